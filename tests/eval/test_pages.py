"""The stored results: their commands, plots and pages, and the table of features."""

import json
import re
import shlex
import shutil
from pathlib import Path

import pytest
import typer
from eval_helpers import failed_command, run_command

from eval.__main__ import app
from eval.pages.figures import PAGES
from eval.pages.render import rendered
from eval.store.report import read_result
from eval.support import features

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "eval" / "results"
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
        {"size": 1024, "method": "avq", "ms": 100.0, "times_as_fast": 12.6, **of_avq}
        | {"exact_ms": 1260.0, "spread": 0.3},
        {"size": 1024, "method": "limit", "ms": 90.0, "times_as_fast": 13.71},
        {"size": 512, "method": "exact", "ms": 7.0, "times_as_fast": 1.0},
        {"size": 512, "method": "avq", "ms": 7.0, "times_as_fast": 1.0, "spread": 0.1, **of_avq},
        {"size": 512, "method": "limit", "ms": None, "times_as_fast": None},
        {"size": 2048, "method": "avq", "ms": None, "times_as_fast": None, "note": "no memory"},
        {"size": 4096, "method": "avq", "ms": 4.0, "times_as_fast": 2.0, "exact_ms": 8.0},
    ]
    environment = {"device": "NVIDIA H200", "date": "2026-11-29"}
    rows = [{**place, **row, **changes} for row in rows]
    return {"command": "python -m eval bench steps", "environment": environment, "rows": rows}


def test_new_results_make_new_pages(results):
    """Catches a figure that stands in the template, a row without a time that is shown, a limit
    relative to exact attention at another time than its own, a row that was not steady without its
    mark, a row beside exact attention that needs a row of that, a row of images with the number of
    another, and a length called faster that is so in one row only."""
    document = steps()
    (results / STEP).write_text(json.dumps(document))
    call = {"batch": 1, "heads": 1, "head_dim": 8, "dtype": "float32", "tokens": 4321}
    times = {"default SDPA": 30.0, "AVQ 64/16/8, stored codewords": 7.0, "AVQ 64/16/8": 5.0}
    rows = [call | {"method": method, "ms": ms} for method, ms in times.items()]
    for heads, ms in ((1, 25.0), (2, 35.0)):  # fewer tokens: faster with one head only
        shape = call | {"tokens": 1234, "heads": heads}
        rows += [shape | {"method": "default SDPA", "ms": 30.0}]
        rows += [shape | {"method": "AVQ 64/16/8", "ms": ms}]
    operation = {"command": "python -m eval bench attention", "rows": rows}
    operation["environment"] = {**document["environment"], "device": "a CPU"}
    (results / "speed/bench_attention_cpu.json").write_text(json.dumps(operation))
    linfusion = results / "quality/quality_linfusion.json"
    scored = json.loads(linfusion.read_text())
    scored["rows"] = [row | {"num_runs": 7, "num_images": 11} for row in scored["rows"]]
    linfusion.write_text(json.dumps(scored))
    run_command("pages", results)
    assert {path.stem for path in results.glob("*.md")} == {*PAGES}
    page = (results / "speed.md").read_text()
    rows = [line.strip("| ").split(" | ") for line in page.splitlines() if line.startswith("| SD")]
    assert rows == [
        ["SD1.5", "512²", "compiled", "7", "7", "1.00", "-", "265", "9 of 10", "-"],
        ["SD1.5", "1024²", "compiled", "1260", "100", "12.60 ¹", "13.71", "265", "9 of 10", "0.90"],
        ["SD1.5", "4096²", "compiled", "8", "4", "2.00", "-", "-", "-", "-"],
    ]
    assert "- SD1.5, compiled: 1.00 at 512², 12.60 at 1024², 2.00 at 4096²\n" in page
    assert " | LinFusion, distilled | 77 | " in (results / "quality.md").read_text()
    hardware = (results / "hardware.md").read_text()
    assert "- a CPU: AVQ is faster from 4321 tokens on, 6 times as fast at 4321." in hardware
    dial = "keys/keys_vit_cuda_bfloat16_dial"
    for name in ("speed", "quality_psnr", "tolerance", "hardware", dial):
        assert (results / f"{name}.png").is_file()


def test_without_results_a_page_says_nothing(results):
    """Catches figures of an earlier version under the name of this one."""
    (results / STEP).unlink()
    page = rendered("speed", results, PAGES["speed"](results))
    assert page == "# Speed\n\nNot measured yet in this version.\n"


