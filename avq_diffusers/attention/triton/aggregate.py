"""Aggregation kernel: the leaf of every key, and the mean and count of the keys of every codeword.

Shapes: as in `precompute`.
"""

import triton
import triton.language as tl

from avq_diffusers.attention.triton.pieces import cell_of, first_extra_piece, parent_of, place_of
from avq_diffusers.attention.triton.rows import (
    bias_of,
    first_maximum,
    load_rows,
    origin_of,
    parent_rows,
    product,
)


@triton.jit
def _store_aggregates(
    mean_keys,
    means_ptr,
    log_counts_ptr,
    spread_ptr,
    row_weight_ptr,
    sums,
    key_sums,
    squares,
    counts,
    parent,
    NUM_PARENTS: tl.constexpr,
    CHILD_ROWS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    MEAN_COLUMNS: tl.constexpr,
    PARENT_ROWS: tl.constexpr,
    LEAF_ROWS: tl.constexpr,
    MEANS: tl.constexpr,
    FACTOR: tl.constexpr,
    ALIGN: tl.constexpr,
):
    """Write the rows of one parent: for all its keys, for those that stay, for its children."""
    leaves = tl.arange(0, LEAF_ROWS)
    count = tl.sum(counts, axis=0)
    # (L) The number that a leaf's values are divided by: for the keys that stay, all of the parent.
    over = tl.maximum(tl.where(leaves == 0, count, counts), 1)
    share = tl.where(leaves == 0, counts * (1.0 / over), 1.0)
    if MEANS:
        over = tl.maximum(counts, 1)
        share = tl.full([LEAF_ROWS], 1.0, tl.float32)
    rows = tl.where(
        leaves == 0, PARENT_ROWS + parent, 2 * PARENT_ROWS + parent * CHILD_ROWS + leaves - 1
    )
    is_row = leaves <= tl.where(parent < NUM_PARENTS, CHILD_ROWS, 0)
    _store_means(
        means_ptr + rows * MEAN_COLUMNS,
        sums * (1.0 / over)[:, None],
        share,
        is_row,
        HEAD_DIM,
        PADDED_DIM,
        MEAN_COLUMNS,
    )
    if MEANS:
        spread = _store_mean_keys(
            mean_keys, rows, key_sums, squares, counts, is_row, FACTOR, HEAD_DIM, PADDED_DIM, ALIGN
        )
        if row_weight_ptr is not None:
            weight = spread * spread / tl.maximum(counts, 1)
            tl.store(row_weight_ptr + rows, weight, mask=is_row)
        tl.store(log_counts_ptr + rows, _log2(counts), mask=is_row)
    else:
        is_child = (leaves > 0) & is_row
        tl.store(log_counts_ptr + rows - PARENT_ROWS, _log2(counts), mask=is_child)

    # (1, DP)
    sums = tl.sum(sums, axis=0)[None, :] * (1.0 / tl.maximum(count, 1))
    ones = tl.full([1], 1.0, tl.float32)
    row = tl.arange(0, 1) + parent
    _store_means(
        means_ptr + row * MEAN_COLUMNS, sums, ones, ones > 0, HEAD_DIM, PADDED_DIM, MEAN_COLUMNS
    )
    if MEANS:
        key_sums = tl.sum(key_sums, axis=0)[None, :]
        counts = count + tl.zeros_like(row)
        squares = tl.sum(squares, axis=0) + tl.zeros_like(ones)
        spread = _store_mean_keys(
            mean_keys, row, key_sums, squares, counts, ones > 0, FACTOR, HEAD_DIM, PADDED_DIM, ALIGN
        )
        tl.store(spread_ptr + row, spread)
        if row_weight_ptr is not None:
            tl.store(row_weight_ptr + row, spread * spread / tl.maximum(counts, 1))
    tl.store(log_counts_ptr + parent, _log2(count))


