"""Measurements of AVQ attention: benchmarks, quality against exact attention, analyses."""
