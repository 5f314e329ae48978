"""Scenes at any size, the table of quality and speed, and plots drawn from stored results."""

import json
import re
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
from diffusers import StableDiffusionPipeline
from eval_helpers import SETTINGS_2X, run_command, scenes_run, score
from PIL import Image
from tiny import random_codebooks, tiny_pipe, tiny_unet

from avq_diffusers import scalecrafter
from avq_diffusers.extras.scalecrafter.settings import MINI_SCALECRAFTER, SD15_1024, SD15_2048
from avq_diffusers.mini import MINI_SD, TEST_SEEDS, render, sample_scene
from eval.benchmarks.step_rows import MODES, MODES_WITHOUT_GRAPHS
from eval.benchmarks.unet import plot_unet
from eval.commands.stored import PLOTS, draw
from eval.methods import attention_method, prepare_methods
from eval.names import EXACT, NO_ATTENTION, TOME
from eval.quality import scene_rows, scene_runs, scenes
from eval.quality.compare import compare_sheet
from eval.quality.generation import Sampling, dilation, dilation_facts, generate
from eval.quality.method_table import build_table, quality_table, table_panels
from eval.quality.metrics import psnr
from eval.store import plots
from eval.store.plots import (
    COLOURS,
    MARKERS,
    HeatMap,
    Line,
    Panel,
    bar_plot,
    heat_maps,
    panel_plot,
)
from eval.store.report import Result, save_json


@pytest.fixture(scope="module")
def codebooks(tmp_path_factory):
    """A folder of codebooks of levels 0 and 1 for this model."""
    folder = tmp_path_factory.mktemp("codebooks")
    random_codebooks(tiny_unet()).save_pretrained(folder)
    return str(folder)


