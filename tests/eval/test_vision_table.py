"""`python -m eval vision table`: rows of `distill.vision` as a table."""

import json

import pytest
from eval_helpers import failed_command, run_command

from eval.vision.fine_tuned import differences, fine_tuned_table, read_rows

TEACHER = {"name": "teacher", "attention": "exact", "step": 9, "score": 80.0}


def row(name, seed, score, *, attention=None, untrained=None):
    return {
        "name": name,
        "seed": seed,
        "attention": attention or name,
        "step": 4,
        "metric": "miou",
        "score": score,
        "untrained": untrained,
        "ms": untrained and 0.25,
    }


ROWS = [
    TEACHER,
    row("M4P2C2", 0, 70.0, untrained=10.0),
    row("flat@M4P2C2", 1, 68.0, attention="M9", untrained=5.0),
    row("flat@M4P2C2", 0, 69.0, attention="M9"),
    row("M4P2C2", 1, 72.0),
    row("swin", 0, 1.0),
]


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "run" / "rows.jsonl"
    path.parent.mkdir()
    path.write_text("".join(json.dumps(line) + "\n" for line in ROWS) + '{"name": "cut')
    return path


def test_seeds_are_joined_and_pairs_are_of_one_seed(path):
    """Catches differences between means of other seeds, and an error of the wrong n."""
    result = read_rows(path)
    assert fine_tuned_table(result).splitlines()[2:] == [
        "| M4P2C2 | 0.25 | 10.0 | 71.00 ± 1.00 | 2 |",
        "| M9 (time of M4P2C2) | 0.25 | 5.0 | 68.50 ± 0.50 | 2 |",
        "| swin | - | - | 1.00 | 1 |",
    ]
    (pair,) = differences(result)
    assert (pair["avq"], pair["flat"]) == ("M4P2C2", "M9")
    assert pair["difference"] == pytest.approx(2.5)
    assert pair["error"] == pytest.approx(1.5)


def test_command_and_its_errors(path, monkeypatch, capsys, tmp_path):
    run_command(monkeypatch, "vision", "table", path, "--output", tmp_path)
    assert "M4P2C2 minus M9: 2.50 ± 1.50" in capsys.readouterr().out
    assert (tmp_path / "vision_run.json").is_file()
    for content, message in (
        (json.dumps(TEACHER) + "\n", "has no rows of attentions and their teacher"),
        ('{"step": 1}\n', "is not a complete result (KeyError"),
    ):
        path.write_text(content)
        assert message in failed_command(monkeypatch, capsys, "vision", "table", path)[1]
