"""Precompute kernels against a float64 oracle on the same rounded codewords and inputs.

Compilation for GPUs that are not there runs this file as a script, in a process of its own.
"""

import json
import math
import os
import subprocess
import sys
from dataclasses import replace
from itertools import product

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from avq_diffusers.attention.spec import Spec, Tensors
from avq_diffusers.attention.triton import problem as problems
from avq_diffusers.attention.triton import updates
from avq_diffusers.attention.triton.codewords import pack, padded_sizes
from avq_diffusers.attention.triton.launch import Plan
from avq_diffusers.attention.triton.precompute import precompute_launches
from avq_diffusers.attention.triton.problem import Layout, addresses_of, readable
from avq_diffusers.attention.triton.tuning import precompute_tiling
from avq_diffusers.codebook.assignment import centre_of

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
HALF, BRAIN, SINGLE = torch.float16, torch.bfloat16, torch.float32
# Triton's interpreter multiplies the bits of bfloat16 numbers as integers.
DTYPES = [HALF, pytest.param(BRAIN, marks=pytest.mark.gpu), SINGLE]


@pytest.fixture(autouse=True)
def poisoned_memory():
    """Memory that nobody wrote holds NaN and the largest integers."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def spec_of(num_parents: int, num_children: int, **changes: object) -> Spec:
    sizes = {"num_parents": num_parents, "num_children": num_children, "num_refined": 0}
    others = {"exact_keys": 0, "num_updates": 0, "query_tile": 128, "means": True}
    return Spec(**sizes | others | changes)


class Problem:
    """Inputs in the layout of a fused projection; codewords, packed and as the kernels see them.

    key, value: (B, H, S, D) views of (B, S, 2, H, D) memory.
    codewords: (H, M0, 1 + C, D) float64, rounded; the first is the parent.
    """

    def __init__(
        self, shape, num_parents, num_children, dtype=HALF, *, offset=0.0, seed=0, codewords=None
    ):
        batch, heads, num_keys, head_dim = shape
        generator = torch.Generator().manual_seed(seed)
        tokens = torch.randn(batch, num_keys, 2, heads, head_dim, generator=generator)
        tokens[:, :, 0] += offset
        tokens = tokens.to(dtype).to(DEVICE)
        self.key, self.value = tokens.permute(2, 0, 3, 1, 4)
        if codewords is None:
            parents = offset + torch.randn(heads, num_parents, 1, head_dim, generator=generator)
            spread = torch.randn(heads, num_parents, num_children, head_dim, generator=generator)
            codewords = torch.cat([parents, parents + 0.5 * spread], dim=2)
        self.set_codewords(codewords.to(DEVICE), dtype)

    def set_codewords(self, codewords: Tensor, dtype: torch.dtype, scale=None) -> None:
        parents, children = codewords[:, :, 0], codewords[:, :, 1:]
        self.num_parents, self.num_children, head_dim = children.shape[1:]
        self.scale = scale or head_dim**-0.5
        self.stored = pack(parents, children, scale=self.scale, dtype=dtype)
        self.codes, self.bias, _ = self.stored
        self.sizes = padded_sizes(head_dim, self.num_parents, self.num_children)
        centre = centre_of(parents).double()
        table = self.codes[..., :head_dim].double() / (self.scale * math.log2(math.e))
        table += centre
        _, parent_rows, child_rows = self.sizes
        rounded = table[:, parent_rows:].reshape(
            len(table), self.num_parents, child_rows, head_dim
        )[:, :, : self.num_children]
        self.codewords = torch.cat([table[:, : self.num_parents, None], rounded], dim=2)

    def run(self, key=None, value=None, **changes) -> tuple[Tensor, Tensor]:
        """Mean values and log counts in the stored form."""
        return self.tables(key, value, means=False, **changes)[:2]

    def tables(self, key=None, value=None, *, means, **changes) -> list[Tensor]:
        """Mean values and log counts; with means also codes and variances of keys."""
        key = self.key if key is None else key
        value = self.value if value is None else value
        tensors = readable(Tensors(key, key, value, *[None] * 6))
        spec = spec_of(self.num_parents, self.num_children, means=means, scale=self.scale)
        problem = problems.Problem.of(tensors, self.stored, None, spec)
        tiling = replace(precompute_tiling(problem), **changes)
        precompute = precompute_launches(problem, tiling=tiling)
        plan = Plan(precompute.parts, precompute.launches)
        memory = plan.run(addresses_of(tensors, self.stored, None), key.device)
        names = ["mean_values", "log_counts", *(["codes", "variance"] if means else [])]
        return [plan.part(memory, name) for name in names]

    def counts(self, log_counts: Tensor) -> tuple[Tensor, Tensor]:
        """Keys of the parents (B, H, M0) and of the leaves (B, H, M0, 1 + C)."""
        _, parent_rows, child_rows = self.sizes
        counts = log_counts.double().exp2().round()
        parents = counts[:, :, : self.num_parents]
        if not self.num_children:
            return parents, parents[..., None]
        children = counts[:, :, parent_rows:]
        children = children.unflatten(2, (self.num_parents, child_rows))
        children = children[..., : self.num_children]
        stay = parents - children.sum(dim=-1)
        return parents, torch.cat([stay[..., None], children], dim=-1)

    def split(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """(B, H, rows, ...) to parents (B, H, M0, ...) and leaves (B, H, M0, 1 + C, ...)."""
        _, parent_rows, child_rows = self.sizes
        stay = rows[:, :, parent_rows : parent_rows + self.num_parents, None]
        if not self.num_children:
            return rows[:, :, : self.num_parents], stay
        children = rows[:, :, 2 * parent_rows :]
        children = children.unflatten(2, (self.num_parents, child_rows))
        leaves = torch.cat([stay, children[:, :, :, : self.num_children]], dim=3)
        return rows[:, :, : self.num_parents], leaves

    def distances(self) -> Tensor:
        """(B, H, S, M0, 1 + C) squared distances to the rounded codewords."""
        key = self.key.double()[:, :, :, None, None]
        return (key - self.codewords[None, :, None]).square().sum(dim=-1)

    def rounding(self) -> Tensor:
        """(B, H, S) how far two rounded scores can move apart, as a squared distance.

        A score is the float32 sum of D products and a bias; packing rounds the bias once more.
        """
        factor = self.scale * math.log2(math.e)
        head_dim = self.key.shape[-1]
        products = self.key.double().abs() @ self.codes[..., :head_dim].double().abs().mT
        magnitude = products.amax(dim=-1) + self.bias[self.bias > -torch.inf].abs().amax()
        return 4 * (head_dim + 2) * 2.0**-23 * magnitude / factor

    def drop_unclear_keys(self) -> "Problem":
        """Replace keys whose choice rounding could change by one whose choice is clear."""
        distance = self.distances()
        parent_distance = distance[..., 0]
        leaf_distance = distance.gather(
            3,
            parent_distance.argmin(-1)[..., None, None].expand(
                *distance.shape[:3], 1, distance.shape[4]
            ),
        )[..., 0, :]
        clear = torch.ones(distance.shape[:3], dtype=torch.bool, device=DEVICE)
        for candidates in (parent_distance, leaf_distance):
            if candidates.shape[-1] > 1:
                nearest = candidates.topk(2, dim=-1, largest=False).values
                clear &= nearest[..., 1] - nearest[..., 0] > 2 * self.rounding()
        assert clear.any(dim=-1).all()
        first_clear = clear.int().argmax(dim=-1)[..., None, None]
        safe = self.key.gather(2, first_clear.expand(-1, -1, -1, self.key.shape[-1]))
        self.key[:] = torch.where(clear[..., None], self.key, safe)
        return self


def oracle(problem: Problem, value: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Counts (B, H, M0, 1 + C) and sums of values (B, H, M0, 1 + C, D), float64."""
    value = problem.value if value is None else value
    distance = problem.distances()
    parent = distance[..., 0].argmin(dim=-1)
    index = parent[..., None, None].expand(*distance.shape[:3], 1, distance.shape[4])
    leaf = distance.gather(3, index)[..., 0, :].argmin(dim=-1)
    num_leaves = distance.shape[4]
    row = parent * num_leaves + leaf
    rows = problem.num_parents * num_leaves
    membership = torch.nn.functional.one_hot(row, rows).double().mT
    shape = (problem.num_parents, num_leaves)
    counts = membership.sum(dim=-1).unflatten(2, shape)
    return counts, (membership @ value.double()).unflatten(2, shape)


