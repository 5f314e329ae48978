"""The definition of AVQ attention, slow and obvious: replace keys per query tile, then attend.

Keys are assigned and parents chosen in the dtype of the codewords; attention is computed in the
dtype of the query. Float64 inputs and codewords give a float64 oracle.

Shapes: B batch, H heads, N queries, S keys, D head dim, M0 parents, C children, T query tiles.
"""

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from avq_diffusers.attention.exact import keys_and_values
from avq_diffusers.attention.tensors import (
    LEAST_OF_ALL,
    LEAST_OF_CELLS,
    SAMPLE,
    SAMPLED_FROM,
    TANGENT_FROM,
    Tensors,
)
from avq_diffusers.config import Spec


class Quantized(NamedTuple):
    """The cells and leaves of a call's keys, and what represents them.

    Attributes:
        cell, leaf: (B, H, S) int64, each key's parent in [0, M0) and its leaf in [0, M0 (1 + C)):
            what stays with the parents first, then the children.
        parents, leaves: (B, H, M0, D) and (B, H, M0 (1 + C), D), differentiable with means.
        straight_through: (B, H, S, D) zeros with the gradient of keys that stored codewords
            represent.
    """

    cell: Tensor
    leaf: Tensor
    parents: Tensor
    leaves: Tensor
    straight_through: Tensor


class Levels(NamedTuple):
    """The resolution at which a query tile shows the keys, constant for gradients.

    Attributes:
        refined: (B, H, M0) bool, parents in whose place their leaves are shown.
        exact: (B, H, M0 (1 + C)) bool, leaves of refined parents in whose place their keys are.
    """

    refined: Tensor
    exact: Tensor


def avq_attention(tensors: Tensors, spec: Spec) -> Tensor:
    """Softmax attention over keys replaced by codewords, at a resolution of each query tile's own.

    A tile shows a cell at the coarsest of three levels, its parent, its leaves or its keys, at
    which a further column would fix at most the threshold: the attention to it times the variance
    of the logits that the column would resolve. 0 is exact attention, infinity flat VQ. With
    `num_refined`, the paper's form, it shows the leaves of the parents with the largest importance;
    if means represent the keys, with the largest importance times spread.

    Values inside a leaf follow its keys. If means of own codewords represent the keys, C of
    `first_order` says how: with the spread r_i that query i sees, the output gains
    r_i / (1 + r_i |q_i|^2 / D) C q_i, for queries q_i times the scale.

    The gradient treats assignments and the choice of levels as constants. Key gradients pass
    through the means, or straight through the quantization with stored codewords.

    Args:
        tensors: the inputs; a codebook has the dtype of `query` or a wider one.
        spec: the options.

    Returns:
        (B, H, N, D) in the order of `query`.
    """
    query, key, value, scale = tensors.query, tensors.key, tensors.value, tensors.scale
    found = quantized(tensors, spec)
    cell, leaf, num_parents = found.cell, found.leaf, found.parents.shape[2]
    representatives = torch.cat([found.parents, found.leaves], dim=2)
    # Differentiable: queries see less of a leaf whose keys come closer.
    spreads = spread(key, cell, found.parents), spread(key, leaf, found.leaves)
    has_term = spec.means and tensors.children is None
    matrix = first_order(key, value, found) if has_term else None

    output = torch.empty_like(query)
    for tile in tiles(tensors, spec):
        tile_query = scale * query[:, :, tile]
        refined, exact = levels(tile_query, found, *spreads, tensors, spec)
        is_refined, is_exact = refined.gather(-1, cell), exact.gather(-1, leaf)

        row = torch.where(is_refined, num_parents + leaf, cell)
        tile_key = _take(representatives, row).to(key.dtype) + found.straight_through
        tile_key = torch.where(is_exact[..., None], key, tile_key)
        tile_key, tile_value = keys_and_values(tensors._replace(key=tile_key))
        weights = (tile_query @ tile_key.mT).softmax(dim=-1)
        output[:, :, tile] = weights @ tile_value
        if matrix is not None:
            tile_spread = torch.cat(spreads, dim=2).gather(-1, row).masked_fill(is_exact, 0)
            tile_spread = F.pad(tile_spread, (0, tile_key.shape[2] - key.shape[2]))
            seen = weights @ tile_spread[..., None]
            guard = 1 + seen * tile_query.square().mean(dim=-1, keepdim=True)
            output[:, :, tile] += seen / guard * (tile_query @ matrix.mT)
    return output


