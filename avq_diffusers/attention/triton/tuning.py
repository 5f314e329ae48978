"""Tilings of the kernels, as data, and the functions that choose them.

A tiling changes a kernel's speed and last bits, never its meaning.
"""

from dataclasses import dataclass, replace

import torch

from avq_diffusers.attention.triton.codewords import padded
from avq_diffusers.attention.triton.problem import Problem


@dataclass(frozen=True)
class AttentionTiling:
    """How the work of a query tile is split."""

    num_warps: int  # warps per program; 16 queries per warp fill the registers
    num_stages: int  # blocks of columns in flight; each takes shared memory
    codewords: int  # per block of the online softmax
    keys: int  # keys or sinks per block
    leaves: int = 32  # leaves whose keys are found at once
    max_registers: int | None = None  # per thread; fewer let more programs share a multiprocessor
    rest_dims: int = 0  # dims of a second block after 64; 0 keeps all dims in one block


# Most columns per block, by how often a tiling was made smaller.
BLOCK_SIZES = (128, 32, 16)
MOST_REDUCED = len(BLOCK_SIZES) - 1


def attention_tiling(problem: Problem) -> AttentionTiling:
    """The tiling of the attend kernel, measured on an H200."""
    tiling = _attention_tiling(problem)
    columns = BLOCK_SIZES[problem.reduction]
    return replace(
        tiling,
        codewords=min(columns, tiling.codewords),
        keys=min(columns, tiling.keys),
        leaves=min(columns, tiling.leaves),
    )


def _attention_tiling(problem: Problem) -> AttentionTiling:
    spec, dtype, has_mma = problem.spec, problem.dtype, problem.instructions == "mma"
    head_dim = problem.query.shape[3]
    tile_rows = padded(spec.query_tile, 16)
    tiling = AttentionTiling(num_warps=-(-tile_rows // 16), num_stages=1, codewords=32, keys=32)
    if has_mma or dtype == torch.float32:
        return tiling
    # Measured on an H200, so that two programs share a multiprocessor.
    if head_dim <= 64:
        most = 128 if problem.instructions == "wgmma" else None
        return replace(tiling, num_stages=2, codewords=64, keys=64, max_registers=most)
    if head_dim < 96:
        num_warps = -(-tile_rows // 32)
        return replace(tiling, num_warps=num_warps, num_stages=2, rest_dims=32)
    return replace(tiling, num_stages=3, codewords=64, keys=64)


@dataclass(frozen=True)
class SelectTiling:
    """How the choice of columns is split."""

    num_warps: int
    rows: int  # parents, stays, children or sinks per matmul
    keys: int = 128  # that a program of the leaf order places at once, at most 255
    max_registers: int | None = None  # per thread; fewer let more programs share a multiprocessor


def select_tiling(problem: Problem) -> SelectTiling:
    """The tiling of the select kernel, measured on an H200."""
    num_warps = max(1, padded(problem.num_samples, 16) // 32)
    most = 32 if problem.dtype == torch.float32 else 64
    if num_warps > 2 and problem.instructions == "tcgen05":
        # Four warps keep logits in tensor memory, where Triton 3.7 cannot add them up both ways.
        num_warps, most = 2, 32
    tiling = SelectTiling(num_warps, min(BLOCK_SIZES[problem.reduction], most))
    is_narrow = problem.query.shape[3] <= 64 and problem.dtype != torch.float32
    if num_warps == 1 and is_narrow and problem.instructions == "wgmma":
        return replace(tiling, max_registers=128)
    return tiling


@dataclass(frozen=True)
class PrecomputeTiling:
    """How the work on a call's keys is split.

    sort_keys, sort_parents: keys and parents per matmul.
    sort_warps, sort_stages: for the sort; each warp ranks its own strip of a chunk.
    leaf_warps, leaf_stages: for the aggregation.
    """

    num_chunks: int  # chunks that a head's keys are sorted in, a power of two
    sort_keys: int
    sort_parents: int
    # Bytes of shared memory for all codes and the key tiles; larger codes are reloaded for every
    # key tile.
    sort_shared: int
    sort_warps: int
    sort_stages: int
    piece_keys: int  # keys of one parent that one program aggregates
    leaf_keys: int  # keys per matmul
    leaf_warps: int
    leaf_stages: int


def precompute_tiling(problem: Problem) -> PrecomputeTiling:
    """The tiling of sort and aggregation, measured on an H200 for half precision.

    Float32 takes smaller tiles to fit registers and shared memory.
    """
    tiling = _precompute_tiling(problem)
    if not problem.reduction:
        return tiling
    columns = BLOCK_SIZES[problem.reduction]
    return replace(
        tiling,
        sort_keys=columns,
        sort_parents=columns,
        sort_shared=24 * 1024,
        sort_stages=1,
        leaf_keys=columns,
        leaf_stages=1,
    )


def _precompute_tiling(problem: Problem) -> PrecomputeTiling:
    spec, means = problem.spec, problem.spec.means
    batch, heads, num_keys, _ = problem.key.shape
    padded_dim, _, _ = problem.padded_sizes
    most_chunks = 16 if spec.num_children == 0 else 64 if spec.num_parents <= 64 else 32
    # Enough pieces to fill the GPU, however the keys are distributed over the parents.
    piece_keys = batch * heads * num_keys * padded_dim >> 16
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
    if spec.num_children > 16:
        tiling = replace(tiling, leaf_keys=64, leaf_warps=4)
    elif means:
        tiling = replace(tiling, piece_keys=min(tiling.piece_keys, 1024))
    if problem.dtype == torch.float32:
        return replace(
            tiling,
            sort_keys=32,
            sort_shared=24 * 1024,
            sort_stages=1,
            leaf_keys=32,
            leaf_warps=4,
            leaf_stages=1,
        )
    return tiling


@dataclass(frozen=True)
class GradientTiling:
    """How the gradients are split.

    num_warps: for gradients of rows and keys.
    """

    attention: AttentionTiling  # for the gradients of a query tile
    rows: int  # of the tables whose gradients one program sums
    keys: int  # whose gradients one program writes
    tiles: int  # whose levels are read at once
    num_warps: int


def gradient_tiling(problem: Problem) -> GradientTiling:
    """The tiling of the gradients."""
    columns = min(32, BLOCK_SIZES[problem.reduction])
    rows = padded(problem.spec.query_tile, 16)
    attention = AttentionTiling(
        num_warps=-(-rows // 16), num_stages=1, codewords=columns, keys=columns, leaves=columns
    )
    # Sums of more than 64 dims spill with fewer.
    num_warps = 8 if problem.query.shape[3] > 64 else 4
    return GradientTiling(attention, rows=columns, keys=columns, tiles=32, num_warps=num_warps)


def clamped_power_of_2(number: int, least: int, most: int) -> int:
    """The largest power of two up to `number`, clamped to `least` and `most`."""
    return min(most, max(least, 1 << (max(number, 1).bit_length() - 1)))