def check(problem: Problem, means: Tensor, log_counts: Tensor) -> None:
    """Counts exactly; means and shares to the rounding of their dtype and of float32 sums."""
    counts, sums = oracle(problem)
    _, parent_rows, child_rows = problem.sizes
    head_dim = problem.key.shape[-1]
    ulp = {HALF: 2.0**-10, BRAIN: 2.0**-7, SINGLE: 2.0**-20}[means.dtype]
    largest = problem.value.double().abs().amax()
    summing = 2.0**-23 * problem.key.shape[2] * largest

    parents = counts.sum(dim=-1)
    assert problem.counts(log_counts)[0].equal(parents)
    assert problem.counts(log_counts)[1].equal(counts)
    parent_log_counts = log_counts[:, :, : problem.num_parents].double()
    torch.testing.assert_close(parent_log_counts, parents.log2(), rtol=2.0**-20, atol=1e-6)

    # What stays is averaged over all keys of the parent.
    over = torch.cat([parents[..., None], counts[..., 1:]], dim=-1)
    shares = torch.ones_like(over)
    shares[..., 0] = counts[..., 0] / parents.clamp(min=1)
    for row_sums, row_over, row_shares, rows in (
        (sums.sum(dim=-2), parents, torch.ones_like(parents), problem.split(means)[0]),
        (sums, over, shares, problem.split(means)[1]),
    ):
        expected = row_sums / row_over.clamp(min=1)[..., None]
        error = (rows[..., :head_dim].double() - expected).abs()
        assert (error <= ulp * expected.abs() + summing + 2.0**-24).all()
        error = (rows[..., head_dim:].double() - row_shares[..., None]).abs()
        assert (error <= ulp * row_shares[..., None] + 2.0**-24).all()

    is_row = torch.zeros(means.shape[2], dtype=torch.bool, device=DEVICE)
    is_row[: problem.num_parents] = True
    is_row[parent_rows : parent_rows + problem.num_parents] = True
    if problem.num_children:
        children = is_row[2 * parent_rows :].unflatten(0, (problem.num_parents, child_rows))
        children[:, : problem.num_children] = True
    assert (means[:, :, ~is_row, :head_dim] == 0).all()
    is_code = torch.cat([is_row[:parent_rows], is_row[2 * parent_rows :]])
    assert (log_counts[:, :, ~is_code] == -torch.inf).all()


