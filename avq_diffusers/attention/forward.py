"""AVQ attention in plain PyTorch, at O(M N) on every device.

The keys of a leaf are summarized once, by their count n and the mean of their values. Every query
tile attends to all parents and to the children of the parents that it refines:

    y = sum_a n_a exp(s q.c_a) mean_a / sum_a n_a exp(s q.c_a)

A tile refines the parents of largest importance, or of largest importance times spread if means
represent the keys. A refined parent stands only for the keys that stay with it, so the result is
exact for any codebook. Exact keys and sink keys are more columns, of one key each; a leaf whose
keys are exact stands for none. There are no atomics and no data-dependent shapes: every run gives
the same bits, and the host never waits for the device. Half precision is computed in float32.

A CPU computes one batch element after another, to stay in cache. Other devices compute all elements
at once, to save launches.

Shapes: H heads (of all batch elements in a chunk), N queries, S keys, D head dim, M0 parents, C
children, P refined parents, T query tiles of I queries, V = M0 + P C visible codewords, E exact
keys.
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
        centre: (H, 1, D), subtracted from all keys and codewords.
        codewords: (H, M0, 2 + C, D), what represents the keys.
        value_means: (H, M0, 2 + C, D).
        counts: (H, M0, 2 + C) int64.
        log_counts: (H, M0, 2 + C), at least `LOG_ZERO`.
        spreads: (H, M0), mean squared distance of the keys of a cell to their mean; None if
            codewords represent the keys, where it takes no part.
    """

    centre: Tensor
    codewords: Tensor
    value_means: Tensor
    counts: Tensor
    log_counts: Tensor
    spreads: Tensor | None


class ExactKeys(NamedTuple):
    """The keys that a query tile can meet as themselves, leaf by leaf.

    Args:
        most: keys per tile, E.
        keys: (S H, D).
        values: (S H, D).
        rows: (H S,) rows of `keys`, sorted by leaf.
        starts: (H, M0, 2 + C) where in `rows` the keys of a codeword begin.
        log_weights: (H, M0, 2 + C), at least `LOG_ZERO`; what the importance of one key counts,
            the squared spread of the codeword's keys.
    """

    most: int
    keys: Tensor
    values: Tensor
    rows: Tensor
    starts: Tensor
    log_weights: Tensor


class Sinks(NamedTuple):
    """The keys (H, any number, D) that every query meets as themselves, and their values."""

    keys: Tensor
    values: Tensor


class Summary(NamedTuple):
    """What the queries of a chunk of batch elements meet.

    Args:
        leaf: (H, S) from `nearest_leaves`.
    """

    leaf: Tensor
    table: CodewordTable
    exact: ExactKeys | None
    sinks: Sinks | None

    @property
    def num_single(self) -> int:
        """Exact keys and sinks of a tile."""
        num_exact = 0 if self.exact is None else self.exact.most
        return num_exact + (0 if self.sinks is None else self.sinks.keys.shape[1])


