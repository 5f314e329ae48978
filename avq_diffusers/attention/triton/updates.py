"""Lloyd updates: move parents to the means of their keys, before the keys are sorted.

Two launches per update:

    cell sums   sums each parent's keys over a chunk of keys: a matmul with the one-hot choice of
                parents.
    cell means  adds the chunks in order, so every run gives the same bits, and divides.

Shapes: B batch, H heads, S keys, D head dim, M0 parents; DP, MP as in `codewords`; T chunks.
"""

from functools import lru_cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from avq_diffusers.attention.triton.codewords import padded_sizes
from avq_diffusers.attention.triton.launch import (
    MOST_PLANS,
    Launch,
    Part,
    Plan,
    Pointer,
    address,
    aligned,
    capability_of,
    group,
    kernel_layout,
)
from avq_diffusers.attention.triton.pieces import Chunks
from avq_diffusers.attention.triton.problem import Layout, Strides, strides_of
from avq_diffusers.attention.triton.rows import (
    KeySizes,
    ParentPointers,
    best_of_loaded_tiles,
    best_of_tile,
    first_maximum,
    head_start,
    load_parents,
    own_parents,
    product,
)
from avq_diffusers.attention.triton.tuning import update_tiling
from avq_diffusers.config import Spec


def updated_parents(key: Tensor, key_order: Tensor | None, spec: Spec) -> Tensor:
    """Parents (B, H, M0, D) at the means of their keys; a parent without keys stays.

    Each update rounds them to the dtype of the keys. The initial parents are keys evenly spaced in
    `key_order`.
    """
    key, key_order = kernel_layout(key), aligned(key_order)
    order_dtype = None if key_order is None else key_order.dtype
    parents = None
    for _ in range(spec.num_updates):
        has_parents = parents is not None
        gpu = key.device, capability_of(key.device)
        plan = _plan(*gpu, key.dtype, Layout.of(key), order_dtype, has_parents, spec)
        inputs = {"key": address(key), "key_order": address(key_order), "parents": address(parents)}
        parents = plan.part(plan.run(inputs, key.device), "updated")
    assert parents is not None
    return parents


class SumPointers(NamedTuple):
    """Sums (B, H, T, MP, DP) float32 and counts (B, H, T, MP) int32 of each parent's keys."""

    sums: tl.tensor
    counts: tl.tensor


