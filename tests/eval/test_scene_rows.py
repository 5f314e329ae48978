"""Rows of scenes, and runs merged over seeds."""

import json
import re
from dataclasses import replace
from functools import partial
from itertools import count

import numpy as np
import pytest
import torch
from eval_helpers import SETTINGS_2X, failed_command, prepare, run_command, scenes_run, score
from tiny import draw, random_codebooks, small_unet, tiny_pipe, tiny_unet

from avq_diffusers import AVQConfig, select_layers
from avq_diffusers.mini import TEST_SEEDS, render, sample_scene
from eval.methods import attention_method
from eval.names import EXACT, NO_ATTENTION, TOME
from eval.quality import scene_rows, scene_runs, scenes
from eval.quality.generation import Sampling
from eval.store import report


@pytest.mark.parametrize("levels", [(0,), (0, 1), (0, 1, 2)])
def test_tome_merges_its_levels(levels):
    """Fails where ToMe stays at level 0 beside methods that change level 1 or 2 as well."""
    pipe = tiny_pipe()
    (method,) = prepare(pipe, TOME, levels=levels)
    tokens = {}

    def note(attn, arguments):
        tokens[by_module[attn]] = arguments[0].shape[1]

    by_module = {layer.attn: layer.level for layer in select_layers(pipe.unet)}
    hooks = [attn.register_forward_pre_hook(note) for attn in by_module]
    draw(pipe)
    whole = dict(tokens)
    with attention_method(pipe, method):
        draw(pipe)
    for hook in hooks:
        hook.remove()
    assert [level for level in range(4) if tokens[level] == whole[level] / 2] == list(levels)
    assert all(tokens[level] == whole[level] for level in range(len(levels), 4))


@pytest.fixture
def drawn(monkeypatch):
    """Two scenes, whose images are drawn right at once."""
    shown = [sample_scene(seed) for seed in TEST_SEEDS[:2]]
    images = np.stack([render(scene, 256) for scene in shown])
    monkeypatch.setattr(scenes, "generate", lambda *positional, **options: images)
    return shown


@pytest.mark.parametrize(
    "fields",
    [{}, {"query_tile": 16, "query_order": "random"}, {"key_norm": True}],
)
def test_a_row_says_what_its_computation_has_of_its_own(tiny_scorer, drawn, tmp_path, fields):
    """Catches rows that do not tell another computation from the default one, and default ones
    that could no longer be merged with those of older files."""
    random_codebooks(tiny_unet(), AVQConfig.parse("M4P2C2", **fields)).save_pretrained(tmp_path)
    methods = [str(tmp_path), NO_ATTENTION]
    *_, row, other = score(tiny_pipe(), methods, drawn, tiny_scorer, Sampling(size=256))
    assert (row["config"], row.get("fields")) == ("M4P2C2", fields or None)
    assert "fields" not in other


def test_the_time_of_a_row_is_that_of_one_image(tiny_scorer, drawn, monkeypatch):
    """Catches the time of all images, and one with the scoring in it."""
    monkeypatch.setattr(scenes, "perf_counter", count(0, 6).__next__)
    *_, row = score(tiny_pipe(), [EXACT], drawn, tiny_scorer, Sampling(size=256))
    assert row["seconds_per_image"] == 3


@pytest.mark.long
def test_scenes_of_a_compiled_unet(tiny_scorer, monkeypatch):
    """Catches a UNet that is not compiled, or code of one method that serves the next."""
    pipe = tiny_pipe(small_unet())
    compile_unet = partial(torch.nn.Module.compile, pipe.unet, backend="eager")
    monkeypatch.setattr(pipe.unet, "compile", compile_unet, raising=False)
    shown = [sample_scene(seed) for seed in TEST_SEEDS[:2]]
    methods = [EXACT, "M4P2C2"]

    settings = Sampling(num_inference_steps=2, size=128)
    plain = score(pipe, methods, shown, tiny_scorer, settings)

    torch._dynamo.utils.counters.clear()
    settings = replace(settings, is_compiled=True, batch_size=1)
    rows = score(pipe, methods, shown, tiny_scorer, settings)

    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] >= len(methods)
    for row, expected in zip(rows, plain, strict=True):
        for name in ("fid", "clip_score", "copy_agreement"):
            assert row[name] == pytest.approx(expected[name], rel=1e-3, abs=1e-3), row["method"]
    with pytest.raises(ValueError, match="2 images are not a multiple of 64"):
        score(pipe, methods, shown, tiny_scorer, replace(settings, batch_size=64))


