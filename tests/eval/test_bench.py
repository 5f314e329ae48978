"""Benches of the operation: each row times what it names, here on the CPU."""

import json
import math
from dataclasses import replace
from time import sleep

import pytest
import torch
from eval_helpers import failed_command, run_command
from PIL import Image

from avq_diffusers import AVQConfig
from eval.benchmarks import inputs, kernels, parts
from eval.benchmarks.contenders import Bench, Contender, relative_error
from eval.benchmarks.inputs import KeySource, Shape
from eval.benchmarks.parts import Sizes
from eval.benchmarks.timing import Effort, time_in_turns
from eval.benchmarks.unfused import flat_kernel, unfused_precompute
from eval.names import method_name, parse_method

CPU = torch.device("cpu")
FAST = Effort(rounds=2, block_ms=0.1, eager_rounds=2)
SHAPE = Shape(2, 2, 150, 16)  # N is no multiple of the query tile


@pytest.fixture(autouse=True)
def few_calibration_keys(monkeypatch):
    monkeypatch.setattr(inputs, "CALIBRATION_KEYS", 256)


@pytest.fixture
def bench():
    return Bench(CPU, FAST)


def is_image_with_ink(path):
    """A plot that is one colour has no axes."""
    with Image.open(path) as image:
        return len(image.convert("L").getcolors()) > 10


@pytest.mark.parametrize(
    ("x", "y", "slope"),
    [
        *(([3, 10, 100], [7 * v**slope for v in (3, 10, 100)], slope) for slope in (1.0, -2.0)),
        ([1, 10, 100, 1000], [1, 10, 1, 1], -0.1),  # not the slope between the end points
    ],
)
def test_fit_slope_is_least_squares_of_logarithms(x, y, slope):
    assert kernels.fit_slope(x, y) == pytest.approx(slope)


