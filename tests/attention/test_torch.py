"""The PyTorch path beyond its results: cost, memory, digits, determinism, needed gradients.

Its results are compared with the definition in `test_fuzz`. Uninitialized memory holds NaN in every
test here.
"""

import math

import pytest
import torch
from cases import THRESHOLD, call_of, make_case, relative_error, stored_attention
from problems import Problem, solve
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from avq_diffusers.attention import torch_backward, torch_forward
from avq_diffusers.attention.api import avq_attention
from avq_diffusers.codebook import assignment
from avq_diffusers.codebook.codebook import Codebook

FP32, FP64 = torch.float32, torch.float64
SINKS = ("sink_key", "sink_value")
SIZES = {"num_parents": 6, "num_children": 3, "num_refined": 2, "query_tile": 16}

pytestmark = pytest.mark.usefixtures("uninitialized_memory_is_nan")


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    """Several chunks, the last one partial, already at the sizes of these tests."""
    monkeypatch.setattr(assignment, "ELEMENTS_CPU", 1 << 13)


def with_sinks(**shape: object) -> tuple[list[Tensor], Codebook]:
    """Query, key, value, sink keys and sink values, and a codebook."""
    query, key, value, codebook = make_case(**shape)
    return [query, key, value, key[:, :, :11] + 1, 1 - value[:, :, :11]], codebook


def own(codebook: Codebook, options: dict[str, object]) -> Codebook | None:
    """No codebook where means represent the keys, which then have a first-order term."""
    return codebook if options is STORED else None


def results(
    tokens: list[Tensor], codebook: Codebook | None, needed: tuple[int, ...] = (), **options: object
) -> list[Tensor | None]:
    """The output, then the gradients of the tokens that need one, or of all."""
    needed = needed or tuple(range(len(tokens)))
    inputs = [x.detach().requires_grad_(i in needed) for i, x in enumerate(tokens)]
    options = SIZES | dict(zip(SINKS, inputs[3:], strict=False)) | options
    output = avq_attention(*inputs[:3], codebook, **options)
    output.square().sum().backward()
    return [output.detach(), *(x.grad for x in inputs)]


MEANS = {"codewords": "means"}
STORED = {"codewords": "stored"}


@pytest.mark.parametrize("options", [STORED, THRESHOLD], ids=str)
@pytest.mark.parametrize("needed", [(0,), (1,), (2,), (3,), (4,), (1, 2), (3, 4), (1, 4)], ids=str)
def test_only_needed_gradients_are_computed(options, needed):
    tokens, codebook = with_sinks()
    call = tokens, own(codebook, options)
    everything = results(*call, **options)
    for i, gradient in enumerate(results(*call, needed, **options)[1:]):
        if i in needed:
            assert relative_error(gradient, everything[1 + i]) < 1e-12
        else:
            assert gradient is None


def flops(needs_grad: tuple[bool, bool, bool] = (True, True, True), **shape: int) -> int:
    call = call_of(*make_case(**shape), scale=1.0)
    with FlopCounterMode(display=False) as counter:
        grad_output = torch.ones_like(call[0].query)
        torch_backward.gradients(grad_output, *call, (*needs_grad, False, False))
    return counter.get_total_flops()


class LargestTensor(TorchDispatchMode):
    """Most numbers in one result."""

    def __init__(self) -> None:
        super().__init__()
        self.numbers = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor) and not func.is_view:
            self.numbers = max(self.numbers, result.numel())
        return result


def test_cost_and_memory_of_gradients_are_linear(monkeypatch):
    """Catches a quadratic way, gradients that nobody needs, and moments of all tiles at once, or of
    the whole batch."""
    monkeypatch.setattr(assignment, "ELEMENTS_CPU", 1 << 10)
    assert flops(queries=64) - flops(queries=32) == 2 * (flops(queries=32) - flops(queries=16))
    assert flops((True, False, True), queries=32) < 0.5 * flops(queries=32)
    assert flops((True, True, False), queries=32) < flops(queries=32)
    tokens_elements, table_elements = 2 * 2 * 256 * 8, 2 * 6 * 5 * 9 * 9
    for shape, expected in (
        ({"queries": 256}, tokens_elements),
        ({"queries": 16, "batch": 16}, table_elements),
    ):
        with LargestTensor() as mode:
            flops(**shape)
        assert mode.numbers == expected


