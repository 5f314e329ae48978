"""Capture for every number of refined parents, the plan for a target, and what a pipeline gives."""

import json
import math
from dataclasses import replace
from functools import partial

import pytest
import torch
from cases import make_case
from diffusers import DDIMScheduler, StableDiffusionImg2ImgPipeline
from tiny import LAYER, draw, quiet, random_codebooks, random_image, tiny_pipe, tuned_codebooks

from avq_diffusers.attention.diagnostics import capture, capture_curve
from avq_diffusers.config import AVQConfig
from avq_diffusers.extras.scalecrafter.apply import scalecrafter
from avq_diffusers.extras.scalecrafter.settings import ScaleCrafterConfig
from avq_diffusers.plugin.apply import apply_avq, avq_disabled
from avq_diffusers.plugin.elastic import CaptureProfile, measure_capture
from avq_diffusers.plugin.refinement import set_num_refined
from avq_diffusers.plugin.report import summary

CONFIG = AVQConfig(
    10, 2, 3, query_tile=16, query_order="random", levels=(0, 1), importance_tile=4
)  # fmt: skip
PROMPT = "a red fox"


def rising(*captures):
    return (0.0, *captures, 1.0)


class TestCurve:
    @pytest.mark.parametrize("order", [None, torch.arange(49, -1, -1)])
    @pytest.mark.parametrize("importance_tile", [None, 4])
    def test_is_capture_at_every_number(self, order, importance_tile):
        """Catches another ranking than the op's, a tile lost, and a curve shifted by one parent."""
        query, key, _, codebook = make_case()
        arguments = {"query_tile": 16, "query_order": order, "importance_tile": importance_tile}
        curve = capture_curve(2 * query, key, codebook, **arguments)
        expected = [capture(2 * query, key, codebook, count, **arguments) for count in range(7)]
        torch.testing.assert_close(curve, torch.stack(expected, dim=-1))

    def test_half_precision(self):
        query, key, _, codebook = make_case(dtype=torch.float16)
        curve = capture_curve(query, key, codebook)
        expected = torch.stack([capture(query, key, codebook, n) for n in range(7)], dim=-1)
        torch.testing.assert_close(curve, expected.double())
        assert (curve[:, 0] == 0).all()
        assert (curve[:, -1] == 1).all()


class TestPlan:
    # Twelve parents; the mean over heads at 3, 4, 7 and 8 parents is .45, .5, .85 and .9.
    EVEN = rising(0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.8, 0.9, 0.95, 0.96, 0.97)
    STEEP = rising(0.4, 0.5, 0.6, 0.6, 0.7, 0.8, 0.9, 0.9, 0.9, 0.91, 0.92)

    @pytest.mark.parametrize(
        ("target", "count"),
        [(0.01, 4), (0.5, 4), (0.51, 8), (0.9, 8), (0.91, 12), (0.99, 12), (1, 12), (1.0, 12)],
    )
    def test_smallest_multiple_of_four(self, target, count):
        """Catches a step too many or too few, one head for all, and heads in place of parts."""
        profile = CaptureProfile({"a": {1000: (self.EVEN, self.STEEP)}, "b": {1000: (self.EVEN,)}})
        plan = profile.at_least(target)
        assert plan["a"] == {1000: count}
        assert list(plan) == ["a", "b"]
        assert profile.at_least(0.95)["b"] == {1000: 12}

    def test_all_parents_where_no_multiple_is_left(self):
        profile = CaptureProfile({"a": {1000: (rising(0.2, 0.4, 0.6, 0.8, 0.9),)}})
        assert profile.at_least(0.85) == {"a": {1000: 6}}
        assert CaptureProfile({"a": {1000: ((0.0, 1.0),)}}).at_least(0.5) == {"a": {1000: 1}}
        unused = rising(0.5, 0.7, 0.8, 1.0, 1.0, 1.0, 1.0)
        assert CaptureProfile({"a": {1000: (unused,)}}).at_least(1.0) == {"a": {1000: 4}}

    def test_parts(self):
        """Catches parts that are averaged, or mixed up."""
        parts = {1000: (self.EVEN,), 400: (self.STEEP,)}
        assert CaptureProfile({"a": parts}).at_least(0.6) == {"a": {1000: 8, 400: 4}}

    @pytest.mark.parametrize("target", [0, -0.5, 1.01, math.nan, math.inf])
    def test_target(self, target):
        profile = CaptureProfile({"a": {1000: (self.EVEN,)}})
        with pytest.raises(ValueError, match="target must be above 0 and at most 1, but got"):
            profile.at_least(target)

    def test_table(self):
        profile = CaptureProfile({"layer.a": {1000: (self.EVEN,), 500: (self.STEEP,)}})
        header, *rows = str(profile).splitlines()
        assert header.split() == ["layer", "from", "80%", "90%", "95%"]
        assert [row.split() for row in rows] == [
            ["layer.a", "1000", "8", "8", "12"],
            ["layer.a", "500", "8", "8", "12"],
        ]
        assert header.index("from") == rows[0].index("1000")
        assert repr(profile) == "CaptureProfile()"


