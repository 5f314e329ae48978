"""The attention of a vision model: exchanged by its name, and observed.

Shapes: B batch, H heads, N tokens of a grid in raster order, T tokens before them, such as CLS,
S keys of a sample, D head dim.
"""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel

from avq_diffusers import (
    AVQCodebooks,
    AVQConfig,
    apply_avq,
    gather_codebooks,
    remove_avq,
    select_layers,
)
from avq_diffusers.hosts import attention_replaced
from distill.attention import CHILD, exact_attention, train_attention
from distill.stored import StoredAttention
from distill.vision.baselines import BASELINES, Grid
from distill.vision.config import AttentionName, LearningConfig

DROPOUTS = ("attention_probs_dropout_prob", "attention_dropout")


class Call(NamedTuple):
    """What a layer passes to its attention: tensors (B, H, N, D), and options of `avq_attention`.

    The options hold `sink_key` and `sink_value` (B, H, T, D) or None, `query_order` and `scale`.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    options: dict[str, Any]


@torch.no_grad()
def observe(model: PreTrainedModel, pixel_values: Tensor) -> tuple[dict[str, Call], Grid]:
    """The calls of all layers with exact attention, by the layers' names, and their tokens.

    Args:
        model: a vision model; whatever attention it has stays.
        pixel_values: (B, 3, S, S).

    Raises:
        TypeError: the model has no layer for AVQ.
        ValueError: a layer does not attend once to the patches.
    """
    layers = select_layers(model)
    found: dict[str, list[Call]] = {layer.name: [] for layer in layers}

    def record(calls: list[Call], *tensors: Tensor | None, **options: Any) -> tuple[Tensor, str]:
        calls.append(Call(*tensors[:3], options))
        return exact_attention(*tensors, **options)

    functions = {name: partial(record, calls) for name, calls in found.items()}
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
    sinks = calls[layers[0].name].options["sink_key"]
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


def set_attention(
    model: PreTrainedModel,
    attention: AttentionName,
    settings: LearningConfig,
    example: Tensor,
    *,
    seed: int,
) -> list[StoredAttention]:
    """Exchange the self-attention of all layers; weights of the model stay as they are.

    Args:
        model: with exact attention.
        attention: what it gets; `exact` changes nothing.
        settings: of stored codebooks. They are NaN until `start_codebooks`.
        example: (B, 3, S, S), images of the size that the model will see.
        seed: of random features.

    Returns:
        The layers with codebooks that learn.

    Raises:
        TypeError: the model has no attention layer that can be replaced.
        ValueError: its attention has dropout, with which the layers would run exact attention.
    """
    if attention == AttentionName():
        return []
    layers = select_layers(model)
    for name in DROPOUTS:
        if getattr(layers[0].attn.config, name, 0):
            raise ValueError(
                f"attention is replaced where it has no dropout; set {name} of the model's "
                f"config to 0."
            )
    if attention.own:
        apply_avq(model, attention.avq, route="always")
        return []
    stored: list[StoredAttention] = []
    if attention.baseline is None:
        made = stored = [
            StoredAttention(layer.num_heads, layer.head_dim, attention.avq, settings)
            for layer in layers
        ]
    else:
        _, grid = observe(model, example[:1])
        make = BASELINES[attention.baseline]
        made = [make(grid, i, layer.head_dim, seed) for i, layer in enumerate(layers)]
    functions = {layer.name: module for layer, module in zip(layers, made, strict=True)}
    train_attention(model, functions, attention.avq or AVQConfig())
    return stored


def remove_attention(model: PreTrainedModel) -> None:
    """Undo `set_attention`; weights of the model stay as they are."""
    remove_avq(model)
    for layer in select_layers(model):
        if hasattr(layer.attn, CHILD):
            delattr(layer.attn, CHILD)


@torch.no_grad()
def learned_codebooks(
    model: PreTrainedModel, attention: AttentionName, layers: Sequence[StoredAttention]
) -> AVQCodebooks:
    """The codebooks that `layers` have learned, for `apply_avq`."""
    learned = {spec.name: x for spec, x in zip(select_layers(model), layers, strict=True)}
    found = {name: layer.copied_codebook() for name, layer in learned.items()}
    codebooks = gather_codebooks(model, attention.avq, found)
    for name, layer in learned.items():
        if layer.key_norm is not None:
            codebooks.key_norm(name).load_state_dict(layer.key_norm.state_dict())
    return codebooks


@torch.no_grad()
def start_codebooks(
    model: PreTrainedModel,
    layers: Sequence[StoredAttention],
    settings: LearningConfig,
    images: Tensor,
    *,
    images_per_step: int,
    seed: int,
) -> None:
    """Fit the codebooks to keys of the model with exact attention.

    Args:
        model: after `set_attention`.
        layers: what it returned.
        settings: of the codebooks.
        images: (B, 3, S, S).
        images_per_step: over micro-batches and processes.
        seed: of samples and k-means.
    """
    generator = torch.Generator().manual_seed(seed)
    per_image = math.ceil(settings.keys_per_layer / len(images))
    samples: dict[str, list[Tensor]] = {}
    for image in images.split(1):
        calls, grid = observe(model, image)
        for name, call in calls.items():
            chosen = torch.randperm(grid.num_patches, generator=generator)[:per_image]
            keys = call.key[0, :, chosen.to(call.key.device)]
            samples.setdefault(name, []).append(keys.float())
    for layer, pieces in zip(layers, samples.values(), strict=True):
        keys = torch.cat(pieces, dim=1)
        layer.start_key_norm(keys)
        layer.start(keys, images_per_step * grid.num_patches, seed)
