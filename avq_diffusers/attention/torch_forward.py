"""AVQ attention in plain PyTorch, at linear cost on every device.

Each cell and leaf is summarized once, by its count n, what represents its keys, the mean of their
values and the variance of its keys. Every query tile attends to a list of columns: codewords, which
are cells or leaves, the keys of exact leaves, and sinks. A column a has a key c_a, a value v_a, a
count n_a (1 for a key) and a spread s_a (0 for a key):

    y = sum_a n_a exp(s q.c_a) v_a / sum_a n_a exp(s q.c_a)

All columns are rows of one table. Its keys carry log n_a as one more channel, which meets a 1 in
the queries, and its values the spread, so one attention gives y and the spread r that a query sees.
With the matrix C of a head, the first-order term r / (1 + r |s q|^2 / D) C s q follows.

A refined cell stands only for the keys that stay with it, so this matches the definition for any
codebook. With `num_refined` all tiles have as many columns. With a threshold their numbers depend
on the data: the host waits to read which cells any tile refines, whose leaves alone are scored, and
how many columns tiles have. Tiles with similar numbers attend together. There are no atomics: every
run gives the same bits. Half precision is computed in float32.

Batch elements run in chunks: few on a CPU, to stay in cache; many elsewhere, to save launches.

Shapes: H heads (of all batch elements in a chunk), N queries, S keys, D head dim, M0 parents, C
children, T query tiles of I queries, R = M0 (2 + C) codewords, G pairs of a head and a tile, K
columns, W channels of a row.
"""

import math
from bisect import bisect_right
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from avq_diffusers.attention.own_codewords import assigned
from avq_diffusers.attention.tensors import (
    LEAST_OF_ALL,
    LEAST_OF_CELLS,
    SAMPLE,
    SAMPLED_FROM,
    TANGENT_FROM,
    Tensors,
    empty_shown,
    empty_tokens,
)
from avq_diffusers.codebook.assignment import ELEMENTS, Groups, chunk_length, grouped
from avq_diffusers.config import Spec

# Longest run of values summed serially.
RUN = 256

# Log count of an empty codeword: finite, because -inf minus -inf is NaN in an online softmax.
LOG_ZERO = -1e30

# Lists of columns are padded to multiples of this: products of other sizes take up to 1.4 times as
# long on a CPU.
ALIGNED = 16

# Share of the longest list of columns that lists padded to its length have at least.
SIMILAR = 0.75


class CellCodewords(NamedTuple):
    """Of every parent: its whole cell, what stays with it, its children.

    With means, the keys are around the centre of their head.
    """

    keys: Tensor  # (H, M0, 2 + C, D)
    values: Tensor  # (H, M0, 2 + C, D), means
    counts: Tensor  # (H, M0, 2 + C) int64
    # (H, M0, 2 + C), the variance of the keys; None if stored codewords represent the keys.
    spreads: Tensor | None = None


class KeySummary(NamedTuple):
    """What the queries of a chunk of batch elements attend to.

    Attributes:
        leaves: the keys.
        keys, values: (rows, W), the table: codewords (H R), with a threshold the keys (H S), sinks,
            and a row that stands for no key.
        key_rows, sink_rows: where in the table keys and sinks are.
        offsets: (H S, D), keys minus the means of their leaves; None if stored codewords represent
            them.
        matrix: (H, D, D), the first-order term's C; None without it.
    """

    leaves: Groups
    codewords: CellCodewords
    keys: Tensor
    values: Tensor
    key_rows: slice
    sink_rows: slice
    offsets: Tensor | None
    matrix: Tensor | None

    @property
    def num_sinks(self) -> int:
        """Of a head."""
        return (self.sink_rows.stop - self.sink_rows.start) // len(self.codewords.counts)


