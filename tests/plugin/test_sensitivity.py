"""`measure_sensitivity`: what one layer alone changes, and that nothing stays behind."""

from dataclasses import replace

import pytest
import torch
from diffusers import (
    StableDiffusionAdapterPipeline,
    StableDiffusionImg2ImgPipeline,
    T2IAdapter,
)
from tiny import CONFIG, draw, random_codebooks, tiny_pipe

from avq_diffusers import (
    AVQCodebooks,
    apply_avq,
    avq_disabled,
    measure_sensitivity,
    remove_avq,
    scalecrafter,
    select_layers,
)
from avq_diffusers.extras.scalecrafter.settings import ScaleCrafterConfig

PROMPT = "a red fox"
SIZES = {"height": 128, "width": 128, "progress": False}


@pytest.fixture(scope="module")
def pipe():
    return tiny_pipe()


@pytest.fixture
def codebooks(pipe):
    yield random_codebooks(pipe.unet)
    remove_avq(pipe)


def recorded(pipe, seed: int, steps: int) -> list[tuple[dict, torch.Tensor]]:
    """Arguments and output of the UNet's calls while an image is drawn."""
    calls = []
    handle = pipe.unet.register_forward_hook(
        lambda unet, args, kwargs, output: calls.append(((args, kwargs), output[0])),
        with_kwargs=True,
    )
    generator = torch.Generator().manual_seed(seed)
    pipe(PROMPT, 128, 128, num_inference_steps=steps, generator=generator, output_type="latent")
    handle.remove()
    return calls


def apply_to_one(pipe, codebooks, name: str) -> None:
    others = tuple(layer.name for layer in select_layers(pipe.unet, (0, 1)) if layer.name != name)
    book = {name: codebooks.codebook(name)}
    one = AVQCodebooks.from_codebooks(replace(CONFIG, exact=others), book, pipe.unet)
    apply_avq(pipe, one, route="always")


def error_of_one_step(pipe, codebooks, name: str, **arguments) -> float:
    """The error of what a pipeline gets from the UNet, from images with and without AVQ."""
    outputs = []
    handle = pipe.unet.register_forward_hook(lambda _, args, output: outputs.append(output[0]))
    remove_avq(pipe)
    draw(pipe, num_inference_steps=1, **arguments)
    exact = outputs[-1]
    apply_to_one(pipe, codebooks, name)
    draw(pipe, num_inference_steps=1, **arguments)
    handle.remove()
    return float((outputs[-1] - exact).norm() / exact.norm())


def test_each_layer_by_hand(pipe, codebooks):
    """Fails where other layers run AVQ as well, errors do not add up, or names are exchanged."""
    calls = recorded(pipe, seed=3, steps=2)
    apply_avq(pipe, codebooks, route="always")
    found = measure_sensitivity(pipe, [PROMPT], num_inference_steps=2, seed=3, **SIZES)
    names = [layer.name for layer in select_layers(pipe.unet, (0, 1))]
    assert list(found) == names
    for name in (names[0], names[-1]):
        apply_to_one(pipe, codebooks, name)
        with torch.no_grad():
            changed = torch.cat([pipe.unet(*args, **kwargs)[0] for (args, kwargs), _ in calls])
        exact = torch.cat([output for _, output in calls])
        error = (changed - exact).norm() / exact.norm()
        assert found[name] == pytest.approx(float(error), rel=1e-4)


def test_half_precision():
    """Catches squares that are summed in the dtype of the UNet."""
    pipe = tiny_pipe().to(torch.bfloat16)
    codebooks = random_codebooks(pipe.unet)
    name = select_layers(pipe.unet, (0, 1))[0].name
    apply_to_one(pipe, codebooks, name)
    found = measure_sensitivity(pipe, [PROMPT], num_inference_steps=1, seed=3, **SIZES)
    with avq_disabled(pipe):
        (((args, kwargs), exact),) = recorded(pipe, seed=3, steps=1)
    with torch.no_grad():
        changed = pipe.unet(*args, **kwargs)[0].double()
    error = (changed - exact.double()).norm() / exact.double().norm()
    assert found[name] == pytest.approx(float(error), rel=1e-5)


