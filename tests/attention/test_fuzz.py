"""Random and hard problems against the definition: outputs and gradients of every backend.

Uninitialized memory holds NaN in every test here.
"""

import math
from contextlib import suppress
from dataclasses import fields
from random import Random

import pytest
import torch
from cases import make_case
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from problems import Problem, draw_problem, solve

from avq_diffusers.attention.api import avq_attention
from avq_diffusers.attention.own_codewords import assigned
from avq_diffusers.attention.tensors import Tensors
from avq_diffusers.codebook import assignment
from avq_diffusers.codebook.codebook import Codebook
from avq_diffusers.config import Spec

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
FP16, FP32, FP64 = torch.float16, torch.float32, torch.float64
TOKENS = Tensors._fields[:5]

pytestmark = pytest.mark.usefixtures("uninitialized_memory_is_nan")


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    """Several chunks, the last one partial, already at the sizes of these tests."""
    monkeypatch.setattr(assignment, "ELEMENTS_CPU", 1 << 13)


def check_random(name: str, backend: str, number: int, **drawn: object) -> None:
    """Solve many problems; most of their queries must have been compared."""
    compared = []
    for case in range(number):
        problem = draw_problem(Random(f"{name} {case}"), backend=backend, **drawn)
        outcome = solve(problem, backend)
        assert outcome.error <= 1, (case, outcome, problem)
        compared.append(outcome.compared)
    assert sum(compared) > 0.75 * number


@pytest.mark.parametrize("part", range(2))
def test_pytorch_solves_any_problem(part):
    """Catches an error of one shape, dtype, layout, order, scale or distribution of keys."""
    check_random(f"{part}", "torch", 15, most=60)


def test_kernels_solve_any_problem():
    pytest.importorskip("triton")
    sizes = {"batch": 1, "num_parents": 5} if DEVICE == "cpu" else {}
    check_random("kernels", "triton", 5, most=30, device=DEVICE, **sizes)


@pytest.mark.gpu
@pytest.mark.parametrize("part", range(10))
def test_kernels_solve_any_large_problem(part):
    """Every problem has kernels of its own to compile: ten parts, for as many processes."""
    check_random(f"gpu {part}", "triton", 10, most=2000, device=DEVICE)


# What hurts, and differs from these.
USUAL = {
    **{"batch": 1, "heads": 2, "queries": 28, "head_dim": 8, "kind": "clustered", "num_sinks": 0},
    **{"num_parents": 6, "num_children": 3, "num_refined": 2, "query_tile": 16, "scale": None},
    **{"has_codebook": False, "codewords": "means", "threshold": None},
    **{"query_order": torch.int64, "key_order": None},
}
STORED = {"has_codebook": True, "codewords": "stored"}
HARD = {
    "last tile partial": {"queries": 20, "batch": 2},
    "fewer queries than a tile": {"queries": 5, "keys": 40},
    "fewer keys than queries": {"queries": 70, "keys": 33, "query_tile": 128},
    "rows of a block that belong to the next tile": {"query_tile": 24, "queries": 50},
    "no padding column": {"head_dim": 64},
    "all but one refined": {"num_refined": 5, "num_children": 1},
    "flat": {"num_refined": 0, "num_children": 0},
    "most parents of one key": {"queries": 30, "num_parents": 25, "num_refined": 17},
    "more children than a warp": {"num_children": 20, "num_parents": 3, "keys": 90},
    "stored codewords": STORED,
    "stored, all refined": STORED | {"num_refined": 6},
    "empty parents": STORED | {"kind": "empty parents", "num_parents": 13},
    "half of the keys in one leaf": STORED | {"kind": "one hot leaf"},
    "keys far from zero": {"kind": "offset", "has_codebook": True},
    "identical keys": STORED | {"kind": "identical"},
    "a threshold and sinks": {"threshold": 0.01, "num_sinks": 5},
    "a threshold and means of a codebook": {"threshold": 0.01, "has_codebook": True},
    "a threshold without children": {"threshold": 0.01, "num_children": 0},
    "tiles with few and many columns": {"threshold": 0.02, "query_tile": 7, "queries": 40},
    "nothing above the threshold": {"threshold": math.inf},
    "more sinks than keys": {"num_sinks": 70},
    "sinks beside stored codewords": STORED | {"num_sinks": 40, "kind": "offset"},
    "one key": {"keys": 1, "num_parents": 1, "num_refined": 1},
}
# Slow in the interpreter, where `test_kernels.py` and the cases above meet the same.
FOR_PYTORCH = {
    "no order": {"query_order": None, "heads": 2},
    "more keys than queries": {"keys": 70},
    "all parents refined": {"num_refined": 6},
    "none refined": {"num_refined": 0},
    "means of a codebook": {"has_codebook": True},
    "stored, flat": STORED | {"num_children": 0, "num_refined": 0, "num_parents": 40},
    "a threshold": {"threshold": 0.01},
    "one query and one key": {"queries": 1, "num_parents": 1, "num_refined": 1},
    "tiles of one query": {"queries": 9, "query_tile": 1},
    "tile above any memory": {"query_tile": 10**9},
    "an order of 32 bits": {"query_order": torch.int32, "key_order": torch.int32},
    "one channel": {"head_dim": 1},
    "nearly one-hot attention": {"scale": 5.0},
    "all keys exact": {"queries": 30, "threshold": 0.0},
    "more parents than keys": STORED | {"num_parents": 60, "num_refined": 25},
}
# `test_kernels.py` has head dim 40, orders of 32 bits, and logits of any size.
FOR_KERNELS = {
    "head dim of SD1.5 level 1": {"head_dim": 80},
    "head dim of DiT": {"head_dim": 128},
    "flat, in two blocks": STORED
    | {"num_refined": 0, "num_children": 0, "num_parents": 90, "keys": 200},
    # On a GPU, gradients of its queries were once wrong.
    "large tile of keys only": {"queries": 36, "query_tile": 128, "num_parents": 2}
    | {"num_children": 0, "threshold": 0.0},
    "few leaves of several keys, far from zero": {"kind": "offset", "keys": 50}
    | {"num_parents": 9, "num_children": 8, "threshold": 0.07},
}


