"""Flash AVQ-attention kernel, run (without a GPU in the interpreter) and compiled for many GPUs.

Outputs are compared to float64 attention on the same rounded inputs, and their error to what
PyTorch's attention loses in the same dtype.
"""

import itertools
import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from cases import relative_error
from torch import Tensor

pytest.importorskip("triton")

from avq_diffusers.attention.triton.attention import AttentionTiling, attend, default_tiling
from avq_diffusers.attention.triton.codewords import mean_columns

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
FP16, BF16, FP32 = torch.float16, torch.bfloat16, torch.float32
DTYPES = [
    pytest.param(FP16, id="fp16"),
    # Triton's interpreter multiplies the bits of bfloat16 numbers as integers.
    pytest.param(BF16, id="bf16", marks=pytest.mark.gpu),
    pytest.param(FP32, id="fp32"),
]


@pytest.fixture(autouse=True)
def nan_in_new_memory(monkeypatch):
    """A row that the kernel does not write is NaN."""

    def new_empty(self: Tensor, shape: tuple[int, ...], **options: object) -> Tensor:
        if options:  # integers, and the interpreter's own
            return torch.empty(shape, **({"dtype": self.dtype, "device": self.device} | options))
        return torch.full(shape, torch.nan, dtype=self.dtype, device=self.device)

    monkeypatch.setattr(Tensor, "new_empty", new_empty)


