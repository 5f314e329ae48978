"""Lloyd updates: parents move to the means of their keys, before keys are sorted by them.

Two launches an update:

    cell sums   adds up the keys of every parent over a chunk of keys: a product with the one-hot
                choice of parents.
    cell means  adds the chunks in order, so every run gives the same bits, and divides.

Shapes: B batch, H heads, S keys, D head dim, M0 parents; DP, MP as in `codewords`; T chunks.
"""

from collections.abc import Sequence
from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from avq_diffusers.attention.triton.codewords import padded_sizes
from avq_diffusers.attention.triton.launch import (
    MOST_PLANS,
    STRIDES,
    Launch,
    Part,
    Plan,
    aligned,
    kernel_layout,
    pointer,
)
from avq_diffusers.attention.triton.nearest import best_of_loaded_tiles, best_of_tile, load_parents
from avq_diffusers.attention.triton.precompute import clamped_power_of_2
from avq_diffusers.attention.triton.rows import first_maximum, parent_rows, product


def updated_parents(
    key: Tensor, key_order: Tensor | None, *, num_parents: int, num_updates: int
) -> Tensor:
    """Parents at the means of their keys; a parent without keys stays. They are rounded each time.

    Args:
        key: (B, H, S, D) float16, bfloat16 or float32, on the current device.
        key_order: (S,) int32 or int64 permutation in which the first parents are evenly spaced;
            None is the order of keys.
        num_updates: at least 1.

    Returns:
        (B, H, M0, D) contiguous, dtype of `key`.
    """
    key, key_order = kernel_layout(key), aligned(key_order)
    parents = _updated(key, key_order, None, num_parents)
    for _ in range(num_updates - 1):
        parents = _updated(key, key_order, parents, num_parents)
    return parents


def _updated(
    key: Tensor, key_order: Tensor | None, parents: Tensor | None, num_parents: int
) -> Tensor:
    plan = _plan(
        key.shape,
        key.stride(),
        key.dtype,
        key.device,
        has_parents=parents is not None,
        order_dtype=None if key_order is None else key_order.dtype,
        num_parents=num_parents,
    )
    tensors = {"key": key, "key_order": key_order, "parents": parents}
    memory = plan.run({name: pointer(x) for name, x in tensors.items()}, key.device)
    return plan.part(memory, "updated")


@lru_cache(MOST_PLANS)
def _plan(
    shape: torch.Size,
    strides: tuple[int, ...],
    dtype: torch.dtype,
    device: torch.device,  # launches belong to one
    *,
    has_parents: bool,
    order_dtype: torch.dtype | None,
    num_parents: int,
) -> Plan:
    return Plan(
        *update_launches(
            shape,
            strides,
            dtype,
            has_parents=has_parents,
            order_dtype=order_dtype,
            num_parents=num_parents,
        )
    )


