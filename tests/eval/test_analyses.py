"""The paper's analyses of codebooks: their variants, tables and plots."""

import json
from dataclasses import replace

import pytest
import torch
from eval_helpers import run_command
from PIL import Image
from tiny import CONFIG, draw, random_codebooks, three_level_pipe, three_level_unet

from avq_diffusers import AVQConfig, select_layers
from distill.scenes import TEST_SEEDS, sample_scene
from eval.codebooks import analyses, layer_errors
from eval.methods.prepared import Method, attention_method
from eval.store import plots

TWELVE = AVQConfig.parse("M12P3C2", levels=(0,), query_tile=16, codewords="stored")
SCENES = [sample_scene(seed) for seed in TEST_SEEDS[:2]]


@pytest.mark.parametrize("key_norm", [False, True])
def test_a_variant_is_the_codebooks_of_another_configuration(key_norm):
    """Fails for fields that reach no layer, changes or norms that are lost, or the original
    that changes as well."""
    pipe = three_level_pipe()
    config = replace(CONFIG, key_norm=key_norm)
    fields = {"query_order": "random", "query_tile": 8}
    changes = {
        layer.name: {name: 0.1 * weight for name, weight in layer.attn.named_parameters()}
        for layer in select_layers(pipe.unet, (0, 1))
    }
    method, expected = (
        Method("x", (0, 1), random_codebooks(pipe.unet, x, projection_changes=changes))
        for x in (config, replace(config, **fields))
    )
    for built in (method, expected) if key_norm else ():
        for name in built.codebooks.layer_specs:
            torch.nn.init.constant_(built.codebooks.key_norm(name).weight, 2.0)
    method = replace(method, num_refined=1)
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


def test_tiled_and_exact_importance():
    """Fails for fields in the wrong row; one importance tile that holds all parents is exact."""
    pipe = three_level_pipe()
    method = Method("x", (0,), random_codebooks(pipe.unet, TWELVE))
    analysis = analyses.ANALYSES["importance"]
    assert analysis.variants(method) == [{"importance_tile": 8}, {"importance_tile": None}]
    eight = random_codebooks(pipe.unet, replace(TWELVE, num_parents=8))
    assert analysis.variants(replace(method, codebooks=eight)) == [{"importance_tile": None}]
    tiled, exact = analyses.analyse(pipe, analysis, [method], SCENES[:1], num_timesteps=1)
    assert (tiled["importance_tile"], exact["importance_tile"]) == (8, None)
    assert tiled["overlap"] < exact["overlap"] == 1
    assert tiled["best_capture"] > tiled["capture"] != exact["capture"]
    whole = method.with_fields(importance_tile=12)
    (row,) = layer_errors.measure_errors(pipe, [whole], SCENES[:1], num_timesteps=1)
    assert row["output_error"] == pytest.approx(exact["output_error"], rel=1e-3)
    assert row["capture"] == pytest.approx(exact["capture"], rel=1e-5)


def test_orders_and_tiles():
    """Every order with every tile; a tile of all queries has no order."""
    fields = analyses.order_variants(None)
    assert {f["query_order"] for f in fields} == {"gilbert", "raster", "random"}
    assert len({tuple(f.values()) for f in fields}) == len(fields) == 18
    pipe = three_level_pipe()
    method = Method("x", (0,), random_codebooks(pipe.unet, TWELVE))
    cases = ("gilbert", 4), ("random", 4), ("gilbert", 256), ("random", 512)
    variants = [method.with_fields(query_order=order, query_tile=tile) for order, tile in cases]
    small, random, whole, again = layer_errors.measure_errors(
        pipe, variants, SCENES[:1], num_timesteps=1
    )
    assert min(small["capture"], random["capture"]) > whole["capture"]
    assert small["capture"] != random["capture"]
    assert whole["capture"] == pytest.approx(again["capture"])
    assert whole["output_error"] == pytest.approx(again["output_error"], rel=1e-4)


@pytest.fixture
def drawn(monkeypatch):
    """The axes that are drawn, in place of their files."""
    found = []
    monkeypatch.setattr(plots, "_save", lambda figure, path, **_: found.append(figure.axes))
    return found


def layer(level, figure=0, heads=()):
    names = ("commitment_loss", "quantization_error", "feature_relative_mse")
    return {"level": level, "heads": {"capture": heads}, **dict.fromkeys(names, figure)}


def test_heads_of_layers(drawn):
    """Level 1 of SDXL has other heads than level 2, so rows of a map differ in length."""
    name = "up_blocks.1.attentions.0.transformer_blocks.{}.attn1"
    layers = {name.format(0): layer(1, heads=(0.2, 0.6)), name.format(1): layer(2, heads=(1, 0, 0))}
    row = {"method": "M4", "config": "M4", "layers": layers}
    heads = analyses.ANALYSES["heads"]
    labels = [name.format(block).removesuffix(".attn1") for block in range(2)]
    assert heads.table([row]).splitlines()[2:4] == [
        f"| M4 | {labels[0]} | 1 | 0.4 | 0.2 | 0.6 |",
        f"| M4 | {labels[1]} | 2 | 0.333 | 0 | 1 |",
    ]
    heads.plot(None, [row])
    axes = drawn[0][0]
    assert [label.get_text() for label in axes.get_yticklabels()] == labels
    texts = {text.get_position(): text.get_text() for text in axes.texts}
    assert texts == {
        **{(0, 0): "0.20", (1, 0): "0.60"},
        **{(0, 1): "1.00", (1, 1): "0.00", (2, 1): "0.00"},
    }


