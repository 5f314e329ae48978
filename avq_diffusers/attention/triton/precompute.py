"""Precompute: assign every key, then average keys and values of every codeword.

A key goes to its nearest parent, then to a child of it that is strictly closer, or stays with the
parent (paper, Algorithm 1). Two or three launches:

    sort        finds the parents of a chunk of keys and sorts the chunk by them, stably.
    aggregate   gathers the keys of one parent from all chunks and finds their leaves by a small
                matrix product. A product with the one-hot choice adds up their keys and values.
    leaf order  puts the keys of a cell in the order of its leaves, if queries meet keys themselves.

The parents are stored codewords, or keys that are evenly spaced in the query order; `updates` may
have moved these. The children are stored too, or keys of the cell. They are read where they are: no
launch here makes codewords.

A parent with many keys is cut into pieces of fixed length. The program that finishes last adds the
pieces in order, so every run gives the same bits.

Shapes: B batch, H heads, S keys, D head dim, M0 parents, C children; DP, MP, CP as in `codewords`;
L leaves of a parent (0 stays, c + 1 is child c) and padding, T chunks.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from avq_diffusers.attention.triton.aggregate import aggregate_kernel
from avq_diffusers.attention.triton.codewords import StoredCodes, mean_columns, padded_sizes
from avq_diffusers.attention.triton.launch import (
    STRIDES,
    Launch,
    Part,
    Plan,
    Pointer,
    capability_of,
    kernel_layout,
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
    capability: tuple[int, int],
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
        num_chunks=clamped_power_of_2(num_keys >> 10, 16, most_chunks),
        sort_keys=64,
        sort_parents=64,
        sort_shared=88 * 1024,
        sort_warps=4,
        sort_stages=3,
        piece_keys=clamped_power_of_2(piece_keys, 256, 2048),
        leaf_keys=32,
        leaf_warps=1,
        leaf_stages=3,
    )
    if num_children > 16:
        tiling = replace(tiling, leaf_keys=64, leaf_warps=4)
    elif means and padded_dim <= 64:
        # As many as fit without a spill: more programs share a multiprocessor.
        tiling = replace(tiling, leaf_registers=168, piece_keys=min(tiling.piece_keys, 1024))
    elif means:
        # Sums of keys and values in one warp spill, and on an A100 those of 64 keys.
        tiling = replace(
            tiling,
            leaf_keys=32 if capability == (8, 0) else 64,
            leaf_warps=2,
            piece_keys=min(tiling.piece_keys, 1024),
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


def clamped_power_of_2(number: int, least: int, most: int) -> int:
    """The largest power of two up to `number`, but within `least` and `most`."""
    return min(most, max(least, 1 << (max(number, 1).bit_length() - 1)))


class Aggregates(NamedTuple):
    """What represents the keys.

    codes: stored ones, or with `means` mean keys (B, H, 2 MP + M0 CP, DP) around `centre`, times
        scale log2(e).
    means: (B, H, 2 MP + M0 CP, DV) mean values, dtype of `codes`; DV = `mean_columns`. Row p
        averages the values of all keys of parent p, row 2 MP + p CP + c those of its child c, and
        row MP + p those that stay with p. Without `means`, the divisor of the latter is the number
        of all keys of p. Columns from D on are the number of keys of the row divided by the
        divisor. A row without keys is 0.
    log_counts: float32, log2 of the number of keys of every row of `codes`.
    spread: (B, H, MP) float32, mean squared distance of the keys of a parent from their mean; None
        without `means`.
    """

    codes: Tensor
    means: Tensor
    log_counts: Tensor
    spread: Tensor | None


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
    scale: float,
    tiling: PrecomputeTiling | None = None,
) -> Aggregates:
    """Assign the keys and summarize those of every codeword.

    Args:
        key, value: (B, H, S, D) float16, bfloat16 or float32.
        stored: codewords as `codewords.pack` gives them; None takes keys.
        parents: (B, H, M0, D) in place of keys, dtype of `key`, contiguous; or None.
        key_order: (S,) permutation in which parents are evenly spaced; None is the order of keys.
        means: the mean of its keys represents a leaf, else the stored codeword.
        scale: factor on the logits.
        tiling: None takes `default_tiling`.
    """
    key, value = kernel_layout(key), kernel_layout(value)
    plan = Plan(
        *precompute_launches(
            key.shape,
            key.stride(),
            value.stride(),
            key.dtype,
            capability_of(key.device),
            is_stored=stored is not None,
            has_parents=parents is not None,
            order_dtype=None if key_order is None else key_order.dtype,
            num_parents=num_parents,
            num_children=num_children,
            means=means,
            exact=False,
            scale=scale,
            tiling=tiling,
        )
    )
    tensors = {"key": key, "value": value, "key_order": key_order, "parents": parents}
    inputs = {name: pointer(x) for name, x in tensors.items()} | stored_pointers(stored)
    memory = plan.run(inputs, key.device)
    codes = plan.part(memory, "codes") if stored is None or means else stored.codes
    spread = plan.part(memory, "spread") if means else None
    return Aggregates(codes, plan.part(memory, "means"), plan.part(memory, "log_counts"), spread)


def stored_pointers(stored: StoredCodes | None) -> dict[str, Pointer]:
    """What the kernels take for stored codewords."""
    if stored is None:
        return {}
    codes, bias, centre = (pointer(x) for x in stored)
    return {"stored_codes": codes, "bias": bias, "centre": centre}


def precompute_launches(
    shape: Sequence[int],
    key_strides: Sequence[int],
    value_strides: Sequence[int],
    dtype: torch.dtype,
    capability: tuple[int, int],
    *,
    is_stored: bool,
    has_parents: bool,
    order_dtype: torch.dtype | None,
    num_parents: int,
    num_children: int,
    means: bool,
    exact: bool,
    scale: float,
    leaves: bool = False,
    tiling: PrecomputeTiling | None = None,
) -> tuple[dict[str, Part], list[Launch]]:
    """The memory of a call and its launches, which take what `precompute` takes.

    Besides `Aggregates`, the memory has what is needed if queries will meet keys (`exact`, which
    needs `means`):

    - `centre`, (B, H, DP) float32, unless codewords are stored;
    - `leaf_order`, (B, H, S) int32, indices of keys by cell, in a cell by leaf;
    - `row_start` and `row_count`, (B, H, 2 MP + M0 CP) int32, where the keys of every row of
      `means` are in this order, and how many;
    - `row_weight`, (B, H, 2 MP + M0 CP) float32, what the attention to a row weighs in the choice
      of exact keys: the squared spread of its keys, divided by their number.

    Args:
        shape: of the keys.
        leaves: the memory also has `leaf`, (B, H, S) int32, the leaf in its cell of every key, in
            the order of cells, and with `exact` in this order `place`, where in `leaf_order` it is.
    """
    batch, num_heads, num_keys, head_dim = shape
    padded_dim, parent_rows, child_rows = padded_sizes(head_dim, num_parents, num_children)
    tiling = tiling or default_tiling(
        batch * num_heads,
        num_keys,
        padded_dim,
        num_parents,
        num_children,
        dtype,
        capability,
        means,
    )
    if exact and tiling.leaf_registers:  # its sums would spill
        tiling = replace(tiling, leaf_registers=None, leaf_keys=64, leaf_warps=2)
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
    strides = [*key_strides[:3], *value_strides[:3]]
    align = 8 if all(stride % 8 == 0 for stride in strides) else 1
    names = [f"{name}_stride_{axis}" for name in ("key", "value") for axis in STRIDES]

    heads = (batch, num_heads)
    int32, float32 = torch.int32, torch.float32
    parts = {
        "rank": Part((*heads, tiling.num_chunks, chunk_keys), int32),
        "order": Part((*heads, num_keys), int32),
        "count": Part((*heads, tiling.num_chunks, tiling.sort_warps, parent_rows), int32),
        "start": Part((*heads, parent_rows + 1, tiling.num_chunks), int32),
        "ticket": Part((*heads, parent_rows), int32),
        "piece_counts": Part((*heads, num_pieces, leaf_rows), int32),
        "piece_sums": Part((*heads, num_pieces, leaf_rows * (1 + means), padded_dim), float32),
        "means": Part((*heads, parent_rows + code_rows, mean_columns(head_dim)), dtype),
        "log_counts": Part((*heads, parent_rows * means + code_rows), float32),
    }
    if not is_stored:
        parts["centre"] = Part((*heads, padded_dim), float32)
    if means:
        parts |= {
            "codes": Part((*heads, parent_rows + code_rows, padded_dim), dtype),
            "square": Part((*heads, num_keys), float32),
            "piece_squares": Part((*heads, num_pieces, leaf_rows), float32),
            "spread": Part((*heads, parent_rows), float32),
        }
    if exact or leaves:
        parts["leaf"] = Part((*heads, num_keys), int32)
    if exact and leaves:
        parts["place"] = Part((*heads, num_keys), int32)
    if exact:
        rows = (*heads, parent_rows + code_rows)
        parts |= {
            "leaf_order": Part((*heads, num_keys), int32),
            "row_start": Part(rows, int32),
            "row_count": Part(rows, int32),
            "row_weight": Part(rows, float32),
        }
    dtypes = {name: part.dtype for name, part in parts.items()} | {"key": dtype, "value": dtype}
    if is_stored:
        dtypes |= {"stored_codes": dtype, "bias": float32, "centre": float32}
    if has_parents:
        dtypes["parents"] = dtype
    if order_dtype is not None:
        dtypes["key_order"] = order_dtype
    numbers = {
        "num_keys": num_keys,
        "chunk_keys": chunk_keys,
        "num_chunks": num_chunks,
        "num_pieces": num_pieces,
        **{name: stride // align for name, stride in zip(names, strides, strict=True)},
    }
    constants = {
        "CODE_ROWS": code_rows,
        "NUM_PARENTS": num_parents,
        "NUM_CHILDREN": num_children,
        "HEAD_DIM": head_dim,
        "PADDED_DIM": padded_dim,
        "MEAN_COLUMNS": mean_columns(head_dim),
        "PARENT_ROWS": parent_rows,
        "CHILD_ROWS": child_rows,
        "LEAF_ROWS": leaf_rows,
        "NUM_CHUNKS": tiling.num_chunks,
        "LOG2_CHUNKS": tiling.num_chunks.bit_length() - 1,
        "PIECE": tiling.piece_keys,
        "ALIGN": align,
        "FACTOR": scale * math.log2(math.e),
    }
    sort = {
        "KEYS": tiling.sort_keys,
        "PARENTS": sort_parents,
        "STRIPS": tiling.sort_warps,
        "RESIDENT": sort_parents == parent_rows or resident_bytes <= tiling.sort_shared,
        "num_warps": tiling.sort_warps,
        "num_stages": tiling.sort_stages,
    }
    aggregate = {
        "KEYS": tiling.leaf_keys,
        "num_warps": tiling.leaf_warps,
        "num_stages": tiling.leaf_stages,
        "maxnreg": tiling.leaf_registers,
    }
    pieces = (num_heads, batch, num_pieces)
    launches = [
        Launch(sort_kernel, (num_heads, batch, num_chunks), dtypes, numbers, constants | sort),
        Launch(aggregate_kernel, pieces, dtypes, numbers, constants | aggregate),
    ]
    if exact:
        leaf_order = {"KEYS": 64, "num_warps": 1}
        launches.append(Launch(leaf_order_kernel, pieces, dtypes, numbers, constants | leaf_order))
    return parts, launches
