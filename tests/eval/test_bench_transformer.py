"""`eval bench transformer`: real configurations, and rows that time what they name, on the CPU."""

import json
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from eval_helpers import run_command
from torch._dynamo.utils import counters

from eval.benchmarks import step_rows as steps
from eval.benchmarks import transformer
from eval.benchmarks.step import layer_states
from eval.benchmarks.step_rows import step_rows
from eval.benchmarks.transformer import (
    MODELS,
    TransformerBench,
    pass_on,
    self_attention_by,
    tiny_model,
)
from eval.names import timed_method

CPU = torch.device("cpu")


@pytest.fixture(scope="module", params=MODELS)
def bench(request):
    return TransformerBench(tiny_model(request.param), CPU, compile_backend="eager")


def side_of(bench):
    return 480 if bench.model.step is None else 64


@pytest.mark.parametrize(
    ("name", "blocks", "billions", "attentions"),
    [
        ("sd35-medium", {}, 2.24, 37),
        ("sd35-large", {}, 8.06, 38),
        ("flux", {}, 11.90, 57),
        ("wan", {"num_layers": 40}, 14.29, 80),
    ],
)
def test_the_configurations_are_those_of_the_models(name, blocks, billions, attentions):
    """The published numbers of parameters; those of Wan for all blocks, of which one is timed."""
    model = MODELS[name]
    with torch.device("meta"):
        whole = model.kind(**{**model.config, **blocks})
        part = model.kind(**{**model.config, **model.part})
    assert sum(x.numel() for x in whole.parameters()) / 1e9 == pytest.approx(billions, abs=0.01)
    counts = [
        sum(name.endswith(("attn", "attn1", "attn2")) for name, _ in network.named_modules())
        for network in (whole, part)
    ]
    assert counts[0] == attentions
    # What is multiplied has the attention of the whole within half a percent.
    times = 40 if blocks else model.times
    assert counts[1] * times == pytest.approx(attentions, rel=0.005)


def test_rows_of_a_transformer(bench):
    """Fails for a limit that attends, AVQ that does not run or stays, ratios upside down, and times
    that are not multiplied."""
    side = side_of(bench)
    methods = ("exact", "limit", "cudnn", "M4P2C2/own", "M4P2C2E8/own", "M4P2C2/fastest")
    *_, rows = step_rows(bench, side, "eager", methods=methods, window_ms=1)
    assert layer_states(bench.network) == []
    exact, limit, cudnn, *avq = (transformer.in_all_blocks(row, bench.times, rows) for row in rows)
    assert exact["error"] == limit["error"] == 0
    own, exact_keys, fastest = avq
    assert [row["error"] < 1e-5 for row in avq] == [True] * 3
    assert 1e-3 < own["difference_from_sdpa"] != exact_keys["difference_from_sdpa"] > 1e-3
    assert fastest["ms"] > 0
    assert limit["difference_from_sdpa"] > 0.01
    assert limit["share_of_limit"] == 1
    assert exact["ms"] == bench.times * rows[0]["ms"]
    assert exact["share_of_limit"] == pytest.approx(limit["ms"] / exact["ms"])
    assert limit["speedup_over_sdpa"] == pytest.approx(exact["ms"] / limit["ms"])
    assert (cudnn["ms"], cudnn["note"]) == (None, "cuDNN needs a CUDA device")


@torch.no_grad()
def test_a_part_is_of_the_same_network(bench):
    """Fails for inputs of another size, and a network without all of its kinds of blocks."""
    inputs = bench.inputs(side_of(bench))
    assert bench.predict(*inputs).shape == inputs[0].shape
    whole = TransformerBench(bench.model, CPU, whole=True)
    kinds = [
        {name.partition(".")[0] for name, _ in one.network.named_parameters()}
        for one in (bench, whole)
    ]
    assert kinds[0] == kinds[1]
    assert whole.times == 1


@torch.no_grad()
def test_every_layer_of_the_image_runs_by_avq(bench):
    """Fails for AVQ that hands its calls over, whose time is that of exact attention."""
    inputs = bench.inputs(side_of(bench))
    with bench.method("M4P2C2/own"):
        bench.predict(*inputs)
        states = layer_states(bench.network)
        assert states
        assert {tuple(state.calls) for state in states} == {("AVQ",)}


@pytest.mark.parametrize(("name", "graphs"), [("sd35-medium", 3), ("flux", 3)])
def test_compiled_steps(name, graphs):
    """Catches blocks that are not compiled, one graph for every block, and blocks that stay
    compiled; the back end that generates code is left to the GPU run."""
    counters.clear()
    steps = TransformerBench(tiny_model(name), CPU, whole=True, compile_backend="eager")
    methods = ("exact", "limit", "M4P2C2/own")
    *_, rows = step_rows(steps, 64, "compile", methods=methods, window_ms=1)
    for row in rows:
        assert row["error"] < 1e-5
        assert row["ms"] > 0
    assert (counters["stats"]["unique_graphs"], counters["graph_break"]) == (3 * graphs, {})
    assert not any("forward" in vars(block) for block in steps.network.transformer_blocks)


