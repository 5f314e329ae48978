"""What a query tile sees: parents, children of refined parents, exact keys and sink keys.

Shapes: as in `attention`.
"""

from typing import NamedTuple

import triton
import triton.language as tl

from avq_diffusers.attention.triton.exact import (
    ExactKeys,
    Tokens,
    attend_exact,
    attend_sinks,
    choose_columns,
    store_scores,
)
from avq_diffusers.attention.triton.rows import Tables
from avq_diffusers.attention.triton.softmax import (
    LOG_ZERO,
    accumulate,
    empty_softmax,
    leave_out,
    load_codes,
    load_codewords,
    load_shares,
    load_values,
    logits_of,
    total_weight,
    weigh,
)

# Below this sum of a query's weights, float16 (smallest subnormal 2^-24) loses precision.
LEAST_TOTAL = tl.constexpr(2.0**-10)
# A power of two whose products with weights up to 1 are finite.
MOST_EXPONENT = tl.constexpr(126.0)


class TileInputs(NamedTuple):
    """What the attention of a query tile reads."""

    query: tl.tuple  # (BLOCK_N, BLOCK_D) and with a second block (BLOCK_N, REST_D)
    valid: tl.tensor  # (BLOCK_N) False on padding
    tables: Tables
    exact: ExactKeys
    sinks: Tokens


class Rows(NamedTuple):
    """Rows of some columns in the tables of codes and of mean values."""

    columns: tl.tensor
    of_codes: tl.tensor
    of_values: tl.tensor
    valid: tl.tensor


@triton.jit
def load_refined(tables, SIZES):
    """The parents that a tile refines, padded with -1."""
    place = tl.arange(0, SIZES.REFINED_ROWS)
    return tl.load(tables.refined + place, mask=place < SIZES.NUM_REFINED, other=-1)


@triton.jit
def rows_of_parents(refined, start, SIZES, BLOCK_M):
    """Parents (BLOCK_M) from `start` on, and their mean-value rows: for all keys, or for the keys
    that stay if the tile refines the parent.

    refined: from `load_refined`; None if tiles refine no parent, or all.
    """
    parents = start + tl.arange(0, BLOCK_M)
    rows = parents
    if SIZES.SELECTS:
        is_refined = refined[:, None] == parents[None, :]
        rows += SIZES.PARENT_ROWS * tl.sum(is_refined.to(tl.int32), axis=0)
    elif SIZES.NUM_REFINED > 0:
        rows += SIZES.PARENT_ROWS
    return parents, rows


@triton.jit
def rows_of_children(tables, start, SIZES, BLOCK_P):
    """Children of BLOCK_P refined parents, starting with the tile's `start`-th.

    Returns:
        columns: (BLOCK_P CP), index among the tile's columns.
        rows: (BLOCK_P CP), index among the head's children.
        valid: (BLOCK_P CP), False on padding.
    """
    CHILD_ROWS: tl.constexpr = SIZES.CHILD_ROWS
    child = tl.arange(0, BLOCK_P * CHILD_ROWS)
    parent = start + child // CHILD_ROWS
    if SIZES.NUM_REFINED % BLOCK_P == 0:
        valid = tl.full([BLOCK_P * CHILD_ROWS], True, tl.int1)
    else:
        valid = parent < SIZES.NUM_REFINED
    columns = SIZES.PARENT_ROWS + start * CHILD_ROWS + child
    if SIZES.SELECTS:
        parent = tl.load(tables.refined + parent, mask=valid, other=0)
    rows = parent * CHILD_ROWS + child % CHILD_ROWS
    # Lets a thread load the log_counts of adjacent children at once.
    rows = tl.multiple_of(tl.max_contiguous(rows, CHILD_ROWS), CHILD_ROWS)
    return columns, rows, valid


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


@triton.jit
def _attend_rows(tile, rows, log_denominator, softmax, SIZES, WHOLE, RUNNING, SCORES):
    """Add one block of codewords to a softmax.

    log_denominator: (BLOCK_N), log2 of attention to parents, infinite for rows without a query.
    WHOLE: all shares are 1.
    SCORES: store the scores of the columns.
    """
    codes, log_counts, values, shares = load_codewords(
        tile.tables, rows.of_codes, rows.of_values, rows.valid, SIZES, WHOLE, RUNNING
    )
    weights, softmax = weigh(tile.query, codes, log_counts, softmax, RUNNING)
    if SCORES:
        exponent = tl.minimum(softmax.running_max - log_denominator, MOST_EXPONENT)
        attention = tl.sum(weights * tl.exp2(exponent)[:, None], axis=0)
        store_scores(attention, tile.exact, rows.columns, rows.of_values, rows.valid)
    return accumulate(softmax, weights, values, shares, SIZES)


