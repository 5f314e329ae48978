"""Curves of training: `python -m eval training`."""

import json

import pytest
from eval_helpers import run_command
from PIL import Image

from eval.codebooks import training


def write_log(folder, lines, end=""):
    folder.mkdir()
    (folder / "log.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines) + end)
    return folder


def test_training_curves_are_means_over_equal_parts(tmp_path):
    """Fails for figures by layer in either form, a preview line of its own, or a cut last line."""
    lines = [
        {"step": 1, "samples": 4, "loss": 8.0, "quantization_error": {"a.b": 0.5, "c": 0.1}},
        {"step": 2, "samples": 8, "loss": 4.0, "quantization_error/a.b": 0.3},
        {"step": 2, "capture": {"a.b": 0.9}},
        {"step": 3, "samples": 12, "loss": 1.0, "note": "text", "final": True},
    ]
    steps = training.read_run(write_log(tmp_path / "run", lines, end='{"step": 4, "lo'))
    assert training.thin(steps, 2) == {
        "step": [1.5, 3],
        "samples": [6, 12],
        "loss": [6, 1],
        "quantization_error/a.b": [0.4, None],
        "quantization_error/c": [0.1, None],
        "capture/a.b": [0.9, None],
    }
    assert training.thin(steps, 100)["loss"] == [8, 4, 1]


def test_training_panels():
    """Layers lie faint behind their mean; runs without a count of samples are shown over steps."""
    first = {"step": [1, 2], "samples": [10, 20], "loss": [3, 1], "active_ratio/a": [0.2, 0.4]}
    first["active_ratio/b"] = [0.4, None]
    second = {"step": [5], "samples": [6], "loss": [2]}
    (loss,), (ratio,) = training.training_rows({"one": first, "two": second})
    assert (loss.title, ratio.title) == ("loss", "active ratio")
    lines = [(line.label, line.x, line.y) for line in loss.lines]
    assert lines == [("one", [10, 20], [3, 1]), ("two", [6], [2])]
    assert [x.y for x in ratio.lines] == [[pytest.approx(0.3), None]]
    assert [x.y for x in ratio.faint] == [[0.2, 0.4], [0.4, None]]
    del second["samples"]
    (loss,), _ = training.training_rows({"one": first, "two": second})
    assert [line.x for line in loss.lines] == [[1, 2], [5]]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "is missing, or holds no step yet"),
        ("", "holds no step yet"),
        ('{"step": 1}\n[1]\n', "line 2 of .* is not a JSON object with a step"),
        ('{"step": 1}\n{"loss": 1}\n', "line 2 of .* is not a JSON object with a step"),
        ("nonsense\n", "line 1 of .* is not a JSON object with a step"),
    ],
)
def test_a_bad_log_is_refused(tmp_path, text, message):
    if text is not None:
        (tmp_path / "log.jsonl").write_text(text)
    with pytest.raises(ValueError, match=message):
        training.read_run(tmp_path)


def test_the_training_command_writes_curves_and_plot(tmp_path, monkeypatch):
    steps = [{"step": n, "samples": 2 * n, "loss": 1 / n} for n in range(1, 9)]
    runs = [str(write_log(tmp_path / name, steps)) for name in ("a", "b")]
    arguments = ["--name", "curves", "--points", 4, "--output", tmp_path]
    run_command(monkeypatch, "training", "--runs", ",".join(runs), *arguments)
    document = json.loads((tmp_path / "curves.json").read_text())
    assert list(document["runs"]) == runs
    assert document["runs"][runs[0]]["step"] == [1.5, 3.5, 5.5, 7.5]
    assert Image.open(tmp_path / "curves.png").size[0] > 300
