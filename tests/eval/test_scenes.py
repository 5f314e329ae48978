"""Scenes: rows at any size, runs that go on, and runs merged over seeds."""

import json
import re
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from eval_helpers import SETTINGS_2X, failed_command, run, run_command, scenes_run, score
from tiny import random_codebooks, small_unet, tiny_pipe, two_level_pipe

from avq_diffusers.extras.scalecrafter.settings import SD15_1024
from distill.scenes import TEST_SEEDS, render, sample_scene
from eval.methods.registry import EXACT, NO_ATTENTION, TOME
from eval.quality import scene_rows, scenes
from eval.quality.generation import Sampling, dilation, dilation_facts, generate
from eval.store import report


def test_rows_at_another_size(scorer, tiny_scorer, monkeypatch):
    """Fails for real images of the usual size, boxes that do not scale, other seeds than those
    from the first on, PSNR to the row before, or `exact` in the place where it was named."""
    shown = [sample_scene(seed) for seed in TEST_SEEDS[:3]]
    by_caption = {scene.caption: scene for scene in shown}
    drawn = []

    def paint(pipe, prompts, seeds, settings, *, description):
        assert list(seeds) == [7, 8, 9]
        drawn.append(description.split()[0])
        images = np.stack([render(by_caption[prompt], settings.size) for prompt in prompts])
        error = np.uint8(0 if drawn[-1] == EXACT else 3 * len(drawn))
        return np.where(images > 127, images - error, images + error)

    monkeypatch.setattr(scenes, "generate", paint)
    settings = Sampling(size=320)
    methods = [NO_ATTENTION, EXACT, TOME]
    rows = score(two_level_pipe(), methods, shown, scorer, settings, first_seed=7)
    real, broken, exact, *others = rows
    assert drawn == [row["method"] for row in rows[2:]] == [EXACT, NO_ATTENTION, TOME]
    assert [real["fid"], exact["fid"]] == pytest.approx([0, 0], abs=1e-2)
    assert broken["fid"] > 0.1
    assert real["copy_agreement"] > 0.99 < exact["copy_agreement"]
    assert abs(broken["copy_agreement"]) < 0.2
    assert exact["clip_score"] == pytest.approx(real["clip_score"])
    assert real["clip_score"] > 80
    assert 0 < real["clip_score_sem"] < 2
    assert real["num_images"] == 3
    decibels = [20 * np.log10(255 / x) for x in (6, 9)]
    assert [row["psnr_median"] for row in others] == pytest.approx(decibels)
    assert exact["psnr_median"] is exact["fid_to_exact"] is None
    # The images of exact attention are the real ones here.
    for row in others:
        assert row["fid"] == pytest.approx(row["fid_to_exact"], rel=0.01)
    table = scene_rows.scenes_table(rows).splitlines()
    assert len(table) == 2 + len(rows)
    assert f"| {broken['fid']:.3f} ± {broken['fid_sem']:.3f} |" in table[3]
    rows = score(two_level_pipe(), [TOME], shown, tiny_scorer, settings, first_seed=7)
    assert rows[2]["psnr_median"] is rows[2]["fid_to_exact"] is None


def test_a_killed_run_goes_on(tiny_scorer, monkeypatch):
    """Fails for methods that are drawn twice, or are compared with no or other images; exact
    attention's are drawn again only for a comparison."""
    shown = [sample_scene(seed) for seed in TEST_SEEDS[:3]]
    settings = Sampling(num_inference_steps=1, size=128)
    methods = [NO_ATTENTION, EXACT, TOME]
    again = partial(score, two_level_pipe(), methods, shown, tiny_scorer, settings)
    rows = again()
    drawn, fatal = [], [TOME]

    def watched(*positional, description, **options):
        drawn.append(description.split()[0])
        if drawn[-1] in fatal:
            raise KeyboardInterrupt
        return generate(*positional, description=description, **options)

    monkeypatch.setattr(scenes, "generate", watched)
    with pytest.raises(KeyboardInterrupt):
        again()
    assert drawn == [EXACT, NO_ATTENTION, fatal.pop()]
    drawn.clear()
    for number, expected in ((4, [EXACT, TOME]), (5, [])):
        finished = {row["method"]: row for row in rows[:number]}
        found = again(finished=finished)
        assert drawn == expected
        for row, before in zip(found, rows, strict=True):
            for name in before.keys() - {"seconds_per_image"}:
                assert row[name] == before[name]
        drawn.clear()


