"""Blockwise online softmax over rows of the codeword tables.

Shapes: as in `attention`.
"""

from typing import NamedTuple

import triton
import triton.language as tl

from avq_diffusers.attention.triton.rows import product

# Below every logit, but finite: -inf minus -inf is NaN while a query has only seen empty codewords.
LOG_ZERO = tl.constexpr(-1e30)
# Below every weight that float32 holds at full precision.
LEAST_WEIGHT = tl.constexpr(2.0**-120)


class TileSizes(NamedTuple):
    """Compile-time sizes of what a query tile sees.

    BLOCK_D, REST_D: dims of the one or two blocks that a row is cut into.
    ROWS, CODE_ROWS: rows of mean values, and of codes.
    EXACT_KEYS, SINKS: whether there are exact keys, and sink keys.
    BLOCK_C, BLOCK_K: exact columns per step, and exact or sink keys per step.
    """

    HEADS: tl.constexpr
    HEAD_DIM: tl.constexpr
    QUERY_TILE: tl.constexpr
    NUM_PARENTS: tl.constexpr
    NUM_REFINED: tl.constexpr
    PARENT_ROWS: tl.constexpr
    CHILD_ROWS: tl.constexpr
    REFINED_ROWS: tl.constexpr  # P, padded to a power of two
    ROWS: tl.constexpr
    CODE_ROWS: tl.constexpr
    BLOCK_D: tl.constexpr
    REST_D: tl.constexpr
    PADDED_DIM: tl.constexpr
    VALUE_WIDTH: tl.constexpr
    SELECTS: tl.constexpr  # tiles refine some of the parents, neither all nor none
    MEANS: tl.constexpr  # mean keys represent the keys, else stored codewords
    EXACT_KEYS: tl.constexpr
    SINKS: tl.constexpr
    ORDERED: tl.constexpr  # query tiles are cut from an order
    OWN_CENTRE: tl.constexpr  # every batch element has its own centre
    VISIBLE: tl.constexpr  # most columns of a tile with exact keys, a power of two
    BLOCK_C: tl.constexpr
    BLOCK_K: tl.constexpr
    FACTOR: tl.constexpr  # on the logits of keys, includes log2(e)
    ALIGN: tl.constexpr  # divisor of the key strides


class TileBlocks(NamedTuple):
    """Compile-time blocks of a query tile.

    M, P: parents, and refined parents with their children, in a block of the online softmax.
    AGAIN_M, AGAIN_P: the same if the tile is recomputed.
    """

    N: tl.constexpr
    M: tl.constexpr
    P: tl.constexpr
    RUNNING: tl.constexpr  # start with a running maximum
    AGAIN_M: tl.constexpr
    AGAIN_P: tl.constexpr


class Softmax(NamedTuple):
    """Sums over codewords, with weights 2^(logit - running_max)."""

    running_max: tl.tensor  # (BLOCK_N,)
    # Weights times mean values, (BLOCK_N, BLOCK_D) and with a second block (BLOCK_N, REST_D).
    numerator: tl.tuple
    # Weights times shares, (BLOCK_N, 8); zero where the mean values hold the shares.
    denominator: tl.tensor


@triton.jit
def _load_dims(pointer, rows, valid, STRIDE, WIDTH):
    """The first WIDTH dims of some rows, (rows, WIDTH)."""
    pointers = pointer + rows[:, None] * STRIDE + tl.arange(0, WIDTH)[None, :]
    return tl.load(pointers, mask=valid[:, None], other=0.0)


@triton.jit
def _load_rows(pointer, rows, valid, STRIDE, BLOCK_D, REST_D):
    """The first BLOCK_D and the next REST_D dims of some rows."""
    blocks = (_load_dims(pointer, rows, valid, STRIDE, BLOCK_D),)
    if REST_D > 0:
        blocks += (_load_dims(pointer + BLOCK_D, rows, valid, STRIDE, REST_D),)
    return blocks


@triton.jit
def load_codes(tables, rows, valid, SIZES):
    return _load_rows(tables.codes, rows, valid, SIZES.PADDED_DIM, SIZES.BLOCK_D, SIZES.REST_D)


@triton.jit
def load_values(tables, rows, valid, SIZES):
    return _load_rows(
        tables.mean_values, rows, valid, SIZES.VALUE_WIDTH, SIZES.BLOCK_D, SIZES.REST_D
    )


@triton.jit
def load_shares(tables, rows, valid, SIZES):
    """(rows, 8), eight equal numbers each."""
    STRIDE: tl.constexpr = SIZES.VALUE_WIDTH
    return _load_dims(tables.mean_values + STRIDE - 8, rows, valid, STRIDE, 8)


