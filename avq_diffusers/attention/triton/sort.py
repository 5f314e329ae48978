"""Sort kernel: the nearest parent of every key, and the keys of a chunk in the order of parents.

Shapes: as in `precompute`.
"""

import triton
import triton.language as tl

from avq_diffusers.attention.triton.nearest import (
    best_of_loaded_tiles,
    best_of_tile,
    load_parents,
)
from avq_diffusers.attention.triton.rows import first_maximum, origin_of


@triton.jit
def _count_bits(bits):
    bits -= (bits >> 1) & 0x55555555
    bits = (bits & 0x33333333) + ((bits >> 2) & 0x33333333)
    bits = (bits + (bits >> 4)) & 0x0F0F0F0F
    return (bits * 0x01010101) >> 24


@triton.jit(
    do_not_specialize=[
        "key_stride_batch",
        "key_stride_head",
        "key_stride_token",
        "num_keys",
        "chunk_keys",
    ]
)
def sort_kernel(
    key_ptr,
    key_order_ptr,
    parents_ptr,
    stored_codes_ptr,
    bias_ptr,
    centre_ptr,
    square_ptr,
    rank_ptr,
    order_ptr,
    count_ptr,
    start_ptr,
    ticket_ptr,
    key_stride_batch,
    key_stride_head,
    key_stride_token,
    num_keys,
    chunk_keys,
    CODE_ROWS: tl.constexpr,
    NUM_PARENTS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    PARENT_ROWS: tl.constexpr,
    NUM_CHUNKS: tl.constexpr,
    KEYS: tl.constexpr,
    PARENTS: tl.constexpr,
    STRIPS: tl.constexpr,
    RESIDENT: tl.constexpr,
    ALIGN: tl.constexpr,
):
    """Sort one chunk of one head's keys by their nearest parent.

    Loops over the chunk three times: find the parents, rank every key among the keys of its parent,
    write the order. A chunk is ranked in STRIPS runs of keys, 32 keys of each run at a time.

    centre: (B, H, DP) float32, the mean of the parents, unless they are stored.
    square: (B, H, S) float32, squared distance of every key from `origin_of`, or None.
    rank: (B, H, NUM_CHUNKS, chunk_keys) int32 workspace: first the parent, then rank and parent.
    order: (B, H, S) int32, key indices sorted within each chunk.
    count: (B, H, NUM_CHUNKS, STRIPS, MP) int32 workspace: first the number of ranked keys of a
        parent in a strip, then where they start in the chunk.
    start: (B, H, MP + 1, NUM_CHUNKS) int32, where the keys of a parent start in a chunk.
    ticket: (B, H, MP) int32, set to 0 for the aggregation.
    RESIDENT: shared memory holds the codes of all parents.
    """
    head = tl.program_id(0)
    batch = tl.program_id(1)
    chunk = tl.program_id(2)
    batch_head = batch.to(tl.int64) * tl.num_programs(0) + head
    batch_chunk = batch_head * NUM_CHUNKS + chunk
    first = chunk * chunk_keys
    length = tl.minimum(chunk_keys, num_keys - first)

    key_stride_token = key_stride_token.to(tl.int64) * ALIGN
    head_start = batch.to(tl.int64) * key_stride_batch + head.to(tl.int64) * key_stride_head
    head_ptr = key_ptr + head_start * ALIGN
    key_ptr = head_ptr + first * key_stride_token
    dtype = key_ptr.dtype.element_ty
    if stored_codes_ptr is not None:
        stored_codes_ptr += head * CODE_ROWS * PADDED_DIM
        bias_ptr += head * CODE_ROWS
        dtype = stored_codes_ptr.dtype.element_ty
    if parents_ptr is not None:
        parents_ptr += batch_head * NUM_PARENTS * HEAD_DIM
    rank_ptr += batch_chunk * chunk_keys
    order_ptr += batch_head * num_keys + first
    if square_ptr is not None:
        square_ptr += batch_head * num_keys + first
        origin = origin_of(
            head_ptr, num_keys, key_stride_token // ALIGN, HEAD_DIM, PADDED_DIM, ALIGN
        )
    count_ptr += batch_chunk * STRIPS * PARENT_ROWS
    start_ptr += batch_head * (PARENT_ROWS + 1) * NUM_CHUNKS + chunk

    all_parents = tl.arange(0, PARENT_ROWS)
    parents = tl.arange(0, PARENTS)
    if RESIDENT:
        codes = ()
        biases = ()
        for first_parent in tl.static_range(0, PARENT_ROWS, PARENTS):
            tile_codes, tile_bias = load_parents(
                head_ptr,
                key_order_ptr,
                parents_ptr,
                stored_codes_ptr,
                bias_ptr,
                first_parent + parents,
                key_stride_token // ALIGN,
                num_keys,
                NUM_PARENTS,
                HEAD_DIM,
                PADDED_DIM,
                ALIGN,
            )
            codes += (tile_codes,)
            biases += (tile_bias,)
    if stored_codes_ptr is None:
        is_first = chunk == 0
        if is_first:
            # (DP) The mean of the parents.
            centre = tl.zeros([PADDED_DIM], tl.float32)
            if RESIDENT:
                for part in tl.static_range(PARENT_ROWS // PARENTS):
                    centre += tl.sum(codes[part].to(tl.float32), axis=0)
            else:
                for first_parent in tl.range(0, PARENT_ROWS, PARENTS):
                    tile_codes, _ = load_parents(
                        head_ptr,
                        key_order_ptr,
                        parents_ptr,
                        stored_codes_ptr,
                        bias_ptr,
                        first_parent + parents,
                        key_stride_token // ALIGN,
                        num_keys,
                        NUM_PARENTS,
                        HEAD_DIM,
                        PADDED_DIM,
                        ALIGN,
                    )
                    centre += tl.sum(tile_codes.to(tl.float32), axis=0)
            columns = tl.arange(0, PADDED_DIM)
            tl.store(centre_ptr + batch_head * PADDED_DIM + columns, centre / NUM_PARENTS)

    rows = tl.arange(0, KEYS)
    columns = tl.arange(0, PADDED_DIM)
    # (KEYS, DP) Offsets in a tile fit 32 bits; the tile's own is a scalar.
    offsets = rows[:, None] * key_stride_token.to(tl.int32) + columns[None, :]
    for tile in tl.range(0, length, KEYS):
        # (KEYS, DP)
        is_key = tile + rows < length
        key = tl.load(
            key_ptr + tile * key_stride_token + offsets,
            mask=is_key[:, None] & (columns < HEAD_DIM)[None, :],
            other=0.0,
        ).to(dtype)
        if square_ptr is not None:
            distance = key.to(tl.float32) - origin[None, :]
            square = tl.sum(distance * distance, axis=1)
            tl.store(square_ptr + tile + rows, square, mask=is_key)

        # (KEYS, 8)
        if PARENT_ROWS == PARENTS:
            best, parent = best_of_tile(key, codes[0], biases[0], 0, PARENT_ROWS - 1)
        elif RESIDENT:
            best = tl.full([KEYS, 8], float("-inf"), tl.float32)
            parent = tl.full([KEYS, 8], PARENT_ROWS - 1, tl.int32)
            for part in tl.static_range(PARENT_ROWS // PARENTS):
                tile_best, tile_parent = best_of_tile(
                    key, codes[part], biases[part], part * PARENTS, PARENTS - 1
                )
                parent = tl.where(tile_best > best, tile_parent, parent)
                best = tl.maximum(best, tile_best)
        else:
            best, parent = best_of_loaded_tiles(
                key,
                head_ptr,
                key_order_ptr,
                parents_ptr,
                stored_codes_ptr,
                bias_ptr,
                key_stride_token // ALIGN,
                num_keys,
                NUM_PARENTS,
                HEAD_DIM,
                PADDED_DIM,
                PARENT_ROWS,
                PARENTS,
                ALIGN,
            )
        _, parent = first_maximum(best, parent, PARENT_ROWS - 1)
        tl.store(rank_ptr + tile + rows, parent, mask=is_key)

    lanes = tl.arange(0, 32 * STRIPS)
    strip = lanes // 32
    in_strip = (lanes % 32).to(tl.uint32)
    bit = tl.full([32], 1, tl.uint32) << tl.arange(0, 32).to(tl.uint32)
    earlier_bits = (tl.full([32 * STRIPS], 1, tl.uint32) << in_strip) - 1
    strip_keys = chunk_keys // STRIPS
    lane_offsets = strip * strip_keys + lanes % 32
    # (32, STRIPS) All keys of a strip in one thread, the strips in different warps.
    other_offsets = tl.arange(0, 32)[:, None] + tl.arange(0, STRIPS)[None, :] * strip_keys
    strip_counts_ptr = (
        count_ptr + tl.arange(0, STRIPS)[:, None] * PARENT_ROWS + all_parents[None, :]
    )
    tl.store(strip_counts_ptr, tl.zeros([STRIPS, PARENT_ROWS], tl.int32))
    # Parents, counts and ranks pass from thread to thread through memory.
    tl.debug_barrier()
    for tile in tl.range(0, strip_keys, 32):
        # (32 STRIPS)
        keys = tile + lane_offsets
        is_key = keys < length
        parent = tl.load(rank_ptr + keys, mask=is_key, other=-1)
        # (32, STRIPS)
        others = tile + other_offsets
        other_parent = tl.load(rank_ptr + others, mask=others < length, other=-1)

        # (32 STRIPS) Bit i of a key says whether key i of its strip has the same parent.
        is_same = other_parent[:, :, None] == parent.reshape(STRIPS, 32)[None, :, :]
        same = tl.sum(tl.where(is_same, bit[:, None, None], 0), axis=0).reshape(32 * STRIPS)
        same = same.to(tl.uint32)
        is_last = same >> in_strip == 1
        parent_count_ptr = count_ptr + strip * PARENT_ROWS + parent
        rank = tl.load(parent_count_ptr, mask=is_key, other=0)
        rank += _count_bits(same & earlier_bits).to(tl.int32)

        tl.debug_barrier()
        tl.store(rank_ptr + keys, rank * PARENT_ROWS + parent, mask=is_key)
        tl.store(parent_count_ptr, rank + 1, mask=is_key & is_last)
        tl.debug_barrier()

    # (STRIPS, MP)
    strip_counts = tl.load(strip_counts_ptr)
    counts = tl.sum(strip_counts, axis=0)
    start = tl.cumsum(counts, axis=0) - counts
    strip_start = start[None, :] + tl.cumsum(strip_counts, axis=0) - strip_counts
    tl.debug_barrier()
    tl.store(strip_counts_ptr, strip_start)
    tl.store(start_ptr + all_parents * NUM_CHUNKS, start)
    tl.store(start_ptr + PARENT_ROWS * NUM_CHUNKS, length)
    if chunk == 0:
        tl.store(
            ticket_ptr + batch_head * PARENT_ROWS + all_parents, tl.zeros([PARENT_ROWS], tl.int32)
        )

    tl.debug_barrier()
    for tile in tl.range(0, length, 128 * STRIPS):
        # (128 STRIPS)
        keys = tile + tl.arange(0, 128 * STRIPS)
        is_key = keys < length
        rank = tl.load(rank_ptr + keys, mask=is_key, other=0)
        parent_start = tl.load(
            count_ptr + keys // strip_keys * PARENT_ROWS + rank % PARENT_ROWS, mask=is_key, other=0
        )
        tl.store(order_ptr + parent_start + rank // PARENT_ROWS, first + keys, mask=is_key)
