"""The dial from fast to exact: what is measured, what a tolerance chooses, and what then runs."""

import json
import math
from contextlib import nullcontext
from functools import partial
from threading import Barrier, BrokenBarrierError

import pytest
import tomesd
import torch
import torch.nn.functional as F
from diffusers import EDMEulerScheduler
from tiny import LAYER, draw, random_codebooks, small_unet, tiny_pipe, tiny_unet

from avq_diffusers.attention.api import avq_attention
from avq_diffusers.attention.orders import query_order
from avq_diffusers.config import AVQConfig, Sizes
from avq_diffusers.plugin import error_measurement, error_profile, routing
from avq_diffusers.plugin.apply import apply_avq, remove_avq
from avq_diffusers.plugin.error_measurement import Ladder, measure_error
from avq_diffusers.plugin.error_profile import Choice, ErrorProfile, LayerErrors
from avq_diffusers.plugin.layers import LayerSpec, select_layers
from avq_diffusers.plugin.refinement import set_num_refined
from avq_diffusers.plugin.report import summary

PROMPT = "a red fox"
CONFIG = AVQConfig(8, 2, 4, query_tile=16, levels=(0, 1))
COARSE, MIDDLE, FINE = "M4P0C0", "M8P4C2", "M8P8C4E16"
SIZE = {"height": 128, "width": 128, "progress": False}
SPEC = LayerSpec("a", 0, 2, 8)
COSTS = {"M8P4C2": 0.5, "M4P0C0": 0.2, "M8P8C4E16": 0.9}
STORED = {
    "layer": SPEC.stored,
    "num_tokens": 64,
    "costs": {"M4P0C0": 0.5},
    "errors": {"1000": {"M4P0C0": 0.1}, "500": {"M4P0C0": 1 / 3}},
}


@pytest.fixture(autouse=True)
def short_ladder(monkeypatch):
    monkeypatch.setattr(error_measurement, "LADDER", (COARSE, FINE))


def measure(pipe, config=CONFIG, **arguments):
    return measure_error(pipe, [PROMPT], config, **SIZE | {"num_inference_steps": 3} | arguments)


def profile_of(pipe, choices, config=CONFIG, num_tokens=1):
    """A profile whose tolerance 0.1 gives every layer these choices, by timestep."""
    layers = []
    for layer in select_layers(pipe.unet, config.levels, config.exact):
        costs = {sizes: 0.5 for sizes in choices.values() if sizes != "exact"}
        errors = {
            start: {sizes: 0.05 if sizes == chosen else 0.5 for sizes in costs}
            for start, chosen in choices.items()
        }
        layers.append(LayerErrors(LayerSpec(**layer.stored), num_tokens, costs, errors))
    return ErrorProfile(config, tuple(layers))


