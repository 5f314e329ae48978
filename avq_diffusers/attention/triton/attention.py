"""Flash AVQ-attention kernel (paper, Algorithm 2): one launch, one program per query tile.

    importance_p = sum_i n_p exp(q_i . c_p) / sum_r n_r exp(q_i . c_r)   queries i of a tile
    y_i = sum_a n_a exp(q_i . c_a) mean_a / sum_a n_a exp(q_i . c_a)     codewords a that it sees

A tile sees all parents and the children of its `num_refined` most important parents. A refined
parent stands only for the keys that stay with it. So the result is exact for any codebook; the
paper's correction is exact only if every parent is the mean of its children.

Logits are in base 2 and include the log2 count. An empty codeword has logit -inf: it neither moves
a maximum nor adds anything.

Weights are relative to a maximum of the logits, `running_max`. With RUNNING it grows with every
block and the sums are rescaled. Without RUNNING, which is faster, it is the largest logit of a
parent (of the first block of parents if all are refined, or none). A child may exceed it by far, or
all keys may be with children far below it. Where the weights leave the range of float16, the tile
is computed again with RUNNING.

Shapes: B batch, H heads, N queries, D head dim, M0 parents, C children, P refined parents. Padded
to powers of two, D is DP, M0 is MP (at least 16) and C is CP (0 without children).

Rows of `means`: MP parents with all their keys, MP parents with the keys that stay, then CP
children of each of the M0 parents. With MEANS, `codes` and `log_counts` of each batch element have
the same rows. Stored codewords need no rows for the keys that stay: a refined parent is weighted by
all its keys, and columns of `means` from D on hold the share of those that stay.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from avq_diffusers.attention.triton.codewords import mean_columns, padded_sizes
from avq_diffusers.attention.triton.exact import exact_of_tile, sinks_of_head
from avq_diffusers.attention.triton.launch import (
    STRIDES,
    Launch,
    Part,
    Plan,
    capability_of,
    kernel_layout,
    pointer,
)
from avq_diffusers.attention.triton.softmax import Sizes, Tables
from avq_diffusers.attention.triton.tile import attend_tile


@triton.jit
def _load_query(
    row_pointers,
    first,
    valid,
    HEAD_DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    codes_ptr,
):
    """Columns from `first` on, in the dtype of the codes."""
    column = first + tl.arange(0, WIDTH)
    is_number = valid[:, None] & (column < HEAD_DIM)[None, :]
    block = tl.load(row_pointers + column[None, :], mask=is_number, other=0.0)
    return block.to(codes_ptr.dtype.element_ty)


@triton.jit
def _store_output(row_pointers, first, valid, output, HEAD_DIM: tl.constexpr):
    """Columns from `first` on."""
    column = first + tl.arange(0, output.shape[1])
    is_number = valid[:, None] & (column < HEAD_DIM)[None, :]
    tl.store(row_pointers + column[None, :], output, mask=is_number)


@triton.jit(
    do_not_specialize=[
        "num_queries",
        "query_stride_batch",
        "query_stride_head",
        "num_keys",
        "exact_keys",
        "key_stride_batch",
        "key_stride_head",
        "key_stride_token",
        "value_stride_batch",
        "value_stride_head",
        "value_stride_token",
        "num_sinks",
        "sink_key_stride_batch",
        "sink_key_stride_head",
        "sink_key_stride_token",
        "sink_value_stride_batch",
        "sink_value_stride_head",
        "sink_value_stride_token",
    ]
)
def _attention_kernel(
    query_ptr,
    query_order_ptr,
    codes_ptr,
    means_ptr,
    log_counts_ptr,
    spread_ptr,
    refined_ptr,
    output_ptr,
    key_ptr,
    value_ptr,
    sink_key_ptr,
    sink_value_ptr,
    centre_ptr,
    leaf_order_ptr,
    row_start_ptr,
    row_count_ptr,
    row_weight_ptr,
    score_ptr,
    row_ptr,
    ranked_row_ptr,
    first_ptr,
    num_queries,
    query_stride_batch,
    query_stride_head,
    num_keys,
    exact_keys,
    key_stride_batch,
    key_stride_head,
    key_stride_token,
    value_stride_batch,
    value_stride_head,
    value_stride_token,
    num_sinks,
    sink_key_stride_batch,
    sink_key_stride_head,
    sink_key_stride_token,
    sink_value_stride_batch,
    sink_value_stride_head,
    sink_value_stride_token,
    QUERY_STRIDE_TOKEN: tl.constexpr,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    NUM_PARENTS: tl.constexpr,
    NUM_CHILDREN: tl.constexpr,
    NUM_REFINED: tl.constexpr,
    QUERY_TILE: tl.constexpr,
    IMPORTANCE_TILE: tl.constexpr,
    PARENT_ROWS: tl.constexpr,
    CHILD_ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    REST_D: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    MEAN_COLUMNS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_P: tl.constexpr,
    RUNNING: tl.constexpr,
    AGAIN_M: tl.constexpr,
    AGAIN_P: tl.constexpr,
    MEANS: tl.constexpr,
    OWN_CENTRE: tl.constexpr,
    FACTOR: tl.constexpr,
    VISIBLE: tl.constexpr,
    LOG2_VISIBLE: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_K: tl.constexpr,
    ALIGN: tl.constexpr,
):
    num_tiles = tl.num_programs(0) // HEADS
    # Heads first: the rows of neighbouring heads share cache lines.
    head = tl.program_id(0) % HEADS
    tile = tl.program_id(0) // HEADS
    batch = tl.program_id(1).to(tl.int64)

    MEAN_ROWS: tl.constexpr = 2 * PARENT_ROWS + NUM_PARENTS * CHILD_ROWS
    CODE_ROWS: tl.constexpr = MEAN_ROWS if MEANS else MEAN_ROWS - PARENT_ROWS
    query_start = batch * query_stride_batch + head.to(tl.int64) * query_stride_head
    query_ptr += tl.multiple_of(query_start, 8)
    code_head = batch * HEADS + head if MEANS else head
    codes_ptr += code_head * (CODE_ROWS * PADDED_DIM)
    means_ptr += (batch * HEADS + head) * (MEAN_ROWS * MEAN_COLUMNS)
    log_counts_ptr += (batch * HEADS + head) * CODE_ROWS
    if MEANS:
        spread_ptr += (batch * HEADS + head) * PARENT_ROWS
    output_ptr += batch * num_queries * (HEADS * HEAD_DIM) + head * HEAD_DIM

    row = tl.arange(0, BLOCK_N)
    token = tile * QUERY_TILE + row
    valid_query = (row < QUERY_TILE) & (token < num_queries)
    if query_order_ptr is not None:
        token = tl.load(query_order_ptr + token, mask=valid_query, other=0).to(tl.int32)

    # (BLOCK_N, BLOCK_D) and (BLOCK_N, REST_D)
    query_ptr += token[:, None] * QUERY_STRIDE_TOKEN
    query = (_load_query(query_ptr, 0, valid_query, HEAD_DIM, BLOCK_D, codes_ptr),)
    if REST_D > 0:
        query += (_load_query(query_ptr, BLOCK_D, valid_query, HEAD_DIM, REST_D, codes_ptr),)

    SELECTS: tl.constexpr = NUM_REFINED > 0 and NUM_REFINED < NUM_PARENTS
    if SELECTS:
        refined_ptr += ((batch * HEADS + head) * num_tiles + tile) * NUM_REFINED
    EXACT: tl.constexpr = score_ptr is not None
    SINKS: tl.constexpr = sink_key_ptr is not None
    exact = None
    sinks = None
    if EXACT or SINKS:
        centre_ptr += (batch * HEADS + head if OWN_CENTRE else head) * PADDED_DIM
    if EXACT:
        exact = exact_of_tile(
            key_ptr,
            value_ptr,
            centre_ptr,
            leaf_order_ptr,
            row_start_ptr,
            row_count_ptr,
            row_weight_ptr,
            score_ptr,
            row_ptr,
            ranked_row_ptr,
            first_ptr,
            batch,
            head,
            (batch * HEADS + head) * num_tiles + tile,
            num_keys,
            exact_keys,
            key_stride_batch,
            key_stride_head,
            key_stride_token,
            value_stride_batch,
            value_stride_head,
            value_stride_token,
            HEADS,
            MEAN_ROWS,
            VISIBLE,
            ALIGN,
        )
    if SINKS:
        sinks = sinks_of_head(
            sink_key_ptr,
            sink_value_ptr,
            centre_ptr,
            batch,
            head,
            num_sinks,
            sink_key_stride_batch,
            sink_key_stride_head,
            sink_key_stride_token,
            sink_value_stride_batch,
            sink_value_stride_head,
            sink_value_stride_token,
            ALIGN,
        )
    # Assigned to a variable, sizes would no longer be constants.
    softmax, total, _ = attend_tile(
        query,
        valid_query,
        Tables(codes_ptr, means_ptr, log_counts_ptr, spread_ptr, refined_ptr),
        exact,
        sinks,
        Sizes(
            HEAD_DIM,
            NUM_PARENTS,
            NUM_CHILDREN,
            NUM_REFINED,
            PARENT_ROWS,
            CHILD_ROWS,
            BLOCK_D,
            REST_D,
            PADDED_DIM,
            MEAN_COLUMNS,
            SELECTS,
            MEANS,
            EXACT,
            SINKS,
            VISIBLE,
            LOG2_VISIBLE,
            BLOCK_C,
            BLOCK_K,
            FACTOR,
        ),
        IMPORTANCE_TILE,
        BLOCK_M,
        BLOCK_P,
        RUNNING,
        AGAIN_M,
        AGAIN_P,
    )

    inverse = (1.0 / total)[:, None]
    output_ptr += token[:, None] * (HEADS * HEAD_DIM)
    _store_output(output_ptr, 0, valid_query, softmax.numerator[0] * inverse, HEAD_DIM)
    if REST_D > 0:
        _store_output(output_ptr, BLOCK_D, valid_query, softmax.numerator[1] * inverse, HEAD_DIM)


@dataclass(frozen=True)
class AttentionTiling:
    """How a launch is cut. Changes its speed and its last bits, never its meaning.

    num_warps: warps per program; 16 queries per warp fill the registers.
    num_stages: blocks of children in flight; each takes shared memory.
    parents_per_block: refined parents whose children form one block of the online softmax.
    parent_block: parents per block. If it holds all of them, no logit is computed twice.
    max_registers: per thread; fewer let more programs share a multiprocessor.
    rest_columns: columns of a second block after 64; 0 keeps all columns in one block.
    running_max: start with a running maximum.
    """

    num_warps: int
    num_stages: int
    parents_per_block: int
    parent_block: int
    max_registers: int | None = None
    rest_columns: int = 0
    running_max: bool = True


def default_tiling(
    *,
    head_dim: int,
    num_parents: int,
    num_children: int,
    num_refined: int,
    query_tile: int,
    dtype: torch.dtype,
    capability: tuple[int, int],
    keys: bool = False,
) -> AttentionTiling:
    """The tiling for a problem size, measured on an H200; `keys` says that queries meet some."""
    parent_rows = _padded(num_parents)
    child_rows = triton.next_power_of_2(max(num_children, 1))
    tile_rows = _padded(query_tile)
    tiling = AttentionTiling(
        num_warps=triton.cdiv(tile_rows, 16),
        num_stages=1,
        parents_per_block=max(1, 64 // child_rows),
        parent_block=parent_rows if parent_rows <= 128 else 64,
    )
    few_parents = max(1, 32 // child_rows)
    if capability < (9, 0) and (dtype == torch.float32 or head_dim > 64):
        # mma.sync keeps all operands in registers; this does not spill.
        return replace(tiling, parents_per_block=few_parents, parent_block=32)
    if capability < (9, 0) or dtype == torch.float32:
        return tiling if parent_rows <= 64 else replace(tiling, parents_per_block=few_parents)
    # Measured on an H200: fewer instructions and more programs beat more warps. From 96 columns on
    # a fixed maximum is faster on an H100, but with sink keys it spills.
    running_max = head_dim > 64 and (head_dim < 96 or keys)
    tiling = replace(tiling, num_warps=triton.cdiv(tile_rows, 32), running_max=running_max)
    if not 0 < num_refined < num_parents:
        tiling = replace(tiling, parent_block=32)
    if 64 < head_dim < 96:
        return replace(tiling, rest_columns=32)
    if tiling.parent_block <= 64:
        tiling = replace(tiling, parents_per_block=few_parents)
        if head_dim <= 64:
            tiling = replace(tiling, max_registers=128 if num_refined else 144)
    return tiling


def attend(
    query: Tensor,
    codes: Tensor,
    means: Tensor,
    log_counts: Tensor,
    spread: Tensor | None,
    *,
    num_parents: int,
    num_children: int,
    num_refined: int,
    query_tile: int,
    query_order: Tensor | None,
    importance_tile: int | None,
    tiling: AttentionTiling | None = None,
) -> Tensor:
    """Attend to the codewords that each query tile sees.

    Args:
        query: (B, H, N, D) float16, bfloat16 or float32.
        codes, means, log_counts, spread: as `precompute` gives them for the dtype of `query`.
        num_parents: M0.
        num_children: C.
        num_refined: P; 0 is flat VQ-attention.
        query_tile: consecutive queries of `query_order` that share one choice of parents.
        query_order: (N,) int32 or int64 permutation of the queries; None is their own order.
        importance_tile: parents per tile of the tiled importance; None is exact.
        tiling: None takes `default_tiling`.

    Returns:
        (B, H, N, D) view of new (B, N, H, D) memory, dtype of `query`.
    """
    query = kernel_layout(query, 8)
    batch, heads, num_queries, head_dim = query.shape
    parts, launch = attention_launch(
        query.shape,
        query.stride(),
        query.dtype,
        capability_of(query.device),
        order_dtype=None if query_order is None else query_order.dtype,
        num_parents=num_parents,
        num_children=num_children,
        num_refined=num_refined,
        query_tile=query_tile,
        importance_tile=importance_tile,
        means=spread is not None,
        tiling=tiling,
    )
    output = query.new_empty((batch, num_queries, heads, head_dim))
    tensors = {
        "query": query,
        "query_order": query_order,
        "codes": codes,
        "means": means,
        "log_counts": log_counts,
        "spread": spread,
        "output": output,
    }
    inputs = {name: pointer(tensor) for name, tensor in tensors.items()}
    Plan(parts, [launch]).run(inputs, query.device)
    return output.transpose(1, 2)


class TokenLayout(NamedTuple):
    """How many keys there are in a head, and the strides of keys and values."""

    number: int
    strides: tuple[int, ...]

    @classmethod
    def of(cls, key: Tensor, value: Tensor) -> "TokenLayout":
        return cls(key.shape[2], (*key.stride()[:3], *value.stride()[:3]))


def attention_launch(
    shape: Sequence[int],
    strides: Sequence[int],
    dtype: torch.dtype,
    capability: tuple[int, int],
    *,
    order_dtype: torch.dtype | None,
    num_parents: int,
    num_children: int,
    num_refined: int,
    query_tile: int,
    importance_tile: int | None,
    means: bool,
    tiling: AttentionTiling | None = None,
    exact: TokenLayout | None = None,
    exact_keys: int = 0,
    sinks: TokenLayout | None = None,
    own_centre: bool = False,
    scale: float = 0.0,
) -> tuple[dict[str, Part], Launch]:
    """The memory and the launch of `attend`, which may also meet keys.

    Then the launch takes `key`, `value` and what `precompute_launches` leaves of exact keys, or
    `sink_key` and `sink_value`, and `centre` for both. Exact keys need codes of mean keys.

    Args:
        shape, strides: of the queries.
        exact: keys of which the best `exact_keys` of a tile take the place of their codewords.
        sinks: keys that every query meets.
        own_centre: every batch element has its own centre.
        scale: factor on the logits of keys.
    """
    batch, heads, num_queries, head_dim = shape
    tiles = (batch, heads, -(-num_queries // query_tile))
    layouts = {"": exact, "sink_": sinks}
    extra = [stride for layout in layouts.values() if layout for stride in layout.strides]
    align = 8 if all(stride % 8 == 0 for stride in extra) else 1
    constants = launch_constants(
        heads=heads,
        head_dim=head_dim,
        query_stride=strides[2],
        num_parents=num_parents,
        num_children=num_children,
        num_refined=num_refined,
        query_tile=query_tile,
        importance_tile=importance_tile,
        dtype=dtype,
        means=means,
        capability=capability,
        tiling=tiling,
        own_centre=own_centre,
        exact=exact is not None,
        scale=scale,
        align=align,
    )
    numbers = {
        "num_queries": num_queries,
        "query_stride_batch": strides[0],
        "query_stride_head": strides[1],
        "exact_keys": exact_keys,
    }
    int32, float32 = torch.int32, torch.float32
    parts = {"refined": Part((*tiles, num_refined), int32)}
    names = {"query": dtype, "codes": dtype, "means": dtype, "log_counts": float32, "output": dtype}
    if order_dtype is not None:
        names["query_order"] = order_dtype
    if means:
        names["spread"] = float32
    if extra:
        names["centre"] = float32
    for prefix, layout in layouts.items():
        number, key_strides = layout or TokenLayout(0, (0,) * 6)
        numbers["num_sinks" if prefix else "num_keys"] = number
        each = [f"{prefix}{name}_stride_{axis}" for name in ("key", "value") for axis in STRIDES]
        numbers |= {x: stride // align for x, stride in zip(each, key_strides, strict=True)}
        if layout is not None:
            names |= {f"{prefix}key": dtype, f"{prefix}value": dtype}
    if exact is not None:
        columns = (*tiles, constants["VISIBLE"])
        parts |= {
            "score": Part(columns, float32),
            "row": Part(columns, int32),
            "ranked_row": Part(columns, int32),
            "first": Part(columns, int32),
        }
        names |= {"leaf_order": int32, "row_start": int32, "row_count": int32}
        names["row_weight"] = float32
    names |= {name: part.dtype for name, part in parts.items()}
    grid = (heads * tiles[2], batch, 1)
    return parts, Launch(_attention_kernel, grid, names, numbers, constants)


def launch_constants(
    *,
    heads: int,
    head_dim: int,
    query_stride: int,
    num_parents: int,
    num_children: int,
    num_refined: int,
    query_tile: int,
    importance_tile: int | None,
    dtype: torch.dtype,
    means: bool,
    capability: tuple[int, int],
    tiling: AttentionTiling | None,
    own_centre: bool = False,
    exact: bool = False,
    scale: float = 0.0,
    align: int = 8,
) -> dict[str, Any]:
    """Compile-time arguments of the kernel, with the options of its launch.

    Args:
        own_centre: every batch element has its own centre.
        exact: with exact keys.
        scale: of exact or sink keys.
        align: divisor of the strides of keys.
    """
    num_refined = num_refined if num_children else 0
    if tiling is None:
        tiling = default_tiling(
            head_dim=head_dim,
            num_parents=num_parents,
            num_children=num_children,
            num_refined=num_refined,
            query_tile=query_tile,
            dtype=dtype,
            capability=capability,
            keys=scale != 0,
        )
    padded_dim, parent_rows, child_rows = padded_sizes(head_dim, num_parents, num_children)
    selects = 0 < num_refined < num_parents
    if scale and tiling.max_registers:  # keys need more, and three programs still fit
        tiling = replace(tiling, max_registers=168)
    visible = triton.next_power_of_2(parent_rows + num_refined * child_rows) if exact else 0
    tile = min(importance_tile or num_parents, num_parents) if selects else num_parents
    parent_block = min(tiling.parent_block, parent_rows) if tile == num_parents else _padded(tile)
    # 64 keys at once spill where registers are few.
    few_keys = exact or head_dim <= 64 or dtype == torch.float32 or capability < (9, 0)
    # Blocks of the second pass, small enough to take no registers from the first.
    again = parent_block, tiling.parents_per_block
    if parent_block > 64 or exact:
        again = 16, max(1, 16 // max(1, child_rows))
    return {
        "QUERY_STRIDE_TOKEN": query_stride,
        "HEADS": heads,
        "HEAD_DIM": head_dim,
        "NUM_PARENTS": num_parents,
        "NUM_CHILDREN": num_children,
        "NUM_REFINED": num_refined,
        "QUERY_TILE": query_tile,
        "IMPORTANCE_TILE": tile,
        "PARENT_ROWS": parent_rows,
        "CHILD_ROWS": child_rows,
        "BLOCK_N": _padded(query_tile),
        # Cut into 32 + 16 columns, products on an H200 read beyond shared memory with Triton 3.6
        # (triton issues 10486, 11366).
        "BLOCK_D": 64 if tiling.rest_columns else padded_dim,
        "REST_D": tiling.rest_columns,
        "PADDED_DIM": padded_dim,
        "MEAN_COLUMNS": mean_columns(head_dim),
        "BLOCK_M": parent_block,
        "BLOCK_P": tiling.parents_per_block,
        "RUNNING": tiling.running_max,
        "AGAIN_M": again[0],
        "AGAIN_P": again[1],
        "MEANS": means,
        "OWN_CENTRE": own_centre,
        "FACTOR": scale * math.log2(math.e),
        "VISIBLE": visible,
        "LOG2_VISIBLE": max(0, visible.bit_length() - 1),
        "BLOCK_C": 16,
        "BLOCK_K": 32 if few_keys else 64,
        "ALIGN": align,
        "num_warps": tiling.num_warps,
        "num_stages": tiling.num_stages,
        "maxnreg": tiling.max_registers,
    }


def _padded(length: int) -> int:
    """The size of a block that holds `length`: a power of two that tensor cores accept."""
    return max(16, triton.next_power_of_2(length))
