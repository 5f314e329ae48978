"""Kernels beyond their results: any tiling, packed codewords, layouts, refusals; and on a GPU.

Their results are compared with the definition in `test_fuzz`. Uninitialized memory holds NaN in
every test here.
"""

import math
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import cache
from random import Random
from threading import Event
from time import sleep
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from cases import call_of, make_case, relative_error, stored_attention
from problems import LAYOUTS, Problem, draw_problem, solve
from torch import Tensor

pytest.importorskip("triton")

from triton import knobs

from avq_diffusers.attention import api as ops
from avq_diffusers.attention import limits, packing, reference
from avq_diffusers.attention.schema import arguments_of
from avq_diffusers.attention.tensors import Tensors
from avq_diffusers.attention.triton import (
    attention,
    call,
    gradients,
    launch,
    launcher,
    precompute,
    tuning,
)
from avq_diffusers.attention.triton import problem as launch_problem
from avq_diffusers.attention.triton.codewords import pack, padded_sizes
from avq_diffusers.attention.triton.problem import Layout
from avq_diffusers.attention.triton.tuning import AttentionTiling
from avq_diffusers.codebook.assignment import centre_of
from avq_diffusers.codebook.codebook import Codebook
from avq_diffusers.config import Spec

GPU, LONG = pytest.mark.gpu, pytest.mark.long
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
FP16, BF16, FP32 = torch.float16, torch.bfloat16, torch.float32

pytestmark = pytest.mark.usefixtures("uninitialized_memory_is_nan")


def drawn(seed: int = 0, **fixed: object) -> Problem:
    """A random problem; `fixed` says what differs from this."""
    sizes = {"batch": 1, "heads": 1, "queries": 40, "keys": 50, "head_dim": 40, "num_sinks": 0}
    sizes |= {"num_parents": 12, "num_children": 4, "num_refined": 3, "threshold": None}
    sizes |= {"query_tile": 32, "has_codebook": False, "codewords": "means"}
    sizes |= {"kind": "clustered", "scale": None, "dtype": FP16, "query_order": torch.int64}
    return draw_problem(Random(seed), backend="triton", device=DEVICE, **sizes | fixed)


def check(problem: Problem) -> None:
    outcome = solve(problem, "triton")
    assert 0 < outcome.error <= 1
    assert outcome.compared > 0.4


def spoiled(problem: Problem, **tokens: Tensor) -> Problem:
    return replace(problem, tokens=problem.tokens | tokens)


TILINGS = {
    "attention": (attention, "attention_tiling"),
    "select": (attention, "select_tiling"),
    "precompute": (precompute, "precompute_tiling"),
    "gradients": (gradients, "gradient_tiling"),
}


@pytest.fixture
def use(monkeypatch):
    """Changes the tilings of the kernels; that of the attention also where gradients repeat it."""
    plans = call._plan, gradients._plan

    def use(**changes: dict[str, object]) -> None:
        for name, of_kernel in changes.items():
            module, function = TILINGS[name]
            tiling = getattr(tuning, function)
            monkeypatch.setattr(
                module, function, lambda x, f=tiling, y=of_kernel: replace(f(x), **y)
            )
        for plan in plans:
            plan.cache_clear()

    yield use
    for plan in plans:
        plan.cache_clear()


def test_a_direct_launch_is_the_one_at_the_end_of_triton_s_own():
    """Catches arguments in another order, and hooks that are called without anyone there."""
    calls = []
    compiled = SimpleNamespace(
        run=lambda *args: calls.append(args),
        function="function",
        packed_metadata="packed",
        launch_metadata=lambda *args: ("metadata", *args),
    )
    kernel = SimpleNamespace(warmup=lambda **arguments: compiled)
    run = launcher.direct_launch(kernel, (2, 3, 4), {})
    run(7, (8, (9, 10)))
    enter = knobs.runtime.launch_enter_hook
    enter.add(print)
    try:
        run(7, (8,))
    finally:
        enter.remove(print)
    handles = 2, 3, 4, 7, "function", "packed"
    metadata = "metadata", (2, 3, 4), 7, 8
    assert calls[0] == (*handles, None, None, None, 8, (9, 10))
    assert calls[1] == (*handles, metadata, enter, knobs.runtime.launch_exit_hook, 8)


