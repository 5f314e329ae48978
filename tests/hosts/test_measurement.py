"""`measure_error`: effects and times by threshold; what measuring and calibrating refuse."""

import json
import math
from contextlib import nullcontext
from dataclasses import replace
from functools import cache
from itertools import pairwise
from typing import ClassVar

import numpy as np
import pytest
import tomesd
import torch
from diffusers import (
    DDPMScheduler,
    EDMEulerScheduler,
    FirstBlockCacheConfig,
    FlowMatchEulerDiscreteScheduler,
    HeunDiscreteScheduler,
    IFPipeline,
    StableDiffusion3Img2ImgPipeline,
    StableDiffusion3Pipeline,
    StableDiffusionPipeline,
    StableDiffusionXLModularPipeline,
)
from hosts.kinds import ADDED
from tiny import LAYER, quiet, sdxl_pipe, small_unet, tiny_pipe, tiny_tokenizer, tiny_unet
from tiny_transformers import sd3_pipe, sd3_transformer, t5_encoder, wan_transformer
from tiny_vision import images, tiny_vision
from tqdm import tqdm

from avq_diffusers import AVQConfig, apply_avq, calibrate, measure_error, remove_avq
from avq_diffusers.hosts.core import routing
from avq_diffusers.hosts.measuring import exact_runs, kept_profiles, measurement, progress
from avq_diffusers.hosts.measuring.allocation import THRESHOLDS as USUAL
from avq_diffusers.hosts.measuring.measurement import output_errors
from avq_diffusers.hosts.measuring.profile import Part
from avq_diffusers.mini import MINI_SD, default_prompts

PROMPT = "a red fox"
CONFIG = AVQConfig.parse("M8C2T1e-4", query_tile=16)
THRESHOLDS = (1e-2, 1.0, 100.0)
SIZE = {"height": 64, "width": 64, "progress": False}


@pytest.fixture(autouse=True)
def coarse_thresholds(monkeypatch):
    """Tiny models need all their few keys at the usual ones."""
    monkeypatch.setattr(exact_runs, "THRESHOLDS", THRESHOLDS)


@pytest.fixture
def pipe():
    """With four layers of self-attention, all at level 0."""
    return tiny_pipe(small_unet())


def two_layer_pipe(cls=StableDiffusion3Pipeline):
    return sd3_pipe(cls, transformer=sd3_transformer(num_layers=2, dual_attention_layers=()))


@cache
def unrun_pipe():
    """Fails if it runs."""
    pipe = tiny_pipe()
    pipe.unet.register_forward_pre_hook(lambda *_: pytest.fail("it ran"))
    return pipe


def measure(pipe, config=CONFIG, **arguments):
    return measure_error(pipe, [PROMPT], config, **SIZE | {"num_inference_steps": 3} | arguments)


def noise_of(pipe, source, tolerance=None, prompt=PROMPT, **run):
    """The UNet's outputs along the exact run, each from the same inputs with AVQ as well."""
    exact, found = [], []

    def repeat(model, args, kwargs, output):
        if len(found) == len(exact):
            exact.append(output[0])
            apply_avq(pipe, source, tolerance=tolerance, route="always")
            found.append(model(*args, **kwargs)[0])
            remove_avq(pipe)

    with pipe.unet.register_forward_hook(repeat, with_kwargs=True):
        pipe(prompt, **run, generator=torch.Generator().manual_seed(5), output_type="latent")
    return exact, found


