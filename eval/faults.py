"""Faults on the real commands: kills at any moment, full disks, read-only folders, damaged files.

A killed command runs again in the same folder until it finishes; what it leaves must be, to the
byte, what an undisturbed run leaves. Commands that cannot go on must say so in one line, and leave
what was there as it was.
"""

import contextlib
import hashlib
import json
import os
import random
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from PIL import Image
from safetensors import SafetensorError
from safetensors.torch import load_file
from tqdm import tqdm

from eval.fault_damages import DAMAGES
from eval.fault_jobs import FOLDER, PROGRAMS, Attempt, Job, last_line, prepare_jobs
from eval.store.markdown import markdown_table

# What differs between two runs of one command: of JSON files, and of lines of a log.
VOLATILE = ("command", "environment", "earlier_sessions")
VOLATILE_FIGURES = ("samples_per_second",)
DISK = 64 * 2**20  # bytes
ROOMS = (0, 8 * 2**10)  # bytes that a full disk has left when the command starts


def kill_repeatedly(
    job: Job, place: Path, kills: int, *, seed: int, progress: Callable[[], Any] = lambda: None
) -> dict[str, Any]:
    """Kill a job `kills` times, and let it finish at last.

    The moments are uniform over the shortest time of an undisturbed run so far. Every second kill
    then waits until the command has written something, so that it falls into writing.

    Args:
        job: of `prepare_jobs`.
        place: folder to work in.
        kills: number of them.
        seed: of the moments.
        progress: called after every kill.

    Returns:
        a row of figures; `failures` lists what went wrong.
    """
    expected, failures = contents(job.undisturbed)
    timed = job.start(place / "timed")
    timed.finish()
    seconds = timed.seconds
    shutil.rmtree(place / "timed")
    moments = random.Random(f"{seed} {job.kind}")
    done = {"kills": 0, "kills_with_progress": 0, "kills_while_writing": 0, "finished": 0}
    begun = time.monotonic()
    folder, number = None, 0
    while done["kills"] < kills or folder is not None:
        if folder is None:
            number += 1
            folder = place / f"killed-{number}"
            before = {}
            if number % 2 and not job.again:  # over an earlier result
                job.earlier(folder)
                before, _ = contents(folder)
            was_killed = False
        attempt = job.start(folder)
        if done["kills"] < kills:
            attempt.process.join(moments.uniform(0, seconds))
            if done["kills"] % 2:
                _wait_for_writing(attempt, folder)
            is_killed = attempt.process.is_alive()
            code, output = attempt.kill()
        else:
            is_killed = False
            code, output = attempt.finish()
        found, damaged = contents(folder)
        failures += [f"after kill {done['kills'] + 1}: {text}" for text in damaged]
        if is_killed and code == -signal.SIGKILL:
            was_killed = True
            done["kills"] += 1
            done["kills_with_progress"] += found != before
            done["kills_while_writing"] += bool(_temporary(folder))
            if not (_is_part(found, expected) or _is_part(found, before)):
                failures.append(f"after kill {done['kills']}: {_difference(found, expected)}")
            progress()
            continue
        done["finished"] += 1
        if not (was_killed or before):  # too late: this machine is faster now
            seconds = min(seconds, attempt.seconds)
        if code != 0:
            failures.append(f"exit code {code} after a kill: {last_line(output)}")
        elif found != expected:
            failures.append(f"another result: {_difference(found, expected)}")
        shutil.rmtree(folder)
        folder = None
    return {
        "job": job.kind,
        **done,
        "seconds_undisturbed": round(seconds, 2),
        "seconds": round(time.monotonic() - begun, 1),
        "failures": failures,
    }


def disk_faults(job: Job, place: Path) -> Iterator[dict[str, Any]]:
    """Yield a row each for disks that fill up and for a folder that cannot be written.

    The disk is a tmpfs where this process may mount one; else a limit of the size of files takes
    the place of a full disk, and a read-only folder is one without the permission to write.
    """
    for room in ROOMS:
        fault = f"full disk, {room // 2**10} KiB left"
        with _disk(place / "disk") as (disk, is_mounted):
            folder, filler = disk / "run", disk / "filler"
            job.earlier(folder)
            if is_mounted:
                free = shutil.disk_usage(disk).free
                filler.write_bytes(bytes(free - room))
            yield _fault_row(
                job,
                folder,
                fault,
                "tmpfs" if is_mounted else "RLIMIT_FSIZE",
                limit=None if is_mounted else room,
                mend=partial(filler.unlink, missing_ok=True),
            )
    with _disk(place / "disk") as (disk, is_mounted):
        folder = disk / "run"
        job.earlier(folder)
        if is_mounted:
            how, mend = "tmpfs, mounted read-only", partial(_remount, disk, "rw")
            _remount(disk, "ro")
        elif os.geteuid() == 0:
            yield {
                "job": job.kind,
                "fault": "read-only folder",
                "skipped": "root may write into every folder, and cannot mount one here",
            }
            return
        else:
            how, mend = "permissions", partial(_permit, folder, 0o755)
            _permit(folder, 0o555)
        try:
            # Refused before the work.
            yield _fault_row(job, folder, "read-only folder", how, mend=mend, code=2)
        finally:
            mend()


