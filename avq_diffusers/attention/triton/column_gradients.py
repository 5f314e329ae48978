"""Column gradient kernel: one program per query tile, which recomputes the tile's choices.

With the weights w_ia of column a for query i, and d for gradients:

    delta_i = dy_i.y_i
    dq_i = s sum_a w_ia (dy_i.mean_a - delta_i) c_a
    dmean_a = sum_i w_ia dy_i
    dc_a = s sum_i w_ia (dy_i.mean_a - delta_i) q_i

A tile stores the last two for its own queries, column by column: all parents, refined ones with
the keys that stay, then the children of refined parents. Exact keys and sink keys follow, each a
mean of one key; the columns that they replace get 0.

Shapes: as in `attention`, T query tiles; a tile has MP + P CP columns of codewords.
"""

from typing import NamedTuple

import triton
import triton.language as tl

from avq_diffusers.attention.triton.attention import (
    output_rows,
    store_dims,
    tables_of_tile,
    tile_of_program,
)
from avq_diffusers.attention.triton.exact import (
    NEVER,
    TilePointers,
    TokenLayout,
    exact_of_tile,
    exact_tokens,
    load_token_codes,
    load_tokens,
    sinks_of_tile,
)
from avq_diffusers.attention.triton.problem import Strides
from avq_diffusers.attention.triton.rows import Tables, product
from avq_diffusers.attention.triton.softmax import load_codes, load_values, logits_of
from avq_diffusers.attention.triton.tile import (
    TileInputs,
    attend_tile,
    load_refined,
    rows_of_children,
    rows_of_parents,
)

# 1 / log2(e): logits are in base 2.
LN2 = tl.constexpr(0.6931471805599453)


class ColumnGradients(NamedTuple):
    """Gradients of each tile's columns: of mean values, then of mean keys divided by s.

    exact_column, sink_column: (B, H, T, keys, 2 D) float32; or None.
    """

    column: tl.tensor  # (B, H, T, MP + P CP, 2 D) float32
    exact_column: tl.tensor = None
    sink_column: tl.tensor = None


class GradientBlocks(NamedTuple):
    """Compile-time blocks: parents, and refined parents with their children, per step."""

    M: tl.constexpr
    P: tl.constexpr


class GradientTile(NamedTuple):
    """What the gradients of a tile's columns need."""

    inputs: TileInputs
    grad: tl.tensor  # (BLOCK_N, DP), gradients of the outputs
    log_total: tl.tensor  # (BLOCK_N), log2 of the sum of weights
    delta: tl.tensor  # (BLOCK_N)


class Columns(NamedTuple):
    """Some columns of a tile, and where their gradients go."""

    pointer: tl.tensor
    place: tl.tensor  # relative to the pointer
    valid: tl.tensor


@triton.jit
def _load_rows(pointer, strides, place, STRIDE, SIZES):
    """Rows (BLOCK_N, DP) of a tile's queries, padded with zeros."""
    start = place.batch * strides.batch + place.head.to(tl.int64) * strides.head
    dims = tl.arange(0, SIZES.PADDED_DIM)
    # One pointer for all rows: more of them, as in `query_rows`, spill.
    offsets = place.token[:, None] * STRIDE + dims[None, :]
    mask = place.valid[:, None] & (dims < SIZES.HEAD_DIM)[None, :]
    return tl.load(pointer + tl.multiple_of(start, 8) + offsets, mask=mask, other=0.0)