class TestMeasure:
    def test_effects_are_those_of_one_layer_alone(self, pipe):
        """By hand. Catches the attention's own error in place of the output's, parts, layers or
        thresholds mixed up, and another seed. Before the last part, only the middle threshold is
        tried, and the others follow it."""
        profile = measure(pipe, parts=3, seed=5)
        assert [*profile.parts] == [1000, 341, 6]  # calls at 667, 334 and 1
        assert {part.share for part in profile.parts.values()} == {1 / 3}
        run = {"height": 64, "width": 64, "num_inference_steps": 3}
        names = [one.layer.name for one in profile.layers]
        for layer, place in ((0, 0), (2, 1), (3, 2)):
            others = tuple(name for name in names if name != names[layer])
            config = CONFIG.changed(threshold=THRESHOLDS[place], exact=others)
            exact, found = noise_of(pipe, config, **run)
            expected = [float((a - b).norm() / b.norm()) for a, b in zip(found, exact, strict=True)]
            effects = np.array([x.effects for x in profile.layers[layer].parts.values()])
            assert min(expected) > 0
            if place == 1:
                assert effects[:, 1] == pytest.approx(expected, rel=1e-2)
            else:
                like_middle = expected[-1] * (effects[:, 1] / effects[-1, 1]).clip(0.1, 10)
                assert effects[:, place] == pytest.approx(like_middle, rel=1e-2)

    def test_columns_and_their_cost(self, pipe):
        """Catches columns of other thresholds, and a CPU's time without what all tiles share."""
        for one in measure(pipe, parts=1, num_inference_steps=1).layers:
            (found,) = one.parts.values()
            columns, times = np.array(found.columns), np.array(found.times)
            assert 8 <= columns[2] <= columns[1] <= columns[0] <= 64
            assert times / one.exact_time == pytest.approx((columns + 8 + 2) / 64, rel=1e-3)

    def test_all_layers_together(self, pipe):
        """Catches a correction by layers alone, by the mean over examples, or of another part."""
        arguments = {**SIZE, "num_inference_steps": 2}
        prompts = [PROMPT, "a dog"]
        profile = measure_error(pipe, prompts, CONFIG, **arguments, parts=2)
        raw = replace(profile, parts={x: Part(0.5) for x in profile.parts}, margin=1.0)
        limits = dict.fromkeys(raw.parts, measurement.CHECKED)
        plan = raw.bounded(limits)
        assert plan.error > 0
        errors = []
        for start in plan.errors:
            exact = replace(raw, parts={x: Part(0.5, 1 if x == start else 1e9) for x in raw.parts})
            choices = exact.bounded(limits).choices
            (of_part,) = output_errors(pipe, prompts, [choices], CONFIG, **arguments, parts=2)
            largest = [max(parts.values()) for parts in of_part]
            errors.append(max(largest))
            assert largest[0] != largest[1]
            expected = max(largest) / plan.errors[start]
            assert profile.parts[start].correction == pytest.approx(expected, rel=1e-3)
        (together,) = output_errors(pipe, prompts, [plan.choices], CONFIG, **arguments, parts=2)
        assert max(max(x.values()) for x in together) == pytest.approx(max(errors))

    def test_a_tolerance_holds_on_another_prompt(self, monkeypatch):
        """Plainly, in every step, with the embedded model. Catches errors that are weighted, and a
        bound that holds because all layers are exact."""
        monkeypatch.setattr(exact_runs, "MOST_REPEATED", 30)
        monkeypatch.setattr(exact_runs, "THRESHOLDS", USUAL)
        pipe = quiet(StableDiffusionPipeline.from_pretrained(MINI_SD))
        config = AVQConfig.parse("M16C4T1e-4", levels=(0,), exact=("down_blocks",))
        run = {"height": 64, "width": 64, "guidance_scale": 3.0, "num_inference_steps": 2}
        prompts = default_prompts()[:2]
        profile = measure_error(pipe, prompts, config, **run, parts=2, progress=False)
        exact, found = noise_of(pipe, profile, tolerance=0.01, prompt="a green ring", **run)
        errors = [float((a - b).norm() / b.norm()) for a, b in zip(found, exact, strict=True)]
        assert 0.001 < max(errors) < 0.012

    def test_a_margin_for_other_prompts(self, pipe):
        """Catches a profile without one, and a margin in what is predicted."""
        profile = measure(pipe, num_inference_steps=1)
        plain = replace(profile, margin=1.0)
        assert profile.margin == measurement.MARGIN == 2.25
        assert profile.uniform(1.0) == plain.uniform(1.0)
        assert profile.within(0.225).choices == plain.within(0.1).choices

    def test_fewer_steps_than_parts(self, pipe):
        """Catches parts without a step."""
        parts = measure(pipe, parts=3, num_inference_steps=2).parts
        assert {start: part.share for start, part in parts.items()} == {1000: 0.5, 6: 0.5}

    def test_parts_of_a_flow(self):
        """Catches parts of a transformer that follow something other than the noise level."""
        pipe = two_layer_pipe()
        size = {"height": 32, "width": 48, "max_sequence_length": 8}
        arguments = {**size, "num_inference_steps": 3, "parts": 3, "progress": False}
        profile = measure_error(pipe, [PROMPT], CONFIG, **arguments)  # at 1000, 751 and 9
        assert [*profile.parts] == [1000, 762, 14]
        plan = profile.within(min(0.5, profile.uniform(1.0).error))
        ((errors,),) = output_errors(pipe, [PROMPT], [plan.choices], CONFIG, **arguments)
        assert max(errors.values()) == pytest.approx(plan.error, rel=0.2)

    def test_parts_of_a_pipeline_that_returns_arrays(self):
        """DeepFloyd IF has no latents."""
        pipe = quiet(
            IFPipeline(
                tiny_tokenizer(),
                t5_encoder(),
                tiny_unet(**ADDED, in_channels=3, out_channels=6),
                DDPMScheduler(variance_type="learned_range"),
                *(None, None, None),
                requires_safety_checker=False,
            )
        )
        arguments = {"height": 16, "width": 16, "num_inference_steps": 2, "parts": 2}
        profile = measure_error(pipe, [PROMPT], CONFIG, **arguments, progress=False)
        assert len(profile.parts) == 2

    def test_parts_of_img2img(self, monkeypatch):
        """Catches parts of the steps that are skipped."""
        monkeypatch.setattr(exact_runs, "MOST_REPEATED", 12)
        pipe = two_layer_pipe(StableDiffusion3Img2ImgPipeline)
        size = {"height": 32, "width": 48}
        image = {"image": torch.rand(1, 3, 32, 48), "strength": 0.5, "max_sequence_length": 8}
        arguments = {**size, **image, "num_inference_steps": 4, "parts": 2, "progress": False}
        parts = measure_error(pipe, [PROMPT], CONFIG, **arguments).parts.values()
        assert [part.share for part in parts] == [0.5, 0.5]

    def test_parts_of_a_base_model(self, monkeypatch):
        """Catches parts of the steps that are left to a refiner."""
        monkeypatch.setattr(exact_runs, "MOST_REPEATED", 12)
        arguments = {"num_inference_steps": 6, "denoising_end": 0.7, "progress": False}
        config = CONFIG.changed(levels=(1,))
        parts = measure_error(sdxl_pipe(), [PROMPT], config, **SIZE | arguments).parts.values()
        assert [part.share for part in parts] == [0.25, 0.25, 0.5]

    def test_a_stopped_run_is_refused(self, pipe):
        """Catches a message about numbers in the profile."""

        def stop(pipe, *_):
            pipe._interrupt = True
            return {}

        with pytest.raises(ValueError, match=r"stopped before its last part.* or pass parts=1"):
            measure(pipe, parts=3, callback_on_step_end=stop)
        assert {*measure(pipe, parts=1, callback_on_step_end=stop).parts} == {1000}

    def test_many_layers_are_measured_in_turns(self, pipe, monkeypatch):
        """Catches a part of the denoising or a layer that has no turn."""
        monkeypatch.setattr(exact_runs, "MOST_REPEATED", 20)  # of 12 calls, 4 layers
        calls, arguments = [], {**SIZE, "num_inference_steps": 6, "parts": 3}
        with pipe.unet.register_forward_pre_hook(lambda *_: calls.append(1)):
            profile = measure_error(pipe, [PROMPT, "a dog"], CONFIG, **arguments)
        assert len(calls) == 12 + (8 + 4 * 3) + 12 * 2
        for one in profile.layers:
            assert len({tuple(part.effects) for part in one.parts.values()}) == 3

    def test_a_cache_of_earlier_calls_is_refused(self):
        class Pipe:
            transformer = wan_transformer()

            def __call__(self, prompt):
                raise AssertionError("it ran")

        Pipe.transformer.enable_cache(FirstBlockCacheConfig(threshold=0.1))
        with pytest.raises(ValueError, match="measure before enable_cache"):
            measure_error(Pipe(), [PROMPT])

    def test_parts_of_several_models_are_refused(self):
        """Catches effects of a model in parts that another one runs."""

        class Pipe:
            transformer, transformer_2 = wan_transformer(), wan_transformer()
            scheduler = FlowMatchEulerDiscreteScheduler()

            def __call__(self, prompt):
                raise AssertionError("it ran")

        with pytest.raises(ValueError, match=r"parts must be 1 .* with several models"):
            measure_error(Pipe(), [PROMPT], parts=2)

    @pytest.mark.parametrize(
        ("make", "examples", "arguments"),
        [
            (lambda: tiny_pipe(small_unet()), [PROMPT], {"height": 64, "num_inference_steps": 1}),
            (tiny_vision, images(), {}),
        ],
        ids=["unet", "vision"],
    )
    def test_a_compiled_model_is_measured_eagerly(self, make, examples, arguments):
        """Catches a layer that does not run, as hooks in compiled code do not."""
        pipe, config = make(), CONFIG
        profile = measure_error(pipe, examples, config, progress=False, **arguments)
        getattr(pipe, "unet", pipe).compile(backend=lambda *_: pytest.fail("it was compiled"))
        assert measure_error(pipe, examples, config, progress=False, **arguments) == profile

    def test_nan_names_the_layer(self, pipe):
        pipe.unet.get_submodule(LAYER).to_k.weight.data[0, 0] = math.nan
        with pytest.raises(ValueError, match=rf"attention of {LAYER} returns NaN or infinity"):
            measure(pipe, num_inference_steps=1)

    def test_samplers_without_training_timesteps(self, pipe):
        """Catches a refusal where nobody asked for parts."""
        pipe.scheduler = EDMEulerScheduler()
        with pytest.raises(ValueError, match="measure_error with several parts need a sampler"):
            measure(pipe, parts=3)
        assert {*measure(pipe, num_inference_steps=4).parts} == {1000}


