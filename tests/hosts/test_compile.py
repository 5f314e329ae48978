"""Compiled UNets: one graph with AVQ."""

import pytest
import torch
from checks import kinds
from tiny import predict, small_unet, traced_unet, tuned_codebooks
from torch._dynamo.testing import CompileCounter

from avq_diffusers import AVQConfig, apply_avq, avq_disabled, remove_avq, select_layers


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch.compiler.reset()
    yield
    torch.compiler.reset()


@pytest.mark.feature("torch.compile of the UNet (one graph)")
@torch.no_grad()
def test_switching_a_compiled_unet():
    """Catches graph breaks, also by a projection's hook, AVQ lost in compiled code, changes that
    are cast there, and compiled code that does not notice AVQ coming, pausing and going."""
    unet = traced_unet().double()
    select_layers(unet)[0].attn.to_q.register_forward_hook(lambda layer, args, output: 2 * output)
    inputs = torch.ones(1, 4, 16, 16).double(), 10, torch.ones(1, 5, 32).double()
    codebooks, exact = (tuned_codebooks(unet, AVQConfig.parse("M4P2C2")), unet(*inputs).sample)
    avq = apply_avq(unet, codebooks)(*inputs).sample
    counter = CompileCounter()
    compiled = torch.compile(remove_avq(unet), backend=counter, fullgraph=True)
    torch.testing.assert_close(compiled(*inputs).sample, exact)
    assert apply_avq(compiled, codebooks) is compiled
    for _ in range(2):
        output = compiled(*inputs).sample
        torch.testing.assert_close(output, avq)
        assert (output - exact).norm() > 100 * (output - avq).norm()
    assert counter.frame_count == 2
    assert kinds(unet) == set()  # compiled calls are not counted
    with avq_disabled(compiled):
        torch.testing.assert_close(compiled(*inputs).sample, exact)
    torch.testing.assert_close(compiled(*inputs).sample, avq)
    torch.testing.assert_close(remove_avq(compiled)(*inputs).sample, exact)


@pytest.mark.feature("torch.compile of its blocks (one graph)")
def test_repeated_blocks():
    """Catches a guard per layer or per resolution: the recompile limit is near."""
    unet, sizes = small_unet(), ((16, 16), (24, 16), (16, 40), (24, 40))
    apply_avq(unet, tuned_codebooks(unet, AVQConfig.parse("M4P2C2")))
    expected, counter = [predict(unet, *size) for size in sizes], CompileCounter()
    unet.compile_repeated_blocks(backend=counter, fullgraph=True)
    for size, want in zip(sizes, expected, strict=True):
        torch.testing.assert_close(predict(unet, *size), want)
    assert counter.frame_count == 3  # as without AVQ
