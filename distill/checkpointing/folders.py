"""Folders that appear in one step, whole, and on disk before they have their name."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError


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


def remove_folder(path: Path) -> None:
    """Delete a folder that, at any moment, is there whole or not at all."""
    hidden = path.with_name(f".removing-{path.name}")
    shutil.rmtree(hidden, ignore_errors=True)
    path.rename(hidden)
    shutil.rmtree(hidden)


def _settle(path: Path, replaced: Path) -> None:
    """Delete the folder that was replaced, or put it back where no other took its place."""
    if replaced.exists():
        if path.exists():
            remove_folder(replaced)
        else:
            replaced.rename(path)
