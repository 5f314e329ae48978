"""Codewords from the keys of the call, and means in place of codewords, on all backends.

Backends take the definition's choices. What a wrong implementation would do is said at each test.
"""

import math
from itertools import product

import pytest
import torch
import torch.nn.functional as F
from cases import make_case, relative_error
from problems import Problem, codewords_of, error_over_budget
from torch import Tensor

from avq_diffusers.attention import diagnostics, reference
from avq_diffusers.attention.api import avq_attention
from avq_diffusers.codebook.codebook import Codebook
from avq_diffusers.config import CODEWORDS

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
FP16, BF16, FP32, FP64 = torch.float16, torch.bfloat16, torch.float32, torch.float64
BACKENDS = ["reference", "torch", "triton"]
SIZES = {"num_parents": 6, "num_children": 3, "query_tile": 16}


@pytest.fixture(params=BACKENDS)
def backend(request) -> str:
    if request.param == "triton":
        pytest.importorskip("triton")
    return request.param


def tokens(**shape) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values in float32, which every backend takes."""
    *tensors, _ = make_case(dtype=FP32, **shape)
    return tuple(x.to(DEVICE) for x in tensors)


def shuffled(length: int) -> Tensor:
    return torch.randperm(length, generator=torch.Generator().manual_seed(1)).to(DEVICE)


# One number per token. The query order is backwards, so the parents are keys 7 and 3: 1 and 10.
KEYS = [5.0, 0.0, 2.0, 10.0, 12.0, 9.0, 16.0, 1.0]
# Cell 0 has keys 0, 1, 2, 7. Its children are those of rank 0 and 2 in the order of keys: 5 and 2.
# 0 is closest to the parent and stays, as does the parent itself: their mean is 0.5.
FINE_0, COARSE_0 = {0: 5.0, 1: 0.5, 2: 2.0, 7: 0.5}, dict.fromkeys((0, 1, 2, 7), 2.0)
# Cell 1 has keys 3, 4, 5, 6, and children 10 and 9. No key is strictly closer to the first than to
# the parent, where 10, 12 and 16 stay: their mean is 38 / 3.
FINE_1 = {3: 38 / 3, 4: 38 / 3, 5: 9.0, 6: 38 / 3}
COARSE_1 = dict.fromkeys((3, 4, 5, 6), 47 / 4)
# An update moves the parents to 2 and 47 / 4. Of cell 0, only 5 is still closer to a child; 2 is as
# close to the parent. Of cell 1, 10 and 9 are children, 12 and 16 stay.
UPDATED_0 = {0: 5.0, 1: 1.0, 2: 1.0, 7: 1.0}
UPDATED_1 = {3: 10.0, 4: 14.0, 5: 9.0, 6: 14.0}


@pytest.mark.parametrize("num_others", [0, 4])
@pytest.mark.parametrize(
    ("num_updates", "fine"), [(0, FINE_0 | FINE_1), (1, UPDATED_0 | UPDATED_1)]
)
def test_eight_keys_by_hand(backend, num_updates, fine, num_others):
    """Catches parents in the order of keys, children in the query order or by distance, a child
    that wins when it is as close as the parent, cells that are not averaged, and updates that move
    no parent. With queries of other tokens, the keys have an order of their own."""
    order = torch.arange(7, -1, -1, device=DEVICE)
    coarse = COARSE_0 | COARSE_1
    # The first tile, queries 7 to 4, looks at large keys and refines cell 1.
    query = torch.tensor([-0.2, -0.4, -0.1, -0.3, 0.1, 0.3, 0.2, 0.4])
    value = torch.eye(8)
    expected = torch.empty(8, 8)
    for tile, cell in ((order[:4].cpu(), (3, 4, 5, 6)), (order[4:].cpu(), (0, 1, 2, 7))):
        seen = torch.tensor([(fine if j in cell else coarse)[j] for j in range(8)])
        expected[tile] = (query[tile, None] * seen).softmax(dim=-1) @ value

    def one_channel(numbers) -> Tensor:
        numbers = torch.as_tensor(numbers)[None, None, :, None]
        return F.pad(numbers, (0, 7)).to(DEVICE)

    others = torch.arange(8, 8 + num_others, device=DEVICE)  # a tile of their own
    output = avq_attention(
        one_channel(F.pad(query, (0, num_others))),
        one_channel(KEYS),
        value[None, None].to(DEVICE),
        num_parents=2,
        num_children=2,
        num_refined=1,
        num_updates=num_updates,
        query_tile=4,
        query_order=torch.cat([others, order]),
        key_order=order if num_others else None,
        scale=1.0,
        backend=backend,
    )
    torch.testing.assert_close(output[0, 0, :8].cpu(), expected, rtol=1e-5, atol=1e-6)


def narrow_and_wide() -> tuple[Tensor, Tensor, Tensor, Codebook]:
    """Two query tiles of one query for which importance times spread chooses differently.

    Eight keys of mean 10 and spread 1/32, then four of mean 1/4 and spread 131/16. The first query
    gives the narrow cell 200 times the attention, less than the ratio of 262 between the spreads.
    The second gives it 694 times.
    """
    numbers = [10, 10.25, 9.75, 10, 10, 10.25, 9.75, 10, 0, 4, -4, 1]
    key, query = (
        F.pad(torch.tensor(x)[None, None, :, None], (0, 15)).to(DEVICE)
        for x in (numbers, [0.472, 0.6])
    )
    value = F.pad(torch.eye(12), (0, 4))[None, None].to(DEVICE)
    parents, children = torch.zeros(1, 2, 16), torch.zeros(1, 2, 2, 16)
    parents[0, :, 0] = torch.tensor([10.0, 0])
    children[0, :, :, 0] = torch.tensor([[10.25, 9.75], [4, -4]])
    return query, key, value, Codebook(parents, children).to(DEVICE)


@pytest.mark.parametrize(
    ("backend", "codewords"), [*product(("reference", "tiled", "torch", "triton"), CODEWORDS)]
)
def test_parents_of_largest_importance_times_spread_are_refined(backend, codewords):
    """Catches importance alone, spread alone, and a spread that is a sum over keys or a root; and
    spread that counts in the stored form."""
    if backend == "triton":
        pytest.importorskip("triton")
    query, key, value, codebook = narrow_and_wide()
    fine = key[0, 0, :, 0].cpu()
    coarse = torch.tensor([10.0] * 8 + [0.25] * 4)
    fine[[8, 11]] = 0.5
    refined = [1, 0]
    if codewords == "stored":
        coarse[8:] = fine[[8, 11]] = 0
        refined = [0, 0]
    cell = torch.tensor([0] * 8 + [1] * 4)
    options = {"num_refined": 1, "codewords": codewords, "query_tile": 1, "scale": 1.0}
    if backend == "tiled":
        codewords_of_call = codebook.parents, codebook.children
        output = reference.avq_attention(
            query, key, value, *codewords_of_call, importance_tile=1, **options
        )
    else:
        output = avq_attention(query, key, value, codebook, backend=backend, **options)
    for i, chosen in enumerate(refined):
        seen = torch.where(cell == chosen, fine, coarse)
        expected = (query[0, 0, i, 0].cpu() * seen).softmax(dim=-1)
        torch.testing.assert_close(output[0, 0, i, :12].cpu(), expected, rtol=1e-4, atol=1e-6)


def test_the_spread_does_not_see_what_all_keys_share(backend):
    """Catches second moments of the keys themselves: 1 is the last digit of their squares here."""
    query, key, value, codebook = narrow_and_wide()
    shift = 4096 * torch.eye(16, device=DEVICE)[15]
    moved = Codebook(codebook.parents + shift, codebook.children + shift)
    options = {"num_refined": 1, "query_tile": 1, "scale": 1.0, "backend": backend}
    output = avq_attention(query, key, value, codebook, **options)
    shifted = avq_attention(query, key + shift, value, moved, **options)
    torch.testing.assert_close(shifted, output, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("backend", ["reference", "torch"])
def test_the_spread_of_a_small_cell_that_is_far_from_the_others(backend):
    """Catches a difference of second moments, which is 0 for all three cells in float32."""
    key = torch.tensor([[-1000.0, 0.0625], [0, 0.0625], [1000, 0.125]]).repeat_interleave(2, dim=0)
    key[::2, 1] *= -1
    codebook = Codebook(key.view(1, 3, 2, 2).mean(2), key.view(1, 3, 2, 2))
    query, value = torch.tensor([[0.0, 4.0]]), torch.tensor([[0, 1], [0, 1], [0, 1]]).float()
    value = value.view(6, 1).expand(-1, 2)
    tensors = (x[None, None].to(DEVICE) for x in (query, key, value))
    options = {"num_refined": 1, "scale": 1.0, "backend": backend}
    output = avq_attention(*tensors, codebook.to(DEVICE), **options)
    weights = torch.tensor([1.0, 1, 1, 1, math.exp(-0.5), math.exp(0.5)])
    expected = (weights @ value / weights.sum()).view(1, 1, 1, 2)
    torch.testing.assert_close(output.cpu(), expected, rtol=1e-5, atol=1e-6)


def test_metrics_choose_parents_as_attention_does():
    """Catches metrics of parents that are chosen by importance alone."""
    query, key, _, codebook = narrow_and_wide()
    options = {"query_tile": 1, "scale": 1.0}
    for codewords, expected in (("means", [[0, 1], [1, 0]]), ("stored", [[1, 0], [1, 0]])):
        refined = diagnostics.refined_parents(
            query, key, codebook, 1, codewords=codewords, **options
        )
        assert refined[0, 0].int().tolist() == expected
    first = query[:, :, :1]
    attention = (first @ key.mT).softmax(dim=-1)[0, 0, 0]
    captured = diagnostics.capture(first, key, codebook, 1, **options)
    torch.testing.assert_close(captured, attention[8:].sum()[None])


def test_of_cells_without_spread_the_first_is_refined():
    """Catches NaN, and a choice by importance where every choice is exact."""
    numbers = torch.tensor([1.0, 1.0, 9.0, 9.0])
    key = numbers[None, None, :, None].expand(-1, -1, -1, 2)
    refined = diagnostics.refined_parents(key, key, None, 1, num_parents=2, num_children=2)
    assert refined.tolist() == [[[[True, False]]]]


def test_cells_with_fewer_keys_than_children_are_exact(backend):
    """Catches children from beyond the cell, or keys that no rank reaches."""
    query, key, value = tokens(queries=21)
    sizes = {"num_parents": 6, "num_refined": 6, "query_tile": 16, "backend": backend}
    exact = F.scaled_dot_product_attention(query, key, value)
    output = avq_attention(query, key, value, num_children=21, **sizes)
    torch.testing.assert_close(output, exact, rtol=1e-4, atol=1e-5)
    few = avq_attention(query, key, value, num_children=1, **sizes)
    assert relative_error(few, exact) > 0.01


@pytest.mark.parametrize("num_refined", [0, 3])
def test_fewer_keys_than_parents_are_exact(backend, num_refined):
    """Catches places beyond the keys, and twins of a parent that count its keys again."""
    query, key, value = tokens(queries=13, keys=7)
    output = avq_attention(
        query, key, value, num_parents=11, num_children=2, num_refined=num_refined, backend=backend
    )
    exact = F.scaled_dot_product_attention(query, key, value)
    torch.testing.assert_close(output, exact, rtol=1e-4, atol=1e-5)


def test_of_equal_codewords_the_first_has_all_keys():
    """Catches keys that go to the later of equal parents or children."""
    numbers = torch.tensor([1.0, 1.0, 1.0, 1.0, 9.0, 9.0, 7.0, 9.0])
    key = numbers[None, None, :, None].expand(-1, -1, -1, 4)
    counts = diagnostics.leaf_counts(key, None, num_parents=4, num_children=4)
    # Parents 1, 1, 9, 7 at places 0, 2, 4, 6; a key of the same value is not strictly closer.
    assert counts[0].sum(-1).tolist() == [4, 0, 3, 1]
    assert counts[0, :, 0].tolist() == [4, 0, 3, 1]
    # Parent 1 takes all. Children 1, 1, 9, 7, of which the first that is closer has the 9s.
    counts = diagnostics.leaf_counts(key, None, num_parents=1, num_children=4)
    assert counts.tolist() == [[[4, 0, 0, 3, 1]]]


MODES = {
    "own": {},
    "own, updated once": {"num_updates": 1},
    "own, updated twice": {"num_updates": 2},
    "own, flat": {"num_children": 0, "num_refined": 0},
    "own, all refined": {"num_refined": 9},
    "codebook": {"codebook": True},
    "codebook, updated": {"codebook": True, "num_updates": 1},
    "codebook, stored and updated": {
        "codebook": True,
        "num_updates": 1,
        "codewords": "stored",
    },
}
SHAPES = {
    "40": {"head_dim": 40, "queries": 91},
    "64": {"head_dim": 64, "queries": 97, "keys": 130},
    "80": {"head_dim": 80, "queries": 67},
    "128": {"head_dim": 128, "queries": 67},
}


def problem_of(shape: str, mode: str, dtype: torch.dtype, seed: int = 0) -> Problem:
    """Strided inputs and a shuffled query order."""
    options = {
        "num_parents": 9,
        "num_children": 5,
        "num_refined": 2,
        "codewords": "means",
        "num_updates": 0,
        "query_tile": 32,
        "scale": None,
    }
    options |= MODES[mode]
    has_codebook = options.pop("codebook", False)
    sizes = {"parents": options["num_parents"], "children": options["num_children"]}
    *tensors, codebook = make_case(dtype=dtype, seed=seed, **sizes, **SHAPES[shape])
    head_dim = tensors[0].shape[-1]
    query, key, value = (
        torch.cat([x + 1, x, x - 1], dim=-1).to(DEVICE)[..., head_dim : 2 * head_dim]
        for x in tensors
    )
    options["query_order"] = shuffled(query.shape[2])
    return Problem(query, key, value, codebook.to(DEVICE) if has_codebook else None, options)


def check(shape: str, mode: str, dtype: torch.dtype, backend: str) -> None:
    for seed in range(9):
        problem = problem_of(shape, mode, dtype, seed)
        if codewords_of(problem, backend).is_clear.all():
            assert error_over_budget(problem, backend) <= 1
            return
    raise AssertionError("no problem without near-ties")


@pytest.mark.parametrize("dtype", [FP64, FP32, FP16, BF16], ids=str)
@pytest.mark.parametrize(
    ("shape", "mode"), [*(("40", mode) for mode in MODES), *((shape, "own") for shape in SHAPES)]
)
def test_pytorch_agrees_with_the_definition(shape, mode, dtype):
    check(shape, mode, dtype, "torch")


# Triton's interpreter multiplies the bits of bfloat16 numbers as integers.
@pytest.mark.parametrize(
    ("dtype", "mode"),
    [
        *((FP16, mode) for mode in MODES),
        *((FP32, mode) for mode in ("own, updated once", "own, flat", "codebook")),
        *(pytest.param(BF16, mode, marks=pytest.mark.gpu) for mode in MODES),
    ],
    ids=str,
)
@pytest.mark.parametrize(
    "shape", ["40", *(pytest.param(shape, marks=pytest.mark.long) for shape in ("64", "80", "128"))]
)
def test_kernels_agree_with_the_definition(shape, mode, dtype):
    pytest.importorskip("triton")
    if "codebook" in mode and "updated" in mode:
        pytest.skip("the kernels do not move the parents of a codebook")
    if dtype == FP32 and SHAPES[shape]["head_dim"] > 64:
        pytest.skip("float32 of this head dim needs a Hopper GPU")
    check(shape, mode, dtype, "triton")


def representatives(key: Tensor, options: dict) -> tuple[Tensor, Tensor]:
    """Each key's mean of its cell and of its leaf."""
    parents = reference.spaced_keys(key, options["num_parents"], None)
    cell = reference.nearest(key, parents)
    children = reference.cell_keys(key, cell, parents, options["num_children"])
    cell, leaf = reference.assign(key, parents, children)
    means = []
    for index in (cell, cell * (1 + options["num_children"]) + leaf):
        same = (index[..., :, None] == index[..., None, :]).to(key.dtype)
        means.append(same @ key / same.sum(dim=-1, keepdim=True))
    return tuple(means)


