"""The folder of a training run, and its checkpoints: safetensors files, `run.json` and digests.

Only one run writes a folder, and no new run overwrites it. A rename makes a checkpoint appear
complete. The leftovers of a killed save are hidden, and the next save removes them.
"""

import json
import re
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from accelerate import PartialState
from accelerate.utils import parse_flag_from_env
from safetensors.torch import load_file, save_file
from torch import Tensor

from avq_diffusers import files
from avq_diffusers.files import TEMPORARY
from distill.checkpointing.folders import (
    check_digests,
    remove_folder,
    replace_folder,
    write_digests,
)
from distill.config_file import CONFIG_FILE, Config, differing_keys, load_config, plain_values
from distill.log import log_path

RUN_FILE = "run.json"
LOCK_SECONDS = 10  # a killed run's data workers hold its lock until they notice


@dataclass(frozen=True)
class Checkpoint:
    """A complete checkpoint: its folder, and the content of `run.json`."""

    path: Path
    run: Mapping[str, Any]

    @property
    def step(self) -> int:
        return self.run["step"]

    def tensors(self, name: str) -> dict[str, Tensor]:
        """Load the tensors saved as `name`.

        Raises:
            ValueError: one holds NaN or infinity.
        """
        path = self.path / f"{name}.safetensors"
        loaded = load_file(path)
        for key, tensor in loaded.items():
            if not tensor.isfinite().all():
                raise ValueError(
                    f"{key} of {path} holds NaN or infinity; delete {self.path} to resume from the "
                    f"checkpoint before."
                )
        return loaded


def checkpoints(output: Path) -> list[Path]:
    """Return the folders of a run's complete checkpoints, oldest first."""
    found = output.glob("checkpoints/step-*")
    return sorted(path for path in found if re.fullmatch(r"step-\d{8}", path.name))


def newest(output: Path) -> Checkpoint | None:
    """Return the newest checkpoint of a run, if it has one.

    Raises:
        ValueError: it is damaged.
    """
    found = checkpoints(output)
    if not found:
        return None
    check_digests(found[-1])
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
    """Save named tensors per file as the checkpoint of `step`; delete all but the newest `keep`.

    A resumed run is checked against `config`. Other values go to `run.json`.

    Raises:
        OSError: the disk is full or not writable. Earlier checkpoints stay.
    """
    path = output / "checkpoints" / f"step-{step:08d}"
    for leftover in path.parent.glob(f"{TEMPORARY}*"):  # from killed runs
        shutil.rmtree(leftover)
    with replace_folder(path) as folder:
        for name, group in tensors.items():
            contiguous = {key: value.detach().contiguous().cpu() for key, value in group.items()}
            save_file(contiguous, folder / f"{name}.safetensors")
        values = {"step": step, "config": plain_values(config), **run}
        (folder / RUN_FILE).write_text(json.dumps(values))
        write_digests(folder)
    for old in checkpoints(output)[:-keep]:
        remove_folder(old)
    return path


def check_config(
    output: Path, found: Checkpoint | None, config: Config, *, free: tuple[str, ...]
) -> None:
    """Check that a run with this configuration may continue the one in `output`.

    Args:
        output: the run's folder.
        found: its newest checkpoint; None if it has none.
        config: configuration of the continuation.
        free: fields and sections that may differ.

    Raises:
        ValueError: the configuration differs.
    """
    if found is not None:
        path, saved = found.path, found.run["config"]
    elif (path := output / CONFIG_FILE).exists():
        saved = plain_values(load_config(path, type(config), []))
    else:
        return
    if differing := differing_keys(config, saved, ignored=free):
        raise ValueError(f"{path} has a different configuration: {', '.join(differing)}.")


@contextmanager
def locked(output: Path) -> Iterator[None]:
    """Keep other runs out of the folder while the block runs.

    Raises:
        OSError: another run is writing the folder, or it is not writable.
    """
    # The Accelerator created later uses this state, also with `accelerate launch --cpu`.
    state = PartialState(cpu=parse_flag_from_env("ACCELERATE_USE_CPU"))
    if not state.is_main_process:
        yield
        return
    message = f"another run is writing {output}; wait for it, or choose another --output."
    with files.locked(output, LOCK_SECONDS, message):
        yield


def check_unused(output: Path, advice: str) -> None:
    """Check that no run has written the folder.

    Raises:
        ValueError: one has; the message ends with the advice.
    """
    if log_path(output).exists() or checkpoints(output):
        raise ValueError(f"{output} holds a run: {advice}.")
