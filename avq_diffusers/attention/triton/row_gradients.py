"""Row gradients kernel: the gradients of what represents the keys, summed over the query tiles.

One program for some rows of the tables takes the tiles that show one of them as a codeword. For row
a, as in `query_gradients`:

    dv_a = sum_i w_ia dy_i    dc_a = sum_i w_ia (p_ia - delta_i) q_i    ds_a = sum_i w_ia dr_i

Further programs find the gradient of the first-order matrix, M = scale A / S:

    dM = sum_i g_i dy_i q_i^T    dA = scale dM / S    dS = -<dM, M> / S

Shapes: as in `attention`.
"""

from typing import NamedTuple

import triton
import triton.language as tl

from avq_diffusers.attention.triton.first_order import LEAST, inverse_variance
from avq_diffusers.attention.triton.problem import Strides
from avq_diffusers.attention.triton.query_gradients import QueryPointers
from avq_diffusers.attention.triton.rows import Tables, product
from avq_diffusers.attention.triton.select import ColumnPointers
from avq_diffusers.attention.triton.softmax import LN2, load_codes, load_values
from avq_diffusers.attention.triton.tile import (
    head_of_tables,
    load_queries,
    load_query_dims,
    query_rows,
    tile_at,
)

# How a tile shows a row.
AS_CODEWORD, AS_KEYS = tl.constexpr(1), tl.constexpr(2)
# Beyond the index of every tile.
NEVER = tl.constexpr(2**31 - 1)


class RowGradients(NamedTuple):
    """Gradients for the keys of each row in float32, those of keys divided by the scale.

    All but `row` are None without a first-order term.
    """

    row: tl.tensor  # (B, H, ROWS, 2 DP) of a key's value, then of the key
    spread: tl.tensor  # (B, H, ROWS) of a key, divided by its offset to the mean
    matrix: tl.tensor  # (B, H, DP, DP) dA divided by the scale
    matrix_size: tl.tensor  # (B, H, MATRIX_SIDE) largest numbers of the matrix
    variance: tl.tensor  # (B, H, MATRIX_SIDE) parts of dS, as `spread`


class HeadOfQueries(NamedTuple):
    """The queries of a program's head, and the levels (T, ROWS) at which tiles show rows."""

    pointers: QueryPointers
    strides: Strides
    grad_strides: Strides
    level: tl.tensor
    batch: tl.tensor
    head: tl.tensor
    batch_head: tl.tensor
    number: tl.tensor
    num_tiles: tl.tensor


class Columns(NamedTuple):
    """Some columns that tiles may show: rows of the tables, or tokens."""

    row: tl.tensor  # (columns) in the tables
    valid: tl.tensor
    key: tl.tensor  # (columns, DP) codes or keys
    value: tl.tensor
    bias: tl.tensor  # (columns) log2 of the number of keys
    spread: tl.tuple  # (columns) alone; nothing for tokens


class ColumnSums(NamedTuple):
    """Sums over queries for some columns: of their values, keys and spreads."""

    grad_value: tl.tensor  # (columns, DP)
    grad_key: tl.tensor  # (columns, DP)
    grad_spread: tl.tensor  # (columns)


@triton.jit
def head_of_queries(queries, columns, strides, grad_strides, number, num_tiles, SIZES):
    """The `HeadOfQueries` of this program."""
    head = tl.program_id(1)
    batch = tl.program_id(2).to(tl.int64)
    batch_head = batch * SIZES.HEADS + head
    level_ptr = columns.level + batch_head * num_tiles * SIZES.ROWS
    return HeadOfQueries(
        queries, strides, grad_strides, level_ptr, batch, head, batch_head, number, num_tiles
    )


@triton.jit
def _tile_of_head(head, index, SIZES, BLOCKS):
    """A `TileOfQueries`, and row pointers of its queries and of the gradients of their outputs."""
    row = tl.arange(0, BLOCKS.N)
    valid = (row < SIZES.QUERY_TILE) & (index * SIZES.QUERY_TILE + row < head.number)
    order_ptr = head.pointers.order
    tile = tile_at(order_ptr, head.batch, head.head, index, head.num_tiles, row, valid, SIZES)
    rows = query_rows(head.pointers.query, head.strides, tile, BLOCKS.QUERY_STRIDE)
    grad_rows = query_rows(head.pointers.grad_output, head.grad_strides, tile, BLOCKS.GRAD_STRIDE)
    return tile, rows, grad_rows


