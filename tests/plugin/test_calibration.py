"""Calibration: what is sampled, what is fitted, what is reported, and that the pipeline is left."""

from functools import partial
from importlib import import_module
from types import SimpleNamespace

import pytest
import torch
from diffusers import StableDiffusionImg2ImgPipeline
from PIL import Image
from tiny import CONFIG, draw, random_codebooks, tiny_pipe
from torch import Tensor

from avq_diffusers import (
    AVQConfig,
    apply_avq,
    avq_disabled,
    calibrate,
    measure_capture,
    measure_sensitivity,
    select_layers,
    summary,
)
from avq_diffusers.attention.diagnostics import capture, quantization_error
from avq_diffusers.attention.orders import query_order
from avq_diffusers.codebook.codebook import Codebook
from avq_diffusers.plugin.calibration import _LayerSample, _watch

PROMPTS = ["a red fox", "two blue hearts"]
STEPS = 4


def fit(pipe, config=CONFIG, prompts=PROMPTS, **arguments):
    defaults = {"num_inference_steps": STEPS, "keys_per_layer": 2048, "progress": False}
    return calibrate(pipe, prompts, config, **defaults | arguments)


def figures(codebooks) -> dict[str, dict[str, float]]:
    return codebooks.config["calibration"]["layers"]


def equal(first, second) -> bool:
    second = second.state_dict()
    return all(torch.equal(value, second[name]) for name, value in first.state_dict().items())


def hooks(pipe) -> dict[str, tuple[int, int]]:
    return {
        name: (len(module._forward_hooks), len(module._forward_pre_hooks))
        for name, module in pipe.unet.named_modules()
    }


@pytest.fixture(scope="module")
def calibrated():
    return fit(tiny_pipe())


def stream(capacity: int, seed: int, num_calls: int = 10, batch: int = 2, tokens: int = 50):
    """A sample of keys that hold their own number; the call of number i is i // (batch tokens)."""
    layer = SimpleNamespace(name="layer", num_heads=1)
    sample = _LayerSample(layer, capacity, 0, seed)
    sizes = []
    for call in range(num_calls):
        first = call * batch * tokens
        key = torch.arange(first, first + batch * tokens).float().view(batch, tokens, 1)
        sample.see_query(None, (), key)
        sample.see_key(None, (), key)
        sizes.append(len(sample.flat_keys))
    return sample.keys.flatten().long(), sizes


def test_the_sample_is_bounded_and_holds_no_key_twice():
    """Fails where old keys are kept beside the new, or priorities and keys fall out of step."""
    numbers, sizes = stream(capacity=130, seed=0)
    assert sizes == [100] + [130] * 9
    assert len(numbers.unique()) == 130


def test_the_sample_is_uniform_over_calls_batch_and_tokens():
    """Fails for the first keys, the last keys, or halving at each call."""
    counts = torch.zeros(1000)
    draws = 200
    for seed in range(draws):
        numbers, _ = stream(capacity=130, seed=seed)
        counts[numbers] += 1
    share = 0.13
    for size in (100, 50, 10):  # a call, an image of a call, neighbours
        cells = counts.view(-1, size).sum(1)
        expected = draws * size * share
        deviation = (draws * size * share * (1 - share)) ** 0.5
        assert (cells - expected).abs().max() < 5 * deviation
    assert (counts > 0).all()


def test_a_short_stream_is_kept_whole():
    numbers, _ = stream(capacity=5000, seed=0)
    assert torch.equal(numbers.sort().values, torch.arange(1000))


def test_every_timestep_of_every_prompt_is_sampled(monkeypatch):
    """Fails where only the first calls, or only one half of the guided batch, are seen."""
    pipe = tiny_pipe()
    layer = select_layers(pipe.unet, (0,))[1]  # in the first, the guided halves are still equal
    calls: list[Tensor] = []
    layer.attn.to_k.register_forward_hook(lambda module, inputs, key: calls.append(key.detach()))
    fitted = []
    module = import_module("avq_diffusers.plugin.calibration")  # the package names the function so
    original = module.fit_codebook

    def spy(keys, *arguments, **options):
        fitted.append(keys)
        return original(keys, *arguments, **options)

    monkeypatch.setattr(module, "fit_codebook", spy)
    fit(pipe, AVQConfig(4, 2, 2), keys_per_layer=1000)

    assert len(calls) == STEPS * len(PROMPTS)
    sampled = fitted[1].transpose(0, 1).flatten(1)  # (S, H D)
    sources = torch.cat([call.flatten(0, 1) for call in calls])
    distance, source = torch.cdist(
        sampled, sources, compute_mode="donot_use_mm_for_euclid_dist"
    ).min(1)
    assert len(sampled) == 1000
    assert distance.max() == 0
    per_half = source.div(256, rounding_mode="floor").bincount(minlength=2 * len(calls))
    expected = 1000 / len(per_half)
    assert (per_half - expected).abs().max() < 5 * expected**0.5


