"""Keys that take part as themselves: those of the columns that gain most, and sink keys.

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
from avq_diffusers.attention.triton.softmax import accumulate, load_codewords, weigh

# After every rank of a key.
NEVER = tl.constexpr(2**31 - 1)


class TilePointers(NamedTuple):
    """Keys that take part as themselves, where those of a leaf are, and the columns of tiles.

    score, row, exact_row, first: (B, H, tiles, VISIBLE), all int32 but the score.
    """

    key: tl.tensor
    value: tl.tensor
    sink_key: tl.tensor
    sink_value: tl.tensor
    centre: tl.tensor
    leaf_order: tl.tensor
    row_start: tl.tensor
    row_count: tl.tensor
    score: tl.tensor  # of every column
    row: tl.tensor  # of every column
    exact_row: tl.tensor  # rows of the exact columns
    # Of every column, where its keys begin among the exact keys of the tile, `NEVER` if they
    # are not exact.
    first: tl.tensor


class TokenLayout(NamedTuple):
    """Their number in a head, and strides that have been divided by ALIGN."""

    number: tl.tensor
    key_batch: tl.tensor
    key_head: tl.tensor
    key_token: tl.tensor
    value_batch: tl.tensor
    value_head: tl.tensor
    value_token: tl.tensor


class Tokens(NamedTuple):
    """Keys and values of a head that take part as themselves."""

    key: tl.tensor
    value: tl.tensor
    key_stride: tl.tensor
    value_stride: tl.tensor
    centre: tl.tensor  # where the codes have their zero
    number: tl.tensor


class ExactKeys(NamedTuple):
    """The keys of a head, where its leaves are, and the columns of a tile."""

    keys: Tokens
    budget: tl.tensor  # most exact keys of a tile
    leaf_order: tl.tensor
    row_start: tl.tensor
    row_count: tl.tensor
    row_weight: tl.tensor
    score: tl.tensor
    row: tl.tensor
    exact_row: tl.tensor
    first: tl.tensor


class ChosenColumns(NamedTuple):
    """The exact columns of a tile.

    earlier: (VISIBLE) exact keys before those of each column.
    shift: (VISIBLE) from the rank of an exact key to its place in the order of leaves.
    """

    number: tl.tensor
    num_keys: tl.tensor
    earlier: tl.tensor
    shift: tl.tensor


@triton.jit
def _tokens_of_head(key_ptr, value_ptr, layout, centre_ptr, tile, SIZES):
    """The `Tokens` of the head of a query tile."""
    head = tile.head.to(tl.int64)
    key_start = tile.batch * layout.key_batch + head * layout.key_head
    value_start = tile.batch * layout.value_batch + head * layout.value_head
    centre_head = tile.batch_head if SIZES.OWN_CENTRE else tile.head
    return Tokens(
        key_ptr + key_start * SIZES.ALIGN,
        value_ptr + value_start * SIZES.ALIGN,
        layout.key_token.to(tl.int64) * SIZES.ALIGN,
        layout.value_token.to(tl.int64) * SIZES.ALIGN,
        centre_ptr + centre_head * SIZES.PADDED_DIM,
        layout.number,
    )


@triton.jit
def exact_of_tile(keys, layout, budget, tables, tile, SIZES):
    """The `ExactKeys` of a query tile, from its tables; None without exact keys."""
    exact = None
    if SIZES.EXACT_KEYS:
        row = tile.batch_head * SIZES.ROWS
        first = tile.number * SIZES.VISIBLE
        exact = ExactKeys(
            _tokens_of_head(keys.key, keys.value, layout, keys.centre, tile, SIZES),
            budget,
            keys.leaf_order + tile.batch_head * layout.number,
            keys.row_start + row,
            keys.row_count + row,
            tables.row_weight,
            keys.score + first,
            keys.row + first,
            keys.exact_row + first,
            keys.first + first,
        )
    return exact


@triton.jit
def sinks_of_tile(keys, layout, tile, SIZES):
    """The sink `Tokens` of a query tile; None without sinks."""
    sinks = None
    if SIZES.SINKS:
        sinks = _tokens_of_head(keys.sink_key, keys.sink_value, layout, keys.centre, tile, SIZES)
    return sinks


@triton.jit
def store_scores(attention, exact, columns, rows, valid):
    """Store scores and rows of some columns, from the sum of the attention of the queries."""
    score = attention * tl.load(exact.row_weight + rows, mask=valid, other=0.0)
    tl.store(exact.score + columns, score, mask=valid)
    tl.store(exact.row + columns, rows, mask=valid)


@triton.jit
def choose_columns(tile, SIZES):
    """Choose the exact columns by their stored scores; return `ChosenColumns`."""
    VISIBLE: tl.constexpr = SIZES.VISIBLE
    BITS: tl.constexpr = 63 if tile.query[0].dtype == tl.float32 else 31
    exact = tile.exact
    # What follows reads what other threads of this program wrote.
    tl.debug_barrier()

    # (VISIBLE) A score is not negative: its bits order like integers, and the column breaks ties.
    # Scores of half-precision inputs are not as exact as the bits that make room for the column.
    column = tl.arange(0, VISIBLE)
    is_column = column < SIZES.PARENT_ROWS + SIZES.NUM_REFINED * SIZES.CHILD_ROWS
    score = tl.load(exact.score + column, mask=is_column, other=0.0)
    rank_key = score.to(tl.int32, bitcast=True)
    if tile.query[0].dtype == tl.float32:
        rank_key = rank_key.to(tl.int64) << 32
    rank_key = rank_key & -VISIBLE | (VISIBLE - 1 - column)
    rank_key = tl.where(is_column, rank_key, -1)
    row = tl.load(exact.row + column, mask=is_column, other=0)
    count = tl.load(exact.row_count + row, mask=is_column, other=0)

    # Search the column that no longer fits, two bits of its rank key at a time, until no other
    # column shares them. A sort is faster, by 2 to 5 % of the kernel, but compiles twice as long.
    fits = tl.sum(count, axis=0) <= exact.budget
    digit = tl.arange(0, 4)
    lowest = tl.full([], 0, rank_key.dtype)
    shift = tl.full([], BITS, tl.int32)
    num_left = tl.where(fits, 0, VISIBLE)
    while num_left > 1:
        shift = tl.maximum(shift - 2, 0)
        candidate = lowest + (digit.to(rank_key.dtype) << shift)
        is_above = rank_key[None, :] >= candidate[:, None]
        is_over = tl.sum(tl.where(is_above, count[None, :], 0), axis=1) > exact.budget
        lowest += (tl.sum(is_over.to(tl.int32), axis=0) - 1).to(rank_key.dtype) << shift
        num_left = tl.sum(((rank_key - lowest) >> shift == 0).to(tl.int32), axis=0)
    is_exact = is_column & (fits | ((rank_key - lowest) >> shift > 0))

    place = tl.cumsum(is_exact.to(tl.int32), axis=0) - 1
    tl.store(exact.exact_row + place, row, mask=is_exact)
    count = tl.where(is_exact, count, 0)
    earlier = tl.cumsum(count, axis=0) - count
    tl.store(exact.first + column, tl.where(is_exact, earlier, NEVER), mask=is_column)
    number = tl.sum(is_exact.to(tl.int32), axis=0)
    num_keys = tl.sum(count, axis=0)
    shift = tl.load(exact.row_start + row, mask=is_exact, other=0) - earlier
    tl.debug_barrier()
    return ChosenColumns(number, num_keys, earlier, shift)


@triton.jit
def _take_away(tile, num_columns, softmax, SIZES, RUNNING):
    """Take the codewords of the exact columns out of a softmax over all that the tile sees."""
    for start in tl.range(0, num_columns, SIZES.BLOCK_C):
        rank = start + tl.arange(0, SIZES.BLOCK_C)
        valid = rank < num_columns
        rows = tl.load(tile.exact.exact_row + rank, mask=valid, other=0)
        codes, log_counts, values, shares = load_codewords(
            tile.tables, rows, rows, valid, SIZES, True, RUNNING
        )
        weights, softmax = weigh(tile.query, codes, log_counts, softmax, RUNNING)
        softmax = accumulate(softmax, -weights, values, shares, SIZES)
    return softmax


@triton.jit
def load_tokens(pointer, token, stride, valid, FIRST, WIDTH, SIZES):
    """Dims from FIRST on of some tokens, (tokens, WIDTH); 1 beyond the head dim."""
    dims = FIRST + tl.arange(0, WIDTH)
    is_dim = (dims < SIZES.HEAD_DIM)[None, :]
    pointers = pointer + token.to(tl.int64)[:, None] * stride + dims[None, :]
    block = tl.load(pointers, mask=valid[:, None] & is_dim, other=0.0)
    return tl.where(is_dim, block, 1.0).to(block.dtype)


@triton.jit
def load_token_codes(tokens, token, valid, FIRST, WIDTH, SIZES):
    """The same dims of keys, around the centre, times the factor of the logits."""
    key = load_tokens(tokens.key, token, tokens.key_stride, valid, FIRST, WIDTH, SIZES)
    dims = FIRST + tl.arange(0, WIDTH)
    centre = tl.load(tokens.centre + dims)
    codes = (key.to(tl.float32) - centre[None, :]) * SIZES.FACTOR
    return tl.where((dims < SIZES.HEAD_DIM)[None, :], codes, 0.0).to(key.dtype)


@triton.jit
def _attend_tokens(query, tokens, token, valid, softmax, SIZES, RUNNING):
    """Add some tokens to a softmax."""
    BLOCK_D: tl.constexpr = SIZES.BLOCK_D
    REST_D: tl.constexpr = SIZES.REST_D
    codes = (load_token_codes(tokens, token, valid, 0, BLOCK_D, SIZES),)
    values = (load_tokens(tokens.value, token, tokens.value_stride, valid, 0, BLOCK_D, SIZES),)
    if REST_D > 0:
        codes += (load_token_codes(tokens, token, valid, BLOCK_D, REST_D, SIZES),)
        values += (
            load_tokens(tokens.value, token, tokens.value_stride, valid, BLOCK_D, REST_D, SIZES),
        )
    shares = tl.full([token.shape[0], 8], 1.0, tl.float32).to(values[0].dtype)
    bias = tl.where(valid, 0.0, float("-inf"))
    weights, softmax = weigh(query, codes, bias, softmax, RUNNING)
    return accumulate(softmax, weights, values, shares, SIZES)


@triton.jit
def exact_tokens(exact, chosen, first, SIZES):
    """Tokens of the exact keys from rank `first` on, and how many there are.

    Finding places for many ranks at once costs as much as for a few.
    """
    CHUNK: tl.constexpr = max(SIZES.VISIBLE, SIZES.BLOCK_K)
    ranks = first + tl.arange(0, CHUNK)
    places = place_of(ranks, chosen.earlier, chosen.shift)
    tokens = tl.load(exact.leaf_order + places, mask=ranks < chosen.num_keys, other=0)
    return tokens, tl.minimum(CHUNK, chosen.num_keys - first)


@triton.jit
def attend_exact(tile, chosen, softmax, SIZES, RUNNING):
    """Put the keys of the exact columns, `chosen` by `choose_columns`, in place of codewords."""
    softmax = _take_away(tile, chosen.number, softmax, SIZES, RUNNING)
    for first in tl.range(0, chosen.num_keys, max(SIZES.VISIBLE, SIZES.BLOCK_K)):
        tokens, number = exact_tokens(tile.exact, chosen, first, SIZES)
        for start in tl.range(0, number, SIZES.BLOCK_K):
            rank = start + tl.arange(0, SIZES.BLOCK_K)
            token = tl.gather(tokens, rank, axis=0)
            valid = rank < number
            softmax = _attend_tokens(
                tile.query, tile.exact.keys, token, valid, softmax, SIZES, RUNNING
            )
    return softmax


@triton.jit
def attend_sinks(tile, softmax, SIZES, RUNNING):
    """Add all sink keys."""
    for start in tl.range(0, tile.sinks.number, SIZES.BLOCK_K):
        token = start + tl.arange(0, SIZES.BLOCK_K)
        valid = token < tile.sinks.number
        softmax = _attend_tokens(tile.query, tile.sinks, token, valid, softmax, SIZES, RUNNING)
    return softmax
