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
    Memory,
    Plan,
    addresses_of,
    aligned,
    capability_of,
    kernel_layout,
)
from avq_diffusers.attention.triton.pieces import Chunks
from avq_diffusers.attention.triton.problem import Given, Layout, Strides, alignment_of, pointers_of
from avq_diffusers.attention.triton.rows import (
    KeySizes,
    ParentPointers,
    best_of_block,
    best_of_blocks,
    first_maximum,
    head_of_program,
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
        key_at, order_at, parents_at = addresses_of(key, key_order, parents)
        given = Given(key=key_at, key_order=order_at, parents=parents_at)
        parents = plan.run(given, key.device)
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
    memory = Memory(len(Given._fields))
    parents_dtype = dtype if has_parents else None
    given = pointers_of(Given(key=dtype, key_order=order_dtype, parents=parents_dtype))
    rows = (batch, num_heads, num_chunks, parent_rows)
    updated = memory.add((batch, num_heads, spec.num_parents, head_dim), dtype)
    sizes = KeySizes(
        HEAD_DIM=head_dim,
        PADDED_DIM=padded_dim,
        NUM_PARENTS=spec.num_parents,
        PARENT_ROWS=parent_rows,
        ALIGN=alignment_of(key),
        UPDATED=has_parents,
        ORDERED=order_dtype is not None,
    )
    arguments = {
        "key_ptr": given.key,
        "updated_ptr": updated,
        "source": ParentPointers(None, None, given.parents, given.key_order),
        "cells": SumPointers(
            memory.add((*rows, padded_dim), torch.float32), memory.add(rows, torch.int32)
        ),
        "key_strides": key.divided(sizes.ALIGN),
        "chunks": Chunks(num_keys, tiling.chunk_keys, num_chunks),
        "SIZES": sizes,
        "KEYS": tiling.keys,
        "PARENTS": tiling.parents,
        "ROWS": tiling.rows,
    }
    by_chunk = (num_heads, batch, num_chunks * (parent_rows // tiling.parents))
    by_rows = (num_heads, batch, parent_rows // tiling.rows)
    options = {"num_warps": tiling.num_warps, "num_stages": tiling.num_stages}
    launches = [
        Launch(cell_sums_kernel, by_chunk, arguments, **options),
        Launch(cell_means_kernel, by_rows, arguments, **options),
    ]
    return Plan(memory, launches, result=updated)


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
    head = head_of_program(key_ptr, source, key_strides, chunks.num_keys, SIZES)
    chunk = tl.program_id(2) % chunks.number
    first_row = tl.program_id(2) // chunks.number * PARENTS
    batch_chunk = head.batch_head * chunks.number + chunk
    first = chunk * chunks.length
    length = tl.minimum(chunks.length, chunks.num_keys - first)
    stride = head.stride.to(tl.int64) * SIZES.ALIGN
    key_ptr = head.key + first * stride
    if PARENT_ROWS == PARENTS:
        codes, bias = load_parents(head, tl.arange(0, PARENTS), SIZES)

    parents = first_row + tl.arange(0, PARENTS)
    rows = tl.arange(0, KEYS)
    dims = tl.arange(0, SIZES.PADDED_DIM)
    # (KEYS, DP) Offsets within a block fit 32 bits; the block's offset is a scalar.
    offsets = rows[:, None] * stride.to(tl.int32) + dims[None, :]
    sums = tl.zeros([PARENTS, SIZES.PADDED_DIM], tl.float32)
    counts = tl.zeros([PARENTS], tl.int32)
    for block in tl.range(0, length, KEYS):
        # (KEYS, DP)
        is_key = block + rows < length
        mask = is_key[:, None] & (dims < SIZES.HEAD_DIM)[None, :]
        key = tl.load(key_ptr + block * stride + offsets, mask=mask, other=0.0)
        if PARENT_ROWS == PARENTS:
            best, parent = best_of_block(key, codes, bias, 0, PARENT_ROWS - 1)
        else:
            best, parent = best_of_blocks(key, head, SIZES, PARENTS)
        _, parent = first_maximum(best, parent, PARENT_ROWS - 1)

        # (PARENTS, KEYS)
        is_of_parent = (parents[:, None] == parent[None, :]) & is_key[None, :]
        sums += product(is_of_parent.to(key.dtype), key)
        counts += tl.sum(is_of_parent.to(tl.int32), axis=1)

    sum_rows = (batch_chunk * PARENT_ROWS + parents)[:, None] * SIZES.PADDED_DIM
    tl.store(cells.sums + sum_rows + dims[None, :], sums)
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
    head = head_of_program(key_ptr, source, key_strides, chunks.num_keys, SIZES)
    # (ROWS, DP)
    parents = tl.program_id(2) * ROWS + tl.arange(0, ROWS)
    dims = tl.arange(0, SIZES.PADDED_DIM)
    is_parent = parents < SIZES.NUM_PARENTS
    former = own_parents(head, parents, is_parent, SIZES)
    sums = tl.zeros([ROWS, SIZES.PADDED_DIM], tl.float32)
    counts = tl.zeros([ROWS], tl.int32)
    for chunk in tl.range(0, chunks.number):
        rows = (head.batch_head * chunks.number + chunk) * SIZES.PARENT_ROWS + parents
        sums += tl.load(cells.sums + rows[:, None] * SIZES.PADDED_DIM + dims[None, :])
        counts += tl.load(cells.counts + rows)

    means = sums / tl.maximum(counts, 1).to(tl.float32)[:, None]
    means = tl.where((counts > 0)[:, None], means.to(former.dtype), former)
    rows = head.batch_head * SIZES.NUM_PARENTS + parents
    mask = is_parent[:, None] & (dims < SIZES.HEAD_DIM)[None, :]
    tl.store(updated_ptr + rows[:, None] * SIZES.HEAD_DIM + dims[None, :], means, mask=mask)
