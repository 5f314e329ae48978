"""`measure_sensitivity`: what one layer alone changes, and that nothing stays behind."""

from dataclasses import replace

import pytest
import torch
from tiny import CONFIG, draw, random_codebooks, tiny_pipe

from avq_diffusers import (
    AVQCodebooks,
    apply_avq,
    avq_disabled,
    measure_sensitivity,
    remove_avq,
    select_layers,
)

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
    """Arguments and output of the UNet's calls while a picture is drawn."""
    calls = []
    handle = pipe.unet.register_forward_hook(
        lambda unet, args, kwargs, output: calls.append(((args, kwargs), output[0])),
        with_kwargs=True,
    )
    generator = torch.Generator().manual_seed(seed)
    pipe(PROMPT, 128, 128, num_inference_steps=steps, generator=generator, output_type="latent")
    handle.remove()
    return calls


def test_each_layer_by_hand(pipe, codebooks):
    """Fails where other layers run AVQ as well, errors do not add up, or names are exchanged."""
    calls = recorded(pipe, seed=3, steps=2)
    apply_avq(pipe, codebooks, route="always")
    found = measure_sensitivity(pipe, [PROMPT], num_inference_steps=2, seed=3, **SIZES)
    names = [layer.name for layer in select_layers(pipe.unet, (0, 1))]
    assert list(found) == names
    for name in (names[0], names[-1]):
        config = replace(CONFIG, exact=tuple(other for other in names if other != name))
        book = {name: codebooks.codebook(name)}
        one = AVQCodebooks.from_codebooks(config, book, pipe.unet)
        apply_avq(pipe, one, route="always")
        with torch.no_grad():
            changed = torch.cat([pipe.unet(*args, **kwargs)[0] for (args, kwargs), _ in calls])
        exact = torch.cat([output for _, output in calls])
        error = (changed - exact).norm() / exact.norm()
        assert found[name] == pytest.approx(float(error), rel=1e-4)


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
    assert torch.equal(draw(pipe), before)
    with avq_disabled(pipe):
        exact = draw(pipe)
        measure_sensitivity(pipe, [PROMPT], num_inference_steps=1, **SIZES)
        assert torch.equal(draw(pipe), exact)


def test_errors(pipe, codebooks):
    with pytest.raises(ValueError, match=r"no AVQ layer; call apply_avq\(pipe, codebooks\)"):
        measure_sensitivity(pipe, [PROMPT])
    apply_avq(pipe, codebooks)
    with pytest.raises(TypeError, match="prompts must be a sequence of strings"):
        measure_sensitivity(pipe, PROMPT)
    with pytest.raises(ValueError, match="at least one prompt, but got none"):
        measure_sensitivity(pipe, [])
    with pytest.raises(ValueError, match="num_inference_steps must be at least 1, but got 0"):
        measure_sensitivity(pipe, [PROMPT], num_inference_steps=0)
