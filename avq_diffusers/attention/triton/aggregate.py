"""Aggregation kernel: the leaf of each key, and the mean and count of each codeword's keys.

Shapes: as in `precompute`.
"""

from typing import NamedTuple

import triton
import triton.language as tl

from avq_diffusers.attention.triton.pieces import (
    Chunks,
    cell_of,
    first_extra_piece,
    keys_of_cell,
    leaf_rows,
    parent_of,
)
from avq_diffusers.attention.triton.problem import Strides
from avq_diffusers.attention.triton.rows import (
    ParentPointers,
    bias_of,
    first_maximum,
    head_start,
    load_rows,
    origin_of,
    own_parents,
    product,
)


class CellPointers(NamedTuple):
    """Output of the sort."""

    order: tl.tensor
    start: tl.tensor
    ticket: tl.tensor
    square: tl.tensor  # (B, H, S) float32, or None if stored codewords represent their keys


class PiecePointers(NamedTuple):
    """What pieces store for the program that adds them up."""

    # (B, H, pieces, L, DP) float32, of values; with mean keys followed by the same for keys.
    piece_sums: tl.tensor
    piece_counts: tl.tensor  # (B, H, pieces, L) int32
    # (B, H, pieces, L) float32, all of a cell in leaf 0 without exact keys; or None.
    piece_squares: tl.tensor


class RowPointers(NamedTuple):
    """Tables with a row per codeword (`precompute`); None for those a call does not have."""

    codes: tl.tensor
    mean_values: tl.tensor
    log_counts: tl.tensor
    variance: tl.tensor
    row_weight: tl.tensor


class Sums(NamedTuple):
    """Sums over each leaf's keys: values and keys (L, DP), squares (L), and counts (L).

    Without mean keys, the sums of keys and squares are zero.
    """

    of_values: tl.tensor
    of_keys: tl.tensor
    of_squares: tl.tensor
    counts: tl.tensor


@triton.jit
def _load_codes(key_ptr, source, order_ptr, parent, cell, stride, num_keys, SIZES, CELLS):
    """(L, DP) codes of the parent and its children, and (L) biases."""
    leaves = tl.arange(0, CELLS.LEAF_ROWS)
    if source.stored_codes is None:
        # The parent, then keys of the cell, evenly spaced in index order.
        rank = tl.maximum(leaves - 1, 0).to(tl.int64) * cell.total // CELLS.NUM_CHILDREN
        rank = tl.minimum(rank.to(tl.int32), tl.maximum(cell.total - 1, 0))
        is_code = (leaves <= CELLS.NUM_CHILDREN) & (cell.total > 0)
        keys = keys_of_cell(order_ptr, rank, is_code, cell, CELLS)
        codes = load_rows(key_ptr, keys, stride, SIZES.ALIGN, is_code & (leaves > 0), SIZES)
        parents = parent + tl.zeros_like(leaves)
        is_parent = is_code & (leaves == 0)
        own = own_parents(key_ptr, source, parents, stride, num_keys, is_parent, SIZES)
        codes = tl.where((leaves == 0)[:, None], own, codes)
        bias = bias_of(codes, is_code)
    else:
        rows = tl.where(
            leaves == 0, parent, CELLS.PARENT_ROWS + parent * CELLS.CHILD_ROWS + leaves - 1
        )
        is_code = leaves <= tl.where(parent < CELLS.NUM_PARENTS, CELLS.NUM_CHILDREN, 0)
        columns = tl.arange(0, SIZES.PADDED_DIM)
        pointers = source.stored_codes + rows[:, None] * SIZES.PADDED_DIM + columns[None, :]
        codes = tl.load(pointers, mask=is_code[:, None], other=0.0)
        bias = tl.load(source.bias + rows, mask=is_code, other=float("-inf"))
    return codes, bias