def test_the_command_goes_on(model, scorer_folder, tmp_path, monkeypatch):
    """Fails where rows are lost by a second kill, for a file that does not say its size and
    ScaleCrafter, or replaces that of another model, and for a bar that counts batches."""
    arguments = ["--model", model, "--output", tmp_path, "--images", 2, "--steps", 1]
    arguments += ["--scorer", scorer_folder, "--size", 256, "--scalecrafter"]
    code, printed, bars = run("scenes", *arguments, "--methods", "value-projection,exact")
    assert code == 0
    path = tmp_path / "scenes_tiny_levels0_256_scalecrafter.json"
    document = json.loads(path.read_text())
    rows = document["rows"]
    assert (document["size"], document["scalecrafter"]) == (256, SETTINGS_2X)
    assert f"| {rows[3]['psnr_median']:.1f} ({rows[3]['psnr_p10']:.1f}) |" in printed
    assert re.search(r"exact \(1 of 2\): 100%.* 2/2 ", bars)

    class Killed(BaseException):
        """As by a signal: no handler of errors sees it."""

    go_on = ("scenes", *arguments, "--methods", "exact,tome", "--resume")

    def killed(*positional, description, **options):
        if not description.startswith(EXACT):
            raise Killed
        return generate(*positional, description=description, **options)

    with monkeypatch.context() as patched:
        patched.setattr(scenes, "generate", killed)
        with pytest.raises(Killed):
            run_command(*go_on)
    kept = json.loads(path.read_text())["rows"]
    assert [row["method"] for row in kept] == [row["method"] for row in rows]
    run_command(*go_on)
    stored = {row["method"]: row for row in json.loads(path.read_text())["rows"]}
    assert list(stored) == [scene_rows.REAL, scene_rows.BROKEN, EXACT, TOME, NO_ATTENTION]
    assert stored[NO_ATTENTION] == rows[3]
    assert stored[TOME]["psnr_median"] > 0


def test_a_folder_trained_again_is_drawn_again(tiny_scorer, tmp_path, monkeypatch):
    """Fails where a row is kept by the name of its folder."""
    shown = [sample_scene(seed) for seed in TEST_SEEDS[:2]]
    settings = Sampling(num_inference_steps=1, size=128)
    pipe = two_level_pipe()
    random_codebooks(pipe.unet).save_pretrained(tmp_path)
    again = partial(score, pipe, [str(tmp_path)], shown, tiny_scorer, settings)
    rows = {row["method"]: row for row in again()}
    random_codebooks(pipe.unet, seed=1).save_pretrained(tmp_path)
    *_, row = again(finished=rows)
    assert row["sha256"] != rows[str(tmp_path)]["sha256"]
    monkeypatch.setattr(scenes, "generate", lambda *_, **__: pytest.fail("drawn once more"))
    assert again(finished={row["method"]: row})[-1] is row


@pytest.mark.parametrize(
    ("changed", "named"),
    [({"images": 3}, "images (2, now 3)"), ({"commit": "b"}, "commit (a, now b)")],
)
def test_only_the_same_run_goes_on(changed, named):
    row = {"method": "M4"}
    stored = {"images": 2, "environment": {"commit": "a", "date": "then"}}
    stored |= {"rows": [row]}
    same = {"images": 2, "commit": "a", "date": "now"}
    assert scene_rows.finished_rows(stored, same) == {"M4": row}
    with pytest.raises(ValueError, match=re.escape(f"differs in {named}; start again")):
        scene_rows.finished_rows(stored, same | changed)


def test_sizes_are_refused_before_the_work():
    pipe, settings = two_level_pipe(), Sampling(size=192, is_dilated=True)
    pipe.unet.register_forward_pre_hook(lambda *_: pytest.fail("something was drawn"))
    with pytest.raises(ValueError, match="there are ScaleCrafter settings for 256 x 256"):
        score(pipe, ["M4/stored"], [sample_scene(0)], None, settings)