class Columns(NamedTuple):
    """What query tiles meet: visible codewords, then exact keys, then sinks, K together.

    Args:
        visible: (T, H, V) rows of the table.
        exact: (T, H, E) rows of the keys; None without exact keys.
        keys: (T, H, K, D).
        values: (T, H, K, D).
        log_counts: (T, H, K), `LOG_ZERO` where there is no key.
    """

    visible: Tensor
    exact: Tensor | None
    keys: Tensor
    values: Tensor
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
    key_order: Tensor | None,
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
        sink_key, sink_value: (B, H, any number, D), same dtype, or None.
        parents: (H, M0, D), float64 for float64 inputs, else float32; None takes codewords from the
            keys.
        children: (H, M0, C, D), same dtype as `parents`.
        query_order: (N,) integer permutation of the queries; None is their own order.
        key_order: (S,) integer permutation in which parents are evenly spaced, or None.
        num_parents, num_children: M0 and C.
        num_refined: parents refined per query tile.
        means: the mean of its keys represents a leaf or cell, else the codeword.
        num_updates: Lloyd updates of the parents.
        exact_keys: most keys per query tile that take part as themselves.
        query_tile: consecutive queries of `query_order` that share one choice of parents.
        importance_tile: parents per tile of the tiled importance; None is exact.
        scale: factor on the logits.

    Returns:
        (B, H, N, D) view of (B, N, H, D) memory, in the order and dtype of `query`.
    """
    batch, heads, num_queries, head_dim = query.shape
    output = query.new_empty(batch, num_queries, heads, head_dim).transpose(1, 2)
    size = 1 if query.device.type == "cpu" else batch
    for start in range(0, batch, size):
        part = slice(start, start + size)
        summary = summarize(
            key[part],
            value[part],
            None if sink_key is None else sink_key[part],
            None if sink_value is None else sink_value[part],
            parents,
            children,
            key_order,
            num_parents=num_parents,
            num_children=num_children,
            means=means,
            num_updates=num_updates,
            exact_keys=exact_keys,
        )
        attend(
            query[part].flatten(0, 1),
            summary,
            output[part],
            num_refined=num_refined,
            query_tile=query_tile,
            query_order=query_order,
            importance_tile=importance_tile,
            scale=scale,
        )
    return output


def summarize(
    key: Tensor,
    value: Tensor,
    sink_key: Tensor | None,
    sink_value: Tensor | None,
    parents: Tensor | None,
    children: Tensor | None,
    key_order: Tensor | None,
    *,
    num_parents: int,
    num_children: int,
    means: bool,
    num_updates: int,
    exact_keys: int,
) -> Summary:
    """The leaf of every key, and what represents the leaves.

    Args:
        key, value: (B, H, S, D); the heads of all batch elements become one list.
    """
    parents, children, leaf = codewords_and_leaves(
        key,
        parents,
        children,
        key_order,
        num_parents=num_parents,
        num_children=num_children,
        num_updates=num_updates,
    )
    key, value = key.flatten(0, 1), value.flatten(0, 1)
    dtype = parents.dtype

    # A shift of all keys by one vector changes no softmax, and small codewords round less.
    centre = centre_of(parents)
    key = key - centre
    features = torch.cat([value, key], dim=-1) if means else value
    leaves = sort_leaves(leaf, num_parents, 1 + num_children)
    counts, sums = aggregate(leaves, features, dtype)
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
    spreads = None
    if means or exact_keys:
        spreads = _spreads(key, leaf, leaves, codewords, counts, of_leaves=exact_keys > 0)
    table = CodewordTable(
        centre,
        codewords,
        averages[..., :head_dim],
        counts,
        log_counts,
        spreads[..., 0] if means and spreads is not None else None,
    )

    exact = sinks = None
    if exact_keys and spreads is not None:
        exact = _exact_keys(key, value.to(dtype), leaves, spreads, exact_keys)
    if sink_key is not None and sink_value is not None:
        sinks = Sinks(sink_key.flatten(0, 1) - centre, sink_value.flatten(0, 1).to(dtype))
    return Summary(leaf, table, exact, sinks)


def _spreads(
    key: Tensor,
    leaf: Tensor,
    leaves: "SortedLeaves",
    codewords: Tensor,
    counts: Tensor,
    *,
    of_leaves: bool,
) -> Tensor:
    """Mean squared distance of the keys (H, S, D) of each cell to what represents it, (H, M0, 1).

    Args:
        of_leaves: also of the keys of each leaf, (H, M0, 2 + C) together.
    """
    num_parents, per_cell = counts.shape[1:]
    cell = leaf // (per_cell - 1)
    rows = [cell * per_cell]
    if of_leaves:
        rows.append(leaf + cell + 1)
    # Moments about the centre would cancel where a cell is small and far from it.
    distances = []
    for row in rows:
        row = across_heads(row, num_parents * per_cell)
        codeword = codewords.flatten(0, 2).index_select(0, row.flatten())
        distances.append(codeword.view_as(key).sub_(key).square_().sum(dim=-1))
    _, sums = aggregate(leaves, torch.stack(distances, dim=-1), key.dtype)
    sums = torch.cat([sums[..., :1].sum(dim=2), *sums[..., 1:].unbind(dim=-1)], dim=2)
    return sums / counts[..., : sums.shape[2]].clamp(min=1)


def _exact_keys(
    key: Tensor, value: Tensor, leaves: "SortedLeaves", spreads: Tensor, exact_keys: int
) -> ExactKeys:
    """The keys (H, S, D) and values of all leaves, weighted by their spreads (H, M0, 2 + C)."""
    num_keys, head_dim = key.shape[1:]
    starts = leaves.edges[:-1].view(leaves.shape)
    return ExactKeys(
        min(exact_keys, num_keys),
        key.transpose(0, 1).reshape(-1, head_dim),
        value.transpose(0, 1).reshape(-1, head_dim),
        leaves.rows,
        torch.cat([starts[..., :1], starts], dim=-1),
        (2 * spreads.log()).clamp(min=LOG_ZERO),
    )


class SortedLeaves(NamedTuple):
    """The keys of all heads, leaf by leaf.

    Args:
        rows: (H S,) rows of tokens (S H, ...).
        edges: (H M0 (1 + C) + 1,) where in `rows` the leaves begin and end.
        shape: (H, M0, 1 + C).
    """

    rows: Tensor
    edges: Tensor
    shape: tuple[int, int, int]


def sort_leaves(leaf: Tensor, num_parents: int, num_leaves: int) -> SortedLeaves:
    """Sort keys by leaf, and those of a leaf by index.

    Args:
        leaf: (H, S) from `nearest_leaves`.
        num_leaves: of a parent, 1 + C.
    """
    shape = len(leaf), num_parents, num_leaves
    leaf = across_heads(leaf, num_parents * num_leaves)
    leaf, rows = leaf.t().flatten().sort(stable=True)
    bounds = torch.arange(shape[0] * num_parents * num_leaves + 1, device=leaf.device)
    return SortedLeaves(rows, torch.searchsorted(leaf, bounds), shape)


def aggregate(leaves: SortedLeaves, features: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Count the keys and sum the features of every leaf (paper, Algorithm 1, for leaves only).

    Args:
        features: (H, S, F), values or values and keys.

    Returns:
        counts: (H, M0, 1 + C) int64; leaf 0 counts the keys that stay with the parent.
        sums: (H, M0, 1 + C, F) of `dtype`.
    """
    width = features.shape[-1]
    # Sums of runs, then of leaves: long leaves neither lose digits nor hold up a GPU.
    runs = torch.arange(0, len(leaves.rows), RUN, device=features.device)
    cuts = torch.cat([leaves.edges, runs]).sort().values
    tokens = features.transpose(0, 1).reshape(-1, width).to(dtype)
    run_sums = F.embedding_bag(leaves.rows, tokens, cuts, mode="sum", include_last_offset=True)
    run = torch.arange(len(run_sums), device=features.device)
    first_run = torch.searchsorted(cuts, leaves.edges[:-1])
    sums = F.embedding_bag(run, run_sums, first_run, mode="sum")
    return leaves.edges.diff().view(leaves.shape), sums.view(*leaves.shape, width)


