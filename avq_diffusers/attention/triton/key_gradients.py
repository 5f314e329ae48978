"""From codeword gradients to key and value gradients, in two launches:

    leaf gradients  sums each codeword's gradient over the tiles, in order, and records where a
                    parent has exact keys.
    key gradients   gives each key the gradients of its two codewords, divided by their key counts,
                    and the gradients from tiles where it is exact.

Shapes: as in `precompute`, T query tiles with the columns of `column_gradients`.
"""

from typing import NamedTuple

import triton
import triton.language as tl

from avq_diffusers.attention.triton.exact import NEVER
from avq_diffusers.attention.triton.pieces import (
    Chunks,
    cell_of,
    keys_of_cell,
    parent_of,
    sorted_keys,
)
from avq_diffusers.attention.triton.sort import SortPointers

# Tiles a program scans at once for exact keys of its parent.
TILES_SEEN = tl.constexpr(32)


@triton.jit
def _inverse_count(log_counts_ptr, rows, is_row):
    """1 / n from log2 n; 0 where there is no key."""
    log_count = tl.load(log_counts_ptr + rows, mask=is_row, other=float("-inf"))
    return tl.where(log_count >= 0, tl.exp2(-tl.maximum(log_count, 0.0)), 0.0)


@triton.jit
def _slots_of(parent, tiles, is_tile, refined_ptr, SIZES):
    """(TILES) A parent's index among the refined parents of tiles, and which tiles refine it."""
    slot = tl.zeros_like(tiles) + parent
    is_refined = tl.full([tiles.shape[0]], SIZES.NUM_REFINED > 0, tl.int1)
    if SIZES.SELECTS:
        place = tl.arange(0, SIZES.REFINED_ROWS)
        pointers = refined_ptr + tiles[:, None] * SIZES.NUM_REFINED + place[None, :]
        mask = is_tile[:, None] & (place < SIZES.NUM_REFINED)[None, :]
        is_slot = (tl.load(pointers, mask=mask, other=-1) == parent).to(tl.int32)
        is_refined = tl.max(is_slot, axis=1) > 0
        slot = tl.sum(is_slot * place[None, :], axis=1)
    return slot, is_refined


@triton.jit
def _exact_slots(first_ptr, parent, tiles, is_tile, slot, is_refined, SIZES):
    """(TILES) What a tile's `exact_slot` is for a parent."""
    column_ptr = first_ptr + tiles.to(tl.int64) * SIZES.VISIBLE
    least = tl.load(column_ptr + parent, mask=is_tile, other=NEVER)
    if SIZES.NUM_REFINED > 0:
        child = tl.arange(0, SIZES.CHILD_ROWS)
        columns = SIZES.PARENT_ROWS + slot[:, None] * SIZES.CHILD_ROWS + child[None, :]
        mask = (is_tile & is_refined)[:, None]
        of_leaves = tl.load(column_ptr[:, None] + columns, mask=mask, other=NEVER)
        least = tl.minimum(least, tl.min(of_leaves, axis=1))
    return tl.where(least == NEVER, -1, tl.where(is_refined, slot, SIZES.NUM_REFINED))


@triton.jit
def _store_leaf_gradients(
    pointer, log_counts_ptr, parent, of_all, of_stay, of_children, SIZES, SCALE
):
    """Divide the sums over tiles by key counts and write them."""
    ROW: tl.constexpr = 2 * SIZES.HEAD_DIM
    numbers = tl.arange(0, of_all.shape[0])
    is_number = numbers < ROW
    dtype = pointer.dtype.element_ty
    scale = tl.where(numbers < SIZES.HEAD_DIM, 1.0, SCALE)
    every = tl.arange(0, 1) >= 0
    row = parent + tl.arange(0, 1)
    of_all *= scale * _inverse_count(log_counts_ptr, row, every)
    of_stay *= scale * _inverse_count(log_counts_ptr, SIZES.PARENT_ROWS + row, every)
    tl.store(pointer + numbers, (of_all + of_stay).to(dtype), mask=is_number)
    if SIZES.NUM_REFINED > 0:
        child = tl.arange(0, SIZES.CHILD_ROWS)
        rows = 2 * SIZES.PARENT_ROWS + parent * SIZES.CHILD_ROWS + child
        inverse = _inverse_count(log_counts_ptr, rows, child >= 0)
        of_children = of_all[None, :] + of_children * scale[None, :] * inverse[:, None]
        pointers = pointer + (1 + child)[:, None] * ROW + numbers[None, :]
        tl.store(pointers, of_children.to(dtype), mask=is_number[None, :])


