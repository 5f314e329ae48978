"""The paper's analyses: figures of heads and variants by hand, tables and plots of known rows."""

import json
from dataclasses import replace
from itertools import combinations

import pytest
import torch
from eval_helpers import run_command, watched
from PIL import Image
from tiny import CONFIG, draw, random_codebooks, tiny_pipe, tiny_unet

from avq_diffusers import AVQConfig, gather_codebooks, select_layers
from avq_diffusers.attention import reference
from avq_diffusers.attention.diagnostics import (
    active_ratio,
    attention_mass,
    captured_share,
    commitment_loss,
    leaf_counts,
    perplexity,
    quantization_error,
    refined_parents,
)
from avq_diffusers.attention.orders import query_order
from avq_diffusers.codebook.assignment import assign
from avq_diffusers.mini import TEST_SEEDS, sample_scene
from eval.codebooks import analyses, layer_errors
from eval.methods import Method, attention_method, prepare_methods
from eval.names import EXACT
from eval.store.plots import HeatMap

TWELVE = AVQConfig.parse("M12P3C2", query_tile=16, levels=(0, 1))
SCENES = [sample_scene(seed) for seed in TEST_SEEDS[:2]]


def method_of(unet, config, **arguments) -> Method:
    return Method("x", config.levels, random_codebooks(unet, config, **arguments))


