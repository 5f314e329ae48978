"""The first-order term: how values inside leaves follow their keys, one matrix per head.

    M = scale sum_j (v_j - mean of its leaf) (k_j - mean of its leaf)^T / sum_j s_leaf(j)

with the spreads s in units of the codes. A query that sees the spread r gains r / (1 + r size) M q.
The sum over keys is that around the centre, which the sort adds up chunk by chunk, without the same
for the means of leaves.

Shapes: as in `precompute`.
"""

import triton
import triton.language as tl

from avq_diffusers.attention.triton.rows import product

# Below it, a sum over keys counts as zero.
LEAST = tl.constexpr(1e-30)
# Leaves whose means are taken away at once.
ROWS = tl.constexpr(16)


@triton.jit
def _over_chunks(covariance_ptr, numbers, num_chunks, SIZE, CHUNKS):
    """Sum over all chunks of some numbers of their covariances."""
    total = tl.zeros(numbers.shape, tl.float32)
    for first in tl.range(0, num_chunks, CHUNKS):
        chunk = first + tl.arange(0, CHUNKS)
        pointers = covariance_ptr + (chunk * SIZE)[:, None, None] + numbers[None, :, :]
        is_chunk = (chunk < num_chunks)[:, None, None]
        total += tl.sum(tl.load(pointers, mask=is_chunk, other=0.0), axis=0)
    return total


@triton.jit
def add_covariances(covariance_ptr, tables, chunks, part, SIZES, CELLS, BLOCKS):
    """Write VALUES rows of a head's matrix, each relative to its largest number."""
    DIM: tl.constexpr = SIZES.PADDED_DIM
    VALUES: tl.constexpr = BLOCKS.VALUES
    dims = tl.arange(0, DIM)
    values = part * VALUES + tl.arange(0, VALUES)
    numbers = values[:, None] * DIM + dims[None, :]
    total = _over_chunks(covariance_ptr, numbers, chunks.number, DIM * DIM, BLOCKS.CHUNKS)
    spread = tl.zeros([ROWS], tl.float32)
    for first in tl.range(SIZES.PARENT_ROWS, SIZES.ROWS, ROWS):
        row = first + tl.arange(0, ROWS)
        is_row = row < SIZES.ROWS
        counts = tl.load(tables.counts + row, mask=is_row, other=0).to(tl.float32)
        spread += counts * tl.load(tables.spread + row, mask=is_row, other=0.0)
        pointers = tables.codes + row[:, None] * DIM + dims[None, :]
        keys = tl.load(pointers, mask=is_row[:, None], other=0.0).to(tl.float32)
        pointers = tables.mean_values + row[:, None] * SIZES.VALUE_WIDTH + values[None, :]
        mask = is_row[:, None] & (values < SIZES.HEAD_DIM)[None, :]
        mean_values = tl.load(pointers, mask=mask, other=0.0).to(tl.float32)
        weights = counts * (-1.0 / SIZES.FACTOR)
        total = product(tl.trans(mean_values * weights[:, None]), keys, total)

    spread = tl.sum(spread, axis=0)
    largest = tl.max(tl.abs(total), axis=1)
    # Without two keys in a leaf there is no term.
    is_some = tl.minimum(largest, spread) > LEAST
    matrix = total * tl.where(is_some, 1.0 / largest, 0.0)[:, None]
    dtype = tables.matrix.dtype.element_ty
    tl.store(tables.matrix + numbers, matrix.to(dtype))
    scale = tl.where(is_some, largest * (BLOCKS.SCALE / spread), 0.0)
    tl.store(tables.matrix_scale + values, scale)
