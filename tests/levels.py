"""The levels at which a backend's query tiles show the keys, read from inside of it.

Shapes: B batch, H heads, T query tiles, M0 parents, C children; MP and CP as in the kernels.
"""

from unittest.mock import patch

import torch
from torch import Tensor

from avq_diffusers.attention import torch_forward
from avq_diffusers.attention.guarded import stored_codes
from avq_diffusers.attention.operators import by_pytorch
from avq_diffusers.attention.tensors import Tensors
from avq_diffusers.config import Spec


def levels_of(tensors: Tensors, spec: Spec, backend: str) -> Tensor:
    """(B, H, T, M0, 2 + C) int how a tile shows all keys of a parent, those that stay with it and
    those of its children: 0 not so, 1 as a codeword, more one by one.

    T is 1 if all tiles show the same.
    """
    return (_levels_of_kernels if backend == "triton" else _levels_of_pytorch)(tensors, spec)


def _levels_of_kernels(tensors: Tensors, spec: Spec) -> Tensor:
    # Here, because most tests run without Triton.
    from avq_diffusers.attention.triton import attention, call
    from avq_diffusers.attention.triton.launch import Memory, Plan
    from avq_diffusers.attention.triton.precompute import precompute_launches
    from avq_diffusers.attention.triton.problem import Given, Problem, given_by, readable

    tensors = readable(tensors)
    stored = stored_codes(tensors)

    parts = []

    def plan_of(problem: Problem) -> Plan:
        memory, given = Memory(len(Given._fields)), problem.pointers()
        precompute = precompute_launches(problem, given, memory)
        tiling = attention.attention_tiling(problem)
        tiles = attention.query_tiles(problem, given, precompute, memory, tiling, levels=True)
        level = tiles.arguments["columns"].level
        parts.append(memory.parts[level.index - memory.num_given])
        return Plan(memory, [*precompute.launches, tiles.select])

    problem = Problem.of(tensors, stored, spec)
    allocation = call.run_fitting(plan_of, problem, given_by(tensors, stored))
    levels = parts[-1].of(allocation)
    _, parent_rows, child_rows = problem.padded_sizes
    rows = parent_rows, parent_rows, spec.num_parents * child_rows
    cells, stay, children = levels.split(rows, dim=-1)
    cells, stay = (x[..., : spec.num_parents, None] for x in (cells, stay))
    children = children.unflatten(-1, (spec.num_parents, child_rows))[..., : spec.num_children]
    return torch.cat([cells, stay, children], dim=-1)


def _levels_of_pytorch(tensors: Tensors, spec: Spec) -> Tensor:
    chosen, choose = [], torch_forward.choose

    def chosen_by(*inputs: object) -> torch_forward.Chosen:
        chosen.append(choose(*inputs))
        return chosen[-1]

    with patch.object(torch_forward, "choose", chosen_by):
        by_pytorch(tensors, spec)
    spans = torch.cat([x.spans for x in chosen])
    return spans.view(*tensors.query.shape[:2], -1, spec.num_parents, 2 + spec.num_children)
