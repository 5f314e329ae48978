"""Checkpoints of a training run: safetensors and JSON, on disk before they get their name.

A kill at any moment leaves whole checkpoints, and hidden folders that the next save removes.
"""

import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from distill.config import differing_keys, plain_values

RUN_FILE = "run.json"


@dataclass(frozen=True)
class Checkpoint:
    """A complete checkpoint: `run` holds its step, configuration and whatever else is plain."""

    path: Path
    run: Mapping[str, Any]

    @property
    def step(self) -> int:
        return self.run["step"]

    def tensors(self, name: str) -> dict[str, Tensor]:
        """The tensors that were saved under `name`."""
        return load_file(self.path / f"{name}.safetensors")


def checkpoints(output: Path) -> list[Path]:
    """The complete checkpoints of a run, oldest first."""
    return sorted(output.glob("checkpoints/step-*"))


def newest(output: Path) -> Checkpoint | None:
    """The checkpoint to go on from, if there is one."""
    found = checkpoints(output)
    if not found:
        return None
    return Checkpoint(found[-1], json.loads((found[-1] / RUN_FILE).read_text()))


def save(
    output: Path,
    step: int,
    tensors: Mapping[str, Mapping[str, Tensor]],
    *,
    config: Any,
    keep: int,
    **run: Any,
) -> Path:
    """Write a checkpoint in one rename, then delete all but the newest `keep`.

    Args:
        output: folder of the run.
        step: completed optimizer steps.
        tensors: by file name.
        config: dataclass that the continuation must agree with.
        keep: number of checkpoints that stay.
        **run: other plain values.

    Raises:
        OSError: the disk is full or not writable; earlier checkpoints are untouched.
    """
    path = output / "checkpoints" / f"step-{step:08d}"
    for leftover in path.parent.glob(".*-step-*"):
        shutil.rmtree(leftover)
    with replace_folder(path) as folder:
        for name, group in tensors.items():
            contiguous = {key: value.detach().contiguous().cpu() for key, value in group.items()}
            save_file(contiguous, folder / f"{name}.safetensors")
        values = {"step": step, "config": plain_values(config), **run}
        (folder / RUN_FILE).write_text(json.dumps(values))
    for old in checkpoints(output)[:-keep]:
        _remove(old)
    return path


def check(
    found: Checkpoint, config: Any, *, free: tuple[str, ...], num_processes: int | None = None
) -> None:
    """Check that a checkpoint belongs to this configuration.

    Args:
        found: the checkpoint.
        config: dataclass of the continuation.
        free: fields and sections that may differ.
        num_processes: of the continuation, where another number changes the result.

    Raises:
        ValueError: it is of another configuration or number of processes.
    """
    differing = differing_keys(config, found.run["config"], ignored=free)
    if num_processes not in (None, found.run.get("num_processes")):
        differing.append("num_processes")
    if differing:
        raise ValueError(
            f"{found.path} is a checkpoint of another configuration; it differs in "
            f"{', '.join(differing)}."
        )


def optimizer_tensors(module: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """What the optimizer remembers, as `exp_avg/NAME` for the parameter NAME of `module`."""
    return {
        f"{kind}/{name}": value
        for name, parameter in module.named_parameters()
        for kind, value in optimizer.state.get(parameter, {}).items()
    }


def load_optimizer(
    module: nn.Module, optimizer: torch.optim.Optimizer, tensors: Mapping[str, Tensor]
) -> None:
    """Restore what `optimizer_tensors` gave; settings such as the rate are not part of it."""
    parameters = dict(module.named_parameters())
    is_fused = optimizer.param_groups[0]["fused"]
    for key, value in tensors.items():
        kind, _, name = key.partition("/")
        parameter = parameters[name]
        if kind == "step":
            restored = value.to(parameter.device if is_fused else "cpu")
        else:
            # The fused update needs the parameter's own memory layout.
            restored = torch.empty_like(parameter.detach()).copy_(value)
        optimizer.state[parameter][kind] = restored


@contextmanager
def replace_folder(path: Path) -> Iterator[Path]:
    """Give a temporary folder to write into; it takes the place of `path` when all went well.

    Raises:
        OSError: the disk is full or not writable; `path` is as it was.
    """
    temporary = path.with_name(f".writing-{path.name}")
    shutil.rmtree(temporary, ignore_errors=True)
    try:
        temporary.mkdir(parents=True)
        yield temporary
        for written in temporary.rglob("*"):
            _sync(written)
        _sync(temporary)
    except (OSError, SafetensorError) as error:
        shutil.rmtree(temporary, ignore_errors=True)
        raise OSError(
            f"{path} could not be written ({error}); what was there is intact."
        ) from error
    if path.exists():
        _remove(path)
    temporary.rename(path)
    _sync(path.parent)


def _remove(path: Path) -> None:
    """Delete a folder that, at any moment, is there whole or not at all."""
    hidden = path.with_name(f".removing-{path.name}")
    shutil.rmtree(hidden, ignore_errors=True)
    path.rename(hidden)
    shutil.rmtree(hidden)


def _sync(path: Path) -> None:
    """Wait until a file or folder is on disk, so that a rename never comes before the content."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
