"""Keys that attend as themselves: those of the columns that gain most, and sink keys.

A column is what a tile sees: of every parent the cell, or the keys that stay if it is refined, then
the children of refined parents. The score of a column is the attention of the tile's queries to its
codeword, times the squared spread of its keys, divided by their number. Columns are exact in the
order of falling score as long as their keys fit the budget.

Shapes: as in `attention`; VISIBLE columns, a power of two, of which MP + P CP hold something.
"""

from typing import NamedTuple

import triton
import triton.language as tl

from avq_diffusers.attention.triton.pieces import place_of
from avq_diffusers.attention.triton.softmax import add_rows, load_codes, logits_of

# After every rank of a key.
NEVER = tl.constexpr(2**31 - 1)


class Sinks(NamedTuple):
    """Pointers to sink keys and their values, of a head.

    centre: where the codes have their zero.
    """

    key: tl.tensor
    value: tl.tensor
    key_stride: tl.tensor
    value_stride: tl.tensor
    centre: tl.tensor
    number: tl.tensor


class Exact(NamedTuple):
    """Pointers to keys and values of a head, to where its leaves are, and to the columns of a tile.

    budget: most exact keys of a tile.
    score, row, is_exact: of every column of the tile.
    """

    key: tl.tensor
    value: tl.tensor
    key_stride: tl.tensor
    value_stride: tl.tensor
    centre: tl.tensor
    budget: tl.tensor
    order: tl.tensor
    row_start: tl.tensor
    row_count: tl.tensor
    row_weight: tl.tensor
    score: tl.tensor
    row: tl.tensor
    is_exact: tl.tensor


@triton.jit
def _score_rows(query, log_denominator, tables, exact, columns, rows, valid, sizes):
    """Store scores and rows of some columns."""
    codes = load_codes(tables, rows, valid, sizes)
    log_counts = tl.load(tables.log_counts + rows, mask=valid, other=float("-inf"))
    weights = tl.exp2(logits_of(query, codes, log_counts[None, :]) - log_denominator[:, None])
    score = tl.sum(weights, axis=0) * tl.load(exact.row_weight + rows, mask=valid, other=0.0)
    tl.store(exact.score + columns, score, mask=valid)
    tl.store(exact.row + columns, rows, mask=valid)


@triton.jit
def choose_columns(query, log_denominator, importance, is_refined, tables, exact, sizes):
    """Mark the exact columns.

    Args:
        log_denominator: (BLOCK_N) of the attention to parents, infinite for rows without a query.
        importance, is_refined: (PARENT_ROWS).

    Returns:
        total: the number of exact keys.
        earlier: (VISIBLE) exact keys before those of the column of each rank.
        shift: (VISIBLE) from the rank of an exact key to its place in the order of leaves.
    """
    PARENT_ROWS: tl.constexpr = sizes.PARENT_ROWS
    CHILD_ROWS: tl.constexpr = sizes.CHILD_ROWS
    NUM_REFINED: tl.constexpr = sizes.NUM_REFINED
    VISIBLE: tl.constexpr = sizes.VISIBLE
    BLOCK: tl.constexpr = 32
    parents = tl.arange(0, PARENT_ROWS)
    score = importance * tl.load(exact.row_weight + parents)
    tl.store(exact.score + parents, score, mask=~is_refined)
    tl.store(exact.row + parents, parents, mask=~is_refined)
    for start in tl.range(0, NUM_REFINED, BLOCK):
        parent = start + tl.arange(0, BLOCK)
        valid = parent < NUM_REFINED
        if sizes.SELECTS:
            parent = tl.load(tables.refined + parent, mask=valid, other=0)
        rows = PARENT_ROWS + parent
        _score_rows(query, log_denominator, tables, exact, parent, rows, valid, sizes)
    for start in tl.range(0, NUM_REFINED * CHILD_ROWS, BLOCK):
        child = start + tl.arange(0, BLOCK)
        valid = child < NUM_REFINED * CHILD_ROWS
        parent = child // CHILD_ROWS
        if sizes.SELECTS:
            parent = tl.load(tables.refined + parent, mask=valid, other=0)
        rows = 2 * PARENT_ROWS + parent * CHILD_ROWS + child % CHILD_ROWS
        columns = PARENT_ROWS + child
        _score_rows(query, log_denominator, tables, exact, columns, rows, valid, sizes)
    # What follows reads what other threads of this program wrote.
    tl.debug_barrier()

    # (VISIBLE) A score is not negative: its bits order like integers, and the column breaks ties.
    # Scores of half-precision inputs are not as exact as the bits that make room for the column.
    column = tl.arange(0, VISIBLE)
    is_column = column < PARENT_ROWS + NUM_REFINED * CHILD_ROWS
    score = tl.load(exact.score + column, mask=is_column, other=0.0)
    rank_key = score.to(tl.int32, bitcast=True)
    if query[0].dtype == tl.float32:
        rank_key = rank_key.to(tl.int64) << 32
    rank_key = rank_key & -VISIBLE | (VISIBLE - 1 - column)
    rank_key = tl.sort(tl.where(is_column, rank_key, -1), descending=True)
    is_column = rank_key >= 0
    column = VISIBLE - 1 - (rank_key & (VISIBLE - 1)).to(tl.int32)
    row = tl.load(exact.row + column, mask=is_column, other=0)
    count = tl.load(exact.row_count + row, mask=is_column, other=0)
    stop = tl.cumsum(count, axis=0)
    is_exact = is_column & (stop <= exact.budget)
    tl.store(exact.is_exact + column, is_exact.to(tl.int8), mask=is_column)
    total = tl.sum(tl.where(is_exact, count, 0), axis=0)
    earlier = tl.where(is_exact, stop - count, NEVER)
    shift = tl.load(exact.row_start + row, mask=is_exact, other=0) - (stop - count)
    tl.debug_barrier()
    return total, earlier, shift