def tuned(unet) -> dict:
    return {
        layer.name: {name: 0.1 * weight for name, weight in layer.attn.named_parameters()}
        for layer in select_layers(unet, (0, 1))
    }


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder of M12P3C2 codebooks for levels 0 and 1 of the tiny model."""
    path = tmp_path_factory.mktemp("run") / "codebooks"
    random_codebooks(tiny_unet(), TWELVE).save_pretrained(path)
    return path


@pytest.mark.parametrize("key_norm", [False, True])
def test_a_variant_is_the_codebooks_of_another_configuration(key_norm):
    """Fails for fields that reach no layer, changes or norms that are lost, or the original
    that changes as well."""
    pipe = tiny_pipe()
    config = replace(CONFIG, key_norm=key_norm)
    fields = {"query_order": "random", "query_tile": 8}
    changes = tuned(pipe.unet)
    method = replace(method_of(pipe.unet, config, projection_changes=changes), num_refined=1)
    expected = method_of(pipe.unet, replace(config, **fields), projection_changes=changes)
    if key_norm:
        for built in (method, expected):
            for name in built.codebooks.layer_specs:
                torch.nn.init.constant_(built.codebooks.key_norm(name).weight, 2.0)
    variant = method.with_fields(**fields)
    drawn = []
    for one in (method, variant, replace(expected, num_refined=1), method):
        with attention_method(pipe, one):
            drawn.append(draw(pipe))
    assert torch.equal(drawn[1], drawn[2])
    assert not torch.equal(drawn[1], drawn[0])
    assert torch.equal(drawn[0], drawn[3])
    name = next(iter(method.codebooks.layer_specs))
    parents = method.codebooks.codebook(name).parents
    assert variant.codebooks.codebook(name).parents.data_ptr() == parents.data_ptr()
    assert variant.layer_configs[0] == replace(config, num_refined=1, **fields)


def test_a_layer_alone_is_measured_at_the_captions_and_steps_of_the_analysis():
    """Fails for AVQ in other layers as well, another variant, other captions or another number of
    steps, and calls of another image than the exact one."""
    pipe, calls = tiny_pipe(), []
    method = replace(method_of(pipe.unet, CONFIG), num_refined=1)
    rows = analyses.analyse(pipe, analyses.ANALYSES["layers"], [method], SCENES, num_timesteps=2)
    (row,) = rows
    found = {name: figures["output_error_alone"] for name, figures in row["layers"].items()}
    assert len({f"{error:.3e}" for error in found.values()}) == len(found) > 1

    handle = pipe.unet.register_forward_hook(lambda *call: calls.append(call[1:]), with_kwargs=True)
    for seed, scene in enumerate(SCENES):
        noise = torch.Generator().manual_seed(seed)
        pipe(scene.caption, num_inference_steps=2, generator=noise, output_type="latent")
    handle.remove()
    exact = torch.cat([output[0] for *_, output in calls])
    for name in [*found][:: len(found) - 1]:
        others = tuple(other for other in found if other != name)
        config = replace(CONFIG, exact=others, num_refined=1)
        alone = gather_codebooks(pipe.unet, config, {name: method.codebooks.codebook(name)})
        with torch.no_grad(), attention_method(pipe, Method("alone", (0, 1), alone)):
            changed = torch.cat([pipe.unet(*args, **kwargs)[0] for args, kwargs, _ in calls])
        error = float((changed - exact).norm() / exact.norm())
        assert found[name] == pytest.approx(error, rel=1e-4)


def test_figures_of_heads_by_hand(monkeypatch):
    """Fails for heads that are mixed, a choice by another order, tile or importance, a best choice
    that is not, an overlap with itself, or codewords counted on the sample of keys only."""
    monkeypatch.setattr(layer_errors, "KEYS_PER_LAYER", 300)
    pipe = tiny_pipe()
    config = replace(CONFIG, query_order="random", query_tile=32, num_parents=6, levels=(0,))
    method = replace(method_of(pipe.unet, config), importance_tile=2)
    (row,) = layer_errors.measure_errors(pipe, [method], SCENES, num_timesteps=1)
    (inputs,) = layer_errors.noised_scenes(pipe, SCENES, 1)
    with attention_method(pipe, method):
        _, calls = watched(pipe, inputs)

    layer = select_layers(pipe.unet, (0,))[1]
    codebook = method.codebooks.codebook(layer.name)
    hidden_states = calls[layer.name][0]
    query, key = (
        (hidden_states @ weight.T).unflatten(-1, (layer.num_heads, -1)).transpose(1, 2)
        for weight in (layer.attn.to_q.weight.detach(), layer.attn.to_k.weight.detach())
    )
    figures = row["layers"][layer.name]
    heads = figures["heads"]
    counts = leaf_counts(key, codebook)
    assert counts.sum() == 2 * 2 * 256
    assert heads["active_ratio"] == pytest.approx(active_ratio(counts).tolist())
    assert heads["perplexity"] == pytest.approx(perplexity(counts).tolist())
    assert heads["evenness"] == pytest.approx((perplexity(counts) / 18).tolist())
    for name, of in (
        ("commitment_loss", commitment_loss),
        ("quantization_error", quantization_error),
    ):
        everything = of(key, codebook, codewords="stored").tolist()
        assert heads[name] == pytest.approx(everything, rel=0.2)
        assert heads[name] != pytest.approx(everything, rel=1e-5)

    query, key = query[:1], key[:1]
    order = query_order(16, 16, "random")
    arguments = {"codewords": "stored", "query_tile": 32, "query_order": order}
    refined = refined_parents(query, key, codebook, 2, importance_tile=2, **arguments)
    mass = attention_mass(query, key, codebook, **arguments)
    expected = captured_share(mass, refined)
    assert heads["capture"] == pytest.approx(expected.tolist(), rel=1e-4)
    assert heads["capture"][0] != pytest.approx(heads["capture"][1], rel=1e-3)
    parent, _ = assign(key, codebook)
    attention = (query @ key.mT * query.shape[-1] ** -0.5).softmax(-1)[0]
    number = torch.nn.functional.one_hot(parent, 6).sum(2).float()
    best, same = torch.zeros(2), torch.zeros(2)
    for rows in order.split(32):
        chosen = [
            reference.importance(
                query[:, :, rows], codebook.parents, number, query.shape[-1] ** -0.5, size
            ).topk(2)
            for size in (2, None)
        ]
        for head in range(2):
            mass = [attention[head, rows][:, parent[0, head] == p].sum() for p in range(6)]
            best[head] += max(mass[p] + mass[q] for p, q in combinations(range(6), 2)) / 256
            tiled, exact = (set(choice.indices[0, head].tolist()) for choice in chosen)
            same[head] += len(tiled & exact) / 16
    assert heads["best_capture"] == pytest.approx(best.tolist(), rel=1e-4)
    assert heads["overlap"] == pytest.approx(same.tolist())
    assert 0 < min(same) < 1
    for name, values in heads.items():
        assert figures[name] == pytest.approx(sum(values) / 2)
    assert (row["num_parents"], row["num_codewords"], row["num_refined"]) == (6, 18, 2)


@torch.no_grad()
def test_keys_are_a_sample_of_all_images_and_timesteps(monkeypatch):
    """Catches the first keys, which are those of one image's top, and more keys than at most."""
    monkeypatch.setattr(layer_errors, "KEYS_PER_LAYER", 300)
    pipe = tiny_pipe()
    method = method_of(pipe.unet, replace(CONFIG, levels=(0,)))
    (row,) = layer_errors.measure_errors(pipe, [method], SCENES, num_timesteps=2)
    layer, sample = select_layers(pipe.unet, (0,))[1], []
    for index, inputs in enumerate(layer_errors.noised_scenes(pipe, SCENES, 2)):
        with attention_method(pipe, method):
            _, calls = watched(pipe, inputs)
        keys = layer.attn.to_k(calls[layer.name][0]).flatten(0, 1)
        kept = torch.randperm(2 * 256, generator=torch.Generator().manual_seed(index))[:150]
        sample.append(keys[kept].unflatten(-1, (layer.num_heads, -1)).transpose(0, 1))
    codebook = method.codebooks.codebook(layer.name)
    expected = quantization_error(torch.cat(sample, 1), codebook, codewords="stored")
    found = row["layers"][layer.name]["heads"]["quantization_error"]
    assert found == pytest.approx(expected.tolist(), rel=1e-5)


