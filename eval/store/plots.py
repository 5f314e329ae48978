"""Plots as PNG files, in colours that colour-blind readers can distinguish."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path
from textwrap import fill
from typing import Any

from avq_diffusers.files import atomic_write

# Okabe and Ito's palette without its yellow, which vanishes on white.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#000000")
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")  # one more than colours: 56 combinations
DASHES = ("-", ":", "-.")
DASHED: dict[str, Any] = {"linestyle": "--", "linewidth": 0.8, "color": "#808080"}
MOST_MARKERS = 20
LOGS = {"xscale": "log", "yscale": "log"}  # of a `Panel`


@dataclass(frozen=True)
class Line:
    """One line of a panel; `label` goes in the legend."""

    label: str
    x: Sequence[float]
    y: Sequence[float]


def lines(
    rows: Iterable[Mapping[str, Any]], label: str | Callable[[Any], str | None], x: str, y: str
) -> list[Line]:
    """A line per label (a field, or a function of the row), with points sorted by `x`.

    Rows without a label, x or y are left out.
    """
    label_of = label if callable(label) else itemgetter(label)
    groups: dict[str, list[Any]] = {}
    for row in rows:
        name, point = label_of(row), (row.get(x), row.get(y))
        if name is not None and None not in point:
            groups.setdefault(name, []).append(point)
    return [
        Line(name, *map(list, zip(*sorted(points), strict=True))) for name, points in groups.items()
    ]


@dataclass(frozen=True)
class Panel:
    """Axes of a `panel_plot`; a logarithmic x axis has base 2.

    Dashed lines mark `reference` on the y axis and `reference_x` on the x axis.
    """

    title: str
    xlabel: str
    lines: Sequence[Line]
    xscale: str = "linear"
    yscale: str = "linear"
    reference: float | None = None
    reference_x: float | None = None


def panel_plot(path: Path, rows: Sequence[Sequence[Panel]]) -> None:
    """Write rows of panels; a label has the same colour and marker in all of them, in one legend.

    Panels without lines are left out. If none are left, nothing is written.
    """
    rows = [shown for row in rows if (shown := [panel for panel in row if panel.lines])]
    if not rows:
        return
    columns = max(map(len, rows))
    labels = [*dict.fromkeys(line.label for row in rows for panel in row for line in panel.lines)]
    looks = {label: _look(index) for index, label in enumerate(labels)}
    legend_columns = max(2, columns)
    height = 3.4 * len(rows) + max(0.8, 0.25 * len(labels) / legend_columns)
    figure = _figure(4.2 * legend_columns, height)
    handles: dict[str, Any] = {}
    for all_axes, row in zip(figure.subplots(len(rows), columns, squeeze=False), rows, strict=True):
        for axes in all_axes[len(row) :]:
            axes.set_axis_off()
        for axes, panel in zip(all_axes, row, strict=False):
            handles |= _draw(axes, panel, looks)
    figure.legend(
        [handles[label] for label in labels],
        labels,
        loc="outside lower center",
        ncols=legend_columns,
    )
    _save(figure, path, dpi=110)


def _look(index: int) -> dict[str, Any]:
    return {
        "color": COLOURS[index % len(COLOURS)],
        "linestyle": DASHES[index // len(COLOURS) % len(DASHES)],
        "marker": MARKERS[index % len(MARKERS)],
    }


def _draw(axes: Any, panel: Panel, looks: Mapping[str, dict[str, Any]]) -> dict[str, Any]:
    """Draw a panel; return the legend handle per label."""
    from matplotlib.ticker import LogLocator, NullFormatter, ScalarFormatter

    handles = {}
    for line in panel.lines:
        look = looks[line.label]
        if len(line.x) > MOST_MARKERS:
            look = look | {"marker": ""}
        (handles[line.label],) = axes.plot(line.x, line.y, **look)
    if panel.reference is not None:
        axes.axhline(panel.reference, **DASHED)
    if panel.reference_x is not None:
        axes.axvline(panel.reference_x, **DASHED)
    axes.set(yscale=panel.yscale, xlabel=fill(panel.xlabel, 42), title=panel.title)
    if panel.xscale == "log":
        low, high = axes.get_xlim()
        axes.set_xscale("log", base=2)
        axes.tick_params(axis="x", labelsize=8)
        if high < 4 * low:  # few powers of two
            axes.xaxis.set_major_locator(LogLocator(10, subs=(1, 2, 3, 4, 6, 8)))
        axes.xaxis.set_major_formatter(ScalarFormatter())
    if panel.yscale == "log":
        low, high = axes.get_ylim()
        steps = (1, 2, 5) if high < 100 * low else (1,)
        axes.yaxis.set_major_locator(LogLocator(10, subs=steps))
        axes.yaxis.set_major_formatter("{x:g}")
        axes.yaxis.set_minor_formatter(NullFormatter())
    axes.grid(alpha=0.3, which="both")
    return handles


def bar_plot(
    path: Path,
    panels: Mapping[str, Mapping[str, float]],
    *,
    xlabel: str,
    reference: float | None = None,
) -> None:
    """Write a panel of labelled horizontal bars per entry of `panels`.

    With `reference`, bars start there, on a logarithmic axis.
    """
    most = max((len(bars) for bars in panels.values()), default=1)
    number = max(1, len(panels))
    figure = _figure(5.4 * number, 1.4 + 0.36 * max(1, most))
    columns = figure.subplots(1, number, squeeze=False).flat
    for axes, (name, bars) in zip(columns, panels.items(), strict=False):
        start = reference or 0
        widths = [value - start for value in bars.values()]
        drawn = axes.barh(range(len(bars)), widths, left=start, color=COLOURS[0])
        axes.set_yticks(range(len(bars)), [fill(label, 36) for label in bars], fontsize=8)
        numbers = [f"{value:#.2g}".rstrip(".") for value in bars.values()]
        axes.bar_label(drawn, numbers, padding=3, fontsize=8)
        if reference is not None:
            axes.set_xscale("log", base=2)
            axes.xaxis.set_major_formatter("{x:g}")
            axes.axvline(reference, **DASHED)
        axes.set(xlabel=xlabel, title=name)
        axes.margins(x=0.2)
        axes.invert_yaxis()
    _save(figure, path)


def _figure(width: float, height: float) -> Any:
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def _save(figure: Any, path: Path, dpi: int = 130) -> None:
    with atomic_write(path) as temporary:
        figure.savefig(temporary, dpi=dpi)