RESOLUTIONS = [*({"num_refined": x} for x in (0, 3, 20)), {"threshold": 0.01}]


# Of 20 parents, 16 rows of a block need two blocks; a block of 64 rows is partly empty.
@pytest.mark.parametrize(
    ("columns", "resolution"),
    list(zip((64, 64, 16, 16), RESOLUTIONS, strict=True)),
    ids=str,
)
def test_any_blocks_choose_and_attend_to_the_same(columns, resolution, use):
    of_attention = {"codewords": columns, "keys": columns, "leaves": columns, "num_warps": 1}
    use(attention=of_attention, select={"rows": columns})
    check(drawn(num_parents=20, num_sinks=17, **resolution))


@pytest.mark.parametrize(
    ("columns", "resolution"), [(16, RESOLUTIONS[3]), (64, RESOLUTIONS[0])], ids=str
)
def test_any_blocks_have_the_same_gradients(columns, resolution, use):
    """Catches rows, keys and tiles of the last block that are not there."""
    of_queries = AttentionTiling(1, 1, columns, columns, leaves=columns)
    of_columns = {"rows": columns, "keys": columns, "tiles": 2 if columns == 16 else 64}
    use(gradients={"attention": of_queries, **of_columns})
    check(drawn(num_parents=20, num_sinks=17, query_tile=16, **resolution))


@pytest.mark.parametrize(("head_dim", "resolution"), [(72, {"threshold": 0.01}), (88, {})])
def test_columns_in_two_blocks_give_the_same(head_dim, resolution, use):
    use(attention={"rest_dims": 32})
    check(drawn(head_dim=head_dim, num_sinks=5, **resolution))


PRECOMPUTE = {
    "one chunk": {"num_chunks": 1},
    "wide sort": {"num_chunks": 4, "sort_keys": 128, "sort_warps": 8},
    "narrow sort": {"sort_keys": 32, "sort_warps": 1},
    "parents in blocks": {"sort_parents": 16, "leaf_keys": 64},
    "parents in blocks, loaded again": {"sort_parents": 16, "sort_shared": 0},
    "cells in pieces": {"piece_keys": 32, "leaf_keys": 16},
    "most chunks": {"num_chunks": 64, "sort_keys": 16, "sort_warps": 2, "leaf_keys": 128},
}


@pytest.mark.parametrize(
    ("name", "codewords"),
    [*((name, "means") for name in PRECOMPUTE), ("cells in pieces", "stored")],
)
def test_any_cut_of_the_keys_gives_the_same(name, codewords, use):
    """Float32 shows a single key that is lost, doubled or taken for another. Half of the keys are
    in one leaf, and cells have several pieces."""
    use(precompute=PRECOMPUTE[name])
    fixed = {"has_codebook": True, "codewords": codewords, "kind": "one hot leaf"}
    problem = drawn(2, queries=32, keys=260, num_parents=20, dtype=FP32, head_dim=24, **fixed)
    tensors, spec = problem.call()
    sort = call._plan(launch_problem.Problem.of(tensors, None, spec)).launches[0]
    assert (sort.arguments["chunks"].number == 1) == (name == "one chunk")
    check(problem)


def test_parents_from_the_keys_that_are_loaded_again(use):
    """Catches a centre of some blocks of parents only."""
    use(precompute={"sort_parents": 16, "sort_shared": 0})
    check(drawn(num_parents=20, num_refined=0, dtype=FP32))


@pytest.mark.parametrize("threshold", [0.0, 0.01])
def test_keys_of_cells_in_pieces_are_shown(threshold, use):
    """Catches an order of leaves that forgets the pieces before, and keys of other leaves."""
    use(precompute={"piece_keys": 32, "leaf_keys": 16})
    check(drawn(keys=260, num_parents=3, threshold=threshold, dtype=FP32, query_tile=16))


