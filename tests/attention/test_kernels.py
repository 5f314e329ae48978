"""`backend="triton"` as a whole: interpreted on small cases, and on a GPU against the definition.

Errors are measured against the float64 definition on the same rounded inputs, and are at most twice
those of PyTorch's attention in the same dtype. Tiles whose choice of parents is a near-tie, where a
rounding decides, are left out.
"""

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from cases import LAYOUTS, call_of, make_case, relative_error, stored_attention
from torch import Tensor

pytest.importorskip("triton")

from avq_diffusers.attention import api as ops
from avq_diffusers.attention import limits, reference
from avq_diffusers.attention.triton.codewords import pack, padded_sizes
from avq_diffusers.codebook.assignment import centre_of
from avq_diffusers.codebook.codebook import Codebook

GPU = pytest.mark.gpu
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
FP16, BF16, FP32 = torch.float16, torch.bfloat16, torch.float32
# Triton's interpreter multiplies the bits of bfloat16 numbers as integers.
DTYPES = [FP16, pytest.param(BF16, marks=GPU), FP32]
NEAR_TIE = 1e-3


def rounded(codebook: Codebook, scale: float, dtype: torch.dtype) -> Codebook:
    """The codewords that the kernels use for inputs of `dtype`, in float64."""
    heads, num_parents, num_children, head_dim = codebook.children.shape
    _, first_child, child_rows = padded_sizes(head_dim, num_parents, num_children)
    codes = pack(codebook.parents, codebook.children, scale=scale, dtype=dtype).codes
    centre = centre_of(codebook.parents.double())
    codewords = codes[..., :head_dim].double() / (scale * math.log2(math.e)) + centre
    children = codewords[:, first_child:].view(heads, num_parents, child_rows, head_dim)
    return Codebook(codewords[:, :num_parents], children[:, :, :num_children])


def clear_queries(
    query: Tensor, key: Tensor, codebook: Codebook, *, num_refined: int, query_tile: int, order
) -> Tensor:
    """(B, H, N) queries of tiles whose last refined parent beats the next one clearly."""
    clear = torch.ones(query.shape[:3], dtype=torch.bool, device=query.device)
    if not 0 < num_refined < codebook.num_parents:
        return clear
    parent, _ = reference.assign(key.double(), codebook.parents, codebook.children)
    counts = F.one_hot(parent, codebook.num_parents).sum(dim=-2).double()
    order = torch.arange(query.shape[2], device=query.device) if order is None else order
    for tile in order.split(query_tile):
        tile_query = query[:, :, tile].double()
        score = reference.importance(tile_query, codebook.parents, counts, query.shape[-1] ** -0.5)
        score = score.sort(dim=-1, descending=True).values
        last, following = score[..., num_refined - 1], score[..., num_refined]
        # Parents without keys are not worth a choice.
        is_clear = (last - following > NEAR_TIE * last) | (following == 0)
        clear[:, :, tile] = is_clear[..., None]
    return clear


def check(query, key, value, codebook, *, num_refined, query_tile=128, order=None, sinks=None):
    """Run the kernels and hold them to the error budget; returns their output.

    `sinks` are keys and values.
    """
    scale = query.shape[-1] ** -0.5
    options = {"num_refined": num_refined, "query_tile": query_tile, "query_order": order}
    sinks = dict(zip(("sink_key", "sink_value"), sinks, strict=True)) if sinks else {}
    output = stored_attention(query, key, value, codebook, backend="triton", **options, **sinks)
    assert output.dtype == query.dtype
    assert output.transpose(1, 2).is_contiguous()
    assert output.isfinite().all()

    exact_codebook = rounded(codebook, scale, query.dtype)
    wide = [x.double() for x in (query, key, value)]
    options |= {name: x.double() for name, x in sinks.items()}
    expected = stored_attention(*wide, exact_codebook, backend="reference", **options)
    met = key, value
    if sinks:
        met = [torch.cat(pair, dim=2) for pair in zip(met, sinks.values(), strict=True)]
    sdpa = F.scaled_dot_product_attention(query, *met)
    exact = F.scaled_dot_product_attention(wide[0], *(x.double() for x in met))
    budget = relative_error(sdpa, exact)
    clear = clear_queries(
        query, key, exact_codebook, num_refined=num_refined, query_tile=query_tile, order=order
    )
    assert clear.double().mean() > 0.5
    budget = 2 * budget + torch.finfo(query.dtype).eps
    assert relative_error(output[clear], expected[clear]) <= budget
    return output


