"""Checkpoints of a training run: safetensors and JSON, on disk before they get their name.

A kill at any moment leaves whole checkpoints, and hidden folders that the next save removes.
"""

import json
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file
from torch import Tensor

from avq_diffusers.files import sha256
from distill.checkpointing.folders import remove_folder, replace_folder
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
        remove_folder(old)
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