@triton.jit
def _add_columns(grad_query, tile, codes, values, log_counts, columns, SIZES):
    """Store the gradients of some columns; return `grad_query` with their contribution added.

    grad_query: (BLOCK_N, DP), in units of base 2.
    codes, values: (columns, DP).
    log_counts: (columns), -inf on unused columns.
    """
    # (BLOCK_N, columns)
    query, grad = tile.inputs.query, tile.grad
    bias = log_counts[None, :] - tile.log_total[:, None]
    weights = tl.exp2(logits_of(query, (codes,), bias))
    grad_logits = weights * (product(grad, tl.trans(values)) - tile.delta[:, None])
    weights = weights.to(grad.dtype)
    grad_logits = grad_logits.to(grad.dtype)

    # (columns, DP)
    grad_values = product(tl.trans(weights), grad)
    grad_codes = product(tl.trans(grad_logits), query[0])
    dims = tl.arange(0, SIZES.PADDED_DIM)
    pointers = columns.pointer + columns.place[:, None] * (2 * SIZES.HEAD_DIM) + dims[None, :]
    mask = columns.valid[:, None] & (dims < SIZES.HEAD_DIM)[None, :]
    tl.store(pointers, grad_values, mask=mask)
    tl.store(pointers + SIZES.HEAD_DIM, grad_codes, mask=mask)
    return product(grad_logits, codes, grad_query)


@triton.jit
def _add_codewords(grad_query, tile, rows, columns, SIZES):
    """`_add_columns` for rows of the tables."""
    tables, valid = tile.inputs.tables, columns.valid
    codes = load_codes(tables, rows, valid, SIZES)[0]
    values = load_values(tables, rows, valid, SIZES)[0]
    log_counts = tl.load(tables.log_counts + rows, mask=valid, other=float("-inf"))
    if SIZES.EXACT_KEYS:
        first_ptr = tile.inputs.exact.first
        first = tl.load(first_ptr + columns.place, mask=valid, other=0)
        log_counts = tl.where(first == NEVER, log_counts, float("-inf"))
    return _add_columns(grad_query, tile, codes, values, log_counts, columns, SIZES)


@triton.jit
def _add_tokens(grad_query, tile, tokens, token, columns, SIZES):
    """`_add_columns` for keys that take part as themselves."""
    DIM: tl.constexpr = SIZES.PADDED_DIM
    valid = columns.valid
    codes = load_token_codes(tokens, token, valid, 0, DIM, SIZES)
    values = load_tokens(tokens.value, token, tokens.value_stride, valid, 0, DIM, SIZES)
    log_counts = tl.where(valid, 0.0, float("-inf"))
    return _add_columns(grad_query, tile, codes, values, log_counts, columns, SIZES)


@triton.jit
def _add_all_codewords(grad_query, tile, column_ptr, SIZES, BLOCKS):
    """`_add_columns` for all parents and the children of refined parents."""
    tables = tile.inputs.tables
    refined = None
    if SIZES.SELECTS:
        refined = load_refined(tables, SIZES)
    for start in tl.range(0, SIZES.PARENT_ROWS, BLOCKS.M):
        parents, rows = rows_of_parents(refined, start, SIZES, BLOCKS.M)
        columns = Columns(column_ptr, parents, tl.full([BLOCKS.M], True, tl.int1))
        grad_query = _add_codewords(grad_query, tile, rows, columns, SIZES)
    if SIZES.NUM_REFINED > 0:
        for start in tl.range(0, SIZES.NUM_REFINED, BLOCKS.P):
            place, rows, valid = rows_of_children(tables, start, SIZES, BLOCKS.P)
            rows += 2 * SIZES.PARENT_ROWS
            columns = Columns(column_ptr, place, valid)
            grad_query = _add_codewords(grad_query, tile, rows, columns, SIZES)
    return grad_query


