"""Exact keys and sink keys: from codewords alone to exact attention, in every backend.

Uninitialized memory holds NaN in every test here.
"""

import pytest
import torch
import torch.nn.functional as F
from cases import call_of, make_case, relative_error
from torch import Tensor

from avq_diffusers.attention import reference, torch_backward, torch_forward
from avq_diffusers.attention.api import avq_attention
from avq_diffusers.codebook import assignment
from avq_diffusers.codebook.codebook import Codebook

FP64 = torch.float64
# Every backend and its dtypes, the widest first.
BACKENDS = {
    "reference": (FP64,),
    "torch": (FP64, torch.float32, torch.float16, torch.bfloat16),
    "triton": (torch.float32, torch.float16, torch.bfloat16),
}
WIDEST = [pytest.param(name, dtypes[0], id=name) for name, dtypes in BACKENDS.items()]
ALL = [
    pytest.param(
        name,
        dtype,
        id=f"{name} {dtype}".replace("torch.", ""),
        # Triton's interpreter multiplies the bits of bfloat16 numbers as integers.
        marks=[pytest.mark.gpu] if (name, dtype) == ("triton", torch.bfloat16) else [],
    )
    for name, dtypes in BACKENDS.items()
    for dtype in dtypes
]
# Sources of codewords: options beside the codebook, and whether there is one.
FORMS = {
    "own": ({"num_parents": 6, "num_children": 3}, False),
    "means": ({}, True),
    "stored": ({"codewords": "stored"}, True),
}


def in_forms(cases: list) -> list:
    """Each case in each form; the kernels have no exact keys of stored codewords."""
    return [
        pytest.param(*case.values, form, id=f"{case.id} {form}", marks=case.marks)
        for case in cases
        for form in FORMS
        if (case.values[0], form) != ("triton", "stored")
    ]


pytestmark = pytest.mark.usefixtures("uninitialized_memory_is_nan")


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    """Several chunks, the last one partial, already at the sizes of these tests."""
    monkeypatch.setattr(assignment, "ELEMENTS_CPU", 1 << 13)


def attend(*inputs: Tensor | Codebook | None, backend: str, **options: object) -> Tensor:
    """`avq_attention` where the backend runs, which is a GPU for kernels if there is one."""
    device = "cuda" if backend == "triton" and torch.cuda.is_available() else "cpu"
    moved = [None if x is None else x.to(device) for x in inputs]
    options = {k: x.to(device) if isinstance(x, Tensor) else x for k, x in options.items()}
    return avq_attention(*moved, backend=backend, **options).cpu()


def allowed(query: Tensor, key: Tensor, value: Tensor) -> float:
    """Twice the error of PyTorch's attention in the dtype of the inputs, and roundings."""
    wide = F.scaled_dot_product_attention(*(x.double() for x in (query, key, value)))
    error = relative_error(F.scaled_dot_product_attention(query, key, value), wide)
    rounding = torch.finfo(query.dtype).eps
    return 1e-13 if query.dtype == FP64 else 2 * error + rounding


@pytest.mark.parametrize(("backend", "dtype", "form"), in_forms(ALL))
@pytest.mark.parametrize("num_refined", [0, 2, 6])
def test_as_many_exact_keys_as_keys_is_exact_attention(backend, dtype, form, num_refined):
    query, key, value, codebook = make_case(dtype=dtype, batch=1, queries=40, keys=70)
    options, has_codebook = FORMS[form]
    exact = F.scaled_dot_product_attention(*(x.double() for x in (query, key, value)))
    for exact_keys in (70,) if backend == "triton" else (70, 1000):
        output = attend(
            query,
            key,
            value,
            codebook if has_codebook else None,
            num_refined=num_refined,
            exact_keys=exact_keys,
            query_tile=16,
            backend=backend,
            **options,
        )
        assert relative_error(output, exact) <= allowed(query, key, value)