class TestMeasure:
    def test_errors_are_those_of_the_calls(self, pipe):
        """Catches half a batch, another norm, a mean over calls, another order, parts mixed up."""
        profile = measure(pipe, parts=2, seed=5)
        calls, timestep = {}, []

        def see_layer(name, side, attn, args):
            query, key, value = (
                (args[0] @ projection.weight.T).unflatten(-1, (2, -1)).transpose(1, 2)
                for projection in (attn.to_q, attn.to_k, attn.to_v)
            )
            exact = F.scaled_dot_product_attention(query, key, value)
            order = query_order(side, side, "gilbert", key.device)
            sizes = dict(num_parents=8, num_children=4, num_refined=8, exact_keys=16)
            avq = avq_attention(
                query, key, value, **sizes, query_tile=16, query_order=order, backend="reference"
            )
            error = (avq - exact).square().sum().sqrt() / exact.square().sum().sqrt()
            calls.setdefault(name, []).append((timestep[-1], len(key), float(error)))

        def see_timestep(unet, args, kwargs):
            timestep.append(float(args[1]))

        pipe.unet.register_forward_pre_hook(see_timestep, with_kwargs=True)
        for layer in select_layers(pipe.unet, (0, 1)):
            hook = partial(see_layer, layer.name, 16 >> layer.level)
            layer.attn.register_forward_pre_hook(hook)
        draw(pipe, seed=5, num_inference_steps=3)
        assert [one.layer.name for one in profile.layers] == list(calls)
        for one in profile.layers:
            first, *later = calls[one.layer.name]
            assert (first[0], first[1], len(later)) == (667, 2, 2)
            expected = {1000: first[2], 500: max(error for *_, error in later)}
            got = {start: errors[FINE] for start, errors in one.errors.items()}
            assert got == pytest.approx(expected, rel=1e-4)
            assert set(one.errors[1000]) == {COARSE, MIDDLE, FINE}
            assert one.costs[FINE] == 56 / (16 >> one.layer.level) ** 2

    def test_sizes_that_cost_as_much_as_exact_are_left_out(self, pipe, monkeypatch):
        """Catches E256 measured, and chosen, for 64 tokens."""
        monkeypatch.setattr(error_measurement, "LADDER", (COARSE, "M8P0C0E56", "M8P0C0E55"))
        costs = {one.layer.level: set(one.costs) for one in measure(pipe).layers}
        assert costs[1] == {COARSE, MIDDLE, "M8P0C0E55"}
        assert costs[0] == {COARSE, MIDDLE, "M8P0C0E55", "M8P0C0E56"}

    def test_leaves_the_pipeline_as_it_was(self, pipe):
        """Catches hooks that stay after a failure, and errors of a UNet that runs AVQ."""
        profile = measure(pipe)
        apply_avq(pipe, random_codebooks(pipe.unet))
        before = draw(pipe)
        hooks = {name: len(m._forward_pre_hooks) for name, m in pipe.unet.named_modules()}
        assert measure(pipe) == profile

        def fail(*args):
            raise KeyError

        with pytest.raises(KeyError):
            measure(pipe, callback_on_step_end=fail)
        assert torch.equal(draw(pipe), before)
        assert hooks == {n: len(m._forward_pre_hooks) for n, m in pipe.unet.named_modules()}
        assert not any(module._forward_hooks for module in pipe.unet.modules())

    def test_nan_names_the_layer(self, pipe):
        pipe.unet.get_submodule(LAYER).to_k.weight.data[0, 0] = math.nan
        with pytest.raises(ValueError, match=rf"attention of {LAYER} gives NaN or infinity"):
            measure(pipe, num_inference_steps=1)

    def test_merged_tokens_name_the_layer(self, pipe):
        """Catches the order of a grid for tokens that are not on it."""
        tomesd.apply_patch(pipe, use_rand=False)
        with pytest.raises(RuntimeError, match=r"did not run .* without merging tokens"):
            measure(pipe, num_inference_steps=1)

    def test_samplers_without_training_timesteps(self, pipe):
        pipe.scheduler = EDMEulerScheduler()
        with pytest.raises(ValueError, match="measure_error with several parts need a sampler"):
            measure(pipe)
        assert set(measure(pipe, parts=1).layers[0].errors) == {1000}

    @pytest.mark.parametrize(
        ("config", "word"),
        [
            (AVQConfig(overrides={"0": {"num_refined": 1}}), "overrides"),
            (AVQConfig(codewords="stored"), 'codewords="stored"'),
            (AVQConfig(key_norm=True), "key_norm"),
            (AVQConfig(importance_tile=4), "importance_tile"),
        ],
    )
    def test_configurations_with_choices_of_their_own(self, pipe, config, word):
        with pytest.raises(ValueError, match=f"a tolerance chooses sizes .*; drop {word}"):
            measure(pipe, config)


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

    def test_a_margin_for_what_is_not_measured(self):
        assert self.choose((0.095, 0.3, 0.05)) == {1000: ("M8P8C4E16", 0.05)}

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

    @pytest.mark.parametrize(
        ("tolerance", "kind", "message"),
        [
            (0, ValueError, "tolerance must be above 0 and finite, but got 0"),
            (-0.1, ValueError, "tolerance must be above 0 and finite, but got -0.1"),
            (math.nan, ValueError, "tolerance must be above 0 and finite, but got nan"),
            (math.inf, ValueError, "tolerance must be above 0 and finite, but got inf"),
            ("0.1", TypeError, "tolerance must be a number such as 0.1, but got '0.1'"),
            (True, TypeError, "tolerance must be a number such as 0.1, but got True"),
        ],
    )
    def test_bad_tolerances(self, pipe, tolerance, kind, message):
        with pytest.raises(kind, match=message):
            apply_avq(pipe, tolerance=tolerance, prompt=PROMPT)

    def test_table(self):
        layer = LayerErrors(
            SPEC, 64, {"M4P0C0": 0.5}, {1000: {"M4P0C0": 0.08}, 500: {"M4P0C0": 0.16}}
        )
        header, row = str(ErrorProfile(AVQConfig(), (layer,))).splitlines()
        assert header.split() == ["layer", "0.05", "0.1", "0.2"]
        assert row.split() == ["a", "exact", "M4P0C0,", "exact", "M4P0C0"]


