"""Identities that follow from the definition, for every backend, through the public operation."""

import pytest
import torch
import torch.nn.functional as F
from cases import make_case, relative_error, stored_attention
from torch import Tensor

from avq_diffusers.attention import reference
from avq_diffusers.codebook.codebook import Codebook

EXACT = 1e-12


@pytest.fixture(params=["reference", "torch"])
def backend(request):
    return request.param


def nearest_codewords(key: Tensor, codebook: Codebook) -> tuple[Tensor, Tensor, Tensor]:
    """Parent index, parent codeword and leaf codeword of each key, by sorting distances."""
    parent = torch.cdist(
        key, codebook.parents[None], compute_mode="donot_use_mm_for_euclid_dist"
    ).argmin(dim=-1)
    head = torch.arange(key.shape[1])[:, None]
    coarse = codebook.parents[head, parent]
    candidates = torch.cat([coarse[..., None, :], codebook.children[head, parent]], dim=-2)
    nearest = (candidates - key[..., None, :]).norm(dim=-1).argmin(dim=-1)
    fine = candidates.gather(-2, nearest[..., None, None].expand_as(candidates[..., :1, :]))
    return parent, coarse, fine[..., 0, :]


@pytest.mark.parametrize(
    ("children", "num_refined", "partly"), [(3, 6, 5), (3, 0, 1), (0, 0, None)]
)
def test_refining_all_parents_or_none_is_attention_over_codewords(
    backend, children, num_refined, partly
):
    """Over leaf codewords, or over parent codewords."""
    query, key, value, codebook = make_case(children=children)
    _, coarse, fine = nearest_codewords(key, codebook)
    expected = F.scaled_dot_product_attention(query, fine if num_refined else coarse, value)

    def error(num_refined):
        options = {"num_refined": num_refined, "backend": backend}
        return relative_error(stored_attention(query, key, value, codebook, **options), expected)

    assert error(num_refined) < EXACT
    assert partly is None or error(partly) > 1e-3


@pytest.mark.parametrize("level", ["parents", "children"])
def test_a_codebook_that_holds_every_key_is_exact_attention(backend, level):
    query, key, value, _ = make_case(batch=1, queries=24)
    if level == "parents":
        codebook = Codebook(key[0], key.new_empty(2, 24, 0, 8))
        num_refined = 0
    else:
        # Four far apart cells, six keys each: the keys themselves are the children.
        centres = 100 * torch.eye(8, dtype=key.dtype)[:4]
        key = key + centres.repeat_interleave(6, dim=0)
        codebook = Codebook(centres.expand(2, -1, -1), key[0].unflatten(1, (4, 6)))
        num_refined = 4
    expected = F.scaled_dot_product_attention(query, key, value)
    output = stored_attention(query, key, value, codebook, num_refined=num_refined, backend=backend)
    assert relative_error(output, expected) < EXACT


def test_refined_parents_are_those_with_most_attention_in_the_tile(backend):
    query, key, value, codebook = make_case(queries=40)
    parent, coarse, fine = nearest_codewords(key, codebook)
    expected = torch.empty_like(query)
    for start in range(0, 40, 16):
        tile = query[:, :, start : start + 16]
        attention = (tile @ coarse.mT / 8**0.5).softmax(dim=-1)
        mass = (attention.sum(dim=-2)[..., None] * F.one_hot(parent, 6)).sum(dim=-2)
        refined = mass.topk(2).indices
        is_refined = (parent[..., None] == refined[..., None, :]).any(dim=-1, keepdim=True)
        expected[:, :, start : start + 16] = F.scaled_dot_product_attention(
            tile, torch.where(is_refined, fine, coarse), value
        )
    output = stored_attention(
        query, key, value, codebook, num_refined=2, query_tile=16, backend=backend
    )
    assert relative_error(output, expected) < EXACT
    other_tiles = stored_attention(
        query, key, value, codebook, num_refined=2, query_tile=20, backend=backend
    )
    assert relative_error(other_tiles, expected) > 1e-3


def test_of_equally_important_parents_the_lower_index_is_refined(backend):
    # Mirrored parents and mirrored queries: both parents get the same mass, bit for bit.
    parents = torch.tensor([[[2.0, 0.0], [-2.0, 0.0]]]).double()
    children = parents[:, :, None] + torch.tensor([[0.0, 1.0], [0.0, -1.0]]).double()
    key = children.view(1, 1, 4, 2)
    query = torch.tensor([[[[0.5, 1.0], [-0.5, 1.0]]]]).double()
    value = torch.arange(8.0).double().view(1, 1, 4, 2)
    codebook = Codebook(parents, children)

    importance = reference.importance(query, parents, torch.tensor([[[2.0, 2.0]]]), 1.0)
    assert importance[0, 0, 0] == importance[0, 0, 1]

    only_first = torch.stack([*key[0, 0, :2], *parents[0, [1, 1]]])[None, None]
    expected = F.scaled_dot_product_attention(query, only_first, value)
    output = stored_attention(query, key, value, codebook, num_refined=1, backend=backend)
    assert relative_error(output, expected) < EXACT


