"""Runs of scenes: resumed, and averaged over seeds."""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from statistics import mean
from typing import Any

import numpy as np

from eval.names import EXACT
from eval.quality.scene_rows import (
    BROKEN,
    LESS_EXACT,
    MAKING,
    MEASURED,
    METRICS,
    PROTOCOL,
    REAL,
    row_key,
)


def finished_rows(
    document: Mapping[str, Any], protocol: Mapping[str, Any], environment: Mapping[str, Any]
) -> dict[str, Mapping[str, Any]]:
    """The rows of a killed run by method, for `score_methods` to go on from.

    Args:
        document: content of the run's file.
        protocol: fields that the file must share.
        environment: environment that the file must share, except for the date.

    Raises:
        ValueError: the file has another protocol, commit, version or device.
    """
    stored = {**document, **document.get("environment", {})}
    expected = {**protocol, **environment}
    differing = [
        f"{name} ({stored.get(name)}, now {value})"
        for name, value in expected.items()
        if name != "date" and stored.get(name) != value
    ]
    if differing:
        raise ValueError(
            f"only the same run can go on, but the stored one differs in {', '.join(differing)}; "
            "start again without --resume."
        )
    return {row["method"]: row for row in document["rows"]}


def merge_runs(runs: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Average the rows that every seed has: means, and standard errors over the seeds.

    Runs of one seed are joined; the first copy of a row counts. `LESS_EXACT` are differences to
    exact attention in the same run: FID varies more with the noise than between methods.

    Raises:
        ValueError: there are fewer than two seeds, two seeds share noise, no row is of every seed,
            or the runs differ otherwise.
    """
    seeds = [run.get("first_seed") for run in runs]
    if len(set(seeds)) < 2 or None in seeds:
        raise ValueError(f"expected results of scenes with different seeds, but got seeds {seeds}.")
    protocols = [{name: run.get(name) for name in PROTOCOL} for run in runs]
    by_seed: dict[int, dict[tuple, Mapping[str, Any]]] = {seed: {} for seed in seeds}
    facts: dict[tuple, dict[str, Any]] = {}
    are_alike = all(x == protocols[0] for x in protocols) and not said_otherwise(runs)
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
            "the runs must have the same methods and images, and the same "
            f"{', '.join((*PROTOCOL, *MAKING))}."
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
    """The seeds of the noise of a run's images."""
    count = max((row["num_images"] for row in run["rows"]), default=0)
    return range(run["first_seed"], run["first_seed"] + count)


def said_otherwise(runs: Sequence[Mapping[str, Any]]) -> list[str]:
    """The names in `MAKING` that have different values in two of the runs."""
    return [name for name in MAKING if len({run.get(name) for run in runs} - {None}) > 1]


def _less_exact(row: Mapping[str, Any], exact: Mapping[str, Any] | None) -> dict[str, float]:
    """Differences of a method's row to exact attention's; rendered images have none."""
    if exact is None or row is exact or row["method"] in (REAL, BROKEN):
        return {}
    return {
        column: row[name] - exact[name]
        for name, column in LESS_EXACT.items()
        if None not in (row.get(name), exact.get(name))
    }


def _over_runs(rows: Sequence[Mapping[str, Any]]) -> dict[str, float | None]:
    """Means and standard errors of each metric, None where a run has none."""
    figures = {}
    for name in (*METRICS, *LESS_EXACT.values()):
        values = [row.get(name) for row in rows]
        known = None not in values
        figures[name] = mean(values) if known else None
        figures[f"{name}_sem"] = _standard_error(np.array(values)) if known else None
    return figures


def _standard_error(values: np.ndarray) -> float:
    return float(values.std(ddof=1) / len(values) ** 0.5)