def on_device(*, dtype=FP16, device=DEVICE, **shape):
    query, key, value, codebook = make_case(dtype=dtype, **shape)
    return *(x.to(device) for x in (query, key, value)), codebook.to(device)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("shape", "num_refined", "query_tile"),
    [
        pytest.param({"queries": 70}, 2, 32, id="tail tile"),
        pytest.param({"queries": 70, "keys": 200}, 6, 64, id="all refined"),
        pytest.param({"queries": 70}, 0, 64, id="none refined"),
        pytest.param({"queries": 64, "parents": 40, "children": 0}, 0, 64, id="flat"),
        pytest.param({"queries": 64, "head_dim": 40, "parents": 12, "children": 5}, 3, 64, id="40"),
        pytest.param({"queries": 1}, 2, 128, id="one token"),
    ],
)
def test_agrees_with_the_definition(dtype, shape, num_refined, query_tile):
    case = on_device(dtype=dtype, **shape)
    order = torch.randperm(case[0].shape[2], generator=torch.Generator().manual_seed(1))
    check(*case, num_refined=num_refined, query_tile=query_tile, order=order.to(DEVICE))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("shape", "num_refined"),
    [
        pytest.param({"parents": 40, "children": 0}, 0, id="flat"),
        pytest.param({}, 2, id="some refined"),
        pytest.param({}, 6, id="all refined"),
        pytest.param({"head_dim": 40, "parents": 12, "children": 5}, 3, id="40"),
    ],
)
def test_sinks_beside_stored_codewords(dtype, shape, num_refined):
    """Catches sinks without the codebook's centre, and with that of another head.

    70 sinks, which are more than a block of the loop, in memory of two tokens more.
    """
    query, key, value, codebook = on_device(dtype=dtype, queries=72, **shape)
    shift = torch.tensor([3.0, -5.0], device=DEVICE)[:, None]
    codebook = Codebook(
        codebook.parents + shift[..., None], codebook.children + shift[..., None, None]
    )
    key = key + shift[..., None].to(dtype)
    sinks = [x.flip(2)[:, :, 1:71] for x in (key, value)]
    check(query, key, value, codebook, num_refined=num_refined, query_tile=32, sinks=sinks)
    check(query, key, value, codebook, num_refined=num_refined, sinks=[x[:, :, :1] for x in sinks])


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(layout):
    """Catches kernels that take neighbours in memory for neighbours in a row."""
    *tensors, codebook = on_device(dtype=FP32)
    query, key, value = map(LAYOUTS[layout], tensors)
    check(query, key, value, codebook, num_refined=2, query_tile=32)


@pytest.mark.parametrize(
    "change",
    [
        "in place",
        *(pytest.param(x, marks=pytest.mark.long) for x in ("made in inference mode", "moved")),
    ],
)
def test_a_changed_codebook_is_packed_again(change):
    query, key, value, codebook = on_device(dtype=FP32)
    if change == "made in inference mode":
        with torch.inference_mode():
            codebook = Codebook(codebook.parents.clone(), codebook.children.clone())
    options = {"num_refined": 2, "backend": "triton"}
    before = stored_attention(query, key, value, codebook, **options)
    assert torch.equal(stored_attention(query, key, value, codebook, **options), before)
    with torch.inference_mode(change == "made in inference mode"):
        moved = codebook.children + 0.5 * torch.randn_like(codebook.children)
        if change == "moved":  # as Module.to does, which leaves the tensor and its version
            codebook.children.data = moved
        else:
            codebook.children.copy_(moved)
    after = stored_attention(query, key, value, codebook, **options)
    assert not torch.equal(after, before)
    fresh = Codebook(codebook.parents.clone(), codebook.children.clone())
    assert torch.equal(stored_attention(query, key, value, fresh, **options), after)


