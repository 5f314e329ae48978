"""The O(MN) PyTorch path against the definition: same choices, same result, on hard shapes.

Uninitialized memory holds NaN in every test here.
"""

import pytest
import torch
import torch.nn.functional as F
from cases import LAYOUTS, SHAPES, make_case, relative_error, stored_attention
from torch import Tensor

from avq_diffusers.attention import reference, torch_forward
from avq_diffusers.codebook import assignment
from avq_diffusers.codebook.assignment import nearest_leaves
from avq_diffusers.codebook.codebook import Codebook

pytestmark = pytest.mark.usefixtures("uninitialized_memory_is_nan")


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    """Several chunks, the last one partial, already at the sizes of these tests."""
    monkeypatch.setattr(assignment, "ELEMENTS_CPU", 1 << 10)


def both(query: Tensor, key: Tensor, value: Tensor, codebook: Codebook, **options):
    output = stored_attention(query, key, value, codebook, backend="torch", **options)
    assert output.shape == query.shape
    assert output.transpose(1, 2).is_contiguous()
    return output, stored_attention(query, key, value, codebook, backend="reference", **options)


@pytest.mark.parametrize(
    ("shape", "num_refined", "query_tile"),
    [
        *SHAPES,
        pytest.param({"parents": 1}, 0, 16, id="one parent, not refined"),
        pytest.param({"queries": 1}, 2, 16, id="one query and one key"),
        pytest.param({"queries": 40, "keys": 1}, 2, 16, id="one key: most parents are empty"),
    ],
)
def test_shapes(shape, num_refined, query_tile):
    query, key, value, codebook = make_case(**shape)
    order = torch.randperm(query.shape[2], generator=torch.Generator().manual_seed(1))
    for query_order in (None, order):
        output, expected = both(
            query,
            key,
            value,
            codebook,
            num_refined=num_refined,
            query_tile=query_tile,
            query_order=query_order,
        )
        assert relative_error(output, expected) < 1e-12


def test_all_keys_in_one_cell():
    query, key, value, codebook = make_case()
    key = codebook.parents[:, 2:3] + 1e-3 * key
    assert (reference.assign(key, codebook.parents, codebook.children)[0] == 2).all()
    output, expected = both(query, key, value, codebook, num_refined=2, query_tile=16)
    assert relative_error(output, expected) < 1e-12


def test_a_parent_whose_keys_all_moved_to_children():
    query, _, value, codebook = make_case(queries=12, parents=4)
    key = codebook.children.flatten(1, 2).expand(2, -1, -1, -1)
    _, leaf = reference.assign(key, codebook.parents, codebook.children)
    assert (leaf > 0).all()
    output, expected = both(query, key, value, codebook, num_refined=2, query_tile=8)
    assert relative_error(output, expected) < 1e-12


def test_children_that_take_no_key():
    query, key, value, codebook = make_case()
    codebook = Codebook(codebook.parents, codebook.parents[:, :, None] + 1e3 * torch.ones(3, 8))
    output, expected = both(query, key, value, codebook, num_refined=2, query_tile=16)
    assert relative_error(output, expected) < 1e-12


def test_identical_codewords_and_keys():
    query, key, value, codebook = make_case()
    parents = codebook.parents[:, [0, 0, 1, 1]]
    codebook = Codebook(parents, parents[:, :, None].expand(-1, -1, 3, -1))
    key = parents[:, torch.arange(50) % 4].expand(2, -1, -1, -1)
    output, expected = both(query, key, value, codebook, num_refined=2, query_tile=16)
    assert relative_error(output, expected) < 1e-12


def test_a_dead_codeword_far_away_costs_no_accuracy():
    """Catches centring on the mean of the parents, which one of them moves by 1e5."""
    query, key, value, codebook = make_case(dtype=torch.float32)
    parents, children = codebook.parents.clone(), codebook.children.clone()
    parents[:, 3] += 1e6
    children[:, 3] += 1e6
    codebook = Codebook(parents, children)
    options = {"num_refined": 2, "query_tile": 16}
    output, _ = both(query, key, value, codebook, **options)
    wide = (x.double() for x in (query, key, value))
    expected = stored_attention(*wide, codebook, backend="reference", **options)
    assert relative_error(output, expected) < 8 * torch.finfo(torch.float32).eps


