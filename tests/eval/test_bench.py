"""Benches of the operation and of the UNet step: each times what it names, here on the CPU."""

import json
import math
from dataclasses import replace
from functools import partial
from importlib.metadata import version
from time import sleep

import pytest
import torch
from diffusers import UNet2DConditionModel
from diffusers.models.attention_processor import AttnProcessor2_0
from eval_helpers import run_command
from PIL import Image

from avq_diffusers import AVQConfig, select_layers
from avq_diffusers.extras.linfusion import LinFusionProcessor
from avq_diffusers.mini import MINI_SD
from eval.benchmarks import contenders, inputs, kernels, step, step_rows, unet
from eval.benchmarks.attention import attention_table, bench_attention
from eval.benchmarks.contenders import Bench, Contender, relative_error
from eval.benchmarks.gradients import bench_gradients, gradients_table
from eval.benchmarks.inputs import KeySource, Shape
from eval.benchmarks.timing import Effort, time_in_turns
from eval.benchmarks.unet_configs import SD15, SDXL
from eval.names import LEVELS, method_label, parse_method, timed_method

CPU = torch.device("cpu")
FAST = Effort(rounds=2, block_ms=0.1, eager_rounds=2)
SHAPE = Shape(2, 2, 150, 16)  # N is no multiple of the query tile


@pytest.fixture(autouse=True)
def few_calibration_keys(monkeypatch):
    monkeypatch.setattr(inputs, "CALIBRATION_KEYS", 256)
    monkeypatch.setattr(step, "CALIBRATION_KEYS", 512)


@pytest.fixture
def bench():
    return Bench(CPU, FAST)


def tiny_steps(**config):
    """Of a tiny UNet that would be trained at 128."""
    build = partial(unet.random_unet, {**unet.TINY, "sample_size": 16, **config}, LEVELS)
    model = replace(unet.TINY_MODELS["sd15"], build=build)
    return step.StepBench(model, CPU, compile_backend="eager")


@pytest.fixture(scope="module")
def steps():
    return tiny_steps()


def read(path):
    return json.loads(path.read_text())


def is_image_with_ink(path):
    """A plot that is one colour has no axes."""
    with Image.open(path) as image:
        return len(image.convert("L").getcolors()) > 10


@pytest.mark.parametrize("slope", [1.0, 0.5, -2.0])
def test_fit_slope_of_a_power_law(slope):
    x = [3, 10, 100, 5000]
    assert kernels.fit_slope(x, [7 * value**slope for value in x]) == pytest.approx(slope)


def test_fit_slope_is_least_squares():
    """Fails for the slope between the end points, which is 0 here."""
    assert kernels.fit_slope([1, 10, 100], [1, 1, 1]) == pytest.approx(0)
    assert kernels.fit_slope([1, 10, 100, 1000], [1, 10, 1, 1]) == pytest.approx(-0.1)


def scaling_row(against, config, tokens, ms, **more):
    chosen = AVQConfig.parse(config, codewords="stored")
    return {
        "part": "scaling",
        "against": against,
        "method": contenders.method_name(chosen),
        "config": config,
        "tokens": tokens,
        "effective_codewords": chosen.effective_codewords,
        "ms": ms,
        **more,
    }


def test_slopes_group_the_rows_and_take_the_right_axis():
    """Fails for VQ and AVQ in one line, a fit over M0 alone, or a missing time taken for one."""
    rows = [
        scaling_row("codewords", "M128", 64, 2.0),
        scaling_row("codewords", "M64", 64, 1.0),
        scaling_row("codewords", "M256", 64, None),
        scaling_row("codewords", "M64P8C8", 64, 4.0, precompute_ms=1.0, attention_ms=2.0),
        scaling_row("codewords", "M64P24C8", 64, 8.0, precompute_ms=1.0, attention_ms=8.0),
        scaling_row("tokens", "M64P8C8", 100, 1.0),
        scaling_row("tokens", "M64P8C8", 1000, 10**1.5),
    ]
    flat, adaptive, tokens = kernels.slopes(rows)
    assert (flat["label"], flat["x"], flat["ms"]) == ("VQ, N = 64", [64, 128], [1.0, 2.0])
    assert flat["slope"] == pytest.approx(1)
    assert "precompute_slope" not in flat
    assert (adaptive["label"], adaptive["x"]) == ("AVQ, N = 64", [128, 256])
    stages = [adaptive[f"{stage}slope"] for stage in ("", "precompute_", "attention_")]
    assert stages == pytest.approx([1, 0, 2])
    assert tokens["label"] == "AVQ 64/8/8"
    assert tokens["slope"] == pytest.approx(1.5)