SHAPES = {
    "tail tile, tail chunk, two heads": ((2, 2, 333, 40), 16, 8, HALF),
    "M0 and C no powers of two": ((1, 2, 300, 40), 11, 5, HALF),
    "more parents than one product": ((1, 1, 200, 64), 100, 3, HALF),
    "one key": ((1, 1, 1, 40), 7, 8, HALF),
    "fewer keys than a tile, most cells empty": ((1, 1, 9, 64), 64, 8, HALF),
    "flat": ((1, 2, 257, 40), 24, 0, HALF),
    "many flat parents": ((1, 1, 300, 16), 500, 0, HALF),
    "most codewords": ((1, 1, 400, 64), 256, 8, HALF),
    "more codes than shared memory holds": ((1, 1, 150, 128), 300, 0, HALF),
    "more float32 codes than shared memory holds": ((1, 1, 150, 64), 100, 3, SINGLE),
    "one parent": ((1, 1, 150, 40), 1, 8, HALF),
    "one child": ((1, 1, 100, 40), 4, 1, HALF),
    "most children": ((1, 1, 130, 32), 4, 32, HALF),
    "narrowest head": ((1, 1, 200, 8), 16, 4, HALF),
    "head dim no power of two, wide": ((1, 1, 150, 80), 16, 8, HALF),
    "widest head": ((1, 1, 150, 128), 16, 8, HALF),
    "float32": ((1, 2, 200, 40), 16, 8, SINGLE),
}


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.long] if name.startswith("m") else [])
        for name in SHAPES
    ],
)
def test_aggregates_match_oracle(name):
    shape, num_parents, num_children, dtype = SHAPES[name]
    problem = Problem(shape, num_parents, num_children, dtype).drop_unclear_keys()
    check(problem, *problem.run())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("offset", [pytest.param(0.0, marks=pytest.mark.long), 1000.0])