@pytest.mark.parametrize(
    ("make", "examples", "arguments", "error", "message"),
    [
        *(
            (unrun_pipe, [PROMPT], {"config": AVQConfig(**{name: value})}, ValueError, message)
            for name, value, message in (
                ("overrides", {"0": {"num_refined": 1}}, "chooses thresholds .*; drop overrides"),
                ("num_refined", 8, "a tolerance chooses thresholds .*; drop num_refined"),
                ("key_norm", True, "a tolerance chooses thresholds .*; drop key_norm"),
            )
        ),
        (
            unrun_pipe,
            [PROMPT],
            {"num_inference_steps": 1001},
            ValueError,
            "at most 1000, but got 1",
        ),
        (
            unrun_pipe,
            [PROMPT],
            {"config": AVQConfig(num_refined=8, codewords="stored")},
            ValueError,
            'thresholds .*; drop codewords="stored"',
        ),
        (unrun_pipe, [PROMPT], {"parts": 0}, ValueError, "parts must be at least 1, but got 0"),
        (tiny_vision, images(), {"parts": 2}, ValueError, "parts must be 1 .* but got 2"),
        (sd3_transformer, [PROMPT], {}, TypeError, "the pipeline of a transformer, but got SD3"),
        (tiny_vision, 3, {}, TypeError, "pixel_values must be tensors, but got int"),
        (tiny_vision, [3], {}, TypeError, "pixel_values must be tensors, but got int"),
        (tiny_vision, [], {}, ValueError, "at least one batch"),
        (tiny_vision, torch.ones(3, 64, 64), {}, ValueError, r"be batches .*got \(3, 64, 64\)"),
        (tiny_vision, [images(), images(32)], {}, ValueError, "one height and width"),
    ],
)
def test_refused(make, examples, arguments, error, message):
    with pytest.raises(error, match=message):
        measure_error(make(), examples, **arguments)