@triton.jit
def _load_tokens(pointer, token, stride, valid, FIRST: tl.constexpr, WIDTH: tl.constexpr, sizes):
    """Columns from FIRST on of some tokens, (tokens, WIDTH); 1 beyond the head dim."""
    column = FIRST + tl.arange(0, WIDTH)
    is_number = (column < sizes.HEAD_DIM)[None, :]
    pointers = pointer + token.to(tl.int64)[:, None] * stride + column[None, :]
    block = tl.load(pointers, mask=valid[:, None] & is_number, other=0.0)
    return tl.where(is_number, block, 1.0).to(block.dtype)


@triton.jit
def _load_token_codes(tokens, token, valid, FIRST: tl.constexpr, WIDTH: tl.constexpr, sizes):
    """The same columns of keys, around the centre, times the factor of the logits."""
    key = _load_tokens(tokens.key, token, tokens.key_stride, valid, FIRST, WIDTH, sizes)
    column = FIRST + tl.arange(0, WIDTH)
    is_number = column < sizes.HEAD_DIM
    centre = tl.load(tokens.centre + column)
    codes = (key.to(tl.float32) - centre[None, :]) * sizes.FACTOR
    return tl.where(is_number[None, :], codes, 0.0).to(key.dtype)


@triton.jit
def _attend_tokens(query, tokens, token, valid, softmax, sizes, RUNNING: tl.constexpr):
    """Add some tokens to a softmax."""
    BLOCK_D: tl.constexpr = sizes.BLOCK_D
    REST_D: tl.constexpr = sizes.REST_D
    codes = (_load_token_codes(tokens, token, valid, 0, BLOCK_D, sizes),)
    values = (_load_tokens(tokens.value, token, tokens.value_stride, valid, 0, BLOCK_D, sizes),)
    if REST_D > 0:
        codes += (_load_token_codes(tokens, token, valid, BLOCK_D, REST_D, sizes),)
        values += (
            _load_tokens(tokens.value, token, tokens.value_stride, valid, BLOCK_D, REST_D, sizes),
        )
    shares = tl.full([token.shape[0], 8], 1.0, tl.float32).to(values[0].dtype)
    bias = tl.where(valid, 0.0, float("-inf"))
    return add_rows(query, codes, bias, values, shares, softmax, sizes, RUNNING)


@triton.jit
def attend_exact(query, exact, chosen, softmax, sizes, RUNNING: tl.constexpr):
    """Add the keys of the exact columns, `chosen` by `choose_columns`."""
    total, earlier, shift = chosen
    for start in tl.range(0, total, sizes.BLOCK_K):
        rank = start + tl.arange(0, sizes.BLOCK_K)
        valid = rank < total
        place = place_of(rank, earlier, shift, sizes.VISIBLE, sizes.LOG2_VISIBLE)
        token = tl.load(exact.order + place, mask=valid, other=0)
        softmax = _attend_tokens(query, exact, token, valid, softmax, sizes, RUNNING)
    return softmax


@triton.jit
def attend_sinks(query, sinks, softmax, sizes, RUNNING: tl.constexpr):
    """Add all sink keys."""
    for start in tl.range(0, sinks.number, sizes.BLOCK_K):
        token = start + tl.arange(0, sizes.BLOCK_K)
        valid = token < sinks.number
        softmax = _attend_tokens(query, sinks, token, valid, softmax, sizes, RUNNING)
    return softmax