def test_features_of_an_adapter():
    """Fails where the UNet runs again without them: it takes them out of the pipeline's list."""
    torch.manual_seed(4)
    adapter = T2IAdapter(channels=[16, 32, 64, 64], num_res_blocks=1, downscale_factor=8).eval()
    pipe = tiny_pipe(cls=StableDiffusionAdapterPipeline, adapter=adapter)
    codebooks = random_codebooks(pipe.unet)
    image = torch.rand(1, 3, 128, 128, generator=torch.Generator().manual_seed(5))
    apply_avq(pipe, codebooks, route="always")
    found = measure_sensitivity(pipe, [PROMPT], num_inference_steps=1, progress=False, image=image)
    for name in (min(found, key=found.get), max(found, key=found.get)):
        expected = error_of_one_step(pipe, codebooks, name, image=image)
        assert found[name] == pytest.approx(expected, rel=1e-4)


def test_noise_damped_guidance(pipe, codebooks):
    """Fails where the weak evaluation, inside of the UNet's call, is measured as well."""
    size = {"height": 256, "width": 256}
    config = ScaleCrafterConfig((1, 2), num_dilated_steps=50, damped_dilations=(1, 1))
    apply_avq(pipe, codebooks, route="always")
    with scalecrafter(pipe, **size, config=config):
        calls = []
        handle = pipe.unet.register_forward_hook(lambda *call: calls.append(call))
        found = measure_sensitivity(pipe, [PROMPT], num_inference_steps=1, progress=False, **size)
        handle.remove()
        assert len(calls) == 2 * (1 + len(found))
        for name in (min(found, key=found.get), max(found, key=found.get)):
            expected = error_of_one_step(pipe, codebooks, name, **size)
            assert found[name] == pytest.approx(expected, rel=1e-4)


def test_prompts_are_averaged(pipe, codebooks):
    """Fails for a prompt or a seed that is taken twice."""
    apply_avq(pipe, codebooks, route="always")
    arguments = {"num_inference_steps": 1, **SIZES}
    both = measure_sensitivity(pipe, ["a fox", "a hen"], seed=3, **arguments)
    first = measure_sensitivity(pipe, ["a fox"], seed=3, **arguments)
    second = measure_sensitivity(pipe, ["a hen"], seed=4, **arguments)
    for name in both:
        low, high = sorted((first[name], second[name]))
        assert low < both[name] < high


@pytest.mark.parametrize("fails", [False, True], ids=["returns", "raises"])
def test_the_pipeline_is_left_as_it_was(pipe, codebooks, fails):
    """Fails for a hook that stays, or a layer that is left off or on."""
    apply_avq(pipe, codebooks, route="always")
    before = draw(pipe)
    if fails:
        with pytest.raises(ValueError, match="divisible by 8"):
            measure_sensitivity(pipe, [PROMPT], height=100, width=100)
    else:
        measure_sensitivity(pipe, [PROMPT], num_inference_steps=1, **SIZES)
    assert not pipe.unet._forward_hooks
    assert not pipe.unet._forward_pre_hooks
    assert torch.equal(draw(pipe), before)
    with avq_disabled(pipe):
        exact = draw(pipe)
        measure_sensitivity(pipe, [PROMPT], num_inference_steps=1, **SIZES)
        assert torch.equal(draw(pipe), exact)


def test_errors(pipe, codebooks):
    with pytest.raises(ValueError, match=r"no AVQ layer; call apply_avq\(pipe\)"):
        measure_sensitivity(pipe, [PROMPT])
    apply_avq(pipe, codebooks)
    with pytest.raises(TypeError, match="prompts must be a sequence of strings"):
        measure_sensitivity(pipe, PROMPT)
    with pytest.raises(ValueError, match="at least one prompt, but got none"):
        measure_sensitivity(pipe, [])
    with pytest.raises(ValueError, match="num_inference_steps must be at least 1, but got 0"):
        measure_sensitivity(pipe, [PROMPT], num_inference_steps=0)
    pipe = StableDiffusionImg2ImgPipeline.from_pipe(pipe)
    sketch = {"image": torch.zeros(1, 3, 64, 64), "strength": 0.1}
    with pytest.raises(RuntimeError, match="did not run in 2 steps; take more"):
        measure_sensitivity(pipe, [PROMPT], num_inference_steps=2, **sketch)