def test_merged_runs_are_means_with_standard_errors_over_runs():
    """The standard error of 1, 2, 6 is sqrt(7 / 3); fails for that of the images."""
    runs = [scenes_run(0, 1, clip_score=80.0), scenes_run(1, 2), scenes_run(2, 6, clip_score=100.0)]
    (row,) = scene_runs.merge_runs(runs)
    assert row["method"] == "M4"
    assert row["num_runs"] == 3
    assert (row["fid"], row["clip_score"], row["copy_agreement"]) == (3, 90, 0.5)
    assert row["fid_sem"] == pytest.approx((7 / 3) ** 0.5)
    assert row["clip_score_sem"] == pytest.approx(10 / 3**0.5)
    assert row["copy_agreement_sem"] == 0
    assert "| 3.000 ± 1.528 | - | 90.00 ± 5.77 |" in scene_rows.scenes_table([row])


def test_rows_without_a_figure_are_merged_without_it():
    """Few scenes may hold no copies; catches a traceback at their difference."""
    rows = [scenes_run(0, method=name)["rows"][0] for name in (EXACT, "M4")]
    rows[1]["copy_agreement"] = None
    merged = scene_runs.merge_runs([scenes_run(seed) | {"rows": rows} for seed in (0, 1)])
    assert merged[1]["copy_agreement"] is merged[1]["copy_agreement_less_exact"] is None
    assert merged[1]["fid_less_exact"] == 0


def test_merged_rows_have_their_differences_to_exact_attention():
    """FID is 3, 5, 4 above that of the same run: the noise, 10 to 30, cancels. Catches errors of
    the means in place of the differences, and exact attention of another run of the seed."""

    def run(seed, exact, method, fid):
        rows = [
            scenes_run(seed, x, method=name)["rows"][0]
            for name, x in ((EXACT, exact), (method, fid))
        ]
        rows += [
            scenes_run(seed, 0.0, method=x)["rows"][0] for x in (scene_rows.REAL, scene_rows.BROKEN)
        ]
        return scenes_run(seed) | {"rows": rows}

    runs = [run(0, 10, "M4", 13), run(1, 20, "M4", 25), run(2, 99, "M5", 0), run(2, 30, "M4", 34)]
    rows = {row["method"]: row for row in scene_runs.merge_runs(runs)}
    assert rows["M4"]["fid_less_exact"] == pytest.approx(4)
    assert rows["M4"]["fid_less_exact_sem"] == pytest.approx(1 / 3**0.5)
    assert rows["M4"]["clip_score_less_exact"] == rows["M4"]["copy_agreement_less_exact_sem"] == 0
    for name in (EXACT, scene_rows.REAL, scene_rows.BROKEN):
        assert rows[name]["fid_less_exact"] is None
    (line,) = scene_rows.differences_table(list(rows.values())).splitlines()[2:]
    assert line == "| M4 | - | - | +4.000 ± 0.577 | +0.000 ± 0.000 | +0.0000 ± 0.0000 |"


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ([], r"expected results of scenes with different seeds, but got seeds \[0\]"),
        ([scenes_run(0)], r"different seeds, but got seeds \[0, 0\]"),
        ([{"rows": []}], r"different seeds, but got seeds \[0, None\]"),
        ([scenes_run(1, method="M5")], "must have the same methods and images"),
        ([scenes_run(1, num_images=2)], "must have the same methods and images"),
        ([scenes_run(1, dtype="double")], "and the same num_inference_steps, dtype"),
        ([scenes_run(1) | {"size": 512}], "and the same .*size, scalecrafter"),
        ([scenes_run(1) | {"scalecrafter": True}], "and the same .*size, scalecrafter"),
        ([{**scenes_run(1), "rows": []}], "must have the same methods and images"),
        (
            [scenes_run(seed) | {"model": model} for seed, model in ((1, "a"), (2, "b"))],
            "and the same .*, model, model_sha256, scorer, scorer_sha256, guidance_scale",
        ),
        ([scenes_run(n) | {"scorer": str(n)} for n in (1, 2)], "and the same .*scorer"),
        ([scenes_run(n) | {"guidance_scale": n} for n in (1, 2)], "and the same .*guidance_scale"),
    ],
)
def test_runs_of_another_protocol_are_not_merged(other, message):
    with pytest.raises(ValueError, match=message):
        scene_runs.merge_runs([scenes_run(0), *other])