def test_layers_are_in_the_order_in_which_they_run(drawn):
    """Fails for means over methods or levels, a layer that a method lacks, and the order of rows,
    of text or of the UNet's modules, whose middle is the last."""
    first = {
        "down_blocks.1": layer(1, 2),
        "up_blocks.2": layer(1, 1),
        "up_blocks.10": layer(0, 5),
        "mid_block": layer(2, 6),
    }
    second = {"down_blocks.0": layer(0, 3), "down_blocks.1": layer(1, 4)}
    rows = [
        {"method": name, "config": name, "layers": layers}
        for name, layers in (("M4", first), ("M8", second))
    ]
    layers = analyses.ANALYSES["layers"]
    lines = [line.split(" | ")[:4] for line in layers.table(rows).splitlines()]
    assert lines[0][3] == "commitment loss"
    assert [line[1:] for line in lines[2:9]] == [
        ["down_blocks.1", "1", "2"],
        ["mid_block", "2", "6"],
        ["up_blocks.2", "1", "1"],
        ["up_blocks.10", "0", "5"],
        ["mean of level 0", "0", "5"],
        ["mean of level 1", "1", "1.5"],
        ["mean of level 2", "2", "6"],
    ]
    assert [line[1] for line in lines[9:11]] == ["down_blocks.0", "down_blocks.1"]
    layers.plot(None, rows)
    axes = drawn[0][1]
    assert axes.get_title() == "quantization error"
    ticks = [label.get_text() for label in axes.get_xticklabels()]
    assert ticks == ["down_blocks.0", "down_blocks.1", "mid_block", "up_blocks.2", "up_blocks.10"]
    points = [line.get_xydata().tolist() for line in axes.lines]
    assert points == [[[1, 2], [2, 6], [3, 1], [4, 5]], [[0, 3], [1, 4]]]


def variant(method, **figures):
    names = {
        name for x in (analyses.IMPORTANCE, analyses.UTILISATION) for name in x.metrics.values()
    }
    known = dict.fromkeys(names, 0.5)
    return {"method": method, "config": method, "origin": "calibrated", **known, **figures}


def test_variants_as_table_and_lines():
    """Catches a flat codebook on the line of a two-level one, and exact importance that is not one
    tile of all parents."""
    rows = [
        variant("M64", num_codewords=64, active_ratio=0.9, is_flat=True),
        variant("M4P2C2", num_codewords=12, active_ratio=1.0, is_flat=False),
        variant("M16", num_codewords=16, active_ratio=0.8, is_flat=True),
    ]
    assert analyses.UTILISATION.table(rows).splitlines()[2] == "| M64 | 64 | 0.9 | 0.5 | 0.5 |"
    ratio, *others = analyses.UTILISATION.panels(rows)
    assert len(others) == 2
    assert [(x.label, x.x, x.y) for x in ratio.lines] == [
        ("flat VQ, calibrated", [16, 64], [0.8, 0.9]),
        ("AVQ, calibrated", [12], [1.0]),
    ]
    rows = [
        variant("M64P8C8", importance_tile=tile, num_parents=64, overlap=overlap)
        for tile, overlap in ((None, 1.0), (16, 0.7))
    ]
    line = "| M64P8C8 | exact | 1 | 0.5 | 0.5 | 0.5 |"
    assert analyses.IMPORTANCE.table(rows).splitlines()[2] == line
    overlap, *_ = analyses.IMPORTANCE.panels(rows)
    assert [(x.label, x.x, x.y) for x in overlap.lines] == [("M64P8C8", [16, 64], [0.7, 1.0])]


def test_the_analyse_command(model, tmp_path, monkeypatch, capsys):
    """From the command line to JSON, table and plot; stored results show those of all analyses."""
    folder = tmp_path / "codebooks"
    random_codebooks(three_level_unet(), TWELVE).save_pretrained(folder)
    options = {"methods": folder, "model": model, "images": 2, "timesteps": 1}
    options |= {"levels": "0", "output": tmp_path}
    arguments = [text for name, value in options.items() for text in (f"--{name}", value)]
    names = ["heads", "importance"]
    run_command(monkeypatch, "analyse", *names, *arguments)
    printed = capsys.readouterr().out
    for name in names:
        document = json.loads((tmp_path / f"{name}_levels0.json").read_text())
        rows = document["rows"]
        assert {row["config"] for row in rows} == {"M12P3C2"}
        assert len(rows) == {"heads": 1, "importance": 2}[name]
        assert len(rows[0]["layers"]) == 3
        assert analyses.ANALYSES[name].table(rows) in printed
        assert Image.open(tmp_path / f"{name}_levels0.png").size[0] > 300
        assert (document["num_images"], document["num_timesteps"]) == (2, 1)
