"""`avq bench`: speed against likeness for several choices of refined parents."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

from diffusers import DiffusionPipeline
from PIL import Image
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from avq_diffusers.cli.codebooks import codeword_source
from avq_diffusers.cli.images import dilation, fit_request, image_error, timed_image
from avq_diffusers.cli.loading import load_pipeline
from avq_diffusers.cli.output import save_image, sheet_path
from avq_diffusers.cli.request import ImageRequest, ModelRequest
from avq_diffusers.config import AVQConfig
from avq_diffusers.files import atomic_write
from avq_diffusers.hosts.profile import ErrorProfile
from avq_diffusers.hosts.refinement import refinable_parents
from avq_diffusers.hosts.verbs import apply_avq, avq_disabled, set_num_refined, states_of
from avq_diffusers.images import image_sheet, psnr

EXACT = "exact"
HEADINGS = ("", "seconds", "speed", "PSNR dB")
THUMBNAIL = 256


@dataclass(frozen=True)
class Choice:
    """A plan for `set_num_refined`. Choices of a series share a marker in the plot."""

    label: str
    series: str
    num_refined: Mapping[str, Any]

    def set(self, pipe: DiffusionPipeline) -> None:
        """Let the AVQ layers run it."""
        set_num_refined(pipe, self.num_refined)


@dataclass(frozen=True)
class ToleranceChoice:
    """The sizes within a tolerance, another kind of `Choice`."""

    label: str
    series: str
    profile: ErrorProfile
    tolerance: float

    def set(self, pipe: DiffusionPipeline) -> None:
        """Let the AVQ layers run them."""
        apply_avq(pipe, self.profile, tolerance=self.tolerance, route="always")


@dataclass(frozen=True)
class ChoiceResult:
    """One image per request by a choice, their median time and their median PSNR to exact ones.

    The PSNR is in dB and infinite for equal images.
    """

    label: str
    series: str
    images: Sequence[Image.Image]
    seconds: float
    psnr: float


def bench_model(
    model: ModelRequest,
    request: ImageRequest,
    out: Path,
    *,
    numbers: Sequence[int] | None,
    tolerances: Sequence[float],
    num_images: int,
) -> None:
    """Print a table, plot it to `out`, and write the sheet of images beside it."""
    pipe = load_pipeline(model.name, model.device)
    request = fit_request(pipe, request)
    source = codeword_source(pipe, model)
    apply_avq(pipe, source, route="always")
    choices: list[Choice | ToleranceChoice] = [*refined_choices(pipe, numbers)]
    requests = [replace(request, seed=request.seed + index) for index in range(num_images)]
    with dilation(pipe, request):
        if tolerances:
            assert isinstance(source, AVQConfig)
            print("measuring the errors of several sizes")
            choices += tolerance_choices(image_error(pipe, source, request), tolerances)
        results = list(run_choices(pipe, choices, requests))
    Console().print(bench_table(results))
    size = f"{request.width}x{request.height}"
    plot_bench(results, f"{Path(model.name).name}, {size}, {request.steps} steps", out)
    save_image(bench_sheet(results, list(map(str, requests))), sheet_path(out))
    print(f"plot:  {out}\nsheet: {sheet_path(out)}")


def refined_choices(pipe: DiffusionPipeline, numbers: Sequence[int] | None = None) -> list[Choice]:
    """Refine the same number of parents in all layers; layers with fewer refine all of theirs.

    By default the numbers are none, a sixteenth, an eighth, a quarter, a half and all of the
    parents.

    Raises:
        ValueError: the pipeline has no AVQ layer, or none that can refine so many parents.
    """
    parents = refinable_parents(states_of(pipe))
    most = max(parents.values())
    if numbers is None:
        numbers = sorted({0, *(most // part for part in (16, 8, 4, 2, 1))})
    for number in numbers:
        if not 0 <= number <= most:
            raise ValueError(f"refined parents must be between 0 and {most}, but got {number}.")
    return [
        Choice(
            f"{number} refined",
            "refined parents per query tile",
            {name: min(number, parents[name]) for name in parents},
        )
        for number in numbers
    ]


def tolerance_choices(profile: ErrorProfile, tolerances: Sequence[float]) -> list[ToleranceChoice]:
    """Run the cheapest sizes, by layer and timestep, whose error is within a tolerance."""
    return [
        ToleranceChoice(f"{tolerance:g} tolerance", "tolerance", profile, tolerance)
        for tolerance in tolerances
    ]


def run_choices(
    pipe: DiffusionPipeline,
    choices: Sequence[Choice | ToleranceChoice],
    requests: Sequence[ImageRequest],
) -> Iterator[ChoiceResult]:
    """Generate the images of exact attention, then of every choice; the pipeline keeps the last."""

    def generate() -> tuple[list[Image.Image], float]:
        timed = [timed_image(pipe, request) for request in requests]
        return [one.image for one in timed], median(one.seconds for one in timed)

    with avq_disabled(pipe):
        exact, seconds = generate()
    yield ChoiceResult(EXACT, EXACT, exact, seconds, math.inf)
    for choice in choices:
        choice.set(pipe)
        images, seconds = generate()
        likeness = median(map(psnr, images, exact))
        yield ChoiceResult(choice.label, choice.series, images, seconds, likeness)


def bench_table(results: Sequence[ChoiceResult]) -> Table:
    """Return seconds per image, speed relative to exact attention and PSNR, a row per choice."""
    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for heading in HEADINGS:
        table.add_column(heading, justify="right" if heading else "left", no_wrap=True)
    for result in results:
        table.add_row(*_cells(result, results[0]))
    return table


def bench_sheet(results: Sequence[ChoiceResult], row_titles: Sequence[str]) -> Image.Image:
    """Lay out the images, at most THUMBNAIL pixels wide, above the table."""
    width, height = results[0].images[0].size
    factor = min(1.0, THUMBNAIL / width)
    size = (round(width * factor), round(height * factor))
    return image_sheet(
        [
            [image.resize(size, Image.Resampling.LANCZOS) for image in row]
            for row in zip(*(result.images for result in results), strict=True)
        ],
        [result.label for result in results],
        row_titles=row_titles,
        table=[HEADINGS, *(_cells(result, results[0]) for result in results)],
    )


def plot_bench(results: Sequence[ChoiceResult], title: str, path: Path) -> None:
    """Plot PSNR to the exact images over seconds; exact attention is a vertical line.

    Images equal to the exact ones have no finite PSNR and are left out.

    Raises:
        OSError: `path` cannot be written; what was there stays.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.subplots()
    axes.axvline(results[0].seconds, color="black", linestyle="--", label=EXACT)
    series = dict.fromkeys(result.series for result in results[1:])
    for name, marker in zip(series, "os", strict=False):
        shown = [x for x in results if x.series == name and math.isfinite(x.psnr)]
        axes.plot([x.seconds for x in shown], [x.psnr for x in shown], marker, label=name)
        for result in shown:
            place: dict[str, Any] = {"xytext": (6, 4), "textcoords": "offset points", "fontsize": 8}
            axes.annotate(result.label.split()[0], (result.seconds, result.psnr), **place)
    axes.set(xlabel="seconds per image", ylabel="PSNR to exact, dB", title=title)
    axes.set_xlim(0, 1.12 * max(result.seconds for result in results))
    axes.grid(alpha=0.3)
    axes.legend()
    with atomic_write(path) as temporary:
        figure.savefig(temporary, dpi=110)


def _cells(result: ChoiceResult, exact: ChoiceResult) -> tuple[str, ...]:
    likeness = "" if result is exact else f"{result.psnr:.1f}"
    speed = f"{exact.seconds / result.seconds:.2f}x"
    return result.label, f"{result.seconds:.2f}", speed, likeness
