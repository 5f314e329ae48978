"""The first-order term: how values inside leaves follow their keys, one matrix per head.

    M = scale sum_j (v_j - mean of its leaf) (k_j - mean of its leaf)^T / sum_j s_leaf(j)

with the spreads s in units of the codes. A query that sees the spread r gains r / (1 + r size) M q.

Shapes: as in `precompute`.
"""

import triton
import triton.language as tl

from avq_diffusers.attention.triton.pieces import extra_pieces, sorted_keys

# Below it, a sum over keys counts as zero.
LEAST = tl.constexpr(1e-30)


@triton.jit
def _total_spread(tables, batch_head, CELLS):
    """Sum over all keys of the spreads of their leaves."""
    BLOCK: tl.constexpr = 256
    total = tl.zeros([BLOCK], tl.float32)
    for first in tl.range(CELLS.PARENT_ROWS, CELLS.ROWS, BLOCK):
        row = first + tl.arange(0, BLOCK)
        place = batch_head * CELLS.ROWS + row
        counts = tl.load(tables.counts + place, mask=row < CELLS.ROWS, other=0)
        spread = tl.load(tables.spread + place, mask=row < CELLS.ROWS, other=0.0)
        total += counts * spread
    return tl.sum(total, axis=0)


@triton.jit
def add_covariances(
    covariance_ptr, tables, sort, chunks, batch_head, part, num_pieces, CELLS, DIM, BLOCKS
):
    """Write VALUES rows of a head's matrix, each relative to its largest number."""
    VALUES: tl.constexpr = BLOCKS.VALUES
    PIECES: tl.constexpr = BLOCKS.PIECES
    extra = extra_pieces(sorted_keys(sort, batch_head, chunks, CELLS), CELLS)
    num_valid = CELLS.PARENT_ROWS + tl.sum(extra, axis=0)
    values = part * VALUES + tl.arange(0, VALUES)
    # (VALUES, DP)
    numbers = values[:, None] * DIM + tl.arange(0, DIM)[None, :]
    total = tl.zeros([VALUES, DIM], tl.float32)
    covariance_ptr += batch_head * num_pieces * (DIM * DIM)
    for first in tl.range(0, num_valid, PIECES):
        piece = first + tl.arange(0, PIECES)
        pointers = covariance_ptr + (piece * (DIM * DIM))[:, None, None] + numbers[None, :, :]
        is_piece = (piece < num_valid)[:, None, None]
        total += tl.sum(tl.load(pointers, mask=is_piece, other=0.0), axis=0)

    spread = _total_spread(tables, batch_head, CELLS)
    largest = tl.max(tl.abs(total), axis=1)
    # Without two keys in a leaf there is no term.
    is_some = tl.minimum(largest, spread) > LEAST
    matrix = total * tl.where(is_some, 1.0 / largest, 0.0)[:, None]
    dtype = tables.matrix.dtype.element_ty
    tl.store(tables.matrix + batch_head * (DIM * DIM) + numbers, matrix.to(dtype))
    scale = tl.where(is_some, largest * (BLOCKS.SCALE / spread), 0.0)
    tl.store(tables.matrix_scale + batch_head * DIM + values, scale)