@pytest.mark.parametrize("one_hot", [True, False])
def test_unfused_precompute_by_hand(one_hot):
    """Fails for sums instead of means, a lost bias, or NaN where a codeword has no key."""
    codewords = torch.tensor([[[0.0, 0], [10, 0], [0, 50]]])
    key = torch.tensor([[[[0.0, 1], [9, 0], [6, 0], [4, 0]]]])
    value = torch.tensor([[[[1.0, 2], [4, 0], [8, 2], [3, 4]]]])
    bias = -0.5 * codewords.square().sum(-1)[:, None]
    means, counts = contenders.unfused_precompute(key, value, codewords, bias, one_hot=one_hot)
    assert counts.tolist() == [[[2, 2, 0]]]
    assert means.tolist() == [[[[2, 3], [6, 1], [0, 0]]]]


def test_inputs_have_the_layout_of_the_projections_and_hot_keys():
    source = KeySource(3, 16, CPU)
    tensors = source.inputs(Shape(2, 3, 400, 16), torch.float32, hot_share=0.3)
    for tensor in tensors:
        assert tensor.shape == (2, 3, 400, 16)
        assert tensor.transpose(1, 2).is_contiguous()
    key = tensors[1]
    hot = (key == key[:1, :, :1]).all(-1).float().mean((0, 2))
    assert hot.tolist() == pytest.approx([0.3] * 3, abs=0.07)
    even = source.inputs(Shape(2, 3, 400, 16), torch.float32)[1]
    assert (even == even[:1, :, :1]).all(-1).sum() == 3
    codebook = source.codebook(AVQConfig.parse("M8P1C2"))
    assert codebook.parents.shape == (3, 8, 16)
    assert source.codebook(AVQConfig.parse("M8P4C2")) is codebook


def test_bench_attention_rows():
    """Fails for a ratio upside down, or exact attention timed beyond its limit."""
    rows = bench_attention(
        [64, 90],  # a square grid, and a row
        config=AVQConfig.parse("M4P2C2", query_tile=16),
        device=CPU,
        dtype=torch.float32,
        batch=1,
        num_heads=1,
        head_dim=8,
        effort=FAST,
        max_exact_tokens=64,
    )
    small, large = rows
    assert (small["num_tokens"], large["num_tokens"]) == (64, 90)
    assert 0 < small["exact_ms"] < small["avq_ms"] < 1000
    assert small["own_over_stored"] == pytest.approx(small["own_ms"] / small["avq_ms"])
    assert small["ratio"] == pytest.approx(small["exact_ms"] / small["avq_ms"])
    assert large["exact_ms"] is None
    assert large["ratio"] is None
    assert attention_table(rows).splitlines()[-1].startswith("| 90 | - | ")
    assert large["exact_spread"] is None
    assert small["exact_spread"] >= 0


def test_bench_gradients_rows():
    """Fails for a forward pass in place of both, or a ratio of another row."""
    config = AVQConfig.parse("M4P2C2", query_tile=16)
    exact, avq = bench_gradients(
        [Shape(1, 2, 64, 8)], configs=[config], device=CPU, dtype=torch.float32, effort=FAST
    )
    for row in (exact, avq):
        assert 0 < row["forward_ms"] < row["both_ms"]
        assert row["over_exact"] == pytest.approx(row["both_ms"] / exact["both_ms"])
    assert avq["attention"] == "M4P2C2/own"
    assert gradients_table([exact, avq]).splitlines()[2].startswith("| B1 H2 N64 D8 | ")


