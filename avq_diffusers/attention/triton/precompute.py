"""Precompute: assign each key, then average the keys and values of each codeword.

A key goes to its nearest parent, then to the nearest child if strictly closer, or stays with the
parent (paper, Algorithm 1). Two launches:

    sort        finds the parents of a chunk of keys and stably sorts the chunk by them.
    aggregate   gathers one parent's keys from all chunks and finds their leaves with a small
                matmul. A matmul with the one-hot choice sums their keys and values.

Parents are stored codewords, or keys evenly spaced in the query order. Children are stored, too, or
keys of the cell. Both are read in place: no launch creates codewords.

A parent with many keys is cut into pieces of fixed length. The program that finishes last adds the
pieces in order, so every run gives the same bits.

Shapes: B batch, H heads, S keys, D head dim, M0 parents, C children; DP, MP, CP as in `codewords`;
L leaves of a parent (0 stays, c + 1 is child c) and padding.
"""

from typing import Any, NamedTuple

import torch

from avq_diffusers.attention.triton.aggregate import PiecePointers, aggregate_kernel
from avq_diffusers.attention.triton.first_order import MOST_VALUES, blocks_per_side
from avq_diffusers.attention.triton.launch import Launch, Memory, Pointer
from avq_diffusers.attention.triton.leaf_order import LeafPointers
from avq_diffusers.attention.triton.pieces import CellSizes, Chunks
from avq_diffusers.attention.triton.problem import Given, Problem, alignment_of
from avq_diffusers.attention.triton.rows import KeySizes, ParentPointers, Tables
from avq_diffusers.attention.triton.sort import SortBlocks, SortPointers, sort_kernel
from avq_diffusers.attention.triton.tuning import PrecomputeTiling, precompute_tiling


class Precompute(NamedTuple):
    """The launches that summarize the keys of a call, and what they leave in its memory.

    `arguments` are those of the launches, for further ones that read what these wrote. Among them
    `tables` are what represents the keys, with a row for all keys of each parent, then for those
    that stay with it, then for those of its children:

    - `codes`: stored codewords, or mean keys (B, H, 2 MP + M0 CP, DP) around the centre, times
      scale log2(e).
    - `mean_values`: (B, H, 2 MP + M0 CP, DP), dtype of `codes`.
    - `counts`: (B, H, 2 MP + M0 CP) int32, number of keys; `log_counts`: float32, log2 of it.
    - `spread`: (B, H, 2 MP + M0 CP) float32, mean squared distance of the keys to their mean, in
      units of the codes, if means represent them.
    - `inside`: (B, H, MP, 2) float32, mean spread of a parent's leaves, weighted by their keys, and
      how many leaves with keys it has beyond one.
    - `matrix`: (B, H, DP, DP) float32, the first-order matrix; `largest`: (B, H, blocks, blocks)
      float32, the largest number of each block.
    """

    launches: list[Launch]
    arguments: dict[str, Any]
    centre: Pointer | None  # (B, H, DP) float32, (H, DP) of stored codewords


