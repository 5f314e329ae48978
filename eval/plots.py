"""PNG plots of benchmark rows, in colours that colour-blind readers can tell apart."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

# Okabe and Ito's palette without its yellow, which vanishes on white.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#000000")
MARKERS = ("o", "s", "^", "D", "v", "P", "X")
DASHES = ("-", ":", "-.")


@dataclass(frozen=True)
class Line:
    """One line of a log-log panel; `label` goes into the legend."""

    label: str
    x: Sequence[float]
    y: Sequence[float]


def log_log_plot(
    path: Path, panels: Mapping[str, Sequence[Line]], *, xlabels: Sequence[str], ylabel: str
) -> None:
    """Write one log-log panel for each entry of `panels`, with a dashed guide of slope 1."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.4 * len(panels), 4.8), layout="constrained")
    columns = figure.subplots(1, len(panels), squeeze=False).flat
    for axes, (title, lines), xlabel in zip(columns, panels.items(), xlabels, strict=True):
        for index, line in enumerate(lines):
            axes.plot(
                line.x,
                line.y,
                DASHES[index // len(COLOURS) % len(DASHES)],
                marker=MARKERS[index % len(MARKERS)],
                color=COLOURS[index % len(COLOURS)],
                label=line.label,
            )
        if lines:
            guide = min(lines, key=lambda line: min(line.y))
            start, end = min(guide.x), max(guide.x)
            low = 0.7 * min(guide.y)
            axes.plot(
                [start, end], [low, low * end / start], "--", color="#808080", label="slope 1"
            )
            axes.legend(fontsize=8)
        axes.set(xscale="log", yscale="log", xlabel=xlabel, ylabel=ylabel, title=title)
        axes.grid(alpha=0.3, which="both")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)


def bar_plot(
    path: Path, panels: Mapping[str, Mapping[str, float]], *, xlabel: str, title: str
) -> None:
    """Write one panel of labelled horizontal bars for each entry of `panels`."""
    from matplotlib.figure import Figure

    most = max((len(bars) for bars in panels.values()), default=1)
    figure = Figure(
        figsize=(5.4 * max(1, len(panels)), 1.4 + 0.36 * max(1, most)), layout="constrained"
    )
    figure.suptitle(title)
    columns = figure.subplots(1, max(1, len(panels)), squeeze=False).flat
    for axes, (name, bars) in zip(columns, panels.items(), strict=False):
        drawn = axes.barh(list(bars), list(bars.values()), color=COLOURS[0])
        axes.bar_label(drawn, fmt="%.4g", padding=3, fontsize=8)
        axes.set(xlabel=xlabel, title=name)
        axes.margins(x=0.2)
        axes.invert_yaxis()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)
