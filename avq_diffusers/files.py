"""Files that appear in one step, whole, and errors that name them."""

import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from safetensors import SafetensorError

TEMPORARY = ".writing-"


@contextmanager
def atomic_write(path: Path, *, shared: bool = False) -> Iterator[Path]:
    """Give a temporary file to write; it takes the place of `path` when all went well.

    Otherwise it is removed, and what was at `path` stays. A kill leaves it behind, under a name
    that begins with `TEMPORARY`; the next write goes over it, unless `shared`.

    Args:
        path: in a folder that exists. The temporary file lies beside it and has its extension.
        shared: others may write `path` at the same time, each a temporary file of its own.
    """
    own = f"{secrets.token_hex(4)}-" if shared else ""
    temporary = path.with_name(f"{TEMPORARY}{own}{path.name}")
    try:
        yield temporary
        temporary.replace(path)
    finally:
        with suppress(OSError):  # it is no longer there, or the disk fails again
            temporary.unlink()


@contextmanager
def atomic_save(folder: Path, last: str, subject: str) -> Iterator[Path]:
    """Give a temporary folder to write; its files take the place of those in `folder`.

    A kill at any moment leaves the old files, the new ones, or a folder without `last`.

    Args:
        folder: made where it is missing; files of other names stay.
        last: name of the file without which the others count for nothing.
        subject: what an error says could not be written.

    Raises:
        OSError: the block could not write; what was there is intact.
    """
    temporary = folder / ".writing"
    try:
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
        yield temporary
    except (OSError, SafetensorError) as error:
        shutil.rmtree(temporary, ignore_errors=True)
        raise OSError(
            f"{subject} could not be written to {folder} ({error}); what was there is intact."
        ) from error
    (folder / last).unlink(missing_ok=True)
    for path in sorted(temporary.iterdir(), key=lambda path: path.name == last):
        path.replace(folder / path.name)
    temporary.rmdir()


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Name the file in the error of a disk that is full or not writable.

    Raises:
        OSError: the block raised one.
    """
    try:
        yield
    except OSError as error:
        raise OSError(f"{path} could not be written ({error}).") from error
