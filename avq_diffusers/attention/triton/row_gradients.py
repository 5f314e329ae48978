"""Row gradients kernel: the gradients of what represents the keys, summed over the query tiles.

One program for some rows of the tables takes the tiles that show one of them as a codeword. For row
a, as in `query_gradients`:

    dv_a = sum_i w_ia dy_i    dc_a = sum_i w_ia (p_ia - delta_i) q_i    ds_a = sum_i w_ia dr_i

Further programs find the gradient of the first-order matrix, M = scale A / S,

    dM = sum_i g_i dy_i q_i^T    dA = scale dM / S    dS = -<dM, M> / S

Shapes: as in `attention`.
"""

from typing import NamedTuple

import triton
import triton.language as tl

from avq_diffusers.attention.triton.first_order import BLOCK, LEAST
from avq_diffusers.attention.triton.problem import Strides
from avq_diffusers.attention.triton.query_gradients import QueryNumbers, load_tile
from avq_diffusers.attention.triton.rows import Tables, product
from avq_diffusers.attention.triton.select import ColumnPointers
from avq_diffusers.attention.triton.softmax import load_codes, load_values, logits_of
from avq_diffusers.attention.triton.tile import head_of_tables, tile_at

# Beyond the index of every tile.
NEVER = tl.constexpr(2**31 - 1)


class RowGradients(NamedTuple):
    """Gradients for the keys of each row, and of the first-order matrix or None."""

    row: tl.tensor  # (B, H, ROWS, 2 DP) float32, of a key's value, then of the key
    spread: tl.tensor  # (B, H, ROWS) float32, of a key, divided by its offset to the mean
    # dA as `matrix` and `matrix_scale` of `Tables`.
    matrix: tl.tensor
    matrix_scale: tl.tensor
    of_offsets: tl.tensor  # (B, H, DP / 16) float32, parts of dS, as `spread`


class GradientBlocks(NamedTuple):
    """Compile-time blocks: queries, rows, keys, and query tiles that are looked at at once.

    SCALE: factor on the logits.
    """

    N: tl.constexpr
    ROWS: tl.constexpr
    KEYS: tl.constexpr
    TILES: tl.constexpr
    SCALE: tl.constexpr


class Queries(NamedTuple):
    """Where the queries of a head and the gradients of their outputs are."""

    query: tl.tensor
    grad: tl.tensor
    order: tl.tensor
    numbers: QueryNumbers
    query_strides: Strides
    grad_strides: Strides
    batch: tl.tensor
    head: tl.tensor
    number: tl.tensor
    num_tiles: tl.tensor


class ColumnSums(NamedTuple):
    """Sums over queries for some columns: of their values, keys and spreads."""

    of_values: tl.tensor  # (columns, DP)
    of_keys: tl.tensor  # (columns, DP)
    of_spreads: tl.tensor  # (columns)


@triton.jit
def no_sums(COLUMNS, SIZES):
    """`ColumnSums` over nothing."""
    zeros = tl.zeros([COLUMNS, SIZES.PADDED_DIM], tl.float32)
    return ColumnSums(zeros, zeros, tl.zeros([COLUMNS], tl.float32))


@triton.jit
def queries_at(queries, index, SIZES, BLOCK_N):
    """The `TileOfQueries` at an index."""
    row = tl.arange(0, BLOCK_N)
    valid = (row < SIZES.QUERY_TILE) & (index * SIZES.QUERY_TILE + row < queries.number)
    return tile_at(
        queries.order, queries.batch, queries.head, index, queries.num_tiles, row, valid, SIZES
    )


