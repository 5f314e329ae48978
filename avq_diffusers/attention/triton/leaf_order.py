"""Leaf order kernel: each cell's keys in the order of leaves, for query tiles with exact keys.

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


class LeafPointers(NamedTuple):
    """Where the keys of each leaf are.

    row_start, row_count: (B, H, 2 MP + M0 CP) int32, start and number of each mean-value row's keys
        in this order.
    """

    # (B, H, S) int32, key indices sorted by cell, then leaf, then as in `leaf`.
    leaf_order: tl.tensor
    row_start: tl.tensor
    row_count: tl.tensor


@triton.jit
def leaf_order_kernel(
    order_ptr,
    start_ptr,
    leaf_ptr,
    piece_counts_ptr,
    place_ptr,
    leaves_of_rows: LeafPointers,
    chunks: Chunks,
    num_pieces,
    CELLS: tl.constexpr,
    KEYS: tl.constexpr,
):
    """Write the keys of one piece of one parent to their leaves' positions.

    order, start: written by the sort.
    leaf, piece_counts: written by the aggregation.
    place: (B, H, S) int32, position of each key in `leaf_order`, in the order of cells; or None.
    """
    PARENT_ROWS: tl.constexpr = CELLS.PARENT_ROWS
    LEAF_ROWS: tl.constexpr = CELLS.LEAF_ROWS
    PIECE: tl.constexpr = CELLS.PIECE
    head = tl.program_id(0)
    batch = tl.program_id(1)
    piece = tl.program_id(2)
    batch_head = batch.to(tl.int64) * tl.num_programs(0) + head

    order_ptr += batch_head * chunks.num_keys
    start_ptr += batch_head * (PARENT_ROWS + 1) * CELLS.NUM_CHUNKS
    leaf_ptr += batch_head * chunks.num_keys
    piece_counts_ptr += batch_head * num_pieces * LEAF_ROWS
    leaf_order_ptr = leaves_of_rows.leaf_order + batch_head * chunks.num_keys
    row_start_ptr = leaves_of_rows.row_start + batch_head * CELLS.ROWS
    row_count_ptr = leaves_of_rows.row_count + batch_head * CELLS.ROWS
    if place_ptr is not None:
        place_ptr += batch_head * chunks.num_keys

    parent, part = parent_of(piece, start_ptr, chunks.number, CELLS)
    if parent >= PARENT_ROWS:
        return
    cell = cell_of(parent, start_ptr, chunks, CELLS)

    # (L)
    leaves = tl.arange(0, LEAF_ROWS)
    counts = tl.load(piece_counts_ptr + parent * LEAF_ROWS + leaves)
    before = tl.where(part > 0, counts, 0)
    if cell.total > PIECE:
        first_extra = first_extra_piece(parent, start_ptr, chunks.number, CELLS)
        for other in tl.range(1, tl.cdiv(cell.total, PIECE)):
            other_piece = first_extra + other - 1
            other_counts = tl.load(piece_counts_ptr + other_piece * LEAF_ROWS + leaves)
            counts += other_counts
            before += tl.where(other < part, other_counts, 0)
    leaf_start = cell.first + tl.cumsum(counts, axis=0) - counts

    if part == 0:
        rows, is_row = leaf_rows(parent, CELLS)
        tl.store(row_start_ptr + rows, leaf_start, mask=is_row)
        tl.store(row_count_ptr + rows, counts, mask=is_row)
        tl.store(row_start_ptr + parent, cell.first)
        tl.store(row_count_ptr + parent, cell.total)

    following = leaf_start + before
    stop = tl.minimum((part + 1) * PIECE, cell.total)
    for tile in tl.range(part * PIECE, stop, KEYS):
        # (KEYS)
        rank = tile + tl.arange(0, KEYS)
        is_key = rank < stop
        keys = keys_of_cell(order_ptr, rank, is_key, cell, CELLS)
        leaf = tl.load(leaf_ptr + cell.first + rank, mask=is_key, other=-1)

        # (L, KEYS)
        is_leaf = leaves[:, None] == leaf[None, :]
        target = tl.cumsum(is_leaf.to(tl.int32), axis=1) - 1 + following[:, None]
        target = tl.sum(tl.where(is_leaf, target, 0), axis=0)
        tl.store(leaf_order_ptr + target, keys, mask=is_key)
        if place_ptr is not None:
            tl.store(place_ptr + cell.first + rank, target, mask=is_key)
        following += tl.sum(is_leaf.to(tl.int32), axis=1)
