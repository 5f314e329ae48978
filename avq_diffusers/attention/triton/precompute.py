"""VQ precompute kernels: assign every key, then average the values of every codeword.

A key goes to its nearest parent, then to a child of it that is strictly closer, or stays with the
parent (paper, Algorithm 1). Two launches:

    sort        finds the parents of a chunk of keys and sorts the chunk by them, stably.
    aggregate   gathers the keys of one parent from all chunks and finds their leaves by a small
                matrix product. A product with the one-hot choice adds up their values.

A parent with many keys is cut into pieces of fixed length. The program that finishes last adds the
pieces in order, so every run gives the same bits.

Shapes: B batch, H heads, S keys, D head dim, M0 parents, C children; DP, MP, CP as in `codewords`;
L leaves of a parent (0 stays, c + 1 is child c) and padding, T chunks.
"""

from dataclasses import dataclass, replace
from functools import cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from avq_diffusers.attention.triton.codewords import mean_columns, padded_sizes
from avq_diffusers.attention.triton.launch import launch


@dataclass(frozen=True)
class PrecomputeTiling:
    """How the work is cut. Changes the result only by the order of additions.

    num_chunks: chunks that a head's keys are sorted in, a power of two.
    sort_keys, sort_parents: keys and parents of one product.
    sort_shared: bytes of shared memory for all codes and the key tiles; larger codes are loaded
        again for every key tile.
    sort_warps, sort_stages: of the sort; each warp ranks its own strip of a chunk.
    piece_keys: keys of one parent that one program aggregates.
    leaf_keys: keys of one product.
    leaf_warps, leaf_stages: of the aggregation.
    """

    num_chunks: int
    sort_keys: int
    sort_parents: int
    sort_shared: int
    sort_warps: int
    sort_stages: int
    piece_keys: int
    leaf_keys: int
    leaf_warps: int
    leaf_stages: int


def default_tiling(
    num_heads: int,
    num_keys: int,
    padded_dim: int,
    num_parents: int,
    num_children: int,
    dtype: torch.dtype,
) -> PrecomputeTiling:
    """The tiling for a problem size, measured on an H200 for half precision.

    Float32 takes smaller tiles to fit registers and shared memory.

    Args:
        num_heads: heads of all batch elements together.
    """
    most_chunks = 16 if num_children == 0 else 64 if num_parents <= 64 else 32
    # Enough pieces to fill the GPU, however the keys are spread over the parents.
    piece_keys = num_heads * num_keys * padded_dim >> 16
    tiling = PrecomputeTiling(
        num_chunks=_clamped_power_of_2(num_keys >> 10, 16, most_chunks),
        sort_keys=64,
        sort_parents=64,
        sort_shared=88 * 1024,
        sort_warps=4,
        sort_stages=3,
        piece_keys=_clamped_power_of_2(piece_keys, 256, 2048),
        leaf_keys=32,
        leaf_warps=1,
        leaf_stages=3,
    )
    if num_children > 16:
        tiling = replace(tiling, leaf_keys=64, leaf_warps=4)
    if dtype == torch.float32:
        tiling = replace(
            tiling,
            sort_keys=32,
            sort_shared=24 * 1024,
            sort_stages=1,
            leaf_keys=32,
            leaf_warps=4,
            leaf_stages=1,
        )
    return tiling


def _clamped_power_of_2(number: int, least: int, most: int) -> int:
    """The largest power of two up to `number`, but within `least` and `most`."""
    return min(most, max(least, 1 << (max(number, 1).bit_length() - 1)))


@triton.jit
def _product(left, right):
    """Matrix product, of float32 factors to about float32 precision on tensor cores."""
    return tl.dot(left, right, input_precision="tf32x3")


@triton.jit
def _first_maximum(scores, columns, LAST: tl.constexpr):
    """Largest score along axis 1 and its lowest column; column LAST if all scores are NaN."""
    best = tl.max(scores, axis=1)
    column = tl.where(scores == tl.expand_dims(best, 1), columns, LAST)
    return best, tl.min(column, axis=1)


@triton.jit
def _nearest_parents(key, codes, bias, first_parent, LAST: tl.constexpr):
    """(KEYS, 8) best score among every eighth parent of a tile, and that parent.

    A thread holds two of eight columns of a row, so threads need not communicate.
    """
    PLACES: tl.constexpr = codes.shape[0] // 8
    scores = (_product(key, codes.T) + bias[None, :]).reshape(key.shape[0], PLACES, 8)
    parents = tl.arange(0, PLACES)[:, None] * 8 + tl.arange(0, 8)[None, :]
    best, parent = _first_maximum(scores, parents[None], LAST)
    return best, first_parent + parent


