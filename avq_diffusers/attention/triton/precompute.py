"""Precompute: assign every key, then average keys and values of every codeword.

A key goes to its nearest parent, then to a child of it that is strictly closer, or stays with the
parent (paper, Algorithm 1). Two launches:

    sort        finds the parents of a chunk of keys and sorts the chunk by them, stably.
    aggregate   gathers the keys of one parent from all chunks and finds their leaves by a small
                matrix product. A product with the one-hot choice adds up their keys and values.

The parents are stored codewords, or keys that are evenly spaced in the query order. The children
are stored too, or keys of the cell. They are read where they are: no launch makes codewords.

A parent with many keys is cut into pieces of fixed length. The program that finishes last adds the
pieces in order, so every run gives the same bits.

Shapes: B batch, H heads, S keys, D head dim, M0 parents, C children; DP, MP, CP as in `codewords`;
L leaves of a parent (0 stays, c + 1 is child c) and padding, T chunks.
"""

import math
from dataclasses import dataclass, replace
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from avq_diffusers.attention.triton.aggregate import aggregate_kernel
from avq_diffusers.attention.triton.codewords import StoredCodes, mean_columns, padded_sizes
from avq_diffusers.attention.triton.launch import launch
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
        tiling = replace(tiling, leaf_warps=2)
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
) -> tuple[Tensor, Tensor, Tensor]:
    """Assign the keys; return code, mean value and log2 count of every codeword.

    Args:
        key, value: (B, H, S, D) float16, bfloat16 or float32, last stride 1.
        stored: codewords as `codewords.pack` gives them; None takes keys.
        parents: (B, H, M0, D) in place of keys, dtype of `key`, contiguous; or None.
        key_order: (S,) permutation in which parents are evenly spaced; None is the order of keys.
        means: the mean of its keys represents a leaf, else the stored codeword.
        scale: factor on the logits.
        tiling: None takes `default_tiling`.

    Returns:
        codes: those of `stored`, or for `means` mean keys (B, H, 2 MP + M0 CP, DP) around one
            vector per head, times scale log2(e).
        mean_values: (B, H, 2 MP + M0 CP, DV), dtype of `codes`; DV = `mean_columns`. Row p averages
            the values of all keys of parent p, row 2 MP + p CP + c those of its child c, and row
            MP + p those that stay with p. Without `means`, the divisor of the latter is the number
            of all keys of p. Columns from D on are the number of keys of the row divided by the
            divisor. A row without keys is 0.
        log_counts: float32, log2 of the number of keys of every row of `codes`.
    """
    batch, num_heads, num_keys, head_dim = key.shape
    strides = (*key.stride()[:3], *value.stride()[:3])
    # A stride times a constant lets the compiler prove that rows of 16 bytes are aligned.
    align = 8 if all(stride % 8 == 0 for stride in strides) else 1
    strides = [stride // align for stride in strides]
    plan = _plan(
        batch * num_heads,
        num_keys,
        head_dim,
        num_parents,
        num_children,
        key.dtype,
        align,
        means,
        scale,
        tiling,
    )

    heads = (batch, num_heads)
    rank, order, count, start, ticket, piece_counts = (
        key.new_empty(heads + shape, dtype=torch.int32) for shape in plan.integers
    )
    piece_sums = key.new_empty(heads + plan.piece_sums, dtype=torch.float32)
    if stored is None:
        codes = bias = None
        centre = key.new_empty(heads + plan.piece_sums[-1:], dtype=torch.float32)
    else:
        codes, bias, centre = stored
    mean_keys = key.new_empty(heads + plan.mean_keys) if means else None
    mean_values = key.new_empty(heads + plan.means)
    log_counts = key.new_empty(heads + plan.log_counts, dtype=torch.float32)

    launch(
        sort_kernel,
        (num_heads, batch, plan.num_chunks),
        (key, key_order, parents, codes, bias, centre, rank, order, count, start, ticket),
        (*strides[:3], num_keys, plan.chunk_keys),
        plan.sort,
    )
    launch(
        aggregate_kernel,
        (num_heads, batch, plan.num_pieces),
        (
            key,
            value,
            key_order,
            parents,
            codes,
            bias,
            centre,
            order,
            start,
            ticket,
            piece_sums,
            piece_counts,
            mean_keys,
            mean_values,
            log_counts,
        ),
        (*strides, num_keys, plan.chunk_keys, plan.num_chunks, plan.num_pieces),
        plan.aggregate,
    )
    if mean_keys is not None:
        codes = mean_keys
    assert codes is not None
    return codes, mean_values, log_counts


class _Plan(NamedTuple):
    """What the problem size decides about the launches.

    num_chunks, chunk_keys: chunks that hold keys, and keys of each but the last.
    num_pieces: most pieces that keys of one head can be cut into.
    integers, piece_sums, mean_keys, means, log_counts: shapes of outputs and workspaces of a head.
    sort, aggregate: constants and options of the kernels.
    """

    num_chunks: int
    chunk_keys: int
    num_pieces: int
    integers: tuple[tuple[int, ...], ...]
    piece_sums: tuple[int, ...]
    mean_keys: tuple[int, ...]
    means: tuple[int, ...]
    log_counts: tuple[int, ...]
    sort: dict[str, object]
    aggregate: dict[str, object]


@cache
def _plan(
    num_heads: int,
    num_keys: int,
    head_dim: int,
    num_parents: int,
    num_children: int,
    dtype: torch.dtype,
    align: int,
    means: bool,
    scale: float,
    tiling: PrecomputeTiling | None,
) -> _Plan:
    padded_dim, parent_rows, child_rows = padded_sizes(head_dim, num_parents, num_children)
    tiling = tiling or default_tiling(
        num_heads, num_keys, padded_dim, num_parents, num_children, dtype, means
    )
    code_rows = parent_rows + num_parents * child_rows
    leaf_rows = max(16, 2 * child_rows)
    # Products and strips both divide a chunk.
    tile_keys = max(tiling.sort_keys, 32 * tiling.sort_warps)
    chunk_keys = -(-num_keys // (tile_keys * tiling.num_chunks)) * tile_keys
    num_pieces = parent_rows + num_keys // tiling.piece_keys
    sort_parents = min(tiling.sort_parents, parent_rows)
    resident_rows = parent_rows + tiling.sort_stages * tiling.sort_keys
    resident_bytes = resident_rows * padded_dim * (4 if dtype == torch.float32 else 2)
    sizes = {
        "CODE_ROWS": code_rows,
        "NUM_PARENTS": num_parents,
        "HEAD_DIM": head_dim,
        "PADDED_DIM": padded_dim,
        "PARENT_ROWS": parent_rows,
        "NUM_CHUNKS": tiling.num_chunks,
        "ALIGN": align,
    }
    return _Plan(
        num_chunks=-(-num_keys // chunk_keys),
        chunk_keys=chunk_keys,
        num_pieces=num_pieces,
        integers=(
            (tiling.num_chunks, chunk_keys),
            (num_keys,),
            (tiling.num_chunks, tiling.sort_warps, parent_rows),
            (parent_rows + 1, tiling.num_chunks),
            (parent_rows,),
            (num_pieces, leaf_rows),
        ),
        piece_sums=(num_pieces, leaf_rows * (1 + means), padded_dim),
        mean_keys=(parent_rows + code_rows, padded_dim),
        means=(parent_rows + code_rows, mean_columns(head_dim)),
        log_counts=(parent_rows * means + code_rows,),
        sort={
            **sizes,
            "KEYS": tiling.sort_keys,
            "PARENTS": sort_parents,
            "STRIPS": tiling.sort_warps,
            "RESIDENT": sort_parents == parent_rows or resident_bytes <= tiling.sort_shared,
            "num_warps": tiling.sort_warps,
            "num_stages": tiling.sort_stages,
        },
        aggregate={
            **sizes,
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
    )
