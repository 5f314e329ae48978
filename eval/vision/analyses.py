"""Analyses of a fine-tuned vision transformer: `python -m eval vision analyses`.

The rows come from `python -m distill.vision analyse`.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from statistics import mean
from typing import Any

from eval.store.markdown import rows_table
from eval.store.plots import Line, Panel, lines
from eval.vision.fine_tuned import LABELS

Row = dict[str, Any]
OF_HEADS = {"capture": "capture", "commitment": "commitment loss", "active_ratio": "active ratio"}
CHOICES = {"tiled": "tiled importance", "exact": "exact importance", "best": "true attention"}


def read_analyses(path: Path) -> dict[str, Any]:
    """The document with a run's analyses.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it is not a file of analyses.
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
        raise ValueError(f"{path} is not a file from python -m distill.vision analyse.")
    return document


def analyses_tables(document: Mapping[str, Any]) -> list[str]:
    """A Markdown table per analysis; a layer's heads are averaged."""
    score = {LABELS[document["metric"]]: "score"}
    columns = {
        "elastic": {"refined parents": "num_refined", **score, "capture": "capture"},
        "order": {"query order": "order", "query tile": "query_tile", **score},
        "importance": {
            "refined parents: capture by": "num_refined",
            **{title: field for field, title in CHOICES.items()},
        },
        "layers": {"layer": "layer", **{title: field for field, title in OF_HEADS.items()}},
    }
    return [rows_table(shown, _rows(document, name)) for name, shown in columns.items()]


def analyses_panels(document: Mapping[str, Any]) -> list[list[Panel]]:
    """Scores and capture by refined parents; capture and commitment per layer, heads faint."""
    name = document["attention"]

    def line(label: str, analysis: str, x: str, y: str) -> Line:
        (found,) = lines(_rows(document, analysis), lambda row: label, x, y)
        return found

    captures = [line(x, "importance", "num_refined", field) for field, x in CHOICES.items()]
    scores = [line(name, "elastic", "num_refined", "score")]
    first = [
        Panel(LABELS[document["metric"]], "refined parents", scores),
        Panel("capture", "refined parents", captures),
    ]
    of_heads = [row for row in document["rows"] if row["analysis"] == "layers"]
    second = []
    for field in ("capture", "commitment"):
        heads = lines(of_heads, "head", "layer", field)
        faint = [Line(name, head.x, head.y) for head in heads]
        means = [line(name, "layers", "layer", field)]
        second.append(Panel(OF_HEADS[field], "layer", means, faint=faint, from_zero=True))
    return [first, second]


def _rows(document: Mapping[str, Any], analysis: str) -> list[Row]:
    """The rows of an analysis; for layers, means over heads."""
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
