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
on the data: the host waits once per call to read them, sorts the tiles by their number of columns
and attends to similar ones together. There are no atomics: every run gives the same bits. Half
precision is computed in float32.

On a CPU, batch elements run one after another, to stay in cache; elsewhere all at once, to save
launches.

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

from avq_diffusers.attention.own_codewords import codewords_and_leaves
from avq_diffusers.attention.tensors import SAMPLE, SAMPLED_FROM, TANGENT_FROM, Tensors
from avq_diffusers.codebook.assignment import ELEMENTS, across_heads, centre_of, chunk_length
from avq_diffusers.config import Spec

# Longest run of values summed serially.
RUN = 256

# Log count of an empty codeword: finite, because -inf minus -inf is NaN in an online softmax.
LOG_ZERO = -1e30

# Share of the longest list of columns that lists padded to its length have at least.
SIMILAR = 0.75


class Leaves(NamedTuple):
    """The keys of all heads, leaf by leaf."""

    rows: Tensor  # (H S,) rows of tokens (S H, ...)
    leaf: Tensor  # (H S,) leaf of each, numbered over heads
    edges: Tensor  # (H M0 (1 + C) + 1,), bounds of the leaves in `rows`
    shape: tuple[int, int, int]  # (H, M0, 1 + C)

    def sorted(self, tokens: Tensor) -> Tensor:
        """Tokens (H, S, F) as (H S, F), leaf by leaf."""
        return tokens.transpose(0, 1).flatten(0, 1).index_select(0, self.rows)


class Codewords(NamedTuple):
    """Of every parent: its whole cell, what stays with it, its children.

    With means, the keys are around the centre of their head.
    """

    keys: Tensor  # (H, M0, 2 + C, D)
    values: Tensor  # (H, M0, 2 + C, D), means
    counts: Tensor  # (H, M0, 2 + C) int64
    # (H, M0, 2 + C), the variance of the keys; None if stored codewords represent the keys.
    spreads: Tensor | None


class Summary(NamedTuple):
    """What the queries of a chunk of batch elements attend to.

    Attributes:
        keys, values: (rows, W), the table: codewords (H R), with a threshold the keys leaf by leaf
            (H S), sinks, and a row that stands for no key.
        key_rows, sink_rows: where in the table keys and sinks are.
        offsets: (H S, 2 D), with means: values and keys leaf by leaf, minus the means of their
            leaves.
        matrix: (H, D, D), the first-order term's C; None without it.
    """

    leaves: Leaves
    codewords: Codewords
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


class Tiles(NamedTuple):
    """How queries are cut into tiles."""

    order: Tensor | None  # (N,) int64; None is the order of the queries
    num_queries: int
    length: int

    @staticmethod
    def of(tensors: Tensors, length: int) -> "Tiles":
        """Tiles of at most `length` queries."""
        order, num_queries = tensors.query_order, tensors.query.shape[2]
        return Tiles(None if order is None else order.long(), num_queries, min(length, num_queries))

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
        place = torch.arange(number, device=device) * lengths.clamp(min=number) // number
        return place, place < lengths

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
    tiles = Tiles.of(tensors, query.shape[2] if spec.num_refined == 0 else spec.query_tile)
    size = 1 if query.device.type == "cpu" else len(query)
    for start in range(0, len(query), size):
        elements = slice(start, start + size)
        part = tensors.part(elements)
        summary = summarize(part, spec)
        queries = tile_queries(part, tiles, summary)
        chosen = choose(queries, summary, tiles, spec)
        of_tiles = chosen.shown(summary.codewords.counts)
        shown[elements] = of_tiles.unflatten(0, (-1, query.shape[1]))
        attended = attend(queries, summary, chosen)
        if summary.matrix is not None:
            attended = with_first_order(queries, summary.matrix, attended)
        tiles.write(output[elements], attended[..., : query.shape[3]])
    return output, shown


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


def width(head_dim: int) -> int:
    """Channels of a row: one more than D, and a multiple of 4 for the fast attention of GPUs."""
    return head_dim // 4 * 4 + 4


