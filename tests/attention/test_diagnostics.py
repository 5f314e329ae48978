"""Diagnostics on codebooks whose figures are known or can be counted."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from cases import make_case
from torch import Tensor

from avq_diffusers.attention import diagnostics, reference
from avq_diffusers.attention.diagnostics import (
    active_ratio,
    attention_mass,
    captured_share,
    leaf_counts,
    perplexity,
)
from avq_diffusers.codebook import assignment
from avq_diffusers.codebook.codebook import Codebook, constraint_error

PARENTS = torch.tensor([[[0.0, 0.0], [10.0, 0.0]]])
CHILDREN = PARENTS[:, :, None] + torch.tensor([[0.0, 2.0], [0.0, -2.0]])
CODEBOOK = Codebook(PARENTS, CHILDREN)

capture, refined_parents, commitment_loss, quantization_error = (
    partial(function, codewords="stored")
    for function in (
        diagnostics.capture,
        diagnostics.refined_parents,
        diagnostics.commitment_loss,
        diagnostics.quantization_error,
    )
)


@pytest.mark.parametrize("order", [None, torch.arange(49, -1, -1)])
@pytest.mark.parametrize("elements", [1, 2 * 16 * 2 * 2 * 6])
def test_capture_is_the_exact_attention_on_refined_cells(order, elements, monkeypatch):
    """Also where tiles are computed one or two at a time, and a last one that is not full."""
    monkeypatch.setattr(assignment, "ELEMENTS_CPU", elements)
    query, key, _, codebook = make_case()
    query = 2 * query
    options = {"query_tile": 16, "query_order": order, "scale": 0.4}
    refined = refined_parents(query, key, codebook, 2, **options)
    captured = captured_share(attention_mass(query, key, codebook, **options), refined)
    torch.testing.assert_close(capture(query, key, codebook, 2, **options), captured)

    parent, _ = reference.assign(key, codebook.parents, codebook.children)
    counts = F.one_hot(parent, 6).sum(dim=2).double()
    attention = (0.4 * query @ key.mT).softmax(dim=-1)
    expected = torch.zeros(2).double()
    for tile in torch.arange(50).split(16) if order is None else order.split(16):
        importance = reference.importance(0.4 * query[:, :, tile], codebook.parents, counts)
        refined = importance.topk(2).indices
        for b in range(2):
            for h in range(2):
                for p in refined[b, h]:
                    expected[h] += attention[b, h, tile][:, parent[b, h] == p].sum()
    torch.testing.assert_close(captured, expected / (2 * 50))


def test_capture_of_all_parents_is_one_and_of_none_is_zero():
    query, key, _, codebook = make_case(dtype=torch.float16)
    torch.testing.assert_close(capture(query, key, codebook, 6), torch.ones(2))
    assert (capture(query, key, codebook, 0) == 0).all()
    rising = torch.stack([capture(query, key, codebook, p) for p in range(7)])
    assert (rising.diff(dim=0) > 0).all()


def test_arguments_are_refused_as_by_attention():
    """Catches figures of parents that are counted from the end, or of heads that are repeated."""
    query, key, _, codebook = make_case()
    others = CODEBOOK, "codebook must have the number of heads of query, 2"
    for metric in (commitment_loss, quantization_error, leaf_counts):
        with pytest.raises(ValueError, match=others[1]):
            metric(key, others[0])
    for function in (capture, refined_parents):
        with pytest.raises(ValueError, match=others[1]):
            function(query, key, others[0], 2)
        with pytest.raises(ValueError, match="num_refined must be at least 0, but got -1"):
            function(query, key, codebook, -1)
    with pytest.raises(ValueError, match="query_tile must be at least 1, but got 0"):
        attention_mass(query, key, codebook, query_tile=0)
    of_keys = {"num_parents": 4, "num_children": 2}
    for options in ({"threshold": 0.1}, {"num_refined": 2}):
        assert torch.equal(
            leaf_counts(key, None, **of_keys, **options), leaf_counts(key, None, **of_keys)
        )


def test_commitment_loss_is_the_squared_distance_to_the_leaf():
    # Distances 1 to a child, 0.5 to the parent, 0 to a child.
    key = torch.tensor([[[[0.0, 3.0], [10.5, 0.0], [10.0, -2.0]]]], requires_grad=True)
    learned = [x.clone().requires_grad_() for x in (PARENTS, CHILDREN)]
    loss = commitment_loss(key, Codebook(*learned))
    torch.testing.assert_close(loss, torch.tensor([(1 + 0.25) / 3]))
    gradient, *of_codebook = torch.autograd.grad(loss.sum(), (key, *learned), allow_unused=True)
    assert of_codebook == [None, None]
    expected = torch.tensor([[[[0.0, 1.0], [0.5, 0.0], [0.0, 0.0]]]]) * 2 / 3
    torch.testing.assert_close(gradient, expected)


def test_figures_are_per_head_over_all_leading_dimensions():
    _, key, _, codebook = make_case(batch=3)
    stacked = key.transpose(0, 1).flatten(1, 2)
    for figure in (commitment_loss, quantization_error, leaf_counts):
        torch.testing.assert_close(figure(key, codebook), figure(stacked, codebook))
    head = Codebook(codebook.parents[1:], codebook.children[1:])
    torch.testing.assert_close(
        commitment_loss(key[:, 1:], head), commitment_loss(key, codebook)[1:]
    )


def test_quantization_error_is_relative_to_one_codeword_at_the_mean():
    _, key, _, codebook = make_case()
    mean = key.mean(dim=(0, 2))[:, None]
    one = Codebook(mean, mean[:, :, None][:, :, :0])
    torch.testing.assert_close(quantization_error(key, one), torch.ones(2).double())
    assert (quantization_error(key, codebook) < 0.7).all()
    torch.testing.assert_close(
        quantization_error(7 * key, Codebook(7 * codebook.parents, 7 * codebook.children)),
        quantization_error(key, codebook),
    )
    every_key = Codebook(key[0], key[0][:, :, None][:, :, :0])
    assert (quantization_error(key[:1], every_key) < 1e-12).all()
    equal = torch.full_like(key, 0.1)
    assert (diagnostics.quantization_error(equal, None, num_parents=4) == 0).all()


def test_leaf_counts():
    key = torch.tensor([[[0.0, 3.0], [0.0, 2.5], [10.5, 0.0], [10.0, -2.0], [0.1, 0.0]]])
    assert leaf_counts(key, CODEBOOK).tolist() == [[[1, 2, 0], [1, 0, 1]]]
    flat = Codebook(PARENTS, CHILDREN[:, :, :0])
    assert leaf_counts(key, flat).tolist() == [[[3], [2]]]


def test_active_ratio_counts_parents_by_their_whole_cell():
    # 1200 keys, 6 codewords: 200 is a fair share, 2 is not above a hundredth of it and 3 is.
    counts = torch.tensor([[0, 3, 2], [0, 0, 1195]])
    assert active_ratio(counts) == pytest.approx(4 / 6)
    assert active_ratio(torch.stack([counts, 7 * counts])).tolist() == [4 / 6, 4 / 6]
    assert active_ratio(torch.tensor([[600], [598], [2]])) == pytest.approx(2 / 3)


def test_perplexity_is_the_number_of_leaves_in_even_use():
    """Fails for one figure over heads, base 2, or the log of an empty leaf."""
    counts = torch.tensor([[[5, 5, 0], [0, 5, 0]], [[0, 0, 0], [9, 0, 0]], [[1, 0, 0], [3, 0, 0]]])
    uneven = 4 / 27**0.25  # 1 / (p^p q^q) for p = 1/4
    assert perplexity(counts).tolist() == pytest.approx([3, 1, uneven])


def test_constraint_error_in_distances_of_a_child():
    assert constraint_error(CODEBOOK).tolist() == [0.0]
    shifted = CHILDREN.clone()
    shifted[0, 1, :, 0] += 1.0
    distance = ((4 + 4 + 5 + 5) / 4) ** 0.5
    assert constraint_error(Codebook(PARENTS, shifted)).item() == pytest.approx(1 / distance)
    two_heads = Codebook(PARENTS.repeat(2, 1, 1), torch.cat([CHILDREN, shifted]))
    assert constraint_error(two_heads).tolist() == pytest.approx([0.0, 1 / distance])
    assert constraint_error(Codebook(PARENTS, CHILDREN[:, :, :0])).tolist() == [0.0]


def own_case() -> tuple[Tensor, Tensor, dict, Codebook]:
    """Queries, keys, options without a codebook, and the codewords that the definition takes."""
    query, key, _, _ = make_case(batch=1)
    order = torch.randperm(50, generator=torch.Generator().manual_seed(2))
    options = {"num_parents": 6, "num_children": 3, "query_order": order}
    parents = reference.spaced_keys(key, 6, order)
    children = reference.cell_keys(key, reference.nearest(key, parents), parents, 3)
    return query, key, options, Codebook(parents[0], children[0])


def test_metrics_without_a_codebook_are_those_of_the_codewords_that_it_takes():
    """Catches codewords that ignore the query order or the sizes, and other representatives."""
    query, key, options, taken = own_case()
    found = {"codebook": None, **options}
    expected = {"codebook": taken, "query_order": options["query_order"]}
    tiles = {"query": query, "key": key, "query_tile": 16}
    mass = attention_mass(**tiles, **found)
    torch.testing.assert_close(mass, attention_mass(**tiles, **expected))
    for function in (diagnostics.capture, diagnostics.refined_parents):
        tiles["num_refined"] = 2
        assert function(**tiles, **found).equal(function(**tiles, **expected))
    assert leaf_counts(key, **found).equal(leaf_counts(key, taken))
    for function in (diagnostics.commitment_loss, diagnostics.quantization_error):
        torch.testing.assert_close(function(key, **found), function(key, **expected))
        # A mean is closer to its keys than a key is.
        assert (function(key, **found) < function(key, taken, codewords="stored")).all()


def test_distances_to_means_by_hand():
    """Catches distances to codewords, and to the parent's mean over its whole cell."""
    key = torch.tensor([[[[0.0], [1.0], [3.0]]]], requires_grad=True)
    codebook = Codebook(torch.tensor([[[0.4]]]), torch.tensor([[[[0.0], [2.0]]]]))
    # 0 goes to the child at 0; 1 stays (0.6 < 1); 3 goes to the child at 2. All are their means.
    assert diagnostics.commitment_loss(key, codebook).tolist() == [0.0]
    # The child at 2 is further than the parent: 0 and 1 stay, around 0.5.
    codebook = Codebook(codebook.parents, codebook.children[:, :, 1:])
    loss = diagnostics.commitment_loss(key, codebook)
    torch.testing.assert_close(loss, torch.tensor([0.5 / 3]))
    (gradient,) = torch.autograd.grad(loss.sum(), key)
    torch.testing.assert_close(gradient.flatten(), torch.tensor([-1.0, 1.0, 0.0]) / 3)