class Case:
    """A random problem: counts, codewords and means that every query dtype represents exactly.

    Args:
        empty: share of codewords without keys, and of parents without any.
        spread: standard deviation of a logit due to a parent, roughly.
        sunken: no key stays with its parent, and children have half its logits.
    """

    def __init__(
        self,
        *,
        batch: int = 2,
        heads: int = 2,
        queries: int = 50,
        head_dim: int = 40,
        parents: int = 12,
        children: int = 4,
        refined: int = 3,
        query_tile: int = 32,
        importance_tile: int | None = None,
        dtype: torch.dtype = FP16,
        empty: float = 0.2,
        spread: float = 2.0,
        sunken: bool = False,
        permuted: bool = False,
        seed: int = 0,
    ) -> None:
        generator = torch.Generator().manual_seed(seed)

        def normal(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator, dtype=torch.float64)

        self.num_parents, self.num_children, self.num_refined = parents, children, refined
        self.query_tile, self.importance_tile = query_tile, importance_tile
        self.dtype = dtype
        self.query = normal(batch, queries, heads, head_dim).to(dtype).transpose(1, 2)
        order = torch.randperm(queries, generator=generator)
        self.query_order = order if permuted else None

        scale = spread / math.log(2) * head_dim**-0.5
        parent_codes = scale * normal(heads, parents, head_dim)
        child_codes = parent_codes[:, :, None] + scale * normal(heads, parents, children, head_dim)
        if sunken:
            child_codes = (parent_codes[:, :, None] / 2).expand_as(child_codes)
        self.parent_codes = parent_codes.to(dtype).double()
        self.child_codes = child_codes.to(dtype).double()

        counts = torch.randint(1, 30, (batch, heads, parents, 1 + children), generator=generator)
        counts *= torch.rand(counts.shape, generator=generator) >= empty
        counts *= torch.rand(counts.shape[:3], generator=generator)[..., None] >= empty
        if sunken:
            counts[..., 0] = 0
        counts[:, :, -1, -1] += 1  # all that parents keep for themselves may be nothing
        self.leaf_counts = counts
        self.counts = counts.sum(dim=3)
        leaf_means = normal(*counts.shape, head_dim) * (counts > 0)[..., None]
        sums = (leaf_means * counts[..., None]).sum(dim=3)
        self.leaf_means = leaf_means.to(dtype).double()
        self.means = (sums / self.counts.clamp(min=1)[..., None]).to(dtype).double()

    def packed(self) -> tuple[Tensor, Tensor, Tensor]:
        """codes, means and log_counts as `attend` takes them."""
        batch, heads, _, head_dim = self.query.shape
        columns = _padded(head_dim)
        parent_rows = _padded(self.num_parents)
        child_rows = 1 << (self.num_children - 1).bit_length() if self.num_children else 0
        children = self.num_parents, child_rows

        codes = torch.zeros(heads, parent_rows + self.num_parents * child_rows, columns)
        codes[:, : self.num_parents, :head_dim] = self.parent_codes
        child_codes = codes[:, parent_rows:].unflatten(1, children)
        child_codes[:, :, : self.num_children, :head_dim] = self.child_codes

        means = torch.zeros(batch, heads, parent_rows + codes.shape[1], mean_columns(head_dim))
        means[..., head_dim:] = 1
        means[:, :, : self.num_parents, :head_dim] = self.means
        # What stays is averaged over all keys of the parent.
        share = (self.leaf_counts[..., 0] / self.counts.clamp(min=1))[..., None]
        stay_means = means[:, :, parent_rows : parent_rows + self.num_parents]
        stay_means[..., :head_dim] = self.leaf_means[:, :, :, 0] * share
        stay_means[..., head_dim:] = share
        child_means = means[:, :, 2 * parent_rows :].unflatten(2, children)
        child_means[:, :, :, : self.num_children, :head_dim] = self.leaf_means[:, :, :, 1:]

        counts = torch.zeros(batch, heads, codes.shape[1])
        counts[:, :, : self.num_parents] = self.counts
        child_counts = counts[:, :, parent_rows:].unflatten(2, children)
        child_counts[:, :, :, : self.num_children] = self.leaf_counts[..., 1:]
        return codes.to(self.dtype), means.to(self.dtype), counts.log2()

    def attend(self, **changes: object) -> Tensor:
        arguments = {
            "num_parents": self.num_parents,
            "num_children": self.num_children,
            "num_refined": self.num_refined,
            "query_tile": self.query_tile,
            "query_order": self.query_order,
            "importance_tile": self.importance_tile,
        }
        arguments |= changes
        if arguments["query_order"] is not None:
            arguments["query_order"] = arguments["query_order"].to(DEVICE)
        query, *tables = (x.to(DEVICE) for x in (self.query, *self.packed()))
        return attend(query, *tables, None, **arguments).to(self.query.dtype).cpu()

    def default_tiling(self, capability: tuple[int, int]) -> AttentionTiling:
        return default_tiling(
            head_dim=self.query.shape[3],
            num_parents=self.num_parents,
            num_children=self.num_children,
            num_refined=self.num_refined if self.num_children else 0,
            query_tile=self.query_tile,
            dtype=self.dtype,
            capability=capability,
        )

    def tiles(self) -> tuple[Tensor, ...]:
        order = self.query_order
        order = torch.arange(self.query.shape[2]) if order is None else order
        return order.split(self.query_tile)

    def importance(self, tile: Tensor) -> Tensor:
        """(B, H, M0), by the definition."""
        mass = self.counts[:, :, None] * self.weight(tile, self.parent_codes)
        step = self.importance_tile or self.num_parents
        importance = torch.zeros(mass.shape[:2] + mass.shape[3:], dtype=torch.float64)
        for start in range(0, self.num_parents, step):
            seen = slice(start + step)
            share = self.counts[..., seen].sum(-1) / self.counts.sum(-1)
            seen_mass = mass[..., seen].sum(-1, keepdim=True)
            part = slice(start, start + step)
            shares = mass[..., part] / seen_mass * share[..., None, None]
            importance[..., part] = shares.nan_to_num().sum(dim=2)
        return importance

    def weight(self, tile: Tensor, codes: Tensor) -> Tensor:
        """2^(q.c) of one key, (B, H, I, codewords)."""
        return (self.query[:, :, tile].double() @ codes.transpose(-1, -2)).exp2()

    def refined(self, tile: Tensor) -> Tensor:
        """(B, H, M0) bool."""
        ranking = self.importance(tile).argsort(dim=-1, descending=True, stable=True)
        refined = torch.zeros(ranking.shape, dtype=torch.bool)
        return refined.scatter(-1, ranking[..., : self.num_refined], True)

    def expected(self) -> Tensor:
        """The output in float64."""
        output = torch.full(self.query.shape, torch.nan, dtype=torch.float64)
        child_means = self.leaf_means[:, :, :, 1:].flatten(2, 3)
        for tile in self.tiles():
            refined = self.refined(tile)
            parent = self.weight(tile, self.parent_codes)
            child = self.weight(tile, self.child_codes.flatten(1, 2))
            counts = torch.where(refined, self.leaf_counts[..., 0], self.counts)
            means = self.means.where(~refined[..., None], self.leaf_means[:, :, :, 0])
            child_counts = (self.leaf_counts[..., 1:] * refined[..., None]).flatten(2, 3)
            weights = torch.cat([parent * counts[:, :, None], child * child_counts[:, :, None]], -1)
            values = torch.cat([means, child_means], dim=2)
            output[:, :, tile] = weights @ values / weights.sum(dim=-1, keepdim=True)
        return output

    def sdpa(self) -> Tensor:
        """PyTorch's attention over the quantized keys, each with the mean value of its codeword."""
        output = torch.empty_like(self.query)
        codes = torch.cat([self.parent_codes[:, :, None], self.child_codes], dim=2)
        for tile in self.tiles():
            refined = self.refined(tile)
            for b, h in itertools.product(*map(range, self.query.shape[:2])):
                counts, means = self.leaf_counts[b, h].clone(), self.leaf_means[b, h].clone()
                coarse = ~refined[b, h]
                counts[coarse] = 0
                counts[coarse, 0] = self.counts[b, h, coarse]
                means[coarse, 0] = self.means[b, h, coarse]
                counts = counts.flatten()
                key = codes[h].flatten(0, 1).repeat_interleave(counts, dim=0)
                value = means.flatten(0, 1).repeat_interleave(counts, dim=0)
                output[b, h, tile] = F.scaled_dot_product_attention(
                    self.query[b, h, tile][None],
                    key[None].to(self.query.dtype),
                    value[None].to(self.query.dtype),
                    scale=math.log(2),
                )[0]
        return output