def test_variants_are_measured_one_after_the_other(folder, monkeypatch):
    """Fails for fields that are written to the wrong row, and for variants whose keys are all in
    memory at once; one importance tile that holds all parents is exact importance, and leaves the
    same rows."""
    counts = []

    def measure(pipe, methods, *arguments, **options):
        counts.append(len(methods))
        return layer_errors.measure_errors(pipe, methods, *arguments, **options)

    monkeypatch.setattr(analyses, "measure_errors", measure)
    pipe = tiny_pipe()
    (method,) = prepare_methods(pipe, [str(folder)], levels=(0,), calibration_prompts=())
    analysis = analyses.ANALYSES["importance"]
    assert analysis.variants(method) == [{"importance_tile": 8}, {"importance_tile": None}]
    eight = method_of(pipe.unet, replace(TWELVE, num_parents=8))
    assert analysis.variants(eight) == [{"importance_tile": None}]
    tiled, exact = analyses.analyse(pipe, analysis, [method], SCENES, num_timesteps=1)
    assert counts == [1, 1]
    assert (tiled["importance_tile"], exact["importance_tile"]) == (8, None)
    assert tiled["overlap"] < exact["overlap"] == 1
    assert tiled["best_capture"] > tiled["capture"] != exact["capture"]
    (expected,) = layer_errors.measure_errors(pipe, [method], SCENES, num_timesteps=1)
    assert exact == {**expected, "importance_tile": None}
    assert exact["is_flat"] is False
    whole = method.with_fields(importance_tile=12)
    (row,) = layer_errors.measure_errors(pipe, [whole], SCENES, num_timesteps=1)
    assert row["output_error"] == pytest.approx(expected["output_error"], rel=1e-3)
    assert row["capture"] == pytest.approx(expected["capture"], rel=1e-5)


def test_rows_say_which_codebooks_are_flat():
    """Fails for a row whose kind is read off the letters of its name."""
    pipe = tiny_pipe()
    methods = [
        replace(
            method_of(pipe.unet, AVQConfig.parse("M4")),
            name="runs/C4P",
        ),
        method_of(pipe.unet, AVQConfig.parse("M4P0C2")),
        Method(EXACT, (0,)),
    ]
    rows = layer_errors.measure_errors(pipe, methods, SCENES[:1], num_timesteps=1)
    assert [row["is_flat"] for row in rows] == [True, False, None]


