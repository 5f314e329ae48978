"""Metrics of a run: `log.jsonl`, and a tracker."""

import json
import math
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor

from avq_diffusers.files import naming, read_log, write_text
from distill.config_file import flatten, plain_values, save_config

PROJECT = "avq-distill"


class Log:
    """The log of a run on disk, one JSON object per line, and its tracker, if it has one.

    Only the main process writes, including the run's configuration. Lines after `step` and lines
    marked `final` are dropped, because the run writes them again. Per-layer metrics are mappings;
    the tracker gets them as `metric/layer`. `last` is the last line.

    Raises:
        ValueError: see `read_log`.
        OSError: the disk is full or not writable, also in `write`.
    """

    def __init__(self, output: Path, config: Any, accelerator: Accelerator, step: int) -> None:
        self.path, self.accelerator = log_path(output), accelerator
        self.last: dict[str, Any] = {}
        if not accelerator.is_main_process:
            return
        save_config(config, output)
        lines = [x for x in read_log(self.path) if x["step"] <= step and "final" not in x]
        write_text(self.path, "".join(json.dumps(line) + "\n" for line in lines))
        if lines:
            self.last = lines[-1]
        accelerator.init_trackers(
            PROJECT,
            {name: str(value) for name, value in flatten(plain_values(config)).items()},
            init_kwargs={"tensorboard": {"purge_step": step + 1}},
        )

    def write(self, step: int, **metrics: float | dict[str, float]) -> None:
        """Write the metrics of a step."""
        if not self.accelerator.is_main_process:
            return
        self.last = _rounded({"step": step, **metrics})
        with naming(self.path), self.path.open("a") as file:
            file.write(json.dumps(self.last) + "\n")
        self.accelerator.log(flatten(metrics, "/"), step=step)


class Meter:
    """Sums the losses of the steps after `step`, on their device."""

    def __init__(self, accelerator: Accelerator, step: int) -> None:
        self.accelerator, self.step = accelerator, step
        self.started = time.monotonic()
        self.totals: dict[str, Tensor] = {}

    def add(self, losses: Mapping[str, Tensor]) -> None:
        """Add a step's scalar losses."""
        for name, value in losses.items():
            self.totals[name] = self.totals.get(name, 0) + value.detach().float()

    def means(self, step: int, batch_size: int) -> dict[str, float]:
        """Return the means over processes and all steps up to `step`, and `samples_per_second`.

        Raises:
            FloatingPointError: a mean is not finite.
        """
        count, accelerator = step - self.step, self.accelerator
        summed = torch.stack([*self.totals.values()]) / count
        reduced = accelerator.reduce(summed, reduction="mean").tolist()
        means = dict(zip(self.totals, reduced, strict=True))
        # A scaled gradient may overflow; the scaler skips that step and halves the scale.
        watched = {k: v for k, v in means.items() if k != "grad_norm" or accelerator.scaler is None}
        if not all(math.isfinite(value) for value in watched.values()):
            listed = ", ".join(f"{name} {value:.4g}" for name, value in means.items())
            raise FloatingPointError(
                f"training stopped: a loss or gradient in the {count} steps up to {step} is not "
                f"finite ({listed}); the last checkpoint is older."
            )
        speed = count * batch_size / (time.monotonic() - self.started)
        return {"samples_per_second": speed, **means}


def log_path(output: Path) -> Path:
    """Return the log file of a run."""
    return output / "log.jsonl"


def _rounded(value: Any) -> Any:
    """Round all numbers except counts to six digits."""
    if isinstance(value, dict):
        return {name: _rounded(item) for name, item in value.items()}
    return value if isinstance(value, int) else float(f"{value:.6g}")
