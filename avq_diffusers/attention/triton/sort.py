"""Sort kernel: each key's nearest parent, and each chunk's keys in the order of parents.

Shapes: as in `precompute`.
"""

from typing import NamedTuple

import triton
import triton.language as tl

from avq_diffusers.attention.triton.pieces import Chunks
from avq_diffusers.attention.triton.problem import Strides
from avq_diffusers.attention.triton.rows import (
    ParentPointers,
    best_of_loaded_tiles,
    best_of_tile,
    first_maximum,
    head_start,
    load_parents,
    origin_of,
)


class SortPointers(NamedTuple):
    """What the sort writes."""

    # (B, H, NUM_CHUNKS, chunk length) int32 workspace: first the parent, then rank and parent.
    rank: tl.tensor
    order: tl.tensor  # (B, H, S) int32, key indices sorted within each chunk
    # (B, H, NUM_CHUNKS, STRIPS, MP) int32 workspace: first the number of a parent's ranked keys in
    # a strip, then their start in the chunk.
    count: tl.tensor
    # (B, H, MP + 1, NUM_CHUNKS) int32, start of a parent's keys in a chunk.
    start: tl.tensor
    ticket: tl.tensor  # (B, H, MP) int32, set to 0 for the aggregation


class SortBlocks(NamedTuple):
    """Compile-time blocks: keys and parents per matmul, and strips per chunk."""

    NUM_CHUNKS: tl.constexpr  # most chunks of a head, a power of two
    CODE_ROWS: tl.constexpr  # rows of stored codes
    KEYS: tl.constexpr
    PARENTS: tl.constexpr
    STRIPS: tl.constexpr
    RESIDENT: tl.constexpr  # shared memory holds the codes of all parents


@triton.jit
def _count_bits(bits):
    bits -= (bits >> 1) & 0x55555555
    bits = (bits & 0x33333333) + ((bits >> 2) & 0x33333333)
    bits = (bits + (bits >> 4)) & 0x0F0F0F0F
    return (bits * 0x01010101) >> 24


@triton.jit
def _resident_parents(key_ptr, source, stride, chunks, SIZES: tl.constexpr, BLOCKS: tl.constexpr):
    """Codes and biases of all parents, in tiles, if they stay in shared memory; else none."""
    codes = ()
    biases = ()
    if BLOCKS.RESIDENT:
        for first in tl.static_range(0, SIZES.PARENT_ROWS, BLOCKS.PARENTS):
            parents = first + tl.arange(0, BLOCKS.PARENTS)
            tile_codes, tile_bias = load_parents(
                key_ptr, source, parents, stride // SIZES.ALIGN, chunks.num_keys, SIZES
            )
            codes += (tile_codes,)
            biases += (tile_bias,)
    return codes, biases