class TestScenes:
    def test_the_command_at_twice_the_size(
        self, model, codebooks, scorer_folder, tmp_path, monkeypatch, capsys
    ):
        """Fails for images that are not dilated, of another size, or PSNR to other images."""
        places = ["--model", model, "--output", tmp_path, "--methods", f"{codebooks},exact"]
        counts = ["--images", 2, "--steps", 2, "--batch", 2, "--scorer", scorer_folder]
        run_command(monkeypatch, "scenes", *places, *counts, "--scalecrafter")
        document = json.loads((tmp_path / "scenes_levels0_scalecrafter.json").read_text())
        assert (document["size"], document["scalecrafter"]) == (256, SETTINGS_2X)
        names = [scene_rows.REAL, scene_rows.BROKEN, EXACT, codebooks]
        assert [row["method"] for row in document["rows"]] == names
        _, _, exact, avq = document["rows"]
        assert exact["psnr_median"] is exact["psnr_p10"] is None
        assert exact["seconds_per_image"] > 0

        pipe = StableDiffusionPipeline.from_pretrained(model)
        captions = [sample_scene(seed).caption for seed in TEST_SEEDS[:2]]
        (method,) = prepare_methods(pipe, [codebooks], levels=(0,), calibration_prompts=())
        settings = Sampling(num_inference_steps=2, batch_size=2, size=256)
        with scalecrafter(pipe, 256, 256):
            expected = generate(pipe, captions, range(2), settings)
            with attention_method(pipe, method):
                images = generate(pipe, captions, range(2), settings)
        assert expected.shape == (2, 256, 256, 3)
        values = psnr(images, expected)
        assert avq["psnr_median"] == pytest.approx(values.mean(), abs=0.1)
        assert avq["psnr_p10"] == pytest.approx(values.min(), abs=0.1)
        undilated = psnr(generate(pipe, captions, range(2), settings), expected)
        assert undilated.max() < values.min() - 1
        assert f"| {avq['psnr_median']:.1f} ({avq['psnr_p10']:.1f}) |" in capsys.readouterr().out

    def test_rows_at_another_size(self, scorer, monkeypatch):
        """Fails for real images of the usual size, boxes that do not scale, other seeds than those
        from the first on, PSNR to the row before, or `exact` in the place where it was named."""
        shown = [sample_scene(seed) for seed in TEST_SEEDS[:3]]
        by_caption = {scene.caption: scene for scene in shown}
        drawn = []

        def paint(pipe, prompts, seeds, settings, *, description):
            assert list(seeds) == [7, 8, 9]
            drawn.append(description)
            images = np.stack([render(by_caption[prompt], settings.size) for prompt in prompts])
            error = np.uint8(0 if description == EXACT else 3 * len(drawn))
            return np.where(images > 127, images - error, images + error)

        monkeypatch.setattr(scenes, "generate", paint)
        settings = Sampling(size=320)
        methods = [NO_ATTENTION, EXACT, TOME]
        rows = score(tiny_pipe(), methods, shown, scorer, settings, first_seed=7)
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
        rows = score(tiny_pipe(), [TOME], shown, scorer, settings, first_seed=7)
        assert rows[2]["psnr_median"] is rows[2]["fid_to_exact"] is None

    def test_a_killed_run_goes_on(self, tiny_scorer, monkeypatch):
        """Fails for methods that are drawn twice, or are compared with no or other images."""
        shown = [sample_scene(seed) for seed in TEST_SEEDS[:3]]
        settings = Sampling(num_inference_steps=1, size=128)
        methods = [NO_ATTENTION, EXACT, TOME]
        again = partial(score, tiny_pipe(), methods, shown, tiny_scorer, settings)
        rows = again()
        drawn = []

        def watched(*positional, description, **options):
            drawn.append(description)
            return generate(*positional, description=description, **options)

        monkeypatch.setattr(scenes, "generate", watched)
        for number, expected in ((4, [EXACT, TOME]), (5, [])):
            finished = {row["method"]: row for row in rows[:number]}
            found = again(finished=finished)
            assert drawn == expected
            for row, before in zip(found, rows, strict=True):
                for name in before.keys() - {"seconds_per_image"}:
                    assert row[name] == before[name]
            drawn.clear()

    def test_the_command_goes_on(self, model, scorer_folder, tmp_path, monkeypatch, capsys):
        """Fails where rows are lost by a second kill, or a file of other images is taken."""
        arguments = ["--model", model, "--output", tmp_path, "--images", 2, "--steps", 1]
        arguments += ["--scorer", scorer_folder]
        run_command(monkeypatch, "scenes", *arguments, "--methods", "exact,value-projection")
        path = tmp_path / "scenes_levels0.json"
        rows = json.loads(path.read_text())["rows"]

        class Killed(BaseException):
            pass

        def killed(*_, **__):
            raise Killed

        go_on = ("scenes", *arguments, "--methods", "exact,tome", "--resume")
        with monkeypatch.context() as patched:
            patched.setattr(scenes, "generate", killed)
            with pytest.raises(Killed):
                run_command(monkeypatch, *go_on)
        stored = json.loads(path.read_text())["rows"]
        assert [row["method"] for row in stored] == [row["method"] for row in rows]
        run_command(monkeypatch, *go_on)
        stored = {row["method"]: row for row in json.loads(path.read_text())["rows"]}
        assert list(stored) == [scene_rows.REAL, scene_rows.BROKEN, EXACT, TOME, NO_ATTENTION]
        assert stored[NO_ATTENTION] == rows[3]
        assert stored[TOME]["psnr_median"] > 0

    def test_a_folder_trained_again_is_drawn_again(self, tiny_scorer, tmp_path, monkeypatch):
        """Fails where a row is kept by the name of its folder."""
        shown = [sample_scene(seed) for seed in TEST_SEEDS[:2]]
        settings = Sampling(num_inference_steps=1, size=128)
        pipe = tiny_pipe()
        random_codebooks(pipe.unet).save_pretrained(tmp_path)
        again = partial(score, pipe, [str(tmp_path)], shown, tiny_scorer, settings)
        rows = {row["method"]: row for row in again()}
        random_codebooks(pipe.unet, seed=1).save_pretrained(tmp_path)
        *_, row = again(finished=rows)
        assert row["sha256"] != rows[str(tmp_path)]["sha256"]
        monkeypatch.setattr(scenes, "generate", lambda *_, **__: pytest.fail("drawn once more"))
        assert again(finished={row["method"]: row})[-1] is row

    @pytest.mark.parametrize(
        ("protocol", "environment", "named"),
        [
            ({"images": 3}, {"commit": "a"}, "images (2, now 3)"),
            ({"images": 2}, {"commit": "b"}, "commit (a, now b)"),
        ],
    )
    def test_only_the_same_run_goes_on(self, protocol, environment, named):
        row = {"method": "M4"}
        stored = {"images": 2, "rows": [row], "environment": {"commit": "a", "date": "then"}}
        same = ({"images": 2}, {"commit": "a", "date": "now"})
        assert scene_runs.finished_rows(stored, *same) == {"M4": row}
        with pytest.raises(ValueError, match=re.escape(f"differs in {named}; start again")):
            scene_runs.finished_rows(stored, protocol, environment)

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"size": 500}, "the size must be a multiple of 64, but got 500"),
            ({}, "the size must be a multiple of 64, but got None"),
            ({"size": 0}, "the size must be a multiple of 64, but got 0"),
            ({"size": 128, "is_dilated": True}, "larger than the training size, 128"),
            ({"size": 192, "is_dilated": True}, "there are ScaleCrafter settings for 256 x 256"),
        ],
    )
    def test_sizes_are_refused_before_the_work(self, options, message):
        pipe = tiny_pipe()
        pipe.unet.register_forward_pre_hook(lambda *_: pytest.fail("something was drawn"))
        with pytest.raises(ValueError, match=message):
            score(pipe, ["M4"], [sample_scene(0)], None, Sampling(**options))

    def test_mini_sd_has_settings_of_its_own(self):
        """Fails where SD1.5's are taken, or mini-sd's for other models."""
        mini = StableDiffusionPipeline.from_pretrained(MINI_SD)
        cases = (
            (mini, 512, MINI_SCALECRAFTER),
            (mini, 1024, SD15_2048),
            (tiny_pipe(), 256, SD15_1024),
        )
        for pipe, size, config in cases:
            with dilation(pipe, Sampling(size=size, is_dilated=True)):
                assert pipe.unet._scalecrafter.config is config
            with dilation(pipe, Sampling(size=size)):
                assert not hasattr(pipe.unet, "_scalecrafter")
            assert dilation_facts(pipe, Sampling(size=size)) is False
        facts = dilation_facts(mini, Sampling(size=512, is_dilated=True))
        assert facts["downsamplers"] is False
        assert json.loads(json.dumps(facts)) == facts  # else no run could be resumed
        with pytest.raises(ValueError, match="ScaleCrafter needs a size"):
            dilation(mini, Sampling(is_dilated=True))


