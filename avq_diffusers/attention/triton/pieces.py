"""Pieces: the keys of one parent, cut to a fixed length that one program works on.

Pieces 0 to MP - 1 are the first piece of every parent, empty or not. The other pieces follow in the
order of the parents.

Shapes: as in `precompute`.
"""

import triton
import triton.language as tl


@triton.jit
def extra_pieces(
    start_ptr, num_chunks, PIECE: tl.constexpr, PARENT_ROWS: tl.constexpr, NUM_CHUNKS: tl.constexpr
):
    """(MP) pieces of each parent after its first."""
    MOST: tl.constexpr = 2048 // PARENT_ROWS
    CHUNKS: tl.constexpr = NUM_CHUNKS if NUM_CHUNKS < MOST else MOST
    num_keys = tl.zeros([PARENT_ROWS], tl.int32)
    for first_chunk in tl.range(0, num_chunks, CHUNKS):
        chunks = first_chunk + tl.arange(0, CHUNKS)
        offsets = tl.arange(0, PARENT_ROWS)[:, None] * NUM_CHUNKS + chunks[None, :]
        is_chunk = (chunks < num_chunks)[None, :]
        starts = tl.load(start_ptr + offsets, mask=is_chunk, other=0)
        stops = tl.load(start_ptr + offsets + NUM_CHUNKS, mask=is_chunk, other=0)
        num_keys += tl.sum(stops - starts, axis=1)
    return tl.maximum(num_keys - 1, 0) // PIECE


@triton.jit
def place_of(rank, earlier, shift, NUM_CHUNKS: tl.constexpr, LOG2_CHUNKS: tl.constexpr):
    """Where the keys of these ranks in their cell are in `order`.

    earlier, shift: from `cell_of`.
    """
    # The chunk of a key is the last one that starts at or before its rank.
    chunk = tl.zeros_like(rank)
    for bit in tl.static_range(LOG2_CHUNKS):
        later = chunk + (NUM_CHUNKS >> (bit + 1))
        chunk = tl.where(tl.gather(earlier, later, axis=0) <= rank, later, chunk)
    return rank + tl.gather(shift, chunk, axis=0)


@triton.jit
def parent_of(
    piece,
    start_ptr,
    num_chunks,
    PIECE: tl.constexpr,
    PARENT_ROWS: tl.constexpr,
    NUM_CHUNKS: tl.constexpr,
):
    """The parent of a piece and which of its pieces this is; a parent of MP is none."""
    parent = piece
    part = 0
    if piece >= PARENT_ROWS:
        extra = extra_pieces(start_ptr, num_chunks, PIECE, PARENT_ROWS, NUM_CHUNKS)
        stop_piece = PARENT_ROWS + tl.cumsum(extra, axis=0)
        parent = tl.sum((stop_piece <= piece).to(tl.int32), axis=0)
        is_parent = tl.arange(0, PARENT_ROWS) == parent
        part = 1 + piece - tl.sum(tl.where(is_parent, stop_piece - extra, 0))
    return parent, part


@triton.jit
def first_extra_piece(
    parent,
    start_ptr,
    num_chunks,
    PIECE: tl.constexpr,
    PARENT_ROWS: tl.constexpr,
    NUM_CHUNKS: tl.constexpr,
):
    """The second piece of a parent, if it has one."""
    extra = extra_pieces(start_ptr, num_chunks, PIECE, PARENT_ROWS, NUM_CHUNKS)
    return PARENT_ROWS + tl.sum(tl.where(tl.arange(0, PARENT_ROWS) < parent, extra, 0), axis=0)


@triton.jit
def cell_of(parent, start_ptr, num_chunks, chunk_keys, NUM_CHUNKS: tl.constexpr):
    """Where the keys of a parent are.

    Returns:
        first: the number of keys of all lower parents.
        total: the number of its keys.
        earlier: (NUM_CHUNKS) how many of them come in earlier chunks.
        shift: (NUM_CHUNKS) from a rank in the cell to a place in `order`.
    """
    chunks = tl.arange(0, NUM_CHUNKS)
    is_chunk = chunks < num_chunks
    starts = tl.load(start_ptr + parent * NUM_CHUNKS + chunks, mask=is_chunk, other=0)
    stops = tl.load(start_ptr + (parent + 1) * NUM_CHUNKS + chunks, mask=is_chunk, other=0)
    total = tl.sum(stops - starts, axis=0)
    earlier = tl.cumsum(stops - starts, axis=0) - (stops - starts)
    return tl.sum(starts, axis=0), total, earlier, chunks * chunk_keys + starts - earlier
