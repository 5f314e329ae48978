"""All that a tile of queries sees: parents, children of refined parents, exact keys and sink keys.

Shapes: as in `attention`.
"""

import triton
import triton.language as tl

from avq_diffusers.attention.triton.exact import (
    attend_exact,
    attend_sinks,
    choose_columns,
    store_scores,
)
from avq_diffusers.attention.triton.selection import rank_of, tiled_importance
from avq_diffusers.attention.triton.softmax import (
    LOG_ZERO,
    accumulate,
    empty_softmax,
    leave_out,
    load_codes,
    load_means,
    load_rows,
    load_shares,
    logits_of,
    total_weight,
    weigh,
)

# Sum of the weights of a query below which float16, whose last bit is 2^-24, loses digits of them.
LEAST_TOTAL = tl.constexpr(2.0**-10)


# A power of two whose products with weights up to 1 are finite.
MOST_EXPONENT = tl.constexpr(126.0)


@triton.jit
def load_refined(tables, sizes):
    """The parents that a tile refines, padded with -1."""
    place = tl.arange(0, triton.next_power_of_2(sizes.NUM_REFINED))
    return tl.load(tables.refined + place, mask=place < sizes.NUM_REFINED, other=-1)


@triton.jit
def rows_of_parents(refined, start, sizes, BLOCK_M: tl.constexpr):
    """Parents (BLOCK_M) from `start` on, and their rows of means: of all their keys, or of those
    that stay if the tile refines them.

    refined: from `load_refined`; None if tiles refine no parent, or all.
    """
    parents = start + tl.arange(0, BLOCK_M)
    rows = parents
    if sizes.SELECTS:
        is_refined = refined[:, None] == parents[None, :]
        rows += sizes.PARENT_ROWS * tl.sum(is_refined.to(tl.int32), axis=0)
    elif sizes.NUM_REFINED > 0:
        rows += sizes.PARENT_ROWS
    return parents, rows


@triton.jit
def rows_of_children(tables, start, sizes, BLOCK_P: tl.constexpr):
    """Children of BLOCK_P refined parents from place `start` on.

    Returns:
        columns: (BLOCK_P CP) of the tile.
        rows: (BLOCK_P CP) among the children of the head.
        valid: (BLOCK_P CP) whether they are.
    """
    CHILD_ROWS: tl.constexpr = sizes.CHILD_ROWS
    child = tl.arange(0, BLOCK_P * CHILD_ROWS)
    parent = start + child // CHILD_ROWS
    if sizes.NUM_REFINED % BLOCK_P == 0:
        valid = tl.full([BLOCK_P * CHILD_ROWS], True, tl.int1)
    else:
        valid = parent < sizes.NUM_REFINED
    columns = sizes.PARENT_ROWS + start * CHILD_ROWS + child
    if sizes.SELECTS:
        parent = tl.load(tables.refined + parent, mask=valid, other=0)
    rows = parent * CHILD_ROWS + child % CHILD_ROWS
    # Lets a thread load the log_counts of neighbouring children at once.
    rows = tl.multiple_of(tl.max_contiguous(rows, CHILD_ROWS), CHILD_ROWS)
    return columns, rows, valid


@triton.jit
def _attend_rows(
    query,
    tables,
    scoring,
    columns,
    code_rows,
    mean_rows,
    valid,
    softmax,
    sizes,
    WHOLE: tl.constexpr,
    RUNNING: tl.constexpr,
):
    """Add one block of codewords to a softmax: `code_rows` with the values of `mean_rows`.

    scoring: None, or where to store the scores of `columns`, and the (BLOCK_N) denominator of
        attention to parents, in base 2, infinite for rows without a query.
    WHOLE: all shares are 1.
    """
    codes, log_counts, means, shares = load_rows(
        tables, code_rows, mean_rows, valid, sizes, WHOLE, RUNNING
    )
    weights, softmax = weigh(query, codes, log_counts, softmax, RUNNING)
    if scoring is not None:
        exact, log_denominator = scoring
        exponent = tl.minimum(softmax.running_max - log_denominator, MOST_EXPONENT)
        attention = tl.sum(weights * tl.exp2(exponent)[:, None], axis=0)
        store_scores(attention, exact, columns, mean_rows, valid)
    return accumulate(softmax, weights, means, shares, sizes)


@triton.jit
def _attend_parents(
    query, tables, scoring, softmax, sizes, BLOCK_M: tl.constexpr, RUNNING: tl.constexpr
):
    """Add all parents, refined ones with the keys that stay, BLOCK_M at a time."""
    refined = None
    if sizes.SELECTS:
        refined = load_refined(tables, sizes)
    for start in tl.range(0, sizes.PARENT_ROWS, BLOCK_M):
        parents, mean_rows = rows_of_parents(refined, start, sizes, BLOCK_M)
        valid = tl.full([BLOCK_M], True, tl.int1)
        code_rows = mean_rows if sizes.MEANS else parents
        softmax = _attend_rows(
            query,
            tables,
            scoring,
            parents,
            code_rows,
            mean_rows,
            valid,
            softmax,
            sizes,
            sizes.MEANS,
            RUNNING,
        )
    return softmax


