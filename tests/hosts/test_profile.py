"""The dial from fast to exact: what a tolerance chooses, what then runs, and what is kept."""

import json
import math
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import pytest
import tiny_transformers
import torch
from filelock import FileLock
from PIL import Image
from tiny import LAYER, LORA, draw, random_codebooks, tiny_pipe, tiny_unet, two_level_unet
from tiny_transformers import predict, sd3_pipe, sd3_transformer, wan_transformer
from tiny_vision import ANY_SIZE, features, images, tiny_vision

from avq_diffusers import (
    AVQConfig,
    apply_avq,
    measure_error,
    select_layers,
    set_num_refined,
    summary,
)
from avq_diffusers.hosts import verbs
from avq_diffusers.hosts.core.layers import LayerSpec
from avq_diffusers.hosts.measuring import kept_profiles, measured_layer, profile
from avq_diffusers.hosts.measuring.profile import ErrorProfile, LayerEffects, Point
from avq_diffusers.hosts.models.registry import models_of

PROMPT = "a red fox"
CONFIG = AVQConfig.parse("M8P4C2", query_tile=16, levels=(0, 1))
COARSE, FINE = "M4", "M8P8C4E16"
SPEC = LayerSpec("a", 0, 2, 8)
STORED = {
    "layer": SPEC.stored,
    "num_tokens": 64,
    "times": {"M4": 0.5, "exact": 1.0},
    "effects": {"500": {"M4": 1 / 3}, "1000": {"M4": 0.1}},
}
SHARES = {"500": 0.25, "1000": 0.75}


class Kind(NamedTuple):
    """How to make a model, what it gives, what it is measured on, and how."""

    make: Callable[[], Any]
    draw: Callable[[Any], torch.Tensor]
    examples: dict[str, Any]
    run: dict[str, Any]
    config: AVQConfig = AVQConfig.parse("M4P2C2", query_tile=16)


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
SIZE = {"height": 32, "width": 48, "max_sequence_length": 8}
PROMPTED = {"prompt": [PROMPT]}
LEVELS = AVQConfig.parse("M4P2C2", query_tile=16, levels=(0, 1))


def small_sd3_pipe():
    return sd3_pipe(transformer=sd3_transformer(num_layers=2, dual_attention_layers=(0,)))


def two_level_pipe():
    return tiny_pipe(two_level_unet())


UNET = Kind(two_level_pipe, draw, PROMPTED, {**RUN, "height": 128, "width": 128}, LEVELS)
SD3 = Kind(small_sd3_pipe, tiny_transformers.draw, PROMPTED, RUN | SIZE)
WAN22 = Kind(Wan22, Wan22.__call__, PROMPTED, QUIET)
VISION = Kind(tiny_vision, features, {"pixel_values": (images(), -2 * images()[:1])}, QUIET)

# Shared by tests of what is refused.
PIPE, TRANSFORMER, VIT = map(cache, (tiny_pipe, sd3_transformer, tiny_vision))


def for_kinds(**kinds):
    return pytest.mark.parametrize("kind", kinds.values(), ids=[*kinds])


def profile_of(pipe, choices, config=CONFIG, num_tokens=1):
    """A profile whose tolerance 0.1 gives every layer these choices, by timestep."""
    layers = []
    for layer in select_layers(getattr(pipe, "unet", pipe), config.levels, config.exact):
        sizes = {x for x in choices.values() if x != "exact"}
        effects = {
            start: {x: 1e-3 if x == chosen else 1.0 for x in sizes}
            for start, chosen in choices.items()
        }
        times = dict.fromkeys(sizes, 0.5) | {"exact": 1.0}
        layers.append(LayerEffects(LayerSpec(**layer.stored), num_tokens, times, effects))
    return ErrorProfile(config, tuple(layers), dict.fromkeys(choices, 1 / len(choices)))


def configs(pipe) -> list[str]:
    """Of the layers with AVQ."""
    return [row.config for row in summary(pipe).rows if row.config]


def profile_with(*layers, shares=None, curve=()):
    """A profile of layers a, b, ..., each with times and, by part, effects of sizes."""
    found = [
        LayerEffects(LayerSpec(name, 0, 2, 8), 64, times, effects)
        for name, (times, effects) in zip("abc", layers, strict=False)
    ]
    return ErrorProfile(AVQConfig(), tuple(found), shares or {1000: 1.0}, curve)