def hard_problem(shape: dict, **others: object) -> Problem:
    queries = shape.get("queries", USUAL["queries"])
    return draw_problem(Random(1), **USUAL | {"keys": queries} | shape | others)


def check_hard(shape: dict, backend: str, dtype: torch.dtype) -> None:
    if backend == "triton":  # slow in the interpreter
        shape = {"heads": 1} | shape
    problem = hard_problem(shape, backend=backend, device=DEVICE, dtype=dtype)
    outcome = solve(problem, backend)
    assert outcome.error <= 1
    assert outcome.compared > 0.4


@pytest.mark.parametrize(("num_parents", "num_children"), [(16, 4), (10, 0)])
@pytest.mark.parametrize(
    ("backend", "dtype"), [("reference", FP32), ("torch", FP32), ("triton", FP32), ("triton", FP16)]
)
def test_equal_keys_tell_nothing_about_their_values(backend, dtype, num_parents, num_children):
    """Catches a first-order term made of roundings: millions where it should be 0, or 0 but with
    key gradients."""
    generator = torch.Generator().manual_seed(1)
    query, value, keys = torch.randn(3, 1, 1, 120, 40, generator=generator).to(DEVICE, dtype)
    # Sixteen parents repeat some of the keys; of ten in turn, a cell holds all that equal a parent.
    index = torch.arange(120) // 12
    if num_children:
        index = torch.randint(9, (120,), generator=generator)
    options = {"num_parents": num_parents, "num_children": num_children, "threshold": math.inf}
    tokens = {"query": query, "key": keys[:, :, index.to(DEVICE)], "value": value}
    found, expected = (
        attended_and_gradients({name: x.to(kind) for name, x in tokens.items()}, **given)
        for kind, given in (
            (dtype, options | {"backend": backend}),
            (FP64, {"threshold": math.inf, **without_first_order(tokens | options)}),
        )
    )
    limit = 1e-5 if dtype == FP32 else 2e-3
    for x, y in zip(found, expected, strict=True):
        assert (x - y).norm() < limit * y.norm()


def attended_and_gradients(tokens: dict, **options: object) -> list[torch.Tensor]:
    """The output, and the gradients of all tokens for a fixed one of the output."""
    leaves = {name: x.detach().requires_grad_() for name, x in tokens.items()}
    output = avq_attention(**leaves, **options)
    generator = torch.Generator().manual_seed(2)
    grad = torch.randn(output.shape, generator=generator).to(output)
    return [output.detach(), *torch.autograd.grad(output, [*leaves.values()], grad)]


@pytest.mark.parametrize("name", HARD | FOR_PYTORCH)
def test_pytorch_solves_hard_problems(name):
    check_hard((HARD | FOR_PYTORCH)[name], "torch", FP64)


@pytest.mark.parametrize("name", HARD | FOR_KERNELS)
def test_kernels_solve_hard_problems(name):
    """In half precision, where gradients are by kernels too."""
    pytest.importorskip("triton")
    check_hard((HARD | FOR_KERNELS)[name], "triton", FP16)


@pytest.mark.parametrize("name", ["last tile partial", "stored codewords", "a threshold and sinks"])
def test_kernels_solve_hard_problems_in_float32(name):
    pytest.importorskip("triton")
    check_hard(HARD[name], "triton", FP32)


