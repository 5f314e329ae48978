"""A pipeline whose UNet runs in CUDA graphs, by the one line that README names."""

import pytest
import torch
from checks import kinds
from diffusers import DDIMScheduler, DPMSolverMultistepScheduler, PNDMScheduler
from tiny import LORA, draw, tiny_pipe

from avq_diffusers import AVQConfig
from avq_diffusers.plugin.apply import apply_avq

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore")]


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def graphed(pipe):
    pipe.unet.compile(backend="cudagraphs", dynamic=False)
    return pipe


@pytest.fixture
def pipe():
    config = AVQConfig(levels=(0, 1), num_parents=16, num_refined=4, num_children=4)
    return apply_avq(tiny_pipe().to("cuda", torch.float16), config, route="always")


SCHEDULERS = (DDIMScheduler, PNDMScheduler, DPMSolverMultistepScheduler)


@pytest.mark.parametrize("scheduler", SCHEDULERS)
@pytest.mark.parametrize("guidance_scale", [1.0, 5.0])
def test_images_of_every_size_are_those_without_graphs(pipe, scheduler, guidance_scale):
    """Catches outputs that a later step overwrites, and a graph of another size."""
    pipe.scheduler = scheduler.from_config(pipe.scheduler.config)
    sizes = [(128, 128), (128, 192), (128, 128)]
    settings = {"guidance_scale": guidance_scale, "num_inference_steps": 5}
    expected = [draw(pipe, height=h, width=w, **settings) for h, w in sizes]
    graphed(pipe)
    for (height, width), image in zip(sizes, expected, strict=True):
        drawn = draw(pipe, height=height, width=width, **settings)
        torch.testing.assert_close(drawn, image, rtol=1e-2, atol=1e-2)


def test_guidance_may_change(pipe):
    expected = [draw(pipe, guidance_scale=scale) for scale in (5.0, 1.0, 5.0)]
    graphed(pipe)
    for scale, image in zip((5.0, 1.0, 5.0), expected, strict=True):
        drawn = draw(pipe, guidance_scale=scale)
        torch.testing.assert_close(drawn, image, rtol=1e-2, atol=1e-2)


def test_a_lora_comes_and_goes(pipe):
    """Catches a graph that keeps the weights of before."""
    plain = draw(pipe)
    pipe.unet.add_adapter(LORA)
    adapted = draw(pipe)
    pipe.unet.delete_adapters("default")
    graphed(pipe)
    torch.testing.assert_close(draw(pipe), plain, rtol=1e-2, atol=1e-2)
    torch.manual_seed(0)
    pipe.unet.add_adapter(LORA)
    assert kinds(pipe) == {"AVQ"}
    with_adapter = draw(pipe)
    pipe.unet.delete_adapters("default")
    torch.testing.assert_close(draw(pipe), plain, rtol=1e-2, atol=1e-2)
    assert (with_adapter - plain).abs().max() > 0.01
    assert adapted.isfinite().all()
