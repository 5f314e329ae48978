"""`set_attention`: exchange the attention of a vision model by its name."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import PreTrainedModel

from avq_diffusers import AVQCodebooks
from avq_diffusers.codebook.codebook import Codebook
from avq_diffusers.vision import apply_avq, gather_codebooks, remove_avq, select_layers
from distill.vision.baselines import make_baseline
from distill.vision.config import AttentionName, CodebookConfig
from distill.vision.layers import (
    Grid,
    TokenAttention,
    observe,
    replace_attention,
    restore_attention,
)
from distill.vision.stored import StoredAttention


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
        ValueError: the model has no attention layer that can be replaced.
    """
    if attention.own:
        apply_avq(model, attention.avq, route="always")
        return []
    if attention.baseline is None and attention.avq is None:
        return []
    calls, grid = observe(model, example[:1])
    num_heads, head_dim = calls[0].query.shape[1], calls[0].query.shape[3]
    made: list[TokenAttention] = []
    for index in range(len(calls)):
        if attention.baseline is not None:
            made.append(make_baseline(attention.baseline, index, grid, head_dim, seed))
        else:
            made.append(StoredAttention(grid, num_heads, head_dim, attention.avq, settings))
    replace_attention(select_layers(model), made)
    return [layer for layer in made if isinstance(layer, StoredAttention)]


def remove_attention(model: PreTrainedModel, attention: AttentionName) -> None:
    """Undo `set_attention`; weights of the model stay as they are."""
    if attention.own:
        remove_avq(model)
    elif attention != AttentionName():
        restore_attention(select_layers(model))


@torch.no_grad()
def learned_codebooks(
    model: PreTrainedModel, attention: AttentionName, layers: Sequence[StoredAttention]
) -> AVQCodebooks:
    """The codebooks that `layers` have learned, for `avq_diffusers.vision.apply_avq`."""
    names = [layer.name for layer in select_layers(model)]
    found = {
        name: Codebook(*(x.clone() for x in vars(layer.quantizer.codebook()).values()))
        for name, layer in zip(names, layers, strict=True)
    }
    codebooks = gather_codebooks(model, attention.avq, found)
    if attention.avq.key_norm:
        for name, layer in zip(names, layers, strict=True):
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
    keys = sampled_keys(model, batches, settings.keys_per_layer, seed)
    for layer, (grid, sample) in zip(layers, keys, strict=True):
        layer.start(sample, images_per_step * grid.num_patches, seed)


def sampled_keys(
    model: PreTrainedModel, batches: Sequence[Tensor], count: int, seed: int
) -> list[tuple[Grid, Tensor]]:
    """About `count` keys of patches for each layer, float32 (H, S, D), and the layer's grid."""
    generator = torch.Generator().manual_seed(seed)
    per_image = math.ceil(count / sum(len(batch) for batch in batches))
    pieces: dict[int, list[Tensor]] = {}
    for batch in batches:
        for image in batch.split(1):
            calls, grid = observe(model, image)
            for index, call in enumerate(calls):
                chosen = torch.randperm(grid.num_patches, generator=generator)[:per_image]
                keys = call.key[0, :, grid.prefix + chosen.to(call.key.device)]
                pieces.setdefault(index, []).append(keys.float())
    return [(grid, torch.cat(keys, dim=1)) for keys in pieces.values()]
