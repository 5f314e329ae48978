"""Helpers for kernels that run on keys: rows of keys, matmuls, and the nearest parent of a key.

Parents are stored codes, or keys of the call, evenly spaced in the query order. A key k belongs to
the parent with the largest k.code + bias.

Shapes: as in `precompute`; KEYS keys per block.
"""

from typing import NamedTuple

import triton
import triton.language as tl


class KeySizes(NamedTuple):
    """Compile-time sizes and modes of keys and parents; key strides are divided by ALIGN.

    STORED: parents are stored codes; else keys, in an order if ORDERED.
    """

    HEAD_DIM: tl.constexpr
    PADDED_DIM: tl.constexpr
    NUM_PARENTS: tl.constexpr
    PARENT_ROWS: tl.constexpr
    ALIGN: tl.constexpr
    ORDERED: tl.constexpr
    STORED: tl.constexpr
    CODE_ROWS: tl.constexpr  # rows of stored codes
    MEANS: tl.constexpr  # mean keys represent the keys, else stored codewords


class ParentPointers(NamedTuple):
    """Where parents are: stored codes and biases, or keys in an order."""

    stored_codes: tl.tensor
    bias: tl.tensor
    key_order: tl.tensor


class Tables(NamedTuple):
    """What represents the keys of each head (`precompute`)."""

    codes: tl.tensor
    mean_values: tl.tensor
    counts: tl.tensor
    log_counts: tl.tensor
    spread: tl.tensor
    inside: tl.tensor
    matrix: tl.tensor
    largest: tl.tensor


class HeadOfKeys(NamedTuple):
    """The keys of a program's head, and where its parents are."""

    batch: tl.tensor
    head: tl.tensor
    batch_head: tl.tensor
    key: tl.tensor
    stride: tl.tensor  # of tokens, divided by ALIGN
    number: tl.tensor
    source: ParentPointers


@triton.jit
def head_start(strides, batch, head, ALIGN):
    """Offset of a head's tokens."""
    return (batch.to(tl.int64) * strides.batch + head.to(tl.int64) * strides.head) * ALIGN


@triton.jit
def head_of_program(key_ptr, source, strides, num_keys, SIZES):
    """The `HeadOfKeys` of this program."""
    head = tl.program_id(0)
    batch = tl.program_id(1)
    batch_head = batch.to(tl.int64) * tl.num_programs(0) + head
    key_ptr += head_start(strides, batch, head, SIZES.ALIGN)
    if SIZES.STORED:
        codes_ptr = source.stored_codes + head * SIZES.CODE_ROWS * SIZES.PADDED_DIM
        bias_ptr = source.bias + head * SIZES.CODE_ROWS
        source = ParentPointers(codes_ptr, bias_ptr, source.key_order)
    return HeadOfKeys(batch, head, batch_head, key_ptr, strides.token, num_keys, source)


@triton.jit
def product(left, right, acc=None):
    """Matmul added to `acc`; float32 factors keep about float32 precision."""
    if left.dtype == tl.float32:
        return tl.dot(left, right, acc=acc, input_precision="tf32x3")
    return tl.dot(left, right, acc=acc)


@triton.jit
def first_maximum(scores, indices, LAST):
    """Largest score along axis 1 and its first index; index LAST if all scores are NaN."""
    best = tl.max(scores, axis=1)
    index = tl.where(scores == tl.expand_dims(best, 1), indices, LAST)
    return best, tl.min(index, axis=1)


@triton.jit
def load_rows(base_ptr, rows, stride, ALIGN, is_row, SIZES):
    """Rows of D elements, padded with zeros to DP."""
    dims = tl.arange(0, SIZES.PADDED_DIM)
    offsets = (rows.to(tl.int64) * stride * ALIGN)[:, None] + dims[None, :]
    mask = is_row[:, None] & (dims < SIZES.HEAD_DIM)[None, :]
    return tl.load(base_ptr + offsets, mask=mask, other=0.0)


