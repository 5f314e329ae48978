"""The parents that a tile of queries refines (paper, Eq. importance).

Shapes: as in `attention`.
"""

import triton
import triton.language as tl

from avq_diffusers.attention.triton.softmax import LOG_ZERO, load_codes, logits_of


@triton.jit
def tiled_importance(
    query,
    valid_query,
    tables,
    sizes,
    TILE: tl.constexpr,
    WHOLE: tl.constexpr,
    BLOCK_M: tl.constexpr,
):
    """Importance of all parents (PARENT_ROWS,) in tiles of TILE parents.

    Unless WHOLE, a denominator covers the parents up to the end of the tile and is extrapolated
    from the keys seen so far to all keys.

    Returns:
        importance: (PARENT_ROWS,).
        running_max: (BLOCK_N,) largest logits.
        log_denominator: (BLOCK_N,), infinite for rows without a query.
    """
    NUM_PARENTS: tl.constexpr = sizes.NUM_PARENTS
    PARENT_ROWS: tl.constexpr = sizes.PARENT_ROWS
    BLOCK_N: tl.constexpr = valid_query.shape[0]
    parents = tl.arange(0, PARENT_ROWS)
    total = tl.sum(tl.exp2(tl.load(tables.log_counts + parents)), axis=0)
    seen = 0.0
    running_max = tl.full([BLOCK_N], LOG_ZERO, tl.float32)
    denominator = tl.zeros([BLOCK_N], tl.float32)
    importance = tl.zeros([PARENT_ROWS], tl.float32)

    if WHOLE:
        for start in tl.range(0, NUM_PARENTS, TILE):
            rows = start + tl.arange(0, BLOCK_M)
            valid = (rows < start + TILE) & (rows < NUM_PARENTS)
            codes = load_codes(tables, rows, valid, sizes)
            log_counts = tl.load(tables.log_counts + rows, mask=valid, other=float("-inf"))
            logits = logits_of(query, codes, log_counts[None, :])
            new_max = tl.maximum(running_max, tl.max(logits, axis=1))
            weights = tl.exp2(logits - new_max[:, None])
            denominator = denominator * tl.exp2(running_max - new_max) + tl.sum(weights, axis=1)
            running_max = new_max

    for start in tl.range(0, NUM_PARENTS, TILE):
        rows = start + tl.arange(0, BLOCK_M)
        valid = (rows < start + TILE) & (rows < NUM_PARENTS)
        codes = load_codes(tables, rows, valid, sizes)
        log_counts = tl.load(tables.log_counts + rows, mask=valid, other=float("-inf"))
        logits = logits_of(query, codes, log_counts[None, :])
        if WHOLE:
            weights = tl.exp2(logits - running_max[:, None])
            share = 1.0
        else:
            new_max = tl.maximum(running_max, tl.max(logits, axis=1))
            weights = tl.exp2(logits - new_max[:, None])
            denominator = denominator * tl.exp2(running_max - new_max) + tl.sum(weights, axis=1)
            running_max = new_max
            seen += tl.sum(tl.exp2(log_counts), axis=0)
            share = seen / total
        # At least 1, the weight of the maximum, unless the first tiles hold no keys.
        denominator_seen = tl.maximum(denominator, 1.0)
        inverse = tl.where(valid_query, share / denominator_seen, 0.0)
        mass = tl.sum(weights * inverse[:, None], axis=0)
        importance += tl.sum(
            tl.where(parents[:, None] == rows[None, :], mass[None, :], 0.0), axis=1
        )
    log_denominator = tl.where(valid_query, running_max + tl.log2(denominator), float("inf"))
    return importance, running_max, log_denominator


@triton.jit
def rank_of(importance, PARENT_ROWS: tl.constexpr):
    """Rank of every parent by falling importance; of equal ones the lower index comes first."""
    # Importance is not negative: its bits order like integers, and the index breaks ties.
    key = importance.to(tl.int32, bitcast=True).to(tl.int64) << 32
    key |= PARENT_ROWS - 1 - tl.arange(0, PARENT_ROWS)
    ahead = key[None, :] > key[:, None]
    return tl.sum(ahead.to(tl.int32), axis=1)
