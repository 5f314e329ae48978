"""The backward kernels: gradients of AVQ attention with means as codewords.

The forward kernels summarize the keys and select columns again. Three launches follow:
`query_gradients`, `row_gradients` and `key_gradients`. There are no atomics: every run gives the
same bits. Nothing is stored for each column of a tile, so memory is linear in the tokens.

Shapes: as in `call`.
"""

from functools import lru_cache, partial

import torch
from torch import Tensor

from avq_diffusers.attention.tensors import Tensors
from avq_diffusers.attention.triton.attention import query_tiles
from avq_diffusers.attention.triton.call import run_fitting
from avq_diffusers.attention.triton.codewords import StoredCodes
from avq_diffusers.attention.triton.key_gradients import GradTokens, key_gradients_kernel
from avq_diffusers.attention.triton.launch import (
    MOST_PLANS,
    Launch,
    Memory,
    Plan,
    Pointer,
    kernel_layout,
)
from avq_diffusers.attention.triton.precompute import precompute_launches
from avq_diffusers.attention.triton.problem import Given, Layout, Problem, given_by, readable
from avq_diffusers.attention.triton.query_gradients import (
    GradientBlocks,
    QueryPointers,
    query_gradients_kernel,
)
from avq_diffusers.attention.triton.row_gradients import RowGradients, row_gradients_kernel
from avq_diffusers.attention.triton.tuning import gradient_tiling
from avq_diffusers.config import Spec


def serves(query: Tensor, *, means: bool) -> bool:
    """Whether these kernels serve a call that the forward kernels served.

    Two float32 tiles do not fit shared memory, and stored codewords have other gradients.
    """
    return query.dtype != torch.float32 and means


def kernel_gradients(
    grad_output: Tensor, tensors: Tensors, stored: StoredCodes | None, spec: Spec
) -> list[Tensor]:
    """Gradients of query, key, value and any sinks, on the current device.

    They are views of new (B, N, H, D) memory, dtype of the queries. Arguments as in
    `call.kernel_attention`.
    """
    tensors, grad_output = readable(tensors), kernel_layout(grad_output, 8)
    tokens = [x for x in tensors.tokens() if x is not None]
    grads = [x.new_empty(x.transpose(1, 2).shape).transpose(1, 2) for x in tokens]
    given = given_by(tensors, stored, None, None, grad_output, *grads)
    make_plan = partial(_plan, grad_output=Layout.of(grad_output))
    run_fitting(make_plan, Problem.of(tensors, stored, spec), given)
    return grads


@lru_cache(MOST_PLANS)
def _plan(problem: Problem, grad_output: Layout) -> Plan:
    tiling = gradient_tiling(problem)
    memory = Memory(len(Given._fields))
    given = problem.pointers()
    precompute = precompute_launches(problem, given, memory, leaves=True)
    tiles = query_tiles(problem, given, precompute, memory, tiling.attention, levels=True)
    sizes, follows = tiles.sizes, problem.has_first_order
    batch, heads, num_queries, _ = problem.query.shape

    def part(*shape: int, when: bool = True) -> Pointer | None:
        """A pointer to a new part (B, H, *shape) in float32; None unless `when`."""
        return memory.add((batch, heads, *shape), torch.float32) if when else None

    dim, side = sizes.PADDED_DIM, sizes.MATRIX_SIDE
    queries = QueryPointers(
        query=given.query,
        grad_output=given.grad_output,
        order=given.query_order,
        log_total=part(num_queries),
        token_total=part(num_queries, when=problem.shows_keys or sizes.SINKS),
        delta=part(num_queries),
        grad_seen=part(num_queries, when=follows),
        share=part(num_queries, when=follows),
    )
    row_gradients = RowGradients(
        row=part(sizes.ROWS, 2 * dim),
        spread=part(sizes.ROWS, when=follows),
        matrix=part(dim, dim, when=follows),
        matrix_size=part(side, when=follows),
        variance=part(side, when=follows),
    )
    grad_strides = grad_output.divided(1)
    grad_sinks = given.grad_sink_key, given.grad_sink_value
    arguments = tiles.arguments | {
        "grad_query_ptr": given.grad_query,
        "queries": queries,
        "gradients": row_gradients,
        "grads": GradTokens(given.grad_key, given.grad_value, *grad_sinks),
        "grad_strides": grad_strides,
        "GRADIENT_BLOCKS": GradientBlocks(
            N=tiles.arguments["BLOCKS"].N,
            ROWS=tiling.rows,
            KEYS=tiling.keys,
            TILES=tiling.tiles,
            SCALE=problem.scale,
            QUERY_STRIDE=tiles.arguments["QUERY_STRIDE"],
            GRAD_STRIDE=grad_strides.token,
        ),
    }
    query_options = {"num_warps": tiling.attention.num_warps, "num_stages": 1}
    sum_options = {"num_warps": tiling.num_warps, "num_stages": 1}
    num_rows = -(-sizes.ROWS // tiling.rows) + (side if follows else 0)
    num_keys = sum(-(-x // tiling.keys) for x in (problem.num_keys, problem.num_sinks))
    launches = [
        *precompute.launches,
        tiles.select,
        Launch(query_gradients_kernel, tiles.grid, arguments, **query_options),
        Launch(row_gradients_kernel, (num_rows, heads, batch), arguments, **sum_options),
        Launch(key_gradients_kernel, (num_keys, heads, batch), arguments, **sum_options),
    ]
    return Plan(memory, launches)
