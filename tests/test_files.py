"""Files that appear in one step, when the writer fails, is killed, or is not alone."""

import os
import re
import signal
import time
from pathlib import Path
from threading import Thread

import pytest
from safetensors import SafetensorError

from avq_diffusers.files import (
    LONGEST_SAVE,
    TEMPORARY,
    atomic_save,
    atomic_write,
    locked,
)
from distill.checkpointing.folders import replace_folder


@pytest.fixture
def path(tmp_path):
    """A file that holds "old"."""
    path = tmp_path / "file.txt"
    path.write_text("old")
    return path


@pytest.fixture
def folder(tmp_path):
    """A folder with a result, "weights" and "last", and a file of another's."""
    folder = tmp_path / "folder"
    save(folder, "old")
    (folder / "mine").write_text("mine")
    return folder


def save(folder, text):
    with atomic_save(folder, "last", "things") as temporary:
        write(temporary, text)


def write(temporary, text):
    for name in ("last", "weights"):
        (temporary / name).write_text(text)


def result(text):
    return {"last": text, "weights": text, "mine": "mine"}


def contents(path):
    return {found.name: found.read_text() for found in path.parent.iterdir()}


@pytest.mark.parametrize("shared", [False, True])
def test_the_file_is_replaced_when_all_is_written(path, shared):
    """Catches writing in place: others see the old file until the block ends. The writer knows the
    format by the name."""
    with atomic_write(path, shared=shared) as temporary:
        temporary.write_text("new")
        assert path.read_text() == "old"
        assert len(contents(path)) == 2
        assert (temporary.parent, temporary.suffix) == (path.parent, ".txt")
        assert temporary.name.startswith(TEMPORARY)
    assert contents(path) == {"file.txt": "new"}


@pytest.mark.parametrize("error", [OSError, ValueError, KeyboardInterrupt])
def test_what_fails_leaves_the_old_files_only(path, folder, error):
    """Catches a clean-up that only errors of the disk start, or whose own error hides the first."""

    def fail(save, *arguments):
        with save(*arguments) as temporary:
            (write if temporary.is_dir() else Path.write_text)(temporary, "half")
            raise error("stop")

    for arguments in ((atomic_write, path), (atomic_save, folder, "last", "things")):
        with pytest.raises(error, match="stop"):
            fail(*arguments)
    assert contents(folder / "last") == result("old")
    assert path.read_text() == "old"
    assert {found.name for found in path.parent.iterdir()} == {"file.txt", "folder"}
    path.with_name(f"{TEMPORARY}file.txt").mkdir()
    with pytest.raises(error, match="first"), atomic_write(path):
        raise error("first")


def test_a_rename_that_fails_leaves_no_temporary_file(folder):
    """Catches a clean-up that covers the writing only."""
    with pytest.raises(OSError, match="could not be written"), atomic_write(folder) as temporary:
        temporary.write_text("new")
    assert [found.name for found in folder.parent.iterdir()] == ["folder"]


def test_a_killed_write_is_marked_and_the_next_one_goes_over_it(path):
    child = os.fork()
    if child == 0:
        with atomic_write(path) as temporary:
            temporary.write_text("half")
            os.kill(os.getpid(), signal.SIGKILL)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    assert contents(path) == {"file.txt": "old", f"{TEMPORARY}file.txt": "half"}
    with atomic_write(path) as temporary:
        temporary.write_text("new")
    assert contents(path) == {"file.txt": "new"}


def test_two_that_share_a_file_do_not_share_the_temporary_one(path):
    """Catches a half-written file that the other writer renames."""
    with atomic_write(path, shared=True) as one:
        one.write_text("one")
        with atomic_write(path, shared=True) as two:
            two.write_text("two")
        assert path.read_text() == "two"
        assert one.read_text() == "one"
    assert contents(path) == {"file.txt": "one"}


def test_two_that_save_into_a_folder_do_not_share_the_temporary_one(folder):
    """Catches one that deletes or moves what the other is writing."""
    with atomic_save(folder, "last", "things") as one:
        write(one, "one")
        save(folder, "two")
        assert {path.name for path in one.iterdir()} == {"last", "weights"}
        assert (folder / "last").read_text() == (folder / "weights").read_text() == "two"
    assert contents(folder / "last") == result("one")


def test_two_saves_into_a_folder_follow_one_another(folder, monkeypatch):
    """Catches files of two results in one folder, or a save that another one spoils."""
    replace = Path.replace
    other = Thread(target=save, args=(folder, "two"))

    def replace_and_be_late(path, target):
        replace(path, target)
        if path.name == "weights" and other.ident is None:
            other.start()
            other.join(0.5)

    monkeypatch.setattr(Path, "replace", replace_and_be_late)
    save(folder, "one")
    other.join()
    assert contents(folder / "last") == result("two")


@pytest.mark.parametrize("moved", [0, 1])
def test_a_move_that_fails_does_not_call_the_old_files_intact(folder, monkeypatch, moved):
    """Catches that claim, an error without a name, and a new file beside the old `last`."""
    replace, moves = Path.replace, []

    def fail_later(path, target):
        if len(moves) == moved:
            raise OSError(5, "Input/output error")
        moves.append(path.name)
        return replace(path, target)

    monkeypatch.setattr(Path, "replace", fail_later)
    message = rf"things could not be written to {folder} .*5\].*; what was there may be lost; save"
    with pytest.raises(OSError, match=message):
        save(folder, "new")
    weights = "new" if moved else "old"
    assert contents(folder / "last") == {"weights": weights, "mine": "mine"}


def test_leftovers_of_kills_go_when_nobody_can_be_writing_them(folder):
    """Catches folders that pile up, and a concurrent writer's that is taken for a leftover."""
    for name, age in (("old", 2 * LONGEST_SAVE), ("new", LONGEST_SAVE / 2)):
        leftover = folder / f"{TEMPORARY}{name}"
        leftover.mkdir()
        (leftover / "weights").write_text("half")
        os.utime(leftover, (time.time() - age,) * 2)
    save(folder, "new")
    names = {"last", "weights", "mine", f"{TEMPORARY}new"}
    assert {path.name for path in folder.iterdir()} == names


@pytest.mark.parametrize("error", [OSError(28, "No space left"), SafetensorError("no space")])
def test_a_folder_is_replaced_only_when_it_is_complete(tmp_path, error):
    folder = tmp_path / "folder"
    for text in ("old", "new"):
        with replace_folder(folder) as temporary:
            (temporary / "weights").write_text(text)
        assert contents(folder / "weights") == {"weights": text}
    with pytest.raises(OSError, match="folder could not be written"), replace_folder(folder):
        raise error
    assert contents(folder / "weights") == {"weights": "new"}
    assert list(tmp_path.iterdir()) == [folder]


@pytest.mark.parametrize("error", [OSError(28, os.strerror(28)), SafetensorError("no space")])
def test_the_error_of_a_disk_names_the_file(path, error):
    message = f"{path} could not be written ({error})."
    with pytest.raises(OSError, match=re.escape(message)) as caught, atomic_write(path):
        raise error
    assert caught.value.__cause__ is error
    with pytest.raises(ValueError, match="another matter"), atomic_write(path):
        raise ValueError("another matter")


def test_a_lock_where_nothing_can_be_written(path):
    with pytest.raises(OSError, match=f"{path}/folder could not be written"):  # noqa: SIM117
        with locked(path / "folder", 0, "busy"):
            pass