def test_orders_and_tiles():
    """Every order with every tile; a tile of all queries has no order."""
    fields = analyses.order_variants(None)
    assert {f["query_order"] for f in fields} == {"gilbert", "raster", "random"}
    assert len({tuple(f.values()) for f in fields}) == len(fields) == 18
    pipe = tiny_pipe()
    method = method_of(pipe.unet, replace(TWELVE, levels=(0,)))
    small, random, whole, again = layer_errors.measure_errors(
        pipe,
        [
            method.with_fields(query_order=order, query_tile=tile)
            for order, tile in (("gilbert", 4), ("random", 4), ("gilbert", 256), ("random", 512))
        ],
        SCENES,
        num_timesteps=1,
    )
    assert min(small["capture"], random["capture"]) > whole["capture"]
    assert small["capture"] != random["capture"]
    assert whole["capture"] == pytest.approx(again["capture"])
    assert whole["output_error"] == pytest.approx(again["output_error"], rel=1e-4)


def layer(level, capture_of_heads=(0.5,), **figures):
    return {"level": level, "heads": {"capture": list(capture_of_heads)}, **figures}


def layer_row(method, layers):
    return {"method": method, "config": method, "layers": layers}


def test_heads_table_and_maps():
    """Level 1 of SDXL has other heads than level 2, so rows of a map differ in length."""
    name = "up_blocks.1.attentions.0.transformer_blocks.{}.attn1"
    rows = [
        layer_row("M4", {name.format(0): layer(1, (0.2, 0.6)), name.format(1): layer(2, (1, 0, 0))})
    ]
    table = analyses.heads_table(rows).splitlines()
    labels = [name.format(block).removesuffix(".attn1") for block in range(2)]
    assert table[2] == f"| M4 | {labels[0]} | 1 | 0.400 | 0.200 | 0.600 |"
    assert table[3] == f"| M4 | {labels[1]} | 2 | 0.333 | 0.000 | 1.000 |"
    assert analyses.heads_maps(rows) == [HeatMap("M4", labels, [[0.2, 0.6], [1, 0, 0]])]
    del rows[0]["layers"][name.format(1)]
    line = analyses.heads_table(rows).splitlines()[2]
    assert line.startswith("| M4 | up_blocks.1.attentions.0 | 1 |")


def test_layers_are_in_the_order_in_which_they_run():
    """Fails for means over methods or levels, a layer that a method lacks, and the order of rows,
    of text or of the UNet's modules, whose middle is the last."""
    figures = {name: dict.fromkeys(analyses.LAYER_METRICS, float(name)) for name in range(1, 7)}
    first = {
        "down_blocks.1": layer(1, **figures[2]),
        "up_blocks.2": layer(1, **figures[1]),
        "up_blocks.10": layer(0, **figures[5]),
        "mid_block": layer(2, **figures[6]),
    }
    second = {"down_blocks.0": layer(0, **figures[3]), "down_blocks.1": layer(1, **figures[4])}
    rows = [layer_row("M4", first), layer_row("M8", second)]
    lines = [line.split(" | ")[:4] for line in analyses.layers_table(rows).splitlines()]
    assert lines[0][2:] == ["commitment loss, M4", "commitment loss, M8"]
    assert lines[2:] == [
        ["| down_blocks.0", "0", "-", "3"],
        ["| down_blocks.1", "1", "2", "4"],
        ["| mid_block", "2", "6", "-"],
        ["| up_blocks.2", "1", "1", "-"],
        ["| up_blocks.10", "0", "5", "-"],
        ["| mean of level 0", "0", "5", "3"],
        ["| mean of level 1", "1", "1.5", "4"],
        ["| mean of level 2", "2", "6", "-"],
    ]
    panel = analyses.layers_panels(rows)[1]
    assert panel.title == "quantization error"
    assert panel.ticks == [line[0].removeprefix("| ") for line in lines[2:7]]
    assert [(x.label, list(x.y)) for x in panel.lines] == [
        ("M4", [None, 2, 6, 1, 5]),
        ("M8", [3, 4, None, None, None]),
    ]


def variant(method, **figures):
    names = (*analyses.ORDER_METRICS, *analyses.IMPORTANCE_METRICS, *analyses.UTILISATION_METRICS)
    known = dict.fromkeys(names, 0.5)
    return {"method": method, "config": method, "origin": "calibrated", **known, **figures}