def without_first_order(tokens: dict) -> dict:
    """The call's own codewords as a codebook, whose means have no such term."""
    names = {*Tensors._fields} & tokens.keys() - {"parents", "children"}
    tensors = Tensors.of(
        **{name: tokens[name].detach() if name in TOKENS else tokens[name] for name in names}
    )
    sizes = {name: tokens[name] for name in ("num_parents", "num_children")}
    found = assigned(tensors, Spec(**sizes))
    centre = found.centre
    return {"codebook": Codebook(found.parents + centre, found.children + centre[:, None])}


def off(tokens: dict, name: str, share: float = 0.02) -> dict:
    """The same tokens, of which one has a gradient that is off by a share."""
    return {name: tokens[name] + share * (tokens[name] - tokens[name].detach())}


SPOILED = {
    "query order ignored": lambda x: {"query_order": None},
    "key order ignored": lambda x: {"key_order": torch.arange(x["key"].shape[2])},
    "tiles of twice the length": lambda x: {"query_tile": 2 * x["query_tile"]},
    "scale one percent off": lambda x: {"scale": 1.01 * x["scale"]},
    "last key lost": lambda x: {name: x[name][:, :, :-1] for name in ("key", "value")},
    "heads mixed": lambda x: {"value": x["value"].roll(1, dims=1)},
    "children ignored": lambda x: {"num_children": 0},
    "no first-order term": without_first_order,
    "no exact keys": lambda x: {"threshold": 0.03},
    "every key exact": lambda x: {"threshold": 0.0},
    "sinks with values of others": lambda x: {"sink_value": x["sink_value"].flip(2)},
    "gradient of queries": lambda x: off(x, "query", 0.05),
    "gradient of keys": lambda x: off(x, "key"),
    "gradient of values": lambda x: off(x, "value"),
}


@pytest.mark.parametrize("name", SPOILED)
def test_wrong_results_are_beyond_the_budget(name):
    """The control of the tests above, where the budget is largest."""
    order = torch.int64 if name == "last key lost" else None  # of keys and queries together
    shape = {"queries": 60, "keys": 61 if order else 60, "num_sinks": 5}
    shape |= {"threshold": 0.02, "scale": 0.15}  # which shows cells, leaves and keys
    wrong = 0
    for seed in range(3):
        problem = draw_problem(Random(seed), **USUAL | shape, dtype=FP16)

        def attend(problem=problem, **tokens: torch.Tensor) -> torch.Tensor:
            return problem.attend("torch", **tokens | SPOILED[name](problem.options | tokens))

        wrong += solve(problem, "torch", attend=attend).error > 1
    assert wrong > 1


QUERY, KEY, VALUE, CODEBOOK = make_case(queries=20, dtype=torch.float32)
INTEGERS = st.one_of(st.integers(-(2**70), 2**70), st.sampled_from([0, 1, 2, 6, 7, 2**31, 2**63]))
THINGS = st.one_of(INTEGERS, st.none(), st.booleans(), st.floats(), st.text(max_size=3))
DTYPES = [torch.float16, torch.float32, torch.float64, torch.int32, torch.bool, torch.complex64]
TENSORS = st.builds(
    lambda shape, dtype, device: torch.zeros(shape, dtype=dtype, device=device),
    st.lists(st.integers(0, 9), max_size=5),
    st.sampled_from(DTYPES),
    st.sampled_from(["cpu", "meta"]),
)
CODEBOOKS = st.builds(
    lambda heads, parents, children, head_dim, dtype: Codebook(
        torch.zeros(heads, parents, head_dim, dtype=dtype),
        torch.zeros(heads, parents, children, head_dim, dtype=dtype),
    ),
    *(st.integers(least, most) for least, most in ((1, 3), (1, 7), (0, 3), (1, 9))),
    st.sampled_from(DTYPES[:3]),
)
CHANGES = {
    **dict.fromkeys((*TOKENS, "query_order", "key_order"), st.one_of(TENSORS, THINGS)),
    **dict.fromkeys((*(x.name for x in fields(Spec)), "scale"), THINGS),
    "codebook": st.one_of(CODEBOOKS, THINGS),
    "backend": st.sampled_from(["auto", "torch", "triton", "flash", ""]),
    "codewords": st.one_of(st.sampled_from(["means", "stored"]), THINGS),
}


@settings(max_examples=60, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(st.fixed_dictionaries({}, optional=CHANGES))
def test_any_arguments_are_carried_out_or_refused(changes):
    """Catches an error from inside for what should have been refused at the door, and nonsense."""
    arguments = {"query": QUERY, "key": KEY, "value": VALUE, "codebook": CODEBOOK, "num_refined": 2}
    arguments |= changes
    with suppress(TypeError, ValueError):
        output = avq_attention(**arguments)
        assert output.shape == arguments["query"].shape
        assert output.dtype == arguments["query"].dtype