@triton.jit
def leaf_gradients_kernel(
    log_counts_ptr,
    refined_ptr,
    leaf_gradients_ptr,
    column_ptr,
    first_ptr,
    exact_slot_ptr,
    num_tiles,
    SIZES: tl.constexpr,
    WIDTH: tl.constexpr,
    TILES: tl.constexpr,
    SCALE: tl.constexpr,
):
    """Sum the gradients of one parent and its children over all tiles, TILES at a time.

    leaf_gradients: (B, H, M0, 1 + CP, 2 D), of each leaf's value and key: its own plus those of the
        parent's row for all keys.
    first: as in `TilePointers`, with exact keys, like the next one.
    exact_slot: (B, H, M0, T) int32, -1 where no key of the parent is exact; else the parent's index
        among the tile's refined parents, P if it is not refined.
    WIDTH: 2 D, padded to a power of two.
    """
    # Parents first: neighbours' columns are adjacent in memory.
    parent = tl.program_id(0)
    batch_head = tl.program_id(2).to(tl.int64) * tl.num_programs(1) + tl.program_id(1)
    batch_parent = batch_head * SIZES.NUM_PARENTS + parent
    first_tile = batch_head * num_tiles
    CHILD_ROWS: tl.constexpr = SIZES.CHILD_ROWS
    ROW: tl.constexpr = 2 * SIZES.HEAD_DIM
    COLUMNS: tl.constexpr = SIZES.PARENT_ROWS + SIZES.NUM_REFINED * CHILD_ROWS
    column_ptr += first_tile * (COLUMNS * ROW)
    refined_ptr += first_tile * SIZES.NUM_REFINED

    numbers = tl.arange(0, WIDTH)
    is_number = numbers < ROW
    of_all = tl.zeros([WIDTH], tl.float32)
    of_stay = tl.zeros([WIDTH], tl.float32)
    of_children = None
    if SIZES.NUM_REFINED > 0:
        child = tl.arange(0, CHILD_ROWS)
        of_children = tl.zeros([CHILD_ROWS, WIDTH], tl.float32)
    for first in tl.range(0, num_tiles, TILES):
        # (TILES)
        tiles = first + tl.arange(0, TILES)
        is_tile = tiles < num_tiles
        slot, is_refined = _slots_of(parent, tiles, is_tile, refined_ptr, SIZES)
        tile_start = tiles.to(tl.int64) * (COLUMNS * ROW)

        # (TILES, WIDTH)
        pointers = column_ptr + (tile_start + parent * ROW)[:, None] + numbers[None, :]
        gradients = tl.load(pointers, mask=is_tile[:, None] & is_number[None, :], other=0.0)
        of_all += tl.sum(tl.where(is_refined[:, None], 0.0, gradients), axis=0)
        of_stay += tl.sum(tl.where(is_refined[:, None], gradients, 0.0), axis=0)
        if SIZES.NUM_REFINED > 0:
            # (TILES, CP, WIDTH)
            columns = SIZES.PARENT_ROWS + slot[:, None] * CHILD_ROWS + child[None, :]
            pointers = column_ptr + (tile_start[:, None] + columns * ROW)[:, :, None]
            mask = (is_tile & is_refined)[:, None, None] & is_number[None, None, :]
            gradients = tl.load(pointers + numbers[None, None, :], mask=mask, other=0.0)
            of_children += tl.sum(gradients, axis=0)
        if SIZES.EXACT_KEYS:
            first_of_head = first_ptr + first_tile * SIZES.VISIBLE
            slots = _exact_slots(first_of_head, parent, tiles, is_tile, slot, is_refined, SIZES)
            tl.store(exact_slot_ptr + batch_parent * num_tiles + tiles, slots, mask=is_tile)

    leaf_gradients_ptr += batch_parent * ((1 + CHILD_ROWS) * ROW)
    log_counts_ptr += batch_head * SIZES.ROWS
    _store_leaf_gradients(
        leaf_gradients_ptr, log_counts_ptr, parent, of_all, of_stay, of_children, SIZES, SCALE
    )


