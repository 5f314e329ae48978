"""Commands that faults meet, each a process of its own.

A process runs a command's entry point, forked from a server that has imported what the commands
need: it takes a second, most of it work. mini-sd with a small UNet of random weights is the model.
"""

import contextlib
import multiprocessing
import os
import resource
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib import import_module
from multiprocessing.connection import Connection
from pathlib import Path
from threading import RLock

import torch
from diffusers import AutoencoderKL, StableDiffusionPipeline, UNet2DConditionModel
from tqdm import tqdm

from avq_diffusers.mini import MINI_SD, SCORER, TEST_SEEDS, sample_scene, write_coco
from eval.store.report import ProcessFailed

# Entry points of the commands, and how the line of an error begins.
PROGRAMS = {
    "avq": ("avq_diffusers.cli.main", "main", "avq: "),
    "distill": ("distill.__main__", "app", "error: "),
    "eval": ("eval.__main__", "main", "eval: "),
}
FORKED = multiprocessing.get_context("forkserver")
# What the server imports.
PRELOADED = ("avq_diffusers.cli.main", "distill.__main__", "distill.loop", "distill.run")
PRELOADED += (
    "eval.__main__",
    "eval.quality.captions",
    "eval.quality.coco",
    "eval.quality.coco_score",
    "eval.fault_jobs",
)
PRELOADED += ("diffusers.schedulers.scheduling_ddim",)
KINDS = ("calibration", "distillation", "generation", "scoring")
SIZE = 64  # of pictures
NUM_PICTURES = 8
NUM_STEPS = 10
FOLDER = "FOLDER"
PATIENCE = 300  # seconds until a process counts as hanging
NEWEST = f"checkpoints/step-{NUM_STEPS:08d}"


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
        raise ProcessFailed(f"the undisturbed {job.kind} failed: {last_line(output)}")


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
        without("codebooks", NEWEST, of="distillation"),
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


def last_line(output: str) -> str:
    """What a command printed at last, the message of an error."""
    lines = output.replace("\r", "\n").strip().split("\n")
    return lines[-1].strip()