class Bar(tqdm):
    """A progress bar that is kept, with how far it got after each update."""

    shown: ClassVar[list] = []

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.told, self.reached = self.total, [0]
        self.shown.append(self)

    def update(self, number=1):
        super().update(number)
        self.reached.append(self.n)


@pytest.fixture
def bars(monkeypatch):
    for module in (progress, routing):
        monkeypatch.setattr(module, "tqdm", Bar)
    monkeypatch.setattr(exact_runs, "MOST_REPEATED", 12)
    monkeypatch.setattr(Bar, "shown", [])
    return Bar.shown


class TestProgress:
    """One bar, whose total is known at the start and reached at the end, never passed."""

    @pytest.mark.parametrize(
        ("make", "examples", "arguments"),
        [
            (
                lambda: tiny_pipe(small_unet()),
                [PROMPT, "a dog"],
                {"height": 64, "width": 64, "num_inference_steps": 2, "parts": 2},
            ),
            (
                two_layer_pipe,
                [PROMPT],
                {"height": 32, "width": 48, "max_sequence_length": 8, "num_inference_steps": 2},
            ),
            (tiny_vision, images(), {}),
        ],
        ids=["unet", "transformer", "vision"],
    )
    def test_it_counts_model_calls(self, bars, make, examples, arguments):
        """Catches calls that are not counted, and a total that only counts the exact ones."""
        pipe, calls = make(), []
        model = getattr(pipe, "unet", getattr(pipe, "transformer", pipe))
        with model.register_forward_pre_hook(lambda *_: calls.append(1)):
            measure_error(pipe, examples, CONFIG, **arguments)
        (bar,) = bars
        assert bar.desc == "measuring layers"
        assert bar.unit == "call"
        assert bar.told == bar.total == bar.n
        # Turns of fewer layers are planned like the others.
        assert 0.7 * bar.n < len(calls) <= bar.n
        assert sum(b - a == 1 for a, b in pairwise(bar.reached)) >= len(calls) - 2

    def test_more_calls_than_planned(self, bars, pipe):
        """Catches a bar that is full long before the end."""
        pipe.scheduler = HeunDiscreteScheduler()
        measure(pipe, parts=1, progress=True)
        (bar,) = bars
        assert bar.told == bar.total == bar.n == max(bar.reached)
        busy = sum(x < bar.n for x in bar.reached)
        assert busy > 0.8 * len(bar.reached)

    def test_fewer_calls_than_planned(self, bars):
        """Catches a bar that stops at half."""
        pipe = two_layer_pipe(StableDiffusion3Img2ImgPipeline)
        run = {"image": torch.rand(1, 3, 32, 48), "strength": 0.5, "max_sequence_length": 8}
        run |= {"height": 32, "width": 48, "num_inference_steps": 4, "parts": 1}
        measure_error(pipe, [PROMPT], CONFIG, **run)
        (bar,) = bars
        assert bar.told == bar.total == bar.n
        assert max(b - a for a, b in pairwise(bar.reached)) < bar.n / 3

    def test_a_function_in_place_of_the_bar(self, bars, pipe):
        told = []
        measure(pipe, num_inference_steps=1, progress=lambda *one: told.append(one))
        assert all(bar.disable for bar in bars)
        assert {(name, total) for name, _, total in told} == {("measuring layers", len(told))}
        assert [done for _, done, _ in told] == [*range(1, len(told) + 1)]

    def test_it_says_what_runs(self, bars, pipe, monkeypatch, tmp_path):
        """Catches "measuring" above a kept profile, and a check without a bar."""
        monkeypatch.setattr(kept_profiles, "user_cache_path", lambda name: tmp_path / name)
        run = {"height": 64, "width": 64, "num_inference_steps": 1, "prompt": PROMPT}
        for _ in range(2):
            apply_avq(pipe, CONFIG, tolerance=0.02, **run)
        apply_avq(pipe, CONFIG, tolerance=0.02, **run, progress=False)
        names = "measuring layers", "checking the kept profile"
        assert [x.desc for x in bars if hasattr(x, "desc")] == [
            f"{name} for a tolerance of 2 %" for name in names
        ]
        for bar in bars[:2]:
            assert bar.told == bar.total == bar.n


