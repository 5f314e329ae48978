"""Builds the attention operation for the kernels Hub."""
