"""Gradients of AVQ attention against the definition by autograd: same gradients at linear cost.

Uninitialized memory holds NaN in every test here.
"""

import itertools

import pytest
import torch
import torch.nn.functional as F
from cases import SHAPES, call_of, make_case, relative_error, stored_attention
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from avq_diffusers.attention import api as ops
from avq_diffusers.attention import reference, torch_backward
from avq_diffusers.codebook import assignment
from avq_diffusers.codebook.codebook import Codebook

EXACT = 1e-10

pytestmark = pytest.mark.usefixtures("uninitialized_memory_is_nan")


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    """Several chunks, the last one partial, already at the sizes of these tests."""
    monkeypatch.setattr(assignment, "ELEMENTS_CPU", 1 << 14)


def random_like(tokens: Tensor, seed: int = 1) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(tokens.shape, generator=generator, dtype=torch.float64).to(tokens)


def gradients(
    query: Tensor, key: Tensor, value: Tensor, codebook: Codebook, *, backend: str, **options
) -> tuple[Tensor, Tensor, Tensor]:
    inputs = [x.detach().requires_grad_() for x in (query, key, value)]
    output = stored_attention(*inputs, codebook, backend=backend, **options)
    return torch.autograd.grad(output, inputs, random_like(query))


def errors(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    codebook: Codebook,
    *,
    backend: str = "torch",
    **options,
) -> list[float]:
    """Errors of the gradients of query, key and value."""
    case = (query, key, value, codebook)
    actual = gradients(*case, backend=backend, **options)
    expected = gradients(*case, backend="reference", **options)
    for gradient, tokens in zip(actual, case[:3], strict=True):
        assert gradient.dtype == tokens.dtype
        assert gradient.shape == tokens.shape
    return [relative_error(*pair) for pair in zip(actual, expected, strict=True)]


@pytest.mark.parametrize(("shape", "num_refined", "query_tile"), SHAPES)
def test_shapes(shape, num_refined, query_tile):
    query, key, value, codebook = make_case(**shape)
    order = torch.randperm(query.shape[2], generator=torch.Generator().manual_seed(1))
    options = {"num_refined": num_refined, "query_tile": query_tile}
    for query_order in (None, order.int()):
        case = (query, key, value, codebook)
        assert max(errors(*case, query_order=query_order, **options)) < EXACT


def test_one_key_gets_no_gradient():
    """One key takes all attention: gradients of query and key vanish, that of value does not."""
    query, key, value, codebook = make_case(keys=1)
    of_query, of_key, of_value = gradients(
        query, key, value, codebook, num_refined=2, query_tile=16, backend="torch"
    )
    assert relative_error(of_value, random_like(query).sum(dim=2, keepdim=True)) < EXACT
    assert of_query.abs().max() < EXACT
    assert of_key.abs().max() < EXACT


def test_scale():
    assert max(errors(*make_case(), num_refined=2, query_tile=16, scale=0.7)) < EXACT


def test_children_that_do_not_average_to_their_parent():
    query, key, value, codebook = make_case()
    codebook = Codebook(codebook.parents, codebook.children + 0.5)
    assert (codebook.children.mean(dim=2) - codebook.parents).norm(dim=-1).min() > 0.5
    assert max(errors(query, key, value, codebook, num_refined=2, query_tile=16)) < EXACT


@pytest.mark.parametrize("cell", ["parent", "child"])
def test_all_keys_in_one_leaf(cell):
    query, key, value, codebook = make_case()
    codeword = codebook.parents[:, 2:3] if cell == "parent" else codebook.children[:, 2, 1:2]
    key = codeword + 1e-3 * key
    parent, leaf = reference.assign(key, codebook.parents, codebook.children)
    assert (parent == 2).all()
    assert (leaf == (0 if cell == "parent" else 2)).all()
    # All keys are equal once replaced: the gradient of the query is zero but for rounding.
    _, *of_keys_and_values = errors(query, key, value, codebook, num_refined=2, query_tile=16)
    assert max(of_keys_and_values) < EXACT


