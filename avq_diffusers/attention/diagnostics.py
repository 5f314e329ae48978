"""How well codewords fit a layer: capture, quantization error, usage.

Every metric has one value per head, (H,): a mean would hide bad heads. Codewords are the ones that
`avq_attention` uses for the same arguments. Options are its keywords, without values and sinks.

Shapes: B batch, H heads, N queries, S keys, D head dim, M0 parents, C children.
"""

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from avq_diffusers.attention import reference
from avq_diffusers.attention.own_codewords import assigned
from avq_diffusers.attention.tensors import Tensors
from avq_diffusers.codebook.assignment import across_heads, chunk_length, heads_first, leaf_sums
from avq_diffusers.codebook.codebook import Codebook
from avq_diffusers.config import LARGEST_COUNT, Spec, check_int

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
    found = _quantized(tensors, spec)
    query, key = _at_least_fp32(tensors)
    members = query.new_zeros(*key.shape[:3], spec.num_parents)
    members.scatter_(-1, found.cell[..., None], 1)
    masses = []
    for tiles in _query_tiles(tensors, spec, row_elements=key.shape[2]):
        attention = (tensors.scale * tiles.flatten(2, 3) @ key.transpose(-1, -2)).softmax(dim=-1)
        masses.append(attention.unflatten(2, tiles.shape[2:4]).sum(dim=3) @ members)
    return torch.cat(masses, dim=-2)


@torch.no_grad()
def refined_parents(
    query: Tensor,
    key: Tensor,
    codebook: Codebook | None,
    num_refined: int,
    importance_tile: int | None = None,
    **options: Any,
) -> Tensor:
    """The parents that AVQ attention refines in each query tile; errors as in `capture`.

    Args:
        query, key, codebook, num_refined, **options: as in `capture`.
        importance_tile: parents per tile of the tiled importance, as in `reference.importance`;
            None is the exact importance that AVQ attention uses.

    Returns:
        (B, H, T, M0) bool for T query tiles.
    """
    if importance_tile is not None:
        check_int("importance_tile", importance_tile, 1, LARGEST_COUNT)
    tensors, spec = _call(query, key, codebook, options, num_refined=num_refined)
    return reference.select(_parent_scores(tensors, spec, importance_tile), num_refined)


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
    found = _quantized(*_call(key, key, codebook, options))
    leaf = across_heads(found.leaf.flatten(0, 1), found.leaves.shape[2]).flatten()
    quantized_key = found.leaves.flatten(0, 2).index_select(0, leaf).view(key.shape)
    return heads_first(key - quantized_key).square().sum(dim=-1).mean(dim=-1)


def quantization_error(key: Tensor, codebook: Codebook | None, **options: Any) -> Tensor:
    """`commitment_loss` for `key`, `codebook` and `options`, divided by the variance of the keys.

    Returns:
        (H,); 0 is exact, 1 is the error of a single codeword at the mean of the keys.
    """
    loss = commitment_loss(key, codebook, **options)
    variance = heads_first(key).to(loss.dtype).var(dim=1, correction=0).sum(dim=-1)
    return loss / variance.clamp(min=torch.finfo(loss.dtype).tiny)


def leaf_counts(key: Tensor, codebook: Codebook | None, **options: Any) -> Tensor:
    """Number of keys in each leaf; `key`, `codebook`, `options` as in `commitment_loss`.

    Returns:
        (H, M0, 1 + C) int64; leaf 0 counts the keys that stay with the parent.
    """
    key = _batched(key)
    tensors, spec = _call(key, key, codebook, options)
    leaf = _quantized(tensors, spec).leaf.movedim(1, 0).flatten(1)
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
    num_refined: int = 0,
) -> tuple[Tensors, Spec]:
    """The checked call of `avq_attention`, with keys standing in for values."""
    given: dict[str, Any] = {**options}
    inputs = {x: given.pop(x) for x in ("query_order", "key_order", "scale") if x in given}
    tensors = Tensors.of(query, key, key, codebook, **inputs)
    if codebook is not None:
        given |= {"num_parents": codebook.num_parents, "num_children": codebook.num_children}
    spec = Spec(**given, num_refined=num_refined)
    tensors.check(spec, one_dtype=False)
    return tensors, spec