class TestFile:
    PROFILE = CaptureProfile(
        {"a": {1000: (rising(0.1), rising(1 / 3)), 400: (rising(0.5), rising(0.2))}}
    )

    def test_round_trip(self, tmp_path):
        self.PROFILE.save(tmp_path / "profile.json")
        assert CaptureProfile.load(str(tmp_path / "profile.json")) == self.PROFILE
        assert [path.name for path in tmp_path.iterdir()] == ["profile.json"]

    @pytest.mark.parametrize(
        "content",
        [
            "", "{", "[]", "{}", '{"curves": []}', '{"curves": {"a": []}}', '{"curves": {"a": {}}}',
            '{"curves": {"a": {"x": [[0, 1]]}}}', '{"curves": {"a": {"500": [[0, 1]]}}}',
            '{"curves": {"a": {"1000": []}}}', '{"curves": {"a": {"1000": [[]]}}}',
            '{"curves": {"a": {"1000": [[0, 1], [0, 0.5, 1]]}}}',
            '{"curves": {"a": {"1000": [[0, 0.6, 0.5, 1]]}}}',
            '{"curves": {"a": {"1000": [[0, NaN, 1]]}}}', '{"curves": {"a": {"1000": [[0, 0.5]]}}}',
            '{"curves": {"a": {"1000": [[0.1, 1]]}}}', '{"curves": {"a": {"1000": 3}}}',
            '{"curves": {"a": {"1000": [[0, 1' + 400 * "0" + "]]}}}",
        ],
    )  # fmt: skip
    def test_other_files(self, tmp_path, content):
        (tmp_path / "other.json").write_text(content)
        with pytest.raises(ValueError, match=r"other\.json is not a saved CaptureProfile: "):
            CaptureProfile.load(tmp_path / "other.json")

    def test_no_file(self, tmp_path):
        with pytest.raises(FileNotFoundError):
            CaptureProfile.load(tmp_path / "none.json")

    def test_checks_itself(self):
        with pytest.raises(ValueError, match="curves of a must begin at timestep 1000"):
            CaptureProfile({"a": {500: (rising(0.5),)}})
        with pytest.raises(ValueError, match="curves of a must rise from 0 to 1 in every head"):
            CaptureProfile({"a": {1000: ((0.0, 0.5),)}})


