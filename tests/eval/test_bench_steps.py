"""`eval bench unet` and `bench transformer`: rows that time what they name, here on the CPU."""

import json
import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from diffusers import UNet2DConditionModel
from eval_helpers import failed_command, run_command
from torch._dynamo.utils import counters

from avq_diffusers import select_layers
from avq_diffusers.mini import MINI_SD
from eval.benchmarks import step
from eval.benchmarks.models import TRANSFORMERS, UNETS
from eval.benchmarks.networks import bench_of, layer_states
from eval.benchmarks.step import Choice, step_rows
from eval.methods.avq import LEVELS
from eval.methods.peer import Peer
from eval.methods.registry import method_label, timed_method

CPU = torch.device("cpu")


def tiny_unet_bench(**config):
    """Of a tiny UNet that is calibrated at 64 pixels."""
    tiny = UNETS["sd15"].for_device(CPU)
    config = {**tiny.config, "layers_per_block": 1, **config}
    return bench_of(replace(tiny, config=config, sizes=(64,)), CPU, compile_backend="eager")


@pytest.fixture(autouse=True)
def two_turns(monkeypatch):
    monkeypatch.setattr(step, "TURNS", 2)


@pytest.fixture(scope="module")
def unet():
    return tiny_unet_bench()


@pytest.fixture(scope="module", params=TRANSFORMERS)
def transformer(request):
    return bench_of(TRANSFORMERS[request.param].for_device(CPU), CPU, compile_backend="eager")


def side_of(bench):
    return bench.model.sizes[0] if bench.model.multiple is None else 64


def rows_of(bench, methods, mode="eager"):
    *_, rows = step_rows(bench, side_of(bench), mode, methods, window_ms=1)
    return {row["method"]: row for row in rows}


def states(bench):
    """What AVQ keeps, by layer."""
    found = {layer.name: layer.avq_state for layer in select_layers(bench.network)}
    return {name: state for name, state in found.items() if state is not None}


@pytest.mark.parametrize(
    ("name", "billions", "attentions", "num_blocks"),
    [
        ("sd15", 0.8595, 32, None),
        ("sdxl", 2.5675, 140, None),
        ("sd35-medium", 2.24, 37, None),
        ("sd35-large", 8.06, 38, None),
        ("flux", 11.90, 57, None),
        ("wan", 14.29, 80, 40),
        ("hunyuan15", 8.33, 54, 54),
        ("minimax-h3", 33.12, 50, 50),
    ],
)
def test_the_configurations_are_those_of_the_models(name, billions, attentions, num_blocks):
    """The published numbers of parameters; those of videos for all blocks, of which one is timed,
    and for the blocks that refine the text."""
    model = {**UNETS, **TRANSFORMERS}[name]
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
    heads = {"sd15": {0: (8, 40), 1: (8, 80)}, "sdxl": {1: (10, 64), 2: (20, 64)}}
    if name in heads:
        layers = select_layers(whole, model.levels)
        assert {x.level: (x.num_heads, x.head_dim) for x in layers} == heads[name]


def test_rows_of_a_unet(unet):
    """Fails for a method that leaves the UNet changed, that does nothing, or ratios upside down."""
    pytest.importorskip("tomesd")
    before = unet.network.attn_processors
    methods = ("exact", "limit", "M4P2C2", "M4P2C2@L0", "M5@L0", "M4P2C2/own", "linfusion")
    methods += ("tome", "tome@L01", "fa2")
    rows = rows_of(unet, methods)
    *timed, fa2 = rows.values()
    for row in timed:
        assert row["error"] < 1e-5
        assert row["steps"] == 2
        assert row["over_limit"] == pytest.approx(row["ms"] / rows["limit"]["ms"])
        assert row["over_sdpa"] == pytest.approx(row["ms"] / rows["exact"]["ms"])
    changes = [row["difference_from_sdpa"] for row in timed]
    assert changes[0] == 0
    assert min(changes[1:]) > 0.01
    assert len(set(changes)) == len(timed)
    assert rows["linfusion"]["difference_from_sdpa"] > 0.1 < rows["limit"]["difference_from_sdpa"]
    assert (fa2["ms"], fa2["note"]) == (None, "FA2 needs a CUDA device")
    after = unet.network.attn_processors
    assert all(after[name] is processor for name, processor in before.items())
    assert states(unet) == {}
    notes = {row["note"] for row in rows_of(unet, ("exact", "M4P2C2"), "graph").values()}
    assert notes == {"CUDA graphs need a CUDA device"}


