"""Key gradients kernel: one program for some keys, in the order of leaves, or for some sinks.

Key j has the offset k_j - c to the mean of its leaf and that of its cell, and the value offset
e_j = v_j - v of its leaf. With the gradients of `row_gradients` and n the number of keys of a row:

    dv_j = dv_leaf / n + dv_cell / n + dA (k_j - c_leaf)
    dk_j = dc_leaf / n + dc_cell / n + dA^T e_j
           + 2 (ds_leaf / n + dS) (k_j - c_leaf) + 2 ds_cell / n (k_j - c_cell)

Tiles that show its leaf key by key add the gradients of plain attention; so do all tiles to sinks.

Shapes: as in `attention`; KEYS keys of a program.
"""

from typing import NamedTuple

import triton
import triton.language as tl

from avq_diffusers.attention.triton.first_order import LEAST
from avq_diffusers.attention.triton.leaf_order import LeafPointers
from avq_diffusers.attention.triton.problem import Strides
from avq_diffusers.attention.triton.query_gradients import QueryPointers
from avq_diffusers.attention.triton.row_gradients import (
    AS_KEYS,
    Columns,
    ColumnSums,
    RowGradients,
    add_tile,
    head_of_queries,
    no_sums,
    row_gradients_of_head,
    sums_where_shown,
)
from avq_diffusers.attention.triton.rows import Tables, product
from avq_diffusers.attention.triton.select import ColumnPointers
from avq_diffusers.attention.triton.softmax import load_codes, load_values
from avq_diffusers.attention.triton.tile import head_of_tables
from avq_diffusers.attention.triton.tokens import (
    TokenLayout,
    TokenPointers,
    load_tokens,
    tokens_of_head,
)


class GradTokens(NamedTuple):
    """Where the gradients of keys and values go, and of sinks or None, (B, tokens, H, D) each."""

    key: tl.tensor
    value: tl.tensor
    sink_key: tl.tensor
    sink_value: tl.tensor


@triton.jit
def _rows_of(key_index, row_start_ptr, SIZES):
    """The rows of the leaf and of the cell of keys at places in the leaf order."""
    PARENT_ROWS: tl.constexpr = SIZES.PARENT_ROWS
    # A cell starts with the keys that stay; the last that starts here or before has the key.
    starts = tl.load(row_start_ptr + PARENT_ROWS + tl.arange(0, PARENT_ROWS))
    cell = tl.sum((starts[None, :] <= key_index[:, None]).to(tl.int32), axis=1) - 1
    leaf = PARENT_ROWS + cell
    if SIZES.CHILD_ROWS > 0:
        first_child = 2 * PARENT_ROWS + cell * SIZES.CHILD_ROWS
        children = first_child[:, None] + tl.arange(0, SIZES.CHILD_ROWS)[None, :]
        is_before = tl.load(row_start_ptr + children) <= key_index[:, None]
        child = tl.sum(is_before.to(tl.int32), axis=1)
        leaf = tl.where(child > 0, first_child + child - 1, leaf)
    return leaf, cell


@triton.jit
def _load_columns(tokens, token, row, valid, SIZES):
    """The `Columns` of some tokens."""
    key = load_tokens(tokens.key, token, tokens.key_stride, valid, SIZES)[0]
    value = load_tokens(tokens.value, token, tokens.value_stride, valid, SIZES)[0]
    return Columns(row, valid, key, value, tl.zeros(row.shape, tl.float32), ())


@triton.jit
def _add_rows(sums, gradients, rows, valid, SIZES):
    """Add the gradients that some rows have for their keys."""
    DIM: tl.constexpr = SIZES.PADDED_DIM
    row_ptr = gradients.row + rows[:, None] * (2 * DIM) + tl.arange(0, DIM)[None, :]
    grad_value = tl.load(row_ptr, mask=valid[:, None], other=0.0)
    grad_key = tl.load(row_ptr + DIM, mask=valid[:, None], other=0.0)
    return ColumnSums(sums.grad_value + grad_value, sums.grad_key + grad_key, sums.grad_spread)


@triton.jit
def _offsets(keys, rows, tables, centre_ptr, SIZES):
    """(KEYS, DP) Offsets of keys to the means of rows."""
    codes = load_codes(tables, rows, keys.valid, SIZES)[0].to(tl.float32)
    centre = tl.load(centre_ptr + tl.arange(0, SIZES.PADDED_DIM))
    return keys.key.to(tl.float32) - codes * (1.0 / SIZES.FACTOR) - centre[None, :]


