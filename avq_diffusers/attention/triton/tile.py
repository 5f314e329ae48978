"""All that a tile of queries sees: parents, children of refined parents, exact keys and sink keys.

Shapes: as in `attention`.
"""

import triton
import triton.language as tl

from avq_diffusers.attention.triton.exact import attend_exact, attend_sinks, choose_columns
from avq_diffusers.attention.triton.selection import rank_of, tiled_importance
from avq_diffusers.attention.triton.softmax import (
    LOG_ZERO,
    accumulate,
    attend_rows,
    empty_softmax,
    leave_out,
    load_codes,
    load_means,
    load_shares,
    logits_of,
    total_weight,
)

# Sum of the weights of a query below which float16, whose last bit is 2^-24, loses digits of them.
LEAST_TOTAL = tl.constexpr(2.0**-10)


@triton.jit
def _attend_parents(query, tables, softmax, sizes, BLOCK_M: tl.constexpr, RUNNING: tl.constexpr):
    """Add all parents, refined ones with the keys that stay, BLOCK_M at a time."""
    if sizes.SELECTS:
        place = tl.arange(0, triton.next_power_of_2(sizes.NUM_REFINED))
        refined = tl.load(tables.refined + place, mask=place < sizes.NUM_REFINED, other=-1)
    for start in tl.range(0, sizes.PARENT_ROWS, BLOCK_M):
        rows = start + tl.arange(0, BLOCK_M)
        mean_rows = rows
        if sizes.SELECTS:
            is_refined = refined[:, None] == rows[None, :]
            mean_rows += sizes.PARENT_ROWS * tl.sum(is_refined.to(tl.int32), axis=0)
        elif sizes.NUM_REFINED > 0:
            mean_rows += sizes.PARENT_ROWS
        valid = tl.full([BLOCK_M], True, tl.int1)
        if sizes.EXACT:
            valid = tl.load(tables.is_exact + rows) == 0
        if sizes.MEANS:
            rows = mean_rows
        softmax = attend_rows(
            query, tables, rows, mean_rows, valid, softmax, sizes, sizes.MEANS, RUNNING
        )
    return softmax


@triton.jit
def _attend_stays(query, tables, softmax, sizes, RUNNING: tl.constexpr):
    """Add the keys that stay with the refined parents, whose mean is not the parent's."""
    BLOCK: tl.constexpr = 16 if sizes.NUM_REFINED <= 16 else 32
    for start in tl.range(0, sizes.NUM_REFINED, BLOCK):
        place = start + tl.arange(0, BLOCK)
        if sizes.NUM_REFINED % BLOCK == 0:
            valid = tl.full([BLOCK], True, tl.int1)
        else:
            valid = place < sizes.NUM_REFINED
        parent = tl.load(tables.refined + place, mask=valid, other=0)
        if sizes.EXACT:
            valid &= tl.load(tables.is_exact + parent) == 0
        rows = sizes.PARENT_ROWS + parent
        softmax = attend_rows(query, tables, rows, rows, valid, softmax, sizes, True, RUNNING)
    return softmax


@triton.jit
def _attend_children(query, tables, softmax, sizes, BLOCK_P: tl.constexpr, RUNNING: tl.constexpr):
    """Add the children of the refined parents, BLOCK_P parents at a time."""
    CHILD_ROWS: tl.constexpr = sizes.CHILD_ROWS
    for start in tl.range(0, sizes.NUM_REFINED, BLOCK_P):
        # (BLOCK_P * CHILD_ROWS)
        child = tl.arange(0, BLOCK_P * CHILD_ROWS)
        parent = start + child // CHILD_ROWS
        if sizes.NUM_REFINED % BLOCK_P == 0:
            valid = tl.full([BLOCK_P * CHILD_ROWS], True, tl.int1)
        else:
            valid = parent < sizes.NUM_REFINED
        if sizes.SELECTS:
            parent = tl.load(tables.refined + parent, mask=valid, other=0)
        if sizes.EXACT:
            column = sizes.PARENT_ROWS + start * CHILD_ROWS + child
            valid &= tl.load(tables.is_exact + column, mask=valid, other=1) == 0
        rows = parent * CHILD_ROWS + child % CHILD_ROWS
        # Lets a thread load the log_counts of neighbouring children at once.
        rows = tl.multiple_of(tl.max_contiguous(rows, CHILD_ROWS), CHILD_ROWS)
        softmax = attend_rows(
            query,
            tables,
            (2 if sizes.MEANS else 1) * sizes.PARENT_ROWS + rows,
            2 * sizes.PARENT_ROWS + rows,
            valid,
            softmax,
            sizes,
            True,
            RUNNING,
        )
    return softmax


