"""`eval bench steps`: rows that time what they name, here with tiny networks on the CPU."""

import json
import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from eval_helpers import failed_command, run, run_command
from torch._dynamo.utils import counters

from avq_diffusers import AVQConfig, select_layers, summary
from avq_diffusers.hosts.core import routing
from eval.benchmarks import networks, steps
from eval.benchmarks.models import MODELS
from eval.benchmarks.networks import NetworkBench, layer_states
from eval.benchmarks.steps import Case, cases_of, measured
from eval.methods.peer import Peer
from eval.methods.registry import AVQ

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    """The back end that generates code is left to the GPU run, the columns to one test; no route
    has to settle on a CPU."""
    monkeypatch.setattr(networks, "SETTLING_CALLS", 1)
    monkeypatch.setattr(networks, "BISECTIONS", 1)
    monkeypatch.setattr(steps, "_BLOCK", 1)
    monkeypatch.setattr(steps, "_LEAST_TURNS", 1)
    for name in ("COMPILE_UNET", "COMPILE_BLOCK"):
        monkeypatch.setattr(networks, name, {"backend": "eager", "dynamic": False})


@pytest.fixture(scope="module")
def bench_of():
    found = {}

    def bench(name):
        if name not in found:
            tiny = MODELS[name].for_device(CPU)
            fewer = {"layers_per_block": 1} if tiny.is_unet else {}
            found[name] = NetworkBench(replace(tiny, config={**tiny.config, **fewer}), CPU)
        return found[name]

    return bench


def size_of(name):
    model = MODELS[name]
    return model.sizes[0] if model.multiple is None else 128


def row_of(bench, name, method, run="eager"):
    return measured(bench(name), Case(name, size_of(name), run, method), 0.001)


@pytest.mark.parametrize(
    ("name", "billions", "attentions", "num_blocks"),
    [
        ("sd15", 0.8595, 32, None),
        ("sdxl", 2.5675, 140, None),
        ("sd35-medium", 2.24, 37, None),
        ("flux", 11.90, 57, None),
        ("wan", 14.29, 80, 40),
        ("minimax-h3", 33.12, 50, 50),
    ],
)
def test_the_configurations_are_those_of_the_models(name, billions, attentions, num_blocks):
    """The published numbers of parameters; those of videos for all blocks, of which one is timed,
    and for the blocks that refine the text."""
    model = MODELS[name]
    rest = {"num_layers": num_blocks, "num_refiner_layers": 2} if num_blocks else {}
    blocks = {x: n for x, n in rest.items() if x in model.config}
    with torch.device("meta"):
        whole = model.kind(**{**model.config, **blocks})
        part = model.kind(**{**model.config, **model.part})
    size = sum(x.numel() for x in whole.parameters()) / 1e9
    assert size == pytest.approx(billions, abs=0.0001 if model.is_unet else 0.01)
    counts = [
        sum(
            x.endswith(("attn", "attn1", "attn2")) and "refiner" not in x
            for x, _ in network.named_modules()
        )
        for network in (whole, part)
    ]
    assert counts[0] == attentions
    # What is multiplied has the attention of the whole within half a percent.
    assert counts[1] * (num_blocks or model.times) == pytest.approx(attentions, rel=0.005)


@pytest.mark.parametrize("name", MODELS)
def test_rows_of_a_model(bench_of, name):
    """Catches AVQ that does not run, stays, or runs another configuration than the default; for
    one model of each kind a limit that attends, and a limit in other layers than AVQ's."""
    avq = row_of(bench_of, name, AVQ)
    assert avq["ms"] > 0
    assert 0 < avq["error"] < 1e-5
    assert avq["difference"] > 0
    if name in ("sd15", "flux"):
        exact, limit = (row_of(bench_of, name, method) for method in ("exact", "limit"))
        assert min(exact["ms"], limit["ms"]) > 0
        assert exact["difference"] == 0
        assert "error" not in exact
        assert avq["difference"] < limit["difference"]
    ran, served = avq["layers"]
    assert ran == served > 0
    network = bench_of(name).network
    assert layer_states(network) == []
    inputs = bench_of(name).inputs(size_of(name))
    with torch.no_grad(), bench_of(name).method(AVQ, inputs):
        rows = [row for row in summary(network).rows if row.config]
        states = layer_states(network)
        assert {x.config.changed(levels=(0, 1)) for x in states} == {AVQConfig()}
        assert {x.route.route for x in states} == {"fastest"}
        levels = {row.level for row in rows}
    assert avq["by_level"].keys() == levels
    names = {layer.name for layer in select_layers(network) if layer.level in levels}
    assert {row.name for row in rows} == names


