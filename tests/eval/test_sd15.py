"""The paper's table of SD1.5 by one command: its plan, restarts, downloads and table."""

import json
import sys
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest
from eval_helpers import failed_command, run_command
from tiny_training import TINY_RUN

from avq_diffusers import AVQCodebooks
from avq_diffusers.files import sha256
from distill.scenes import write_coco
from eval.methods.base import UNET_STEP
from eval.methods.registry import check_place
from eval.quality import coco_download, sd15
from eval.quality.coco import image_path
from eval.quality.coco_download import download_coco
from eval.quality.sd15 import ROWS, Request, Step, carry_out, paper_table, plan, plan_table
from eval.store.report import SCORER


@pytest.fixture
def request_(tmp_path):
    return Request(
        output=tmp_path / "out",
        rows=["exact", "m64p16c8", "linfusion"],
        sizes=(512, 1024),
        model="sd15",
        captions=None,
        real=None,
        scorer=None,
        images=30_000,
        steps=25,
        overrides=["steps=7"],
        processes=1,
        device="cuda",
    )


def words(step):
    return [word.replace(str(sd15.ROOT), "ROOT") for word in step.command[1:]]


def test_the_plan(request_):
    """Catches a row without its training, images of another model, another order of folders, the
    training size dilated or a larger one not."""
    steps = {step.name: words(step) for step in plan(request_)}
    images = [f"generate {row} 512" for row in request_.rows] + ["score 512"]
    larger = [name.replace("512", "1024") for name in images]
    distilled = ["distill m64p16c8", "distill linfusion"]
    assert list(steps) == ["download coco", *distilled, *images, *larger, "bench steps"]
    out = str(request_.output)
    train = f"-m distill --config ROOT/configs/sd15_m64p16c8.yaml --resume --output {out}/distill/"
    train += "m64p16c8 --set base_model=sd15 --set steps=7"
    assert " ".join(steps["distill m64p16c8"]) == train
    draw = f"-m eval coco generate {out}/rows/linfusion-1024 --method {out}/distill/linfusion/"
    draw += f"linfusion --captions {out}/coco/captions.txt --model sd15 --images 30000 --size 1024"
    assert " ".join(steps["generate linfusion 1024"]).startswith(draw)
    dilated = {name for name, command in steps.items() if "--scalecrafter" in command}
    assert dilated == {f"generate {row} 1024" for row in request_.rows}
    score = " ".join(steps["score 512"])
    folders = " ".join(f"{out}/rows/{row}-512" for row in request_.rows)
    assert score.startswith(f"-m eval coco score {folders} --real {out}/coco/val2014 --cache")
    for name, row in ROWS.items():
        assert row.method or (sd15.ROOT / "configs" / f"sd15_{name}.yaml").exists()
        if row.timed is not None:
            check_place(row.timed, UNET_STEP)


def test_stand_ins_and_several_gpus(request_):
    local = replace(request_, captions=Path("c.txt"), real=Path("real"), scorer="s", device="cpu")
    steps = {step.name: " ".join(words(step)) for step in plan(local)}
    assert not {"download coco", "bench steps"} & steps.keys()
    assert "--captions c.txt" in steps["generate exact 512"]
    assert "--real real" in steps["score 512"]
    assert steps["score 512"].endswith("--scorer s")
    shared = {step.name: step for step in plan(replace(request_, processes=4))}
    launched = ["-m", "accelerate.commands.launch", "--num_processes", "4", "-m"]
    found = {name for name, step in shared.items() if words(step)[:5] == launched}
    assert found == {name for name in shared if name.startswith(("distill", "generate"))}
    assert shared["distill m64p16c8"].hours == sd15.DISTILL_HOURS / 4


def test_unknown_rows_are_refused(tmp_path):
    last = failed_command("reproduce", "sd15", tmp_path, "--rows", "exact,m1")
    assert "--rows must be some of exact, " in last


def test_hours_and_space_of_what_is_left(request_):
    """Catches sums over finished steps, and images that are not counted."""
    steps = plan(replace(request_, images=3000))
    by_name = {step.name: step for step in steps}
    assert by_name["generate exact 1024"].gigabytes == 5
    assert by_name["generate exact 1024"].hours == pytest.approx(0.61)
    total = sum(step.hours or 0 for step in steps)
    assert f"Expected: {total:.1f} hours" in plan_table(request_, steps)
    mark = by_name["distill linfusion"].mark(request_.output)
    mark.parent.mkdir(parents=True)
    mark.write_text(json.dumps(by_name["distill linfusion"].command))
    table = plan_table(request_, steps)
    assert f"Expected: {total - sd15.DISTILL_HOURS:.1f} hours" in table
    assert "| distill linfusion | done |" in table
    assert "| distill m64p16c8 | to do |" in table