@triton.jit
def no_sums(columns, SIZES):
    """`ColumnSums` over nothing."""
    zeros = tl.zeros([columns.row.shape[0], SIZES.PADDED_DIM], tl.float32)
    return ColumnSums(zeros, zeros, tl.zeros(columns.row.shape, tl.float32))


@triton.jit
def add_tile(sums, head, index, columns, is_shown, SIZES, BLOCKS):
    """Add the queries of a tile to the sums of the columns that it shows."""
    IS_TOKENS: tl.constexpr = len(columns.spread) == 0
    pointers = head.pointers
    tile, rows, grad_rows = _tile_of_head(head, index, SIZES, BLOCKS)
    query = load_queries(rows, tile, SIZES)[0]
    grad = load_queries(grad_rows, tile, SIZES)[0]
    number = head.batch_head * head.number + tile.token
    total_ptr = pointers.token_total if IS_TOKENS else pointers.log_total
    total = tl.load(total_ptr + number, mask=tile.valid, other=float("inf"))
    delta = tl.load(pointers.delta + number, mask=tile.valid, other=0.0)

    # (columns, BLOCK_N)
    logits = tl.zeros([columns.row.shape[0], BLOCKS.N], tl.float32)
    products = logits - delta[None, :]
    logits = product(columns.key, tl.trans(query), logits)
    if IS_TOKENS:
        logits *= SIZES.FACTOR
    bias = tl.where(is_shown, columns.bias, float("-inf"))
    weights = tl.exp2(logits + bias[:, None] - total[None, :])
    grad_spread = sums.grad_spread
    if SIZES.FIRST_ORDER and not IS_TOKENS:
        grad_seen = tl.load(pointers.grad_seen + number, mask=tile.valid, other=0.0)
        products += columns.spread[0][:, None] * grad_seen[None, :]
        grad_spread += tl.sum(weights * grad_seen[None, :], axis=1)
    grad_logits = weights * product(columns.value, tl.trans(grad), products)

    # (columns, DP)
    grad_value = product(weights.to(grad.dtype), grad, sums.grad_value)
    grad_key = product(grad_logits.to(query.dtype), query, sums.grad_key)
    return ColumnSums(grad_value, grad_key, grad_spread)


@triton.jit
def sums_where_shown(sums, head, columns, LEVEL, SIZES, BLOCKS):
    """Add the tiles that show columns at a level to their sums."""
    for first in tl.range(0, head.num_tiles, BLOCKS.TILES):
        # (TILES, columns)
        tiles = first + tl.arange(0, BLOCKS.TILES)
        level_ptr = head.level + tiles.to(tl.int64)[:, None] * SIZES.ROWS + columns.row[None, :]
        mask = (tiles < head.num_tiles)[:, None] & columns.valid[None, :]
        levels = tl.load(level_ptr, mask=mask, other=0)
        has_shown = tl.max((levels == LEVEL).to(tl.int32), axis=1)
        index = first - 1
        for _ in tl.range(0, tl.sum(has_shown, axis=0)):
            index = tl.min(tl.where((has_shown > 0) & (tiles > index), tiles, NEVER), axis=0)
            tile_level_ptr = head.level + index.to(tl.int64) * SIZES.ROWS
            level = tl.load(tile_level_ptr + columns.row, mask=columns.valid, other=0)
            sums = add_tile(sums, head, index, columns, level == LEVEL, SIZES, BLOCKS)
    return sums


@triton.jit
def row_gradients_of_head(gradients, batch_head, SIZES):
    """The `RowGradients` of a head."""
    DIM: tl.constexpr = SIZES.PADDED_DIM
    SIDE: tl.constexpr = SIZES.MATRIX_SIDE
    return RowGradients(
        gradients.row + batch_head * (SIZES.ROWS * 2 * DIM),
        gradients.spread + batch_head * SIZES.ROWS,
        gradients.matrix + batch_head * (DIM * DIM),
        gradients.matrix_size + batch_head * SIDE,
        gradients.variance + batch_head * SIDE,
    )


