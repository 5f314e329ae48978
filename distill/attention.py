"""Trainable functions that attend in place of AVQ, for `replace_attention`.

A function takes the inputs, options and backend of a call. A module becomes a child of the layer
that it serves, so it is moved, trained and saved with the model.

Shapes: B batch, H heads, N tokens, D head dim.
"""

from collections.abc import Mapping

from torch import nn

from avq_diffusers import AVQConfig, select_layers
from avq_diffusers.attention.exact import exact_attention
from avq_diffusers.attention.tensors import Attended, Tensors
from avq_diffusers.config import Spec
from avq_diffusers.hosts import AttentionFunction, replace_attention

CHILD = "token_attention"


def train_attention(
    model: nn.Module, functions: Mapping[str, AttentionFunction], config: AVQConfig
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


def attend_exactly(tensors: Tensors, spec: Spec, backend: str) -> Attended:
    """Softmax attention over all keys and sinks, for `train_attention`."""
    return Attended(exact_attention(tensors), "exact")
