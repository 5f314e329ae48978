"""Benches of the operation: each row times what it names, here on the CPU."""

import json
import math
from dataclasses import replace
from time import sleep

import pytest
import torch
from eval_helpers import FAST, run_command

from avq_diffusers import AVQConfig
from eval.benchmarks import inputs, kernels, parts, timing
from eval.benchmarks.contenders import Bench, Contender
from eval.benchmarks.inputs import Inputs, Shape
from eval.benchmarks.parts import Sizes, part_rows
from eval.benchmarks.timing import time_in_turns
from eval.keys.calls import relative_error

CPU = torch.device("cpu")
TWO_SIZES = [Shape(1, 2, 16, 16), Shape(1, 2, 36, 16)]
STORED = ", stored codewords"
TINY_METHODS = ["M8/stored", "M4P2C2/stored", "M4P2C2"]
SHAPE = Shape(2, 2, 150, 16)  # N is no multiple of the query tile


@pytest.fixture(autouse=True)
def few_calibration_keys(monkeypatch):
    monkeypatch.setattr(inputs, "CALIBRATION_KEYS", 256)


@pytest.fixture
def bench():
    return Bench(CPU, FAST)


def test_inputs_have_the_layout_of_the_projections():
    sets = Inputs(Shape(2, 3, 400, 16), torch.float32, CPU, 1)
    for tensor in sets.sets[0]:
        assert tensor.shape == (2, 3, 400, 16)
        assert tensor.transpose(1, 2).is_contiguous()
    codebook = sets.codebook(AVQConfig.parse("M8P1C2"))
    assert codebook.parents.shape == (3, 8, 16)
    assert sets.codebook(AVQConfig.parse("M8P4C2")) is codebook


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


def every_contender(bench, sets, flat, adaptive):
    avq = [bench.avq(sets, name) for name in (f"{flat}/stored", f"{adaptive}/stored", adaptive)]
    return [*bench.exact(sets), *avq]


def test_every_contender_is_what_it_is_called(bench):
    """All rows of a size against their oracle, and each oracle refuses the neighbours' outputs."""
    sets = bench.inputs(SHAPE)
    rivals = every_contender(bench, sets, "M8", "M8P2C4")
    rows = bench.rows(rivals, sets)
    names = ["default SDPA", "FA2", "cuDNN", f"VQ 8{STORED}", f"AVQ 8/2/4{STORED}", "AVQ 8/2/4"]
    assert [row["method"] for row in rows] == names
    timed = {row["method"]: row for row in rows if row["ms"] is not None}
    assert list(timed) == [name for name in names if name not in ("FA2", "cuDNN")]
    for row in timed.values():
        assert row["error"] < 1e-5
        assert 0 < row["ms"] < 1000
        assert row["spread"] >= 0
        assert row["over_sdpa"] == pytest.approx(row["ms"] / timed["default SDPA"]["ms"])
    assert rows[1]["note"] == "FA2 needs a CUDA device"
    stored, own = timed[f"AVQ 8/2/4{STORED}"], timed["AVQ 8/2/4"]
    assert stored["effective_codewords"] == own["effective_codewords"] == 16
    assert (stored["config"], own["config"]) == ("M8P2C4/stored", "M8P2C4")
    assert own["over_stored"] == pytest.approx(own["ms"] / stored["ms"])
    assert stored["over_stored"] is None

    by_name = {rival.name: rival for rival in rivals}
    for name, other in (
        (f"AVQ 8/2/4{STORED}", f"VQ 8{STORED}"),
        ("default SDPA", f"AVQ 8/2/4{STORED}"),
        (f"VQ 8{STORED}", "default SDPA"),
        ("AVQ 8/2/4", f"AVQ 8/2/4{STORED}"),
    ):
        impostor = Contender(name, by_name[other].run, by_name[name].expected)
        (row,) = bench.rows([impostor], sets)
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
    rivals = [Contender(name, run, expected[name]) for name, run in runs.items()]
    sets = bench.inputs(Shape(1, 1, 4, 2), 1)
    rows = {row["method"]: row for row in bench.rows(rivals, sets)}
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


@torch.no_grad()
def test_sinks_are_attended_to(bench, monkeypatch):
    """Fails for a row of sinks that is timed without them; they hold what no other value has."""
    sets = bench.inputs(SHAPE)
    sinks = [(key, torch.full_like(value, 9.0)) for key, value in sets.sinks(3)]
    monkeypatch.setattr(sets, "sinks", lambda number: sinks)
    without, with_sinks = (bench.avq(sets, "M4P2C2", num_sinks=n) for n in (0, 3))
    exact, *_ = bench.exact(sets, 3)
    assert sinks[0][0].shape == (2, 2, 3, 16)
    assert with_sinks.run(1).mean() > without.run(1).mean() + 0.01 < exact.run(1).mean()
    assert relative_error(with_sinks.run(0), with_sinks.expected()) < 1e-5