@pytest.mark.parametrize("options", [MEANS, {**THRESHOLD, "threshold": math.inf}])
def test_cost_of_means_is_linear(options):
    """Twice the tokens add twice the products, where tiles have as many columns."""

    def flops(num_tokens: int) -> int:
        query, key, value, _ = make_case(batch=1, queries=num_tokens)
        sinks = {"sink_key": key[:, :, :5], "sink_value": value[:, :, :5]}
        call = call_of(query, key, value, None, **options | sinks)
        with FlopCounterMode(display=False) as counter:
            torch_forward.avq_attention(*call)
            torch_backward.gradients(query, *call, (True,) * 5)
        return counter.get_total_flops()

    assert flops(512) - flops(256) == 2 * (flops(256) - flops(128))


@pytest.mark.parametrize("options", [STORED, THRESHOLD], ids=str)
def test_chunks_do_not_change_the_result(options, monkeypatch):
    tokens, codebook = with_sinks(batch=3, queries=100)
    found = []
    for elements in (1 << 10, 1 << 14, 1 << 22):
        monkeypatch.setattr(assignment, "ELEMENTS_CPU", elements)
        found.append(results(tokens, own(codebook, options), **options))
    for x, y, z in zip(*found, strict=True):
        assert max(relative_error(x, z), relative_error(y, z)) < 1e-13


@pytest.mark.parametrize("dtype", [FP32, torch.bfloat16])
@pytest.mark.parametrize("options", [STORED, THRESHOLD], ids=str)
def test_same_bits_on_every_run(options, dtype):
    tokens, codebook = with_sinks(queries=200, dtype=dtype)
    order = torch.randperm(200, generator=torch.Generator().manual_seed(1))
    call = tokens, own(codebook, options)
    first = results(*call, query_order=order, **options)
    for _ in range(5):
        again = results(*call, query_order=order, **options)
        assert all(map(torch.equal, again, first))


# By how much all keys are shifted, and a codeword that takes no key.
DIGITS = {
    "a shift of all keys": (300, 0, {}),
    "a shift, none refined": (300, 0, {"num_refined": 0}),
    "a shift, by a threshold and beside sinks": (300, 0, THRESHOLD),
    "a shift of own codewords, beside sinks": (300, 0, MEANS),
    "a dead codeword far away": (0, 1e6, {}),
}


@pytest.mark.parametrize("name", DIGITS)
def test_it_costs_no_digits(name):
    """Catches logits with the offset that all keys share, 1e-5 of error, and centring on the mean
    of the parents, which a dead one moves."""
    shift, far, options = DIGITS[name]
    tokens, codebook = with_sinks(dtype=FP32)
    tokens[1], tokens[3] = tokens[1] + shift, tokens[3] + shift
    parents, children = codebook.parents + shift, codebook.children + shift
    parents[:, 3] += far
    children[:, 3] += far
    codebook = None if "own" in name else Codebook(parents, children)
    problem = (tokens if "sinks" in name else tokens[:3]), codebook
    output, *gradients = results(*problem, **STORED | options, backend="torch")
    wide = [x.double() for x in problem[0]], codebook and codebook.to(dtype=FP64)
    expected, *targets = results(*wide, **STORED | options, backend="reference")
    assert relative_error(output, expected) < 8 * torch.finfo(FP32).eps
    assert relative_error(gradients[2], targets[2]) < 16 * torch.finfo(FP32).eps


@pytest.mark.parametrize("dtype", [FP32, torch.float16, torch.bfloat16])
def test_large_values_and_counts_do_not_overflow(dtype):
    # One cell of 4096 keys: the sum of its values, 4e6, is beyond fp16.
    query, key, value, codebook = make_case(batch=1, queries=16, keys=4096, dtype=dtype)
    key = (codebook.parents[:, 2:3] + 1e-3 * key).to(dtype)
    tokens = [x.detach().requires_grad_() for x in (query, key, 1000 + value)]
    output = stored_attention(*tokens, codebook, num_refined=1, backend="torch")
    wide = *(x.detach().double() for x in tokens), codebook.to(dtype=FP64)
    expected = stored_attention(*wide, num_refined=1, backend="reference")
    assert relative_error(output.detach(), expected) < 2 * torch.finfo(dtype).eps
    for gradient in torch.autograd.grad(output, tokens, torch.ones_like(output)):
        assert gradient.isfinite().all()