def test_lines_of_utilisation_are_kinds_of_codebooks():
    rows = [
        variant("M64", num_codewords=64, active_ratio=0.9, is_flat=True),
        variant("M4P2C2", num_codewords=12, active_ratio=1.0, is_flat=False),
        variant("M16", num_codewords=16, active_ratio=0.8, is_flat=True),
    ]
    panel, _ = analyses.utilisation_panels(rows)
    assert [(x.label, x.x, x.y) for x in panel.lines] == [
        ("AVQ, calibrated", [12], [1.0]),
        ("flat VQ, calibrated", [16, 64], [0.8, 0.9]),
    ]
    assert analyses.utilisation_table(rows).splitlines()[2] == "| M64 | 64 | 0.9 | 0.5 | 0.5 |"


def test_lines_of_order_and_importance():
    """Exact importance lies at the number of parents; the best capture is faint."""
    orders = [
        variant("M4P2C2", query_order=order, query_tile=tile, capture=tile / 100)
        for order in ("gilbert", "random")
        for tile in (32, 16)
    ]
    *_, panel = analyses.order_panels(orders)
    assert [(x.label, x.x, x.y) for x in panel.lines] == [
        ("M4P2C2, gilbert", [16, 32], [0.16, 0.32]),
        ("M4P2C2, random", [16, 32], [0.16, 0.32]),
    ]
    line = analyses.order_table(orders).splitlines()[4]
    assert line == "| M4P2C2 | random | 32 | 0.5 | 0.5 | 0.32 |"
    tiles = [
        variant("M64P8C8", importance_tile=tile, num_parents=64, best_capture=0.9, overlap=overlap)
        for tile, overlap in ((None, 1.0), (16, 0.7))
    ]
    overlap, captured, _ = analyses.importance_panels(tiles)
    assert [(x.label, x.x, x.y) for x in overlap.lines] == [("M64P8C8", [16, 64], [0.7, 1.0])]
    assert [x.y for x in captured.faint] == [[0.9, 0.9]]
    line = analyses.importance_table(tiles).splitlines()[2]
    assert line == "| M64P8C8 | exact | 1 | 0.5 | 0.9 | 0.5 |"


@pytest.mark.parametrize("names", [["heads", "layers", "utilisation"], ["order", "importance"]])
def test_the_analyse_command(names, folder, model, tmp_path, monkeypatch, capsys):
    """From the command line to JSON, table and plot of every analysis."""
    options = {"methods": folder, "model": model, "images": 2, "timesteps": 1}
    options |= {"levels": "0", "output": tmp_path}
    arguments = [text for name, value in options.items() for text in (f"--{name}", value)]
    run_command(monkeypatch, "analyse", *names, *arguments)
    printed = capsys.readouterr().out
    for name in names:
        document = json.loads((tmp_path / f"{name}_levels0.json").read_text())
        rows = document["rows"]
        assert {row["config"] for row in rows} == {"M12P3C2"}
        assert len(rows) == {"order": 18, "importance": 2}.get(name, 1)
        assert len(rows[0]["layers"]) == 6
        assert analyses.ANALYSES[name].table(rows) in printed
        assert Image.open(tmp_path / f"{name}_levels0.png").size[0] > 300
        assert (document["num_images"], document["num_timesteps"]) == (2, 1)
    assert sorted(x.stem for x in tmp_path.glob("*.json")) == sorted(f"{x}_levels0" for x in names)


def kernel_row(config, tokens=256, ms=1.0, heads=8, **facts):
    return {"config": config, "tokens": tokens, "ms": ms, "batch": 2, "heads": heads, **facts} | {
        "head_dim": 40
    }