@pytest.mark.parametrize(("backend", "dtype", "form"), in_forms(WIDEST))
def test_sinks_are_keys_that_attend_exactly(backend, dtype, form):
    """Every key is exact, so sinks are more keys; elsewhere they change no codeword."""
    query, key, value, codebook = make_case(dtype=dtype)
    options, has_codebook = FORMS[form]
    sinks = {"sink_key": key[:, :, 20:33] + 1, "sink_value": 1 - value[:, :, 20:33]}
    output = attend(
        query,
        key,
        value,
        codebook if has_codebook else None,
        num_refined=2,
        exact_keys=50,
        query_tile=16,
        backend=backend,
        **sinks,
        **options,
    )
    keys = torch.cat([key, sinks["sink_key"]], dim=2)
    values = torch.cat([value, sinks["sink_value"]], dim=2)
    exact = F.scaled_dot_product_attention(*(x.double() for x in (query, keys, values)))
    assert relative_error(output, exact) <= allowed(query, keys, values)


@pytest.mark.parametrize(("backend", "dtype"), WIDEST)
@pytest.mark.parametrize("num_refined", [0, 2])
def test_sinks_share_the_softmax_with_codewords(backend, dtype, num_refined):
    """Sinks only dilute: the output is a mean of that without them and of their values."""
    query, key, value, codebook = make_case(dtype=dtype)
    options = {"num_refined": num_refined, "query_tile": 16, "backend": backend}
    ones, zeros = torch.ones_like(value), torch.zeros_like(value[:, :, :5])
    sinks = {"sink_key": key[:, :, :5], "sink_value": zeros}
    alone = attend(query, key, value, codebook, **options)
    share = attend(query, key, ones, codebook, **options, **sinks)
    assert 0.01 < share.min() < share.max() < 1
    output = attend(query, key, value, codebook, **options, **sinks)
    assert relative_error(output, (share * alone).double()) <= allowed(query, key, value)


@pytest.mark.parametrize(("backend", "dtype"), WIDEST)
def test_a_budget_below_every_leaf_changes_nothing(backend, dtype):
    query, key, value, codebook = make_case(dtype=dtype)
    # Every leaf that has keys has each of them twice.
    key, value = (torch.cat([x, x + 0.01], dim=2) for x in (key, value))
    options = {"num_refined": 2, "query_tile": 16, "backend": backend}
    output = attend(query, key, value, codebook, **options, exact_keys=1)
    expected = attend(query, key, value, codebook, **options)
    assert relative_error(output, expected.double()) <= allowed(query, key, value)


def two_cells(
    keys: list[list[float]], query: list[float], dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor, Codebook]:
    """One query, and keys around (-4, 0, ...) and (4, 0, ...), the cells of two parents."""

    def padded(rows: list[list[float]]) -> Tensor:
        return F.pad(torch.tensor(rows, dtype=FP64), (0, 6))

    key = padded(keys)
    value = torch.arange(8.0 * len(keys), dtype=FP64).view(-1, 8).sin()
    codebook = Codebook(padded([[-4, 0], [4, 0]])[None], torch.zeros(1, 2, 0, 8, dtype=FP64))
    tensors = (x.to(dtype)[None, None] for x in (padded([query]), key, value))
    return *tensors, codebook if dtype == FP64 else codebook.to(dtype=torch.float32)


FEW = [[-4, 1], [-4, -1], [-4, 0]]
MANY = [[4, 1], [4, -1], [4, 0], [4.5, 0], [3.5, 0]]
WIDE = [[-4, 2], [-4, -2], [-4, 0]]


