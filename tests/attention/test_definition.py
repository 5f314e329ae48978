"""The rules of the definition by hand, in every backend, and the identities that follow.

What a wrong implementation would do is said at each test.
"""

import math
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from cases import make_case, relative_error, unchecked_call
from torch import Tensor

from avq_diffusers.attention import reference
from avq_diffusers.attention.api import avq_attention
from avq_diffusers.codebook.codebook import Codebook

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
FP32, FP64 = torch.float32, torch.float64
# The widest dtype of every backend, and what its outputs may be off.
BACKENDS = {"reference": (FP64, 1e-12), "torch": (FP64, 1e-12), "triton": (FP32, 4e-6)}
SIZES = {"num_parents": 6, "num_children": 3, "num_refined": 2, "query_tile": 16}
OWN, MEANS, STORED = "own", "means", "stored"
RESOLVED = "means by a threshold"

pytestmark = pytest.mark.usefixtures("uninitialized_memory_is_nan")


@pytest.fixture(params=BACKENDS)
def backend(request) -> str:
    if request.param == "triton":
        pytest.importorskip("triton")
    return request.param


def attend(backend: str, *inputs: Tensor | Codebook | None, **options: object) -> Tensor:
    """Run inputs in the widest dtype of the backend; a float64 tensor on the CPU."""
    dtype, _ = BACKENDS[backend]

    def moved(x: object) -> object:
        if isinstance(x, Tensor):
            return x.to(DEVICE, dtype if x.is_floating_point() else x.dtype)
        return x.to(DEVICE, dtype) if isinstance(x, Codebook) else x

    options = {name: moved(x) for name, x in (SIZES | options).items()}
    return avq_attention(*map(moved, inputs), backend=backend, **options).double().cpu()


def one_channel(numbers: object, head_dim: int = 8) -> Tensor:
    """Tokens (1, 1, N, D) whose first channel is given, and the others are 0."""
    return F.pad(torch.as_tensor(numbers, dtype=FP64)[None, None, :, None], (0, head_dim - 1))


def line_codebook(parents: list[float], children: list[list[float]], dim: int = 8) -> Codebook:
    """One head whose codewords are on a line."""
    rows = torch.tensor(children, dtype=FP64).view(1, len(parents), -1, 1)
    return Codebook(one_channel(parents, dim)[0], F.pad(rows, (0, dim - 1)))


# One number per token. The query order is backwards, so the parents are keys 7 and 3: 1 and 10.
KEYS = [5.0, 0.0, 2.0, 10.0, 12.0, 9.0, 16.0, 1.0]
# Cell 0 has keys 0, 1, 2, 7. Its children are those of rank 0 and 2 in the order of keys: 5 and 2.
# 0 is closest to the parent and stays, as does the parent itself: their mean is 0.5.
FINE_0, COARSE_0 = {0: 5.0, 1: 0.5, 2: 2.0, 7: 0.5}, dict.fromkeys((0, 1, 2, 7), 2.0)
# Cell 1 has keys 3, 4, 5, 6, and children 10 and 9. No key is strictly closer to the first than to
# the parent, where 10, 12 and 16 stay: their mean is 38 / 3.
FINE_1 = {3: 38 / 3, 4: 38 / 3, 5: 9.0, 6: 38 / 3}
COARSE_1 = dict.fromkeys((3, 4, 5, 6), 47 / 4)


@pytest.mark.parametrize("num_others", [0, 4])
def test_eight_keys_by_hand(backend, num_others):
    """Catches parents in the order of keys, children in the query order or by distance, a child
    that wins when it is as close as the parent, and cells that are not averaged. With queries of
    other tokens, the keys have an order of their own."""
    order = torch.arange(7, -1, -1)
    coarse, fine = COARSE_0 | COARSE_1, FINE_0 | FINE_1
    # The first tile, queries 7 to 4, looks at large keys and refines cell 1.
    query = torch.tensor([-0.2, -0.4, -0.1, -0.3, 0.1, 0.3, 0.2, 0.4], dtype=FP64)
    value = torch.eye(8, dtype=FP64)
    expected = torch.empty(8, 8, dtype=FP64)
    keys, leaves = (torch.tensor(x, dtype=FP64) for x in (KEYS, [fine[j] for j in range(8)]))
    offsets = keys - leaves
    for tile, cell in ((order[:4], (3, 4, 5, 6)), (order[4:], (0, 1, 2, 7))):
        seen = torch.tensor([(fine if j in cell else coarse)[j] for j in range(8)]).double()
        same = (seen == seen[:, None]).double()
        spread = same @ (keys - seen).square() / same.sum(1)
        queries = query[tile, None]
        weights = (queries * seen).softmax(dim=-1)
        # Value j is the unit vector j, so that its covariance with the keys is their offsets.
        seen_spread = weights @ spread[:, None]
        share = seen_spread / (1 + seen_spread * queries.square() / 8)
        expected[tile] = weights + share * queries * offsets / offsets.square().sum()
    output = attend(
        backend,
        one_channel(F.pad(query, (0, num_others))),
        one_channel(KEYS),
        value[None, None],
        num_parents=2,
        num_children=2,
        num_refined=1,
        query_tile=4,
        query_order=torch.cat([torch.arange(8, 8 + num_others), order]),  # others have a tile
        key_order=order if num_others else None,
        scale=1.0,
    )
    torch.testing.assert_close(output[0, 0, :8], expected, rtol=1e-5, atol=1e-6)