@triton.jit
def logits_of(query, codes, bias):
    """Queries times codewords, both in blocks of dims, plus a bias for free."""
    bias = tl.broadcast_to(bias, (query[0].shape[0], codes[0].shape[0]))
    logits = product(query[0], tl.trans(codes[0]), bias)
    if len(query) > 1:
        logits = product(query[1], tl.trans(codes[1]), logits)
    return logits


@triton.jit
def empty_softmax(running_max, SIZES):
    """A softmax over no codewords."""
    BLOCK_N: tl.constexpr = running_max.shape[0]
    numerator = (tl.zeros([BLOCK_N, SIZES.BLOCK_D], tl.float32),)
    if SIZES.REST_D > 0:
        numerator += (tl.zeros([BLOCK_N, SIZES.REST_D], tl.float32),)
    return Softmax(running_max, numerator, tl.zeros([BLOCK_N, 8], tl.float32))


@triton.jit
def accumulate(softmax, weights, values, shares, SIZES):
    """Add weights (BLOCK_N, rows) times values (rows, BLOCK_D) to a softmax.

    Tensor cores sum the weights, too: times the share in a padding dim of the values or, if there
    is none, times `shares` (rows, 8), eight times the same because a matmul has at least 8.
    """
    weights = weights.to(values[0].dtype)
    denominator = softmax.denominator
    if SIZES.VALUE_WIDTH != SIZES.PADDED_DIM:
        denominator = product(weights, shares, denominator)
    numerator = softmax.numerator
    sums = (product(weights, values[0], numerator[0]),)
    if len(values) > 1:
        sums += (product(weights, values[1], numerator[1]),)
    return Softmax(softmax.running_max, sums, denominator)


@triton.jit
def _rescale(softmax, running_max):
    """The same sums relative to another maximum."""
    factor = tl.exp2(softmax.running_max - running_max)[:, None]
    numerator = (softmax.numerator[0] * factor,)
    if len(softmax.numerator) > 1:
        numerator += (softmax.numerator[1] * factor,)
    return Softmax(running_max, numerator, softmax.denominator * factor)


@triton.jit
def leave_out(weights, running_max, is_kept):
    """Weights of the kept parents, relative to the largest of them."""
    weights = tl.where(is_kept[None, :], weights, 0.0)
    highest = tl.max(weights, axis=1)
    weights *= (1.0 / tl.maximum(highest, LEAST_WEIGHT))[:, None]
    return weights, tl.where(highest < LEAST_WEIGHT, LOG_ZERO, running_max + tl.log2(highest))


@triton.jit
def load_codewords(tables, code_rows, value_rows, valid, SIZES, WHOLE, RUNNING):
    """Codes and log counts of `code_rows`, mean values and shares of `value_rows`.

    WHOLE: all shares are 1.
    RUNNING: a codeword that holds no keys has log count -inf.
    """
    # (rows, BLOCK_D), (rows)
    codes = load_codes(tables, code_rows, valid, SIZES)
    log_counts = tl.load(tables.log_counts + code_rows, mask=valid, other=float("-inf"))
    values = load_values(tables, value_rows, valid, SIZES)
    if WHOLE:
        shares = tl.full([values[0].shape[0], 8], 1.0, tl.float32).to(values[0].dtype)
    else:
        shares = load_shares(tables, value_rows, valid, SIZES)
        if RUNNING:
            log_counts = tl.where(tl.max(shares, axis=1) > 0, log_counts, float("-inf"))
    return codes, log_counts, values, shares


@triton.jit
def weigh(query, codes, bias, softmax, RUNNING):
    """Weights (BLOCK_N, rows) of codes with a bias (rows), and the softmax to add them to.

    RUNNING: first raise the softmax's maximum to the largest logit.
    """
    if RUNNING:
        logits = logits_of(query, codes, bias[None, :])
        softmax = _rescale(softmax, tl.maximum(softmax.running_max, tl.max(logits, axis=1)))
        weights = tl.exp2(logits - softmax.running_max[:, None])
    else:
        weights = tl.exp2(logits_of(query, codes, bias[None, :] - softmax.running_max[:, None]))
    return weights, softmax


@triton.jit
def total_weight(softmax, SIZES):
    """Sum of the weights, (BLOCK_N,)."""
    if SIZES.VALUE_WIDTH == SIZES.PADDED_DIM:
        # The last block holds the first padding dim.
        last = softmax.numerator[-1]
        FIRST: tl.constexpr = SIZES.BLOCK_D if len(softmax.numerator) > 1 else 0
        dims = FIRST + tl.arange(0, last.shape[1])
        total = tl.sum(tl.where((dims == SIZES.HEAD_DIM)[None, :], last, 0.0), axis=1)
    else:
        total = tl.max(softmax.denominator, axis=1)
    return total