@pytest.mark.parametrize("refined", [0, 3, 20])
def test_a_logit_may_exceed_those_before_by_any_amount(refined, use):
    """Catches float16 weights that overflow, and sums that keep an earlier maximum."""
    shape = {"queries": 32, "keys": 60, "num_parents": 20, "num_children": 8}
    found = drawn(num_refined=refined, kind="spread", scale=1.7, **shape)
    query, key = found.tokens["query"].double(), found.tokens["key"].double()
    parents = reference.spaced_keys(key, 20, found.call()[0].key_order)
    one_hot = F.one_hot(reference.nearest(key, parents), 20)
    means = one_hot.double().mT @ key / one_hot.sum(2)[..., None].clamp(min=1)
    cells, keys = (1.7 * query @ x.mT / math.log(2) for x in (means, key))
    excess = (keys if refined else cells[..., 16:]).amax(-1)
    assert (excess - cells[..., :16].amax(-1) > 40).any()  # far above 2^16
    use(attention={"codewords": 16}, select={"rows": 16})
    assert relative_error(found.attend("triton"), found.define("triton")[0]) < 0.1


@pytest.mark.parametrize("columns", [16, 64])
@pytest.mark.parametrize("refined", [3, 20])
def test_all_keys_may_lie_far_below_their_parents(columns, refined, use):
    """Catches weights that all vanish in float16 beside a parent that no key stays with."""
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    parents = 40 * normal(1, 20, 16)
    key = 0.6 * parents.repeat(1, 3, 1)[None]
    tokens = {"query": normal(1, 1, 40, 16), "key": key, "value": normal(1, 1, 60, 16)}
    options = {"num_parents": 20, "num_children": 1, "num_refined": refined, "query_tile": 32}
    options |= {"codewords": "stored", "threshold": None, "scale": None}
    tokens = {name: x.to(DEVICE, FP16) for name, x in tokens.items()}
    codebook = Codebook(parents, parents[:, :, None] * 0.6).to(DEVICE)
    found = Problem(tokens, codebook, options)
    logits = tokens["query"].double() @ codebook.parents.double().mT / 4 / math.log(2)
    assert (0.4 * logits.amax(-1) > 24).any()  # 2^-24 is the least float16
    use(attention={"codewords": columns}, select={"rows": columns})
    check(found)


@pytest.mark.parametrize("refined", [0, 12])
def test_empty_codewords_change_nothing_however_large_their_logits(refined):
    found = drawn()
    codebook = reference.spaced_keys(found.tokens["key"].double(), 12, None)[0]
    children = codebook[:, :, None].repeat(1, 1, 4, 1)
    outputs = []
    for far in (50, 3000):
        parents, moved = codebook.clone(), children.clone()
        parents[:, ::4], moved[:, ::4] = 50, far
        moved[:, :, 1] = far
        options = {"codewords": "stored", "num_refined": refined}
        padded = Codebook(parents.float(), moved.float())
        outputs.append(found.attend("triton", codebook=padded, **options))
    assert torch.equal(*outputs)


# What may change without changing a bit of the output or of a gradient.
SAME_BITS = {
    "queries of another tile": lambda x: spoiled(x, query=x.tokens["query"].index_fill(2, LAST, 9)),
    "a layout for each of query, key and value": lambda x: spoiled(
        x, **{name: LAYOUTS[layout](x.tokens[name]) for name, layout in OTHERS.items()}
    ),
    "NaN around the tokens, and rows that are not aligned": lambda x: replace(
        x, tokens={name: amid_nan(y) for name, y in x.tokens.items()}
    ),
    "orders of 32 bits": lambda x: replace(
        x, options=x.options | {"query_order": x.options["query_order"].int()}
    ),
}
LAST = torch.arange(32, 40, device=DEVICE)
OTHERS = {"query": "channels first", "key": "part of a projection", "value": "every second token"}


def amid_nan(tokens: Tensor) -> Tensor:
    batch, heads, length, head_dim = tokens.shape
    shape = batch, length + 10, heads, head_dim + 3
    memory = torch.full(shape, torch.nan, dtype=tokens.dtype, device=DEVICE)
    view = memory[:, 5:-5, :, 1 : 1 + head_dim].transpose(1, 2)
    return view.copy_(tokens)