@triton.jit
def _add_all_tokens(grad_query, tile, chosen, gradients, SIZES):
    """`_add_columns` for exact keys and sink keys."""
    exact, sinks = tile.inputs.exact, tile.inputs.sinks
    if SIZES.EXACT_KEYS:
        for first in tl.range(0, chosen.num_keys, max(SIZES.VISIBLE, SIZES.BLOCK_K)):
            tokens, number = exact_tokens(exact, chosen, first, SIZES)
            for start in tl.range(0, number, SIZES.BLOCK_K):
                rank = start + tl.arange(0, SIZES.BLOCK_K)
                token = tl.gather(tokens, rank, axis=0)
                columns = Columns(gradients.exact_column, first + rank, rank < number)
                grad_query = _add_tokens(grad_query, tile, exact.keys, token, columns, SIZES)
    if SIZES.SINKS:
        for start in tl.range(0, sinks.number, SIZES.BLOCK_K):
            token = start + tl.arange(0, SIZES.BLOCK_K)
            columns = Columns(gradients.sink_column, token, token < sinks.number)
            grad_query = _add_tokens(grad_query, tile, sinks, token, columns, SIZES)
    return grad_query


@triton.jit
def _gradients_of_tile(gradients, exact, sinks, place, SIZES):
    """The `ColumnGradients` of a query tile."""
    COLUMNS: tl.constexpr = SIZES.PARENT_ROWS + SIZES.NUM_REFINED * SIZES.CHILD_ROWS
    ROW: tl.constexpr = 2 * SIZES.HEAD_DIM
    exact_column_ptr = gradients.exact_column
    sink_column_ptr = gradients.sink_column
    if SIZES.EXACT_KEYS:
        exact_column_ptr = gradients.exact_column + place.number * exact.budget * ROW
    if SIZES.SINKS:
        sink_column_ptr = gradients.sink_column + place.number * sinks.number * ROW
    column_ptr = gradients.column + place.number * (COLUMNS * ROW)
    return ColumnGradients(column_ptr, exact_column_ptr, sink_column_ptr)


@triton.jit
def column_gradients_kernel(
    query_ptr,
    grad_output_ptr,
    query_order_ptr,
    grad_query_ptr,
    gradients: ColumnGradients,
    tables: Tables,
    keys: TilePointers,
    num_queries,
    exact_keys,
    query_strides: Strides,
    grad_strides: Strides,
    key_layout: TokenLayout,
    sink_layout: TokenLayout,
    QUERY_STRIDE: tl.constexpr,
    GRAD_STRIDE: tl.constexpr,
    SIZES: tl.constexpr,
    BLOCKS: tl.constexpr,
    GRADIENT_BLOCKS: tl.constexpr,
):
    """Write the gradients of one tile's queries, and the tile's contribution to its columns.

    grad_query: (B, N, H, D).
    """
    HEAD_DIM: tl.constexpr = SIZES.HEAD_DIM
    place = tile_of_program(query_order_ptr, num_queries, SIZES, BLOCKS)
    tables = tables_of_tile(tables, place, SIZES)
    exact = exact_of_tile(keys, key_layout, exact_keys, tables, place, SIZES)
    sinks = sinks_of_tile(keys, sink_layout, place, SIZES)
    gradients = _gradients_of_tile(gradients, exact, sinks, place, SIZES)

    # (BLOCK_N, DP)
    query = _load_rows(query_ptr, query_strides, place, QUERY_STRIDE, SIZES)
    grad = _load_rows(grad_output_ptr, grad_strides, place, GRAD_STRIDE, SIZES)

    inputs = TileInputs((query,), place.valid, tables, exact, sinks)
    softmax, total, chosen = attend_tile(inputs, SIZES, BLOCKS)
    delta = tl.sum(softmax.numerator[0] * grad.to(tl.float32), axis=1) / total
    tile = GradientTile(inputs, grad, softmax.running_max + tl.log2(total), delta)
    grad_query = tl.zeros(query.shape, tl.float32)
    grad_query = _add_all_codewords(grad_query, tile, gradients.column, SIZES, GRADIENT_BLOCKS)
    grad_query = _add_all_tokens(grad_query, tile, chosen, gradients, SIZES)
    rows = output_rows(grad_query_ptr, place, num_queries, SIZES)
    store_dims(rows, 0, place, grad_query * LN2, HEAD_DIM)