@triton.jit
def _count_bits(bits):
    bits -= (bits >> 1) & 0x55555555
    bits = (bits & 0x33333333) + ((bits >> 2) & 0x33333333)
    bits = (bits + (bits >> 4)) & 0x0F0F0F0F
    return (bits * 0x01010101) >> 24


@triton.jit
def _load_rows(
    base_ptr,
    rows,
    stride,
    is_row,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    ALIGN: tl.constexpr,
):
    """Rows of D numbers, padded with zeros to DP."""
    columns = tl.arange(0, PADDED_DIM)
    offsets = (rows.to(tl.int64) * stride * ALIGN)[:, None] + columns[None, :]
    return tl.load(
        base_ptr + offsets, mask=is_row[:, None] & (columns < HEAD_DIM)[None, :], other=0.0
    )


@triton.jit
def _load_codes(codes_ptr, rows, PADDED_DIM: tl.constexpr):
    return tl.load(codes_ptr + rows[:, None] * PADDED_DIM + tl.arange(0, PADDED_DIM)[None, :])


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
    codes_ptr,
    bias_ptr,
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
    key_ptr += (batch.to(tl.int64) * key_stride_batch + head.to(tl.int64) * key_stride_head) * ALIGN
    key_ptr += first * key_stride_token
    codes_ptr += head * CODE_ROWS * PADDED_DIM
    bias_ptr += head * CODE_ROWS
    rank_ptr += batch_chunk * chunk_keys
    order_ptr += batch_head * num_keys + first
    count_ptr += batch_chunk * STRIPS * PARENT_ROWS
    start_ptr += batch_head * (PARENT_ROWS + 1) * NUM_CHUNKS + chunk

    all_parents = tl.arange(0, PARENT_ROWS)
    parents = tl.arange(0, PARENTS)
    if RESIDENT:
        codes = ()
        for first_parent in tl.static_range(0, PARENT_ROWS, PARENTS):
            codes += (_load_codes(codes_ptr, first_parent + parents, PADDED_DIM),)
    if PARENT_ROWS == PARENTS:
        bias = tl.load(bias_ptr + parents)

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
        ).to(codes_ptr.dtype.element_ty)

        # (KEYS, 8)
        if PARENT_ROWS == PARENTS:
            best, parent = _nearest_parents(key, codes[0], bias, 0, PARENT_ROWS - 1)
        else:
            best = tl.full([KEYS, 8], float("-inf"), tl.float32)
            parent = tl.full([KEYS, 8], PARENT_ROWS - 1, tl.int32)
            if RESIDENT:
                for part in tl.static_range(PARENT_ROWS // PARENTS):
                    bias = tl.load(bias_ptr + part * PARENTS + parents)
                    tile_best, tile_parent = _nearest_parents(
                        key, codes[part], bias, part * PARENTS, PARENTS - 1
                    )
                    parent = tl.where(tile_best > best, tile_parent, parent)
                    best = tl.maximum(best, tile_best)
            else:
                for first_parent in tl.range(0, PARENT_ROWS, PARENTS):
                    bias = tl.load(bias_ptr + first_parent + parents)
                    tile_best, tile_parent = _nearest_parents(
                        key,
                        _load_codes(codes_ptr, first_parent + parents, PADDED_DIM),
                        bias,
                        first_parent,
                        PARENTS - 1,
                    )
                    parent = tl.where(tile_best > best, tile_parent, parent)
                    best = tl.maximum(best, tile_best)
        _, parent = _first_maximum(best, parent, PARENT_ROWS - 1)
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


@triton.jit
def _extra_pieces(
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
def _store_aggregates(
    means_ptr,
    log_counts_ptr,
    sums,
    counts,
    parent,
    NUM_PARENTS: tl.constexpr,
    CHILD_ROWS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    MEAN_COLUMNS: tl.constexpr,
    PARENT_ROWS: tl.constexpr,
    LEAF_ROWS: tl.constexpr,
):
    """Write the rows of one parent: for all its keys, for those that stay, for its children."""
    leaves = tl.arange(0, LEAF_ROWS)
    count = tl.sum(counts, axis=0)
    # (L) The number that a leaf's values are divided by: for the keys that stay, all of the parent.
    over = tl.maximum(tl.where(leaves == 0, count, counts), 1)
    share = tl.where(leaves == 0, counts * (1.0 / over), 1.0)
    rows = tl.where(
        leaves == 0, PARENT_ROWS + parent, 2 * PARENT_ROWS + parent * CHILD_ROWS + leaves - 1
    )
    is_row = leaves <= tl.where(parent < NUM_PARENTS, CHILD_ROWS, 0)
    _store_means(
        means_ptr + rows * MEAN_COLUMNS,
        sums * (1.0 / over)[:, None],
        share,
        is_row,
        HEAD_DIM,
        PADDED_DIM,
        MEAN_COLUMNS,
    )
    is_child = (leaves > 0) & is_row
    tl.store(
        log_counts_ptr + PARENT_ROWS + parent * CHILD_ROWS + leaves - 1,
        _log2(counts),
        mask=is_child,
    )

    # (1, DP)
    sums = tl.sum(sums, axis=0)[None, :] * (1.0 / tl.maximum(count, 1))
    ones = tl.full([1], 1.0, tl.float32)
    row = tl.arange(0, 1) + parent
    _store_means(
        means_ptr + row * MEAN_COLUMNS, sums, ones, ones > 0, HEAD_DIM, PADDED_DIM, MEAN_COLUMNS
    )
    tl.store(log_counts_ptr + parent, _log2(count))


@triton.jit
def _store_means(
    row_ptr,
    means,
    share,
    is_row,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    MEAN_COLUMNS: tl.constexpr,
):
    """Write rows of DV columns: D of a mean, and the share of keys in the others."""
    columns = tl.arange(0, PADDED_DIM)
    rows = tl.where((columns < HEAD_DIM)[None, :], means, share[:, None])
    dtype = row_ptr.dtype.element_ty
    mask = is_row[:, None] & (columns < MEAN_COLUMNS)[None, :]
    tl.store(row_ptr[:, None] + columns[None, :], rows.to(dtype), mask=mask)
    if MEAN_COLUMNS > PADDED_DIM:
        columns = PADDED_DIM + tl.arange(0, MEAN_COLUMNS - PADDED_DIM)
        rows = tl.broadcast_to(share[:, None], [share.shape[0], MEAN_COLUMNS - PADDED_DIM])
        tl.store(row_ptr[:, None] + columns[None, :], rows.to(dtype), mask=is_row[:, None])


@triton.jit
def _log2(count):
    """log2 of a count, -inf for 0."""
    return tl.where(count > 0, tl.log2(tl.maximum(count, 1).to(tl.float32)), float("-inf"))


@triton.jit(
    do_not_specialize=[
        "key_stride_batch",
        "key_stride_head",
        "key_stride_token",
        "value_stride_batch",
        "value_stride_head",
        "value_stride_token",
        "num_keys",
        "chunk_keys",
        "num_chunks",
        "num_pieces",
    ]
)
def aggregate_kernel(
    key_ptr,
    value_ptr,
    codes_ptr,
    bias_ptr,
    order_ptr,
    start_ptr,
    ticket_ptr,
    piece_sums_ptr,
    piece_counts_ptr,
    means_ptr,
    log_counts_ptr,
    key_stride_batch,
    key_stride_head,
    key_stride_token,
    value_stride_batch,
    value_stride_head,
    value_stride_token,
    num_keys,
    chunk_keys,
    num_chunks,
    num_pieces,
    CODE_ROWS: tl.constexpr,
    NUM_PARENTS: tl.constexpr,
    NUM_CHILDREN: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    MEAN_COLUMNS: tl.constexpr,
    PARENT_ROWS: tl.constexpr,
    CHILD_ROWS: tl.constexpr,
    LEAF_ROWS: tl.constexpr,
    NUM_CHUNKS: tl.constexpr,
    LOG2_CHUNKS: tl.constexpr,
    PIECE: tl.constexpr,
    KEYS: tl.constexpr,
    ALIGN: tl.constexpr,
):
    """Choose a leaf for the keys of one piece of one parent, count them and add up their values.

    Pieces 0 to MP - 1 are the first piece of every parent, empty or not. The other pieces follow in
    the order of the parents.

    piece_sums: (B, H, num_pieces, L, DP) float32, only for parents of several pieces.
    piece_counts: (B, H, num_pieces, L) int32.
    """
    head = tl.program_id(0)
    batch = tl.program_id(1)
    piece = tl.program_id(2)
    batch_head = batch.to(tl.int64) * tl.num_programs(0) + head

    key_ptr += (batch.to(tl.int64) * key_stride_batch + head.to(tl.int64) * key_stride_head) * ALIGN
    value_ptr += (
        batch.to(tl.int64) * value_stride_batch + head.to(tl.int64) * value_stride_head
    ) * ALIGN
    codes_ptr += head * CODE_ROWS * PADDED_DIM
    bias_ptr += head * CODE_ROWS
    order_ptr += batch_head * num_keys
    start_ptr += batch_head * (PARENT_ROWS + 1) * NUM_CHUNKS
    ticket_ptr += batch_head * PARENT_ROWS
    piece_sums_ptr += batch_head * num_pieces * LEAF_ROWS * PADDED_DIM
    piece_counts_ptr += batch_head * num_pieces * LEAF_ROWS
    means_ptr += batch_head * (PARENT_ROWS + CODE_ROWS) * MEAN_COLUMNS
    log_counts_ptr += batch_head * CODE_ROWS

    parent = piece
    part = 0
    if piece >= PARENT_ROWS:
        extra = _extra_pieces(start_ptr, num_chunks, PIECE, PARENT_ROWS, NUM_CHUNKS)
        stop_piece = PARENT_ROWS + tl.cumsum(extra, axis=0)
        parent = tl.sum((stop_piece <= piece).to(tl.int32), axis=0)
        if parent >= PARENT_ROWS:
            return
        part = (
            1 + piece - tl.sum(tl.where(tl.arange(0, PARENT_ROWS) == parent, stop_piece - extra, 0))
        )

    # (NUM_CHUNKS) where the parent's keys are in each chunk, and how many come in earlier chunks.
    chunks = tl.arange(0, NUM_CHUNKS)
    is_chunk = chunks < num_chunks
    starts = tl.load(start_ptr + parent * NUM_CHUNKS + chunks, mask=is_chunk, other=0)
    stops = tl.load(start_ptr + (parent + 1) * NUM_CHUNKS + chunks, mask=is_chunk, other=0)
    total = tl.sum(stops - starts, axis=0)
    earlier = tl.cumsum(stops - starts, axis=0) - (stops - starts)
    shift = chunks * chunk_keys + starts - earlier

    leaves = tl.arange(0, LEAF_ROWS)
    if NUM_CHILDREN > 0:
        # (L, DP)
        code_rows = tl.where(leaves == 0, parent, PARENT_ROWS + parent * CHILD_ROWS + leaves - 1)
        is_code = leaves <= tl.where(parent < NUM_PARENTS, NUM_CHILDREN, 0)
        codes = tl.load(
            codes_ptr + code_rows[:, None] * PADDED_DIM + tl.arange(0, PADDED_DIM)[None, :],
            mask=is_code[:, None],
            other=0.0,
        )
        bias = tl.load(bias_ptr + code_rows, mask=is_code, other=float("-inf"))

    sums = tl.zeros([LEAF_ROWS, PADDED_DIM], tl.float32)
    chosen_counts = tl.zeros([LEAF_ROWS, KEYS], tl.int32)
    stop = tl.minimum((part + 1) * PIECE, total)
    for tile in tl.range(part * PIECE, stop, KEYS):
        # (KEYS) The chunk of a key is the last one that starts at or before its position.
        position = tile + tl.arange(0, KEYS)
        is_key = position < stop
        chunk = tl.zeros([KEYS], tl.int32)
        for bit in tl.static_range(LOG2_CHUNKS):
            later = chunk + (NUM_CHUNKS >> (bit + 1))
            chunk = tl.where(tl.gather(earlier, later, axis=0) <= position, later, chunk)
        position += tl.gather(shift, chunk, axis=0)
        keys = tl.load(order_ptr + position, mask=is_key, other=0)

        # (KEYS, DP)
        value = _load_rows(value_ptr, keys, value_stride_token, is_key, HEAD_DIM, PADDED_DIM, ALIGN)
        value = value.to(codes_ptr.dtype.element_ty)

        # (L, KEYS)
        if NUM_CHILDREN > 0:
            key = _load_rows(key_ptr, keys, key_stride_token, is_key, HEAD_DIM, PADDED_DIM, ALIGN)
            key = key.to(codes_ptr.dtype.element_ty)
            _, leaf = _first_maximum(
                _product(key, codes.T) + bias[None, :], leaves[None, :], LEAF_ROWS - 1
            )
            is_chosen = (leaves[:, None] == leaf[None, :]) & is_key[None, :]
        else:
            is_chosen = (leaves[:, None] == 0) & is_key[None, :]
        chosen_counts += is_chosen.to(tl.int32)
        sums += _product(tl.where(is_chosen, 1.0, 0.0).to(value.dtype), value)
    counts = tl.sum(chosen_counts, axis=1)

    if total <= PIECE:
        _store_aggregates(
            means_ptr,
            log_counts_ptr,
            sums,
            counts,
            parent,
            NUM_PARENTS,
            CHILD_ROWS,
            HEAD_DIM,
            PADDED_DIM,
            MEAN_COLUMNS,
            PARENT_ROWS,
            LEAF_ROWS,
        )
    else:
        offsets = leaves[:, None] * PADDED_DIM + tl.arange(0, PADDED_DIM)[None, :]
        tl.store(piece_sums_ptr + piece * (LEAF_ROWS * PADDED_DIM) + offsets, sums)
        tl.store(piece_counts_ptr + piece * LEAF_ROWS + leaves, counts)
        # All threads have stored before one of them says so.
        tl.debug_barrier()
        num_parts = tl.cdiv(total, PIECE)
        if tl.atomic_add(ticket_ptr + parent, 1) == num_parts - 1:
            extra = _extra_pieces(start_ptr, num_chunks, PIECE, PARENT_ROWS, NUM_CHUNKS)
            first_extra = PARENT_ROWS + tl.sum(
                tl.where(tl.arange(0, PARENT_ROWS) < parent, extra, 0), axis=0
            )
            sums = tl.load(piece_sums_ptr + parent * (LEAF_ROWS * PADDED_DIM) + offsets)
            counts = tl.load(piece_counts_ptr + parent * LEAF_ROWS + leaves)
            for other in tl.range(first_extra, first_extra + num_parts - 1):
                sums += tl.load(piece_sums_ptr + other * (LEAF_ROWS * PADDED_DIM) + offsets)
                counts += tl.load(piece_counts_ptr + other * LEAF_ROWS + leaves)
            _store_aggregates(
                means_ptr,
                log_counts_ptr,
                sums,
                counts,
                parent,
                NUM_PARENTS,
                CHILD_ROWS,
                HEAD_DIM,
                PADDED_DIM,
                MEAN_COLUMNS,
                PARENT_ROWS,
                LEAF_ROWS,
            )


def precompute(
    key: Tensor,
    value: Tensor,
    codes: Tensor,
    bias: Tensor,
    *,
    num_parents: int,
    num_children: int,
    tiling: PrecomputeTiling | None = None,
) -> tuple[Tensor, Tensor]:
    """Assign the keys; return the mean value and the log2 count of every codeword.

    Args:
        key, value: (B, H, S, D) float16, bfloat16 or float32, last stride 1.
        codes, bias: codewords as `codewords.pack` gives them.
        tiling: None takes `default_tiling`.

    Returns:
        means: (B, H, 2 MP + M0 CP, DV), dtype of `codes`; DV = `mean_columns`. Row p averages the
            values of all keys of parent p, row 2 MP + p CP + c those of its child c. Row MP + p is
            the sum of the values that stay with p, divided by the number of all its keys. Columns
            from D on are the number of keys of the row divided by the same number: 1 except in
            rows MP to 2 MP. A row without keys is 0.
        log_counts: (B, H, MP + M0 CP) float32, log2 of the number of keys of every codeword.
    """
    batch, num_heads, num_keys, head_dim = key.shape
    strides = (*key.stride()[:3], *value.stride()[:3])
    # A stride times a constant lets the compiler prove that rows of 16 bytes are aligned.
    align = 8 if all(stride % 8 == 0 for stride in strides) else 1
    strides = [stride // align for stride in strides]
    plan = _plan(
        batch * num_heads, num_keys, head_dim, num_parents, num_children, key.dtype, align, tiling
    )

    heads = (batch, num_heads)
    rank, order, count, start, ticket, piece_counts = (
        key.new_empty(heads + shape, dtype=torch.int32) for shape in plan.integers
    )
    piece_sums = key.new_empty(heads + plan.piece_sums, dtype=torch.float32)
    means = codes.new_empty(heads + plan.means)
    log_counts = bias.new_empty(heads + codes.shape[1:2])

    launch(
        sort_kernel,
        (num_heads, batch, plan.num_chunks),
        (key, codes, bias, rank, order, count, start, ticket),
        (*strides[:3], num_keys, plan.chunk_keys),
        plan.sort,
    )
    launch(
        aggregate_kernel,
        (num_heads, batch, plan.num_pieces),
        (
            key,
            value,
            codes,
            bias,
            order,
            start,
            ticket,
            piece_sums,
            piece_counts,
            means,
            log_counts,
        ),
        (*strides, num_keys, plan.chunk_keys, plan.num_chunks, plan.num_pieces),
        plan.aggregate,
    )
    return means, log_counts


class _Plan(NamedTuple):
    """What the problem size decides about the launches.

    num_chunks, chunk_keys: chunks that hold keys, and keys of each but the last.
    num_pieces: most pieces that keys of one head can be cut into.
    integers, piece_sums, means: shapes of the outputs and workspaces of one head.
    sort, aggregate: constants and options of the kernels.
    """

    num_chunks: int
    chunk_keys: int
    num_pieces: int
    integers: tuple[tuple[int, ...], ...]
    piece_sums: tuple[int, ...]
    means: tuple[int, ...]
    sort: dict[str, int]
    aggregate: dict[str, int]


@cache
def _plan(
    num_heads: int,
    num_keys: int,
    head_dim: int,
    num_parents: int,
    num_children: int,
    dtype: torch.dtype,
    align: int,
    tiling: PrecomputeTiling | None,
) -> _Plan:
    padded_dim, parent_rows, child_rows = padded_sizes(head_dim, num_parents, num_children)
    tiling = tiling or default_tiling(
        num_heads, num_keys, padded_dim, num_parents, num_children, dtype
    )
    code_rows = parent_rows + num_parents * child_rows
    leaf_rows = max(16, 2 * child_rows)
    # Products and strips both divide a chunk.
    tile_keys = max(tiling.sort_keys, 32 * tiling.sort_warps)
    chunk_keys = -(-num_keys // (tile_keys * tiling.num_chunks)) * tile_keys
    num_pieces = parent_rows + num_keys // tiling.piece_keys
    sort_parents = min(tiling.sort_parents, parent_rows)
    resident_rows = parent_rows + tiling.sort_stages * tiling.sort_keys
    resident_bytes = resident_rows * padded_dim * (4 if dtype == torch.float32 else 2)
    sizes = {
        "CODE_ROWS": code_rows,
        "HEAD_DIM": head_dim,
        "PADDED_DIM": padded_dim,
        "PARENT_ROWS": parent_rows,
        "NUM_CHUNKS": tiling.num_chunks,
        "ALIGN": align,
    }
    return _Plan(
        num_chunks=-(-num_keys // chunk_keys),
        chunk_keys=chunk_keys,
        num_pieces=num_pieces,
        integers=(
            (tiling.num_chunks, chunk_keys),
            (num_keys,),
            (tiling.num_chunks, tiling.sort_warps, parent_rows),
            (parent_rows + 1, tiling.num_chunks),
            (parent_rows,),
            (num_pieces, leaf_rows),
        ),
        piece_sums=(num_pieces, leaf_rows, padded_dim),
        means=(parent_rows + code_rows, mean_columns(head_dim)),
        sort={
            **sizes,
            "KEYS": tiling.sort_keys,
            "PARENTS": sort_parents,
            "STRIPS": tiling.sort_warps,
            "RESIDENT": sort_parents == parent_rows or resident_bytes <= tiling.sort_shared,
            "num_warps": tiling.sort_warps,
            "num_stages": tiling.sort_stages,
        },
        aggregate={
            **sizes,
            "NUM_PARENTS": num_parents,
            "NUM_CHILDREN": num_children,
            "MEAN_COLUMNS": mean_columns(head_dim),
            "CHILD_ROWS": child_rows,
            "LEAF_ROWS": leaf_rows,
            "LOG2_CHUNKS": tiling.num_chunks.bit_length() - 1,
            "PIECE": tiling.piece_keys,
            "KEYS": tiling.leaf_keys,
            "num_warps": tiling.leaf_warps,
            "num_stages": tiling.leaf_stages,
        },
    )