def results(found: Problem, **changes: object) -> list[Tensor]:
    """The output of the first tile, and the gradients of keys and values through it."""
    inputs = {name: x.detach().requires_grad_() for name, x in found.tokens.items()}
    output = found.attend("triton", **inputs | changes)
    order = found.options["query_order"].long()[:32]
    first = output[:, :, order]
    return [first, *torch.autograd.grad(first.sin().sum(), list(inputs.values())[1:])]


@cache
def problem_and_results() -> tuple[Problem, list[Tensor]]:
    found = drawn(head_dim=24, num_sinks=5, threshold=0.01, query_order=None)
    order = torch.arange(40, device=DEVICE)
    found = replace(found, options=found.options | {"query_order": order})
    return found, results(found)


@pytest.mark.parametrize("name", SAME_BITS)
def test_same_bits(name):
    """Catches neighbours in memory taken for neighbours in a row, and queries beyond the last that
    vote."""
    found, expected = problem_and_results()
    assert all(map(torch.equal, results(SAME_BITS[name](found)), expected))


def test_another_number_of_refined_parents_takes_the_same_kernels():
    """Catches a compilation for each number that a schedule sets, or that a route measures."""
    problem = drawn(num_parents=8, num_children=4, num_refined=3)
    tensors, spec = problem.call()
    specs = spec, spec.changed(num_refined=5), spec.changed(num_refined=8)
    problems = [launch_problem.Problem.of(tensors, None, spec) for spec in specs]
    compiled = [[launch.constants for launch in call._plan(x).launches] for x in problems]
    assert compiled[0] == compiled[1] != compiled[2]
    assert problems[0].variant == problems[1].variant != problems[2].variant


@pytest.mark.parametrize("resolution", [{}, {"threshold": 0.0}], ids=str)
def test_memory_of_gradients_is_linear_in_the_tokens(resolution):
    """Catches something stored for each column of a tile."""
    sizes = []
    for tokens in (1 << 12, 1 << 14):
        layout = Layout(torch.Size((1, 2, tokens, 64)), (128 * tokens, 64, 128, 1))
        tensors, spec = drawn(num_parents=64, num_children=8, **resolution).call()
        problem = launch_problem.Problem.of(tensors, None, spec)
        problem = problem._replace(query=layout, key=layout, value=layout)
        sizes.append(gradients._plan(problem, layout)._size / tokens)
    assert sizes[1] < 1.1 * sizes[0]


def test_gradients_in_float32_keep_their_digits():
    """Where two tiles of float32 fit; catches a product of lower precision."""
    tokens = [x.to(DEVICE, FP32) for x in make_case(batch=1, queries=40, head_dim=16)[:3]]
    grad = torch.linspace(-1, 1, tokens[0].numel()).to(tokens[0]).sin().view(tokens[0].shape)
    options = {"num_parents": 6, "num_children": 3, "threshold": 0.02, "query_tile": 16}
    spec, tensors = Spec(**options), Tensors.of(*tokens, scale=0.25)
    found = gradients.kernel_gradients(grad, tensors, None, spec)
    wide = [x.double().requires_grad_() for x in tokens]
    output = ops.avq_attention(*wide, backend="reference", **options)
    for gradient, target in zip(found, torch.autograd.grad(output, wide, grad), strict=True):
        assert relative_error(gradient, target) < 1e-6