def test_same_seed_same_codebooks_other_seed_others(calibrated):
    """Fails where noise, sample or k-means read the global generator, or ignore the seed."""
    torch.manual_seed(123)
    assert equal(calibrated, fit(tiny_pipe()))
    assert not equal(calibrated, fit(tiny_pipe(), seed=1))


def test_prompt_i_runs_with_seed_plus_i():
    """Fails where the noise ignores the seed, or every prompt gets the same noise."""
    pipe = tiny_pipe()
    inputs = []
    pipe.unet.register_forward_pre_hook(
        lambda module, arguments: inputs.append(arguments[0].detach()[:1])
    )
    fit(pipe, seed=5)
    calibrated_on = inputs[0], inputs[STEPS]
    for index, first in enumerate(calibrated_on):
        inputs.clear()
        draw(pipe, seed=5 + index, num_inference_steps=STEPS)
        assert torch.equal(inputs[0], first)


def test_the_global_generator_is_not_touched():
    before = torch.random.get_rng_state()
    pipe = tiny_pipe()
    torch.random.set_rng_state(before)
    fit(pipe)
    assert torch.equal(torch.random.get_rng_state(), before)


def test_the_pipeline_is_left_as_it_was():
    """Fails for a hook, a processor or a progress-bar setting that stays."""
    pipe = tiny_pipe()
    pipe.set_progress_bar_config(disable=False, desc="mine")
    before = draw(pipe), hooks(pipe), pipe.unet.attn_processors
    fit(pipe)
    assert pipe._progress_bar_config == {"disable": False, "desc": "mine"}
    assert hooks(pipe) == before[1]
    after = pipe.unet.attn_processors
    assert all(after[name] is processor for name, processor in before[2].items())
    assert torch.equal(draw(pipe), before[0])


def test_a_failing_pipeline_is_left_as_it_was_too():
    pipe = tiny_pipe()
    apply_avq(pipe, random_codebooks(pipe.unet))
    before = hooks(pipe), dict(pipe._progress_bar_config)
    with pytest.raises(ValueError, match="divisible by 8"):
        fit(pipe, height=100, width=100)
    assert (hooks(pipe), pipe._progress_bar_config) == before
    draw(pipe)
    assert summary(pipe).rows[0].runs.startswith("AVQ")


def test_keys_come_from_exact_attention_and_avq_stays_as_it_was(calibrated):
    """Fails where calibration of a pipeline with AVQ sees AVQ's keys, or switches AVQ off or on."""
    pipe = tiny_pipe()
    exact = draw(pipe)
    apply_avq(pipe, random_codebooks(pipe.unet))
    with_avq = draw(pipe)
    assert not torch.equal(with_avq, exact)  # else its keys would be the exact ones anyway
    assert equal(fit(pipe), calibrated)
    assert torch.equal(draw(pipe), with_avq)
    with avq_disabled(pipe):
        fit(pipe)
        assert torch.equal(draw(pipe), exact)


def test_the_report_covers_every_layer(calibrated):
    names = [layer.name for layer in select_layers(tiny_pipe().unet, CONFIG.levels)]
    assert list(figures(calibrated)) == names
    for measured in figures(calibrated).values():
        assert set(measured) == {"quantization_error", "active_ratio", "capture"}
        assert 0 < measured["quantization_error"] < 1
        assert 0 < measured["active_ratio"] <= 1
        assert 0 < measured["capture"] < 1
    kept = calibrated.config["calibration"]
    assert (kept["num_prompts"], kept["num_inference_steps"], kept["seed"]) == (2, STEPS, 0)
    assert kept["keys_per_layer"] == 2048


def test_capture_grows_with_num_refined_to_everything(calibrated):
    """Fails where capture ignores num_refined or counts parents that were not chosen."""
    captures = [
        {
            name: measured["capture"]
            for name, measured in figures(fit(tiny_pipe(), AVQConfig(4, 2, p, 16))).items()
        }
        for p in (0, 1, 2, 4)
    ]
    for name in captures[0]:
        none, one, two, every = (capture[name] for capture in captures)
        assert none == 0
        assert 1 / 4 < one < two < every
        assert every == pytest.approx(1, abs=1e-5)