@triton.jit
def _attend_parents(tile, log_denominator, softmax, SIZES, BLOCK_M, RUNNING, SCORES):
    """Add all parents, refined ones with the keys that stay, BLOCK_M at a time."""
    MEANS: tl.constexpr = SIZES.MEANS
    refined = None
    if SIZES.SELECTS:
        refined = load_refined(tile.tables, SIZES)
    for start in tl.range(0, SIZES.PARENT_ROWS, BLOCK_M):
        parents, value_rows = rows_of_parents(refined, start, SIZES, BLOCK_M)
        valid = tl.full([BLOCK_M], True, tl.int1)
        rows = Rows(parents, value_rows if MEANS else parents, value_rows, valid)
        softmax = _attend_rows(tile, rows, log_denominator, softmax, SIZES, MEANS, RUNNING, SCORES)
    return softmax


@triton.jit
def _attend_stays(tile, log_denominator, softmax, SIZES, RUNNING, SCORES):
    """Add the keys that stay with the refined parents, whose mean is not the parent's."""
    BLOCK: tl.constexpr = 16 if SIZES.NUM_REFINED <= 16 else 32
    for start in tl.range(0, SIZES.NUM_REFINED, BLOCK):
        place = start + tl.arange(0, BLOCK)
        if SIZES.NUM_REFINED % BLOCK == 0:
            valid = tl.full([BLOCK], True, tl.int1)
        else:
            valid = place < SIZES.NUM_REFINED
        parents = tl.load(tile.tables.refined + place, mask=valid, other=0)
        stays = SIZES.PARENT_ROWS + parents
        rows = Rows(parents, stays, stays, valid)
        softmax = _attend_rows(tile, rows, log_denominator, softmax, SIZES, True, RUNNING, SCORES)
    return softmax


@triton.jit
def _attend_children(tile, log_denominator, softmax, SIZES, BLOCK_P, RUNNING, SCORES):
    """Add the children of the refined parents, BLOCK_P parents at a time."""
    FIRST_CODE: tl.constexpr = (2 if SIZES.MEANS else 1) * SIZES.PARENT_ROWS
    for start in tl.range(0, SIZES.NUM_REFINED, BLOCK_P):
        columns, children, valid = rows_of_children(tile.tables, start, SIZES, BLOCK_P)
        rows = Rows(columns, FIRST_CODE + children, 2 * SIZES.PARENT_ROWS + children, valid)
        softmax = _attend_rows(tile, rows, log_denominator, softmax, SIZES, True, RUNNING, SCORES)
    return softmax


@triton.jit
def _parents_in_one_block(tile, SIZES, RUNNING):
    """Choose the parents to refine, and attend to all parents with the same logits.

    Returns:
        softmax: over all parents, refined ones with the keys that stay.
        log_denominator: (BLOCK_N) of the attention to parents, as in `_attend_rows`.
    """
    PARENT_ROWS: tl.constexpr = SIZES.PARENT_ROWS
    tables = tile.tables
    parents = tl.arange(0, PARENT_ROWS)
    is_parent = parents < SIZES.NUM_PARENTS
    codes = load_codes(tables, parents, is_parent, SIZES)

    # (BLOCK_N, PARENT_ROWS)
    logits = logits_of(tile.query, codes, tl.load(tables.log_counts + parents)[None, :])
    running_max = tl.max(logits, axis=1)
    weights = tl.exp2(logits - running_max[:, None])
    total = tl.sum(weights, axis=1)
    inverse = tl.where(tile.valid, 1.0 / total, 0.0)

    # (PARENT_ROWS)
    importance = tl.sum(weights * inverse[:, None], axis=0)
    is_refined = _refine(importance, tables, SIZES)
    if SIZES.MEANS:
        value_rows = parents
        shares = tl.full([PARENT_ROWS, 8], 1.0, tl.float32).to(tables.mean_values.dtype.element_ty)
        is_kept = ~is_refined
    else:
        value_rows = parents + tl.where(is_refined, PARENT_ROWS, 0)
        shares = load_shares(tables, value_rows, is_parent, SIZES)
        is_kept = tl.max(shares, axis=1) > 0
    log_denominator = tl.where(tile.valid, running_max + tl.log2(total), float("inf"))
    if SIZES.EXACT_KEYS:
        store_scores(importance, tile.exact, parents, parents, ~is_refined)
    values = load_values(tables, value_rows, is_parent, SIZES)
    if RUNNING:
        weights, running_max = leave_out(weights, running_max, is_kept)
    elif SIZES.MEANS:
        weights = tl.where(is_kept[None, :], weights, 0.0)
    softmax = empty_softmax(running_max, SIZES)
    softmax = accumulate(softmax, weights, values, shares, SIZES)
    # Later code reads what other threads of this program wrote.
    tl.debug_barrier()
    if SIZES.MEANS:
        softmax = _attend_stays(tile, log_denominator, softmax, SIZES, RUNNING, SIZES.EXACT_KEYS)
    return softmax, log_denominator


