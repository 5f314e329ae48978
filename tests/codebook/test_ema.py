import re

import pytest
import torch

from avq_diffusers.codebook.assignment import assign, assign_leaves
from avq_diffusers.codebook.codebook import Codebook, project_children
from avq_diffusers.codebook.ema import (
    batch_statistics,
    derive_codebook,
    ema_decay,
    ema_update,
    reassign_dead,
)
from avq_diffusers.codebook.kmeans import fit_codebook

# Two parents on a line with two children each, and keys whose way is plain to see:
# -2 takes the child at -1, 0.25 stays with the parent at 0, both 9s take the child at 9.
PARENTS = torch.tensor([[[0.0], [10.0]]])
CHILDREN = torch.tensor([[[[-1.0], [1.0]], [[9.0], [11.0]]]])
KEYS = torch.tensor([[[-2.0], [0.25], [9.0], [9.0]]])


def line_codebook():
    return Codebook(PARENTS, CHILDREN)


def random_layer(batch=2, heads=3, num_keys=200, head_dim=8, num_parents=6, num_children=4):
    generator = torch.Generator().manual_seed(0)
    shape = (batch, heads, num_keys, head_dim)
    keys = torch.randn(shape, generator=generator, dtype=torch.float64)
    codebook = fit_codebook(keys.movedim(1, 0).flatten(1, 2), num_parents, num_children)
    return keys, codebook


class Learning:
    """A codebook that learns for several steps.

    Args:
        codebook: where the codewords start.
        counts: (H, M0, 1 + C) keys per batch that these codewords stand for; None is none.
    """

    def __init__(self, codebook, counts=None):
        self._codebook = codebook
        codewords = torch.cat([codebook.parents[:, :, None], codebook.children], dim=2)
        self.ema_counts = codewords.new_zeros(codewords.shape[:-1]) if counts is None else counts
        self.ema_key_sums = codewords * self.ema_counts[..., None]

    def codebook(self):
        return self._codebook

    def update(self, key_sums, counts, decay):
        self.ema_key_sums = ema_update(self.ema_key_sums, key_sums, decay)
        self.ema_counts = ema_update(self.ema_counts, counts, decay)
        self._codebook = derive_codebook(self.ema_key_sums, self.ema_counts, self._codebook)

    def reassign_dead(self, keys, **arguments):
        self.ema_key_sums, self.ema_counts, self._codebook = reassign_dead(
            self.ema_key_sums, self.ema_counts, self._codebook, keys, **arguments
        )


def constraint_error(codebook):
    return (codebook.children.mean(2) - codebook.parents).abs().max()


def leaf_error(keys, codebook):
    parent, child = assign(keys, codebook)
    leaves = torch.cat([codebook.parents[:, :, None], codebook.children], dim=2)
    head = torch.arange(codebook.num_heads)[:, None]
    return (keys - leaves[head, parent, child + 1]).square().sum(-1).mean()


def test_batch_statistics_by_hand():
    key_sums, counts = batch_statistics(KEYS, line_codebook())
    assert key_sums[..., 0].tolist() == [[[-1.75, -2.0, 0.0], [18.0, 18.0, 0.0]]]
    assert counts.tolist() == [[[2.0, 1.0, 0.0], [2.0, 2.0, 0.0]]]


def test_one_update_by_hand():
    statistics = Learning(line_codebook())
    statistics.update(*batch_statistics(KEYS, statistics.codebook()), decay=0.75)
    assert statistics.ema_counts.tolist() == [[[0.5, 0.25, 0.0], [0.5, 0.5, 0.0]]]
    assert statistics.ema_key_sums[..., 0].tolist() == [[[-0.4375, -0.5, 0.0], [4.5, 4.5, 0.0]]]
    assert ema_update(torch.tensor(8.0), torch.tensor(4.0), decay=0.75) == 7
    # The children without keys make up for the others: (-2 + 0.25) / 2 and (9 + 9) / 2.
    codebook = statistics.codebook()
    assert codebook.parents[..., 0].tolist() == [[-0.875, 9.0]]
    assert codebook.children[..., 0].tolist() == [[[-2.0, 0.25], [9.0, 9.0]]]


def test_a_known_assignment_is_used():
    keys, codebook = random_layer()
    leaf = assign_leaves(keys, codebook)
    expected = batch_statistics(keys, codebook)
    for result, total in zip(batch_statistics(keys, codebook, leaf), expected, strict=True):
        assert torch.equal(result, total)
    stays = leaf - leaf % (1 + codebook.num_children)
    _, counts = batch_statistics(keys, codebook, stays)
    assert (counts[:, :, 1:] == 0).all()


def test_parent_without_keys_keeps_its_place():
    statistics = Learning(line_codebook())
    statistics.update(*batch_statistics(KEYS[:, :2], statistics.codebook()), decay=0.9)
    codebook = statistics.codebook()
    assert codebook.parents[0, 1] == 10
    assert codebook.children[0, 1, :, 0].tolist() == [9, 11]
    assert codebook.parents[0, 0] == pytest.approx(-0.875)


