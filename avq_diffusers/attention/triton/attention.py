"""Flash AVQ-attention kernel (paper, Algorithm 2): one launch, one program per query tile.

    importance_p = sum_i n_p exp(q_i . c_p) / sum_r n_r exp(q_i . c_r)   queries i of a tile
    y_i = sum_a n_a exp(q_i . c_a) mean_a / sum_a n_a exp(q_i . c_a)     codewords a that it sees

A tile sees all parents and the children of its `num_refined` most important parents. A refined
parent stands only for the keys that stay with it, so the result matches the definition for any
codebook; the paper's correction does so only if every parent is the mean of its children.

Logits are in base 2 and include the log2 count. An empty codeword has logit -inf: it neither moves
a maximum nor contributes to a sum.

Weights are relative to a maximum of the logits, `running_max`. With RUNNING, it grows block by
block and the sums are rescaled. Without RUNNING, which is faster, it is the largest parent logit
(of the first block of parents if all or none are refined). A child's logit can far exceed it, or
all keys can be in children far below it; where weights leave float16's range, the tile is
recomputed with RUNNING.

Shapes: B batch, H heads, N queries, D head dim, M0 parents, C children, P refined parents. Padded
to powers of two, D is DP, M0 is MP (at least 16) and C is CP (0 without children).

Rows of `mean_values`: MP parents with all their keys, MP parents with the keys that stay, then CP
children for each of the M0 parents. With mean keys, `codes` and `log_counts` of each batch element
have the same rows. Stored codewords need no rows for the keys that stay: a refined parent is
weighted by all its keys, and numbers of `mean_values` from D on hold the share that stays.
"""

import math
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from avq_diffusers.attention.triton.codewords import padded, value_width
from avq_diffusers.attention.triton.exact import (
    TilePointers,
    TokenLayout,
    exact_of_tile,
    sinks_of_tile,
)
from avq_diffusers.attention.triton.launch import Launch, Memory
from avq_diffusers.attention.triton.precompute import Precompute
from avq_diffusers.attention.triton.problem import Given, Layout, Problem, Strides, alignment_of
from avq_diffusers.attention.triton.rows import Tables
from avq_diffusers.attention.triton.softmax import TileBlocks, TileSizes
from avq_diffusers.attention.triton.tile import TileInputs, attend_tile
from avq_diffusers.attention.triton.tuning import (
    COLUMN_BLOCK,
    AttentionTiling,
    again_blocks,
    attention_tiling,
    keys_per_block,
    meets_keys,
)


class TileOfQueries(NamedTuple):
    """A program's queries."""

    batch: tl.tensor
    head: tl.tensor
    batch_head: tl.tensor
    number: tl.tensor  # index of the tile over all heads
    token: tl.tensor  # (BLOCK_N)
    valid: tl.tensor  # (BLOCK_N) False on padding


@triton.jit
def tile_of_program(query_order_ptr, num_queries, SIZES, BLOCKS):
    """The `TileOfQueries` of this program."""
    num_tiles = tl.num_programs(0) // SIZES.HEADS
    # Heads first: the rows of neighbouring heads share cache lines.
    head = tl.program_id(0) % SIZES.HEADS
    tile = tl.program_id(0) // SIZES.HEADS
    batch = tl.program_id(1).to(tl.int64)
    batch_head = batch * SIZES.HEADS + head

    row = tl.arange(0, BLOCKS.N)
    token = tile * SIZES.QUERY_TILE + row
    valid = (row < SIZES.QUERY_TILE) & (token < num_queries)
    if SIZES.ORDERED:
        token = tl.load(query_order_ptr + token, mask=valid, other=0).to(tl.int32)
    return TileOfQueries(batch, head, batch_head, batch_head * num_tiles + tile, token, valid)


@triton.jit
def tables_of_tile(tables, tile, SIZES):
    """The head's tables and the tile's refined parents."""
    code_head = tile.batch_head if SIZES.MEANS else tile.head
    return Tables(
        tables.codes + code_head * (SIZES.CODE_ROWS * SIZES.PADDED_DIM),
        tables.mean_values + tile.batch_head * (SIZES.ROWS * SIZES.VALUE_WIDTH),
        tables.log_counts + tile.batch_head * SIZES.CODE_ROWS,
        tables.variance + tile.batch_head * SIZES.PARENT_ROWS,
        tables.row_weight + tile.batch_head * SIZES.ROWS,
        tables.refined + tile.number * SIZES.NUM_REFINED,
    )