class TestApply:
    def test_runs_what_was_chosen(self, pipe):
        """Catches sizes that do not reach the layers, and parts that switch elsewhere."""
        exact = draw(pipe)
        coarse, fine = (
            draw(apply_avq(pipe, AVQConfig.parse(x, query_tile=16, levels=(0, 1))))
            for x in (COARSE, FINE)
        )
        for chosen, expected in ((COARSE, coarse), (FINE, fine), ("exact", exact)):
            profile = profile_of(pipe, {1000: chosen})
            assert torch.equal(draw(apply_avq(pipe, profile, tolerance=0.1)), expected)
        switched = profile_of(pipe, {1000: "exact", 400: FINE})  # steps at 501 and 1
        latents = draw(apply_avq(pipe, switched, tolerance=0.1))
        assert not any(torch.equal(latents, other) for other in (exact, coarse, fine))
        row = next(row for row in summary(pipe).rows if row.name == LAYER)
        assert row.calls == {"scheduled": 1, "AVQ": 1}
        assert (row.config, row.error) == (f"exact, {FINE}", 0.05)
        assert torch.equal(draw(remove_avq(pipe)), exact)
        assert "_avq_scheduler" not in pipe.unet.__dict__

    def test_one_line(self, pipe):
        """Catches arguments that do not reach the measurement, and another choice next time."""
        profile = measure(pipe, num_inference_steps=2, seed=3)
        other = tiny_pipe()
        apply_avq(
            other, CONFIG, tolerance=0.3, prompt=PROMPT, num_inference_steps=2, seed=3, **SIZE
        )
        apply_avq(pipe, profile, tolerance=0.3)
        assert torch.equal(draw(pipe), draw(other))
        configs = {row.config for row in summary(pipe).rows}
        assert len(configs - {""}) > 1
        assert summary(pipe) == summary(other)

    def test_summary_shows_errors_of_what_runs(self, pipe):
        """Catches an error shown for sizes that nobody measured."""
        assert "error" not in str(summary(apply_avq(pipe, CONFIG)))
        apply_avq(pipe, profile_of(pipe, {1000: FINE}), tolerance=0.1)
        header, row = (line.split() for line in str(summary(pipe)).splitlines()[:2])
        assert row[header.index("error")] == "0.050"
        set_num_refined(pipe, 2)
        assert "error" not in str(summary(pipe))
        assert {row.config for row in summary(pipe).rows if row.config} == {"M8P2C2"}

    def test_fewer_tokens_than_were_measured_run_exact(self, pipe):
        """Catches AVQ where its cost is unknown, and a forced route that is not."""
        exact = draw(pipe)
        avq = draw(apply_avq(pipe, profile_of(pipe, {1000: FINE}), tolerance=0.1))
        tokens = {row.num_tokens for row in summary(pipe).rows if row.config}
        profile = profile_of(pipe, {1000: FINE}, num_tokens=max(tokens) + 1)
        assert torch.equal(draw(apply_avq(pipe, profile, tolerance=0.1)), exact)
        assert {row.runs for row in summary(pipe).rows if row.config} == {"exact: few tokens"}
        assert torch.equal(draw(apply_avq(pipe, profile, tolerance=0.1, route="always")), avq)
        apply_avq(pipe, profile, tolerance=0.1)
        assert not torch.equal(draw(set_num_refined(pipe, 4)), exact)

    def test_failed_measurement_changes_nothing(self, pipe):
        avq = draw(apply_avq(pipe, CONFIG))
        with pytest.raises(TypeError, match="takes no argument hight"):
            apply_avq(pipe, tolerance=0.1, prompt=PROMPT, hight=128)
        assert torch.equal(draw(pipe), avq)

    def test_compiled(self):
        """Catches sizes of the first part baked into the graph of the second."""
        pipe = tiny_pipe(small_unet())
        config = AVQConfig(8, 2, 4, query_tile=16)
        profile = profile_of(pipe, {1000: COARSE, 400: "exact"}, config)
        expected = draw(apply_avq(pipe, profile, tolerance=0.1), height=64, width=64)
        pipe.unet.compile(backend="eager")
        torch.testing.assert_close(draw(pipe, height=64, width=64), expected)

    @pytest.mark.parametrize(
        ("arguments", "kind", "message"),
        [
            ({"prompt": PROMPT}, TypeError, "prompt belong to the measurement of a tolerance"),
            ({"height": 64}, TypeError, "height belong to the measurement of a tolerance"),
            ({"tolerance": 0.1}, TypeError, "a tolerance is measured on a prompt; pass prompt"),
            ({"tolerance": 0.1, "prompt": []}, ValueError, "at least one prompt"),
            ({"tolerance": 0.1, "prompt": 3}, TypeError, "prompts must be a sequence of strings"),
            (
                {"tolerance": 0.1, "prompt": PROMPT, "source": "M64P16C8"},
                TypeError,
                "expected AVQCodebooks, an AVQConfig or nothing, but got str",
            ),
        ],
    )
    def test_bad_arguments(self, pipe, arguments, kind, message):
        with pytest.raises(kind, match=message):
            apply_avq(pipe, **arguments)

    def test_codebooks(self, pipe):
        with pytest.raises(ValueError, match="apply it without codebooks"):
            apply_avq(pipe, random_codebooks(pipe.unet), tolerance=0.1, prompt=PROMPT)

    def test_profiles(self, pipe):
        profile = profile_of(pipe, {1000: FINE})
        with pytest.raises(TypeError, match=r"tolerance must be a number .* got None"):
            apply_avq(pipe, profile)
        with pytest.raises(TypeError, match="an ErrorProfile is measured already; drop prompt"):
            apply_avq(pipe, profile, tolerance=0.1, prompt=PROMPT)

    def test_another_model(self, pipe):
        """Catches a profile that is applied to what it does not describe."""
        profile = profile_of(pipe, {1000: FINE})
        message = f"error profile of another model: {LAYER} has 4 heads of dim 4, but was measured"
        with pytest.raises(ValueError, match=message):
            apply_avq(tiny_pipe(tiny_unet(attention_head_dim=4)), profile, tolerance=0.1)
        larger = tiny_pipe(tiny_unet(layers_per_block=2))
        with pytest.raises(ValueError, match=r"error profile of another model: .* is unexpected"):
            apply_avq(pipe, profile_of(larger, {1000: FINE}), tolerance=0.1)