@triton.jit
def attend_tile(
    query,
    valid_query,
    tables,
    exact,
    sinks,
    sizes,
    IMPORTANCE_TILE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_P: tl.constexpr,
    RUNNING: tl.constexpr,
    AGAIN_M: tl.constexpr,
    AGAIN_P: tl.constexpr,
):
    """Numerator and sum of weights (BLOCK_N,) over all that a tile of queries sees.

    Stores the parents to refine, chosen by their importance. A tile that overflows is computed
    again with a running maximum, in blocks of AGAIN_M and AGAIN_P parents.
    """
    BLOCK_N: tl.constexpr = valid_query.shape[0]
    PARENT_ROWS: tl.constexpr = sizes.PARENT_ROWS
    WHOLE: tl.constexpr = IMPORTANCE_TILE >= sizes.NUM_PARENTS
    ONE_BLOCK: tl.constexpr = sizes.SELECTS and WHOLE and BLOCK_M == PARENT_ROWS
    parents = tl.arange(0, PARENT_ROWS)
    chosen = None

    if ONE_BLOCK:
        is_parent = parents < sizes.NUM_PARENTS
        codes = load_codes(tables, parents, is_parent, sizes)

        # (BLOCK_N, PARENT_ROWS)
        logits = logits_of(query, codes, tl.load(tables.log_counts + parents)[None, :])
        running_max = tl.max(logits, axis=1)
        weights = tl.exp2(logits - running_max[:, None])
        total = tl.sum(weights, axis=1)
        inverse = tl.where(valid_query, 1.0 / total, 0.0)

        # (PARENT_ROWS)
        importance = tl.sum(weights * inverse[:, None], axis=0)
        is_refined = _refine(importance, tables, sizes)
        if sizes.MEANS:
            mean_rows = parents
            shares = tl.full([PARENT_ROWS, 8], 1.0, tl.float32).to(tables.means.dtype.element_ty)
            is_kept = ~is_refined
        else:
            mean_rows = parents + tl.where(is_refined, PARENT_ROWS, 0)
            shares = load_shares(tables, mean_rows, is_parent, sizes)
            is_kept = tl.max(shares, axis=1) > 0
        if sizes.EXACT:
            log_denominator = tl.where(valid_query, running_max + tl.log2(total), float("inf"))
            tl.debug_barrier()
            chosen = choose_columns(
                query, log_denominator, importance, is_refined, tables, exact, sizes
            )
            is_kept &= tl.load(tables.is_exact + parents) == 0
        means = load_means(tables, mean_rows, is_parent, sizes)
        if RUNNING:
            weights, running_max = leave_out(weights, running_max, is_kept)
        elif sizes.MEANS:
            weights = tl.where(is_kept[None, :], weights, 0.0)
        softmax = empty_softmax(running_max, sizes)
        softmax = accumulate(softmax, weights, means, shares, sizes)
        # The loops read what other threads of this program wrote.
        tl.debug_barrier()
        if sizes.MEANS:
            softmax = _attend_stays(query, tables, softmax, sizes, RUNNING)
    else:
        if sizes.SELECTS or sizes.EXACT:
            importance, running_max, log_denominator = tiled_importance(
                query,
                valid_query,
                tables,
                sizes,
                BLOCK_M if WHOLE else IMPORTANCE_TILE,
                WHOLE,
                BLOCK_M,
            )
            is_refined = parents < (sizes.NUM_PARENTS if sizes.NUM_REFINED > 0 else 0)
            if sizes.SELECTS:
                is_refined = _refine(importance, tables, sizes)
            # The loops read what other threads of this program wrote.
            tl.debug_barrier()
            if sizes.EXACT:
                chosen = choose_columns(
                    query, log_denominator, importance, is_refined, tables, exact, sizes
                )
        elif not RUNNING:
            rows = tl.arange(0, BLOCK_M)
            every = tl.full([BLOCK_M], True, tl.int1)
            codes = load_codes(tables, rows, every, sizes)
            logits = logits_of(query, codes, tl.load(tables.log_counts + rows)[None, :])
            running_max = tl.maximum(tl.max(logits, axis=1), LOG_ZERO)
        if RUNNING:
            running_max = tl.full([BLOCK_N], LOG_ZERO, tl.float32)
        softmax = empty_softmax(running_max, sizes)
        softmax = _attend_parents(query, tables, softmax, sizes, BLOCK_M, RUNNING)

    if sizes.NUM_REFINED > 0:
        softmax = _attend_children(query, tables, softmax, sizes, BLOCK_P, RUNNING)
    if sizes.EXACT:
        softmax = attend_exact(query, exact, chosen, softmax, sizes, RUNNING)
    if sizes.SINKS:
        softmax = attend_sinks(query, sinks, softmax, sizes, RUNNING)

    total = total_weight(softmax, sizes)
    if not RUNNING:
        # An overflow leaves infinity or NaN, and neither is less than infinity.
        in_range = (total > LEAST_TOTAL) & (total < float("inf"))
        if tl.min(in_range.to(tl.int32)) == 0:
            softmax = empty_softmax(tl.full([BLOCK_N], LOG_ZERO, tl.float32), sizes)
            softmax = _attend_parents(query, tables, softmax, sizes, AGAIN_M, True)
            if sizes.NUM_REFINED > 0:
                softmax = _attend_children(query, tables, softmax, sizes, AGAIN_P, True)
            if sizes.EXACT:
                softmax = attend_exact(query, exact, chosen, softmax, sizes, True)
            if sizes.SINKS:
                softmax = attend_sinks(query, sinks, softmax, sizes, True)
            total = total_weight(softmax, sizes)
    return softmax.numerator, total


@triton.jit
def _refine(importance, tables, sizes):
    """Store the parents to refine; return which they are, (PARENT_ROWS,).

    They are those of largest importance, times their spread if means represent their keys.
    """
    parents = tl.arange(0, sizes.PARENT_ROWS)
    if sizes.MEANS:
        importance *= tl.load(tables.spread + parents)
    rank = rank_of(importance, sizes.PARENT_ROWS)
    is_refined = rank < sizes.NUM_REFINED
    place = rank
    if sizes.EXACT:  # columns are in the order of parents
        place = tl.cumsum(is_refined.to(tl.int32), axis=0) - 1
    tl.store(tables.refined + place, parents, mask=is_refined)
    return is_refined