def summarize(tensors: Tensors, spec: Spec) -> Summary:
    """What represents the keys; heads of all batch elements are flattened."""
    parents, children, leaf = codewords_and_leaves(tensors, spec)
    dtype, head_dim = parents.dtype, parents.shape[2]
    # Shifting all keys by one vector leaves the softmax unchanged, and small codewords round less.
    centre = centre_of(parents)
    value, key = tensors.value.flatten(0, 1).to(dtype), tensors.key.flatten(0, 1) - centre
    leaves = sort_leaves(leaf, spec.num_parents, 1 + spec.num_children)
    offsets = matrix = None
    if spec.means:
        by_leaf = leaves.sorted(torch.cat([value, key], dim=-1))
        codewords, offsets = _means(by_leaf, leaves)
        if tensors.parents is None:
            matrix = _first_order(offsets, len(key))
    else:
        by_leaf = leaves.sorted(value)
        counts, means = _averages(by_leaf, leaves)
        cells = torch.cat([parents[:, :, None].expand(-1, -1, 2, -1), children], dim=2)
        codewords = Codewords(cells - centre[:, None], means, counts, None)

    first = codewords.counts.numel()
    key_rows = slice(first, first + (len(by_leaf) if spec.num_refined is None else 0))
    sink_key, sink_value = tensors.sink_key, tensors.sink_value
    num_sinks = 0 if sink_key is None else sink_key.shape[2]
    sink_rows = slice(key_rows.stop, key_rows.stop + len(key) * num_sinks)
    keys, values = centre.new_zeros(2, sink_rows.stop + 1, width(head_dim))
    keys[:first, :head_dim] = codewords.keys.flatten(0, 2)
    keys[:first, head_dim] = codewords.counts.flatten().to(dtype).log().clamp(min=LOG_ZERO)
    keys[-1, head_dim] = LOG_ZERO
    values[:first, :head_dim] = codewords.values.flatten(0, 2)
    if codewords.spreads is not None:
        values[:first, head_dim] = codewords.spreads.flatten()
    if spec.num_refined is None:
        values[key_rows, :head_dim], keys[key_rows, :head_dim] = by_leaf.split(head_dim, dim=1)
    if sink_key is not None and sink_value is not None:
        keys[sink_rows, :head_dim] = (sink_key.flatten(0, 1) - centre).flatten(0, 1)
        values[sink_rows, :head_dim] = sink_value.flatten(0, 2)
    return Summary(leaves, codewords, keys, values, key_rows, sink_rows, offsets, matrix)


def _means(by_leaf: Tensor, leaves: Leaves) -> tuple[Codewords, Tensor]:
    """Codewords of values and keys (H S, 2 D), leaf by leaf, and their offsets to the leaves'."""
    counts, means = _averages(by_leaf, leaves)
    values, keys = means.chunk(2, dim=-1)
    offsets = by_leaf - means[:, :, 1:].flatten(0, 2).index_select(0, leaves.leaf)
    distances = torch.linalg.vector_norm(offsets.chunk(2, dim=1)[1], dim=1, keepdim=True)
    inside = aggregate(leaves, distances.square_())[..., 0]
    # A leaf's keys around the mean of its cell. Moments about the centre would cancel for small
    # cells far from it.
    between = (keys[:, :, 1:] - keys[:, :, :1]).square().sum(dim=-1)
    of_cells = (inside + counts[:, :, 1:] * between).sum(dim=2, keepdim=True)
    spreads = torch.cat([of_cells, inside], dim=2) / counts.clamp(min=1)
    return Codewords(keys, values, counts, spreads), offsets


def _averages(by_leaf: Tensor, leaves: Leaves) -> tuple[Tensor, Tensor]:
    """Counts (H, M0, 2 + C) and means (H, M0, 2 + C, F) of codewords."""
    counts, sums = leaves.edges.diff().view(leaves.shape), aggregate(leaves, by_leaf)
    counts, sums = (torch.cat([x.sum(2, keepdim=True), x], dim=2) for x in (counts, sums))
    return counts, sums / counts.clamp(min=1)[..., None]


