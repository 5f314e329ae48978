"""Trainable functions that attend in place of AVQ, for `replace_attention`.

A function takes the arguments of `avq_attention`. A module becomes a child of the layer that it
serves, so it is moved, trained and saved with the model.

Shapes: B batch, H heads, N tokens, D head dim.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from avq_diffusers import AVQConfig, select_layers
from avq_diffusers.hosts import replace_attention

CHILD = "token_attention"


def train_attention(
    model: nn.Module, functions: Mapping[str, Callable[..., tuple[Tensor, str]]], config: AVQConfig
) -> None:
    """`replace_attention` with functions that may be modules.

    Args:
        model: as in `apply_avq`.
        functions: layer name -> function, for the layers of `config`.
        config: layers, sizes and order.
    """
    replace_attention(model, functions, config)
    for layer in select_layers(model, config.levels, config.exact):
        function = functions[layer.name]
        if isinstance(function, nn.Module):
            setattr(layer.attn, CHILD, function.to(layer.anchor.weight.device))


def exact_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    codebook: None = None,
    *,
    sink_key: Tensor | None = None,
    sink_value: Tensor | None = None,
    scale: float | None = None,
    **options: Any,
) -> tuple[Tensor, str]:
    """Softmax attention of queries (B, H, N, D) over all keys and sinks."""
    key, value = with_sinks(key, sink_key), with_sinks(value, sink_value)
    return F.scaled_dot_product_attention(query, key, value, scale=scale), "exact"


def with_sinks(tokens: Tensor, sinks: Tensor | None) -> Tensor:
    """The tokens with the sinks, if any, prepended."""
    return tokens if sinks is None else torch.cat([sinks, tokens], dim=2)
