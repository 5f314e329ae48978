"""Atomic writes, training logs, digests, and errors that name the path."""

import hashlib
import json
import secrets
import shutil
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout
from safetensors import SafetensorError

TEMPORARY = ".writing-"
LONGEST_SAVE = 24 * 3600
LOCK_SECONDS = 600


@contextmanager
def atomic_write(path: Path, *, shared: bool = False) -> Iterator[Path]:
    """Yield the path of a temporary file and move it to `path` if the block succeeds.

    If the block fails, the temporary file is deleted and `path` is unchanged. A killed process
    leaves the temporary file behind, with a name that starts with `TEMPORARY`. The next write
    overwrites it, unless `shared`.

    Args:
        path: its folder is created if missing. The temporary file is in the same folder and has
            the same extension.
        shared: other processes may write `path` at the same time; each uses its own temporary file.

    Raises:
        OSError: the disk is full or not writable; the message names `path`.
    """
    prefix = f"{secrets.token_hex(4)}-" if shared else ""
    temporary = path.with_name(f"{TEMPORARY}{prefix}{path.name}")
    try:
        with naming(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            yield temporary
            temporary.replace(path)
    finally:
        with suppress(OSError):  # already gone, or the disk fails again
            temporary.unlink()


def write_text(path: Path, text: str) -> None:
    """Write a text atomically, in UTF-8.

    Raises:
        OSError: see `atomic_write`.
    """
    with atomic_write(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


@contextmanager
def atomic_save(folder: Path, last: str, subject: str) -> Iterator[Path]:
    """Yield a temporary folder and move its files into `folder` if the block succeeds.

    Other processes may save to `folder` at the same time: each uses its own temporary folder, and
    they move their files in turn. A process killed at any moment leaves the old files, the new
    files, or a folder without `last`. The first save a day later deletes a killed process's
    temporary folder.

    Args:
        folder: created if missing. Files with other names stay.
        last: name of the file that makes the others valid.
        subject: what the error message says could not be written.

    Raises:
        OSError: the block failed to write, or another process does not stop saving there. The
            message says whether the previous files are intact.
    """
    temporary = folder / f"{TEMPORARY}{secrets.token_hex(4)}"
    outcome = "what was there is intact"
    try:
        temporary.mkdir(parents=True)
        _remove_leftovers(folder)
        yield temporary
        with locked(folder, LOCK_SECONDS, "another process does not stop saving there"):
            written = sorted(temporary.iterdir(), key=lambda path: path.name == last)
            (folder / last).unlink(missing_ok=True)
            outcome = "what was there may be lost; save again"
            for path in written:
                path.replace(folder / path.name)
    except (OSError, SafetensorError) as error:
        raise OSError(
            f"{subject} could not be written to {folder} ({error}); {outcome}."
        ) from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _remove_leftovers(folder: Path) -> None:
    """Delete temporary folders of killed processes: those too old to still be in use."""
    for path in folder.glob(f"{TEMPORARY}*/"):
        with suppress(FileNotFoundError):  # another process was faster
            if time.time() - path.stat().st_mtime > LONGEST_SAVE:
                shutil.rmtree(path, ignore_errors=True)


@contextmanager
def locked(folder: Path, seconds: float, message: str) -> Iterator[None]:
    """Keep other processes that call this function out of a folder while the block runs.

    Args:
        folder: created if missing.
        seconds: time to wait for another process.
        message: error message if another process keeps the folder.

    Raises:
        OSError: another process keeps the folder, or it is not writable.
    """
    lock = FileLock(folder / ".lock")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock.acquire(timeout=seconds)
    except Timeout as error:
        raise OSError(message) from error
    except OSError as error:
        raise OSError(f"{folder} could not be written ({error}).") from error
    try:
        yield
    finally:
        Path(lock.lock_file).unlink(missing_ok=True)
        lock.release()


def sha256(path: Path) -> str | None:
    """SHA-256 of a file in hexadecimal; None if the file does not exist."""
    digest = hashlib.sha256()
    try:
        with path.open("rb") as file:
            while piece := file.read(1 << 20):
                digest.update(piece)
    except FileNotFoundError:
        return None
    return digest.hexdigest()


def sha256_all(paths: Sequence[Path]) -> list[str | None]:
    """`sha256` of several files, read in parallel."""
    with ThreadPoolExecutor() as pool:
        return list(pool.map(sha256, paths))


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Name the file in errors from a full or read-only disk.

    Raises:
        OSError: the block raised an OSError or an error of safetensors.
    """
    try:
        yield
    except (OSError, SafetensorError) as error:
        raise OSError(f"{path} could not be written ({error}).") from error


def read_log(path: Path) -> list[dict[str, Any]]:
    """Read the complete lines of a training log, one JSON object with a `step` per line.

    A missing log is empty. A kill may have cut the last line.

    Raises:
        ValueError: a line is not a JSON object with a step.
    """
    lines = path.read_bytes().split(b"\n")[:-1] if path.exists() else []
    read = []
    for number, line in enumerate(lines, 1):
        try:
            read.append(json.loads(line))
            valid = isinstance(read[-1]["step"], int)
        except (KeyError, RecursionError, TypeError, ValueError):
            valid = False
        if not valid:
            raise ValueError(
                f"line {number} of {path} is not a JSON object with a step; delete that line to "
                f"continue."
            )
    return read
