"""Vision transformers that were fine-tuned with each attention: `python -m eval vision table`.

The rows come from `python -m distill.vision compare`: one of the teacher, one of each attention on
the teacher's weights, and one of each attention and seed after equal steps.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from avq_diffusers import AVQConfig
from avq_diffusers.files import read_log
from eval.store.markdown import markdown_table, number
from eval.store.plots import Line, Panel
from eval.store.report import complete

TEACHER, FLAT = "teacher", "flat@"
WIDE = 8  # times that span more than this factor have a logarithmic axis
LABELS = {"miou": "mean IoU, %", "top1": "top-1, %"}
Row = dict[str, Any]
Result = dict[str, Any]


def read_rows(path: Path) -> Result:
    """The teacher and the rows of all attentions, with seeds brought together.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it is no file of a comparison, or has no attention yet.
    """
    if not path.is_file():
        raise FileNotFoundError(f"there is no file {path}.")
    lines = [line for line in read_log(path) if "failed" not in line]
    with complete(path):
        names = dict.fromkeys(line["name"] for line in lines)
        if TEACHER not in names or len(names) == 1:
            raise ValueError(f"{path} has no rows of attentions and their teacher.")
        names.pop(TEACHER)
        return {
            "teacher": next(line for line in lines if line["name"] == TEACHER),
            "metric": next(line["metric"] for line in lines if "metric" in line),
            "rows": [_together(name, lines) for name in names],
        }


def _together(name: str, lines: Sequence[Row]) -> Row:
    found = [line for line in lines if line["name"] == name]
    untrained = next((line for line in found if line["seed"] is None), {})
    trained = [line for line in found if line["seed"] is not None]
    scores = [line["score"] for line in trained]
    return {
        "name": name,
        "attention": found[0]["attention"],
        "tokens": found[0]["tokens"],
        "ms": untrained.get("ms"),
        "untrained": untrained.get("score"),
        "seeds": [line["seed"] for line in trained],
        "scores": scores,
        "score": mean(scores) if scores else None,
        "error": stdev(scores) / len(scores) ** 0.5 if len(scores) > 1 else None,
        "steps": trained[0]["step"] if trained else 0,
        "elastic": next((_curve(line) for line in trained if line.get("elastic")), {}),
        "layers": trained[0].get("layers", []) if trained else [],
    }


def _curve(line: Row) -> dict[str, float]:
    """Scores by refined parents, with the score at the number of the run itself."""
    own = AVQConfig.parse(line["attention"].partition("/")[0]).num_refined
    scores = {**line["elastic"], str(own): line["score"]}
    return {key: scores[key] for key in sorted(scores, key=int)}


def fine_tuned_table(result: Result) -> str:
    """Scores with one standard error, and kernel times, as Markdown."""
    label = LABELS[result["metric"]]
    return markdown_table(
        ["attention", "kernel, ms", f"{label}, untrained", f"{label}, fine-tuned", "seeds"],
        (
            [
                _label(row),
                number(row["ms"], ".3g"),
                number(row["untrained"], ".1f"),
                number(row["score"], ".2f")
                + ("" if row["error"] is None else f" ± {row['error']:.2f}"),
                str(len(row["scores"])),
            ]
            for row in result["rows"]
        ),
    )


def elastic_table(result: Result) -> str:
    """Scores of the first seed by refined parents, as Markdown; empty without any."""
    rows = [row for row in result["rows"] if row["elastic"]]
    numbers = sorted({int(key) for row in rows for key in row["elastic"]})
    if not rows:
        return ""
    return markdown_table(
        ["attention", *(f"P = {number_}" for number_ in numbers)],
        (
            [row["name"], *(number(row["elastic"].get(str(p)), ".2f") for p in numbers)]
            for row in rows
        ),
    )


def layers_table(result: Result) -> str:
    """Quantization error, active ratio and capture of learned codebooks by layer: heads' means."""
    rows = [row for row in result["rows"] if row["layers"]]
    if not rows:
        return ""
    count = max(len(row["layers"]) for row in rows)
    return markdown_table(
        ["attention", "of", *map(str, range(count))],
        (
            [
                row["name"],
                name.replace("_", " "),
                *(f"{mean(layer[name]):.2f}" for layer in row["layers"]),
            ]
            for row in rows
            for name in row["layers"][0]
        ),
    )


def differences(result: Result) -> list[Row]:
    """AVQ minus flat VQ of equal kernel time: the mean over seeds and its standard error."""
    rows = {row["name"]: row for row in result["rows"]}
    found = []
    for name, flat in rows.items():
        avq = rows.get(name.removeprefix(FLAT))
        if not name.startswith(FLAT) or avq is None:
            continue
        pairs = [
            avq["scores"][avq["seeds"].index(seed)] - score
            for seed, score in zip(flat["seeds"], flat["scores"], strict=True)
            if seed in avq["seeds"]
        ]
        if len(pairs) > 1:
            found.append(
                {
                    "avq": avq["name"],
                    "flat": flat["attention"],
                    "difference": mean(pairs),
                    "error": stdev(pairs) / len(pairs) ** 0.5,
                }
            )
    return found


def fine_tuned_panels(result: Mapping[str, Any]) -> list[list[Panel]]:
    """Scores over kernel time, untrained and fine-tuned; and over refined parents.

    Untrained comes first: all attentions have that score, so each looks alike in all plots.
    """
    label = LABELS[result["metric"]]
    teacher = result["teacher"]["score"]
    panels = []
    for title, field in (("untrained", "untrained"), ("fine-tuned", "score")):
        rows = [row for row in result["rows"] if None not in (row["ms"], row[field])]
        times = [row["ms"] for row in rows]
        panels.append(
            Panel(
                f"{label}, {title}",
                "kernel, ms",
                [Line(_label(row), [row["ms"]], [row[field]]) for row in rows],
                xscale="log" if rows and max(times) > WIDE * min(times) else "linear",
                reference=teacher,
            )
        )
    curves = [row for row in result["rows"] if row["elastic"]]
    if curves:
        lines = [
            Line(_label(row), [int(p) for p in row["elastic"]], list(row["elastic"].values()))
            for row in curves
        ]
        panels.append(Panel(f"{label}, elastic", "refined parents", lines, reference=teacher))
    return [panels]


def _label(row: Row) -> str:
    if row["name"] == row["attention"]:
        return row["name"]
    return f"{row['attention']} (time of {row['name'].removeprefix(FLAT)})"
