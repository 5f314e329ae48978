"""Checkpoints of a training run: safetensors and JSON, written to a temporary name and renamed."""

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from distill.pretrain.config import RunConfig, differing_keys, plain_values

KEPT = 2
# Fields that may change between a run and its continuation: they do not change its result, or
# (the time budget) are a property of the process.
FREE = ("workers", "max_minutes", "finish_minutes", "log_every", "preview_minutes")
FREE += ("checkpoint_every", "tensorboard", "compile")


@dataclass(frozen=True)
class TrainingState:
    """What a checkpoint holds, beside step and progress."""

    model: nn.Module
    averaged: nn.Module
    optimizer: torch.optim.Optimizer


def checkpoints(output: Path) -> list[Path]:
    """Return the complete checkpoints of a run, oldest first."""
    return sorted(output.glob("checkpoints/step-*"))


def save(
    output: Path,
    state: TrainingState,
    config: RunConfig,
    num_processes: int,
    step: int,
    progress: float,
) -> Path:
    """Write a checkpoint in one rename, then delete all but the newest `KEPT`."""
    path = output / "checkpoints" / f"step-{step:08d}"
    temporary = path.with_name(f".writing-{path.name}")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    save_file(_contiguous(state.model.state_dict()), temporary / "model.safetensors")
    save_file(_contiguous(state.averaged.state_dict()), temporary / "averaged.safetensors")
    save_file(_contiguous(_optimizer_tensors(state)), temporary / "optimizer.safetensors")
    run = {"num_processes": num_processes, "step": step, "progress": progress}
    (temporary / "run.json").write_text(json.dumps({"config": plain_values(config), **run}))
    shutil.rmtree(path, ignore_errors=True)
    temporary.rename(path)
    for old in checkpoints(output)[:-KEPT]:
        shutil.rmtree(old)
    return path


def check_newest(output: Path, config: RunConfig, num_processes: int) -> None:
    """Check that the newest checkpoint, if there is one, belongs to this configuration.

    Raises:
        ValueError: it is of another configuration or number of processes.
    """
    found = checkpoints(output)
    if not found:
        return
    run = _read_run(found[-1])
    differing = differing_keys(config, run["config"], ignored=FREE)
    if run["num_processes"] != num_processes:
        differing.append("num_processes")
    if differing:
        raise ValueError(
            f"{found[-1]} is a checkpoint of another configuration; it differs in "
            f"{', '.join(differing)}."
        )


def load_newest(output: Path, state: TrainingState) -> tuple[int, float]:
    """Restore the newest checkpoint in place; return its step and progress (0 if there is none)."""
    found = checkpoints(output)
    if not found:
        return 0, 0.0
    state.model.load_state_dict(load_file(found[-1] / "model.safetensors"))
    state.averaged.load_state_dict(load_file(found[-1] / "averaged.safetensors"))
    _restore_optimizer(state, load_file(found[-1] / "optimizer.safetensors"))
    run = _read_run(found[-1])
    return run["step"], run["progress"]


def _read_run(path: Path) -> dict[str, Any]:
    return json.loads((path / "run.json").read_text())


def _optimizer_tensors(state: TrainingState) -> dict[str, Tensor]:
    return {
        f"{key}/{name}": value
        for name, parameter in state.model.named_parameters()
        for key, value in state.optimizer.state[parameter].items()
    }


def _restore_optimizer(state: TrainingState, tensors: dict[str, Tensor]) -> None:
    for name, parameter in state.model.named_parameters():
        restored = state.optimizer.state[parameter]
        for key in ("exp_avg", "exp_avg_sq"):
            # The fused update needs the parameter's own memory layout (channels last).
            restored[key] = torch.empty_like(parameter.detach()).copy_(tensors[f"{key}/{name}"])
        fused = state.optimizer.param_groups[0]["fused"]
        restored["step"] = tensors[f"step/{name}"].to(parameter.device if fused else "cpu")


def _contiguous(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: value.detach().contiguous().cpu() for name, value in tensors.items()}
