"""Attention methods on the queries, keys and values of real models."""
