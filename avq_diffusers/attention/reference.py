"""The definition of AVQ attention, slow and obvious: replace keys per query tile, then attend.

Keys are assigned and parents chosen in the dtype of the codewords; attention is computed in the
dtype of the query. Float64 inputs and codewords give a float64 oracle.

Shapes: B batch, H heads, N queries, S keys, D head dim, M0 parents, C children, T query tiles.
"""

import torch
import torch.nn.functional as F
from torch import Tensor


def avq_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    parents: Tensor,
    children: Tensor,
    *,
    num_refined: int,
    query_tile: int,
    query_order: Tensor | None = None,
    importance_tile: int | None = None,
    scale: float | None = None,
) -> Tensor:
    """Softmax attention over keys replaced by codewords, refined where a query tile looks most.

    Gradients reach query, key (straight through the quantization) and value; codewords get none.

    Args:
        query: (B, H, N, D).
        key, value: (B, H, S, D), same dtype as `query`.
        parents: (H, M0, D), dtype of `query` or wider.
        children: (H, M0, C, D), dtype of `parents`.
        num_refined: parents refined per query tile.
        query_tile: consecutive queries of `query_order` that share one choice of parents.
        query_order: (N,) integer permutation of the queries; None is their own order.
        importance_tile: parents per tile of the tiled importance; None is exact.
        scale: factor on the logits; None is 1 / sqrt(D).

    Returns:
        (B, H, N, D) in the order of `query`.
    """
    num_queries, head_dim = query.shape[-2:]
    num_parents = parents.shape[1]
    scale = head_dim**-0.5 if scale is None else scale
    if query_order is None:
        query_order = torch.arange(num_queries, device=query.device)

    parent_assignment, leaf_assignment = assign(key, parents, children)
    leaves = torch.cat([parents[:, :, None], children], dim=2).detach()
    heads = torch.arange(key.shape[1], device=key.device)[:, None]
    coarse_key = leaves[heads, parent_assignment, 0].to(key.dtype)
    fine_key = leaves[heads, parent_assignment, leaf_assignment].to(key.dtype)
    counts = F.one_hot(parent_assignment, num_parents).sum(dim=-2).to(parents.dtype)

    output = torch.empty_like(query)
    for tile in query_order.split(query_tile):
        tile_query = query[:, :, tile]
        tile_importance = importance(tile_query, parents, counts, scale, importance_tile)
        refined = select(tile_importance, num_refined)
        is_refined = refined.gather(-1, parent_assignment)[..., None]
        quantized_key = torch.where(is_refined, fine_key, coarse_key) + (key - key.detach())
        output[:, :, tile] = F.scaled_dot_product_attention(
            tile_query, quantized_key, value, scale=scale
        )
    return output


@torch.no_grad()
def assign(key: Tensor, parents: Tensor, children: Tensor) -> tuple[Tensor, Tensor]:
    """Nearest parent of each key, then its nearest leaf in that parent's cell.

    Args:
        key: (B, H, S, D).
        parents: (H, M0, D).
        children: (H, M0, C, D).

    Returns:
        parent_assignment: (B, H, S) int64 in [0, M0).
        leaf_assignment: (B, H, S) int64; 0 stays with the parent, c > 0 is child c - 1. The parent
            comes first, so a child must be strictly closer.
    """
    parent_distance = [_squared_distance(key, parents[:, p, None]) for p in range(parents.shape[1])]
    parent_assignment = torch.stack(parent_distance, dim=-1).argmin(dim=-1)

    leaves = torch.cat([parents[:, :, None], children], dim=2)
    heads = torch.arange(key.shape[1], device=key.device)[:, None]
    leaf_distance = [
        _squared_distance(key, leaves[heads, parent_assignment, leaf])
        for leaf in range(leaves.shape[2])
    ]
    return parent_assignment, torch.stack(leaf_distance, dim=-1).argmin(dim=-1)


@torch.no_grad()
def importance(
    tile_query: Tensor,
    parents: Tensor,
    counts: Tensor,
    scale: float,
    importance_tile: int | None = None,
) -> Tensor:
    """Attention mass that each parent receives from the queries of one tile (Eq. importance).

    With `importance_tile`, a softmax denominator covers the parents up to the end of the codeword
    tile and is extrapolated from the keys seen so far to all keys (appendix "Computing Importance
    with Tiled Codewords").

    Args:
        tile_query: (B, H, I, D), the queries of one tile.
        parents: (H, M0, D).
        counts: (B, H, M0), keys per parent.
        scale: of the logits.

    Returns:
        (B, H, M0); exact importance sums to I over the parents.
    """
    num_parents = parents.shape[1]
    importance_tile = importance_tile or num_parents
    logits = scale * tile_query.to(parents.dtype) @ parents.transpose(-1, -2)
    log_mass = logits + counts.log()[:, :, None]

    importance = torch.zeros_like(counts)
    for start in range(0, num_parents, importance_tile):
        stop = min(start + importance_tile, num_parents)
        extrapolation = counts.sum(dim=-1) / counts[..., :stop].sum(dim=-1)
        log_denominator = log_mass[..., :stop].logsumexp(-1) + extrapolation.log()[..., None]
        mass = (log_mass[..., start:stop] - log_denominator[..., None]).exp().sum(dim=-2)
        importance[..., start:stop] = mass
    return importance.where(counts > 0, 0)


def select(importance: Tensor, num_refined: int) -> Tensor:
    """Mark the `num_refined` parents of largest importance. Of equal parents the lower index wins.

    Args:
        importance: (..., M0).

    Returns:
        (..., M0) bool.
    """
    ranking = importance.argsort(dim=-1, descending=True, stable=True)
    refined = torch.zeros_like(importance, dtype=torch.bool)
    return refined.scatter(-1, ranking[..., :num_refined], True)


def _squared_distance(key: Tensor, codeword: Tensor) -> Tensor:
    return (key - codeword).square().sum(dim=-1)
