"""Speed against likeness: pictures for several choices of refined parents, and the exact ones."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from PIL import Image
from rich.box import SIMPLE_HEAD
from rich.table import Table

from avq_diffusers.cli.comparison import psnr, timed_picture
from avq_diffusers.cli.sheet import picture_sheet
from avq_diffusers.files import atomic_write
from avq_diffusers.plugin.apply import avq_disabled
from avq_diffusers.plugin.elastic import SHOWN_TARGETS, CaptureProfile
from avq_diffusers.plugin.refinement import refinable_parents, set_num_refined

EXACT = "exact"
HEADINGS = ("", "seconds", "speed", "PSNR dB")
THUMBNAIL = 256


@dataclass(frozen=True)
class Choice:
    """What `set_num_refined` gets, under the name that tables and plots show.

    The choices of one `series` look alike in the plot.
    """

    label: str
    series: str
    num_refined: Mapping[str, Any]


@dataclass(frozen=True)
class Drawn:
    """Pictures of a choice, one a seed.

    Attributes:
        label, series: of the choice.
        images: in the order of the seeds.
        seconds: the median time of a picture.
        psnr: the median over pictures of the PSNR in dB to the exact one; infinite for equal ones.
    """

    label: str
    series: str
    images: Sequence[Image.Image]
    seconds: float
    psnr: float


def refined_choices(pipe: Any, numbers: Sequence[int] | None = None) -> list[Choice]:
    """The same number of refined parents in all layers; layers with fewer refine all of theirs.

    Args:
        pipe: a pipeline with AVQ.
        numbers: of refined parents; None takes none, a sixteenth, an eighth, a quarter, a half and
            all of the parents, which for flat codebooks is none.

    Raises:
        ValueError: the pipeline has no AVQ layer, or none that can refine so many parents.
    """
    parents = refinable_parents(pipe)
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


def capture_choices(profile: CaptureProfile) -> list[Choice]:
    """As few refined parents, by layer and timestep, as get a share of the attention."""
    return [
        Choice(f"{target:.0%} capture", "capture target", profile.at_least(target))
        for target in SHOWN_TARGETS
    ]


def draw_choices(
    pipe: Any, choices: Sequence[Choice], arguments: dict[str, Any], seeds: Sequence[int]
) -> Iterator[Drawn]:
    """Draw the exact pictures, then those of every choice, from the same noise.

    Args:
        pipe: a pipeline with AVQ; it keeps the last choice.
        choices: what to draw.
        arguments: of the pipeline's call.
        seeds: of the noise, one a picture.
    """

    def draw() -> tuple[list[Image.Image], float]:
        pictures = [timed_picture(pipe, arguments, seed) for seed in seeds]
        return [one.image for one in pictures], median(one.seconds for one in pictures)

    with avq_disabled(pipe):
        exact, seconds = draw()
    yield Drawn(EXACT, EXACT, exact, seconds, math.inf)
    for choice in choices:
        set_num_refined(pipe, choice.num_refined)
        images, seconds = draw()
        yield Drawn(choice.label, choice.series, images, seconds, median(map(psnr, images, exact)))


def sweep_table(drawn: Sequence[Drawn]) -> Table:
    """One row a choice: seconds a picture, speed relative to exact attention, PSNR to it."""
    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for heading in HEADINGS:
        table.add_column(heading, justify="right" if heading else "left", no_wrap=True)
    for one in drawn:
        table.add_row(*_cells(one, drawn[0]))
    return table


def sweep_sheet(drawn: Sequence[Drawn], row_titles: Sequence[str]) -> Image.Image:
    """The pictures, at most THUMBNAIL pixels wide, above a table of seconds and PSNR."""
    width, height = drawn[0].images[0].size
    factor = min(1.0, THUMBNAIL / width)
    size = (round(width * factor), round(height * factor))
    return picture_sheet(
        [
            [image.resize(size, Image.Resampling.LANCZOS) for image in row]
            for row in zip(*(one.images for one in drawn), strict=True)
        ],
        [one.label for one in drawn],
        row_titles=row_titles,
        table=[HEADINGS, *(_cells(one, drawn[0]) for one in drawn)],
    )


def plot_sweep(drawn: Sequence[Drawn], title: str, path: Path) -> None:
    """Plot PSNR to the exact pictures over seconds; exact attention is a vertical line.

    Pictures with the bits of the exact ones have no finite PSNR and are left out.

    Raises:
        OSError: `path` cannot be written; what was there stays.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.subplots()
    axes.axvline(drawn[0].seconds, color="black", linestyle="--", label=EXACT)
    series = dict.fromkeys(one.series for one in drawn[1:])
    for name, marker in zip(series, "os", strict=False):
        shown = [one for one in drawn if one.series == name and math.isfinite(one.psnr)]
        axes.plot([one.seconds for one in shown], [one.psnr for one in shown], marker, label=name)
        for one in shown:
            place = {"xytext": (6, 4), "textcoords": "offset points", "fontsize": 8}
            axes.annotate(one.label.split()[0], (one.seconds, one.psnr), **place)
    axes.set(xlabel="seconds per picture", ylabel="PSNR to exact, dB", title=title)
    axes.set_xlim(0, 1.12 * max(one.seconds for one in drawn))
    axes.grid(alpha=0.3)
    axes.legend()
    with atomic_write(path) as temporary:
        figure.savefig(temporary, dpi=110)


def _cells(one: Drawn, exact: Drawn) -> tuple[str, ...]:
    likeness = "" if one is exact else f"{one.psnr:.1f}"
    return one.label, f"{one.seconds:.2f}", f"{exact.seconds / one.seconds:.2f}x", likeness