def test_codewords_that_take_no_key():
    """Empty parents, empty children far away, and parents that lost all keys to a child."""
    query, key, value, codebook = make_case()
    children = codebook.children.clone()
    children[:, :, 0] = 1e3
    children[:, 1, 1:] = codebook.parents[:, 1, None]
    parents = codebook.parents.clone()
    parents[:, 3] = -1e3
    key = key.clone()
    key[:, :, :10] = children[:, 5, 1:2] + 1e-3 * key[:, :, :10]
    assert max(errors(query, key, value, Codebook(parents, children), num_refined=3)) < EXACT


def test_layouts():
    case = make_case()
    fused = [torch.cat([x, x + 1, x - 1], dim=-1)[..., 8:16] for x in case[:3]]
    assert max(errors(*fused, case[3], num_refined=2, query_tile=16)) < EXACT
    flipped = [x.permute(3, 2, 1, 0).contiguous().permute(3, 2, 1, 0) for x in case[:3]]
    assert max(errors(*flipped, case[3], num_refined=2, query_tile=16)) < EXACT

    inputs = [x.detach().requires_grad_() for x in case[:3]]
    sums = [
        torch.autograd.grad(
            stored_attention(*inputs, case[3], num_refined=2, backend=backend).sum(), inputs[:2]
        )
        for backend in ("torch", "reference")
    ]  # the gradient of a sum has no memory of its own
    for actual, expected in zip(*sums, strict=True):
        assert relative_error(actual, expected) < EXACT


@pytest.mark.parametrize("num_refined", [0, 6])
@pytest.mark.parametrize("shape", [{}, {"keys": 70}, {"children": 0}])
def test_the_dense_way_agrees(shape, num_refined):
    if not shape.get("children", 3):
        num_refined = 0
    case = make_case(**shape)
    options = {"num_refined": num_refined, "query_tile": 16}
    assert max(errors(*case, backend="dense", **options)) < EXACT
    dense = stored_attention(*case, backend="dense", **options)
    assert relative_error(dense, stored_attention(*case, backend="reference", **options)) < EXACT
    assert dense.transpose(1, 2).is_contiguous()


def test_quantization_to_half_precision_keeps_the_digits_of_shifted_keys():
    """Catches codewords rounded with the offset that all of them share: 0.05 of error."""
    _, key, _, codebook = make_case()
    parents, children = codebook.parents + 300, codebook.children + 300
    key = (key + 300).half()
    quantized = torch_backward.quantize(key, parents.float(), children.float()).double()
    parent, leaf = reference.assign(key.double(), parents, children)
    expected = torch.cat([parents[:, :, None], children], dim=2)[
        torch.arange(2)[:, None], parent, leaf
    ]
    quantized, expected = (x - x.mean(dim=2, keepdim=True) for x in (quantized, expected))
    assert relative_error(quantized, expected) < torch.finfo(torch.float16).eps


def flops(needs_grad: tuple[bool, bool, bool] = (True, True, True), **shape: int) -> int:
    call = call_of(*make_case(**shape), scale=1.0)
    with FlopCounterMode(display=False) as counter:
        torch_backward.gradients(random_like(call[0].query), *call, (*needs_grad, False, False))
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


def test_cost_and_memory_are_linear(monkeypatch):
    """Catches a quadratic way, and moments of all tiles or of the whole batch at once."""
    monkeypatch.setattr(assignment, "ELEMENTS_CPU", 1 << 10)
    assert flops(queries=512) == 2 * flops(queries=256)
    tokens_elements, table_elements = 2 * 2 * 512 * 8, 2 * 6 * 5 * 9 * 9
    for shape, expected in (
        ({"queries": 512}, tokens_elements),
        ({"queries": 16, "batch": 16}, table_elements),
    ):
        with LargestTensor() as mode:
            flops(**shape)
        assert mode.numbers == expected


