"""Blockwise online softmax over columns: rows of the codeword tables, and keys.

Logits are in base 2 and include the log2 count. Weights are relative to the maximum so far, and the
sums are rescaled when it grows.

Shapes: as in `attention`.
"""

from typing import NamedTuple

import triton
import triton.language as tl

from avq_diffusers.attention.triton.rows import product

# Below every logit, but finite: -inf minus -inf is NaN while a query has seen nothing.
LOG_ZERO = tl.constexpr(-1e30)


class TileSizes(NamedTuple):
    """Compile-time sizes and modes of what a query tile sees.

    REFINES: which parents a tile refines, `"threshold"`, `"some"`, `"none"` or `"all"`.
    MOST: most columns of a tile but sinks.
    BLOCK_D, REST_D: dims of the one or two blocks that a row is cut into.
    ROWS, CODE_ROWS: rows of the tables, and of codes.
    MATRIX_SIDE: blocks along each side of the first-order matrix.
    """

    HEADS: tl.constexpr
    HEAD_DIM: tl.constexpr
    QUERY_TILE: tl.constexpr
    NUM_REFINED: tl.constexpr
    PARENT_ROWS: tl.constexpr
    CHILD_ROWS: tl.constexpr
    ROWS: tl.constexpr
    CODE_ROWS: tl.constexpr
    MOST: tl.constexpr
    BLOCK_D: tl.constexpr
    REST_D: tl.constexpr
    PADDED_DIM: tl.constexpr
    VALUE_WIDTH: tl.constexpr
    MATRIX_SIDE: tl.constexpr
    REFINES: tl.constexpr
    MEANS: tl.constexpr  # mean keys represent the keys, else stored codewords
    FIRST_ORDER: tl.constexpr  # values inside leaves follow their keys
    SINKS: tl.constexpr
    ORDERED: tl.constexpr  # query tiles are cut from an order
    OWN_CENTRE: tl.constexpr  # every batch element has its own centre
    FACTOR: tl.constexpr  # on the logits of keys, includes log2(e)
    ALIGN: tl.constexpr  # divisor of the key strides


class Softmax(NamedTuple):
    """Sums over columns, with weights 2^(logit - running_max)."""

    running_max: tl.tensor  # (BLOCK_N,)
    # Weights times mean values, (BLOCK_N, BLOCK_D) and with a second block (BLOCK_N, REST_D).
    numerator: tl.tuple
    # Weights of codewords times 1 and spread, (BLOCK_N, 8); zero where padding dims of the
    # numerator hold these sums.
    numbers: tl.tensor
    of_keys: tl.tensor  # (BLOCK_N,) weights of keys


@triton.jit
def load_dims(pointer, rows, valid, STRIDE, WIDTH):
    """The first WIDTH dims of some rows, (rows, WIDTH)."""
    pointers = pointer + rows[:, None] * STRIDE + tl.arange(0, WIDTH)[None, :]
    return tl.load(pointers, mask=valid[:, None], other=0.0)


@triton.jit
def _load_blocks(pointer, rows, valid, STRIDE, SIZES):
    """The first BLOCK_D and the next REST_D dims of some rows."""
    blocks = (load_dims(pointer, rows, valid, STRIDE, SIZES.BLOCK_D),)
    if SIZES.REST_D > 0:
        blocks += (load_dims(pointer + SIZES.BLOCK_D, rows, valid, STRIDE, SIZES.REST_D),)
    return blocks


@triton.jit
def load_codes(tables, rows, valid, SIZES):
    """Codes of some rows."""
    if not SIZES.MEANS:  # one code for all keys of a parent and for those that stay
        rows -= tl.where(rows >= SIZES.PARENT_ROWS, SIZES.PARENT_ROWS, 0)
    return _load_blocks(tables.codes, rows, valid, SIZES.PADDED_DIM, SIZES)


