"""Adaptive vector-quantized (AVQ) attention, at a cost linear in the number of tokens."""

from .attention.api import avq_attention
from .attention.orders import query_order
from .codebook.codebook import Codebook

__all__ = ["Codebook", "avq_attention", "query_order"]