def test_other_children_in_the_same_memory_are_packed_again():
    """Catches tables that are found by address and version, which a later tensor may have again."""
    parents = torch.zeros(1, 2, 8)
    memory = np.ones((1, 2, 3, 8), np.float32)
    children = torch.from_numpy(memory)
    first = ops._packed_codewords(parents, children, 1.0, FP32)
    assert ops._packed_codewords(parents, children, 1.0, FP32) is first
    del children
    memory += 1
    others = ops._packed_codewords(parents, torch.from_numpy(memory), 1.0, FP32)
    assert not torch.equal(others.codes, first.codes)


@torch.inference_mode()
def test_codewords_of_inference_mode_are_packed_again():
    """Their tensors do not tell of changes."""
    parents, children = torch.zeros(1, 2, 8), torch.ones(1, 2, 3, 8)
    first = ops._packed_codewords(parents, children, 1.0, FP32)
    others = ops._packed_codewords(parents, children.add_(1), 1.0, FP32)
    assert not torch.equal(others.codes, first.codes)


def test_packed_codewords_die_with_their_codebook():
    query, key, value, codebook = on_device()
    held = len(ops._packed)
    stored_attention(query, key, value, codebook, num_refined=2, backend="triton")
    assert len(ops._packed) == held + 1
    del codebook
    assert len(ops._packed) == held


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"scale": 0.0}, "scale must be positive, but is 0.0"),
        ({"scale": -1.0}, "scale must be positive, but is -1.0"),
        ({"query_tile": 200}, "query_tile must be at most 128"),
        ({"num_updates": 1}, "num_updates moves the parents of a codebook"),
        ({"exact_keys": 1}, 'exact keys need codewords="means"'),
    ],
)
def test_what_the_kernels_cannot_do_is_said(change, message):
    case = on_device()
    with pytest.raises(ValueError, match=rf'backend="triton" cannot run: {message}'):
        stored_attention(*case, num_refined=2, backend="triton", **change)
    assert stored_attention(*case, num_refined=2, **change).isfinite().all()