def recorded(pipe, codebooks, **arguments):
    """By layer: (timestep, query, key, order) of the last image in every call, all exact.

    An independent way to what AVQ sees: what `attn1` gets, times its weights and their changes.
    """
    calls, timestep, handles = {}, [], []

    def see_timestep(module, args, kwargs):
        timestep[:] = [float(args[1])]

    def see_layer(name, attn, args):
        hidden_states = args[0][-1].double()
        changes = codebooks.projection_changes(name) or {}
        query, key = (
            (hidden_states @ (weight + changes.get(f"{part}.weight", 0)).double().T)
            .unflatten(-1, (attn.heads, -1))
            .transpose(0, 1)[None]
            for part, weight in (("to_q", attn.to_q.weight), ("to_k", attn.to_k.weight))
        )
        norm = codebooks.key_norm(name)
        if norm is not None:
            key = norm(key.float())
        order = attn._avq.call.get().query_order
        calls.setdefault(name, []).append((timestep[0], query.float(), key.float(), order))

    handles.append(pipe.unet.register_forward_pre_hook(see_timestep, with_kwargs=True))
    for name in codebooks.layer_specs:
        attn = pipe.unet.get_submodule(name)
        handles.append(attn.register_forward_pre_hook(partial(see_layer, name)))
    with avq_disabled(pipe):
        draw(pipe, **arguments)
    for handle in handles:
        handle.remove()
    return calls