@triton.jit
def _parents_in_blocks(tile, SIZES, BLOCKS):
    """Like `_parents_in_one_block`, if no block holds all parents or there is nothing to choose.

    `log_denominator` is only meaningful with a choice or exact keys.
    """
    running_max = tl.full([tile.valid.shape[0]], LOG_ZERO, tl.float32)
    log_denominator = running_max
    if SIZES.SELECTS or SIZES.EXACT_KEYS:
        importance, running_max, log_denominator = importance_in_blocks(tile, SIZES, BLOCKS.M)
        if SIZES.SELECTS:
            _refine(importance, tile.tables, SIZES)
        # The loops read what other threads of this program wrote.
        tl.debug_barrier()
    elif not BLOCKS.RUNNING:
        rows = tl.arange(0, BLOCKS.M)
        codes = load_codes(tile.tables, rows, tl.full([BLOCKS.M], True, tl.int1), SIZES)
        logits = logits_of(tile.query, codes, tl.load(tile.tables.log_counts + rows)[None, :])
        running_max = tl.maximum(tl.max(logits, axis=1), LOG_ZERO)
    if BLOCKS.RUNNING:
        running_max = tl.full([tile.valid.shape[0]], LOG_ZERO, tl.float32)
    softmax = empty_softmax(running_max, SIZES)
    softmax = _attend_parents(
        tile, log_denominator, softmax, SIZES, BLOCKS.M, BLOCKS.RUNNING, SIZES.EXACT_KEYS
    )
    return softmax, log_denominator


@triton.jit
def _attend_keys(tile, chosen, softmax, SIZES, RUNNING):
    """Add exact keys, in place of their codewords, and sink keys."""
    if SIZES.EXACT_KEYS:
        softmax = attend_exact(tile, chosen, softmax, SIZES, RUNNING)
    if SIZES.SINKS:
        softmax = attend_sinks(tile, softmax, SIZES, RUNNING)
    return softmax


@triton.jit
def attend_tile(tile, SIZES, BLOCKS):
    """Attend to everything that a query tile sees.

    Stores the parents to refine, chosen by importance. A tile that overflows is recomputed with a
    running maximum, in separate block sizes.

    Returns:
        softmax: over all columns.
        total: (BLOCK_N,), sum of its weights.
        chosen: what `choose_columns` returned; nothing without exact keys.
    """
    RUNNING: tl.constexpr = BLOCKS.RUNNING
    if SIZES.SELECTS and BLOCKS.M == SIZES.PARENT_ROWS:
        softmax, log_denominator = _parents_in_one_block(tile, SIZES, RUNNING)
    else:
        softmax, log_denominator = _parents_in_blocks(tile, SIZES, BLOCKS)
    if SIZES.NUM_REFINED > 0:
        softmax = _attend_children(
            tile, log_denominator, softmax, SIZES, BLOCKS.P, RUNNING, SIZES.EXACT_KEYS
        )
    chosen = ()
    if SIZES.EXACT_KEYS:
        chosen = choose_columns(tile, SIZES)
    softmax = _attend_keys(tile, chosen, softmax, SIZES, RUNNING)

    total = total_weight(softmax, SIZES)
    if not RUNNING:
        # Overflow leaves infinity or NaN; neither is less than infinity.
        in_range = (total > LEAST_TOTAL) & (total < float("inf"))
        if tl.min(in_range.to(tl.int32)) == 0:
            least = tl.full([tile.valid.shape[0]], LOG_ZERO, tl.float32)
            softmax = empty_softmax(least, SIZES)
            softmax = _attend_parents(
                tile, log_denominator, softmax, SIZES, BLOCKS.AGAIN_M, True, False
            )
            if SIZES.NUM_REFINED > 0:
                softmax = _attend_children(
                    tile, log_denominator, softmax, SIZES, BLOCKS.AGAIN_P, True, False
                )
            softmax = _attend_keys(tile, chosen, softmax, SIZES, True)
            total = total_weight(softmax, SIZES)
    return softmax, total, chosen


@triton.jit
def _refine(importance, tables, SIZES):
    """Store the parents to refine; return a mask of them, (PARENT_ROWS,).

    They have the largest importance, times the variance of their keys if means represent the keys.
    """
    parents = tl.arange(0, SIZES.PARENT_ROWS)
    if SIZES.MEANS:
        importance *= tl.load(tables.variance + parents)
    rank = rank_of(importance, SIZES.PARENT_ROWS)
    is_refined = rank < SIZES.NUM_REFINED
    place = rank
    if SIZES.EXACT_KEYS:  # columns are in the order of parents
        place = tl.cumsum(is_refined.to(tl.int32), axis=0) - 1
    tl.store(tables.refined + place, parents, mask=is_refined)
    return is_refined
