"""`avq bench`: speed against PSNR for several thresholds, refined parents, or tolerances."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from diffusers import DiffusionPipeline
from PIL import Image

from avq_diffusers.cli.codebooks import codeword_source
from avq_diffusers.cli.dials import refined_plan, set_dial, usual_values
from avq_diffusers.cli.images import dilation, first_steps, fit_request, timed_image
from avq_diffusers.cli.loading import compile_model, load_pipeline
from avq_diffusers.cli.output import save_sheet, sheet_path
from avq_diffusers.cli.request import NUM_REFINED, THRESHOLD, Dial, ImageRequest, ModelRequest
from avq_diffusers.config import AVQConfig, digits_of
from avq_diffusers.files import atomic_write
from avq_diffusers.hosts.core import AVQSource, as_table
from avq_diffusers.hosts.verbs import apply_avq, avq_disabled
from avq_diffusers.images import image_sheet, psnr

EXACT = "exact"
LEGEND = """seconds per image, speed relative to exact attention, PSNR to its images,
seconds of the first step (cold: includes compilation) and of the next (warm)
AVQ ran in all layers, also where exact attention is faster"""
THUMBNAIL = 256


class ChoiceResult(NamedTuple):
    """A choice's images, one per request, with their median time and median PSNR to exact ones.

    Attributes:
        psnr: in dB; infinite for equal images.
        cold, warm: seconds of this choice's first step, and of the next.
    """

    label: str
    images: Sequence[Image.Image]
    seconds: float
    psnr: float
    cold: float
    warm: float


def bench_model(
    model: ModelRequest,
    request: ImageRequest,
    output: Path,
    dial: Dial,
    *,
    num_images: int,
    is_compiled: bool,
) -> None:
    """Print a table, plot it to `output`, and write a sheet of images beside it."""
    pipe = load_pipeline(model.name, model.device, model.dtype)
    request = fit_request(pipe, request)
    source = codeword_source(pipe, model)
    apply_avq(pipe, source, route="always")
    if is_compiled:
        compile_model(pipe)
    requests = [replace(request, seed=request.seed + index) for index in range(num_images)]
    with dilation(pipe, request):
        choices = compared(pipe, source, request, dial)
        results = list(run_choices(pipe, choices, requests))
    print(f"{bench_table(results)}\n{LEGEND}")
    size = f"{request.width}x{request.height}"
    plot_bench(results, f"{Path(model.name).name}, {size}, steps {request.steps}", output)
    save_sheet(bench_sheet(results, list(map(str, requests))), output)
    print(f"plot:  {output}\nsheet: {sheet_path(output)}")


def compared(
    pipe: DiffusionPipeline, source: AVQSource, request: ImageRequest, dial: Dial
) -> dict[str, Callable[[], Any]]:
    """What is compared: label -> function that sets the choice, the same in all layers.

    The first tolerance to run measures on the request's image.
    """
    kind = dial.kind or (THRESHOLD if isinstance(source, AVQConfig) else NUM_REFINED)
    values = dial.values or usual_values(pipe, kind)
    for x in values if kind == NUM_REFINED else ():
        refined_plan(pipe, int(x))  # refuses too many before images are made
    labels = [f"{kind.removeprefix('num_')} {digits_of(x)}" for x in values]
    setters = [partial(set_dial, pipe, source, request, kind, x) for x in values]
    return dict(zip(labels, setters, strict=True))


def run_choices(
    pipe: DiffusionPipeline,
    choices: Mapping[str, Callable[[], Any]],
    requests: Sequence[ImageRequest],
) -> Iterator[ChoiceResult]:
    """Generate images with exact attention, then with each choice; the last one stays set."""

    def result(label: str, exact: Sequence[Image.Image] | None = None) -> ChoiceResult:
        pipe.set_progress_bar_config(desc=label)
        cold, warm = (first_steps(pipe, requests[0]) for _ in range(2))
        timed = [timed_image(pipe, request) for request in requests]
        images = [one.image for one in timed]
        likeness = math.inf if exact is None else median(map(psnr, images, exact))
        seconds = median(one.seconds for one in timed)
        return ChoiceResult(label, images, seconds, likeness, cold, warm)

    with avq_disabled(pipe):
        exact = result(EXACT)
    yield exact
    for label, choose in choices.items():
        choose()
        yield result(label, exact.images)


def bench_table(results: Sequence[ChoiceResult]) -> str:
    """The table, one row per choice."""
    exact, rows = results[0], [("", "seconds", "speed", "PSNR dB", "cold step", "warm step")]
    for result in results:
        row = (
            result.label,
            f"{result.seconds:.2f}",
            f"{exact.seconds / result.seconds:.2f}x",
            "" if result is exact else f"{result.psnr:.1f}",
            f"{result.cold:.2f}",
            f"{result.warm:.2f}",
        )
        rows.append(row)
    return as_table(rows)


def bench_sheet(results: Sequence[ChoiceResult], row_titles: Sequence[str]) -> Image.Image:
    """Lay out the images, at most THUMBNAIL pixels wide."""
    width, height = results[0].images[0].size
    factor = min(1.0, THUMBNAIL / width)
    size = (round(width * factor), round(height * factor))
    return image_sheet(
        [
            [image.resize(size, Image.Resampling.LANCZOS) for image in row]
            for row in zip(*(result.images for result in results), strict=True)
        ],
        [
            results[0].label,
            *(f"{x.label}, {x.psnr:.1f} dB, {x.seconds:.2f} s" for x in results[1:]),
        ],
        row_titles=row_titles,
    )


def plot_bench(results: Sequence[ChoiceResult], title: str, path: Path) -> None:
    """Plot PSNR to the exact images against seconds; exact attention is a vertical line.

    Images equal to the exact ones have infinite PSNR and are left out.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.subplots()
    axes.axvline(results[0].seconds, color="black", linestyle="--", label=EXACT)
    shown = [result for result in results[1:] if math.isfinite(result.psnr)]
    points = [result.seconds for result in shown], [result.psnr for result in shown]
    axes.plot(*points, "o", label=results[-1].label.split()[0])
    for result in shown:
        position: dict[str, Any] = {"xytext": (6, 4), "textcoords": "offset points", "fontsize": 8}
        axes.annotate(result.label.split()[1], (result.seconds, result.psnr), **position)
    axes.set(xlabel="seconds per image", ylabel="PSNR to exact, dB", title=title)
    axes.set_xlim(0, 1.12 * max(result.seconds for result in results))
    axes.grid(alpha=0.3)
    axes.legend()
    with atomic_write(path) as temporary:
        figure.savefig(temporary, dpi=110)
