"""Keys that attend as themselves: those of the columns that gain most, and sink keys.

A column is what a tile sees: of every parent the cell, or the keys that stay if it is refined, then
the children of refined parents. The score of a column is the attention of the tile's queries to its
codeword, times the squared spread of its keys, divided by their number. Columns are exact in the
order of falling score as long as their keys fit the budget.

A tile first attends to all codewords, which gives the scores. Then those of exact columns are taken
away again. Little is lost: by Jensen's inequality the keys that take their place weigh no less.

Shapes: as in `attention`; VISIBLE columns, a power of two, of which MP + P CP hold something.
"""

from typing import NamedTuple

import triton
import triton.language as tl

from avq_diffusers.attention.triton.pieces import place_of
from avq_diffusers.attention.triton.softmax import accumulate, load_rows, weigh

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
    score, row: of every column of the tile.
    ranked_row: rows in the order of falling score.
    first: of every column, where its keys begin among the exact keys of the tile, `NEVER` if they
        are not exact.
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
    ranked_row: tl.tensor
    first: tl.tensor


@triton.jit
def exact_of_tile(
    key_ptr,
    value_ptr,
    centre_ptr,
    leaf_order_ptr,
    row_start_ptr,
    row_count_ptr,
    row_weight_ptr,
    score_ptr,
    row_ptr,
    ranked_row_ptr,
    first_ptr,
    batch,
    head,
    column_tile,
    num_keys,
    exact_keys,
    key_stride_batch,
    key_stride_head,
    key_stride_token,
    value_stride_batch,
    value_stride_head,
    value_stride_token,
    HEADS: tl.constexpr,
    MEAN_ROWS: tl.constexpr,
    VISIBLE: tl.constexpr,
    ALIGN: tl.constexpr,
):
    """Move pointers to a head, and those to columns to tile `column_tile` of all heads."""
    key_start = batch * key_stride_batch + head.to(tl.int64) * key_stride_head
    value_start = batch * value_stride_batch + head.to(tl.int64) * value_stride_head
    batch_head = batch * HEADS + head
    table = batch_head * MEAN_ROWS
    columns = column_tile * VISIBLE
    return Exact(
        key_ptr + key_start * ALIGN,
        value_ptr + value_start * ALIGN,
        key_stride_token.to(tl.int64) * ALIGN,
        value_stride_token.to(tl.int64) * ALIGN,
        centre_ptr,
        exact_keys,
        leaf_order_ptr + batch_head * num_keys,
        row_start_ptr + table,
        row_count_ptr + table,
        row_weight_ptr + table,
        score_ptr + columns,
        row_ptr + columns,
        ranked_row_ptr + columns,
        first_ptr + columns,
    )


@triton.jit
def sinks_of_head(
    sink_key_ptr,
    sink_value_ptr,
    centre_ptr,
    batch,
    head,
    num_sinks,
    sink_key_stride_batch,
    sink_key_stride_head,
    sink_key_stride_token,
    sink_value_stride_batch,
    sink_value_stride_head,
    sink_value_stride_token,
    ALIGN: tl.constexpr,
):
    """Move pointers to a head."""
    key_start = batch * sink_key_stride_batch + head.to(tl.int64) * sink_key_stride_head
    value_start = batch * sink_value_stride_batch + head.to(tl.int64) * sink_value_stride_head
    return Sinks(
        sink_key_ptr + key_start * ALIGN,
        sink_value_ptr + value_start * ALIGN,
        sink_key_stride_token.to(tl.int64) * ALIGN,
        sink_value_stride_token.to(tl.int64) * ALIGN,
        centre_ptr,
        num_sinks,
    )


@triton.jit
def store_scores(attention, exact, columns, rows, valid):
    """Store scores and rows of some columns, from the sum of the attention of the queries."""
    score = attention * tl.load(exact.row_weight + rows, mask=valid, other=0.0)
    tl.store(exact.score + columns, score, mask=valid)
    tl.store(exact.row + columns, rows, mask=valid)


@triton.jit
def choose_columns(query, exact, sizes):
    """Choose the exact columns by their stored scores.

    Returns:
        num_columns: of them.
        total: the number of exact keys.
        earlier: (VISIBLE) exact keys before those of the column of each rank.
        shift: (VISIBLE) from the rank of an exact key to its place in the order of leaves.
    """
    VISIBLE: tl.constexpr = sizes.VISIBLE
    # What follows reads what other threads of this program wrote.
    tl.debug_barrier()

    # (VISIBLE) A score is not negative: its bits order like integers, and the column breaks ties.
    # Scores of half-precision inputs are not as exact as the bits that make room for the column.
    column = tl.arange(0, VISIBLE)
    is_column = column < sizes.PARENT_ROWS + sizes.NUM_REFINED * sizes.CHILD_ROWS
    score = tl.load(exact.score + column, mask=is_column, other=0.0)
    rank_key = score.to(tl.int32, bitcast=True)
    if query[0].dtype == tl.float32:
        rank_key = rank_key.to(tl.int64) << 32
    rank_key = rank_key & -VISIBLE | (VISIBLE - 1 - column)
    rank_key = tl.sort(tl.where(is_column, rank_key, -1), descending=True)
    is_column = rank_key >= 0
    column = VISIBLE - 1 - (rank_key & (VISIBLE - 1)).to(tl.int32)
    row = tl.load(exact.row + column, mask=is_column, other=0)
    tl.store(exact.ranked_row + tl.arange(0, VISIBLE), row)
    count = tl.load(exact.row_count + row, mask=is_column, other=0)
    stop = tl.cumsum(count, axis=0)
    is_exact = is_column & (stop <= exact.budget)
    num_columns = tl.sum(is_exact.to(tl.int32), axis=0)
    total = tl.sum(tl.where(is_exact, count, 0), axis=0)
    earlier = tl.where(is_exact, stop - count, NEVER)
    shift = tl.load(exact.row_start + row, mask=is_exact, other=0) - (stop - count)
    tl.store(exact.first + column, earlier, mask=is_column)
    tl.debug_barrier()
    return num_columns, total, earlier, shift


