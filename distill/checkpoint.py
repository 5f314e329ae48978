"""Checkpoints of a training run: safetensors and JSON, on disk before they get their name.

A kill at any moment leaves whole checkpoints, and hidden folders that the next save removes.
"""

import json
import os
import re
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

from avq_diffusers.files import sha256
from distill.config_file import differing_keys, plain_values

RUN_FILE = "run.json"
RUN_KEYS = {"step": int, "config": dict, "sha256": dict}


@dataclass(frozen=True)
class Checkpoint:
    """A complete checkpoint: `run` holds its step, configuration and whatever else is plain."""

    path: Path
    run: Mapping[str, Any]

    @property
    def step(self) -> int:
        return self.run["step"]

    def tensors(self, name: str) -> dict[str, Tensor]:
        """The tensors that were saved under `name`.

        Raises:
            ValueError: the file is missing or not the one that was saved, or holds NaN or infinity.
        """
        path = self.path / f"{name}.safetensors"
        digest = sha256(path)
        if digest is None or digest != self.run["sha256"].get(name):
            raise damaged(path, "it is not the file that was saved")
        loaded = load_file(path)
        for key, tensor in loaded.items():
            if not tensor.isfinite().all():
                raise damaged(path, f"{key} holds NaN or infinity")
        return loaded


def checkpoints(output: Path) -> list[Path]:
    """The complete checkpoints of a run, oldest first."""
    found = output.glob("checkpoints/step-*")
    return sorted(path for path in found if re.fullmatch(r"step-\d{8}", path.name))


def newest(output: Path) -> Checkpoint | None:
    """The checkpoint to go on from, if there is one.

    Raises:
        ValueError: its run.json is damaged.
    """
    found = checkpoints(output)
    if not found:
        return None
    path = found[-1] / RUN_FILE
    try:
        run = json.loads(path.read_text())
        missing = [key for key, kind in RUN_KEYS.items() if not isinstance(run.get(key), kind)]
    except (AttributeError, OSError, RecursionError, ValueError) as error:
        raise damaged(path, repr(error)) from None
    if missing:
        raise damaged(path, f"it lacks {', '.join(missing)}")
    return Checkpoint(found[-1], run)


def damaged(path: Path, reason: str) -> ValueError:
    """The error of a checkpoint that cannot be gone on from."""
    return ValueError(
        f"{path} is damaged ({reason}); delete {path.parent} to go on from the checkpoint before."
    )


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
        digests = {name: sha256(folder / f"{name}.safetensors") for name in tensors}
        values = {"step": step, "config": plain_values(config), "sha256": digests, **run}
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


def sync(path: Path) -> None:
    """Wait until a file or folder is on disk, so that a rename never comes before the content."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def replace_folder(path: Path) -> Iterator[Path]:
    """Give a temporary folder to write into; it takes the place of `path` when all went well.

    A kill between the two renames leaves the old folder under a hidden name; the next call puts it
    back before it writes.

    Raises:
        OSError: the disk is full or not writable; `path` is as it was.
    """
    temporary = path.with_name(f".writing-{path.name}")
    replaced = path.with_name(f".replaced-{path.name}")
    _settle(path, replaced)
    shutil.rmtree(temporary, ignore_errors=True)
    try:
        temporary.mkdir(parents=True)
        yield temporary
        for written in temporary.rglob("*"):
            sync(written)
        sync(temporary)
        if path.exists():
            path.rename(replaced)
        temporary.rename(path)
    except (OSError, SafetensorError) as error:
        shutil.rmtree(temporary, ignore_errors=True)
        raise OSError(
            f"{path} could not be written ({error.__cause__ or error}); what was there is intact."
        ) from error
    finally:
        _settle(path, replaced)
    sync(path.parent)


def _settle(path: Path, replaced: Path) -> None:
    """Delete the folder that was replaced, or put it back where no other took its place."""
    if replaced.exists():
        if path.exists():
            _remove(replaced)
        else:
            replaced.rename(path)


def _remove(path: Path) -> None:
    """Delete a folder that, at any moment, is there whole or not at all."""
    hidden = path.with_name(f".removing-{path.name}")
    shutil.rmtree(hidden, ignore_errors=True)
    path.rename(hidden)
    shutil.rmtree(hidden)
