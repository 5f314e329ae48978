"""Precompute: assign every key, then average keys and values of every codeword.

A key goes to its nearest parent, then to a child of it that is strictly closer, or stays with the
parent (paper, Algorithm 1). Two or three launches:

    sort        finds the parents of a chunk of keys and sorts the chunk by them, stably.
    aggregate   gathers the keys of one parent from all chunks and finds their leaves by a small
                matrix product. A product with the one-hot choice adds up their keys and values.
    leaf order  puts the keys of a cell in the order of its leaves, if queries meet keys themselves.

The parents are stored codewords, or keys that are evenly spaced in the query order. The children
are stored too, or keys of the cell. They are read where they are: no launch makes codewords.

A parent with many keys is cut into pieces of fixed length. The program that finishes last adds the
pieces in order, so every run gives the same bits.

Shapes: B batch, H heads, S keys, D head dim, M0 parents, C children; DP, MP, CP as in `codewords`;
L leaves of a parent (0 stays, c + 1 is child c) and padding, T chunks.
"""

import math
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from avq_diffusers.attention.triton.aggregate import aggregate_kernel
from avq_diffusers.attention.triton.codewords import StoredCodes, mean_columns, padded_sizes
from avq_diffusers.attention.triton.launch import (
    MOST_PLANS,
    Launch,
    Workspace,
    aligned,
    pointer,
)
from avq_diffusers.attention.triton.leaf_order import leaf_order_kernel
from avq_diffusers.attention.triton.sort import sort_kernel


@dataclass(frozen=True)
class PrecomputeTiling:
    """How the work is cut. Changes the result only by the order of additions.

    num_chunks: chunks that a head's keys are sorted in, a power of two.
    sort_keys, sort_parents: keys and parents of one product.
    sort_shared: bytes of shared memory for all codes and the key tiles; larger codes are loaded
        again for every key tile.
    sort_warps, sort_stages: of the sort; each warp ranks its own strip of a chunk.
    piece_keys: keys of one parent that one program aggregates.
    leaf_keys: keys of one product.
    leaf_warps, leaf_stages: of the aggregation.
    leaf_registers: of the aggregation, per thread; None leaves it to the compiler.
    """

    num_chunks: int
    sort_keys: int
    sort_parents: int
    sort_shared: int
    sort_warps: int
    sort_stages: int
    piece_keys: int
    leaf_keys: int
    leaf_warps: int
    leaf_stages: int
    leaf_registers: int | None = None


def default_tiling(
    num_heads: int,
    num_keys: int,
    padded_dim: int,
    num_parents: int,
    num_children: int,
    dtype: torch.dtype,
    means: bool,
) -> PrecomputeTiling:
    """The tiling for a problem size, measured on an H200 for half precision.

    Float32 takes smaller tiles to fit registers and shared memory.

    Args:
        num_heads: heads of all batch elements together.
    """
    most_chunks = 16 if num_children == 0 else 64 if num_parents <= 64 else 32
    # Enough pieces to fill the GPU, however the keys are spread over the parents.
    piece_keys = num_heads * num_keys * padded_dim >> 16
    tiling = PrecomputeTiling(
        num_chunks=_clamped_power_of_2(num_keys >> 10, 16, most_chunks),
        sort_keys=64,
        sort_parents=64,
        sort_shared=88 * 1024,
        sort_warps=4,
        sort_stages=3,
        piece_keys=_clamped_power_of_2(piece_keys, 256, 2048),
        leaf_keys=32,
        leaf_warps=1,
        leaf_stages=3,
    )
    if num_children > 16:
        tiling = replace(tiling, leaf_keys=64, leaf_warps=4)
    elif means and padded_dim <= 64:
        # As many as fit without a spill: more programs share a multiprocessor.
        tiling = replace(tiling, leaf_registers=160, piece_keys=min(tiling.piece_keys, 1024))
    elif means:
        # Sums of keys and values in one warp spill.
        tiling = replace(
            tiling, leaf_keys=64, leaf_warps=2, piece_keys=min(tiling.piece_keys, 1024)
        )
    if dtype == torch.float32:
        tiling = replace(
            tiling,
            sort_keys=32,
            sort_shared=24 * 1024,
            sort_stages=1,
            leaf_keys=32,
            leaf_warps=4,
            leaf_stages=1,
            leaf_registers=None,
        )
    return tiling


def _clamped_power_of_2(number: int, least: int, most: int) -> int:
    """The largest power of two up to `number`, but within `least` and `most`."""
    return min(most, max(least, 1 << (max(number, 1).bit_length() - 1)))


class Leaves(NamedTuple):
    """Where the keys of every row of `Aggregates.mean_values` are.

    order: (B, H, S) int32, indices of keys by cell, in a cell by leaf.
    row_start, row_count: (B, H, 2 MP + M0 CP) int32, where the keys of a row are in `order`, and
        how many.
    row_weight: (B, H, 2 MP + M0 CP) float32, what the attention to a row weighs in the choice of
        exact keys: the squared spread of its keys, divided by their number.
    """

    order: Tensor
    row_start: Tensor
    row_count: Tensor
    row_weight: Tensor


