"""Attend kernel: softmax attention of one query tile to its list of columns.

    y_i = sum_a n_a exp(q_i . c_a) mean_a / sum_a n_a exp(q_i . c_a)     columns a of its tile

The columns are codewords, then the keys of leaves that are shown key by key, then sinks. A refined
parent stands for the keys that stay with it, so this matches the definition for any codebook; the
paper's correction (Algorithm 2) does so only if every parent is the mean of its children. With own
codewords, the first-order term follows (`first_order`).

Shapes: B batch, H heads, N queries, T query tiles, D head dim, M0 parents, C children, P refined
parents. Padded to powers of two, D is DP, M0 is MP (at least 16) and C is CP (0 without children).

Rows of the tables: MP parents with all their keys, MP parents with the keys that stay, then CP
children for each of the M0 parents.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from avq_diffusers.attention.triton.codewords import padded
from avq_diffusers.attention.triton.first_order import (
    blocks_per_side,
    matrix_block,
    matrix_size,
    relative_to,
)
from avq_diffusers.attention.triton.launch import Launch, Memory
from avq_diffusers.attention.triton.leaf_order import LeafPointers
from avq_diffusers.attention.triton.precompute import Precompute
from avq_diffusers.attention.triton.problem import Given, Layout, Problem, Strides, alignment_of
from avq_diffusers.attention.triton.rows import Tables, product
from avq_diffusers.attention.triton.select import (
    ColumnPointers,
    Programs,
    SelectBlocks,
    columns_of_tile,
    select_kernel,
)
from avq_diffusers.attention.triton.softmax import (
    TileSizes,
    attend_codewords,
    empty_softmax,
)
from avq_diffusers.attention.triton.tile import (
    head_of_tables,
    load_queries,
    output_rows,
    query_rows,
    size_of,
    store_dims,
    whole_tile,
)
from avq_diffusers.attention.triton.tokens import (
    TokenLayout,
    TokenPointers,
    attend_tokens,
    centre_logits,
    centre_of_head,
    tokens_of_head,
)
from avq_diffusers.attention.triton.tuning import (
    AttentionTiling,
    attention_tiling,
    select_tiling,
)
from avq_diffusers.config import Spec


class AttendBlocks(NamedTuple):
    """Compile-time blocks: queries, codewords, keys, and leaves whose keys are found at once."""

    N: tl.constexpr
    C: tl.constexpr
    K: tl.constexpr
    LEAVES: tl.constexpr


class Seen(NamedTuple):
    """What a tile may attend to: its columns, and where they and the sinks are."""

    tables: Tables
    tokens: TokenPointers
    leaves: LeafPointers
    columns: ColumnPointers
    key_layout: TokenLayout
    sink_layout: TokenLayout


@triton.jit
def _add_codewords(queries, seen, sums, ADD, SIZES, BLOCKS):
    """Add the codewords of a tile to sums."""
    columns = seen.columns
    num_codewords = tl.load(columns.shown)
    # At least once: where eight warps skip it, products of the next loop are wrong with Triton 3.6.
    for first in tl.range(0, tl.maximum(num_codewords, 1), BLOCKS.C):
        column = first + tl.arange(0, BLOCKS.C)
        valid = column < num_codewords
        rows = tl.load(columns.row + column, mask=valid, other=0)
        bias = tl.load(columns.bias + column, mask=valid, other=float("-inf"))
        sums = ADD(queries, seen.tables, rows, bias, valid, sums, SIZES)
    return sums


@triton.jit
def _leaves_at(columns, first, num_leaves, SIZES, LEAVES):
    """Where the keys of LEAVES of a tile's leaves are, whose keys it shows one by one.

    Returns:
        start: index of the first key in the order of leaves.
        num_keys: number of keys.
        stops: (LEAVES) number of keys up to and with each leaf.
        gaps: (LEAVES) places between its last key and the first of the next leaf.
    """
    leaf = first + tl.arange(0, LEAVES)
    valid = leaf < num_leaves
    index = SIZES.MOST - 1 - leaf
    starts = tl.load(columns.row + index, mask=valid, other=0)
    next_starts = tl.load(columns.row + index - 1, mask=leaf + 1 < num_leaves, other=0)
    counts = tl.load(columns.bias + index, mask=valid, other=0.0).to(tl.int32)
    start = tl.sum(tl.where(leaf == first, starts, 0), axis=0)
    return start, tl.sum(counts, axis=0), tl.cumsum(counts, axis=0), next_starts - starts - counts


@triton.jit
def _index_after_gaps(rank, start, stops, gaps):
    """Places in the order of leaves of some keys, by their rank from `start` on."""
    is_passed = stops[None, :] <= rank[:, None]
    return start + rank + tl.sum(tl.where(is_passed, gaps[None, :], 0), axis=1)


@triton.jit
def _add_keys(queries, centre_bias, keys, order_ptr, seen, sums, ADD, SIZES, BLOCKS):
    """Add the keys of the leaves that a tile shows key by key to sums."""
    num_leaves = tl.load(seen.columns.num_leaves)
    for first in tl.range(0, num_leaves, BLOCKS.LEAVES):
        start, num_keys, stops, gaps = _leaves_at(
            seen.columns, first, num_leaves, SIZES, BLOCKS.LEAVES
        )
        for first_rank in tl.range(0, num_keys, BLOCKS.K):
            rank = first_rank + tl.arange(0, BLOCKS.K)
            valid = rank < num_keys
            index = _index_after_gaps(rank, start, stops, gaps)
            token = tl.load(order_ptr + index, mask=valid, other=0)
            sums = ADD(queries, centre_bias, keys, token, valid, sums, SIZES)
    return sums


@triton.jit
def _add_sinks(queries, centre_bias, sinks, sums, ADD, SIZES, BLOCKS):
    """Add all sinks to sums."""
    for first in tl.range(0, sinks.number, BLOCKS.K):
        token = first + tl.arange(0, BLOCKS.K)
        valid = token < sinks.number
        sums = ADD(queries, centre_bias, sinks, token, valid, sums, SIZES)
    return sums


@triton.jit
def seen_by_tile(tile, tables, tokens, leaves, columns, key_layout, sink_layout, SIZES):
    """What a tile may attend to."""
    columns = columns_of_tile(columns, tile, SIZES)
    return Seen(tables, tokens, leaves, columns, key_layout, sink_layout)


@triton.jit
def add_columns(queries, centre_bias, sums, tile, seen, ADD_CODEWORDS, ADD_TOKENS, SIZES, BLOCKS):
    """Add the columns of a tile to sums, by functions that take the queries first."""
    tokens = seen.tokens
    sums = _add_codewords(queries, seen, sums, ADD_CODEWORDS, SIZES, BLOCKS)
    if SIZES.REFINES == "threshold":
        layout = seen.key_layout
        keys = tokens_of_head(tokens.key, tokens.value, layout, tile.batch, tile.head, SIZES)
        order_ptr = seen.leaves.leaf_order + tile.batch_head * layout.number
        sums = _add_keys(
            queries, centre_bias, keys, order_ptr, seen, sums, ADD_TOKENS, SIZES, BLOCKS
        )
    if SIZES.SINKS:
        sinks = tokens_of_head(
            tokens.sink_key, tokens.sink_value, seen.sink_layout, tile.batch, tile.head, SIZES
        )
        sums = _add_sinks(queries, centre_bias, sinks, sums, ADD_TOKENS, SIZES, BLOCKS)
    return sums


@triton.jit
def attend_tile(query, tile, seen, SIZES, BLOCKS):
    """The softmax of a tile over its columns."""
    centre_bias = ()
    if SIZES.REFINES == "threshold" or SIZES.SINKS:
        centre_bias = centre_logits(query, centre_of_head(seen.tokens, tile, SIZES), SIZES)
    softmax = empty_softmax(BLOCKS.N, SIZES)
    return add_columns(
        query, centre_bias, softmax, tile, seen, attend_codewords, attend_tokens, SIZES, BLOCKS
    )


@triton.jit
def _matrix_of(tables, VALUE, VALUES, SIZES):
    """The first-order matrix for VALUES dims of the outputs, from VALUE on, in blocks of dims."""
    matrix = (matrix_block(tables, VALUE, VALUES, 0, SIZES.BLOCK_D, SIZES),)
    if SIZES.REST_D > 0:
        matrix += (matrix_block(tables, VALUE, VALUES, SIZES.BLOCK_D, SIZES.REST_D, SIZES),)
    return matrix


@triton.jit
def _output(numerator, inverse, query, matrix, size, SIZES):
    """Outputs (BLOCK_N, dims).

    query: the queries, times `size` and the weight of the first-order term.
    matrix: `_matrix_of` these dims.
    size: largest number of the matrix.
    """
    output = numerator * inverse[:, None]
    if SIZES.FIRST_ORDER:
        output = product(query[0], relative_to(size, matrix[0], query[0].dtype), output)
        if SIZES.REST_D > 0:
            output = product(query[1], relative_to(size, matrix[1], query[1].dtype), output)
    return output


@triton.jit
def times(query, weight, SIZES):
    """The queries, each times its weight (BLOCK_N)."""
    scaled = ((query[0].to(tl.float32) * weight[:, None]).to(query[0].dtype),)
    if SIZES.REST_D > 0:
        scaled += ((query[1].to(tl.float32) * weight[:, None]).to(query[1].dtype),)
    return scaled


@triton.jit
def attend_kernel(
    query_ptr,
    query_order_ptr,
    output_ptr,
    tables: Tables,
    tokens: TokenPointers,
    leaves: LeafPointers,
    columns: ColumnPointers,
    num_queries,
    query_strides: Strides,
    key_layout: TokenLayout,
    sink_layout: TokenLayout,
    QUERY_STRIDE: tl.constexpr,
    SIZES: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    """Write the outputs of one query tile."""
    HEAD_DIM: tl.constexpr = SIZES.HEAD_DIM
    BLOCK_D: tl.constexpr = SIZES.BLOCK_D
    tile = whole_tile(query_order_ptr, columns.shown, num_queries, SIZES, BLOCKS.N)
    tables = head_of_tables(tables, tile.batch_head, tile.head, SIZES)
    query_row_ptr = query_rows(query_ptr, query_strides, tile, QUERY_STRIDE)
    query = load_queries(query_row_ptr, tile, SIZES)
    seen = seen_by_tile(tile, tables, tokens, leaves, columns, key_layout, sink_layout, SIZES)
    softmax = attend_tile(query, tile, seen, SIZES, BLOCKS)
    inverse = 1.0 / softmax.total
    size = 0.0
    matrix = ()
    if SIZES.FIRST_ORDER:
        # Before the queries, so that the program waits once for both.
        matrix = _matrix_of(tables, 0, BLOCK_D, SIZES)
        spread = softmax.spread * inverse
        query = load_queries(query_row_ptr, tile, SIZES, True)
        size = matrix_size(tables, SIZES)
        query = times(query, size * spread / (1.0 + spread * size_of(query, SIZES)), SIZES)
    rows = output_rows(output_ptr, tile, num_queries, SIZES)
    output = _output(softmax.numerator[0], inverse, query, matrix, size, SIZES)
    store_dims(rows, 0, tile, output, HEAD_DIM)
    if SIZES.REST_D > 0:
        if SIZES.FIRST_ORDER:
            matrix = _matrix_of(tables, BLOCK_D, SIZES.REST_D, SIZES)
        rest = _output(softmax.numerator[1], inverse, query, matrix, size, SIZES)
        store_dims(rows, BLOCK_D, tile, rest, HEAD_DIM)


class TileLaunch(NamedTuple):
    """What kernels that run on query tiles have in common, and the launch that selects."""

    select: Launch
    grid: tuple[int, int, int]
    arguments: dict[str, Any]
    sizes: TileSizes


def attention_launches(
    problem: Problem, given: Given, precompute: Precompute, memory: Memory
) -> list[Launch]:
    """The launches after the precompute, which add to the memory. `given` are pointers."""
    tiling = attention_tiling(problem)
    tiles = query_tiles(problem, given, precompute, memory, tiling)
    attend = Launch(
        attend_kernel,
        tiles.grid,
        tiles.arguments,
        num_warps=tiling.num_warps,
        num_stages=tiling.num_stages,
        maxnreg=tiling.max_registers,
    )
    return [tiles.select, attend]


def query_tiles(
    problem: Problem,
    given: Given,
    precompute: Precompute,
    memory: Memory,
    tiling: AttentionTiling,
    *,
    levels: bool = False,
) -> TileLaunch:
    """The `TileLaunch` of a call, which add to its memory; with `levels`, for a backward pass."""
    batch, heads, _, _ = problem.query.shape
    query_strides = problem.query.divided(1)
    keys = (problem.key, problem.value) if problem.shows_keys or levels else ()
    align = alignment_of(*keys, *(problem.sinks or ()))
    sizes = _sizes(problem, tiling, align)
    shape = (batch, heads, problem.num_tiles)
    columns = ColumnPointers(
        row=memory.add((*shape, sizes.MOST), torch.int32),
        bias=memory.add((*shape, sizes.MOST), torch.float32),
        shown=memory.add((*shape, 2), torch.int32) if levels else given.shown,
        num_leaves=memory.add(shape, torch.int32),
        refined=memory.add((*shape, sizes.PARENT_ROWS), torch.int32),
        level=memory.add((*shape, sizes.ROWS), torch.int8) if levels else None,
    )
    centre = precompute.centre
    sources = given.key, given.value, given.sink_key, given.sink_value
    arguments = precompute.arguments | {
        "query_ptr": given.query,
        "query_order_ptr": given.query_order,
        "output_ptr": given.output,
        "tokens": TokenPointers(*sources, centre),
        "columns": columns,
        "num_queries": problem.query.shape[2],
        "num_tiles": problem.num_tiles,
        "limit": _limit(problem.spec),
        "query_strides": query_strides,
        "key_layout": _token_layout(keys, align),
        "sink_layout": _token_layout(problem.sinks, align),
        "QUERY_STRIDE": query_strides.token,
        "SIZES": sizes,
    }
    attend = AttendBlocks(
        padded(problem.spec.query_tile, 16),
        tiling.codewords,
        tiling.keys,
        tiling.leaves,
    )
    select = _select_launch(problem, precompute, arguments, levels=levels)
    grid = heads * problem.num_tiles, batch, 1
    return TileLaunch(select, grid, arguments | {"BLOCKS": attend}, sizes)


# Above every gain of a further column that is finite.
LARGEST_FLOAT32 = 3.4e38


def _limit(spec: Spec) -> float:
    """`Spec.limit`, or the number of refined parents: numbers that kernels take at run time."""
    if spec.num_refined is not None:
        return float(spec.num_refined)
    return min(spec.limit, LARGEST_FLOAT32)


def _select_launch(
    problem: Problem, precompute: Precompute, arguments: dict[str, Any], *, levels: bool
) -> Launch:
    tiling = select_tiling(problem)
    sizes = arguments["SIZES"]
    batch, heads, _, _ = problem.query.shape
    has_order = precompute.arguments["CELLS"].LEAVES
    num_pieces = precompute.arguments["num_pieces"] if has_order else 0
    num_matrix = sizes.MATRIX_SIDE**2 if problem.has_first_order else 0
    blocks = SelectBlocks(
        SAMPLES=padded(problem.num_samples, 16),
        M=min(tiling.rows, sizes.PARENT_ROWS),
        P=min(sizes.PARENT_ROWS, max(1, tiling.rows // max(1, sizes.CHILD_ROWS))),
        K=tiling.rows,
        KEYS=tiling.keys,
        LEVELS=levels,
    )
    chosen = {"programs": Programs(num_pieces, num_matrix), "BLOCKS": blocks}
    grid = heads * (num_pieces + num_matrix + problem.num_tiles), batch, 1
    return Launch(
        select_kernel,
        grid,
        arguments | chosen,
        num_warps=tiling.num_warps,
        num_stages=1,
        maxnreg=tiling.max_registers,
    )


def _token_layout(layouts: tuple[Layout, ...] | None, align: int) -> TokenLayout:
    """The layout of keys and values; zeros without any."""
    if not layouts:
        return TokenLayout(*(0,) * len(TokenLayout._fields))
    key, value = layouts
    return TokenLayout(key.shape[2], *key.divided(align), *value.divided(align))


def _sizes(problem: Problem, tiling: AttentionTiling, align: int) -> TileSizes:
    spec = problem.spec
    head_dim = problem.query.shape[3]
    padded_dim, parent_rows, child_rows = problem.padded_sizes
    rows = problem.num_rows
    refines = {None: "threshold", 0: "none", spec.num_parents: "all"}
    return TileSizes(
        HEADS=problem.query.shape[1],
        HEAD_DIM=head_dim,
        QUERY_TILE=spec.query_tile,
        PARENT_ROWS=parent_rows,
        CHILD_ROWS=child_rows,
        ROWS=rows,
        CODE_ROWS=rows if spec.means else rows - parent_rows,
        MOST=spec.num_leaves,
        # Cut into 32 + 16 dims, products on an H200 read beyond shared memory with Triton 3.6
        # (triton issues 10486, 11366).
        BLOCK_D=64 if tiling.rest_dims else padded_dim,
        REST_D=tiling.rest_dims,
        PADDED_DIM=padded_dim,
        MATRIX_SIDE=blocks_per_side(padded_dim),
        REFINES=refines.get(spec.num_refined, "some"),
        MEANS=spec.means,
        FIRST_ORDER=problem.has_first_order,
        SINKS=problem.sinks is not None,
        ORDERED=problem.query_order is not None,
        OWN_CENTRE=not problem.is_stored,
        FACTOR=problem.factor,
        ALIGN=align,
    )
