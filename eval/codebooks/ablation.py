"""What each training choice is worth: `python -m eval ablate`.

Each variant is a run of `python -m distill` with a few settings changed. Several run at a time on
one device. The command can be repeated: it resumes runs, leaves finished ones alone, and refuses
runs with other settings.
"""

import json
import subprocess
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from tqdm import tqdm

from eval.codebooks.layer_errors import METRICS
from eval.store.markdown import rows_table

Row = dict[str, Any]

BASE = "base"
# Variant -> settings it changes in the ablated configuration.
VARIANTS: dict[str, Mapping[str, Any]] = {
    BASE: {},
    **{f"learning rate {rate}": {"learning_rate": rate} for rate in (0.0005, 0.001)},
    "EMA decay 0.9": {"codebooks.decay_start": 0.9, "codebooks.decay_end": 0.9},
    "EMA decay 0.999": {"codebooks.decay_start": 0.999, "codebooks.decay_end": 0.999},
    **{
        f"commitment {weight}": {"objective.commitment_weight": weight}
        for weight in (0.0, 0.01, 0.1, 1.0)
    },
    "P refined in training": {"objective.full_spawning": "false"},
    "dead codewords move": {"codebooks.dead_threshold": 1.0},
    "children unconstrained": {"objective.project_children": "false"},
    "DiVeQ": {"objective.diveq": "true"},
    "no noise loss": {"objective.noise_weight": 0.0},
    "no feature loss": {"objective.feature_weight": 0.0},
    "key norm": {"avq.key_norm": "true"},
}
# What two files must share for their runs to go into one table.
PROTOCOL = ("config", "overrides", "num_images", "num_timesteps")


def train_variants(
    config: Path,
    output: Path,
    variants: Sequence[str],
    *,
    seeds: Sequence[int],
    parallel: int,
    overrides: Sequence[str],
) -> dict[str, Path]:
    """Finish training all variants; return the codebooks by `VARIANT, seed S`.

    Args:
        config: YAML file for `distill`.
        output: folder of the runs.
        variants: keys of `VARIANTS`.
        seeds: each variant is trained once per seed.
        parallel: runs at a time.
        overrides: other `--set` options, applied before the variant's.

    Raises:
        ValueError: a variant is unknown, or a run failed.
    """
    if unknown := [name for name in variants if name not in VARIANTS]:
        raise ValueError(f"variants must be some of {', '.join(VARIANTS)}, but got {unknown[0]!r}.")
    runs = {}
    for variant in variants:
        for seed in seeds:
            run = output / f"{config.stem}-{variant.replace(' ', '-').lower()}-seed{seed}"
            changed = [f"{name}={value}" for name, value in VARIANTS[variant].items()]
            runs[f"{variant}, seed {seed}"] = run, [*overrides, f"seed={seed}", *changed]
    with ThreadPoolExecutor(parallel) as pool:
        done = pool.map(lambda run: _distill(config, *run), runs.values())
        list(tqdm(done, desc="runs", total=len(runs)))
    return {name: run / "codebooks" for name, (run, _) in runs.items()}


def ablation_rows(errors: Sequence[Row], names: Mapping[str, str]) -> list[Row]:
    """Variant, seed and metrics of every run.

    Args:
        errors: rows from `measure_errors`, with folders as methods.
        names: folder -> `VARIANT, seed S`.
    """
    rows = []
    for row in errors:
        variant, _, seed = names[row["method"]].rpartition(", seed ")
        figures = {figure: row[figure] for figure in METRICS}
        rows.append({"variant": variant, "seed": int(seed), "config": row["config"], **figures})
    return rows


def join_ablations(documents: Sequence[Mapping[str, Any]]) -> list[Row]:
    """The rows of several `python -m eval ablate` files, by variant and seed.

    Raises:
        ValueError: the files differ in `PROTOCOL`, or two contain the same run.
    """
    for name in PROTOCOL:
        if len({json.dumps(document[name]) for document in documents}) > 1:
            raise ValueError(f"ablations that are merged must be alike, but differ in {name}.")
    rows = [row for document in documents for row in document["rows"]]
    runs = Counter((row["variant"], row["seed"], row["config"]) for row in rows)
    if repeated := [run for run, count in runs.items() if count > 1]:
        variant, seed, config = repeated[0]
        raise ValueError(f"two files have the run {variant}, seed {seed}, judged at {config}.")
    variants = list(dict.fromkeys(row["variant"] for row in rows))
    return sorted(rows, key=lambda row: (variants.index(row["variant"]), row["seed"]))


def ablation_table(rows: Sequence[Row]) -> str:
    """Means over seeds as a Markdown table, with standard errors if there are several.

    Runs with one seed see the same images in the same order, so the output error relative to the
    same seed's `BASE` run varies less.
    """
    base = {
        (row["config"], row["seed"]): row["output_error"] for row in rows if row["variant"] == BASE
    }
    shown = []
    for variant, config in dict.fromkeys((row["variant"], row["config"]) for row in rows):
        runs = [row for row in rows if (row["variant"], row["config"]) == (variant, config)]
        judged = [run for run in runs if (config, run["seed"]) in base]
        over = [run["output_error"] / base[config, run["seed"]] for run in judged]
        shown.append(
            {
                **{"variant": variant, "config": config, "seeds": len(runs)},
                f"error / {BASE}, same seed": _over_seeds(over),
                **{x: _over_seeds([run[name] for run in runs]) for name, x in METRICS.items()},
            }
        )
    return rows_table({title: title for title in shown[0]}, shown)


def _over_seeds(values: Sequence[float | None]) -> str:
    known = [value for value in values if value is not None]  # flat: no capture
    if not known:
        return "-"
    error = f" ± {stdev(known) / len(known) ** 0.5:.1g}" if len(known) > 1 else ""
    return f"{mean(known):.3g}{error}"


def _distill(config: Path, run: Path, settings: Sequence[str]) -> None:
    from eval.benchmarks.distillation import last_error

    command = [sys.executable, "-m", "distill", "--config", str(config), "--output", str(run)]
    changes = [f"--set={setting}" for setting in settings]
    done = subprocess.run([*command, "--resume", *changes], capture_output=True, text=True)
    if done.returncode:
        raise ValueError(f"the run {run} failed: {last_error(done.stderr)}")