class Aggregates(NamedTuple):
    """What represents the keys.

    codes: stored ones, or with `means` mean keys (B, H, 2 MP + M0 CP, DP) around `centre`, times
        scale log2(e).
    mean_values: (B, H, 2 MP + M0 CP, DV), dtype of `codes`; DV = `mean_columns`. Row p averages the
        values of all keys of parent p, row 2 MP + p CP + c those of its child c, and row MP + p
        those that stay with p. Without `means`, the divisor of the latter is the number of all keys
        of p. Columns from D on are the number of keys of the row divided by the divisor. A row
        without keys is 0.
    log_counts: float32, log2 of the number of keys of every row of `codes`.
    centre: (H, DP) or without stored codewords (B, H, DP) float32.
    leaves: of exact keys, or None.
    """

    codes: Tensor
    mean_values: Tensor
    log_counts: Tensor
    centre: Tensor
    leaves: Leaves | None


def precompute(
    key: Tensor,
    value: Tensor,
    stored: StoredCodes | None,
    parents: Tensor | None,
    key_order: Tensor | None,
    *,
    num_parents: int,
    num_children: int,
    means: bool,
    exact: bool = False,
    scale: float,
    tiling: PrecomputeTiling | None = None,
) -> Aggregates:
    """Assign the keys and summarize those of every codeword.

    Args:
        key, value: (B, H, S, D) float16, bfloat16 or float32, last stride 1.
        stored: codewords as `codewords.pack` gives them; None takes keys.
        parents: (B, H, M0, D) in place of keys, dtype of `key`, contiguous; or None.
        key_order: (S,) permutation in which parents are evenly spaced; None is the order of keys.
        means: the mean of its keys represents a leaf, else the stored codeword.
        exact: queries will meet keys themselves; needs `means`.
        scale: factor on the logits.
        tiling: None takes `default_tiling`.
    """
    key, value = aligned(key), aligned(value)
    if key_order is not None:
        key_order = aligned(key_order)
    plan = _plan(
        key.device,
        key.shape,
        key.stride(),
        value.stride(),
        key.dtype,
        stored is not None,
        parents is not None,
        None if key_order is None else key_order.dtype,
        num_parents,
        num_children,
        means,
        exact,
        scale,
        tiling,
    )
    _memory, parts = plan.workspace.allocate(key.device)
    rank, order, count, start, ticket, piece_counts, piece_sums, piece_squares, leaf = parts
    if stored is None:
        code = bias = None
        centre = key.new_empty(plan.centre, dtype=torch.float32)
    else:
        code, bias, centre = stored
    mean_keys = key.new_empty(plan.mean_keys) if means else None
    mean_values = key.new_empty(plan.mean_values)
    log_counts = key.new_empty(plan.log_counts, dtype=torch.float32)
    leaves = None
    if exact:
        leaves = Leaves(
            order=key.new_empty(key.shape[:3], dtype=torch.int32),
            row_start=key.new_empty(plan.log_counts, dtype=torch.int32),
            row_count=key.new_empty(plan.log_counts, dtype=torch.int32),
            row_weight=key.new_empty(plan.log_counts, dtype=torch.float32),
        )

    keys = pointer(key)
    made_of = tuple(pointer(x) for x in (key_order, parents, code, bias, centre))
    plan.sort(keys, *made_of, rank, order, count, start, ticket)
    plan.aggregate(
        keys,
        pointer(value),
        *made_of,
        order,
        start,
        ticket,
        piece_sums,
        piece_counts,
        piece_squares if exact else None,
        leaf if exact else None,
        pointer(mean_keys),
        pointer(mean_values),
        pointer(log_counts),
        None if leaves is None else pointer(leaves.row_weight),
    )
    if leaves is not None:
        outputs = (leaves.order, leaves.row_start, leaves.row_count)
        plan.leaf_order(order, start, leaf, piece_counts, *(pointer(x) for x in outputs))
    codes = mean_keys if stored is None or means else stored.codes
    assert codes is not None
    return Aggregates(codes, mean_values, log_counts, centre, leaves)


class _Plan(NamedTuple):
    """What the problem size decides about a call.

    centre, mean_keys, mean_values, log_counts: shapes of the outputs.
    """

    workspace: Workspace
    centre: tuple[int, ...]
    mean_keys: tuple[int, ...]
    mean_values: tuple[int, ...]
    log_counts: tuple[int, ...]
    sort: Launch
    aggregate: Launch
    leaf_order: Launch