@lru_cache(MOST_PLANS)
def _plan(
    device: torch.device,  # launches belong to a device
    capability: tuple[int, int],
    dtype: torch.dtype,
    key: Layout,
    order_dtype: torch.dtype | None,
    has_parents: bool,
    spec: Spec,
) -> Plan:
    """One update, starting from given parents or else from keys."""
    batch, num_heads, num_keys, head_dim = key.shape
    padded_dim, parent_rows, _ = padded_sizes(head_dim, spec.num_parents, 0)
    tiling = update_tiling(capability, key.shape, dtype, parent_rows)
    num_chunks = -(-num_keys // tiling.chunk_keys)
    align, (key_strides,) = strides_of(key)
    heads = (batch, num_heads)
    parts = {
        "sums": Part((*heads, num_chunks, parent_rows, padded_dim), torch.float32),
        "counts": Part((*heads, num_chunks, parent_rows), torch.int32),
        "updated": Part((*heads, spec.num_parents, head_dim), dtype),
    }
    pointers = {name: Pointer(name, part.dtype) for name, part in parts.items()} | {
        "key": Pointer("key", dtype),
        "key_order": None if order_dtype is None else Pointer("key_order", order_dtype),
        "parents": Pointer("parents", dtype) if has_parents else None,
        "stored_codes": None,
        "bias": None,
    }
    arguments = {
        "key_ptr": pointers["key"],
        "updated_ptr": pointers["updated"],
        "source": group(ParentPointers, pointers),
        "cells": group(SumPointers, pointers),
        "key_strides": key_strides,
        "chunks": Chunks(num_keys, tiling.chunk_keys, num_chunks),
        "SIZES": KeySizes(head_dim, padded_dim, spec.num_parents, parent_rows, align),
        "KEYS": tiling.keys,
        "PARENTS": tiling.parents,
        "ROWS": tiling.rows,
    }
    tiles = (num_heads, batch, num_chunks * (parent_rows // tiling.parents))
    rows = (num_heads, batch, parent_rows // tiling.rows)
    options = {"num_warps": tiling.num_warps, "num_stages": tiling.num_stages}
    launches = [
        Launch(cell_sums_kernel, tiles, arguments, **options),
        Launch(cell_means_kernel, rows, arguments, **options),
    ]
    return Plan(parts, launches)


@triton.jit
def cell_sums_kernel(
    key_ptr,
    source: ParentPointers,
    cells: SumPointers,
    key_strides: Strides,
    chunks: Chunks,
    SIZES: tl.constexpr,
    KEYS: tl.constexpr,
    PARENTS: tl.constexpr,
):
    """Sum the keys of PARENTS parents in one chunk of one head's keys."""
    PARENT_ROWS: tl.constexpr = SIZES.PARENT_ROWS
    head = tl.program_id(0)
    batch = tl.program_id(1)
    chunk = tl.program_id(2) % chunks.number
    first_row = tl.program_id(2) // chunks.number * PARENTS
    batch_head = batch.to(tl.int64) * tl.num_programs(0) + head
    batch_chunk = batch_head * chunks.number + chunk
    first = chunk * chunks.length
    length = tl.minimum(chunks.length, chunks.num_keys - first)

    stride = key_strides.token.to(tl.int64) * SIZES.ALIGN
    head_ptr = key_ptr + head_start(key_strides, batch, head, SIZES.ALIGN)
    key_ptr = head_ptr + first * stride
    if source.parents is not None:
        parents_ptr = source.parents + batch_head * SIZES.NUM_PARENTS * SIZES.HEAD_DIM
        source = ParentPointers(None, None, parents_ptr, None)

    if PARENT_ROWS == PARENTS:
        all_parents = tl.arange(0, PARENTS)
        codes, bias = load_parents(
            head_ptr, source, all_parents, stride // SIZES.ALIGN, chunks.num_keys, SIZES
        )
    parents = first_row + tl.arange(0, PARENTS)
    rows = tl.arange(0, KEYS)
    columns = tl.arange(0, SIZES.PADDED_DIM)
    # (KEYS, DP) Offsets within a tile fit 32 bits; the tile's offset is a scalar.
    offsets = rows[:, None] * stride.to(tl.int32) + columns[None, :]
    sums = tl.zeros([PARENTS, SIZES.PADDED_DIM], tl.float32)
    counts = tl.zeros([PARENTS], tl.int32)
    for tile in tl.range(0, length, KEYS):
        # (KEYS, DP)
        is_key = tile + rows < length
        mask = is_key[:, None] & (columns < SIZES.HEAD_DIM)[None, :]
        key = tl.load(key_ptr + tile * stride + offsets, mask=mask, other=0.0)
        if PARENT_ROWS == PARENTS:
            best, parent = best_of_tile(key, codes, bias, 0, PARENT_ROWS - 1)
        else:
            best, parent = best_of_loaded_tiles(
                key, head_ptr, source, stride // SIZES.ALIGN, chunks.num_keys, SIZES, PARENTS
            )
        _, parent = first_maximum(best, parent, PARENT_ROWS - 1)

        # (PARENTS, KEYS)
        is_of_parent = (parents[:, None] == parent[None, :]) & is_key[None, :]
        sums += product(is_of_parent.to(key.dtype), key)
        counts += tl.sum(is_of_parent.to(tl.int32), axis=1)

    sum_rows = (batch_chunk * PARENT_ROWS + parents)[:, None] * SIZES.PADDED_DIM
    tl.store(cells.sums + sum_rows + columns[None, :], sums)
    tl.store(cells.counts + batch_chunk * PARENT_ROWS + parents, counts)


@triton.jit
def cell_means_kernel(
    key_ptr,
    updated_ptr,
    source: ParentPointers,
    cells: SumPointers,
    key_strides: Strides,
    chunks: Chunks,
    SIZES: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Write the mean keys of ROWS parents of one head; a parent without keys is kept.

    updated: (B, H, M0, D), dtype of the keys.
    """
    head = tl.program_id(0)
    batch = tl.program_id(1)
    batch_head = batch.to(tl.int64) * tl.num_programs(0) + head
    key_ptr += head_start(key_strides, batch, head, SIZES.ALIGN)
    if source.parents is not None:
        parents_ptr = source.parents + batch_head * SIZES.NUM_PARENTS * SIZES.HEAD_DIM
        source = ParentPointers(None, None, parents_ptr, None)

    # (ROWS, DP)
    parents = tl.program_id(2) * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, SIZES.PADDED_DIM)
    is_parent = parents < SIZES.NUM_PARENTS
    former = own_parents(
        key_ptr, source, parents, key_strides.token, chunks.num_keys, is_parent, SIZES
    )
    sums = tl.zeros([ROWS, SIZES.PADDED_DIM], tl.float32)
    counts = tl.zeros([ROWS], tl.int32)
    for chunk in tl.range(0, chunks.number):
        rows = (batch_head * chunks.number + chunk) * SIZES.PARENT_ROWS + parents
        sums += tl.load(cells.sums + rows[:, None] * SIZES.PADDED_DIM + columns[None, :])
        counts += tl.load(cells.counts + rows)

    means = sums / tl.maximum(counts, 1).to(tl.float32)[:, None]
    means = tl.where((counts > 0)[:, None], means.to(former.dtype), former)
    rows = batch_head * SIZES.NUM_PARENTS + parents
    mask = is_parent[:, None] & (columns < SIZES.HEAD_DIM)[None, :]
    tl.store(updated_ptr + rows[:, None] * SIZES.HEAD_DIM + columns[None, :], means, mask=mask)