class TestMerge:
    def test_psnr_and_time_are_averaged(self):
        """Fails for errors over images, or a mean over those runs that have a figure."""
        runs = [scenes_run(seed) for seed in range(3)]
        for run, decibels in zip(runs, (30.0, 33.0, 36.0), strict=True):
            run["rows"][0] |= {"psnr_median": decibels, "seconds_per_image": 0.5}
            run["rows"][0]["psnr_p10"] = None if decibels == 33 else decibels
        (row,) = scene_runs.merge_runs(runs)
        assert row["psnr_median"] == 33
        assert row["psnr_median_sem"] == pytest.approx(3 / 3**0.5)
        assert row["psnr_p10"] is row["psnr_p10_sem"] is None
        assert row["seconds_per_image"] == 0.5
        assert scene_rows.scenes_table([row]).endswith("| 33.0 ± 1.7 |")
        few = row | {"psnr_median_sem": float("nan")}  # of too few images
        assert scene_rows.scenes_table([few]).endswith("| 33.0 |")


def quality_row(method, config=None, origin=None, levels=(0,), **figures):
    facts = {"config": config, "origin": origin, "levels": list(levels)}
    facts["effective_codewords"] = 192 if config == "M64P16C8" else None
    return {"method": method, **facts, "num_images": 5, **figures}


def quality(rows, *, kind="scenes", size=256, seed=0, **changes):
    document = {"command": f"python -m eval {kind} --x", "first_seed": seed, "size": size}
    document |= {"scalecrafter": size > 256, "num_inference_steps": 25, "dtype": "half"}
    return {**document, "rows": rows, **changes}


def speed(times, *, size=512, unet="SD1.5", **changes):
    rows = [{"size": size, "mode": "graph", "method": m, "ms": ms} for m, ms in times.items()]
    environment = {"device": "GPU"}
    document = {"command": "python -m eval bench unet", "environment": environment, "unet": unet}
    return {**document, "mode": "in a graph", "rows": rows, **changes}


def result(document, name="a.json"):
    """As `read_result` gives it, but not from a file."""
    words = document["command"].split()
    kind = " ".join(words[3:5]) if words[3] == "bench" else words[3]
    return Result(SimpleNamespace(name=name, __str__=lambda self: name), kind, document)


METRICS = {"fid": 20.0, "fid_sem": 0.5, "clip_score": 90.0, "copy_agreement": 0.75}
FOLDER = "runs/m64/codebooks"
BUT_ONE = "runs/but-one/codebooks"
SMALL, LARGE = "256²", "512², ScaleCrafter"
TIMES = "512² (SD1.5; in a graph)"


