"""Pieces: a parent's keys, cut to a fixed length for one program each.

Pieces 0 to MP - 1 are the first piece of each parent, empty or not. The others follow in the order
of parents.

Shapes: as in `precompute`.
"""

from typing import NamedTuple

import triton
import triton.language as tl

# Of the number of runs that `index_of` searches.
MOST_BITS = tl.constexpr(16)


class CellSizes(NamedTuple):
    """Compile-time sizes of cells, their leaves and their pieces."""

    NUM_PARENTS: tl.constexpr
    NUM_CHILDREN: tl.constexpr
    PARENT_ROWS: tl.constexpr
    CHILD_ROWS: tl.constexpr
    LEAF_ROWS: tl.constexpr
    ROWS: tl.constexpr  # 2 MP + M0 CP rows of mean values
    NUM_CHUNKS: tl.constexpr  # most chunks of a head, a power of two
    PIECE: tl.constexpr
    FACTOR: tl.constexpr  # on the logits of keys, includes log2(e)
    LEAVES: tl.constexpr  # whether the leaf of each key is stored


class Chunks(NamedTuple):
    """Keys per head, keys per chunk, and the number of chunks."""

    num_keys: tl.tensor
    length: tl.tensor
    number: tl.tensor


class SortedKeys(NamedTuple):
    """The sorted keys of a head: `order` and `start` of `SortPointers`."""

    order: tl.tensor
    start: tl.tensor
    chunks: Chunks


class Cell(NamedTuple):
    """Where a parent's keys are."""

    order: tl.tensor
    first: tl.tensor  # number of keys of all lower parents
    total: tl.tensor  # number of its keys
    earlier: tl.tensor  # (NUM_CHUNKS) how many of them are in earlier chunks
    shift: tl.tensor  # (NUM_CHUNKS) from a rank in the cell to a position in `order`


@triton.jit
def sorted_keys(sort, batch_head, chunks, CELLS):
    """The `SortedKeys` of a head."""
    start = batch_head * (CELLS.PARENT_ROWS + 1) * CELLS.NUM_CHUNKS
    return SortedKeys(sort.order + batch_head * chunks.num_keys, sort.start + start, chunks)


@triton.jit
def extra_pieces(keys, CELLS):
    """(MP) number of pieces of each parent after its first."""
    PARENT_ROWS: tl.constexpr = CELLS.PARENT_ROWS
    NUM_CHUNKS: tl.constexpr = CELLS.NUM_CHUNKS
    MOST: tl.constexpr = 2048 // PARENT_ROWS
    BLOCK: tl.constexpr = NUM_CHUNKS if NUM_CHUNKS < MOST else MOST
    num_keys = tl.zeros([PARENT_ROWS], tl.int32)
    for first_chunk in tl.range(0, keys.chunks.number, BLOCK):
        chunks = first_chunk + tl.arange(0, BLOCK)
        offsets = tl.arange(0, PARENT_ROWS)[:, None] * NUM_CHUNKS + chunks[None, :]
        is_chunk = (chunks < keys.chunks.number)[None, :]
        starts = tl.load(keys.start + offsets, mask=is_chunk, other=0)
        stops = tl.load(keys.start + offsets + NUM_CHUNKS, mask=is_chunk, other=0)
        num_keys += tl.sum(stops - starts, axis=1)
    return tl.maximum(num_keys - 1, 0) // CELLS.PIECE


@triton.jit
def index_of(rank, earlier, shift):
    """Positions of these ranks in an order made of runs.

    earlier: (a power of two) ranks before each run, non-decreasing.
    shift: (the same) from a rank in each run to its position.
    """
    SIZE: tl.constexpr = earlier.shape[0]
    # The run of a rank is the last one that starts at or before it.
    run = tl.zeros_like(rank)
    for bit in tl.static_range(MOST_BITS):
        if SIZE >> bit > 1:
            later = run + (SIZE >> (bit + 1))
            run = tl.where(tl.gather(earlier, later, axis=0) <= rank, later, run)
    return rank + tl.gather(shift, run, axis=0)


@triton.jit
def keys_of_cell(rank, valid, cell):
    """The keys at these ranks in their cell; key 0 where a rank is not valid."""
    index = index_of(rank, cell.earlier, cell.shift)
    return tl.load(cell.order + index, mask=valid, other=0)


@triton.jit
def parent_of(piece, keys, CELLS):
    """The parent of a piece and the piece's index within it; parent MP means none."""
    parent = piece
    part = 0
    if piece >= CELLS.PARENT_ROWS:
        extra = extra_pieces(keys, CELLS)
        stop_piece = CELLS.PARENT_ROWS + tl.cumsum(extra, axis=0)
        parent = tl.sum((stop_piece <= piece).to(tl.int32), axis=0)
        is_parent = tl.arange(0, CELLS.PARENT_ROWS) == parent
        part = 1 + piece - tl.sum(tl.where(is_parent, stop_piece - extra, 0))
    return parent, part


@triton.jit
def first_extra_piece(parent, keys, CELLS):
    """The second piece of a parent, if it has one."""
    extra = extra_pieces(keys, CELLS)
    is_lower = tl.arange(0, CELLS.PARENT_ROWS) < parent
    return CELLS.PARENT_ROWS + tl.sum(tl.where(is_lower, extra, 0), axis=0)


@triton.jit
def cell_of(parent, keys, CELLS):
    """The `Cell` of a parent."""
    chunk = tl.arange(0, CELLS.NUM_CHUNKS)
    is_chunk = chunk < keys.chunks.number
    starts_ptr = keys.start + parent * CELLS.NUM_CHUNKS + chunk
    starts = tl.load(starts_ptr, mask=is_chunk, other=0)
    stops_ptr = keys.start + (parent + 1) * CELLS.NUM_CHUNKS + chunk
    stops = tl.load(stops_ptr, mask=is_chunk, other=0)
    total = tl.sum(stops - starts, axis=0)
    earlier = tl.cumsum(stops - starts, axis=0) - (stops - starts)
    shift = chunk * keys.chunks.length + starts - earlier
    return Cell(keys.order, tl.sum(starts, axis=0), total, earlier, shift)


@triton.jit
def leaf_rows(parent, CELLS):
    """(L) Mean-value rows of the keys that stay with a parent and of its children, and which rows
    are valid."""
    leaves = tl.arange(0, CELLS.LEAF_ROWS)
    STAY: tl.constexpr = CELLS.PARENT_ROWS
    CHILDREN: tl.constexpr = 2 * CELLS.PARENT_ROWS
    rows = tl.where(leaves == 0, STAY + parent, CHILDREN + parent * CELLS.CHILD_ROWS + leaves - 1)
    return rows, leaves <= tl.where(parent < CELLS.NUM_PARENTS, CELLS.CHILD_ROWS, 0)