def test_none_refined_is_attention_over_cells_and_all_refined_over_leaves(backend):
    """Catches parents that lose the keys of their children, or leaves that miss a key."""
    query, key, value = tokens()
    cells, leaves = representatives(key, SIZES)
    for num_refined, seen in ((0, cells), (6, leaves)):
        output = avq_attention(query, key, value, num_refined=num_refined, backend=backend, **SIZES)
        expected = F.scaled_dot_product_attention(query, seen, value)
        torch.testing.assert_close(output, expected, rtol=1e-4, atol=1e-5)
    assert relative_error(cells, leaves) > 0.1


@pytest.mark.parametrize("codewords", ["means", "stored"])
@pytest.mark.parametrize("num_refined", [0, 5])
def test_a_codebook_of_all_keys_is_exact(backend, codewords, num_refined):
    query, key, value = tokens(batch=1, queries=20)
    codebook = Codebook(key[0], key[0][:, :, None].expand(-1, -1, 2, -1).contiguous())
    output = avq_attention(
        query,
        key,
        value,
        codebook,
        num_refined=num_refined,
        codewords=codewords,
        query_tile=16,
        backend=backend,
    )
    exact = F.scaled_dot_product_attention(query, key, value)
    torch.testing.assert_close(output, exact, rtol=1e-4, atol=1e-5)


