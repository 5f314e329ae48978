"""Random problems against the definition, drawn by hypothesis."""

from contextlib import suppress
from dataclasses import replace
from functools import partial
from random import Random

import problems
import pytest
import torch
from cases import make_case
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from problems import SINKS, codewords_of, draw_problem, error_over_budget, gradient_over_budget

from avq_diffusers.attention.api import avq_attention
from avq_diffusers.codebook.codebook import Codebook

CPU = torch.device("cpu")
RANDOM = st.randoms(use_true_random=False)
TENSORS = ("query", "key", "value")
repeatable = partial(
    settings, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck)
)


@repeatable(max_examples=60)
@given(RANDOM)
def test_any_problem_is_solved_within_the_budget(rng):
    """Catches an error of one shape, dtype, layout, order, scale or distribution of keys."""
    problem = draw_problem(rng, kernels=False, device=CPU)
    assert error_over_budget(problem, "torch") <= 1, problem


@repeatable(max_examples=25)
@given(RANDOM)
def test_gradients_are_those_of_the_definition(rng):
    problem = draw_problem(rng, kernels=False, device=CPU, most=60)
    wide = {name: getattr(problem, name).double() for name in TENSORS}
    if problem.codebook is not None:
        wide["codebook"] = problem.codebook.to(dtype=torch.float64)
    sinks = {name: problem.options[name].double() for name in SINKS if name in problem.options}
    problem = replace(problem, **wide, options=problem.options | sinks)
    assume(codewords_of(problem, "torch").is_clear.all())
    assert gradient_over_budget(problem) <= 1, problem


# Every problem has kernels of its own to compile: ten parts, for as many processes.
@pytest.mark.gpu
@pytest.mark.parametrize("part", range(10))
@repeatable(max_examples=30)
@given(number=st.integers(0, 2**32))
def test_any_problem_is_solved_within_the_budget_by_the_kernels(part, number):
    rng = Random(f"{part} {number}")
    problem = draw_problem(rng, kernels=True, device=torch.device("cuda"), most=2000)
    assert error_over_budget(problem, "triton") <= 1, problem


SPOILED = {
    "query order ignored": lambda arguments: arguments | {"query_order": None},
    "key order ignored": lambda arguments: arguments | {"key_order": None},
    "tiles of twice the length": lambda x: x | {"query_tile": 2 * x["query_tile"]},
    "scale one percent off": lambda x: x | {"scale": 1.01 * (x["scale"] or default_scale(x))},
    "last key lost": lambda x: x | {name: x[name][:, :, :-1] for name in ("key", "value")},
    "heads mixed": lambda x: x | {"value": x["value"].roll(1, dims=1)},
    "children ignored": lambda x: x | {"num_refined": 0},
    "one update more": lambda x: x | {"num_updates": x["num_updates"] + 1},
    "no exact keys": lambda x: x | {"exact_keys": 0},
}
# Of the options of a problem, where not every problem can be.
CAN_BE_SPOILED = {
    "key order ignored": lambda options: "key_order" in options,
    "last key lost": lambda options: "key_order" not in options,
    "no exact keys": lambda options: options["exact_keys"] > 0,
}


def default_scale(arguments) -> float:
    return arguments["query"].shape[-1] ** -0.5


@pytest.mark.parametrize("spoiled", SPOILED)
def test_wrong_results_are_beyond_the_budget(spoiled, choosing, monkeypatch):
    """The control of the tests above, on problems whose tiles can choose different parents."""

    def wrong(query, key, value, codebook, *, backend, **options):
        arguments = {"query": query, "key": key, "value": value, **options}
        if backend == "torch":
            arguments = SPOILED[spoiled](arguments)
        return avq_attention(codebook=codebook, backend=backend, **arguments)

    monkeypatch.setattr(problems, "avq_attention", wrong)
    can_be = CAN_BE_SPOILED.get(spoiled)
    if can_be is not None:
        choosing = [problem for problem in choosing if can_be(problem.options)]
    errors = [error_over_budget(problem, "torch") for problem in choosing]
    assert sum(error > 1 for error in errors) > len(errors) / 3


@pytest.fixture(scope="module")
def choosing():
    problems = [draw_problem(Random(seed), kernels=False, device=CPU) for seed in range(250)]
    return [problem for problem in problems if chooses(problem)]


def chooses(problem) -> bool:
    *_, num_queries, _ = problem.query.shape
    return (
        0 < problem.options["num_refined"] < problem.options["num_parents"]
        and 1 < problem.options["query_tile"] < min(100, num_queries)
        and "query_order" in problem.options
        and problem.key.shape[2] > 1
        and codewords_of(problem, "torch").is_clear.all()
    )


QUERY, KEY, VALUE, CODEBOOK = make_case(queries=20, dtype=torch.float32)
INTEGERS = st.one_of(st.integers(-(2**70), 2**70), st.sampled_from([0, 1, 2, 6, 7, 2**31, 2**63]))
ORDERS = ("query_order", "key_order")
THINGS = st.one_of(INTEGERS, st.none(), st.booleans(), st.floats(), st.text(max_size=3))
SHAPES = st.lists(st.integers(0, 9), max_size=5)
DTYPES = st.sampled_from(
    [torch.float16, torch.float32, torch.float64, torch.int32, torch.bool, torch.complex64]
)


@st.composite
def tensors(draw):
    shape, dtype = draw(SHAPES), draw(DTYPES)
    return torch.zeros(shape, dtype=dtype, device=draw(st.sampled_from(["cpu", "meta"])))


@st.composite
def codebooks(draw):
    heads, parents, children, head_dim = (draw(st.integers(1, n)) for n in (3, 7, 3, 9))
    dtype = draw(st.sampled_from([torch.float16, torch.float32, torch.float64]))
    return Codebook(
        torch.zeros(heads, parents, head_dim, dtype=dtype),
        torch.zeros(heads, parents, draw(st.integers(0, children)), head_dim, dtype=dtype),
    )


CHANGES = {
    **{name: st.one_of(tensors(), THINGS) for name in (*TENSORS, *SINKS, *ORDERS)},
    "codebook": st.one_of(codebooks(), THINGS),
    "backend": st.sampled_from(["auto", "torch", "dense", "triton", "flash", ""]),
    **{
        name: st.one_of(INTEGERS, THINGS)
        for name in (
            *("num_parents", "num_children", "num_refined", "num_updates"),
            *("query_tile", "scale", "exact_keys"),
        )
    },
    "codewords": st.one_of(st.sampled_from(["means", "stored"]), THINGS),
}


@repeatable(max_examples=100)
@given(st.fixed_dictionaries({}, optional=CHANGES))
def test_any_arguments_are_carried_out_or_refused(changes):
    """Catches an error from inside for what should have been refused at the door, and nonsense."""
    arguments = {"query": QUERY, "key": KEY, "value": VALUE, "codebook": CODEBOOK, "num_refined": 2}
    arguments |= changes
    with suppress(TypeError, ValueError):
        output = avq_attention(**arguments)
        assert output.shape == arguments["query"].shape
        assert output.dtype == arguments["query"].dtype