def test_a_repeated_call_goes_on_at_the_failed_step(request_):
    """Catches finished steps that run again, one that failed and counts as finished, and another
    command under the same name."""
    seen = request_.output / "seen"
    request_.output.mkdir()
    seen.write_text("")

    def step(name, code=0):
        script = f"open({str(seen)!r}, 'a').write({name!r}); raise SystemExit({code})"
        return Step(name, [sys.executable, "-c", script])

    with pytest.raises(ValueError, match=r"b failed with the message above; repeat"):
        carry_out(request_, [step("a"), step("b", 1), step("c")])
    assert seen.read_text() == "ab"
    carry_out(request_, [step("a"), step("b"), step("c")])
    assert seen.read_text() == "abbc"
    carry_out(request_, [step("a"), step("b"), Step("c", step("d").command)])
    assert seen.read_text() == "abbcd"


def test_the_table_has_both_metrics():
    """Catches metrics of another row or size."""
    figures = {"clip_score": 0.3, "ms": 5.0}
    measured = {
        "tome": {512: {"fid": 1.0, **figures}, 1024: {"fid": 2.0, **figures, "ms": None}},
        "own_m64p16c8": {size: {"fid": 3.0, **figures} for size in (512, 1024)},
    }
    header, _, tome, own = paper_table(measured, (512, 1024)).splitlines()
    titles = [f"{name}, {size}²" for size in (512, 1024) for name in ("FID", "CLIP score", "ms")]
    assert header == f"| method | {' | '.join(titles)} |"
    assert tome == (
        "| ToMe-SD (r = 0.5) | 1.00 (12.40) | 0.300 (0.317) | 5.0 (42.0) | 2.00 (43.00) | "
        "0.300 (0.290) | - (163.3) |"
    )
    assert own.startswith("| AVQ M64P16C8, own codewords | 3.00 (-) | 0.300 (-) |")


def test_captions_and_images_are_downloaded_and_unpacked_once(tmp_path, monkeypatch):
    """Catches another list of captions, a cut file that counts as whole, and a second download."""
    (tmp_path / "list").write_bytes(b"a fox\n")
    with zipfile.ZipFile(tmp_path / "zip", "w") as archive:
        archive.writestr("val2014/a.jpg", b"image")
    monkeypatch.setattr(coco_download, "CAPTIONS_URL", (tmp_path / "list").as_uri())
    monkeypatch.setattr(coco_download, "IMAGES_URL", (tmp_path / "zip").as_uri())
    folder = tmp_path / "coco"
    with pytest.raises(ValueError, match="list is not the file of the protocol"):
        download_coco(folder)
    assert not list(folder.iterdir())
    monkeypatch.setattr(coco_download, "CAPTIONS_SHA256", sha256(tmp_path / "list"))
    for _ in range(2):
        download_coco(folder)
        assert sorted(path.name for path in folder.iterdir()) == ["captions.txt", "val2014"]
        (tmp_path / "list").unlink(missing_ok=True)
        (tmp_path / "zip").unlink(missing_ok=True)
    assert (folder / "val2014/a.jpg").read_bytes() == b"image"
    (folder / "captions.txt").unlink()
    with pytest.raises(OSError, match="list could not be downloaded"):
        download_coco(folder)


@pytest.mark.long
def test_from_a_model_to_the_table(model, tmp_path, monkeypatch):
    """The whole way with stand-ins: two trainings, three rows, the table; then once more."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # as in this process
    write_coco(tmp_path / "scenes", 4, first_seed=5, size=64)
    # TINY_RUN is for files of mini-sd; those of SD1.5 differ in their data.
    tiny = {**TINY_RUN, "data.source": "scenes", "steps": 2, "gradient_checkpointing": "false"}
    tiny |= dict.fromkeys(("data.path", "data.split", "data.image_column"), "null")
    tiny |= {"data.caption_column": "null", "data.preprocessing": "crop"}
    tiny |= {"avq.num_parents": 8, "codebooks": "null", "avq.codewords": "means"}
    tiny |= {"objective.commitment_weight": 0}
    tiny = {key: x for key, x in tiny.items() if not key.startswith("codebooks.")}
    settings = [part for key, x in tiny.items() for part in ("--set", f"{key}={x}")]
    arguments = ["sd15", tmp_path / "out", "--rows", "exact,own_m64p16c8,linfusion"]
    arguments += ["--sizes", 64, "--images", 4, "--steps", 2, "--device", "cpu", "--model", model]
    arguments += ["--captions", tmp_path / "scenes/annotations/captions_scenes.json"]
    arguments += ["--real", tmp_path / "scenes/images", "--scorer", SCORER, *settings]
    first = run_command("reproduce", *arguments)
    table = (tmp_path / "out/table.md").read_text()
    assert first.endswith(table)
    assert len(table.splitlines()) == 2 + 3
    made = AVQCodebooks.from_pretrained(tmp_path / "out/distill/own_m64p16c8/codebooks")
    assert (made.config["own_codewords"], made.config["training"]["steps"]) == (True, 2)
    rows = [tmp_path / "out/rows" / f"{name}-64" for name in ("exact", "own_m64p16c8", "linfusion")]
    images = {image_path(row, 3).read_bytes() for row in rows}
    assert len(images) == 3

    monkeypatch.setattr(sd15.subprocess, "run", None)  # nothing is left to do
    second = run_command("reproduce", *arguments)
    assert "to do" not in second
    assert second.endswith(table)