def test_chosen_leaf_is_nearest_up_to_rounding(dtype, offset):
    """Values that name their key show where each key went."""
    problem = Problem((6, 2, 40, 40), 12, 8, dtype, offset=offset)
    value = torch.eye(40, dtype=dtype, device=DEVICE).expand(6, 2, 40, 40)
    means, log_counts = problem.run(value=value)
    _, leaf_means = problem.split(means)
    went = (leaf_means[..., :40] > 0).permute(0, 1, 4, 2, 3)
    assert (went.flatten(3).sum(dim=-1) == 1).all()
    assert problem.counts(log_counts)[1].flatten(1).sum(dim=1).eq(80).all()

    distance, rounding = problem.distances(), problem.rounding()
    parent_distance = distance[..., 0]
    to_parent = parent_distance[went.any(dim=-1)].view(6, 2, 40)
    assert (to_parent <= parent_distance.amin(dim=-1) + rounding).all()
    of_parent = went.any(dim=-1)[..., None]
    best_leaf = distance.masked_fill(~of_parent, torch.inf).flatten(3).amin(dim=-1)
    assert (distance[went].view(6, 2, 40) <= best_leaf + rounding).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_ties_go_to_the_lower_parent_the_parent_and_the_lower_child(dtype):
    """Small integers are exact, so distances are equal, not almost equal."""
    codewords = torch.zeros(1, 4, 3, 16)
    codewords[0, :, :, 0] = torch.tensor(
        [
            [9.0, 9.0, 9.0],  # children on their parent
            [2.0, 4.0, 4.0],  # twin children
            [2.0, 0.0, 0.0],  # twin of parent 1
            [-2.0, -4.0, 0.0],
        ]
    )
    problem = Problem((1, 1, 6, 16), 4, 2, dtype)
    problem.key[:] = 0
    problem.key[0, 0, :, 0] = torch.tensor([9.0, 4.0, 3.0, 0.0, -2.0, -3.0])
    problem.set_codewords(codewords.to(DEVICE), dtype, scale=math.log(2))
    assert problem.codewords.equal(problem.codewords.round())
    _, leaves = problem.counts(problem.run()[1])
    # Key 9 stays. Of the keys of parent 1, 4 goes to the first twin; 3, between the parent and its
    # children, stays, and so does 0, between parents 1 to 3. Of the keys of parent 3, -2 stays, and
    # so does -3, between it and a child.
    expected = [[1, 0, 0], [2, 1, 0], [0, 0, 0], [2, 0, 0]]
    assert leaves[0, 0].int().tolist() == expected


def test_one_hot_leaf_in_pieces():
    problem = Problem((1, 2, 700, 40), 16, 8)
    problem.key[:, :, :650] = problem.codewords[None, :, 5:6, 3].to(HALF)
    problem.drop_unclear_keys()
    means, log_counts = problem.run(piece_keys=64)
    check(problem, means, log_counts)
    assert problem.counts(log_counts)[1][:, :, 5, 3].ge(650).all()


def test_several_parents_in_pieces():
    problem = Problem((2, 2, 400, 40), 5, 4).drop_unclear_keys()
    means, log_counts = problem.run(piece_keys=32)
    check(problem, means, log_counts)
    assert (problem.counts(log_counts)[0] > 64).sum() > 4


def test_identical_keys():
    problem = Problem((1, 1, 200, 40), 16, 8)
    problem.key[:] = problem.codewords[0, 3, 0].to(HALF)
    means, log_counts = problem.run()
    check(problem.drop_unclear_keys(), means, log_counts)


CONFIGS = [
    {"num_chunks": 1},
    {"num_chunks": 4, "sort_keys": 128, "sort_warps": 8},
    {"sort_keys": 32, "sort_warps": 1},
    {"sort_parents": 16, "leaf_keys": 64},
    {"sort_parents": 16, "sort_shared": 0},
    {"piece_keys": 32, "leaf_keys": 16},
    {"num_chunks": 64, "sort_keys": 16, "sort_warps": 2, "leaf_keys": 128},
]


@pytest.mark.parametrize("changes", CONFIGS, ids=str)
@pytest.mark.long
def test_counts_do_not_depend_on_the_configuration(changes):
    problem = Problem((1, 1, 260, 40), 20, 8)
    _, expected = problem.run()
    means, log_counts = problem.run(**changes)
    assert log_counts.equal(expected)
    again = problem.run(**changes)
    assert means.equal(again[0])


