"""AVQ attention in plain PyTorch, at O(M N) on every device.

Each leaf's keys are summarized once, by their count n and the mean of their values. Every query
tile attends to all parents and to the children of the parents that it refines:

    y = sum_a n_a exp(s q.c_a) mean_a / sum_a n_a exp(s q.c_a)

A tile refines the parents with the largest importance, or importance times spread if means
represent the keys. A refined parent stands only for the keys that stay with it, so this matches the
definition for any codebook. Exact keys and sink keys are further columns, of one key each; a leaf
whose keys are exact stands for none. There are no atomics and no data-dependent shapes: every run
gives the same bits, and the host never waits for the device. Half precision is computed in float32.

On a CPU, batch elements run one after another, to stay in cache; elsewhere all at once, to save
launches.

Shapes: H heads (of all batch elements in a chunk), N queries, S keys, D head dim, M0 parents, C
children, P refined parents, T query tiles of I queries, V = M0 + P C visible codewords, E exact
keys, K columns.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from avq_diffusers.attention.own_codewords import codewords_and_leaves
from avq_diffusers.attention.tensors import Tensors
from avq_diffusers.codebook.assignment import across_heads, centre_of, chunk_length
from avq_diffusers.config import Spec

# Longest run of values summed serially.
RUN = 256

# Log count of an empty codeword: finite, because -inf minus -inf is NaN in an online softmax.
LOG_ZERO = -1e30


class CodewordTable(NamedTuple):
    """The codewords a tile can see. Per parent: one entry for all its keys, one for the keys that
    stay, one per child."""

    centre: Tensor  # (H, 1, D), subtracted from all keys and codewords
    codewords: Tensor  # (H, M0, 2 + C, D), representing the keys
    mean_values: Tensor  # (H, M0, 2 + C, D)
    counts: Tensor  # (H, M0, 2 + C) int64
    log_counts: Tensor  # (H, M0, 2 + C), at least `LOG_ZERO`
    # (H, M0), the variance of a cell's keys: their mean squared distance to their mean. None if
    # stored codewords represent the keys.
    spreads: Tensor | None


class KeysByLeaf(NamedTuple):
    """The keys that can be exact in a query tile, leaf by leaf."""

    most: int  # keys per tile, E
    keys: Tensor  # (S H, D)
    values: Tensor  # (S H, D)
    rows: Tensor  # (H S,) rows of `keys`, sorted by leaf
    starts: Tensor  # (H, M0, 2 + C), start of a codeword's keys in `rows`
    # (H, M0, 2 + C), at least `LOG_ZERO`: weight of a key's importance, the squared spread of the
    # codeword's keys.
    log_weights: Tensor


class SortedLeaves(NamedTuple):
    """The keys of all heads, leaf by leaf."""

    rows: Tensor  # (H S,) rows of tokens (S H, ...)
    edges: Tensor  # (H M0 (1 + C) + 1,), bounds of the leaves in `rows`
    shape: tuple[int, int, int]  # (H, M0, 1 + C)


class Sinks(NamedTuple):
    """The keys (H, any number, D) that every query attends to exactly, and their values."""

    keys: Tensor
    values: Tensor


class Summary(NamedTuple):
    """What the queries of a chunk of batch elements attend to."""

    leaf: Tensor  # (H, S) from `nearest_leaves`
    table: CodewordTable  # the codewords
    by_leaf: KeysByLeaf | None  # the keys that can be exact; None without exact keys
    sinks: Sinks | None  # None without sink keys

    @property
    def num_single(self) -> int:
        """Columns of a tile that hold one key: exact keys and sinks."""
        num_exact = 0 if self.by_leaf is None else self.by_leaf.most
        return num_exact + (0 if self.sinks is None else self.sinks.keys.shape[1])


class Columns(NamedTuple):
    """What query tiles attend to: visible codewords, exact keys, then sinks, K in total."""

    visible: Tensor  # (T, H, V) rows of the table
    key_rows: Tensor | None  # (T, H, E) rows of the exact keys; None without them
    keys: Tensor  # (T, H, K, D)
    values: Tensor  # (T, H, K, D)
    log_counts: Tensor  # (T, H, K), `LOG_ZERO` where there is no key


def avq_attention(tensors: Tensors, spec: Spec) -> Tensor:
    """Attention over codewords, refined per query tile; equal to `reference.avq_attention`.

    The codewords in `tensors` are float64 for float64 tokens, else float32. The output is a (B, H,
    N, D) view of (B, N, H, D) memory, in the order and dtype of the query.
    """
    batch, output = tensors.query.shape[0], empty_tokens(tensors.query)
    size = 1 if tensors.query.device.type == "cpu" else batch
    for start in range(0, batch, size):
        elements = slice(start, start + size)
        part = tensors.part(elements)
        attend(part, summarize(part, spec), output[elements], spec)
    return output


def empty_tokens(tokens: Tensor) -> Tensor:
    """Uninitialized (B, H, N, D) with the strides of (B, N, H, D) memory.

    Not a view: autograd refuses in-place changes to a view returned by an operator.
    """
    return torch.empty_permuted(
        tokens.shape, (0, 2, 1, 3), dtype=tokens.dtype, device=tokens.device
    )


def empty_shown(query: Tensor, query_tile: int) -> Tensor:
    """Uninitialized `Attended.shown` of a query (B, H, N, D)."""
    batch, heads, num_queries, _ = query.shape
    num_tiles = (num_queries + query_tile - 1) // query_tile
    return query.new_empty(batch, heads, num_tiles, 2, dtype=torch.int32)


def summarize(tensors: Tensors, spec: Spec) -> Summary:
    """The leaf of each key, and what represents the leaves; heads of all batch elements are
    flattened."""
    parents, children, leaf = codewords_and_leaves(tensors, spec)
    key, value = tensors.key.flatten(0, 1), tensors.value.flatten(0, 1)
    dtype = parents.dtype

    # Shifting all keys by one vector leaves the softmax unchanged, and small codewords round less.
    centre = centre_of(parents)
    key = key - centre
    features = torch.cat([value, key], dim=-1) if spec.means else value
    leaves = sort_leaves(leaf, spec.num_parents, 1 + spec.num_children)
    counts, sums = aggregate(leaves, features, dtype)
    sums = torch.cat([sums.sum(dim=2, keepdim=True), sums], dim=2)
    counts = torch.cat([counts.sum(dim=2, keepdim=True), counts], dim=2)
    averages = sums / counts.clamp(min=1)[..., None]
    head_dim = value.shape[-1]
    if spec.means:
        codewords = averages[..., head_dim:]
    else:
        parents, children = parents - centre, children - centre[:, None]
        codewords = torch.cat([parents[:, :, None].expand(-1, -1, 2, -1), children], dim=2)
    log_counts = counts.to(dtype).log().clamp(min=LOG_ZERO)

    spreads = by_leaf = sinks = None
    if spec.exact_keys:
        of_codewords = _spreads(key, leaf, leaves, codewords, counts, of_leaves=True)
        spreads = of_codewords[..., 0] if spec.means else None
        starts = leaves.edges[:-1].view(leaves.shape)
        by_leaf = KeysByLeaf(
            min(spec.exact_keys, key.shape[1]),
            key.transpose(0, 1).reshape(-1, head_dim),
            value.to(dtype).transpose(0, 1).reshape(-1, head_dim),
            leaves.rows,
            torch.cat([starts[..., :1], starts], dim=-1),
            (2 * of_codewords.log()).clamp(min=LOG_ZERO),
        )
    elif spec.means:
        spreads = _spreads(key, leaf, leaves, codewords, counts, of_leaves=False)[..., 0]
    if tensors.sink_key is not None and tensors.sink_value is not None:
        sink_key, sink_value = tensors.sink_key.flatten(0, 1), tensors.sink_value.flatten(0, 1)
        sinks = Sinks(sink_key - centre, sink_value.to(dtype))
    mean_values = averages[..., :head_dim]
    table = CodewordTable(centre, codewords, mean_values, counts, log_counts, spreads)
    return Summary(leaf, table, by_leaf, sinks)


def _spreads(
    key: Tensor,
    leaf: Tensor,
    leaves: SortedLeaves,
    codewords: Tensor,
    counts: Tensor,
    *,
    of_leaves: bool,
) -> Tensor:
    """Variance of each cell's keys (H, S, D) around what represents it, (H, M0, 1); with
    `of_leaves` also each leaf's, (H, M0, 2 + C) in all."""
    num_parents, per_cell = counts.shape[1:]
    cell = leaf // (per_cell - 1)
    rows = [cell * per_cell]
    if of_leaves:
        rows.append(leaf + cell + 1)
    # Moments about the centre would cancel for small cells far from it.
    distances = []
    for row in rows:
        row = across_heads(row, num_parents * per_cell)
        codeword = codewords.flatten(0, 2).index_select(0, row.flatten())
        distances.append(codeword.view_as(key).sub_(key).square_().sum(dim=-1))
    _, sums = aggregate(leaves, torch.stack(distances, dim=-1), key.dtype)
    sums = torch.cat([sums[..., :1].sum(dim=2), *sums[..., 1:].unbind(dim=-1)], dim=2)
    return sums / counts[..., : sums.shape[2]].clamp(min=1)


