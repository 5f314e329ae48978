"""A pipeline whose UNet is compiled, on a GPU into CUDA graphs, by the line that README names."""

import pytest
import torch
from checks import kinds
from diffusers import DDIMScheduler, PNDMScheduler
from tiny import LORA, draw, tiny_pipe

from avq_diffusers.config import AVQConfig
from avq_diffusers.plugin.apply import apply_avq

pytestmark = pytest.mark.long

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# All keys are exact: else rounding decides near-ties, and this random model amplifies them.
CONFIG = AVQConfig(levels=(0, 1), num_parents=16, num_refined=4, num_children=4, exact_keys=1024)


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


def check_same(images, expected):
    for image, other in zip(images, expected, strict=True):
        assert off(image, other) < 1e-3


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
        return images

    def draw_adapted():
        torch.manual_seed(0)
        pipe.unet.add_adapter(LORA)
        image = draw(pipe)
        pipe.unet.delete_adapters("default")
        return [image, draw(pipe)]

    expected, adapted = draw_all(), draw_adapted()
    pndm, _, _, _, ddim, _, _, unguided = expected
    for different in (adapted, (pndm, ddim), (ddim, unguided)):  # as stale weights or outputs are
        assert off(*different) > 0.1
    pipe.unet.compile(mode="reduce-overhead", dynamic=False)
    check_same(draw_all(), expected)
    check_same(draw_adapted(), adapted)
    assert kinds(pipe) == {"AVQ"}
