"""Files that appear in one step, when the writer fails, is killed, or is not alone."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from threading import Thread

import pytest
from PIL import Image
from safetensors import SafetensorError

from avq_diffusers.files import (
    LONGEST_SAVE,
    TEMPORARY,
    atomic_save,
    atomic_write,
    locked,
    naming,
)
from distill.checkpointing.folders import replace_folder

KILLED = """
import os, signal, sys
from pathlib import Path
from avq_diffusers.files import atomic_write

with atomic_write(Path(sys.argv[1])) as temporary:
    temporary.write_text("half")
    os.kill(os.getpid(), signal.SIGKILL)
"""


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
    """Catches writing in place: others see the old file until the block ends."""
    with atomic_write(path, shared=shared) as temporary:
        temporary.write_text("new")
        assert path.read_text() == "old"
        assert len(contents(path)) == 2
    assert contents(path) == {"file.txt": "new"}


@pytest.mark.parametrize("error", [OSError, ValueError, KeyboardInterrupt])
def test_a_write_that_fails_leaves_the_old_file_only(path, error):
    def fail():
        with atomic_write(path) as temporary:
            temporary.write_text("half")
            raise error("stop")

    with pytest.raises(error, match="stop"):
        fail()
    assert contents(path) == {"file.txt": "old"}


def test_a_rename_that_fails_leaves_no_temporary_file(tmp_path):
    """Catches a clean-up that covers the writing only."""
    (tmp_path / "folder").mkdir()
    folder = tmp_path / "folder"
    with pytest.raises(OSError, match="could not be written"), atomic_write(folder) as temporary:
        temporary.write_text("new")
    assert [found.name for found in tmp_path.iterdir()] == ["folder"]


def test_a_write_that_never_began_says_why(path):
    """Catches a clean-up whose own error hides the first one."""
    with pytest.raises(OSError, match="first"), atomic_write(path):
        raise FileNotFoundError("first")
    obstacle = path.with_name(f"{TEMPORARY}file.txt")
    obstacle.mkdir()
    with pytest.raises(ValueError, match="first"), atomic_write(path):
        raise ValueError("first")
    assert path.read_text() == "old"


@pytest.mark.long
def test_a_kill_leaves_a_marked_file_that_the_next_write_goes_over(path):
    process = subprocess.run([sys.executable, "-c", KILLED, path])
    assert process.returncode == -signal.SIGKILL
    assert contents(path) == {"file.txt": "old", f"{TEMPORARY}file.txt": "half"}
    with atomic_write(path) as temporary:
        temporary.write_text("new")
    assert contents(path) == {"file.txt": "new"}


@pytest.mark.parametrize("shared", [False, True])
def test_writers_know_the_format_by_the_name(tmp_path, shared):
    """Catches a mark at the end of the name, and another folder, maybe on another disk."""
    path = tmp_path / "image.png"
    with atomic_write(path, shared=shared) as temporary:
        assert temporary.parent == tmp_path
        assert temporary.name.startswith(TEMPORARY)
        Image.new("RGB", (8, 8)).save(temporary)
    with Image.open(path) as image:
        assert image.format == "PNG"


def test_two_that_share_a_file_do_not_share_the_temporary_one(path):
    """Catches a half-written file that the other writer renames."""
    with atomic_write(path, shared=True) as one:
        one.write_text("one")
        with atomic_write(path, shared=True) as two:
            two.write_text("two")
        assert path.read_text() == "two"
        assert one.read_text() == "one"
    assert contents(path) == {"file.txt": "one"}


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_a_save_that_fails_leaves_the_old_files_only(folder, error):
    """Catches a temporary folder that only errors of the disk remove."""

    def fail():
        with atomic_save(folder, "last", "things") as temporary:
            write(temporary, "half")
            raise error("stop")

    with pytest.raises(error, match="stop"):
        fail()
    assert contents(folder / "last") == result("old")


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


@pytest.mark.parametrize("text", ["one", "two"])
def test_a_save_between_the_moves_of_another_is_noticed(folder, monkeypatch, text):
    """Catches files of two results that pass for one; those of equal results are one."""
    replace = Path.replace

    def replace_and_be_late(path, target):
        replace(path, target)
        if path.name == "weights":
            monkeypatch.setattr(Path, "replace", replace)
            for name in ("last", "weights"):  # as a save without locks
                (folder / name).write_text(text)

    monkeypatch.setattr(Path, "replace", replace_and_be_late)
    message = r"things could not be .*\(another process .* same time\); .* be lost: save again\."
    if text == "two":
        with pytest.raises(OSError, match=message):
            save(folder, "one")
    else:
        save(folder, "one")
    assert contents(folder / "last") == {"last": "one", "weights": text, "mine": "mine"}
    save(folder, "new")
    assert contents(folder / "last") == result("new")


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
    message = rf"things could not be written to {folder} .*5\].*; what was there may be lost: save"
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


@pytest.mark.parametrize("block", [naming, atomic_write])
@pytest.mark.parametrize("error", [OSError(28, os.strerror(28)), SafetensorError("no space")])
def test_the_error_of_a_disk_names_the_file(path, block, error):
    message = f"{path} could not be written ({error})."
    with pytest.raises(OSError, match=re.escape(message)) as caught, block(path):
        raise error
    assert caught.value.__cause__ is error
    with pytest.raises(ValueError, match="another matter"), block(path):
        raise ValueError("another matter")


def test_a_missing_folder_is_made(tmp_path):
    with atomic_write(tmp_path / "a" / "b" / "file.txt") as temporary:
        temporary.write_text("new")
    assert contents(tmp_path / "a" / "b" / "file.txt") == {"file.txt": "new"}


def test_a_lock_where_nothing_can_be_written(path):
    with pytest.raises(OSError, match=f"{path}/folder could not be written"):  # noqa: SIM117
        with locked(path / "folder", 0, "busy"):
            pass
