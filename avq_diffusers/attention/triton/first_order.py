"""The first-order term: how values inside leaves follow their keys, one matrix per head.

    M = ln(2) sum_j (v_j - mean of its leaf) (c_j - mean of its leaf)^T / sum_j s_leaf(j)

with the keys c and the spreads s in units of the codes. A query that sees the spread r gains
r / (1 + r size) M q. The sum over keys is that around the centre, which programs of the sort's
launch add up chunk by chunk, without the same for the means of leaves. The matrix is computed in at
most 4 x 4 blocks.

Shapes: as in `precompute`.
"""

import triton
import triton.language as tl

from avq_diffusers.attention import tensors
from avq_diffusers.attention.triton.rows import load_keys, mean_parent, product
from avq_diffusers.attention.triton.softmax import LN2

# Below it, a divisor counts as zero.
LEAST = tl.constexpr(1e-30)
LEAST_OF_CELLS = tl.constexpr(tensors.LEAST_OF_CELLS)
LEAST_OF_ALL = tl.constexpr(tensors.LEAST_OF_ALL)
# Chunks that are added at once, rows whose means are read at once, and blocks of leaves in flight
# with up to 64 dims (with more, other programs of the launch get slower).
CHUNKS = tl.constexpr(4)
ROWS = tl.constexpr(32)
IN_FLIGHT = tl.constexpr(4)


