"""From the gradients of codewords to those of keys and values, in two launches:

    leaf gradients  adds up what the tiles give every codeword, in their order, and notes where a
                    parent has exact keys.
    key gradients   gives every key what its two codewords have, divided by their numbers of keys,
                    and what it has from tiles where it is exact.

Shapes: as in `precompute`, T query tiles with the columns of `column_gradients`.
"""

import triton
import triton.language as tl

from avq_diffusers.attention.triton.exact import NEVER
from avq_diffusers.attention.triton.pieces import cell_of, parent_of, place_of

# Tiles that a program looks at, of which it takes those with exact keys of its parent.
TILES_SEEN = tl.constexpr(32)


@triton.jit
def _inverse_count(log_counts_ptr, rows, is_row):
    """1 / n from log2 n; 0 where there is no key."""
    log_count = tl.load(log_counts_ptr + rows, mask=is_row, other=float("-inf"))
    return tl.where(log_count >= 0, tl.exp2(-tl.maximum(log_count, 0.0)), 0.0)


@triton.jit(do_not_specialize=["num_tiles"])
def leaf_gradients_kernel(
    column_ptr,
    refined_ptr,
    log_counts_ptr,
    leaf_gradients_ptr,
    first_ptr,
    exact_slot_ptr,
    num_tiles,
    HEAD_DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    NUM_PARENTS: tl.constexpr,
    NUM_REFINED: tl.constexpr,
    PARENT_ROWS: tl.constexpr,
    CHILD_ROWS: tl.constexpr,
    TILES: tl.constexpr,
    VISIBLE: tl.constexpr,
    SCALE: tl.constexpr,
):
    """Add up the gradients of one parent and its children over all tiles, TILES at a time.

    leaf_gradients: (B, H, M0, 1 + CP, 2 D), of the value and the key of every leaf: its own, and
        what it has of all keys of the parent.
    first: as in `column_gradients`; None without exact keys, as the next one.
    exact_slot: (B, H, M0, T) int32, -1 where no key of the parent is exact; else which of the
        refined parents of the tile it is, P if it is none.
    WIDTH: 2 D, padded to a power of two.
    """
    # Parents first: the columns of neighbours are neighbours in memory.
    parent = tl.program_id(0)
    head = tl.program_id(1)
    batch = tl.program_id(2)
    batch_head = batch.to(tl.int64) * tl.num_programs(1) + head

    ROW: tl.constexpr = 2 * HEAD_DIM
    MEAN_ROWS: tl.constexpr = 2 * PARENT_ROWS + NUM_PARENTS * CHILD_ROWS
    COLUMNS: tl.constexpr = PARENT_ROWS + NUM_REFINED * CHILD_ROWS
    SELECTS: tl.constexpr = NUM_REFINED > 0 and NUM_REFINED < NUM_PARENTS
    column_ptr += batch_head * num_tiles * (COLUMNS * ROW)
    if SELECTS:
        refined_ptr += batch_head * num_tiles * NUM_REFINED
        place = tl.arange(0, triton.next_power_of_2(NUM_REFINED))
    log_counts_ptr += batch_head * MEAN_ROWS
    leaf_gradients_ptr += (batch_head * NUM_PARENTS + parent) * ((1 + CHILD_ROWS) * ROW)
    EXACT: tl.constexpr = first_ptr is not None
    if EXACT:
        first_ptr += batch_head * num_tiles * VISIBLE
        exact_slot_ptr += (batch_head * NUM_PARENTS + parent) * num_tiles

    numbers = tl.arange(0, WIDTH)
    is_number = numbers < ROW
    of_all = tl.zeros([WIDTH], tl.float32)
    of_stay = tl.zeros([WIDTH], tl.float32)
    if NUM_REFINED > 0:
        child = tl.arange(0, CHILD_ROWS)
        of_children = tl.zeros([CHILD_ROWS, WIDTH], tl.float32)
    for first in tl.range(0, num_tiles, TILES):
        # (TILES)
        tiles = first + tl.arange(0, TILES)
        is_tile = tiles < num_tiles
        is_refined = tl.full([TILES], NUM_REFINED > 0, tl.int1)
        slot = tl.full([TILES], 0, tl.int32) + parent
        if SELECTS:
            mask = is_tile[:, None] & (place < NUM_REFINED)[None, :]
            refined = tl.load(
                refined_ptr + tiles[:, None] * NUM_REFINED + place[None, :], mask=mask, other=-1
            )
            is_slot = (refined == parent).to(tl.int32)
            is_refined = tl.max(is_slot, axis=1) > 0
            slot = tl.sum(is_slot * place[None, :], axis=1)
        tile_start = tiles.to(tl.int64) * (COLUMNS * ROW)

        # (TILES, WIDTH)
        gradients = tl.load(
            column_ptr + (tile_start + parent * ROW)[:, None] + numbers[None, :],
            mask=is_tile[:, None] & is_number[None, :],
            other=0.0,
        )
        of_all += tl.sum(tl.where(is_refined[:, None], 0.0, gradients), axis=0)
        of_stay += tl.sum(tl.where(is_refined[:, None], gradients, 0.0), axis=0)
        if EXACT:
            column_start = tiles.to(tl.int64) * VISIBLE
            least = tl.load(first_ptr + column_start + parent, mask=is_tile, other=NEVER)
        if NUM_REFINED > 0:
            # (TILES, CP)
            columns = PARENT_ROWS + slot[:, None] * CHILD_ROWS + child[None, :]
            if EXACT:
                of_leaves = tl.load(
                    first_ptr + column_start[:, None] + columns,
                    mask=(is_tile & is_refined)[:, None],
                    other=NEVER,
                )
                least = tl.minimum(least, tl.min(of_leaves, axis=1))
            # (TILES, CP, WIDTH)
            starts = tile_start[:, None] + columns * ROW
            mask = (is_tile & is_refined)[:, None, None] & is_number[None, None, :]
            gradients = tl.load(
                column_ptr + starts[:, :, None] + numbers[None, None, :], mask=mask, other=0.0
            )
            of_children += tl.sum(gradients, axis=0)
        if EXACT:
            exact_slot = tl.where(is_refined, slot, NUM_REFINED)
            exact_slot = tl.where(least == NEVER, -1, exact_slot)
            tl.store(exact_slot_ptr + tiles, exact_slot, mask=is_tile)

    scale = tl.where(numbers < HEAD_DIM, 1.0, SCALE)
    every = tl.arange(0, 1) >= 0
    cell = parent + tl.arange(0, 1)
    of_all *= scale * _inverse_count(log_counts_ptr, cell, every)
    of_stay *= scale * _inverse_count(log_counts_ptr, PARENT_ROWS + cell, every)
    dtype = leaf_gradients_ptr.dtype.element_ty
    tl.store(leaf_gradients_ptr + numbers, (of_all + of_stay).to(dtype), mask=is_number)
    if NUM_REFINED > 0:
        rows = 2 * PARENT_ROWS + parent * CHILD_ROWS + child
        inverse = _inverse_count(log_counts_ptr, rows, child >= 0)
        of_children = of_all[None, :] + of_children * scale[None, :] * inverse[:, None]
        tl.store(
            leaf_gradients_ptr + (1 + child)[:, None] * ROW + numbers[None, :],
            of_children.to(dtype),
            mask=is_number[None, :],
        )