def test_constant_keys_in_a_leaf_are_exact_with_means(backend):
    """Catches codewords in place of means; the stored form is the control."""
    query, key, value, codebook = make_case(queries=40, dtype=FP32)
    cell, leaf = reference.assign(key, codebook.parents, codebook.children)
    leaf = 4 * cell + leaf
    first = (leaf[..., :, None] == leaf[..., None, :]).int().argmax(dim=-1)
    key = key.gather(2, first[..., None].expand_as(key))
    inputs = [x.to(DEVICE) for x in (query, key, value, codebook)]
    options = {"num_refined": 6, "query_tile": 16, "backend": backend}
    exact = F.scaled_dot_product_attention(*inputs[:3])
    torch.testing.assert_close(avq_attention(*inputs, **options), exact, rtol=1e-4, atol=1e-5)
    stored = avq_attention(*inputs, codewords="stored", **options)
    assert relative_error(stored, exact) > 0.01


def test_a_shift_of_all_keys_changes_nothing(backend):
    """Catches a centre that is added to some codewords only."""
    query, key, value = tokens(batch=1)
    options = {"num_refined": 2, "backend": backend, **SIZES}
    output = avq_attention(query, key, value, **options)
    shifted = avq_attention(query, key + 20, value, **options)
    torch.testing.assert_close(shifted, output, rtol=1e-3, atol=1e-4)
    half = torch.arange(50, device=DEVICE)[:, None] < 25
    moved = avq_attention(query, key + 20 * half, value, **options)
    assert relative_error(moved, output) > 0.1