def test_gradients_are_those_of_all_three_inputs(bench, monkeypatch):
    """Fails for a forward pass in place of both, and for gradients that are not checked."""
    compute, inputs = torch.autograd.grad, []

    def grad(output, tensors, *more):
        inputs.append(len(tensors))
        return compute(output, tensors, *more)

    monkeypatch.setattr(torch.autograd, "grad", grad)
    sizes = {"gradients": Sizes([Shape(1, 2, 2048, 16)], ["M4P2C2"])}
    ((exact, _, _, avq),) = part_rows(bench, "gradients", sizes)
    assert len(inputs) >= 4 * bench.effort.rounds
    assert {*inputs} == {3}
    for row in (exact, avq):
        assert min(row["forward_ms"], row["ms"]) > 0
    assert avq["method"] == "AVQ 4/2/2"
    assert 0 < avq["error"] < 1e-5
    assert avq["over_sdpa"] == pytest.approx(avq["ms"] / exact["ms"])


def test_attention_beyond_its_limit_is_not_timed(bench, monkeypatch):
    monkeypatch.setattr(parts, "MOST_EXACT_TOKENS", 64)
    shapes = [Shape(1, 1, n, 8) for n in (64, 90)]  # a square grid, and a row
    sizes = {"attention": Sizes(shapes, ["M4P2C2/stored", "M4P2C2"])}
    small, large = part_rows(bench, "attention", sizes)
    avq = [f"AVQ 4/2/2{STORED}", "AVQ 4/2/2"]
    assert [row["method"] for row in small] == ["default SDPA", *avq]
    assert [row["method"] for row in large] == avq
    line = kernels.kernels_table([*small, *large]).splitlines()[-1]
    assert line.startswith("| B1 H1 N90 D8 | AVQ 4/2/2 | ")


@pytest.mark.parametrize("part", parts.KERNEL_PARTS)
def test_the_commands_write_rows(part, tmp_path, monkeypatch):
    monkeypatch.setattr(parts, "TINY", dict.fromkeys(parts.FULL, Sizes(TWO_SIZES, TINY_METHODS)))
    output = ("--device", "cpu", "--output", tmp_path)
    printed = run_command("bench", "kernels", "--parts", part, *output)
    document = json.loads((tmp_path / f"bench_kernels_{part}_cpu.json").read_text())
    assert document["command"].startswith("python -m eval bench kernels")
    assert document["environment"].keys() >= {"commit", "torch", "device"}
    rows = document["rows"]
    assert all(row["error"] < 1e-4 for row in rows if row.get("error") is not None)
    assert {row["part"] for row in rows} == {part}
    assert [row["tokens"] for row in rows] == [16] * (len(rows) // 2) + [36] * (len(rows) // 2)
    avq = [row for row in rows if row.get("config") == "M4P2C2" and row["tokens"] == 16]
    if part == "sd15":
        assert all(f" | {row['over_stored']:.3f} | " in printed for row in avq)
    elif part == "joint":
        assert [row["sinks"] for row in avq] == [0, parts.TEXT]


def test_attention_writes_rows(tmp_path, monkeypatch):
    monkeypatch.setattr(timing, "Effort", lambda **_: FAST)
    options = ("--tokens", 64, "--config", "M4P2C2", "--heads", 1, "--head-dim", 8)
    output = ("--device", "cpu", "--output", tmp_path)
    run_command("bench", "attention", *options, *output)
    rows = json.loads((tmp_path / "bench_attention_cpu.json").read_text())["rows"]
    assert len(rows) == 3


def test_a_part_keeps_the_sizes_it_has(bench, tmp_path, monkeypatch):
    """Fails where results are written at the end only."""

    def cut_off(*arguments):
        yield next(part_rows(*arguments))
        raise KeyboardInterrupt

    monkeypatch.setattr(kernels, "part_rows", cut_off)
    with pytest.raises(KeyboardInterrupt):
        kernels.run_part("table", bench, parts.TINY, tmp_path / "x.json")
    assert len(json.loads((tmp_path / "x.json").read_text())["rows"]) == 6


@pytest.mark.gpu
def test_rows_on_a_gpu():
    """Graphs, stages and fused backends, each against its oracle."""
    bench = Bench(torch.device("cuda"), replace(FAST, block_ms=1))
    sets = bench.inputs(Shape(2, 4, 1000, 64))
    for row in bench.rows(every_contender(bench, sets, "M32", "M16P4C4"), sets):
        assert row["ms"] is not None, row
        assert row["timer"] == "graph", row
        if "config" in row:
            assert 0 < row["precompute_ms"] < row["ms"] * 2
            assert 0 < row["attention_ms"] < row["ms"] * 2