@pytest.mark.parametrize("other", [True, SETTINGS_2X | {"downsamplers": False}])
def test_runs_of_other_scalecrafter_settings_are_not_merged(other):
    """Catches settings that are not compared; a file with True is of before they were written."""
    runs = [scenes_run(seed) | {"scalecrafter": {**SETTINGS_2X}} for seed in (0, 1)]
    (row,) = scene_runs.merge_runs(runs)
    assert row["num_runs"] == 2
    with pytest.raises(ValueError, match=r"and the same .*size, scalecrafter"):
        scene_runs.merge_runs([*runs, scenes_run(2) | {"scalecrafter": other}])


@pytest.mark.parametrize(("first", "second"), [(0, 4), (4, 0), (9, 5)])
def test_runs_that_share_noise_are_not_merged(first, second):
    """Catches seeds that only differ; ranges that touch are merged."""
    runs = [scenes_run(seed, num_images=5) for seed in (first, second)]
    low = min(first, second)
    message = f"the seeds {low} to {low + 4} and {low + 4} to {low + 8}"
    with pytest.raises(ValueError, match=message):
        scene_runs.merge_runs(runs)
    (row,) = scene_runs.merge_runs([runs[0], scenes_run(first + 5, num_images=5)])
    assert row["num_runs"] == 2


def test_runs_of_one_seed_are_joined():
    """Catches a row counted twice or under another level, and one that a seed lacks."""

    def run(seed, **fids):
        rows = []
        for name, fid in fids.items():
            method, _, level = name.partition("_")
            (row,) = scenes_run(seed, fid, method=method)["rows"]
            rows.append(row | {"levels": [int(level)]})
        return scenes_run(seed) | {"rows": rows}

    runs = [
        run(0, exact_0=1.0, M4_0=2.0),
        run(0, exact_1=5.0, M4_1=3.0),
        run(1, exact_1=3.0, M4_1=5.0, M4_0=4.0, M9_0=1.0),
    ]
    rows = scene_runs.merge_runs(runs)
    found = [(*scene_rows.row_key(row), row["fid"], row["num_runs"]) for row in rows]
    assert found == [("exact", (), 2, 2), ("M4", (0,), 3, 2), ("M4", (1,), 4, 2)]
    changed = run(1, M4_0=4.0)
    changed["rows"][0]["sha256"] = "another folder"
    with pytest.raises(ValueError, match="the same methods and images"):
        scene_runs.merge_runs([*runs, changed])


def test_runs_of_older_files_are_merged():
    """Catches a file that does not say its model refused beside one that does."""
    (row,) = scene_runs.merge_runs([scenes_run(0), scenes_run(1) | {"model": "a", "scorer": "b"}])
    assert row["num_runs"] == 2


def test_the_merge_command(tmp_path, monkeypatch, capsys):
    files = [tmp_path / "a.json", tmp_path / "b.json"]
    commands = [f"python -m eval scenes --first-seed {seed}" for seed in (1, 3)]
    for file, command, fid in zip(files, commands, (1, 3), strict=True):
        run = scenes_run(seed=fid, fid=fid) | {"model": "mini-sd"}
        run["rows"] += [{**run["rows"][0], "method": "M5"}] * (fid == 3)
        report.save_json(file, command=command, device="cpu", **run)
    run_command(monkeypatch, "merge", *files, "--output", tmp_path / "both.json")
    shown = capsys.readouterr().out
    assert "| M4 | - | - | 2.000 ± 1.000 |" in shown
    assert "Left out, as not every seed has it: M5, levels []" in shown
    document = json.loads((tmp_path / "both.json").read_text())
    assert [run["command"] for run in document["runs"]] == commands
    assert not any("rows" in run for run in document["runs"])
    assert document["rows"][0]["fid"] == 2
    assert (document["model"], document["dtype"]) == ("mini-sd", "half")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ([], "x.json is not a result of python -m eval"),
        ({"command": "python -m eval table a"}, "but these are of table"),
        ({"command": "python -m eval scenes"}, "x.json is not a complete result .*'rows'"),
        ({"command": "python -m eval scenes", "rows": [1]}, "x.json is not a complete result"),
        (
            {"command": "python -m eval scenes", "rows": [], "num_images": 1},
            "x.json is not a complete result .*'first_seed'",
        ),
    ],
)
def test_the_merge_command_names_a_file_that_does_not_fit(
    tmp_path, monkeypatch, capsys, content, message
):
    """Catches a traceback, and a sentence that does not say which file it is."""
    (tmp_path / "x.json").write_text(json.dumps(content))
    code, last = failed_command(
        monkeypatch, capsys, "merge", tmp_path / "x.json", "--output", tmp_path / "y.json"
    )
    assert code == 2
    assert re.search(message, last)
    assert not (tmp_path / "y.json").exists()