def test_queries_may_change_places_within_their_tile(backend):
    """Catches parents from neighbours in the batch of queries rather than of the order's tile."""
    query, key, value = tokens(batch=1, queries=48)
    options = {"num_refined": 2, "backend": backend, **SIZES}
    output = avq_attention(query, key, value, **options)
    inside = torch.cat([16 * tile + shuffled(16) for tile in range(3)])
    permuted = avq_attention(query[:, :, inside], key, value, **options)
    torch.testing.assert_close(permuted, output[:, :, inside], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("backend", ["torch", "triton"])
@pytest.mark.parametrize("num_updates", [0, pytest.param(1, marks=pytest.mark.long)])
def test_every_run_gives_the_same_bits(backend, num_updates):
    query, key, value = tokens(queries=70)
    options = {"num_refined": 2, "num_updates": num_updates, "backend": backend, **SIZES}
    first = avq_attention(query, key, value, **options)
    assert torch.equal(avq_attention(query, key, value, **options), first)


@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_compiles_to_one_graph_without_a_codebook(backend):
    torch._dynamo.reset()
    query, key, value = tokens(batch=1, queries=20)

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return 2 * avq_attention(query, key, value, num_refined=2, backend=backend, **SIZES)

    compiled = torch.compile(attend, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(query, key, value), attend(query, key, value))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("num_refined", [0, 2, 9])
def test_gradients_are_those_of_the_definition(mode, num_refined):
    """Catches straight-through gradients, and means that miss the gradient of a cell or leaf."""
    problem = problem_of("40", mode, FP64)
    options = problem.options
    if options["num_children"]:
        options["num_refined"] = num_refined
    codebook = problem.codebook and problem.codebook.to(dtype=FP64)
    found = []
    for backend in ("torch", "reference"):
        inputs = [
            x.detach().clone().requires_grad_() for x in (problem.query, problem.key, problem.value)
        ]
        output = avq_attention(*inputs, codebook, backend=backend, **options)
        weights = torch.arange(output.numel(), dtype=FP64, device=DEVICE).cos().view(output.shape)
        found.append(torch.autograd.grad((output * weights).sum(), inputs))
    for gradient, expected in zip(*found, strict=True):
        assert relative_error(gradient, expected) < 1e-10


@pytest.mark.parametrize("num_updates", [0, 1])
@pytest.mark.parametrize("has_codebook", [False, True])
def test_gradients_are_those_of_finite_differences(num_updates, has_codebook):
    """With means, no gradient is straight through: a small step changes no assignment."""
    sizes = {"queries": 7, "head_dim": 3, "parents": 3, "children": 2}
    *inputs, codebook = make_case(batch=1, heads=1, **sizes)
    inputs = [x.requires_grad_() for x in inputs]

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return avq_attention(
            query,
            key,
            value,
            codebook if has_codebook else None,
            num_parents=3,
            num_children=2,
            num_refined=1,
            num_updates=num_updates,
            query_tile=4,
            backend="torch",
        )

    torch.autograd.gradcheck(attend, inputs)


@pytest.mark.parametrize("backend", ["torch", pytest.param("triton", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("mode", ["own", "codebook"])
@pytest.mark.parametrize(("of_values", "of_keys"), [(1e30, 1.0), (1.0, 1e5)])
def test_bfloat16_has_its_whole_range(backend, mode, of_values, of_keys):
    """Catches float16 inside, infinite from 65520 on, and sums that lose what bfloat16 holds."""

    def scaled(seed: int) -> Problem:
        problem = problem_of("64", mode, FP32, seed)
        codebook = problem.codebook
        if codebook is not None:
            codebook = Codebook(codebook.parents * of_keys, codebook.children * of_keys)
        tensors = problem.query / of_keys, problem.key * of_keys, problem.value * of_values
        return Problem(*(x.to(BF16) for x in tensors), codebook, problem.options)

    problems = map(scaled, range(9))
    problem = next(x for x in problems if codewords_of(x, backend).is_clear.all())
    assert error_over_budget(problem, backend) <= 1