@triton.jit
def _as_exact_keys(
    leaf,
    place,
    is_key,
    parent,
    numbers,
    row_start_ptr,
    first_ptr,
    exact_slot_ptr,
    exact_column_ptr,
    num_tiles,
    exact_keys,
    HEAD_DIM: tl.constexpr,
    NUM_REFINED: tl.constexpr,
    PARENT_ROWS: tl.constexpr,
    CHILD_ROWS: tl.constexpr,
    VISIBLE: tl.constexpr,
):
    """Gradients (KEYS, DP) of values and keys of one parent, over the tiles where they are exact.

    Few tiles have any: a block of tiles is looked at, then those few are taken one by one.

    leaf, place: (KEYS) of the keys, in the cell and in `leaf_order`.
    """
    ROW: tl.constexpr = 2 * HEAD_DIM
    of_values = tl.zeros([leaf.shape[0], numbers.shape[0]], tl.float32)
    of_keys = of_values
    in_cell = place - tl.load(row_start_ptr + parent)
    row = tl.where(
        leaf == 0, PARENT_ROWS + parent, 2 * PARENT_ROWS + parent * CHILD_ROWS + leaf - 1
    )
    in_leaf = place - tl.load(row_start_ptr + row, mask=is_key, other=0)
    for start in tl.range(0, num_tiles, TILES_SEEN):
        # (TILES_SEEN)
        tiles = start + tl.arange(0, TILES_SEEN)
        slots = tl.load(exact_slot_ptr + tiles, mask=tiles < num_tiles, other=-1)
        tile = -1
        for _ in tl.range(0, tl.sum((slots >= 0).to(tl.int32), axis=0)):
            tile = tl.min(tl.where((slots >= 0) & (tiles > tile), tiles, NEVER), axis=0)

            # (KEYS)
            column = parent + tl.zeros_like(leaf)
            rank = in_cell
            if NUM_REFINED > 0:
                slot = tl.load(exact_slot_ptr + tile)
                is_refined = slot < NUM_REFINED
                child_column = PARENT_ROWS + slot * CHILD_ROWS + leaf - 1
                column = tl.where(is_refined & (leaf > 0), child_column, column)
                rank = tl.where(is_refined, in_leaf, in_cell)
            tile_start = tile.to(tl.int64)
            first = tl.load(first_ptr + tile_start * VISIBLE + column, mask=is_key, other=NEVER)
            is_exact = is_key & (first != NEVER)

            # (KEYS, DP)
            starts = (tile_start * exact_keys + first + rank) * ROW
            pointers = exact_column_ptr + starts[:, None] + numbers[None, :]
            mask = is_exact[:, None] & (numbers < HEAD_DIM)[None, :]
            of_values += tl.load(pointers, mask=mask, other=0.0)
            of_keys += tl.load(pointers + HEAD_DIM, mask=mask, other=0.0)
    return of_values, of_keys