def test_a_key_as_close_to_a_child_as_to_its_parent_stays(backend):
    parents = torch.tensor([[[0.0, 0.0]]]).double()
    children = torch.tensor([[[[2.0, 0.0], [0.0, 4.0]]]]).double()
    key = torch.tensor([[[[1.0, 0.0], [0.0, 3.0]]]]).double()
    query = torch.tensor([[[[1.0, -1.0]]]]).double()
    value = torch.eye(2).double()[None, None]
    quantized = torch.tensor([[[[0.0, 0.0], [0.0, 4.0]]]]).double()
    expected = F.scaled_dot_product_attention(query, quantized, value)
    output = stored_attention(
        query, key, value, Codebook(parents, children), num_refined=1, backend=backend
    )
    assert relative_error(output, expected) < EXACT


def test_constant_values_give_constant_output(backend):
    query, key, value, codebook = make_case()
    value = value[:, :, :1].expand_as(value)
    output = stored_attention(query, key, value, codebook, num_refined=2, backend=backend)
    assert relative_error(output, value) < EXACT


def test_output_lies_between_the_values_of_each_channel(backend):
    query, key, value, codebook = make_case()
    output = stored_attention(10 * query, key, value, codebook, num_refined=2, backend=backend)
    assert (output >= value.amin(dim=2, keepdim=True) - EXACT).all()
    assert (output <= value.amax(dim=2, keepdim=True) + EXACT).all()


def test_the_order_of_keys_does_not_matter(backend):
    query, key, value, codebook = make_case()
    output = stored_attention(query, key, value, codebook, num_refined=2, backend=backend)
    order = torch.randperm(50, generator=torch.Generator().manual_seed(1))
    permuted = stored_attention(
        query, key[:, :, order], value[:, :, order], codebook, num_refined=2, backend=backend
    )
    assert relative_error(permuted, output) < EXACT
    only_keys = stored_attention(
        query, key[:, :, order], value, codebook, num_refined=2, backend=backend
    )
    assert relative_error(only_keys, output) > 1e-3


def test_shifting_keys_and_codewords_together_changes_nothing(backend):
    query, key, value, codebook = make_case()
    shift = torch.linspace(-30, 50, 16, dtype=torch.float64).view(2, 1, 8)
    shifted = Codebook(codebook.parents + shift, codebook.children + shift[:, None])
    output = stored_attention(query, key, value, codebook, num_refined=2, backend=backend)
    moved = stored_attention(query, key + shift, value, shifted, num_refined=2, backend=backend)
    assert relative_error(moved, output) < 1e-11
    only_keys = stored_attention(
        query, key + shift, value, codebook, num_refined=2, backend=backend
    )
    assert relative_error(only_keys, output) > 1e-3


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-10), (torch.float32, 2e-6)])
def test_empty_codewords_far_away_change_nothing(backend, dtype, tolerance):
    query, key, value, codebook = make_case(queries=40, dtype=dtype)
    # In the direction of a query: the largest logits by far, if they counted.
    far = 1e4 * query[0, :, :1] / query[0, :, :1].norm(dim=-1, keepdim=True)
    parents = torch.cat([far, codebook.parents, -far], dim=1)
    children = torch.cat([codebook.children, far[:, None].expand(-1, 6, 1, -1)], dim=2)
    cell = far[:, None].expand(-1, 1, 4, -1)
    padded = Codebook(parents, torch.cat([cell, children, -cell], dim=1))
    options = {"query_tile": 16, "backend": backend}

    output = stored_attention(query, key, value, codebook, num_refined=3, **options)
    with_empty = stored_attention(query, key, value, padded, num_refined=3, **options)
    assert relative_error(with_empty, output) < tolerance

    # All parents with keys are refined, so empty ones must be taken too.
    output = stored_attention(query, key, value, codebook, num_refined=6, **options)
    with_empty = stored_attention(query, key, value, padded, num_refined=8, **options)
    assert relative_error(with_empty, output) < tolerance


def test_permuting_queries_inside_a_tile_permutes_the_output(backend):
    query, key, value, codebook = make_case(queries=48)
    options = {"num_refined": 2, "query_tile": 16, "backend": backend}
    output = stored_attention(query, key, value, codebook, **options)
    inside = torch.arange(48).view(3, 16).flip(1).flatten()
    permuted = stored_attention(query[:, :, inside], key, value, codebook, **options)
    assert relative_error(permuted, output[:, :, inside]) < EXACT
    across = torch.arange(48).view(16, 3).t().flatten()
    permuted = stored_attention(query[:, :, across], key, value, codebook, **options)
    assert relative_error(permuted, output[:, :, across]) > 1e-3


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_query_order_cuts_tiles_but_keeps_the_order_of_the_output(backend, dtype):
    query, key, value, codebook = make_case(queries=50)
    order = torch.randperm(50, generator=torch.Generator().manual_seed(1)).to(dtype)
    options = {"num_refined": 2, "query_tile": 16, "backend": backend}
    output = stored_attention(query, key, value, codebook, query_order=order, **options)
    permuted = stored_attention(query[:, :, order], key, value, codebook, **options)
    assert relative_error(output[:, :, order], permuted) < EXACT
    unordered = stored_attention(query, key, value, codebook, **options)
    assert relative_error(output, unordered) > 1e-3