@pytest.mark.parametrize("name", ["sd15", "flux"])
def test_layers_have_the_columns_of_trained_models(bench_of, name, monkeypatch):
    """Catches the columns of random weights at the default threshold."""
    monkeypatch.setattr(networks, "BISECTIONS", 10)
    inputs = bench_of(name).inputs(512 if name == "flux" else 192)
    with torch.no_grad():
        _, facts = bench_of(name).solve_columns(inputs)
    expected = MODELS[name].columns
    level = 0
    most = 1024 + 512  # tokens of the image, and of the text
    assert facts["by_level"][level] == pytest.approx(min(expected[level], most), rel=0.05)


def test_rows_of_other_methods(bench_of):
    """Fails for a method that leaves the UNet changed, or does nothing."""
    pytest.importorskip("tomesd")
    before = bench_of("sd15").network.attn_processors
    methods = "M64P16C8", "linfusion", "tome", "tome@L01"
    rows = {method: row_of(bench_of, "sd15", method) for method in methods}
    assert all(row["ms"] > 0 for row in rows.values())
    changes = [row["difference"] for row in rows.values()]
    assert min(changes) > 1e-3
    assert len(set(changes)) == len(rows)
    after = bench_of("sd15").network.attn_processors
    assert all(after[name] is processor for name, processor in before.items())


@pytest.mark.parametrize("name", [pytest.param("sd15", marks=pytest.mark.long), "sd35-medium"])
def test_a_compiled_model(bench_of, name):
    """Catches a model that is not compiled, or stays so, a graph for every block, and AVQ lost in
    compiled code."""
    num_graphs = {"sd15": 1, "sd35-medium": 2}[name]  # one of each kind of block
    for _ in range(2):  # dynamo compiled them twice in one of some fifteen runs
        counters.clear()
        row = row_of(bench_of, name, AVQ, "compiled")
        assert row["ms"] > 0
        assert counters["graph_break"] == {}
        if counters["stats"]["unique_graphs"] == num_graphs:
            break
    assert counters["stats"]["unique_graphs"] == num_graphs
    ran, served = row["layers"]
    assert ran == served > 0
    assert all(x._compiled_call_impl is None for x in bench_of(name).network.modules())


def test_compiled_layers_follow_the_route_of_compiled_code():
    """Catches the layers of eager calls beside the time of compiled ones."""
    known = routing.BreakEven(eager=4096, compiled=1024)
    route = SimpleNamespace(break_even={"workload": known})
    for tokens, last_call, runs in ((512, "faster", False), (1024, "faster", True)):
        state = SimpleNamespace(route=route, last_call=last_call, last_order=range(tokens))
        assert networks._runs_avq(state, is_compiled=True) == runs
        assert not networks._runs_avq(state, is_compiled=False)
    unmeasured = SimpleNamespace(route=SimpleNamespace(break_even={}), last_call="AVQ")
    assert networks._runs_avq(unmeasured, is_compiled=True)


@pytest.mark.parametrize("method", ["limit", AVQ])
@pytest.mark.parametrize("name", ["sd15", "sd35-medium", "wan"])
def test_others_are_timed_beside_exact_attention(bench_of, name, method):
    """Catches a method that is compared with itself, as it replaces SDPA for the whole process."""
    bench = bench_of(name)
    inputs = bench.inputs(size_of(name))
    exact = bench.predict(*inputs)
    with bench.method(method, inputs):
        assert torch.equal(bench.predict_exact(*inputs), exact)
        assert not torch.equal(bench.predict(*inputs), exact)


