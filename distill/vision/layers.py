"""Self-attention of a vision model, replaced by modules that train with it.

A module is a child of the attention layer that it serves, so it moves, trains and is saved with the
model. It is reached through transformers' `AttentionInterface`.

Shapes: B batch, H heads, N tokens, D head dim. The first tokens, such as CLS, are the prefix; the
patches of a grid follow in raster order.
"""

import copy
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from avq_diffusers.vision import select_layers
from avq_diffusers.vision.layers import VisionLayer

NAME = "avq_training"
CHILD = "token_attention"


class Grid(NamedTuple):
    """The tokens of a layer: `prefix`, then `height` x `width` patches."""

    prefix: int
    height: int
    width: int

    @property
    def num_patches(self) -> int:
        return self.height * self.width


class Call(NamedTuple):
    """What a layer passes to its attention; query, key and value are (B, H, N, D)."""

    query: Tensor
    key: Tensor
    value: Tensor
    scale: float


class TokenAttention(nn.Module, ABC):
    """Exact attention of the prefix; a subclass says how patches attend."""

    def __init__(self, grid: Grid) -> None:
        super().__init__()
        self.grid = grid

    def forward(self, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        """Return the attention output (B, H, N, D) of inputs (B, H, N, D)."""
        prefix = self.grid.prefix
        if query.shape[2] != prefix + self.grid.num_patches:
            raise ValueError(
                f"the model was prepared for {prefix} + {self.grid.height} x {self.grid.width} "
                f"tokens, but got {query.shape[2]}."
            )
        key = self.prepared(key)
        patches = self.attend(query[:, :, prefix:], key, value, scale)
        if prefix == 0:
            return patches
        first = F.scaled_dot_product_attention(query[:, :, :prefix], key, value, scale=scale)
        return torch.cat([first, patches.to(first.dtype)], dim=2)

    def prepared(self, key: Tensor) -> Tensor:
        """The keys that all tokens attend to."""
        return key

    @abstractmethod
    def attend(self, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        """Attention of the patches (B, H, height * width, D) over all N tokens."""


class ValueProjection(TokenAttention):
    """Negative control: the output of a patch is its own value."""

    def attend(self, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        return value[:, :, self.grid.prefix :]


def replace_attention(layers: Sequence[VisionLayer], attentions: Sequence[TokenAttention]) -> None:
    """Give each layer an attention of its own."""
    register()
    for layer, attention in zip(layers, attentions, strict=True):
        attn = layer.attn
        attn._exact_config = attn.config
        _put(attn, attention.to(layer.projection.weight.device))


def restore_attention(layers: Sequence[VisionLayer]) -> None:
    """Undo `replace_attention`."""
    for layer in layers:
        attn = layer.attn
        attn.config = attn._exact_config
        delattr(attn, "_exact_config")
        delattr(attn, CHILD)


@torch.no_grad()
def observe(model: PreTrainedModel, pixel_values: Tensor) -> tuple[list[Call], Grid]:
    """The calls of all layers with exact attention, and their tokens.

    Args:
        model: a vision model; whatever attention it has stays.
        pixel_values: (B, 3, S, S).

    Raises:
        ValueError: the model has no attention over the patches of an image that can be replaced.
    """
    layers = select_layers(model)
    recorders = [_Recorder() for _ in layers]
    grids: list[torch.Size] = []
    hook = layers[0].projection.register_forward_hook(
        lambda projection, inputs, patches: grids.append(patches.shape[-2:])
    )
    before = [(layer.attn.config, getattr(layer.attn, CHILD, None)) for layer in layers]
    was_training = model.training
    register()
    for layer, recorder in zip(layers, recorders, strict=True):
        _put(layer.attn, recorder)
    try:
        model.eval()(pixel_values=pixel_values)
    finally:
        hook.remove()
        for layer, (config, attention) in zip(layers, before, strict=True):
            layer.attn.config = config
            setattr(layer.attn, CHILD, attention)
            if attention is None:
                delattr(layer.attn, CHILD)
        model.train(was_training)
    calls = [call for recorder in recorders for call in recorder.calls]
    height, width = grids[0]
    lengths = {call.key.shape[2] for call in calls}
    if len(calls) != len(layers) or len(lengths) != 1 or min(lengths) < height * width:
        raise ValueError(
            f"the {len(layers)} layers of {type(model).__name__} must attend once each to the "
            f"{height} x {width} patches, but {len(calls)} calls had {sorted(lengths)} tokens."
        )
    return calls, Grid(lengths.pop() - height * width, height, width)


class _Recorder(nn.Module):
    """Exact attention that keeps its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Call] = []

    def forward(self, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        self.calls.append(Call(query, key, value, scale))
        return F.scaled_dot_product_attention(query, key, value, scale=scale)


def _put(attn: nn.Module, attention: nn.Module) -> None:
    setattr(attn, CHILD, attention)
    attn.config = copy.copy(attn.config)  # layers and models share a config
    attn.config._attn_implementation_internal = NAME


def register() -> None:
    """Make the attention function known to transformers, once."""
    if NAME not in ALL_ATTENTION_FUNCTIONS:
        AttentionInterface.register(NAME, _attend)


def _attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **options: object,
) -> tuple[Tensor, None]:
    if attention_mask is not None or dropout:
        raise NotImplementedError(
            "the attention of vision models trains without masks and dropout; set "
            "attention_probs_dropout_prob of the model's config to 0."
        )
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    output = getattr(module, CHILD)(query, key, value, scale)
    return output.transpose(1, 2), None
