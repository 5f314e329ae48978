"""Peers of `python -m eval keys`: what runs without their packages, and their kernels on a GPU."""

import sys
from functools import partial
from types import ModuleType

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode

from eval.keys import peers
from eval.keys.calls import Call
from eval.keys.measuring import key_method, met_columns, scheme_of, token_order
from eval.keys.pooled import BLOCK
from eval.names import PISA, PISA_ZEROTH, SOL

N = 3 * BLOCK + 7  # a last block of 7 tokens


def problem(num_tokens, dtype=torch.float32):
    generator = torch.Generator().manual_seed(2)
    return (2 * torch.randn(3, 2, 2, num_tokens, 8, generator=generator)).to(dtype).unbind()


def order_of(num_tokens):
    return torch.randperm(num_tokens, generator=torch.Generator().manual_seed(5))


@pytest.mark.parametrize(
    ("name", "source", "setting", "scheme"),
    [
        ("pisa@.15", PISA, 0.15, "PISA"),
        ("pisa0@1", PISA_ZEROTH, 1, "PISA, zeroth order"),
        ("sol@1.3", SOL, 1.3, "Sol-Attn"),
    ],
)
def test_a_peer_has_a_name_and_a_setting(name, source, setting, scheme):
    method = key_method(name)
    assert (method.source, method.setting, method.is_folder) == (source, setting, False)
    assert scheme_of(method) == scheme


@pytest.mark.parametrize(
    ("source", "dtype", "message"),
    [
        (SOL, torch.float16, "sol@1 takes bfloat16 only: --dtype bfloat16"),
        (PISA, torch.float32, "pisa@1 takes float16 or bfloat16 only: --dtype bfloat16"),
    ],
)
def test_a_peer_is_refused_in_another_dtype(source, dtype, message):
    with FakeTensorMode():
        weight = torch.empty(1, device="cuda", dtype=dtype)
    with pytest.raises(ValueError, match=message):
        peers.check_peer(f"{source}@1", source, weight)


@pytest.mark.parametrize(
    ("source", "package", "place"),
    [
        (PISA, "piecewise_attn", "github.com/xie-lab-ml/piecewise-sparse-attention"),
        (PISA_ZEROTH, "pisa_hyvideo_kernels", "github.com/NVlabs/Sana, check out"),
        (SOL, "sol_attn", "github.com/NVlabs/Sana@sol-engine"),
    ],
)
def test_a_missing_peer_says_how_to_install_it(source, package, place, monkeypatch):
    monkeypatch.setitem(sys.modules, package, None)
    with FakeTensorMode():
        weight = torch.empty(1, device="cuda", dtype=torch.bfloat16)
    with pytest.raises(ImportError, match=f"{source} needs the package {package}: .*{place}"):
        peers.check_peer(f"{source}@1", source, weight)


def test_sol_takes_heads_of_two_sizes():
    tensors = problem(9, torch.bfloat16)
    with pytest.raises(ValueError, match="sol takes heads of 64 or 128 dims, but got 8"):
        peers.prepared(SOL, 1.0, *tensors, query_order=order_of(9))


@pytest.mark.parametrize("source", [PISA, SOL])
def test_inputs_are_arranged_as_the_peer_reads_them(source):
    """Catches another order, another layout, and strides that the kernels do not look at."""
    tensor = problem(N)[0].transpose(1, 2).contiguous().transpose(1, 2)  # as from a projection
    order = order_of(N)
    (arranged,) = peers.arranged(source, tensor, query_order=order)
    assert arranged.is_contiguous()
    for place, token in enumerate(order.tolist()):
        found = arranged[:, place] if source == SOL else arranged[:, :, place]
        assert torch.equal(found, tensor[:, :, token])


def exact_blocks(query, key, threshold, scale):
    """The definition, for one head: sums written out."""
    queries, keys = (
        torch.stack([block.mean(dim=0) for block in x.double().split(BLOCK)]) for x in (query, key)
    )
    exact = torch.zeros(len(queries), len(keys), dtype=torch.bool)
    for i, mean_query in enumerate(queries):
        scores = scale * keys @ mean_query
        variance = sum(
            (scale * mean_query[d]) ** 2 * keys[:, d].var(correction=0) for d in range(8)
        )
        for j, score in enumerate(scores):
            is_high = score > scores.mean() + threshold * variance.sqrt()
            exact[i, j] = is_high or abs(i - j) <= 1
    return exact


@pytest.mark.parametrize("threshold", [0.5, 1.3])
def test_exact_blocks_of_sol_match_its_rule(threshold):
    """Catches means that count padding, a deviation over queries, and neighbours left out."""
    query, key, _ = problem(6 * BLOCK + 7)
    apart = torch.randn(7, 8, generator=torch.Generator().manual_seed(7))
    key = key + apart.repeat_interleave(BLOCK, dim=0)[: key.shape[2]]
    found = peers.sol_exact_blocks(query, key, threshold=threshold, scale=0.3)
    for head in [(b, h) for b in range(2) for h in range(2)]:
        expected = exact_blocks(query[head], key[head], threshold, 0.3)
        assert torch.equal(found[head], expected)
    assert found.sum() > peers.sol_exact_blocks(query, key, threshold=1e9).sum()


@pytest.mark.parametrize(
    ("name", "columns"),
    [
        ("pisa@.5", 2 + 2 * BLOCK),  # 2 of 4 blocks, whole ones: at most
        ("pisa@.01", 3 + BLOCK),
        ("pisa0@1", N),
        ("sol@1000", (130 + 193 + 136 + 73) / 4),  # of blocks of 64, 64, 64 and 7
    ],
)
def test_columns_of_peers(name, columns):
    """Catches blocks that count as means too, and a last block that counts as a whole one."""
    call = Call("any", *problem(N), None)
    found = met_columns(key_method(name), partial(token_order, 14), call)
    assert found == pytest.approx(columns)


def test_each_setting_is_tuned_apart():
    """Catches a choice made at one density that serves all others, and one that is lost."""
    triton = pytest.importorskip("triton")
    module = ModuleType("kernels")
    module.kernel = triton.autotune([triton.Config({})], key=["T"])(triton.jit(exact_blocks))
    peers._tune_apart(module, (PISA, 0.1))
    module.kernel.cache["T"] = "a choice"
    peers._tune_apart(module, (PISA, 0.2))
    assert not module.kernel.cache
    peers._tune_apart(module, (PISA, 0.1))
    assert module.kernel.cache == {"T": "a choice"}


@pytest.mark.gpu
@pytest.mark.parametrize(("source", "setting"), [(PISA, 1.0), (PISA_ZEROTH, 1.0), (SOL, -1e3)])
def test_a_peer_of_exact_blocks_is_exact_attention(source, setting):
    """Catches a lost scale, tokens out of order, and padding that counts; all blocks are exact."""
    pytest.importorskip(peers._MODULES[source].partition(".")[0])
    generator = torch.Generator("cuda").manual_seed(6)
    query, key, value = torch.randn(3, 2, 2, N, 64, generator=generator, device="cuda").bfloat16()
    exact = F.scaled_dot_product_attention(query.float(), key.float(), value.float(), scale=0.2)
    order = order_of(N).cuda()
    output = peers.peer_attention(source, setting, query, key, value, query_order=order, scale=0.2)
    assert (output.float() - exact).norm() < 1e-2 * exact.norm()