def test_time_in_turns_runs_every_set_and_divides():
    """Fails for a run that is timed under another's name, on one input set, or for all sets."""
    calls = []

    def slow(index):
        calls.append(("slow", index))
        sleep(0.004)

    def quick(index):
        calls.append(("quick", index))

    slow_timing, quick_timing = time_in_turns([slow, quick], 3, CPU, FAST)
    assert 4 <= slow_timing["ms"] == slow_timing["eager_ms"] < 20
    assert quick_timing["ms"] < 1
    assert slow_timing["timer"] == "eager"
    assert {index for name, index in calls if name == "slow"} == {0, 1, 2}
    order = [name for name, index in calls if index == 0]
    turns = [name for name, before in zip(order, [None, *order], strict=False) if name != before]
    assert turns[-3:] == ["slow", "quick", "slow"]  # estimate, then forwards and backwards


def every_contender(bench, shape, sets, flat, adaptive):
    flat, adaptive = (AVQConfig.parse(text, codewords="stored") for text in (flat, adaptive))
    fused = bench.avq(shape, sets, flat)
    unfused = bench.unfused(shape, sets, flat, fused.expected)
    stored = bench.avq(shape, sets, adaptive)
    own = bench.avq(shape, sets, replace(adaptive, codewords="means"), own=True)
    return [*bench.exact(sets), fused, *unfused, stored, own]


def test_every_contender_is_what_it_is_called(bench):
    """All rows of a size against their oracle, and each oracle refuses the neighbours' outputs."""
    sets = bench.input_sets(SHAPE)
    rivals = every_contender(bench, SHAPE, sets, "M8", "M8P2C4")
    rows = bench.rows(SHAPE, rivals, len(sets))
    names = ["default SDPA", "FA2", "cuDNN", "VQ 8", "unfused VQ 8 (one-hot)"]
    names += ["unfused VQ 8 (scatter)", "AVQ 8/2/4", "AVQ 8/2/4, own codewords"]
    assert [row["method"] for row in rows] == names
    timed = {row["method"]: row for row in rows if row["ms"] is not None}
    assert list(timed) == [name for name in names if name not in ("FA2", "cuDNN")]
    for row in timed.values():
        assert row["error"] < 1e-5
        assert 0 < row["ms"] < 1000
        assert row["spread"] >= 0
    assert rows[1]["note"] == "FA2 needs a CUDA device"
    assert "not compiled" in timed["unfused VQ 8 (scatter)"]["note"]
    stored, own = timed["AVQ 8/2/4"], timed["AVQ 8/2/4, own codewords"]
    assert stored["effective_codewords"] == own["effective_codewords"] == 16
    assert (stored["config"], own["config"]) == ("M8P2C4", "M8P2C4/own")
    assert own["over_stored"] == pytest.approx(own["ms"] / stored["ms"])
    assert "over_stored" not in stored

    by_name = {rival.name: rival for rival in rivals}
    for name, other in (
        ("AVQ 8/2/4", "VQ 8"),
        ("default SDPA", "AVQ 8/2/4"),
        ("VQ 8", "default SDPA"),
        ("AVQ 8/2/4, own codewords", "AVQ 8/2/4"),
    ):
        impostor = Contender(name, by_name[other].run, by_name[name].expected)
        (row,) = bench.rows(SHAPE, [impostor], len(sets))
        assert row["ms"] is None, (name, other)
        assert row["note"].startswith("wrong output: relative error")


@pytest.mark.parametrize("text", ["M8P2C4", "M32", "M8P2C4/own"])
def test_the_stages_of_the_kernels_are_the_operation(bench, text):
    """In Triton's interpreter; fails for stages, or a packing of the baseline, that miss a row."""
    pytest.importorskip("triton")
    shape = Shape(1, 2, 70, 16)
    sets = bench.input_sets(shape)
    method = parse_method(text, (0,))
    config = method.config
    codebook = None if method.own else bench.source(shape).codebook(config)
    order = torch.arange(shape.num_tokens).flip(0) if method.own else None
    bench.backend = "triton"
    expected = bench.avq(shape, sets, config, order, own=method.own).run(0)
    stages = contenders.kernel_stages(sets, config, codebook, order)
    assert list(stages) == ["precompute_ms", "attention_ms"]
    assert relative_error(stages["attention_ms"](0), expected) < 1e-5
    if not config.num_children:
        query, key, value = sets[0]
        bias = -0.5 * codebook.parents.square().sum(-1)[:, None]
        unfused = contenders.unfused_precompute(key, value, codebook.parents, bias, one_hot=True)
        by_kernel = contenders.flat_kernel(config, codebook, torch.float32)
        assert relative_error(by_kernel(query, *unfused), expected) < 1e-5


