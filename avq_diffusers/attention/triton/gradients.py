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
from avq_diffusers.attention.triton.attention import query_tiles
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
from avq_diffusers.attention.triton.launch import MOST_PLANS, Launch, Memory, Plan, kernel_layout
from avq_diffusers.attention.triton.precompute import precompute_launches
from avq_diffusers.attention.triton.problem import Given, Layout, Problem, given_by, readable
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
    tokens = [x for x in tensors.tokens() if x is not None]
    grads = [x.new_empty(x.transpose(1, 2).shape).transpose(1, 2) for x in tokens]
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
        outputs = None, grad, *(x[part] for x in grads[:3])
        given = given_by(of_part, stored, part_parents, *outputs)
        make_plan = partial(_plan, grad_output=Layout.of(grad))
        problem = Problem.of(of_part, stored, part_parents, spec)
        sink_column = run_fitting(make_plan, problem, given)
        if sink_column is not None:
            of_sinks = sink_column.sum(dim=2)
            grads[3][part] = of_sinks[..., head_dim:] * tensors.scale
            grads[4][part] = of_sinks[..., :head_dim]
    return grads


@lru_cache(MOST_PLANS)
def _plan(problem: Problem, grad_output: Layout) -> Plan:
    spec, float32 = problem.spec, torch.float32
    tiling = gradient_tiling(problem)
    memory = Memory(len(Given._fields))
    given = problem.pointers()
    precompute = precompute_launches(problem, given, memory, leaves=True)
    attention = query_tiles(problem, given, precompute, memory, tiling.choice)
    sizes = attention.sizes
    batch, heads, _, head_dim = problem.query.shape
    tiles, width = (batch, heads, problem.num_tiles), 2 * head_dim
    parents = (batch, heads, spec.num_parents)
    num_columns = sizes.PARENT_ROWS + sizes.NUM_REFINED * sizes.CHILD_ROWS
    columns = ColumnGradients(memory.add((*tiles, num_columns, width), float32))
    exact = ExactPointers()
    if problem.sinks:
        sink_column = memory.add((*tiles, problem.num_sinks, width), float32)
        columns = columns._replace(sink_column=sink_column)
    if problem.exact_keys:
        exact = ExactPointers(
            place=precompute.place,
            row_start=precompute.leaves.row_start,
            first=attention.keys.first,
            exact_slot=memory.add((*parents, problem.num_tiles), torch.int32),
            exact_column=memory.add((*tiles, problem.exact_keys, width), float32),
        )
        columns = columns._replace(exact_column=exact.exact_column)
    grad_strides = grad_output.divided(1)
    arguments = attention.arguments | {
        "grad_output_ptr": given.grad_output,
        "grad_query_ptr": given.grad_query,
        "grad_key_ptr": given.grad_key,
        "grad_value_ptr": given.grad_value,
        "log_counts_ptr": attention.tables.log_counts,
        "refined_ptr": attention.tables.refined,
        "leaf_ptr": precompute.leaf,
        "leaf_gradients_ptr": memory.add((*parents, 1 + sizes.CHILD_ROWS, width), problem.dtype),
        "column_ptr": columns.column,
        "first_ptr": exact.first,
        "exact_slot_ptr": exact.exact_slot,
        "gradients": columns,
        "sort": precompute.sort,
        "exact": exact,
        "chunks": precompute.chunks,
        "num_tiles": problem.num_tiles,
        "grad_strides": grad_strides,
        "CELLS": precompute.cells,
        "GRAD_STRIDE": grad_strides.token,
        "GRADIENT_BLOCKS": GradientBlocks(
            min(tiling.columns, sizes.PARENT_ROWS),
            max(1, tiling.columns // max(1, sizes.CHILD_ROWS)),
        ),
        "WIDTH": padded(width),
        "TILES": tiling.leaf_tiles,
        "KEYS": tiling.keys,
        "SCALE": problem.scale,
    }
    of_columns = {"num_warps": tiling.choice.num_warps, "num_stages": 1}
    of_leaves = {"num_warps": tiling.leaf_warps, "num_stages": 1}
    of_keys = {"num_warps": 1, "num_stages": 1}
    by_parent = spec.num_parents, heads, batch
    by_piece = precompute.launches[1].grid
    launches = [
        *precompute.launches,
        Launch(column_gradients_kernel, attention.grid, arguments, **of_columns),
        Launch(leaf_gradients_kernel, by_parent, arguments, **of_leaves),
        Launch(key_gradients_kernel, by_piece, arguments, **of_keys),
    ]
    return Plan(memory, launches, result=columns.sink_column)
