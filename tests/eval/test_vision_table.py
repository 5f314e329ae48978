"""`python -m eval vision table`: the rows of a comparison as tables and a plot."""

import json

import pytest
from eval_helpers import run_command

from eval.__main__ import main
from eval.vision.fine_tuned import (
    differences,
    elastic_table,
    fine_tuned_panels,
    fine_tuned_table,
    layers_table,
    read_rows,
)

TEACHER = {"name": "teacher", "seed": 0, "attention": "exact", "step": 9, "score": 80.0}


def row(name, seed, score, *, attention=None, **more):
    return {
        "name": name,
        "seed": seed,
        "attention": attention or name,
        "step": 0 if seed is None else 4,
        "metric": "miou",
        "score": score,
        "tokens": 1370,
        "ms": 0.25 if seed is None else None,
        **more,
    }


ROWS = [
    TEACHER,
    row("M4P2C2", None, 10.0),
    row("M4P2C2", 0, 70.0, elastic={"1": 60.0, "4": 75.5}, layers=[{"capture": [0.5, 0.7]}] * 2),
    row("flat@M4P2C2", None, 5.0, attention="M9"),
    row("flat@M4P2C2", 1, 68.0, attention="M9"),
    row("flat@M4P2C2", 0, 69.0, attention="M9"),
    row("M4P2C2", 1, 72.0),
    row("swin", None, 1.0),
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
    table = fine_tuned_table(result).splitlines()
    assert table[2] == "| M4P2C2 | 0.25 | 10.0 | 71.00 ± 1.00 | 2 |"
    assert table[3] == "| M9 (time of M4P2C2) | 0.25 | 5.0 | 68.50 ± 0.50 | 2 |"
    assert table[4] == "| swin | 0.25 | 1.0 | - | 0 |"
    (pair,) = differences(result)
    assert (pair["avq"], pair["flat"]) == ("M4P2C2", "M9")
    assert pair["difference"] == pytest.approx(2.5)
    assert pair["error"] == pytest.approx(1.5)
    assert elastic_table(result).splitlines()[2] == "| M4P2C2 | 60.00 | 70.00 | 75.50 |"
    assert layers_table(result).splitlines()[2] == "| M4P2C2 | capture | 0.60 | 0.60 |"


def test_panels_show_every_attention_with_a_score(path):
    untrained, fine_tuned, elastic = fine_tuned_panels(read_rows(path))[0]
    assert [line.y for line in fine_tuned.lines] == [[71.0], [68.5]]
    assert len(untrained.lines) == 3
    assert elastic.lines[0].x == [1, 2, 4]
    assert fine_tuned.reference == 80.0


def test_command_and_its_errors(path, monkeypatch, capsys, tmp_path):
    run_command(monkeypatch, "vision", "table", path, "--output", tmp_path)
    assert "M4P2C2 minus M9: 2.50 ± 1.50" in capsys.readouterr().out
    assert (tmp_path / "vision_run.png").is_file()
    before = (tmp_path / "vision_run.png").read_bytes()
    (tmp_path / "vision_run.png").unlink()
    run_command(monkeypatch, "plot", tmp_path / "vision_run.json")
    assert (tmp_path / "vision_run.png").read_bytes() == before
    for content, message in (
        (json.dumps(TEACHER) + "\n", "has no rows of attentions and their teacher"),
        (json.dumps({"name": "teacher", "step": 1}) + "\n", "has no rows"),
        ('{"step": 1}\n', "is not a complete result (KeyError"),
    ):
        path.write_text(content)
        monkeypatch.setattr("sys.argv", ["eval", "vision", "table", str(path)])
        with pytest.raises(SystemExit) as error:
            main()
        assert error.value.code == 2
        assert message in capsys.readouterr().err


ANALYSES = {
    "attention": "M4P2C2",
    "metric": "top1",
    "environment": {"device": "a GPU"},
    "rows": [
        {"analysis": "elastic", "num_refined": 1, "score": 70.0, "capture": 0.4},
        {"analysis": "importance", "num_refined": 1, "exact": 0.4, "tiled": 0.3, "best": 0.5},
        {"analysis": "order", "order": "gilbert", "query_tile": 64, "score": 71.0},
        {"analysis": "order", "order": "gilbert", "query_tile": 32, "score": 72.0},
        *(
            {
                "analysis": "layers",
                "layer": layer,
                "head": head,
                "capture": 0.2 + layer + head,
                "commitment": 3.0,
                "active_ratio": 1.0,
            }
            for layer in range(2)
            for head in range(2)
        ),
    ],
}


def test_analyses(tmp_path, monkeypatch, capsys):
    path = tmp_path / "run" / "analyses.json"
    path.parent.mkdir()
    path.write_text(json.dumps(ANALYSES))
    run_command(monkeypatch, "vision", "analyses", path, "--output", tmp_path)
    printed = capsys.readouterr().out
    assert "| 1 | 70.00 | 0.400 |" in printed
    assert "| query order: top-1, % | tile 32 | tile 64 |" in printed
    assert "| gilbert | 72.00 | 71.00 |" in printed
    assert "| 1 | 0.300 | 0.400 | 0.500 |" in printed
    assert "| 1 | 1.700 | 3.000 | 1.000 |" in printed
    result = json.loads((tmp_path / "vision_analyses_run.json").read_text())
    assert result["run"] == {"device": "a GPU"}
    assert (tmp_path / "vision_analyses_run.png").is_file()
    path.write_text("[]")
    monkeypatch.setattr("sys.argv", ["eval", "vision", "analyses", str(path)])
    with pytest.raises(SystemExit):
        main()
    assert "is no file of python -m distill.vision analyse" in capsys.readouterr().err
