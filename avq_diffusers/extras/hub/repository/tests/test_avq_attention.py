"""AVQ attention against its definition in float64, on the same rounded inputs."""

import kernels
import pytest
import torch
import torch.nn.functional as F

avq = kernels.get_kernel("$repo_id", version=1, trust_remote_code=True)

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = [torch.float16, torch.bfloat16, torch.float32] if DEVICE == "cuda" else [torch.float32]
SIZES = {"num_parents": 16, "num_children": 4, "query_tile": 64}

pytestmark = pytest.mark.kernels_ci


def tokens(dtype: torch.dtype) -> list[torch.Tensor]:
    """Query, key and value (B, H, N, D) of a 16 x 24 grid with clustered keys."""
    generator = torch.Generator().manual_seed(0)
    query, key, value = torch.randn(3, 2, 3, 384, 64, generator=generator)
    key = 0.3 * key + 2 * torch.randn(2, 3, 6, 64, generator=generator).repeat_interleave(64, 2)
    return [x.to(DEVICE, dtype).requires_grad_() for x in (query, key, value)]


def errors(attend, expected, dtype: torch.dtype) -> list[float]:
    """Relative errors of the output and the gradients."""

    def results(function, inputs):
        output = function(*inputs)
        return [output.detach(), *torch.autograd.grad(output.square().sum(), inputs)]

    found = results(attend, tokens(dtype))
    right = results(expected, [x.detach().double().requires_grad_() for x in tokens(dtype)])
    return [float((x.double() - y).norm() / y.norm()) for x, y in zip(found, right, strict=True)]


# With all or no parents refined, rounding cannot change a choice.
@pytest.mark.parametrize("refined", [0, 16])
@pytest.mark.parametrize("dtype", DTYPES)
def test_agrees_with_the_definition(dtype, refined):
    def attend(backend):
        order = avq.query_order(16, 24, device=DEVICE)
        options = {"query_order": order, "num_refined": refined, "backend": backend, **SIZES}
        return lambda *inputs: avq.avq_attention(*inputs, **options)

    found = errors(attend("auto"), attend("reference"), dtype)
    exact = F.scaled_dot_product_attention
    allowed = errors(exact, exact, dtype)
    for error, exact_error in zip(found, allowed, strict=True):
        assert error <= 2 * exact_error + 4 * torch.finfo(dtype).eps


def test_a_threshold_of_0_is_exact_attention():
    query, key, value = tokens(torch.float32)
    exact = F.scaled_dot_product_attention(query, key, value)
    found = avq.avq_attention(query, key, value, threshold=0, **SIZES)
    coarse = avq.avq_attention(query, key, value, threshold=0.1, **SIZES)
    assert (found - exact).norm() < 1e-5 * exact.norm() < (coarse - exact).norm()


def test_compiles_to_one_graph():
    query, key, value = tokens(torch.float32)
    compiled = torch.compile(avq.avq_attention, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(query, key, value), avq.avq_attention(query, key, value))
