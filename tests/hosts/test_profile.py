"""The dial from fast to exact: what a tolerance chooses, what then runs, and the file."""

import json
import math
from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import pytest
import tiny_transformers
import torch
from tiny import LAYER, draw, random_codebooks, tiny_pipe, tiny_unet
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
from avq_diffusers.config import Sizes
from avq_diffusers.hosts import measurement, profile
from avq_diffusers.hosts.layers import LayerSpec
from avq_diffusers.hosts.profile import MARGIN, Choice, ErrorProfile, LayerErrors

PROMPT = "a red fox"
CONFIG = AVQConfig.parse("M8P4C2", query_tile=16, levels=(0, 1))
COARSE, FINE = "M4P0C0", "M8P8C4E16"
SPEC = LayerSpec("a", 0, 2, 8)
COSTS = {"M8P4C2": 0.5, "M4P0C0": 0.2, "M8P8C4E16": 0.9}
STORED = {
    "layer": SPEC.stored,
    "num_tokens": 64,
    "costs": {"M4P0C0": 0.5},
    "errors": {"1000": {"M4P0C0": 0.1}, "500": {"M4P0C0": 1 / 3}},
}


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
UNET = Kind(tiny_pipe, draw, PROMPTED, {**RUN, "height": 128, "width": 128}, LEVELS)
SD3 = Kind(sd3_pipe, tiny_transformers.draw, PROMPTED, RUN | SIZE)
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
        costs = {sizes: 0.5 for sizes in choices.values() if sizes != "exact"}
        errors = {
            start: {sizes: 0.05 if sizes == chosen else 0.5 for sizes in costs}
            for start, chosen in choices.items()
        }
        layers.append(LayerErrors(LayerSpec(**layer.stored), num_tokens, costs, errors))
    return ErrorProfile(config, tuple(layers))


def configs(pipe) -> list[str]:
    """Of the layers with AVQ."""
    return [row.config for row in summary(pipe).rows if row.config]