def plan(allocation):
    return {
        name: {start: str(choice) for start, choice in choices.items()}
        for name, choices in allocation.choices.items()
    }


TIMES = {"M4": 1.0, "M8P4C2": 2.0, "exact": 4.0}
MILD = {"M4": 0.29, "M8P4C2": 0.04}
SHARP = {"M4": 0.4, "M8P4C2": 0.2}


class TestWithin:
    def test_time_goes_where_it_removes_most_error(self):
        """Catches layers judged alone, errors added instead of their squares, and effects of exact
        attention."""
        profile = profile_with(*((TIMES, {1000: x}) for x in (MILD, SHARP)))
        for tolerance, a, b, time in (
            (0.5, "M4", "M4", 2),  # .29 and .4 are .494 together
            (0.4, "M4", "M8P4C2", 3),
            (0.21, "M8P4C2", "M8P4C2", 4),
            (0.041, "M8P4C2", "exact", 6),
            (0.001, "exact", "exact", 8),
        ):
            found = profile.within(tolerance)
            assert plan(found) == {"a": {1000: a}, "b": {1000: b}}
            assert (found.time, found.exact_time, found.speedup) == (time, 8, 8 / time)
            assert found.error <= tolerance
        assert profile.within(0.5).error == pytest.approx(0.494, rel=1e-3)
        assert plan(profile.taking(6.5)) == plan(profile.within(0.041))
        assert plan(profile.taking(0)) == plan(profile.within(0.5))
        uniform = profile.uniform("M8P4C2")
        assert plan(uniform) == {name: {1000: "M8P4C2"} for name in "ab"}
        assert uniform.error == pytest.approx((0.04**2 + 0.2**2) ** 0.5)

    def test_what_was_removed_too_much_is_given_back(self):
        """The best step may remove more than needed, and make an earlier one needless."""
        small = {"M4": 1.0, "exact": 1.5}, {1000: {"M4": 0.1}}
        large = {"M4": 1.0, "exact": 21.0}, {1000: {"M4": 0.4}}
        found = profile_with(small, large).within(0.11)
        assert plan(found) == {"a": {1000: "M4"}, "b": {1000: "exact"}}

    def test_never_slower(self):
        times = {"M4": 4.0, "M8P4C2": 5.0, "exact": 4.0}
        profile = profile_with((times, {1000: {"M4": 0.1, "M8P4C2": 0.0}}))
        assert plan(profile.within(0.5)) == {"a": {1000: "exact"}}

    def test_parts(self):
        """Catches time counted in full for a part of the calls, and switches that change
        nothing."""
        parts = {1000: SHARP, 600: MILD, 300: MILD}
        shares = {1000: 0.5, 600: 0.25, 300: 0.25}
        profile = profile_with((TIMES, parts), shares=shares)
        found = profile.within(0.43)
        assert plan(found) == {"a": {1000: "M4", 600: "M8P4C2"}}
        assert found.time == 0.5 * 1 + 0.5 * 2
        assert found.choices["a"][600].effect == pytest.approx(0.04 * 2**0.5)
        assert plan(profile.within(0.01)) == {"a": {1000: "exact"}}

    def test_the_same_sizes_in_the_whole_denoising(self):
        """Catches effects of the first part only, and of parts added up."""
        early = {"M4": 0.03, "M8P4C2": 0.0}
        parts = {1000: early, 500: {"M4": 0.04, "M8P4C2": 0.0}}
        never = {1000: {"M4": 1.0, "M8P4C2": 1.0}, 500: {"M4": 1.0, "M8P4C2": 1.0}}
        halves = {1000: 0.5, 500: 0.5}
        profile = profile_with((TIMES, parts), (TIMES, never), shares=halves)
        for tolerance, sizes in ((0.051, "M4"), (0.049, "M8P4C2")):
            config = profile.config_within(tolerance)
            assert str(config.for_layer("a", 0)) == sizes
            assert config.exact == ("b",)
        with pytest.raises(ValueError, match="all layers must be exact"):
            profile_with((TIMES, never), shares=halves).config_within(0.1)

    def test_measured_errors_correct_predicted_ones(self):
        """Catches a correction upside down, and one that ends with the curve."""
        effects = {1000: {"M4": 0.04, "M8P4C2": 0.01}}
        curve = Point(0.02, 0.04), Point(0.01, 0.02)
        profile = profile_with((TIMES, effects), curve=curve)
        assert plan(profile.within(0.0799)) == {"a": {1000: "M8P4C2"}}
        assert profile.within(0.0801).error == pytest.approx(0.08)
        rising = profile_with((TIMES, effects), curve=(Point(0.01, 0.01), Point(0.04, 0.16)))
        assert rising.within(0.1).error == pytest.approx(0.01)
        assert rising.uniform("M4").error == pytest.approx(0.16)

    def test_table(self):
        effects = {1000: {"M4": 0.008, "M8P4C2": 0.001}, 500: {"M4": 0.016, "M8P4C2": 0.0}}
        table = str(profile_with((TIMES, effects), shares={1000: 0.5, 500: 0.5}))
        assert [line.split()[-1] for line in table.splitlines()] == ["0.05", "0.018", "4", "M4"]
        assert "M4, M8P4C2" in table.splitlines()[-1]

    def test_no_text_speaks_of_operations(self):
        """Catches a gain in operations, which reads as one in time, on a CPU."""
        timed = profile_with((TIMES, {1000: MILD}))
        counted = replace(timed, unit=profile.OPERATIONS)
        for of_timed, of_counted in (
            (str(timed), str(counted)),
            (str(timed.within(0.02)), str(counted.within(0.02))),
        ):
            assert "times as fast" in of_timed
            assert "times" not in of_counted

    def test_plot(self, tmp_path):
        """Catches a curve that fails where some plan has no error."""
        profile = profile_with((TIMES, {1000: MILD}), (TIMES, {1000: SHARP}))
        profile.plot(tmp_path / "curve.png")
        with Image.open(tmp_path / "curve.png") as image:
            assert np.ptp(image) == 255
        assert [x.name for x in tmp_path.iterdir()] == ["curve.png"]


