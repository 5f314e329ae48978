"""Folders that appear complete, by a rename, after their content is on disk."""

import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError

from avq_diffusers.files import TEMPORARY

REMOVING = ".removing-"


def sync(path: Path) -> None:
    """Wait until a file or folder is on disk, so that no rename precedes the content."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def replace_folder(path: Path) -> Iterator[Path]:
    """Yield a temporary folder that replaces `path` if the block succeeds.

    Raises:
        OSError: the disk is full or not writable.
    """
    temporary = path.with_name(f"{TEMPORARY}{path.name}")
    shutil.rmtree(temporary, ignore_errors=True)
    try:
        temporary.mkdir(parents=True)
        yield temporary
        for written in temporary.rglob("*"):
            sync(written)
        sync(temporary)
        if path.exists():
            remove_folder(path)
        temporary.rename(path)
        sync(path.parent)
    except (OSError, SafetensorError) as error:
        shutil.rmtree(temporary, ignore_errors=True)
        raise OSError(f"{path} could not be written ({error.__cause__ or error}).") from error


def remove_leftovers(folder: Path, name: str) -> None:
    """Delete what killed calls of `replace_folder` and `remove_folder` left in a folder.

    Args:
        folder: the folder that holds the others.
        name: regular expression of the names of folders that they wrote or removed.
    """
    pattern = re.compile(f"({re.escape(TEMPORARY)}|{re.escape(REMOVING)}){name}")
    for path in folder.glob(".*"):
        if pattern.fullmatch(path.name):
            shutil.rmtree(path)


def remove_folder(path: Path) -> None:
    """Delete a folder that at any moment is complete or gone."""
    hidden = path.with_name(f"{REMOVING}{path.name}")
    shutil.rmtree(hidden, ignore_errors=True)
    path.rename(hidden)
    shutil.rmtree(hidden)