def test_rows_of_a_transformer(transformer):
    """Fails for a limit that attends, AVQ that does not run or stays, ratios upside down, and times
    that are not multiplied."""
    methods = ("exact", "limit", "cudnn", "M4P2C2/own", "M4C2T1e-3", "M4C2T1e-3/fastest")
    rows = rows_of(transformer, methods)
    assert layer_states(transformer.network) == []
    exact, limit, cudnn, own, threshold, fastest = rows.values()
    assert exact["error"] == limit["error"] == 0
    assert all(row["error"] < 1e-5 for row in (own, threshold, fastest))
    assert own["difference_from_sdpa"] > max(1e-3, threshold["difference_from_sdpa"])
    assert fastest["ms"] > 0
    assert limit["difference_from_sdpa"] > 0.01
    assert limit["over_sdpa"] == pytest.approx(limit["ms"] / exact["ms"])
    assert (cudnn["ms"], cudnn["note"]) == (None, "cuDNN needs a CUDA device")
    with transformer.method("M4P2C2/own"), torch.no_grad():
        transformer.predict(*transformer.inputs(side_of(transformer)))
        assert {tuple(x.calls) for x in layer_states(transformer.network)} == {("AVQ",)}


def test_a_model_with_a_mask_is_timed_in_eager_steps():
    """Catches exact attention that is timed as AVQ, since compiled code cannot read the mask."""
    bench = bench_of(TRANSFORMERS["hunyuan15"].for_device(CPU), CPU)
    (row,) = rows_of(bench, ["M4P2C2/own"], "compile").values()
    assert (row["ms"], row["note"]) == (None, "AVQ reads a mask on the host, in eager steps only")


def test_times_are_those_of_all_blocks():
    rows = [{"method": "exact", "ms": 6.0}, {"method": "limit", "ms": 2.0}]
    rows += [{"method": "cudnn", "ms": None}]
    exact, limit, cudnn = step.in_all_blocks(rows, 10)
    assert (exact["ms"], exact["over_limit"], exact["over_sdpa"]) == (60, 3, 1)
    assert (limit["ms"], limit["over_cudnn"]) == (20, None)
    assert (cudnn["ms"], cudnn["over_limit"]) == (None, None)


@pytest.mark.parametrize(
    ("name", "label", "route", "is_tuned"),
    [
        ("M4P2C2@L0/fastest", "AVQ 4/2/2, level 0, fastest route", "fastest", False),
        ("M4P2C2@L0/tuned", "AVQ 4/2/2, level 0, tuned projections", "always", True),
        ("M4P2C2-up_blocks.2", "AVQ 4/2/2, up_blocks.2 exact", "always", False),
        ("M4P2C2@L0/own2", "AVQ 4/2/2, own codewords, 2 updates, level 0", "always", False),
        ("M5/means", "VQ 5, mean keys", "always", False),
        ("M4C2T1e-3/fastest", "AVQ 4/2, threshold 0.001, fastest route", "fastest", False),
        (
            "M4C2T1e-4@L0/tuned",
            "AVQ 4/2, threshold 1e-4, level 0, tuned projections",
            "always",
            True,
        ),
    ],
)
def test_a_row_runs_what_its_label_says(unet, name, label, route, is_tuned):
    """Fails where the row of AVQ is timed with some layers exact, with a row's changes of
    projections, or without the layers that its name leaves exact."""
    with unet.method(name):
        found = states(unet)
        assert {state.route.route for state in found.values()} == {route}
    config = timed_method(name).config
    assert {replace(s.config, levels=config.levels) for s in found.values()} == {config}
    assert {s.weights.codebook is None for s in found.values()} == {timed_method(name).own}
    changes = {state.weights.projection_changes is not None for state in found.values()}
    assert changes == {is_tuned}
    assert method_label(name) == label
    levels = (0,) if "@L0" in name else LEVELS
    expected = {layer.name for layer in select_layers(unet.network, levels)}
    exact = {layer for layer in expected if layer.startswith(f"{name.partition('-')[2]}.")}
    assert found.keys() == expected - exact
    assert bool(exact) == ("-up" in name)


