"""Training curves of distillation runs, from the `log.jsonl` of each run.

A metric of layers is named `quantization_error/<layer>`, or is an object by layer.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean
from typing import Any

from avq_diffusers.files import read_log
from eval.store.plots import Line, Panel

LOG = "log.jsonl"
AXES = {"step": "optimizer steps", "samples": "samples"}
LOSSES = ("loss", "noise", "output", "feature", "commitment")
LAYER_METRICS = ("quantization_error", "active_ratio", "capture")
LINEAR = ("active_ratio", "capture")

Curves = dict[str, list[float | None]]


def read_run(run: Path) -> list[dict[str, float]]:
    """Read the log of a run: one mapping of names to numbers per step; lines of a step are joined.

    Raises:
        ValueError: the log is missing, empty or damaged.
    """
    steps: dict[int, dict[str, float]] = {}
    for line in read_log(run / LOG):
        steps.setdefault(line["step"], {}).update(_flat(line))
    if not steps:
        raise ValueError(f"{run / LOG} is missing, or holds no step yet.")
    return list(steps.values())


def thin(steps: Sequence[Mapping[str, float]], num_points: int) -> Curves:
    """Means over at most `num_points` equal parts of the log; None where a part lacks a metric."""
    size = -(-len(steps) // num_points)
    parts = [steps[start : start + size] for start in range(0, len(steps), size)]
    names = dict.fromkeys(name for step in steps for name in step)
    return {name: [_mean_of(part, name) for part in parts] for name in names}


def training_rows(curves: Mapping[str, Curves]) -> list[list[Panel]]:
    """Panels of losses and layers' metrics over samples, or over steps without these."""
    names = {name for run in curves.values() for name in run}
    losses = [name for name in LOSSES if name in names]
    layer_figures = [
        figure for figure in LAYER_METRICS if any(name.startswith(f"{figure}/") for name in names)
    ]
    axis = "samples" if all("samples" in run for run in curves.values()) else "step"
    return [
        [_panel(curves, figure, axis) for figure in figures]
        for figures in (losses, layer_figures)
        if figures
    ]


def _panel(curves: Mapping[str, Curves], figure: str, axis: str) -> Panel:
    lines, faint = [], []
    for label, run in curves.items():
        layers = [run[name] for name in run if name.startswith(f"{figure}/")]
        values = _mean_of_layers(layers) if layers else run.get(figure)
        if values is not None:
            lines.append(Line(label, run[axis], values))
            faint += [Line(label, run[axis], layer) for layer in layers]
    yscale = "linear" if figure in LINEAR else "log"
    return Panel(figure.replace("_", " "), AXES[axis], lines, faint, yscale=yscale)


def _flat(figures: Mapping[str, Any], prefix: str = "") -> dict[str, float]:
    """Numbers by name, those of nested objects by `outer/inner`; anything else is left out."""
    flat = {}
    for name, value in figures.items():
        if isinstance(value, Mapping):
            flat |= _flat(value, f"{prefix}{name}/")
        elif isinstance(value, int | float) and not isinstance(value, bool):
            flat[prefix + name] = value
    return flat


def _mean_of(steps: Sequence[Mapping[str, float]], name: str) -> float | None:
    values = [step[name] for step in steps if name in step]
    return float(f"{mean(values):.5g}") if values else None


def _mean_of_layers(layers: Sequence[Sequence[float | None]]) -> list[float | None]:
    return [None if None in values else mean(values) for values in zip(*layers, strict=True)]