def test_a_shift_of_all_keys_costs_no_accuracy():
    """Catches logits of codewords with the offset that all of them share: 1e-5 of error."""
    query, key, value, codebook = make_case(dtype=torch.float32)
    codebook = Codebook(codebook.parents + 300, codebook.children + 300)
    for num_refined in (0, 2):
        options = {"num_refined": num_refined, "query_tile": 16}
        output, _ = both(query, key + 300, value, codebook, **options)
        wide = (x.double() for x in (query, key + 300, value))
        expected = stored_attention(*wide, codebook, backend="reference", **options)
        assert relative_error(output, expected) < 8 * torch.finfo(torch.float32).eps


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(layout):
    *tensors, codebook = make_case()
    query, key, value = map(LAYOUTS[layout], tensors)
    output, expected = both(query, key, value, codebook, num_refined=2, query_tile=16)
    assert relative_error(output, expected) < 1e-12


def test_codebook_layout():
    query, key, value, codebook = make_case()
    strided = Codebook(codebook.parents.mT.contiguous().mT, codebook.children.mT.contiguous().mT)
    output, expected = both(query, key, value, strided, num_refined=2, query_tile=16)
    assert relative_error(output, expected) < 1e-12


def test_every_key_is_counted_once():
    _, key, value, codebook = make_case(keys=77)
    parent, leaf = reference.assign(key, codebook.parents, codebook.children)
    for b in range(2):
        found = nearest_leaves(key[b], codebook.parents, codebook.children)
        leaves = torch_forward.sort_leaves(found, 6, 4)
        counts, value_sums = torch_forward.aggregate(leaves, value[b], torch.float64)
        assert counts.shape == (2, 6, 4)
        assert (counts.sum(dim=(1, 2)) == 77).all()
        torch.testing.assert_close(value_sums.sum(dim=(1, 2)), value[b].sum(dim=1))
        for h in range(2):
            for p in range(6):
                for c in range(4):
                    members = (parent[b, h] == p) & (leaf[b, h] == c)
                    assert counts[h, p, c] == members.sum()
                    torch.testing.assert_close(value_sums[h, p, c], value[b, h, members].sum(0))


@pytest.mark.parametrize("head_dim", [40, 64, 80, 128, 160])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_error_is_at_most_twice_that_of_exact_attention(dtype, head_dim):
    query, key, value, codebook = make_case(
        queries=256, head_dim=head_dim, parents=16, children=4, dtype=dtype
    )
    exact_codebook = codebook.to(dtype=torch.float64)
    wide = tuple(x.double() for x in (query, key, value))

    # The choices agree, so that what remains is arithmetic.
    parent, leaf = reference.assign(wide[1], exact_codebook.parents, exact_codebook.children)
    for b in range(2):
        chosen = nearest_leaves(key[b], codebook.parents, codebook.children)
        assert torch.equal(chosen, (parent * 5 + leaf)[b])
    counts = F.one_hot(parent, 16).sum(dim=2).double()
    for tile in wide[0].split(64, dim=2):
        importance = (
            reference.importance(tile, exact_codebook.parents, counts, head_dim**-0.5)
            .sort(descending=True)
            .values
        )
        assert (importance[..., 3] - importance[..., 4] > 1e-4).all()

    options = {"num_refined": 4, "query_tile": 64}
    output = stored_attention(query, key, value, codebook, backend="torch", **options)
    assert output.dtype == dtype
    expected = stored_attention(*wide, exact_codebook, backend="reference", **options)
    error = relative_error(output, expected)

    attention = F.scaled_dot_product_attention(query, key, value)
    attention_error = relative_error(attention, F.scaled_dot_product_attention(*wide))
    assert 0 < error <= 2 * attention_error + torch.finfo(torch.float32).eps


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_large_values_and_counts_do_not_overflow(dtype):
    # One cell of 4096 keys: the sum of its values, 4e6, is beyond fp16.
    query, key, value, codebook = make_case(batch=1, queries=16, keys=4096, dtype=dtype)
    key = (codebook.parents[:, 2:3] + 1e-3 * key).to(dtype)
    value = 1000 + value
    output = stored_attention(query, key, value, codebook, num_refined=1)
    expected = stored_attention(
        query.double(),
        key.double(),
        value.double(),
        codebook.to(dtype=torch.float64),
        num_refined=1,
        backend="reference",
    )
    assert relative_error(output, expected) < 2 * torch.finfo(dtype).eps