@triton.jit
def add_tile(sums, queries, tile, codes, values, bias, spread, STRIDES, SIZES):
    """Add the queries of a tile to the sums of columns.

    codes: (columns, DP) rows of the tables with a spread, or tokens.
    bias: (columns), -inf where a column is not shown.
    spread: a tuple of (columns), empty for tokens.
    """
    IS_TOKENS: tl.constexpr = len(spread) == 0
    dims = tl.arange(0, SIZES.PADDED_DIM)
    query = load_tile(queries.query, queries.query_strides, tile, dims, STRIDES.QUERY, SIZES)
    grad = load_tile(queries.grad, queries.grad_strides, tile, dims, STRIDES.GRAD, SIZES)
    number = tile.batch_head * queries.number + tile.token
    numbers = queries.numbers
    total_ptr = numbers.token_total if IS_TOKENS else numbers.log_total
    total = tl.load(total_ptr + number, mask=tile.valid, other=float("inf"))
    delta = tl.load(numbers.delta + number, mask=tile.valid, other=0.0)

    # (columns, BLOCK_N)
    logits = tl.zeros([codes.shape[0], query.shape[0]], tl.float32)
    products = logits - delta[None, :]
    logits = product(codes, tl.trans(query), logits)
    if IS_TOKENS:
        logits *= SIZES.FACTOR
    weights = tl.exp2(logits + bias[:, None] - total[None, :])
    of_spreads = sums.of_spreads
    if SIZES.FIRST_ORDER and not IS_TOKENS:
        grad_seen = tl.load(numbers.grad_seen + number, mask=tile.valid, other=0.0)
        products += spread[0][:, None] * grad_seen[None, :]
        of_spreads += tl.sum(weights * grad_seen[None, :], axis=1)
    grad_logits = weights * product(values, tl.trans(grad), products)

    # (columns, DP)
    of_values = product(weights.to(grad.dtype), grad, sums.of_values)
    of_keys = product(grad_logits.to(query.dtype), query, sums.of_keys)
    return ColumnSums(of_values, of_keys, of_spreads)


@triton.jit
def sums_where_shown(
    queries, level_ptr, LEVEL, rows, is_row, codes, values, bias, spread, STRIDES, SIZES, BLOCKS
):
    """`ColumnSums` over the tiles that show rows at a level; arguments as in `add_tile`."""
    sums = no_sums(rows.shape[0], SIZES)
    for first in tl.range(0, queries.num_tiles, BLOCKS.TILES):
        # (TILES, columns)
        tiles = first + tl.arange(0, BLOCKS.TILES)
        pointers = level_ptr + tiles.to(tl.int64)[:, None] * SIZES.ROWS + rows[None, :]
        mask = (tiles < queries.num_tiles)[:, None] & is_row[None, :]
        is_shown = tl.load(pointers, mask=mask, other=0) == LEVEL
        has_shown = tl.max(is_shown.to(tl.int32), axis=1)
        index = first - 1
        for _ in tl.range(0, tl.sum(has_shown, axis=0)):
            index = tl.min(tl.where((has_shown > 0) & (tiles > index), tiles, NEVER), axis=0)
            level = tl.load(
                level_ptr + index.to(tl.int64) * SIZES.ROWS + rows, mask=is_row, other=0
            )
            tile = queries_at(queries, index, SIZES, BLOCKS.N)
            shown_bias = tl.where(level == LEVEL, bias, float("-inf"))
            sums = add_tile(sums, queries, tile, codes, values, shown_bias, spread, STRIDES, SIZES)
    return sums


@triton.jit
def row_gradients_of_head(found, batch_head, SIZES):
    """The `RowGradients` of a head."""
    DIM: tl.constexpr = SIZES.PADDED_DIM
    SIDE: tl.constexpr = DIM // BLOCK
    return RowGradients(
        found.row + batch_head * (SIZES.ROWS * 2 * DIM),
        found.spread + batch_head * SIZES.ROWS,
        found.matrix + batch_head * (DIM * DIM),
        found.matrix_scale + batch_head * (SIDE * SIDE),
        found.of_offsets + batch_head * SIDE,
    )


@triton.jit
def _write_rows(queries, tables, level_ptr, found, first, STRIDES, SIZES, BLOCKS):
    """Write the gradients for the keys of some rows of the tables."""
    DIM: tl.constexpr = SIZES.PADDED_DIM
    rows = first + tl.arange(0, BLOCKS.ROWS)
    is_row = rows < SIZES.ROWS
    codes = load_codes(tables, rows, is_row, SIZES)[0]
    values, _ = load_values(tables, rows, is_row, SIZES)
    spread = tl.load(tables.spread + rows, mask=is_row, other=0.0)
    log_counts = tl.load(tables.log_counts + rows, mask=is_row, other=float("-inf"))
    sums = sums_where_shown(
        queries,
        level_ptr,
        1,
        rows,
        is_row,
        codes,
        values[0],
        log_counts,
        (spread,),
        STRIDES,
        SIZES,
        BLOCKS,
    )
    counts = tl.load(tables.counts + rows, mask=is_row, other=0)
    share = 1.0 / tl.maximum(counts, 1)
    row_ptr = found.row + rows[:, None] * (2 * DIM) + tl.arange(0, DIM)[None, :]
    tl.store(row_ptr, sums.of_values * share[:, None], mask=is_row[:, None])
    tl.store(row_ptr + DIM, sums.of_keys * (share * BLOCKS.SCALE)[:, None], mask=is_row[:, None])
    if SIZES.FIRST_ORDER:
        of_offsets = sums.of_spreads * share * (2.0 * SIZES.FACTOR * SIZES.FACTOR)
        tl.store(found.spread + rows, of_offsets, mask=is_row)


