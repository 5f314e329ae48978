"""The real commands, killed at random moments or out of disk, end in the same bytes as undisturbed.

What lies in a folder under a final name must be whole at every moment.
"""

import hashlib
import json
import os
import random
import shutil
import signal
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import pytest
from PIL import Image
from processes import Command
from safetensors import SafetensorError
from safetensors.torch import load_file
from tiny import tiny_pipe
from tiny_training import RUN_CONFIG, TINY_RUN

from avq_diffusers.cli.main import main
from distill.scenes import TEST_SEEDS, write_coco

pytestmark = pytest.mark.long

KILLS = 4  # of each command
SIZE = TINY_RUN["image_size"]
NUM_STEPS = 10
FOLDER = "FOLDER"
# What differs between two runs of one command.
VOLATILE = ("command", "environment", "earlier_sessions", "samples_per_second")
SETTINGS = TINY_RUN | {
    "steps": NUM_STEPS,
    "checkpoint_every": 1,
    "keep_checkpoints": 2,
    "samples.every": 5,
    "samples.prompts": "[a red star]",
}


@dataclass(frozen=True)
class Job:
    """A command that writes into FOLDER.

    Attributes:
        entry: of `Command`.
        arguments: of the command.
        undisturbed: folder of an undisturbed run.
        missing: patterns of files that are deleted from it where the command shall have work left.
        again: further arguments where there is a folder.
        code: exit code where it fails while working.
    """

    entry: str
    arguments: tuple[str, ...]
    undisturbed: Path
    missing: tuple[str, ...] = ()
    again: tuple[str, ...] = ()
    code: int = 2

    def start(self, folder: Path, file_limit: int | None = None) -> Command:
        again = self.again if folder.exists() else ()
        arguments = [part.replace(FOLDER, str(folder)) for part in (*self.arguments, *again)]
        return Command(self.entry, arguments, file_limit)

    def copy_of_earlier(self, folder: Path) -> None:
        """An earlier good state, from which the command comes to the same result."""
        shutil.copytree(self.undisturbed, folder)
        for path in [path for pattern in self.missing for path in folder.glob(pattern)]:
            shutil.rmtree(path) if path.is_dir() else path.unlink()


@pytest.fixture(scope="module")
def jobs(tmp_path_factory):
    place = tmp_path_factory.mktemp("jobs")
    model, prompts = str(place / "model"), str(place / "prompts.txt")
    tiny_pipe().save_pretrained(model)
    write_coco(place / "scenes", 8, first_seed=TEST_SEEDS[0], size=SIZE)
    Path(prompts).write_text("a red star\n")
    method = ("--levels", "0,1", "--model", model)
    settings = [f"--set={key}={value}" for key, value in {"base_model": model, **SETTINGS}.items()]
    return {
        "calibration": Job(
            "avq_diffusers.cli.main:main",
            (
                *(
                    "calibrate",
                    *method,
                    "--config",
                    "M4P2C2",
                    "--output",
                    FOLDER,
                    "--device",
                    "cpu",
                ),
                *("--prompts", prompts, "--steps", "8", "--keys", "512"),
            ),
            place / "calibration",
        ),
        "distillation": Job(
            "distill.__main__:app",
            ("--config", str(RUN_CONFIG), "--output", FOLDER, *settings),
            place / "distillation",
            ("codebooks", f"checkpoints/step-{NUM_STEPS:08d}"),
            again=("--resume",),
            code=1,
        ),
        "generation": Job(
            "eval.__main__:main",
            (
                *("coco", "generate", FOLDER, *method, "--method", "M4P2C2", "--size", str(SIZE)),
                *("--captions", str(place / "scenes/annotations/captions_scenes.json")),
                *("--calibration", prompts, "--images", "8", "--steps", "2"),
            ),
            place / "generation",
            ("images/00000[4-9].png",),
        ),
        "measurement": Job(
            "test_kills:measure_and_generate",
            (
                *(FOLDER, "generate", "a red star", *method, "--tolerance", "0.02", "--steps", "2"),
                *("--height", str(SIZE), "--width", str(SIZE), "--device", "cpu"),
            ),
            place / "measurement",
            ("*.png",),
        ),
    }


def measure_and_generate() -> None:
    """`avq` whose profiles and images are in the folder that is named first."""
    folder = sys.argv.pop(1)
    Path(folder).mkdir(exist_ok=True)
    os.environ["XDG_CACHE_HOME"] = folder
    sys.argv += ["--output", f"{folder}/image.png"]
    main()


