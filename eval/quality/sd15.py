"""The paper's table for SD1.5 on COCO: the commands that make it, their cost, the published values.

OUTPUT/coco holds captions and real images, OUTPUT/distill the runs, OUTPUT/rows the images per row
and size, OUTPUT/coco_SIZE.json the metrics, OUTPUT/bench_steps_* the times, and OUTPUT/done one
file per finished step.
"""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from avq_diffusers.files import write_text
from eval.quality.coco_download import CAPTIONS, IMAGES
from eval.quality.protocol import GENERATION
from eval.store.markdown import markdown_table, number

ROOT = Path(__file__).parents[2]
BENCH_RUN = "compiled"
METRICS = {"fid": ("FID", ".2f"), "clip_score": ("CLIP score", ".3f"), "ms": ("ms", ".1f")}
# Expected gigabytes of COCO, of the distillation data with its cache, of all weights, and of a
# row's images by image side.
COCO_GB, LAION_GB, WEIGHTS_GB = 13, 75, 12
ROW_GB = {512: 14, 1024: 50}
# Hours on one H200: see "Time and space" in eval/README.md.
DISTILL_HOURS, OWN_HOURS = 12, 9.6  # with stored or own codewords


class TableRow(NamedTuple):
    """One row of the paper's table.

    Attributes:
        label: as printed in the paper.
        timed: method for `bench steps`; None for codebooks from distilling
            `configs/sd15_ROW.yaml`.
        method: method for `coco generate`; None for the result of distilling.
    """

    label: str
    timed: str | None = None
    method: str | None = None


ROWS = {
    "exact": TableRow("SD1.5 (FA-v2)", "exact", "exact"),
    "linfusion": TableRow("LinFusion", "linfusion"),
    "tome": TableRow("ToMe-SD (r = 0.5)", "tome", "tome"),
    "m32p8c8": TableRow("AVQ M32P8C8"),
    "m64p16c8": TableRow("AVQ M64P16C8"),
    "m128p32c8": TableRow("AVQ M128P32C8"),
    "m64p16c8_level1": TableRow("AVQ M64P16C8, levels 0 and 1"),
    "own_m64p16c8": TableRow("AVQ M64P16C8, own codewords", "M64P16C8@L0"),
    "own_m64c8t1e-4_level1": TableRow("AVQ M64C8T1e-4, levels 0 and 1", "M64C8T1e-4@L01"),
}
# FID, CLIP score and milliseconds per step, by row and size.
PUBLISHED = {
    ("exact", 512): (12.75, 0.318, 44.37),
    ("exact", 1024): (41.03, 0.292, 213.43),
    ("linfusion", 512): (12.52, 0.318, 43.70),
    ("linfusion", 1024): (36.37, 0.295, 141.57),
    ("tome", 512): (12.40, 0.317, 41.99),
    ("tome", 1024): (43.00, 0.290, 163.30),
    ("m32p8c8", 512): (12.50, 0.319, 39.09),
    ("m32p8c8", 1024): (35.39, 0.297, 133.48),
    ("m64p16c8", 512): (12.51, 0.320, 39.50),
    ("m64p16c8", 1024): (35.65, 0.296, 135.06),
    ("m128p32c8", 512): (12.55, 0.319, 40.23),
    ("m128p32c8", 1024): (35.51, 0.297, 138.16),
    ("m64p16c8_level1", 512): (12.48, 0.320, 39.41),
    ("m64p16c8_level1", 1024): (36.29, 0.297, 128.59),
}
# Hours for 30,000 images on one H200, compiled, by size; other AVQ rows are similar.
HOURS = {
    "exact": {512: 1.3, 1024: 6.1},
    "linfusion": {512: 1.4, 1024: 3.8},
    "tome": {512: 1.5, 1024: 4.8},
    "m64p16c8_level1": {512: 1.2, 1024: 3.4},
}
AVQ_HOURS = {512: 1.2, 1024: 3.6}