@pytest.fixture
def table():
    distilled = (FOLDER, "M64P16C8", "distilled")
    small = [
        {"method": scene_rows.REAL, "num_images": 5, **METRICS},
        quality_row(EXACT, **METRICS),
        quality_row("M64P16C8", "M64P16C8", "calibrated", **METRICS),
        quality_row(*distilled, fid=21.0, clip_score=89.0, psnr_median=40.0),
        quality_row(f"{FOLDER}@P8", "M64P8C8", "distilled", **METRICS),
        quality_row("tome", **METRICS),
        quality_row("tome", levels=(0, 1), **METRICS),
        quality_row(BUT_ONE, "M64P16C8, up_blocks.1 exact", "calibrated", (0, 1), **METRICS),
        quality_row("value-projection", **METRICS),
        quality_row("runs/linear", "LinFusion", "distilled", (0, 1, 2), **METRICS),
        quality_row("runs/linear-01", "LinFusion", "distilled", (0, 1), **METRICS),
        quality_row("M4", "M4", "calibrated", **METRICS),
        quality_row("M64P16C8/own", "M64P16C8/own", "own", **METRICS),
    ]
    both = [quality_row(EXACT, levels=(0, 1), fid=99.0), quality_row(*distilled, (0, 1), fid=22.0)]
    large = [quality_row(EXACT, fid=30.0, clip_score=80.0), quality_row(*distilled, fid=31.0)]
    timed = {"exact": 10.0, "limit": 5.0, "M64P16C8": 6.0, "M64P16C8@L0": 7.0, "tome": 8.0}
    timed |= {"M64P16C8/fastest": 6.5, "M64P8C8@L0/tuned": None, "M4": 5.5, "M4@L0": 5.25}
    timed |= {"linfusion": 9.0, "tome@L01": 8.5, "M64P16C8-up_blocks.1": 6.25}
    timed |= {"M64P16C8@L0/own": 6.75, "M64P16C8@L0/own1": 6.875}
    timed |= {"M64P16C8/tuned": 6.125, "M64P16C8@L0/tuned": 7.5, "M4@L0/tuned": 5.375}
    documents = [
        speed(timed),
        quality(small),
        quality(both),
        quality(large, kind="merge", size=512, runs=[{"first_seed": 0}, {"first_seed": 5}]),
        speed({"exact": 40.0, "M64P16C8@L0": 28.0, "M64P16C8@L0/tuned": 29.0}, size=1024),
        speed({"exact": 3.0}, unet="mini-sd"),
    ]
    return build_table([result(document) for document in documents])


