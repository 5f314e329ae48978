"""Metrics of a run: lines of `log.jsonl`, and a tracker."""

import json
import math
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor

from avq_diffusers.files import atomic_write, naming, read_log
from distill.config import DistillConfig
from distill.config_file import flatten, plain_values, save_config

PROJECT = "avq-distill"


class LogFile:
    """The log on disk, one JSON object per line; `last` is the last line.

    Lines after `step` and lines of the end (`final`) are dropped, because the run writes them
    again.

    Raises:
        ValueError: see `read_log`.
        OSError: the disk is full or not writable, also in `write`.
    """

    def __init__(self, output: Path, step: int) -> None:
        self.path = log_path(output)
        output.mkdir(parents=True, exist_ok=True)
        lines = [x for x in read_log(self.path) if x["step"] <= step and "final" not in x]
        self.last: dict[str, Any] = lines[-1] if lines else {}
        with atomic_write(self.path) as temporary:
            temporary.write_text("".join(json.dumps(line) + "\n" for line in lines))

    def write(self, step: int, **metrics: float | dict[str, float]) -> None:
        """Write the metrics of a step."""
        self.last = _rounded({"step": step, **metrics})
        with naming(self.path), self.path.open("a") as file:
            file.write(json.dumps(self.last) + "\n")


class Log:
    """The log of a distillation run: a `LogFile` and the tracker. Only the main process writes.

    Metrics per layer are mappings. The tracker gets them as `metric/layer`.
    """

    def __init__(
        self, output: Path, config: DistillConfig, accelerator: Accelerator, step: int
    ) -> None:
        self.accelerator = accelerator
        if not accelerator.is_main_process:
            return
        self.file = LogFile(output, step)
        save_config(config, output)
        values = flatten(plain_values(config))
        accelerator.init_trackers(
            PROJECT,
            {name: str(value) for name, value in values.items()},
            init_kwargs={"tensorboard": {"purge_step": step + 1}},
        )

    def write(self, step: int, **metrics: float | dict[str, float]) -> None:
        """Write the metrics of a step."""
        self.file.write(step, **metrics)
        self.accelerator.log(flatten(metrics, "/"), step=step)


def reduced_means(
    totals: dict[str, Tensor], count: int, step: int, accelerator: Accelerator
) -> dict[str, float]:
    """Return the means of `totals` over `count` steps up to `step` and over all processes.

    Raises:
        FloatingPointError: a mean is not finite.
    """
    summed = torch.stack([value.float() for value in totals.values()]) / count
    means = dict(zip(totals, accelerator.reduce(summed, reduction="mean").tolist(), strict=True))
    # A scaled gradient may overflow; the scaler skips that step and halves the scale.
    watched = {k: v for k, v in means.items() if k != "grad_norm" or accelerator.scaler is None}
    if not all(math.isfinite(value) for value in watched.values()):
        listed = ", ".join(f"{name} {value:.4g}" for name, value in means.items())
        raise FloatingPointError(
            f"training stopped: a loss or gradient of the {count} steps up to {step} is not finite "
            f"({listed}); the last checkpoint is older."
        )
    return means


def log_path(output: Path) -> Path:
    """Return the log file of a run."""
    return output / "log.jsonl"


def _rounded(value: Any) -> Any:
    """Round all numbers but counts to six digits."""
    if isinstance(value, dict):
        return {name: _rounded(item) for name, item in value.items()}
    return value if isinstance(value, int) else float(f"{value:.6g}")