def test_capture_is_that_of_the_layer_on_the_grid_that_ran():
    """Fails for the transposed grid, another call than the middle one of the first prompt, the
    unguided half of the batch, the default order or importance tile, and without overrides."""
    pipe, calls = tiny_pipe(), {}
    overrides = {"1": {"num_refined": 1}}
    config = AVQConfig(8, 2, 3, 8, levels=(0, 1), importance_tile=2, overrides=overrides)
    layers = select_layers(pipe.unet, config.levels)
    for layer in layers:
        for projection in (layer.attn.to_q, layer.attn.to_k):
            found = calls.setdefault(layer.name, [])
            projection.register_forward_hook(lambda *call, found=found: found.append(call[-1]))
    height, width = 64, 192
    codebooks = fit(pipe, config, height=height, width=width)
    for layer in layers:
        query, key = (
            x[-1:].float().unflatten(-1, (layer.num_heads, -1)).transpose(1, 2)
            for x in calls[layer.name][STEPS // 2 * 2 :][:2]
        )
        scale = pipe.vae_scale_factor << layer.level
        sides = (height // scale, width // scale)
        captured = [
            capture(
                query,
                key,
                codebooks.codebook(layer.name),
                (3, 1)[layer.level],
                codewords="stored",
                query_tile=8,
                query_order=query_order(*grid),
                importance_tile=2,
            )
            .mean()
            .item()
            for grid in (sides, sides[::-1])
        ]
        assert captured[0] != pytest.approx(captured[1], rel=1e-6)
        assert figures(codebooks)[layer.name]["capture"] == pytest.approx(captured[0], rel=1e-6)


def test_calibrated_codebooks_beat_random_keys():
    """Fails for codewords of another layer or head, or for k-means that does not descend."""
    pipe = tiny_pipe()
    config = AVQConfig(4, 2, 2, levels=(0, 1))
    layers = select_layers(pipe.unet, config.levels)
    samples = [_LayerSample(layer, 2048, 0, 5) for layer in layers]
    with _watch(samples):
        draw(pipe, seed=7, num_inference_steps=STEPS)  # an image that calibration has not seen
    codebooks = fit(pipe, config)
    generator = torch.Generator().manual_seed(0)
    for layer, sample in zip(layers, samples, strict=True):
        chosen = sample.keys[:, torch.randperm(sample.keys.shape[1], generator=generator)]
        random = Codebook(chosen[:, :4], chosen[:, 4:12].unflatten(1, (4, 2)))
        stored = partial(quantization_error, sample.keys, codewords="stored")
        error = stored(codebooks.codebook(layer.name))
        assert (error < 0.9 * stored(random)).all(), layer.name


def test_overrides_size_single_layers():
    config = AVQConfig(4, 2, 2, levels=(0, 1), overrides={"1": {"num_parents": 6}})
    codebooks = fit(tiny_pipe(), config)
    sizes = {
        spec.level: codebooks.codebook(name).num_parents
        for name, spec in codebooks.layer_specs.items()
    }
    assert sizes == {0: 4, 1: 6}
    assert apply_avq(tiny_pipe(), codebooks)


def test_a_flat_configuration_has_no_children():
    codebooks = fit(tiny_pipe(), AVQConfig(8, 0, 0))
    name = next(iter(codebooks.layer_specs))
    assert codebooks.codebook(name).children.shape[2] == 0
    assert all(measured["capture"] == 0 for measured in figures(codebooks).values())


def test_img2img_takes_its_arguments_and_may_run_few_steps():
    """Strength 0.3 of 10 steps is 3 calls: fails where the capture waits for call 5."""
    pipe = tiny_pipe(cls=StableDiffusionImg2ImgPipeline)
    image = Image.new("RGB", (64, 64), "red")
    codebooks = fit(pipe, prompts=PROMPTS[:1], num_inference_steps=10, image=image, strength=0.3)
    assert all(0 < measured["capture"] < 1 for measured in figures(codebooks).values())
    other = fit(
        pipe,
        prompts=PROMPTS[:1],
        num_inference_steps=10,
        image=Image.effect_noise((64, 64), 90).convert("RGB"),
        strength=0.3,
    )
    assert not equal(codebooks, other)


def test_the_result_saves_and_applies(calibrated, tmp_path):
    calibrated.save_pretrained(tmp_path)
    loaded = type(calibrated).from_pretrained(tmp_path)
    assert equal(loaded, calibrated)
    assert figures(loaded) == figures(calibrated)
    pipe = apply_avq(tiny_pipe(), loaded)
    draw(pipe)
    assert sum(row.runs.startswith("AVQ") for row in summary(pipe).rows) == 6


@pytest.mark.parametrize("pipe", [object(), torch.nn.Linear(1, 1)])
@pytest.mark.parametrize("function", [calibrate, measure_capture, measure_sensitivity])
def test_what_is_no_pipeline_is_refused(function, pipe):
    """Catches an AttributeError, as of a UNet, which is all that `apply_avq` needs."""
    with pytest.raises(TypeError, match=f"a pipeline with a unet, but got {type(pipe).__name__}"):
        function(pipe, PROMPTS)


@pytest.mark.parametrize("function", [calibrate, measure_capture, measure_sensitivity])
def test_steps_that_are_no_int_are_refused(pipe, codebooks, function):
    """Catches an IndexError in the middle of the run."""
    apply_avq(pipe, codebooks)
    for steps in (1.5, "2", True):
        with pytest.raises(TypeError, match="num_inference_steps must be an int, but got"):
            function(pipe, PROMPTS, num_inference_steps=steps)


@pytest.mark.parametrize("function", [calibrate, measure_capture, measure_sensitivity])
def test_arguments_that_runs_set_are_refused(pipe, codebooks, function):
    """Fails where Python finds the same argument twice, deep in the first run."""
    apply_avq(pipe, codebooks)
    pipe.unet.register_forward_pre_hook(lambda *_: pytest.fail("it ran"))
    for name in ("prompt", "generator", "output_type"):
        message = f"are set for each prompt and cannot .*, but got {name}"
        with pytest.raises(TypeError, match=message):
            function(pipe, PROMPTS, **{name: "np"})


def test_one_string_is_refused():
    with pytest.raises(TypeError, match="prompts must be a sequence of strings, but got one"):
        calibrate(tiny_pipe(), "a red fox")
    with pytest.raises(TypeError, match="prompts must be a sequence of strings, but got 7 in it"):
        calibrate(tiny_pipe(), ["a red fox", 7])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"prompts": []}, "prompts must hold at least one prompt, but got none"),
        ({"config": AVQConfig(key_norm=True)}, "key_norm changes the model and needs training"),
        ({"config": AVQConfig(levels=(7,))}, "no self-attention at level 7"),
        (
            {"config": AVQConfig(4, 2, 2, overrides={"7": {"num_parents": 8}})},
            r"overrides must have levels or names .*, but got '7'; .* at level 0",
        ),
        ({"keys_per_layer": 3}, "keys_per_layer must be at least num_parents = 4, but got 3"),
        ({"keys_per_layer": -1}, "keys_per_layer must be at least 1, but got -1"),
        ({"num_inference_steps": 0}, "num_inference_steps must be at least 1, but got 0"),
    ],
    ids=["prompts", "key_norm", "level", "override", "few-keys", "negative-keys", "steps"],
)
def test_bad_arguments_are_refused_before_the_pipeline_runs(arguments, message):
    pipe = tiny_pipe()
    runs = []
    pipe.unet.register_forward_pre_hook(lambda *_: runs.append(1))
    with pytest.raises(ValueError, match=message):
        fit(pipe, **arguments)
    assert not runs


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"config": "M4P2C2"}, "config must be an AVQConfig, but got 'M4P2C2'"),
        ({"num_inference_steps": 2.5}, "num_inference_steps must be an int, but got 2.5"),
        ({"keys_per_layer": 128.0}, "keys_per_layer must be an int, but got 128.0"),
    ],
    ids=["config", "steps", "keys"],
)
def test_arguments_of_another_type_are_refused(arguments, message):
    with pytest.raises(TypeError, match=message):
        fit(tiny_pipe(), **arguments)


def test_fused_projections_are_named():
    pipe = tiny_pipe()
    pipe.unet.fuse_qkv_projections()
    with pytest.raises(RuntimeError, match="calibrate before compiling or fusing projections"):
        fit(pipe)


def test_layers_that_do_not_run_are_named():
    """A compiled UNet runs without hooks; its codebooks must not be fitted to nothing."""
    pipe = tiny_pipe()
    pipe.unet.forward = lambda sample, *arguments, **options: (sample,)
    with pytest.raises(RuntimeError, match=r"attn1 did not run while calibrating"):
        fit(pipe)