class TestTable:
    def test_times_belong_to_what_runs(self, table):
        """Fails for a join by name: of folders, levels, the default route, exact, projections, own
        codewords."""
        times = {(row["method"], *row["levels"]): row["ms"].get(TIMES) for row in table["rows"]}
        assert times == {
            (scene_rows.REAL,): None,
            (EXACT,): 10,
            ("M64P16C8", 0): 7,
            (FOLDER, 0): 7.5,
            (f"{FOLDER}@P8", 0): None,  # measured, and wrong
            ("tome", 0): 8,
            ("tome", 0, 1): 8.5,
            (BUT_ONE, 0, 1): 6.25,
            ("value-projection", 0): None,
            ("runs/linear", 0, 1, 2): 9,
            ("runs/linear-01", 0, 1): None,  # not in every self-attention, which was timed
            ("M4", 0): 5.25,
            ("M64P16C8/own", 0): 6.75,
            ("AVQ 64/16/8, own codewords, 1 update, level 0", 0): 6.875,
            (FOLDER, 0, 1): 6.125,
            ("limit",): 5,
            ("AVQ 64/16/8", 0, 1): 6,
            ("AVQ 64/16/8, fastest route", 0, 1): 6.5,
            ("VQ 4", 0, 1): 5.5,
            ("VQ 4, level 0, tuned projections", 0): 5.375,
        }
        (exact,) = (row for row in table["rows"] if row["method"] == EXACT)
        other_times = {"1024² (SD1.5; in a graph)": 40, "512² (mini-sd; in a graph)": 3}
        assert exact["ms"] == {TIMES: 10, **other_times}

    def test_quality_stands_by_size(self, table):
        """Fails where a size overwrites another, or a later file a row that is there."""
        rows = {(row["method"], *row["levels"]): row["quality"] for row in table["rows"]}
        assert rows[EXACT,][SMALL] == METRICS
        assert {size: figures["fid"] for size, figures in rows[EXACT,].items()} == {
            SMALL: 20,
            LARGE: 30,
        }
        assert {size: figures["fid"] for size, figures in rows[FOLDER, 0].items()} == {
            SMALL: 21,
            LARGE: 31,
        }
        assert rows[FOLDER, 0, 1] == {SMALL: {"fid": 22}}
        assert rows["limit",] == {}
        assert table["quality"][LARGE]["first_seeds"] == [0, 5]

    def test_markdown(self, table):
        lines = quality_table(table).splitlines()
        cells = {line.split(" | ")[0]: line.split(" | ") for line in lines}
        assert len({len(line.split(" | ")) for line in (lines[0], *lines[2:])}) == 1
        assert cells[f"| {EXACT}"][1:7] == ["-", "-", "20.000 ± 0.500", "-", "90.00", "0.750"]
        assert cells[f"| {EXACT}"][-3:] == ["10", "40", "3 |"]
        assert cells["| M64P16C8"][1:3] == ["192", "0"]
        assert cells["| AVQ 64/16/8"][1:3] == ["192", "0, 1"]
        assert cells["| limit"][1:-3] == ["-"] * (len(cells["| limit"]) - 4)
        start = f"| {FOLDER} (M64P16C8) | 192 | 0, 1 | 22.000 | - | - | - | - | - |"
        assert any(line.startswith(start) for line in lines)

    def test_panels(self, table):
        """Fails for a row without time or figure that is drawn, or labels that are the same."""
        (fid, clip, psnr), (fid_large, clip_large, _) = table_panels(table)
        assert [(line.label, *line.x, *line.y) for line in fid.lines] == [
            (EXACT, 10, 20),
            ("M64P16C8, calibrated", 7, 20),
            ("M64P16C8, distilled, level 0", 7.5, 21),
            ("tome, level 0", 8, 20),
            ("tome, level 0+1", 8.5, 20),
            ("M64P16C8, up_blocks.1 exact, calibrated", 6.25, 20),
            ("LinFusion, distilled, level 0+1+2", 9, 20),
            ("M4, calibrated", 5.25, 20),
            ("M64P16C8/own, own", 6.75, 20),
            ("M64P16C8, distilled, level 0+1", 6.125, 22),
        ]
        assert [line.errors[0] for line in fid.lines] == [0.5, 0.5, 0, *[0.5] * 6, 0]
        assert {line.errors[0] for line in clip.lines} == {0}  # it has none; those are of FID
        assert (fid.reference, clip.reference, fid_large.reference) == (20, 90, 30)
        assert [line.y[0] for line in clip.lines] == [90, 90, 89, *[90] * 6]
        assert [line.x[0] for line in clip_large.lines] == [10]
        assert [(line.x, line.y) for line in psnr.lines] == [([7.5], [40])]
        assert psnr.reference is None
        fid, *_ = table_panels(table, 1024)[0]
        assert [line.x[0] for line in fid.lines] == [40, 28, 29]

    def test_panels_show_the_times_of_the_images_own_size(self):
        """Catches small images over the times of large ones, where the methods differ more."""
        documents = [quality([quality_row(EXACT, **METRICS)], size=side) for side in (256, 512, 64)]
        times = ((1024, 40.0), (512, 10.0), (256, 3.0))
        documents += [speed({"exact": milliseconds}, size=side) for side, milliseconds in times]
        table = build_table([result(document, f"{i}.json") for i, document in enumerate(documents)])
        rows = table_panels(table)
        assert [fid.lines[0].x[0] for fid, *_ in rows] == [3, 10, 40]
        assert [fid.xlabel for fid, *_ in rows] == [
            f"UNet step, ms, at {side}² (SD1.5; in a graph)" for side in (256, 512, 1024)
        ]
        assert [fid.lines[0].x[0] for fid, *_ in table_panels(table, 512)] == [10, 10, 10]

    def test_panels_of_a_size_that_is_not_there(self, table):
        with pytest.raises(ValueError, match=r"has 2 of scenes and times at the sizes \[512, 1024"):
            table_panels(table, 2048)
        table = build_table([result(speed({"exact": 1.0}))])
        with pytest.raises(ValueError, match="has 0 of scenes"):
            table_panels(table)

    @pytest.mark.parametrize(
        ("document", "message"),
        [
            ({"command": "python -m eval errors"}, "a table is made of results of scenes, "),
            (quality([quality_row(EXACT)], seed=1), "other seeds; average seeds by merge first"),
            (quality([quality_row(EXACT)], dtype="x"), "have images of 256², but are of another"),
            (
                {"command": "python -m eval scenes", "rows": []},
                "does not say the size of its images; make it again: python -m eval scenes",
            ),
            (quality([]), "b.json.* is not a complete result .IndexError"),
            (
                quality([{"method": EXACT}]),
                "b.json.* is not a complete result .KeyError: 'num_images",
            ),
            (speed({}, rows=[{"size": 64}]), "b.json.* is not a complete result .KeyError: 'mode'"),
            (speed({"exact": 1.0}), "a.json both have the times of 512"),
            (speed({"M5P6C7@0": 1.0}, size=64), "names an unknown method: .*'M5P6C7@0'"),
        ],
    )
    def test_what_does_not_fit_is_refused(self, document, message):
        fitting = [quality([quality_row(EXACT)]), speed({"exact": 1.0})]
        documents = [*map(result, fitting), result(document, "b.json")]
        with pytest.raises(ValueError, match=message):
            build_table(documents)

    def test_a_folder_that_has_changed_is_refused(self):
        """Catches codebooks of before and after a training in one row, also behind a file that
        does not say which they are."""
        silent, small, large = (
            result(quality([quality_row("runs/a", "M4", sha256=digest)], size=size), f"{size}.json")
            for size, digest in ((128, None), (256, "old"), (512, "new"))
        )
        for said in ([silent, small], [small, silent]):
            (row,) = build_table(said)["rows"]
            assert row["sha256"] == "old"
            with pytest.raises(ValueError, match=r"has images of runs/a as it is at anoth"):
                build_table([*said, large])

    def test_a_column_says_whether_its_images_were_dilated(self):
        documents = [
            quality([quality_row(EXACT)], size=512, scalecrafter=used) for used in (False, True)
        ]
        assert list(build_table(list(map(result, documents)))["quality"]) == ["512²", LARGE]

    def test_a_column_has_one_kind_of_dilation(self):
        """Catches rows of other settings beside those of ScaleCrafter's present ones."""
        used = (SETTINGS_2X, SETTINGS_2X, SETTINGS_2X | {"downsamplers": False})
        documents = [quality([quality_row(EXACT)], size=512, scalecrafter=x) for x in used]
        first, same, other = map(result, documents)
        assert list(build_table([first, same])["quality"]) == [LARGE]
        with pytest.raises(ValueError, match="are of another protocol or other seeds"):
            build_table([first, other])

    @pytest.mark.parametrize("name", ["model", "scorer", "guidance_scale"])
    def test_what_makes_images_must_agree(self, name):
        """Catches a column of two models; a file that does not say hides none of the others."""
        documents = [quality([quality_row(EXACT)], **said) for said in ({}, {name: 1}, {name: 2})]
        silent, first, second = map(result, documents)
        assert build_table([silent, first])["quality"][SMALL][name] == 1
        assert build_table([first, silent])["quality"][SMALL][name] == 1
        with pytest.raises(ValueError, match="are of another protocol or other seeds"):
            build_table([silent, first, second])

    def test_times_are_those_of_the_same_fields(self):
        """Catches a time of the default computation beside a row of another one."""
        rows = [
            quality_row(name, "M64P16C8", "distilled", fields=fields)
            for name, fields in (("a", {}), ("b", {"query_tile": 16}))
        ]
        table = build_table(
            [result(quality(rows)), result(speed({"M64P16C8@L0/tuned": 7.0}), "b.json")]
        )
        assert [row["ms"].get(TIMES) for row in table["rows"]] == [7.0, None]

    def test_the_commands(self, tmp_path, monkeypatch, capsys):
        """From files to table.json, and from that to its plot at a size."""
        documents = {"a": quality([quality_row(EXACT, **METRICS)]), "b": speed({"exact": 10.0})}
        documents["c"] = speed({"exact": 40.0}, size=1024)
        files = [tmp_path / f"{name}.json" for name in documents]
        for file, document in zip(files, documents.values(), strict=True):
            file.write_text(json.dumps(document))
        run_command(monkeypatch, "table", *files, "--output", tmp_path)
        table = json.loads((tmp_path / "table.json").read_text())
        assert quality_table(table) in capsys.readouterr().out
        plots = []
        for options in ([], ["--size", "512"], ["--size", "1024"]):
            run_command(monkeypatch, "plot", tmp_path / "table.json", *options)
            plots.append((tmp_path / "table.png").read_bytes())
        assert plots[0] == plots[1] != plots[2]


