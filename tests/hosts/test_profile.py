"""The dial from fast to exact: what a tolerance chooses, what then runs, and what is kept."""

import json
import math
import re
import warnings
from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from itertools import product
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from diffusers import StableDiffusionPAGPipeline
from diffusers.guiders import ClassifierFreeGuidance
from PIL import Image
from tiny import LAYER, LORA, draw, random_codebooks, tiny_pipe, tiny_unet, two_level_pipe
from tiny_transformers import predict, sd3_transformer, wan_transformer
from tiny_vision import ANY_SIZE, features, images, tiny_vision

from avq_diffusers import (
    AVQConfig,
    apply_avq,
    measure_error,
    select_layers,
    set_threshold,
    summary,
)
from avq_diffusers.hosts import output_errors, verbs
from avq_diffusers.hosts.core.layers import LayerSpec
from avq_diffusers.hosts.measuring import allocation, exact_runs, kept_profiles, profile
from avq_diffusers.hosts.measuring.allocation import OPERATIONS, allocate, power_laws
from avq_diffusers.hosts.measuring.profile import ErrorProfile, LayerEffects, Measured, Part
from avq_diffusers.hosts.models.registry import models_of

PROMPT = "a red fox"
CONFIG = AVQConfig.parse("M8C2T1e-4", query_tile=16, levels=(0, 1))
THRESHOLDS = (1e-2, 1.0, 100.0)
AVQ = "M8C2T100"
SPEC = LayerSpec("a", 0, 2, 8)
NUMBERS = {"effects": [0.01, 0.02], "columns": [20.0, 10.0], "times": [0.5, 0.25]}
STORED = {
    "layer": SPEC.stored,
    "num_tokens": 64,
    "exact_time": 1.0,
    "parts": {"500": NUMBERS | {"effects": [0.3, 0.4]}, "1000": NUMBERS},
}
PARTS = {
    "500": {"share": 0.25, "correction": 1.0},
    "1000": {"share": 0.75, "correction": 1.0},
}


class Kind(NamedTuple):
    """How to make a model, what it gives, what it is measured on, and how."""

    make: Callable[[], Any]
    draw: Callable[[Any], torch.Tensor]
    examples: dict[str, Any]
    run: dict[str, Any]
    config: AVQConfig = AVQConfig.parse("M4C2T1e-4", query_tile=16)


class Wan22:
    """Has a transformer for each half of the steps."""

    set_progress_bar_config = staticmethod(lambda **_: None)

    def __init__(self):
        self.transformer, self.transformer_2 = wan_transformer(), wan_transformer()

    def __call__(self, prompt="", num_inference_steps=1, generator=None, output_type=""):
        other = {"hidden_states": torch.ones(2, 4, 3, 16, 24)}
        return torch.cat([predict(self.transformer), predict(self.transformer_2, **other)])


QUIET = {"progress": False}
RUN = {"num_inference_steps": 2, "seed": 3, **QUIET}
PROMPTED = {"prompt": [PROMPT]}
LEVELS = AVQConfig.parse("M4C2T1e-4", query_tile=16, levels=(0, 1))


UNET = Kind(two_level_pipe, draw, PROMPTED, {**RUN, "height": 64, "width": 64}, LEVELS)
WAN22 = Kind(Wan22, Wan22.__call__, PROMPTED, QUIET)
VISION = Kind(tiny_vision, features, {"pixel_values": (images(), -2 * images()[:1])}, QUIET)

# Shared by tests of what is refused.
PIPE, TRANSFORMER, VIT = map(cache, (tiny_pipe, sd3_transformer, tiny_vision))


def for_kinds(**kinds):
    return pytest.mark.parametrize("kind", kinds.values(), ids=[*kinds])


@pytest.fixture(autouse=True)
def many_choices(monkeypatch):
    """Few layers fill a tolerance only with a dense series."""
    monkeypatch.setattr(allocation, "PER_DECADE", 20)