class TestFile:
    def test_round_trip(self, pipe, tmp_path):
        profile = measure(pipe, num_inference_steps=2)
        profile.save(tmp_path / "profile.json")
        assert ErrorProfile.load(str(tmp_path / "profile.json")) == profile
        assert [path.name for path in tmp_path.iterdir()] == ["profile.json"]

    def test_a_failed_save_leaves_what_was_there(self, pipe, tmp_path, monkeypatch):
        path = tmp_path / "profile.json"
        profile = profile_of(pipe, {1000: FINE})
        profile.save(path)
        monkeypatch.setattr(error_profile.json, "dumps", lambda *args, **options: 3)
        with pytest.raises(TypeError):
            profile_of(pipe, {1000: COARSE}).save(path)
        assert [*tmp_path.iterdir()] == [path]
        assert ErrorProfile.load(path) == profile

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
        assert ErrorProfile.load(path).within(0.2)["a"][1000] == Choice(Sizes(4, 0, 0, 0), 0.1)
        path.write_text(json.dumps(good | change))
        with pytest.raises(ValueError, match=r"other\.json is not a saved ErrorProfile: "):
            ErrorProfile.load(path)

    @pytest.mark.parametrize("content", ["", "{", "[]", "{}", "[" * 100_000])
    def test_no_profile(self, tmp_path, content):
        (tmp_path / "other.json").write_text(content)
        with pytest.raises(ValueError, match=r"other\.json is not a saved ErrorProfile: "):
            ErrorProfile.load(tmp_path / "other.json")