def _first_order(offsets: Tensor, heads: int) -> Tensor:
    """How values follow keys inside leaves, C (H, D, D), of their offsets (H S, 2 D)."""
    values, keys = offsets.unflatten(0, (heads, -1)).chunk(2, dim=-1)
    return values.mT @ keys / variance_of(keys)


def variance_of(offsets: Tensor) -> Tensor:
    """What C is divided by, (H, 1, 1), of the keys' offsets (H, S, D); 1 if they are 0."""
    variance = offsets.square().sum(dim=(1, 2))[:, None, None]
    return variance.where(variance > 0, 1)


def sort_leaves(leaf: Tensor, num_parents: int, num_leaves: int) -> Leaves:
    """Sort keys by `leaf` (H, S), then by index; a parent has `num_leaves`, 1 + C."""
    shape = len(leaf), num_parents, num_leaves
    leaf = across_heads(leaf, num_parents * num_leaves)
    leaf, rows = leaf.t().flatten().sort(stable=True)
    bounds = torch.arange(math.prod(shape) + 1, device=leaf.device)
    return Leaves(rows, leaf, torch.searchsorted(leaf, bounds), shape)


def aggregate(leaves: Leaves, by_leaf: Tensor) -> Tensor:
    """Sum the features (H S, F) of each leaf: (H, M0, 1 + C, F) (paper, Algorithm 1)."""
    sums = sum_segments(by_leaf, leaves.edges)
    return sums.view(*leaves.shape, by_leaf.shape[1])


def sum_segments(rows: Tensor, edges: Tensor) -> Tensor:
    """Sums (E - 1, F) of consecutive rows (any number, F) between edges (E,), the last of which is
    the number of rows."""
    # Sum runs, then segments: long ones neither lose precision nor stall a GPU.
    index = torch.arange(len(rows), device=rows.device)
    runs = index[::RUN]
    cuts = torch.cat([edges, runs]).sort().values
    run_sums = F.embedding_bag(index, rows, cuts, mode="sum", include_last_offset=True)
    first_run = torch.searchsorted(cuts, edges[:-1])
    index = torch.arange(len(run_sums), device=rows.device)
    return F.embedding_bag(index, run_sums, first_run, mode="sum")


def tile_queries(tensors: Tensors, tiles: Tiles, summary: Summary) -> Tensor:
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
        self, summary: Summary, elements: Callable[[int], int], most: int = ELEMENTS
    ) -> Iterator[tuple[Tensor | slice, Tensor]]:
        """Pairs of a head and a tile, and the rows (G, K) of the table that they attend to.

        Args:
            summary: what the rows are taken from.
            elements: numbers in the intermediates of a pair with so many columns.
            most: numbers in those of all pairs at a time, except on a CPU.
        """
        spans, device = self.spans.flatten(0, 1), self.spans.device
        sinks = summary.num_sinks
        if self.number is not None:
            length = chunk_length(device, elements(self.number + sinks), most)
            for start in range(0, len(spans), length):
                part = slice(start, start + length)
                yield part, self._rows(summary, part, self.number)
            return
        order = spans.sum(dim=-1).sort(descending=True, stable=True)
        numbers, start = order.values.tolist(), 0
        while start < len(spans):
            longest = numbers[start]
            length = chunk_length(device, elements(longest + sinks), most)
            similar = bisect_right(numbers, -SIMILAR * longest, key=lambda number: -number)
            pairs = order.indices[start : min(start + length, similar)]
            yield pairs, self._rows(summary, pairs, longest)
            start += len(pairs)

    def _rows(self, summary: Summary, pairs: Tensor | slice, number: int) -> Tensor:
        """Rows of the first columns, padded by the last row of the table, and of sinks."""
        heads, num_tiles, per_head = self.spans.shape
        spans = self.spans.flatten(0, 1)[pairs].long()
        head = torch.arange(heads * num_tiles, device=spans.device)[pairs] // num_tiles
        starts = summary.leaves.edges[:-1].view(summary.leaves.shape)
        starts = torch.cat([starts[..., :1], starts], dim=-1).flatten(1) + heads * per_head
        itself = torch.arange(heads * per_head, device=spans.device).view(heads, per_head)
        starts = torch.where(spans > 1, starts[head], itself[head])

        ends = spans.cumsum(dim=-1)
        place = torch.arange(number, device=spans.device).expand(len(spans), -1).contiguous()
        codeword = torch.searchsorted(ends, place, right=True).clamp(max=per_head - 1)
        rows = place + (starts - ends + spans).gather(-1, codeword)
        rows = rows.where(place < ends[:, -1:], len(summary.keys) - 1)
        if summary.num_sinks == 0:
            return rows
        first, end = summary.sink_rows.start, summary.sink_rows.stop
        sinks = torch.arange(first, end, device=spans.device).view(heads, -1)
        return torch.cat([rows, sinks[head]], dim=-1)