@pytest.fixture
def coarse_thresholds(monkeypatch):
    """Tiny models need all their few keys at the usual ones; few calls tell them apart."""
    monkeypatch.setattr(exact_runs, "THRESHOLDS", THRESHOLDS)
    monkeypatch.setattr(exact_runs, "MOST_REPEATED", 24)


def profile_of(pipe, choices, config=CONFIG, num_tokens=1):
    """A profile whose tolerance 0.1 gives every layer these choices, by timestep: exact attention,
    or the coarsest threshold."""
    parts = {
        start: Measured([1e-3 if x == AVQ else 1.0] * 3, [30.0, 20.0, 10.0], [0.9, 0.7, 0.5])
        for start, x in choices.items()
    }
    layers = select_layers(getattr(pipe, "unet", pipe), config.levels, config.exact)
    found = [LayerEffects(LayerSpec(**x.stored), num_tokens, 1.0, parts) for x in layers]
    shares = {start: Part(1 / len(choices)) for start in choices}
    return ErrorProfile(config, tuple(found), shares, THRESHOLDS)


def configs(pipe) -> list[str]:
    """Of the layers with AVQ."""
    return [row.config for row in summary(pipe).rows if row.config]


def law(effect, time=1.0):
    """A layer whose effect is this at threshold 1, and whose time is a fifth of exact attention's
    there."""
    powers = np.array(THRESHOLDS)
    times = 0.2 * time * powers**-0.3
    return Measured(*(x.tolist() for x in (effect * powers**0.5, 64 * times / time, times)))


def profile_with(*layers, parts=None):
    """A profile of layers a, b, ..., each with its part, or parts by timestep."""
    found = [
        LayerEffects(LayerSpec(name, 0, 2, 8), 64, 1.0, x if isinstance(x, dict) else {1000: x})
        for name, x in zip("abc", layers, strict=False)
    ]
    return ErrorProfile(AVQConfig(), tuple(found), parts or {1000: Part(1.0)}, THRESHOLDS)


def thresholds_in(allocation, start=1000):
    """By layer; 0 is exact attention."""
    of_part = {name: choices[start].spec for name, choices in allocation.choices.items()}
    return {name: 0 if spec is None else spec.threshold for name, spec in of_part.items()}


def test_each_choice_may_be_a_graph_of_its_own(monkeypatch):
    """Catches blocks that run eagerly, since others were compiled for more thresholds."""
    monkeypatch.undo()
    choices = allocation.choices_of(allocation.THRESHOLDS)
    assert len(choices) + 1 <= torch._dynamo.config.recompile_limit
    assert choices[-1] == 1e-3
    assert max(np.diff(np.log10(choices))) < 0.35


class TestAllocate:
    @pytest.mark.parametrize("seed", range(5))
    def test_against_all_choices(self, seed):
        """Catches a multiplier that stops early, choices judged alone, and an error above the
        limit."""
        rng = np.random.default_rng(seed)
        times, squared = np.sort(rng.random((4, 6))), -np.sort(-(rng.random((4, 6)) ** 4))
        squared[:, -1] = 0
        rows = np.arange(4)
        every = [np.array(x) for x in product(range(6), repeat=4)]
        sums = np.array([(times[rows, x].sum(), squared[rows, x].sum()) for x in every])
        for limit in (0.0, 0.01, 0.1, 0.5, 1.0, 5.0):
            found = allocate(times, squared, limit)
            time, error = times[rows, found].sum(), squared[rows, found].sum()
            assert error <= limit
            assert time <= sums[sums[:, 1] <= error + 1e-12, 0].min() + 1e-9
            # One layer's step at most separates it from the best within the limit.
            assert time <= sums[sums[:, 1] <= limit, 0].min() + np.ptp(times, axis=1).max()

    def test_power_laws(self):
        """Catches straight lines between values, ends that stay level, and effects that fall."""
        wanted = np.array([1e-3, 1e-2, 0.1, 1, 10, 100.0])
        powers = np.array([0.7, -0.4, -0.2])[:, None]
        found = power_laws(THRESHOLDS, 5 * np.array(THRESHOLDS) ** powers, wanted)
        assert found == pytest.approx(5 * wanted**powers)
        measured = np.array([[0.2, 0.1, 0.4], [64, 64, 8], [0.5, 0.6, 0.5]])
        found = power_laws(THRESHOLDS, measured, wanted)
        assert (np.diff(found[0]) >= 0).all()
        assert (np.diff(found[1:]) <= 0).all()
        assert found[0, :4] == pytest.approx(0.2)
        assert found[:, -1] == pytest.approx([0.4, 8, 0.5])
        assert (power_laws(THRESHOLDS, np.zeros((3, 3)), wanted) < 1e-9).all()


