"""Metrics of how well a codebook fits a layer: capture, quantization error, usage.

Every metric has one value per head, (H,): a mean would hide bad heads.

Shapes: B batch, H heads, N queries, S keys, D head dim, M0 parents, C children.
"""

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from avq_diffusers.attention import reference
from avq_diffusers.attention.validation import check_arguments
from avq_diffusers.codebook.assignment import assign, assign_leaves, chunk_length, heads_first
from avq_diffusers.codebook.codebook import Codebook

ACTIVE_SHARE = 0.01


@torch.no_grad()
def capture(
    query: Tensor,
    key: Tensor,
    codebook: Codebook,
    num_refined: int,
    *,
    query_tile: int = 128,
    query_order: Tensor | None = None,
    importance_tile: int | None = None,
    scale: float | None = None,
) -> Tensor:
    """Share of exact attention that falls on keys of refined parents (paper, Tab. elastic_p).

    Its cost is that of exact attention, in pieces of bounded memory.

    Args:
        query: (B, H, N, D).
        key: (B, H, S, D).
        codebook: of H heads and head dim D.
        num_refined, query_tile, query_order, importance_tile, scale: as in `avq_attention`.

    Returns:
        (H,) in [0, 1], mean over batch and queries.

    Raises:
        TypeError, ValueError: as `avq_attention`; query and key may have different dtypes.
    """
    refined = refined_parents(
        query,
        key,
        codebook,
        num_refined,
        query_tile=query_tile,
        query_order=query_order,
        importance_tile=importance_tile,
        scale=scale,
    )
    mass = attention_mass(
        query, key, codebook, query_tile=query_tile, query_order=query_order, scale=scale
    )
    return captured_share(mass, refined)


@torch.no_grad()
def capture_curve(
    query: Tensor,
    key: Tensor,
    codebook: Codebook,
    *,
    query_tile: int = 128,
    query_order: Tensor | None = None,
    importance_tile: int | None = None,
    scale: float | None = None,
) -> Tensor:
    """`capture` for every number of refined parents, at the cost of one.

    Args:
        query: (B, H, N, D).
        key: (B, H, S, D).
        codebook: of H heads and head dim D.
        query_tile, query_order, importance_tile, scale: as in `avq_attention`.

    Returns:
        (H, M0 + 1) float64 in [0, 1], on the CPU: with 0, 1, ... M0 refined parents.

    Raises:
        TypeError, ValueError: as `avq_attention`; query and key may have different dtypes.
    """
    _check(query, key, codebook, 0, query_tile, query_order, importance_tile, scale)
    mass = attention_mass(
        query, key, codebook, query_tile=query_tile, query_order=query_order, scale=scale
    )
    importance = _parent_importance(
        query, key, codebook, query_tile, query_order, importance_tile, scale
    )
    ranking = importance.argsort(dim=-1, descending=True, stable=True)
    captured = mass.gather(-1, ranking).cpu().double().sum(dim=(0, 2)).cumsum(dim=-1)
    return F.pad(captured / captured[:, -1:], (1, 0))


def captured_share(mass: Tensor, refined: Tensor) -> Tensor:
    """`capture` of any choice of parents.

    Args:
        mass: (B, H, T, M0) of `attention_mass`.
        refined: (B, H, T, M0) bool.

    Returns:
        (H,) in [0, 1].
    """
    return (mass * refined).sum(dim=(0, 2, 3)) / mass.sum(dim=(0, 2, 3))


@torch.no_grad()
def attention_mass(
    query: Tensor,
    key: Tensor,
    codebook: Codebook,
    *,
    query_tile: int = 128,
    query_order: Tensor | None = None,
    scale: float | None = None,
) -> Tensor:
    """Exact attention of each query tile that falls on the keys of each parent.

    Importance estimates it; the parents of largest mass are the best to refine (paper,
    Tab. tiled_capture).

    Args:
        query: (B, H, N, D).
        key: (B, H, S, D).
        codebook: of H heads and head dim D.
        query_tile, query_order, scale: as in `avq_attention`.

    Returns:
        (B, H, T, M0) for T query tiles; the sum over parents is the number of queries in a tile.

    Raises:
        TypeError, ValueError: as `avq_attention`; query and key may have different dtypes.
    """
    _check(query, key, codebook, 0, query_tile, query_order, None, scale)
    query, key, scale = _at_least_fp32(query, key, scale)
    parent_assignment, _ = assign(key, codebook)
    members = query.new_zeros(*key.shape[:3], codebook.num_parents)
    members.scatter_(-1, parent_assignment[..., None], 1)
    masses = []
    for tiles in _query_tiles(query, query_tile, query_order, row_elements=key.shape[2]):
        attention = (scale * tiles.flatten(2, 3) @ key.transpose(-1, -2)).softmax(dim=-1)
        masses.append(attention.unflatten(2, tiles.shape[2:4]).sum(dim=3) @ members)
    return torch.cat(masses, dim=-2)


@torch.no_grad()
def refined_parents(
    query: Tensor,
    key: Tensor,
    codebook: Codebook,
    num_refined: int,
    *,
    query_tile: int = 128,
    query_order: Tensor | None = None,
    importance_tile: int | None = None,
    scale: float | None = None,
) -> Tensor:
    """The parents that AVQ attention refines in each query tile.

    Args:
        query: (B, H, N, D).
        key: (B, H, S, D).
        codebook: of H heads and head dim D.
        num_refined, query_tile, query_order, importance_tile, scale: as in `avq_attention`.

    Returns:
        (B, H, T, M0) bool for T query tiles.

    Raises:
        TypeError, ValueError: as `avq_attention`; query and key may have different dtypes.
    """
    _check(query, key, codebook, num_refined, query_tile, query_order, importance_tile, scale)
    importance = _parent_importance(
        query, key, codebook, query_tile, query_order, importance_tile, scale
    )
    return reference.select(importance, num_refined)


