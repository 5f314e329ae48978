"""The results in the repository: their commands exist, read them, and give them again."""

import json
import shlex
import shutil
from pathlib import Path

import pytest
import typer
from matplotlib.figure import Figure

from eval.__main__ import app
from eval.commands import stored
from eval.commands.quality import _scenes_document
from eval.quality.method_table import build_table, quality_table
from eval.quality.scene_rows import merge_runs, scenes_table
from eval.store.report import read_result

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "eval" / "results"
PATHS = sorted(RESULTS.rglob("*.json"))
# Options that commands no longer have: `errors` took times of kernels to stand beside the errors,
# `vision features` a limit of time.
REMOVED = {"--kernels", "--minutes"}
COMMANDS = typer.main.get_command(app)
KINDS = {path: read_result(path).kind for path in PATHS}


def of_kind(*kinds):
    paths = [path for path in PATHS if KINDS[path] in kinds]
    return pytest.mark.parametrize("path", paths, ids=lambda path: path.stem)


@pytest.mark.parametrize("path", PATHS, ids=lambda path: path.stem)
def test_the_command_of_a_result_exists(path):
    """Catches a command or an option that was renamed and not in the files."""
    command = COMMANDS
    words = shlex.split(read_result(path).document["command"])[3:]
    while hasattr(command, "commands"):
        command = command.commands[words.pop(0)]
    known = {name for parameter in command.params for name in parameter.opts} | REMOVED
    assert {word for word in words if word.startswith("--")} <= known


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """A copy without plots."""
    copy = tmp_path_factory.mktemp("eval") / "results"
    shutil.copytree(RESULTS, copy, ignore=shutil.ignore_patterns("*.s*", "*.png"))
    return copy


@of_kind(*stored.PLOTS)
def test_a_stored_plot_is_plotted_again(path, results, monkeypatch):
    """Catches a result whose rows the plot of today does not read; others look at the image."""
    monkeypatch.setattr(Figure, "savefig", lambda _, target, dpi: Path(target).touch())
    copy = results / path.relative_to(RESULTS)
    for plot in copy.parent.glob("*.png"):
        plot.unlink()
    stored.draw(copy)
    assert list(copy.parent.glob("*.png"))


@of_kind("scenes")
def test_stored_scenes_are_read(path):
    rows = json.loads(path.read_text())["rows"]
    assert len(scenes_table(rows).splitlines()) == 2 + len(rows)


@of_kind("merge")
def test_a_stored_average_is_that_of_its_runs(path):
    document = json.loads(path.read_text())
    sources = [ROOT / name for name in shlex.split(document["command"])[4:]]
    if not all(source.is_file() for source in sources):
        pytest.skip("its runs are not stored")
    rows = merge_runs([_scenes_document(read_result(source)) for source in sources])
    assert [row["method"] for row in rows] == [row["method"] for row in document["rows"]]
    for row, expected in zip(rows, document["rows"], strict=True):
        for name in ("fid", "fid_sem", "clip_score", "copy_agreement", "psnr_median"):
            assert row[name] == pytest.approx(expected[name], nan_ok=True), name


@of_kind("table")
def test_a_stored_table_is_that_of_its_files(path):
    document = json.loads(path.read_text())
    names = shlex.split(document["command"])[4:]
    table = build_table([read_result(RESULTS / name) for name in names if name.endswith(".json")])
    assert quality_table(table) == quality_table(document)


def test_the_page_of_variants_is_that_of_its_results():
    """Catches a page, or the function that makes it, that changed alone."""
    pytest.importorskip("triton")
    from eval.benchmarks.variants import variants_page

    paths = sorted(path for path in PATHS if KINDS[path] == "bench variants")
    page = variants_page([read_result(path).document for path in paths])
    assert (RESULTS / "variants.md").read_text() == page