def test_a_contender_of_nan_or_one_that_fails_gets_no_time(bench):
    good = torch.ones(1, 1, 4, 2)

    def fail(index):
        raise RuntimeError("no available kernel\nand a trace")

    def never(index):
        raise AssertionError("the stage of a contender that is wrong was run")

    def slow_stage(index):
        sleep(0.001)

    rivals = [
        Contender("nan", lambda index: good * math.nan, lambda: good),
        Contender("fails", fail, lambda: good, stages={"precompute_ms": never}),
        Contender("zero", lambda index: 0 * good, lambda: good, stages={"precompute_ms": never}),
        Contender(
            "right",
            lambda index: good,
            lambda: good[:, :, :2],
            facts={"note": "kept"},
            stages={"precompute_ms": slow_stage},
        ),
    ]
    nan, failed, zero, right = bench.rows(Shape(1, 1, 4, 2), rivals, 1)
    assert nan["ms"] is None
    assert nan["note"] == "wrong output: relative error nan"
    assert (failed["ms"], failed["note"]) == (None, "no available kernel")
    assert (zero["ms"], zero["note"]) == (None, "wrong output: relative error 1")
    assert right["precompute_ms"] >= 1 > right["ms"]
    assert right["note"] == "kept"


@torch.no_grad()
def test_sinks_are_attended_to(bench):
    """Fails for a row of sinks that is timed without them; they hold what no other value has."""
    config = AVQConfig.parse("M4P2C2")
    sets = bench.input_sets(SHAPE)
    sinks = [(key, torch.full_like(value, 9.0)) for key, value in bench.sinks(SHAPE, 3, len(sets))]
    without, with_sinks = (
        bench.avq(SHAPE, sets, config, own=True, sinks=some) for some in ((), sinks)
    )
    assert sinks[0][0].shape == (2, 2, 3, 16)
    assert with_sinks.run(1).mean() > without.run(1).mean() + 0.01
    assert relative_error(with_sinks.run(0), with_sinks.expected()) < 1e-5


def test_run_kernels_writes_rows_fits_and_plots(tmp_path, capsys):
    kernels.run_kernels(CPU, tmp_path, command="x")
    table, sd15, joint, scaling = (
        read(tmp_path / f"bench_kernels_{part}_cpu.json") for part in kernels.PARTS
    )
    assert table["command"] == "x"
    assert table["environment"]["torch"] == version("torch")
    assert [row["tokens"] for row in table["rows"]] == [64] * 8 + [150] * 8
    assert all(row["error"] < 1e-4 for row in table["rows"] if row["ms"] is not None)

    *stored, own, skewed = (row for row in sd15["rows"] if "keys" in row)
    assert [row["keys"] for row in (*stored, own, skewed)] == ["uniform", "skewed"] * 2
    assert stored[1]["method"] == "AVQ 4/2/2, skewed keys"
    assert skewed["method"] == "AVQ 4/2/2, own codewords, skewed keys"
    assert stored[0]["ms"] > 0 < stored[1]["ms"]
    assert own["over_stored"] == pytest.approx(own["ms"] / stored[0]["ms"])
    assert skewed["over_stored"] == pytest.approx(skewed["ms"] / stored[1]["ms"])
    assert f"| {own['over_stored']:.3f} |" in kernels.kernels_table("sd15", sd15["rows"])
    (ratio, _) = (row["over_stored"] for row in table["rows"] if "over_stored" in row)
    assert f", {ratio:.3f} of stored)" in kernels.kernels_table("table", table["rows"])

    avq = [row for row in joint["rows"] if "config" in row]
    assert [row["sinks"] for row in avq] == [0, 5, 0, 5]
    assert all(row["error"] < 1e-4 for row in avq)
    assert len({row["method"] for row in joint["rows"]}) == len(joint["rows"])

    labels = [line["label"] for line in scaling["slopes"]]
    assert labels == ["VQ, N = 64", "AVQ, N = 64", "AVQ 4/2/2"]
    assert scaling["slopes"][1]["x"] == [8, 16]
    assert scaling["slopes"][2]["x"] == [64, 256]
    assert all(math.isfinite(line["slope"]) for line in scaling["slopes"])

    for part in kernels.PARTS:
        assert is_image_with_ink(tmp_path / f"bench_kernels_{part}_cpu.png")
    printed = capsys.readouterr().out
    assert "| method | N = 64 | N = 150 |" in printed
    assert "| B2 H2 N64 D40 | AVQ 4/2/2, skewed keys | " in printed
    assert "| tokens | AVQ 4/2/2 | " in printed