def choose(queries: Tensor, summary: Summary, tiles: Tiles, spec: Spec) -> Chosen:
    """The columns of each tile of queries (H T, I, W)."""
    counts = summary.codewords.counts
    if spec.num_refined == 0:
        cells = (torch.arange(counts.shape[2], device=counts.device) == 0).int()
        return Chosen(cells.repeat(len(counts), tiles.number, counts.shape[1]), spec.columns)
    place, is_query = tiles.deciding(spec.threshold is not None, queries.device)
    queries = queries.unflatten(0, (len(counts), -1))
    if place.shape[1] < queries.shape[2]:
        place = place[..., None].expand(len(counts), -1, -1, queries.shape[3])
        queries = queries.gather(2, place)

    length = chunk_length(queries.device, len(counts) * is_query.shape[1] * counts[0].numel())
    parts = zip(queries.split(length, dim=1), is_query.split(length), strict=True)
    if spec.num_refined is not None:
        spans = [_spans_of_refined(*part, summary, spec.num_refined) for part in parts]
    else:
        assert spec.threshold is not None
        spans = [_spans_of_threshold(*part, summary, spec.threshold) for part in parts]
    return Chosen(torch.cat(spans, dim=1), spec.columns)


def _spans_of_refined(
    queries: Tensor, is_query: Tensor, summary: Summary, num_refined: int
) -> Tensor:
    """`Chosen.spans` of tiles that refine as many cells, from their queries (H, T, I, W); others
    (T, I) are padding."""
    spreads = summary.codewords.spreads
    score = _importance(queries, is_query, summary)
    if spreads is not None:
        score = score * spreads[:, None, :, 0]
    # topk leaves the order of ties undefined.
    ranking = score.sort(dim=-1, descending=True, stable=True).indices
    refined = torch.zeros_like(score, dtype=torch.bool)
    refined = refined.scatter_(-1, ranking[..., :num_refined], True)[..., None]
    of_leaves = refined.expand(*score.shape, summary.leaves.shape[2])
    return torch.cat([~refined, of_leaves], dim=-1).flatten(2).int()


def _spans_of_threshold(
    queries: Tensor, is_query: Tensor, summary: Summary, threshold: float
) -> Tensor:
    """`Chosen.spans` of tiles, from the queries (H, T, J, W) that decide; others (T, J) are
    padding."""
    counts, spreads = summary.codewords.counts, summary.codewords.spreads
    assert spreads is not None  # a threshold needs means
    cells, leaves = _masses(queries, is_query, summary)
    head_dim = summary.codewords.keys.shape[3]
    size = queries[..., :head_dim].square().sum(dim=(2, 3)) / (head_dim * is_query.sum(dim=-1))
    size = size[..., None, None]
    inside = (counts * spreads)[..., 1:].sum(dim=-1) / counts[..., 0].clamp(min=1)
    further = ((counts[..., 1:] > 0).sum(dim=-1) - 1)[:, None]
    keys, spreads = counts[:, None, :, 1:].int(), spreads[:, None]
    gain = growth(size[..., 0] * spreads[..., 0]) - growth(size[..., 0] * inside[:, None])
    refined = (cells * gain / further.clamp(min=1) > threshold) | (further <= 0)
    gain = leaves * growth(size * spreads[..., 1:]) / keys.clamp(min=1)
    of_leaves = torch.where(gain > threshold, keys, keys.clamp(max=1))
    of_cells = ~refined & (counts[:, None, :, 0] > 0)
    return torch.cat([of_cells[..., None], of_leaves * refined[..., None]], dim=-1).flatten(2)