@triton.jit
def _write_rows(head, tables, gradients, first, SIZES, BLOCKS):
    """Write the gradients for the keys of some rows of the tables."""
    DIM: tl.constexpr = SIZES.PADDED_DIM
    row = first + tl.arange(0, BLOCKS.ROWS)
    valid = row < SIZES.ROWS
    codes = load_codes(tables, row, valid, SIZES)[0]
    values = load_values(tables, row, valid, SIZES)
    log_counts = tl.load(tables.log_counts + row, mask=valid, other=0.0)
    spread = tl.load(tables.spread + row, mask=valid, other=0.0)
    columns = Columns(row, valid, codes, values[0], log_counts, (spread,))
    sums = sums_where_shown(no_sums(columns, SIZES), head, columns, AS_CODEWORD, SIZES, BLOCKS)

    inverse = 1.0 / tl.maximum(tl.load(tables.counts + row, mask=valid, other=0), 1)
    row_ptr = gradients.row + row[:, None] * (2 * DIM) + tl.arange(0, DIM)[None, :]
    tl.store(row_ptr, sums.grad_value * inverse[:, None], mask=valid[:, None])
    tl.store(row_ptr + DIM, sums.grad_key * inverse[:, None], mask=valid[:, None])
    if SIZES.FIRST_ORDER:
        variance = sums.grad_spread * inverse * (2.0 * SIZES.FACTOR / LN2)
        tl.store(gradients.spread + row, variance, mask=valid)


@triton.jit
def _write_matrix(head, tables, gradients, strip, SIZES, BLOCKS):
    """Write the gradient of a strip of rows of the first-order matrix."""
    DIM: tl.constexpr = SIZES.PADDED_DIM
    BLOCK: tl.constexpr = DIM // SIZES.MATRIX_SIDE
    values = strip * BLOCK + tl.arange(0, BLOCK)
    dims = tl.arange(0, DIM)
    total = tl.zeros([BLOCK, DIM], tl.float32)
    for index in tl.range(0, head.num_tiles):
        tile, rows, grad_rows = _tile_of_head(head, index, SIZES, BLOCKS)
        query = load_queries(rows, tile, SIZES)[0]
        grad = load_query_dims(grad_rows, strip * BLOCK, tile, SIZES.HEAD_DIM, BLOCK)
        number = head.batch_head * head.number + tile.token
        share = tl.load(head.pointers.share + number, mask=tile.valid, other=0.0)
        # Relative to the largest, to fit half precision.
        largest = tl.maximum(tl.max(share, axis=0), LEAST)
        grad = (grad.to(tl.float32) * (share / largest)[:, None]).to(query.dtype)
        total += product(tl.trans(grad), query, tl.zeros([BLOCK, DIM], tl.float32)) * largest

    numbers = values[:, None] * DIM + dims[None, :]
    matrix = tl.load(tables.matrix + numbers)
    inverse = inverse_variance(tables, SIZES)
    variance = tl.sum(tl.sum(total * matrix, axis=1), axis=0) * inverse
    tl.store(gradients.variance + strip, variance * (-2.0 * SIZES.FACTOR / LN2))
    total *= inverse
    tl.store(gradients.matrix + numbers, total)
    tl.store(gradients.matrix_size + strip, tl.max(tl.max(tl.abs(total), axis=1), axis=0))


@triton.jit
def row_gradients_kernel(
    queries: QueryPointers,
    tables: Tables,
    columns: ColumnPointers,
    gradients: RowGradients,
    num_queries,
    num_tiles,
    query_strides: Strides,
    grad_strides: Strides,
    SIZES: tl.constexpr,
    GRADIENT_BLOCKS: tl.constexpr,
):
    """Write the gradients of some rows of the tables, or of the first-order matrix."""
    STRIPS: tl.constexpr = SIZES.MATRIX_SIDE if SIZES.FIRST_ORDER else 0
    index = tl.program_id(0)
    head = head_of_queries(
        queries, columns, query_strides, grad_strides, num_queries, num_tiles, SIZES
    )
    tables = head_of_tables(tables, head.batch_head, head.head, SIZES)
    gradients = row_gradients_of_head(gradients, head.batch_head, SIZES)
    if SIZES.FIRST_ORDER and index < STRIPS:
        _write_matrix(head, tables, gradients, index, SIZES, GRADIENT_BLOCKS)
    else:
        first = (index - STRIPS) * GRADIENT_BLOCKS.ROWS
        _write_rows(head, tables, gradients, first, SIZES, GRADIENT_BLOCKS)
