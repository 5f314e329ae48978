"""Kernel 1, VQ precompute: where every key goes, and the mean value and count of every codeword.

A key goes to its nearest parent, then to the nearest of that parent's leaves: the parent itself
(the key stays) or a child that is strictly closer (paper, Algorithm 1). Two launches:

    sort        a chunk of keys finds its parents and is sorted by them, stably and on its own.
    aggregate   the keys of one parent, gathered from all chunks, choose among the parent's leaves
                by a small matrix product; a product with the one-hot choice adds up their values.

A parent with many keys is cut into pieces of fixed length. The program that finishes last adds the
pieces in their order, so every run gives the same bits.

Shapes: B batch, H heads, S keys, D head dim, M0 parents, C children; DP, MP, CP as in `codewords`;
L leaf slots (0 stays, c + 1 is child c), T chunks.
"""

from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl
from torch import Tensor

from avq_diffusers.kernels.codewords import padded_sizes


@dataclass(frozen=True)
class Config:
    """How the work is cut; affects the result only by the order of additions.

    num_chunks: chunks that a head's keys are sorted in, a power of two.
    sort_keys, sort_parents: keys and parents of one product.
    sort_group: keys that are ranked by comparing each with each.
    sort_warps, sort_stages: of the sort.
    piece_keys: keys of one parent that one program aggregates.
    leaf_keys: keys of one product.
    leaf_warps, leaf_stages: of the aggregation.
    """

    num_chunks: int
    sort_keys: int
    sort_parents: int
    sort_group: int
    sort_warps: int
    sort_stages: int
    piece_keys: int
    leaf_keys: int
    leaf_warps: int
    leaf_stages: int


