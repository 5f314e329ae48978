"""The backward kernels: gradients of AVQ attention with means as codewords.

The forward kernels summarize the keys and make the choices again. Three launches follow:
`column_gradients`, and the two of `key_gradients`. There are no atomics: every run gives the same
bits.

Shapes: as in `call`.
"""

from functools import lru_cache, partial

import torch
from torch import Tensor

from avq_diffusers.attention.tensors import Tensors
from avq_diffusers.attention.triton.attention import attention_launch
from avq_diffusers.attention.triton.call import run_fitting
from avq_diffusers.attention.triton.codewords import StoredCodes, padded
from avq_diffusers.attention.triton.column_gradients import (
    ColumnGradients,
    GradientBlocks,
    column_gradients_kernel,
)
from avq_diffusers.attention.triton.key_gradients import (
    ExactPointers,
    key_gradients_kernel,
    leaf_gradients_kernel,
)
from avq_diffusers.attention.triton.launch import (
    MOST_PLANS,
    Launch,
    Part,
    Plan,
    Pointer,
    address,
    group,
    kernel_layout,
)
from avq_diffusers.attention.triton.precompute import precompute_launches
from avq_diffusers.attention.triton.problem import (
    Layout,
    Problem,
    Strides,
    addresses_of,
    readable,
)
from avq_diffusers.attention.triton.softmax import TileSizes
from avq_diffusers.attention.triton.tuning import gradient_tiling
from avq_diffusers.config import Spec

# Most bytes of column gradients per launch, unless a single batch element needs more.
COLUMN_BYTES = 1 << 30


def serves(query: Tensor, *, means: bool) -> bool:
    """Whether these kernels serve a call that the forward kernels served.

    Two float32 tiles do not fit shared memory, and stored codewords have other gradients.
    """
    return query.dtype != torch.float32 and means


def kernel_gradients(
    grad_output: Tensor,
    tensors: Tensors,
    stored: StoredCodes | None,
    parents: Tensor | None,
    spec: Spec,
) -> list[Tensor]:
    """Gradients of query, key, value and any sinks, on the current device.

    They are views of new (B, N, H, D) memory, dtype of the queries. Arguments as in
    `call.kernel_attention`.
    """
    tokens = dict(zip(Tensors._fields, tensors.tokens(), strict=False))
    grads = {
        f"grad_{name}": x.new_empty(x.transpose(1, 2).shape).transpose(1, 2)
        for name, x in tokens.items()
        if x is not None
    }
    batch, heads, num_queries, head_dim = tensors.query.shape
    columns = spec.num_visible + spec.exact_keys
    columns += 0 if tensors.sink_key is None else tensors.sink_key.shape[2]
    num_tiles = -(-num_queries // spec.query_tile)
    size = max(1, COLUMN_BYTES // (heads * num_tiles * columns * 8 * head_dim))
    for start in range(0, batch, size):
        part = slice(start, start + size)
        of_part = readable(tensors.part(part))
        part_parents = None if parents is None else parents[part]
        grad = kernel_layout(grad_output[part], 8)
        problem = Problem.of(of_part, stored, part_parents, spec)
        addresses = addresses_of(of_part, stored, part_parents)
        addresses["grad_output"] = address(grad)
        addresses |= {name: address(x[part]) for name, x in grads.items()}
        make_plan = partial(_plan, grad_output=Layout.of(grad))
        plan, memory = run_fitting(make_plan, problem, addresses)
        if "grad_sink_key" in grads:
            of_sinks = plan.part(memory, "sink_column").sum(dim=2)
            grads["grad_sink_value"][part] = of_sinks[..., :head_dim]
            grads["grad_sink_key"][part] = of_sinks[..., head_dim:] * tensors.scale
    return list(grads.values())


@lru_cache(MOST_PLANS)
def _plan(problem: Problem, grad_output: Layout) -> Plan:
    spec, dtype = problem.spec, problem.dtype
    tiling = gradient_tiling(problem)
    precompute = precompute_launches(problem, leaves=True)
    attention = attention_launch(problem, precompute.pointers, tiling.choice)
    parts = precompute.parts | attention.parts | _parts(problem, attention.arguments["SIZES"])
    given = ("grad_output", "grad_query", "grad_key", "grad_value")
    pointers = {
        **dict.fromkeys((*ColumnGradients._fields, *ExactPointers._fields)),
        **attention.pointers,
        **{name: Pointer(name, part.dtype) for name, part in parts.items()},
        **{name: Pointer(name, dtype) for name in given},
    }
    sizes, cells = attention.arguments["SIZES"], precompute.arguments["CELLS"]
    child_rows = max(1, sizes.CHILD_ROWS)
    arguments = {
        **attention.arguments,
        **{f"{name}_ptr": pointer for name, pointer in pointers.items()},
        "gradients": group(ColumnGradients, pointers),
        "exact": group(ExactPointers, pointers),
        "num_tiles": problem.num_tiles,
        "grad_strides": Strides(*grad_output.strides[:3]),
        "chunks": precompute.arguments["chunks"],
        "CELLS": cells,
        "GRAD_STRIDE": grad_output.strides[2],
        "GRADIENT_BLOCKS": GradientBlocks(
            min(tiling.columns, sizes.PARENT_ROWS), max(1, tiling.columns // child_rows)
        ),
        "WIDTH": padded(2 * sizes.HEAD_DIM),
        "TILES": tiling.leaf_tiles,
        "KEYS": tiling.keys,
        "SCALE": problem.scale,
    }
    options = {"num_warps": tiling.choice.num_warps, "num_stages": 1}
    of_leaves = {"num_warps": tiling.leaf_warps, "num_stages": 1}
    of_keys = {"num_warps": 1, "num_stages": 1}
    batch, heads, _, _ = problem.query.shape
    by_parent = spec.num_parents, heads, batch
    by_piece = precompute.launches[1].grid
    return Plan(
        parts,
        [
            *precompute.launches,
            Launch(column_gradients_kernel, attention.launch.grid, arguments, **options),
            Launch(leaf_gradients_kernel, by_parent, arguments, **of_leaves),
            Launch(key_gradients_kernel, by_piece, arguments, **of_keys),
        ],
    )


def _parts(problem: Problem, sizes: TileSizes) -> dict[str, Part]:
    batch, heads, _, head_dim = problem.query.shape
    tiles = (batch, heads, problem.num_tiles)
    width = 2 * head_dim
    columns = sizes.PARENT_ROWS + sizes.NUM_REFINED * sizes.CHILD_ROWS
    leaves = (batch, heads, sizes.NUM_PARENTS, 1 + sizes.CHILD_ROWS, width)
    parts = {
        "column": Part((*tiles, columns, width), torch.float32),
        "leaf_gradients": Part(leaves, problem.dtype),
    }
    if problem.exact_keys:
        parts["exact_column"] = Part((*tiles, problem.exact_keys, width), torch.float32)
        parts["exact_slot"] = Part((*leaves[:3], problem.num_tiles), torch.int32)
    if problem.sinks:
        parts["sink_column"] = Part((*tiles, problem.num_sinks, width), torch.float32)
    return parts