@triton.jit
def load_values(tables, rows, valid, SIZES):
    """Mean values of some rows, and 8 numbers: 1, the spread and zeros."""
    STRIDE: tl.constexpr = SIZES.VALUE_WIDTH
    values = _load_blocks(tables.mean_values, rows, valid, STRIDE, SIZES)
    numbers = ()
    if SIZES.VALUE_WIDTH != SIZES.PADDED_DIM:
        numbers += (load_dims(tables.mean_values + SIZES.HEAD_DIM, rows, valid, STRIDE, 8),)
    return values, numbers


@triton.jit
def logits_of(query, codes, bias):
    """Queries times codes, both in blocks of dims, plus a bias for free."""
    bias = tl.broadcast_to(bias, (query[0].shape[0], codes[0].shape[0]))
    logits = product(query[0], tl.trans(codes[0]), bias)
    if len(query) > 1:
        logits = product(query[1], tl.trans(codes[1]), logits)
    return logits


@triton.jit
def empty_softmax(BLOCK_N, SIZES):
    """A softmax over nothing."""
    numerator = (tl.zeros([BLOCK_N, SIZES.BLOCK_D], tl.float32),)
    if SIZES.REST_D > 0:
        numerator += (tl.zeros([BLOCK_N, SIZES.REST_D], tl.float32),)
    running_max = tl.full([BLOCK_N], LOG_ZERO, tl.float32)
    return Softmax(
        running_max,
        numerator,
        tl.zeros([BLOCK_N, 8], tl.float32),
        tl.zeros([BLOCK_N], tl.float32),
    )


@triton.jit
def weigh(softmax, logits):
    """Weights of logits (BLOCK_N, columns), and the softmax to add them to."""
    running_max = tl.maximum(softmax.running_max, tl.max(logits, axis=1))
    factor = tl.exp2(softmax.running_max - running_max)
    numerator = (softmax.numerator[0] * factor[:, None],)
    if len(softmax.numerator) > 1:
        numerator += (softmax.numerator[1] * factor[:, None],)
    numbers = softmax.numbers * factor[:, None]
    rescaled = Softmax(running_max, numerator, numbers, softmax.of_keys * factor)
    return tl.exp2(logits - running_max[:, None]), rescaled


@triton.jit
def accumulate(softmax, weights, values, numbers, SIZES):
    """Add weights (BLOCK_N, columns) times values, and times their numbers if there are any."""
    weights = weights.to(values[0].dtype)
    sums = softmax.numbers
    if len(numbers) > 0:
        sums = product(weights, numbers[0], sums)
    numerator = (product(weights, values[0], softmax.numerator[0]),)
    if len(values) > 1:
        numerator += (product(weights, values[1], softmax.numerator[1]),)
    return Softmax(softmax.running_max, numerator, sums, softmax.of_keys)


@triton.jit
def attend_codewords(query, tables, rows, bias, valid, softmax, SIZES):
    """Add rows of the tables to a softmax, with a bias of their logits."""
    codes = load_codes(tables, rows, valid, SIZES)
    values, numbers = load_values(tables, rows, valid, SIZES)
    weights, softmax = weigh(softmax, logits_of(query, codes, bias[None, :]))
    return accumulate(softmax, weights, values, numbers, SIZES)


@triton.jit
def _number(softmax, PLACE, SIZES):
    """(BLOCK_N) The sum of weights times the number at a place after the mean values."""
    if SIZES.VALUE_WIDTH == SIZES.PADDED_DIM:
        # The last block holds the padding dims.
        sums = softmax.numerator[-1]
        FIRST: tl.constexpr = SIZES.BLOCK_D if len(softmax.numerator) > 1 else 0
        place = FIRST + tl.arange(0, sums.shape[1]) - SIZES.HEAD_DIM
    else:
        sums = softmax.numbers
        place = tl.arange(0, 8)
    return tl.sum(tl.where((place == PLACE)[None, :], sums, 0.0), axis=1)


@triton.jit
def total_weight(softmax, SIZES):
    """Sum of the weights, (BLOCK_N)."""
    return _number(softmax, 0, SIZES) + softmax.of_keys


@triton.jit
def total_spread(softmax, SIZES):
    """Sum of weights times spreads, (BLOCK_N)."""
    return _number(softmax, 1, SIZES)
