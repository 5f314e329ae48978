"""Rows from `scenes`: their tables, and runs that are resumed or averaged."""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from statistics import mean
from typing import Any

from eval.methods.registry import EXACT, METHOD_COLUMNS
from eval.store.markdown import figure, rows_table, standard_error

LIKENESS = ("fid_to_exact", "psnr_median", "psnr_p10")
METRICS = ("fid", "clip_score", "copy_agreement", *LIKENESS, "seconds_per_image")
# What `merge` adds: differences to exact attention's images from the same noise.
LESS_EXACT = {name: f"{name}_less_exact" for name in ("fid", "clip_score", "copy_agreement")}
MEASURED = {f"{name}{end}" for name in (*METRICS, *LESS_EXACT.values()) for end in ("", "_sem")}
PROTOCOL = ("num_inference_steps", "dtype", "size", "scalecrafter", "model", "model_sha256")
PROTOCOL += ("scorer", "scorer_sha256", "guidance_scale")
REAL = "real scenes"
BROKEN = "real scenes, copies broken"


def row_key(row: Mapping[str, Any]) -> tuple[str, tuple[int, ...]]:
    """The method and levels of a row; exact attention is the same at any levels."""
    levels = () if row["method"] == EXACT else tuple(row.get("levels") or ())
    return row["method"], levels


def _psnr_cell(row: Mapping[str, Any]) -> str:
    low = row.get("psnr_p10")
    return figure("psnr_median", ".1f")(row) + ("" if low is None else f" ({low:.1f})")


FACT_COLUMNS = {
    **METHOD_COLUMNS,
    "levels": lambda row: ", ".join(map(str, row_key(row)[1])) or "-",
}
METRIC_COLUMNS = {
    "FID": figure("fid", ".3f"),
    "FID to exact": figure("fid_to_exact", ".3f"),
    "CLIP score": figure("clip_score", ".2f"),
    "copy agreement": figure("copy_agreement", ".3f"),
    "PSNR dB, median (p10)": _psnr_cell,
}
DIFFERENCE_COLUMNS = {
    **FACT_COLUMNS,
    "FID": figure(LESS_EXACT["fid"], "+.3f"),
    "CLIP score": figure(LESS_EXACT["clip_score"], "+.3f"),
    "copy agreement": figure(LESS_EXACT["copy_agreement"], "+.4f"),
}


def scenes_table(rows: Sequence[Mapping[str, Any]]) -> str:
    """The rows as a Markdown table; ± is one standard error."""
    return rows_table(FACT_COLUMNS | METRIC_COLUMNS, rows)


def differences_table(rows: Sequence[Mapping[str, Any]]) -> str:
    """The differences in `LESS_EXACT` of merged rows, as a Markdown table."""
    different = [row for row in rows if row.get(LESS_EXACT["fid"]) is not None]
    return rows_table(DIFFERENCE_COLUMNS, different)


def without_differences(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """The methods of merged rows that lack differences because a run lacks exact attention."""
    compared = (row for row in rows if row["method"] not in (EXACT, REAL, BROKEN))
    return [row["method"] for row in compared if row.get(LESS_EXACT["fid"]) is None]


def finished_rows(
    document: Mapping[str, Any], run: Mapping[str, Any]
) -> dict[str, Mapping[str, Any]]:
    """The rows of a killed run by method, for `score_methods` to continue from.

    Args:
        document: content of the run's file.
        run: protocol and environment that the file must share, except for the date.

    Raises:
        ValueError: the file has a different protocol, commit, version or device.
    """
    stored = {**document, **document.get("environment", {})}
    differing = [
        f"{name} ({stored.get(name)}, now {value})"
        for name, value in run.items()
        if name != "date" and stored.get(name) != value
    ]
    if differing:
        raise ValueError(
            f"only the same run can be resumed, but the stored one differs in "
            f"{', '.join(differing)}; start again without --resume."
        )
    return {row["method"]: row for row in document["rows"]}


def merge_runs(runs: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Average the rows that every seed has: means, and standard errors over the seeds.

    Runs with one seed are joined; of duplicate rows, the first counts. `LESS_EXACT` are differences
    to exact attention in the same run: FID varies more with the noise than between methods.

    Raises:
        ValueError: there are fewer than two seeds, two seeds share noise, no row exists for every
            seed, or the runs differ otherwise.
    """
    seeds = [run.get("first_seed") for run in runs]
    if len(set(seeds)) < 2 or None in seeds:
        raise ValueError(f"expected results of scenes with different seeds, but got seeds {seeds}.")
    protocols = [{name: run.get(name) for name in PROTOCOL} for run in runs]
    by_seed: dict[int, dict[tuple, Mapping[str, Any]]] = {seed: {} for seed in seeds}
    facts: dict[tuple, dict[str, Any]] = {}
    are_alike = all(x == protocols[0] for x in protocols)
    for run in runs:
        exact = next((row for row in run["rows"] if row["method"] == EXACT), None)
        for row in run["rows"]:
            key = row_key(row)
            by_seed[run["first_seed"]].setdefault(key, {**row, **_less_exact(row, exact)})
            said = {name: row[name] for name in row if name not in MEASURED}
            if row["method"] == EXACT:
                said.pop("levels", None)
            are_alike &= facts.setdefault(key, said) == said
    common = [key for key in facts if all(key in rows for rows in by_seed.values())]
    if not are_alike or not common:
        raise ValueError(
            f"the runs must have the same methods and images, and the same {', '.join(PROTOCOL)}."
        )
    ranges = sorted({(x.start, x.stop) for x in map(noise_seeds, runs)})
    for (first, stop), (other, other_stop) in pairwise(ranges):
        if other < stop:
            raise ValueError(
                f"runs that are averaged must share no noise, but have the seeds {first} to "
                f"{stop - 1} and {other} to {other_stop - 1}."
            )
    return [
        {**facts[key], "num_runs": len(by_seed), **_over_runs([x[key] for x in by_seed.values()])}
        for key in common
    ]


def noise_seeds(run: Mapping[str, Any]) -> range:
    """The noise seeds of a run's images."""
    count = max((row["num_images"] for row in run["rows"]), default=0)
    return range(run["first_seed"], run["first_seed"] + count)


def _less_exact(row: Mapping[str, Any], exact: Mapping[str, Any] | None) -> dict[str, float]:
    """Differences between a method's row and exact attention's; rendered images have none."""
    if exact is None or row is exact or row["method"] in (REAL, BROKEN):
        return {}
    return {
        column: row[name] - exact[name]
        for name, column in LESS_EXACT.items()
        if None not in (row.get(name), exact.get(name))
    }


def _over_runs(rows: Sequence[Mapping[str, Any]]) -> dict[str, float | None]:
    """Means and standard errors of each metric, None where a run has none."""
    figures: dict[str, float | None] = {}
    for name in (*METRICS, *LESS_EXACT.values()):
        values = [row.get(name) for row in rows]
        known = None not in values
        figures[name] = mean(values) if known else None
        figures[f"{name}_sem"] = standard_error(values) if known else None
    return figures