def _without(field):
    def change(document):
        del document["rows"][-1][field]

    return change


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        (STEP, _without("ms"), "is not a complete result (KeyError: 'ms'); make it again."),
        (
            "tolerance/tolerance_mini_sd3.json",
            _without("ms"),
            "is not a complete result (KeyError: 'ms'",
        ),
        ("vision/vision_features_vit_cuda.json", None, "there is no file "),
        (
            "quality/quality_levels01.json",
            _without("fid"),
            "is not a complete result (KeyError: 'fid'",
        ),
        (
            "keys/keys_vit_cuda_bfloat16.json",
            lambda document: document.update(rows=document["rows"][1:]),
            "has no row of exact; make it again.",
        ),
        (
            "tolerance/tolerance_mini_sd3.json",
            lambda document: document.clear(),
            "is not a result from",
        ),
    ],
)
def test_what_is_missing_is_said(results, name, change, message):
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
    last = failed_command("pages", results)
    assert f"{path}" in last
    assert message in last
    assert not [*results.glob("*.md")]


PATHS = sorted(RESULTS.rglob("*.json"))
REMOVED = {"--minutes"}  # an option that `vision features` no longer has
COMMANDS = typer.main.get_command(app)


@pytest.mark.parametrize("path", PATHS, ids=lambda path: path.stem)
def test_the_command_of_a_result_exists(path):
    """Catches a command or an option that was renamed and not in the files."""
    command = COMMANDS
    words = shlex.split(read_result(path)["command"])[3:]
    while hasattr(command, "commands"):
        command = command.commands[words.pop(0)]
    known = {name for parameter in command.params for name in parameter.opts} | REMOVED
    assert {word for word in words if word.startswith("--")} <= known


def test_the_page_of_variants_is_that_of_its_results():
    """Catches a page, or the function that makes it, that changed alone, and a result without rows
    that breaks it."""
    pytest.importorskip("triton")
    from eval.benchmarks.variants import variants_page

    results = map(read_result, sorted(RESULTS.rglob("bench_variants_*.json")))
    assert (RESULTS / "notes" / "variants.md").read_text() == variants_page(results)


JUNIT = """<testsuites><testsuite>
<testcase name="a"><properties><property name="cpu" value="img2img"/></properties></testcase>
<testcase name="b"><properties><property name="cpu" value="inpainting"/></properties></testcase>
<testcase name="c"><properties><property name="cpu" value="inpainting"/></properties><failure/>
</testcase>
<testcase name="d"><properties><property name="cpu" value="AnimateDiff"/></properties><skipped/>
</testcase>
<testcase name="e"><properties><property name="cuda" value="CUDA graphs"/></properties></testcase>
<testcase name="f"/>
</testsuite></testsuites>"""


def test_every_feature_has_a_test():
    """Catches a marker that the table does not know, and a line of the table without a test."""
    tests = Path(__file__).parents[1]
    texts = [path.read_text() for path in tests.rglob("test_*.py")]
    marked = re.findall(r'\bfeature\("([^"]+)"\)', "".join(texts))
    marked += re.findall(r'"([\w. ]+ at full size)":', "".join(texts))
    # Tables of kinds and cases hold the names of their rows.
    hosts = "".join(path.read_text() for path in (tests / "hosts").glob("*.py"))
    known = {name for names in features.GROUPS.values() for name in names}
    marked += [name for name in known if f'"{name}"' in hosts]
    assert set(marked) == known


def save(path, **content):
    path.write_text(json.dumps(content))


def test_one_column_is_written_and_the_other_stays(tmp_path, monkeypatch):
    made = {"device": "a", "torch": "2", "commit": "c"}
    monkeypatch.setattr(features, "environment", lambda device: made)
    monkeypatch.setattr(features, "save_json", save)
    (tmp_path / "junit.xml").write_text(JUNIT)
    features.write_features(tmp_path / "junit.xml", tmp_path, "cuda")
    features.write_features(tmp_path / "junit.xml", tmp_path, "cpu")
    text = (tmp_path / "features.md").read_text()
    header, _, *rows = text[text.index("| feature ") :].splitlines()
    assert re.search(r"CPU: 2 tests passed, a, .*GPU: 1 tests passed, a, ", header)
    assert rows[0] == "| Pipelines | img2img; **failed**: inpainting; not run: AnimateDiff | - |"
    assert "| Compilation | - | CUDA graphs |" in rows


def test_unknown_features_are_refused(tmp_path):
    (tmp_path / "junit.xml").write_text(JUNIT.replace("img2img", "img3img"))
    with pytest.raises(ValueError, match="those of GROUPS, but a test is for 'img3img'"):
        features.read_outcomes(tmp_path / "junit.xml")
    (tmp_path / "junit.xml").write_text("# Tests")
    with pytest.raises(ValueError, match=r"junit\.xml is no JUnit file"):
        features.read_outcomes(tmp_path / "junit.xml")


def test_the_stored_table_is_that_of_the_stored_results():
    columns = json.loads((RESULTS / "features.json").read_text())["columns"]
    assert (RESULTS / "features.md").read_text() == features.features_table(columns) + "\n"
