"""The results in the repository: their commands exist, and plot them again."""

import shlex
import shutil
from pathlib import Path

import pytest
import typer
from matplotlib.figure import Figure

from eval.__main__ import app
from eval.commands import stored
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


def test_the_page_of_variants_is_that_of_its_results():
    """Catches a page, or the function that makes it, that changed alone."""
    pytest.importorskip("triton")
    from eval.benchmarks.variants import variants_page

    paths = sorted(path for path in PATHS if KINDS[path] == "bench variants")
    page = variants_page([read_result(path).document for path in paths])
    assert (RESULTS / "notes" / "variants.md").read_text() == page