def damage_faults(job: Job, place: Path) -> Iterator[dict[str, Any]]:
    """Yield a row for every damage to the files that a job goes on from, or that others read."""
    for target, damage, damage_file, mend in DAMAGES[job.kind]:
        folder = place / "damaged"
        shutil.copytree(job.undisturbed, folder)
        (path,) = folder.glob(target)
        damage_file(path)
        name = f"{target}: {damage}"
        if job.kind == "calibration":  # nothing goes on from codebooks; whoever loads them sees it
            arguments = ("inspect", FOLDER, "--out", str(place / "plot.png"))
            reader = Job(job.kind, "avq", arguments, job.undisturbed, job.earlier)
            yield _fault_row(reader, folder, name, "avq inspect", mend=None)
        elif job.kind == "scoring":  # features of real pictures are computed anew
            yield _fault_row(job, folder, name, "file", code=0, mend=lambda: None)
        else:
            yield _fault_row(job, folder, name, "file", mend=partial(mend, folder, path), code=2)
        shutil.rmtree(folder)


def _fault_row(
    job: Job,
    folder: Path,
    fault: str,
    how: str,
    *,
    mend: Callable[[], Any] | None,
    limit: int | None = None,
    code: int | None = None,
) -> dict[str, Any]:
    """Run a job under a fault and, if that can be mended, once more without."""
    wanted = job.code if code is None else code
    before, damaged_before = contents(folder)
    found_code, output = job.start(folder, limit=limit).finish()
    after, damaged = contents(folder)
    line = last_line(output)
    failures = []
    if found_code != wanted:
        failures.append(f"exit code {found_code} and not {wanted}")
    if wanted and ("Traceback" in output or not line.startswith(PROGRAMS[job.program][2])):
        failures.append("not an error of one line")
    if new := sorted(set(damaged) - set(damaged_before)):
        failures.append(f"half-written: {', '.join(new)}")
    if wanted and not _is_part(before, after):
        failures.append(f"what was there has changed: {_difference(before, after)}")
    if mend is not None:
        mend()
        code_then, output_then = job.start(folder).finish()
        expected, _ = contents(job.undisturbed)
        found, _ = contents(folder)
        if code_then != 0:
            failures.append(f"does not go on: {last_line(output_then)}")
        elif found != expected:
            failures.append(f"goes on to another result: {_difference(found, expected)}")
    return {
        "job": job.kind,
        "fault": fault,
        "how": how,
        "exit_code": found_code,
        "message": line.replace(str(folder.parent), "...") if wanted else None,
        "failures": failures,
    }


def contents(folder: Path) -> tuple[dict[str, str], list[str]]:
    """Digests of what lies in a folder under final names, and which of it is not whole.

    Left out are dates, speeds and command lines. Every line of a log counts by itself, the last one
    if it is whole, which is how the reader of logs takes them.
    """
    digests, damaged = {}, []
    for path in sorted(folder.rglob("*")):
        name = str(path.relative_to(folder))
        if path.is_dir() or _is_temporary(path.relative_to(folder)):
            continue
        try:
            found = _read(path)
        except (OSError, SyntaxError, ValueError, SafetensorError) as error:
            damaged.append(f"{name} is not whole ({error})")
            found = {"": path.read_bytes()}
        digests |= {name + part: hashlib.sha256(x).hexdigest() for part, x in found.items()}
    return digests, damaged


def _read(path: Path) -> dict[str, bytes]:
    """The parts of a whole file."""
    if path.suffix == ".jsonl":
        lines = enumerate(path.read_text().split("\n")[:-1])
        return {f":{number}": _plain(line, VOLATILE_FIGURES) for number, line in lines}
    if path.suffix == ".json":
        return {"": _plain(path.read_text(), VOLATILE)}
    if path.suffix == ".png":
        with Image.open(path) as picture:
            picture.verify()
    if path.suffix == ".safetensors":
        load_file(path)
    return {"": path.read_bytes()}


