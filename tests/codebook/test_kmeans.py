import re

import pytest
import torch
from sklearn.cluster import KMeans

from avq_diffusers.codebook import kmeans
from avq_diffusers.codebook.assignment import assign
from avq_diffusers.codebook.codebook import project_children
from avq_diffusers.codebook.kmeans import fit_codebook


def gaussian_mixture(heads, num_keys, head_dim, num_components, seed=0):
    generator = torch.Generator().manual_seed(seed)
    means = 3 * torch.randn(heads, num_components, head_dim, generator=generator)
    component = torch.randint(num_components, (num_keys,), generator=generator)
    return means[:, component] + torch.randn(heads, num_keys, head_dim, generator=generator)


def squared_errors(key, codebook):
    """Squared distance of each key to its parent and to its leaf: two (..., H, N)."""
    parent, child = assign(key, codebook)
    head = torch.arange(codebook.num_heads)[:, None]
    codewords = codebook.leaves.double()
    return tuple(
        (key.double() - codewords[head, parent, leaf]).square().sum(-1)
        for leaf in (torch.zeros_like(child), child + 1)
    )


@pytest.mark.parametrize("num_components", [24, 100])
def test_inertia_is_that_of_scikit_learn(num_components):
    # Both find local minima; a mean over keys and seeds tells worse from unlucky.
    ratios = []
    for seed in range(3):
        keys = gaussian_mixture(2, 2000, 8, num_components, seed)
        parent_error, _ = squared_errors(keys, fit_codebook(keys, 24, 0, seed=seed))
        for head in range(2):
            oracle = KMeans(24, n_init=4, random_state=seed).fit(keys[head].numpy())
            ratios.append(parent_error[head].sum() / oracle.inertia_)
    assert sum(ratios) / len(ratios) < 1.02


def test_children_lower_the_error_below_parents_and_below_flat_k_means():
    keys = gaussian_mixture(heads=2, num_keys=3000, head_dim=16, num_components=60)
    parent_error, leaf_error = squared_errors(keys, fit_codebook(keys, 16, 4))
    flat_error, _ = squared_errors(keys, fit_codebook(keys, 16, 0))
    assert leaf_error.sum() < 0.6 * parent_error.sum()
    assert leaf_error.sum() < 0.6 * flat_error.sum()


def test_children_are_used_even_where_every_key_is_far_from_every_other():
    keys = torch.randn(2, 2000, 40, generator=torch.Generator().manual_seed(0))
    _, child = assign(keys, fit_codebook(keys, 16, 8))
    assert (child == -1).float().mean() < 0.3


def test_same_seed_same_codebook():
    keys = gaussian_mixture(2, 1000, 8, 10)
    first, again, other = (fit_codebook(keys, 16, 4, seed=seed) for seed in (3, 3, 4))
    assert torch.equal(first.parents, again.parents)
    assert torch.equal(first.children, again.children)
    assert not torch.equal(first.parents, other.parents)
    with torch.autocast("cpu", torch.bfloat16):  # of a training loop
        again = fit_codebook(keys, 16, 4, seed=3)
    assert torch.equal(first.parents, again.parents)
    assert torch.equal(first.children, again.children)


@pytest.mark.parametrize(("distinct", "copies", "parents"), [(5, 20, 16), (32, 1, 32), (1, 20, 4)])
def test_as_many_parents_as_distinct_keys_hold_every_key(distinct, copies, parents):
    keys = torch.randn(2, distinct, 8).repeat(1, copies, 1)
    state = torch.get_rng_state()
    codebook = fit_codebook(keys, parents, 3)
    assert torch.equal(torch.get_rng_state(), state)
    assert max(error.max() for error in squared_errors(keys, codebook)) < 1e-10
    assert copies > 1 or (assign(keys, codebook)[1] == -1).all()


def test_empty_centroids_move_to_the_farthest_keys():
    """Catches centroids that move to keys which are represented already, or share one."""
    keys = torch.tensor([0.0, 0.0, 0.0, 10.0, 0.0, 20.0])[None, :, None]
    centroids = kmeans._lloyd(keys, torch.zeros(1, 3, 1), num_iterations=1)
    assert centroids[0, :, 0].tolist() == [5, 20, 10]


