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
MOST_MARKERS = 20


@dataclass(frozen=True)
class Line:
    """One line of a panel; `label` goes in the legend. Points with y None are left out.

    With `errors`, the points have y error bars and no line.
    """

    label: str
    x: Sequence[float]
    y: Sequence[float | None]
    errors: Sequence[float] = ()


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
    """Axes of a `panel_plot`; `faint` lines are behind the others and not in the legend.

    A logarithmic x axis has base 2. With `ticks`, the x axis shows these names at 0, 1, 2, ...
    With `from_zero`, the y axis starts at 0, so that small differences look small. Dashed lines
    mark `reference` on the y axis and `reference_x` on the x axis.
    """

    title: str
    xlabel: str
    lines: Sequence[Line]
    faint: Sequence[Line] = ()
    xscale: str = "linear"
    yscale: str = "linear"
    ticks: Sequence[str] = ()
    from_zero: bool = False
    reference: float | None = None
    reference_x: float | None = None


@dataclass(frozen=True)
class HeatMap:
    """Numbers from 0 to 1: `values[i]` belongs to `rows[i]`; rows may differ in length."""

    title: str
    rows: Sequence[str]
    values: Sequence[Sequence[float]]


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
    from matplotlib.ticker import LogLocator, ScalarFormatter

    handles = {}
    for line in panel.faint:
        faint = {"alpha": 0.25, "linewidth": 0.8, "marker": ""}
        axes.plot(*_points(line), **looks[line.label] | faint)
    for line in panel.lines:
        look = looks[line.label]
        if line.errors:
            bars = look | {"linestyle": "", "capsize": 3}
            handles[line.label] = axes.errorbar(line.x, line.y, line.errors, **bars)
        else:
            look = look if len(line.x) <= MOST_MARKERS else look | {"marker": ""}
            (handles[line.label],) = axes.plot(*_points(line), **look)
    dashed = {"linestyle": "--", "linewidth": 0.8, "color": "#808080"}
    if panel.reference is not None:
        axes.axhline(panel.reference, **dashed)
    if panel.reference_x is not None:
        axes.axvline(panel.reference_x, **dashed)
    axes.set(yscale=panel.yscale, xlabel=fill(panel.xlabel, 42), title=panel.title)
    if panel.xscale == "log":
        low, high = axes.get_xlim()
        axes.set_xscale("log", base=2)
        axes.tick_params(axis="x", labelsize=8)
        if high < 4 * low:  # few powers of two
            axes.xaxis.set_major_locator(LogLocator(10, subs=(1, 2, 3, 4, 6, 8)))
        axes.xaxis.set_major_formatter(ScalarFormatter())
    if panel.from_zero:
        axes.set_ylim(0, 1.1 * axes.dataLim.y1)
    if panel.ticks:
        axes.set_xticks(range(len(panel.ticks)), panel.ticks, rotation=60, ha="right", fontsize=7)
    axes.grid(alpha=0.3, which="both")
    return handles


def _points(line: Line) -> tuple[list[float], list[float]]:
    shown = [(x, y) for x, y in zip(line.x, line.y, strict=True) if y is not None]
    return [x for x, _ in shown], [y for _, y in shown]


def heat_maps(path: Path, maps: Sequence[HeatMap], *, xlabel: str, label: str) -> None:
    """Write the maps side by side with one colour scale and numbers in the cells."""
    most = max(len(values) for heat_map in maps for values in heat_map.values)
    height = max(len(heat_map.rows) for heat_map in maps)
    figure = _figure((3.2 + 0.5 * most) * len(maps), 1.6 + 0.34 * height)
    for axes, heat_map in zip(figure.subplots(1, len(maps), squeeze=False).flat, maps, strict=True):
        padded = [[*values, *[float("nan")] * (most - len(values))] for values in heat_map.values]
        image = axes.imshow(padded, vmin=0, vmax=1, cmap="cividis", aspect="auto")
        centred = {"ha": "center", "va": "center", "fontsize": 7}
        for row, values in enumerate(heat_map.values):
            for column, value in enumerate(values):
                colour = "white" if value < 0.5 else "black"
                axes.text(column, row, f"{value:.2f}", color=colour, **centred)
        axes.set_xticks(range(most))
        axes.set_yticks(range(len(heat_map.rows)), heat_map.rows, fontsize=7)
        axes.set_title(fill(heat_map.title, 40), fontsize=8)
        axes.set_xlabel(xlabel)
    figure.colorbar(image, ax=figure.axes, label=label)
    _save(figure, path)


def bar_plot(
    path: Path, panels: Mapping[str, Mapping[str, float]], *, xlabel: str, title: str
) -> None:
    """Write a panel of labelled horizontal bars per entry of `panels`."""
    most = max((len(bars) for bars in panels.values()), default=1)
    number = max(1, len(panels))
    figure = _figure(5.4 * number, 1.4 + 0.36 * max(1, most))
    figure.suptitle(fill(title, 56 * number))
    columns = figure.subplots(1, number, squeeze=False).flat
    for axes, (name, bars) in zip(columns, panels.items(), strict=False):
        drawn = axes.barh(range(len(bars)), list(bars.values()), color=COLOURS[0])
        axes.set_yticks(range(len(bars)), [fill(label, 36) for label in bars], fontsize=8)
        axes.bar_label(drawn, fmt="%.4g", padding=3, fontsize=8)
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