def update_launches(
    shape: Sequence[int],
    strides: Sequence[int],
    dtype: torch.dtype,
    *,
    has_parents: bool,
    order_dtype: torch.dtype | None,
    num_parents: int,
) -> tuple[dict[str, Part], list[Launch]]:
    """The memory of one update and its launches. `updated` in it is (B, H, M0, D), as the keys.

    Args:
        shape, strides: of the keys.
        has_parents: the parents are given, (B, H, M0, D), and not keys.
    """
    batch, num_heads, num_keys, head_dim = shape
    padded_dim, parent_rows, _ = padded_sizes(head_dim, num_parents, 0)
    # Some hundred programs, whose sums take less memory than their keys.
    chunk_keys = clamped_power_of_2(batch * num_heads * num_keys >> 9, 256, 2048)
    num_chunks = -(-num_keys // chunk_keys)
    is_wide = dtype == torch.float32
    tile_parents = min(64, parent_rows)
    mean_rows = 16
    align = 8 if all(stride % 8 == 0 for stride in strides[:3]) else 1

    heads = (batch, num_heads)
    parts = {
        "sums": Part((*heads, num_chunks, parent_rows, padded_dim), torch.float32),
        "counts": Part((*heads, num_chunks, parent_rows), torch.int32),
        "updated": Part((*heads, num_parents, head_dim), dtype),
    }
    dtypes = {name: part.dtype for name, part in parts.items()} | {"key": dtype}
    if has_parents:
        dtypes["parents"] = dtype
    if order_dtype is not None:
        dtypes["key_order"] = order_dtype
    numbers = {
        "num_keys": num_keys,
        "chunk_keys": chunk_keys,
        "num_chunks": num_chunks,
        **{f"key_stride_{axis}": strides[i] // align for i, axis in enumerate(STRIDES)},
    }
    constants = {
        "NUM_PARENTS": num_parents,
        "HEAD_DIM": head_dim,
        "PADDED_DIM": padded_dim,
        "PARENT_ROWS": parent_rows,
        "PARENTS": tile_parents,
        "KEYS": 32 if is_wide else 64,
        "ROWS": mean_rows,
        "ALIGN": align,
        "num_warps": 4,
        "num_stages": 1 if is_wide else 3,
    }
    tiles = (num_heads, batch, num_chunks * (parent_rows // tile_parents))
    rows = (num_heads, batch, parent_rows // mean_rows)
    return parts, [
        Launch(cell_sums_kernel, tiles, dtypes, numbers, constants),
        Launch(cell_means_kernel, rows, dtypes, numbers, constants),
    ]


@triton.jit(
    do_not_specialize=[
        "key_stride_batch",
        "key_stride_head",
        "key_stride_token",
        "num_keys",
        "chunk_keys",
        "num_chunks",
    ]
)
def cell_sums_kernel(
    key_ptr,
    key_order_ptr,
    parents_ptr,
    sums_ptr,
    counts_ptr,
    key_stride_batch,
    key_stride_head,
    key_stride_token,
    num_keys,
    chunk_keys,
    num_chunks,
    NUM_PARENTS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    PARENT_ROWS: tl.constexpr,
    PARENTS: tl.constexpr,
    KEYS: tl.constexpr,
    ALIGN: tl.constexpr,
):
    """Add up the keys of PARENTS parents in one chunk of one head's keys.

    sums: (B, H, T, MP, DP) float32.
    counts: (B, H, T, MP) int32, keys of each parent.
    """
    head = tl.program_id(0)
    batch = tl.program_id(1)
    chunk = tl.program_id(2) % num_chunks
    first_row = tl.program_id(2) // num_chunks * PARENTS
    batch_head = batch.to(tl.int64) * tl.num_programs(0) + head
    batch_chunk = batch_head * num_chunks + chunk
    first = chunk * chunk_keys
    length = tl.minimum(chunk_keys, num_keys - first)

    key_stride_token = key_stride_token.to(tl.int64) * ALIGN
    head_start = batch.to(tl.int64) * key_stride_batch + head.to(tl.int64) * key_stride_head
    head_ptr = key_ptr + head_start * ALIGN
    key_ptr = head_ptr + first * key_stride_token
    if parents_ptr is not None:
        parents_ptr += batch_head * NUM_PARENTS * HEAD_DIM

    if PARENT_ROWS == PARENTS:
        codes, bias = load_parents(
            head_ptr,
            key_order_ptr,
            parents_ptr,
            None,
            None,
            tl.arange(0, PARENTS),
            key_stride_token // ALIGN,
            num_keys,
            NUM_PARENTS,
            HEAD_DIM,
            PADDED_DIM,
            ALIGN,
        )
    parents = first_row + tl.arange(0, PARENTS)
    rows = tl.arange(0, KEYS)
    columns = tl.arange(0, PADDED_DIM)
    # (KEYS, DP) Offsets in a tile fit 32 bits; the tile's own is a scalar.
    offsets = rows[:, None] * key_stride_token.to(tl.int32) + columns[None, :]
    sums = tl.zeros([PARENTS, PADDED_DIM], tl.float32)
    counts = tl.zeros([PARENTS], tl.int32)
    for tile in tl.range(0, length, KEYS):
        # (KEYS, DP)
        is_key = tile + rows < length
        key = tl.load(
            key_ptr + tile * key_stride_token + offsets,
            mask=is_key[:, None] & (columns < HEAD_DIM)[None, :],
            other=0.0,
        )
        if PARENT_ROWS == PARENTS:
            best, parent = best_of_tile(key, codes, bias, 0, PARENT_ROWS - 1)
        else:
            best, parent = best_of_loaded_tiles(
                key,
                head_ptr,
                key_order_ptr,
                parents_ptr,
                None,
                None,
                key_stride_token // ALIGN,
                num_keys,
                NUM_PARENTS,
                HEAD_DIM,
                PADDED_DIM,
                PARENT_ROWS,
                PARENTS,
                ALIGN,
            )
        _, parent = first_maximum(best, parent, PARENT_ROWS - 1)
        # (PARENTS, KEYS)
        is_of_parent = (parents[:, None] == parent[None, :]) & is_key[None, :]
        sums += product(is_of_parent.to(key.dtype), key)
        counts += tl.sum(is_of_parent.to(tl.int32), axis=1)

    tl.store(
        sums_ptr + (batch_chunk * PARENT_ROWS + parents)[:, None] * PADDED_DIM + columns[None, :],
        sums,
    )
    tl.store(counts_ptr + batch_chunk * PARENT_ROWS + parents, counts)


@triton.jit(
    do_not_specialize=[
        "key_stride_batch",
        "key_stride_head",
        "key_stride_token",
        "num_keys",
        "num_chunks",
    ]
)
def cell_means_kernel(
    key_ptr,
    key_order_ptr,
    parents_ptr,
    sums_ptr,
    counts_ptr,
    updated_ptr,
    key_stride_batch,
    key_stride_head,
    key_stride_token,
    num_keys,
    num_chunks,
    NUM_PARENTS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    PARENT_ROWS: tl.constexpr,
    ROWS: tl.constexpr,
    ALIGN: tl.constexpr,
):
    """Write the mean key of ROWS parents of one head, or the parent if it has no keys.

    sums, counts: as `cell_sums_kernel` writes them.
    updated: (B, H, M0, D), dtype of the keys.
    """
    head = tl.program_id(0)
    batch = tl.program_id(1)
    batch_head = batch.to(tl.int64) * tl.num_programs(0) + head
    head_start = batch.to(tl.int64) * key_stride_batch + head.to(tl.int64) * key_stride_head
    if parents_ptr is not None:
        parents_ptr += batch_head * NUM_PARENTS * HEAD_DIM

    # (ROWS, DP)
    parents = tl.program_id(2) * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, PADDED_DIM)
    is_parent = parents < NUM_PARENTS
    former = parent_rows(
        key_ptr + head_start * ALIGN,
        key_order_ptr,
        parents_ptr,
        parents,
        key_stride_token,
        num_keys,
        is_parent,
        NUM_PARENTS,
        HEAD_DIM,
        PADDED_DIM,
        ALIGN,
    )
    sums = tl.zeros([ROWS, PADDED_DIM], tl.float32)
    counts = tl.zeros([ROWS], tl.int32)
    for chunk in tl.range(0, num_chunks):
        rows = (batch_head * num_chunks + chunk) * PARENT_ROWS + parents
        sums += tl.load(sums_ptr + rows[:, None] * PADDED_DIM + columns[None, :])
        counts += tl.load(counts_ptr + rows)

    means = sums / tl.maximum(counts, 1).to(tl.float32)[:, None]
    means = tl.where((counts > 0)[:, None], means.to(former.dtype), former)
    rows = batch_head * NUM_PARENTS + parents
    mask = is_parent[:, None] & (columns < HEAD_DIM)[None, :]
    tl.store(updated_ptr + rows[:, None] * HEAD_DIM + columns[None, :], means, mask=mask)