@pytest.mark.parametrize(("of_values", "of_keys"), [(1e30, 1.0), (1.0, 1e5)])
def test_bfloat16_reaches_beyond_float16(of_values, of_keys):
    """Catches float16 inside, infinite from 65520 on, and sums that lose what bfloat16 holds."""
    *tokens, codebook = make_case(queries=64, head_dim=64, parents=2, children=0, dtype=FP32)
    codebook = Codebook(codebook.parents * of_keys, codebook.children * of_keys)
    scaled = zip(tokens, (1 / of_keys, of_keys, of_values), strict=True)
    tokens = dict(
        zip(("query", "key", "value"), (x.bfloat16() * y for x, y in scaled), strict=True)
    )
    sizes = {"num_parents": 2, "num_children": 0, "num_refined": 0}
    options = sizes | {"codewords": "means", "query_tile": 32, "scale": None}
    outcome = solve(Problem(tokens, codebook, options), "torch")
    assert outcome.error <= 1
    assert outcome.compared > 0.5


def test_the_codebook_gets_no_gradient():
    query, key, value, codebook = make_case()
    learned = Codebook(codebook.parents.requires_grad_(), codebook.children.requires_grad_())
    for backend in ("torch", "reference"):
        output = stored_attention(query, key, value, learned, num_refined=6, backend=backend)
        assert not output.requires_grad
        inputs = [query.detach().requires_grad_(), learned.parents, learned.children]
        output = stored_attention(inputs[0], key, value, learned, num_refined=6, backend=backend)
        of_query, *of_codebook = torch.autograd.grad(output.sum(), inputs, allow_unused=True)
        assert of_query.any()
        assert of_codebook == [None, None]


def loss(*tokens: Tensor, codebook: Codebook, **options: object) -> Tensor:
    output = stored_attention(2 * tokens[0], *tokens[1:], codebook, query_tile=16, **options)
    return output.transpose(1, 2).flatten(2).square().sum()


def test_checkpointing_and_autocast_change_no_gradient():
    *tokens, codebook = make_case(dtype=FP32)

    def attend(*x: Tensor) -> Tensor:
        return loss(*x, codebook=codebook, num_refined=2)

    def recomputed(*x: Tensor) -> Tensor:
        return checkpoint(attend, *x, use_reentrant=False)

    found = []
    for run, autocast in ((attend, False), (recomputed, False), (attend, True)):
        inputs = [x.detach().requires_grad_() for x in tokens]
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
            run(*inputs).backward()
        found.append([x.grad for x in inputs])
    for plain, *others in zip(*found, strict=True):
        assert plain.any()
        assert all(torch.equal(plain, other) for other in others)


@pytest.mark.gpu
class TestCuda:
    @pytest.fixture(autouse=True)
    def deterministic_cublas(self, monkeypatch):
        monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

    @staticmethod
    def on_cuda(dtype: torch.dtype) -> tuple[tuple[Tensor, Tensor, Tensor, Codebook], dict]:
        shape = {"queries": 1000, "head_dim": 40, "parents": 64, "children": 8}
        *tokens, codebook = make_case(**shape, dtype=dtype)
        order = torch.randperm(1000, generator=torch.Generator().manual_seed(1)).cuda()
        options = {"num_refined": 16, "query_order": order, "backend": "torch"}
        return (*(x.cuda() for x in tokens), codebook.to("cuda")), options

    @pytest.mark.parametrize("deterministic", [True, False])
    @pytest.mark.parametrize("dtype", [FP32, torch.float16, torch.bfloat16])
    def test_same_bits_on_every_run(self, dtype, deterministic):
        torch.use_deterministic_algorithms(deterministic)
        case, options = self.on_cuda(dtype)
        first = stored_attention(*case, **options)
        for _ in range(100):
            assert torch.equal(stored_attention(*case, **options), first)

    def test_the_host_never_waits_without_a_threshold(self):
        (query, key, value, codebook), options = self.on_cuda(torch.float16)
        options |= {"sink_key": key[:, :, :9], "sink_value": value[:, :, :9]}
        stored_attention(query, key, value, codebook, **options)
        torch.cuda.set_sync_debug_mode("error")
        try:
            stored_attention(query, key, value, codebook, **options)
            with pytest.raises(RuntimeError, match="synchroniz"):
                query.sum().item()
        finally:
            torch.cuda.set_sync_debug_mode("default")