class QueryTiles(NamedTuple):
    """How queries are cut into tiles."""

    order: Tensor | None  # (N,) int64; None is the order of the queries
    num_queries: int
    length: int

    @staticmethod
    def of(tensors: Tensors, length: int) -> "QueryTiles":
        """Tiles of at most `length` queries."""
        order, num_queries = tensors.query_order, tensors.query.shape[2]
        return QueryTiles(
            None if order is None else order.long(), num_queries, min(length, num_queries)
        )

    @property
    def number(self) -> int:
        """T."""
        return -(-self.num_queries // self.length)

    def cut(self, tokens: Tensor, dtype: torch.dtype) -> Tensor:
        """Tokens (B, H, N, D) as (B H T, I, W), padded with 0."""
        tokens = tokens.flatten(0, 1)
        if self.order is not None:
            tokens = tokens.transpose(0, 1).index_select(0, self.order).transpose(0, 1)
        size = len(tokens), self.number * self.length, width(tokens.shape[2])
        tiles = tokens.new_zeros(size, dtype=dtype)
        tiles[:, : self.num_queries, : tokens.shape[2]] = tokens
        return tiles.view(-1, self.length, tiles.shape[2])

    def deciding(self, sampled: bool, device: torch.device) -> tuple[Tensor, Tensor]:
        """Places (T, J) of the queries in each tile that decide its columns, and whether there is
        one.

        Args:
            sampled: whether `SAMPLE` queries of a tile decide, if there are many in all.
        """
        number = self.length
        if sampled and self.num_queries >= SAMPLED_FROM:
            number = min(SAMPLE, self.length)
        first = torch.arange(0, self.num_queries, self.length, device=device)[:, None]
        lengths = (self.num_queries - first).clamp(max=self.length)
        slot = torch.arange(number, device=device) * lengths.clamp(min=number) // number
        return slot, slot < lengths

    def write(self, tokens: Tensor, tiles: Tensor) -> None:
        """Write tiles (B H T, I, D) to the tokens that they were cut from.

        Args:
            tokens: (B, H, N, D) view of (B, N, H, D) memory, and written as such: with one head,
                deterministic `index_copy_` on a GPU mistakes the view's strides for contiguous
                ones.
        """
        batch, heads = tokens.shape[:2]
        found = tiles.reshape(batch, heads, -1, tiles.shape[2])[:, :, : self.num_queries]
        memory, found = tokens.transpose(1, 2), found.transpose(1, 2)
        if self.order is None:
            memory.copy_(found)
        else:
            memory.index_copy_(1, self.order, found.to(memory.dtype))


def avq_attention(tensors: Tensors, spec: Spec) -> tuple[Tensor, Tensor]:
    """`Attended.output` and `Attended.shown`; the output equals `reference.avq_attention`.

    The codewords in `tensors` are float64 for float64 tokens, else float32. The output is a (B, H,
    N, D) view of (B, N, H, D) memory, in the order and dtype of the query.
    """
    query = tensors.query
    output, shown = empty_tokens(query), empty_shown(query, spec.query_tile)
    # All queries see the same columns where no parent is refined.
    tiles = QueryTiles.of(tensors, query.shape[2] if spec.num_refined == 0 else spec.query_tile)
    size = chunk_length(query.device, query[0].numel())
    for start in range(0, len(query), size):
        elements = slice(start, start + size)
        part = tensors.part(elements)
        summary = summarize(part, spec)
        queries = tile_queries(part, tiles, summary)
        chosen = choose(queries, summary, tiles, spec)
        num_shown = chosen.shown(summary.codewords.counts)
        shown[elements] = num_shown.unflatten(0, (-1, query.shape[1]))
        attended = attend(queries, summary, chosen)
        if summary.matrix is not None:
            attended = with_first_order(queries, summary.matrix, attended)
        tiles.write(output[elements], attended[..., : query.shape[3]])
    return output, shown


def width(head_dim: int) -> int:
    """Channels of a row: one more than D, and a multiple of 4 for the fast attention of GPUs."""
    return head_dim // 4 * 4 + 4


def summarize(tensors: Tensors, spec: Spec) -> KeySummary:
    """What represents the keys; heads of all batch elements are flattened."""
    centre, key, parents, children, leaf = assigned(tensors, spec)
    dtype, head_dim = key.dtype, key.shape[2]
    key, value = key.flatten(0, 1), tensors.value.flatten(0, 2).to(dtype)
    sizes = len(parents), spec.num_parents, 1 + spec.num_children
    leaves = grouped(leaf, sizes[1] * sizes[2])
    counts = _with_cells(leaves.edges.diff().view(sizes))
    offsets = matrix = None
    if spec.means:
        codewords, offsets = _means(key, value, leaves, counts)
        if tensors.parents is None:
            # Offsets add up to 0 in a leaf, so the mean of its values has no part in this.
            values, head_offsets = (x.unflatten(0, (len(parents), -1)) for x in (value, offsets))
            matrix = values.mT @ head_offsets / variance_of(codewords)
    else:
        cells = torch.cat([parents[:, :, None].expand(-1, -1, 2, -1), children], dim=2)
        codewords = CellCodewords(cells, _averages(value, leaves, counts), counts)

    first = counts.numel()
    key_rows = slice(first, first + (len(key) if spec.num_refined is None else 0))
    sink_key, sink_value = tensors.sink_key, tensors.sink_value
    num_sinks = 0 if sink_key is None else sink_key.shape[2]
    sink_rows = slice(key_rows.stop, key_rows.stop + len(parents) * num_sinks)
    keys, values = centre.new_zeros(2, sink_rows.stop + 1, width(head_dim))
    keys[:first, :head_dim] = codewords.keys.flatten(0, 2)
    keys[:first, head_dim] = counts.flatten().to(dtype).log().clamp(min=LOG_ZERO)
    keys[-1, head_dim].fill_(LOG_ZERO)
    values[:first, :head_dim] = codewords.values.flatten(0, 2)
    if codewords.spreads is not None:
        values[:first, head_dim] = codewords.spreads.flatten()
    if spec.num_refined is None:
        keys[key_rows, :head_dim], values[key_rows, :head_dim] = key, value
    if sink_key is not None and sink_value is not None:
        keys[sink_rows, :head_dim] = (sink_key.flatten(0, 1) - centre).flatten(0, 1)
        values[sink_rows, :head_dim] = sink_value.flatten(0, 2)
    return KeySummary(leaves, codewords, keys, values, key_rows, sink_rows, offsets, matrix)


def _means(
    key: Tensor, value: Tensor, leaves: Groups, counts: Tensor
) -> tuple[CellCodewords, Tensor]:
    """Codewords of keys and values (H S, D), and `KeySummary.offsets`."""
    keys, values = (_averages(x, leaves, counts) for x in (key, value))
    offsets = offsets_to(keys, key, leaves)
    distances = torch.linalg.vector_norm(offsets, dim=1, keepdim=True).square_()
    inside = sum_groups(distances, leaves).view_as(counts[:, :, 1:])
    # A leaf's keys around the mean of its cell. Moments about the centre would cancel for small
    # cells far from it.
    between = (keys[:, :, 1:] - keys[:, :, :1]).square().sum(dim=-1)
    cell_sums = (inside + counts[:, :, 1:] * between).sum(dim=2, keepdim=True)
    spreads = torch.cat([cell_sums, inside], dim=2) / counts.clamp(min=1)
    return CellCodewords(keys, values, counts, spreads), offsets


def offsets_to(means: Tensor, tokens: Tensor, leaves: Groups) -> Tensor:
    """Tokens (H S, D) minus the means (H, M0, 2 + C, D) of their leaves."""
    return tokens - means[:, :, 1:].flatten(0, 2).index_select(0, leaves.number)


def _averages(tokens: Tensor, leaves: Groups, counts: Tensor) -> Tensor:
    """Means (H, M0, 2 + C, F) of tokens (H S, F) over those of each codeword."""
    heads, num_parents, per_parent = counts.shape
    sums = sum_groups(tokens, leaves).view(heads, num_parents, per_parent - 1, -1)
    return _with_cells(sums) / counts.clamp(min=1)[..., None]


def _with_cells(leaf_sums: Tensor) -> Tensor:
    """Sums or counts (H, M0, 1 + C, ...) of leaves as those of codewords, (H, M0, 2 + C, ...)."""
    return torch.cat([leaf_sums.sum(dim=2, keepdim=True), leaf_sums], dim=2)


def variance_of(codewords: CellCodewords) -> Tensor:
    """What C is divided by, (H, 1, 1): the sum of the keys' squared distances to the means of
    their leaves; infinity without a first-order term."""
    assert codewords.spreads is not None  # own codewords are means
    variances = (codewords.counts * codewords.spreads).sum(dim=1)
    between = (codewords.counts[:, :, :1] * codewords.keys[:, :, 0].square()).sum(dim=(1, 2))
    inside, around_cells = variances[:, 1:].sum(dim=1), variances[:, 0]
    least = LEAST_OF_CELLS * around_cells + LEAST_OF_ALL * (between + around_cells)
    return inside.where(inside > least, torch.inf)[:, None, None]


def sum_groups(tokens: Tensor, groups: Groups) -> Tensor:
    """Sum tokens (H S, F) over each group, (all groups, F) (paper, Algorithm 1)."""
    # Sum runs, then groups: long ones neither lose precision nor stall a GPU.
    runs = torch.arange(0, len(tokens), RUN, device=tokens.device)
    cuts = torch.cat([groups.edges, runs]).sort().values
    run_sums = F.embedding_bag(groups.rows, tokens, cuts, mode="sum", include_last_offset=True)
    first_run = torch.searchsorted(cuts, groups.edges[:-1])
    index = torch.arange(len(run_sums), device=tokens.device)
    return F.embedding_bag(index, run_sums, first_run, mode="sum")


def tile_queries(tensors: Tensors, tiles: QueryTiles, summary: KeySummary) -> Tensor:
    """Queries (H T, I, W), times the scale, and a 1 that meets log counts."""
    queries = tiles.cut(tensors.query, summary.keys.dtype)
    queries *= tensors.scale
    queries[..., tensors.query.shape[3]] = 1
    return queries


class Chosen(NamedTuple):
    """The columns of every query tile.

    Attributes:
        spans: (H, T, R) int32, columns that stand for the keys of a codeword: itself, its keys, or
            none.
        number: the columns of every tile without sinks; None if tiles differ.
    """

    spans: Tensor
    number: int | None

    def shown(self, counts: Tensor) -> Tensor:
        """(H, T, 2) int32 numbers of codewords that hold keys, and of keys."""
        has_keys = counts.flatten(1)[:, None] > 0
        keys = self.spans.where(self.spans > 1, 0).sum(dim=-1)
        codewords = ((self.spans == 1) & has_keys).sum(dim=-1)
        return torch.stack([codewords, keys], dim=-1).int()

    def lists(
        self, summary: KeySummary, elements: Callable[[int], int], most: int = ELEMENTS
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Pairs (G,) of a head and a tile, and the rows (G, K) of the table that they attend to.

        Args:
            summary: what the rows are taken from.
            elements: numbers in the intermediates of a pair with so many columns.
            most: numbers in those of all pairs at a time, except on a CPU.
        """
        numbers, device = self.spans.sum(dim=-1).flatten(), self.spans.device
        if self.number is None:
            lengths, order = numbers.sort(descending=True, stable=True)
            longest = lengths.tolist()
        else:
            longest, order = [self.number] * len(numbers), torch.arange(len(numbers), device=device)
        rows, firsts = self._rows(summary, sum(longest)), numbers.cumsum(dim=0) - numbers
        start, sinks = 0, summary.num_sinks
        while start < len(order):
            number = longest[start]
            length = chunk_length(device, elements(number + sinks), most)
            similar = bisect_right(longest, -SIMILAR * number, key=lambda number: -number)
            pairs = order[start : min(start + length, similar)]
            slot = torch.arange(number, device=device)
            is_row = slot < numbers[pairs, None]
            slot = (firsts[pairs, None] + slot).clamp(max=len(rows) - 1)
            listed = rows[slot].where(is_row, len(summary.keys) - 1)
            if sinks:
                sink_numbers = pairs // self.spans.shape[1] * sinks + summary.sink_rows.start
                sink_numbers = sink_numbers[:, None] + torch.arange(sinks, device=device)
                listed = torch.cat([listed, sink_numbers], dim=1)
            yield pairs, F.pad(listed, (0, -listed.shape[1] % ALIGNED), value=len(summary.keys) - 1)
            start += len(pairs)

    def _rows(self, summary: KeySummary, total: int) -> Tensor:
        """The rows of all pairs, one pair after the other, without sinks: `total` in number."""
        _, num_tiles, per_head = self.spans.shape
        spans, device = self.spans.flatten().long(), self.spans.device
        entry = torch.repeat_interleave(spans, output_size=total)
        slot = torch.arange(total, device=device) - (spans.cumsum(dim=0) - spans)[entry]
        codeword = entry // (num_tiles * per_head) * per_head + entry % per_head
        counts, leaves = summary.codewords.counts, summary.leaves
        firsts = leaves.edges[:-1].view(*counts.shape[:2], -1)
        firsts = torch.cat([firsts[..., :1], firsts], dim=-1).flatten()
        slot = (firsts[codeword] + slot).clamp(max=len(leaves.rows) - 1)
        key = summary.key_rows.start + leaves.rows[slot]
        return torch.where(spans[entry] > 1, key, codeword)


def choose(queries: Tensor, summary: KeySummary, tiles: QueryTiles, spec: Spec) -> Chosen:
    """The columns of each tile of queries (H T, I, W)."""
    counts = summary.codewords.counts
    if spec.num_refined == 0:
        cells = (torch.arange(counts.shape[2], device=counts.device) == 0).int()
        return Chosen(cells.repeat(len(counts), tiles.number, counts.shape[1]), spec.columns)
    slot, is_query = tiles.deciding(spec.threshold is not None, queries.device)
    queries = queries.unflatten(0, (len(counts), -1))
    if slot.shape[1] < queries.shape[2]:
        slot = slot[..., None].expand(len(counts), -1, -1, queries.shape[3])
        queries = queries.gather(2, slot)

    length = chunk_length(queries.device, len(counts) * is_query.shape[1] * counts[0].numel())
    parts = zip(queries.split(length, dim=1), is_query.split(length), strict=True)
    spans_of = _spans_of_threshold if spec.num_refined is None else _spans_of_refined
    spans = [spans_of(*part, summary, spec) for part in parts]
    return Chosen(torch.cat(spans, dim=1), spec.columns)


def _spans_of_refined(queries: Tensor, is_query: Tensor, summary: KeySummary, spec: Spec) -> Tensor:
    """`Chosen.spans` of tiles that refine as many cells, from their queries (H, T, I, W); others
    (T, I) are padding."""
    codewords = summary.codewords
    cells = _keys_of(summary)[:, :, 0]
    score = (queries.flatten(1, 2) @ cells.mT).softmax(dim=-1).unflatten(1, is_query.shape)
    score[:, ~is_query] = 0
    score = score.sum(dim=2)
    if codewords.spreads is not None:
        score = score * codewords.spreads[:, None, :, 0]
    # topk leaves the order of ties undefined.
    ranking = score.sort(dim=-1, descending=True, stable=True).indices
    refined = torch.zeros_like(score, dtype=torch.bool)
    refined = refined.scatter_(-1, ranking[..., : spec.num_refined], True)[..., None]
    leaf_spans = refined.expand(*score.shape, codewords.counts.shape[2] - 1)
    return torch.cat([~refined, leaf_spans], dim=-1).flatten(2).int()


def _spans_of_threshold(
    queries: Tensor, is_query: Tensor, summary: KeySummary, spec: Spec
) -> Tensor:
    """`Chosen.spans` of tiles, from the queries (H, T, J, W) that decide; others (T, J) are
    padding."""
    counts, spreads = summary.codewords.counts, summary.codewords.spreads
    assert spreads is not None  # a threshold needs means
    keys, head_dim = _keys_of(summary), summary.codewords.keys.shape[3]
    flat = queries.flatten(1, 2)
    size = queries[..., :head_dim].square().sum(dim=(2, 3)) / (head_dim * is_query.sum(dim=-1))
    size = size[..., None]
    logits = flat @ keys[:, :, 0].mT
    seen = logits
    if summary.num_sinks:
        sinks = summary.keys[summary.sink_rows].unflatten(0, (len(counts), -1))
        seen = torch.cat([seen, flat @ sinks.mT], dim=-1)
    denominator = seen.logsumexp(dim=-1, keepdim=True)
    denominator.unflatten(1, is_query.shape)[:, ~is_query] = torch.inf

    def masses(logits: Tensor) -> Tensor:
        """Mean attention of the queries, (H, T, any), whose denominator is that of all cells."""
        shares = logits.sub_(denominator).exp_().unflatten(1, is_query.shape)
        return shares.sum(dim=2) / is_query.sum(dim=-1)[:, None]

    inside = (counts * spreads)[..., 1:].sum(dim=-1) / counts[..., 0].clamp(min=1)
    further = ((counts[..., 1:] > 0).sum(dim=-1) - 1)[:, None]
    gain = growth(size * spreads[:, None, :, 0]) - growth(size * inside[:, None])
    # NaN, such as that of a query, is worth a column.
    refined = ~(masses(logits) * gain / further.clamp(min=1) <= spec.limit) | (further <= 0)

    # Leaves matter only in cells that a tile refines, and if they have several keys.
    is_open = refined.any(dim=1) & (counts[..., 1:] > 1).any(dim=-1)
    head = torch.arange(len(counts), device=counts.device)[:, None]
    opened = is_open.sort(dim=1, descending=True, stable=True).indices
    opened = opened[:, : int(is_open.sum(dim=1).max())]
    leaf_spans = counts[:, None, :, 1:].int().clamp(max=1).repeat(1, refined.shape[1], 1, 1)
    leaves, sizes = keys[head, opened, 1:], counts[head, opened, 1:].int()[:, None]
    gain = masses(flat @ leaves.flatten(1, 2).mT).unflatten(-1, leaves.shape[1:3])
    gain *= growth(size[..., None] * spreads[head, opened, 1:][:, None]) / sizes.clamp(min=1)
    finest = torch.where(gain <= spec.limit, sizes.clamp(max=1), sizes)
    leaf_spans[head, :, opened] = finest.transpose(1, 2)
    cell_spans = ~refined & (counts[:, None, :, 0] > 0)
    return torch.cat([cell_spans[..., None], leaf_spans * refined[..., None]], dim=-1).flatten(2)


def _keys_of(summary: KeySummary) -> Tensor:
    """Codewords with their log counts, (H, M0, 2 + C, W)."""
    counts = summary.codewords.counts
    return summary.keys[: counts.numel()].unflatten(0, counts.shape)


def growth(x: Tensor) -> Tensor:
    """How much the attention to a leaf exceeds that to its mean, by the variance of its logits."""
    slope = math.exp(TANGENT_FROM)
    return torch.expm1(x.clamp(max=TANGENT_FROM)) + slope * (x - TANGENT_FROM).clamp(min=0)


def attend(queries: Tensor, summary: KeySummary, chosen: Chosen) -> Tensor:
    """Softmax over each tile's columns: outputs and the spreads seen, of queries (H T, I, W)."""
    attended = torch.empty_like(queries)
    tile, channels = queries.shape[1:]

    def elements(columns: int) -> int:
        return 2 * channels * (tile + columns)

    for pairs, rows in chosen.lists(summary, elements):
        keys, values = (take(x, rows)[:, None] for x in (summary.keys, summary.values))
        # With 3-D inputs, SDPA takes its slow path.
        found = F.scaled_dot_product_attention(queries[pairs, None], keys, values, scale=1.0)
        attended.index_copy_(0, pairs, found[:, 0])
    return attended


def take(table: Tensor, rows: Tensor) -> Tensor:
    """Rows (G, K) of a table (rows, W), as (G, K, W)."""
    return table.index_select(0, rows.flatten()).unflatten(0, rows.shape)


def with_first_order(queries: Tensor, matrix: Tensor, attended: Tensor) -> Tensor:
    """What was attended to (H T, I, W), and the first-order term of C (H, D, D)."""
    head_dim = matrix.shape[1]
    scaled, seen = queries[..., :head_dim], attended[..., head_dim, None]
    following = scaled.unflatten(0, (len(matrix), -1)).flatten(1, 2) @ matrix.mT
    size = torch.linalg.vector_norm(scaled, dim=-1, keepdim=True).square_() / head_dim
    share = seen / size.mul_(seen).add_(1)
    return attended[..., :head_dim].addcmul_(share, following.view(scaled.shape))