@torch.no_grad()
def levels(
    tile_query: Tensor,
    found: Quantized,
    cell_spread: Tensor,
    leaf_spread: Tensor,
    tensors: Tensors,
    spec: Spec,
) -> Levels:
    """The resolution of a tile.

    Args:
        tile_query: (B, H, I, D), times the scale.
        found: the cells and leaves.
        cell_spread, leaf_spread: (B, H, M0) and (B, H, M), variances of their keys.
        tensors, spec: as in `avq_attention`.
    """
    if spec.threshold is not None:
        queries = sampled(tile_query, tensors.query.shape[2])
        sink_key = tensors.sink_key
        return resolution(queries, found, cell_spread, leaf_spread, sink_key, spec.limit)
    assert spec.num_refined is not None
    counts = _counts(found.cell, found.parents)[..., 0].to(found.parents.dtype)
    score = importance(tile_query, found.parents, counts)
    refined = select(score * cell_spread if spec.means else score, spec.num_refined)
    return Levels(refined, torch.zeros_like(leaf_spread, dtype=torch.bool))


def sampled(tile_query: Tensor, num_queries: int) -> Tensor:
    """The queries of a tile that decide its resolution: `SAMPLE` evenly spaced ones, or all.

    Args:
        tile_query: (B, H, I, D).
        num_queries: number of queries of the call; all of a tile decide below `SAMPLED_FROM`.
    """
    length = tile_query.shape[2]
    if num_queries < SAMPLED_FROM or length <= SAMPLE:
        return tile_query
    return tile_query[:, :, torch.arange(SAMPLE) * length // SAMPLE]


@torch.no_grad()
def resolution(
    tile_query: Tensor,
    found: Quantized,
    cell_spread: Tensor,
    leaf_spread: Tensor,
    sink_key: Tensor | None,
    limit: float,
) -> Levels:
    """The levels at which a further column would fix at most `limit`.

    What that would be is unknown where it is NaN, such as for a query that is: the keys are shown.

    Args:
        tile_query: (B, H, I, D), the queries that decide, times the scale.
        found: the cells and leaves.
        cell_spread, leaf_spread: (B, H, M0) and (B, H, M), variances of their keys.
        sink_key: (B, H, T, D) or None.
        limit: `Spec.limit`.
    """
    num_parents, num_leaves = found.parents.shape[2], found.leaves.shape[2]
    size = tile_query.square().mean(dim=(2, 3))[..., None]  # (B, H, 1)
    cell_mass, leaf_mass = _masses(tile_query, found, sink_key)
    leaf_counts = _counts(found.leaf, found.leaves)[..., 0].to(size.dtype)
    parent_of_leaf = torch.arange(num_leaves, device=size.device) - num_parents
    parent_of_leaf = parent_of_leaf // max(1, num_leaves // num_parents - 1)
    parent_of_leaf[:num_parents] = torch.arange(num_parents)  # what stays

    def sums(leaf_values: Tensor) -> Tensor:
        return torch.zeros_like(cell_mass).index_add(-1, parent_of_leaf, leaf_values)

    inside = sums(leaf_counts * leaf_spread) / sums(leaf_counts).clamp(min=1)
    further = sums((leaf_counts > 0).to(size.dtype)) - 1
    gain = cell_mass * (growth(size * cell_spread) - growth(size * inside)) / further.clamp(min=1)
    refined = (further <= 0) | ~(gain <= limit)
    gain = leaf_mass * growth(size * leaf_spread) / leaf_counts.clamp(min=1)
    is_fine = (leaf_counts > 1) & ~(gain <= limit)
    return Levels(refined, refined[:, :, parent_of_leaf] & is_fine)


def growth(x: Tensor) -> Tensor:
    """exp(x) - 1, continued by its tangent from `TANGENT_FROM` on.

    Args:
        x: variances of logits, of any shape. Logits that vary a lot inside a leaf hide
            exponentially more attention than its mean shows.
    """
    slope = math.exp(TANGENT_FROM)
    return torch.expm1(x.clamp(max=TANGENT_FROM)) + slope * (x - TANGENT_FROM).clamp(min=0)


def first_order(key: Tensor, value: Tensor, found: Quantized) -> Tensor:
    """How values inside leaves follow their keys: one matrix per head.

    Args:
        key, value: (B, H, S, D).
        found: the keys' cells and leaves, represented by means.

    Returns:
        (B, H, D, D), the covariance of values and keys around the means of their leaves, divided by
        the variance of the keys; 0 where that is at most `LEAST_OF_CELLS` of their variance around
        the means of their cells plus `LEAST_OF_ALL` of that around the mean of all.
    """
    key = key - key[:, :, :1]  # offsets of equal keys are exactly 0
    key_offsets, value_offsets = (
        x - _take(_means(x, found.leaf, found.leaves), found.leaf) for x in (key, value)
    )
    cell_offsets = key - _take(_means(key, found.cell, found.parents), found.cell)
    inside, around_cells, around_all = (
        offsets.square().sum(dim=(2, 3))[..., None, None]
        for offsets in (key_offsets, cell_offsets, key - key.mean(dim=2, keepdim=True))
    )
    # No infinite divisor, through which the gradient would be NaN.
    is_some = inside > LEAST_OF_CELLS * around_cells + LEAST_OF_ALL * around_all
    return is_some * (value_offsets.mT @ key_offsets) / inside.where(is_some, 1)


@torch.no_grad()
def _masses(tile_query: Tensor, found: Quantized, sink_key: Tensor | None) -> tuple[Tensor, Tensor]:
    """Mean attention of queries to parents and leaves, (B, H, M0) and (B, H, M).

    The softmax denominator runs over parents and sinks.
    """
    parents, leaves = (
        tile_query @ rows.mT + _counts(index, rows).mT.to(rows.dtype).log()
        for index, rows in ((found.cell, found.parents), (found.leaf, found.leaves))
    )
    seen = parents if sink_key is None else torch.cat([parents, tile_query @ sink_key.mT], dim=-1)
    denominator = seen.logsumexp(dim=-1, keepdim=True)
    masses = [(x - denominator).exp().mean(dim=-2) for x in (parents, leaves)]
    return masses[0], masses[1]


def tiles(tensors: Tensors, spec: Spec) -> tuple[Tensor, ...]:
    """The places of the queries of each tile.

    Args:
        tensors, spec: as in `avq_attention`.
    """
    order, query = tensors.query_order, tensors.query
    order = torch.arange(query.shape[2], device=query.device) if order is None else order
    return order.split(spec.query_tile)


def quantized(tensors: Tensors, spec: Spec) -> Quantized:
    """The cells and leaves of a call's keys.

    Args:
        tensors, spec: as in `avq_attention`.
    """
    key, fixed_key = tensors.key, tensors.key.detach()
    parents, children = tensors.parents, tensors.children
    if parents is None:
        parents = spaced_keys(fixed_key, spec.num_parents, tensors.key_order)
    else:
        parents = parents.detach().expand(len(key), -1, -1, -1)
    if children is None:
        children = cell_keys(fixed_key, nearest(fixed_key, parents), parents, spec.num_children)
    else:
        children = children.detach().expand(len(key), -1, -1, -1, -1)
    num_parents, num_children = children.shape[2:4]
    cell, leaf = assign(fixed_key, parents, children)
    # Rows of leaves: what stays with each parent, then the children.
    leaf = torch.where(leaf > 0, num_parents + cell * num_children + leaf - 1, cell)
    leaves = torch.cat([parents, children.flatten(2, 3)], dim=2)
    if spec.means:
        means = _means(key, cell, parents), _means(key, leaf, leaves)
        return Quantized(cell, leaf, *means, torch.zeros_like(key))
    return Quantized(cell, leaf, parents, leaves, key - key.detach())


def spaced_keys(key: Tensor, num_parents: int, key_order: Tensor | None) -> Tensor:
    """Keys evenly spaced in the key order: the parents of a call without a codebook.

    Args:
        key: (B, H, S, D).
        num_parents: M0.
        key_order: (S,) permutation; None is the order of `key`.

    Returns:
        (B, H, M0, D).
    """
    index = torch.arange(num_parents, device=key.device) * key.shape[2] // num_parents
    if key_order is not None:
        index = key_order[index]
    return key[:, :, index]


def cell_keys(key: Tensor, cell: Tensor, parents: Tensor, num_children: int) -> Tensor:
    """For each parent, keys of its cell, evenly spaced in index order.

    Args:
        key: (B, H, S, D).
        cell: (B, H, S) from `nearest`.
        parents: (B, H, M0, D).
        num_children: C.

    Returns:
        (B, H, M0, C, D). An empty cell repeats its parent, which no key prefers.
    """
    children = parents[:, :, :, None].repeat(1, 1, 1, num_children, 1)
    for b, h, p in torch.cartesian_prod(*map(torch.arange, parents.shape[:3])).tolist():
        members = (cell[b, h] == p).nonzero()[:, 0]
        if len(members):
            rank = (
                torch.arange(num_children, device=key.device) * len(members) // max(1, num_children)
            )
            children[b, h, p] = key[b, h, members[rank]]
    return children


def nearest(key: Tensor, parents: Tensor) -> Tensor:
    """Nearest parent of each key; ties go to the lower index.

    Args:
        key: (B, H, S, D).
        parents: (H, M0, D) or (B, H, M0, D).

    Returns:
        (B, H, S) int64 in [0, M0).
    """
    distance = [_squared_distance(key, parents[..., p, None, :]) for p in range(parents.shape[-2])]
    return torch.stack(distance, dim=-1).argmin(dim=-1)


@torch.no_grad()
def assign(key: Tensor, parents: Tensor, children: Tensor) -> tuple[Tensor, Tensor]:
    """Nearest parent of each key, then its nearest leaf in that parent's cell.

    Args:
        key: (B, H, S, D).
        parents: (H, M0, D) or (B, H, M0, D).
        children: (H, M0, C, D) or (B, H, M0, C, D).

    Returns:
        cell: (B, H, S) int64 in [0, M0), the parent.
        leaf: (B, H, S) int64; 0 stays with the parent, c > 0 is child c - 1. The parent comes
            first, so a child must be strictly closer.
    """
    cell = nearest(key, parents)
    leaves = torch.cat([parents[..., None, :], children], dim=-2)
    leaves = leaves.expand(len(key), *leaves.shape[-4:])
    distance = [_squared_distance(key, _take(leaf, cell)) for leaf in leaves.unbind(dim=3)]
    return cell, torch.stack(distance, dim=-1).argmin(dim=-1)


@torch.no_grad()
def importance(
    tile_query: Tensor, parents: Tensor, counts: Tensor, importance_tile: int | None = None
) -> Tensor:
    """Attention mass that each parent receives from the queries of one tile (Eq. importance).

    With `importance_tile`, which no backend uses, the softmax denominator covers the parents up to
    the end of the codeword tile, extrapolated from the keys seen so far to all keys (appendix
    "Computing Importance with Tiled Codewords").

    Args:
        tile_query: (B, H, I, D), the queries of one tile, times the scale.
        parents: (H, M0, D) or (B, H, M0, D).
        counts: (B, H, M0), keys per parent.
        importance_tile: parents per codeword tile; None is one tile.

    Returns:
        (B, H, M0); with one codeword tile, the sum over parents is I.
    """
    log_mass = tile_query.to(parents.dtype) @ parents.mT + counts.log()[:, :, None]
    importance = torch.zeros_like(counts)
    for tile in torch.arange(parents.shape[-2]).split(importance_tile or parents.shape[-2]):
        stop = int(tile[-1]) + 1
        extrapolation = counts.sum(dim=-1) / counts[..., :stop].sum(dim=-1)
        log_denominator = log_mass[..., :stop].logsumexp(-1) + extrapolation.log()[..., None]
        importance[..., tile] = (log_mass[..., tile] - log_denominator[..., None]).exp().sum(dim=-2)
    return importance.where(counts > 0, 0)


def spread(key: Tensor, index: Tensor, codewords: Tensor) -> Tensor:
    """Variance of each codeword's keys around it: their mean squared distance to it.

    Args:
        key: (B, H, S, D).
        index: (B, H, S) int64 in [0, M), the codeword of each key.
        codewords: (B, H, M, D).

    Returns:
        (B, H, M); 0 without keys.
    """
    distance = _squared_distance(key, _take(codewords, index))
    return _means(distance[..., None], index, codewords)[..., 0]


def select(score: Tensor, num_refined: int) -> Tensor:
    """Mark the `num_refined` parents with the largest scores; ties go to the lower index.

    Args:
        score: (..., M0), importance or importance times spread.

    Returns:
        (..., M0) bool.
    """
    ranking = score.argsort(dim=-1, descending=True, stable=True)
    refined = torch.zeros_like(score, dtype=torch.bool)
    return refined.scatter(-1, ranking[..., :num_refined], True)


def _counts(index: Tensor, codewords: Tensor) -> Tensor:
    """(B, H, M, 1) number of keys of each codeword."""
    return F.one_hot(index, codewords.shape[2]).sum(dim=-2)[..., None]


def _means(key: Tensor, index: Tensor, codewords: Tensor) -> Tensor:
    """(B, H, M, D) mean of the keys of each codeword; 0 without keys."""
    one_hot = F.one_hot(index, codewords.shape[2]).to(key.dtype)
    return one_hot.mT @ key / _counts(index, codewords).clamp(min=1)


def _take(codewords: Tensor, index: Tensor) -> Tensor:
    """The codeword (B, H, S, D) of each key."""
    return codewords.gather(2, index[..., None].expand(-1, -1, -1, codewords.shape[-1]))


def _squared_distance(key: Tensor, codeword: Tensor) -> Tensor:
    return (key - codeword).square().sum(dim=-1)