def test_run_kernels_keeps_the_sizes_it_has(tmp_path, monkeypatch):
    """Fails where results are written at the end only."""

    def cut_off(bench, suite):
        yield next(kernels.table_part(bench, suite))
        raise KeyboardInterrupt

    monkeypatch.setitem(kernels.PARTS, "table", cut_off)
    with pytest.raises(KeyboardInterrupt):
        kernels.run_kernels(CPU, tmp_path, command="x")
    rows = read(tmp_path / "bench_kernels_table_cpu.json")["rows"]
    assert {row["tokens"] for row in rows} == {64}


def test_run_kernels_refuses_an_unknown_part(tmp_path):
    message = "--parts must be some of table, sd15, joint, scaling, but got 'all'"
    with pytest.raises(ValueError, match=message):
        kernels.run_kernels(CPU, tmp_path, command="x", parts=["all"])


@pytest.mark.parametrize(
    ("config", "num_parameters", "heads"),
    [
        (SD15, 859_520_964, {0: (8, 40), 1: (8, 80), 2: (8, 160), 3: (8, 160)}),
        (SDXL, 2_567_463_684, {1: (10, 64), 2: (20, 64)}),
    ],
    ids=["SD1.5", "SDXL"],
)
def test_the_unets_are_those_that_they_are_called(config, num_parameters, heads):
    with torch.device("meta"):
        model = UNet2DConditionModel(**config)
    assert sum(parameter.numel() for parameter in model.parameters()) == num_parameters
    layers = select_layers(model)
    assert {layer.level: (layer.num_heads, layer.head_dim) for layer in layers} == heads


def last(generator):
    *_, rows = generator
    return rows


def test_unet_rows(steps):
    """Fails for a method that leaves the UNet changed, that does nothing, or ratios upside down."""
    methods = ("exact", "limit", "M4P2C2", "M4P2C2@L0", "M5@L0", "M4P2C2/own", "linfusion", "fa2")
    rows = last(step_rows.step_rows(steps, 64, "graph", methods=methods))
    assert [(row["ms"], row["note"]) for row in rows] == [
        (None, "CUDA graphs need a CUDA device")
    ] * len(methods)
    rows = last(step_rows.step_rows(steps, 64, "eager", methods=methods, window_ms=1))
    assert [(row["mode"], row["method"]) for row in rows] == [("eager", name) for name in methods]
    sdpa, limit, adaptive, level_0, flat, own, linfusion, fa2 = rows
    for row in rows[:-1]:
        assert row["error"] < 1e-5
        assert row["steps"] == 5
        assert row["over_limit"] == pytest.approx(row["ms"] / limit["ms"])
        assert row["over_sdpa"] == pytest.approx(row["ms"] / sdpa["ms"])
    assert sdpa["difference_from_sdpa"] == 0
    assert 0.01 < level_0["difference_from_sdpa"] != adaptive["difference_from_sdpa"]
    assert limit["difference_from_sdpa"] > 0.1
    assert linfusion["difference_from_sdpa"] > 0.1
    assert 0.01 < own["difference_from_sdpa"] != adaptive["difference_from_sdpa"]
    labels = [row["label"] for row in (level_0, flat, own, linfusion)]
    own_label = "AVQ 4/2/2, own codewords"
    assert labels == ["AVQ 4/2/2, level 0", "VQ 5, level 0", own_label, "LinFusion"]
    assert (fa2["ms"], fa2["note"]) == (None, "FA2 needs a CUDA device")
    for layer in select_layers(steps.unet):
        assert type(layer.attn.processor) is AttnProcessor2_0
        assert layer.avq_state is None