class _Quantized(NamedTuple):
    """Where keys (B, H, S, D) go, and what represents them."""

    cell: Tensor  # (B, H, S) int64 in [0, M0)
    leaf: Tensor  # (B, H, S) int64 in [0, M0 (1 + C))
    parents: Tensor  # (B, H, M0, D)
    leaves: Tensor  # (B, H, M0 (1 + C), D)


@torch.no_grad()
def _quantized(tensors: Tensors, spec: Spec) -> _Quantized:
    dtype = torch.promote_types(tensors.key.dtype, torch.float32)
    if tensors.parents is not None:
        dtype = torch.promote_types(dtype, tensors.parents.dtype)
    key = tensors.key.to(dtype)
    tensors = tensors._replace(key=key).with_codewords_in(dtype)
    with torch.autocast(key.device.type, enabled=False):
        centre, _, parents, children, leaf = assigned(tensors, spec)
        leaves = torch.cat([parents[:, :, None], children], dim=2) + centre[:, None]
        parents = parents + centre
        cell = leaf // leaves.shape[2]
        leaves = leaves.flatten(1, 2)
        if spec.means:
            parents, leaves = (
                sums / counts.clamp(min=1)[..., None]
                for sums, counts in (
                    leaf_sums(key.flatten(0, 1), cell, parents.shape[1]),
                    leaf_sums(key.flatten(0, 1), leaf, leaves.shape[1]),
                )
            )
    return _Quantized(*(x.unflatten(0, key.shape[:2]) for x in (cell, leaf, parents, leaves)))


def _parent_scores(tensors: Tensors, spec: Spec, importance_tile: int | None) -> Tensor:
    """The scores that refined parents are chosen by, (B, H, T, M0)."""
    found = _quantized(tensors, spec)
    query, key = _at_least_fp32(tensors)
    parents = found.parents.to(query.dtype)
    # `reference.spread` in O(S D) memory.
    distance = key - parents.gather(2, found.cell[..., None].expand_as(key))
    distance = distance.square().sum(dim=-1, keepdim=True).flatten(0, 1)
    sums, counts = leaf_sums(distance, found.cell.flatten(0, 1), spec.num_parents)
    spread = (sums[..., 0] / counts.clamp(min=1)).view(parents.shape[:3])
    counts = counts.view(parents.shape[:3])
    importances = []
    for tiles in _query_tiles(tensors, spec, row_elements=parents.shape[2]):
        num_tiles = tiles.shape[2]
        importance = reference.importance(
            tiles.movedim(2, 0).flatten(0, 1),
            parents.repeat(num_tiles, 1, 1, 1),
            counts.repeat(num_tiles, 1, 1),
            tensors.scale,
            importance_tile,
        )
        importances.append(importance.unflatten(0, (-1, len(query))).movedim(0, 2))
    score = torch.cat(importances, dim=-2)
    return score * spread[:, :, None] if spec.means else score


def _batched(key: Tensor) -> Tensor:
    """(..., H, S, D) to (B, H, S, D)."""
    return key[None] if key.ndim == 3 else key.flatten(0, -4)


def _at_least_fp32(tensors: Tensors) -> tuple[Tensor, Tensor]:
    """Query and key."""
    dtype = torch.promote_types(tensors.query.dtype, torch.float32)
    return tensors.query.to(dtype), tensors.key.to(dtype)


def _query_tiles(tensors: Tensors, spec: Spec, *, row_elements: int) -> Iterator[Tensor]:
    """Queries (B, H, T, I, D) of T tiles at a time; a partial last tile comes alone.

    Args:
        row_elements: numbers computed per query, which bound T to save memory.
    """
    query, _ = _at_least_fp32(tensors)
    batch, heads, num_queries, _ = query.shape
    query_order, query_tile = tensors.query_order, spec.query_tile
    if query_order is None:
        query_order = torch.arange(num_queries, device=query.device)
    tile_elements = batch * heads * query_tile * row_elements
    length = query_tile * chunk_length(query.device, tile_elements)
    num_whole = num_queries // query_tile * query_tile
    for start in range(0, num_whole, length):
        chunk = query_order[start : min(start + length, num_whole)]
        yield query[:, :, chunk].unflatten(2, (-1, query_tile))
    if num_whole < num_queries:
        yield query[:, :, None, query_order[num_whole:]]