def test_the_prompt_goes_by_its_name():
    """Catches pipelines that take something else first."""

    class ImageFirst(StableDiffusionPipeline):
        def __call__(self, image=None, prompt=None, height=None, width=None, **run):
            assert image is None
            return super().__call__(prompt, height, width, **run)

    assert measure(tiny_pipe(small_unet(), ImageFirst), num_inference_steps=1).layers


def test_modular_pipelines():
    pipe = StableDiffusionXLModularPipeline()
    pipe.unet = small_unet()
    with pytest.raises(TypeError, match="StableDiffusionXLModularPipeline is modular and cannot"):
        measure_error(pipe, [PROMPT])


@pytest.mark.parametrize(
    ("prompts", "arguments", "error", "message"),
    [
        ([PROMPT], {"hieght": 64}, TypeError, "StableDiffusionPipeline takes no argument hieg"),
        *(
            ([PROMPT], {name: "np"}, TypeError, f"are set for each .*, but got {name}")
            for name in ("prompt", "generator", "output_type")
        ),
        ([PROMPT, " "], {}, ValueError, "prompts must not be empty, but one is"),
        ([PROMPT, "a\udcff"], {}, ValueError, "prompt must be text, .* character 2 is a lone sur"),
        ([PROMPT], {"negative_prompt": "\udcff"}, ValueError, "negative_prompt must be text, bu"),
        ([PROMPT], {"seed": 1.5}, TypeError, "seed must be an int, but got 1.5"),
        ([PROMPT], {"height": "128"}, TypeError, "height must be an int, but got '128'"),
        ([PROMPT, 7], {}, TypeError, "a sequence of strings, but got 7 in it"),
        (7, {}, TypeError, "must be a string or a sequence of strings, but got 7"),
        ([], {}, ValueError, "prompts must hold at least one prompt, but got none"),
    ],
)
def test_examples(prompts, arguments, error, message):
    """Those of `calibrate` are checked by the same function."""
    with pytest.raises(error, match=message):
        measure_error(unrun_pipe(), prompts, **SIZE | arguments)


