"""The parents that a query tile refines (paper, Eq. importance).

Shapes: as in `attention`.
"""

import triton
import triton.language as tl

from avq_diffusers.attention.triton.softmax import LOG_ZERO, load_codes, logits_of


@triton.jit
def _parent_logits(tile, start, SIZES, BLOCK_M):
    """Parents (BLOCK_M) from `start` on, and logits (BLOCK_N, BLOCK_M) with their log counts."""
    parents = start + tl.arange(0, BLOCK_M)
    valid = parents < SIZES.NUM_PARENTS
    codes = load_codes(tile.tables, parents, valid, SIZES)
    log_counts = tl.load(tile.tables.log_counts + parents, mask=valid, other=float("-inf"))
    return parents, logits_of(tile.query, codes, log_counts[None, :])


@triton.jit
def importance_in_blocks(tile, SIZES, BLOCK_M):
    """Importance of all parents, BLOCK_M at a time: denominators first, then shares.

    Returns:
        importance: (PARENT_ROWS,).
        running_max: (BLOCK_N,), largest logits.
        log_denominator: (BLOCK_N,), infinite for rows without a query.
    """
    BLOCK_N: tl.constexpr = tile.valid.shape[0]
    running_max = tl.full([BLOCK_N], LOG_ZERO, tl.float32)
    denominator = tl.zeros([BLOCK_N], tl.float32)
    for start in tl.range(0, SIZES.NUM_PARENTS, BLOCK_M):
        _, logits = _parent_logits(tile, start, SIZES, BLOCK_M)
        new_max = tl.maximum(running_max, tl.max(logits, axis=1))
        weights = tl.exp2(logits - new_max[:, None])
        denominator = denominator * tl.exp2(running_max - new_max) + tl.sum(weights, axis=1)
        running_max = new_max

    every_parent = tl.arange(0, SIZES.PARENT_ROWS)
    importance = tl.zeros([SIZES.PARENT_ROWS], tl.float32)
    for start in tl.range(0, SIZES.NUM_PARENTS, BLOCK_M):
        parents, logits = _parent_logits(tile, start, SIZES, BLOCK_M)
        weights = tl.exp2(logits - running_max[:, None])
        # The denominator is at least 1, the weight of the maximum.
        inverse = tl.where(tile.valid, 1.0 / tl.maximum(denominator, 1.0), 0.0)
        share = tl.sum(weights * inverse[:, None], axis=0)
        is_parent = every_parent[:, None] == parents[None, :]
        importance += tl.sum(tl.where(is_parent, share[None, :], 0.0), axis=1)
    log_denominator = tl.where(tile.valid, running_max + tl.log2(denominator), float("inf"))
    return importance, running_max, log_denominator


@triton.jit
def rank_of(importance, PARENT_ROWS):
    """Rank of each parent by decreasing importance; ties go to the lower index."""
    # Importance is non-negative, so its bits order like integers, and the index breaks ties.
    key = importance.to(tl.int32, bitcast=True).to(tl.int64) << 32
    key |= PARENT_ROWS - 1 - tl.arange(0, PARENT_ROWS)
    ahead = key[None, :] > key[:, None]
    return tl.sum(ahead.to(tl.int32), axis=1)