def _importance(queries: Tensor, is_query: Tensor, summary: Summary) -> Tensor:
    """Attention of queries to cells, (H, T, M0)."""
    cells = summary.keys[: summary.codewords.counts.numel()]
    cells = cells.unflatten(0, summary.codewords.counts.shape)[:, :, 0]
    shares = (queries.flatten(1, 2) @ cells.mT).softmax(dim=-1).unflatten(1, is_query.shape)
    shares[:, ~is_query] = 0
    return shares.sum(dim=2)


def _masses(queries: Tensor, is_query: Tensor, summary: Summary) -> tuple[Tensor, Tensor]:
    """Mean attention of queries to cells (H, T, M0) and leaves (H, T, M0, 1 + C).

    The softmax denominator runs over cells and sinks.
    """
    counts = summary.codewords.counts
    keys = summary.keys[: counts.numel()].unflatten(0, counts.shape)
    flat = queries.flatten(1, 2)
    logits = (flat @ keys.flatten(1, 2).mT).unflatten(-1, counts.shape[1:])
    seen = logits[..., 0]
    if summary.num_sinks:
        sinks = summary.keys[summary.sink_rows].unflatten(0, (len(counts), -1))
        seen = torch.cat([seen, flat @ sinks.mT], dim=-1)
    denominator = seen.logsumexp(dim=-1)
    denominator.unflatten(1, is_query.shape)[:, ~is_query] = torch.inf
    shares = logits.sub_(denominator[..., None, None]).exp_().unflatten(1, is_query.shape)
    masses = shares.sum(dim=2) / is_query.sum(dim=-1)[:, None, None]
    return masses[..., 0], masses[..., 1:]


def growth(x: Tensor) -> Tensor:
    """How much the attention to a leaf exceeds that to its mean, by the variance of its logits."""
    slope = math.exp(TANGENT_FROM)
    return torch.expm1(x.clamp(max=TANGENT_FROM)) + slope * (x - TANGENT_FROM).clamp(min=0)


def attend(queries: Tensor, summary: Summary, chosen: Chosen) -> Tensor:
    """Softmax over each tile's columns: outputs and the spreads seen, of queries (H T, I, W)."""
    attended = torch.empty_like(queries)
    tile, channels = queries.shape[1:]

    def elements(columns: int) -> int:
        return 2 * channels * (tile + columns)

    for pairs, rows in chosen.lists(summary, elements):
        keys, values = (take(x, rows)[:, None] for x in (summary.keys, summary.values))
        # With 3-D inputs, SDPA takes its slow path.
        attended[pairs] = F.scaled_dot_product_attention(
            queries[pairs][:, None], keys, values, scale=1.0
        )[:, 0]
    return attended


def take(table: Tensor, rows: Tensor) -> Tensor:
    """Rows (G, K) of a table (rows, W), as (G, K, W)."""
    return table.index_select(0, rows.flatten()).unflatten(0, rows.shape)


def with_first_order(queries: Tensor, matrix: Tensor, attended: Tensor) -> Tensor:
    """What was attended to (H T, I, W), and the first-order term of C (H, D, D)."""
    head_dim = matrix.shape[1]
    scaled, seen = queries[..., :head_dim], attended[..., head_dim, None]
    following = scaled.unflatten(0, (len(matrix), -1)).flatten(1, 2) @ matrix.mT
    share = seen / (1 + seen * scaled.square().mean(dim=-1, keepdim=True))
    return attended[..., :head_dim] + share * following.view(scaled.shape)
