"""Precompute: assign each key, then average the keys and values of each codeword.

A key goes to its nearest parent, then to the nearest child if strictly closer, or stays with the
parent (paper, Algorithm 1). Two or three launches:

    sort        finds the parents of a chunk of keys and stably sorts the chunk by them.
    aggregate   gathers one parent's keys from all chunks and finds their leaves with a small
                matmul. A matmul with the one-hot choice sums their keys and values.
    leaf order  sorts each cell's keys by leaf, if queries attend to exact keys.

Parents are stored codewords, or keys evenly spaced in the query order, possibly moved by `updates`.
Children are stored, too, or keys of the cell. Both are read in place: no launch here creates
codewords.

A parent with many keys is cut into pieces of fixed length. The program that finishes last adds the
pieces in order, so every run gives the same bits.

Shapes: B batch, H heads, S keys, D head dim, M0 parents, C children; DP, MP, CP as in `codewords`;
L leaves of a parent (0 stays, c + 1 is child c) and padding.
"""

import math
from typing import Any, NamedTuple

import torch

from avq_diffusers.attention.triton.aggregate import (
    CellPointers,
    PiecePointers,
    RowPointers,
    aggregate_kernel,
)
from avq_diffusers.attention.triton.codewords import padded_sizes, value_columns
from avq_diffusers.attention.triton.launch import Launch, Part, Pointer, group
from avq_diffusers.attention.triton.leaf_order import LeafPointers, leaf_order_kernel
from avq_diffusers.attention.triton.pieces import CellSizes, Chunks
from avq_diffusers.attention.triton.problem import Problem, strides_of
from avq_diffusers.attention.triton.rows import KeySizes, ParentPointers
from avq_diffusers.attention.triton.sort import SortBlocks, SortPointers, sort_kernel
from avq_diffusers.attention.triton.tuning import (
    LEAF_ORDER_KEYS,
    PrecomputeTiling,
    precompute_tiling,
)


class Precompute(NamedTuple):
    """The launches that summarize the keys of a call.

    The memory holds what represents the keys:

    - `codes`, unless stored codewords represent the keys: mean keys (B, H, 2 MP + M0 CP, DP) around
      the centre, times scale log2(e).
    - `mean_values`: (B, H, 2 MP + M0 CP, DV), dtype of `codes`; DV = `value_columns`. Row p
      averages the values of all keys of parent p, row 2 MP + p CP + c those of its child c, and row
      MP + p those that stay with p; unless means represent the keys, the latter's divisor is the
      number of all keys of p. Columns from D on hold the row's number of keys over the divisor. A
      row without keys is 0.
    - `log_counts`: float32, log2 of the number of keys per row of the codes.
    - `variance`: (B, H, MP) float32, mean squared distance of a parent's keys from their mean, if
      means represent them.
    - `centre`: (B, H, DP) float32, unless codewords are stored.

    If tiles have exact keys, it also holds `LeafPointers` and

    - `row_weight`: (B, H, 2 MP + M0 CP) float32, weight of the attention to a row in the choice of
      exact keys: the squared variance of its keys, divided by their number.
    """

    parts: dict[str, Part]  # parts of the memory
    pointers: dict[str, Pointer | None]  # to the memory and to the call's inputs
    launches: list[Launch]
    arguments: dict[str, Any]  # for kernels that run on keys