@pytest.mark.parametrize("dtype", [FP16, FP32])
def test_packed_scores_order_codewords_by_distance(dtype):
    codebook = make_case(heads=2, head_dim=40, parents=11, children=5)[3]
    parents, children = codebook.parents + 3, codebook.children + 3
    scale = 40**-0.5
    codes, bias, _ = pack(parents, children, scale=scale, dtype=dtype)
    padded_dim, parent_rows, child_rows = padded_sizes(40, 11, 5)
    assert codes.shape == (2, parent_rows + 11 * child_rows, padded_dim)
    is_row = bias > -torch.inf
    assert is_row.sum() == 2 * 11 * 6
    assert (codes[~is_row] == 0).all()
    assert (codes[..., 40:] == 0).all()
    factor = scale * math.log2(math.e)
    centre = centre_of(parents)
    rounded = (factor * (parents - centre)).to(dtype)
    assert codes[:, :11, :40].equal(rounded)  # once
    table = codes[..., :40].double() / factor + centre
    key = make_case(queries=20, head_dim=40)[1] + 3
    scores = key @ codes[..., :40].double().mT + bias.double()[None, :, None]
    difference = scores + factor / 2 * torch.cdist(key, table[None]).square()
    of_rows = difference[..., is_row[0]]
    spread = of_rows.amax(-1) - of_rows.amin(-1)
    assert (spread <= 2.0**-21 * bias[is_row].abs().max()).all()
    parents[:, 2] += 1e6  # no key goes there
    assert pack(parents, children, scale=scale, dtype=dtype).codes.isfinite().all()


def on_device(*, dtype=FP16, device=DEVICE, **shape):
    query, key, value, codebook = make_case(dtype=dtype, **shape)
    return *(x.to(device) for x in (query, key, value)), codebook.to(device)


@pytest.mark.parametrize("change", ["in place", "announced", "made in inference mode", "moved"])
def test_a_changed_codebook_is_packed_again(change):
    query, key, value, codebook = on_device(batch=1, heads=1, queries=16, dtype=FP32)
    if change == "made in inference mode":
        with torch.inference_mode():
            codebook = Codebook(codebook.parents.clone(), codebook.children.clone())
    options = {"num_refined": 2, "backend": "triton"}
    before = stored_attention(query, key, value, codebook, **options)
    assert torch.equal(stored_attention(query, key, value, codebook, **options), before)
    with torch.inference_mode(change == "made in inference mode"):
        moved = codebook.children + 0.5 * torch.randn_like(codebook.children)
        if change == "moved":  # as Module.to does, which leaves the tensor and its version
            codebook.children.data = moved
        elif change == "announced":
            codebook.children.data.copy_(moved)
            torch.autograd.graph.increment_version(codebook.children)
        else:
            codebook.children.copy_(moved)
    after = stored_attention(query, key, value, codebook, **options)
    assert not torch.equal(after, before)
    fresh = Codebook(codebook.parents.clone(), codebook.children.clone())
    assert torch.equal(stored_attention(query, key, value, fresh, **options), after)


def test_other_children_in_the_same_memory_are_packed_again():
    """Catches tables that are found by address and version, which a later tensor may have again."""
    parents = torch.zeros(1, 2, 8)
    memory = np.ones((1, 2, 3, 8), np.float32)
    children = torch.from_numpy(memory)
    first = packing.packed_codewords(parents, children, 1.0, FP32)
    assert packing.packed_codewords(parents, children, 1.0, FP32) is first
    del children
    memory += 1
    others = packing.packed_codewords(parents, torch.from_numpy(memory), 1.0, FP32)
    assert not torch.equal(others.codes, first.codes)


def test_packed_codewords_die_with_their_codebook():
    query, key, value, codebook = on_device(batch=1, heads=1, queries=16)
    held = len(packing._packed)
    stored_attention(query, key, value, codebook, num_refined=2, backend="triton")
    assert len(packing._packed) == held + 1
    del codebook
    assert len(packing._packed) == held


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"scale": 0.0}, "scale must be positive, but is 0.0"),
        ({"scale": -1.0}, "scale must be positive, but is -1.0"),
        ({"query_tile": 200}, "query_tile must be at most 128"),
    ],
)
def test_what_the_kernels_cannot_do_is_said(change, message):
    case = on_device()
    with pytest.raises(ValueError, match=rf'backend="triton" cannot run: {message}'):
        stored_attention(*case, num_refined=2, backend="triton", **change)
    assert stored_attention(*case, num_refined=2, **change).isfinite().all()


