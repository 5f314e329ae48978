"""The attention calls of a vision model.

Shapes: B batch, H heads, D head dim; n patches of a grid in raster order, T tokens before them,
such as CLS.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel

from avq_diffusers import AVQConfig, select_layers
from avq_diffusers.hosts import attention_replaced
from distill.attention import exact_attention

OPTIONS = ("sink_key", "sink_value", "query_order", "scale")


class Grid(NamedTuple):
    """The tokens of a layer: `prefix`, then `height` x `width` patches."""

    prefix: int
    height: int
    width: int

    @property
    def num_patches(self) -> int:
        return self.height * self.width


class Call(NamedTuple):
    """What a layer passes to its attention.

    Attributes:
        query, key, value: (B, H, n, D).
        sink_key, sink_value: (B, H, T, D), or None.
        query_order: (n,) of the default configuration.
        scale: factor on the logits.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    sink_key: Tensor | None
    sink_value: Tensor | None
    query_order: Tensor
    scale: float | None

    @property
    def options(self) -> dict[str, Any]:
        """All but query, key and value, as `avq_attention` takes them."""
        return {name: getattr(self, name) for name in OPTIONS}


@torch.no_grad()
def observe(model: PreTrainedModel, pixel_values: Tensor) -> tuple[dict[str, Call], Grid]:
    """The calls of all layers with exact attention, by their names, and their tokens.

    Args:
        model: a vision model; whatever attention it has stays.
        pixel_values: (B, 3, S, S).

    Raises:
        TypeError: the model has no layer for AVQ.
        ValueError: a layer does not attend once to the patches.
    """
    layers = select_layers(model)
    found: dict[str, list[Call]] = {layer.name: [] for layer in layers}
    functions = {name: partial(_record, calls) for name, calls in found.items()}
    grids: list[torch.Size] = []
    hook = layers[0].anchor.register_forward_hook(
        lambda projection, inputs, patches: grids.append(patches.shape[-2:])
    )
    with hook, evaluating(model), attention_replaced(model, functions, AVQConfig()):
        model(pixel_values=pixel_values)
    height, width = grids[0]
    if any(len(calls) != 1 for calls in found.values()):
        raise ValueError(
            f"the {len(layers)} layers of {type(model).__name__} must attend once each to the "
            f"{height} x {width} patches, but did {[len(calls) for calls in found.values()]} times."
        )
    calls = {name: of_layer[0] for name, of_layer in found.items()}
    sinks = calls[layers[0].name].sink_key
    return calls, Grid(0 if sinks is None else sinks.shape[2], height, width)


@contextmanager
def evaluating(model: PreTrainedModel) -> Iterator[None]:
    """Evaluation mode inside the `with` block."""
    was_training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(was_training)


def _record(
    calls: list[Call], query: Tensor, key: Tensor, value: Tensor, codebook: None, **options: Any
) -> tuple[Tensor, str]:
    calls.append(Call(query, key, value, **{name: options[name] for name in OPTIONS}))
    return exact_attention(query, key, value, **options)