@pytest.mark.parametrize("calls", [2, 17])
def test_the_check_of_the_error_leaves_the_route_alone(bench_of, monkeypatch, calls):
    """Catches times of AVQ in layers that the row calls exact, and a check without AVQ."""
    monkeypatch.setattr(routing, "MEASURED", ("cpu",))
    monkeypatch.setattr(routing, "break_even", lambda *call: routing.NEVER_FASTER)
    monkeypatch.setattr(networks, "SETTLING_CALLS", calls)
    bench = bench_of("sd35-medium")
    inputs = bench.inputs(size_of("sd35-medium"))
    with bench.method(AVQ, inputs):
        for _ in range(2):
            bench.predict(*inputs)
            assert {state.last_call for state in layer_states(bench.network)} == {"faster"}
            assert bench.error(inputs)["error"] >= 0


def test_a_step_that_is_wrong_gets_no_time(bench_of, monkeypatch):
    """Fails where NaN is lost among the errors, and for compiled code with another output."""
    name = "sd35-medium"
    network = bench_of(name).network
    with network.proj_out.register_forward_hook(lambda module, args, output: output * math.nan):
        assert row_of(bench_of, name, "exact")["note"].startswith("wrong output: nan")
    real = bench_of(name).compiled

    def compiled():
        network.pos_embed.register_forward_hook(lambda module, args, output: 2 * output)
        return real()

    monkeypatch.setattr(bench_of(name), "compiled", compiled)
    row = row_of(bench_of, name, "exact", "compiled")
    network.pos_embed._forward_hooks.clear()
    assert (row["ms"], row["note"].partition(":")[0]) == (None, "wrong output")


@pytest.mark.parametrize(("run", "factor"), [("eager", math.nan), ("compiled", 1.001)])
def test_attention_that_is_wrong_gets_no_time(bench_of, monkeypatch, run, factor):
    """Catches kernels whose output nobody compares; the route keeps these layers exact."""
    real = networks.attend

    def attend(tensors, spec, backend):
        found = real(tensors, spec, backend)
        return found._replace(output=factor * found.output) if backend == "torch" else found

    monkeypatch.setattr(networks, "attend", attend)
    monkeypatch.setattr(routing, "_is_faster_on_cpu", lambda *_: False)
    row = row_of(bench_of, "sd15", AVQ, run)
    assert (row["ms"], row["note"].partition(":")[0]) == (None, "wrong attention")


@torch.no_grad()
def test_a_peer_takes_the_calls_of_self_attention(monkeypatch, bench_of):
    """Catches a step without the peer, cross-attention that is replaced, and a lost scale."""
    calls = []
    exact = F.scaled_dot_product_attention

    def attend(peer, inputs, scale):
        assert all(x.is_contiguous() for x in inputs)
        calls.append((peer.source, peer.setting))
        return exact(*inputs, scale=scale)

    monkeypatch.setattr(Peer, "attend", attend)
    bench = bench_of("wan")
    inputs = bench.inputs(480)
    expected = bench.predict(*inputs)
    with bench.method("pisa@.15", inputs):
        torch.testing.assert_close(bench.predict(*inputs), expected)
    assert calls == [("pisa", 0.15)] * len(select_layers(bench.network))


