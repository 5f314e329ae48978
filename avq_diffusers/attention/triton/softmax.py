"""An online softmax over rows of the codeword tables, in blocks.

Shapes: as in `attention`.
"""

from typing import NamedTuple

import triton
import triton.language as tl

# Below every logit, but finite: -inf minus -inf is NaN where a query has only met empty codewords.
LOG_ZERO = tl.constexpr(-1e30)
# Below every weight that float32 holds to full precision.
LEAST_WEIGHT = tl.constexpr(2.0**-120)


class Tables(NamedTuple):
    """Pointers to the codewords of a head, and to the refined parents of a tile."""

    codes: tl.tensor
    means: tl.tensor
    log_counts: tl.tensor
    spread: tl.tensor
    refined: tl.tensor


class Sizes(NamedTuple):
    """Compile-time sizes of the codebook and of its tables.

    BLOCK_D, REST_D: columns of the one or two blocks that a row is cut into.
    SELECTS: tiles refine some of the parents, neither all nor none.
    EXACT, SINKS: keys of some columns, or sink keys, attend as themselves.
    VISIBLE: columns that a tile may see, a power of two.
    BLOCK_C, BLOCK_K: exact columns, and keys that attend as themselves, at once.
    FACTOR: on the logits, with log2(e).
    """

    HEAD_DIM: tl.constexpr
    NUM_PARENTS: tl.constexpr
    NUM_CHILDREN: tl.constexpr
    NUM_REFINED: tl.constexpr
    PARENT_ROWS: tl.constexpr
    CHILD_ROWS: tl.constexpr
    BLOCK_D: tl.constexpr
    REST_D: tl.constexpr
    PADDED_DIM: tl.constexpr
    MEAN_COLUMNS: tl.constexpr
    SELECTS: tl.constexpr
    MEANS: tl.constexpr
    EXACT: tl.constexpr
    SINKS: tl.constexpr
    VISIBLE: tl.constexpr
    LOG2_VISIBLE: tl.constexpr
    BLOCK_C: tl.constexpr
    BLOCK_K: tl.constexpr
    FACTOR: tl.constexpr


class Softmax(NamedTuple):
    """Sums over codewords, of weights 2^(logit - running_max).

    running_max: (BLOCK_N,).
    numerator: weights times means, (BLOCK_N, BLOCK_D) and perhaps (BLOCK_N, REST_D).
    denominator: weights times shares, (BLOCK_N, 8); zero where the means hold the shares.
    """

    running_max: tl.tensor
    numerator: tl.tuple
    denominator: tl.tensor


@triton.jit
def _load_columns(pointer, rows, valid, STRIDE: tl.constexpr, WIDTH: tl.constexpr):
    """The first WIDTH columns of some rows, (rows, WIDTH)."""
    pointers = pointer + rows[:, None] * STRIDE + tl.arange(0, WIDTH)[None, :]
    return tl.load(pointers, mask=valid[:, None], other=0.0)


@triton.jit
def _load_rows(
    pointer, rows, valid, STRIDE: tl.constexpr, BLOCK_D: tl.constexpr, REST_D: tl.constexpr
):
    """The first BLOCK_D and the next REST_D columns of some rows."""
    blocks = (_load_columns(pointer, rows, valid, STRIDE, BLOCK_D),)
    if REST_D > 0:
        blocks += (_load_columns(pointer + BLOCK_D, rows, valid, STRIDE, REST_D),)
    return blocks


@triton.jit
def load_codes(tables, rows, valid, sizes):
    return _load_rows(tables.codes, rows, valid, sizes.PADDED_DIM, sizes.BLOCK_D, sizes.REST_D)


@triton.jit
def load_means(tables, rows, valid, sizes):
    return _load_rows(tables.means, rows, valid, sizes.MEAN_COLUMNS, sizes.BLOCK_D, sizes.REST_D)


@triton.jit
def load_shares(tables, rows, valid, sizes):
    """(rows, 8), equal columns."""
    STRIDE: tl.constexpr = sizes.MEAN_COLUMNS
    return _load_columns(tables.means + STRIDE - 8, rows, valid, STRIDE, 8)