def test_large_values_neither_overflow_nor_lose_their_mean():
    """A half-precision sum of 300 values of 1000 is infinite."""
    problem = Problem((1, 1, 300, 40), 16, 4)
    problem.value[:] = 1000
    means, log_counts = problem.run()
    for rows, counts in zip(problem.split(means), problem.counts(log_counts), strict=True):
        # The mean of what stays is taken over all keys of the parent.
        expected = torch.where(counts > 0, 1000.0, 0.0)[..., None] * rows[..., 40:41].double()
        error = (rows[..., :40].double() - expected).abs()
        assert (error <= 2.0**-9 * expected).all()


def test_far_codeword_is_finite_and_takes_nothing():
    problem = Problem((1, 1, 200, 40), 16, 4).drop_unclear_keys()
    far = problem.codewords.clone()
    far[:, 7] += 1e6
    problem.set_codewords(far.float(), HALF)
    assert problem.codes.isfinite().all()
    means, log_counts = problem.run()
    check(problem, means, log_counts)
    assert (problem.counts(log_counts)[0][:, :, 7] == 0).all()


def test_layouts_and_surroundings_change_nothing():
    """NaN around the tokens, rows that are not 16-byte aligned, and heads before tokens."""
    problem = Problem((2, 2, 150, 40), 16, 8)
    expected = problem.run()
    for pad in (8, 3):
        views = []
        for tokens in (problem.key, problem.value):
            memory = torch.full((2, 160, 2, 40 + pad), torch.nan, dtype=HALF, device=DEVICE)
            view = memory[:, 5:155, :, :40].transpose(1, 2)
            views.append(view.copy_(tokens))
        for got, want in zip(problem.run(*views), expected, strict=True):
            assert got.equal(want)
    contiguous = problem.run(problem.key.contiguous(), problem.value.contiguous())
    for got, want in zip(contiguous, expected, strict=True):
        assert got.equal(want)


def test_check_can_fail():
    """Exchange two values, or move one key: the comparison with the oracle notices both."""
    problem = Problem((1, 1, 200, 40), 16, 8).drop_unclear_keys()
    means, log_counts = problem.run(value=problem.value.flip(2))
    with pytest.raises(AssertionError):
        check(problem, means, log_counts)
    moved = problem.key.clone()
    moved[:, :, 0] = -problem.key[:, :, 0]
    means, log_counts = problem.run(key=moved)
    with pytest.raises(AssertionError):
        check(problem, means, log_counts)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("changes", [{}, {"piece_keys": 32}], ids=str)
