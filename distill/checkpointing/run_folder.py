"""The folder of a run: only one run writes it, and no new run overwrites it."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from accelerate import PartialState
from accelerate.utils import parse_flag_from_env

from avq_diffusers import files
from distill.checkpointing.checkpoint import checkpoints
from distill.log import log_path

# A killed run's data workers hold its lock until they notice.
LOCK_SECONDS = 10


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


def check_unused(output: Path) -> None:
    """Check that no run has written the folder.

    Raises:
        ValueError: one has.
    """
    if log_path(output).exists() or checkpoints(output):
        raise ValueError(f"{output} holds a run: add --resume or choose another --output.")