def test_the_methods_change_the_layers_they_name(steps):
    def changed(name):
        with steps.method(name):
            return {
                layer.level
                for layer in select_layers(steps.unet)
                if type(layer.attn.processor) is not AttnProcessor2_0
            }

    assert changed("exact") == set()
    assert changed("limit") == changed("M4P2C2") == {0, 1}
    assert changed("M4P2C2@L0") == {0}
    assert changed("linfusion") == {0, 1, 2, 3}
    levels = [timed_method(name).levels for name in ("tome", "tome@L01")]
    assert levels == [(0,), (0, 1)]
    config = AVQConfig.parse("M4P2C2")
    assert steps.codebooks(config) is steps.codebooks(AVQConfig.parse("M4P2C2"))


def test_linfusion_is_the_same_network_every_time(steps):
    """Fails for weights that a captured graph would lose, or a phi that is zero."""

    def processors():
        with steps.method("linfusion"):
            return [layer.attn.processor for layer in select_layers(steps.unet)]

    first, second = processors(), processors()
    assert all(one is other for one, other in zip(first, second, strict=True))
    assert len({id(processor) for processor in first}) == 16
    for processor in first:
        assert type(processor) is LinFusionProcessor
        assert processor.phi_q[-1].weight.std() > 0.01
        assert processor.phi_k[-1].weight.std() > 0.01
        assert not torch.equal(processor.phi_q[-1].weight, processor.phi_k[-1].weight)


@pytest.mark.parametrize(
    ("name", "label", "route", "is_tuned"),
    [
        ("M4P2C2@L0/fastest", "AVQ 4/2/2, level 0, fastest route", "fastest", False),
        ("M4P2C2@L0/tuned", "AVQ 4/2/2, level 0, tuned projections", "always", True),
        ("M4P2C2", "AVQ 4/2/2", "always", False),
        ("M4P2C2-up_blocks.2", "AVQ 4/2/2, up_blocks.2 exact", "always", False),
        ("M4P2C2@L0/own2", "AVQ 4/2/2, own codewords, 2 updates, level 0", "always", False),
        ("M4P2C2E8/own", "AVQ 4/2/2, 8 exact keys, own codewords", "always", False),
        ("M5/means", "VQ 5, mean keys", "always", False),
    ],
)
def test_a_row_runs_what_its_label_says(steps, name, label, route, is_tuned):
    """Fails where the row of AVQ is timed with some layers exact, with a row's changes of
    projections, or without the layers that its name leaves exact."""
    with steps.method(name):
        states = {
            layer.name: layer.avq_state
            for layer in select_layers(steps.unet)
            if layer.avq_state is not None
        }
        assert {state.route.route for state in states.values()} == {route}
    config = timed_method(name).config
    assert {replace(s.config, levels=config.levels) for s in states.values()} == {config}
    assert {s.weights.codebook is None for s in states.values()} == {"/own" in name}
    changes = {state.weights.projection_changes is not None for state in states.values()}
    assert changes == {is_tuned}
    assert method_label(name) == label
    levels = (0,) if "@L0" in name else LEVELS
    expected = {layer.name for layer in select_layers(steps.unet, levels)}
    exact = {layer for layer in expected if layer.startswith(f"{name.partition('-')[2]}.")}
    assert states.keys() == expected - exact
    assert bool(exact) == ("-" in name)


