"""Faults on the real commands: kills at any moment, full disks, read-only folders, damaged files.

Each attempt is a process that runs a command's entry point, forked from a server that has imported
what the commands need: an attempt takes a second, most of it work. mini-sd with a small UNet of
random weights is the model.

A killed command runs again in the same folder until it finishes; what it leaves must be, to the
byte, what an undisturbed run leaves. Commands that cannot go on must say so in one line, and leave
what was there as it was.
"""

import contextlib
import hashlib
import json
import multiprocessing
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from multiprocessing.connection import Connection
from pathlib import Path
from threading import RLock
from typing import Any

import torch
from diffusers import AutoencoderKL, StableDiffusionPipeline, UNet2DConditionModel
from PIL import Image
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from tqdm import tqdm

from avq_diffusers.mini import MINI_SD, SCORER, TEST_SEEDS, sample_scene, write_coco
from eval.markdown import markdown_table
from eval.report import ProcessFailed

# Entry points of the commands, and how the line of an error begins.
PROGRAMS = {
    "avq": ("avq_diffusers.cli", "main", "avq: "),
    "distill": ("distill.__main__", "app", "error: "),
    "eval": ("eval.__main__", "main", "eval: "),
}
FORKED = multiprocessing.get_context("forkserver")
# What the server imports.
PRELOADED = ("avq_diffusers.cli", "distill.__main__", "distill.loop", "distill.run")
PRELOADED += ("eval.__main__", "eval.captions", "eval.coco", "eval.coco_score", "eval.faults")
PRELOADED += ("diffusers.schedulers.scheduling_ddim",)
KINDS = ("calibration", "distillation", "generation", "scoring")
SIZE = 64  # of pictures
NUM_PICTURES = 8
NUM_STEPS = 10
FOLDER = "FOLDER"
WEIGHTS = "diffusion_pytorch_model.safetensors"
# What differs between two runs of one command: of JSON files, and of lines of a log.
VOLATILE = ("command", "environment", "earlier_sessions")
VOLATILE_FIGURES = ("samples_per_second",)
PATIENCE = 300  # seconds until a process counts as hanging
DISK = 64 * 2**20  # bytes
ROOMS = (0, 8 * 2**10)  # bytes that a full disk has left when the command starts


@dataclass(frozen=True)
class Job:
    """A command that works for a while.

    Attributes:
        kind: one of `KINDS`.
        program: of `PROGRAMS`.
        arguments: of the command; FOLDER stands for where it writes.
        again: further arguments where it has been killed before.
        code: exit code where it fails while working.
        undisturbed: folder of an undisturbed run.
        earlier: makes a folder with an earlier good state, from which the command comes to the same
            result.
    """

    kind: str
    program: str
    arguments: tuple[str, ...]
    undisturbed: Path
    earlier: Callable[[Path], None]
    again: tuple[str, ...] = ()
    code: int = 2

    def start(self, folder: Path, *, limit: int | None = None) -> "Attempt":
        """Start the command in a folder, with at most `limit` bytes in a file that it writes."""
        again = self.again if folder.exists() else ()
        arguments = [part.replace(FOLDER, str(folder)) for part in (*self.arguments, *again)]
        return Attempt(self.program, arguments, limit)