def precompute_launches(
    problem: Problem, given: Given, memory: Memory, *, leaves: bool = False
) -> Precompute:
    """A call's first launches, which add to its memory.

    With `leaves`, the order of leaves is made even if tiles do not need it. `given` are pointers.
    """
    spec, dtype = problem.spec, problem.dtype
    int32, float32 = torch.int32, torch.float32
    batch, num_heads, num_keys, _ = problem.key.shape
    tiling = precompute_tiling(problem)
    sizes = _sizes(problem)
    has_order = leaves or problem.shows_keys
    cells = _cells(problem, tiling, has_leaves=has_order)
    # A chunk is a multiple of both matmul blocks and strips.
    block_keys = max(tiling.sort_keys, 32 * tiling.sort_warps)
    chunk_keys = -(-num_keys // (block_keys * tiling.num_chunks)) * block_keys
    chunks = Chunks(num_keys, chunk_keys, -(-num_keys // chunk_keys))
    summed = _summed(problem, tiling)
    # Upper bound on the pieces of one head's keys.
    num_pieces = cells.PARENT_ROWS + num_keys // tiling.piece_keys

    def part(*shape: int, dtype: torch.dtype = int32, when: bool = True) -> Pointer | None:
        """A pointer to a new part, (B, H, *shape); None unless `when`."""
        return memory.add((batch, num_heads, *shape), dtype) if when else None

    means, parent_rows, leaf_rows = spec.means, cells.PARENT_ROWS, cells.LEAF_ROWS
    follows, dim = problem.has_first_order, sizes.PADDED_DIM
    side = blocks_per_side(dim)
    sort = SortPointers(
        rank=part(tiling.num_chunks, chunk_keys),
        order=part(num_keys),
        count=part(tiling.num_chunks, tiling.sort_warps, parent_rows),
        start=part(parent_rows + 1, tiling.num_chunks),
        ticket=part(parent_rows),
        square=part(num_keys, dtype=float32, when=means),
    )
    pieces = PiecePointers(
        part(num_pieces, leaf_rows * (1 + means), dim, dtype=float32),
        part(num_pieces, leaf_rows),
        part(num_pieces, leaf_rows, dtype=float32, when=means),
    )
    tables = Tables(
        codes=part(cells.ROWS, dim, dtype=dtype) if means else given.stored_codes,
        mean_values=part(cells.ROWS, dim, dtype=dtype),
        counts=part(cells.ROWS),
        log_counts=part(cells.ROWS, dtype=float32),
        spread=part(cells.ROWS, dtype=float32, when=means),
        inside=part(parent_rows, 2, dtype=float32, when=means),
        matrix=part(dim, dim, dtype=float32, when=follows),
        largest=part(side, side, dtype=float32, when=follows),
    )
    centre = given.centre or part(dim, dtype=float32)
    arguments = {
        "key_ptr": given.key,
        "value_ptr": given.value,
        "centre_ptr": centre,
        "leaf_ptr": part(num_keys, when=cells.LEAVES),
        "piece_counts_ptr": pieces.piece_counts,
        "covariance_ptr": part(summed.number, dim, dim, dtype=float32, when=follows),
        "source": ParentPointers(given.stored_codes, given.bias, given.key_order),
        "sort": sort,
        "pieces": pieces,
        "tables": tables,
        "leaves": LeafPointers(part(num_keys, when=has_order), part(cells.ROWS, when=has_order)),
        "key_strides": problem.key.divided(sizes.ALIGN),
        "value_strides": problem.value.divided(sizes.ALIGN),
        "chunks": chunks,
        "summed": summed,
        "num_pieces": num_pieces,
        "CELLS": cells,
    }
    sort_arguments = arguments | {"SIZES": sizes, "BLOCKS": _sort_blocks(problem, tiling, sizes)}
    piece_arguments = arguments | {"SIZES": sizes, "KEYS": tiling.leaf_keys}
    parts = -(-dim // MOST_VALUES.value) if follows else 0
    launches = [
        Launch(
            sort_kernel,
            (num_heads, batch, chunks.number + parts * summed.number),
            sort_arguments,
            num_warps=tiling.sort_warps,
            num_stages=tiling.sort_stages,
        ),
        Launch(
            aggregate_kernel,
            (num_heads, batch, num_pieces),
            piece_arguments,
            num_warps=tiling.leaf_warps,
            num_stages=tiling.leaf_stages,
        ),
    ]
    return Precompute(launches, arguments, centre)


def _sizes(problem: Problem) -> KeySizes:
    spec, head_dim = problem.spec, problem.key.shape[3]
    padded_dim, parent_rows, child_rows = problem.padded_sizes
    return KeySizes(
        HEAD_DIM=head_dim,
        PADDED_DIM=padded_dim,
        NUM_PARENTS=spec.num_parents,
        PARENT_ROWS=parent_rows,
        CODE_ROWS=parent_rows + spec.num_parents * child_rows,
        ALIGN=alignment_of(problem.key, problem.value),
        MEANS=spec.means,
        STORED=problem.is_stored,
        ORDERED=problem.key_order is not None,
    )


def _summed(problem: Problem, tiling: PrecomputeTiling) -> Chunks:
    """The chunks whose covariances are summed by one program each."""
    num_keys = problem.key.shape[2]
    length = -(-max(512, -(-num_keys // 16)) // tiling.sort_keys) * tiling.sort_keys
    return Chunks(num_keys, length, -(-num_keys // length))


def _cells(problem: Problem, tiling: PrecomputeTiling, *, has_leaves: bool) -> CellSizes:
    spec = problem.spec
    _, parent_rows, child_rows = problem.padded_sizes
    return CellSizes(
        NUM_PARENTS=spec.num_parents,
        NUM_CHILDREN=spec.num_children,
        PARENT_ROWS=parent_rows,
        CHILD_ROWS=child_rows,
        LEAF_ROWS=max(16, 2 * child_rows),
        ROWS=problem.num_rows,
        NUM_CHUNKS=tiling.num_chunks,
        PIECE=tiling.piece_keys,
        FACTOR=problem.factor,
        LEAVES=has_leaves,
    )


def _sort_blocks(problem: Problem, tiling: PrecomputeTiling, sizes: KeySizes) -> SortBlocks:
    sort_parents = min(tiling.sort_parents, sizes.PARENT_ROWS)
    resident_rows = sizes.PARENT_ROWS + tiling.sort_stages * tiling.sort_keys
    resident_bytes = resident_rows * sizes.PADDED_DIM * problem.dtype.itemsize
    return SortBlocks(
        NUM_CHUNKS=tiling.num_chunks,
        KEYS=tiling.sort_keys,
        PARENTS=sort_parents,
        STRIPS=tiling.sort_warps,
        RESIDENT=sort_parents == sizes.PARENT_ROWS or resident_bytes <= tiling.sort_shared,
        FIRST_ORDER=problem.has_first_order,
        FACTOR=problem.factor,
    )
