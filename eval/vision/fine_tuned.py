"""Vision transformers fine-tuned with each attention: `python -m eval vision table`.

The rows come from `python -m distill.vision compare`: one for the teacher, and one per attention
and seed after the same number of steps. For the first seed they include the score before training.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean
from typing import Any

from avq_diffusers.files import read_log
from eval.store.markdown import number, rows_table, standard_error, with_error
from eval.store.report import complete

TEACHER, FLAT = "teacher", "flat@"
LABELS = {"miou": "mean IoU, %", "top1": "top-1, %"}
Row = dict[str, Any]


def read_rows(path: Path) -> dict[str, Any]:
    """The teacher and the rows of all attentions, with seeds combined.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it is not a comparison's file, or has no attention yet.
    """
    if not path.is_file():
        raise FileNotFoundError(f"there is no file {path}.")
    with complete(path):
        found: dict[str, list[Row]] = {}
        for line in read_log(path):
            found.setdefault(line["name"], []).append(line)
        if TEACHER not in found or len(found) == 1:
            raise ValueError(f"{path} has no rows of attentions and their teacher.")
        teacher, *_ = found.pop(TEACHER)
        rows = [_together(of_name) for of_name in found.values()]
        return {"teacher": teacher, "metric": rows[0]["metric"], "rows": rows}


def _together(lines: Sequence[Row]) -> Row:
    scores = [line["score"] for line in lines]

    def known(name: str) -> float | None:  # from the first seed, which may come last
        return next((line[name] for line in lines if line[name] is not None), None)

    return {
        **{name: lines[0][name] for name in ("name", "attention", "metric", "step")},
        **{name: known(name) for name in ("ms", "untrained")},
        "seeds": [line["seed"] for line in lines],
        "scores": scores,
        "score": mean(scores),
        "error": standard_error(scores),
    }


def fine_tuned_table(result: Mapping[str, Any]) -> str:
    """Scores with one standard error, and kernel times, as Markdown."""
    label = LABELS[result["metric"]]
    columns = {
        "attention": _label,
        "kernel, ms": lambda row: number(row["ms"], ".3g"),
        f"{label}, untrained": lambda row: number(row["untrained"], ".1f"),
        f"{label}, fine-tuned": lambda row: with_error(row["score"], row["error"], ".2f"),
        "seeds": lambda row: len(row["scores"]),
    }
    return rows_table(columns, result["rows"])


def differences(result: Mapping[str, Any]) -> list[Row]:
    """AVQ minus flat VQ with equal kernel time: mean over seeds and its standard error."""
    rows = {row["name"]: row for row in result["rows"]}
    found = []
    for name, avq in rows.items():
        if flat := rows.get(FLAT + name):
            scores = dict(zip(flat["seeds"], flat["scores"], strict=True))
            both = zip(avq["seeds"], avq["scores"], strict=True)
            pairs = [score - scores[seed] for seed, score in both if seed in scores]
            if len(pairs) > 1:
                names = {"avq": name, "flat": flat["attention"]}
                found.append({**names, "difference": mean(pairs), "error": standard_error(pairs)})
    return found


def _label(row: Row) -> str:
    if row["name"] == row["attention"]:
        return row["name"]
    return f"{row['attention']} (time of {row['name'].removeprefix(FLAT)})"
