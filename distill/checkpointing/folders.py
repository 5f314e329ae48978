"""Folders that appear complete, through a rename, once their content is on disk."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from avq_diffusers.files import TEMPORARY, naming


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