def test_constraint_holds_after_every_step_and_the_error_falls():
    keys, codebook = random_layer()
    start = Codebook(0.1 * codebook.parents.float(), 0.1 * codebook.children.float())
    keys = keys.float()
    statistics = Learning(start)
    for step in range(30):
        statistics.update(*batch_statistics(keys, statistics.codebook()), decay=0.8)
        assert constraint_error(statistics.codebook()) < 1e-5, step
    assert leaf_error(keys, statistics.codebook()) < 0.9 * leaf_error(keys, start)
    assert leaf_error(keys, statistics.codebook()) < 1.1 * leaf_error(
        keys, codebook.to(dtype=torch.float32)
    )


def test_codewords_do_not_drift_while_their_statistics_underflow():
    statistics = Learning(line_codebook(), torch.full((1, 2, 3), 0.7))
    nothing = batch_statistics(KEYS[:, :0], line_codebook())
    for _ in range(200):
        statistics.update(*nothing, decay=0.3)
        torch.testing.assert_close(statistics.codebook().parents, PARENTS)
        torch.testing.assert_close(statistics.codebook().children, CHILDREN)
    assert (statistics.ema_counts == 0).all()


def solve_constrained_least_squares(means, counts, parent):
    """Stationarity N_c (C_c - M_c) + mu = 0 and sum C_c = C p, as one linear system."""
    num_children = len(counts)
    system = torch.zeros(num_children + 1, num_children + 1, dtype=torch.float64)
    system[:-1, :-1] = counts.diag()
    system[:-1, -1] = system[-1, :-1] = 1
    right = torch.cat([counts[:, None] * means, num_children * parent[None]])
    return torch.linalg.solve(system, right)[:-1]


