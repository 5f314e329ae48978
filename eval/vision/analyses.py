"""Analyses of a fine-tuned vision transformer: `python -m eval vision analyses`.

The rows come from `python -m distill.vision analyse`.
"""

import json
from pathlib import Path
from statistics import mean
from typing import Any

from eval.store.markdown import markdown_table, number
from eval.store.plots import Line, Panel
from eval.vision.fine_tuned import LABELS

Row = dict[str, Any]
OF_HEADS = {"capture": "capture", "commitment": "commitment loss", "active_ratio": "active ratio"}
CHOICES = {"tiled": "tiled importance", "exact": "exact importance", "best": "true attention"}


def read_analyses(path: Path) -> dict[str, Any]:
    """The document of a run's analyses.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it is no file of analyses.
    """
    if not path.is_file():
        raise FileNotFoundError(f"there is no file {path}.")
    try:
        document = json.loads(path.read_text())
        complete = {"attention", "metric", "environment"} <= document.keys()
        complete &= all("analysis" in row for row in document["rows"])
    except (ValueError, LookupError, TypeError, AttributeError):
        complete = False
    if not complete:
        raise ValueError(f"{path} is no file of python -m distill.vision analyse.")
    return document


def analyses_tables(document: dict[str, Any]) -> list[str]:
    """A Markdown table for each analysis; heads of a layer are averaged."""
    label = LABELS[document["metric"]]
    columns = {
        "elastic": {"num_refined": "refined parents", "score": label, "capture": "capture"},
        "order": {"order": "query order", "query_tile": "query tile", "score": label},
        "importance": {"num_refined": "refined parents: capture by", **CHOICES},
        "layers": {"layer": "layer", **OF_HEADS},
    }
    return [
        markdown_table(
            list(titles.values()),
            ([_cell(row[name]) for name in titles] for row in _rows(document, analysis)),
        )
        for analysis, titles in columns.items()
    ]


def analyses_panels(document: dict[str, Any]) -> list[list[Panel]]:
    """Scores and capture by refined parents; capture and commitment of layers, heads faint."""
    name = document["attention"]

    def line(label: str, analysis: str, x: str, y: str) -> Line:
        rows = _rows(document, analysis)
        return Line(label, [row[x] for row in rows], [row[y] for row in rows])

    scores = [line(name, "elastic", "num_refined", "score")]
    captures = [
        line(label, "importance", "num_refined", choice) for choice, label in CHOICES.items()
    ]
    first = [
        Panel(LABELS[document["metric"]], "refined parents", scores),
        Panel("capture", "refined parents", captures),
    ]
    second = []
    for field in ("capture", "commitment"):
        mean_of_heads = line(name, "layers", "layer", field)
        heads: dict[int, list[float]] = {}
        for row in document["rows"]:
            if row["analysis"] == "layers":
                heads.setdefault(row["head"], []).append(row[field])
        faint = [Line(name, mean_of_heads.x, values) for values in heads.values()]
        panel = Panel(OF_HEADS[field], "layer", [mean_of_heads], faint=faint, from_zero=True)
        second.append(panel)
    return [first, second]


def _rows(document: dict[str, Any], analysis: str) -> list[Row]:
    """The rows of an analysis; of layers, the means over heads."""
    rows = [row for row in document["rows"] if row["analysis"] == analysis]
    if analysis != "layers":
        return rows
    layers: dict[int, list[Row]] = {}
    for row in rows:
        layers.setdefault(row["layer"], []).append(row)
    return [
        {"layer": layer, **{name: mean(row[name] for row in heads) for name in OF_HEADS}}
        for layer, heads in layers.items()
    ]


def _cell(value: Any) -> str:
    return number(value, ".4g") if isinstance(value, float | None) else str(value)