def test_the_command(tmp_path, monkeypatch):
    """Catches a killed run that loses its rows, a rerun that measures them again or keeps those of
    other code, times that are not those of all blocks, and ratios upside down."""
    options = ["bench", "steps", "--device", "cpu", "--models", "wan@480,sd35-medium@128"]
    options += ["--window", 0.001, "--runs", "eager", "--output", tmp_path]
    path = tmp_path / "bench_steps_cpu.json"
    real = steps.measured

    def killed(bench, case, window):
        if case.model == "sd35-medium":
            raise KeyboardInterrupt
        return real(bench, case, window)

    monkeypatch.setattr(steps, "measured", killed)
    monkeypatch.setattr("distill.environment._commit", lambda: "a")
    code, *_ = run(*options)
    assert code == 130
    kept = json.loads(path.read_text())["rows"]
    assert [row["method"] for row in kept] == ["exact", "avq"]
    monkeypatch.setattr(steps, "measured", real)
    printed = run_command(*options, "--seconds", 0)
    assert "Out of time at sd35-medium 128 eager exact" in printed
    run_command(*options)
    document = json.loads(path.read_text())
    rows = document["rows"]
    assert [row["ms"] for row in rows[:2]] == [row["ms"] for row in kept]
    assert len(rows) == 6
    for row in rows:
        exact = next(x for x in rows if x["model"] == row["model"])
        assert row["times_as_fast"] == pytest.approx(row.get("exact_ms", exact["ms"]) / row["ms"])
        assert ("exact_ms" in row) == (row["method"] != "exact")  # on a host that changes its speed
    monkeypatch.setattr(steps, "_times", lambda *_: [[3.0, 5.0, 4.0]])
    document["environment"]["commit"] = "another"
    path.write_text(json.dumps(document))
    run_command(*options)
    rows = json.loads(path.read_text())["rows"]
    assert {(row["model"], row["ms"]) for row in rows} == {("wan", 4), ("sd35-medium", 8)}


@pytest.mark.parametrize(
    ("commit", "changes", "is_kept"),
    [
        ("a", {"date": "then"}, True),
        ("a", {"diffusers": "0"}, False),
        ("a", {"tomesd": None}, False),
        ("unknown", {}, False),
    ],
)
def test_rows_are_kept_of_the_same_environment(
    tmp_path, monkeypatch, capsys, commit, changes, is_kept
):
    """Catches times of other code or packages under the names of the present ones."""
    monkeypatch.setattr("distill.environment._commit", lambda: commit)
    monkeypatch.setattr(steps, "NetworkBench", lambda *_: None)
    path, cases = tmp_path / "steps.json", cases_of("sd15@512", ["eager"], ["exact"])

    def timed(ms):
        monkeypatch.setattr(steps, "measured", lambda *_: {"ms": ms})
        return [row["ms"] for row in steps.run_steps(cases, CPU, path)]

    assert timed(1.0) == [1]
    document = json.loads(path.read_text())
    document["environment"] |= changes
    path.write_text(json.dumps(document))
    assert timed(2.0) == ([1] if is_kept else [2])
    assert f"Of 1 timed rows in {path}, {int(is_kept)} are of the same" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "is not a result"),
        (
            '{"command": "python -m eval bench"}',
            "is not a complete result (KeyError: 'environment')",
        ),
    ],
)
def test_a_damaged_file_is_named(tmp_path, text, message):
    """Catches a command that ends in a traceback, or writes over a file that is not its own."""
    path = tmp_path / "bench_steps_cpu.json"
    path.write_text(text)
    last = failed_command("bench", "steps", "--device", "cpu", "--output", tmp_path)
    assert f"{path} {message}" in last
    assert path.read_text() == text


def test_eager_rows_come_first():
    """Catches a run that compiles before it has the rows that take seconds, and limits that delay
    what they are compared with."""
    cases = cases_of("flux@1024,sd15@512", ["compiled", "eager"], ["limit", "exact", AVQ])
    of_run = [
        ("flux", 1024, "exact"),
        ("flux", 1024, AVQ),
        ("sd15", 512, "exact"),
        ("sd15", 512, AVQ),
        ("flux", 1024, "limit"),
        ("sd15", 512, "limit"),
    ]
    assert [(model, size, method) for model, size, _, method in cases] == of_run * 2
    assert [case.run for case in cases] == ["eager"] * 6 + ["compiled"] * 6