def test_ties_go_to_the_lower_parent_the_parent_and_the_lower_child(backend):
    """Small integers are exact, so distances are equal, not almost equal; kernels multiply them by
    scale / log 2."""
    scale = math.log(2)
    # Children on their parent; twin children; a twin of the parent before; children beside it.
    codebook = line_codebook([9, 2, 2, -2], [[9, 9], [4, 4], [0, 0], [-4, 0]])
    key = one_channel([9, 4, 3, 0, -2, -3])
    # 4 goes to the first twin. 3, between parent 1 and its children, stays, and so does 0, between
    # parents 1 to 3; of the keys of parent 3, -3 stays, between it and a child.
    seen = one_channel([9, 4, 2, 2, -2, -2])
    query, value = one_channel([0.3, -0.2]), F.pad(torch.eye(6, dtype=FP64), (0, 2))[None, None]
    options = {"codewords": STORED, "num_refined": 4, "scale": scale}
    output = attend(backend, query, key, value, codebook, **options)
    expected = F.scaled_dot_product_attention(query, seen, value, scale=scale)
    assert relative_error(output, expected) < 1e-6


def test_of_equally_important_parents_the_lower_index_is_refined(backend):
    # Mirrored parents and mirrored queries: both parents get the same mass, bit for bit.
    codebook = line_codebook([2, -2], [[2, 2], [-2, -2]])
    for p in range(2):
        codebook.children[0, p, 1, 1] = 1 - 2 * p
    key = codebook.children.view(1, 1, 4, 8)
    query = one_channel([0.5, -0.5]) + torch.eye(8, dtype=FP64)[1]
    value = torch.arange(32.0).double().view(1, 1, 4, 8)
    counts = torch.tensor([[[2.0, 2.0]]]).double()
    importance = reference.importance(query, codebook.parents, counts)
    assert importance[0, 0, 0] == importance[0, 0, 1]
    only_first = torch.stack([*key[0, 0, :2], *codebook.parents[0, [1, 1]]])[None, None]
    expected = F.scaled_dot_product_attention(query, only_first, value)
    output = attend(backend, query, key, value, codebook, codewords=STORED, num_refined=1)
    assert relative_error(output, expected) < 1e-6


def narrow_and_wide() -> tuple[Tensor, Tensor, Tensor, Codebook]:
    """Two query tiles of one query for which importance times spread chooses differently.

    Eight keys of mean 10 and spread 1/32, then four of mean 1/4 and spread 131/16. The first query
    gives the narrow cell 200 times the attention, less than the ratio of 262 between the spreads.
    The second gives it 694 times.
    """
    key = one_channel([10, 10.25, 9.75, 10, 10, 10.25, 9.75, 10, 0, 4, -4, 1], 16)
    query, value = one_channel([0.472, 0.6], 16), F.pad(torch.eye(12), (0, 4))[None, None]
    return query, key, value, line_codebook([10, 0], [[10.25, 9.75], [4, -4]], 16)