@triton.jit
def query_rows(pointer, strides, tile, STRIDE_TOKEN):
    """(BLOCK_N, 1) row pointers of the queries, or of the gradients of their outputs."""
    start = tile.batch * strides.batch + tile.head.to(tl.int64) * strides.head
    return pointer + tl.multiple_of(start, 8) + tile.token[:, None] * STRIDE_TOKEN


@triton.jit
def load_dims(row_pointers, first, tile, HEAD_DIM, WIDTH):
    """Load dims of the query rows from `first` on, padded with zeros."""
    dims = first + tl.arange(0, WIDTH)
    mask = tile.valid[:, None] & (dims < HEAD_DIM)[None, :]
    return tl.load(row_pointers + dims[None, :], mask=mask, other=0.0)


@triton.jit
def output_rows(pointer, tile, num_queries, SIZES):
    """(BLOCK_N, 1) row pointers of the queries in (B, N, H, D) memory."""
    TOKEN: tl.constexpr = SIZES.HEADS * SIZES.HEAD_DIM
    start = tile.batch * num_queries * TOKEN + tile.head * SIZES.HEAD_DIM
    return pointer + start + tile.token[:, None] * TOKEN


@triton.jit
def store_dims(row_pointers, first, tile, block, HEAD_DIM):
    """Store dims of the query rows from `first` on."""
    dims = first + tl.arange(0, block.shape[1])
    mask = tile.valid[:, None] & (dims < HEAD_DIM)[None, :]
    tl.store(row_pointers + dims[None, :], block, mask=mask)