# Without a GPU the interpreter runs what others would: float32 has most registers to save on 8.0.
RUNS = [
    pytest.param(
        dtype.values[0],
        torch.cuda.get_device_capability() if DEVICE == "cuda" else capability,
        id=dtype.id,
        marks=dtype.marks,
    )
    for dtype, capability in zip(DTYPES, [(9, 0), (9, 0), (8, 0)], strict=True)
]


def _padded(length: int) -> int:
    return max(16, 1 << (length - 1).bit_length())


@pytest.mark.parametrize(("dtype", "capability"), RUNS)
@pytest.mark.parametrize(
    "shape",
    [
        {"query_tile": 16, "children": 8, "parents": 16},  # nothing to pad but the last tile
        {"children": 3},  # padding children
        {"parents": 5, "refined": 4, "head_dim": 8},  # all sizes below a block
        {"head_dim": 64},  # no padding column: the weights are summed elsewhere
        {"head_dim": 80, "refined": 7},  # more refined parents than a block of children holds
        {"head_dim": 128, "heads": 1, "batch": 1},
        {"query_tile": 24},  # rows of a block that belong to the next tile
        {"query_tile": 1, "queries": 5},
        {"queries": 7},  # fewer queries than a tile
        {"permuted": True},
        {"refined": 0},  # flat
        {"refined": 0, "children": 0, "parents": 90},  # flat in two blocks, one not full
        {"refined": 3, "children": 0},  # nothing to refine
        {"refined": 12},  # all leaves
        {"refined": 12, "empty": 0.8},  # rows that meet only empty codewords first
        {"refined": 10, "empty": 0.8},  # empty parents are selected
        {"refined": 11, "children": 1},
        {"importance_tile": 5},  # tiles that are no power of two, the last not full
        {"importance_tile": 1, "empty": 0.6},  # first tiles without keys
        {"importance_tile": 20},  # not tiled
        {"spread": 40.0},  # nearly one-hot: most weights underflow
    ],
    ids=str,
)
def test_error_is_at_most_twice_that_of_sdpa(shape, dtype, capability):
    case = Case(dtype=dtype, **shape)
    expected = case.expected()

    error = relative_error(case.attend(tiling=case.default_tiling(capability)), expected)

    assert error <= 2 * relative_error(case.sdpa(), expected)


@pytest.mark.parametrize("refined", [0, 3, 12])
@pytest.mark.parametrize("parent_block", [16, 64], ids=["blocks of parents", "one block"])
def test_a_logit_may_exceed_the_reference_by_any_amount(parent_block, refined):
    """Catches float16 weights that overflow, and a second pass that starts from the first one."""
    case = Case(parents=20, refined=refined, spread=40.0)
    parent, child = (
        case.weight(torch.arange(50), codes).log2()
        for codes in (case.parent_codes, case.child_codes.flatten(1, 2))
    )
    excess = child.amax(dim=-1) if refined else parent[..., 16:].amax(dim=-1)
    reference = parent[..., :16] if refined in (0, 12) else parent
    assert (excess - reference.amax(dim=-1) > 40).any()  # far above 2^16, with log counts up to 10

    output = case.attend(tiling=AttentionTiling(1, 1, 4, parent_block, running_max=False))

    running = case.attend(tiling=AttentionTiling(1, 1, 4, parent_block))
    expected = case.expected()
    assert relative_error(output, expected) <= 1.1 * relative_error(running, expected)