@triton.jit
def _sum_squares(square_ptr, order_ptr, start, stop, cell, CELLS: tl.constexpr):
    """Sum of the squared distances of a cell's keys, ranks `start` to `stop`."""
    BLOCK: tl.constexpr = 256
    squares = tl.zeros([BLOCK], tl.float32)
    for first in tl.range(start, stop, BLOCK):
        rank = first + tl.arange(0, BLOCK)
        keys = keys_of_cell(order_ptr, rank, rank < stop, cell, CELLS)
        squares += tl.load(square_ptr + keys, mask=rank < stop, other=0.0)
    return tl.sum(squares, axis=0)


@triton.jit
def _add_pieces(pieces, sums, parent, first_extra, num_parts, offsets, MEANS: tl.constexpr):
    """The sums over all pieces of a parent, in order."""
    LEAF_ROWS: tl.constexpr = offsets.shape[0]
    ROW: tl.constexpr = (2 if MEANS else 1) * LEAF_ROWS * offsets.shape[1]
    KEYS: tl.constexpr = LEAF_ROWS * offsets.shape[1]
    leaves = tl.arange(0, LEAF_ROWS)
    values = tl.load(pieces.piece_sums + parent * ROW + offsets)
    keys = sums.of_keys
    squares = sums.of_squares
    if MEANS:
        keys = tl.load(pieces.piece_sums + KEYS + parent * ROW + offsets)
    counts = tl.load(pieces.piece_counts + parent * LEAF_ROWS + leaves)
    if MEANS:
        squares = tl.load(pieces.piece_squares + parent * LEAF_ROWS + leaves)
    for other in tl.range(first_extra, first_extra + num_parts - 1):
        values += tl.load(pieces.piece_sums + (other * ROW + offsets))
        if MEANS:
            keys += tl.load(pieces.piece_sums + KEYS + (other * ROW + offsets))
        counts += tl.load(pieces.piece_counts + other * LEAF_ROWS + leaves)
        if MEANS:
            squares += tl.load(pieces.piece_squares + other * LEAF_ROWS + leaves)
    return Sums(values, keys, squares, counts)


@triton.jit
def _log2(count):
    """log2 of a count, -inf for 0."""
    return tl.where(count > 0, tl.log2(tl.maximum(count, 1).to(tl.float32)), float("-inf"))


@triton.jit
def _store_values(row_ptr, means, share, is_row, SIZES: tl.constexpr, COLUMNS: tl.constexpr):
    """Write rows of DV columns: a mean value in the first D, the share of keys in the others."""
    columns = tl.arange(0, SIZES.PADDED_DIM)
    rows = tl.where((columns < SIZES.HEAD_DIM)[None, :], means, share[:, None])
    dtype = row_ptr.dtype.element_ty
    mask = is_row[:, None] & (columns < COLUMNS)[None, :]
    tl.store(row_ptr[:, None] + columns[None, :], rows.to(dtype), mask=mask)
    if COLUMNS > SIZES.PADDED_DIM:
        columns = SIZES.PADDED_DIM + tl.arange(0, COLUMNS - SIZES.PADDED_DIM)
        rows = tl.broadcast_to(share[:, None], [share.shape[0], COLUMNS - SIZES.PADDED_DIM])
        tl.store(row_ptr[:, None] + columns[None, :], rows.to(dtype), mask=is_row[:, None])


@triton.jit
def _store_mean_keys(
    tables, centre, origin, rows, sums, squares, counts, is_row, SIZES: tl.constexpr, FACTOR
):
    """Write mean keys around the centre, times the logits' factor; 0 without keys.

    origin: arguments of `origin_of`, which squared distances are measured from.

    Returns the variance of each row: the mean squared distance of its keys from their mean.
    """
    inverse = 1.0 / tl.maximum(counts, 1)
    means = sums * inverse[:, None]
    codes = tl.where((counts > 0)[:, None], (means - centre[None, :]) * FACTOR, 0.0)
    columns = tl.arange(0, SIZES.PADDED_DIM)
    pointers = tables.codes + rows[:, None] * SIZES.PADDED_DIM + columns[None, :]
    tl.store(pointers, codes.to(tables.codes.dtype.element_ty), mask=is_row[:, None])
    key_ptr, num_keys, stride = origin
    offsets = means - origin_of(key_ptr, num_keys, stride, SIZES)[None, :]
    return tl.maximum(squares * inverse - tl.sum(offsets * offsets, axis=1), 0.0)


