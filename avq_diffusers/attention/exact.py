"""Softmax attention of a call to all its keys and sinks."""

import torch
import torch.nn.functional as F
from torch import Tensor

from avq_diffusers.attention.tensors import Tensors


def exact_attention(tensors: Tensors) -> Tensor:
    """Exact attention (B, H, N, D).

    Args:
        tensors: the inputs; a codebook is ignored.
    """
    key, value = keys_and_values(tensors)
    return F.scaled_dot_product_attention(tensors.query, key, value, scale=tensors.scale)


def keys_and_values(tensors: Tensors) -> tuple[Tensor, Tensor]:
    """All keys and values (B, H, S + T, D), sinks last.

    Args:
        tensors: the inputs.
    """
    key, value, sink_key, sink_value = tensors[1:5]
    if sink_key is None or sink_value is None:
        return key, value
    return torch.cat([key, sink_key], dim=2), torch.cat([value, sink_value], dim=2)