class Attempt:
    """A process, leader of its own group, that runs a command.

    Args:
        program: of `PROGRAMS`.
        arguments: of the command.
        limit: of the size of files that it writes, in bytes.
    """

    def __init__(self, program: str, arguments: Sequence[str], limit: int | None = None) -> None:
        module, function, _ = PROGRAMS[program]
        reader, writer = FORKED.Pipe(duplex=False)
        self.process = FORKED.Process(
            target=_run, args=(module, function, [program, *arguments], limit, writer)
        )
        self.process.start()
        writer.close()
        os.read(reader.fileno(), 1)  # it leads its group now
        self.started = time.monotonic()
        # A pipe: a limit of file sizes would cut a file of messages too.
        self.pool = ThreadPoolExecutor(1)
        self.reading = self.pool.submit(_drain, reader)

    def finish(self) -> tuple[int, str]:
        """Wait for the exit code and what was printed; kills what hangs."""
        self.process.join(PATIENCE)
        return self.kill()

    def kill(self) -> tuple[int, str]:
        """Send SIGKILL to the group; return the exit code and what was printed."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.join()
        output = self.reading.result()
        self.pool.shutdown()
        return self.process.exitcode, output

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.started


def _run(
    module: str, function: str, arguments: list[str], limit: int | None, output: Connection
) -> None:
    os.setsid()
    os.write(output.fileno(), b"\n")
    for stream in (1, 2):
        os.dup2(output.fileno(), stream)
    if limit is not None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
    torch.set_num_threads(1)  # sums depend on the number of threads
    tqdm.set_lock(RLock())  # its own kind is shared by processes and would outlive the kill
    sys.argv = arguments
    getattr(import_module(module), function)()


def _drain(reader: Connection) -> str:
    with reader:
        return b"".join(iter(lambda: os.read(reader.fileno(), 2**16), b"")).decode(errors="replace")


def prepare_jobs(place: Path, kinds: Sequence[str]) -> list[Job]:
    """Make a model and data, and run the jobs of these kinds once, undisturbed.

    Args:
        place: an empty folder.
        kinds: of `KINDS`.

    Raises:
        ValueError: a kind is unknown.
        ProcessFailed: an undisturbed run fails.
    """
    if unknown := [kind for kind in kinds if kind not in KINDS]:
        raise ValueError(f"--jobs must be some of {', '.join(KINDS)}, but got {unknown[0]!r}.")
    FORKED.set_forkserver_preload(list(PRELOADED))
    _tiny_model(place / "model")
    (place / "prompts.txt").write_text(sample_scene(TEST_SEEDS[0]).caption + "\n")
    write_coco(place / "scenes", NUM_PICTURES, first_seed=TEST_SEEDS[0], size=SIZE)
    chosen = []
    for job in _jobs(place):
        is_needed = job.kind == "generation" and "scoring" in kinds
        if job.kind in kinds or is_needed:
            _finish(job, job.undisturbed)
        if job.kind in kinds:
            chosen.append(job)
    return chosen


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
            failures.append(f"exit code {code} after a kill: {_last_line(output)}")
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
    line = _last_line(output)
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
            failures.append(f"does not go on: {_last_line(output_then)}")
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


def _last_line(output: str) -> str:
    lines = output.replace("\r", "\n").strip().split("\n")
    return lines[-1].strip()


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


# Damages


def _truncate(path: Path) -> None:
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 2])


def _overwrite(path: Path) -> None:
    """The header."""
    content = path.read_bytes()
    path.write_bytes(b"\xff" * 64 + content[64:])


def _flip(path: Path) -> None:
    """One bit in the middle, which the format does not notice."""
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def _put_nan(path: Path) -> None:
    """NaN in one tensor; a checkpoint's digest is that of the file with it."""
    tensors = load_file(path)
    name = max(tensors, key=lambda name: tensors[name].numel())
    tensors[name].view(-1)[0] = torch.nan
    save_file(tensors, path)
    run = path.with_name("run.json")
    if run.exists():
        values = json.loads(run.read_text())
        values["sha256"][path.stem] = hashlib.sha256(path.read_bytes()).hexdigest()
        run.write_text(json.dumps(values))


def _swap_sizes(path: Path) -> None:
    """The weights of codebooks of another size."""
    tensors = load_file(path)
    save_file({name: x[:, :-1].contiguous() for name, x in tensors.items()}, path)


def _swap_training(path: Path) -> None:
    """The weights of other codebooks of the same sizes."""
    save_file({name: 0.5 * x for name, x in load_file(path).items()}, path)


def _swap_steps(path: Path) -> None:
    """The file of the checkpoint before, of the same shapes."""
    others = sorted(path.parent.parent.glob("step-*"))
    shutil.copy(others[-2] / path.name, path)


def _swap_names(path: Path) -> None:
    """The file of the optimizer in the place of the trained tensors."""
    shutil.copy(path.with_name("optimizer.safetensors"), path)


def _delete_codebooks(folder: Path, path: Path) -> None:
    shutil.rmtree(folder / "codebooks")


def _delete_checkpoint(folder: Path, path: Path) -> None:
    """What the message says."""
    shutil.rmtree(path.parent)


_CODEBOOK_DAMAGES = (
    (WEIGHTS, "truncated", _truncate),
    (WEIGHTS, "corrupted", _overwrite),
    (WEIGHTS, "corrupted, one bit", _flip),
    (WEIGHTS, "swapped for another size", _swap_sizes),
    (WEIGHTS, "swapped for another training", _swap_training),
    (WEIGHTS, "NaN", _put_nan),
    ("config.json", "truncated", _truncate),
)
_NEWEST = f"checkpoints/step-{NUM_STEPS:08d}"
# By kind: pattern of the file, name of the damage, the damage, how it is mended.
DAMAGES = {
    "calibration": [(*damage, None) for damage in _CODEBOOK_DAMAGES],
    "generation": [
        (f"codebooks/{target}", *damage, _delete_codebooks) for target, *damage in _CODEBOOK_DAMAGES
    ],
    "distillation": [
        (f"{_NEWEST}/{target}", *damage, _delete_checkpoint)
        for target, *damage in (
            ("objective.safetensors", "truncated", _truncate),
            ("objective.safetensors", "corrupted, one bit", _flip),
            ("objective.safetensors", "swapped for the step before", _swap_steps),
            ("objective.safetensors", "swapped for the optimizer", _swap_names),
            ("objective.safetensors", "NaN", _put_nan),
            ("optimizer.safetensors", "truncated", _truncate),
            ("optimizer.safetensors", "NaN", _put_nan),
            ("run.json", "truncated", _truncate),
        )
    ],
    "scoring": [
        ("cache/*.safetensors", "truncated", _truncate, None),
        ("cache/*.safetensors", "corrupted", _overwrite, None),
    ],
}