@torch.no_grad()
def test_a_peer_takes_the_calls_of_self_attention(monkeypatch, bench):
    """Catches a step without the peer, cross-attention that is replaced, a lost scale, and tokens
    in another order than text and image have."""
    calls = []
    exact = F.scaled_dot_product_attention

    def attend(source, setting, inputs, scale):
        assert all(x.is_contiguous() for x in inputs)
        calls.append((source, setting))
        return exact(*inputs, scale=scale)

    monkeypatch.setattr(transformer, "attention_in_order", attend)
    inputs = bench.inputs(side_of(bench))
    with bench.method("pisa0@.15"):
        by_peer = bench.predict(*inputs)
    torch.testing.assert_close(by_peer, bench.predict(*inputs))
    with bench.method("M4P2C2/own"):
        num_layers = len(layer_states(bench.network))
    assert calls == [("pisa0", 0.15)] * num_layers


def test_the_limit_leaves_cross_attention_and_restores():
    query, key, value = torch.randn(3, 1, 2, 8, 4)
    exact = F.scaled_dot_product_attention
    expected = exact(query, key[:, :, :5], value[:, :, :5])
    with self_attention_by(pass_on):
        assert torch.equal(F.scaled_dot_product_attention(query, key, value), value)
        assert torch.equal(
            F.scaled_dot_product_attention(query, key[:, :, :5], value[:, :, :5]), expected
        )
    assert F.scaled_dot_product_attention is exact


def test_the_command_writes_rows_a_plot_and_what_was_timed(tmp_path, monkeypatch, capsys):
    options = ["--model", "flux", "--device", "cpu", "--sizes", 64, "--modes", "eager"]
    options += ["--seconds", 0.001]
    options += ["--methods", "exact,limit", "--output", tmp_path]
    run_command(monkeypatch, "bench", "transformer", *options)
    document = json.loads((tmp_path / "bench_transformer_flux_64_eager_cpu.json").read_text())
    assert document["model"] == "tiny, for Flux"
    assert document["timed_blocks"] == {"num_layers": 1, "num_single_layers": 2}
    assert document["multiplied_by"] == 2
    assert [row["method"] for row in document["rows"]] == ["exact", "limit"]
    plot = tmp_path / "bench_transformer_flux_64_cpu.png"
    drawn = plot.read_bytes()
    plot.unlink()
    run_command(monkeypatch, "plot", tmp_path / "bench_transformer_flux_64_eager_cpu.json")
    assert plot.read_bytes() == drawn
    printed = capsys.readouterr().out
    assert "| 64 | eager | limit | " in printed
    assert "A part was timed; times are multiplied by 2." in printed


@pytest.mark.parametrize("devices", [("H100", "H100"), ("H200", "H100")])
def test_panels_name_devices_that_differ(devices, tmp_path, monkeypatch):
    """Catches a plot that sets times of two cards side by side and does not say so."""
    for mode, device in zip(("graph", "eager"), devices, strict=True):
        row = {"mode": mode, "label": "limit", "ms": 1.0}
        document = {"environment": {"device": device}, "rows": [row], "model": "x"}
        (tmp_path / f"x_64_{mode}_cpu.json").write_text(json.dumps(document))
    titles = []
    monkeypatch.setattr(steps, "bar_plot", lambda _, panels, **labels: titles.extend(panels))
    steps.plot_steps(tmp_path, "x", 64, CPU, {"graph": "G", "eager": "E"}, "{model}")
    assert titles == (["G", "E"] if len(set(devices)) == 1 else ["G\nH200", "E\nH100"])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"model": "sd3"}, "--model must be one of sd35-medium, sd35-large, flux, wan, but got"),
        ({"sizes": [100]}, "--sizes must be multiples of 16 from 64 on, but got 100"),
        ({"model": "wan", "sizes": [512]}, "must be 480 or 720 for .*Wan 14B, but got 512"),
        ({"modes": ["jit"]}, "modes must be graph, compile, eager, but got 'jit'"),
        ({"methods": ["M64P16C8"]}, "with /own or /fastest, but got 'M64P16C8'"),
        ({"methods": ["pooled@E256"]}, "pooled@E256 can only be measured by keys"),
        ({"methods": ["linfusion"]}, "methods of a transformer are exact, fa2, cudnn, limit"),
    ],
)
def test_refusals(tmp_path, arguments, message):
    """Catches an error after the model is built, or a row of stored codewords that has none."""
    with pytest.raises(ValueError, match=message):
        transformer.run_transformer(
            CPU, tmp_path, command="y", **{"model": "flux", "modes": ["eager"], **arguments}
        )
    assert not list(tmp_path.iterdir())


def test_default_methods_are_known():
    model = replace(MODELS["flux"], sizes=())
    transformer.check_choices(model, (), transformer.METHODS, ("eager",))
    assert timed_method(transformer.METHODS[3]).config.exact_keys == 256