@triton.jit
def _store_means(
    row_ptr,
    means,
    share,
    is_row,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    MEAN_COLUMNS: tl.constexpr,
):
    """Write rows of DV columns: D of a mean, and the share of keys in the others."""
    columns = tl.arange(0, PADDED_DIM)
    rows = tl.where((columns < HEAD_DIM)[None, :], means, share[:, None])
    dtype = row_ptr.dtype.element_ty
    mask = is_row[:, None] & (columns < MEAN_COLUMNS)[None, :]
    tl.store(row_ptr[:, None] + columns[None, :], rows.to(dtype), mask=mask)
    if MEAN_COLUMNS > PADDED_DIM:
        columns = PADDED_DIM + tl.arange(0, MEAN_COLUMNS - PADDED_DIM)
        rows = tl.broadcast_to(share[:, None], [share.shape[0], MEAN_COLUMNS - PADDED_DIM])
        tl.store(row_ptr[:, None] + columns[None, :], rows.to(dtype), mask=is_row[:, None])


@triton.jit
def _store_mean_keys(
    mean_keys,
    rows,
    key_sums,
    squares,
    counts,
    is_row,
    FACTOR: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    ALIGN: tl.constexpr,
):
    """Write mean keys around the centre, times the factor of the logits; 0 without keys.

    Returns the spreads of the rows, the mean squared distances of their keys from the mean.
    """
    codes_ptr, centre, key_ptr, num_keys, stride = mean_keys
    inverse = 1.0 / tl.maximum(counts, 1)
    means = key_sums * inverse[:, None]
    codes = tl.where((counts > 0)[:, None], (means - centre[None, :]) * FACTOR, 0.0)
    pointers = codes_ptr + rows[:, None] * PADDED_DIM + tl.arange(0, PADDED_DIM)[None, :]
    tl.store(pointers, codes.to(codes_ptr.dtype.element_ty), mask=is_row[:, None])
    origin = origin_of(key_ptr, num_keys, stride, HEAD_DIM, PADDED_DIM, ALIGN)
    offsets = means - origin[None, :]
    return tl.maximum(squares * inverse - tl.sum(offsets * offsets, axis=1), 0.0)


@triton.jit
def _sum_squares(
    square_ptr,
    order_ptr,
    start,
    stop,
    earlier,
    shift,
    NUM_CHUNKS: tl.constexpr,
    LOG2_CHUNKS: tl.constexpr,
):
    """Sum of the squared distances of the keys of these ranks in a cell."""
    BLOCK: tl.constexpr = 256
    squares = tl.zeros([BLOCK], tl.float32)
    for first in tl.range(start, stop, BLOCK):
        rank = first + tl.arange(0, BLOCK)
        place = place_of(rank, earlier, shift, NUM_CHUNKS, LOG2_CHUNKS)
        keys = tl.load(order_ptr + place, mask=rank < stop, other=0)
        squares += tl.load(square_ptr + keys, mask=rank < stop, other=0.0)
    return tl.sum(squares, axis=0)


@triton.jit
def _log2(count):
    """log2 of a count, -inf for 0."""
    return tl.where(count > 0, tl.log2(tl.maximum(count, 1).to(tl.float32)), float("-inf"))