@pytest.mark.parametrize("needs_grad", list(itertools.product([False, True], repeat=3))[1:])
def test_only_needed_gradients_are_computed(needs_grad):
    *tokens, codebook = make_case()
    everything = gradients(*tokens, codebook, backend="torch", num_refined=2, query_tile=16)
    inputs = [
        x.detach().requires_grad_(needed) for x, needed in zip(tokens, needs_grad, strict=True)
    ]
    output = stored_attention(*inputs, codebook, backend="torch", num_refined=2, query_tile=16)
    output.backward(random_like(output))
    for x, expected, needed in zip(inputs, everything, needs_grad, strict=True):
        if needed:
            assert relative_error(x.grad, expected) < EXACT
        else:
            assert x.grad is None
    assert flops(needs_grad, queries=64) < flops(queries=64) or all(needs_grad)
    if not needs_grad[1]:
        assert flops(needs_grad, queries=64) < 0.5 * flops(queries=64)


def test_the_codebook_gets_no_gradient():
    query, key, value, codebook = make_case()
    learned = Codebook(codebook.parents.requires_grad_(), codebook.children.requires_grad_())
    for backend in ("torch", "dense", "reference"):
        output = stored_attention(query, key, value, learned, num_refined=6, backend=backend)
        assert not output.requires_grad
        inputs = [query.detach().requires_grad_(), learned.parents, learned.children]
        output = stored_attention(inputs[0], key, value, learned, num_refined=6, backend=backend)
        of_query, *of_codebook = torch.autograd.grad(output.sum(), inputs, allow_unused=True)
        assert of_query.any()
        assert of_codebook == [None, None]


def test_gradients_of_query_and_value_match_finite_differences():
    """Not for keys: quantization is constant around a key, so its finite difference is zero."""
    inputs = make_case(batch=1, heads=1, queries=6, head_dim=3, parents=3, children=2)
    query, value = (x.detach().requires_grad_() for x in (inputs[0], inputs[2]))

    def attend(query: Tensor, value: Tensor) -> Tensor:
        options = {"num_refined": 1, "query_tile": 4, "backend": "torch"}
        return stored_attention(query, inputs[1], value, inputs[3], **options)

    assert torch.autograd.gradcheck(attend, (query, value))


