"""Aggregation kernel: the leaf of each key, and mean, spread and count of each codeword's keys.

Shapes: as in `precompute`.
"""

from typing import NamedTuple

import triton
import triton.language as tl

from avq_diffusers.attention.triton.leaf_order import LeafPointers
from avq_diffusers.attention.triton.pieces import (
    Chunks,
    cell_of,
    first_extra_piece,
    keys_of_cell,
    leaf_rows,
    parent_of,
    sorted_keys,
)
from avq_diffusers.attention.triton.problem import Strides
from avq_diffusers.attention.triton.rows import (
    ParentPointers,
    Tables,
    bias_of,
    first_maximum,
    head_of_program,
    head_start,
    load_keys,
    load_rows,
    origin_of,
    own_parents,
    product,
)
from avq_diffusers.attention.triton.sort import SortPointers


class PiecePointers(NamedTuple):
    """What pieces store for the program that adds them up."""

    # (B, H, pieces, L, DP) float32, of values; with mean keys followed by the same for keys.
    piece_sums: tl.tensor
    piece_counts: tl.tensor  # (B, H, pieces, L) int32
    piece_squares: tl.tensor  # (B, H, pieces, L) float32; or None


class HeadOfPieces(NamedTuple):
    """What pieces of a head read besides its keys, and what they write."""

    value: tl.tensor
    value_stride: tl.tensor  # of tokens, divided by ALIGN
    square: tl.tensor
    leaf: tl.tensor
    centre: tl.tensor
    pieces: PiecePointers
    tables: Tables
    row_start: tl.tensor


class Sums(NamedTuple):
    """Sums over each leaf's keys: values and keys (L, DP), squares (L), and counts (L).

    Without mean keys, the sums of keys and squares are zero.
    """

    value_sums: tl.tensor
    key_sums: tl.tensor
    square_sums: tl.tensor
    counts: tl.tensor


@triton.jit
def _load_codes(head, parent, cell, SIZES, CELLS):
    """(L, DP) codes of the parent and its children, and (L) biases; nothing without children."""
    codes = ()
    bias = ()
    leaves = tl.arange(0, CELLS.LEAF_ROWS)
    if CELLS.NUM_CHILDREN > 0 and SIZES.STORED:
        rows = tl.where(
            leaves == 0, parent, CELLS.PARENT_ROWS + parent * CELLS.CHILD_ROWS + leaves - 1
        )
        is_code = leaves <= tl.where(parent < CELLS.NUM_PARENTS, CELLS.NUM_CHILDREN, 0)
        dims = tl.arange(0, SIZES.PADDED_DIM)
        pointers = head.source.stored_codes + rows[:, None] * SIZES.PADDED_DIM + dims[None, :]
        codes = tl.load(pointers, mask=is_code[:, None], other=0.0)
        bias = tl.load(head.source.bias + rows, mask=is_code, other=float("-inf"))
    elif CELLS.NUM_CHILDREN > 0:
        # The parent, then keys of the cell, evenly spaced in index order.
        rank = tl.maximum(leaves - 1, 0).to(tl.int64) * cell.total // CELLS.NUM_CHILDREN
        rank = tl.minimum(rank.to(tl.int32), tl.maximum(cell.total - 1, 0))
        is_code = (leaves <= CELLS.NUM_CHILDREN) & (cell.total > 0)
        keys = keys_of_cell(rank, is_code, cell)
        codes = load_keys(head, keys, is_code & (leaves > 0), SIZES)
        parents = parent + tl.zeros_like(leaves)
        parent_codes = own_parents(head, parents, is_code & (leaves == 0), SIZES)
        codes = tl.where((leaves == 0)[:, None], parent_codes, codes)
        bias = bias_of(codes, is_code)
    return codes, bias


