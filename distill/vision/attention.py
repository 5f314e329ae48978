"""`set_attention`: exchange the attention of a vision model by its name."""

import math
from collections.abc import Sequence

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
from distill.attention import CHILD, train_attention
from distill.stored import StoredAttention
from distill.vision.baselines import make_baseline
from distill.vision.calls import observe
from distill.vision.config import AttentionName, CodebookConfig

DROPOUTS = ("attention_probs_dropout_prob", "attention_dropout")


def set_attention(
    model: PreTrainedModel,
    attention: AttentionName,
    settings: CodebookConfig,
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
        made = [
            make_baseline(attention.baseline, index, grid, layer.head_dim, seed)
            for index, layer in enumerate(layers)
        ]
    names = [layer.name for layer in layers]
    train_attention(model, dict(zip(names, made, strict=True)), attention.avq or AVQConfig())
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
    names = [layer.name for layer in select_layers(model)]
    learned = dict(zip(names, layers, strict=True))
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
    settings: CodebookConfig,
    batches: Sequence[Tensor],
    *,
    images_per_step: int,
    seed: int,
) -> None:
    """Fit the codebooks to keys of the model with exact attention.

    Args:
        model: after `set_attention`.
        layers: what it returned.
        settings: of the codebooks.
        batches: of `start_images` images in all, (B, 3, S, S) each.
        images_per_step: over micro-batches and processes.
        seed: of samples and k-means.
    """
    keys, num_patches = sampled_keys(model, batches, settings.keys_per_layer, seed)
    for layer, sample in zip(layers, keys, strict=True):
        layer.start_key_norm(sample)
        layer.start(sample, images_per_step * num_patches, seed)


def sampled_keys(
    model: PreTrainedModel, batches: Sequence[Tensor], count: int, seed: int
) -> tuple[list[Tensor], int]:
    """About `count` keys of patches for each layer, float32 (H, S, D), and patches per image."""
    generator = torch.Generator().manual_seed(seed)
    per_image = math.ceil(count / sum(len(batch) for batch in batches))
    pieces: dict[str, list[Tensor]] = {}
    for batch in batches:
        for image in batch.split(1):
            calls, grid = observe(model, image)
            for name, call in calls.items():
                chosen = torch.randperm(grid.num_patches, generator=generator)[:per_image]
                keys = call.key[0, :, chosen.to(call.key.device)]
                pieces.setdefault(name, []).append(keys.float())
    return [torch.cat(keys, dim=1) for keys in pieces.values()], grid.num_patches
