"""AVQ attention in plain PyTorch, at O(M N) on every device.

The keys of a leaf are summarized once, by their count n and the mean of their values. Every query
tile attends to all parents and to the children of the parents that it refines:

    y = sum_a n_a exp(s q.c_a) mean_a / sum_a n_a exp(s q.c_a)

A refined parent stands only for the keys that stay with it, so the result is exact for any
codebook. There are no atomics and no data-dependent shapes: every run gives the same bits, and the
host never waits for the device. Half precision is computed in float32.

A CPU computes one batch element after another, to stay in cache. Other devices compute all elements
at once, to save launches.

Shapes: H heads (of all batch elements in a chunk), N queries, S keys, D head dim, M0 parents, C
children, P refined parents, T query tiles of I queries.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from avq_diffusers.attention.own_codewords import codewords_and_leaves
from avq_diffusers.codebook.assignment import (
    across_heads,
    centre_of,
    chunk_length,
)

# Longest sequence of values that is summed serially.
RUN = 256

# Log count of an empty codeword: finite, because -inf minus -inf is NaN in an online softmax.
LOG_ZERO = -1e30


class CodewordTable(NamedTuple):
    """The codewords that a query tile can see: per cell all its keys, those that stay, children.

    Args:
        codewords: (H, M0, 2 + C, D), centred; what represents the keys.
        value_means: (H, M0, 2 + C, D).
        counts: (H, M0, 2 + C) int64.
        log_counts: (H, M0, 2 + C), at least `LOG_ZERO`.
    """

    codewords: Tensor
    value_means: Tensor
    counts: Tensor
    log_counts: Tensor


def avq_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    sink_key: Tensor | None,
    sink_value: Tensor | None,
    parents: Tensor | None,
    children: Tensor | None,
    query_order: Tensor | None,
    *,
    num_parents: int,
    num_children: int,
    num_refined: int,
    means: bool,
    num_updates: int,
    exact_keys: int,
    query_tile: int,
    importance_tile: int | None,
    scale: float,
) -> Tensor:
    """Attention over codewords, refined per query tile; equal to `reference.avq_attention`.

    Args:
        query: (B, H, N, D).
        key, value: (B, H, S, D), same dtype as `query`.
        parents: (H, M0, D), float64 for float64 inputs, else float32; None takes codewords from the
            keys.
        children: (H, M0, C, D), same dtype as `parents`.
        query_order: (N,) integer permutation of the queries; None is their own order.
        num_parents, num_children: M0 and C.
        num_refined: parents refined per query tile.
        means: the mean of its keys represents a leaf or cell, else the codeword.
        num_updates: Lloyd updates of the parents.
        query_tile: consecutive queries of `query_order` that share one choice of parents.
        importance_tile: parents per tile of the tiled importance; None is exact.
        scale: factor on the logits.

    Returns:
        (B, H, N, D) view of (B, N, H, D) memory, in the order and dtype of `query`.
    """
    if exact_keys or sink_key is not None:
        raise NotImplementedError("exact keys and sink keys are not in the PyTorch path yet.")
    batch, heads, num_queries, head_dim = query.shape
    output = query.new_empty(batch, num_queries, heads, head_dim).transpose(1, 2)
    size = 1 if query.device.type == "cpu" else batch
    for start in range(0, batch, size):
        part = slice(start, start + size)
        _, table = leaves_and_table(
            key[part],
            value[part],
            parents,
            children,
            query_order,
            num_parents=num_parents,
            num_children=num_children,
            means=means,
            num_updates=num_updates,
        )
        attend(
            query[part].flatten(0, 1),
            table,
            output[part],
            num_refined=num_refined,
            query_tile=query_tile,
            query_order=query_order,
            importance_tile=importance_tile,
            scale=scale,
        )
    return output


def leaves_and_table(
    key: Tensor,
    value: Tensor,
    parents: Tensor | None,
    children: Tensor | None,
    query_order: Tensor | None,
    *,
    num_parents: int,
    num_children: int,
    means: bool,
    num_updates: int,
) -> tuple[Tensor, CodewordTable]:
    """The leaf of every key, and what represents the leaves.

    Args:
        key, value: (B, H, S, D); the heads of all batch elements become one list.

    Returns:
        leaf: (B H, S) from `nearest_leaves`.
        table: of B H heads.
    """
    parents, children, leaf = codewords_and_leaves(
        key,
        parents,
        children,
        query_order,
        num_parents=num_parents,
        num_children=num_children,
        num_updates=num_updates,
    )
    key, value = key.flatten(0, 1), value.flatten(0, 1)
    dtype = parents.dtype

    # A shift of all keys by one vector changes no softmax, and small codewords round less.
    centre = centre_of(parents)
    features = torch.cat([value, key - centre], dim=-1) if means else value
    counts, sums = aggregate(leaf, features, num_parents, 1 + num_children, dtype)
    sums = torch.cat([sums.sum(dim=2, keepdim=True), sums], dim=2)
    counts = torch.cat([counts.sum(dim=2, keepdim=True), counts], dim=2)
    averages = sums / counts.clamp(min=1)[..., None]
    head_dim = value.shape[-1]
    if means:
        codewords = averages[..., head_dim:]
    else:
        parents, children = parents - centre, children - centre[:, None]
        codewords = torch.cat([parents[:, :, None].expand(-1, -1, 2, -1), children], dim=2)
    log_counts = counts.to(dtype).log().clamp(min=LOG_ZERO)
    return leaf, CodewordTable(codewords, averages[..., :head_dim], counts, log_counts)


def aggregate(
    leaf: Tensor, features: Tensor, num_parents: int, num_leaves: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Count the keys and sum the features of every leaf (paper, Algorithm 1, for leaves only).

    Args:
        leaf: (H, S) from `nearest_leaves`.
        features: (H, S, F), values or values and keys.
        num_leaves: of a parent, 1 + C.

    Returns:
        counts: (H, M0, 1 + C) int64; leaf 0 counts the keys that stay with the parent.
        sums: (H, M0, 1 + C, F) of `dtype`.
    """
    heads, _, width = features.shape
    num_rows = heads * num_parents * num_leaves
    leaf = across_heads(leaf, num_parents * num_leaves)
    leaf, row = leaf.t().flatten().sort(stable=True)

    edges = torch.searchsorted(leaf, torch.arange(num_rows + 1, device=leaf.device))
    # Sums of runs, then of leaves: long leaves neither lose digits nor hold up a GPU.
    runs = torch.arange(0, len(leaf), RUN, device=leaf.device)
    cuts = torch.cat([edges, runs]).sort().values
    rows = features.transpose(0, 1).reshape(-1, width).to(dtype)
    run_sums = F.embedding_bag(row, rows, cuts, mode="sum", include_last_offset=True)
    run = torch.arange(len(run_sums), device=leaf.device)
    first_run = torch.searchsorted(cuts, edges[:-1])
    sums = F.embedding_bag(run, run_sums, first_run, mode="sum")
    return (
        edges.diff().view(heads, num_parents, num_leaves),
        sums.view(heads, num_parents, num_leaves, width),
    )


