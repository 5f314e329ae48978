"""Quality and speed of all methods in one table: `python -m eval table`.

Quality comes from `scenes` or `merge`, with columns per image size. Speed is the time of a
step of SD1.5 from `bench steps`, one column per size and run. A time applies to every method that
runs the same computation: the same configuration at the same levels, with the model's projections.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from avq_diffusers import AVQConfig
from eval.methods.avq import LEVELS, config_label, exact_labels
from eval.methods.linfusion import LINFUSION_CONFIG
from eval.methods.registry import AVQ, LINFUSION, TOME, method_label, timed_method
from eval.quality.scene_rows import (
    FACT_COLUMNS,
    MEASURED,
    METRIC_COLUMNS,
    PROTOCOL,
    row_key,
)
from eval.store.markdown import Column, number, rows_table
from eval.store.report import Result, complete

Row = dict[str, Any]
Variant = tuple[str, tuple[int, ...]]

FACTS = ("method", "config", "origin", "sha256", "levels", "effective_codewords")
SPEED_MODEL = "sd15"
# LinFusion is timed in every self-attention layer; these are the levels of mini-sd, which generates
# the scenes.
LINFUSION_LEVELS = (0, 1, 2)


def build_table(results: Sequence[Result]) -> dict[str, Any]:
    """Join results of `scenes`, `merge` and `bench steps` by method.

    Results of one size must share protocol and seeds. Of duplicate rows, the first counts.

    Returns:
        `quality` and `speed`, which say how each column was measured, and `rows` with metrics and
        milliseconds by column.

    Raises:
        ValueError: a result is incomplete, or does not fit the others.
    """
    table: dict[str, dict] = {"quality": {}, "speed": {}, "rows": {}}
    for result in sorted(results, key=_is_speed):  # times go to existing rows
        with complete(result.path):
            (_add_speed if _is_speed(result) else _add_quality)(result, **table)
    return {**table, "rows": list(table["rows"].values())}


def quality_table(table: Mapping[str, Any]) -> str:
    """The table as Markdown; ± is one standard error, over the seeds if there are several."""

    def metric(title: str, column: Column) -> Column:
        return lambda row: column(row["quality"].get(title, {}))

    def time(title: str) -> Column:
        return lambda row: number(row["ms"].get(title))

    columns = {
        f"{name}, {title}": metric(title, column)
        for title in table["quality"]
        for name, column in METRIC_COLUMNS.items()
    }
    columns |= {f"UNet ms, {title}": time(title) for title in table["speed"]}
    return rows_table(FACT_COLUMNS | columns, table["rows"])


def _is_speed(result: Result) -> bool:
    return result.kind == "bench steps"


def _add_quality(
    result: Result, quality: dict[str, Row], speed: dict[str, Row], rows: dict[Any, Row]
) -> None:
    document = result.document
    title = f"{document['size']}²" + (", ScaleCrafter" if document["scalecrafter"] else "")
    protocol = {
        **{name: document[name] for name in PROTOCOL},
        "num_images": document["rows"][0]["num_images"],
        "first_seeds": sorted({run["first_seed"] for run in document.get("runs", [document])}),
    }
    if quality.setdefault(title, protocol) != protocol:
        raise ValueError(
            f"{result.path} and an earlier result have images of {title}, but another protocol or "
            "other seeds; average seeds with merge first."
        )
    for row in document["rows"]:
        variant = _variant(row)
        facts = {name: row.get(name) for name in FACTS} | {"levels": list(variant[1])}
        entry = _entry(rows, (row["method"], variant), facts)
        if entry["sha256"] != facts["sha256"]:
            raise ValueError(
                f"{result.path} and an earlier result have images of different versions of "
                f"{row['method']}: the folder's digest differs; make one of them again."
            )
        entry["quality"].setdefault(title, {name: row[name] for name in row if name in MEASURED})


def _add_speed(
    result: Result, quality: dict[str, Row], speed: dict[str, Row], rows: dict[Any, Row]
) -> None:
    document = result.document
    for timed in document["rows"]:
        if timed["model"] != SPEED_MODEL:
            continue
        title = f"{timed['size']}² ({timed['title']}; {timed['run']})"
        facts = {
            "unet": timed["title"],
            "size": timed["size"],
            "run": timed["run"],
            "file": result.path.name,
            "device": document["environment"]["device"],
        }
        if speed.setdefault(title, facts) != facts:
            raise ValueError(
                f"{result.path} and {speed[title]['file']} both have times of {title}; leave one "
                "out."
            )
        variant, facts = _timed(timed["method"])
        same = [entry for (_, other), entry in rows.items() if other == variant]
        for entry in same or [_entry(rows, (timed["method"], variant), facts)]:
            entry["ms"][title] = timed["ms"]


def _entry(rows: dict[Any, Row], key: tuple[str, Variant], facts: Row) -> Row:
    """The row of a method, a new one if there is none."""
    return rows.setdefault(key, {**facts, "quality": {}, "ms": {}})


def _variant(row: Row) -> Variant:
    """What a row from `scenes` computes. Exact attention and real images have no levels."""
    _, levels = row_key(row)
    config = row.get("config") or row["method"]
    fields = [f"{name} {value}" for name, value in row.get("fields", {}).items()]
    is_tuned = row.get("origin") == "distilled" and config != LINFUSION_CONFIG
    return ", ".join([config, *fields, *["tuned"] * is_tuned]), levels


def _timed(name: str) -> tuple[Variant, Row]:
    """What a row from `bench steps` computes, and its facts."""
    name = str(AVQConfig()) if name == AVQ else name
    facts = dict.fromkeys(FACTS) | {"method": method_label(name), "levels": []}
    try:
        method = timed_method(name)
    except ValueError:  # an older version's
        return (name, LEVELS), facts
    config = method.config
    if config is None:
        others = {TOME: (TOME, method.levels), LINFUSION: (LINFUSION_CONFIG, LINFUSION_LEVELS)}
        return others.get(method.kind, (method.kind, ())), facts
    facts |= {"levels": [*config.levels], "effective_codewords": config.columns}
    labels = [config_label(config, own=method.own), *exact_labels(config)]
    return (", ".join(labels), config.levels), facts
