"""Codebooks, and which of their codewords a key takes."""

import math
import re

import pytest
import torch
from torch import Tensor

from avq_diffusers.codebook import assignment
from avq_diffusers.codebook.assignment import assign, assign_leaves
from avq_diffusers.codebook.codebook import Codebook

PARENTS, CHILDREN = torch.zeros(2, 3, 5), torch.zeros(2, 3, 4, 5)


def test_properties():
    codebook = Codebook(PARENTS, CHILDREN)
    assert (codebook.num_heads, codebook.num_parents, codebook.num_children) == (2, 3, 4)
    assert (codebook.head_dim, codebook.num_codewords) == (5, 15)


def test_to_converts_both_tensors_and_keeps_itself_where_nothing_changes():
    codebook = Codebook(PARENTS, CHILDREN)
    half = codebook.to(dtype=torch.float16)
    assert half.parents.dtype == half.children.dtype == torch.float16
    assert codebook.to("cpu", torch.float32) is codebook
    on_meta = codebook.to("meta")
    assert on_meta.parents.device.type == on_meta.children.device.type == "meta"
    with pytest.raises(ValueError, match=r"parents must be finite, but got NaN or infinity\."):
        Codebook(PARENTS + 1e6, CHILDREN).to(dtype=torch.float16)


@pytest.mark.parametrize(
    ("parents", "children", "error", "message"),
    [
        ([1.0], CHILDREN, TypeError, "parents must be a tensor, but got list."),
        (PARENTS, None, TypeError, "children must be a tensor, but got NoneType."),
        (PARENTS.int(), CHILDREN, TypeError, "parents must be floating point, but got torch.int32"),
        (
            PARENTS[0],
            CHILDREN,
            ValueError,
            "parents must have shape (heads, parents, head_dim) and not be empty, but got (3, 5).",
        ),
        (PARENTS[:, :0], CHILDREN[:, :0], ValueError, "not be empty, but got (2, 0, 5)."),
        (
            PARENTS,
            CHILDREN[..., :3],
            ValueError,
            "children must have shape (2, 3, children, 5) to match parents, but got (2, 3, 4, 3).",
        ),
        (PARENTS, CHILDREN[:1], ValueError, "but got (1, 3, 4, 5)."),
        (PARENTS, PARENTS, ValueError, "but got (2, 3, 5)."),
        (
            PARENTS,
            CHILDREN.half(),
            TypeError,
            "children must have the dtype of parents, torch.float32, but got torch.float16.",
        ),
        (
            PARENTS,
            CHILDREN.to("meta"),
            ValueError,
            "children must be on the device of parents, cpu, but got meta.",
        ),
        (PARENTS / 0, CHILDREN, ValueError, "parents must be finite, but got NaN or infinity."),
        (PARENTS, CHILDREN + math.inf, ValueError, "children must be finite"),
    ],
)
def test_codebook_rejects(parents, children, error, message):
    with pytest.raises(error, match=re.escape(message)):
        Codebook(parents, children)


