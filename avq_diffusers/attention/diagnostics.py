"""How well codewords fit a layer: capture, quantization error, usage.

Every metric has one value per head, (H,): a mean would hide bad heads. Codewords are the ones that
`avq_attention` uses for the same arguments. Options are its keywords, without values and sinks.

Shapes: B batch, H heads, N queries, S keys, D head dim, M0 parents, C children.
"""

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from avq_diffusers.attention import reference
from avq_diffusers.attention.own_codewords import assigned
from avq_diffusers.attention.tensors import Tensors
from avq_diffusers.attention.torch_forward import QueryTiles, choose, summarize, tile_queries
from avq_diffusers.codebook.assignment import across_heads, heads_first, leaf_sums
from avq_diffusers.codebook.codebook import Codebook
from avq_diffusers.config import RESOLUTIONS, Spec

ACTIVE_SHARE = 0.01


@torch.no_grad()
def capture(
    query: Tensor,
    key: Tensor,
    codebook: Codebook | None,
    num_refined: int,
    **options: Any,
) -> Tensor:
    """Share of exact attention that falls on keys of refined parents (paper, Tab. elastic_p).

    Costs as much as exact attention, in bounded memory.

    Args:
        query: (B, H, N, D).
        key: (B, H, S, D).
        codebook: H heads and head dim D, or None for codewords from the keys.
        num_refined, **options: as in `avq_attention`.

    Returns:
        (H,) in [0, 1], mean over batch and queries.

    Raises:
        TypeError, ValueError: as `avq_attention`; query and key may have different dtypes.
    """
    refined = refined_parents(query, key, codebook, num_refined, **options)
    return captured_share(attention_mass(query, key, codebook, **options), refined)


def captured_share(mass: Tensor, refined: Tensor) -> Tensor:
    """`capture` for any choice of parents.

    Args:
        mass: (B, H, T, M0), from `attention_mass`.
        refined: (B, H, T, M0) bool.

    Returns:
        (H,) in [0, 1].
    """
    return (mass * refined).sum(dim=(0, 2, 3)) / mass.sum(dim=(0, 2, 3))


