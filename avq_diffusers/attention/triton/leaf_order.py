"""Leaf order kernel: the keys of each cell in the order of leaves, for query tiles that meet keys.

Shapes: as in `precompute`.
"""

import triton
import triton.language as tl

from avq_diffusers.attention.triton.pieces import cell_of, first_extra_piece, parent_of, place_of


@triton.jit(do_not_specialize=["num_keys", "chunk_keys", "num_chunks", "num_pieces"])
def leaf_order_kernel(
    order_ptr,
    start_ptr,
    leaf_ptr,
    piece_counts_ptr,
    leaf_order_ptr,
    row_start_ptr,
    row_count_ptr,
    place_ptr,
    num_keys,
    chunk_keys,
    num_chunks,
    num_pieces,
    NUM_PARENTS: tl.constexpr,
    PARENT_ROWS: tl.constexpr,
    CHILD_ROWS: tl.constexpr,
    LEAF_ROWS: tl.constexpr,
    NUM_CHUNKS: tl.constexpr,
    LOG2_CHUNKS: tl.constexpr,
    PIECE: tl.constexpr,
    KEYS: tl.constexpr,
):
    """Write the keys of one piece of one parent where their leaves are.

    order, start: as the sort writes them.
    leaf, piece_counts: as the aggregation writes them.
    leaf_order: (B, H, S) int32, indices of keys by cell, in a cell by leaf, in a leaf as in `leaf`.
    row_start, row_count: (B, H, 2 MP + M0 CP) int32, where the keys of a row are, and how many.
    place: (B, H, S) int32, where in `leaf_order` the keys are, in the order of cells; or None.
    """
    head = tl.program_id(0)
    batch = tl.program_id(1)
    piece = tl.program_id(2)
    batch_head = batch.to(tl.int64) * tl.num_programs(0) + head

    MEAN_ROWS: tl.constexpr = 2 * PARENT_ROWS + NUM_PARENTS * CHILD_ROWS
    order_ptr += batch_head * num_keys
    start_ptr += batch_head * (PARENT_ROWS + 1) * NUM_CHUNKS
    leaf_ptr += batch_head * num_keys
    piece_counts_ptr += batch_head * num_pieces * LEAF_ROWS
    leaf_order_ptr += batch_head * num_keys
    row_start_ptr += batch_head * MEAN_ROWS
    row_count_ptr += batch_head * MEAN_ROWS
    if place_ptr is not None:
        place_ptr += batch_head * num_keys

    parent, part = parent_of(piece, start_ptr, num_chunks, PIECE, PARENT_ROWS, NUM_CHUNKS)
    if parent >= PARENT_ROWS:
        return
    first, total, earlier, shift = cell_of(parent, start_ptr, num_chunks, chunk_keys, NUM_CHUNKS)

    # (L)
    leaves = tl.arange(0, LEAF_ROWS)
    counts = tl.load(piece_counts_ptr + parent * LEAF_ROWS + leaves)
    before = tl.where(part > 0, counts, 0)
    if total > PIECE:
        first_extra = first_extra_piece(
            parent, start_ptr, num_chunks, PIECE, PARENT_ROWS, NUM_CHUNKS
        )
        for other in tl.range(1, tl.cdiv(total, PIECE)):
            other_counts = tl.load(
                piece_counts_ptr + (first_extra + other - 1) * LEAF_ROWS + leaves
            )
            counts += other_counts
            before += tl.where(other < part, other_counts, 0)
    leaf_start = first + tl.cumsum(counts, axis=0) - counts

    if part == 0:
        rows = tl.where(
            leaves == 0, PARENT_ROWS + parent, 2 * PARENT_ROWS + parent * CHILD_ROWS + leaves - 1
        )
        is_row = leaves <= tl.where(parent < NUM_PARENTS, CHILD_ROWS, 0)
        tl.store(row_start_ptr + rows, leaf_start, mask=is_row)
        tl.store(row_count_ptr + rows, counts, mask=is_row)
        tl.store(row_start_ptr + parent, first)
        tl.store(row_count_ptr + parent, total)

    following = leaf_start + before
    stop = tl.minimum((part + 1) * PIECE, total)
    for tile in tl.range(part * PIECE, stop, KEYS):
        # (KEYS)
        rank = tile + tl.arange(0, KEYS)
        is_key = rank < stop
        place = place_of(rank, earlier, shift, NUM_CHUNKS, LOG2_CHUNKS)
        keys = tl.load(order_ptr + place, mask=is_key, other=0)
        leaf = tl.load(leaf_ptr + first + rank, mask=is_key, other=-1)

        # (L, KEYS)
        is_leaf = leaves[:, None] == leaf[None, :]
        target = tl.cumsum(is_leaf.to(tl.int32), axis=1) - 1 + following[:, None]
        target = tl.sum(tl.where(is_leaf, target, 0), axis=0)
        tl.store(leaf_order_ptr + target, keys, mask=is_key)
        if place_ptr is not None:
            tl.store(place_ptr + first + rank, target, mask=is_key)
        following += tl.sum(is_leaf.to(tl.int32), axis=1)