def random_codebook(heads, num_parents, num_children, head_dim, seed=0, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    parents = torch.randn(heads, num_parents, head_dim, generator=generator, dtype=dtype)
    shape = (heads, num_parents, num_children, head_dim)
    offsets = torch.randn(shape, generator=generator, dtype=dtype)
    return Codebook(parents, parents[:, :, None] + 0.5 * offsets)


def assert_nearest(leaf: Tensor, key: Tensor, codebook: Codebook, tolerance: float) -> None:
    """Each key's leaf is nearest up to `tolerance` in squared distance, and so is its parent."""
    num_leaves = 1 + codebook.num_children
    parents, children = codebook.parents.double(), codebook.children.double()
    key = key.double()
    distance = torch.cdist(key, parents, compute_mode="donot_use_mm_for_euclid_dist").square()
    parent = (leaf // num_leaves)[..., None]
    assert (distance.gather(-1, parent)[..., 0] - distance.amin(dim=-1)).max() <= tolerance

    leaves = torch.cat([parents[:, :, None], children], dim=2)
    cell = leaves[torch.arange(len(leaves))[:, None], parent[..., 0]]
    distance = (cell - key[:, :, None]).square().sum(dim=-1)
    leaf = (leaf % num_leaves)[..., None]
    assert (distance.gather(-1, leaf)[..., 0] - distance.amin(dim=-1)).max() <= tolerance


def test_a_child_is_taken_only_if_strictly_closer():
    codebook = Codebook(torch.tensor([[[0.0], [10.0]]]), torch.tensor([[[[2.0], [-2.0]]] * 2]))
    codebook = Codebook(codebook.parents, codebook.parents[:, :, None] + codebook.children[:, :1])
    key = torch.tensor([[[0.9], [1.0], [1.1], [-1.1], [9.5], [12.5], [100.0]]])
    parent, child = assign(key, codebook)
    assert parent.tolist() == [[0, 0, 0, 0, 1, 1, 1]]
    assert child.tolist() == [[-1, -1, 0, 1, -1, 0, 0]]
    assert assign_leaves(key, codebook).tolist() == [[0, 0, 1, 2, 3, 4, 4]]
    assert parent.dtype == child.dtype == torch.int64
    # Of equal codewords the first takes all keys, and no child that lies on its parent does.
    twins = Codebook(torch.zeros(1, 3, 1), torch.ones(1, 3, 4, 1))
    assert assign_leaves(torch.tensor([[[1.0], [0.0]]]), twins).tolist() == [[1, 0]]
    on_parent = Codebook(codebook.parents, codebook.parents[:, :, None].repeat(1, 1, 3, 1))
    assert (assign(key, on_parent)[1] == -1).all()


@pytest.mark.parametrize(
    ("shape", "num_parents", "num_children"),
    [
        ((2, 3, 100, 40), 16, 4),  # batched
        ((3, 65, 80), 7, 3),  # no batch, nothing a power of two
        ((1, 1, 1, 40), 1, 1),  # one of everything
        ((2, 2, 3, 50, 8), 5, 0),  # two batch dims, flat codebook
    ],
)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_takes_the_nearest_codewords(shape, num_parents, num_children, dtype):
    codebook = random_codebook(shape[-3], num_parents, num_children, shape[-1])
    key = torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(dtype)
    parent, child = assign(key.transpose(-1, -2).contiguous().transpose(-1, -2), codebook)
    assert parent.shape == child.shape == shape[:-1]
    leaf = parent * (1 + num_children) + child + 1
    pairs = zip(leaf.view(-1, *shape[-3:-1]), key.view(-1, *shape[-3:]), strict=True)
    for leaves, keys in pairs:
        assert_nearest(leaves, keys, codebook, 1e-4)
    if num_children > 1:
        assert child.unique().numel() == num_children + 1  # stay and every child


def test_autocast_does_not_lower_the_precision():
    codebook = random_codebook(2, 64, 4, 40)
    key = torch.randn(2, 1000, 40)
    expected = assign(key, codebook)
    with torch.autocast("cpu", torch.bfloat16):
        low_precision = codebook.parents.square().sum(-1)[:, None] / 2 - key @ codebook.parents.mT
        result = assign(key, codebook)
    assert torch.equal(result[0], expected[0])
    assert torch.equal(result[1], expected[1])
    assert not torch.equal(low_precision.argmin(-1), expected[0])


def test_chunks_bound_the_memory_and_do_not_change_the_result(monkeypatch):
    # Products of other shapes round otherwise: in float64 no key is that near to two codewords.
    codebook = random_codebook(2, 64, 4, 8, dtype=torch.float64)
    key = torch.randn(3, 2, 1001, 8, dtype=torch.float64)
    expected = assign_leaves(key, codebook)
    sizes = []

    def recorded_product(*arguments, product=torch.baddbmm, **options):
        result = product(*arguments, **options)
        sizes.append(result.numel())
        return result

    monkeypatch.setattr(assignment, "ELEMENTS_CPU", 50_000)
    monkeypatch.setattr(torch, "baddbmm", recorded_product)
    assert torch.equal(assign_leaves(key, codebook), expected)
    assert len(sizes) > 1
    assert max(sizes) <= 50_000


@pytest.mark.parametrize("shape", [(10, 5), (3, 10, 5), (2, 10, 4)])
def test_assign_rejects_keys_of_another_layer(shape):
    message = f"key must have shape (..., 2, keys, 5) to match the codebook, but got {shape}."
    with pytest.raises(ValueError, match=re.escape(message)):
        assign(torch.zeros(shape), random_codebook(2, 3, 4, 5))