@torch.no_grad()
def attention_mass(query: Tensor, key: Tensor, codebook: Codebook | None, **options: Any) -> Tensor:
    """Exact attention mass from each query tile to the keys of each parent.

    Importance is an estimate of it; the parents with the largest mass are the best to refine
    (paper, Tab. tiled_capture). `query`, `key`, `codebook`, `options` and errors as in `capture`.

    Returns:
        (B, H, T, M0) for T query tiles; the sum over parents is the number of queries in a tile.
    """
    tensors, spec = _call(query, key, codebook, options)
    leaf, _ = _quantized(tensors, spec)
    dtype = torch.promote_types(query.dtype, torch.float32)
    query, key = tensors.scale * query.to(dtype), key.to(dtype)
    members = F.one_hot(leaf // (1 + spec.num_children), spec.num_parents).to(dtype)
    masses = []
    for places in reference.tiles(tensors, spec):
        attention = (query[:, :, places] @ key.mT).softmax(dim=-1).sum(dim=2, keepdim=True)
        masses.append(attention @ members)
    return torch.cat(masses, dim=-2)


@torch.no_grad()
def refined_parents(
    query: Tensor,
    key: Tensor,
    codebook: Codebook | None,
    num_refined: int,
    **options: Any,
) -> Tensor:
    """The parents that AVQ attention refines in each query tile; errors as in `capture`.

    Args:
        query, key, codebook, num_refined, **options: as in `capture`.

    Returns:
        (B, H, T, M0) bool for T query tiles.
    """
    tensors, spec = _call(query, key, codebook, {**options, "num_refined": num_refined})
    tensors = tensors.with_codewords_in(_dtype_of_codewords(tensors))
    with torch.autocast(key.device.type, enabled=False):
        summary = summarize(tensors, spec)
        tiles = QueryTiles.of(tensors, spec.query_tile)
        spans = choose(tile_queries(tensors, tiles, summary), summary, tiles, spec).spans
    is_refined = spans.unflatten(-1, (spec.num_parents, -1))[..., 0] == 0
    return is_refined.unflatten(0, (len(query), -1))


def commitment_loss(key: Tensor, codebook: Codebook | None, **options: Any) -> Tensor:
    """Mean squared distance of the keys to what represents their leaves.

    With stored codewords this is the paper's loss (Tab. perlayer_imagenet); distillation logs and
    weights its mean over heads, divided by D. Differentiable in `key`; codewords get no gradient.

    Args:
        key: (..., H, S, D).
        codebook: H heads and head dim D, or None for codewords from the keys.
        **options: as in `avq_attention`.

    Returns:
        (H,).

    Raises:
        TypeError, ValueError: as `avq_attention`.
    """
    key = _batched(key)
    leaf, leaves = _quantized(*_call(key, key, codebook, options))
    leaf = across_heads(leaf.flatten(0, 1), leaves.shape[1]).flatten()
    quantized_key = leaves.flatten(0, 1).index_select(0, leaf).view(key.shape)
    return heads_first(key - quantized_key).square().sum(dim=-1).mean(dim=-1)


def quantization_error(key: Tensor, codebook: Codebook | None, **options: Any) -> Tensor:
    """`commitment_loss` for `key`, `codebook` and `options`, divided by the variance of the keys.

    Returns:
        (H,); 0 is exact, 1 is the error of a single codeword at the mean of the keys.
    """
    loss = commitment_loss(key, codebook, **options)
    key = heads_first(key).to(loss.dtype)
    variance = key.var(dim=1, correction=0).sum(dim=-1)
    rounding = (8 * torch.finfo(loss.dtype).eps) ** 2 * key.square().sum(dim=-1).mean(dim=1)
    # Of equal keys, both are what rounding leaves.
    return torch.where(variance > rounding, loss / variance, 0)


def leaf_counts(key: Tensor, codebook: Codebook | None, **options: Any) -> Tensor:
    """Number of keys in each leaf; `key`, `codebook`, `options` as in `commitment_loss`.

    Returns:
        (H, M0, 1 + C) int64; leaf 0 counts the keys that stay with the parent.
    """
    key = _batched(key)
    tensors, spec = _call(key, key, codebook, options)
    leaf = _quantized(tensors, spec)[0].movedim(1, 0).flatten(1)
    shape = spec.num_parents, 1 + spec.num_children
    counts = leaf.new_zeros(len(leaf), shape[0] * shape[1])
    counts.scatter_add_(1, leaf, torch.ones_like(leaf))
    return counts.unflatten(1, shape)


def active_ratio(counts: Tensor) -> Tensor:
    """Share of codewords with more than 1 % of an even share of the keys, one in M0 (1 + C)
    (paper, appendix "Codebook utilization").

    A parent counts all keys of its cell. To rate a codebook on a dataset, sum the counts first.

    Args:
        counts: (..., M0, 1 + C) keys per leaf, as from `leaf_counts`.

    Returns:
        (...), in [0, 1].
    """
    cells = counts.sum(dim=-1, keepdim=True)
    fair_share = cells.sum(dim=-2) / counts.shape[-2:].numel()
    codewords = torch.cat([cells, counts[..., 1:]], dim=-1).flatten(-2)
    return (codewords > ACTIVE_SHARE * fair_share).double().mean(dim=-1)


def perplexity(counts: Tensor) -> Tensor:
    """Exponential of the entropy of the leaves' key shares: the effective number of leaves.

    Args:
        counts: (..., M0, 1 + C) keys per leaf, as from `leaf_counts`.

    Returns:
        (...), from 1 to M0 (1 + C).
    """
    counts = counts.flatten(-2).double()
    shares = counts / counts.sum(dim=-1, keepdim=True)
    return torch.special.entr(shares).sum(dim=-1).exp()


def _call(
    query: Tensor,
    key: Tensor,
    codebook: Codebook | None,
    options: Mapping[str, Any],
) -> tuple[Tensors, Spec]:
    """The checked call of `avq_attention`, with keys standing in for values."""
    given = dict(options)
    if not given.keys() & {*RESOLUTIONS}:
        given["num_refined"] = 0  # which what does not depend on queries ignores
    inputs = {x: given.pop(x) for x in ("query_order", "key_order", "scale") if x in given}
    tensors = Tensors.of(query, key, key, codebook, **inputs)
    if codebook is not None:
        given |= {"num_parents": codebook.num_parents, "num_children": codebook.num_children}
    spec = Spec(**given)
    tensors.check(spec, one_dtype=False)
    return tensors, spec


@torch.no_grad()
def _quantized(tensors: Tensors, spec: Spec) -> tuple[Tensor, Tensor]:
    """The leaf of each key, (B, H, S) int64 in [0, M0 (1 + C)), and what represents the leaves,
    (B H, M0 (1 + C), D)."""
    dtype = _dtype_of_codewords(tensors)
    key = tensors.key.to(dtype)
    tensors = tensors._replace(key=key).with_codewords_in(dtype)
    with torch.autocast(key.device.type, enabled=False):
        centre, _, parents, children, leaf = assigned(tensors, spec)
        leaves = torch.cat([parents[:, :, None], children], dim=2) + centre[:, None]
        leaves = leaves.flatten(1, 2)
        if spec.means:
            sums, counts = leaf_sums(key.flatten(0, 1), leaf, leaves.shape[1])
            leaves = sums / counts.clamp(min=1)[..., None]
    return leaf.view(key.shape[:3]), leaves


def _dtype_of_codewords(tensors: Tensors) -> torch.dtype:
    """At least float32."""
    dtype = torch.promote_types(tensors.key.dtype, torch.float32)
    parents = tensors.parents
    return dtype if parents is None else torch.promote_types(dtype, parents.dtype)


def _batched(key: Tensor) -> Tensor:
    """(..., H, S, D) to (B, H, S, D)."""
    return key[None] if key.ndim == 3 else key.flatten(0, -4)