@triton.jit
def _attend_stays(query, tables, scoring, softmax, sizes, RUNNING: tl.constexpr):
    """Add the keys that stay with the refined parents, whose mean is not the parent's."""
    BLOCK: tl.constexpr = 16 if sizes.NUM_REFINED <= 16 else 32
    for start in tl.range(0, sizes.NUM_REFINED, BLOCK):
        place = start + tl.arange(0, BLOCK)
        if sizes.NUM_REFINED % BLOCK == 0:
            valid = tl.full([BLOCK], True, tl.int1)
        else:
            valid = place < sizes.NUM_REFINED
        parents = tl.load(tables.refined + place, mask=valid, other=0)
        rows = sizes.PARENT_ROWS + parents
        softmax = _attend_rows(
            query, tables, scoring, parents, rows, rows, valid, softmax, sizes, True, RUNNING
        )
    return softmax


@triton.jit
def _attend_children(
    query, tables, scoring, softmax, sizes, BLOCK_P: tl.constexpr, RUNNING: tl.constexpr
):
    """Add the children of the refined parents, BLOCK_P parents at a time."""
    for start in tl.range(0, sizes.NUM_REFINED, BLOCK_P):
        columns, rows, valid = rows_of_children(tables, start, sizes, BLOCK_P)
        softmax = _attend_rows(
            query,
            tables,
            scoring,
            columns,
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
    """Attend to all that a tile of queries sees.

    Stores the parents to refine, chosen by their importance. A tile that overflows is computed
    again with a running maximum, in blocks of AGAIN_M and AGAIN_P parents.

    Returns:
        softmax: over all of it.
        total: (BLOCK_N,) sum of its weights.
        chosen: what `choose_columns` returned; nothing without exact keys.
    """
    BLOCK_N: tl.constexpr = valid_query.shape[0]
    PARENT_ROWS: tl.constexpr = sizes.PARENT_ROWS
    WHOLE: tl.constexpr = IMPORTANCE_TILE >= sizes.NUM_PARENTS
    ONE_BLOCK: tl.constexpr = sizes.SELECTS and WHOLE and BLOCK_M == PARENT_ROWS
    parents = tl.arange(0, PARENT_ROWS)
    scoring = None

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
            scoring = (exact, log_denominator)
            store_scores(importance, exact, parents, parents, ~is_refined)
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
            softmax = _attend_stays(query, tables, scoring, softmax, sizes, RUNNING)
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
            if sizes.SELECTS:
                _refine(importance, tables, sizes)
            if sizes.EXACT:
                scoring = (exact, log_denominator)
            # The loops read what other threads of this program wrote.
            tl.debug_barrier()
        elif not RUNNING:
            rows = tl.arange(0, BLOCK_M)
            every = tl.full([BLOCK_M], True, tl.int1)
            codes = load_codes(tables, rows, every, sizes)
            logits = logits_of(query, codes, tl.load(tables.log_counts + rows)[None, :])
            running_max = tl.maximum(tl.max(logits, axis=1), LOG_ZERO)
        if RUNNING:
            running_max = tl.full([BLOCK_N], LOG_ZERO, tl.float32)
        softmax = empty_softmax(running_max, sizes)
        softmax = _attend_parents(query, tables, scoring, softmax, sizes, BLOCK_M, RUNNING)

    if sizes.NUM_REFINED > 0:
        softmax = _attend_children(query, tables, scoring, softmax, sizes, BLOCK_P, RUNNING)
    chosen = ()
    if sizes.EXACT:
        chosen = choose_columns(query, exact, sizes)
        softmax = attend_exact(query, tables, exact, chosen, softmax, sizes, RUNNING)
    if sizes.SINKS:
        softmax = attend_sinks(query, sinks, softmax, sizes, RUNNING)

    total = total_weight(softmax, sizes)
    if not RUNNING:
        # An overflow leaves infinity or NaN, and neither is less than infinity.
        in_range = (total > LEAST_TOTAL) & (total < float("inf"))
        if tl.min(in_range.to(tl.int32)) == 0:
            softmax = empty_softmax(tl.full([BLOCK_N], LOG_ZERO, tl.float32), sizes)
            softmax = _attend_parents(query, tables, None, softmax, sizes, AGAIN_M, True)
            if sizes.NUM_REFINED > 0:
                softmax = _attend_children(query, tables, None, softmax, sizes, AGAIN_P, True)
            if sizes.EXACT:
                softmax = attend_exact(query, tables, exact, chosen, softmax, sizes, True)
            if sizes.SINKS:
                softmax = attend_sinks(query, sinks, softmax, sizes, True)
            total = total_weight(softmax, sizes)
    return softmax, total, chosen


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