CURVES = {"run": {"step": [1, 2], "samples": [4, 8], "loss": [0.5, 0.25], "capture/a": [0.1, None]}}


class TestDraw:
    @pytest.mark.parametrize(("device", "modes"), [("cuda", MODES), ("cpu", MODES_WITHOUT_GRAPHS)])
    @pytest.mark.parametrize("stem", ["bench_unet", "bench_unet_mini"])
    def test_a_unet_plot_has_all_modes(self, stem, device, modes, tmp_path):
        """Fails for the plot of another model too."""
        for mode in ("graph", "compile"):
            rows = [{"size": 64, "mode": mode, "label": mode, "ms": 2.0}]
            path = tmp_path / f"{stem}_64_{mode}_{device}.json"
            facts = {"command": "python -m eval bench unet", "device": "cpu", "unet": "SD1.5"}
            save_json(path, **facts, rows=rows)
        plot = tmp_path / f"{stem}_64_{device}.png"
        plot_unet(tmp_path, stem, 64, SimpleNamespace(type=device), modes)
        expected = plot.read_bytes()
        plot.unlink()
        draw(path)
        assert plot.read_bytes() == expected

    @pytest.mark.parametrize(
        ("text", "message"),
        [
            ("no JSON", "is not a result of python -m eval"),
            ('{"rows": []}', "is not a result of python -m eval"),
            ('{"command": "python -m eval"}', "is not a result of python -m eval"),
            ('{"command": "python -m distill --config x"}', "is not a result of python -m eval"),
            (
                '{"command": "python -m eval scenes --x"}',
                f"plots are those of {', '.join(PLOTS)}, but .* is a result of scenes",
            ),
            ('{"command": "python -m eval coco score x"}', "is a result of coco score"),
        ],
    )
    def test_other_files_are_refused(self, text, message, tmp_path):
        (tmp_path / "x.json").write_text(text)
        with pytest.raises(ValueError, match=message):
            draw(tmp_path / "x.json")
        assert not (tmp_path / "x.png").exists()

    @pytest.mark.parametrize("kind", ["table", "errors", "analyse", "training", "bench kernels"])
    def test_a_file_without_fields_is_named(self, kind, tmp_path):
        """Catches a KeyError that does not say which file it is."""
        path = tmp_path / "x.json"
        path.write_text(json.dumps({"command": f"python -m eval {kind} x"}))
        with pytest.raises(ValueError, match=r"x\.json is not a complete result \(KeyError"):
            draw(path)

    def test_a_file_that_is_not_there(self, tmp_path):
        with pytest.raises(FileNotFoundError, match=r"there is no file .*x\.json"):
            draw(tmp_path / "x.json")

    def test_a_size_is_for_tables(self, tmp_path):
        path = tmp_path / "x.json"
        save_json(path, command="python -m eval training", device="cpu", runs=CURVES)
        with pytest.raises(ValueError, match="a size chooses what the plot of a table shows"):
            draw(path, size=512)