@triton.jit
def load_keys(head, keys, is_key, SIZES):
    """Keys of a head, padded with zeros to DP."""
    return load_rows(head.key, keys, head.stride, SIZES.ALIGN, is_key, SIZES)


@triton.jit
def bias_of(codes, is_code):
    """-|c|^2 / 2 for codes that are keys, -inf for padding."""
    wide = codes.to(tl.float32)
    return tl.where(is_code, -0.5 * tl.sum(wide * wide, axis=1), float("-inf"))


@triton.jit
def own_parents(head, parents, is_parent, SIZES):
    """Parents that are not stored: keys, padded to DP."""
    index = (parents.to(tl.int64) * head.number // SIZES.NUM_PARENTS).to(tl.int32)
    index = tl.minimum(index, head.number - 1)
    if SIZES.ORDERED:
        index = tl.load(head.source.key_order + index).to(tl.int32)
    return load_keys(head, index, is_parent, SIZES)


@triton.jit
def origin_of(head, SIZES):
    """(DP) A key of the head, in float32: distances from it exclude what all keys share."""
    # Sixteen copies, because a single row gets no wide loads.
    keys = head.number // 2 + tl.zeros([16], tl.int32)
    return tl.max(load_keys(head, keys, keys >= 0, SIZES).to(tl.float32), axis=0)


@triton.jit
def load_parents(head, parents, SIZES):
    """Codes and biases of some parents of a head."""
    if SIZES.STORED:
        dims = tl.arange(0, SIZES.PADDED_DIM)
        rows = head.source.stored_codes + parents[:, None] * SIZES.PADDED_DIM
        codes = tl.load(rows + dims[None, :])
        bias = tl.load(head.source.bias + parents)
    else:
        is_parent = parents < SIZES.NUM_PARENTS
        codes = own_parents(head, parents, is_parent, SIZES)
        bias = bias_of(codes, is_parent)
    return codes, bias


@triton.jit
def mean_parent(head, SIZES, PARENTS):
    """(DP) The mean of the parents, PARENTS at a time: the centre."""
    centre = tl.zeros([SIZES.PADDED_DIM], tl.float32)
    for first in tl.range(0, SIZES.PARENT_ROWS, PARENTS):
        codes, _ = load_parents(head, first + tl.arange(0, PARENTS), SIZES)
        centre += tl.sum(codes.to(tl.float32), axis=0)
    return centre / SIZES.NUM_PARENTS


@triton.jit
def best_of_block(key, codes, bias, first_parent, LAST):
    """(KEYS, 8) best score among every eighth parent of a block, and that parent.

    A thread holds two of a row's eight places, so threads need not communicate.
    """
    PLACES: tl.constexpr = codes.shape[0] // 8
    scores = (product(key, codes.T) + bias[None, :]).reshape(key.shape[0], PLACES, 8)
    parents = tl.arange(0, PLACES)[:, None] * 8 + tl.arange(0, 8)[None, :]
    best, parent = first_maximum(scores, parents[None], LAST)
    return best, first_parent + parent


@triton.jit
def best_of_blocks(key, head, SIZES, PARENTS):
    """`best_of_block` over all parents, with codes loaded block by block."""
    LAST: tl.constexpr = SIZES.PARENT_ROWS - 1
    best = tl.full([key.shape[0], 8], float("-inf"), tl.float32)
    parent = tl.full([key.shape[0], 8], LAST, tl.int32)
    for first_parent in tl.range(0, SIZES.PARENT_ROWS, PARENTS):
        parents = first_parent + tl.arange(0, PARENTS)
        codes, bias = load_parents(head, parents, SIZES)
        block_best, block_parent = best_of_block(key, codes, bias, first_parent, PARENTS - 1)
        parent = tl.where(block_best > best, block_parent, parent)
        best = tl.maximum(best, block_best)
    return best, parent