def blocks_per_side(padded_dim: int) -> int:
    """Blocks of a matrix along each of its sides."""
    return min(4, padded_dim // 16)


# Values whose covariance with all dims of the keys one program sums.
MOST_VALUES = tl.constexpr(64)


@triton.jit
def sum_covariance(head, value_ptr, value_stride, covariance_ptr, summed, index, SIZES, BLOCKS):
    """Write a part of a chunk's sum of values times keys around the centre.

    Keys are scaled and rounded as codes are, so that leaves of one key cancel later.
    """
    DIM: tl.constexpr = SIZES.PADDED_DIM
    VALUES: tl.constexpr = min(DIM, MOST_VALUES)
    PARTS: tl.constexpr = DIM // VALUES
    chunk = index // PARTS
    values = index % PARTS * VALUES + tl.arange(0, VALUES)
    is_value = (values < SIZES.HEAD_DIM)[None, :]
    centre = mean_parent(head, SIZES, BLOCKS.PARENTS)
    total = tl.zeros([VALUES, DIM], tl.float32)
    stop = tl.minimum((chunk + 1) * summed.length, summed.num_keys)
    for first in tl.range(chunk * summed.length, stop, BLOCKS.KEYS):
        token = first + tl.arange(0, BLOCKS.KEYS)
        is_key = token < stop
        key = load_keys(head, token, is_key, SIZES)
        offsets = (token.to(tl.int64) * value_stride * SIZES.ALIGN)[:, None] + values[None, :]
        # Values beyond the last key are 0.
        value = tl.load(value_ptr + offsets, mask=is_key[:, None] & is_value, other=0.0)
        code = (key.to(tl.float32) - centre[None, :]) * BLOCKS.FACTOR
        total = product(tl.trans(value), code.to(key.dtype), total)
    covariance_ptr += (head.batch_head * summed.number + chunk) * (DIM * DIM)
    tl.store(covariance_ptr + values[:, None] * DIM + tl.arange(0, DIM)[None, :], total)


@triton.jit
def inverse_variance(tables, SIZES):
    """1 / sum_j s_leaf(j) of a head; 0 without a first-order term."""
    DIM: tl.constexpr = SIZES.PADDED_DIM
    inside = tl.zeros([ROWS], tl.float32)
    least = tl.zeros([ROWS], tl.float32)
    for first in tl.range(0, SIZES.PARENT_ROWS, ROWS):
        row = first + tl.arange(0, ROWS)
        is_row = row < SIZES.PARENT_ROWS
        counts = tl.load(tables.counts + row, mask=is_row, other=0)
        inside += counts * tl.load(tables.inside + 2 * row, mask=is_row, other=0.0)
        around_cells = tl.load(tables.spread + row, mask=is_row, other=0.0)
        pointers = tables.codes + row[:, None] * DIM + tl.arange(0, DIM)[None, :]
        codes = tl.load(pointers, mask=is_row[:, None], other=0.0).to(tl.float32)
        around_all = around_cells + tl.sum(codes * codes, axis=1)
        least += counts * (around_cells * LEAST_OF_CELLS + around_all * LEAST_OF_ALL)
    total = tl.sum(inside, axis=0)
    is_some = total > tl.sum(least, axis=0)
    return tl.where(is_some, 1.0 / tl.maximum(total, LEAST), 0.0)


@triton.jit
def add_covariances(covariance_ptr, tables, num_chunks, block, SIZES):
    """Write a block of a head's matrix."""
    DIM: tl.constexpr = SIZES.PADDED_DIM
    SIDE: tl.constexpr = SIZES.MATRIX_SIDE
    BLOCK: tl.constexpr = DIM // SIDE
    values = block // SIDE * BLOCK + tl.arange(0, BLOCK)
    dims = block % SIDE * BLOCK + tl.arange(0, BLOCK)
    is_padding = BLOCK * tl.maximum(block // SIDE, block % SIDE) >= SIZES.HEAD_DIM
    num_chunks = tl.where(is_padding, 0, num_chunks)
    num_rows = tl.where(is_padding, 0, SIZES.ROWS)
    inverse = inverse_variance(tables, SIZES)
    numbers = values[:, None] * DIM + dims[None, :]
    total = tl.zeros([BLOCK, BLOCK], tl.float32)
    for first in tl.range(0, num_chunks, CHUNKS):
        chunk = first + tl.arange(0, CHUNKS)
        pointers = covariance_ptr + (chunk * (DIM * DIM))[:, None, None] + numbers[None, :, :]
        is_chunk = (chunk < num_chunks)[:, None, None]
        total += tl.sum(tl.load(pointers, mask=is_chunk, other=0.0), axis=0)

    STAGES: tl.constexpr = IN_FLIGHT if DIM <= 64 else 1
    for first in tl.range(SIZES.PARENT_ROWS, num_rows, ROWS, num_stages=STAGES):
        row = first + tl.arange(0, ROWS)
        is_row = row < num_rows
        counts = tl.load(tables.counts + row, mask=is_row, other=0).to(tl.float32)
        pointers = tables.codes + row[:, None] * DIM + dims[None, :]
        keys = tl.load(pointers, mask=is_row[:, None], other=0.0).to(tl.float32)
        pointers = tables.mean_values + row[:, None] * DIM + values[None, :]
        mask = is_row[:, None] & (values < SIZES.HEAD_DIM)[None, :]
        mean_values = tl.load(pointers, mask=mask, other=0.0).to(tl.float32)
        total = product(tl.trans(mean_values * -counts[:, None]), keys, total)

    total *= inverse * LN2
    tl.store(tables.matrix + numbers, total)
    tl.store(tables.largest + block, tl.max(tl.max(tl.abs(total), axis=1), axis=0))


@triton.jit
def matrix_size(tables, SIZES):
    """Largest number of a head's matrix; something positive if all are 0."""
    SIDE: tl.constexpr = SIZES.MATRIX_SIDE
    largest = tl.load(tables.largest + tl.arange(0, SIDE * SIDE))
    return tl.maximum(tl.max(largest, axis=0), LEAST)


@triton.jit
def matrix_block(tables, VALUE, VALUES, DIM, DIMS, SIZES):
    """(DIMS, VALUES) Part of the matrix, transposed."""
    values = (VALUE + tl.arange(0, VALUES))[None, :]
    dims = (DIM + tl.arange(0, DIMS))[:, None]
    return tl.load(tables.matrix + values * SIZES.PADDED_DIM + dims)


@triton.jit
def relative_to(size, matrix, dtype):
    """A part of the matrix, relative to a size."""
    return (matrix * (1.0 / size)).to(dtype)