class ExactPointers(NamedTuple):
    """What tiles with exact keys store; None without exact keys.

    place, row_start: written by the leaf order kernel.
    first, exact_column: as in `column_gradients`.
    """

    place: tl.tensor = None
    row_start: tl.tensor = None
    first: tl.tensor = None
    exact_slot: tl.tensor = None  # written by the leaf gradients kernel
    exact_column: tl.tensor = None


@triton.jit
def _as_exact_keys(leaf, place, is_key, parent, dims, exact, num_tiles, exact_keys, SIZES):
    """Gradients (KEYS, DP) of one parent's values and keys, over the tiles where they are exact.

    Few tiles have any, so a block of tiles is scanned and the hits are processed one by one.

    leaf, place: (KEYS), each key's leaf in the cell and position in `leaf_order`.
    """
    HEAD_DIM: tl.constexpr = SIZES.HEAD_DIM
    NUM_REFINED: tl.constexpr = SIZES.NUM_REFINED
    PARENT_ROWS: tl.constexpr = SIZES.PARENT_ROWS
    CHILD_ROWS: tl.constexpr = SIZES.CHILD_ROWS
    ROW: tl.constexpr = 2 * HEAD_DIM
    of_values = tl.zeros([leaf.shape[0], dims.shape[0]], tl.float32)
    of_keys = of_values
    in_cell = place - tl.load(exact.row_start + parent)
    row = tl.where(
        leaf == 0, PARENT_ROWS + parent, 2 * PARENT_ROWS + parent * CHILD_ROWS + leaf - 1
    )
    in_leaf = place - tl.load(exact.row_start + row, mask=is_key, other=0)
    for start in tl.range(0, num_tiles, TILES_SEEN):
        # (TILES_SEEN)
        tiles = start + tl.arange(0, TILES_SEEN)
        slots = tl.load(exact.exact_slot + tiles, mask=tiles < num_tiles, other=-1)
        tile = -1
        for _ in tl.range(0, tl.sum((slots >= 0).to(tl.int32), axis=0)):
            tile = tl.min(tl.where((slots >= 0) & (tiles > tile), tiles, NEVER), axis=0)

            # (KEYS)
            column = parent + tl.zeros_like(leaf)
            rank = in_cell
            if NUM_REFINED > 0:
                slot = tl.load(exact.exact_slot + tile)
                is_refined = slot < NUM_REFINED
                child_column = PARENT_ROWS + slot * CHILD_ROWS + leaf - 1
                column = tl.where(is_refined & (leaf > 0), child_column, column)
                rank = tl.where(is_refined, in_leaf, in_cell)
            tile_start = tile.to(tl.int64)
            first = tl.load(
                exact.first + tile_start * SIZES.VISIBLE + column, mask=is_key, other=NEVER
            )
            is_exact = is_key & (first != NEVER)

            # (KEYS, DP)
            starts = (tile_start * exact_keys + first + rank) * ROW
            pointers = exact.exact_column + starts[:, None] + dims[None, :]
            mask = is_exact[:, None] & (dims < HEAD_DIM)[None, :]
            of_values += tl.load(pointers, mask=mask, other=0.0)
            of_keys += tl.load(pointers + HEAD_DIM, mask=mask, other=0.0)
    return of_values, of_keys