@pytest.mark.parametrize(("backend", "dtype"), WIDEST)
@pytest.mark.parametrize(
    ("left", "query", "exact_keys", "exact"),
    [
        pytest.param(FEW, [-0.3, 1], 2, (), id="the first does not fit"),
        pytest.param(FEW, [-0.3, 1], 3, (0,), id="it just fits"),
        pytest.param(FEW, [-0.3, 1], 7, (0,), id="the second does not fit too"),
        pytest.param(FEW, [-0.3, 1], 8, (0, 1), id="both fit"),
        pytest.param(FEW, [0.3, 1], 4, (), id="none after one that does not fit"),
        pytest.param(FEW, [0.3, 1], 5, (1,), id="the other one is first"),
        # A key on the left has 1/11 of the attention of one on the right, and 5 times its spread.
        pytest.param(WIDE, [0.3, 1], 3, (0,), id="the spread counts twice"),
        pytest.param([[-4, 1], [-4, -1]], [0, 1], 2, (0,), id="of equal cells the lower index"),
    ],
)
def test_the_keys_that_gain_most_are_exact(backend, dtype, left, query, exact_keys, exact):
    right = [[4, 1], [4, -1]] if len(left) == 2 else MANY
    query, key, value, codebook = two_cells(left + right, query, dtype)
    output = attend(
        query,
        key,
        value,
        codebook,
        num_refined=0,
        exact_keys=exact_keys,
        scale=1.0,
        backend=backend,
    )
    seen = key.double().clone()
    cells = slice(len(left)), slice(len(left), None)
    for index, cell in enumerate(cells):
        if index not in exact:
            seen[:, :, cell] = seen[:, :, cell].mean(dim=2, keepdim=True)
    expected = F.scaled_dot_product_attention(query.double(), seen, value.double(), scale=1.0)
    assert relative_error(output, expected) <= allowed(query, key, value)
    everything = F.scaled_dot_product_attention(*(x.double() for x in (query, key, value)), scale=1)
    assert (relative_error(expected, everything) > 0.01) == (len(exact) < 2)


@pytest.mark.parametrize(("backend", "dtype"), WIDEST)
def test_of_equal_leaves_that_of_the_lower_parent_is_exact(backend, dtype):
    """Catches leaves in the order of their parents' importance: the second parent has more."""
    keys = [[-4, 9], [-4, 7], [-4, 0], [4, 9], [4, 7], [4, 0], [4, 0], [4, 0]]
    query, key, value, codebook = two_cells(keys, [0, 0.1], dtype)
    up = F.pad(torch.tensor([[0.0, 8]]), (0, 6)).to(codebook.parents)
    codebook = Codebook(codebook.parents, (codebook.parents + up)[:, :, None])
    options = {"num_refined": 2, "exact_keys": 2, "scale": 1.0, "backend": backend}
    output = attend(query, key, value, codebook, **options)
    seen = key.double().clone()
    seen[:, :, 3:5] = seen[:, :, 3:5].mean(dim=2, keepdim=True)
    expected = F.scaled_dot_product_attention(query.double(), seen, value.double(), scale=1.0)
    assert relative_error(output, expected) <= allowed(query, key, value)


def test_scores_below_float32_keep_their_order():
    """Two cells get e^-300 and e^-200 of the attention; one key of each as much as the best."""

    def tokens(rows: list[list[float]]) -> Tensor:
        return F.pad(torch.tensor(rows, dtype=FP64), (0, 6))[None, None]

    key = tokens([[0, 1], [0, -1], [-600, -500], [0, -500], [-400, 500], [0, 500]])
    value = torch.arange(48, dtype=FP64).view(1, 1, 6, 8).sin()
    parents = tokens([[0, 0], [-300, -500], [-200, 500]])[0]
    codebook = Codebook(parents, torch.zeros(1, 3, 0, 8, dtype=FP64))
    query = tokens([[1, 0]])
    options = {"num_refined": 0, "exact_keys": 4, "scale": 1.0}
    expected = avq_attention(query, key, value, codebook, backend="reference", **options)
    given = (x.float() for x in (query, key, value))
    output = avq_attention(*given, codebook.to(dtype=torch.float32), backend="torch", **options)
    assert relative_error(output, expected) < 1e-6