def test_an_avq_row_that_runs_exact_attention_gets_no_time(steps, monkeypatch):
    real = steps.method

    def method(name, *, oracle=False):
        return real(name if oracle or name == "exact" else "exact", oracle=oracle)

    monkeypatch.setattr(steps, "method", method)
    methods = ("exact", "M4P2C2", "limit", "linfusion")
    rows = last(step_rows.step_rows(steps, 64, "eager", methods=methods, window_ms=1))
    sdpa, *others = rows
    assert sdpa["ms"] > 0
    for row in others:
        assert row["ms"] is None
        assert row["note"].startswith("wrong output")


def test_a_step_of_nan_gets_no_time(steps):
    """Fails where NaN is lost among the errors, as Python's maximum loses it."""
    methods = ("exact", "M4P2C2")
    with steps.unet.conv_out.register_forward_hook(lambda module, args, output: output * math.nan):
        rows = last(step_rows.step_rows(steps, 64, "eager", methods=methods, window_ms=1))
    for row in rows:
        assert row["ms"] is None
        assert row["note"].startswith("wrong output: relative error nan")


@pytest.mark.long
def test_compiled_step():
    """Dynamo takes the step; the back end that generates code is left to the GPU run."""
    steps = tiny_steps(layers_per_block=1)
    methods = ("M4P2C2", "limit", "linfusion", "M4P2C2/own")
    rows = last(step_rows.step_rows(steps, 64, "compile", methods=methods, window_ms=1))
    for row in rows:
        assert row["error"] < 1e-5
        assert row["ms"] > 0
        assert row["over_sdpa"] is None
    assert rows[1]["over_limit"] == 1


def test_run_unet_writes_rows_and_plots(tmp_path, monkeypatch, capsys):
    saved = []
    save = unet.save_json
    monkeypatch.setattr(
        unet,
        "save_json",
        lambda path, **content: (saved.append(len(content["rows"])), save(path, **content)),
    )
    monkeypatch.setattr(unet, "step_rows", partial(unet.step_rows, window_ms=1))
    options = {"sizes": (64,), "methods": ("exact", "limit"), "modes": ("eager",)}
    unet.run_unet(CPU, tmp_path, command="y", **options)
    assert saved == [1, 2, 2]
    document = read(tmp_path / "bench_unet_64_eager_cpu.json")
    assert document["rows"][1]["over_limit"] == 1
    assert document["batch"] == 2
    assert document["unet"] == "tiny, random weights"
    assert is_image_with_ink(tmp_path / "bench_unet_64_cpu.png")
    assert "| 64 | eager | limit | " in capsys.readouterr().out

    unet.run_unet(CPU, tmp_path, command="y", minutes=0, **options)
    rows = read(tmp_path / "bench_unet_64_eager_cpu.json")["rows"]
    assert [row["note"] for row in rows] == ["not started: out of time"] * 2


def test_mini_sd_is_itself_at_its_sizes():
    """Fails for random weights, latents of SD1.5's scale, or keys of another image size."""
    bench = step.StepBench(unet.MINI_MODEL, CPU)
    stored = UNet2DConditionModel.from_pretrained(MINI_SD, subfolder="unet").state_dict()
    loaded = bench.unet.state_dict()
    assert all(torch.equal(loaded[name], tensor) for name, tensor in stored.items())
    sample, _, text = bench.inputs(64)
    assert (sample.shape, text.shape) == ((2, 4, 16, 16), (2, 77, 192))
    sides = []
    bench.inputs = lambda side: sides.append(side) or (sample, None, text)
    assert {keys.shape[0] for keys in bench._keys.values()} == {2}
    assert sides == [256] * len(step.CALIBRATION_STEPS)
    with bench.method("linfusion"):
        processors = {type(layer.attn.processor) for layer in select_layers(bench.unet)}
    assert processors == {LinFusionProcessor}