def test_no_gpu_no_kernels(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    case = on_device(device="cpu")
    with pytest.raises(ValueError, match="query is on cpu, and the kernels need an NVIDIA GPU"):
        stored_attention(*case, num_refined=2, backend="triton")
    assert ops.resolve_backend("auto", *call_of(*case)) == "torch"
    monkeypatch.setattr(limits, "HAS_TRITON", False)
    with pytest.raises(ValueError, match="triton is not installed"):
        stored_attention(*case, num_refined=2, backend="triton")


def test_tiles_with_exact_keys_see_few_enough_codewords_to_sort_them():
    *tensors, _ = on_device()
    sizes = {"codewords": "means", "num_parents": 64, "num_children": 32, "exact_keys": 1}

    def resolve(num_refined, **changes):
        options = sizes | {"num_refined": num_refined} | changes
        return ops.resolve_backend("triton", *call_of(*tensors, None, **options))

    with pytest.raises(ValueError, match="exact keys may see 1024 codewords, but see 1056"):
        resolve(31)
    assert resolve(30) == resolve(31, exact_keys=0) == "triton"


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize(
    "form", [*(pytest.param(x, marks=pytest.mark.long) for x in ("stored", "means")), "own"]
)
def test_it_is_a_well_behaved_operation(form):
    query, key, value, codebook = on_device(batch=1, queries=20, dtype=FP32)
    order = torch.arange(20, device=DEVICE)
    options = {"codewords": "stored" if form == "stored" else "means", "query_order": order}
    codebook = None if form == "own" else codebook
    tensors, spec = call_of(query, key, value, codebook, scale=0.3, **options)
    arguments = (*tensors, spec.numbers, spec.scale)
    torch.library.opcheck(torch.ops.avq_diffusers.kernel_attention.default, arguments)


def test_compiles_to_one_graph():
    query, key, value, codebook = on_device(batch=1, queries=20, dtype=FP32)

    @torch.compile(backend="aot_eager", fullgraph=True)
    def compiled(query, key, value):
        return stored_attention(query, key, value, codebook, num_refined=2, backend="triton")

    expected = stored_attention(query, key, value, codebook, num_refined=2, backend="triton")
    assert torch.equal(compiled(query, key, value), expected)


def level(number: int, tokens: int, dtype: torch.dtype = FP16, **shape):
    """A self-attention of Stable Diffusion 1.5 at M64C8."""
    head_dim = {0: 40, 1: 80}[number]
    sizes = {"batch": 2, "heads": 8, "parents": 64, "children": 8, **shape}
    return on_device(queries=tokens, head_dim=head_dim, dtype=dtype, **sizes)


@GPU
class TestGpu:
    @pytest.mark.parametrize("dtype", [FP16, BF16, FP32], ids=str)
    @pytest.mark.parametrize("number", [0, 1])
    @pytest.mark.parametrize("num_refined", [0, 16, 64])
    def test_the_layers_of_stable_diffusion(self, dtype, number, num_refined):
        check(*level(number, 1024, dtype), num_refined=num_refined)

    @pytest.mark.parametrize("head_dim", [64, 128])
    @pytest.mark.parametrize(
        ("parents", "num_refined"), [(32, 8), (64, 8), (128, 8), (128, 32), (256, 16)]
    )
    def test_the_configurations_of_the_paper(self, head_dim, parents, num_refined):
        case = on_device(queries=1500, head_dim=head_dim, parents=parents, children=8)
        check(*case, num_refined=num_refined)

    def test_children_that_do_not_average_to_their_parent(self):
        query, key, value, codebook = level(0, 1024)
        moved = Codebook(codebook.parents * 1.02, codebook.children)
        check(query, key, value, moved, num_refined=16)

    def test_same_bits_whatever_else_the_gpu_does(self):
        case = level(0, 4096)
        options = {"num_refined": 16, "backend": "triton"}
        first = stored_attention(*case, **options)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = stored_attention(*case, **options)
        load = torch.randn(4096, 4096, device="cuda", dtype=FP16)
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        for _ in range(100):
            with torch.cuda.stream(stream):
                other = stored_attention(*case, **options)
            load = load @ load
            again = stored_attention(*case, **options)
            graph.replay()
            torch.cuda.synchronize()
            assert torch.equal(again, first)
            assert torch.equal(other, first)
            assert torch.equal(captured, first)

    def test_the_host_never_waits(self):
        case = level(0, 1024)
        stored_attention(*case, num_refined=16, backend="triton")
        torch.cuda.set_sync_debug_mode("error")
        try:
            stored_attention(*case, num_refined=16, backend="triton")
        finally:
            torch.cuda.set_sync_debug_mode("default")

    def test_memory_does_not_grow(self):
        case = level(0, 4096)
        for _ in range(3):
            stored_attention(*case, num_refined=16, backend="triton")
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        for _ in range(50):
            stored_attention(*case, num_refined=16, backend="triton")
        torch.cuda.synchronize()
        assert torch.cuda.memory_allocated() == before

    def test_more_elements_than_32_bits_count(self):
        """The last batch element lies beyond 2^31 elements."""
        tokens, heads, head_dim, batch = 16384, 8, 64, 260
        generator = torch.Generator("cuda").manual_seed(0)
        shape = (batch, tokens, heads, head_dim)
        packed = torch.randn(shape, generator=generator, device="cuda", dtype=FP16).transpose(1, 2)
        parents = torch.randn(heads, 64, head_dim, generator=generator, device="cuda")
        offsets = torch.randn(heads, 64, 8, head_dim, generator=generator, device="cuda")
        codebook = Codebook(parents, parents[:, :, None] + 0.3 * offsets)
        options = {"num_refined": 16, "backend": "triton"}
        output = stored_attention(packed, packed, packed, codebook, **options)[-1:]
        last = packed[-1:].clone()
        alone = stored_attention(last, last, last, codebook, **options)
        assert relative_error(output, alone) < 1e-3  # a batch cuts sums into other pieces

    @pytest.mark.parametrize("skew", ["one value", "identical keys", "huge offset"])
    def test_hard_keys(self, skew):
        query, key, value, codebook = level(0, 2000)
        if skew == "one value":
            key = key.clone()
            key[:, :, :600] = key[:, :, :1]
        elif skew == "identical keys":
            key = key[:, :, :1].expand_as(key).contiguous()
        else:
            offset = 30.0
            key = key + offset
            codebook = Codebook(codebook.parents + offset, codebook.children + offset)
        check(query, key, value, codebook, num_refined=16)
