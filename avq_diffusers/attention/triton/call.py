"""A kernel call from keys to outputs: precompute, then attention, in one allocation."""

from collections import Counter
from collections.abc import Callable
from functools import lru_cache

from torch import Tensor

from avq_diffusers.attention.tensors import Tensors, empty_shown, empty_tokens
from avq_diffusers.attention.triton.attention import attention_launches
from avq_diffusers.attention.triton.codewords import StoredCodes
from avq_diffusers.attention.triton.launch import MOST_PLANS, Memory, Plan, UnfitError, are_aligned
from avq_diffusers.attention.triton.precompute import precompute_launches
from avq_diffusers.attention.triton.problem import Given, Problem, given_by, readable
from avq_diffusers.attention.triton.tuning import MOST_REDUCED
from avq_diffusers.config import Spec

# How often each variant's tilings were made smaller in this process.
reductions: Counter[Problem] = Counter()


def kernel_attention(
    tensors: Tensors, stored: StoredCodes | None, spec: Spec
) -> tuple[Tensor, Tensor]:
    """AVQ attention on the current device.

    Args:
        tensors: float16, bfloat16 or float32 tokens of one dtype; the codebook is ignored.
        stored: codewords from `codewords.pack`; None takes keys.
        spec: the call's options.

    Returns:
        The output, a (B, H, N, D) view of new (B, N, H, D) memory, dtype of the queries; and
        `Attended.shown`.

    Raises:
        UnfitError: even with the smallest tiling, Triton cannot make a kernel for this GPU.
    """
    tensors = readable(tensors)
    results = empty_tokens(tensors.query), empty_shown(tensors.query, spec.query_tile)
    given = given_by(tensors, stored, *results)
    run_fitting(_plan, Problem.of(tensors, stored, spec), given)
    return results


def repetition(tensors: Tensors, spec: Spec) -> Callable[[Tensors], tuple[Tensor, Tensor] | None]:
    """`kernel_attention` for further calls that look like one that has run, with own codewords.

    Args:
        tensors, spec: the call.

    Returns:
        A function of tensors with the same shapes, strides, dtypes and device, which must be the
        current one. It returns None where kernels cannot read them as they are.
    """
    as_they_are = readable(tensors)
    if any(x is not y for x, y in zip(as_they_are, tensors, strict=True)):
        return lambda tensors: None
    problem = Problem.of(tensors, None, spec)
    plan = _plan(_fitting(problem))

    def repeat(tensors: Tensors) -> tuple[Tensor, Tensor] | None:
        results = empty_tokens(tensors.query), empty_shown(tensors.query, spec.query_tile)
        given = given_by(tensors, None, *results)
        if not are_aligned(given):
            return None
        plan.run(given, problem.device)
        return results

    return repeat


def run_fitting(make_plan: Callable[[Problem], Plan], problem: Problem, given: Given) -> Tensor:
    """`Plan.run` of a problem, with smaller tilings if Triton cannot make a kernel for this GPU.

    Raises:
        UnfitError: it cannot even with the smallest.
    """
    while True:
        fitting = _fitting(problem)
        try:
            return make_plan(fitting).run(given, problem.device)
        except UnfitError:
            if fitting.reduction == MOST_REDUCED:
                raise
            # Other threads may have done the same.
            reductions[problem.variant] = fitting.reduction + 1


def _fitting(problem: Problem) -> Problem:
    """The problem with tilings as small as its variant has needed so far."""
    return problem._replace(reduction=reductions[problem.variant]) if reductions else problem


@lru_cache(MOST_PLANS)
def _plan(problem: Problem) -> Plan:
    memory = Memory(len(Given._fields))
    given = problem.pointers()
    precompute = precompute_launches(problem, given, memory)
    launches = attention_launches(problem, given, precompute, memory)
    return Plan(memory, [*precompute.launches, *launches])