def attend(
    query: Tensor,
    summary: Summary,
    output: Tensor,
    *,
    num_refined: int,
    query_tile: int,
    query_order: Tensor | None,
    importance_tile: int | None,
    scale: float,
) -> None:
    """Softmax over the columns that each query tile meets (paper, Algorithm 2, no correction).

    Args:
        query: (H, N, D).
        output: (B, H / B, N, D) for any B, written in the order of `query`.
    """
    heads, num_queries, head_dim = query.shape
    batch = output.shape[:2]
    table = summary.table
    num_parents, num_children = table.counts.shape[1], table.counts.shape[2] - 2
    query_tile = min(query_tile, num_queries)

    if num_refined == 0 and summary.exact is None:
        # All tiles meet the same columns.
        keys = table.codewords[None, :, :, 0].contiguous()
        values = table.value_means[None, :, :, 0].contiguous()
        log_counts = table.log_counts[None, :, :, 0].contiguous()
        if summary.sinks is not None:
            keys, values, log_counts = _with_sinks(summary.sinks, keys, values, log_counts)
        whole = _attention(query[None], keys, values, log_counts, scale)
        output.copy_(whole[0].unflatten(0, batch))
        return

    num_visible = num_parents + num_refined * num_children
    tile_elements = 2 * head_dim * (num_visible + summary.num_single)
    row_elements = num_parents + tile_elements // query_tile
    if summary.exact is not None:
        row_elements += num_visible
    chunk = chunk_length(query.device, heads * row_elements)
    chunk = max(1, chunk // query_tile) * query_tile
    for start in range(0, num_queries, chunk):
        stop = min(start + chunk, num_queries)
        order = slice(start, stop) if query_order is None else query_order[start:stop].long()
        tiles = cut_tiles(query, order, query_tile, table.codewords.dtype)
        columns = columns_of(
            tiles,
            summary,
            num_queries=stop - start,
            num_refined=num_refined,
            importance_tile=importance_tile,
            scale=scale,
        )
        tile_output = _attention(
            tiles.transpose(0, 1), columns.keys, columns.values, columns.log_counts, scale
        )
        write_tiles(output, tile_output.transpose(0, 1), order)


def columns_of(
    tiles: Tensor,
    summary: Summary,
    *,
    num_queries: int,
    num_refined: int,
    importance_tile: int | None,
    scale: float,
) -> Columns:
    """Choose the parents that each tile refines and the keys that it meets as themselves.

    Args:
        tiles: (H, T, I, D) queries, of which the first `num_queries` are not padding.
    """
    table, exact = summary.table, summary.exact
    log_mass = torch.baddbmm(
        table.log_counts[:, None, :, 0],
        tiles.flatten(1, 2),
        table.codewords[:, :, 0].transpose(1, 2),
        alpha=scale,
    )
    log_denominator = None if exact is None else log_mass.logsumexp(dim=-1, keepdim=True)
    mass = _mass(log_mass, table.counts[..., 0], importance_tile)
    mass[:, num_queries:] = 0
    score = mass.unflatten(1, tiles.shape[1:3]).sum(dim=2)
    if table.spreads is not None:
        score = score * table.spreads[:, None]
    visible = _visible_codewords(score, table, num_refined, in_order=exact is not None)
    keys = gather_rows(table.codewords, visible)
    values = gather_rows(table.value_means, visible)
    log_counts = gather_rows(table.log_counts, visible)

    exact_rows = None
    if exact is not None and log_denominator is not None:
        log_denominator[:, num_queries:] = torch.inf
        log_shares = torch.baddbmm(
            -log_denominator.unflatten(1, tiles.shape[1:3]).transpose(0, 1).flatten(0, 1),
            tiles.transpose(0, 1).flatten(0, 1),
            keys.flatten(0, 1).mT,
            alpha=scale,
        ).unflatten(0, visible.shape[:2])
        log_shares += gather_rows(exact.log_weights, visible)[:, :, None]
        # The sums themselves may underflow.
        ranking = log_shares.logsumexp(dim=2).sort(dim=-1, descending=True, stable=True).indices
        is_exact, exact_rows, is_key = _choose_exact(ranking, visible, table.counts, exact)
        log_counts = log_counts.masked_fill(is_exact, LOG_ZERO)
        rows = exact_rows.flatten()
        for_keys = [x.index_select(0, rows).unflatten(0, exact_rows.shape) for x in exact[1:3]]
        keys, values = (torch.cat(x, dim=2) for x in zip((keys, values), for_keys, strict=True))
        of_keys = log_counts.new_zeros(is_key.shape).masked_fill_(~is_key, LOG_ZERO)
        log_counts = torch.cat([log_counts, of_keys], dim=2)
    if summary.sinks is not None:
        keys, values, log_counts = _with_sinks(summary.sinks, keys, values, log_counts)
    return Columns(visible, exact_rows, keys, values, log_counts)


def _visible_codewords(
    score: Tensor, table: CodewordTable, num_refined: int, *, in_order: bool
) -> Tensor:
    """Choose the parents that each tile refines; return the codewords that it sees.

    Args:
        score: (H, T, M0) of parents.
        in_order: as in the definition: cells, what stays with refined parents, their children.

    Returns:
        (T, H, V) int64 rows of the table, the heads one after another.
    """
    num_parents, per_cell = table.counts.shape[1:]
    # topk leaves the order of equal values open.
    ranking = score.sort(dim=-1, descending=True, stable=True).indices
    refined = ranking[..., :num_refined]

    is_refined = torch.zeros_like(ranking).scatter_(-1, refined, 1)
    cell = torch.arange(num_parents, device=score.device).expand_as(ranking)
    if in_order:
        is_refined, cell = is_refined.sort(dim=-1, stable=True)
        refined = cell[..., num_parents - num_refined :]
    parent_rows = cell * per_cell + is_refined
    child_row = torch.arange(2, per_cell, device=score.device)
    child_rows = (refined[..., None] * per_cell + child_row).flatten(-2)
    rows = torch.cat([parent_rows, child_rows], dim=-1).transpose(0, 1)
    return across_heads(rows, num_parents * per_cell)


def _choose_exact(
    ranking: Tensor, visible: Tensor, counts: Tensor, exact: ExactKeys
) -> tuple[Tensor, Tensor, Tensor]:
    """The codewords of highest rank whose keys fit, and these keys.

    Args:
        ranking, visible: (T, H, V).
        counts: (H, M0, 2 + C).

    Returns:
        is_exact: (T, H, V) bool.
        rows: (T, H, E) of the keys; any where there is none.
        is_key: (T, H, E) bool.
    """
    ranked = visible.gather(-1, ranking)
    counts = gather_rows(counts, ranked)
    ends = counts.cumsum(dim=-1)
    fits = ends <= exact.most
    is_exact = torch.zeros_like(fits).scatter_(-1, ranking, fits)

    place = torch.arange(exact.most, device=ends.device).expand(*ends.shape[:2], -1).contiguous()
    rank = torch.searchsorted(ends, place, right=True)
    is_key = fits.gather(-1, rank)
    starts = gather_rows(exact.starts, ranked) - ends + counts
    place = torch.where(is_key, place + starts.gather(-1, rank), 0)
    rows = exact.rows.index_select(0, place.flatten()).view_as(place)
    return is_exact, rows, is_key


def _with_sinks(
    sinks: Sinks, keys: Tensor, values: Tensor, log_counts: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Columns (T, H, K, D) and their log counts (T, H, K), with the sinks at the end."""
    keys, values = (
        torch.cat([x, sink.expand(len(x), -1, -1, -1)], dim=2)
        for x, sink in zip((keys, values), sinks, strict=True)
    )
    return keys, values, F.pad(log_counts, (0, sinks.keys.shape[1]))


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
