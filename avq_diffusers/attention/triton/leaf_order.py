"""Leaf order: each cell's keys leaf by leaf, for query tiles that see keys in place of leaves.

Shapes: as in `precompute`.
"""

from typing import NamedTuple

import triton
import triton.language as tl

from avq_diffusers.attention.triton.pieces import (
    cell_of,
    first_extra_piece,
    keys_of_cell,
    parent_of,
    sorted_keys,
)


class LeafPointers(NamedTuple):
    """Where the keys of each leaf are."""

    # (B, H, S) int32, key indices sorted by cell, then leaf, then as in `leaf`.
    leaf_order: tl.tensor
    # (B, H, 2 MP + M0 CP) int32, start of each leaf's keys in this order, by row of the tables,
    # written by the aggregation.
    row_start: tl.tensor


@triton.jit
def _count_leaves(piece_counts_ptr, parent, part, keys, cell, CELLS):
    """(L) Keys per leaf of a cell, and how many of them are in pieces before `part`."""
    LEAF_ROWS: tl.constexpr = CELLS.LEAF_ROWS
    leaves = tl.arange(0, LEAF_ROWS)
    counts = tl.load(piece_counts_ptr + parent * LEAF_ROWS + leaves)
    before = tl.where(part > 0, counts, 0)
    if cell.total > CELLS.PIECE:
        first_extra = first_extra_piece(parent, keys, CELLS)
        for other in tl.range(1, tl.cdiv(cell.total, CELLS.PIECE)):
            other_piece = first_extra + other - 1
            other_counts = tl.load(piece_counts_ptr + other_piece * LEAF_ROWS + leaves)
            counts += other_counts
            before += tl.where(other < part, other_counts, 0)
    return counts, before


@triton.jit
def order_leaves(leaf_ptr, piece_counts_ptr, sort, leaves, chunks, batch_head, piece, CELLS, KEYS):
    """Write the keys of one piece of one parent to their leaves' positions.

    leaf, piece_counts: written by the aggregation; the latter of this head.
    """
    LEAF_ROWS: tl.constexpr = CELLS.LEAF_ROWS
    WORDS: tl.constexpr = CELLS.NUM_CHILDREN // 4 + 1
    leaves_of_cell = tl.arange(0, LEAF_ROWS)
    first_key = batch_head * chunks.num_keys
    sorted_of_head = sorted_keys(sort, batch_head, chunks, CELLS)

    parent, part = parent_of(piece, sorted_of_head, CELLS)
    if parent < CELLS.PARENT_ROWS:
        cell = cell_of(parent, sorted_of_head, CELLS)
        counts, before = _count_leaves(piece_counts_ptr, parent, part, sorted_of_head, cell, CELLS)
        leaf_start = cell.first + tl.cumsum(counts, axis=0) - counts
        following = leaf_start + before
        stop = tl.minimum((part + 1) * CELLS.PIECE, cell.total)
        for block in tl.range(part * CELLS.PIECE, stop, KEYS):
            # (KEYS)
            rank = block + tl.arange(0, KEYS)
            is_key = rank < stop
            keys = keys_of_cell(rank, is_key, cell)
            leaf = tl.load(leaf_ptr + first_key + cell.first + rank, mask=is_key, other=-1)

            # Keys of each leaf up to a key, four numbers of 8 bits in a word.
            shift = 8 * (leaf & 3)
            through = tl.zeros_like(leaf)
            totals = tl.zeros_like(leaves_of_cell)
            for word in tl.static_range(WORDS):
                is_word = leaf >> 2 == word
                ones = tl.where(is_word, 1 << shift, 0)
                through = tl.where(is_word, tl.cumsum(ones, axis=0), through)
                totals = tl.where(leaves_of_cell >> 2 == word, tl.sum(ones, axis=0), totals)
            number = (through >> shift) & 255
            target = tl.gather(following, tl.maximum(leaf, 0), axis=0) + number - 1
            tl.store(leaves.leaf_order + first_key + target, keys, mask=is_key)
            following += (totals >> 8 * (leaves_of_cell & 3)) & 255