def test_a_step_that_is_wrong_gets_no_time(unet, monkeypatch):
    """Fails where NaN is lost among the errors, and for rows that ran exact attention."""
    conv = unet.network.conv_out
    with conv.register_forward_hook(lambda module, args, output: output * math.nan):
        for row in rows_of(unet, ("exact", "M4P2C2")).values():
            assert row["ms"] is None
            assert row["note"].startswith("wrong output: relative error nan")
    real = unet.method

    def method(name, *, oracle=False):
        return real(name if oracle or name == "exact" else "exact", oracle=oracle)

    monkeypatch.setattr(unet, "method", method)
    sdpa, *others = rows_of(unet, ("exact", "M4P2C2", "limit", "linfusion")).values()
    assert sdpa["ms"] > 0
    for row in others:
        assert row["ms"] is None
        assert row["note"].startswith("wrong output")


@pytest.mark.long
def test_a_compiled_unet():
    """Dynamo takes the step; the back end that generates code is left to the GPU run."""
    rows = rows_of(tiny_unet_bench(), ("M4P2C2", "limit", "linfusion", "M4P2C2/own"), "compile")
    for row in rows.values():
        assert row["error"] < 1e-5
        assert row["ms"] > 0
        assert row["over_sdpa"] is None
    assert rows["limit"]["over_limit"] == 1


def test_a_compiled_transformer():
    """Catches blocks that are not compiled, one graph for every block, and blocks that stay
    compiled."""
    counters.clear()
    model = TRANSFORMERS["sd35-medium"].for_device(CPU)
    bench = bench_of(replace(model, part={}), CPU, compile_backend="eager")
    (row,) = rows_of(bench, ["M4P2C2/own"], "compile").values()
    assert row["error"] < 1e-5
    assert row["ms"] > 0
    assert (counters["stats"]["unique_graphs"], counters["graph_break"]) == (3, {})
    assert not any("forward" in vars(block) for block in bench.network.transformer_blocks)


@torch.no_grad()
def test_a_peer_takes_the_calls_of_self_attention(monkeypatch, transformer):
    """Catches a step without the peer, cross-attention that is replaced, a lost scale, and tokens
    in another order than text and image have."""
    calls = []
    exact = F.scaled_dot_product_attention

    def attend(peer, inputs, scale):
        assert all(x.is_contiguous() for x in inputs)
        calls.append((peer.source, peer.setting))
        return exact(*inputs, scale=scale)

    monkeypatch.setattr(Peer, "attend", attend)
    inputs = transformer.inputs(side_of(transformer))
    with transformer.method("pisa0@.15"):
        by_peer = transformer.predict(*inputs)
    torch.testing.assert_close(by_peer, transformer.predict(*inputs))
    with transformer.method("M4P2C2/own"):
        num_layers = len(layer_states(transformer.network))
    assert calls == [("pisa0", 0.15)] * num_layers