@triton.jit
def _mean_parent(key_ptr, source, codes, stride, chunks, SIZES: tl.constexpr, BLOCKS: tl.constexpr):
    """(DP) The mean of the parents."""
    centre = tl.zeros([SIZES.PADDED_DIM], tl.float32)
    if BLOCKS.RESIDENT:
        for part in tl.static_range(SIZES.PARENT_ROWS // BLOCKS.PARENTS):
            centre += tl.sum(codes[part].to(tl.float32), axis=0)
    else:
        for first in tl.range(0, SIZES.PARENT_ROWS, BLOCKS.PARENTS):
            parents = first + tl.arange(0, BLOCKS.PARENTS)
            tile_codes, _ = load_parents(
                key_ptr, source, parents, stride // SIZES.ALIGN, chunks.num_keys, SIZES
            )
            centre += tl.sum(tile_codes.to(tl.float32), axis=0)
    return centre / SIZES.NUM_PARENTS


@triton.jit
def _best_of_resident(key, codes, biases, SIZES: tl.constexpr, BLOCKS: tl.constexpr):
    """`best_of_tile` over all parents, with resident codes."""
    if SIZES.PARENT_ROWS == BLOCKS.PARENTS:
        best, parent = best_of_tile(key, codes[0], biases[0], 0, SIZES.PARENT_ROWS - 1)
    else:
        best = tl.full([BLOCKS.KEYS, 8], float("-inf"), tl.float32)
        parent = tl.full([BLOCKS.KEYS, 8], SIZES.PARENT_ROWS - 1, tl.int32)
        for part in tl.static_range(SIZES.PARENT_ROWS // BLOCKS.PARENTS):
            tile_best, tile_parent = best_of_tile(
                key, codes[part], biases[part], part * BLOCKS.PARENTS, BLOCKS.PARENTS - 1
            )
            parent = tl.where(tile_best > best, tile_parent, parent)
            best = tl.maximum(best, tile_best)
    return best, parent


@triton.jit
def _rank(rank_ptr, count_ptr, length, chunk_keys, SIZES: tl.constexpr, BLOCKS: tl.constexpr):
    """Replace each key's parent by its rank among that parent's keys in the chunk.

    Leaves in `count` the start of each parent's keys per strip.

    Returns:
        start: (MP), start of each parent's keys.
    """
    PARENT_ROWS: tl.constexpr = SIZES.PARENT_ROWS
    STRIPS: tl.constexpr = BLOCKS.STRIPS
    all_parents = tl.arange(0, PARENT_ROWS)
    lanes = tl.arange(0, 32 * STRIPS)
    strip = lanes // 32
    in_strip = (lanes % 32).to(tl.uint32)
    bit = tl.full([32], 1, tl.uint32) << tl.arange(0, 32).to(tl.uint32)
    earlier_bits = (tl.full([32 * STRIPS], 1, tl.uint32) << in_strip) - 1
    strip_keys = chunk_keys // STRIPS
    lane_offsets = strip * strip_keys + lanes % 32
    # (32, STRIPS) One thread holds all keys of a strip; strips are in different warps.
    other_offsets = tl.arange(0, 32)[:, None] + tl.arange(0, STRIPS)[None, :] * strip_keys
    strip_counts_ptr = (
        count_ptr + tl.arange(0, STRIPS)[:, None] * PARENT_ROWS + all_parents[None, :]
    )
    tl.store(strip_counts_ptr, tl.zeros([STRIPS, PARENT_ROWS], tl.int32))
    # Threads exchange parents, counts and ranks through memory.
    tl.debug_barrier()
    for tile in tl.range(0, strip_keys, 32):
        # (32 STRIPS)
        keys = tile + lane_offsets
        is_key = keys < length
        parent = tl.load(rank_ptr + keys, mask=is_key, other=-1)
        # (32, STRIPS)
        others = tile + other_offsets
        other_parent = tl.load(rank_ptr + others, mask=others < length, other=-1)

        # (32 STRIPS) Bit i tells whether key i of the strip has the same parent.
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
    return start


@triton.jit
def sort_kernel(
    key_ptr,
    centre_ptr,
    square_ptr,
    source: ParentPointers,
    sort: SortPointers,
    key_strides: Strides,
    chunks: Chunks,
    SIZES: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    """Sort one chunk of one head's keys by their nearest parent.

    Three passes over the chunk: find the parents, rank each key among its parent's keys, write the
    order. Ranking works on strips of the chunk, 32 keys of each at a time.

    centre: (B, H, DP) float32, the mean of the parents, written unless they are stored.
    square: (B, H, S) float32, squared distance of each key from `origin_of`, or None.
    """
    NUM_CHUNKS: tl.constexpr = BLOCKS.NUM_CHUNKS
    PARENT_ROWS: tl.constexpr = SIZES.PARENT_ROWS
    PADDED_DIM: tl.constexpr = SIZES.PADDED_DIM
    KEYS: tl.constexpr = BLOCKS.KEYS
    head = tl.program_id(0)
    batch = tl.program_id(1)
    chunk = tl.program_id(2)
    batch_head = batch.to(tl.int64) * tl.num_programs(0) + head
    batch_chunk = batch_head * NUM_CHUNKS + chunk
    first = chunk * chunks.length
    length = tl.minimum(chunks.length, chunks.num_keys - first)

    stride = key_strides.token.to(tl.int64) * SIZES.ALIGN
    head_ptr = key_ptr + head_start(key_strides, batch, head, SIZES.ALIGN)
    key_ptr = head_ptr + first * stride
    dtype = key_ptr.dtype.element_ty
    if source.stored_codes is not None:
        codes_ptr = source.stored_codes + head * BLOCKS.CODE_ROWS * PADDED_DIM
        source = ParentPointers(codes_ptr, source.bias + head * BLOCKS.CODE_ROWS, None, None)
        dtype = codes_ptr.dtype.element_ty
    elif source.parents is not None:
        parents_ptr = source.parents + batch_head * SIZES.NUM_PARENTS * SIZES.HEAD_DIM
        source = ParentPointers(None, None, parents_ptr, None)
    rank_ptr = sort.rank + batch_chunk * chunks.length
    order_ptr = sort.order + (batch_head * chunks.num_keys + first)
    if square_ptr is not None:
        square_ptr += batch_head * chunks.num_keys + first
        origin = origin_of(head_ptr, chunks.num_keys, stride // SIZES.ALIGN, SIZES)
    count_ptr = sort.count + batch_chunk * BLOCKS.STRIPS * PARENT_ROWS
    start_ptr = sort.start + (batch_head * (PARENT_ROWS + 1) * NUM_CHUNKS + chunk)

    codes, biases = _resident_parents(head_ptr, source, stride, chunks, SIZES, BLOCKS)
    if source.stored_codes is None:
        is_first = chunk == 0
        if is_first:
            centre = _mean_parent(head_ptr, source, codes, stride, chunks, SIZES, BLOCKS)
            columns = tl.arange(0, PADDED_DIM)
            tl.store(centre_ptr + batch_head * PADDED_DIM + columns, centre)

    rows = tl.arange(0, KEYS)
    columns = tl.arange(0, PADDED_DIM)
    # (KEYS, DP) Offsets within a tile fit 32 bits; the tile's offset is a scalar.
    offsets = rows[:, None] * stride.to(tl.int32) + columns[None, :]
    for tile in tl.range(0, length, KEYS):
        # (KEYS, DP)
        is_key = tile + rows < length
        mask = is_key[:, None] & (columns < SIZES.HEAD_DIM)[None, :]
        key = tl.load(key_ptr + tile * stride + offsets, mask=mask, other=0.0).to(dtype)
        if square_ptr is not None:
            distance = key.to(tl.float32) - origin[None, :]
            square = tl.sum(distance * distance, axis=1)
            tl.store(square_ptr + tile + rows, square, mask=is_key)

        # (KEYS, 8)
        if BLOCKS.RESIDENT:
            best, parent = _best_of_resident(key, codes, biases, SIZES, BLOCKS)
        else:
            best, parent = best_of_loaded_tiles(
                key,
                head_ptr,
                source,
                stride // SIZES.ALIGN,
                chunks.num_keys,
                SIZES,
                BLOCKS.PARENTS,
            )
        _, parent = first_maximum(best, parent, PARENT_ROWS - 1)
        tl.store(rank_ptr + tile + rows, parent, mask=is_key)

    start = _rank(rank_ptr, count_ptr, length, chunks.length, SIZES, BLOCKS)
    all_parents = tl.arange(0, PARENT_ROWS)
    tl.store(start_ptr + all_parents * NUM_CHUNKS, start)
    tl.store(start_ptr + PARENT_ROWS * NUM_CHUNKS, length)
    if chunk == 0:
        ticket_ptr = sort.ticket + batch_head * PARENT_ROWS + all_parents
        tl.store(ticket_ptr, tl.zeros([PARENT_ROWS], tl.int32))

    tl.debug_barrier()
    strip_keys = chunks.length // BLOCKS.STRIPS
    for tile in tl.range(0, length, 128 * BLOCKS.STRIPS):
        # (128 STRIPS)
        keys = tile + tl.arange(0, 128 * BLOCKS.STRIPS)
        is_key = keys < length
        rank = tl.load(rank_ptr + keys, mask=is_key, other=0)
        place = count_ptr + keys // strip_keys * PARENT_ROWS + rank % PARENT_ROWS
        parent_start = tl.load(place, mask=is_key, other=0)
        tl.store(order_ptr + parent_start + rank // PARENT_ROWS, first + keys, mask=is_key)