@triton.jit
def logits_of(query, codes, bias):
    """Queries times codewords, both in blocks of columns, plus a bias at no extra cost."""
    bias = tl.broadcast_to(bias, (query[0].shape[0], codes[0].shape[0]))
    logits = tl.dot(query[0], tl.trans(codes[0]), acc=bias, input_precision="tf32x3")
    if len(query) > 1:
        logits = tl.dot(query[1], tl.trans(codes[1]), acc=logits, input_precision="tf32x3")
    return logits


@triton.jit
def empty_softmax(running_max, sizes):
    """A softmax over no codewords."""
    BLOCK_N: tl.constexpr = running_max.shape[0]
    numerator = (tl.zeros([BLOCK_N, sizes.BLOCK_D], tl.float32),)
    if sizes.REST_D > 0:
        numerator += (tl.zeros([BLOCK_N, sizes.REST_D], tl.float32),)
    return Softmax(running_max, numerator, tl.zeros([BLOCK_N, 8], tl.float32))


@triton.jit
def accumulate(softmax, weights, means, shares, sizes):
    """Add weights (BLOCK_N, rows) times means (rows, BLOCK_D) to a softmax.

    Tensor cores sum up the weights, too: times the share in a padding column of the means, or, if
    there is none, times `shares` (rows, 8). A product has at least 8 columns; these are equal.
    """
    weights = weights.to(means[0].dtype)
    denominator = softmax.denominator
    if sizes.MEAN_COLUMNS != sizes.PADDED_DIM:
        denominator = tl.dot(weights, shares, acc=denominator, input_precision="tf32x3")
    numerator = softmax.numerator
    sums = (tl.dot(weights, means[0], acc=numerator[0], input_precision="tf32x3"),)
    if len(means) > 1:
        sums += (tl.dot(weights, means[1], acc=numerator[1], input_precision="tf32x3"),)
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
    """Weights of the parents that are kept, relative to the largest of them."""
    weights = tl.where(is_kept[None, :], weights, 0.0)
    highest = tl.max(weights, axis=1)
    weights *= (1.0 / tl.maximum(highest, LEAST_WEIGHT))[:, None]
    return weights, tl.where(highest < LEAST_WEIGHT, LOG_ZERO, running_max + tl.log2(highest))


@triton.jit
def load_rows(
    tables,
    code_rows,
    mean_rows,
    valid,
    sizes,
    WHOLE: tl.constexpr,
    RUNNING: tl.constexpr,
):
    """Codes and log counts of `code_rows`, means and shares of `mean_rows`.

    WHOLE: all shares are 1.
    RUNNING: a codeword that holds no keys has log count -inf.
    """
    # (rows, BLOCK_D), (rows)
    codes = load_codes(tables, code_rows, valid, sizes)
    log_counts = tl.load(tables.log_counts + code_rows, mask=valid, other=float("-inf"))
    means = load_means(tables, mean_rows, valid, sizes)
    if WHOLE:
        shares = tl.full([means[0].shape[0], 8], 1.0, tl.float32).to(means[0].dtype)
    else:
        shares = load_shares(tables, mean_rows, valid, sizes)
        if RUNNING:
            log_counts = tl.where(tl.max(shares, axis=1) > 0, log_counts, float("-inf"))
    return codes, log_counts, means, shares


@triton.jit
def weigh(query, codes, bias, softmax, RUNNING: tl.constexpr):
    """Weights (BLOCK_N, rows) of codes with a bias (rows), and the softmax that they are to join.

    RUNNING: first raise its maximum to the largest logit.
    """
    if RUNNING:
        logits = logits_of(query, codes, bias[None, :])
        softmax = _rescale(softmax, tl.maximum(softmax.running_max, tl.max(logits, axis=1)))
        weights = tl.exp2(logits - softmax.running_max[:, None])
    else:
        weights = tl.exp2(logits_of(query, codes, bias[None, :] - softmax.running_max[:, None]))
    return weights, softmax


@triton.jit
def total_weight(softmax, sizes):
    """Sum of the weights, (BLOCK_N,)."""
    if sizes.MEAN_COLUMNS == sizes.PADDED_DIM:
        # The last block holds the first padding column.
        last = softmax.numerator[-1]
        FIRST: tl.constexpr = sizes.BLOCK_D if len(softmax.numerator) > 1 else 0
        column = FIRST + tl.arange(0, last.shape[1])
        total = tl.sum(tl.where((column == sizes.HEAD_DIM)[None, :], last, 0.0), axis=1)
    else:
        total = tl.max(softmax.denominator, axis=1)
    return total