def test_logits_of_two_hundred():
    query, key, value, codebook = make_case(queries=64, dtype=torch.float32)
    direction = F.normalize(codebook.parents[:, 0], dim=-1)
    largest = (codebook.parents @ direction[..., None]).abs().amax(dim=(1, 2))
    query = 200 / largest[:, None, None] * direction[:, None].expand(2, 2, 64, 8).clone()
    # Opposite queries, and more of one kind than of the other, or the two would tie.
    query[:, :, ::4] *= -1
    options = {"num_refined": 2, "query_tile": 16}
    output = stored_attention(query, key, value, codebook, scale=1.0, **options)
    expected = stored_attention(
        query.double(),
        key.double(),
        value.double(),
        codebook.to(dtype=torch.float64),
        scale=1.0,
        backend="reference",
        **options,
    )
    assert relative_error(output, expected) < 1e-4


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_same_bits_on_every_run(dtype):
    query, key, value, codebook = make_case(queries=200, dtype=dtype)
    order = torch.randperm(200, generator=torch.Generator().manual_seed(1))
    options = {"num_refined": 2, "query_tile": 16, "query_order": order}
    first = stored_attention(query, key, value, codebook, **options)
    for _ in range(10):
        assert torch.equal(stored_attention(query, key, value, codebook, **options), first)


def test_batch_elements_do_not_mix():
    query, key, value, codebook = make_case()
    output = stored_attention(query, key, value, codebook, num_refined=2)
    for b in range(2):
        part = slice(b, b + 1)
        alone = stored_attention(query[part], key[part], value[part], codebook, num_refined=2)
        assert torch.equal(alone, output[part])


def test_chunks_do_not_change_the_result(monkeypatch):
    query, key, value, codebook = make_case(queries=100)
    options = {"num_refined": 2, "query_tile": 16}
    output = stored_attention(query, key, value, codebook, **options)
    monkeypatch.setattr(assignment, "ELEMENTS_CPU", 1 << 20)
    assert relative_error(stored_attention(query, key, value, codebook, **options), output) < 1e-13


@pytest.mark.gpu
class TestCuda:
    @pytest.fixture(autouse=True)
    def deterministic_cublas(self, monkeypatch):
        monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

    @staticmethod
    def on_cuda(dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Codebook]:
        query, key, value, codebook = make_case(
            queries=1000, head_dim=40, parents=64, children=8, dtype=dtype
        )
        return query.cuda(), key.cuda(), value.cuda(), codebook.to("cuda")

    @pytest.mark.parametrize("deterministic", [True, False])
    @pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
    def test_same_bits_on_every_run(self, dtype, deterministic):
        torch.use_deterministic_algorithms(deterministic)
        query, key, value, codebook = self.on_cuda(dtype)
        order = torch.randperm(1000, generator=torch.Generator().manual_seed(1)).cuda()
        options = {"num_refined": 16, "query_order": order}
        first = stored_attention(query, key, value, codebook, backend="torch", **options)
        for _ in range(100):
            output = stored_attention(query, key, value, codebook, backend="torch", **options)
            assert torch.equal(output, first)

    @pytest.mark.parametrize("num_refined", [0, 16])
    def test_agrees_with_the_definition(self, num_refined):
        query, key, value, codebook = self.on_cuda(torch.float64)
        output, expected = both(query, key, value, codebook, num_refined=num_refined)
        assert relative_error(output, expected) < 1e-12

    def test_the_host_never_waits(self):
        query, key, value, codebook = self.on_cuda(torch.float16)
        order = torch.randperm(1000, generator=torch.Generator().manual_seed(1)).cuda()
        options = {"num_refined": 16, "exact_keys": 64, "query_order": order, "backend": "torch"}
        options |= {"sink_key": key[:, :, :9], "sink_value": value[:, :, :9]}
        stored_attention(query, key, value, codebook, **options)
        torch.cuda.set_sync_debug_mode("error")
        try:
            stored_attention(query, key, value, codebook, **options)
            with pytest.raises(RuntimeError, match="synchroniz"):
                query.sum().item()
        finally:
            torch.cuda.set_sync_debug_mode("default")