@triton.jit
def _take_away(query, tables, exact, num_columns, softmax, sizes, RUNNING: tl.constexpr):
    """Take the codewords of the exact columns out of a softmax over all that the tile sees."""
    for start in tl.range(0, num_columns, sizes.BLOCK_C):
        rank = start + tl.arange(0, sizes.BLOCK_C)
        valid = rank < num_columns
        rows = tl.load(exact.ranked_row + rank, mask=valid, other=0)
        codes, log_counts, means, shares = load_rows(
            tables, rows, rows, valid, sizes, True, RUNNING
        )
        weights, softmax = weigh(query, codes, log_counts, softmax, RUNNING)
        softmax = accumulate(softmax, -weights, means, shares, sizes)
    return softmax


@triton.jit
def load_tokens(pointer, token, stride, valid, FIRST: tl.constexpr, WIDTH: tl.constexpr, sizes):
    """Columns from FIRST on of some tokens, (tokens, WIDTH); 1 beyond the head dim."""
    column = FIRST + tl.arange(0, WIDTH)
    is_number = (column < sizes.HEAD_DIM)[None, :]
    pointers = pointer + token.to(tl.int64)[:, None] * stride + column[None, :]
    block = tl.load(pointers, mask=valid[:, None] & is_number, other=0.0)
    return tl.where(is_number, block, 1.0).to(block.dtype)


@triton.jit
def load_token_codes(tokens, token, valid, FIRST: tl.constexpr, WIDTH: tl.constexpr, sizes):
    """The same columns of keys, around the centre, times the factor of the logits."""
    key = load_tokens(tokens.key, token, tokens.key_stride, valid, FIRST, WIDTH, sizes)
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
    codes = (load_token_codes(tokens, token, valid, 0, BLOCK_D, sizes),)
    values = (load_tokens(tokens.value, token, tokens.value_stride, valid, 0, BLOCK_D, sizes),)
    if REST_D > 0:
        codes += (load_token_codes(tokens, token, valid, BLOCK_D, REST_D, sizes),)
        values += (
            load_tokens(tokens.value, token, tokens.value_stride, valid, BLOCK_D, REST_D, sizes),
        )
    shares = tl.full([token.shape[0], 8], 1.0, tl.float32).to(values[0].dtype)
    bias = tl.where(valid, 0.0, float("-inf"))
    weights, softmax = weigh(query, codes, bias, softmax, RUNNING)
    return accumulate(softmax, weights, values, shares, sizes)


@triton.jit
def exact_tokens(exact, chosen, first, sizes):
    """Tokens of the exact keys from rank `first` on, and how many there are.

    Finding places for many ranks at once costs as much as for a few.
    """
    _, total, earlier, shift = chosen
    CHUNK: tl.constexpr = max(sizes.VISIBLE, sizes.BLOCK_K)
    ranks = first + tl.arange(0, CHUNK)
    places = place_of(ranks, earlier, shift, sizes.VISIBLE, sizes.LOG2_VISIBLE)
    tokens = tl.load(exact.order + places, mask=ranks < total, other=0)
    return tokens, tl.minimum(CHUNK, total - first)


@triton.jit
def attend_exact(query, tables, exact, chosen, softmax, sizes, RUNNING: tl.constexpr):
    """Put the keys of the exact columns, `chosen` by `choose_columns`, in place of codewords."""
    num_columns, total, _, _ = chosen
    softmax = _take_away(query, tables, exact, num_columns, softmax, sizes, RUNNING)
    for first in tl.range(0, total, max(sizes.VISIBLE, sizes.BLOCK_K)):
        tokens, number = exact_tokens(exact, chosen, first, sizes)
        for start in tl.range(0, number, sizes.BLOCK_K):
            rank = start + tl.arange(0, sizes.BLOCK_K)
            token = tl.gather(tokens, rank, axis=0)
            softmax = _attend_tokens(query, exact, token, rank < number, softmax, sizes, RUNNING)
    return softmax


@triton.jit
def attend_sinks(query, sinks, softmax, sizes, RUNNING: tl.constexpr):
    """Add all sink keys."""
    for start in tl.range(0, sinks.number, sizes.BLOCK_K):
        token = start + tl.arange(0, sizes.BLOCK_K)
        valid = token < sinks.number
        softmax = _attend_tokens(query, sinks, token, valid, softmax, sizes, RUNNING)
    return softmax