@pytest.mark.parametrize("backend", ["torch", "dense"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_error_is_at_most_twice_that_of_exact_attention(dtype, backend):
    query, key, value, codebook = make_case(
        queries=256, head_dim=40, parents=16, children=4, dtype=dtype
    )
    # Codewords that half precision holds exactly, so that what remains is arithmetic.
    codebook = codebook.to(dtype=dtype)
    exact_codebook = codebook.to(dtype=torch.float64)
    wide = [x.double() for x in (query, key, value)]
    options = {"num_refined": 16 if backend == "dense" else 4, "query_tile": 64}
    actual = gradients(query, key, value, codebook, backend=backend, **options)
    grad_output = random_like(query)
    inputs = [x.requires_grad_() for x in wide]
    expected = torch.autograd.grad(
        stored_attention(*inputs, exact_codebook, backend="reference", **options),
        inputs,
        grad_output.double(),
    )

    narrow = [x.detach().requires_grad_() for x in (query, key, value)]
    attention = torch.autograd.grad(F.scaled_dot_product_attention(*narrow), narrow, grad_output)
    exact = torch.autograd.grad(
        F.scaled_dot_product_attention(*inputs), inputs, grad_output.double()
    )
    for i in range(3):
        budget = 2 * relative_error(attention[i], exact[i]) + torch.finfo(torch.float32).eps
        assert actual[i].dtype == dtype
        assert 0 < relative_error(actual[i], expected[i]) <= budget


def test_large_values_and_counts_do_not_overflow():
    # One cell of 4096 keys: the sum of its values, 4e6, is beyond fp16.
    query, key, value, codebook = make_case(batch=1, queries=16, keys=4096, dtype=torch.float16)
    key = (codebook.parents[:, 2:3] + 1e-3 * key).half()
    value = 1000 + value
    for gradient in gradients(query, key, value, codebook, num_refined=1, backend="torch"):
        assert gradient.isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_same_bits_on_every_run(dtype):
    case = make_case(queries=200, dtype=dtype)
    order = torch.randperm(200, generator=torch.Generator().manual_seed(1))
    options = {"num_refined": 2, "query_tile": 16, "query_order": order, "backend": "torch"}
    first = gradients(*case, **options)
    for _ in range(10):
        for gradient, expected in zip(gradients(*case, **options), first, strict=True):
            assert torch.equal(gradient, expected)


def test_chunks_do_not_change_the_result(monkeypatch):
    case = make_case(batch=3, queries=100)
    options = {"num_refined": 2, "query_tile": 16, "backend": "torch"}
    by_chunks = []
    for elements in (1 << 10, 1 << 14, 1 << 22):
        monkeypatch.setattr(assignment, "ELEMENTS_CPU", elements)
        by_chunks.append(gradients(*case, **options))
    for others in by_chunks[:2]:
        for gradient, expected in zip(others, by_chunks[2], strict=True):
            assert relative_error(gradient, expected) < 1e-13


@pytest.mark.parametrize("num_refined", [2, 6])
def test_activation_checkpointing(num_refined):
    *tokens, codebook = make_case(dtype=torch.float32)

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return stored_attention(2 * query, key, value, codebook, num_refined=num_refined)

    found = []
    for run in (attend, lambda *x: checkpoint(attend, *x, use_reentrant=False)):
        inputs = [x.detach().requires_grad_() for x in tokens]
        run(*inputs).square().sum().backward()
        found.append([x.grad for x in inputs])
    for plain, recomputed in zip(*found, strict=True):
        assert plain.any()
        assert torch.equal(plain, recomputed)


@pytest.mark.parametrize(("backend", "dynamic"), [("torch", True), ("dense", False)])
def test_compile_without_graph_breaks(backend, dynamic):
    torch._dynamo.reset()
    *tokens, codebook = make_case(dtype=torch.float32)

    def loss(query, key, value, parents, children):
        codebook = Codebook(parents, children, check_finite=False)
        options = {"num_refined": 2 if backend == "torch" else 6, "query_tile": 16}
        output = stored_attention(2 * query, key, value, codebook, backend=backend, **options)
        return output.transpose(1, 2).flatten(2).square().sum()

    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    for size in (50, 30):
        found = []
        for run in (loss, compiled):
            inputs = [x[:, :, :size].detach().requires_grad_() for x in tokens]
            run(*inputs, codebook.parents, codebook.children).backward()
            found.append([x.grad for x in inputs])
        for eager, traced in zip(*found, strict=True):
            assert eager.any()
            torch.testing.assert_close(traced, eager)


@pytest.mark.parametrize("backend", ["torch", "dense"])
def test_autocast_changes_nothing(backend):
    case = make_case(dtype=torch.float32)
    options = {"num_refined": 6, "backend": backend}
    expected = gradients(*case, **options)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = gradients(*case, **options)  # with its backward, too
    for gradient, target in zip(found, expected, strict=True):
        assert torch.equal(gradient, target)


def test_the_kernels_have_these_gradients():
    """Float32, where kernels and fallback choose the same parents."""
    pytest.importorskip("triton")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    query, key, value, codebook = make_case(queries=40, dtype=torch.float32)
    case = (*(x.to(device) for x in (query, key, value)), codebook.to(device))
    held = len(ops._packed)
    found = gradients(*case, backend="triton", num_refined=2, query_tile=16)
    assert len(ops._packed) == held + 1  # the kernels ran
    expected = gradients(*case, backend="torch", num_refined=2, query_tile=16)
    for gradient, target in zip(found, expected, strict=True):
        assert relative_error(gradient, target) < 1e-6


@pytest.mark.parametrize(
    ("device", "lengths"),
    [
        ("cpu", {0: (256, 4096), 64: (1024, 65536)}),
        ("cuda", {0: (4096, 65536), 64: (16384, 262144)}),
    ],
)
def test_when_the_dense_way_is_faster(device, lengths):
    codebook = Codebook(torch.zeros(1, 64, 40), torch.zeros(1, 64, 8, 40))
    for num_refined, (short, long) in lengths.items():
        for length, is_faster in ((short, True), (long, False)):
            key = torch.zeros(1, 1, 1, 40).expand(1, 1, length, 40)
            tensors, spec = call_of(key[:, :, :1], key, key, codebook, num_refined=num_refined)
            with torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True):
                tensors = tensors._replace(query=torch.empty(1, 1, 1, 40, device=device))
            assert torch_backward.dense_is_faster(tensors, spec) == is_faster