def test_kernel_times_are_those_of_one_shape(tmp_path):
    """Fails for times of other tokens or heads, skewed keys or own codewords, or a flat codebook's
    other name."""
    path = tmp_path / "times.json"
    rows = [
        {"method": "default SDPA", "tokens": 256, "ms": 9.0},
        kernel_row("M64P8C8", tokens=1024, ms=7.0),
        kernel_row("M64P8C8", ms=2.0),
        kernel_row("M64P8C8", ms=3.0, keys="skewed"),
        kernel_row("M64P8C8", ms=4.0, heads=4),
        kernel_row("M64P0C0", ms=1.5, keys="uniform"),
        kernel_row("M64P8C8/own", ms=1.25),
    ]
    path.write_text(json.dumps({"environment": {"device": "GPU"}, "rows": rows}))
    shape, times = layer_errors.read_kernel_times(path, 256)
    assert shape == "B2 H8 N256 D40, GPU"
    assert times == {"M64P8C8": 2.0, "M64": 1.5, "M64P8C8/own": 1.25}
    with pytest.raises(ValueError, match="has no times of AVQ attention with 64 tokens"):
        layer_errors.read_kernel_times(path, 64)
    for text in ("nonsense", "[]", '{"rows": [{"config": "M4"}]}'):
        path.write_text(text)
        with pytest.raises(ValueError, match=r"is not a file of `python -m eval bench kernels`"):
            layer_errors.read_kernel_times(path, 256)


def test_errors_over_milliseconds_and_refined_parents():
    """Fails for a method without a time that gets one, or flat VQ among the elastic codebooks."""

    def row(method, config, effective, refined):
        figures = dict.fromkeys([*layer_errors.METRICS, "capture"], 1 / effective)
        facts = {"method": method, "config": config, "origin": "calibrated"}
        facts["is_flat"] = method == "M9"
        return {**facts, "effective_codewords": effective, "num_refined": refined, **figures}

    rows = [
        row("M8P4C2", "M8P4C2", 16, 4),
        row("M8P4C2", "M8P0C2", 8, 0),
        row("M9", "M9", 9, 0),
        {**row(EXACT, None, 1, None), "effective_codewords": None},
    ]
    assert len(layer_errors.error_panels(rows)) == 2
    times = layer_errors.KernelTimes("B1 H2", {"M8P4C2": 0.2, "M9": 0.1})
    layer_errors.add_kernel_times(rows, times)
    assert [row["kernel_ms"] for row in rows] == [0.2, None, 0.1, None]
    _, by_time, by_refined = layer_errors.error_panels(rows, times)
    assert by_time[0].xlabel == "kernel, ms (B1 H2)"
    lines = {line.label: (line.x, line.y) for line in by_time[0].lines}
    assert lines == {
        "M8P4C2, calibrated": ([0.2], [1 / 16]),
        "flat VQ, calibrated": ([0.1], [1 / 9]),
    }
    *_, captured, times = by_refined
    assert (captured.title, times.title) == ("capture", "kernel, ms")
    assert [(x.label, x.x, x.y) for x in times.lines] == [
        ("M8P4C2, calibrated", [0, 4], [None, 0.2])
    ]
    table = layer_errors.errors_table(rows).splitlines()
    assert table[0].endswith("| capture | kernel, ms |")
    assert [line.split(" | ")[-1] for line in table[2:]] == ["0.2 |", "- |", "0.1 |", "- |"]


def test_the_errors_command_with_kernel_times(folder, model, tmp_path, monkeypatch, capsys):
    times = tmp_path / "times.json"
    rows = [kernel_row("M12P3C2", ms=0.25)]
    times.write_text(json.dumps({"environment": {"device": "GPU"}, "rows": rows}))
    options = {"methods": folder, "model": model, "refined": "0,3", "images": 2, "timesteps": 1}
    options |= {"kernels": times, "output": tmp_path}
    arguments = [text for name, value in options.items() for text in (f"--{name}", value)]
    run_command(monkeypatch, "errors", *arguments)
    document = json.loads((tmp_path / "errors_levels0.json").read_text())
    assert document["kernel_times"]["shape"] == "B2 H8 N256 D40, GPU"
    rows = document["rows"]
    assert [(row["num_refined"], row["kernel_ms"]) for row in rows] == [(0, None), (3, 0.25)]
    assert rows[0]["capture"] == 0 < rows[1]["capture"]
    assert "| 0.25 |" in capsys.readouterr().out
    assert Image.open(tmp_path / "errors_levels0.png").size[1] > 900  # three rows of panels