class TestExactParts:
    def test_first_steps(self, pipe):
        """Catches exact attention at other timesteps, and sizes lost on the way back."""
        exact = draw(pipe)
        avq = draw(apply_avq(pipe, CONFIG))
        assert torch.equal(draw(set_num_refined(pipe, "exact")), exact)
        set_num_refined(pipe, {1000: "exact", 400: 4})
        partly = draw(pipe)
        assert not torch.equal(partly, exact)
        assert not torch.equal(partly, avq)
        row = next(row for row in summary(pipe).rows if row.name == LAYER)
        assert (row.config, row.calls["scheduled"]) == ("exact, M8P4C2", 3)
        assert torch.equal(draw(set_num_refined(pipe, 4)), avq)

    @pytest.mark.parametrize("value", ["dense", None, 1.5])
    def test_other_words(self, pipe, value):
        with pytest.raises(TypeError, match="only 'exact' may take the place of a number"):
            set_num_refined(apply_avq(pipe, CONFIG), {1000: value})


def test_costs_on_a_gpu_are_measured_once_and_kept(monkeypatch, tmp_path):
    """Catches a choice that changes with a second measurement, and the ratio upside down."""
    times = iter((1.0, 2.0, 4.0, 1.0))
    monkeypatch.setattr(routing, "user_cache_path", lambda name: tmp_path / name)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "GPU X")
    monkeypatch.setattr(torch.accelerator, "device_index", lambda index: nullcontext())
    monkeypatch.setattr(routing, "_compiled_milliseconds", lambda call: call())
    workload = routing.Workload(4, 8, Sizes(4, 2, 2, 0), 16, torch.float16)

    def cost(num_tokens):
        turns = {"avq": lambda: next(times), "exact": lambda: next(times)}
        return routing.relative_cost(workload, num_tokens, torch.device("cuda"), **turns)

    try:
        for _ in range(2):
            routing._table.cache_clear()
            assert cost(256) == 0.5
        assert cost(1024) == 4.0
    finally:
        routing._table.cache_clear()
    (kept,) = tmp_path.rglob("routes.json")
    assert [*json.loads(kept.read_text()).values()] == [0.5, 4.0]


def test_the_first_call_decides_what_is_measured():
    """Catches a later call of more tokens that has sizes of its own, where the first had none."""
    ladder = Ladder(SPEC, CONFIG, progress=False)
    for num_tokens in (4, 64):
        query, key, value = torch.randn(3, 1, 2, num_tokens, 8)
        _, errors = ladder.measure(query, key, value, query_tile=16)
        assert errors.shape == (0,)
    assert ladder.costs == {}


def test_kernels_compile_side_by_side():
    """Catches rungs that compile one after another, gradients in a thread, and a lost error."""
    ladder = Ladder(SPEC, AVQConfig(), progress=False)
    both, modes = Barrier(2), []

    def call():
        both.wait(timeout=10)
        modes.append(torch.is_grad_enabled())

    ladder._compile([call, call], torch.device("cpu"))
    assert modes == [False, False]
    both.abort()
    with pytest.raises(BrokenBarrierError):
        ladder._compile([call], torch.device("cpu"))