def test_dilation_is_applied_and_told():
    """Fails where a row that is not dilated is, or facts are not those that JSON gives back."""
    pipe = two_level_pipe()
    plain, dilated = (Sampling(size=256, is_dilated=is_dilated) for is_dilated in (False, True))
    with dilation(pipe, dilated):
        assert pipe.unet._scalecrafter.config is SD15_1024
    with dilation(pipe, plain):
        assert not hasattr(pipe.unet, "_scalecrafter")
    assert dilation_facts(pipe, plain) is False
    facts = dilation_facts(pipe, dilated)
    assert json.loads(json.dumps(facts)) == facts == SETTINGS_2X  # else no run could be resumed
    with pytest.raises(ValueError, match="ScaleCrafter needs a size"):
        dilation(pipe, Sampling(is_dilated=True))


@pytest.mark.long
def test_scenes_of_a_compiled_unet(tiny_scorer, monkeypatch):
    """Catches a UNet that is not compiled, or code of one method that serves the next."""
    pipe = tiny_pipe(small_unet())
    compile_unet = partial(torch.nn.Module.compile, pipe.unet, backend="eager")
    monkeypatch.setattr(pipe.unet, "compile", compile_unet, raising=False)
    shown = [sample_scene(seed) for seed in TEST_SEEDS[:2]]
    methods = [EXACT, "M4P2C2/stored"]

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


def rows_run(seed, *rows):
    """A run of such rows: method, FID, and further fields."""
    made = [scenes_run(seed, fid, method=x)["rows"][0] | fields for x, fid, fields in rows]
    return scenes_run(seed) | {"rows": made}


def test_merged_rows_are_means_and_differences_with_standard_errors_over_seeds():
    """The standard error of 1, 2, 6 is sqrt(7 / 3). FID is 3, 5, 4 above that of exact attention in
    the same run, whose noise, 10 to 30, cancels. Fails for errors of the images or of the means, a
    mean over those runs that have a figure, and exact attention of another run of the seed."""
    full, lacking = {"psnr_median": 30.0, "psnr_p10": 29.0}, {"psnr_median": 33.0, "psnr_p10": None}
    controls = [(name, 0.0, {}) for name in (scene_rows.REAL, scene_rows.BROKEN)]
    runs = [
        rows_run(0, (EXACT, 10, {}), ("M4", 13, full), ("M5", 1, {}), *controls),
        rows_run(1, (EXACT, 20, {}), ("M4", 25, lacking), ("M5", 2, {}), *controls),
        rows_run(2, (EXACT, 99, {}), ("M5", 6, {})),
        rows_run(2, (EXACT, 30, {}), ("M4", 34, full), ("M5", 9, {}), *controls),
    ]
    rows = {row["method"]: row for row in scene_rows.merge_runs(runs)}
    m4, m5 = rows["M4"], rows["M5"]
    assert (m5["fid"], m5["num_runs"]) == (3, 3)
    assert m5["fid_sem"] == pytest.approx((7 / 3) ** 0.5)
    assert m5["clip_score_sem"] == 0
    assert m4["fid_less_exact"] == pytest.approx(4)
    assert m4["fid_less_exact_sem"] == pytest.approx(1 / 3**0.5)
    assert m4["psnr_median_sem"] == pytest.approx(1)
    assert m4["psnr_p10"] is m4["psnr_p10_sem"] is None
    for name in (EXACT, scene_rows.REAL, scene_rows.BROKEN):
        assert rows[name]["fid_less_exact"] is None
    few = m5 | {"psnr_median": 33.0, "psnr_median_sem": float("nan")}  # of too few images
    line = "| M5 | - | - | 3.000 ± 1.528 | - | 90.00 ± 0.00 | 0.500 ± 0.000 | 33.0 |"
    assert scene_rows.scenes_table([few]).endswith(line)
    line, _ = scene_rows.differences_table(list(rows.values())).splitlines()[2:]
    assert line == "| M4 | - | - | +4.000 ± 0.577 | +0.000 ± 0.000 | +0.0000 ± 0.0000 |"