class TestWithin:
    def choose(self, *errors, tolerance=0.1, costs=COSTS):
        starts = (1000, 600, 300)[: len(errors)]
        parts = {
            start: dict(zip(costs, part, strict=True))
            for start, part in zip(starts, errors, strict=True)
        }
        plan = ErrorProfile(AVQConfig(), (LayerErrors(SPEC, 64, costs, parts),)).within(tolerance)
        return {start: (str(choice), choice.error) for start, choice in plan["a"].items()}

    def test_cheapest_that_holds(self):
        """Catches the first that holds, the last, the most exact, and a limit that is left out."""
        assert self.choose((0.09, 0.3, 0.05)) == {1000: ("M8P4C2", 0.09)}
        assert self.choose((0.05, 0.09, 0.01)) == {1000: ("M4P0C0", 0.09)}
        assert self.choose((0.11, 0.3, 0.05)) == {1000: ("M8P8C4E16", 0.05)}
        assert self.choose((0.11, 0.3, 0.11)) == {1000: ("exact", 0.0)}
        assert self.choose((0.11, 0.3, 0.2), tolerance=1) == {1000: ("M4P0C0", 0.3)}
        assert self.choose((0.095, 0.3, 0.05)) == {1000: ("M8P8C4E16", 0.05)}  # a margin

    def test_never_slower(self):
        costs = {"M8P4C2": 1.0, "M4P0C0": 1.2, "M8P8C4E16": 1.5}
        assert self.choose((0, 0, 0), costs=costs) == {1000: ("exact", 0.0)}

    def test_equal_parts_are_one(self):
        """Catches a switch that changes nothing, the smaller error of the two, and parts merged
        over another one between them.
        """
        held, exact = (0.02, 0.3, 0.01), (0.3, 0.3, 0.3)
        assert self.choose(held, (0.08, 0.3, 0), exact) == {
            1000: ("M8P4C2", 0.08),
            300: ("exact", 0.0),
        }
        assert [*self.choose(held, exact, held)] == [1000, 600, 300]

    def test_table(self):
        layer = LayerErrors(
            SPEC, 64, {"M4P0C0": 0.5}, {1000: {"M4P0C0": 0.08}, 500: {"M4P0C0": 0.16}}
        )
        header, row = str(ErrorProfile(AVQConfig(), (layer,))).splitlines()
        assert header.split() == ["layer", "0.05", "0.1", "0.2"]
        assert row.split() == ["a", "exact", "M4P0C0,", "exact", "M4P0C0"]


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
        assert (row.config, row.error) == (f"exact, {FINE}", 0.05)
        model = apply_avq(tiny_vision(), VISION.config)
        avq = features(model)
        with pytest.raises(ValueError, match="a vision model has no schedules by timestep"):
            apply_avq(model, profile_of(model, parts, VISION.config), tolerance=0.1)
        assert torch.equal(features(model), avq)

    @for_kinds(unet=UNET, sd3=SD3, wan22=WAN22, vision=VISION)
    def test_one_line(self, kind, monkeypatch, tmp_path):
        """Catches arguments that do not reach the measurement, sizes that do not reach the layers,
        another choice next time, an error shown for sizes that nobody measured, and layers of a
        second transformer that take the names of the first's."""
        monkeypatch.setattr(measurement, "LADDER", (COARSE, FINE))
        pipe, other = kind.make(), kind.make()
        exact, (examples,) = kind.draw(pipe), kind.examples.values()
        found = measure_error(pipe, examples, kind.config, **kind.run)
        found.save(tmp_path / "profile.json")
        loaded = ErrorProfile.load(tmp_path / "profile.json")
        assert loaded == found
        names = [one.layer.name for one in found.layers]
        assert names == [row.name for row in summary(pipe).rows if row.level in kind.config.levels]
        errors = sorted(one.errors[1000][FINE] for one in found.layers)
        tolerance = errors[len(errors) // 3] / MARGIN * 1.001
        plan = found.within(tolerance)
        assert apply_avq(pipe, loaded, tolerance=tolerance) is pipe
        rows = [row for row in summary(pipe).rows if row.config]
        assert len({row.config for row in rows}) > 1
        for row in rows:
            assert row.config == ", ".join(map(str, plan[row.name].values()))
            assert row.error == max(choice.error for choice in plan[row.name].values())
        avq = kind.draw(pipe)
        apply_avq(other, kind.config, tolerance=tolerance, **kind.examples, **kind.run)
        assert torch.equal(kind.draw(other), avq)
        assert summary(other) == summary(pipe)
        header, row = (line.split() for line in str(summary(pipe)).splitlines()[:2])
        assert row[header.index("error")] == f"{rows[0].error:.3f}"
        set_num_refined(pipe, 0)
        assert "error" not in str(summary(pipe))
        apply_avq(pipe, found, tolerance=1e-9)
        assert {*configs(pipe)} == {"exact"}
        assert torch.equal(kind.draw(pipe), exact)

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
                (PIPE, {"tolerance": x, "prompt": PROMPT}, ValueError, f"finite, but got {x}")
                for x in (0, -0.1, math.nan, math.inf, 10**400)
            ),
            *(
                (PIPE, {"tolerance": x, "prompt": PROMPT}, TypeError, f"number .* got {x!r}")
                for x in ("0.1", True)
            ),
            *(
                (make, arguments, TypeError, f"{name} belong to the measurement of a tolerance")
                for make, arguments, name in (
                    (PIPE, {"prompt": PROMPT}, "prompt"),
                    (TRANSFORMER, {"seed": 1}, "seed"),
                    (VIT, {"pixel_values": images()}, "pixel_values"),
                    (VIT, ANY_SIZE, "interpolate_pos_encoding"),
                )
            ),
            (TRANSFORMER, {"tolerance": 0.1}, TypeError, "a tolerance needs prompt=... to mea"),
            (VIT, {"tolerance": 0.1}, TypeError, "a tolerance needs pixel_values=... to m"),
            (PIPE, {"pixel_values": 3}, TypeError, "a UNet is measured by prompt=...; pass"),
            (PIPE, {"tolerance": 0.1, "prompt": []}, ValueError, "at least one prompt"),
            (PIPE, {"tolerance": 0.1, "prompt": 3}, TypeError, "be a sequence of strings"),
            (PIPE, {"tolerance": 1, "prompt": PROMPT, "hight": 8}, TypeError, "ument hight"),
            (PIPE, {"tolerance": 1, "prompt": PROMPT, "source": "M4"}, TypeError, "got str"),
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
        with pytest.raises(TypeError, match="an ErrorProfile is measured already; drop prompt"):
            apply_avq(pipe, found, tolerance=0.1, prompt=PROMPT)
        with pytest.raises(ValueError, match="apply it without codebooks"):
            apply_avq(pipe, random_codebooks(pipe.unet), tolerance=0.1, prompt=PROMPT)
        message = f"error profile of another model: {LAYER} has 4 heads of dim 4, but was measured"
        with pytest.raises(ValueError, match=message):
            apply_avq(tiny_pipe(tiny_unet(attention_head_dim=4)), found, tolerance=0.1)
        larger = tiny_pipe(tiny_unet(layers_per_block=2))
        with pytest.raises(ValueError, match=r"error profile of another model: .* is unexpected"):
            apply_avq(pipe, profile_of(larger, {1000: FINE}), tolerance=0.1)


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
            {"config": {"num_parent": 3}},
            {"layers": [STORED | {"layer": {"name": "a"}}]},
            {"layers": [STORED | {"layer": SPEC.stored | {"name": 3}}]},
            {"layers": [STORED | {"num_tokens": 0}]},
            {"layers": [STORED | {"num_tokens": "many"}]},
            {"layers": [STORED | {"costs": {"M4": 0.5}}]},
            {"layers": [STORED | {"costs": {"M4P0C0": "cheap"}}]},
            {"layers": [STORED | {"costs": {"exact": 1.0}, "errors": {"1000": {"exact": 0.0}}}]},
            {"layers": [STORED | {"errors": {}}]},
            {"layers": [STORED | {"errors": {"500": {"M4P0C0": 0.1}}}]},
            {"layers": [STORED | {"errors": {"1000": {"M4P0C0": math.nan}}}]},
            {"layers": [STORED | {"errors": {"1000": {"M4P0C0": -0.1}}}]},
            {"layers": [STORED | {"errors": {"1000": [0.1]}}]},
        ],
    )
    def test_other_files(self, tmp_path, change):
        path = tmp_path / "other.json"
        good = {"config": {}, "layers": [STORED]}
        path.write_text(json.dumps(good))
        assert ErrorProfile.load(path).within(0.2)["a"][1000] == Choice(
            Sizes(num_parents=4, num_refined=0, num_children=0, exact_keys=0), 0.1
        )
        for content in (json.dumps(good | change), "", "{", "[]", "{}", "[" * 100_000):
            path.write_text(content)
            with pytest.raises(ValueError, match=r"other\.json is not a saved ErrorProfile: "):
                ErrorProfile.load(path)