@triton.jit
def _store_rows(
    tables,
    centre,
    origin,
    sums,
    parent,
    SIZES: tl.constexpr,
    CELLS: tl.constexpr,
    COLUMNS: tl.constexpr,
    FACTOR: tl.constexpr,
):
    """Write one parent's rows: for all its keys, for the keys that stay, and for its children."""
    MEANS: tl.constexpr = tables.codes is not None
    leaves = tl.arange(0, CELLS.LEAF_ROWS)
    counts = sums.counts
    count = tl.sum(counts, axis=0)
    # (L) Divisor of a leaf's values; for the keys that stay, the count of all the parent's keys.
    over = tl.maximum(tl.where(leaves == 0, count, counts), 1)
    share = tl.where(leaves == 0, counts * (1.0 / over), 1.0)
    if MEANS:
        over = tl.maximum(counts, 1)
        share = tl.full([CELLS.LEAF_ROWS], 1.0, tl.float32)
    rows, is_row = leaf_rows(parent, CELLS)
    means = sums.of_values * (1.0 / over)[:, None]
    _store_values(tables.mean_values + rows * COLUMNS, means, share, is_row, SIZES, COLUMNS)
    if MEANS:
        variance = _store_mean_keys(
            tables,
            centre,
            origin,
            rows,
            sums.of_keys,
            sums.of_squares,
            counts,
            is_row,
            SIZES,
            FACTOR,
        )
        if tables.row_weight is not None:
            weight = variance * variance / tl.maximum(counts, 1)
            tl.store(tables.row_weight + rows, weight, mask=is_row)
        tl.store(tables.log_counts + rows, _log2(counts), mask=is_row)
    else:
        is_child = (leaves > 0) & is_row
        tl.store(tables.log_counts + rows - CELLS.PARENT_ROWS, _log2(counts), mask=is_child)

    # (1, DP)
    means = tl.sum(sums.of_values, axis=0)[None, :] * (1.0 / tl.maximum(count, 1))
    ones = tl.full([1], 1.0, tl.float32)
    row = tl.arange(0, 1) + parent
    _store_values(tables.mean_values + row * COLUMNS, means, ones, ones > 0, SIZES, COLUMNS)
    if MEANS:
        keys = tl.sum(sums.of_keys, axis=0)[None, :]
        counts = count + tl.zeros_like(row)
        squares = tl.sum(sums.of_squares, axis=0) + tl.zeros_like(ones)
        variance = _store_mean_keys(
            tables, centre, origin, row, keys, squares, counts, ones > 0, SIZES, FACTOR
        )
        tl.store(tables.variance + row, variance)
        if tables.row_weight is not None:
            tl.store(tables.row_weight + row, variance * variance / tl.maximum(counts, 1))
    tl.store(tables.log_counts + parent, _log2(count))