@triton.jit
def _sum_leaves(head, at, codes, bias, cell, part, SIZES, CELLS, KEYS):
    """The `Sums` of a part of a cell's keys by their leaf, which is stored."""
    LEAF_ROWS: tl.constexpr = CELLS.LEAF_ROWS
    start = part * CELLS.PIECE
    stop = tl.minimum(start + CELLS.PIECE, cell.total)
    leaves = tl.arange(0, LEAF_ROWS)
    value_sums = tl.zeros([LEAF_ROWS, SIZES.PADDED_DIM], tl.float32)
    key_sums = value_sums
    # Tensor cores also add up 1 and the square of each key, in columns 0 and 1.
    column = tl.arange(0, 8)[None, :]
    numbers = tl.zeros([LEAF_ROWS, 8], tl.float32)
    square = tl.zeros([KEYS], tl.float32)
    for block in tl.range(start, stop, KEYS):
        # (KEYS)
        rank = block + tl.arange(0, KEYS)
        is_key = rank < stop
        keys = keys_of_cell(rank, is_key, cell)

        # (KEYS, DP)
        value = load_rows(at.value, keys, at.value_stride, SIZES.ALIGN, is_key, SIZES)
        if CELLS.NUM_CHILDREN > 0 or SIZES.MEANS:
            key = load_keys(head, keys, is_key, SIZES)

        # (L, KEYS)
        if CELLS.NUM_CHILDREN > 0:
            scores = product(key, codes.T) + bias[None, :]
            _, leaf = first_maximum(scores, leaves[None, :], LEAF_ROWS - 1)
            is_chosen = (leaves[:, None] == leaf[None, :]) & is_key[None, :]
        else:
            is_chosen = (leaves[:, None] == 0) & is_key[None, :]
        one_hot = tl.where(is_chosen, 1.0, 0.0)
        chosen = one_hot.to(value.dtype)
        value_sums += product(chosen, value)
        if SIZES.MEANS:
            key_sums += product(chosen, key)
            square = tl.load(at.square + keys, mask=is_key, other=0.0)
        key_numbers = tl.where(column == 0, 1.0, tl.where(column == 1, square[:, None], 0.0))
        numbers = product(one_hot, key_numbers, numbers)
        if CELLS.LEAVES:
            leaf = tl.sum(tl.where(is_chosen, leaves[:, None], 0), axis=0)
            tl.store(at.leaf + cell.first + rank, leaf, mask=is_key)
    counts = tl.sum(tl.where(column == 0, numbers, 0.0), axis=1).to(tl.int32)
    return Sums(value_sums, key_sums, tl.sum(tl.where(column == 1, numbers, 0.0), axis=1), counts)


@triton.jit
def _piece_at(pieces, piece, SIZES, CELLS):
    """Pointers to the sums over a piece, in the order of `Sums`."""
    KEYS: tl.constexpr = CELLS.LEAF_ROWS * SIZES.PADDED_DIM
    ROW: tl.constexpr = (2 if SIZES.MEANS else 1) * KEYS
    leaves = tl.arange(0, CELLS.LEAF_ROWS)
    numbers = leaves[:, None] * SIZES.PADDED_DIM + tl.arange(0, SIZES.PADDED_DIM)[None, :]
    values_ptr = pieces.piece_sums + piece * ROW + numbers
    squares_ptr = pieces.piece_counts
    if SIZES.MEANS:
        squares_ptr = pieces.piece_squares + piece * CELLS.LEAF_ROWS + leaves
    counts_ptr = pieces.piece_counts + piece * CELLS.LEAF_ROWS + leaves
    return Sums(values_ptr, values_ptr + KEYS, squares_ptr, counts_ptr)


@triton.jit
def _store_piece(pieces, piece, sums, SIZES, CELLS):
    """Store the sums over a piece."""
    at = _piece_at(pieces, piece, SIZES, CELLS)
    tl.store(at.value_sums, sums.value_sums)
    tl.store(at.counts, sums.counts)
    if SIZES.MEANS:
        tl.store(at.key_sums, sums.key_sums)
        tl.store(at.square_sums, sums.square_sums)


@triton.jit
def _add_pieces(pieces, sums, parent, first_extra, num_parts, SIZES, CELLS):
    """The sums over all pieces of a parent, in order."""
    at = _piece_at(pieces, parent, SIZES, CELLS)
    values = tl.load(at.value_sums)
    counts = tl.load(at.counts)
    keys = sums.key_sums
    squares = sums.square_sums
    if SIZES.MEANS:
        keys = tl.load(at.key_sums)
        squares = tl.load(at.square_sums)
    for other in tl.range(first_extra, first_extra + num_parts - 1):
        at = _piece_at(pieces, other, SIZES, CELLS)
        values += tl.load(at.value_sums)
        counts += tl.load(at.counts)
        if SIZES.MEANS:
            keys += tl.load(at.key_sums)
            squares += tl.load(at.square_sums)
    return Sums(values, keys, squares, counts)


