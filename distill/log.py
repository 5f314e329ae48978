"""Figures of a run: lines of `log.jsonl`, and the tracker's."""

import json
import math
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor

from avq_diffusers.files import atomic_write, naming
from distill.config import DistillConfig
from distill.config_file import flatten, plain_values

PROJECT = "avq-distill"


class LogFile:
    """The lines on disk, each a JSON object; the last one is `last`.

    Args:
        output: folder of the run, made if need be.
        step: lines of later steps and of the end (`final`) are dropped, as the run writes them
            again.

    Raises:
        ValueError: of `read_log`.
        OSError: the disk is full or not writable, here or in `write`.
    """

    def __init__(self, output: Path, step: int) -> None:
        self.path = log_path(output)
        output.mkdir(parents=True, exist_ok=True)
        lines = [x for x in read_log(output) if x["step"] <= step and "final" not in x]
        self.last: dict[str, Any] = lines[-1] if lines else {}
        with atomic_write(self.path) as temporary:
            temporary.write_text("".join(json.dumps(line) + "\n" for line in lines))

    def write(self, step: int, **figures: float | dict[str, float]) -> None:
        """Write the figures of a step."""
        self.last = _rounded({"step": step, **figures})
        with naming(self.path), self.path.open("a") as file:
            file.write(json.dumps(self.last) + "\n")


class Log:
    """The log of a distillation run: the lines on disk, and the tracker.

    Only the main process writes.

    Figures of every layer are mappings by layer; trackers get them as `figure/layer`.

    Args:
        output: folder of the run.
        config: kept by the tracker.
        accelerator: with the tracker.
        step: of `LogFile`.
    """

    def __init__(
        self, output: Path, config: DistillConfig, accelerator: Accelerator, step: int
    ) -> None:
        self.accelerator = accelerator
        if not accelerator.is_main_process:
            return
        self.file = LogFile(output, step)
        values = flatten(plain_values(config))
        accelerator.init_trackers(
            PROJECT,
            {name: str(value) for name, value in values.items()},
            init_kwargs={"tensorboard": {"purge_step": step + 1}},
        )

    def write(self, step: int, **figures: float | dict[str, float]) -> None:
        """Write the figures of a step."""
        self.file.write(step, **figures)
        self.accelerator.log(flatten(figures, "/"), step=step)


def reduced_means(
    totals: dict[str, Tensor], count: int, step: int, accelerator: Accelerator
) -> dict[str, float]:
    """Means over the `count` steps up to `step`, and over all processes, of summed figures.

    Raises:
        FloatingPointError: one is not finite.
    """
    summed = torch.stack([value.float() for value in totals.values()]) / count
    means = dict(zip(totals, accelerator.reduce(summed, reduction="mean").tolist(), strict=True))
    # A scaled gradient may overflow: that step is skipped, and the scale halved.
    watched = {k: v for k, v in means.items() if k != "grad_norm" or accelerator.scaler is None}
    if not all(math.isfinite(value) for value in watched.values()):
        listed = ", ".join(f"{name} {value:.4g}" for name, value in means.items())
        raise FloatingPointError(
            f"training stopped: a loss or gradient of the {count} steps up to {step} is not finite "
            f"({listed}); the last checkpoint is from before."
        )
    return means


def log_path(output: Path) -> Path:
    """The file in the folder of a run."""
    return output / "log.jsonl"


def read_log(output: Path) -> list[dict[str, Any]]:
    """The whole lines of a run; a kill may have cut the last one.

    Raises:
        ValueError: a line is not a JSON object with a step.
    """
    path = log_path(output)
    lines = path.read_bytes().split(b"\n")[:-1] if path.exists() else []
    read = []
    for number, line in enumerate(lines, 1):
        try:
            read.append(json.loads(line))
            valid = isinstance(read[-1]["step"], int)
        except (KeyError, RecursionError, TypeError, ValueError):
            valid = False
        if not valid:
            raise ValueError(
                f"line {number} of {path} is not a JSON object with a step; delete that line to go "
                f"on."
            )
    return read


def _rounded(value: Any) -> Any:
    """Six digits of every figure that is not a count."""
    if isinstance(value, dict):
        return {name: _rounded(figure) for name, figure in value.items()}
    return value if isinstance(value, int) else float(f"{value:.6g}")
