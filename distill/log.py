"""Figures of a run: lines of `log.jsonl`, and the tracker's."""

import json
from pathlib import Path
from typing import Any

from accelerate import Accelerator

from avq_diffusers.files import atomic_write, naming
from distill.config import DistillConfig, flatten, plain_values

PROJECT = "avq-distill"


class Log:
    """Writes the lines; only the main process does.

    Figures of every layer are mappings by layer; trackers get them as `figure/layer`.

    Args:
        output: folder of the run.
        config: kept by the tracker.
        accelerator: with the tracker.
        step: lines of later steps are dropped, as the run takes those steps again.
    """

    def __init__(
        self, output: Path, config: DistillConfig, accelerator: Accelerator, step: int
    ) -> None:
        self.accelerator = accelerator
        self.path = log_path(output)
        self.last: dict[str, Any] = {}
        if not accelerator.is_main_process:
            return
        output.mkdir(parents=True, exist_ok=True)
        lines = [line for line in read_log(output) if line["step"] <= step]
        self.last = lines[-1] if lines else {}
        with naming(self.path), atomic_write(self.path) as temporary:
            temporary.write_text("".join(json.dumps(line) + "\n" for line in lines))
        values = flatten(plain_values(config))
        accelerator.init_trackers(PROJECT, {name: str(value) for name, value in values.items()})

    def write(self, step: int, **figures: float | dict[str, float]) -> None:
        """Write the figures of a step."""
        self.last = _rounded({"step": step, **figures})
        with naming(self.path), self.path.open("a") as file:
            file.write(json.dumps(self.last) + "\n")
        self.accelerator.log(flatten(figures, "/"), step=step)


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
            raise ValueError(f"line {number} of {path} is not a JSON object with a step.")
    return read


def _rounded(value: Any) -> Any:
    """Six digits of every figure that is no count."""
    if isinstance(value, dict):
        return {name: _rounded(figure) for name, figure in value.items()}
    return value if isinstance(value, int) else float(f"{value:.6g}")
