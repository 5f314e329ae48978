"""The nearest parent of keys, for the kernels that assign them.

Shapes: as in `precompute`; KEYS keys of a tile.
"""

import triton
import triton.language as tl

from avq_diffusers.attention.triton.rows import bias_of, first_maximum, parent_rows, product


@triton.jit
def load_parents(
    key_ptr,
    key_order_ptr,
    parents_ptr,
    stored_codes_ptr,
    bias_ptr,
    parents,
    stride,
    num_keys,
    NUM_PARENTS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    ALIGN: tl.constexpr,
):
    """Codes and biases of some parents."""
    if stored_codes_ptr is not None:
        columns = tl.arange(0, PADDED_DIM)
        codes = tl.load(stored_codes_ptr + parents[:, None] * PADDED_DIM + columns[None, :])
        bias = tl.load(bias_ptr + parents)
    else:
        is_parent = parents < NUM_PARENTS
        codes = parent_rows(
            key_ptr,
            key_order_ptr,
            parents_ptr,
            parents,
            stride,
            num_keys,
            is_parent,
            NUM_PARENTS,
            HEAD_DIM,
            PADDED_DIM,
            ALIGN,
        )
        bias = bias_of(codes, is_parent)
    return codes, bias


@triton.jit
def best_of_tile(key, codes, bias, first_parent, LAST: tl.constexpr):
    """(KEYS, 8) best score among every eighth parent of a tile, and that parent.

    A thread holds two of eight columns of a row, so threads need not communicate.
    """
    PLACES: tl.constexpr = codes.shape[0] // 8
    scores = (product(key, codes.T) + bias[None, :]).reshape(key.shape[0], PLACES, 8)
    parents = tl.arange(0, PLACES)[:, None] * 8 + tl.arange(0, 8)[None, :]
    best, parent = first_maximum(scores, parents[None], LAST)
    return best, first_parent + parent


@triton.jit
def best_of_loaded_tiles(
    key,
    key_ptr,
    key_order_ptr,
    parents_ptr,
    stored_codes_ptr,
    bias_ptr,
    stride,
    num_keys,
    NUM_PARENTS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    PARENT_ROWS: tl.constexpr,
    PARENTS: tl.constexpr,
    ALIGN: tl.constexpr,
):
    """As `best_of_tile`, of all parents, whose codes are loaded tile by tile."""
    best = tl.full([key.shape[0], 8], float("-inf"), tl.float32)
    parent = tl.full([key.shape[0], 8], PARENT_ROWS - 1, tl.int32)
    for first_parent in tl.range(0, PARENT_ROWS, PARENTS):
        codes, bias = load_parents(
            key_ptr,
            key_order_ptr,
            parents_ptr,
            stored_codes_ptr,
            bias_ptr,
            first_parent + tl.arange(0, PARENTS),
            stride,
            num_keys,
            NUM_PARENTS,
            HEAD_DIM,
            PADDED_DIM,
            ALIGN,
        )
        tile_best, tile_parent = best_of_tile(key, codes, bias, first_parent, PARENTS - 1)
        parent = tl.where(tile_best > best, tile_parent, parent)
        best = tl.maximum(best, tile_best)
    return best, parent
