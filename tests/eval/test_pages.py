"""The pages of the results: up to date, made of the files, clear about what is missing."""

import json
import shutil
from pathlib import Path

import pytest
from eval_helpers import failed_command, run_command

from eval.pages.figures import PAGES
from eval.pages.render import rendered

RESULTS = Path(__file__).parents[2] / "eval" / "results"
STEP = "speed/bench_steps_cuda.json"


@pytest.fixture
def results(tmp_path):
    """A copy without pages and plots."""
    folder = tmp_path / "results"
    shutil.copytree(RESULTS, folder, ignore=shutil.ignore_patterns("*.md", "*.png", "*.webp"))
    return folder


@pytest.mark.parametrize("name", PAGES)
def test_pages_are_up_to_date(name):
    """Catches a result, a template or a figure that changed after the page: make it again."""
    page = (RESULTS / f"{name}.md").read_text(encoding="utf-8")
    assert page == rendered(name, RESULTS, PAGES[name](RESULTS))


def steps(**changes):
    """A file of `bench steps`: SD1.5 at two sizes, compiled; the larger one without its limit."""
    place = {"model": "sd15", "title": "SD1.5", "run": "compiled"}
    of_avq = {"columns": 265.2, "layers": [9, 10], "peak_mib": 90.0}
    rows = [
        {"size": 1024, "method": "exact", "ms": 1234.0, "times_as_fast": 1.0, "peak_mib": 100.0},
        {"size": 1024, "method": "avq", "ms": 100.0, "times_as_fast": 12.34, **of_avq},
        {"size": 1024, "method": "limit", "ms": 90.0, "times_as_fast": 13.71},
        {"size": 512, "method": "exact", "ms": 7.0, "times_as_fast": 1.0},
        {"size": 512, "method": "avq", "ms": 7.0, "times_as_fast": 1.0, **of_avq},
        {"size": 2048, "method": "avq", "ms": None, "times_as_fast": None, "note": "no memory"},
    ]
    environment = {"device": "NVIDIA H200", "date": "2026-11-29"}
    rows = [{**place, **row, **changes} for row in rows]
    return {"command": "python -m eval bench steps", "environment": environment, "rows": rows}


def test_new_results_make_new_pages(results, monkeypatch):
    """Catches a figure that stands in the template, a row without a time that is shown, and times
    on the quality page that are not those of the file."""
    document = steps()
    paper = {"method": "M64P16C8@L0/own", "ms": 321.0, "times_as_fast": 3.84}
    document["rows"].append(document["rows"][0] | paper)
    (results / STEP).write_text(json.dumps(document))
    call = {"batch": 1, "heads": 1, "head_dim": 8, "dtype": "float32", "tokens": 4321}
    times = {"default SDPA": 30.0, "AVQ 64/16/8": 7.0, "AVQ 64/16/8, own codewords": 5.0}
    rows = [call | {"method": method, "ms": ms} for method, ms in times.items()]
    operation = {"command": "python -m eval bench attention", "rows": rows}
    operation["environment"] = {**document["environment"], "device": "a CPU"}
    (results / "speed/bench_attention_cpu.json").write_text(json.dumps(operation))
    run_command(monkeypatch, "pages", results)
    assert {path.stem for path in results.glob("*.md")} == {*PAGES}
    page = (results / "speed.md").read_text()
    rows = [line.strip("| ").split(" | ") for line in page.splitlines() if line.startswith("| SD")]
    assert rows == [
        ["SD1.5", "512²", "compiled", "7", "7", "1.00", "-", "265", "9 of 10", "-"],
        ["SD1.5", "1024²", "compiled", "1230", "100", "12.34", "13.71", "265", "9 of 10", "0.90"],
    ]
    assert "- SD1.5, compiled: 1.00 at 512², 12.34 at 1024²\n" in page
    assert " dB at 321.0 ms per step, ToMe " in (results / "quality.md").read_text()
    hardware = (results / "hardware.md").read_text()
    assert "- a CPU: AVQ is faster from 4321 tokens on, 6 times as fast at 4321." in hardware
    for name in ("speed", "quality_psnr", "tolerance", "hardware"):
        assert (results / f"{name}.png").is_file()


def test_without_results_a_page_says_nothing(results):
    """Catches figures of an earlier version under the name of this one."""
    (results / STEP).unlink(missing_ok=True)
    page = rendered("speed", results, PAGES["speed"](results))
    assert page == "# Speed\n\nNot measured yet in this version.\n"
    assert "ms per step" not in rendered("quality", results, PAGES["quality"](results))


def _without(field):
    def change(document):
        del document["rows"][-1][field]

    return change


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        (STEP, _without("ms"), "is not a complete result (KeyError: 'ms'); make it again."),
        ("vision/vision_seg_sizes.json", None, "there is no file "),
        (
            "quality/quality_own_levels01.json",
            _without("fid"),
            "is not a complete result (KeyError: 'fid'",
        ),
        (
            "keys/keys_vit_cuda_bfloat16.json",
            lambda document: document.update(rows=document["rows"][1:]),
            "has no row of exact; make it again.",
        ),
        (
            "tolerance/tolerance_levels01.json",
            lambda document: document.clear(),
            "is not a result from",
        ),
    ],
)
def test_what_is_missing_is_said(results, monkeypatch, capsys, name, change, message):
    """Catches a page that leaves out what it cannot read, and pages half of which are new."""
    path = results / name
    if name == STEP:
        path.write_text(json.dumps(steps()))
    if change is None:
        path.unlink()
    else:
        document = json.loads(path.read_text())
        change(document)
        path.write_text(json.dumps(document))
    code, last = failed_command(monkeypatch, capsys, "pages", results)
    assert code == 2
    assert f"{path}" in last
    assert message in last
    assert not [*results.glob("*.md")]