class TestSheet:
    def test_a_row_is_a_method(self, tmp_path):
        """Fails for rows and columns exchanged, or other images than those of the first seed."""
        first, second = (
            np.stack([np.full((40, 40, 3), (level + i, 0, 200), np.uint8) for i in range(4)])
            for level in (50, 150)
        )
        compare_sheet(tmp_path / "x.png", {"exact": first, "M4": second}, ["a cat", "a dog"])
        pixels = np.asarray(Image.open(tmp_path / "x.png"))

        def places(level):
            return np.argwhere((pixels == (level, 0, 200)).all(-1))

        corners = {level: tuple(places(level)[0].tolist()) for level in (50, 51, 150, 151)}
        assert corners[50][0] == corners[51][0] < corners[150][0] == corners[151][0]
        assert corners[50][1] == corners[150][1] < corners[51][1] == corners[151][1]
        assert [len(places(level)) for level in (50, 52, 151, 152)] == [1600, 0, 1600, 0]

    def test_the_command_at_twice_the_size(self, model, codebooks, tmp_path, monkeypatch):
        places = ["--model", model, "--output", tmp_path, "--methods", codebooks]
        counts = ["--prompts", 2, "--seeds", 1, "--steps", 1]
        run_command(monkeypatch, "compare", *places, *counts, "--size", 256, "--scalecrafter")
        document = json.loads((tmp_path / "compare_levels0_256_scalecrafter.json").read_text())
        assert (document["size"], document["scalecrafter"]) == (256, SETTINGS_2X)
        width, height = Image.open(tmp_path / "compare_levels0_256_scalecrafter.webp").size
        assert width > 2 * 256
        assert height > 3 * 256