def test_slopes_group_the_rows_and_take_the_right_axis():
    """Fails for VQ and AVQ in one line, a fit over M0 alone, or a missing time taken for one."""

    def row(against, config, tokens, ms, **more):
        chosen = AVQConfig.parse(config, codewords="stored")
        facts = {"effective_codewords": chosen.effective_codewords, "tokens": tokens, "ms": ms}
        return {"against": against, "method": method_name(chosen), **facts, **more}

    rows = [
        row("codewords", "M128", 64, 2.0),
        row("codewords", "M64", 64, 1.0),
        row("codewords", "M256", 64, None),
        row("codewords", "M64P8C8", 64, 4.0, precompute_ms=1.0, attention_ms=2.0),
        row("codewords", "M64P24C8", 64, 8.0, precompute_ms=1.0, attention_ms=8.0),
        row("tokens", "M64P8C8", 100, 1.0),
        row("tokens", "M64P8C8", 1000, 10**1.5),
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
    means, counts = unfused_precompute(key, value, codewords, bias, one_hot=one_hot)
    assert counts.tolist() == [[[2, 2, 0]]]
    assert means.tolist() == [[[[2, 3], [6, 1], [0, 0]]]]


def test_the_unfused_baseline_attends_by_our_kernel(bench):
    """In Triton's interpreter; fails for a packing of means and counts that misses a row."""
    pytest.importorskip("triton")
    shape = Shape(1, 2, 70, 16)
    sets, config = bench.input_sets(shape), parse_method("M32", (0,)).config
    codebook = bench.source(shape).codebook(config)
    (query, key, value), bias = sets[0], -0.5 * codebook.parents.square().sum(-1)[:, None]
    unfused = unfused_precompute(key, value, codebook.parents, bias, one_hot=True)
    output = flat_kernel(config, codebook, torch.float32)(query, *unfused)
    assert relative_error(output, bench.avq(shape, sets, "M32").run(0)) < 1e-5


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
    avq = [bench.avq(shape, sets, name) for name in (flat, adaptive, f"{adaptive}/own")]
    return [*bench.exact(sets), avq[0], *bench.unfused(shape, sets, flat), *avq[1:]]


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
        assert row["over_sdpa"] == pytest.approx(row["ms"] / timed["default SDPA"]["ms"])
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


def test_a_contender_of_nan_or_one_that_fails_gets_no_time(bench):
    good = torch.ones(1, 1, 4, 2)

    def fail(index):
        raise RuntimeError("no available kernel\nand a trace")

    runs = {"nan": lambda _: good * math.nan, "fails": fail, "zero": lambda _: 0 * good}
    # As of gradients: all tensors are compared, and one of NaN is not lost among right ones.
    runs |= {"second": lambda _: (good, good * math.nan), "right": lambda _: good}
    expected = dict.fromkeys(runs, lambda: good) | {"second": lambda: (good, good)}
    rivals = [Contender(name, run, expected[name], {"x": 1}) for name, run in runs.items()]
    rows = {row["method"]: row for row in bench.rows(Shape(1, 1, 4, 2), rivals, 1)}
    notes = {name: row.get("note") for name, row in rows.items()}
    wrong = "wrong output: relative error"
    assert notes == {
        "nan": f"{wrong} nan",
        "fails": "no available kernel",
        "zero": f"{wrong} 1",
        "second": f"{wrong} nan",
        "right": None,
    }
    assert [name for name, row in rows.items() if row["ms"] is not None] == ["right"]
    assert {row["x"] for row in rows.values()} == {1}


@torch.no_grad()
def test_sinks_are_attended_to(bench):
    """Fails for a row of sinks that is timed without them; they hold what no other value has."""
    sets = bench.input_sets(SHAPE)
    sinks = [(key, torch.full_like(value, 9.0)) for key, value in bench.sinks(SHAPE, 3, len(sets))]
    without, with_sinks = (bench.avq(SHAPE, sets, "M4P2C2/own", sinks=some) for some in ((), sinks))
    assert sinks[0][0].shape == (2, 2, 3, 16)
    assert with_sinks.run(1).mean() > without.run(1).mean() + 0.01
    assert relative_error(with_sinks.run(0), with_sinks.expected()) < 1e-5


def test_gradients_are_those_of_all_three_inputs(bench):
    """Fails for a forward pass in place of both, and for gradients that are not checked."""
    sizes = {"gradients": Sizes([Shape(1, 2, 64, 8)], ["M4P2C2/own"])}
    ((exact, _, _, avq),) = parts.gradients_part(bench, sizes)
    for row in (exact, avq):
        assert 0 < row["forward_ms"] < row["ms"]
    assert avq["method"] == "AVQ 4/2/2, own codewords"
    assert 0 < avq["error"] < 1e-5
    assert avq["over_sdpa"] == pytest.approx(avq["ms"] / exact["ms"])


def test_attention_beyond_its_limit_is_not_timed(bench, monkeypatch):
    monkeypatch.setattr(parts, "MOST_EXACT_TOKENS", 64)
    shapes = [Shape(1, 1, n, 8) for n in (64, 90)]  # a square grid, and a row
    small, large = parts.attention_part(
        bench, {"attention": Sizes(shapes, ["M4P2C2", "M4P2C2/own"])}
    )
    avq = ["AVQ 4/2/2", "AVQ 4/2/2, own codewords"]
    assert [row["method"] for row in small] == ["default SDPA", *avq]
    assert [row["method"] for row in large] == avq
    assert large[1]["over_stored"] == pytest.approx(large[1]["ms"] / large[0]["ms"])
    line = kernels.kernels_table("attention", [*small, *large]).splitlines()[-1]
    assert line.startswith("| B1 H1 N90 D8 | AVQ 4/2/2, own codewords | ")


def test_the_commands_write_rows_fits_and_plots(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(parts, "NUM_SINKS", 5)
    output = ("--device", "cpu", "--output", tmp_path)
    run_command(monkeypatch, "bench", "kernels", *output)
    run_command(monkeypatch, "bench", "gradients", *output)
    options = ("--tokens", "64,90", "--config", "M4P2C2", "--heads", 1, "--head-dim", 8)
    run_command(monkeypatch, "bench", "attention", *options, *output)
    found = {path.stem: json.loads(path.read_text()) for path in tmp_path.glob("*.json")}
    for document in found.values():
        assert document["command"].startswith("python -m eval bench ")
        assert document["environment"].keys() >= {"commit", "torch", "device"}
    table, sd15, joint, scaling = (
        found[f"bench_kernels_{part}_cpu"]["rows"] for part in parts.KERNEL_PARTS
    )
    assert [row["tokens"] for row in table] == [64] * 8 + [150] * 8
    assert all(row["error"] < 1e-4 for row in table if row["ms"] is not None)

    *stored, own, skewed = (row for row in sd15 if "keys" in row)
    assert [row["keys"] for row in (*stored, own, skewed)] == ["uniform", "skewed"] * 2
    assert stored[1]["method"] == "AVQ 4/2/2, skewed keys"
    assert skewed["method"] == "AVQ 4/2/2, own codewords, skewed keys"
    assert own["over_stored"] == pytest.approx(own["ms"] / stored[0]["ms"])
    assert skewed["over_stored"] == pytest.approx(skewed["ms"] / stored[1]["ms"])

    avq = [row for row in joint if "config" in row]
    assert [row["sinks"] for row in avq] == [0, 5, 0, 5]
    assert all(row["error"] < 1e-4 for row in avq)
    assert len({row["method"] for row in joint}) == len(joint)

    assert {row["part"] for row in scaling} == {"scaling"}
    lines = found["bench_kernels_scaling_cpu"]["slopes"]
    assert [line["label"] for line in lines] == ["VQ, N = 64", "AVQ, N = 64", "AVQ 4/2/2"]
    assert [line["x"] for line in lines[1:]] == [[8, 16], [64, 256]]
    assert all(math.isfinite(line["slope"]) for line in lines)

    assert len(found["bench_gradients_cpu"]["rows"]) == 4
    assert len(found["bench_attention_cpu"]["rows"]) == 2 * 3
    for part in parts.KERNEL_PARTS:
        assert is_image_with_ink(tmp_path / f"bench_kernels_{part}_cpu.png")
    printed = capsys.readouterr().out
    assert "| B2 H2 N64 D40 | AVQ 4/2/2, skewed keys | " in printed
    assert "| tokens | AVQ 4/2/2 | " in printed
    assert "| ms (x default SDPA) | N = 64 | N = 150 |" in printed
    assert f" | {own['over_stored']:.3f} | " in printed


def test_a_part_keeps_the_sizes_it_has(bench, tmp_path, monkeypatch):
    """Fails where results are written at the end only."""

    def cut_off(bench, sizes):
        yield next(parts.scaling_part(bench, sizes))
        raise KeyboardInterrupt

    monkeypatch.setitem(parts.PARTS, "scaling", cut_off)
    with pytest.raises(KeyboardInterrupt):
        kernels.run_part("scaling", bench, parts.TINY, tmp_path / "x.json", command="x")
    assert len(json.loads((tmp_path / "x.json").read_text())["rows"]) == 4


def test_an_unknown_part_is_refused(monkeypatch, capsys):
    code, last = failed_command(monkeypatch, capsys, "bench", "kernels", "--parts", "table,all")
    message = "--parts must be some of table, sd15, joint, scaling, but got 'all'."
    assert (code, last) == (2, f"eval: {message}")


@pytest.mark.gpu
def test_rows_on_a_gpu():
    """Graphs, stages, fused backends and the compiled baseline, each against its oracle."""
    bench = Bench(torch.device("cuda"), replace(FAST, block_ms=1))
    shape = Shape(2, 4, 1000, 64)
    sets = bench.input_sets(shape)
    for row in bench.rows(shape, every_contender(bench, shape, sets, "M32", "M16P4C4"), len(sets)):
        assert row["ms"] is not None, row
        assert row["timer"] == "graph", row
        if "config" in row:
            assert 0 < row["precompute_ms"] < row["ms"] * 2
            assert 0 < row["attention_ms"] < row["ms"] * 2