@lru_cache(MOST_PLANS)
def _plan(
    device: torch.device,
    shape: torch.Size,
    key_strides: tuple[int, ...],
    value_strides: tuple[int, ...],
    dtype: torch.dtype,
    is_stored: bool,
    has_parents: bool,
    order_dtype: torch.dtype | None,
    num_parents: int,
    num_children: int,
    means: bool,
    exact: bool,
    scale: float,
    tiling: PrecomputeTiling | None,
) -> _Plan:
    batch, num_heads, num_keys, head_dim = shape
    padded_dim, parent_rows, child_rows = padded_sizes(head_dim, num_parents, num_children)
    tiling = tiling or default_tiling(
        batch * num_heads, num_keys, padded_dim, num_parents, num_children, dtype, means
    )
    if exact:  # its sums would spill
        tiling = replace(tiling, leaf_registers=None)
    code_rows = parent_rows + num_parents * child_rows
    leaf_rows = max(16, 2 * child_rows)
    # Products and strips both divide a chunk.
    tile_keys = max(tiling.sort_keys, 32 * tiling.sort_warps)
    chunk_keys = -(-num_keys // (tile_keys * tiling.num_chunks)) * tile_keys
    num_chunks = -(-num_keys // chunk_keys)
    # The most that the keys of one head can be cut into.
    num_pieces = parent_rows + num_keys // tiling.piece_keys
    sort_parents = min(tiling.sort_parents, parent_rows)
    resident_rows = parent_rows + tiling.sort_stages * tiling.sort_keys
    resident_bytes = resident_rows * padded_dim * (4 if dtype == torch.float32 else 2)
    # A stride times a constant lets the compiler prove that rows of 16 bytes are aligned.
    strides = (*key_strides[:3], *value_strides[:3])
    align = 8 if all(stride % 8 == 0 for stride in strides) else 1
    strides = tuple(stride // align for stride in strides)

    heads = (batch, num_heads)
    int32, float32 = torch.int32, torch.float32
    workspace = {
        "rank": ((*heads, tiling.num_chunks, chunk_keys), int32),
        "order": ((*heads, num_keys), int32),
        "count": ((*heads, tiling.num_chunks, tiling.sort_warps, parent_rows), int32),
        "start": ((*heads, parent_rows + 1, tiling.num_chunks), int32),
        "ticket": ((*heads, parent_rows), int32),
        "piece_counts": ((*heads, num_pieces, leaf_rows), int32),
        "piece_sums": ((*heads, num_pieces, leaf_rows * (1 + means), padded_dim), float32),
        "piece_squares": ((*heads, num_pieces, leaf_rows) if exact else (), float32),
        "leaf": ((*heads, num_keys) if exact else (), int32),
    }
    made_of = (
        order_dtype,
        dtype if has_parents else None,
        dtype if is_stored else None,
        float32 if is_stored else None,
        float32,
    )
    constants = {
        "CODE_ROWS": code_rows,
        "NUM_PARENTS": num_parents,
        "HEAD_DIM": head_dim,
        "PADDED_DIM": padded_dim,
        "PARENT_ROWS": parent_rows,
        "NUM_CHUNKS": tiling.num_chunks,
        "ALIGN": align,
    }
    return _Plan(
        workspace=Workspace(*zip(*workspace.values(), strict=True)),
        centre=(*heads, padded_dim),
        mean_keys=(*heads, parent_rows + code_rows, padded_dim),
        mean_values=(*heads, parent_rows + code_rows, mean_columns(head_dim)),
        log_counts=(*heads, parent_rows * means + code_rows),
        sort=Launch(
            sort_kernel,
            (num_heads, batch, num_chunks),
            (dtype, *made_of, *[int32] * 5),
            (*strides[:3], num_keys, chunk_keys),
            {
                **constants,
                "KEYS": tiling.sort_keys,
                "PARENTS": sort_parents,
                "STRIPS": tiling.sort_warps,
                "RESIDENT": sort_parents == parent_rows or resident_bytes <= tiling.sort_shared,
                "num_warps": tiling.sort_warps,
                "num_stages": tiling.sort_stages,
            },
        ),
        aggregate=Launch(
            aggregate_kernel,
            (num_heads, batch, num_pieces),
            (
                *(dtype, dtype, *made_of, int32, int32, int32, float32, int32),
                *((float32, int32) if exact else (None, None)),
                *(dtype if means else None, dtype, float32, float32 if exact else None),
            ),
            (*strides, num_keys, chunk_keys, num_chunks, num_pieces),
            {
                **constants,
                "FACTOR": scale * math.log2(math.e),
                "NUM_CHILDREN": num_children,
                "MEAN_COLUMNS": mean_columns(head_dim),
                "CHILD_ROWS": child_rows,
                "LEAF_ROWS": leaf_rows,
                "LOG2_CHUNKS": tiling.num_chunks.bit_length() - 1,
                "PIECE": tiling.piece_keys,
                "KEYS": tiling.leaf_keys,
                "num_warps": tiling.leaf_warps,
                "num_stages": tiling.leaf_stages,
                "maxnreg": tiling.leaf_registers,
            },
        ),
        leaf_order=Launch(
            leaf_order_kernel,
            (num_heads, batch, num_pieces),
            (int32,) * 7,
            (num_keys, chunk_keys, num_chunks, num_pieces),
            {
                "NUM_PARENTS": num_parents,
                "PARENT_ROWS": parent_rows,
                "CHILD_ROWS": child_rows,
                "LEAF_ROWS": leaf_rows,
                "NUM_CHUNKS": tiling.num_chunks,
                "LOG2_CHUNKS": tiling.num_chunks.bit_length() - 1,
                "PIECE": tiling.piece_keys,
                "KEYS": 64,
                "num_warps": 1,
            },
        ),
    )