@pytest.mark.parametrize(
    "counts",
    [
        [1.0, 1.0, 1.0, 1.0],
        [0.5, 3.0, 20.0, 1000.0],
        [1e-6, 1e6, 1.0, 1.0],
        [7.0],
        [5.0, 0.0, 2.0, 1.0],
        [5.0, 0.0, 2.0, 0.0],
        [0.0, 0.0, 0.0, 0.0],
    ],
)
def test_projection_solves_the_weighted_least_squares(counts):
    """Also in the limit of vanishing counts."""
    counts = torch.tensor(counts, dtype=torch.float64)
    generator = torch.Generator().manual_seed(0)
    means = torch.randn(len(counts), 3, generator=generator, dtype=torch.float64)
    parent = torch.randn(3, generator=generator, dtype=torch.float64)
    projected = project_children(means, counts, parent)
    expected = solve_constrained_least_squares(means, counts.clamp(min=1e-9), parent)
    torch.testing.assert_close(projected, expected, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(projected.mean(0), parent)
    assert project_children(means[:0], counts[:0], parent).numel() == 0
    if (counts == 0).any():
        shift = projected - means
        assert (shift[counts > 0] == 0).all()
        massless = shift[counts == 0]
        torch.testing.assert_close(massless, massless[:1].expand_as(massless))


def far_layer():
    """A layer whose last two parents, with all their children, are out of reach of every key."""
    keys, codebook = random_layer()
    shift = torch.zeros(6, 1, dtype=torch.float64)
    shift[4:] = 100
    codebook = Codebook(codebook.parents + shift, codebook.children + shift[:, None])
    return keys, codebook, *batch_statistics(keys, codebook)


def test_dead_parents_move_to_different_keys_with_their_children():
    keys, codebook, key_sums, counts = far_layer()
    assert (counts[:, 4:] == 0).all()
    counts[:, 4:, 1:] = 0.5  # what earlier batches left
    key_sums[:, 4:, 1:] = 50
    new_sums, new_counts, new = reassign_dead(key_sums, counts, codebook, keys, least_count=1.0)

    for head in range(3):
        is_at_key = (new.parents[head, 4:, None] == keys[:, head].flatten(0, 1)).all(-1)
        assert is_at_key.any(1).all()
        assert not (is_at_key[0] & is_at_key[1]).any()
    old_offsets = codebook.children[:, 4:] - codebook.parents[:, 4:, None]
    torch.testing.assert_close(new.children[:, 4:] - new.parents[:, 4:, None], old_offsets)
    assert (new_counts[:, 4:, 0] == 1).all()
    assert (new_counts[:, 4:, 1:] == 0).all()
    assert (new_sums[:, 4:, 1:] == 0).all()
    assert constraint_error(new) < 1e-10
    assert leaf_error(keys, new) < leaf_error(keys, codebook)


def test_only_children_of_dead_parents_move_along():
    """Catches children of other parents that move as well."""
    keys, codebook, key_sums, counts = far_layer()
    assert (counts[:, :4, 0] > 1).all()
    counts[:, :4, 1:3] = 0  # of two children without keys, the second stays
    key_sums[:, :4, 1:3] = 0
    new_sums, new_counts, new = reassign_dead(key_sums, counts, codebook, keys, least_count=1.0)
    assert (new.children[:, 4:] - codebook.children[:, 4:]).abs().min() > 50
    living = derive_codebook(new_sums, new_counts, codebook)
    assert torch.equal(new.children[:, :4], living.children[:, :4])
    assert torch.equal(new.parents, living.parents)


def test_one_dead_child_of_a_cell_moves_to_a_key_of_the_cell():
    keys, codebook = random_layer()
    children = codebook.children.clone()
    children[0, 2, [1, 3]] += 100
    codebook = Codebook(codebook.parents, children)
    key_sums, counts = batch_statistics(keys, codebook)
    counts[counts > 0] += 1  # only the children above are dead
    new_sums, new_counts, _ = reassign_dead(key_sums, counts, codebook, keys, least_count=1.0)

    changed = (new_counts != counts).nonzero().tolist()
    assert changed == [[0, 2, 2]]
    assert new_counts[0, 2, 2] == counts[0, 2, 0] / 5
    target = new_sums[0, 2, 2] / new_counts[0, 2, 2]
    in_cell = keys[:, 0][assign(keys, codebook)[0][:, 0] == 2]
    assert (in_cell - target).norm(dim=-1).min() < 1e-10


def test_dead_codewords_are_drawn_by_squared_distance():
    """Catches draws by distance, from all keys alike, or of the best represented keys: of keys at
    1 and at 3 from their parent, nine in ten parents and children move to the one at 3."""
    heads = 2000
    parents = torch.tensor([0.0, 1000.0]).expand(heads, 2)[..., None]
    children = torch.tensor([[500.0], [1001.0]]).expand(heads, 2, 1)[..., None]
    keys = torch.tensor([0.0, 0.0, 1.0, 3.0]).expand(heads, 4)[..., None]
    counts = torch.tensor([[8.0, 0.0], [0.0, 0.0]]).expand(heads, 2, 2)
    key_sums = torch.zeros(heads, 2, 2, 1)
    codebook = Codebook(parents, children)
    key_sums, counts, _ = reassign_dead(key_sums, counts, codebook, keys, least_count=1.0)
    means = (key_sums / counts[..., None])[..., 0]
    for moved in (means[:, 1, 0], means[:, 0, 1]):
        is_far = moved == 3
        assert (is_far | (moved == 1)).all()
        # Five standard deviations of the share.
        assert abs(is_far.float().mean() - 0.9) < 5 * (0.9 * 0.1 / heads) ** 0.5


def test_what_was_moved_is_alive_and_the_living_stay():
    """Catches a moved codeword whose count is below the least, or at it and taken for dead, and
    a child that moves to another cell's key where the batch has none of its own."""
    keys, codebook, key_sums, counts = far_layer()
    counts[:, 0] = counts.new_tensor([2.0, 2.0, 0.0, 0.0, 0.0])  # an average leaf is below 1
    key_sums[:, 0] = 2 * codebook.parents[:, 0, None]
    counts[:, 5] = counts.new_tensor([9.0, 9.0, 0.0, 0.0, 0.0])  # of earlier batches
    key_sums[:, 5] = 9 * codebook.parents[:, 5, None]
    first = reassign_dead(key_sums, counts, codebook, keys, least_count=1.0)
    was_moved = first[1] != counts
    assert was_moved[:, 4, 0].all()
    assert (was_moved[:, 0].sum(-1) == 1).all()
    assert torch.equal(first[0][:, 5], key_sums[:, 5])
    assert torch.equal(first[0][~was_moved], key_sums[~was_moved])
    again = reassign_dead(*first, keys, least_count=1.0, seed=1)
    for before, after in zip(first[:2], again[:2], strict=True):
        assert torch.equal(before[was_moved], after[was_moved])
    parents = [
        reassign_dead(key_sums, counts, codebook, keys, least_count=1.0, seed=seed)[2].parents
        for seed in (0, 1)
    ]
    assert torch.equal(parents[0], first[2].parents)
    assert not torch.equal(*parents)


def test_where_there_are_fewer_keys_than_dead_parents_the_others_stay():
    """Catches training that ends at a small micro-batch, and two parents at one key."""
    keys, codebook, key_sums, counts = far_layer()
    few, counts = keys[:1, :, :3], torch.zeros_like(counts)
    _, counts, new = reassign_dead(key_sums, counts, codebook, few, least_count=1.0)
    is_moved = counts[:, :, 0] > 0
    for head in range(3):
        moved = new.parents[head][is_moved[head]]
        assert torch.equal(moved.sort(0).values, few[0, head].sort(0).values)
    assert torch.equal(new.parents[~is_moved], codebook.parents[~is_moved])


def test_refusals():
    with pytest.raises(ValueError, match=re.escape("key must have shape (..., 1, keys, 1)")):
        batch_statistics(torch.zeros(2, 4, 1), line_codebook())


def test_decay_warms_up_along_a_cosine():
    assert ema_decay(0, 100) == pytest.approx(0.9)
    assert ema_decay(25, 100) == pytest.approx(0.945 - 0.045 * 0.5**0.5)
    assert ema_decay(50, 100) == pytest.approx(0.945)
    assert ema_decay(100, 100) == ema_decay(10_000, 100) == ema_decay(0, 0) == 0.99