class TestApply:
    def test_parts(self, pipe):
        """Catches parts that switch elsewhere, and a schedule without timesteps to follow."""
        parts = {1000: "exact", 400: FINE}  # steps at 501 and 1
        once = [profile_of(pipe, {1000: x}) for x in ("exact", FINE)]
        exact, fine = (draw(apply_avq(pipe, found, tolerance=0.1)) for found in once)
        latents = draw(apply_avq(pipe, profile_of(pipe, parts), tolerance=0.1))
        assert not any(torch.equal(latents, other) for other in (exact, fine))
        row = next(row for row in summary(pipe).rows if row.name == LAYER)
        assert row.calls == {"scheduled": 1, "AVQ": 1}
        assert (row.config, row.effect) == (f"exact, {FINE}", 1e-3)
        model = apply_avq(tiny_vision(), VISION.config)
        avq = features(model)
        with pytest.raises(ValueError, match="this vision model has no schedules by timestep"):
            apply_avq(model, profile_of(model, parts, VISION.config), tolerance=0.1)
        assert torch.equal(features(model), avq)

    @for_kinds(unet=UNET, sd3=SD3, wan22=WAN22, vision=VISION)
    def test_one_line(self, kind, monkeypatch, tmp_path):
        """Catches arguments that do not reach the measurement, sizes that do not reach the layers,
        another choice next time, an error shown for sizes that nobody measured, and layers of a
        second transformer that take the names of the first's."""
        monkeypatch.setattr(measured_layer, "LADDER", (COARSE, FINE))
        pipe, other = kind.make(), kind.make()
        exact, (examples,) = kind.draw(pipe), kind.examples.values()
        found = measure_error(pipe, examples, kind.config, **kind.run)
        found.save(tmp_path / "profile.json")
        loaded = ErrorProfile.load(tmp_path / "profile.json")
        assert loaded == found
        names = [one.layer.name for one in found.layers]
        assert names == [row.name for row in summary(pipe).rows if row.level in kind.config.levels]
        rungs = found.uniform(COARSE), found.uniform(FINE)
        tolerance = (rungs[0].error * rungs[1].error) ** 0.5
        chosen = found.within(tolerance)
        assert apply_avq(pipe, loaded, tolerance=tolerance) is pipe
        rows = [row for row in summary(pipe).rows if row.config]
        assert len({row.config for row in rows}) > 1
        for row in rows:
            choices = chosen.choices[row.name].values()
            assert row.config == ", ".join(map(str, choices))
            assert row.effect == pytest.approx(math.hypot(*(choice.effect for choice in choices)))
        assert str(summary(pipe)).endswith(str(chosen))
        avq = kind.draw(pipe)
        apply_avq(other, kind.config, tolerance=tolerance, **kind.examples, **kind.run)
        assert torch.equal(kind.draw(other), avq)
        assert summary(other) == summary(pipe)
        set_num_refined(pipe, 0)
        assert "effect" not in str(summary(pipe))
        assert "of exact" not in str(summary(pipe))
        apply_avq(pipe, found, tolerance=1e-9)
        assert {*configs(pipe)} == {"exact"}
        assert torch.equal(kind.draw(pipe), exact)

    def test_a_model_is_measured_once(self, monkeypatch, tmp_path):
        """Catches a second measurement, the profile of another model, size, prompt or noise
        schedule, and a measurement that is lost because it cannot be kept."""
        monkeypatch.setattr(measured_layer, "LADDER", (COARSE, FINE))
        run = UNET.run | {"num_inference_steps": 1, "height": 64, "width": 64}

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
        for pipe, arguments in ((changed, {}), (other_noise, {}), (UNET.make(), {"height": 192})):
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
        avq = draw(apply_avq(pipe, profile_of(pipe, {1000: FINE}), tolerance=0.1))
        tokens = {row.num_tokens for row in summary(pipe).rows if row.config}
        found = profile_of(pipe, {1000: FINE}, num_tokens=max(tokens) + 1)
        assert torch.equal(draw(apply_avq(pipe, found, tolerance=0.1)), exact)
        assert {row.runs for row in summary(pipe).rows if row.config} == {"exact: few tokens"}
        assert torch.equal(draw(apply_avq(pipe, found, tolerance=0.1, route="always")), avq)
        apply_avq(pipe, found, tolerance=0.1)
        assert not torch.equal(draw(set_num_refined(pipe, 4)), exact)

    @pytest.mark.parametrize(
        ("make", "arguments", "error", "message"),
        [
            *(
                (PIPE, {"tolerance": x, "prompt": PROMPT}, ValueError, f"0.5, but got {x};")
                for x in (0, -0.1, 2, math.inf, math.nan, 10**400)
            ),
            *(
                (PIPE, {"tolerance": x, "prompt": PROMPT}, TypeError, f"number .* got {x!r}")
                for x in ("0.1", True)
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
            (PIPE, {"tolerance": 0.1, "prompt": 3}, TypeError, "a string or a sequence of strings"),
            (PIPE, {"tolerance": 0.1, "prompt": ["a", ""]}, ValueError, "must not be empty"),
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
        pipe = apply_avq(make(), SD3.config)
        with pytest.raises(error, match=message):
            apply_avq(pipe, **arguments)
        assert {*configs(pipe)} == {"M4P2C2"}

    def test_sources(self, pipe):
        """Catches a profile that is applied to what it does not describe."""
        found = profile_of(pipe, {1000: FINE})
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
            apply_avq(pipe, profile_of(larger, {1000: FINE}), tolerance=0.1)


def key_of(pipe, **arguments):
    return kept_profiles.KeptProfile(pipe, models_of(pipe), None, arguments).name


class TestKey:
    """Catches contents told apart by address or by part, and changes that no weight shows."""

    def test_arguments(self):
        pipe = PIPE()
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
        assert key_of(pipe, given=object()) is None

    def test_pipeline(self):
        pipe = tiny_pipe(two_level_unet())
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

    def test_a_locked_folder(self, monkeypatch, tmp_path):
        """Is waited for briefly; then nothing is kept."""
        monkeypatch.setattr(kept_profiles, "user_cache_path", lambda name: tmp_path / name)
        monkeypatch.setattr(kept_profiles, "PATIENCE", 0.1)
        kept = kept_profiles.KeptProfile(PIPE(), models_of(PIPE()), None, {})
        kept.folder.mkdir(parents=True)
        with FileLock(kept.folder / "profiles.lock"):
            kept.save(profile_of(PIPE(), {1000: FINE}), [PROMPT])
        assert kept.load([PROMPT]) is None
        kept.save(profile_of(PIPE(), {1000: FINE}), [PROMPT])
        assert kept.load([PROMPT]) is not None

    def test_a_kept_profile_is_checked(self, monkeypatch, tmp_path):
        """One without a layer, or with effects that no longer hold, is measured again."""
        monkeypatch.setattr(kept_profiles, "user_cache_path", lambda name: tmp_path / name)
        monkeypatch.setattr(measured_layer, "LADDER", (COARSE, FINE))
        pipe, run = two_level_pipe(), UNET.run | {"height": 64, "width": 64}
        arguments = {"tolerance": 1e-4, "prompt": PROMPT} | run
        first = summary(apply_avq(pipe, LEVELS, **arguments))
        kept = kept_profiles.KeptProfile(pipe, models_of(pipe), LEVELS, run)
        good = kept.load()
        kept.save(replace(good, layers=good.layers[1:]), [PROMPT])
        assert summary(apply_avq(pipe, LEVELS, **arguments)) == first
        kept.save(profile_of(pipe, {1000: COARSE}, LEVELS), [PROMPT])
        with pytest.warns(match="the kept measurement no longer holds"):
            apply_avq(pipe, LEVELS, **arguments | {"tolerance": 2e-3})


class TestFile:
    def test_round_trip(self, pipe, tmp_path, monkeypatch):
        """A failed save leaves what was there."""
        path, found = tmp_path / "profile.json", profile_of(pipe, {1000: FINE, 400: "exact"})
        found.save(path)
        assert ErrorProfile.load(str(path)) == found
        monkeypatch.setattr(profile.json, "dumps", lambda *args, **options: 3)
        with pytest.raises(TypeError):
            profile_of(pipe, {1000: COARSE}).save(path)
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
            {"shares": {"1000": 1.0}},
            {"shares": SHARES | {"1000": 0}},
            {"weights": {"1000": 1.0}},
            {"weights": {"500": -1.0, "1000": 3.0}},
            {"curve": [{"predicted": 0.1, "measured": math.nan}]},
            {"curve": [{"predicted": 0.1}]},
            {"layers": [STORED | {"layer": {"name": "a"}}]},
            {"layers": [STORED | {"layer": SPEC.stored | {"name": 3}}]},
            {"layers": [STORED | {"num_tokens": 0}]},
            {"layers": [STORED | {"num_tokens": "many"}]},
            {"layers": [STORED | {"times": {"M4": 0.5}}]},
            {"layers": [STORED | {"times": {"M5": 0.5, "exact": 1.0}}]},
            {"layers": [STORED | {"times": {"M4": "cheap", "exact": 1.0}}]},
            {"layers": [STORED | {"effects": {}}]},
            {"layers": [STORED | {"effects": {"500": {"M4": 0.1}}}]},
            *(
                {"layers": [STORED | {"effects": STORED["effects"] | {"1000": x}}]}
                for x in ({"M4": math.nan}, {"M4": -0.1}, {"M4": 1e308}, [0.1], {"exact": 0.0})
            ),
        ],
    )
    def test_other_files(self, tmp_path, change):
        """The good file has its parts in another order than `save`."""
        path = tmp_path / "other.json"
        good = {"config": {}, "layers": [STORED], "shares": SHARES, "curve": [], "unit": "ms"}
        good["weights"] = {"500": 0.5, "1000": 1.5}
        path.write_text(json.dumps(good))
        assert plan(ErrorProfile.load(path).within(0.2)) == {"a": {1000: "M4", 500: "exact"}}
        for content in (json.dumps(good | change), "", "{", "[]", "{}", "[" * 100_000):
            path.write_text(content)
            with pytest.raises(ValueError, match=r"other\.json is not a saved ErrorProfile: "):
                ErrorProfile.load(path)