def test_runs_of_one_seed_are_joined():
    """Catches a row counted twice or under another level, and one that a seed lacks."""
    low, high = {"levels": [0]}, {"levels": [1]}
    runs = [
        rows_run(0, (EXACT, 1.0, low), ("M4", 2.0, low)),
        rows_run(0, (EXACT, 5.0, high), ("M4", 3.0, high)),
        rows_run(1, (EXACT, 3.0, high), ("M4", 5.0, high), ("M4", 4.0, low), ("M9", 1.0, low)),
    ]
    rows = scene_rows.merge_runs(runs)
    found = [(*scene_rows.row_key(row), row["fid"], row["num_runs"]) for row in rows]
    assert found == [("exact", (), 2, 2), ("M4", (0,), 3, 2), ("M4", (1,), 4, 2)]
    changed = rows_run(1, ("M4", 4.0, low | {"sha256": "another folder"}))
    with pytest.raises(ValueError, match="the same methods and images"):
        scene_rows.merge_runs([*runs, changed])


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ([scenes_run(0)], r"different seeds, but got seeds \[0, 0\]"),
        ([{"rows": []}], r"different seeds, but got seeds \[0, None\]"),
        ([scenes_run(1, method="M5")], "must have the same methods and images"),
        ([scenes_run(1, dtype="double")], "and the same num_inference_steps, dtype"),
        ([scenes_run(1) | {"scalecrafter": SETTINGS_2X}], "and the same .*size, scalecrafter"),
        (
            [scenes_run(seed) | {"model": model} for seed, model in ((1, "a"), (2, "b"))],
            "and the same .*, model, model_sha256, scorer, scorer_sha256, guidance_scale",
        ),
    ],
)
def test_runs_of_another_protocol_are_not_merged(other, message):
    with pytest.raises(ValueError, match=message):
        scene_rows.merge_runs([scenes_run(0), *other])


def test_runs_that_share_noise_are_not_merged():
    """Catches seeds that only differ; ranges that touch are merged."""
    first, second, third = (scenes_run(seed, num_images=5) for seed in (0, 4, 5))
    with pytest.raises(ValueError, match="the seeds 0 to 4 and 4 to 8"):
        scene_rows.merge_runs([second, first])
    assert len(scene_rows.merge_runs([first, third])) == 1


def test_the_merge_command(tmp_path):
    """Catches rows that vanish from a table without a word."""
    files = [tmp_path / "a.json", tmp_path / "b.json"]
    commands = [f"python -m eval scenes --first-seed {seed}" for seed in (1, 3)]
    for file, command, fid in zip(files, commands, (1, 3), strict=True):
        run = scenes_run(seed=fid, fid=fid)
        run |= {"model": "mini-sd"}
        run["rows"] += [{**run["rows"][0], "method": "M5"}] * (fid == 3)
        report.save_json(file, command=command, device="cpu", **run)
    shown = run_command("merge", *files, "--output", tmp_path / "both.json")
    assert "| M4 | - | - | 2.000 ± 1.000 |" in shown
    assert "No differences without `exact` in the same files: M4\n" in shown
    assert "Left out because a seed lacks it: M5, levels []" in shown
    document = json.loads((tmp_path / "both.json").read_text())
    assert [run["command"] for run in document["runs"]] == commands
    assert not any("rows" in run for run in document["runs"])
    assert document["rows"][0]["fid"] == 2
    assert (document["model"], document["dtype"]) == ("mini-sd", "half")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ([], "x.json is not a result from python -m eval"),
        (
            {"command": "python -m eval merge a"},
            "x.json is not a result from python -m eval scenes",
        ),
        ({"command": "python -m eval scenes", "rows": [1]}, "x.json is not a complete result"),
    ],
)
def test_the_merge_command_names_a_file_that_does_not_fit(tmp_path, content, message):
    """Catches a traceback, and a sentence that does not say which file it is."""
    (tmp_path / "x.json").write_text(json.dumps(content))
    last = failed_command("merge", tmp_path / "x.json", "--output", tmp_path / "y.json")
    assert re.search(message, last)
    assert not (tmp_path / "y.json").exists()