# The jobs


def _tiny_model(folder: Path) -> None:
    """mini-sd with small networks of random weights, but for its text encoder."""
    pipe = StableDiffusionPipeline.from_pretrained(MINI_SD)
    small = {"norm_num_groups": 4, "layers_per_block": 1}
    torch.manual_seed(0)
    pipe.vae = AutoencoderKL.from_config(
        {**pipe.vae.config, **small, "block_out_channels": (8, 8, 8), "sample_size": SIZE}
    )
    unet_sizes = {"block_out_channels": (16, 16, 16), "sample_size": SIZE // pipe.vae_scale_factor}
    pipe.unet = UNet2DConditionModel.from_config({**pipe.unet.config, **small, **unet_sizes})
    pipe.save_pretrained(folder)


def _finish(job: Job, folder: Path) -> None:
    code, output = job.start(folder).finish()
    if code != 0:
        raise ProcessFailed(f"the undisturbed {job.kind} failed: {_last_line(output)}")


def _jobs(place: Path) -> Iterator[Job]:
    """One of each kind, in an order in which each finds what it needs."""
    model = str(place / "model")
    config, levels = ("--config", "M16P4C4"), ("--levels", "0,1")
    undisturbed = place / "undisturbed"

    def calibrated_before(folder: Path) -> None:
        kept = place / "calibrated-before"
        if not kept.exists():
            other = Job("calibration", "avq", (*calibration, "--seed", "1"), kept, lambda _: None)
            _finish(other, kept)
        shutil.copytree(kept, folder)

    calibration = ("calibrate", "--model", model, *config, *levels, "--out", FOLDER)
    calibration += ("--prompts", str(place / "prompts.txt"), "--steps", "8", "--keys", "512")
    calibration += ("--device", "cpu")
    yield Job("calibration", "avq", calibration, undisturbed / "calibration", calibrated_before)

    def without(*targets: str, of: str) -> Callable[[Path], None]:
        def copy(folder: Path) -> None:
            shutil.copytree(undisturbed / of, folder)
            for path in [path for target in targets for path in folder.glob(target)]:
                shutil.rmtree(path) if path.is_dir() else path.unlink()

        return copy

    settings = {
        "base_model": model,
        "image_size": SIZE,
        "avq.num_parents": 4,
        "avq.num_children": 2,
        "avq.num_refined": 2,
        "data.num_samples": 8,
        "data.workers": 0,
        "data.cache": "null",
        "codebooks.start_pictures": 4,
        "codebooks.decay_warmup_steps": 2,
        "steps": NUM_STEPS,
        "batch_size": 4,
        "micro_batch_size": 4,
        "warmup_steps": 1,
        "precision": "fp32",
        "log_every": 1,
        "checkpoint_every": 1,
        "keep_checkpoints": 2,
        "samples.every": 5,
        "samples.prompts": "[a red star]",
        "samples.num_inference_steps": 1,
        "tracker": "null",
    }
    file = Path(__file__).parent.parent / "configs" / "mini_m64p16c8.yaml"
    distillation = ("--config", str(file), "--output", FOLDER)
    for key, value in settings.items():
        distillation += ("--set", f"{key}={value}")
    yield Job(
        "distillation",
        "distill",
        distillation,
        undisturbed / "distillation",
        without("codebooks", _NEWEST, of="distillation"),
        again=("--resume",),
        code=1,
    )

    generation = ("coco", "generate", FOLDER, "--model", model, "--method", "M16P4C4", *levels)
    generation += ("--captions", str(place / "scenes/annotations/captions_scenes.json"))
    generation += ("--calibration", str(place / "prompts.txt"), "--size", str(SIZE))
    generation += ("--pictures", str(NUM_PICTURES), "--steps", "2")
    yield Job(
        "generation",
        "eval",
        generation,
        undisturbed / "generation",
        without("pictures/00000[4-9].png", of="generation"),
    )

    scoring = ("coco", "score", str(undisturbed / "generation"), "--output", FOLDER)
    scoring += ("--real", str(place / "scenes/images"), "--scorer", SCORER, "--threads", "2")
    scoring += ("--cache", f"{FOLDER}/cache", "--batch", "4")
    yield Job("scoring", "eval", scoring, undisturbed / "scoring", without("cache", of="scoring"))


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