@pytest.mark.parametrize(
    ("group", "model", "title", "stem"),
    [
        ("unet", "sd15", {"unet": "tiny, for SD1.5, random weights"}, "bench_unet"),
        ("unet", "sdxl", {"unet": "tiny, for SDXL, random weights"}, "bench_unet_sdxl"),
        (
            "transformer",
            "flux",
            {
                "model": "tiny, for Flux",
                "timed_blocks": {"num_layers": 1, "num_single_layers": 2},
                "multiplied_by": 2,
            },
            "bench_transformer_flux",
        ),
    ],
)
def test_the_commands(group, model, title, stem, tmp_path, monkeypatch, capsys):
    """Fails for results in the files of another model, and SDXL without its conditions."""
    options = ["--model", model, "--device", "cpu", "--sizes", 64, "--modes", "eager"]
    options += ["--seconds", 0.001, "--methods", "exact,limit", "--output", tmp_path]
    run_command(monkeypatch, "bench", group, *options)
    path, plot = tmp_path / f"{stem}_64_eager_cpu.json", tmp_path / f"{stem}_64_cpu.png"
    document = json.loads(path.read_text())
    assert document.items() >= title.items()
    assert [row["method"] for row in document["rows"]] == ["exact", "limit"]
    assert document["rows"][1]["over_limit"] == 1
    drawn = plot.read_bytes()
    plot.unlink()
    run_command(monkeypatch, "plot", path)
    assert plot.read_bytes() == drawn
    printed = capsys.readouterr().out
    assert "| 64 | eager | limit | " in printed
    assert ("times are scaled by 2." in printed) == (group == "transformer")
    run_command(monkeypatch, "bench", group, *options, "--minutes", 0)
    rows = json.loads(path.read_text())["rows"]
    assert [row["note"] for row in rows] == ["not started: out of time"] * 2


def test_mini_sd_is_itself_at_its_sizes():
    """Fails for random weights, and latents of SD1.5's scale."""
    bench = bench_of(UNETS["mini-sd"].for_device(CPU), CPU)
    stored = UNet2DConditionModel.from_pretrained(MINI_SD, subfolder="unet").state_dict()
    loaded = bench.network.state_dict()
    assert all(torch.equal(loaded[name], tensor) for name, tensor in stored.items())
    sample, text = bench.inputs(64)
    assert (sample.shape, text.shape) == ((2, 4, 16, 16), (2, 77, 192))


def test_panels_name_devices_that_differ(tmp_path, monkeypatch):
    """Catches a plot that sets times of two cards side by side and does not say so."""
    for mode, device in (("graph", "H200"), ("eager", "H100")):
        rows = [{"mode": mode, "label": "limit", "ms": 1.0}]
        document = {"environment": {"device": device}, "rows": rows, "model": "x"}
        (tmp_path / f"x_64_{mode}_cuda.json").write_text(json.dumps(document))
    titles = []
    monkeypatch.setattr(step, "bar_plot", lambda _, panels, **labels: titles.extend(panels))
    step.plot_steps(tmp_path, "x", 64, "cuda")
    assert titles == [f"{step.MODES['graph']}\nH200", f"{step.MODES['eager']}\nH100"]


@pytest.mark.parametrize(
    ("group", "options", "message"),
    [
        ("unet", {"model": "sd3"}, "--model must be one of sd15, sdxl, mini-sd, but got 'sd3'"),
        ("unet", {"methods": "xformers"}, "methods must be exact, "),
        ("unet", {"methods": "sol@1.3"}, "M64P16C8/tuned, but got 'sol@1.3'"),
        ("unet", {"model": "sdxl", "methods": "M4"}, "are 1, 2, but M4 changes 0, 1"),
        ("unet", {"modes": "jit"}, "modes must be graph, compile, eager, but got 'jit'"),
        ("transformer", {"sizes": "100"}, "--sizes must be multiples of 16 from 64 on, but got 1"),
        ("transformer", {"model": "wan", "sizes": "512"}, "must be 480 or 720 for one block of W"),
        ("transformer", {"methods": "M64P16C8"}, "methods for bench transformer are exact, fa2, c"),
    ],
)
def test_refusals(group, options, message, tmp_path, monkeypatch, capsys):
    """Catches an error after the model is built, or a row of stored codewords that has none."""
    parts = [x for name, value in options.items() for x in (f"--{name}", value)]
    parts += ["--device", "cpu", "--output", tmp_path]
    code, last = failed_command(monkeypatch, capsys, "bench", group, *parts)
    assert code == 2
    assert message in last
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", [*UNETS, *TRANSFORMERS])
def test_default_methods_and_sizes_are_possible(name):
    model = {**UNETS, **TRANSFORMERS}[name]
    Choice(model, model.sizes, model.methods)