def test_a_child_without_keys_moves_to_the_farthest_key():
    """Catches a move to a key that is represented already, and one of no weight in the projection.

    Both children start at a tenth of a key of theirs, and the one closer to the parent gets none.
    """
    keys = torch.tensor([1.0] * 10 + [1.05], dtype=torch.float64)[None, :, None]
    generator = torch.Generator().manual_seed(0)
    offsets = kmeans._fit_child_offsets(keys, keys.new_zeros(1, 1, 1), 2, 1, generator)
    means = torch.tensor([11.05 / 11, 1.05], dtype=torch.float64)[:, None]
    counts = torch.tensor([11, 1])
    expected = project_children(means, counts, keys.new_zeros(1))
    found = offsets.flatten().sort().values
    torch.testing.assert_close(found, expected.flatten().sort().values)


def test_children_start_towards_different_keys_far_from_their_parent():
    """Catches draws from all keys alike, and two children drawn to one key."""
    keys = torch.zeros(50, 100, 2, dtype=torch.float64)
    keys[:, 20, 0], keys[:, 70, 1] = 8, -8
    codebook = fit_codebook(keys, 1, 2, num_iterations=0)
    torch.testing.assert_close(codebook.parents, torch.zeros_like(codebook.parents))
    # A tenth of the way, in either order.
    expected = torch.tensor([[0.0, -0.8], [0.8, 0.0]], dtype=torch.float64).expand(50, 2, 2)
    torch.testing.assert_close(codebook.children[:, 0].sort(dim=1).values, expected)


def test_spare_children_of_small_cells_are_never_taken():
    # Cells of two keys, four children: two children find no key.
    pairs = torch.tensor([[0.0, 1.0], [0.0, -1.0]])
    centers = torch.tensor([[0.0, 0.0], [50.0, 0.0], [0.0, 50.0]])
    keys = (centers[:, None] + pairs).flatten(0, 1)[None]
    codebook = fit_codebook(keys, 3, 4)
    _, leaf_error = squared_errors(keys, codebook)
    assert leaf_error.max() < 1e-10
    assert (codebook.children.mean(2) - codebook.parents).abs().max() < 1e-5
    offsets = (codebook.children - codebook.parents[:, :, None]).norm(dim=-1)
    assert (offsets < 1e-5).sum(dim=2).tolist() == [[2, 2, 2]]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_fits_in_fp32_or_wider(dtype):
    expected = torch.promote_types(dtype, torch.float32)
    codebook = fit_codebook(torch.randn(1, 64, 8).to(dtype), 4, 2)
    assert codebook.parents.dtype == codebook.children.dtype == expected


KEYS = torch.zeros(1, 9, 2)


@pytest.mark.parametrize(
    ("keys", "arguments", "error", "message"),
    [
        ([1.0], {}, TypeError, "keys must be a floating-point tensor, but got list."),
        (KEYS.int(), {}, TypeError, "tensor, but got torch.int32."),
        (KEYS[0], {}, ValueError, "keys must have shape (heads, keys, head_dim) and"),
        (KEYS[:, :0], {}, ValueError, "not be empty, but got (1, 0, 2)."),
        (KEYS / 0, {}, ValueError, "keys must be finite, but got NaN"),
        (KEYS[:, :3], {}, ValueError, "at least num_parents = 4 keys per head, but got 3."),
        (KEYS, {"num_parents": 0}, ValueError, "num_parents must be at least 1, but got 0."),
        (KEYS, {"num_children": -1}, ValueError, "num_children must be at least 0, but got -1."),
        (KEYS, {"num_iterations": -1}, ValueError, "num_iterations must be at least 0, but got -1"),
        (KEYS, {"seed": 1.5}, TypeError, "seed must be an int, but got 1.5"),
    ],
)
def test_fit_codebook_rejects(keys, arguments, error, message):
    arguments = {"num_parents": 4, "num_children": 2} | arguments
    with pytest.raises(error, match=re.escape(message)):
        fit_codebook(keys, **arguments)