def commitment_loss(key: Tensor, codebook: Codebook) -> Tensor:
    """Mean squared distance of the keys to their leaves (paper, Tab. perlayer_imagenet).

    Differentiable in `key`; codewords get no gradient. Distillation logs and weights the mean of
    this over heads, divided by D.

    Args:
        key: (..., H, S, D).
        codebook: of H heads and head dim D.

    Returns:
        (H,).
    """
    leaves = codebook.leaves.detach().flatten(1, 2)
    head = torch.arange(codebook.num_heads, device=key.device)[:, None]
    quantized_key = leaves[head, assign_leaves(key, codebook)]
    return heads_first(key - quantized_key).square().sum(dim=-1).mean(dim=-1)


def quantization_error(key: Tensor, codebook: Codebook) -> Tensor:
    """`commitment_loss` in variances of the keys.

    Args:
        key: (..., H, S, D).
        codebook: of H heads and head dim D.

    Returns:
        (H,); 0 is exact, 1 is what a single codeword at the mean of the keys would reach.
    """
    loss = commitment_loss(key, codebook)
    variance = heads_first(key).to(loss.dtype).var(dim=1, correction=0).sum(dim=-1)
    return loss / variance.clamp(min=torch.finfo(loss.dtype).tiny)


def leaf_counts(key: Tensor, codebook: Codebook) -> Tensor:
    """Number of keys that each leaf takes.

    Args:
        key: (..., H, S, D).
        codebook: of H heads and head dim D.

    Returns:
        (H, M0, 1 + C) int64; leaf 0 counts the keys that stay with the parent.
    """
    leaf = assign_leaves(key, codebook).movedim(-2, 0).flatten(1)
    counts = leaf.new_zeros(codebook.num_heads, codebook.num_codewords)
    counts.scatter_add_(1, leaf, torch.ones_like(leaf))
    return counts.unflatten(1, (codebook.num_parents, -1))


def active_ratio(counts: Tensor) -> Tensor:
    """Share of codewords with more than 1 % of the fair share of keys, the number of keys over
    M0 (1 + C) (paper, appendix "Codebook utilization").

    A parent counts all keys of its cell. To rate a codebook on a data set, sum the counts first.

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
    """Exponential of the entropy of the leaves' shares of keys: how many leaves are in even use.

    Args:
        counts: (..., M0, 1 + C) keys per leaf, as from `leaf_counts`.

    Returns:
        (...), from 1 to M0 (1 + C).
    """
    counts = counts.flatten(-2).double()
    shares = counts / counts.sum(dim=-1, keepdim=True)
    return torch.special.entr(shares).sum(dim=-1).exp()


def constraint_error(codebook: Codebook) -> Tensor:
    """How far children are from averaging to their parent (paper, Eq. parent_constraint).

    Returns:
        (H,) largest distance between a parent and the mean of its children, in root mean square
        distances of a child to its parent; 0 for a flat codebook.
    """
    offsets = codebook.children - codebook.parents[:, :, None]
    if codebook.num_children == 0:
        return offsets.new_zeros(codebook.num_heads)
    distance = offsets.square().sum(dim=-1).mean(dim=(1, 2)).sqrt()
    error = offsets.mean(dim=2).norm(dim=-1).amax(dim=1)
    return error / distance.clamp(min=torch.finfo(offsets.dtype).tiny)


def _check(
    query: Tensor,
    key: Tensor,
    codebook: Codebook,
    num_refined: int,
    query_tile: int,
    query_order: Tensor | None,
    importance_tile: int | None,
    scale: float | None,
) -> None:
    # No metric needs values; the keys stand in for them.
    check_arguments(
        query,
        key,
        key,
        codebook,
        num_refined=num_refined,
        query_tile=query_tile,
        query_order=query_order,
        importance_tile=importance_tile,
        scale=scale,
    )


def _parent_importance(
    query: Tensor,
    key: Tensor,
    codebook: Codebook,
    query_tile: int,
    query_order: Tensor | None,
    importance_tile: int | None,
    scale: float | None,
) -> Tensor:
    """(B, H, T, M0)."""
    query, key, scale = _at_least_fp32(query, key, scale)
    parents = codebook.parents.to(query.dtype)
    parent_assignment, _ = assign(key, codebook)
    counts = query.new_zeros(*key.shape[:2], codebook.num_parents)
    counts.scatter_add_(-1, parent_assignment, counts.new_ones(parent_assignment.shape))
    found = []
    row_elements = codebook.num_parents
    for tiles in _query_tiles(query, query_tile, query_order, row_elements=row_elements):
        importance = reference.importance(
            tiles.movedim(2, 0).flatten(0, 1),
            parents,
            counts.repeat(tiles.shape[2], 1, 1),
            scale,
            importance_tile,
        )
        found.append(importance.unflatten(0, (-1, len(query))).movedim(0, 2))
    return torch.cat(found, dim=-2)


def _at_least_fp32(query: Tensor, key: Tensor, scale: float | None) -> tuple[Tensor, Tensor, float]:
    dtype = torch.promote_types(query.dtype, torch.float32)
    return query.to(dtype), key.to(dtype), query.shape[-1] ** -0.5 if scale is None else scale


def _query_tiles(
    query: Tensor, query_tile: int, query_order: Tensor | None, *, row_elements: int
) -> Iterator[Tensor]:
    """Queries (B, H, T, I, D) of T tiles at a time; a last tile that is not full comes alone.

    Args:
        row_elements: numbers that are computed per query; few tiles at a time bound the memory.
    """
    batch, heads, num_queries, _ = query.shape
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