@triton.jit
def _log2(count):
    """log2 of a count, -inf for 0."""
    return tl.where(count > 0, tl.log2(tl.maximum(count, 1).to(tl.float32)), float("-inf"))


@triton.jit
def _store_values(tables, rows, means, is_row, SIZES):
    """Write mean values (rows, DP)."""
    dims = tl.arange(0, SIZES.PADDED_DIM)
    pointers = tables.mean_values + rows[:, None] * SIZES.PADDED_DIM + dims[None, :]
    tl.store(pointers, means.to(tables.mean_values.dtype.element_ty), mask=is_row[:, None])


@triton.jit
def _store_mean_keys(head, at, rows, sums, squares, counts, is_row, SIZES, CELLS):
    """Write mean keys around the centre, times the logits' factor, 0 without keys.

    Returns the spread of each row: the mean squared distance of its keys to their mean, times the
    squared factor.
    """
    dims = tl.arange(0, SIZES.PADDED_DIM)
    inverse = 1.0 / tl.maximum(counts, 1)
    means = sums * inverse[:, None]
    offsets = means - tl.load(at.centre + dims)[None, :]
    codes = tl.where((counts > 0)[:, None], offsets * CELLS.FACTOR, 0.0)
    pointers = at.tables.codes + rows[:, None] * SIZES.PADDED_DIM + dims[None, :]
    tl.store(pointers, codes.to(at.tables.codes.dtype.element_ty), mask=is_row[:, None])
    offsets = means - origin_of(head, SIZES)[None, :]
    variance = tl.maximum(squares * inverse - tl.sum(offsets * offsets, axis=1), 0.0)
    # The variance of a single key is rounding error.
    return tl.where(counts > 1, variance * (CELLS.FACTOR * CELLS.FACTOR), 0.0)


@triton.jit
def _store_rows(head, at, sums, parent, first, SIZES, CELLS):
    """Write one parent's rows: for all its keys, for the keys that stay, and for its children.

    first: number of keys of all lower parents.
    """
    tables, counts = at.tables, sums.counts
    count = tl.sum(counts, axis=0)
    one = tl.zeros([1], tl.int32)
    rows, is_row = leaf_rows(parent, CELLS)
    if SIZES.MEANS:
        keys, squares = sums.key_sums, sums.square_sums
        spread = _store_mean_keys(head, at, rows, keys, squares, counts, is_row, SIZES, CELLS)
        tl.store(tables.spread + rows, spread, mask=is_row)
        # (1, DP)
        keys = tl.sum(keys, axis=0)[None, :]
        squares = tl.sum(squares, axis=0) + tl.zeros([1], tl.float32)
        cell_spread = _store_mean_keys(
            head, at, one + parent, keys, squares, one + count, one == 0, SIZES, CELLS
        )
        tl.store(tables.spread + parent + one, cell_spread)
        inside = tl.sum(spread * counts, axis=0) / tl.maximum(count, 1)
        tl.store(tables.inside + 2 * parent, inside)
        further = tl.sum((counts > 0).to(tl.float32), axis=0) - 1.0
        tl.store(tables.inside + 2 * parent + 1, further)

    means = sums.value_sums * (1.0 / tl.maximum(counts, 1))[:, None]
    _store_values(tables, rows, means, is_row, SIZES)
    tl.store(tables.counts + rows, counts, mask=is_row)
    if CELLS.LEAVES:
        starts = first + tl.cumsum(counts, axis=0) - counts
        tl.store(at.row_start + rows, starts, mask=is_row)
    tl.store(tables.log_counts + rows, _log2(counts), mask=is_row)
    means = tl.sum(sums.value_sums, axis=0)[None, :] * (1.0 / tl.maximum(count, 1))
    _store_values(tables, one + parent, means, one == 0, SIZES)
    tl.store(tables.counts + parent, count)
    tl.store(tables.log_counts + parent, _log2(count))