def sort_leaves(leaf: Tensor, num_parents: int, num_leaves: int) -> SortedLeaves:
    """Sort keys by `leaf` (H, S), then by index; a parent has `num_leaves`, 1 + C."""
    shape = len(leaf), num_parents, num_leaves
    leaf = across_heads(leaf, num_parents * num_leaves)
    leaf, rows = leaf.t().flatten().sort(stable=True)
    bounds = torch.arange(shape[0] * num_parents * num_leaves + 1, device=leaf.device)
    return SortedLeaves(rows, torch.searchsorted(leaf, bounds), shape)


def aggregate(leaves: SortedLeaves, features: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Count the keys and sum the features of each leaf (paper, Algorithm 1, for leaves only).

    Args:
        features: (H, S, F), values, or values and keys.

    Returns:
        counts: (H, M0, 1 + C) int64; leaf 0 counts the keys that stay with the parent.
        sums: (H, M0, 1 + C, F) of `dtype`.
    """
    width = features.shape[-1]
    # Sum runs, then leaves: long leaves neither lose precision nor stall a GPU.
    runs = torch.arange(0, len(leaves.rows), RUN, device=features.device)
    cuts = torch.cat([leaves.edges, runs]).sort().values
    tokens = features.transpose(0, 1).reshape(-1, width).to(dtype)
    run_sums = F.embedding_bag(leaves.rows, tokens, cuts, mode="sum", include_last_offset=True)
    run = torch.arange(len(run_sums), device=features.device)
    first_run = torch.searchsorted(cuts, leaves.edges[:-1])
    sums = F.embedding_bag(run, run_sums, first_run, mode="sum")
    return leaves.edges.diff().view(leaves.shape), sums.view(*leaves.shape, width)


def attend(tensors: Tensors, summary: Summary, output: Tensor, spec: Spec) -> None:
    """Softmax over each query tile's columns (paper, Algorithm 2, without correction).

    Writes `output` (B, H, N, D) of the summarized batch elements, in the order of the query.
    """
    query, table = tensors.query.flatten(0, 1), summary.table
    if spec.num_refined == 0 and summary.by_leaf is None:
        # All tiles have the same columns.
        of_cells = table.codewords, table.mean_values, table.log_counts
        keys, values, log_counts = (x[None, :, :, 0].contiguous() for x in of_cells)
        if summary.sinks is not None:
            keys, values, log_counts = _with_sinks(summary.sinks, keys, values, log_counts)
        whole = _attention(query[None], keys, values, log_counts, tensors.scale)
        output.copy_(whole[0].unflatten(0, output.shape[:2]))
        return

    heads, num_queries, head_dim = query.shape
    query_tile = min(spec.query_tile, num_queries)
    tile_elements = 2 * head_dim * (spec.num_visible + summary.num_single)
    row_elements = spec.num_parents + tile_elements // query_tile
    if summary.by_leaf is not None:
        row_elements += spec.num_visible
    chunk = chunk_length(query.device, heads * row_elements)
    for order, tiles, columns in tiles_and_columns(tensors, summary, spec, chunk // query_tile):
        tile_output = _attention(
            tiles.transpose(0, 1), columns.keys, columns.values, columns.log_counts, tensors.scale
        )
        write_tiles(output, tile_output.transpose(0, 1), order)


def tiles_and_columns(
    tensors: Tensors, summary: Summary, spec: Spec, num_tiles: int
) -> Iterator[tuple[Tensor | slice, Tensor, Columns]]:
    """Query tiles with their positions and columns; up to `num_tiles`, at least 1, at a time.

    Yields the positions of the queries, tiles (H, T, I, D) from `cut_tiles`, and their columns.
    """
    query, query_order = tensors.query.flatten(0, 1), tensors.query_order
    num_queries = query.shape[1]
    query_tile = min(spec.query_tile, num_queries)
    chunk = max(1, num_tiles) * query_tile
    for start in range(0, num_queries, chunk):
        stop = min(start + chunk, num_queries)
        order = slice(start, stop) if query_order is None else query_order[start:stop].long()
        tiles = cut_tiles(query, order, query_tile, summary.table.codewords.dtype)
        yield order, tiles, _columns(tiles, summary, spec, tensors.scale, stop - start)


def _columns(
    tiles: Tensor, summary: Summary, spec: Spec, scale: float, num_queries: int
) -> Columns:
    """Choose the refined parents and exact keys of each tile (H, T, I, D).

    Queries from `num_queries` on are padding.
    """
    table, by_leaf = summary.table, summary.by_leaf
    log_mass = torch.baddbmm(
        table.log_counts[:, None, :, 0],
        tiles.flatten(1, 2),
        table.codewords[:, :, 0].transpose(1, 2),
        alpha=scale,
    )
    mass = log_mass.softmax(dim=-1)
    mass[:, num_queries:] = 0
    score = mass.unflatten(1, tiles.shape[1:3]).sum(dim=2)
    if table.spreads is not None:
        score = score * table.spreads[:, None]
    visible = _visible_codewords(score, table, spec.num_refined, in_order=by_leaf is not None)
    keys = gather_rows(table.codewords, visible)
    values = gather_rows(table.mean_values, visible)
    log_counts = gather_rows(table.log_counts, visible)

    key_rows = None
    if by_leaf is not None:
        log_denominator = log_mass.logsumexp(dim=-1, keepdim=True)
        log_denominator[:, num_queries:] = torch.inf
        log_shares = torch.baddbmm(
            -log_denominator.unflatten(1, tiles.shape[1:3]).transpose(0, 1).flatten(0, 1),
            tiles.transpose(0, 1).flatten(0, 1),
            keys.flatten(0, 1).mT,
            alpha=scale,
        ).unflatten(0, visible.shape[:2])
        log_shares += gather_rows(by_leaf.log_weights, visible)[:, :, None]
        # The sums themselves may underflow.
        ranking = log_shares.logsumexp(dim=2).sort(dim=-1, descending=True, stable=True).indices
        is_exact, key_rows, is_key = _choose_exact(ranking, visible, table.counts, by_leaf)
        log_counts = log_counts.masked_fill(is_exact, LOG_ZERO)
        keys, values = (
            torch.cat([x, _take(of_leaves, key_rows)], dim=2)
            for x, of_leaves in ((keys, by_leaf.keys), (values, by_leaf.values))
        )
        of_keys = log_counts.new_zeros(is_key.shape).masked_fill_(~is_key, LOG_ZERO)
        log_counts = torch.cat([log_counts, of_keys], dim=2)
    if summary.sinks is not None:
        keys, values, log_counts = _with_sinks(summary.sinks, keys, values, log_counts)
    return Columns(visible, key_rows, keys, values, log_counts)


def _visible_codewords(
    score: Tensor, table: CodewordTable, num_refined: int, *, in_order: bool
) -> Tensor:
    """Choose the parents with the largest scores (H, T, M0); return the codewords each tile sees.

    These are (T, H, V) int64 rows of the table, heads concatenated; with `in_order` in the
    definition's order: cells, what stays with refined parents, their children.
    """
    num_parents, per_cell = table.counts.shape[1:]
    # topk leaves the order of ties undefined.
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
    ranking: Tensor, visible: Tensor, counts: Tensor, by_leaf: KeysByLeaf
) -> tuple[Tensor, Tensor, Tensor]:
    """The highest-ranked codewords (T, H, V) whose keys fit the budget, and these keys.

    Returns whether each codeword is exact, (T, H, V); the rows of the keys, (T, H, E), arbitrary
    where there is none; and whether there is one, (T, H, E).
    """
    ranked = visible.gather(-1, ranking)
    counts = gather_rows(counts, ranked)
    ends = counts.cumsum(dim=-1)
    fits = ends <= by_leaf.most
    is_exact = torch.zeros_like(fits).scatter_(-1, ranking, fits)

    place = torch.arange(by_leaf.most, device=ends.device).expand(*ends.shape[:2], -1).contiguous()
    rank = torch.searchsorted(ends, place, right=True)
    is_key = fits.gather(-1, rank)
    starts = gather_rows(by_leaf.starts, ranked) - ends + counts
    place = torch.where(is_key, place + starts.gather(-1, rank), 0)
    return is_exact, _take(by_leaf.rows, place), is_key


def _with_sinks(
    sinks: Sinks, keys: Tensor, values: Tensor, log_counts: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Columns (T, H, K, D) and log counts (T, H, K), with the sinks appended."""
    keys, values = (
        torch.cat([x, sink.expand(len(x), -1, -1, -1)], dim=2)
        for x, sink in zip((keys, values), sinks, strict=True)
    )
    return keys, values, F.pad(log_counts, (0, sinks.keys.shape[1]))


def gather_rows(column: Tensor, visible: Tensor) -> Tensor:
    """Rows (T, H, M0 + P C, ...) of a table's column (H, M0, 2 + C, ...)."""
    return _take(column.flatten(0, 2), visible)


def _take(rows: Tensor, index: Tensor) -> Tensor:
    return rows.index_select(0, index.flatten()).unflatten(0, index.shape)


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
    """Write tiles (H, T, I, D) to tokens (B, H / B, N, D), where `cut_tiles` found them.

    Args:
        tokens: a view of (B, N, H, D) memory, and written as such: with one head, deterministic
            `index_copy_` on a GPU mistakes the view's strides for contiguous ones.
    """
    tiles = tiles.flatten(1, 2).unflatten(0, tokens.shape[:2]).transpose(1, 2)
    memory = tokens.transpose(1, 2)
    if isinstance(order, slice):
        target = memory[:, order]
        target.copy_(tiles[:, : target.shape[1]])
    else:
        memory.index_copy_(1, order, tiles[:, : len(order)].to(memory.dtype))


def _attention(
    query: Tensor, codewords: Tensor, mean_values: Tensor, log_counts: Tensor, scale: float
) -> Tensor:
    """Attention over codewords of n keys each. Inputs are 4-D: with 3-D inputs, SDPA takes its
    slow path."""
    return F.scaled_dot_product_attention(
        query.to(codewords.dtype),
        codewords,
        mean_values,
        attn_mask=log_counts[..., None, :],
        scale=scale,
    )
