"""Compiled UNets: one graph with AVQ; on a GPU CUDA graphs, by the line that README names."""

import pytest
import torch
from checks import differ, kinds
from diffusers import DDIMScheduler, PNDMScheduler
from tiny import (
    LORA,
    draw,
    predict,
    small_unet,
    tiny_pipe,
    tiny_unet,
    tuned_codebooks,
)
from torch._dynamo.testing import CompileCounter

from avq_diffusers import AVQConfig, apply_avq, avq_disabled, remove_avq

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# All keys are exact: else rounding decides near-ties, and this random model amplifies them.
CONFIG = AVQConfig.parse("M16P4C4E1024", levels=(0, 1))


@pytest.fixture(autouse=True)
def fresh_compiler():
    """Without TF32: its rounding, too, is amplified, to 1.5e-3 on an H100."""
    torch.compiler.reset()
    with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
        yield
    torch.compiler.reset()


def off(image, other):
    """The largest difference, relative to the largest value."""
    return float((image - other).abs().max() / other.abs().max())


@pytest.mark.long
def test_sizes_guidance_schedulers_and_a_lora_may_change():
    """Catches a graph of another size, stale weights, and outputs that a later step overwrites."""
    pipe = apply_avq(tiny_pipe().to(DEVICE), CONFIG, route="always")

    def draw_all():
        images = []
        # PNDM keeps the outputs of four steps. Without guidance they are the graph's own, which
        # PyTorch refuses with any attention.
        for scheduler, guidance in ((PNDMScheduler, {}), (DDIMScheduler, {"guidance_scale": 1.0})):
            pipe.scheduler = scheduler.from_config(pipe.scheduler.config)
            for changes in ({}, {"width": 192}, {}, guidance):
                images.append(draw(pipe, num_inference_steps=6, **changes))
        torch.manual_seed(0)
        pipe.unet.add_adapter(LORA)
        images.append(draw(pipe))
        pipe.unet.delete_adapters("default")
        return [*images, draw(pipe)]

    expected = draw_all()
    pndm, _, _, _, ddim, _, _, unguided, *adapted = expected
    for different in (adapted, (pndm, ddim), (ddim, unguided)):  # as stale weights or outputs are
        assert off(*different) > 0.1
    pipe.unet.compile(mode="reduce-overhead", dynamic=False)
    for image, other in zip(draw_all(), expected, strict=True):
        assert off(image, other) < 1e-3
    assert kinds(pipe) == {"AVQ"}


@pytest.mark.feature("torch.compile of the UNet (one graph)")
@torch.no_grad()
def test_switching_a_compiled_unet():
    """Catches graph breaks, AVQ lost in compiled code, changes that are cast there, and compiled
    code that does not notice AVQ coming, pausing and going."""
    unet = small_unet().double()
    inputs = torch.ones(1, 4, 16, 16).double(), 10, torch.ones(1, 5, 32).double()
    codebooks, exact = (
        tuned_codebooks(unet, AVQConfig.parse("M4P2C2")),
        unet(*inputs).sample,
    )
    avq = apply_avq(unet, codebooks)(*inputs).sample
    counter = CompileCounter()
    compiled = torch.compile(remove_avq(unet), backend=counter, fullgraph=True)
    torch.testing.assert_close(compiled(*inputs).sample, exact)
    assert apply_avq(compiled, codebooks) is compiled
    for _ in range(3):
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
def test_repeated_blocks(unet):
    """Catches a guard per layer or per resolution: the recompile limit is near."""
    sizes = ((16, 16), (24, 16), (16, 40))

    def compiled(model):
        torch.compiler.reset()
        counter = CompileCounter()
        model.compile_repeated_blocks(backend=counter, fullgraph=True)
        return counter, [predict(model, *size) for size in sizes]

    avq = apply_avq(tiny_unet(), tuned_codebooks(unet))
    expected = [predict(avq, *size) for size in sizes]
    (exact_graphs, exact), (graphs, outputs) = compiled(unet), compiled(avq)
    assert graphs.frame_count == exact_graphs.frame_count
    for output, want, plain in zip(outputs, expected, exact, strict=True):
        torch.testing.assert_close(output, want)
        assert differ(output, plain)


def test_export():
    """Catches fake tensors that stay in the layers, where nothing was in its place before."""
    unet = small_unet()
    apply_avq(unet, tuned_codebooks(unet, AVQConfig.parse("M4P2C2"))).double()
    inputs = torch.ones(1, 4, 16, 16).double(), torch.tensor(10), torch.ones(1, 5, 32).double()
    with torch.no_grad():
        exported = torch.export.export(unet, inputs).module()
        torch.testing.assert_close(exported(*inputs).sample, unet(*inputs).sample)
    assert any("avq_diffusers.attention" in str(node.target) for node in exported.graph.nodes)
