"""A call of the kernels from keys to outputs: precompute, then attention, in one memory."""

from functools import lru_cache

import torch
from torch import Tensor

from avq_diffusers.attention.spec import Spec, Tensors
from avq_diffusers.attention.triton.attention import attention_launch
from avq_diffusers.attention.triton.codewords import StoredCodes
from avq_diffusers.attention.triton.launch import MOST_PLANS, Plan, address
from avq_diffusers.attention.triton.precompute import precompute_launches
from avq_diffusers.attention.triton.problem import Problem, addresses_of, readable


def kernel_attention(
    tensors: Tensors, stored: StoredCodes | None, parents: Tensor | None, spec: Spec
) -> Tensor:
    """AVQ attention on the current device.

    Args:
        tensors: of the call: float16, bfloat16 or float32 tokens of one dtype; its codebook is not
            looked at.
        stored: codewords as `codewords.pack` gives them; None takes keys.
        parents: (B, H, M0, D) in place of keys, dtype of the keys, contiguous; or None.
        spec: of the call. Exact keys need means.

    Returns:
        (B, H, N, D) view of new (B, N, H, D) memory, dtype of the queries.
    """
    tensors = readable(tensors)
    query = tensors.query
    plan = _plan(Problem.of(tensors, stored, parents, spec))
    output = torch.empty_permuted(query.shape, (0, 2, 1, 3), dtype=query.dtype, device=query.device)
    addresses = addresses_of(tensors, stored, parents)
    addresses["output"] = address(output)
    plan.run(addresses, query.device)
    return output


@lru_cache(MOST_PLANS)
def _plan(problem: Problem) -> Plan:
    precompute = precompute_launches(problem)
    attention = attention_launch(problem, precompute.pointers)
    parts = precompute.parts | attention.parts
    return Plan(parts, [*precompute.launches, attention.launch])