@triton.jit
def attention_kernel(
    query_ptr,
    query_order_ptr,
    output_ptr,
    tables: Tables,
    keys: TilePointers,
    num_queries,
    exact_keys,
    query_strides: Strides,
    key_layout: TokenLayout,
    sink_layout: TokenLayout,
    QUERY_STRIDE: tl.constexpr,
    SIZES: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    """Write the outputs of one query tile."""
    HEAD_DIM: tl.constexpr = SIZES.HEAD_DIM
    tile = tile_of_program(query_order_ptr, num_queries, SIZES, BLOCKS)
    tables = tables_of_tile(tables, tile, SIZES)
    exact = exact_of_tile(keys, key_layout, exact_keys, tables, tile, SIZES)
    sinks = sinks_of_tile(keys, sink_layout, tile, SIZES)

    # (BLOCK_N, BLOCK_D) and (BLOCK_N, REST_D)
    rows = query_rows(query_ptr, query_strides, tile, QUERY_STRIDE)
    query = (load_dims(rows, 0, tile, HEAD_DIM, SIZES.BLOCK_D),)
    if SIZES.REST_D > 0:
        query += (load_dims(rows, SIZES.BLOCK_D, tile, HEAD_DIM, SIZES.REST_D),)

    inputs = TileInputs(query, tile.valid, tables, exact, sinks)
    softmax, total, _ = attend_tile(inputs, SIZES, BLOCKS)

    inverse = (1.0 / total)[:, None]
    rows = output_rows(output_ptr, tile, num_queries, SIZES)
    store_dims(rows, 0, tile, softmax.numerator[0] * inverse, HEAD_DIM)
    if SIZES.REST_D > 0:
        store_dims(rows, SIZES.BLOCK_D, tile, softmax.numerator[1] * inverse, HEAD_DIM)


class Tiles(NamedTuple):
    """What kernels that run on query tiles have in common.

    The memory holds `tables.refined`, (B, H, tiles, P) int32, the parents that each tile refines,
    and with exact keys the columns in `keys`.
    """

    grid: tuple[int, int, int]
    arguments: dict[str, Any]
    tables: Tables
    keys: TilePointers
    sizes: TileSizes


def attention_launch(
    problem: Problem, given: Given, precompute: Precompute, memory: Memory
) -> Launch:
    """The launch for the attention of a call, which adds to its memory. `given` are pointers."""
    tiling = attention_tiling(problem)
    tiles = query_tiles(problem, given, precompute, memory, tiling)
    return Launch(
        attention_kernel,
        tiles.grid,
        tiles.arguments,
        num_warps=tiling.num_warps,
        num_stages=tiling.num_stages,
        maxnreg=tiling.max_registers,
    )


def query_tiles(
    problem: Problem, given: Given, precompute: Precompute, memory: Memory, tiling: AttentionTiling
) -> Tiles:
    """The `Tiles` of a call, which add to its memory."""
    batch, heads, num_queries, _ = problem.query.shape
    query_strides = problem.query.divided(1)
    exact = (problem.key, problem.value) if problem.exact_keys else ()
    align = alignment_of(*exact, *(problem.sinks or ()))
    sizes = _sizes(problem, tiling, align)
    shape = (batch, heads, problem.num_tiles)
    refined = memory.add((*shape, problem.spec.num_refined), torch.int32)
    keys = TilePointers(
        *(given.key, given.value, given.sink_key, given.sink_value, precompute.centre),
        *precompute.leaves,
        *(None, None, None, None),
    )
    if problem.exact_keys:
        columns = (*shape, sizes.VISIBLE)
        keys = keys._replace(
            score=memory.add(columns, torch.float32),
            row=memory.add(columns, torch.int32),
            exact_row=memory.add(columns, torch.int32),
            first=memory.add(columns, torch.int32),
        )
    tables = precompute.tables._replace(refined=refined)
    blocks = min(tiling.parent_block, sizes.PARENT_ROWS), tiling.parents_per_block
    arguments = {
        "query_ptr": given.query,
        "query_order_ptr": given.query_order,
        "output_ptr": given.output,
        "tables": tables,
        "keys": keys,
        "num_queries": num_queries,
        "exact_keys": problem.exact_keys,
        "query_strides": query_strides,
        "key_layout": _token_layout(exact, align),
        "sink_layout": _token_layout(problem.sinks, align),
        "QUERY_STRIDE": query_strides.token,
        "SIZES": sizes,
        "BLOCKS": TileBlocks(
            padded(problem.spec.query_tile, 16),
            *blocks,
            tiling.running_max,
            *again_blocks(problem, *blocks),
        ),
    }
    grid = heads * problem.num_tiles, batch, 1
    return Tiles(grid, arguments, tables, keys, sizes)


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
    rows = 2 * parent_rows + spec.num_parents * child_rows
    visible = padded(parent_rows + spec.num_refined * child_rows) if problem.exact_keys else 0
    return TileSizes(
        HEADS=problem.query.shape[1],
        HEAD_DIM=head_dim,
        QUERY_TILE=spec.query_tile,
        NUM_PARENTS=spec.num_parents,
        NUM_REFINED=spec.num_refined,
        PARENT_ROWS=parent_rows,
        CHILD_ROWS=child_rows,
        REFINED_ROWS=padded(spec.num_refined) if spec.num_refined else 0,
        ROWS=rows,
        CODE_ROWS=rows if spec.means else rows - parent_rows,
        # Cut into 32 + 16 dims, products on an H200 read beyond shared memory with Triton 3.6
        # (triton issues 10486, 11366).
        BLOCK_D=64 if tiling.rest_dims else padded_dim,
        REST_D=tiling.rest_dims,
        PADDED_DIM=padded_dim,
        VALUE_WIDTH=value_width(head_dim),
        SELECTS=spec.refines_some,
        MEANS=spec.means,
        EXACT_KEYS=problem.exact_keys > 0,
        SINKS=problem.sinks is not None,
        ORDERED=problem.query_order is not None,
        OWN_CENTRE=not problem.is_stored,
        VISIBLE=visible,
        BLOCK_C=COLUMN_BLOCK,
        BLOCK_K=keys_per_block(problem),
        FACTOR=problem.scale * math.log2(math.e) if meets_keys(problem) else 0.0,
        ALIGN=align,
    )