@pytest.fixture(scope="module")
def seconds(jobs):
    """How long each job takes, all of them run once, undisturbed."""

    def run(job: Job) -> float:
        command = job.start(job.undisturbed)
        code, output = command.finish()
        assert code == 0, output
        return command.seconds

    return {kind: run(job) for kind, job in jobs.items()}


KINDS = pytest.mark.parametrize(
    "kind", ["calibration", "distillation", "generation", "measurement"]
)


@KINDS
def test_a_killed_command_ends_in_the_same_bytes(jobs, seconds, tmp_path, kind):
    """Catches a half-written file under its final name, and state that a resumed run lacks."""
    job, folder = jobs[kind], tmp_path / "run"
    expected = contents(job.undisturbed)
    seed = time.time_ns()
    moments, kills = random.Random(seed), 0
    while kills < KILLS:
        command = job.start(folder)
        command.process.join(moments.uniform(0, seconds[kind]))
        code, output = command.kill()
        if code == -signal.SIGKILL:
            kills += 1
            assert is_part(contents(folder), expected), f"after kill {kills} of seed {seed}"
        else:
            assert code == 0, output
            assert contents(folder) == expected
            shutil.rmtree(folder)
    code, output = job.start(folder).finish()
    assert code == 0, output
    assert contents(folder) == expected


@KINDS
def test_a_full_disk_is_named_and_harmless(jobs, seconds, tmp_path, kind):
    """Catches an earlier result that is lost, a traceback, and a command that cannot go on."""
    job, folder = jobs[kind], tmp_path / "run"
    job.copy_of_earlier(folder)
    before, expected = contents(folder), contents(job.undisturbed)
    code, output = job.start(folder, file_limit=256).finish()
    assert (code, "Traceback" in output) == (job.code, False), output
    assert "could not be written" in output.strip().splitlines()[-1]
    assert is_part(before, contents(folder))
    code, output = job.start(folder).finish()
    assert code == 0, output
    assert contents(folder) == expected


def test_what_is_not_whole_or_of_another_run_is_found(jobs, seconds, tmp_path):
    """The control: readers that stop at the header, and comparisons that look at names only."""
    folder = tmp_path / "run"
    shutil.copytree(jobs["distillation"].undisturbed, folder)
    before = contents(folder)
    weights = next((folder / "codebooks").glob("*.safetensors"))
    for path in (next(folder.glob("samples/*10.png")), weights, folder / "codebooks/config.json"):
        content = path.read_bytes()
        path.write_bytes(content[:-9])
        with pytest.raises((OSError, SyntaxError, ValueError, SafetensorError)):
            contents(folder)
        path.write_bytes(content)
    with (folder / "log.jsonl").open("a") as file:
        file.write('{"step": 11, "lo')
    assert contents(folder) == before
    weights.write_bytes(next(folder.glob("checkpoints/*/*.safetensors")).read_bytes())
    assert not is_part(contents(folder), before)


def contents(folder: Path) -> dict[str, str]:
    """Digests of what lies in a folder under final names; fails where a file is not whole.

    Every line of a log counts by itself. Left out are dates, speeds and command lines.
    """
    found = {}
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder)
        if path.is_file() and not any(part.startswith(".") for part in name.parts):
            found |= {f"{name}{key}": hashlib.sha256(x).hexdigest() for key, x in parts(path)}
    return found


def parts(path: Path):
    if path.suffix == ".jsonl":
        for number, line in enumerate(path.read_text().split("\n")[:-1]):
            yield f":{number}", without_volatile(line)
        return
    if path.suffix == ".png":
        with Image.open(path) as image:
            image.verify()
    elif path.suffix == ".safetensors":
        load_file(path)
    yield "", without_volatile(path.read_text()) if path.suffix == ".json" else path.read_bytes()


def without_volatile(text: str) -> bytes:
    values = {key: value for key, value in json.loads(text).items() if key not in VOLATILE}
    return json.dumps(values, sort_keys=True).encode()


def is_part(found: dict[str, str], whole: dict[str, str]) -> bool:
    """Whether all that was found is so in `whole`, but for checkpoints that are deleted later."""
    return all(
        whole.get(name) == digest
        for name, digest in found.items()
        if name in whole or not name.startswith("checkpoints/")
    )