@pytest.mark.parametrize("codewords", [MEANS, STORED])
@pytest.mark.parametrize("shift", [0, 4096])
def test_parents_of_largest_importance_times_spread_are_refined(backend, codewords, shift):
    """Catches importance alone, spread alone, a spread that is a sum over keys or a root, spread
    that counts in the stored form, and second moments of the keys themselves: 1 is the last digit
    of their squares where all keys are shifted."""
    query, key, value, codebook = narrow_and_wide()
    fine, coarse = key[0, 0, :, 0].clone(), torch.tensor([10.0] * 8 + [0.25] * 4).double()
    fine[[8, 11]] = 0.5
    refined = [1, 0]
    if codewords == STORED:
        coarse[8:] = fine[[8, 11]] = 0
        refined = [0, 0]
    cell = torch.tensor([0] * 8 + [1] * 4)
    options = {"num_refined": 1, "codewords": codewords, "query_tile": 1, "scale": 1.0}
    offset = shift * torch.eye(16, dtype=FP64)[15]
    moved = Codebook(codebook.parents + offset, codebook.children + offset)
    output = attend(backend, query, key + offset, value, moved, **options)
    for i, chosen in enumerate(refined):
        seen = torch.where(cell == chosen, fine, coarse)
        expected = (query[0, 0, i, 0] * seen).softmax(dim=-1)
        torch.testing.assert_close(output[0, 0, i, :12], expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("backend", ["reference", "torch"])
def test_the_spread_of_a_small_cell_that_is_far_from_the_others(backend):
    """Catches a difference of second moments, which is 0 for all three cells in float32."""
    key = torch.tensor([[-1000.0, 0.0625], [0, 0.0625], [1000, 0.125]]).repeat_interleave(2, dim=0)
    key[::2, 1] *= -1
    codebook = Codebook(key.view(1, 3, 2, 2).mean(2), key.view(1, 3, 2, 2))
    query, value = torch.tensor([[0.0, 4.0]]), torch.tensor([0.0, 1, 0, 1, 0, 1])
    tensors = (x[None, None] for x in (query, key, value.view(6, 1).expand(-1, 2)))
    output = avq_attention(*tensors, codebook, num_refined=1, scale=1.0, backend=backend)
    weights = torch.tensor([1.0, 1, 1, 1, math.exp(-0.5), math.exp(0.5)])
    expected = weights @ value / weights.sum()
    torch.testing.assert_close(output, expected.expand_as(output), rtol=1e-5, atol=1e-6)


BY_THRESHOLD = {"num_refined": None, "threshold": 0.01}


def usual(form: str = STORED, **shape: int) -> dict[str, object]:
    """Arguments of `attend`, with codewords of one of three sources, by one of two forms."""
    query, key, value, codebook = make_case(**shape)
    found = {"query": query, "key": key, "value": value}
    found["codebook"] = None if form == OWN else codebook
    found["codewords"] = STORED if form == STORED else MEANS
    return found | (BY_THRESHOLD if form == RESOLVED else {})


def run(backend: str, given: dict[str, object], **options: object) -> Tensor:
    options = given | options
    inputs = [options.pop(name) for name in ("query", "key", "value", "codebook")]
    return attend(backend, *inputs, **options)


def sdpa(given: dict[str, object], **changes: Tensor) -> Tensor:
    query, key, value = ((given | changes)[name] for name in ("query", "key", "value"))
    if "sink_key" in given:
        key = torch.cat([key, given["sink_key"]], dim=2)
        value = torch.cat([value, given["sink_value"]], dim=2)
    return F.scaled_dot_product_attention(query, key, value)


def representatives(given: dict[str, object]) -> tuple[Tensor, Tensor]:
    """What stands for each key in its cell and in its leaf, by sorting distances."""
    key, (parents, children) = given["key"], vars(given["codebook"]).values()
    parents, children = parents.expand(2, -1, -1, -1), children.expand(2, -1, -1, -1, -1)
    mode = {"compute_mode": "donot_use_mm_for_euclid_dist"}
    cell = torch.cdist(key, parents, **mode).argmin(dim=-1)
    index = torch.arange(2)[:, None, None], torch.arange(2)[:, None]
    coarse = parents[(*index, cell)]
    candidates = torch.cat([coarse[..., None, :], children[(*index, cell)]], dim=-2)
    leaf = (candidates - key[..., None, :]).norm(dim=-1).argmin(dim=-1)
    if given["codewords"] == STORED:
        fine = candidates.gather(-2, leaf[..., None, None].expand_as(candidates[..., :1, :]))
        return coarse, fine[..., 0, :]
    means = []
    for row in (cell, cell * 4 + leaf):
        same = (row[..., :, None] == row[..., None, :]).to(key.dtype)
        means.append(same @ key / same.sum(dim=-1, keepdim=True))
    return tuple(means)


@pytest.mark.parametrize("form", [MEANS, STORED])
def test_none_refined_is_attention_over_cells_and_all_refined_over_leaves(form):
    """Catches parents that lose the keys of their children, or leaves that miss a key."""
    given = usual(form)
    cells, leaves = representatives(given)
    for num_refined, seen in ((0, cells), (6, leaves)):
        output = run("reference", given, num_refined=num_refined)
        assert relative_error(output, sdpa(given, key=seen)) < 1e-12
    assert relative_error(cells, leaves) > 0.1


def far_cells() -> dict[str, object]:
    """Four far apart cells, six keys each: the keys themselves are the children."""
    given = usual(batch=1, queries=24)
    centres = 100 * torch.eye(8, dtype=FP64)[:4]
    given["key"] = given["key"] + centres.repeat_interleave(6, dim=0)
    children = given["key"][0].unflatten(1, (4, 6))
    given["codebook"] = Codebook(centres.expand(2, -1, -1), children)
    return given | {"num_refined": 4}


def every_key_a_parent(form: str, num_refined: int) -> dict[str, object]:
    given = usual(form, batch=1, queries=20)
    parents = given["key"][0]
    given["codebook"] = Codebook(parents, parents[:, :, None].repeat(1, 1, 2, 1))
    return given | {"num_refined": num_refined}


def constant_leaves() -> dict[str, object]:
    given = usual(MEANS, queries=40)
    key, codebook = given["key"], given["codebook"]
    cell, leaf = reference.assign(key, codebook.parents, codebook.children)
    leaf = 4 * cell + leaf
    first = (leaf[..., :, None] == leaf[..., None, :]).int().argmax(dim=-1)
    return given | {"key": key.gather(2, first[..., None].expand_as(key)), "num_refined": 6}


def all_exact(form: str, *, sinks: bool = False) -> dict[str, object]:
    given = usual(form, batch=1, queries=40, keys=70) | BY_THRESHOLD | {"threshold": 0}
    if sinks:
        given["sink_key"] = given["key"][:, :, 20:33] + 1
        given["sink_value"] = 1 - given["value"][:, :, 20:33]
    return given


IS_EXACT = {
    # Children from beyond the cell, or keys that no rank reaches.
    "cells with fewer keys than children": lambda: (
        usual(OWN, queries=21) | {"num_children": 21, "num_refined": 6}
    ),
    # Places beyond the keys, and twins of a parent that count its keys again.
    "fewer keys than parents": lambda: usual(OWN, queries=13, keys=7) | {"num_parents": 11},
    "every key a parent": lambda: every_key_a_parent(STORED, 0),
    "every key a parent, means": lambda: every_key_a_parent(MEANS, 5),
    "every key a child": far_cells,
    # Codewords in place of means.
    "constant keys in every leaf": constant_leaves,
    "all keys exact": lambda: all_exact(OWN),
    "all keys exact, means": lambda: all_exact(MEANS),
    "all keys exact, beside sinks": lambda: all_exact(OWN, sinks=True),
}
IS_NOT_EXACT = {
    "cells with fewer keys than children": {"num_children": 1},
    "constant keys in every leaf": {"codewords": STORED},
    "every key a child": {"num_refined": 3},
    "all keys exact": {"threshold": 0.01},
}


@pytest.mark.parametrize("name", IS_EXACT)
def test_it_is_exact_attention(backend, name):
    given = IS_EXACT[name]()
    if backend == "triton" and given["codebook"] is not None:
        pytest.skip("`test_fuzz.py` draws such problems for the kernels")
    tolerance = 10 * BACKENDS[backend][1]
    assert relative_error(run(backend, given), sdpa(given)) < tolerance
    if name in IS_NOT_EXACT and backend != "triton":
        assert relative_error(run(backend, given, **IS_NOT_EXACT[name]), sdpa(given)) > 1e-3


INSIDE = torch.cat([16 * tile + torch.arange(15, -1, -1) for tile in range(3)])
ACROSS = torch.arange(48).view(16, 3).t().flatten()


def shifted(x: dict, *, both: bool = True) -> dict:
    shift = torch.linspace(-30, 50, 16, dtype=FP64).view(2, 1, 8)[: x["key"].shape[1]]
    found = {"key": x["key"] + shift}
    if both and x["codebook"] is not None:
        codebook = x["codebook"]
        moved = Codebook(codebook.parents + shift, codebook.children + shift[:, None])
        found["codebook"] = moved
    return found


# What changes, what becomes of the output, and a change that must not pass for it.
IDENTITIES = {
    "constant values give constant output": (
        lambda x: {"value": torch.ones_like(x["value"])},
        lambda y: torch.ones_like(y),
        None,
    ),
    "the order of keys does not matter": (
        lambda x: {"key": x["key"].flip(2), "value": x["value"].flip(2)},
        lambda y: y,
        lambda x: {"key": x["key"].flip(2)},
    ),
    "shifting keys and codewords together changes nothing": (
        shifted,
        lambda y: y,
        lambda x: shifted(x, both=False),
    ),
    "permuting queries inside a tile permutes the output": (
        lambda x: {"query": x["query"][:, :, INSIDE]},
        lambda y: y[:, :, INSIDE],
        lambda x: {"query": x["query"][:, :, ACROSS]},
    ),
    "the scale multiplies the query": (
        lambda x: {"query": x["query"] / 2, "scale": 2 * 8**-0.5},
        lambda y: y,
        lambda x: {"query": x["query"] / 2},
    ),
    "batch elements do not mix": (
        lambda x: {name: x[name].flip(0) for name in ("query", "key", "value")},
        lambda y: y.flip(0),
        None,
    ),
    "the query order cuts tiles but keeps the order of the output": (
        lambda x: {"query": x["query"][:, :, ACROSS], "query_order": ACROSS.argsort()},
        lambda y: y[:, :, ACROSS],
        lambda x: {"query": x["query"][:, :, ACROSS]},
    ),
}


@pytest.mark.parametrize("form", [MEANS, STORED, RESOLVED])
@pytest.mark.parametrize("name", IDENTITIES)
def test_identities(form, name):
    given = usual(form, queries=48)
    change, post, control = IDENTITIES[name]
    expected = post(run("reference", given))
    tolerance = 1e-11 if "shifting" in name else 1e-12  # a shift by 50 costs digits
    assert relative_error(run("reference", given, **change(given)), expected) < tolerance
    if control is not None:
        assert relative_error(run("reference", given, **control(given)), expected) > 1e-3


def test_without_a_codebook_a_shift_of_all_keys_changes_nothing(backend):
    """Catches a centre that is added to some codewords only."""
    given = usual(OWN, batch=1, queries=48)
    tolerance = 20 * BACKENDS[backend][1]
    output = run(backend, given)
    assert relative_error(run(backend, given, **shifted(given)), output) < tolerance


@pytest.mark.parametrize(("form", "num_refined"), [(MEANS, 3), (STORED, 6)])
def test_empty_codewords_far_away_change_nothing(backend, form, num_refined):
    given = usual(form, batch=1, queries=24)
    query, codebook = given["query"], given["codebook"]
    # In the direction of a query: the largest logits by far, if they counted.
    far = 1e4 * query[0, :, :1] / query[0, :, :1].norm(dim=-1, keepdim=True)
    parents = torch.cat([far, codebook.parents, -far], dim=1)
    children = torch.cat([codebook.children, far[:, None].expand(-1, 6, 1, -1)], dim=2)
    cell = far[:, None].expand(-1, 1, 4, -1)
    padded = Codebook(parents, torch.cat([cell, children, -cell], dim=1))
    # If all parents with keys are refined, empty ones must be taken too.
    more = num_refined + 2 * (num_refined == 6)
    output = run(backend, given, num_refined=num_refined)
    with_empty = run(backend, given, codebook=padded, num_refined=more)
    assert relative_error(with_empty, output) < 100 * BACKENDS[backend][1]


def test_exact_importance_sums_to_the_number_of_queries():
    query, _, _, codebook = make_case(queries=50)
    counts = torch.tensor([3.0, 0, 1, 4, 1, 5]).double().expand(2, 2, -1)
    for valid in (50, 17, 1):
        importance = reference.importance(0.3 * query[:, :, :valid], codebook.parents, counts)
        torch.testing.assert_close(importance.sum(dim=-1), torch.full((2, 2), valid).double())
        assert (importance[..., 1] == 0).all()


@pytest.mark.parametrize("importance_tile", [1, 2, 4, 6, 10])
def test_tiled_importance_extrapolates_the_denominator(importance_tile):
    query, _, _, codebook = make_case(batch=1, heads=1, queries=5)
    query = 0.3 * query
    # The first tiles may hold no key at all.
    counts = torch.tensor([0.0, 0, 1, 4, 0, 5]).double()
    mass = (query[0, 0] @ codebook.parents[0].T).exp() * counts
    expected = torch.zeros(6, dtype=FP64)
    for j in range(6):
        stop = min((j // importance_tile + 1) * importance_tile, 6)
        seen = counts[:stop].sum()
        if seen > 0:
            denominator = mass[:, :stop].sum(dim=1) * counts.sum() / seen
            expected[j] = (mass[:, j] / denominator).sum()
    importance = reference.importance(query, codebook.parents, counts[None, None], importance_tile)
    torch.testing.assert_close(importance[0, 0], expected)


@pytest.mark.parametrize("form", [OWN, MEANS])
def test_gradients_through_means_are_those_of_finite_differences(form):
    """With means, no gradient is straight through: a small step changes no assignment."""
    sizes = {"queries": 7, "head_dim": 3, "parents": 3, "children": 2}
    *inputs, codebook = make_case(batch=1, heads=1, **sizes)
    options = {"num_parents": 3, "num_children": 2, "num_refined": 1, "query_tile": 4}
    options |= {"codebook": None if form == OWN else codebook}
    tokens = [x.detach().requires_grad_() for x in inputs]
    torch.autograd.gradcheck(lambda *x: avq_attention(*x, backend="reference", **options), tokens)


def test_the_papers_correction_is_the_definition_where_parents_are_means_of_children():
    """Paper, Algorithm 2: refined parents keep all their keys, and children carry a correction."""
    query, key, value, codebook = make_case()
    children = codebook.children
    codebook = Codebook(children.mean(dim=2), children)
    expected = attend("reference", query, key, value, codebook, codewords=STORED, num_refined=6)

    parent, leaf = reference.assign(key, codebook.parents, children)
    of_parent, of_child = F.one_hot(parent, 6).double(), F.one_hot(4 * parent + leaf, 24).double()
    of_child = of_child.unflatten(-1, (6, 4))[..., 1:].flatten(-2)
    child_logits = query.shape[-1] ** -0.5 * query @ children.flatten(1, 2).mT
    # A parent's logit is recovered as the mean of its children's.
    parent_logits = child_logits.unflatten(-1, (6, 3)).mean(dim=-1)
    correction = child_logits.exp() - parent_logits.repeat_interleave(3, dim=-1).exp()
    weights = parent_logits.exp() @ of_parent.mT + correction @ of_child.mT
    output = weights @ value / weights.sum(dim=-1, keepdim=True)
    assert relative_error(output, expected) < 1e-12


class TestThreshold:
    """Resolution by error, with own codewords."""

    @pytest.fixture
    def run(self, backend):
        def run(threshold, *tokens, **options):
            return attend(backend, *tokens, **BY_THRESHOLD | options | {"threshold": threshold})

        return run

    @pytest.fixture
    def check(self, backend):
        def check(found, expected):
            assert relative_error(found, expected) < 10 * BACKENDS[backend][1]

        return check

    @pytest.fixture
    def tokens(self):
        query, key, value, _ = make_case(batch=1, queries=70)
        return query, key, value + 0.5 * key

    @pytest.fixture
    def sinks(self):
        key, value = make_case(batch=1, queries=5, seed=1)[1:3]
        return {"sink_key": key + 1, "sink_value": value}

    def test_zero_is_exact_attention(self, run, check, tokens, sinks):
        """Catches a refined parent, a key or a sink that is left out or counts twice."""
        query, key, value = tokens
        expected = F.scaled_dot_product_attention(*tokens)
        check(run(0.0, *tokens), expected)
        every = [
            torch.cat([x, y], dim=2) for x, y in zip((key, value), sinks.values(), strict=True)
        ]
        expected = F.scaled_dot_product_attention(query, *every)
        check(run(0.0, *tokens, **sinks), expected)

    def test_zero_is_exact_where_attention_to_cells_underflows(self, run, tokens, sinks):
        """Catches cells whose mean gets no attention in float32, although one key gets it all."""
        query, key, value = (x.float() for x in tokens)
        sinks = {name: 2 * x.float() for name, x in sinks.items()}
        query = 40 * query
        every = [
            torch.cat([x, y], dim=2) for x, y in zip((key, value), sinks.values(), strict=True)
        ]
        expected = F.scaled_dot_product_attention(query, *every)
        found = run(0.0, query, key, value, **sinks)
        assert relative_error(found, expected) < 1e-3

    def test_a_query_that_is_not_finite_hides_nothing_from_others(self, run, tokens):
        """Catches a tile that takes a worth of NaN for too little."""
        query, key, value = tokens
        query, others = query.clone(), torch.arange(70) != 5
        expected = F.scaled_dot_product_attention(*tokens)[:, :, others]
        query[:, :, 5, 0] = math.nan
        found = run(1e-3, query, key, value, query_tile=128)
        assert found[:, :, 5].isnan().all()
        assert relative_error(found[:, :, others], expected) < 1e-3

    def test_infinity_is_flat_attention_and_the_first_order_term(self, run, check, tokens, sinks):
        """By hand; catches a matrix that is transposed or of parents, a spread of leaves in place
        of cells, a lost guard, and sinks with a spread."""
        query, key, value = tokens
        found = reference.quantized(*unchecked_call(*tokens, **SIZES))
        cells = F.one_hot(found.cell, 6).to(FP64)
        counts = cells.sum(2)
        parents, means = (cells.mT @ x / counts[..., None] for x in (key, value))
        spread = (cells * (key - cells @ parents).square().sum(-1, keepdim=True)).sum(2) / counts
        leaves = F.one_hot(found.leaf, 24).to(FP64)
        inside = leaves / leaves.sum(2, keepdim=True).clamp(min=1)
        offsets, of_values = (x - leaves @ (inside.mT @ x) for x in (key, value))
        matrix = torch.einsum("bhsv,bhsk->bhvk", of_values, offsets)
        matrix /= offsets.square().sum((2, 3))[..., None, None]
        scaled = query * 8**-0.5
        logits = scaled @ parents.mT + counts.log()[:, :, None]
        logits = torch.cat([logits, scaled @ sinks["sink_key"].mT], dim=-1)
        weights = logits.softmax(-1)
        seen = (weights[..., :6] * spread[:, :, None]).sum(-1, keepdim=True)
        expected = weights @ torch.cat([means, sinks["sink_value"]], dim=2)
        guard = 1 + seen * scaled.square().mean(-1, keepdim=True)
        expected += seen / guard * torch.einsum("bhvk,bhqk->bhqv", matrix, scaled)
        # A parent whose keys all stay is its own leaf.
        assert (leaves.view(1, 2, 70, 24).sum(2) > 0).sum(-1).min() > 6
        check(run(math.inf, *tokens, **sinks), expected)

    @pytest.mark.parametrize("backend", ["reference", "torch"])
    def test_values_that_follow_their_keys_are_exact_to_second_order(self, run):
        """Catches a term of the wrong size: half the leaf then has a quarter of the error, and with
        the right one a sixteenth."""
        offsets = torch.cat([torch.eye(8), -torch.eye(8)]).to(FP64)
        centres = 2 * torch.randn(6, 8, generator=torch.Generator().manual_seed(2), dtype=FP64)
        affine = torch.randn(8, 8, generator=torch.Generator().manual_seed(3), dtype=FP64)
        query = make_case(batch=1, heads=1, queries=20)[0]

        def error(size):
            key = (centres[:, None] + size * offsets).flatten(0, 1)[None, None]
            value = key @ affine + 1
            order = torch.arange(96)  # its evenly spaced keys are one of each cell
            options = {"num_children": 0, "key_order": order}
            found = run(math.inf, query, key, value, **options)
            return relative_error(found, F.scaled_dot_product_attention(query, key, value))

        assert error(0.2) < error(0.4) / 12
        assert error(0.4) < 1e-3

    @pytest.mark.parametrize("backend", ["reference", "torch"])
    def test_single_keys_add_nothing(self, run, check):
        query, key, value, _ = make_case(queries=6)
        options = {"num_children": 0}
        found = run(math.inf, query, key, value, **options)
        check(found, F.scaled_dot_product_attention(query, key, value))

    @pytest.mark.parametrize("backend", ["reference", "torch"])
    def test_a_lower_threshold_is_closer(self, run, tokens):
        """Catches a choice that shows what matters least first."""
        exact = F.scaled_dot_product_attention(*tokens)
        errors = [relative_error(run(x, *tokens), exact) for x in (math.inf, 1e-2, 1e-3, 1e-5)]
        assert errors == sorted(errors, reverse=True)
        assert errors[2] < errors[0] / 3

    def test_the_choice_by_hand(self):
        """Catches the spread of a cell in place of what its leaves resolve, a price per leaf in
        place of per further leaf, and masses without counts or sinks."""
        # Two cells: 0, 1, 4, 6 with leaves {0, 1}, {4} and {6}, and 10, 11, which are one leaf.
        numbers = torch.tensor([0.0, 1.0, 4.0, 6.0, 10.0, 11.0], dtype=FP64)
        key = numbers[None, None, :, None]
        found = reference.Quantized(
            torch.tensor([[[0, 0, 0, 0, 1, 1]]]),
            torch.tensor([[[0, 0, 2, 3, 1, 1]]]),
            torch.tensor([[[[2.75], [10.5]]]], dtype=FP64),
            torch.tensor([[[[0.5], [10.5], [4.0], [6.0], [0.0], [0.0]]]], dtype=FP64),
            key,
        )
        spreads = [91 / 16, 0.25], [0.25, 0.25, 0.0, 0.0, 0.0, 0.0]
        spreads = [torch.tensor(x, dtype=FP64)[None, None] for x in spreads]
        queries, sink = [0.3, 0.5], 9.0

        def masses(means, counts):
            found = []
            for q in queries:
                total = 4 * math.exp(q * 2.75) + 2 * math.exp(q * 10.5) + math.exp(q * sink)
                found.append(
                    [n * math.exp(q * k) / total for k, n in zip(means, counts, strict=True)]
                )
            return [sum(column) / len(queries) for column in zip(*found, strict=True)]

        size = sum(q * q for q in queries) / 2
        (cell, _), (leaf, other) = masses([2.75, 10.5], [4, 2]), masses([0.5, 10.5], [2, 2])
        of_cell = cell * (math.expm1(size * 91 / 16) - math.expm1(size * 0.25 * 2 / 4)) / 2
        of_leaf, of_other = (m * math.expm1(size * 0.25) / 2 for m in (leaf, other))
        assert of_leaf < of_other < of_cell
        tile_query = torch.tensor(queries, dtype=FP64)[None, None, :, None]
        sink_key = torch.full((1, 1, 1, 1), sink, dtype=FP64)

        def chosen(threshold):
            levels = reference.resolution(tile_query, found, *spreads, sink_key, threshold)
            return [x.flatten().tolist() for x in levels]

        none, both = [False] * 6, [True, True]
        assert chosen(0.999 * of_leaf) == [both, [True, True, *none[2:]]]
        assert chosen(1.001 * of_leaf) == [both, [False, True, *none[2:]]]
        assert chosen(1.001 * of_other) == [both, none]
        assert chosen(0.999 * of_cell) == [both, none]
        assert chosen(1.001 * of_cell) == [[False, True], none]

    @pytest.mark.parametrize("backend", ["reference", "torch"])
    def test_permuting_keys_changes_nothing_if_their_order_follows(self, run, check, tokens):
        """Catches keys of one leaf in the place of another's, and values that stay behind."""
        query, key, value = tokens
        order = torch.randperm(70, generator=torch.Generator().manual_seed(4))
        options = {"num_children": 0, "query_order": torch.arange(70)}  # children go by index
        expected = run(0.01, *tokens, **options)
        moved = key[:, :, order], value[:, :, order]
        check(run(0.01, query, *moved, **options, key_order=order.argsort()), expected)
        assert relative_error(run(0.01, query, *moved, **options), expected) > 1e-3
        for level in (math.inf, 0.0):
            assert relative_error(run(level, *tokens, **options), expected) > 1e-3

    @pytest.mark.parametrize(("num_queries", "sampled"), [(4095, False), (4096, True)])
    def test_sixteen_queries_of_a_tile_decide_where_there_are_many(
        self, backend, run, check, num_queries, sampled
    ):
        """Catches the first sixteen, and as many of a last tile that is not full."""
        query, key, value, _ = make_case(batch=1, heads=1, queries=num_queries, keys=50)
        options = {"query_tile": 127}
        places = [
            start + torch.arange(16) * min(127, num_queries - start) // 16
            for start in range(0, num_queries, 127)
        ]
        decide = torch.zeros(num_queries, dtype=torch.bool)
        decide[torch.cat(places)] = True
        other = torch.where(decide[:, None], query, 3 * query.flip(2))
        expected, found = (run(0.01, x, key, value, **options) for x in (query, other))
        error = relative_error(found[:, :, decide], expected[:, :, decide])
        assert (error < 1e-6) == sampled
        if backend != "reference":
            check(expected, attend("reference", query, key, value, **BY_THRESHOLD | options))

    @pytest.mark.parametrize("threshold", [math.inf, 0.02])
    def test_gradients_take_the_choice_as_constant(self, threshold):
        """Catches a matrix, spreads or a guard without gradients."""
        sizes = {"queries": 10, "head_dim": 2, "parents": 3, "children": 2}
        tokens = [x.detach().requires_grad_() for x in make_case(batch=1, heads=1, **sizes)[:3]]
        options = {"num_parents": 3, "num_children": 2, "query_tile": 8, "backend": "reference"}
        run = partial(avq_attention, threshold=threshold, **options)
        with torch.no_grad():  # if all keys were exact, there would be no term to differentiate
            assert relative_error(run(*tokens), F.scaled_dot_product_attention(*tokens)) > 0.01
        torch.autograd.gradcheck(run, tokens, eps=1e-7, atol=1e-5)

    def test_growth(self):
        x = torch.tensor([0.0, 1e-8, 1.0, 20.0, 21.0], dtype=FP64)
        expected = [0.0, 1e-8, math.e - 1, math.expm1(20), math.expm1(20) + math.exp(20)]
        torch.testing.assert_close(reference.growth(x), torch.tensor(expected, dtype=FP64))