@triton.jit(do_not_specialize=["num_keys", "chunk_keys", "num_chunks", "num_tiles", "exact_keys"])
def key_gradients_kernel(
    order_ptr,
    start_ptr,
    leaf_ptr,
    leaf_gradients_ptr,
    grad_key_ptr,
    grad_value_ptr,
    place_ptr,
    row_start_ptr,
    first_ptr,
    exact_slot_ptr,
    exact_column_ptr,
    num_keys,
    chunk_keys,
    num_chunks,
    num_tiles,
    exact_keys,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    NUM_PARENTS: tl.constexpr,
    NUM_REFINED: tl.constexpr,
    PARENT_ROWS: tl.constexpr,
    CHILD_ROWS: tl.constexpr,
    NUM_CHUNKS: tl.constexpr,
    LOG2_CHUNKS: tl.constexpr,
    PIECE: tl.constexpr,
    KEYS: tl.constexpr,
    VISIBLE: tl.constexpr,
    SCALE: tl.constexpr,
):
    """Give the keys of one piece of one parent the gradients of their leaves.

    order, start: as the sort writes them.
    leaf: as the aggregation writes it.
    grad_key, grad_value: (B, S, H, D).
    place, row_start: as the leaf order writes them; None without exact keys, as the next three.
    first, exact_column: as in `column_gradients`.
    exact_slot: as the leaf gradients write it.
    """
    head = tl.program_id(0)
    batch = tl.program_id(1)
    piece = tl.program_id(2)
    batch_head = batch.to(tl.int64) * HEADS + head

    ROW: tl.constexpr = 2 * HEAD_DIM
    order_ptr += batch_head * num_keys
    start_ptr += batch_head * (PARENT_ROWS + 1) * NUM_CHUNKS
    leaf_ptr += batch_head * num_keys
    first_token = batch.to(tl.int64) * num_keys * (HEADS * HEAD_DIM) + head * HEAD_DIM
    grad_key_ptr += first_token
    grad_value_ptr += first_token
    EXACT: tl.constexpr = place_ptr is not None
    if EXACT:
        place_ptr += batch_head * num_keys
        row_start_ptr += batch_head * (2 * PARENT_ROWS + NUM_PARENTS * CHILD_ROWS)
        first_ptr += batch_head * num_tiles * VISIBLE
        exact_column_ptr += batch_head * num_tiles * exact_keys * ROW

    parent, part = parent_of(piece, start_ptr, num_chunks, PIECE, PARENT_ROWS, NUM_CHUNKS)
    if parent >= NUM_PARENTS:
        return
    first, total, earlier, shift = cell_of(parent, start_ptr, num_chunks, chunk_keys, NUM_CHUNKS)
    leaf_gradients_ptr += (batch_head * NUM_PARENTS + parent) * ((1 + CHILD_ROWS) * ROW)
    if EXACT:
        exact_slot_ptr += (batch_head * NUM_PARENTS + parent) * num_tiles

    numbers = tl.arange(0, PADDED_DIM)
    stop = tl.minimum((part + 1) * PIECE, total)
    for tile in tl.range(part * PIECE, stop, KEYS):
        # (KEYS)
        rank = tile + tl.arange(0, KEYS)
        is_key = rank < stop
        place = place_of(rank, earlier, shift, NUM_CHUNKS, LOG2_CHUNKS)
        keys = tl.load(order_ptr + place, mask=is_key, other=0)
        leaf = tl.zeros([KEYS], tl.int32)
        if NUM_REFINED > 0:
            leaf = tl.load(leaf_ptr + first + rank, mask=is_key, other=0)

        # (KEYS, DP)
        mask = is_key[:, None] & (numbers < HEAD_DIM)[None, :]
        pointers = leaf_gradients_ptr + leaf[:, None] * ROW + numbers[None, :]
        of_values = tl.load(pointers, mask=mask, other=0.0)
        of_keys = tl.load(pointers + HEAD_DIM, mask=mask, other=0.0)
        if EXACT:
            exact_values, exact_codes = _as_exact_keys(
                leaf,
                tl.load(place_ptr + first + rank, mask=is_key, other=0),
                is_key,
                parent,
                numbers,
                row_start_ptr,
                first_ptr,
                exact_slot_ptr,
                exact_column_ptr,
                num_tiles,
                exact_keys,
                HEAD_DIM,
                NUM_REFINED,
                PARENT_ROWS,
                CHILD_ROWS,
                VISIBLE,
            )
            of_values += exact_values
            of_keys += exact_codes * SCALE
        offsets = keys.to(tl.int64)[:, None] * (HEADS * HEAD_DIM) + numbers[None, :]
        tl.store(grad_value_ptr + offsets, of_values, mask=mask)
        tl.store(grad_key_ptr + offsets, of_keys, mask=mask)