class TestWithin:
    def test_time_goes_where_it_removes_most_error(self):
        """Catches one threshold for all, errors added instead of their squares, and effects of
        exact attention."""
        profile = profile_with(law(0.01), law(0.04))
        for tolerance in (0.02, 0.03):
            found = profile.within(tolerance)
            assert 0.9 * tolerance < found.error <= tolerance
            effects = [x[1000].effect for x in found.choices.values()]
            assert found.error == pytest.approx(math.hypot(*effects))
            # Power laws of equal exponents: the squares are as 1 : 4^(2 x .3 / (1 + .3)).
            chosen = thresholds_in(found)
            assert chosen["a"] / chosen["b"] == pytest.approx(16 ** (1 / 1.3), rel=0.15)
            uniform = profile.uniform(math.sqrt(chosen["a"] * chosen["b"]))
            assert found.time < uniform.time or found.error < uniform.error
            assert found.exact_time == 2
            assert found.speedup == 2 / found.time
        assert thresholds_in(profile.within(1e-4)) == {"a": 0, "b": 0}
        assert profile.within(1e-4).time == 2
        uniform = profile.uniform(1.0)
        assert thresholds_in(uniform) == {"a": 1, "b": 1}
        assert uniform.error == pytest.approx((0.01**2 + 0.04**2) ** 0.5)

    def test_never_slower(self):
        slow = Measured([0.0, 0.0, 0.1], [64.0, 64.0, 64.0], [1.0, 1.0, 1.0])
        assert thresholds_in(profile_with(slow).within(0.5)) == {"a": 0}

    def test_layers_that_avq_does_not_serve(self):
        profile = profile_with({}, law(0.001))
        for found in (profile.within(0.5), profile.uniform(100.0)):
            assert thresholds_in(found) == {"a": 0, "b": 100.0}
            assert found.time == pytest.approx(1 + 0.2 * 100.0**-0.3)
        assert profile.config_within(0.5).exact == ("a",)

    def test_parts(self):
        """Catches time counted in full for a part of the calls, a part above its share of the
        tolerance, and columns of another part."""
        parts = {1000: law(0.004), 600: law(0.01), 300: law(0.01)}
        shares = {1000: Part(0.25), 600: Part(0.25), 300: Part(0.5)}
        found = profile_with(parts, parts=shares).within(0.02)
        chosen = [thresholds_in(found, start)["a"] for start in parts]
        assert chosen == pytest.approx([0.25, 1, 4], rel=0.13)
        times = [0.2 * x**-0.3 for x in chosen]
        assert found.time == pytest.approx(0.25 * times[0] + 0.25 * times[1] + 0.5 * times[2])
        for error, limit in zip(found.errors.values(), (0.002, 0.01, 0.02), strict=True):
            assert 0.85 * limit < error <= limit
        for start, time in zip(parts, times, strict=True):
            assert found.choices["a"][start].columns == pytest.approx(64 * time)
        assert found.effect("a") == found.error

    def test_the_same_thresholds_in_the_whole_denoising(self):
        """Catches thresholds of the first part only."""
        parts, never = {1000: law(1e-4), 500: law(0.04)}, dict.fromkeys((1000, 500), law(10.0))
        profile = profile_with(parts, never, parts={1000: Part(0.5), 500: Part(0.5)})
        config = profile.config_within(0.02)
        assert config.for_layer("a", 0).threshold == thresholds_in(profile.within(0.02), 500)["a"]
        assert config.exact == ("b",)
        parts = {500: Part(0.5), 1000: Part(0.5)}
        with pytest.raises(ValueError, match="all layers must be exact"):
            profile_with(never, parts=parts).config_within(0.1)

    def test_measured_errors_correct_predicted_ones(self):
        """Catches a correction upside down."""
        plain, corrected = (
            profile_with(law(0.01), parts={1000: Part(1.0, correction)}) for correction in (1, 2)
        )
        found = corrected.within(0.02)
        assert thresholds_in(found) == thresholds_in(plain.within(0.01))
        assert found.error == pytest.approx(2 * plain.within(0.01).error)

    def test_table(self):
        """It says how many columns each layer gets in each part."""
        parts = {1000: law(0.005), 500: law(10.0)}
        profile = profile_with(parts, parts={1000: Part(0.5), 500: Part(0.5)})
        *_, row = str(profile).splitlines()
        columns = [profile.within(x).choices["a"][1000].columns for x in (0.01, 0.02, 0.05)]
        assert re.split("  +", row)[1:] == [f"{x:.0f}, exact" for x in columns]

    def test_no_text_speaks_of_operations(self):
        """Catches a gain in operations, which reads as one in time, on a CPU."""
        timed = profile_with(law(0.01))
        counted = replace(timed, unit=OPERATIONS)
        for of_timed, of_counted in (
            (str(timed), str(counted)),
            (str(timed.within(0.02)), str(counted.within(0.02))),
        ):
            assert "times as fast" in of_timed
            assert "times" not in of_counted

    def test_plot(self, tmp_path, monkeypatch):
        """Catches a curve that fails where some plan has no error."""
        monkeypatch.setattr(allocation, "PER_DECADE", 3)
        profile = profile_with(law(0.0), {})
        profile.plot(tmp_path / "curve.png")
        profile_with(law(0.01), law(0.04)).plot(tmp_path / "curve.png")
        with Image.open(tmp_path / "curve.png") as image:
            assert np.ptp(image) == 255
        assert [x.name for x in tmp_path.iterdir()] == ["curve.png"]