def precompute_launches(
    problem: Problem, *, leaves: bool = False, tiling: PrecomputeTiling | None = None
) -> Precompute:
    """A call's memory and first launches.

    With `leaves` the memory also holds `leaf`, (B, H, S) int32, each key's leaf in its cell, in the
    order of cells, and with exact keys `place`, its position in `leaf_order`, in the same order.
    `tiling` defaults to `precompute_tiling`.
    """
    spec, dtype = problem.spec, problem.dtype
    batch, num_heads, num_keys, head_dim = problem.key.shape
    tiling = tiling or precompute_tiling(problem)
    padded_dim, parent_rows, child_rows = padded_sizes(
        head_dim, spec.num_parents, spec.num_children
    )
    rows = 2 * parent_rows + spec.num_parents * child_rows
    # A chunk is a multiple of both matmul tiles and strips.
    tile_keys = max(tiling.sort_keys, 32 * tiling.sort_warps)
    chunk_keys = -(-num_keys // (tile_keys * tiling.num_chunks)) * tile_keys
    chunks = Chunks(num_keys, chunk_keys, -(-num_keys // chunk_keys))
    # Upper bound on the pieces of one head's keys.
    num_pieces = parent_rows + num_keys // tiling.piece_keys
    cells = CellSizes(
        NUM_PARENTS=spec.num_parents,
        NUM_CHILDREN=spec.num_children,
        PARENT_ROWS=parent_rows,
        CHILD_ROWS=child_rows,
        LEAF_ROWS=max(16, 2 * child_rows),
        ROWS=rows,
        NUM_CHUNKS=tiling.num_chunks,
        LOG2_CHUNKS=tiling.num_chunks.bit_length() - 1,
        PIECE=tiling.piece_keys,
    )
    sort_parents = min(tiling.sort_parents, parent_rows)
    resident_rows = parent_rows + tiling.sort_stages * tiling.sort_keys
    resident_bytes = resident_rows * padded_dim * dtype.itemsize
    blocks = SortBlocks(
        NUM_CHUNKS=tiling.num_chunks,
        CODE_ROWS=rows - parent_rows,
        KEYS=tiling.sort_keys,
        PARENTS=sort_parents,
        STRIPS=tiling.sort_warps,
        RESIDENT=sort_parents == parent_rows or resident_bytes <= tiling.sort_shared,
    )
    parts = _parts(problem, cells, chunks, num_pieces, tiling.sort_warps, leaves=leaves)
    align, (key_strides, value_strides) = strides_of(problem.key, problem.value)
    of_parts = {name: Pointer(name, part.dtype) for name, part in parts.items()}
    pointers = problem.pointers() | dict.fromkeys(_OPTIONAL) | of_parts
    arguments = {f"{name}_ptr": pointer for name, pointer in pointers.items()} | {
        "source": group(ParentPointers, pointers),
        "sort": group(SortPointers, pointers),
        "cells": group(CellPointers, pointers),
        "pieces": group(PiecePointers, pointers),
        "tables": group(RowPointers, pointers),
        "leaves_of_rows": group(LeafPointers, pointers),
        "key_strides": key_strides,
        "value_strides": value_strides,
        "chunks": chunks,
        "num_pieces": num_pieces,
        "SIZES": KeySizes(head_dim, padded_dim, spec.num_parents, parent_rows, align),
        "BLOCKS": blocks,
        "CELLS": cells,
        "VALUE_COLUMNS": value_columns(head_dim),
        "FACTOR": problem.scale * math.log2(math.e),
    }
    sort = Launch(
        sort_kernel,
        (num_heads, batch, chunks.number),
        arguments,
        num_warps=tiling.sort_warps,
        num_stages=tiling.sort_stages,
    )
    pieces = num_heads, batch, num_pieces
    aggregate = Launch(
        aggregate_kernel,
        pieces,
        arguments | {"KEYS": tiling.leaf_keys},
        num_warps=tiling.leaf_warps,
        num_stages=tiling.leaf_stages,
        maxnreg=tiling.leaf_registers,
    )
    launches = [sort, aggregate]
    if problem.exact_keys:
        of_leaves = arguments | {"KEYS": LEAF_ORDER_KEYS}
        launches.append(Launch(leaf_order_kernel, pieces, of_leaves, num_warps=1))
    return Precompute(parts, pointers, launches, arguments)


def _parts(
    problem: Problem,
    cells: CellSizes,
    chunks: Chunks,
    num_pieces: int,
    strips: int,
    *,
    leaves: bool,
) -> dict[str, Part]:
    int32, float32 = torch.int32, torch.float32
    heads = problem.key.shape[:2]
    head_dim, means = problem.key.shape[3], problem.spec.means
    padded_dim, parent_rows, _ = padded_sizes(head_dim, problem.spec.num_parents, 0)
    keys, rows = (*heads, chunks.num_keys), (*heads, cells.ROWS)
    piece_leaves = (*heads, num_pieces, cells.LEAF_ROWS)
    parts = {
        "rank": Part((*heads, cells.NUM_CHUNKS, chunks.length), int32),
        "order": Part(keys, int32),
        "count": Part((*heads, cells.NUM_CHUNKS, strips, parent_rows), int32),
        "start": Part((*heads, parent_rows + 1, cells.NUM_CHUNKS), int32),
        "ticket": Part((*heads, parent_rows), int32),
        "piece_counts": Part(piece_leaves, int32),
        "piece_sums": Part((*piece_leaves[:3], cells.LEAF_ROWS * (1 + means), padded_dim), float32),
        "mean_values": Part((*rows, value_columns(head_dim)), problem.dtype),
        "log_counts": Part(rows if means else (*heads, cells.ROWS - parent_rows), float32),
    }
    if not problem.is_stored:
        parts["centre"] = Part((*heads, padded_dim), float32)
    if means:
        parts |= {
            "codes": Part((*rows, padded_dim), problem.dtype),
            "square": Part(keys, float32),
            "piece_squares": Part(piece_leaves, float32),
            "variance": Part((*heads, parent_rows), float32),
        }
    if problem.exact_keys or leaves:
        parts["leaf"] = Part(keys, int32)
    if problem.exact_keys and leaves:
        parts["place"] = Part(keys, int32)
    if problem.exact_keys:
        parts |= {
            "leaf_order": Part(keys, int32),
            "row_start": Part(rows, int32),
            "row_count": Part(rows, int32),
            "row_weight": Part(rows, float32),
        }
    return parts


# Parts that only some calls have.
_OPTIONAL = (
    *("codes", "square", "piece_squares", "variance"),
    *("leaf", "place", "leaf_order", "row_start", "row_count", "row_weight"),
)
