"""What each choice of the training is worth: `python -m eval ablate`.

Every variant is a run of the real `python -m distill` with a few settings changed, several at a
time on one device. Runs that are there are resumed, so the command can be repeated: finished ones
make no further step, and those of other settings are refused.
"""

import subprocess
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from tqdm import tqdm

from eval.benchmarks.distillation import last_error

Row = dict[str, Any]

BASE = "base"
# The settings that a variant changes in the configuration that is ablated.
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
FIGURES = {
    "output_error": "output error",
    "feature_relative_mse": "feature, relative MSE",
    "quantization_error": "quantization error",
    "active_ratio": "active ratio",
    "capture": "capture",
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
    """Train what is not trained to its end, and return the codebooks by `VARIANT, seed S`.

    Args:
        config: YAML file of `distill`.
        output: folder of the runs, named by the stem of `config`, variant and seed.
        variants: keys of `VARIANTS`.
        seeds: of the runs; a variant is trained once with each.
        parallel: runs at a time.
        overrides: further `--set` of `distill`, before those of the variant.

    Raises:
        ValueError: a variant is unknown, or a run failed, as one that is there with other settings.
    """
    if unknown := [name for name in variants if name not in VARIANTS]:
        raise ValueError(f"variants must be some of {', '.join(VARIANTS)}, but got {unknown[0]!r}.")

    def train(variant: str, seed: int) -> tuple[str, Path]:
        run = output / f"{config.stem}-{variant.replace(' ', '-').lower()}-seed{seed}"
        changed = [f"{name}={value}" for name, value in VARIANTS[variant].items()]
        _distill(config, run, [*overrides, f"seed={seed}", *changed])
        return f"{variant}, seed {seed}", run / "codebooks"

    cases = [(variant, seed) for variant in variants for seed in seeds]
    with ThreadPoolExecutor(parallel) as pool:
        done = pool.map(lambda case: train(*case), cases)
        return dict(tqdm(done, desc="runs", total=len(cases)))


def ablation_rows(rows: Sequence[Row], names: Mapping[str, str]) -> list[Row]:
    """Means over seeds, with the standard deviation where there are several.

    Args:
        rows: of `measure_errors`; the method is a folder.
        names: `VARIANT, seed S` by folder.
    """
    groups: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        variant = names[row["method"]].rpartition(", seed")[0]
        groups.setdefault((variant, row["config"]), []).append(row)
    return [
        {"variant": variant, "config": config, "num_seeds": len(group), **_statistics(group)}
        for (variant, config), group in groups.items()
    ]


def ablation_table(rows: Sequence[Row]) -> str:
    """The rows as a Markdown table."""
    lines = [
        f"| variant | config | seeds | {' | '.join(FIGURES.values())} |",
        f"|---|---|---|{'---|' * len(FIGURES)}",
    ]
    for row in rows:
        cells = [row["variant"], row["config"], str(row["num_seeds"])]
        for figure in FIGURES:
            value, spread = row[figure], row[f"{figure}_sd"]
            text = "-" if value is None else f"{value:.3g}"
            cells.append(text if spread is None else f"{text} ± {spread:.1g}")
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _statistics(group: Sequence[Row]) -> dict[str, float | None]:
    figures = {}
    for figure in FIGURES:
        values = [row[figure] for row in group if row[figure] is not None]  # flat: no capture
        figures[figure] = mean(values) if values else None
        figures[f"{figure}_sd"] = stdev(values) if len(values) > 1 else None
    return figures


def _distill(config: Path, run: Path, settings: Sequence[str]) -> None:
    command = [sys.executable, "-m", "distill", "--config", str(config), "--output", str(run)]
    command.append("--resume")
    for setting in settings:
        command += ["--set", setting]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise ValueError(f"the run {run} failed: {last_error(done.stderr)}")
