"""Speed against likeness: one picture for several choices of refined parents, and the exact one."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from PIL import Image
from rich.box import SIMPLE_HEAD
from rich.table import Table

from avq_diffusers.comparison import psnr, refinable_parents, timed_picture
from avq_diffusers.elastic import CaptureProfile
from avq_diffusers.pipeline import avq_disabled, set_num_refined
from avq_diffusers.sheet import picture_sheet

EXACT = "exact"
CAPTURE_TARGETS = (0.8, 0.9, 0.95)
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
    """A picture, the seconds it took, and its PSNR in dB to the exact one (itself: infinity)."""

    label: str
    series: str
    image: Image.Image
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
        for target in CAPTURE_TARGETS
    ]


def draw_choices(
    pipe: Any, choices: Sequence[Choice], arguments: dict[str, Any], seed: int
) -> Iterator[Drawn]:
    """Draw the exact picture, then that of every choice, from the same noise.

    Args:
        pipe: a pipeline with AVQ; it keeps the last choice.
        arguments: of the pipeline's call.
    """
    with avq_disabled(pipe):
        exact, seconds = timed_picture(pipe, arguments, seed)
    yield Drawn(EXACT, EXACT, exact, seconds, math.inf)
    for choice in choices:
        set_num_refined(pipe, choice.num_refined)
        image, seconds = timed_picture(pipe, arguments, seed)
        yield Drawn(choice.label, choice.series, image, seconds, psnr(image, exact))


def sweep_table(drawn: Sequence[Drawn]) -> Table:
    """One row a picture: seconds, speed relative to the exact picture, PSNR to it."""
    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for heading in HEADINGS:
        table.add_column(heading, justify="right" if heading else "left", no_wrap=True)
    for one in drawn:
        table.add_row(*_cells(one, drawn[0]))
    return table


def sweep_sheet(drawn: Sequence[Drawn], title: str) -> Image.Image:
    """All pictures, at most THUMBNAIL pixels wide, above a table of seconds and PSNR."""
    width, height = drawn[0].image.size
    factor = min(1.0, THUMBNAIL / width)
    size = (round(width * factor), round(height * factor))
    return picture_sheet(
        [[one.image.resize(size, Image.Resampling.LANCZOS) for one in drawn]],
        [one.label for one in drawn],
        row_titles=[title],
        table=[HEADINGS, *(_cells(one, drawn[0]) for one in drawn)],
    )


def plot_sweep(drawn: Sequence[Drawn], title: str, path: Path) -> None:
    """Plot PSNR to the exact picture over seconds; the exact picture is a vertical line.

    A picture with the bits of the exact one has no finite PSNR and is left out.
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
            axes.annotate(one.label, (one.seconds, one.psnr), **place)
    axes.set(xlabel="seconds per picture", ylabel="PSNR to the exact picture, dB", title=title)
    axes.set_xlim(0, 1.12 * max(one.seconds for one in drawn))
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=110)


def _cells(one: Drawn, exact: Drawn) -> tuple[str, ...]:
    likeness = "" if one is exact else f"{one.psnr:.1f}"
    return one.label, f"{one.seconds:.2f}", f"{exact.seconds / one.seconds:.2f}x", likeness