@dataclass(frozen=True)
class Request:
    """What to reproduce.

    Attributes:
        output: folder for everything.
        rows: keys of `ROWS`.
        sizes: sides of the images; the first is the training size, the others run ScaleCrafter.
        model: folder or Hub id of the base model.
        captions, real, scorer: in place of the downloads; None downloads, and scores with Inception
            and CLIP.
        images: number of images per row.
        steps: denoising steps.
        overrides: `--set` options for every distillation.
        processes: processes for training and generation, one per GPU.
        device: cpu, cuda or mps.
    """

    output: Path
    rows: Sequence[str]
    sizes: Sequence[int]
    model: str
    captions: Path | None
    real: Path | None
    scorer: str | None
    images: int
    steps: int
    overrides: Sequence[str]
    processes: int
    device: str

    @property
    def coco(self) -> Path:
        return self.output / "coco"


@dataclass(frozen=True)
class Step:
    """One command of the plan.

    Attributes:
        name: name of the step, and of its file in OUTPUT/done.
        command: the process's command.
        hours: expected hours, with one H200 per process; None for minutes, or network-bound steps.
        gigabytes: expected disk space.
    """

    name: str
    command: Sequence[str]
    hours: float | None = None
    gigabytes: float = 0

    def mark(self, output: Path) -> Path:
        return output / "done" / f"{self.name.replace(' ', '-')}.json"

    def is_done(self, output: Path) -> bool:
        """Whether this exact command has finished."""
        try:
            return json.loads(self.mark(output).read_text()) == list(self.command)
        except (OSError, ValueError):
            return False


def plan(request: Request) -> list[Step]:
    """The steps, in order."""
    steps = []
    if request.captions is None or request.real is None:
        command = _python("eval", "coco", "download", request.coco)
        steps.append(Step("download coco", command, gigabytes=COCO_GB))
    steps += [_distill(request, name) for name in request.rows if ROWS[name].method is None]
    for size in request.sizes:
        steps += [_generate(request, name, size) for name in request.rows]
        steps.append(_score(request, size))
    if request.device == "cuda":
        methods = ",".join(_timed(request, name) for name in request.rows)
        models = ",".join(f"sd15@{size}" for size in request.sizes)
        options = ("--models", models, "--methods", methods, "--runs", BENCH_RUN)
        where = ("--device", request.device, "--output", request.output)
        steps.append(Step("bench steps", _python("eval", "bench", "steps", *options, *where)))
    return steps


def plan_table(request: Request, steps: Sequence[Step]) -> str:
    """The steps with expected hours and gigabytes, their sums, and the free disk space."""
    rows = [
        [
            step.name,
            "done" if step.is_done(request.output) else "to do",
            number(step.hours, ".1f"),
            number(step.gigabytes or None, ".0f"),
        ]
        for step in steps
    ]
    left = [step for step in steps if not step.is_done(request.output)]
    hours = sum(step.hours or 0 for step in left)
    gigabytes = sum(step.gigabytes for step in left)
    free = shutil.disk_usage(_existing(request.output)).free / 1e9
    return "\n".join(
        [
            markdown_table(["step", "state", "hours", "GB"], rows),
            "",
            f"Expected: {hours:.1f} hours of training and UNet time, on {request.processes} H200 "
            f"with the settings in configs; {gigabytes:.0f} GB ({free:.0f} GB are free). "
            f"Downloads, VAE and scoring come on top. Weights and training data ({WEIGHTS_GB} and "
            f"{LAION_GB} GB) go to the Hub's cache.",
        ]
    )


def carry_out(request: Request, steps: Iterable[Step]) -> None:
    """Run the unfinished steps, each in its own process.

    Raises:
        ValueError: a step failed and printed its own message. A repeated call continues there.
    """
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    for step in steps:
        if step.is_done(request.output):
            continue
        print(f"{step.name}: {' '.join(step.command)}", file=sys.stderr, flush=True)
        done = subprocess.run(step.command, env={**os.environ, "PYTHONPATH": path})
        if done.returncode:
            raise ValueError(
                f"{step.name} failed with the message above; repeat the command to continue there."
            )
        write_text(step.mark(request.output), json.dumps(list(step.command)))


