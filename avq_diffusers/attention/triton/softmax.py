"""Blockwise online softmax over columns: rows of the codeword tables, and keys.

Logits are in base 2 and include the log2 count. Weights are relative to the maximum so far, and the
sums are rescaled when it grows.

Shapes: as in `attention`.
"""

import math
from typing import NamedTuple

import triton
import triton.language as tl

from avq_diffusers.attention.triton.rows import product

# Below every logit, but finite: -inf minus -inf is NaN while a query has seen nothing.
LOG_ZERO = tl.constexpr(-1e30)
# 1 / log2(e): logits are in base 2.
LN2 = tl.constexpr(math.log(2))


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
    PARENT_ROWS: tl.constexpr
    CHILD_ROWS: tl.constexpr
    ROWS: tl.constexpr
    CODE_ROWS: tl.constexpr
    MOST: tl.constexpr
    BLOCK_D: tl.constexpr
    REST_D: tl.constexpr
    PADDED_DIM: tl.constexpr
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
    total: tl.tensor  # (BLOCK_N,) weights
    spread: tl.tensor  # (BLOCK_N,) weights of codewords times their spreads


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
    """Mean values of some rows."""
    return _load_blocks(tables.mean_values, rows, valid, SIZES.PADDED_DIM, SIZES)


@triton.jit
def logits_of(left, right, bias):
    """Queries times codes, or codes times queries, in blocks of dims, plus a bias for free."""
    bias = tl.broadcast_to(bias, (left[0].shape[0], right[0].shape[0]))
    logits = product(left[0], tl.trans(right[0]), bias)
    if len(left) > 1:
        logits = product(left[1], tl.trans(right[1]), logits)
    return logits


@triton.jit
def empty_softmax(BLOCK_N, SIZES):
    """A softmax over nothing."""
    numerator = (tl.zeros([BLOCK_N, SIZES.BLOCK_D], tl.float32),)
    if SIZES.REST_D > 0:
        numerator += (tl.zeros([BLOCK_N, SIZES.REST_D], tl.float32),)
    running_max = tl.full([BLOCK_N], LOG_ZERO, tl.float32)
    zeros = tl.zeros([BLOCK_N], tl.float32)
    return Softmax(running_max, numerator, zeros, zeros)


@triton.jit
def weigh(softmax, logits):
    """Weights of logits (BLOCK_N, columns), and the softmax with them in its total."""
    running_max = tl.maximum(softmax.running_max, tl.max(logits, axis=1))
    factor = tl.exp2(softmax.running_max - running_max)
    numerator = (softmax.numerator[0] * factor[:, None],)
    if len(softmax.numerator) > 1:
        numerator += (softmax.numerator[1] * factor[:, None],)
    weights = tl.exp2(logits - running_max[:, None])
    total = softmax.total * factor + tl.sum(weights, axis=1)
    return weights, Softmax(running_max, numerator, total, softmax.spread * factor)


@triton.jit
def accumulate(softmax, weights, values):
    """Add weights (BLOCK_N, columns) times values to the numerator."""
    weights = weights.to(values[0].dtype)
    numerator = (product(weights, values[0], softmax.numerator[0]),)
    if len(values) > 1:
        numerator += (product(weights, values[1], softmax.numerator[1]),)
    return Softmax(softmax.running_max, numerator, softmax.total, softmax.spread)


@triton.jit
def attend_codewords(query, tables, rows, bias, valid, softmax, SIZES):
    """Add rows of the tables to a softmax, with a bias of their logits."""
    codes = load_codes(tables, rows, valid, SIZES)
    values = load_values(tables, rows, valid, SIZES)
    weights, softmax = weigh(softmax, logits_of(query, codes, bias[None, :]))
    softmax = accumulate(softmax, weights, values)
    spread = softmax.spread
    if SIZES.FIRST_ORDER:
        row_spreads = tl.load(tables.spread + rows, mask=valid, other=0.0)
        spread += tl.sum(weights * row_spreads[None, :], axis=1)
    return Softmax(softmax.running_max, softmax.numerator, softmax.total, spread)
