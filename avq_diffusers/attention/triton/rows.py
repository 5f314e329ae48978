"""What the kernels of keys share: rows of keys, products, and the codes that parents have.

The parents of a call are stored codes, updated parents, or keys of the call that are evenly spaced
in the query order. A key k belongs to the parent with the largest k.code + bias.
"""

import triton
import triton.language as tl


@triton.jit
def product(left, right):
    """Matrix product, of float32 factors to about float32 precision on tensor cores."""
    return tl.dot(left, right, input_precision="tf32x3")


@triton.jit
def first_maximum(scores, columns, LAST: tl.constexpr):
    """Largest score along axis 1 and its lowest column; column LAST if all scores are NaN."""
    best = tl.max(scores, axis=1)
    column = tl.where(scores == tl.expand_dims(best, 1), columns, LAST)
    return best, tl.min(column, axis=1)


@triton.jit
def load_rows(
    base_ptr,
    rows,
    stride,
    is_row,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    ALIGN: tl.constexpr,
):
    """Rows of D numbers, padded with zeros to DP."""
    columns = tl.arange(0, PADDED_DIM)
    offsets = (rows.to(tl.int64) * stride * ALIGN)[:, None] + columns[None, :]
    return tl.load(
        base_ptr + offsets, mask=is_row[:, None] & (columns < HEAD_DIM)[None, :], other=0.0
    )


@triton.jit
def bias_of(codes, is_code):
    """-|c|^2 / 2 of codes that are keys, -inf of padding."""
    wide = codes.to(tl.float32)
    return tl.where(is_code, -0.5 * tl.sum(wide * wide, axis=1), float("-inf"))


@triton.jit
def parent_rows(
    key_ptr,
    key_order_ptr,
    parents_ptr,
    parents,
    stride,
    num_keys,
    is_parent,
    NUM_PARENTS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    ALIGN: tl.constexpr,
):
    """Parents that are not stored, padded to DP: updated ones, or keys."""
    if parents_ptr is not None:
        rows = load_rows(parents_ptr, parents, HEAD_DIM, is_parent, HEAD_DIM, PADDED_DIM, 1)
    else:
        place = (parents.to(tl.int64) * num_keys // NUM_PARENTS).to(tl.int32)
        place = tl.minimum(place, num_keys - 1)
        if key_order_ptr is not None:
            place = tl.load(key_order_ptr + place).to(tl.int32)
        rows = load_rows(key_ptr, place, stride, is_parent, HEAD_DIM, PADDED_DIM, ALIGN)
    return rows


@triton.jit
def origin_of(
    key_ptr,
    num_keys,
    stride,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    ALIGN: tl.constexpr,
):
    """(DP) A key of the head, in float32: distances from it do not see what all keys share."""
    # Sixteen copies, because a single row has no wide loads.
    rows = num_keys // 2 + tl.zeros([16], tl.int32)
    block = load_rows(key_ptr, rows, stride, rows >= 0, HEAD_DIM, PADDED_DIM, ALIGN)
    return tl.max(block.to(tl.float32), axis=0)