@pytest.mark.parametrize(("backend", "dtype"), WIDEST)
def test_exact_keys_of_refined_parents_are_those_of_leaves(backend, dtype):
    """Catches leaves whose keys are taken from elsewhere in the sorted cell."""
    query, key, value, codebook = make_case(batch=1, heads=1, queries=16, keys=90, dtype=dtype)
    wide = [x.double() for x in (query, key, value)]
    cell, leaf = reference.assign(key.double(), codebook.parents, codebook.children)
    rows = F.one_hot(cell * 4 + leaf, 24).double()
    means = (rows.mT @ wide[1] / rows.sum(2)[..., None].clamp(min=1)).expand(1, 1, -1, -1)
    distance = (wide[1] - rows @ means).square().sum(-1)
    spread = (rows.mT @ distance[..., None])[..., 0] / rows.sum(2).clamp(min=1)
    # With all parents refined, the denominator cancels for a tile of one query.
    for index in (0, 7):
        one = wide[0][:, :, index : index + 1]
        gain = (one @ means.mT * 8**-0.5).exp()[0, 0, 0] * spread[0, 0] ** 2
        order = gain.argsort(descending=True)
        counts = rows[0, 0].sum(0)[order].cumsum(0)
        for count in (1, 4):
            chosen = rows[0, 0, :, order[:count]].sum(1) > 0
            seen = torch.where(chosen[:, None], wide[1], rows @ means)
            expected = F.scaled_dot_product_attention(one, seen, wide[2])
            output = attend(
                query[:, :, index : index + 1],
                key,
                value,
                codebook,
                num_refined=6,
                exact_keys=int(counts[count - 1]),
                backend=backend,
            )
            assert relative_error(output, expected) <= allowed(query, key, value)


def test_the_error_falls_with_exact_keys_and_the_choice_matters(monkeypatch):
    query, key, value, codebook = make_case(queries=200, keys=400, seed=1)
    query = 2 * query
    exact = F.scaled_dot_product_attention(query, key, value)

    def error(exact_keys: int, num_refined: int = 2) -> float:
        output = avq_attention(
            query,
            key,
            value,
            codebook,
            num_refined=num_refined,
            exact_keys=exact_keys,
            query_tile=16,
            backend="reference",
        )
        return relative_error(output, exact)

    errors = [error(exact_keys) for exact_keys in (0, 50, 100, 200, 300, 400)]
    assert errors == sorted(errors, reverse=True)
    assert errors[2] < 0.8 * errors[0]
    gain = reference.exact_gain
    monkeypatch.setattr(reference, "exact_gain", lambda *case: -gain(*case))
    assert error(100) > 1.2 * errors[2]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("num_refined", [0, 2, 6])
@pytest.mark.parametrize("exact_keys", [0, 1, 9, 30])
def test_the_pytorch_path_and_its_gradients_are_the_definition(form, num_refined, exact_keys):
    query, key, value, codebook = make_case(queries=70)
    options, has_codebook = FORMS[form]
    order = torch.randperm(70, generator=torch.Generator().manual_seed(1))
    tokens = query, key, value, key[:, :, :11] + 1, 1 - value[:, :, :11]
    found = []
    for backend in ("torch", "reference"):
        inputs = [x.detach().requires_grad_() for x in tokens]
        output = avq_attention(
            *inputs[:3],
            codebook if has_codebook else None,
            num_refined=num_refined,
            exact_keys=exact_keys,
            sink_key=inputs[3],
            sink_value=inputs[4],
            query_tile=16,
            query_order=order,
            backend=backend,
            **options,
        )
        weights = torch.linspace(-1, 1, output.numel(), dtype=FP64).view_as(output)
        found.append([output.detach(), *torch.autograd.grad((output * weights).sum(), inputs)])
    assert max(relative_error(*pair) for pair in zip(*found, strict=True)) < 1e-12