@pytest.mark.parametrize("measure", [calibrate, measure_error])
class TestRefusals:
    """Before the pipeline runs, but for the last."""

    @pytest.mark.parametrize(
        ("arguments", "error", "message"),
        [
            ({"num_inference_steps": 1.5}, TypeError, "num_inference_steps must be an "),
            ({"num_inference_steps": 0}, ValueError, "steps must be at least 1, but got"),
            ({"config": "M4P2C2"}, TypeError, "config must be an AVQConfig, but got 'M4"),
            ({"config": AVQConfig(levels=(7,))}, ValueError, "no self-attention at leve"),
        ],
    )
    def test_arguments(self, measure, arguments, error, message):
        with pytest.raises(error, match=message):
            measure(unrun_pipe(), [PROMPT], **SIZE | arguments)

    @pytest.mark.parametrize(
        ("thing", "message"),
        [
            (object(), "expected a pipeline with a unet or a transformer, or a model, but got obj"),
            (torch.nn.Linear(1, 1), "AVQ does not know the attention of Linear"),
            (small_unet(), "expected the pipeline of a UNet, but got UNet2DConditionModel"),
        ],
    )
    def test_no_pipeline(self, measure, thing, message):
        with pytest.raises(TypeError, match=message):
            measure(thing, [PROMPT])

    def test_layers_that_do_not_run(self, pipe, measure):
        pipe.unet.forward = lambda x, *_, **__: (x,)
        with pytest.raises(RuntimeError, match=r"attn1 .*did not run"):
            measure(pipe, [PROMPT], CONFIG, num_inference_steps=1, **SIZE)


def test_layers_that_avq_does_not_serve(pipe):
    """Catches codebooks that were fitted to nothing, and a tolerance that ends in an error."""
    tomesd.apply_patch(pipe, use_rand=False)
    run = {"num_inference_steps": 1, **SIZE}
    with pytest.raises(RuntimeError, match="no call that AVQ serves: tokens are not the grid"):
        calibrate(pipe, [PROMPT], CONFIG, **run)
    with pytest.warns(UserWarning, match="layers, which stay exact: tokens are not the grid"):
        profile = measure_error(pipe, PROMPT, CONFIG, **run)
    choices = profile.within(0.02).choices.values()
    assert {str(choice) for parts in choices for choice in parts.values()} == {"exact"}
    assert "exact" in str(profile)


def test_times_on_a_gpu_are_measured_once_and_kept(monkeypatch, tmp_path):
    """Catches a choice that changes with a second measurement, one name for two attentions, and a
    time of another version's kernels."""
    times = iter((1.0, 2.0, 3.0))
    monkeypatch.setattr(routing, "user_cache_path", lambda name: tmp_path / name)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "GPU X")
    monkeypatch.setattr(torch.accelerator, "device_index", lambda index: nullcontext())
    monkeypatch.setattr(routing, "_graph_milliseconds", lambda call: next(times))
    try:
        for _ in range(2):
            routing._table.cache_clear()
            kept = [routing.kept_milliseconds(x, torch.device("cuda"), None) for x in "ab"]
            assert kept == [1.0, 2.0]
        monkeypatch.setattr(routing, "versions", lambda: "torch 3.0")
        assert routing.kept_milliseconds("a", torch.device("cuda"), None) == 3.0
    finally:
        routing._table.cache_clear()
    (path,) = tmp_path.rglob("routes.json")
    assert [*json.loads(path.read_text()).values()] == [1.0, 2.0, 3.0]