class TestApply:
    def test_parts(self, pipe):
        """Catches parts that switch elsewhere, and a schedule without timesteps to follow."""
        parts = {1000: "exact", 400: AVQ}  # steps at 501 and 1
        once = [profile_of(pipe, {1000: x}) for x in ("exact", AVQ)]
        exact, fine = (draw(apply_avq(pipe, found, tolerance=0.1)) for found in once)
        latents = draw(apply_avq(pipe, profile_of(pipe, parts), tolerance=0.1))
        assert not any(torch.equal(latents, other) for other in (exact, fine))
        row = next(row for row in summary(pipe).rows if row.name == LAYER)
        assert row.calls == {"scheduled": 1, "AVQ": 1}
        assert (row.config, row.effect) == (f"exact, {AVQ}", pytest.approx(1e-3))
        model = apply_avq(tiny_vision(), VISION.config)
        avq = features(model)
        with pytest.raises(ValueError, match="this vision model has no schedules by timestep"):
            apply_avq(model, profile_of(model, parts, VISION.config), tolerance=0.1)
        assert torch.equal(features(model), avq)

    @for_kinds(unet=UNET, wan22=WAN22, vision=VISION)
    @pytest.mark.usefixtures("coarse_thresholds")
    def test_one_line(self, kind, tmp_path):
        """Catches arguments that do not reach the measurement, thresholds that do not reach the
        layers, another choice next time, an error shown for thresholds that nobody measured, and
        layers of a second transformer that take the names of the first's."""
        pipe, other = kind.make(), kind.make()
        exact, (examples,) = kind.draw(pipe), kind.examples.values()
        found = measure_error(pipe, examples, kind.config, **kind.run)
        found.save(tmp_path / "profile.json")
        loaded = ErrorProfile.load(tmp_path / "profile.json")
        assert loaded == found
        names = [one.layer.name for one in found.layers]
        assert names == [row.name for row in summary(pipe).rows if row.level in kind.config.levels]
        tolerance = max(found.uniform(THRESHOLDS[-1]).error, 1e-3) / 3
        chosen = found.within(tolerance)
        assert apply_avq(pipe, loaded, tolerance=tolerance) is pipe
        rows = [row for row in summary(pipe).rows if row.config]
        assert kind is VISION or len({row.config for row in rows}) > 1
        for row in rows:
            choices = chosen.choices[row.name].values()
            assert row.config == ", ".join(dict.fromkeys(map(str, choices)))
            assert row.effect == max(choice.effect for choice in choices)
        assert str(summary(pipe)).endswith(str(chosen))
        avq = kind.draw(pipe)
        apply_avq(other, kind.config, tolerance=tolerance, **kind.examples, **kind.run)
        assert torch.equal(kind.draw(other), avq)
        assert summary(other) == summary(pipe)
        set_threshold(pipe, 0.1)
        assert "effect" not in str(summary(pipe))
        assert "of exact" not in str(summary(pipe))
        apply_avq(pipe, found, tolerance=1e-9)
        assert {*configs(pipe)} == {"exact"}
        assert torch.equal(kind.draw(pipe), exact)

    @pytest.mark.usefixtures("coarse_thresholds")
    def test_a_model_is_measured_once(self, monkeypatch, tmp_path):
        """Catches a second measurement, the profile of another model, size, prompt or noise
        schedule, and a measurement that is lost because it cannot be kept."""
        run = UNET.run | {"num_inference_steps": 1}

        def apply(pipe, forbidden=False, **arguments):
            with monkeypatch.context() as patch:
                if forbidden:
                    patch.setattr(verbs, "measure_error", lambda *_, **__: pytest.fail("it ran"))
                apply_avq(pipe, LEVELS, tolerance=0.05, **run | arguments)
            return summary(pipe)

        first = apply(UNET.make(), prompt=[PROMPT])
        assert apply(UNET.make(), forbidden=True, prompt=[PROMPT]) == first
        assert apply(UNET.make(), forbidden=True) == first
        changed = UNET.make()
        changed.unet.get_submodule(LAYER).to_q.weight.data *= 2
        other_noise = UNET.make()
        other_noise.scheduler.register_to_config(beta_end=0.02)
        hooked = UNET.make()
        hooked.unet.register_forward_hook(lambda *_: None)  # may change anything
        others = (changed, {}), (other_noise, {}), (hooked, {}), (UNET.make(), {"height": 192})
        for pipe, arguments in others:
            with pytest.raises(TypeError, match="to measure this model on once"):
                apply(pipe, forbidden=True, **arguments)
        with pytest.raises(pytest.fail.Exception, match="it ran"):
            apply(UNET.make(), forbidden=True, prompt=["a dog"])
        (tmp_path / "avq-diffusers").touch()  # not a folder
        monkeypatch.setattr(kept_profiles, "user_cache_path", lambda name: tmp_path / name)
        assert apply(UNET.make(), prompt=[PROMPT]) == first

    def test_fewer_tokens_than_were_measured_run_exact(self, pipe):
        """Catches AVQ where its cost is unknown, and a forced route that is not."""
        exact = draw(pipe)
        avq = draw(apply_avq(pipe, profile_of(pipe, {1000: AVQ}), tolerance=0.1))
        tokens = {row.num_tokens for row in summary(pipe).rows if row.config}
        found = profile_of(pipe, {1000: AVQ}, num_tokens=max(tokens) + 1)
        assert torch.equal(draw(apply_avq(pipe, found, tolerance=0.1)), exact)
        assert {row.runs for row in summary(pipe).rows if row.config} == {"exact: few tokens"}
        assert torch.equal(draw(apply_avq(pipe, found, tolerance=0.1, route="always")), avq)
        apply_avq(pipe, found, tolerance=0.1)
        assert not torch.equal(draw(set_threshold(pipe, 100.0)), exact)

    @pytest.mark.parametrize(
        ("make", "arguments", "error", "message"),
        [
            *(
                (PIPE, {"tolerance": x, "prompt": PROMPT}, error, message)
                for x, error, message in (
                    (0, ValueError, "0.5, but got 0;"),
                    ("0.1", TypeError, "number .* got '0.1'"),
                    (True, TypeError, "number .* got True"),
                )
            ),
            *(
                (make, arguments, TypeError, f"{name} only serve to measure for a tolerance")
                for make, arguments, name in (
                    (PIPE, {"prompt": PROMPT}, "prompt"),
                    (TRANSFORMER, {"seed": 1}, "seed"),
                    (VIT, {"pixel_values": images()}, "pixel_values"),
                    (VIT, ANY_SIZE, "interpolate_pos_encoding"),
                )
            ),
            (TRANSFORMER, {"tolerance": 0.1}, TypeError, "a tolerance needs prompt=... to mea"),
            (VIT, {"tolerance": 0.1}, TypeError, "a tolerance needs pixel_values=... to m"),
            (PIPE, {"pixel_values": 3}, TypeError, "a UNet is measured on prompt=...; pass"),
            (PIPE, {"tolerance": 0.1, "prompt": []}, ValueError, "at least one prompt"),
            (
                PIPE,
                {"tolerance": 0.1, "prompt": PROMPT, "hight": 8},
                TypeError,
                "did you mean heig",
            ),
            (PIPE, {"prompts": PROMPT}, TypeError, "takes no argument prompts; did you mean promp"),
            (PIPE, {"tolerance": 0.1, "prompt": PROMPT, "source": 4}, TypeError, "got int"),
        ],
    )
    def test_bad_arguments(self, make, arguments, error, message):
        """They leave the earlier AVQ."""
        pipe = apply_avq(make(), WAN22.config)
        with pytest.raises(error, match=message):
            apply_avq(pipe, **arguments)
        assert {*configs(pipe)} == {"M4C2T1e-4"}

    def test_sources(self, pipe):
        """Catches a profile that is applied to what it does not describe."""
        found = profile_of(pipe, {1000: AVQ})
        with pytest.raises(TypeError, match=r"tolerance must be a number .* got None"):
            apply_avq(pipe, found)
        with pytest.raises(TypeError, match="an ErrorProfile is already measured; drop prompt"):
            apply_avq(pipe, found, tolerance=0.1, prompt=PROMPT)
        with pytest.raises(ValueError, match="apply it without codebooks"):
            apply_avq(pipe, random_codebooks(pipe.unet), tolerance=0.1, prompt=PROMPT)
        message = f"error profile of another model: {LAYER} has 4 heads of dim 4, but was measured"
        with pytest.raises(ValueError, match=message):
            apply_avq(tiny_pipe(tiny_unet(attention_head_dim=4)), found, tolerance=0.1)
        larger = tiny_pipe(tiny_unet(layers_per_block=2))
        with pytest.raises(ValueError, match=r"error profile of another model: .* is unexpected"):
            apply_avq(pipe, profile_of(larger, {1000: AVQ}), tolerance=0.1)


