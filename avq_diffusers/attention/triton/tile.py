"""Query tiles: their queries, and what kernels on tiles read of the tables.

Shapes: as in `attention`.
"""

import math
from typing import NamedTuple

import triton
import triton.language as tl

from avq_diffusers.attention.triton.rows import Tables

# From squared logits in base 2 to those in base e, 1 / log2(e)^2.
SQUARED_LN2 = tl.constexpr(math.log(2) ** 2)
# Neighbouring tiles whose programs begin in the order of their work.
GROUP = tl.constexpr(32)


class TileOfQueries(NamedTuple):
    """Some queries of a tile."""

    batch: tl.tensor
    head: tl.tensor
    batch_head: tl.tensor
    number: tl.tensor  # index of the tile over all heads
    token: tl.tensor  # (BLOCK_N)
    valid: tl.tensor  # (BLOCK_N) False on padding


@triton.jit
def tile_at(query_order_ptr, batch, head, index, num_tiles, row, valid, SIZES):
    """The `TileOfQueries` at an index in its head, with these rows of the tile."""
    batch_head = batch * SIZES.HEADS + head
    token = index * SIZES.QUERY_TILE + row
    if SIZES.ORDERED:
        token = tl.load(query_order_ptr + token, mask=valid, other=0).to(tl.int32)
    return TileOfQueries(batch, head, batch_head, batch_head * num_tiles + index, token, valid)


@triton.jit
def _longest_first(shown_ptr, index, num_tiles):
    """The tile in place of one, so that programs on tiles with more columns begin first.

    shown_ptr: numbers of codewords and of keys of the head's tiles; only `GROUP` neighbours change
        places.
    """
    first = index // GROUP * GROUP
    tile = tl.arange(0, GROUP)
    is_tile = first + tile < num_tiles
    codewords = tl.load(shown_ptr + 2 * (first + tile), mask=is_tile, other=-1)
    keys = tl.load(shown_ptr + 2 * (first + tile) + 1, mask=is_tile, other=0)
    order = (codewords + keys) * GROUP - tile
    rank = tl.sum((order[None, :] > order[:, None]).to(tl.int32), axis=1)
    return first + tl.sum(tl.where(rank == index - first, tile, 0), axis=0)


@triton.jit
def whole_tile(query_order_ptr, shown_ptr, num_queries, SIZES, BLOCK_N):
    """The `TileOfQueries` of this program, one of a grid of tiles."""
    num_tiles = tl.num_programs(0) // SIZES.HEADS
    # Heads first: the rows of neighbouring heads share cache lines.
    head = tl.program_id(0) % SIZES.HEADS
    index = tl.program_id(0) // SIZES.HEADS
    batch = tl.program_id(1).to(tl.int64)
    if SIZES.REFINES == "threshold":
        first_tile = (batch * SIZES.HEADS + head) * num_tiles
        index = _longest_first(shown_ptr + 2 * first_tile, index, num_tiles)
    row = tl.arange(0, BLOCK_N)
    valid = (row < SIZES.QUERY_TILE) & (index * SIZES.QUERY_TILE + row < num_queries)
    return tile_at(query_order_ptr, batch, head, index, num_tiles, row, valid, SIZES)


@triton.jit
def head_of_tables(tables, batch_head, head, SIZES):
    """The `Tables` of a head."""
    code_head = batch_head if SIZES.MEANS else head
    row = batch_head * SIZES.ROWS
    return Tables(
        tables.codes + code_head * (SIZES.CODE_ROWS * SIZES.PADDED_DIM),
        tables.mean_values + row * SIZES.PADDED_DIM,
        tables.counts + row,
        tables.log_counts + row,
        tables.spread + row,
        tables.inside + batch_head * (2 * SIZES.PARENT_ROWS),
        tables.matrix + batch_head * (SIZES.PADDED_DIM * SIZES.PADDED_DIM),
        tables.largest + batch_head * (SIZES.MATRIX_SIDE * SIZES.MATRIX_SIDE),
    )


@triton.jit
def query_rows(pointer, strides, tile, STRIDE_TOKEN):
    """(BLOCK_N, 1) row pointers of the queries, or of the gradients of their outputs."""
    start = tile.batch * strides.batch + tile.head.to(tl.int64) * strides.head
    return pointer + tl.multiple_of(start, 8) + tile.token[:, None] * STRIDE_TOKEN


@triton.jit
def load_query_dims(row_pointers, first, tile, HEAD_DIM, WIDTH, AGAIN=False):
    """Load dims of the query rows from `first` on, padded with zeros."""
    dims = first + tl.arange(0, WIDTH)
    mask = tile.valid[:, None] & (dims < HEAD_DIM)[None, :]
    pointers = row_pointers + dims[None, :]
    if AGAIN:
        block = tl.load(pointers, mask=mask, other=0.0, eviction_policy="evict_first")
    else:
        block = tl.load(pointers, mask=mask, other=0.0)
    return block


@triton.jit
def load_queries(row_pointers, tile, SIZES, AGAIN=False):
    """The queries in blocks of dims, (BLOCK_N, BLOCK_D) and (BLOCK_N, REST_D).

    AGAIN: the compiler does not keep what was loaded before in registers.
    """
    query = (load_query_dims(row_pointers, 0, tile, SIZES.HEAD_DIM, SIZES.BLOCK_D, AGAIN),)
    if SIZES.REST_D > 0:
        query += (
            load_query_dims(row_pointers, SIZES.BLOCK_D, tile, SIZES.HEAD_DIM, SIZES.REST_D, AGAIN),
        )
    return query


@triton.jit
def size_of(query, SIZES):
    """(BLOCK_N) |q|^2 / D: times a spread in units of the codes, the variance of the logits."""
    wide = query[0].to(tl.float32)
    squares = tl.sum(wide * wide, axis=1)
    if SIZES.REST_D > 0:
        wide = query[1].to(tl.float32)
        squares += tl.sum(wide * wide, axis=1)
    return squares * (SQUARED_LN2 / SIZES.HEAD_DIM)


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