def test_colour_and_marker_together_are_of_one_label():
    """Fails for as many markers as colours, by which the eighth label looks like the first."""
    looks = [(COLOURS[i % len(COLOURS)], MARKERS[i % len(MARKERS)]) for i in range(50)]
    assert len(set(looks)) == 50


@pytest.fixture
def figures(monkeypatch):
    """The figures that are drawn, in place of their files."""
    found = []
    monkeypatch.setattr(plots, "_save", lambda figure, path, **_: found.append(figure))
    return found


def test_lines_are_drawn_where_their_numbers_are(figures):
    """Catches a missing number drawn as 0, axes that are exchanged or of another scale, a cut axis
    that makes small differences large, and a legend of the other lines."""
    lines = [Line("a", [1, 2, 4], [8, None, 2]), Line("b", [2], [3])]
    both = Panel("both", "x", lines, [Line("b", [1, 4], [9, 1])], xscale="log", yscale="log")
    small = Panel("small", "x", [Line("b", [0, 1], [98, 100])], ticks=["p", "q"], from_zero=True)
    panel_plot(None, [[both, small]])
    (figure,) = figures
    first, second = figure.axes
    faint, a, b = first.lines
    found = [line.get_xydata().tolist() for line in (faint, a, b)]
    assert found == [[[1, 9], [4, 1]], [[1, 8], [4, 2]], [[2, 3]]]
    assert (first.get_xscale(), first.get_yscale()) == ("log", "log")
    assert (second.get_xscale(), second.get_yscale()) == ("linear", "linear")
    low, high = second.get_ylim()
    assert low == 0 < 100 < high
    assert [label.get_text() for label in second.get_xticklabels()] == ["p", "q"]
    (legend,) = figure.legends
    shown = zip(legend.get_texts(), legend.get_lines(), strict=True)
    assert [(text.get_text(), line.get_color()) for text, line in shown] == [
        ("a", a.get_color()),
        ("b", b.get_color()),
    ]
    assert a.get_color() != b.get_color() == faint.get_color() == second.lines[0].get_color()


def test_error_bars_and_reference_are_drawn_where_their_numbers_are(figures):
    """Catches bars of another length or direction, a reference that lies elsewhere, a grid that is
    not filled, and a legend that lacks a label."""
    panels = [
        Panel("a", "x", [Line("m", [1], [20], [3])], reference=15),
        Panel("b", "x", [Line("n", [2], [5], [1])]),
    ]
    panel_plot(None, [panels, panels])
    (figure,) = figures
    for first, second in (figure.axes[:2], figure.axes[2:]):
        point, _, (bar,) = first.containers[0]
        assert point.get_xydata().tolist() == [[1, 20]]
        assert [segment.tolist() for segment in bar.get_segments()] == [[[1, 17], [1, 23]]]
        dashed = [line for line in first.lines if line.get_linestyle() == "--"]
        assert [line.get_ydata()[0] for line in dashed] == [15]
        assert second.containers[0][0].get_xydata().tolist() == [[2, 5]]
        assert not [line for line in second.lines if line.get_linestyle() == "--"]
    (legend,) = figure.legends
    assert [text.get_text() for text in legend.get_texts()] == ["m", "n"]


def test_numbers_of_a_heat_map_stand_in_their_cells(figures):
    """Catches the colours of a short row that are those of other columns than its numbers, and a
    scale of colours for each map."""
    maps = [HeatMap("a", ["x", "y"], [[0.25, 0.75], [0.5]]), HeatMap("b", ["x"], [[0.4]])]
    heat_maps(None, maps, xlabel="h", label="c")
    first, second, _ = figures[0].axes
    assert first.images[0].get_array().tolist() == [[0.25, 0.75], [0.5, None]]
    assert first.images[0].get_clim() == second.images[0].get_clim() == (0, 1)
    cells = {text.get_position(): text.get_text() for text in first.texts}
    assert cells == {(0, 0): "0.25", (1, 0): "0.75", (0, 1): "0.50"}


def test_bars_are_drawn_where_their_numbers_are(figures):
    """Catches a bar beside another's name."""
    bar_plot(None, {"panel": {"long": 3.0, "short": 1.0}}, xlabel="x", title="t")
    (axes,) = figures[0].axes
    names = [label.get_text() for label in axes.get_yticklabels()]
    bars = [(bar.get_y() + bar.get_height() / 2, bar.get_width()) for bar in axes.patches]
    assert (names, bars) == (["long", "short"], [(0, 3), (1, 1)])