def test_mean_keys_their_values_and_their_variances(changes, dtype):
    """Of the default form; catches a lost piece, centre or scale, and sums that cancel."""
    problem = Problem((2, 2, 300, 40), 5, 4, dtype, offset=20.0).drop_unclear_keys()
    values, log_counts, codes, variance = problem.tables(means=True, **changes)
    counts, sums = oracle(problem)
    key_sums = oracle(problem, problem.key)[1]
    over = counts.clamp(min=1)[..., None]
    ulp = max(torch.finfo(dtype).eps, 2.0**-18)  # of float32 sums
    assert log_counts[:, :, :5].double().exp2().round().equal(counts.sum(-1).double())
    leaf_counts = problem.split(log_counts[..., None])[1][..., 0].double().exp2().round()
    assert leaf_counts.equal(counts.double())
    for rows, expected in (
        (problem.split(values)[1], sums / over),
        (problem.split(values)[0], sums.sum(-2) / counts.sum(-1).clamp(min=1)[..., None]),
    ):
        torch.testing.assert_close(rows[..., :40].double(), expected, rtol=ulp, atol=ulp)
        assert (rows[..., 40:] == 1).all()

    is_used = counts > 0
    centre = problem.stored.centre[:, :40].double()[None, :, None, None]
    means = problem.split(codes)[1][..., :40].double() / (problem.scale * math.log2(math.e))
    means = torch.where(is_used[..., None], means + centre, 0.0)
    torch.testing.assert_close(means, key_sums / over, rtol=ulp, atol=4 * ulp)
    squares = oracle(problem, problem.key.double().square())[1].sum(-2).sum(-1)
    number = counts.sum(-1).clamp(min=1)
    mean = key_sums.sum(-2) / number[..., None]
    expected = squares / number - mean.square().sum(-1)
    torch.testing.assert_close(variance[..., :5].double(), expected, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("dtype", [HALF, SINGLE])
def test_packed_scores_order_codewords_by_distance(dtype):
    problem = Problem((1, 2, 20, 40), 11, 5, dtype, offset=3.0)
    padded_dim, parent_rows, child_rows = problem.sizes
    assert problem.codes.shape == (2, parent_rows + 11 * child_rows, padded_dim)
    key = problem.key.double()
    scores = key @ problem.codes[..., :40].double().mT + problem.bias.double()[None, :, None]
    is_row = problem.bias > -torch.inf
    assert is_row.sum() == 2 * 11 * 6
    assert (problem.codes[~is_row] == 0).all()
    assert (problem.codes[..., 40:] == 0).all()
    parents = scores[..., :11]
    children = scores[..., parent_rows:].unflatten(-1, (11, child_rows))[..., :5]
    scores = torch.cat([parents[..., None], children], dim=-1)
    factor = problem.scale * math.log2(math.e)
    difference = (scores + factor / 2 * problem.distances()).flatten(3)
    spread = difference.amax(dim=-1) - difference.amin(dim=-1)
    assert (spread <= 2.0**-22 * problem.bias[is_row].abs().max()).all()


def test_packing_rounds_once():
    generator = torch.Generator().manual_seed(0)
    parents = 1000 + torch.randn(2, 16, 40, generator=generator)
    children = parents[:, :, None] + torch.randn(2, 16, 4, 40, generator=generator)
    codes = pack(parents, children, scale=0.3, dtype=HALF).codes
    centred = (parents - centre_of(parents)).double() * 0.3 * math.log2(math.e)
    assert codes[:, :16, :40].equal(centred.to(HALF))


@pytest.mark.parametrize(
    "problems",
    [
        pytest.param([(90, 64, "stored"), (86, 80, "own")], id="some"),
        pytest.param(
            [
                *product((86, 90), (40, 64, 80, 128), ("stored", "means", "own")),
                *product((80, 89), (40, 80), ("own",)),  # kin of 86
            ],
            id="all",
            marks=pytest.mark.long,
        ),
    ],
)
def test_kernels_compile_to_what_was_meant(problems):
    environment = {**os.environ, "TRITON_INTERPRET": "0"}
    environment["PYTHONPATH"] = os.pathsep.join(sys.path)
    command = [sys.executable, __file__, json.dumps(problems)]
    run = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert run.returncode == 0, run.stderr[-2000:]
    results = json.loads(run.stdout.splitlines()[-1])
    assert len(results) == 2 * sum(1 + (form == "own") for *_, form in problems)
    for result in results:
        # An address may wait in memory while a piece is summed, and some in an update.
        most = 0 if "stored" in result["kernel"] else 16 if "cell" in result["kernel"] else 8
        assert result["stack"] <= most, result
        assert result["shared"] <= 99 * 1024, result
        assert result["narrow_loads"] == 0, result
        assert result["products"] > 0 or "cell means" in result["kernel"], result


def compile_launches(capability: int, head_dim: int, form: str) -> list[dict]:
    """Compile the kernels exactly as they are launched, those of updates for own codewords too."""
    from compile_only import compile_launch

    problems.capability_of = lambda device: divmod(capability, 10)
    own, device, order = form == "own", torch.device("cpu"), torch.int64
    strides = (4096 * 2 * head_dim, head_dim, 2 * head_dim, 1)
    layout = Layout(torch.Size((1, 2, 4096, head_dim)), strides)
    spec = spec_of(64, 8, means=form != "stored", scale=0.1)
    fields = (device, HALF, layout, layout, layout, None, order, order if own else None)
    problem = problems.Problem(*fields, not own, False, spec)
    launches = precompute_launches(problem).launches
    names = ["sort", "aggregate"]
    if own:
        names += ["cell sums", "cell means"]
        launches += updates._plan(device, HALF, layout, order, False, spec).launches
    results = []
    for name, launch in zip(names, launches, strict=True):
        info = compile_launch(launch, capability=capability)
        results.append(
            {
                "kernel": f"{name}, {form}, D = {head_dim}, sm_{capability}",
                "stack": info.stack,
                "registers": info.registers,
                "shared": info.shared,
                "narrow_loads": info.count("LDG.E.U16"),
                "products": info.count(
                    "HGMMA" if name in ("sort", "cell sums") and capability == 90 else "HMMA"
                ),
            }
        )
    return results


if __name__ == "__main__":
    forms = json.loads(sys.argv[1])
    print(json.dumps([result for form in forms for result in compile_launches(*form)]))