@pytest.mark.parametrize("refined", [3, 20])
@pytest.mark.parametrize("running_max", [False, True])
@pytest.mark.parametrize("parent_block", [16, 64], ids=["blocks of parents", "one block"])
def test_all_keys_may_lie_far_below_their_parents(parent_block, running_max, refined):
    """Catches weights that all vanish in float16 beside a parent that no key stays with."""
    case = Case(parents=20, refined=refined, spread=40.0, sunken=True)
    output = case.attend(tiling=AttentionTiling(1, 1, 4, parent_block, running_max=running_max))
    expected = case.expected()
    assert relative_error(output, expected) <= 2 * relative_error(case.sdpa(), expected)


@pytest.mark.parametrize("importance_tile", [None, 3], ids=["exact", "tiled"])
@pytest.mark.parametrize("parent_block", [16, 64], ids=["blocks of parents", "one block"])
def test_most_important_parents_are_refined(parent_block, importance_tile):
    """Parent p alone has value 1 in channel p, and only in the mean of all its keys."""
    case = Case(parents=40, importance_tile=importance_tile, dtype=FP32, empty=0.0)
    case.leaf_means[:] = 0
    case.means[:] = torch.eye(40, dtype=torch.float64)

    output = case.attend(tiling=AttentionTiling(1, 1, 4, parent_block))

    for tile in case.tiles():
        refined = (output[:, :, tile] == 0).all(dim=2)
        importance = case.importance(tile)
        assert (refined.sum(dim=-1) == case.num_refined).all()
        least = importance.where(refined, torch.inf).amin(dim=-1)
        most = importance.where(~refined, 0.0).amax(dim=-1)
        assert (least >= most * (1 - 1e-5)).all()


def test_of_equally_important_parents_the_first_are_refined():
    case = Case(parents=40, dtype=FP32, empty=0.0)
    case.leaf_means[:] = 0
    case.means[:] = torch.eye(40, dtype=torch.float64)
    case.parent_codes[:] = 0
    case.counts[:] = 5

    refined = (case.attend() == 0).all(dim=2)

    assert refined.nonzero()[:, -1].view(-1, 3).unique(dim=0).tolist() == [[0, 1, 2]]