@triton.jit
def _pieces_of_head(pieces, batch_head, num_pieces, SIZES, CELLS):
    """The `PiecePointers` of a head."""
    first = batch_head * num_pieces * CELLS.LEAF_ROWS
    return PiecePointers(
        pieces.piece_sums + first * ((2 if SIZES.MEANS else 1) * SIZES.PADDED_DIM),
        pieces.piece_counts + first,
        pieces.piece_squares + first,
    )


@triton.jit
def _tables_of_head(tables, batch_head, SIZES, CELLS):
    """The `Tables` of a head."""
    row = batch_head * CELLS.ROWS
    return Tables(
        tables.codes + row * SIZES.PADDED_DIM,
        tables.mean_values + row * SIZES.PADDED_DIM,
        tables.counts + row,
        tables.log_counts + row,
        tables.spread + row,
        tables.inside + batch_head * (2 * CELLS.PARENT_ROWS),
        tables.matrix,
        tables.largest,
    )


@triton.jit
def aggregate_kernel(
    key_ptr,
    value_ptr,
    centre_ptr,
    leaf_ptr,
    source: ParentPointers,
    sort: SortPointers,
    pieces: PiecePointers,
    tables: Tables,
    leaves: LeafPointers,
    key_strides: Strides,
    value_strides: Strides,
    chunks: Chunks,
    num_pieces,
    SIZES: tl.constexpr,
    CELLS: tl.constexpr,
    KEYS: tl.constexpr,
):
    """Choose leaves for one piece of one parent's keys, count the keys and sum their values.

    leaf: (B, H, S) int32, each key's leaf in its cell, in the order of cells, if LEAVES.
    """
    LEAF_ROWS: tl.constexpr = CELLS.LEAF_ROWS
    PIECE: tl.constexpr = CELLS.PIECE
    piece = tl.program_id(2)
    head = head_of_program(key_ptr, source, key_strides, chunks.num_keys, SIZES)
    first_key = head.batch_head * chunks.num_keys
    centre_head = head.head.to(tl.int64) if SIZES.STORED else head.batch_head
    at = HeadOfPieces(
        value_ptr + head_start(value_strides, head.batch, head.head, SIZES.ALIGN),
        value_strides.token,
        sort.square + first_key,
        leaf_ptr + first_key,
        centre_ptr + centre_head * SIZES.PADDED_DIM,
        _pieces_of_head(pieces, head.batch_head, num_pieces, SIZES, CELLS),
        _tables_of_head(tables, head.batch_head, SIZES, CELLS),
        leaves.row_start + head.batch_head * CELLS.ROWS,
    )
    sorted_of_head = sorted_keys(sort, head.batch_head, chunks, CELLS)

    parent, part = parent_of(piece, sorted_of_head, CELLS)
    if parent >= CELLS.PARENT_ROWS:
        return
    cell = cell_of(parent, sorted_of_head, CELLS)
    codes, bias = _load_codes(head, parent, cell, SIZES, CELLS)

    sums = _sum_leaves(head, at, codes, bias, cell, part, SIZES, CELLS, KEYS)
    tl.store(at.pieces.piece_counts + piece * LEAF_ROWS + tl.arange(0, LEAF_ROWS), sums.counts)
    if cell.total <= PIECE:
        _store_rows(head, at, sums, parent, cell.first, SIZES, CELLS)
    else:
        _store_piece(at.pieces, piece, sums, SIZES, CELLS)
        # All threads must have stored before one of them signals it.
        tl.debug_barrier()
        num_parts = tl.cdiv(cell.total, PIECE)
        ticket_ptr = sort.ticket + head.batch_head * CELLS.PARENT_ROWS
        if tl.atomic_add(ticket_ptr + parent, 1) == num_parts - 1:
            first_extra = first_extra_piece(parent, sorted_of_head, CELLS)
            sums = _add_pieces(at.pieces, sums, parent, first_extra, num_parts, SIZES, CELLS)
            _store_rows(head, at, sums, parent, cell.first, SIZES, CELLS)