def key_of(pipe, **arguments):
    return kept_profiles.KeptProfile(pipe, models_of(pipe), None, arguments).name


class TestKey:
    """Catches contents told apart by address or by part, and changes that no weight shows."""

    def test_arguments(self):
        pipe = VIT()
        black, red = (Image.new("RGB", (64, 64), color) for color in ("black", "red"))
        long = torch.zeros(3000)
        edited = long.clone()
        edited[1500] = 1
        seeds = [torch.Generator().manual_seed(seed) for seed in (0, 1)]
        for a, b in (
            (black, red),
            (long, edited),
            (long.numpy(), edited.numpy()),
            ({"x": [long]}, {"x": [edited]}),
            (seeds[0], seeds[1]),
            ({"scale": 0.0}, {"scale": 3.0}),
        ):
            assert key_of(pipe, given=a) == key_of(pipe, given=a) != key_of(pipe, given=b)
        assert key_of(pipe, given=black) == key_of(pipe, given=black.copy())
        for unknown in (object(), long.to("meta"), long.to_sparse()):
            assert key_of(pipe, given=unknown) is None

    def test_pipeline(self):
        pipe = two_level_pipe()
        pipe.unet.add_adapter(LORA)
        keys = [key_of(pipe)]

        def edit(weight):
            weight.data.view(-1)[weight.numel() // 2 + 1] += 1

        for change in (
            lambda: edit(pipe.unet.get_submodule(LAYER).to_q.base_layer.weight),
            lambda: edit(pipe.text_encoder.get_input_embeddings().weight),
            lambda: pipe.unet.set_adapters(["default"], [0.5]),
            lambda: pipe.unet.disable_adapters(),
            lambda: pipe.enable_freeu(0.9, 0.2, 1.2, 1.4),
            lambda: pipe.scheduler.register_to_config(beta_end=0.02),
        ):
            change()
            keys.append(key_of(pipe))
        assert len({*keys}) == len(keys)
        draw(apply_avq(pipe, CONFIG))
        assert key_of(pipe) == keys[-1]
        with pipe.unet.register_forward_hook(lambda *_: None):
            assert key_of(pipe) is None
        assert key_of(TRANSFORMER()) != key_of(VIT())

    def test_what_is_no_module(self):
        """Catches a profile taken for one of another guidance, configuration or layers of PAG."""
        pipe = tiny_pipe(cls=StableDiffusionPAGPipeline)
        keys = [None, key_of(pipe)]
        for change in (
            lambda: pipe.register_to_config(requires_safety_checker=True),
            lambda: pipe.set_pag_applied_layers("down_blocks.0"),
            *(
                partial(setattr, pipe, "guider", ClassifierFreeGuidance(guidance_scale=scale))
                for scale in (1.0, 8.0)
            ),
        ):
            change()
            keys.append(key_of(pipe))
        assert len({*keys}) == len(keys)

    @pytest.mark.usefixtures("coarse_thresholds")
    def test_a_kept_profile_is_checked(self, monkeypatch, tmp_path):
        """Catches a damaged one that hides another, one without a layer, and one with effects that
        no longer hold."""
        monkeypatch.setattr(kept_profiles, "user_cache_path", lambda name: tmp_path / name)
        pipe, run = two_level_pipe(), UNET.run | {"num_inference_steps": 1}
        arguments = {"tolerance": 1e-4, "prompt": PROMPT} | run
        first = summary(apply_avq(pipe, LEVELS, **arguments))
        kept = kept_profiles.KeptProfile(pipe, models_of(pipe), LEVELS, run)
        layers = select_layers(pipe.unet, LEVELS.levels)
        good = kept.load(layers)
        kept.save(good, ["a dog"])
        max(kept.folder.iterdir(), key=lambda path: path.stat().st_mtime_ns).write_text("{")
        assert kept.load(layers) == good
        kept.save(replace(good, layers=good.layers[1:]), [PROMPT])
        assert summary(apply_avq(pipe, LEVELS, **arguments)) == first
        kept.save(profile_of(pipe, {1000: AVQ}, LEVELS), [PROMPT])
        with pytest.warns(match="the kept measurement no longer holds"):
            apply_avq(pipe, LEVELS, **arguments | {"tolerance": 5e-3})

    @pytest.mark.usefixtures("coarse_thresholds")
    def test_a_kept_profile_is_checked_in_each_part(self, monkeypatch, tmp_path):
        """Catches a first part whose error is compared with the whole tolerance."""
        monkeypatch.setattr(kept_profiles, "user_cache_path", lambda name: tmp_path / name)
        pipe, run = two_level_pipe(), UNET.run | {"num_inference_steps": 2, "parts": 2}
        apply_avq(pipe, LEVELS, tolerance=0.5, prompt=PROMPT, **run)
        kept = kept_profiles.KeptProfile(pipe, models_of(pipe), LEVELS, run)
        first, last = kept.load(select_layers(pipe.unet, LEVELS.levels)).parts
        own = profile_of(pipe, {first: AVQ, last: "exact"}, LEVELS)
        plan = own.within(0.1).choices
        ((errors,),) = output_errors(pipe, [PROMPT], [plan], LEVELS, **run)
        assert errors[last] == 0 < errors[first]
        for times, holds in ((6, True), (2, False)):
            kept.save(own, [PROMPT])
            tolerance = times * errors[first]
            assert own.within(tolerance).choices == plan
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                apply_avq(pipe, LEVELS, tolerance=tolerance, prompt=PROMPT, **run)
            assert any("no longer holds" in str(x.message) for x in caught) != holds


class TestFile:
    def test_round_trip(self, pipe, tmp_path, monkeypatch):
        """A failed save leaves what was there."""
        path, found = tmp_path / "profile.json", profile_of(pipe, {1000: AVQ, 400: "exact"})
        found.save(path)
        assert ErrorProfile.load(str(path)) == found
        assert '"effects": [ ' in path.read_text()  # readable: a row of numbers is a line
        monkeypatch.setattr(profile.json, "dumps", lambda *args, **options: 3)
        with pytest.raises(TypeError):
            profile_of(pipe, {1000: "exact"}).save(path)
        assert [*tmp_path.iterdir()] == [path]
        assert ErrorProfile.load(path) == found

    @pytest.mark.parametrize(
        "change",
        [
            {"layers": []},
            {"layers": 3},
            {"layers": [STORED, STORED]},
            {"config": {"num_parent": 3}},
            {"unit": "s"},
            {"parts": {"1000": PARTS["1000"]}},
            {"parts": PARTS | {"1000": {"share": 0}}},
            {"parts": PARTS | {"1000": {"share": 0.5, "correction": math.nan}}},
            {"parts": PARTS | {"1000": 3}},
            {"thresholds": [1e-4]},
            {"thresholds": [4e-4, 1e-4]},
            {"thresholds": [1e-4, 4e-4, 1e-3]},
            {"thresholds": ["a", "b"]},
            {"thresholds": [1e-4, 10**400]},
            {"layers": [STORED | {"layer": {"name": "a"}}]},
            {"layers": [STORED | {"layer": SPEC.stored | {"name": 3}}]},
            {"layers": [STORED | {"num_tokens": 0}]},
            {"layers": [STORED | {"num_tokens": "many"}]},
            {"layers": [STORED | {"num_tokens": 10**400}]},
            {"layers": [STORED | {"exact_time": "cheap"}]},
            {"layers": [STORED | {"exact_time": -1.0}]},
            {"layers": [STORED | {"parts": {"500": NUMBERS}}]},
            *(
                {"layers": [STORED | {"parts": STORED["parts"] | {"1000": NUMBERS | x}}]}
                for x in (
                    *({"effects": [0.1, y]} for y in (math.nan, -0.1, 1e308, 10**400, "small")),
                    {"effects": [0.1]},
                    {"effects": 3},
                    {"sizes": []},
                )
            ),
        ],
    )
    def test_other_files(self, tmp_path, change):
        """The good file has its parts in another order than `save`."""
        path = tmp_path / "other.json"
        good = {"config": {}, "unit": "ms", "thresholds": [1e-4, 4e-4]}
        good |= {"layers": [STORED], "parts": PARTS}
        path.write_text(json.dumps(good))
        found = ErrorProfile.load(path).within(0.2)
        assert [*found.choices["a"]] == [1000, 500]
        assert thresholds_in(found) == {"a": 4e-4}
        assert found.errors[500] <= 0.2
        for content in (json.dumps(good | change), "", "{", "[]", "{}", "[" * 100_000):
            path.write_text(content)
            with pytest.raises(ValueError, match=r"other\.json is not a saved ErrorProfile: "):
                ErrorProfile.load(path)