@triton.jit
def aggregate_kernel(
    key_ptr,
    value_ptr,
    centre_ptr,
    leaf_ptr,
    source: ParentPointers,
    cells: CellPointers,
    pieces: PiecePointers,
    tables: RowPointers,
    key_strides: Strides,
    value_strides: Strides,
    chunks: Chunks,
    num_pieces,
    SIZES: tl.constexpr,
    CELLS: tl.constexpr,
    VALUE_COLUMNS: tl.constexpr,
    KEYS: tl.constexpr,
    FACTOR: tl.constexpr,
):
    """Choose leaves for one piece of one parent's keys, count the keys and sum their values.

    leaf: (B, H, S) int32, each key's leaf in its cell, in the order of cells; or None.
    """
    MEANS: tl.constexpr = tables.codes is not None
    EXACT_KEYS: tl.constexpr = tables.row_weight is not None
    PADDED_DIM: tl.constexpr = SIZES.PADDED_DIM
    PARENT_ROWS: tl.constexpr = CELLS.PARENT_ROWS
    LEAF_ROWS: tl.constexpr = CELLS.LEAF_ROWS
    PIECE: tl.constexpr = CELLS.PIECE
    CODE_ROWS: tl.constexpr = CELLS.ROWS - PARENT_ROWS
    head = tl.program_id(0)
    batch = tl.program_id(1)
    piece = tl.program_id(2)
    batch_head = batch.to(tl.int64) * tl.num_programs(0) + head

    key_ptr += head_start(key_strides, batch, head, SIZES.ALIGN)
    value_ptr += head_start(value_strides, batch, head, SIZES.ALIGN)
    dtype = key_ptr.dtype.element_ty
    centre_head = batch_head
    if source.stored_codes is not None:
        codes_ptr = source.stored_codes + head * CODE_ROWS * PADDED_DIM
        source = ParentPointers(codes_ptr, source.bias + head * CODE_ROWS, None, None)
        dtype = codes_ptr.dtype.element_ty
        centre_head = head.to(tl.int64)
    elif source.parents is not None:
        parents_ptr = source.parents + batch_head * SIZES.NUM_PARENTS * SIZES.HEAD_DIM
        source = ParentPointers(None, None, parents_ptr, None)
    order_ptr = cells.order + batch_head * chunks.num_keys
    start_ptr = cells.start + batch_head * (PARENT_ROWS + 1) * CELLS.NUM_CHUNKS
    ticket_ptr = cells.ticket + batch_head * PARENT_ROWS
    square_ptr = None
    if MEANS:
        square_ptr = cells.square + batch_head * chunks.num_keys
    if leaf_ptr is not None:
        leaf_ptr += batch_head * chunks.num_keys
    PIECE_ROWS: tl.constexpr = 2 * LEAF_ROWS if MEANS else LEAF_ROWS
    pieces = PiecePointers(
        pieces.piece_sums + batch_head * num_pieces * PIECE_ROWS * PADDED_DIM,
        pieces.piece_counts + batch_head * num_pieces * LEAF_ROWS,
        pieces.piece_squares + batch_head * num_pieces * LEAF_ROWS if MEANS else None,
    )
    centre = None
    if MEANS:
        centre = tl.load(centre_ptr + centre_head * PADDED_DIM + tl.arange(0, PADDED_DIM))
    tables = RowPointers(
        tables.codes + batch_head * CELLS.ROWS * PADDED_DIM if MEANS else None,
        tables.mean_values + batch_head * CELLS.ROWS * VALUE_COLUMNS,
        tables.log_counts + batch_head * (CELLS.ROWS if MEANS else CODE_ROWS),
        tables.variance + batch_head * PARENT_ROWS if MEANS else None,
        tables.row_weight + batch_head * CELLS.ROWS if EXACT_KEYS else None,
    )

    parent, part = parent_of(piece, start_ptr, chunks.number, CELLS)
    if parent >= PARENT_ROWS:
        return
    cell = cell_of(parent, start_ptr, chunks, CELLS)
    if CELLS.NUM_CHILDREN > 0:
        codes, bias = _load_codes(
            key_ptr,
            source,
            order_ptr,
            parent,
            cell,
            key_strides.token,
            chunks.num_keys,
            SIZES,
            CELLS,
        )

    leaves = tl.arange(0, LEAF_ROWS)
    stop = tl.minimum((part + 1) * PIECE, cell.total)
    value_sums = tl.zeros([LEAF_ROWS, PADDED_DIM], tl.float32)
    key_sums = value_sums
    chosen_counts = tl.zeros([LEAF_ROWS, KEYS], tl.int32)
    leaf_squares = tl.zeros([LEAF_ROWS, KEYS], tl.float32)
    for tile in tl.range(part * PIECE, stop, KEYS):
        # (KEYS)
        rank = tile + tl.arange(0, KEYS)
        is_key = rank < stop
        keys = keys_of_cell(order_ptr, rank, is_key, cell, CELLS)

        # (KEYS, DP)
        value = load_rows(value_ptr, keys, value_strides.token, SIZES.ALIGN, is_key, SIZES)
        value = value.to(dtype)
        if CELLS.NUM_CHILDREN > 0 or MEANS:
            key = load_rows(key_ptr, keys, key_strides.token, SIZES.ALIGN, is_key, SIZES)
            key = key.to(dtype)

        # (L, KEYS)
        if CELLS.NUM_CHILDREN > 0:
            scores = product(key, codes.T) + bias[None, :]
            _, leaf = first_maximum(scores, leaves[None, :], LEAF_ROWS - 1)
            is_chosen = (leaves[:, None] == leaf[None, :]) & is_key[None, :]
        else:
            is_chosen = (leaves[:, None] == 0) & is_key[None, :]
        chosen_counts += is_chosen.to(tl.int32)
        chosen = tl.where(is_chosen, 1.0, 0.0).to(dtype)
        value_sums += product(chosen, value)
        if MEANS:
            key_sums += product(chosen, key)
            if EXACT_KEYS:
                square = tl.load(square_ptr + keys, mask=is_key, other=0.0)
                leaf_squares += tl.where(is_chosen, square[None, :], 0.0)
            if leaf_ptr is not None:
                leaf = tl.sum(tl.where(is_chosen, leaves[:, None], 0), axis=0)
                tl.store(leaf_ptr + cell.first + rank, leaf, mask=is_key)
    counts = tl.sum(chosen_counts, axis=1)
    squares = tl.sum(leaf_squares, axis=1)
    if EXACT_KEYS:
        tl.store(pieces.piece_counts + piece * LEAF_ROWS + leaves, counts)
    elif MEANS:
        # A separate loop: the one above has no registers to spare.
        of_cell = _sum_squares(square_ptr, order_ptr, part * PIECE, stop, cell, CELLS)
        squares = tl.where(leaves == 0, of_cell, 0.0)
    sums = Sums(value_sums, key_sums, squares, counts)

    origin = key_ptr, chunks.num_keys, key_strides.token
    if cell.total <= PIECE:
        _store_rows(tables, centre, origin, sums, parent, SIZES, CELLS, VALUE_COLUMNS, FACTOR)
    else:
        ROW: tl.constexpr = PIECE_ROWS * PADDED_DIM
        offsets = leaves[:, None] * PADDED_DIM + tl.arange(0, PADDED_DIM)[None, :]
        tl.store(pieces.piece_sums + piece * ROW + offsets, value_sums)
        if MEANS:
            piece_keys_ptr = pieces.piece_sums + LEAF_ROWS * PADDED_DIM
            tl.store(piece_keys_ptr + piece * ROW + offsets, key_sums)
        tl.store(pieces.piece_counts + piece * LEAF_ROWS + leaves, counts)
        if MEANS:
            tl.store(pieces.piece_squares + piece * LEAF_ROWS + leaves, squares)
        # All threads must have stored before one of them signals it.
        tl.debug_barrier()
        num_parts = tl.cdiv(cell.total, PIECE)
        if tl.atomic_add(ticket_ptr + parent, 1) == num_parts - 1:
            first_extra = first_extra_piece(parent, start_ptr, chunks.number, CELLS)
            sums = _add_pieces(pieces, sums, parent, first_extra, num_parts, offsets, MEANS)
            _store_rows(tables, centre, origin, sums, parent, SIZES, CELLS, VALUE_COLUMNS, FACTOR)