@pytest.mark.parametrize("changes", [{}, {"refined": 0}, {"spread": 40.0}], ids=str)
@pytest.mark.parametrize("parent_block", [16, 64], ids=["blocks of parents", "one block"])
@pytest.mark.parametrize("head_dim", [72, 88])
def test_columns_in_two_blocks_give_the_same(head_dim, parent_block, changes):
    case = Case(head_dim=head_dim, parents=20, **changes)
    whole, split = (
        case.attend(tiling=AttentionTiling(1, 1, 4, parent_block, rest_columns=rest))
        for rest in (0, 32)
    )
    torch.testing.assert_close(split, whole, rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize("refined", [0, 3, 12])
def test_empty_codewords_change_nothing_however_large_their_logits(refined):
    case = Case(refined=refined, empty=0.4)
    output = case.attend()
    empty = (case.leaf_counts.sum(dim=0) == 0) & (case.counts.sum(dim=0) == 0)[..., None]
    empty_parents, empty_children = empty.all(dim=-1), (case.leaf_counts.sum(dim=0) == 0)[..., 1:]
    assert empty_parents.any()

    case.parent_codes[empty_parents] = 6e4 * case.parent_codes[empty_parents].sign()
    case.child_codes[empty_children] = 6e4 * case.child_codes[empty_children].sign()

    assert torch.equal(case.attend(), output)


def test_queries_beyond_the_last_do_not_vote():
    case = Case(queries=40)
    output = case.attend()

    case.query = case.query[:, :, 32:]

    assert torch.equal(case.attend(), output[:, :, 32:])


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
def test_query_order_only_says_which_queries_form_a_tile(dtype):
    case = Case(permuted=True)
    order, query = case.query_order, case.query
    output = case.attend(query_order=order.to(dtype))

    case.query = query[:, :, order]

    assert torch.equal(case.attend(query_order=None), output[:, :, order])
    case.query = query
    assert not torch.equal(case.attend(query_order=None), output)


def test_output_does_not_depend_on_the_rest_of_the_batch():
    case = Case(batch=3)
    query, codes, means, log_counts = (x.to(DEVICE) for x in (case.query, *case.packed()))
    arguments = {
        "num_parents": 12,
        "num_children": 4,
        "num_refined": 3,
        "query_tile": 32,
        "query_order": None,
        "importance_tile": None,
    }

    alone = attend(query[1:2], codes, means[1:2], log_counts[1:2], None, **arguments)

    assert torch.equal(alone.cpu(), case.attend()[1:2])


@pytest.mark.parametrize("offset", [40, 1], ids=["aligned", "unaligned"])
def test_query_may_have_any_strides(offset):
    case = Case()
    output = case.attend()
    assert output.transpose(1, 2).is_contiguous()

    memory = torch.full((2, 50, 2, 123), torch.nan, dtype=FP16, device=DEVICE)
    view = memory[..., offset : offset + 40].transpose(1, 2)
    case.query = view.copy_(case.query)
    assert torch.equal(case.attend(), output)

    case.query = case.query.contiguous()
    assert torch.equal(case.attend(), output)


COMPILE = """
import json, sys
import torch
from compile_only import compile_launch
from avq_diffusers.attention.triton.attention import TokenLayout, attention_launch

for problem in json.loads(sys.argv[1]):
    capability, head_dim, (parents, refined, children), form, exact_keys, num_sinks = problem
    strides = 4096 * 8 * head_dim, head_dim, 8 * head_dim, 1
    keys, sinks = (
        TokenLayout(number, (*strides[:3], *strides[:3])) if met else None
        for number, met in ((4096, exact_keys), (num_sinks, num_sinks))
    )
    _, launch = attention_launch(
        (2, 8, 4096, head_dim), strides, torch.float16, divmod(capability, 10),
        order_dtype=torch.int64, num_parents=parents, num_children=children, num_refined=refined,
        query_tile=128, importance_tile=None, means=form != "stored", exact=keys,
        exact_keys=exact_keys, sinks=sinks, own_centre=form == "own",
        scale=0.1 if keys or sinks else 0.0,
    )
    info = compile_launch(launch, capability=capability)
    result = {
        "spilled": info.count("LDL", "STL") / len(info.instructions()),
        "shared": info.shared,
        "narrow_loads": info.count("LDG.E.U16"),
        "hopper_products": info.count("HGMMA"),
    }
    print(json.dumps([problem, result]))
"""


@pytest.mark.long
def test_compiled_kernels_fit():
    """No spills, the shared memory of a consumer GPU, wide loads, and Hopper's tensor cores.

    On Hopper a limit on registers makes room for more programs; what it spills is little. With
    exact keys or sinks this also holds for the blocks of keys and of a second pass.
    """
    codebooks, forms = [(64, 16, 8), (128, 32, 8)], ["stored", "means"]
    problems = list(itertools.product([86, 90], [40, 64, 80, 128], codebooks, forms, [0], [0]))
    problems += itertools.product([80, 89], [40, 80], codebooks[:1], forms, [0], [0])  # as 86
    problems += itertools.product([90], [40, 64], codebooks[:1], ["own"], [256], [0])
    problems += itertools.product([90], [64, 128], codebooks[:1], ["own"], [0], [512])
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = str(Path(__file__).parents[1])
    command = [sys.executable, "-c", COMPILE, json.dumps(problems)]

    run = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)

    lines = run.stdout.splitlines()
    assert len(lines) == len(problems)
    for line in lines:
        problem, result = json.loads(line)
        capability, *_, exact_keys, num_sinks = problem
        meets_keys = exact_keys or num_sinks
        most = 0 if capability != 90 else 0.01 if meets_keys else 0.025
        assert result["spilled"] <= most, problem
        assert result["shared"] <= 99 * 1024, problem
        if not meets_keys:  # shares of a few parents, twice
            assert result["narrow_loads"] <= 2, problem
        assert (result["hopper_products"] > 0) == (capability == 90), problem
