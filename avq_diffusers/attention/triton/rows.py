"""Helpers for kernels that run on keys: rows of keys, matmuls, and the nearest parent of a key.

Parents are stored codes, updated parents, or keys of the call, evenly spaced in the query order. A
key k belongs to the parent with the largest k.code + bias.

Shapes: as in `precompute`; KEYS keys per tile.
"""

from typing import NamedTuple

import triton
import triton.language as tl


class KeySizes(NamedTuple):
    """Compile-time sizes of keys and parents; key strides are divided by ALIGN."""

    HEAD_DIM: tl.constexpr
    PADDED_DIM: tl.constexpr
    NUM_PARENTS: tl.constexpr
    PARENT_ROWS: tl.constexpr
    ALIGN: tl.constexpr


class ParentPointers(NamedTuple):
    """Where parents are: stored codes and biases, updated parents, or keys in an order.

    None for what a call does not have.
    """

    stored_codes: tl.tensor
    bias: tl.tensor
    parents: tl.tensor
    key_order: tl.tensor


@triton.jit
def product(left, right, acc=None):
    """Matmul added to `acc`; float32 factors keep about float32 precision."""
    if left.dtype == tl.float32:
        return tl.dot(left, right, acc=acc, input_precision="tf32x3")
    return tl.dot(left, right, acc=acc)


@triton.jit
def first_maximum(scores, columns, LAST: tl.constexpr):
    """Largest score along axis 1 and its first column; column LAST if all scores are NaN."""
    best = tl.max(scores, axis=1)
    column = tl.where(scores == tl.expand_dims(best, 1), columns, LAST)
    return best, tl.min(column, axis=1)


@triton.jit
def head_start(strides, batch, head, ALIGN: tl.constexpr):
    """Offset of a head's tokens."""
    return (batch.to(tl.int64) * strides.batch + head.to(tl.int64) * strides.head) * ALIGN


@triton.jit
def load_rows(base_ptr, rows, stride, ALIGN: tl.constexpr, is_row, SIZES: tl.constexpr):
    """Rows of D elements, padded with zeros to DP."""
    columns = tl.arange(0, SIZES.PADDED_DIM)
    offsets = (rows.to(tl.int64) * stride * ALIGN)[:, None] + columns[None, :]
    mask = is_row[:, None] & (columns < SIZES.HEAD_DIM)[None, :]
    return tl.load(base_ptr + offsets, mask=mask, other=0.0)


@triton.jit
def bias_of(codes, is_code):
    """-|c|^2 / 2 for codes that are keys, -inf for padding."""
    wide = codes.to(tl.float32)
    return tl.where(is_code, -0.5 * tl.sum(wide * wide, axis=1), float("-inf"))


@triton.jit
def own_parents(key_ptr, source, parents, stride, num_keys, is_parent, SIZES: tl.constexpr):
    """Parents that are not stored, padded to DP: updated ones, or keys.

    key_ptr, source: at the head.
    """
    if source.parents is not None:
        rows = load_rows(source.parents, parents, SIZES.HEAD_DIM, 1, is_parent, SIZES)
    else:
        place = (parents.to(tl.int64) * num_keys // SIZES.NUM_PARENTS).to(tl.int32)
        place = tl.minimum(place, num_keys - 1)
        if source.key_order is not None:
            place = tl.load(source.key_order + place).to(tl.int32)
        rows = load_rows(key_ptr, place, stride, SIZES.ALIGN, is_parent, SIZES)
    return rows


@triton.jit
def origin_of(key_ptr, num_keys, stride, SIZES: tl.constexpr):
    """(DP) A key of the head, in float32: distances from it exclude what all keys share."""
    # Sixteen copies, because a single row gets no wide loads.
    rows = num_keys // 2 + tl.zeros([16], tl.int32)
    block = load_rows(key_ptr, rows, stride, SIZES.ALIGN, rows >= 0, SIZES)
    return tl.max(block.to(tl.float32), axis=0)


@triton.jit
def load_parents(key_ptr, source, parents, stride, num_keys, SIZES: tl.constexpr):
    """Codes and biases of some parents of a head."""
    if source.stored_codes is not None:
        columns = tl.arange(0, SIZES.PADDED_DIM)
        rows = source.stored_codes + parents[:, None] * SIZES.PADDED_DIM
        codes = tl.load(rows + columns[None, :])
        bias = tl.load(source.bias + parents)
    else:
        is_parent = parents < SIZES.NUM_PARENTS
        codes = own_parents(key_ptr, source, parents, stride, num_keys, is_parent, SIZES)
        bias = bias_of(codes, is_parent)
    return codes, bias


@triton.jit
def best_of_tile(key, codes, bias, first_parent, LAST: tl.constexpr):
    """(KEYS, 8) best score among every eighth parent of a tile, and that parent.

    A thread holds two of a row's eight columns, so threads need not communicate.
    """
    PLACES: tl.constexpr = codes.shape[0] // 8
    scores = (product(key, codes.T) + bias[None, :]).reshape(key.shape[0], PLACES, 8)
    parents = tl.arange(0, PLACES)[:, None] * 8 + tl.arange(0, 8)[None, :]
    best, parent = first_maximum(scores, parents[None], LAST)
    return best, first_parent + parent


@triton.jit
def best_of_loaded_tiles(
    key, key_ptr, source, stride, num_keys, SIZES: tl.constexpr, PARENTS: tl.constexpr
):
    """`best_of_tile` over all parents, with codes loaded tile by tile."""
    LAST: tl.constexpr = SIZES.PARENT_ROWS - 1
    best = tl.full([key.shape[0], 8], float("-inf"), tl.float32)
    parent = tl.full([key.shape[0], 8], LAST, tl.int32)
    for first_parent in tl.range(0, SIZES.PARENT_ROWS, PARENTS):
        tile = first_parent + tl.arange(0, PARENTS)
        codes, bias = load_parents(key_ptr, source, tile, stride, num_keys, SIZES)
        tile_best, tile_parent = best_of_tile(key, codes, bias, first_parent, PARENTS - 1)
        parent = tl.where(tile_best > best, tile_parent, parent)
        best = tl.maximum(best, tile_best)
    return best, parent
