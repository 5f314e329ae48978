"""Files that appear in one step, whole, and errors that name them."""

import hashlib
import secrets
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from safetensors import SafetensorError

TEMPORARY = ".writing-"
LONGEST_SAVE = 24 * 3600


@contextmanager
def atomic_write(path: Path, *, shared: bool = False) -> Iterator[Path]:
    """Give a temporary file to write; it takes the place of `path` when all went well.

    Otherwise it is removed, and what was at `path` stays. A kill leaves it behind, under a name
    that begins with `TEMPORARY`; the next write goes over it, unless `shared`.

    Args:
        path: its folder is made where it is missing. The temporary file lies beside it and has its
            extension.
        shared: others may write `path` at the same time, each a temporary file of its own.

    Raises:
        OSError: the disk is full or not writable; the message names `path`.
    """
    own = f"{secrets.token_hex(4)}-" if shared else ""
    temporary = path.with_name(f"{TEMPORARY}{own}{path.name}")
    try:
        with naming(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            yield temporary
            temporary.replace(path)
    finally:
        with suppress(OSError):  # it is no longer there, or the disk fails again
            temporary.unlink()


@contextmanager
def atomic_save(folder: Path, last: str, subject: str) -> Iterator[Path]:
    """Give a temporary folder to write; its files take the place of those in `folder`.

    Others may save into `folder` at the same time, each through a temporary folder of its own. A
    kill at any moment leaves the old files, the new ones, or a folder without `last`; the temporary
    folder that it leaves behind goes with the first save a day later.

    Args:
        folder: made where it is missing; files of other names stay.
        last: name of the file without which the others count for nothing.
        subject: what an error says could not be written.

    Raises:
        OSError: the block could not write, or another's files came between; the message says
            whether what was there is intact.
    """
    temporary = folder / f"{TEMPORARY}{secrets.token_hex(4)}"
    outcome = "what was there is intact"
    try:
        temporary.mkdir(parents=True)
        _remove_leftovers(folder)
        yield temporary
        written = sorted(temporary.iterdir(), key=lambda path: path.name == last)
        digests = {folder / path.name: sha256(path) for path in written}
        (folder / last).unlink(missing_ok=True)
        outcome = "what was there may be lost: save again"
        for path in written:
            path.replace(folder / path.name)
        if any(sha256(path) != digest for path, digest in digests.items()):
            raise OSError("another process saves there at the same time")
    except (OSError, SafetensorError) as error:
        raise OSError(
            f"{subject} could not be written to {folder} ({error}); {outcome}."
        ) from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _remove_leftovers(folder: Path) -> None:
    """Delete temporary folders of kills: so old that nobody can still be writing them."""
    for path in folder.glob(f"{TEMPORARY}*/"):
        with suppress(FileNotFoundError):  # another process was faster
            if time.time() - path.stat().st_mtime > LONGEST_SAVE:
                shutil.rmtree(path, ignore_errors=True)


def sha256(path: Path) -> str | None:
    """Digest of a file, None where there is none."""
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except FileNotFoundError:
        return None


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Name the file in the error of a disk that is full or not writable.

    Raises:
        OSError: the block raised one, or an error of safetensors.
    """
    try:
        yield
    except (OSError, SafetensorError) as error:
        raise OSError(f"{path} could not be written ({error}).") from error
