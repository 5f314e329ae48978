"""Sort kernel: each key's nearest parent, and each chunk's keys in the order of parents.

With a first-order term, some programs of the launch sum its covariance instead.

Shapes: as in `precompute`.
"""

from typing import NamedTuple

import triton
import triton.language as tl

from avq_diffusers.attention.triton.first_order import sum_covariance
from avq_diffusers.attention.triton.pieces import Chunks
from avq_diffusers.attention.triton.problem import Strides
from avq_diffusers.attention.triton.rows import (
    ParentPointers,
    best_of_block,
    best_of_blocks,
    first_maximum,
    head_of_program,
    head_start,
    load_parents,
    mean_parent,
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
    # (B, H, S) float32, squared distance of each key from `origin_of`, with mean keys.
    square: tl.tensor


class SortBlocks(NamedTuple):
    """Compile-time blocks: keys and parents per matmul, and strips per chunk."""

    NUM_CHUNKS: tl.constexpr  # most chunks of a head, a power of two
    KEYS: tl.constexpr
    PARENTS: tl.constexpr
    STRIPS: tl.constexpr
    RESIDENT: tl.constexpr  # shared memory holds the codes of all parents
    FIRST_ORDER: tl.constexpr  # values inside leaves follow their keys
    FACTOR: tl.constexpr  # on the logits of keys, includes log2(e)


class Chunk(NamedTuple):
    """The keys that a program sorts."""

    first: tl.tensor
    length: tl.tensor
    strip_keys: tl.tensor  # keys per strip


@triton.jit
def _count_bits(bits):
    bits -= (bits >> 1) & 0x55555555
    bits = (bits & 0x33333333) + ((bits >> 2) & 0x33333333)
    bits = (bits + (bits >> 4)) & 0x0F0F0F0F
    return (bits * 0x01010101) >> 24


@triton.jit
def _resident_parents(head, SIZES, BLOCKS):
    """Codes and biases of all parents, in blocks, if they stay in shared memory; else none."""
    codes = ()
    biases = ()
    if BLOCKS.RESIDENT:
        for first in tl.static_range(0, SIZES.PARENT_ROWS, BLOCKS.PARENTS):
            parents = first + tl.arange(0, BLOCKS.PARENTS)
            block_codes, block_bias = load_parents(head, parents, SIZES)
            codes += (block_codes,)
            biases += (block_bias,)
    return codes, biases


@triton.jit
def _best_of_resident(key, codes, biases, SIZES, BLOCKS):
    """`best_of_block` over all parents, with resident codes."""
    if SIZES.PARENT_ROWS == BLOCKS.PARENTS:
        best, parent = best_of_block(key, codes[0], biases[0], 0, SIZES.PARENT_ROWS - 1)
    else:
        best = tl.full([BLOCKS.KEYS, 8], float("-inf"), tl.float32)
        parent = tl.full([BLOCKS.KEYS, 8], SIZES.PARENT_ROWS - 1, tl.int32)
        for block in tl.static_range(SIZES.PARENT_ROWS // BLOCKS.PARENTS):
            block_best, block_parent = best_of_block(
                key, codes[block], biases[block], block * BLOCKS.PARENTS, BLOCKS.PARENTS - 1
            )
            parent = tl.where(block_best > best, block_parent, parent)
            best = tl.maximum(best, block_best)
    return best, parent


@triton.jit
def _find_parents(head, chunk, codes, biases, at, SIZES, BLOCKS):
    """Write the parent of each key to `rank`, and its squared distance with mean keys."""
    rows = tl.arange(0, BLOCKS.KEYS)
    dims = tl.arange(0, SIZES.PADDED_DIM)
    stride = head.stride.to(tl.int64) * SIZES.ALIGN
    key_ptr = head.key + chunk.first * stride
    # (KEYS, DP) Offsets within a block fit 32 bits; the block's offset is a scalar.
    offsets = rows[:, None] * stride.to(tl.int32) + dims[None, :]
    if SIZES.MEANS:
        origin = origin_of(head, SIZES)
    for block in tl.range(0, chunk.length, BLOCKS.KEYS):
        # (KEYS, DP)
        is_key = block + rows < chunk.length
        mask = is_key[:, None] & (dims < SIZES.HEAD_DIM)[None, :]
        key = tl.load(key_ptr + block * stride + offsets, mask=mask, other=0.0)
        if SIZES.MEANS:
            distance = key.to(tl.float32) - origin[None, :]
            square = tl.sum(distance * distance, axis=1)
            tl.store(at.square + block + rows, square, mask=is_key)

        # (KEYS, 8)
        if BLOCKS.RESIDENT:
            best, parent = _best_of_resident(key, codes, biases, SIZES, BLOCKS)
        else:
            best, parent = best_of_blocks(key, head, SIZES, BLOCKS.PARENTS)
        _, parent = first_maximum(best, parent, SIZES.PARENT_ROWS - 1)
        tl.store(at.rank + block + rows, parent, mask=is_key)


@triton.jit
def _rank(chunk, at, SIZES, BLOCKS):
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
    lane_offsets = strip * chunk.strip_keys + lanes % 32
    # (32, STRIPS) One thread holds all keys of a strip; strips are in different warps.
    other_offsets = tl.arange(0, 32)[:, None] + tl.arange(0, STRIPS)[None, :] * chunk.strip_keys
    strip_counts_ptr = at.count + tl.arange(0, STRIPS)[:, None] * PARENT_ROWS + all_parents[None, :]
    tl.store(strip_counts_ptr, tl.zeros([STRIPS, PARENT_ROWS], tl.int32))
    # Threads exchange parents, counts and ranks through memory.
    tl.debug_barrier()
    for block in tl.range(0, chunk.strip_keys, 32):
        # (32 STRIPS)
        keys = block + lane_offsets
        is_key = keys < chunk.length
        parent = tl.load(at.rank + keys, mask=is_key, other=-1)
        # (32, STRIPS)
        others = block + other_offsets
        other_parent = tl.load(at.rank + others, mask=others < chunk.length, other=-1)

        # (32 STRIPS) Bit i tells whether key i of the strip has the same parent.
        is_same = other_parent[:, :, None] == parent.reshape(STRIPS, 32)[None, :, :]
        same = tl.sum(tl.where(is_same, bit[:, None, None], 0), axis=0).reshape(32 * STRIPS)
        same = same.to(tl.uint32)
        is_last = same >> in_strip == 1
        parent_count_ptr = at.count + strip * PARENT_ROWS + parent
        rank = tl.load(parent_count_ptr, mask=is_key, other=0)
        rank += _count_bits(same & earlier_bits).to(tl.int32)

        tl.debug_barrier()
        tl.store(at.rank + keys, rank * PARENT_ROWS + parent, mask=is_key)
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
def _write_order(chunk, at, SIZES, BLOCKS):
    """Write the chunk's keys in the order of parents."""
    LENGTH: tl.constexpr = 128 * BLOCKS.STRIPS
    for block in tl.range(0, chunk.length, LENGTH):
        # (128 STRIPS)
        keys = block + tl.arange(0, LENGTH)
        is_key = keys < chunk.length
        rank = tl.load(at.rank + keys, mask=is_key, other=0)
        strip = keys // chunk.strip_keys
        parent_start_ptr = at.count + strip * SIZES.PARENT_ROWS + rank % SIZES.PARENT_ROWS
        parent_start = tl.load(parent_start_ptr, mask=is_key, other=0)
        index = parent_start + rank // SIZES.PARENT_ROWS
        tl.store(at.order + index, chunk.first + keys, mask=is_key)


@triton.jit
def _at_chunk(sort, head, chunks, index, SIZES, BLOCKS):
    """The `Chunk` of an index, and the `SortPointers` at it; `ticket` at its head."""
    NUM_CHUNKS: tl.constexpr = BLOCKS.NUM_CHUNKS
    PARENT_ROWS: tl.constexpr = SIZES.PARENT_ROWS
    first = index * chunks.length
    length = tl.minimum(chunks.length, chunks.num_keys - first)
    batch_chunk = head.batch_head * NUM_CHUNKS + index
    first_key = head.batch_head * chunks.num_keys + first
    at = SortPointers(
        sort.rank + batch_chunk * chunks.length,
        sort.order + first_key,
        sort.count + batch_chunk * BLOCKS.STRIPS * PARENT_ROWS,
        sort.start + (head.batch_head * (PARENT_ROWS + 1) * NUM_CHUNKS + index),
        sort.ticket + head.batch_head * PARENT_ROWS,
        sort.square + first_key,
    )
    return Chunk(first, length, chunks.length // BLOCKS.STRIPS), at


@triton.jit
def sort_kernel(
    key_ptr,
    value_ptr,
    centre_ptr,
    covariance_ptr,
    source: ParentPointers,
    sort: SortPointers,
    key_strides: Strides,
    value_strides: Strides,
    chunks: Chunks,
    summed: Chunks,
    SIZES: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    """Sort one chunk of one head's keys by their nearest parent, or sum a part of its covariance.

    Three passes over the chunk: find the parents, rank each key among its parent's keys, write the
    order. Ranking works on strips of the chunk, 32 keys of each at a time.

    centre: (B, H, DP) float32, the mean of the parents, written unless they are stored.
    covariance: (B, H, chunks, DP, DP) float32, sums over the keys of chunks `summed`.
    """
    head = head_of_program(key_ptr, source, key_strides, chunks.num_keys, SIZES)
    index = tl.program_id(2)
    if BLOCKS.FIRST_ORDER and index >= chunks.number:
        value_ptr += head_start(value_strides, head.batch, head.head, SIZES.ALIGN)
        sum_covariance(
            head,
            value_ptr,
            value_strides.token,
            covariance_ptr,
            summed,
            index - chunks.number,
            SIZES,
            BLOCKS,
        )
        return
    chunk, at = _at_chunk(sort, head, chunks, index, SIZES, BLOCKS)

    codes, biases = _resident_parents(head, SIZES, BLOCKS)
    if index == 0 and not SIZES.STORED:
        dims = tl.arange(0, SIZES.PADDED_DIM)
        centre = mean_parent(head, SIZES, BLOCKS.PARENTS)
        tl.store(centre_ptr + head.batch_head * SIZES.PADDED_DIM + dims, centre)
    _find_parents(head, chunk, codes, biases, at, SIZES, BLOCKS)
    start = _rank(chunk, at, SIZES, BLOCKS)
    all_parents = tl.arange(0, SIZES.PARENT_ROWS)
    tl.store(at.start + all_parents * BLOCKS.NUM_CHUNKS, start)
    tl.store(at.start + SIZES.PARENT_ROWS * BLOCKS.NUM_CHUNKS, chunk.length)
    if index == 0:
        tl.store(at.ticket + all_parents, tl.zeros([SIZES.PARENT_ROWS], tl.int32))

    tl.debug_barrier()
    _write_order(chunk, at, SIZES, BLOCKS)
