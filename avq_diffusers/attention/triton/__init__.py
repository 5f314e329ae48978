"""Triton kernels of AVQ attention: tensors and integers only, nothing of diffusers."""