def test_metrics_choose_parents_as_attention_does():
    """Catches metrics of parents that are chosen by importance alone. Of two queries, the first
    gives the narrow cell 200 times the attention of the wide one, of 262 times its spread."""
    key = torch.tensor([10, 10.25, 9.75, 10, 10, 10.25, 9.75, 10, 0, 4, -4, 1])[None, None, :, None]
    query = torch.tensor([0.472, 0.6])[None, None, :, None]
    children = torch.tensor([[[[10.25], [9.75]], [[4], [-4]]]])
    codebook = Codebook(torch.tensor([[[10.0], [0.0]]]), children)
    options = {"query_tile": 1, "scale": 1.0}
    for codewords, expected in (("means", [[0, 1], [1, 0]]), ("stored", [[1, 0], [1, 0]])):
        chosen = {"codewords": codewords, **options}
        refined = diagnostics.refined_parents(query, key, codebook, 1, **chosen)
        assert refined[0, 0].int().tolist() == expected
    first = query[:, :, :1]
    attention = (first @ key.mT).softmax(dim=-1)[0, 0, 0]
    captured = capture(first, key, codebook, 1, codewords="means", **options)
    torch.testing.assert_close(captured, attention[8:].sum()[None])


def test_of_cells_without_spread_the_first_is_refined():
    """Catches NaN, and a choice by importance where every choice is exact."""
    numbers = torch.tensor([1.0, 1.0, 9.0, 9.0])
    key = numbers[None, None, :, None].expand(-1, -1, -1, 2)
    refined = diagnostics.refined_parents(key, key, None, 1, num_parents=2, num_children=2)
    assert refined.tolist() == [[[[True, False]]]]
