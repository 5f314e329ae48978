"""What each training choice is worth: `python -m eval ablate`.

Each variant is a run of `python -m distill` with a few settings changed. Several run at a time on
one device. The command can be repeated: it resumes runs, leaves finished ones alone, and refuses
runs with other settings.
"""

import subprocess
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import mean
from typing import Any

from tqdm import tqdm

from eval.codebooks.layer_errors import METRICS
from eval.store.markdown import rows_table, standard_error

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
        ValueError: a run failed.
    """
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
    error = standard_error(known)
    return f"{mean(known):.3g}" + ("" if error is None else f" ± {error:.1g}")


def _distill(config: Path, run: Path, settings: Sequence[str]) -> None:
    from eval.benchmarks.distillation import last_error

    command = [sys.executable, "-m", "distill", "--config", str(config), "--output", str(run)]
    changes = [f"--set={setting}" for setting in settings]
    done = subprocess.run([*command, "--resume", *changes], capture_output=True, text=True)
    if done.returncode:
        raise ValueError(f"the run {run} failed: {last_error(done.stderr)}")