def attend(
    query: Tensor,
    table: CodewordTable,
    output: Tensor,
    *,
    num_refined: int,
    query_tile: int,
    query_order: Tensor | None,
    importance_tile: int | None,
    scale: float,
) -> None:
    """Softmax over the codewords that each query tile sees (paper, Algorithm 2, no correction).

    Args:
        query: (H, N, D).
        output: (B, H / B, N, D) for any B, written in the order of `query`.
    """
    heads, num_queries, head_dim = query.shape
    batch = output.shape[:2]
    num_parents, num_children = table.counts.shape[1], table.counts.shape[2] - 2
    query_tile = min(query_tile, num_queries)

    if num_refined == 0:
        # All tiles see the same codewords.
        parents = table.codewords[:, :, 0].contiguous()
        means = table.value_means[:, :, 0].contiguous()
        log_counts = table.log_counts[:, :, 0].contiguous()
        whole = _attention(query[None], parents[None], means[None], log_counts[None], scale)
        output.copy_(whole[0].unflatten(0, batch))
        return

    tile_elements = 2 * head_dim * (num_parents + num_refined * num_children)
    row_elements = num_parents + tile_elements // query_tile
    chunk = chunk_length(query.device, heads * row_elements)
    chunk = max(1, chunk // query_tile) * query_tile
    for start in range(0, num_queries, chunk):
        stop = min(start + chunk, num_queries)
        order = slice(start, stop) if query_order is None else query_order[start:stop].long()
        tiles = cut_tiles(query, order, query_tile, table.codewords.dtype)
        visible = visible_codewords(
            tiles,
            table,
            num_queries=stop - start,
            num_refined=num_refined,
            importance_tile=importance_tile,
            scale=scale,
        )
        tile_output = _attention(
            tiles.transpose(0, 1),
            gather_rows(table.codewords, visible),
            gather_rows(table.value_means, visible),
            gather_rows(table.log_counts, visible),
            scale,
        )
        write_tiles(output, tile_output.transpose(0, 1), order)


def visible_codewords(
    tiles: Tensor,
    table: CodewordTable,
    *,
    num_queries: int,
    num_refined: int,
    importance_tile: int | None,
    scale: float,
) -> Tensor:
    """Choose the parents that each tile refines; return the codewords that it sees.

    Args:
        tiles: (H, T, I, D) queries, of which the first `num_queries` are not padding.

    Returns:
        (T, H, M0 + P C) int64 rows of the table, the heads one after another.
    """
    _, num_parents, per_cell, _ = table.codewords.shape
    log_mass = torch.baddbmm(
        table.log_counts[:, None, :, 0],
        tiles.flatten(1, 2),
        table.codewords[:, :, 0].transpose(1, 2),
        alpha=scale,
    )
    mass = _mass(log_mass, table.counts[..., 0], importance_tile)
    mass[:, num_queries:] = 0
    importance = mass.unflatten(1, tiles.shape[1:3]).sum(dim=2)
    # topk leaves the order of equal values open.
    ranking = importance.sort(dim=-1, descending=True, stable=True).indices
    refined = ranking[..., :num_refined]

    is_refined = torch.zeros_like(ranking).scatter_(-1, refined, 1)
    cell = torch.arange(num_parents, device=tiles.device)
    parent_rows = cell * per_cell + is_refined
    child_row = torch.arange(2, per_cell, device=tiles.device)
    child_rows = (refined[..., None] * per_cell + child_row).flatten(-2)
    rows = torch.cat([parent_rows, child_rows], dim=-1).transpose(0, 1)
    return across_heads(rows, num_parents * per_cell)


def gather_rows(column: Tensor, visible: Tensor) -> Tensor:
    """Rows (T, H, M0 + P C, ...) of a table's column (H, M0, 2 + C, ...)."""
    rows = column.flatten(0, 2).index_select(0, visible.flatten())
    return rows.unflatten(0, visible.shape)


def cut_tiles(tokens: Tensor, order: Tensor | slice, query_tile: int, dtype: torch.dtype) -> Tensor:
    """Cut the tokens (H, N, D) at `order` into tiles (H, T, query_tile, D), padded with 0."""
    if isinstance(order, slice):
        tiles = tokens[:, order]
    else:
        tiles = tokens.transpose(0, 1).index_select(0, order).transpose(0, 1)
    tiles = tiles.to(dtype)
    padding = -tiles.shape[1] % query_tile
    if padding:
        tiles = F.pad(tiles, (0, 0, 0, padding))
    return tiles.unflatten(1, (-1, query_tile))


def write_tiles(tokens: Tensor, tiles: Tensor, order: Tensor | slice) -> None:
    """Put tiles (H, T, query_tile, D) where `cut_tiles` found them.

    Args:
        tokens: (B, H / B, N, D) for any B, written.
    """
    tiles = tiles.flatten(1, 2).unflatten(0, tokens.shape[:2])
    if isinstance(order, slice):
        target = tokens[:, :, order]
        target.copy_(tiles[:, :, : target.shape[2]])
    else:
        tokens.index_copy_(2, order, tiles[:, :, : len(order)].to(tokens.dtype))


def _attention(
    query: Tensor, codewords: Tensor, value_means: Tensor, log_counts: Tensor, scale: float
) -> Tensor:
    """Attention over codewords of n keys each. Inputs have four dimensions: with three, SDPA takes
    its slow path."""
    return F.scaled_dot_product_attention(
        query.to(codewords.dtype),
        codewords,
        value_means,
        attn_mask=log_counts[..., None, :],
        scale=scale,
    )


def _mass(log_mass: Tensor, counts: Tensor, importance_tile: int | None) -> Tensor:
    """Attention mass per query and parent, from log(n exp(s q.c)) of shape (H, queries, M0)."""
    num_parents = log_mass.shape[-1]
    if importance_tile is None or importance_tile >= num_parents:
        return log_mass.softmax(dim=-1)
    log_denominator = torch.full_like(log_mass[..., :1], -torch.inf)
    for start in range(0, num_parents, importance_tile):
        stop = min(start + importance_tile, num_parents)
        tile = log_mass[..., start:stop]
        log_denominator = log_denominator.logaddexp(tile.logsumexp(dim=-1, keepdim=True))
        share_seen = counts[:, :stop].sum(dim=-1).to(tile.dtype) / counts.sum(dim=-1)
        tile.sub_(log_denominator).exp_().mul_(share_seen[:, None, None])
    return log_mass
