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

from avq_diffusers.attention.triton.first_order import BLOCK, matrix_block, matrix_size
from avq_diffusers.attention.triton.leaf_order import LeafPointers
from avq_diffusers.attention.triton.problem import Strides
from avq_diffusers.attention.triton.query_gradients import QueryNumbers
from avq_diffusers.attention.triton.row_gradients import (
    ColumnSums,
    Queries,
    RowGradients,
    add_tile,
    no_sums,
    queries_at,
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
    """Where the gradients of keys and values go, and of sinks, (B, tokens, H, D) each."""

    key: tl.tensor
    value: tl.tensor
    sink_key: tl.tensor
    sink_value: tl.tensor


@triton.jit
def _rows_of(place, row_start_ptr, SIZES):
    """The rows of the tables for the leaf and for the cell of keys at places in the leaf order."""
    PARENT_ROWS: tl.constexpr = SIZES.PARENT_ROWS
    # A cell starts with the keys that stay; the last that starts here or before has the key.
    starts = tl.load(row_start_ptr + PARENT_ROWS + tl.arange(0, PARENT_ROWS))
    parent = tl.sum((starts[None, :] <= place[:, None]).to(tl.int32), axis=1) - 1
    row = PARENT_ROWS + parent
    if SIZES.CHILD_ROWS > 0:
        first_child = 2 * PARENT_ROWS + parent * SIZES.CHILD_ROWS
        children = first_child[:, None] + tl.arange(0, SIZES.CHILD_ROWS)[None, :]
        is_before = tl.load(row_start_ptr + children) <= place[:, None]
        leaf = tl.sum(is_before.to(tl.int32), axis=1)
        row = tl.where(leaf > 0, first_child + leaf - 1, row)
    return row, parent


@triton.jit
def _add_rows(sums, found, rows, valid, SIZES):
    """Add the gradients that some rows have for their keys."""
    DIM: tl.constexpr = SIZES.PADDED_DIM
    row_ptr = found.row + rows[:, None] * (2 * DIM) + tl.arange(0, DIM)[None, :]
    of_values = tl.load(row_ptr, mask=valid[:, None], other=0.0)
    of_keys = tl.load(row_ptr + DIM, mask=valid[:, None], other=0.0)
    return ColumnSums(sums.of_values + of_values, sums.of_keys + of_keys, sums.of_spreads)


@triton.jit
def _offsets(tokens, tables, centre_ptr, rows, valid, SIZES):
    """(KEYS, DP) Offsets of keys to the means of their rows."""
    dims = tl.arange(0, SIZES.PADDED_DIM)
    codes = load_codes(tables, rows, valid, SIZES)[0].to(tl.float32)
    means = codes * (1.0 / SIZES.FACTOR) + tl.load(centre_ptr + dims)[None, :]
    return tl.where(valid[:, None], tokens.to(tl.float32) - means, 0.0)


@triton.jit
def _add_first_order(
    sums, found, tables, matrix, centre_ptr, key, value, row, parent, valid, SIZES
):
    """Add the gradients of the first-order term.

    matrix: the tables of the head, with the gradient of the matrix in place of the matrix.
    """
    DIM: tl.constexpr = SIZES.PADDED_DIM
    dims = tl.arange(0, DIM)
    is_dim = (dims < SIZES.HEAD_DIM)[None, :]
    offset = _offsets(key, tables, centre_ptr, row, valid, SIZES)
    values, _ = load_values(tables, row, valid, SIZES)
    value_offset = tl.where(is_dim, value.to(tl.float32) - values[0].to(tl.float32), 0.0)
    size = matrix_size(matrix, SIZES)
    block = matrix_block(matrix, size, 0, DIM, 0, DIM, SIZES)
    zeros = tl.zeros(offset.shape, tl.float32)
    of_values = sums.of_values + size * product(offset.to(block.dtype), block, zeros)
    of_keys = sums.of_keys + size * product(value_offset.to(block.dtype), tl.trans(block), zeros)
    of_leaf = tl.load(found.spread + row, mask=valid, other=0.0)
    of_leaf += tl.sum(tl.load(found.of_offsets + tl.arange(0, DIM // BLOCK)), axis=0)
    of_keys += of_leaf[:, None] * offset
    offset = _offsets(key, tables, centre_ptr, parent, valid, SIZES)
    of_keys += tl.load(found.spread + parent, mask=valid, other=0.0)[:, None] * offset
    return ColumnSums(of_values, of_keys, sums.of_spreads)


@triton.jit
def _store(key_ptr, value_ptr, sums, token, valid, batch, head, number, SIZES):
    """Write the gradients of tokens."""
    dims = tl.arange(0, SIZES.PADDED_DIM)
    row = (batch * number + token) * SIZES.HEADS + head
    offsets = row[:, None] * SIZES.HEAD_DIM + dims[None, :]
    mask = valid[:, None] & (dims < SIZES.HEAD_DIM)[None, :]
    tl.store(key_ptr + offsets, sums.of_keys, mask=mask)
    tl.store(value_ptr + offsets, sums.of_values, mask=mask)


@triton.jit
def _write_sinks(queries, sinks, grads, first, STRIDES, SIZES, BLOCKS):
    """Write the gradients of some sinks."""
    token = first + tl.arange(0, BLOCKS.KEYS)
    valid = token < sinks.number
    key = load_tokens(sinks.key, token, sinks.key_stride, valid, SIZES)[0]
    value = load_tokens(sinks.value, token, sinks.value_stride, valid, SIZES)[0]
    bias = tl.where(valid, 0.0, float("-inf"))
    sums = no_sums(BLOCKS.KEYS, SIZES)
    for index in tl.range(0, queries.num_tiles):
        tile = queries_at(queries, index, SIZES, BLOCKS.N)
        sums = add_tile(sums, queries, tile, key, value, bias, (), STRIDES, SIZES)
    sums = ColumnSums(sums.of_values, sums.of_keys * BLOCKS.SCALE, sums.of_spreads)
    batch, head = queries.batch, queries.head
    _store(grads.sink_key, grads.sink_value, sums, token, valid, batch, head, sinks.number, SIZES)


@triton.jit
def key_gradients_kernel(
    query_ptr,
    query_order_ptr,
    grad_output_ptr,
    tables: Tables,
    grad_tables: Tables,
    tokens: TokenPointers,
    leaves: LeafPointers,
    columns: ColumnPointers,
    numbers: QueryNumbers,
    found: RowGradients,
    grads: GradTokens,
    num_queries,
    num_tiles,
    query_strides: Strides,
    grad_strides: Strides,
    key_layout: TokenLayout,
    sink_layout: TokenLayout,
    STRIDES: tl.constexpr,
    SIZES: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    """Write the gradients of some keys, or of some sinks.

    grad_tables: the tables, with the gradient of the first-order matrix in place of the matrix.
    """
    index = tl.program_id(0)
    head = tl.program_id(1)
    batch = tl.program_id(2).to(tl.int64)
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
    if SIZES.SINKS:
        sinks = tokens_of_head(tokens.sink_key, tokens.sink_value, sink_layout, batch, head, SIZES)
        if index * BLOCKS.KEYS < sinks.number:
            _write_sinks(queries, sinks, grads, index * BLOCKS.KEYS, STRIDES, SIZES, BLOCKS)
            return
        index -= tl.cdiv(sinks.number, BLOCKS.KEYS)
    keys = tokens_of_head(tokens.key, tokens.value, key_layout, batch, head, SIZES)
    tables = head_of_tables(tables, batch_head, head, SIZES)
    found = row_gradients_of_head(found, batch_head, SIZES)
    place = index * BLOCKS.KEYS + tl.arange(0, BLOCKS.KEYS)
    valid = place < keys.number
    token = tl.load(leaves.leaf_order + batch_head * keys.number + place, mask=valid, other=0)
    row, parent = _rows_of(place, leaves.row_start + batch_head * SIZES.ROWS, SIZES)
    key = load_tokens(keys.key, token, keys.key_stride, valid, SIZES)[0]
    value = load_tokens(keys.value, token, keys.value_stride, valid, SIZES)[0]

    sums = no_sums(BLOCKS.KEYS, SIZES)
    if SIZES.REFINES == "threshold":
        level_ptr = columns.level + batch_head * num_tiles * SIZES.ROWS
        bias = tl.zeros([BLOCKS.KEYS], tl.float32)
        sums = sums_where_shown(
            queries, level_ptr, 2, row, valid, key, value, bias, (), STRIDES, SIZES, BLOCKS
        )
        sums = ColumnSums(sums.of_values, sums.of_keys * BLOCKS.SCALE, sums.of_spreads)
    sums = _add_rows(sums, found, row, valid, SIZES)
    sums = _add_rows(sums, found, parent, valid, SIZES)
    if SIZES.FIRST_ORDER:
        matrix = head_of_tables(grad_tables, batch_head, head, SIZES)
        centre_head = batch_head if SIZES.OWN_CENTRE else head.to(tl.int64)
        centre_ptr = tokens.centre + centre_head * SIZES.PADDED_DIM
        sums = _add_first_order(
            sums, found, tables, matrix, centre_ptr, key, value, row, parent, valid, SIZES
        )
    _store(grads.key, grads.value, sums, token, valid, batch, head, keys.number, SIZES)
