"""Analyses of a fine-tuned vision transformer: `python -m eval vision analyses`.

The rows come from `python -m distill.vision analyse`.
"""

import json
from collections.abc import Sequence
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
        kinds = {row["analysis"] for row in document["rows"]}
        complete = {"attention", "metric", "environment"} <= document.keys()
    except (ValueError, LookupError, TypeError, AttributeError):
        complete, kinds = False, set()
    if not complete or not kinds:
        raise ValueError(f"{path} is no file of python -m distill.vision analyse.")
    return document


def analyses_tables(document: dict[str, Any]) -> list[str]:
    """A Markdown table for each analysis; heads of a layer are averaged."""
    label = LABELS[document["metric"]]
    rows = document["rows"]
    elastic, orders = _of(rows, "elastic"), _of(rows, "order")
    tiles = sorted({row["query_tile"] for row in orders})
    scores = {(row["order"], row["query_tile"]): row["score"] for row in orders}
    tables = [
        markdown_table(
            ["refined parents", label, "capture"],
            (
                [str(row["num_refined"]), number(row["score"], ".2f"), f"{row['capture']:.3f}"]
                for row in elastic
            ),
        ),
        markdown_table(
            [f"query order: {label}", *(f"tile {tile}" for tile in tiles)],
            (
                [order, *(number(scores[order, tile], ".2f") for tile in tiles)]
                for order in dict.fromkeys(row["order"] for row in orders)
            ),
        ),
        markdown_table(
            ["refined parents: capture by", *CHOICES.values()],
            (
                [str(row["num_refined"]), *(f"{row[name]:.3f}" for name in CHOICES)]
                for row in _of(rows, "importance")
            ),
        ),
        markdown_table(
            ["layer", *OF_HEADS.values()],
            (
                [str(layer), *(f"{mean(row[name] for row in heads):.3f}" for name in OF_HEADS)]
                for layer, heads in _layers(rows).items()
            ),
        ),
    ]
    return tables


def analyses_panels(document: dict[str, Any]) -> list[list[Panel]]:
    """Scores and capture by refined parents; capture and commitment of layers, heads faint."""
    rows = document["rows"]
    elastic, importance = _of(rows, "elastic"), _of(rows, "importance")
    layers = _layers(rows)
    refined = [row["num_refined"] for row in elastic]
    name = document["attention"]
    first = [
        Panel(
            LABELS[document["metric"]],
            "refined parents",
            [Line(name, refined, [row["score"] for row in elastic])],
        ),
        Panel(
            "capture",
            "refined parents",
            [
                Line(label, refined, [row[choice] for row in importance])
                for choice, label in CHOICES.items()
            ],
        ),
    ]
    second = []
    for field in ("capture", "commitment"):
        heads = len(next(iter(layers.values())))
        faint = [
            Line(name, list(layers), [found[head][field] for found in layers.values()])
            for head in range(heads)
        ]
        means = [mean(row[field] for row in found) for found in layers.values()]
        line = Line(name, list(layers), means)
        second.append(Panel(OF_HEADS[field], "layer", [line], faint=faint, from_zero=True))
    return [first, second]


def _of(rows: Sequence[Row], analysis: str) -> list[Row]:
    return [row for row in rows if row["analysis"] == analysis]


def _layers(rows: Sequence[Row]) -> dict[int, list[Row]]:
    layers: dict[int, list[Row]] = {}
    for row in _of(rows, "layers"):
        layers.setdefault(row["layer"], []).append(row)
    return layers
