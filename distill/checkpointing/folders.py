"""Folders that appear complete, through a rename, once their content is on disk.

A checkpoint also holds the digests of its files.
"""

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from avq_diffusers.files import TEMPORARY, naming, sha256_all, write_text

DIGESTS = "digests.json"


def sync(path: Path) -> None:
    """Wait until a file or folder is on disk, so that no rename precedes its content."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def replace_folder(path: Path) -> Iterator[Path]:
    """Yield a temporary folder that replaces `path` if the block succeeds.

    A killed process leaves behind a folder whose name starts with `TEMPORARY`.

    Raises:
        OSError: the disk is full or not writable.
    """
    temporary = path.with_name(f"{TEMPORARY}{path.name}")
    shutil.rmtree(temporary, ignore_errors=True)
    try:
        with naming(path):
            temporary.mkdir(parents=True)
            yield temporary
            for written in (*temporary.rglob("*"), temporary):
                sync(written)
            if path.exists():
                remove_folder(path)
            temporary.rename(path)
            sync(path.parent)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def remove_folder(path: Path) -> None:
    """Delete a folder so that at any moment it is complete or gone."""
    hidden = path.with_name(f"{TEMPORARY}old-{path.name}")
    shutil.rmtree(hidden, ignore_errors=True)
    path.rename(hidden)
    shutil.rmtree(hidden)


def write_digests(folder: Path) -> None:
    """Record the digests of a checkpoint's files for `check_digests`.

    Raises:
        OSError: the disk is full or not writable.
    """
    write_text(folder / DIGESTS, json.dumps(_digests(folder)))


def check_digests(folder: Path) -> None:
    """Check that a checkpoint's files are those that were saved.

    Raises:
        ValueError: they are not.
    """
    try:
        saved = dict(json.loads((folder / DIGESTS).read_text()))
    except (OSError, RecursionError, TypeError, ValueError):
        saved = {}
    found = _digests(folder)
    if saved != found:
        raise ValueError(
            f"{folder} does not hold the files that were saved; delete it to resume from the "
            f"checkpoint before."
        )


def _digests(folder: Path) -> dict[str, str | None]:
    """Digests by file name, without a killed process's temporary files; other processes may still
    write random states."""
    paths = sorted(path for path in folder.iterdir() if path.is_file() and path.name != DIGESTS)
    paths = [path for path in paths if not path.name.startswith(("rng_state", TEMPORARY))]
    return dict(zip((path.name for path in paths), sha256_all(paths), strict=True))