@triton.jit(
    do_not_specialize=[
        "key_stride_batch",
        "key_stride_head",
        "key_stride_token",
        "value_stride_batch",
        "value_stride_head",
        "value_stride_token",
        "num_keys",
        "chunk_keys",
        "num_chunks",
        "num_pieces",
    ]
)
def aggregate_kernel(
    key_ptr,
    value_ptr,
    key_order_ptr,
    parents_ptr,
    stored_codes_ptr,
    bias_ptr,
    centre_ptr,
    square_ptr,
    order_ptr,
    start_ptr,
    ticket_ptr,
    piece_sums_ptr,
    piece_counts_ptr,
    piece_squares_ptr,
    leaf_ptr,
    codes_ptr,
    means_ptr,
    log_counts_ptr,
    spread_ptr,
    row_weight_ptr,
    key_stride_batch,
    key_stride_head,
    key_stride_token,
    value_stride_batch,
    value_stride_head,
    value_stride_token,
    num_keys,
    chunk_keys,
    num_chunks,
    num_pieces,
    FACTOR: tl.constexpr,
    CODE_ROWS: tl.constexpr,
    NUM_PARENTS: tl.constexpr,
    NUM_CHILDREN: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    MEAN_COLUMNS: tl.constexpr,
    PARENT_ROWS: tl.constexpr,
    CHILD_ROWS: tl.constexpr,
    LEAF_ROWS: tl.constexpr,
    NUM_CHUNKS: tl.constexpr,
    LOG2_CHUNKS: tl.constexpr,
    PIECE: tl.constexpr,
    KEYS: tl.constexpr,
    ALIGN: tl.constexpr,
):
    """Choose a leaf for the keys of one piece of one parent, count them and add up their values.

    piece_sums: (B, H, num_pieces, L, DP) float32, only for parents of several pieces.
    piece_counts: (B, H, num_pieces, L) int32.
    square: (B, H, S) float32, as the sort writes it, or None without MEANS, as the next two.
    piece_squares: (B, H, num_pieces, L) float32; all of a cell is in leaf 0 without exact keys.
    spread: (B, H, MP) float32, mean squared distance of the keys of a parent from their mean.
    leaf: (B, H, S) int32, the leaf in its cell of every key, in the order of cells; or None.
    row_weight: (B, H, 2 MP + M0 CP) float32, what a row weighs in the choice of exact keys; None
        without exact keys.
    """
    head = tl.program_id(0)
    batch = tl.program_id(1)
    piece = tl.program_id(2)
    batch_head = batch.to(tl.int64) * tl.num_programs(0) + head

    key_ptr += (batch.to(tl.int64) * key_stride_batch + head.to(tl.int64) * key_stride_head) * ALIGN
    value_ptr += (
        batch.to(tl.int64) * value_stride_batch + head.to(tl.int64) * value_stride_head
    ) * ALIGN
    MEANS: tl.constexpr = codes_ptr is not None
    EXACT: tl.constexpr = row_weight_ptr is not None
    dtype = key_ptr.dtype.element_ty
    centre_head = batch_head
    if stored_codes_ptr is not None:
        stored_codes_ptr += head * CODE_ROWS * PADDED_DIM
        bias_ptr += head * CODE_ROWS
        dtype = stored_codes_ptr.dtype.element_ty
        centre_head = head.to(tl.int64)
    if parents_ptr is not None:
        parents_ptr += batch_head * NUM_PARENTS * HEAD_DIM
    mean_keys = None
    if MEANS:
        centre = tl.load(centre_ptr + centre_head * PADDED_DIM + tl.arange(0, PADDED_DIM))
        codes_ptr += batch_head * (PARENT_ROWS + CODE_ROWS) * PADDED_DIM
        mean_keys = (codes_ptr, centre, key_ptr, num_keys, key_stride_token)
    order_ptr += batch_head * num_keys
    start_ptr += batch_head * (PARENT_ROWS + 1) * NUM_CHUNKS
    ticket_ptr += batch_head * PARENT_ROWS
    PIECE_ROWS: tl.constexpr = 2 * LEAF_ROWS if MEANS else LEAF_ROWS
    piece_sums_ptr += batch_head * num_pieces * PIECE_ROWS * PADDED_DIM
    piece_counts_ptr += batch_head * num_pieces * LEAF_ROWS
    if MEANS:
        square_ptr += batch_head * num_keys
        piece_squares_ptr += batch_head * num_pieces * LEAF_ROWS
        spread_ptr += batch_head * PARENT_ROWS
    if leaf_ptr is not None:
        leaf_ptr += batch_head * num_keys
    if EXACT:
        row_weight_ptr += batch_head * (PARENT_ROWS + CODE_ROWS)
    means_ptr += batch_head * (PARENT_ROWS + CODE_ROWS) * MEAN_COLUMNS
    log_counts_ptr += batch_head * (CODE_ROWS + PARENT_ROWS if MEANS else CODE_ROWS)

    parent, part = parent_of(piece, start_ptr, num_chunks, PIECE, PARENT_ROWS, NUM_CHUNKS)
    if parent >= PARENT_ROWS:
        return
    first, total, earlier, shift = cell_of(parent, start_ptr, num_chunks, chunk_keys, NUM_CHUNKS)

    leaves = tl.arange(0, LEAF_ROWS)
    if NUM_CHILDREN > 0 and stored_codes_ptr is None:
        # (L, DP) The parent, then keys of the cell that are evenly spaced in the order of keys.
        rank = tl.maximum(leaves - 1, 0).to(tl.int64) * total // NUM_CHILDREN
        rank = tl.minimum(rank.to(tl.int32), tl.maximum(total - 1, 0))
        is_code = (leaves <= NUM_CHILDREN) & (total > 0)
        place = place_of(rank, earlier, shift, NUM_CHUNKS, LOG2_CHUNKS)
        child_keys = tl.load(order_ptr + place, mask=is_code, other=0)
        codes = load_rows(
            key_ptr,
            child_keys,
            key_stride_token,
            is_code & (leaves > 0),
            HEAD_DIM,
            PADDED_DIM,
            ALIGN,
        )
        parent_code = parent_rows(
            key_ptr,
            key_order_ptr,
            parents_ptr,
            parent + tl.zeros_like(leaves),
            key_stride_token,
            num_keys,
            is_code & (leaves == 0),
            NUM_PARENTS,
            HEAD_DIM,
            PADDED_DIM,
            ALIGN,
        )
        codes = tl.where((leaves == 0)[:, None], parent_code, codes)
        bias = bias_of(codes, is_code)
    elif NUM_CHILDREN > 0:
        # (L, DP)
        code_rows = tl.where(leaves == 0, parent, PARENT_ROWS + parent * CHILD_ROWS + leaves - 1)
        is_code = leaves <= tl.where(parent < NUM_PARENTS, NUM_CHILDREN, 0)
        codes = tl.load(
            stored_codes_ptr + code_rows[:, None] * PADDED_DIM + tl.arange(0, PADDED_DIM)[None, :],
            mask=is_code[:, None],
            other=0.0,
        )
        bias = tl.load(bias_ptr + code_rows, mask=is_code, other=float("-inf"))

    stop = tl.minimum((part + 1) * PIECE, total)
    sums = tl.zeros([LEAF_ROWS, PADDED_DIM], tl.float32)
    key_sums = sums
    chosen_counts = tl.zeros([LEAF_ROWS, KEYS], tl.int32)
    leaf_squares = tl.zeros([LEAF_ROWS, KEYS], tl.float32)
    for tile in tl.range(part * PIECE, stop, KEYS):
        # (KEYS)
        position = tile + tl.arange(0, KEYS)
        is_key = position < stop
        key_place = place_of(position, earlier, shift, NUM_CHUNKS, LOG2_CHUNKS)
        keys = tl.load(order_ptr + key_place, mask=is_key, other=0)

        # (KEYS, DP)
        value = load_rows(value_ptr, keys, value_stride_token, is_key, HEAD_DIM, PADDED_DIM, ALIGN)
        value = value.to(dtype)

        # (L, KEYS)
        if NUM_CHILDREN > 0 or MEANS:
            key = load_rows(key_ptr, keys, key_stride_token, is_key, HEAD_DIM, PADDED_DIM, ALIGN)
            key = key.to(dtype)
        if NUM_CHILDREN > 0:
            _, leaf = first_maximum(
                product(key, codes.T) + bias[None, :], leaves[None, :], LEAF_ROWS - 1
            )
            is_chosen = (leaves[:, None] == leaf[None, :]) & is_key[None, :]
        else:
            is_chosen = (leaves[:, None] == 0) & is_key[None, :]
        chosen_counts += is_chosen.to(tl.int32)
        chosen = tl.where(is_chosen, 1.0, 0.0).to(dtype)
        sums += product(chosen, value)
        if MEANS:
            key_sums += product(chosen, key)
            if EXACT:
                square = tl.load(square_ptr + keys, mask=is_key, other=0.0)
                leaf_squares += tl.where(is_chosen, square[None, :], 0.0)
            if leaf_ptr is not None:
                leaf = tl.sum(tl.where(is_chosen, leaves[:, None], 0), axis=0)
                tl.store(leaf_ptr + first + position, leaf, mask=is_key)
    counts = tl.sum(chosen_counts, axis=1)
    squares = None
    if EXACT:
        squares = tl.sum(leaf_squares, axis=1)
        tl.store(piece_counts_ptr + piece * LEAF_ROWS + leaves, counts)
    elif MEANS:
        # A loop of its own: the one above has no register to spare.
        cell_squares = _sum_squares(
            square_ptr, order_ptr, part * PIECE, stop, earlier, shift, NUM_CHUNKS, LOG2_CHUNKS
        )
        squares = tl.where(leaves == 0, cell_squares, 0.0)

    if total <= PIECE:
        _store_aggregates(
            mean_keys,
            means_ptr,
            log_counts_ptr,
            spread_ptr,
            row_weight_ptr,
            sums,
            key_sums,
            squares,
            counts,
            parent,
            NUM_PARENTS,
            CHILD_ROWS,
            HEAD_DIM,
            PADDED_DIM,
            MEAN_COLUMNS,
            PARENT_ROWS,
            LEAF_ROWS,
            MEANS,
            FACTOR,
            ALIGN,
        )
    else:
        offsets = leaves[:, None] * PADDED_DIM + tl.arange(0, PADDED_DIM)[None, :]
        piece_keys_ptr = piece_sums_ptr + LEAF_ROWS * PADDED_DIM
        tl.store(piece_sums_ptr + piece * (PIECE_ROWS * PADDED_DIM) + offsets, sums)
        if MEANS:
            tl.store(piece_keys_ptr + piece * (PIECE_ROWS * PADDED_DIM) + offsets, key_sums)
        tl.store(piece_counts_ptr + piece * LEAF_ROWS + leaves, counts)
        if MEANS:
            tl.store(piece_squares_ptr + piece * LEAF_ROWS + leaves, squares)
        # All threads have stored before one of them says so.
        tl.debug_barrier()
        num_parts = tl.cdiv(total, PIECE)
        if tl.atomic_add(ticket_ptr + parent, 1) == num_parts - 1:
            first_extra = first_extra_piece(
                parent, start_ptr, num_chunks, PIECE, PARENT_ROWS, NUM_CHUNKS
            )
            sums = tl.load(piece_sums_ptr + parent * (PIECE_ROWS * PADDED_DIM) + offsets)
            if MEANS:
                key_sums = tl.load(piece_keys_ptr + parent * (PIECE_ROWS * PADDED_DIM) + offsets)
            counts = tl.load(piece_counts_ptr + parent * LEAF_ROWS + leaves)
            if MEANS:
                squares = tl.load(piece_squares_ptr + parent * LEAF_ROWS + leaves)
            for other in tl.range(first_extra, first_extra + num_parts - 1):
                other_rows = other * (PIECE_ROWS * PADDED_DIM) + offsets
                sums += tl.load(piece_sums_ptr + other_rows)
                if MEANS:
                    key_sums += tl.load(piece_keys_ptr + other_rows)
                counts += tl.load(piece_counts_ptr + other * LEAF_ROWS + leaves)
                if MEANS:
                    squares += tl.load(piece_squares_ptr + other * LEAF_ROWS + leaves)
            _store_aggregates(
                mean_keys,
                means_ptr,
                log_counts_ptr,
                spread_ptr,
                row_weight_ptr,
                sums,
                key_sums,
                squares,
                counts,
                parent,
                NUM_PARENTS,
                CHILD_ROWS,
                HEAD_DIM,
                PADDED_DIM,
                MEAN_COLUMNS,
                PARENT_ROWS,
                LEAF_ROWS,
                MEANS,
                FACTOR,
                ALIGN,
            )