class TestMeasure:
    def measure(self, pipe, **arguments):
        sizes = {"height": 128, "width": 128, "num_inference_steps": 3, "progress": False}
        return measure_capture(pipe, [PROMPT], **sizes | arguments)

    @pytest.mark.parametrize("kind", ["calibrated", "distilled"])
    def test_curves(self, pipe, kind):
        """Catches projections without their changes, a part of other timesteps,
        the unguided half of the batch, and any number that `capture` does not give.
        """
        if kind == "calibrated":
            codebooks = random_codebooks(pipe.unet, CONFIG)
        else:
            config = AVQConfig(10, 2, 3, query_tile=16, levels=(0, 1), key_norm=True)
            codebooks = tuned_codebooks(pipe.unet, config)
        apply_avq(pipe, codebooks)
        profile = self.measure(pipe, parts=2, seed=5)
        calls = recorded(pipe, codebooks, seed=5, num_inference_steps=3)
        assert list(profile.curves) == list(codebooks.layer_specs)
        for name, seen in calls.items():
            config, codebook = codebooks.layer_config(name), codebooks.codebook(name)
            assert [timestep for timestep, *_ in seen] == [667, 334, 1]
            for start, part in ((1000, seen[:1]), (500, seen[1:])):
                for count in (0, 1, 4, 9, 10):
                    expected = sum(
                        capture(
                            query,
                            key,
                            codebook,
                            count,
                            codewords="stored",
                            query_tile=16,
                            query_order=order,
                            importance_tile=config.importance_tile,
                        )
                        for _, query, key, order in part
                    ) / len(part)  # fmt: skip
                    got = [curve[count] for curve in profile.curves[name][start]]
                    torch.testing.assert_close(torch.tensor(got), expected, rtol=1e-3, atol=1e-3)

    def test_plan_reaches_the_target_with_the_fewest(self, pipe):
        """Catches a plan that `set_num_refined` reads otherwise, and a target missed."""
        codebooks = random_codebooks(pipe.unet, CONFIG)
        profile = self.measure(apply_avq(pipe, codebooks), parts=2)
        set_num_refined(pipe, profile.at_least(0.7))
        seen = recorded(pipe, codebooks, num_inference_steps=3)
        numbers = set()
        for name, calls in seen.items():
            plan = profile.at_least(0.7)[name]
            shown = {row.name: row.config for row in summary(pipe).rows}[name]
            values = list(dict.fromkeys(plan.values()))
            assert shown == f"M10P{'-'.join(map(str, values))}C2"
            for start, part in ((1000, calls[:1]), (500, calls[1:])):
                count = plan[start]
                numbers.add(count)
                assert count in (4, 8, 10)
                reached = [
                    sum(
                        capture(q, k, codebooks.codebook(name), n, codewords="stored",
                                query_tile=16, query_order=order, importance_tile=4).mean()
                        for _, q, k, order in part
                    ) / len(part)
                    for n in (count, count - 2 if count == 10 else count - 4)
                ]  # fmt: skip
                assert reached[0] > 0.7 - 1e-3
                assert reached[1] < 0.7 + 1e-3
        assert len(numbers) > 1

    def test_leaves_the_pipeline_as_it_was(self, pipe):
        """Catches hooks, a schedule or a progress bar that stay, and a result that depends on what
        is refined now.
        """
        apply_avq(pipe, random_codebooks(pipe.unet, CONFIG))
        profile = self.measure(pipe)
        set_num_refined(pipe, {1000: 0, 300: 10})
        before = draw(pipe)
        hooks = {name: len(m._forward_pre_hooks) for name, m in pipe.unet.named_modules()}
        assert self.measure(pipe) == profile
        assert torch.equal(draw(pipe), before)
        assert hooks == {n: len(m._forward_pre_hooks) for n, m in pipe.unet.named_modules()}
        assert not any(module._forward_hooks for module in pipe.unet.modules())
        assert pipe._progress_bar_config == {"disable": True}

        def fail(*args):
            raise KeyError

        with pytest.raises(KeyError):
            self.measure(pipe, callback_on_step_end=fail)
        assert torch.equal(draw(pipe), before)
        assert hooks == {n: len(m._forward_pre_hooks) for n, m in pipe.unet.named_modules()}

    def test_prompts_and_seeds_count(self, pipe):
        """Catches all but one prompt dropped, and arguments that do not reach the pipeline."""
        apply_avq(pipe, random_codebooks(pipe.unet, CONFIG))
        sizes = {"num_inference_steps": 1, "parts": 1, "progress": False, "height": 64, "width": 64}
        both = measure_capture(pipe, ["a fox", "a hen"], seed=3, **sizes)
        first = measure_capture(pipe, ["a fox"], seed=3, **sizes)
        second = measure_capture(pipe, ["a hen"], seed=4, **sizes)
        for name, parts in both.curves.items():
            halves = [torch.tensor(x.curves[name][1000]) for x in (first, second)]
            torch.testing.assert_close(torch.tensor(parts[1000]), sum(halves) / 2)
            assert not torch.equal(*halves)
        assert measure_capture(pipe, ["a fox"], seed=3, **sizes | {"width": 128}) != first

    def test_damped_evaluations_do_not_count(self, pipe):
        """Catches curves of the prompt mixed with those of nothing, and a bar that runs over."""
        apply_avq(pipe, random_codebooks(pipe.unet, CONFIG))
        pipe.scheduler = DDIMScheduler(timestep_spacing="trailing")  # one step, at 999
        damped = ScaleCrafterConfig((1, 1, 2, 2), 35, damped_dilations=(1, 1, 1, 1))
        sizes = {"height": 256, "width": 256, "num_inference_steps": 1, "parts": 1}
        with scalecrafter(pipe, 256, 256, config=damped):
            profile = self.measure(pipe, **sizes)
        with scalecrafter(pipe, 256, 256, config=replace(damped, damped_dilations=None)):
            assert self.measure(pipe, **sizes) == profile

    def test_parts_without_a_step(self, pipe):
        """Catches a part without curves, and a plan that does not begin at 1000."""
        apply_avq(pipe, random_codebooks(pipe.unet, CONFIG))
        profile = self.measure(pipe, num_inference_steps=2, parts=4)  # timesteps 501 and 1
        assert {tuple(parts) for parts in profile.curves.values()} == {(1000, 250)}
        other = quiet(StableDiffusionImg2ImgPipeline.from_pipe(pipe))
        late = measure_capture(
            other,
            [PROMPT],
            image=random_image(128),
            strength=0.5,
            num_inference_steps=4,
            progress=False,
        )  # timesteps 251 and 1
        assert {tuple(parts) for parts in late.curves.values()} == {(1000, 250)}
        set_num_refined(pipe, late.at_least(0.9))

    def test_flat_layers_are_left_out(self, pipe):
        config = AVQConfig(4, 2, 2, overrides={"up_blocks": {"num_children": 0, "num_refined": 0}})
        apply_avq(pipe, random_codebooks(pipe.unet, config))
        profile = self.measure(pipe, num_inference_steps=1)
        assert {name.split(".")[0] for name in profile.curves} == {"down_blocks"}
        set_num_refined(pipe, profile.at_least(1.0))
        shown = {row.name.split(".")[0]: row.config for row in summary(pipe).rows if row.config}
        assert shown == {"down_blocks": "M4P4C2", "up_blocks": "M4P0C0"}

    def test_shows_progress(self, pipe, capsys):
        apply_avq(pipe, random_codebooks(pipe.unet, CONFIG))
        self.measure(pipe, num_inference_steps=2, progress=True)
        assert "2/2" in capsys.readouterr().err
        self.measure(pipe, num_inference_steps=1)
        assert capsys.readouterr().err == ""

    def test_layers_that_do_not_run(self, pipe):
        """Catches a profile of nothing: where tokens are merged, AVQ does not run."""
        apply_avq(pipe, random_codebooks(pipe.unet, CONFIG))
        attn = pipe.unet.get_submodule(LAYER)
        attn.register_forward_pre_hook(lambda attn, args: (args[0][:, ::2], *args[1:]))
        attn.register_forward_hook(lambda attn, args, output: output.repeat_interleave(2, dim=1))
        with pytest.raises(RuntimeError, match=r"down_blocks\.0.*did not run on its grid"):
            self.measure(pipe, num_inference_steps=1)

    def test_errors(self, pipe, codebooks):
        with pytest.raises(ValueError, match=r"no AVQ layer; call apply_avq\(pipe\)"):
            measure_capture(pipe, [PROMPT])
        apply_avq(pipe, codebooks)
        with pytest.raises(TypeError, match="prompts must be a sequence of strings"):
            measure_capture(pipe, PROMPT)
        for arguments, message in (
            ({"prompts": []}, "at least one prompt, but got none"),
            ({"num_inference_steps": 0}, "num_inference_steps must be at least 1, but got 0"),
            ({"parts": 0}, "parts must be at least 1, but got 0"),
            ({"parts": 1001}, "parts must be at most 1000, but got 1001"),
        ):
            with pytest.raises(ValueError, match=message):
                measure_capture(pipe, **{"prompts": [PROMPT]} | arguments)
        apply_avq(pipe, random_codebooks(pipe.unet, AVQConfig.parse("M4")))
        with pytest.raises(ValueError, match="AVQ is flat here: without children, nothing"):
            measure_capture(pipe, [PROMPT])

    def test_of_another_model(self, pipe, codebooks):
        """Catches a plan that is taken over for the layers that happen to have the same name."""
        profile = CaptureProfile({"down_blocks.7.attn1": {1000: (rising(0.5),)}})
        apply_avq(pipe, codebooks)
        with pytest.raises(ValueError, match=r"layer is 'down_blocks\.7\.attn1' or in it; the"):
            set_num_refined(pipe, profile.at_least(0.9))


def test_saved_profile_serves_another_pipeline(pipe, tmp_path):
    """Catches anything that matters to the image and is not in the file."""
    codebooks = random_codebooks(pipe.unet, CONFIG)
    profile = measure_capture(
        apply_avq(pipe, codebooks), [PROMPT], num_inference_steps=2, progress=False
    )
    expected = draw(set_num_refined(pipe, profile.at_least(0.8)))
    profile.save(tmp_path / "profile.json")
    assert json.loads((tmp_path / "profile.json").read_text()).keys() == {"curves"}
    plan = CaptureProfile.load(tmp_path / "profile.json").at_least(0.8)
    other = set_num_refined(apply_avq(tiny_pipe(), codebooks), plan)
    assert torch.equal(draw(other), expected)