def measured(request: Request) -> dict[str, dict[int, dict[str, Any]]]:
    """FID, CLIP score and milliseconds by row and size, from finished steps' files."""
    found: dict[str, dict[int, dict[str, Any]]] = {name: {} for name in request.rows}
    path = request.output / f"bench_steps_{request.device}.json"
    timed = json.loads(path.read_text())["rows"] if path.exists() else []
    times = {(row["size"], row["method"]): row["ms"] for row in timed}
    for size in request.sizes:
        scored = json.loads((request.output / f"coco_{size}.json").read_text())["rows"]
        for name, row in zip(request.rows, scored, strict=True):
            found[name][size] = {**row, "ms": times.get((size, _timed(request, name)))}
    return found


def paper_table(found: Mapping[str, Mapping[int, Mapping[str, Any]]], sizes: Sequence[int]) -> str:
    """Measured metrics, each with the published one in brackets."""
    header = ["method"]
    header += [f"{title}, {size}²" for size in sizes for title, _ in METRICS.values()]
    rows = []
    for name, by_size in found.items():
        cells = [ROWS[name].label]
        for size in sizes:
            published = PUBLISHED.get((name, size), (None,) * len(METRICS))
            for (metric, (_, form)), paper in zip(METRICS.items(), published, strict=True):
                cells.append(f"{number(by_size[size][metric], form)} ({number(paper, form)})")
        rows.append(cells)
    return markdown_table(header, rows)


def _distill(request: Request, name: str) -> Step:
    command = ["--config", ROOT / "configs" / f"sd15_{name}.yaml", "--resume"]
    command += ["--output", _run(request, name)]
    for setting in (f"base_model={request.model}", *request.overrides):
        command += ["--set", setting]
    launched = _launch(request, "distill", *command)
    hours = OWN_HOURS if name.startswith("own_") else DISTILL_HOURS
    return Step(f"distill {name}", launched, hours=hours / request.processes)


def _generate(request: Request, name: str, size: int) -> Step:
    result = _run(request, name) / ("linfusion" if name == "linfusion" else "codebooks")
    method = ROWS[name].method or result
    captions = request.captions or request.coco / CAPTIONS
    options: list[Any] = ["--method", method, "--captions", captions, "--model", request.model]
    options += ["--images", request.images, "--size", size, "--steps", request.steps]
    options += ["--device", request.device]
    options += ["--scalecrafter"] if size != request.sizes[0] else []
    options += ["--compile"] if request.device == "cuda" else []
    share = request.images / GENERATION["num_images"]
    hours = HOURS.get(name, AVQ_HOURS).get(size)
    return Step(
        f"generate {name} {size}",
        _launch(request, "eval", "coco", "generate", _images(request, name, size), *options),
        hours=None if hours is None else hours * share / request.processes,
        gigabytes=ROW_GB.get(size, 0) * share,
    )


def _timed(request: Request, name: str) -> str:
    """The method for `bench steps`."""
    return ROWS[name].timed or str(_run(request, name) / "codebooks")


def _score(request: Request, size: int) -> Step:
    folders = [_images(request, name, size) for name in request.rows]
    options: list[Any] = ["--real", request.real or request.coco / IMAGES]
    options += ["--cache", request.output / "cache", "--name", f"coco_{size}"]
    options += ["--device", request.device, "--output", request.output]
    options += [] if request.scorer is None else ["--scorer", request.scorer]
    return Step(f"score {size}", _python("eval", "coco", "score", *folders, *options))


def _run(request: Request, name: str) -> Path:
    return request.output / "distill" / name


def _images(request: Request, name: str, size: int) -> Path:
    return request.output / "rows" / f"{name}-{size}"


def _launch(request: Request, module: str, *arguments: Any) -> list[str]:
    if request.processes == 1:
        return _python(module, *arguments)
    number_of = ("--num_processes", request.processes)
    return _python("accelerate.commands.launch", *number_of, "-m", module, *arguments)


def _python(module: str, *arguments: Any) -> list[str]:
    return [sys.executable, "-m", module, *map(str, arguments)]


def _existing(path: Path) -> Path:
    return next(folder for folder in (path, *path.absolute().parents) if folder.exists())