def test_scale_multiplies_the_query(backend):
    query, key, value, codebook = make_case()
    output = stored_attention(
        query, key, value, codebook, num_refined=2, scale=0.7, backend=backend
    )
    scaled = stored_attention(
        0.7 * 8**0.5 * query, key, value, codebook, num_refined=2, backend=backend
    )
    assert relative_error(output, scaled) < EXACT


def test_exact_importance_sums_to_the_number_of_queries():
    query, _, _, codebook = make_case(queries=50)
    counts = torch.tensor([3.0, 0, 1, 4, 1, 5]).double().expand(2, 2, -1)
    for valid in (50, 17, 1):
        importance = reference.importance(query[:, :, :valid], codebook.parents, counts, 0.3)
        torch.testing.assert_close(importance.sum(dim=-1), torch.full((2, 2), valid).double())
        assert (importance[..., 1] == 0).all()


@pytest.mark.parametrize("importance_tile", [1, 2, 4, 6, 10])
def test_tiled_importance_extrapolates_the_denominator(importance_tile):
    query, _, _, codebook = make_case(batch=1, heads=1, queries=5)
    # The first tiles may hold no key at all.
    counts = torch.tensor([0.0, 0, 1, 4, 0, 5]).double()
    mass = (0.3 * query[0, 0] @ codebook.parents[0].T).exp() * counts
    expected = torch.zeros(6, dtype=torch.float64)
    for j in range(6):
        stop = min((j // importance_tile + 1) * importance_tile, 6)
        seen = counts[:stop].sum()
        if seen > 0:
            denominator = mass[:, :stop].sum(dim=1) * counts.sum() / seen
            expected[j] = (mass[:, j] / denominator).sum()
    importance = reference.importance(
        query, codebook.parents, counts[None, None], 0.3, importance_tile
    )
    torch.testing.assert_close(importance[0, 0], expected)


def test_select_marks_the_largest_and_of_equal_ones_the_lower_index():
    importance = torch.tensor([[0.0, 2.0, 1.0, 1.0, 2.0, 1.0], [0.0] * 6])
    expected = torch.tensor([[0, 1, 1, 0, 1, 0], [1, 1, 1, 0, 0, 0]], dtype=torch.bool)
    assert torch.equal(reference.select(importance, 3), expected)


def test_gradients_pass_straight_through_the_quantization():
    inputs = make_case(queries=20)
    query, key, value = (x.detach().requires_grad_() for x in inputs[:3])
    codebook = inputs[3]
    grad_output = torch.randn(query.shape, generator=torch.Generator().manual_seed(1)).double()

    output = stored_attention(query, key, value, codebook, num_refined=6)
    gradients = torch.autograd.grad(output, (query, key, value), grad_output)
    quantized_key = nearest_codewords(key, codebook)[2].detach().requires_grad_()
    expected = F.scaled_dot_product_attention(query, quantized_key, value)
    expected = torch.autograd.grad(expected, (query, quantized_key, value), grad_output)
    for gradient, target in zip(gradients, expected, strict=True):
        assert relative_error(gradient, target) < EXACT


def test_the_papers_correction_is_the_definition_where_parents_are_means_of_children():
    """Paper, Algorithm 2: refined parents keep all their keys, and children carry a correction."""
    query, key, value, codebook = make_case()
    children = codebook.children
    codebook = Codebook(children.mean(dim=2), children)
    expected = stored_attention(query, key, value, codebook, num_refined=6, backend="reference")

    parent, leaf = reference.assign(key, codebook.parents, children)
    of_parent, of_child = F.one_hot(parent, 6).double(), F.one_hot(4 * parent + leaf, 24).double()
    of_child = of_child.unflatten(-1, (6, 4))[..., 1:].flatten(-2)
    scale = query.shape[-1] ** -0.5
    child_logits = scale * query @ children.flatten(1, 2).mT
    # A parent's logit is recovered as the mean of its children's.
    parent_logits = child_logits.unflatten(-1, (6, 3)).mean(dim=-1)
    correction = child_logits.exp() - parent_logits.repeat_interleave(3, dim=-1).exp()
    weights = parent_logits.exp() @ of_parent.mT + correction @ of_child.mT
    output = weights @ value / weights.sum(dim=-1, keepdim=True)
    assert relative_error(output, expected) < EXACT