@pytest.mark.parametrize("form", ["own", "stored"])
@pytest.mark.parametrize("needed", [(0,), (1,), (2,), (3,), (4,), (1, 2), (3, 4), (1, 4)], ids=str)
def test_only_needed_gradients_are_computed(form, needed):
    query, key, value, codebook = make_case()
    options, has_codebook = FORMS[form]
    tokens = query, key, value, key[:, :, :11] + 1, 1 - value[:, :, :11]

    def gradients(needed: tuple[int, ...]) -> list[Tensor | None]:
        inputs = [x.detach().requires_grad_(i in needed) for i, x in enumerate(tokens)]
        output = avq_attention(
            *inputs[:3],
            codebook if has_codebook else None,
            num_refined=2,
            exact_keys=9,
            sink_key=inputs[3],
            sink_value=inputs[4],
            query_tile=16,
            **options,
        )
        output.square().sum().backward()
        return [x.grad for x in inputs]

    everything = gradients((0, 1, 2, 3, 4))
    for i, gradient in enumerate(gradients(needed)):
        if i in needed:
            assert relative_error(gradient, everything[i]) < 1e-12
        else:
            assert gradient is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_same_bits_on_every_run(dtype):
    tokens = [x.detach().requires_grad_() for x in make_case(queries=200, dtype=dtype)[:3]]

    def run() -> list[Tensor]:
        output = avq_attention(
            *tokens, num_parents=6, num_children=3, num_refined=2, exact_keys=40, query_tile=16
        )
        return [output, *torch.autograd.grad(output.square().sum(), tokens)]

    first = run()
    for _ in range(5):
        assert all(map(torch.equal, run(), first))


def test_chunks_do_not_change_the_result(monkeypatch):
    query, key, value, _ = make_case(batch=3, queries=100)
    tokens = query, key, value, key[:, :, :11] + 1, 1 - value[:, :, :11]
    tokens = [x.detach().requires_grad_() for x in tokens]
    options = {"num_parents": 6, "num_children": 3, "num_refined": 2, "query_tile": 16}
    options |= {"exact_keys": 40, "sink_key": tokens[3], "sink_value": tokens[4]}
    found = []
    for elements in (1 << 10, 1 << 22):
        monkeypatch.setattr(assignment, "ELEMENTS_CPU", elements)
        output = avq_attention(*tokens[:3], **options)
        found.append([output.detach(), *torch.autograd.grad(output.square().sum(), tokens)])
    assert max(relative_error(*pair) for pair in zip(*found, strict=True)) < 1e-13


def test_a_shift_of_all_keys_costs_no_accuracy():
    """Catches exact keys or sinks with the offset that all keys share: 1e-5 of error."""
    query, key, value, codebook = make_case(dtype=torch.float32)
    codebook = Codebook(codebook.parents + 300, codebook.children + 300)
    options = {"num_refined": 2, "exact_keys": 20, "query_tile": 16}
    outputs = []
    for dtype, backend in ((torch.float32, "torch"), (FP64, "reference")):
        tokens = [x.to(dtype) for x in (query, key + 300, value)]
        sinks = {"sink_key": tokens[1][:, :, :5], "sink_value": tokens[2][:, :, :5]}
        outputs.append(avq_attention(*tokens, codebook, backend=backend, **sinks, **options))
    assert relative_error(*outputs) < 8 * torch.finfo(torch.float32).eps


def test_cost_is_linear():
    """Twice the tokens at one budget are twice the products."""
    from torch.utils.flop_counter import FlopCounterMode

    def flops(num_tokens: int) -> int:
        query, key, value, codebook = make_case(queries=num_tokens)
        sinks = {"sink_key": key[:, :, :5], "sink_value": value[:, :, :5]}
        options = {"codewords": "means", "exact_keys": 64, "scale": 1.0} | sinks
        call = call_of(query, key, value, codebook, **options)
        with FlopCounterMode(display=False) as counter:
            torch_forward.avq_attention(*call)
            torch_backward.gradients(query, *call, (True,) * 5)
        return counter.get_total_flops()

    assert flops(1024) == 2 * flops(512)