def test_no_gpu_no_kernels(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    case = on_device(device="cpu")
    with pytest.raises(ValueError, match="query is on cpu, and the kernels need an NVIDIA GPU"):
        stored_attention(*case, num_refined=2, backend="triton")
    assert ops.resolve_backend("auto", *call_of(*case)) == "torch"
    monkeypatch.setattr(limits, "HAS_TRITON", False)
    with pytest.raises(ValueError, match="triton is not installed"):
        stored_attention(*case, num_refined=2, backend="triton")


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize(
    "form", [*(pytest.param(x, marks=LONG) for x in ("stored", "means")), "own"]
)
def test_it_is_a_well_behaved_operation(form):
    query, key, value, codebook = on_device(batch=1, heads=1, queries=20, dtype=FP32)
    order = torch.arange(20, device=DEVICE)
    options = {"codewords": "stored" if form == "stored" else "means", "query_order": order}
    codebook = None if form == "own" else codebook
    tensors, spec = call_of(query, key, value, codebook, scale=0.3, **options)
    arguments = arguments_of(tensors, spec)
    torch.library.opcheck(torch.ops.avq_diffusers.kernel_attention.default, arguments)


@GPU
@pytest.mark.parametrize("is_eager", [True, False])
def test_further_calls_repeat_the_launches_of_the_first(is_eager, monkeypatch):
    """Catches eager calls or compiled code that plan each call anew, or repeat another call's."""
    tokens = on_device(queries=300, dtype=FP16)[:3]
    options = {"num_parents": 8, "num_children": 4, "codewords": "means"}
    tensors, spec = call_of(*tokens, None, num_refined=None, threshold=1e-3, **options)
    arguments = arguments_of(tensors, spec)

    def run(scale: float) -> Tensor:
        with torch.no_grad():
            if is_eager:
                return ops.attend(tensors._replace(scale=scale), spec, "triton").output
            *others, _, numbers, threshold = arguments
            operator = torch.ops.avq_diffusers.kernel_attention.default
            return operator(*others, scale, numbers, threshold)[0]

    expected = {scale: run(scale) for scale in (0.1, 0.5)}
    assert not torch.equal(*expected.values())
    monkeypatch.setattr(call, "kernel_attention", None)
    for scale, output in expected.items():
        assert torch.equal(run(scale), output)


@pytest.mark.parametrize("has_codebook", [True, False])
def test_compiles_to_one_graph(has_codebook):
    torch._dynamo.reset()
    found = drawn(queries=20, keys=20, head_dim=8, has_codebook=has_codebook)
    found = replace(found, options=found.options | {"query_order": None})
    compiled = torch.compile(
        lambda *tokens: found.attend("triton", **dict(zip(found.tokens, tokens, strict=True))),
        backend="aot_eager",
        fullgraph=True,
    )
    inputs = [x.detach().requires_grad_() for x in found.tokens.values()]
    outputs = (
        compiled(*inputs),
        found.attend("triton", **dict(zip(found.tokens, inputs, strict=True))),
    )
    grads = [torch.autograd.grad(x.sin().sum(), inputs) for x in outputs]
    assert torch.equal(*outputs)
    assert all(map(torch.equal, *grads))


PAPER = [(32, 8), (64, 8), (128, 8), (128, 32), (256, 16)]


@GPU
class TestGpu:
    @staticmethod
    def level(number: int, tokens: int, **fixed: object) -> Problem:
        """A self-attention of Stable Diffusion 1.5 at M64C8."""
        sizes = {"num_parents": 64, "num_children": 8, "num_refined": 16, "query_tile": 128}
        sizes |= {"batch": 2, "heads": 8, "queries": tokens, "keys": tokens, "sharpness": 1.0}
        return drawn(head_dim={0: 40, 1: 80}[number], **sizes | fixed)

    @pytest.mark.parametrize("dtype", [FP16, BF16, FP32], ids=str)
    @pytest.mark.parametrize("number", [0, 1])
    @pytest.mark.parametrize(
        "fixed",
        [
            *({"num_refined": x, "codewords": "stored", "has_codebook": True} for x in (0, 16, 64)),
            *({"num_refined": x} for x in (0, 16, 64)),
            *({"threshold": x} for x in (0.0, 1e-4, 1e-2, math.inf)),
        ],
        ids=str,
    )
    def test_the_layers_of_stable_diffusion(self, dtype, number, fixed):
        if dtype == FP32 and number == 1 and torch.cuda.get_device_capability() < (9, 0):
            pytest.skip("beyond the limits of the kernels on this GPU")
        check(self.level(number, 1024, dtype=dtype, **fixed))

    @pytest.mark.parametrize(
        "fixed",
        [
            *({"kind": kind} for kind in ("one hot leaf", "identical", "offset", "empty parents")),
            *({"head_dim": 128, "num_parents": m, "num_refined": p} for m, p in PAPER),
        ],
        ids=str,
    )
    def test_hard_keys_and_the_configurations_of_the_paper(self, fixed):
        sizes = {"heads": 2, "queries": 2000, "keys": 2000, "num_parents": 64, "num_children": 8}
        sizes |= {"sharpness": 1.0}
        check(drawn(has_codebook=True, codewords="stored", **sizes | fixed))

    def test_same_bits_whatever_else_the_gpu_does(self):
        found = self.level(0, 4096)
        first = found.attend("triton")
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = found.attend("triton")
        load = torch.randn(4096, 4096, device="cuda", dtype=FP16)
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        grads = results(found)
        for _ in range(100):
            with torch.cuda.stream(stream):
                other = found.attend("triton")
            load = load @ load
            again = found.attend("triton")
            graph.replay()
            torch.cuda.synchronize()
            assert torch.equal(again, first)
            assert torch.equal(other, first)
            assert torch.equal(captured, first)
        assert all(map(torch.equal, results(found), grads))

    def test_the_public_way_to_launch_serves_an_unknown_triton(self, monkeypatch, use):
        monkeypatch.setattr(launch, "IS_DIRECT", False)
        monkeypatch.setattr(launch, "direct_launch", None)  # catches its use
        use()
        check(drawn(threshold=0.01, num_sinks=5))

    def test_the_host_never_waits(self):
        found = self.level(0, 1024)
        found.attend("triton")
        torch.cuda.set_sync_debug_mode("error")
        try:
            found.attend("triton")
        finally:
            torch.cuda.set_sync_debug_mode("default")

    def test_a_kernel_that_another_thread_is_loading(self):
        """Catches a launch of a kernel whose binary is not there yet."""
        loading = Event()

        def load_slowly(*_: object) -> None:
            loading.set()
            sleep(0.3)

        # Sizes of no other test, whose kernels are not loaded; two numbers of keys share them.
        sizes = {"num_parents": 52, "num_children": 7, "num_refined": 9, "head_dim": 56}
        first, second = drawn(keys=600, **sizes), drawn(keys=700, **sizes)
        hooks = knobs.runtime.kernel_load_start_hook
        hooks.add(load_slowly)
        try:
            with ThreadPoolExecutor(1) as pool:
                other = pool.submit(first.attend, "triton")
                assert loading.wait(60)
                assert solve(second, "triton").error <= 1
                other.result()
        finally:
            hooks.remove(load_slowly)

    def test_memory_does_not_grow(self):
        found = self.level(0, 4096)
        for _ in range(3):
            found.attend("triton")
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        for _ in range(50):
            found.attend("triton")
        torch.cuda.synchronize()
        assert torch.cuda.memory_allocated() == before

    def test_more_elements_than_32_bits_count(self):
        """The last batch element lies beyond 2^31 elements."""
        tokens, heads, head_dim, batch = 16384, 8, 64, 260
        generator = torch.Generator("cuda").manual_seed(0)
        shape = (batch, tokens, heads, head_dim)
        packed = torch.randn(shape, generator=generator, device="cuda", dtype=FP16).transpose(1, 2)
        parents = torch.randn(heads, 64, head_dim, generator=generator, device="cuda")
        offsets = torch.randn(heads, 64, 8, head_dim, generator=generator, device="cuda")
        codebook = Codebook(parents, parents[:, :, None] + 0.3 * offsets)
        options = {"num_refined": 16, "backend": "triton"}
        output = stored_attention(packed, packed, packed, codebook, **options)[-1:]
        last = packed[-1:].clone()
        alone = stored_attention(last, last, last, codebook, **options)
        assert relative_error(output, alone) < 1e-3  # a batch cuts sums into other pieces