def _plain(text: str, left_out: Sequence[str]) -> bytes:
    values = {key: value for key, value in json.loads(text).items() if key not in left_out}
    return json.dumps(values, sort_keys=True).encode()


def _is_temporary(name: Path) -> bool:
    return any(part.startswith(".") for part in name.parts)


def _temporary(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if _is_temporary(path.relative_to(folder))]


def _is_part(found: Mapping[str, str], whole: Mapping[str, str]) -> bool:
    """Whether everything found is so in `whole`, but for checkpoints that were deleted since."""
    return all(
        whole.get(name) == digest
        for name, digest in found.items()
        if name in whole or not name.startswith("checkpoints/")
    )


def _difference(found: Mapping[str, str], expected: Mapping[str, str]) -> str:
    names = found.keys() | expected.keys()
    return ", ".join(sorted(name for name in names if found.get(name) != expected.get(name)))


def _wait_for_writing(attempt: Attempt, folder: Path) -> None:
    """Return as soon as the folder changes, or the process has ended."""
    before = _listing(folder)
    while attempt.process.is_alive() and _listing(folder) == before:
        time.sleep(0.0005)


def _listing(folder: Path) -> set[tuple[str, int]]:
    """Names and sizes, whatever is renamed or deleted in the meantime."""
    listed = set()
    for parent, _, names in os.walk(folder):
        listed.add((parent, 0))
        for name in names:
            path = os.path.join(parent, name)
            with contextlib.suppress(FileNotFoundError):
                listed.add((path, os.stat(path).st_size))
    return listed


@contextlib.contextmanager
def _disk(path: Path) -> Iterator[tuple[Path, bool]]:
    """A small disk of its own where one can be mounted, else a folder; empty, removed at last."""
    path.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={DISK}", "tmpfs", str(path)]
    try:
        is_mounted = subprocess.run(mount, capture_output=True).returncode == 0
    except FileNotFoundError:
        is_mounted = False
    try:
        yield path, is_mounted
    finally:
        if is_mounted:
            subprocess.run(["umount", str(path)], check=True)
        shutil.rmtree(path)


def _remount(path: Path, mode: str) -> None:
    subprocess.run(["mount", "-o", f"remount,{mode}", str(path)], check=True)


def _permit(folder: Path, mode: int) -> None:
    for path in (folder, *folder.rglob("*")):
        if path.is_dir():
            path.chmod(mode)


def run_faults(
    place: Path, kinds: Sequence[str], *, kills: int, seed: int
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """All faults on the jobs of these kinds.

    Args:
        place: an empty folder.
        kinds: of `KINDS`.
        kills: of each job.
        seed: of the moments of kills.

    Returns:
        rows of `kill_repeatedly`, and rows of the other faults.

    Raises:
        ValueError: a kind is unknown.
        ProcessFailed: an undisturbed run fails.
    """
    killed, faults = [], []
    jobs = prepare_jobs(place, kinds)
    for job in jobs:
        own = place / job.kind
        own.mkdir()
        with tqdm(total=kills, desc=job.kind, unit="kill") as bar:
            killed.append(kill_repeatedly(job, own, kills, seed=seed, progress=bar.update))
        rows = (row for find in (disk_faults, damage_faults) for row in find(job, own))
        faults += tqdm(rows, f"{job.kind}, other faults", unit="fault")
    return killed, faults


def failures_of(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """What went wrong, a line each."""
    return [
        f"{row['job']}, {row.get('fault', 'kills')}: {text}"
        for row in rows
        for text in row.get("failures", ())
    ]


def faults_table(killed: Sequence[Mapping[str, Any]], faults: Sequence[Mapping[str, Any]]) -> str:
    """The rows as two Markdown tables."""
    names = ("kills", "kills_with_progress", "kills_while_writing", "finished")
    header = ["job", "kills", "after progress", "while writing", "runs finished", "failures"]
    lines = [
        [row["job"], *(str(row[name]) for name in names), str(len(row["failures"]))]
        for row in killed
    ]
    others = [
        [
            row["job"],
            row["fault"],
            *(["-", "skipped"] if "skipped" in row else [str(row["exit_code"]), _verdict(row)]),
        ]
        for row in faults
    ]
    return "\n\n".join(
        [
            markdown_table(header, lines),
            markdown_table(["job", "fault", "exit code", "result"], others),
        ]
    )


def _verdict(row: Mapping[str, Any]) -> str:
    return "; ".join(row["failures"]) or "as it should"