@pytest.mark.long
def test_run_unet_keeps_mini_sd_apart(tmp_path, monkeypatch):
    """Fails for results in the files of SD1.5, a plot of these, or sizes of SD1.5."""
    (tmp_path / "bench_unet_64_eager_cpu.json").write_text("{}")
    options = {"sizes": (64,), "methods": ("exact",), "modes": ("eager",)}
    unet.run_unet(CPU, tmp_path, command="y", model="mini-sd", **options)
    document = read(tmp_path / "bench_unet_mini_64_eager_cpu.json")
    assert document["unet"] == "mini-sd"
    assert document["rows"][0]["ms"] > 0
    assert is_image_with_ink(tmp_path / "bench_unet_mini_64_cpu.png")
    assert read(tmp_path / "bench_unet_64_eager_cpu.json") == {}
    assert not (tmp_path / "bench_unet_64_cpu.png").exists()

    options = ["--model", "mini-sd", "--device", "cpu", "--modes", "eager", "--minutes", 0]
    run_command(monkeypatch, "bench", "unet", *options, "--output", tmp_path / "sizes")
    names = [path.name for path in sorted((tmp_path / "sizes").glob("*.json"))]
    assert names == [f"bench_unet_mini_{side}_eager_cpu.json" for side in (256, 512)]
    rows = read(tmp_path / "sizes" / names[0])["rows"]
    assert [row["method"] for row in rows] == list(unet.METHODS)


@pytest.mark.long
def test_run_unet_times_sdxl(tmp_path):
    """Fails where rows change other levels than those of SDXL, or its conditions are left out."""
    pytest.importorskip("tomesd")
    methods = ("exact", "limit", "M4P2C2@L12", "M4P2C2@L1", "tome@L1", "tome@L12")
    options = {"sizes": (128,), "methods": methods, "modes": ("eager",)}
    unet.run_unet(CPU, tmp_path, command="y", model="sdxl", **options)
    document = read(tmp_path / "bench_unet_sdxl_128_eager_cpu.json")
    assert document["unet"] == "tiny SDXL, random weights"
    rows = {row["method"]: row for row in document["rows"]}
    assert all(row["ms"] > 0 for row in rows.values())
    changes = [rows[name]["difference_from_sdpa"] for name in methods]
    assert changes[0] == 0
    assert len(set(changes)) == len(methods)
    labels = [row["label"] for row in document["rows"][2:6]]
    avq = ["AVQ 4/2/2, levels 1 and 2", "AVQ 4/2/2, level 1"]
    assert labels == [*avq, "ToMe r=0.5, level 1", "ToMe r=0.5, levels 1 and 2"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"model": "sd3"}, "--model must be one of sd15, sdxl, mini-sd, but got 'sd3'"),
        ({"methods": ["xformers"]}, "methods must be exact, .*, or configurations such as"),
        ({"methods": ["M4P2C2@0"]}, "methods must be exact, .*, or configurations such as"),
        ({"methods": ["pooled@E64"]}, "pooled@E64 can only be measured by keys"),
        ({"methods": ["sol@1.3"]}, "sol@1.3 is timed by bench transformer only"),
        (
            {"methods": ["M4P2C2@L2"]},
            "the levels of SD1.5, random weights are 0, 1, but M4P2C2@L2 changes 2",
        ),
        (
            {"model": "sdxl", "methods": ["M4P2C2"]},
            "the levels of SDXL, random weights are 1, 2, but M4P2C2 changes 0, 1",
        ),
        ({"modes": ["jit"]}, "modes must be graph, compile, eager, but got 'jit'"),
        ({"sizes": [100]}, "--sizes must be multiples of 64, but got 100"),
    ],
)
def test_run_unet_refuses(tmp_path, arguments, message):
    with pytest.raises(ValueError, match=message):
        unet.run_unet(CPU, tmp_path, command="y", **arguments)
    assert not list(tmp_path.iterdir())


@pytest.mark.gpu
def test_rows_on_a_gpu():
    """Graphs, stages, fused backends and the compiled baseline, each against its oracle."""
    bench = Bench(torch.device("cuda"), FAST)
    shape = Shape(2, 4, 1000, 64)
    sets = bench.input_sets(shape)
    for row in bench.rows(shape, every_contender(bench, shape, sets, "M32", "M16P4C4"), len(sets)):
        assert row["ms"] is not None, row
        assert row["timer"] == "graph", row
        if "config" in row:
            assert 0 < row["precompute_ms"] < row["ms"] * 2
            assert 0 < row["attention_ms"] < row["ms"] * 2