def configure(num_keys: int, num_children: int, dtype: torch.dtype) -> Config:
    """The configuration for a problem size; smaller tiles where registers or shared memory end."""
    piece_keys = min(2048, max(256, triton.next_power_of_2(num_keys) // 16))
    config = Config(
        num_chunks=32,
        sort_keys=64,
        sort_parents=64,
        sort_group=32,
        sort_warps=4,
        sort_stages=2,
        piece_keys=piece_keys,
        leaf_keys=32,
        leaf_warps=1,
        leaf_stages=2,
    )
    if num_children > 16:
        config = replace(config, leaf_keys=64, leaf_warps=4)
    if dtype == torch.float32:
        config = replace(
            config, sort_keys=32, sort_stages=1, leaf_keys=32, leaf_warps=4, leaf_stages=1
        )
    return config


@triton.jit
def _product(left, right):
    """Matrix product, of float32 factors to about float32 precision on tensor cores."""
    return tl.dot(left, right, input_precision="tf32x3")


@triton.jit
def _first_maximum(scores, columns, LAST: tl.constexpr):
    """Largest score of each row and its lowest column; LAST, the last column, if the row is NaN."""
    best = tl.max(scores, axis=1)
    column = tl.where(scores == best[:, None], columns[None, :], LAST)
    return best, tl.min(column, axis=1)


@triton.jit
def _load_rows(
    base_ptr, rows, stride, is_row, D: tl.constexpr, DP: tl.constexpr, ALIGN: tl.constexpr
):
    """Rows of D numbers, padded with zeros to DP."""
    columns = tl.arange(0, DP)
    offsets = (rows.to(tl.int64) * stride * ALIGN)[:, None] + columns[None, :]
    return tl.load(base_ptr + offsets, mask=is_row[:, None] & (columns < D)[None, :], other=0.0)


@triton.jit
def _load_codes(codes_ptr, bias_ptr, rows, DP: tl.constexpr):
    codes = tl.load(codes_ptr + rows[:, None] * DP + tl.arange(0, DP)[None, :])
    return codes, tl.load(bias_ptr + rows)


@triton.jit(
    do_not_specialize=[
        "key_stride_b",
        "key_stride_h",
        "key_stride_s",
        "num_keys",
        "chunk_keys",
    ]
)
def sort_kernel(
    key_ptr,
    codes_ptr,
    bias_ptr,
    rank_ptr,
    order_ptr,
    start_ptr,
    ticket_ptr,
    key_stride_b,
    key_stride_h,
    key_stride_s,
    num_keys,
    chunk_keys,
    NUM_CODES: tl.constexpr,
    D: tl.constexpr,
    DP: tl.constexpr,
    MP: tl.constexpr,
    NUM_CHUNKS: tl.constexpr,
    KEYS: tl.constexpr,
    PARENTS: tl.constexpr,
    GROUP: tl.constexpr,
    ALIGN: tl.constexpr,
):
    """Sort one chunk of one head's keys by their nearest parent.

    rank, order: (B, H, S) int32 workspace, and key indices sorted within each chunk.
    start: (B, H, MP + 1, NUM_CHUNKS) int32, where a parent's keys start in a chunk.
    ticket: (B, H, MP) int32, set to 0 for the aggregation.
    """
    head = tl.program_id(0)
    batch = tl.program_id(1)
    chunk = tl.program_id(2)
    batch_head = batch.to(tl.int64) * tl.num_programs(0) + head

    key_ptr += (batch.to(tl.int64) * key_stride_b + head.to(tl.int64) * key_stride_h) * ALIGN
    codes_ptr += head * NUM_CODES * DP
    bias_ptr += head * NUM_CODES
    rank_ptr += batch_head * num_keys
    order_ptr += batch_head * num_keys
    start_ptr += batch_head * (MP + 1) * NUM_CHUNKS + chunk
    first = chunk * chunk_keys
    stop = tl.minimum(first + chunk_keys, num_keys)

    GROUPS: tl.constexpr = KEYS // GROUP
    all_parents = tl.arange(0, MP)
    parents = tl.arange(0, PARENTS)
    in_group = tl.arange(0, GROUP)
    is_before = in_group[None, :, None] < in_group[None, None, :]
    group = tl.arange(0, KEYS) // GROUP
    if MP == PARENTS:
        codes, bias = _load_codes(codes_ptr, bias_ptr, parents, DP)

    counts = tl.zeros([MP], tl.int32)
    for tile in tl.range(first, stop, KEYS):
        # [KEYS]
        keys = tile + tl.arange(0, KEYS)
        is_key = keys < stop
        # [KEYS, DP]
        key = _load_rows(key_ptr, keys, key_stride_s, is_key, D, DP, ALIGN).to(
            codes_ptr.dtype.element_ty
        )

        # [KEYS]
        if MP == PARENTS:
            best, parent = _first_maximum(_product(key, codes.T) + bias[None, :], parents, MP - 1)
        else:
            best = tl.full([KEYS], float("-inf"), tl.float32)
            parent = tl.full([KEYS], MP - 1, tl.int32)
            for first_parent in tl.range(0, MP, PARENTS):
                codes, bias = _load_codes(codes_ptr, bias_ptr, first_parent + parents, DP)
                tile_best, tile_parent = _first_maximum(
                    _product(key, codes.T) + bias[None, :], parents, PARENTS - 1
                )
                parent = tl.where(tile_best > best, first_parent + tile_parent, parent)
                best = tl.maximum(best, tile_best)

        # Rank of a key among those of its parent: counts of earlier tiles, of earlier groups, and
        # of earlier keys in the group.
        grouped = parent.reshape(GROUPS, GROUP)
        # [GROUPS, GROUP, GROUP]
        is_same = (grouped[:, :, None] == grouped[:, None, :]) & is_before
        before = tl.sum(is_same.to(tl.int32), axis=1).reshape(KEYS)
        # [GROUPS, MP]
        bins = group * MP + parent
        group_counts = tl.histogram(bins, GROUPS * MP, mask=is_key).reshape(GROUPS, MP)
        earlier = tl.cumsum(group_counts, axis=0) - group_counts + counts[None, :]
        rank = tl.gather(earlier.reshape(GROUPS * MP), bins, axis=0) + before
        counts += tl.sum(group_counts, axis=0)
        tl.store(rank_ptr + keys, rank * MP + parent, mask=is_key)

    start = tl.cumsum(counts, axis=0) - counts
    tl.store(start_ptr + all_parents * NUM_CHUNKS, start)
    tl.store(start_ptr + MP * NUM_CHUNKS, stop - first)
    if chunk == 0:
        tl.store(ticket_ptr + batch_head * MP + all_parents, tl.zeros([MP], tl.int32))

    # The next loop reads ranks that other threads of this program wrote.
    tl.debug_barrier()
    for tile in tl.range(first, stop, KEYS):
        keys = tile + tl.arange(0, KEYS)
        is_key = keys < stop
        rank = tl.load(rank_ptr + keys, mask=is_key, other=0)
        position = first + tl.gather(start, rank % MP, axis=0) + rank // MP
        tl.store(order_ptr + position, keys, mask=is_key)


@triton.jit
def _extra_pieces(
    start_ptr, num_chunks, PIECE: tl.constexpr, MP: tl.constexpr, NUM_CHUNKS: tl.constexpr
):
    """[MP] pieces of each parent after its first."""
    CHUNKS: tl.constexpr = 512 // MP
    num_keys = tl.zeros([MP], tl.int32)
    for first_chunk in tl.range(0, num_chunks, CHUNKS):
        chunks = first_chunk + tl.arange(0, CHUNKS)
        offsets = tl.arange(0, MP)[:, None] * NUM_CHUNKS + chunks[None, :]
        is_chunk = (chunks < num_chunks)[None, :]
        starts = tl.load(start_ptr + offsets, mask=is_chunk, other=0)
        stops = tl.load(start_ptr + offsets + NUM_CHUNKS, mask=is_chunk, other=0)
        num_keys += tl.sum(stops - starts, axis=1)
    return tl.maximum(num_keys - 1, 0) // PIECE


@triton.jit
def _store_aggregates(
    means_ptr,
    logs_ptr,
    sums,
    counts,
    parent,
    M0: tl.constexpr,
    CP: tl.constexpr,
    DP: tl.constexpr,
    MP: tl.constexpr,
    L: tl.constexpr,
):
    """Write the rows of one parent: all its keys, those that stay, and those of its children."""
    slots = tl.arange(0, L)
    columns = tl.arange(0, DP)
    # [L]
    rows = tl.where(slots == 0, MP + parent, 2 * MP + parent * CP + slots - 1)
    is_row = (slots == 0) | ((slots <= CP) & (parent < M0))
    means = sums * (1.0 / tl.maximum(counts, 1))[:, None]
    tl.store(
        means_ptr + rows[:, None] * DP + columns[None, :],
        means.to(means_ptr.dtype.element_ty),
        mask=is_row[:, None],
    )
    tl.store(logs_ptr + rows, _log2(counts), mask=is_row)

    count = tl.sum(counts, axis=0)
    mean = tl.sum(sums, axis=0) * (1.0 / tl.maximum(count, 1))
    tl.store(means_ptr + parent * DP + columns, mean.to(means_ptr.dtype.element_ty))
    tl.store(logs_ptr + parent, _log2(count))


@triton.jit
def _log2(count):
    """log2 of a count, -inf for 0."""
    return tl.where(count > 0, tl.log2(tl.maximum(count, 1).to(tl.float32)), float("-inf"))


@triton.jit(
    do_not_specialize=[
        "key_stride_b",
        "key_stride_h",
        "key_stride_s",
        "value_stride_b",
        "value_stride_h",
        "value_stride_s",
        "num_keys",
        "chunk_keys",
        "num_chunks",
        "num_pieces",
    ]
)
def aggregate_kernel(
    key_ptr,
    value_ptr,
    codes_ptr,
    bias_ptr,
    order_ptr,
    start_ptr,
    ticket_ptr,
    piece_sums_ptr,
    piece_counts_ptr,
    means_ptr,
    logs_ptr,
    key_stride_b,
    key_stride_h,
    key_stride_s,
    value_stride_b,
    value_stride_h,
    value_stride_s,
    num_keys,
    chunk_keys,
    num_chunks,
    num_pieces,
    NUM_CODES: tl.constexpr,
    NUM_ROWS: tl.constexpr,
    M0: tl.constexpr,
    C: tl.constexpr,
    D: tl.constexpr,
    DP: tl.constexpr,
    MP: tl.constexpr,
    CP: tl.constexpr,
    L: tl.constexpr,
    NUM_CHUNKS: tl.constexpr,
    LOG2_CHUNKS: tl.constexpr,
    PIECE: tl.constexpr,
    KEYS: tl.constexpr,
    ALIGN: tl.constexpr,
):
    """Choose a leaf for the keys of one piece of one parent, count them and add up their values.

    Pieces 0..MP-1 are the first ones of every parent, empty or not; the others follow in the order
    of the parents.

    piece_sums: (B, H, num_pieces, L, DP) float32, used by parents of several pieces only.
    piece_counts: (B, H, num_pieces, L) int32.
    """
    head = tl.program_id(0)
    batch = tl.program_id(1)
    piece = tl.program_id(2)
    batch_head = batch.to(tl.int64) * tl.num_programs(0) + head

    key_ptr += (batch.to(tl.int64) * key_stride_b + head.to(tl.int64) * key_stride_h) * ALIGN
    value_ptr += (batch.to(tl.int64) * value_stride_b + head.to(tl.int64) * value_stride_h) * ALIGN
    codes_ptr += head * NUM_CODES * DP
    bias_ptr += head * NUM_CODES
    order_ptr += batch_head * num_keys
    start_ptr += batch_head * (MP + 1) * NUM_CHUNKS
    ticket_ptr += batch_head * MP
    piece_sums_ptr += batch_head * num_pieces * L * DP
    piece_counts_ptr += batch_head * num_pieces * L
    means_ptr += batch_head * NUM_ROWS * DP
    logs_ptr += batch_head * NUM_ROWS

    parent = piece
    part = 0
    if piece >= MP:
        extra = _extra_pieces(start_ptr, num_chunks, PIECE, MP, NUM_CHUNKS)
        stop_piece = MP + tl.cumsum(extra, axis=0)
        parent = tl.sum((stop_piece <= piece).to(tl.int32), axis=0)
        if parent >= MP:
            return
        part = 1 + piece - tl.sum(tl.where(tl.arange(0, MP) == parent, stop_piece - extra, 0))

    # [NUM_CHUNKS] where the parent's keys are in each chunk, and how many come in earlier chunks.
    chunks = tl.arange(0, NUM_CHUNKS)
    is_chunk = chunks < num_chunks
    starts = tl.load(start_ptr + parent * NUM_CHUNKS + chunks, mask=is_chunk, other=0)
    stops = tl.load(start_ptr + (parent + 1) * NUM_CHUNKS + chunks, mask=is_chunk, other=0)
    total = tl.sum(stops - starts, axis=0)
    earlier = tl.cumsum(stops - starts, axis=0) - (stops - starts)
    shift = chunks * chunk_keys + starts - earlier

    slots = tl.arange(0, L)
    if C > 0:
        # [L, DP]
        code_rows = tl.where(slots == 0, parent, MP + parent * CP + slots - 1)
        is_code = (slots == 0) | ((slots <= C) & (parent < M0))
        codes = tl.load(
            codes_ptr + code_rows[:, None] * DP + tl.arange(0, DP)[None, :],
            mask=is_code[:, None],
            other=0.0,
        )
        bias = tl.load(bias_ptr + code_rows, mask=is_code, other=float("-inf"))

    sums = tl.zeros([L, DP], tl.float32)
    chosen_counts = tl.zeros([L, KEYS], tl.int32)
    stop = tl.minimum((part + 1) * PIECE, total)
    for tile in tl.range(part * PIECE, stop, KEYS):
        # [KEYS] The chunk of a key is the last one that starts at or before its position.
        position = tile + tl.arange(0, KEYS)
        is_key = position < stop
        chunk = tl.zeros([KEYS], tl.int32)
        for bit in tl.static_range(LOG2_CHUNKS):
            later = chunk + (NUM_CHUNKS >> (bit + 1))
            chunk = tl.where(tl.gather(earlier, later, axis=0) <= position, later, chunk)
        position += tl.gather(shift, chunk, axis=0)
        keys = tl.load(order_ptr + position, mask=is_key, other=0)

        # [KEYS, DP]
        value = _load_rows(value_ptr, keys, value_stride_s, is_key, D, DP, ALIGN)
        value = value.to(codes_ptr.dtype.element_ty)

        # [L, KEYS]
        if C > 0:
            key = _load_rows(key_ptr, keys, key_stride_s, is_key, D, DP, ALIGN)
            key = key.to(codes_ptr.dtype.element_ty)
            _, slot = _first_maximum(_product(key, codes.T) + bias[None, :], slots, L - 1)
            is_chosen = (slots[:, None] == slot[None, :]) & is_key[None, :]
        else:
            is_chosen = (slots[:, None] == 0) & is_key[None, :]
        chosen_counts += is_chosen.to(tl.int32)
        sums += _product(tl.where(is_chosen, 1.0, 0.0).to(value.dtype), value)
    counts = tl.sum(chosen_counts, axis=1)

    if total <= PIECE:
        _store_aggregates(means_ptr, logs_ptr, sums, counts, parent, M0, CP, DP, MP, L)
    else:
        offsets = slots[:, None] * DP + tl.arange(0, DP)[None, :]
        tl.store(piece_sums_ptr + piece * (L * DP) + offsets, sums)
        tl.store(piece_counts_ptr + piece * L + slots, counts)
        # All threads have stored before one of them says so.
        tl.debug_barrier()
        num_parts = tl.cdiv(total, PIECE)
        if tl.atomic_add(ticket_ptr + parent, 1) == num_parts - 1:
            extra = _extra_pieces(start_ptr, num_chunks, PIECE, MP, NUM_CHUNKS)
            first_extra = MP + tl.sum(tl.where(tl.arange(0, MP) < parent, extra, 0), axis=0)
            sums = tl.load(piece_sums_ptr + parent * (L * DP) + offsets)
            counts = tl.load(piece_counts_ptr + parent * L + slots)
            for other in tl.range(first_extra, first_extra + num_parts - 1):
                sums += tl.load(piece_sums_ptr + other * (L * DP) + offsets)
                counts += tl.load(piece_counts_ptr + other * L + slots)
            _store_aggregates(means_ptr, logs_ptr, sums, counts, parent, M0, CP, DP, MP, L)


def precompute(
    key: Tensor,
    value: Tensor,
    codes: Tensor,
    bias: Tensor,
    *,
    num_parents: int,
    num_children: int,
    config: Config | None = None,
) -> tuple[Tensor, Tensor]:
    """Mean value and log2 count of the keys of every codeword.

    Args:
        key, value: (B, H, S, D) float16, bfloat16 or float32, last stride 1.
        codes, bias: codewords as `codewords.pack` gives them.
        config: how to cut the work; None takes the configuration for this size.

    Returns:
        means: (B, H, 2 MP + M0 CP, DP), dtype of `codes`. Row p averages all keys of parent p, row
            MP + p those that stay with it, row 2 MP + p CP + c those of its child c; 0 where there
            are none and in padding.
        logs: (B, H, 2 MP + M0 CP) float32, log2 of the number of those keys.
    """
    batch_size, num_heads, num_keys, head_dim = key.shape
    config = config or configure(num_keys, num_children, key.dtype)
    padded_dim, padded_parents, padded_children = padded_sizes(head_dim, num_parents, num_children)
    num_slots = max(16, 2 * padded_children)
    num_rows = codes.shape[1] + padded_parents
    num_chunks = config.num_chunks
    chunk_keys = triton.cdiv(num_keys, config.sort_keys * num_chunks) * config.sort_keys
    used_chunks = triton.cdiv(num_keys, chunk_keys)
    num_pieces = padded_parents + num_keys // config.piece_keys
    sort_parents = min(config.sort_parents, padded_parents)
    strides = (*key.stride()[:3], *value.stride()[:3])
    # A stride times a constant lets the compiler prove that rows of 16 bytes are aligned.
    align = 8 if all(stride % 8 == 0 for stride in strides) else 1
    strides = [stride // align for stride in strides]

    heads = (batch_size, num_heads)
    indices = key.new_empty((2, *heads, num_keys), dtype=torch.int32)
    rank, order = indices[0], indices[1]
    start = key.new_empty((*heads, padded_parents + 1, num_chunks), dtype=torch.int32)
    ticket = key.new_empty((*heads, padded_parents), dtype=torch.int32)
    piece_sums = key.new_empty((*heads, num_pieces, num_slots, padded_dim), dtype=torch.float32)
    piece_counts = key.new_empty((*heads, num_pieces, num_slots), dtype=torch.int32)
    means = codes.new_empty((*heads, num_rows, padded_dim))
    logs = bias.new_empty((*heads, num_rows))

    sort_kernel[(num_heads, batch_size, used_chunks)](
        key,
        codes,
        bias,
        rank,
        order,
        start,
        ticket,
        *strides[:3],
        num_keys,
        chunk_keys,
        NUM_CODES=codes.shape[1],
        D=head_dim,
        DP=padded_dim,
        MP=padded_parents,
        NUM_CHUNKS=num_chunks,
        KEYS=config.sort_keys,
        PARENTS=sort_parents,
        GROUP=config.sort_group,
        ALIGN=align,
        num_warps=config.sort_warps,
        num_stages=config.sort_stages,
    )
    aggregate_kernel[(num_heads, batch_size, num_pieces)](
        key,
        value,
        codes,
        bias,
        order,
        start,
        ticket,
        piece_sums,
        piece_counts,
        means,
        logs,
        *strides,
        num_keys,
        chunk_keys,
        used_chunks,
        num_pieces,
        NUM_CODES=codes.shape[1],
        NUM_ROWS=num_rows,
        M0=num_parents,
        C=num_children,
        D=head_dim,
        DP=padded_dim,
        MP=padded_parents,
        CP=padded_children,
        L=num_slots,
        NUM_CHUNKS=num_chunks,
        LOG2_CHUNKS=num_chunks.bit_length() - 1,
        PIECE=config.piece_keys,
        KEYS=config.leaf_keys,
        ALIGN=align,
        num_warps=config.leaf_warps,
        num_stages=config.leaf_stages,
    )
    return means, logs