@triton.jit
def _exact_of_parent(exact, parent, batch_head, num_keys, num_tiles, exact_keys, SIZES):
    """The `ExactPointers` at a head and its parent, with exact keys."""
    if SIZES.EXACT_KEYS:
        first_tile = batch_head * num_tiles
        exact = ExactPointers(
            exact.place + batch_head * num_keys,
            exact.row_start + batch_head * SIZES.ROWS,
            exact.first + first_tile * SIZES.VISIBLE,
            exact.exact_slot + (batch_head * SIZES.NUM_PARENTS + parent) * num_tiles,
            exact.exact_column + first_tile * exact_keys * (2 * SIZES.HEAD_DIM),
        )
    return exact


@triton.jit
def key_gradients_kernel(
    leaf_ptr,
    leaf_gradients_ptr,
    grad_key_ptr,
    grad_value_ptr,
    sort: SortPointers,
    exact: ExactPointers,
    chunks: Chunks,
    num_tiles,
    exact_keys,
    SIZES: tl.constexpr,
    CELLS: tl.constexpr,
    KEYS: tl.constexpr,
    SCALE: tl.constexpr,
):
    """Write the gradients of the keys in one piece of one parent.

    leaf: written by the aggregation.
    grad_key, grad_value: (B, S, H, D).
    """
    HEAD_DIM: tl.constexpr = SIZES.HEAD_DIM
    TOKEN: tl.constexpr = SIZES.HEADS * HEAD_DIM
    ROW: tl.constexpr = 2 * HEAD_DIM
    head = tl.program_id(0)
    batch = tl.program_id(1).to(tl.int64)
    batch_head = batch * SIZES.HEADS + head
    sorted_of_head = sorted_keys(sort, batch_head, chunks, CELLS)
    leaf_ptr += batch_head * chunks.num_keys
    first_token = batch * chunks.num_keys * TOKEN + head * HEAD_DIM
    grad_key_ptr += first_token
    grad_value_ptr += first_token

    parent, part = parent_of(tl.program_id(2), sorted_of_head, CELLS)
    if parent >= SIZES.NUM_PARENTS:
        return
    cell = cell_of(parent, sorted_of_head, CELLS)
    parent_row = batch_head * SIZES.NUM_PARENTS + parent
    leaf_gradients_ptr += parent_row * ((1 + SIZES.CHILD_ROWS) * ROW)
    exact = _exact_of_parent(
        exact, parent, batch_head, chunks.num_keys, num_tiles, exact_keys, SIZES
    )

    dims = tl.arange(0, SIZES.PADDED_DIM)
    stop = tl.minimum((part + 1) * CELLS.PIECE, cell.total)
    for block in tl.range(part * CELLS.PIECE, stop, KEYS):
        # (KEYS)
        rank = block + tl.arange(0, KEYS)
        is_key = rank < stop
        keys = keys_of_cell(rank, is_key, cell)
        leaf = tl.zeros([KEYS], tl.int32)
        if SIZES.NUM_REFINED > 0:
            leaf = tl.load(leaf_ptr + cell.first + rank, mask=is_key, other=0)

        # (KEYS, DP)
        mask = is_key[:, None] & (dims < HEAD_DIM)[None, :]
        pointers = leaf_gradients_ptr + leaf[:, None] * ROW + dims[None, :]
        of_values = tl.load(pointers, mask=mask, other=0.0)
        of_keys = tl.load(pointers + HEAD_DIM, mask=mask, other=0.0)
        if SIZES.EXACT_KEYS:
            place = tl.load(exact.place + cell.first + rank, mask=is_key, other=0)
            exact_values, exact_codes = _as_exact_keys(
                leaf, place, is_key, parent, dims, exact, num_tiles, exact_keys, SIZES
            )
            of_values += exact_values
            of_keys += exact_codes * SCALE
        offsets = keys.to(tl.int64)[:, None] * TOKEN + dims[None, :]
        tl.store(grad_value_ptr + offsets, of_values, mask=mask)
        tl.store(grad_key_ptr + offsets, of_keys, mask=mask)
