"""The pages of the results: up to date, made of the files, clear about what is missing."""

import json
import shutil
from pathlib import Path

import pytest
from eval_helpers import failed_command, run_command

from eval.pages.figures import PAGES
from eval.pages.render import rendered

RESULTS = Path(__file__).parents[2] / "eval" / "results"
STEP = "speed/bench_unet_1024_compile_cuda.json"


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


def test_new_results_make_new_pages(results, monkeypatch):
    """Catches a figure that stands in the template, an older file that wins, and a way to run
    that hides another or shares a line with it."""
    document = json.loads((results / STEP).read_text())
    for row in document["rows"]:
        row["ms"] = {"exact": 1234.0, "limit": 90.0}.get(row["method"], 100.0)
    default = document["rows"][0] | {"method": "M64C8T1e-4", "ms": 617.0}
    document["rows"].append(default)
    document["environment"]["date"] = "9999-01-01"
    (results / "bench_unet_x_cuda.json").write_text(json.dumps(document))
    document["rows"] = [row | {"mode": "eager", "ms": 7.0} for row in document["rows"]]
    (results / "bench_unet_y_cuda.json").write_text(json.dumps(document))
    call = {"batch": 1, "heads": 1, "head_dim": 8, "dtype": "float32", "tokens": 4321}
    times = {"default SDPA": 30.0, "AVQ 64/16/8": 7.0, "AVQ 64/16/8, own codewords": 5.0}
    rows = [call | {"method": method, "ms": ms} for method, ms in times.items()]
    operation = {"command": "python -m eval bench attention", "rows": rows}
    operation["environment"] = document["environment"] | {"device": "a CPU"}
    (results / "speed/bench_attention_cpu.json").write_text(json.dumps(operation))
    run_command(monkeypatch, "pages", results)
    assert {path.stem for path in results.glob("*.md")} == {*PAGES}
    page = (results / "speed.md").read_text()
    rows = [line.strip("| ").split(" | ") for line in page.splitlines() if "| 1024² |" in line]
    ways = {row[1]: row[4:] for row in rows if row[0] == "SD1.5"}
    assert [*ways] == ["compiled", "CUDA graph", "eager"]
    assert ways["compiled"] == ["1230", "100", "12.34", "617", "2.00", "90"]
    assert ways["eager"] == ["7", "7", "1.00", "7", "1.00", "7"]
    assert "- SD1.5, compiled, NVIDIA H200: 12.34 at 1024²\n" in page
    assert "- compiled: 13%\n" in page
    hardware = (results / "hardware.md").read_text()
    assert "- a CPU: AVQ is faster from 4321 tokens on, 6 times as fast at 4321." in hardware
    for name in ("speed", "quality_psnr", "tolerance", "hardware"):
        assert (results / f"{name}.png").is_file()


def _without(field):
    def change(document):
        del document["rows"][-1][field]

    return change


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        (STEP, _without("ms"), "is not a complete result (KeyError: 'ms'); make it again."),
        (STEP, lambda document: document.pop("unet"), "is not a complete result (KeyError: 'model"),
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
