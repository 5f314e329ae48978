"""Lloyd updates by kernels against the definition in float64, without a GPU in the interpreter.

Keys are small integers, so that every distance to a first parent is exact and ties are real.
"""

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from avq_diffusers.attention import reference
from avq_diffusers.attention.spec import Spec
from avq_diffusers.attention.triton import updates

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
HALF, SINGLE = torch.float16, torch.float32
# Triton's interpreter multiplies the bits of bfloat16 numbers as integers.
BRAIN = pytest.param(torch.bfloat16, marks=pytest.mark.gpu)

pytestmark = pytest.mark.usefixtures("uninitialized_memory_is_nan")


def updated_parents(
    key: Tensor, order: Tensor | None, *, num_parents: int, num_updates: int
) -> Tensor:
    sizes = {"num_parents": num_parents, "num_children": 0, "num_refined": 0, "exact_keys": 0}
    others = {"num_updates": num_updates, "query_tile": 128, "means": True, "scale": 1.0}
    return updates.updated_parents(key, order, Spec(**sizes, **others))


def integer_keys(shape: tuple[int, int, int, int], dtype: torch.dtype) -> Tensor:
    """(B, H, S, D), a part of a fused projection."""
    batch, heads, num_keys, head_dim = shape
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(-3, 4, (batch, num_keys, 2, heads, head_dim), generator=generator)
    return tokens.to(DEVICE, dtype)[:, :, 1].transpose(1, 2)


def lloyd(key: Tensor, parents: Tensor) -> Tensor:
    """Means of the keys of each parent, float64."""
    one_hot = torch.nn.functional.one_hot(reference.nearest(key, parents), parents.shape[2])
    counts = one_hot.sum(2)[..., None]
    means = one_hot.double().mT @ key / counts.clamp(min=1)
    return means.where(counts > 0, parents)


@pytest.mark.parametrize("dtype", [HALF, SINGLE, BRAIN])
@pytest.mark.parametrize(
    ("shape", "num_parents"),
    [
        pytest.param((2, 2, 600, 40), 64, id="three chunks of keys"),
        pytest.param((1, 2, 90, 16), 9, id="padded parents"),
        pytest.param((1, 1, 300, 24), 150, id="parents above a tile"),
        pytest.param((1, 1, 70, 128), 1, id="one parent"),
        pytest.param((1, 1, 20, 8), 30, id="more parents than keys"),
    ],
)
def test_parents_move_to_the_means_of_their_keys(shape, num_parents, dtype):
    """Catches lost chunks, keys of padding, ties to a higher parent and divided empty cells."""
    key = integer_keys(shape, dtype)
    order = torch.randperm(shape[2], generator=torch.Generator().manual_seed(1)).to(DEVICE)
    found = updated_parents(key, order, num_parents=num_parents, num_updates=1)
    first = reference.spaced_keys(key.double(), num_parents, order)
    expected = lloyd(key.double(), first)
    assert (found.shape, found.dtype) == (first.shape, dtype)
    assert found.is_contiguous()
    tolerance = torch.finfo(dtype).eps
    torch.testing.assert_close(found.double(), expected, rtol=tolerance, atol=tolerance / 100)
    assert not torch.allclose(found.double(), first, rtol=0.1) or num_parents > shape[2]


def test_second_update_starts_from_the_first():
    key = integer_keys((1, 2, 300, 40), HALF)
    once, twice = (
        updated_parents(key, None, num_parents=20, num_updates=number) for number in (1, 2)
    )
    distances = torch.cdist(key.double(), once.double())
    nearest, next_nearest = distances.topk(2, largest=False).values.unbind(-1)
    assert (next_nearest - nearest).min() > 1e-5  # else rounding could decide
    expected = lloyd(key.double(), once.double())
    torch.testing.assert_close(twice.double(), expected, rtol=1e-3, atol=1e-5)
    assert (twice.double() - once.double()).norm() > 0.1 * once.double().norm()


def test_parent_without_keys_stays():
    """Of equal parents the first takes all keys."""
    key = integer_keys((1, 1, 64, 16), HALF).clone()
    key[:, :, 32:] = key[:, :, :32]
    found = updated_parents(key, None, num_parents=64, num_updates=1)
    assert torch.equal(found[:, :, 32:], key[:, :, 32:])


def test_layout_and_repetition_keep_the_bits():
    key = integer_keys((2, 2, 520, 40), HALF) / 7
    first = updated_parents(key, None, num_parents=16, num_updates=2)
    for again in (key, key.contiguous()):
        assert torch.equal(updated_parents(again, None, num_parents=16, num_updates=2), first)