@triton.jit
def _first_order_gradients(keys, cell, gradients, tables, centre_ptr, SIZES, SCALE):
    """The gradients of the first-order term."""
    DIM: tl.constexpr = SIZES.PADDED_DIM
    strips = tl.arange(0, SIZES.MATRIX_SIDE)
    dims = tl.arange(0, DIM)
    means = load_values(tables, keys.row, keys.valid, SIZES)
    value_offset = keys.value.to(tl.float32) - means[0].to(tl.float32)
    value_offset = tl.where((dims < SIZES.HEAD_DIM)[None, :], value_offset, 0.0)
    offset = _offsets(keys, keys.row, tables, centre_ptr, SIZES)
    # Relative to the largest number, to fit half precision.
    size = tl.maximum(tl.max(tl.load(gradients.matrix_size + strips), axis=0), LEAST)
    matrix = tl.load(gradients.matrix + dims[:, None] * DIM + dims[None, :]) * (1.0 / size)
    matrix = matrix.to(keys.key.dtype)
    zeros = tl.zeros(offset.shape, tl.float32)
    grad_value = product(offset.to(matrix.dtype), tl.trans(matrix), zeros) * (size * SCALE)
    grad_key = product(value_offset.to(matrix.dtype), matrix, zeros) * size

    leaf_spread = tl.load(gradients.spread + keys.row, mask=keys.valid, other=0.0)
    leaf_spread += tl.sum(tl.load(gradients.variance + strips), axis=0)
    cell_spread = tl.load(gradients.spread + cell, mask=keys.valid, other=0.0)
    grad_key += leaf_spread[:, None] * offset
    grad_key += cell_spread[:, None] * _offsets(keys, cell, tables, centre_ptr, SIZES)
    return ColumnSums(grad_value, grad_key, tl.zeros(cell.shape, tl.float32))


@triton.jit
def _store(key_ptr, value_ptr, sums, token, valid, head, number, SIZES, SCALE):
    """Write the gradients of some of a head's tokens."""
    dims = tl.arange(0, SIZES.PADDED_DIM)
    row = (head.batch * number + token) * SIZES.HEADS + head.head
    offsets = row[:, None] * SIZES.HEAD_DIM + dims[None, :]
    mask = valid[:, None] & (dims < SIZES.HEAD_DIM)[None, :]
    tl.store(key_ptr + offsets, sums.grad_key * SCALE, mask=mask)
    tl.store(value_ptr + offsets, sums.grad_value, mask=mask)


@triton.jit
def _write_sinks(head, sinks, grads, first, SIZES, BLOCKS):
    """Write the gradients of some sinks."""
    token = first + tl.arange(0, BLOCKS.KEYS)
    valid = token < sinks.number
    columns = _load_columns(sinks, token, token, valid, SIZES)
    sums = no_sums(columns, SIZES)
    for index in tl.range(0, head.num_tiles):
        sums = add_tile(sums, head, index, columns, valid, SIZES, BLOCKS)
    key_ptr, value_ptr = grads.sink_key, grads.sink_value
    _store(key_ptr, value_ptr, sums, token, valid, head, sinks.number, SIZES, BLOCKS.SCALE)


@triton.jit
def key_gradients_kernel(
    queries: QueryPointers,
    tables: Tables,
    tokens: TokenPointers,
    leaves: LeafPointers,
    columns: ColumnPointers,
    gradients: RowGradients,
    grads: GradTokens,
    num_queries,
    num_tiles,
    query_strides: Strides,
    grad_strides: Strides,
    key_layout: TokenLayout,
    sink_layout: TokenLayout,
    SIZES: tl.constexpr,
    GRADIENT_BLOCKS: tl.constexpr,
):
    """Write the gradients of some keys, or of some sinks."""
    KEYS: tl.constexpr = GRADIENT_BLOCKS.KEYS
    SCALE: tl.constexpr = GRADIENT_BLOCKS.SCALE
    index = tl.program_id(0)
    head = head_of_queries(
        queries, columns, query_strides, grad_strides, num_queries, num_tiles, SIZES
    )
    if SIZES.SINKS:
        sinks = tokens_of_head(
            tokens.sink_key, tokens.sink_value, sink_layout, head.batch, head.head, SIZES
        )
        if index * KEYS < sinks.number:
            _write_sinks(head, sinks, grads, index * KEYS, SIZES, GRADIENT_BLOCKS)
            return
        index -= tl.cdiv(sinks.number, KEYS)
    keys = tokens_of_head(tokens.key, tokens.value, key_layout, head.batch, head.head, SIZES)
    tables = head_of_tables(tables, head.batch_head, head.head, SIZES)
    gradients = row_gradients_of_head(gradients, head.batch_head, SIZES)

    key_index = index * KEYS + tl.arange(0, KEYS)
    valid = key_index < keys.number
    token_ptr = leaves.leaf_order + head.batch_head * keys.number + key_index
    token = tl.load(token_ptr, mask=valid, other=0)
    key_index = tl.minimum(key_index, keys.number - 1)
    leaf, cell = _rows_of(key_index, leaves.row_start + head.batch_head * SIZES.ROWS, SIZES)
    shown = _load_columns(keys, token, leaf, valid, SIZES)
    sums = no_sums(shown, SIZES)
    if SIZES.FIRST_ORDER:
        centre_ptr = tokens.centre + head.batch_head * SIZES.PADDED_DIM
        sums = _first_order_gradients(shown, cell, gradients, tables, centre_ptr, SIZES, SCALE)
    sums = _add_rows(sums, gradients, leaf, valid, SIZES)
    sums = _add_rows(sums, gradients, cell, valid, SIZES)
    if SIZES.REFINES == "threshold":
        sums = sums_where_shown(sums, head, shown, AS_KEYS, SIZES, GRADIENT_BLOCKS)
    _store(grads.key, grads.value, sums, token, valid, head, keys.number, SIZES, SCALE)