@triton.jit
def _inverse_spread(tables, SIZES):
    """1 over the sum of all keys' spreads around their leaves; 0 for the inverse of nothing."""
    total = tl.zeros([64], tl.float32)
    for first in tl.range(SIZES.PARENT_ROWS, SIZES.ROWS, 64):
        rows = first + tl.arange(0, 64)
        counts = tl.load(tables.counts + rows, mask=rows < SIZES.ROWS, other=0)
        total += counts * tl.load(tables.spread + rows, mask=rows < SIZES.ROWS, other=0.0)
    spread = tl.sum(total, axis=0)
    return tl.where(spread > LEAST, 1.0 / tl.maximum(spread, LEAST), 0.0)


@triton.jit
def _write_matrix(queries, tables, found, strip, STRIDES, SIZES, BLOCKS):
    """Write the gradient of 16 rows of the first-order matrix."""
    DIM: tl.constexpr = SIZES.PADDED_DIM
    SIDE: tl.constexpr = DIM // BLOCK
    values = strip * BLOCK + tl.arange(0, BLOCK)
    dims = tl.arange(0, DIM)
    total = tl.zeros([BLOCK, DIM], tl.float32)
    for index in tl.range(0, queries.num_tiles):
        tile = queries_at(queries, index, SIZES, BLOCKS.N)
        query = load_tile(queries.query, queries.query_strides, tile, dims, STRIDES.QUERY, SIZES)
        grad = load_tile(queries.grad, queries.grad_strides, tile, values, STRIDES.GRAD, SIZES)
        number = tile.batch_head * queries.number + tile.token
        share = tl.load(queries.numbers.share + number, mask=tile.valid, other=0.0)
        # Relative to the largest, to fit half precision.
        largest = tl.maximum(tl.max(share, axis=0), LEAST)
        grad = (grad.to(tl.float32) * (share / largest)[:, None]).to(query.dtype)
        total += product(tl.trans(grad), query, tl.zeros([BLOCK, DIM], tl.float32)) * largest

    inverse = _inverse_spread(tables, SIZES)
    numbers = values[:, None] * DIM + dims[None, :]
    blocks = strip * SIDE + dims // BLOCK
    matrix = tl.load(tables.matrix + numbers).to(tl.float32)
    matrix *= tl.load(tables.matrix_scale + blocks)[None, :]
    of_offsets = tl.sum(tl.sum(total * matrix, axis=1), axis=0) * inverse
    tl.store(found.of_offsets + strip, of_offsets * (-2.0 * SIZES.FACTOR * SIZES.FACTOR))
    largest = tl.maximum(tl.max(tl.max(tl.abs(total), axis=1), axis=0), LEAST)
    tl.store(found.matrix + numbers, (total / largest).to(found.matrix.dtype.element_ty))
    scale = tl.zeros([DIM], tl.float32) + largest * inverse * BLOCKS.SCALE
    tl.store(found.matrix_scale + blocks, scale)


@triton.jit
def row_gradients_kernel(
    query_ptr,
    query_order_ptr,
    grad_output_ptr,
    tables: Tables,
    columns: ColumnPointers,
    numbers: QueryNumbers,
    found: RowGradients,
    num_queries,
    num_tiles,
    query_strides: Strides,
    grad_strides: Strides,
    STRIDES: tl.constexpr,
    SIZES: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    """Write the gradients of some rows of the tables, or of the first-order matrix."""
    head = tl.program_id(1)
    batch = tl.program_id(2).to(tl.int64)
    index = tl.program_id(0)
    batch_head = batch * SIZES.HEADS + head
    queries = Queries(
        query_ptr,
        grad_output_ptr,
        query_order_ptr,
        numbers,
        query_strides,
        grad_strides,
        batch,
        head,
        num_queries,
        num_tiles,
    )
    tables = head_of_tables(tables, batch_head, head, SIZES)
    found = row_gradients_of_head(found, batch_head, SIZES)
    if SIZES.FIRST_ORDER:
        STRIPS: tl.constexpr = SIZES.PADDED_DIM // BLOCK
        if index < STRIPS:
            _write_matrix(queries, tables, found, index, STRIDES, SIZES, BLOCKS)
            return
        index -= STRIPS
    level_ptr = columns.level + batch_head * num_tiles * SIZES.ROWS
    first = index * BLOCKS.ROWS
    _write_rows(queries, tables, level_ptr, found, first, STRIDES, SIZES, BLOCKS)
