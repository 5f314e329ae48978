"""Plots and sheets, drawn from results."""

import numpy as np
import pytest
from PIL import Image

from eval.commands.stored import PLOTS, draw
from eval.quality.compare import compare_sheet
from eval.store import plots
from eval.store.plots import (
    COLOURS,
    MARKERS,
    HeatMap,
    Line,
    Panel,
    bar_plot,
    heat_maps,
    panel_plot,
)

OTHERS = "is not a result from python -m eval"
NO_PLOT = f"plots are those of {', '.join(PLOTS)}, but .* is a result of "


@pytest.mark.parametrize(
    ("text", "size", "message"),
    [
        ("no JSON", None, OTHERS),
        ('{"rows": []}', None, OTHERS),
        ('{"command": "python -m eval"}', None, OTHERS),
        ('{"command": "python -m distill --config x"}', None, OTHERS),
        ('{"command": "python -m eval scenes --x"}', None, f"{NO_PLOT}scenes"),
        ('{"command": "python -m eval coco score x"}', None, f"{NO_PLOT}coco score"),
        ('{"command": "python -m eval errors"}', 512, "a size chooses what the plot of a table"),
        *(
            (f'{{"command": "python -m eval {kind} x"}}', None, r"x\.json is not a complete result")
            for kind in ("table", "errors", "analyse", "bench kernels")
        ),
    ],
)
def test_other_files_are_refused(text, size, message, tmp_path):
    """Catches a KeyError that does not say which file it is."""
    (tmp_path / "x.json").write_text(text)
    with pytest.raises(ValueError, match=message):
        draw(tmp_path / "x.json", size=size)
    assert not (tmp_path / "x.png").exists()
    with pytest.raises(FileNotFoundError, match=r"there is no file .*y\.json"):
        draw(tmp_path / "y.json")


class TestSheet:
    def test_a_row_is_a_method(self, tmp_path):
        """Fails for rows and columns exchanged, or other images than those of the first seed."""
        first, second = (
            np.stack([np.full((40, 40, 3), (level + i, 0, 200), np.uint8) for i in range(4)])
            for level in (50, 150)
        )
        compare_sheet(tmp_path / "x.png", {"exact": first, "M4": second}, ["a cat", "a dog"])
        pixels = np.asarray(Image.open(tmp_path / "x.png"))

        def places(level):
            return np.argwhere((pixels == (level, 0, 200)).all(-1))

        corners = {level: tuple(places(level)[0].tolist()) for level in (50, 51, 150, 151)}
        assert corners[50][0] == corners[51][0] < corners[150][0] == corners[151][0]
        assert corners[50][1] == corners[150][1] < corners[51][1] == corners[151][1]
        assert [len(places(level)) for level in (50, 52, 151, 152)] == [1600, 0, 1600, 0]


def test_colour_and_marker_together_are_of_one_label():
    """Fails for as many markers as colours, by which the eighth label looks like the first."""
    looks = [(COLOURS[i % len(COLOURS)], MARKERS[i % len(MARKERS)]) for i in range(50)]
    assert len(set(looks)) == 50


@pytest.fixture
def figures(monkeypatch):
    """The figures that are drawn, in place of their files."""
    found = []
    monkeypatch.setattr(plots, "_save", lambda figure, path, **_: found.append(figure))
    return found


def test_lines_are_drawn_where_their_numbers_are(figures):
    """Catches a missing number drawn as 0, axes that are exchanged or of another scale, a cut axis
    that makes small differences large, and a legend of the other lines."""
    lines = [Line("a", [1, 2, 4], [8, None, 2]), Line("b", [2], [3])]
    both = Panel("both", "x", lines, [Line("b", [1, 4], [9, 1])], xscale="log", yscale="log")
    small = Panel("small", "x", [Line("b", [0, 1], [98, 100])], ticks=["p", "q"], from_zero=True)
    panel_plot(None, [[both, small]])
    (figure,) = figures
    first, second = figure.axes
    faint, a, b = first.lines
    found = [line.get_xydata().tolist() for line in (faint, a, b)]
    assert found == [[[1, 9], [4, 1]], [[1, 8], [4, 2]], [[2, 3]]]
    assert (first.get_xscale(), first.get_yscale()) == ("log", "log")
    assert (second.get_xscale(), second.get_yscale()) == ("linear", "linear")
    low, high = second.get_ylim()
    assert low == 0 < 100 < high
    assert [label.get_text() for label in second.get_xticklabels()] == ["p", "q"]
    (legend,) = figure.legends
    shown = zip(legend.get_texts(), legend.get_lines(), strict=True)
    assert [(text.get_text(), line.get_color()) for text, line in shown] == [
        ("a", a.get_color()),
        ("b", b.get_color()),
    ]
    assert a.get_color() != b.get_color() == faint.get_color() == second.lines[0].get_color()


def test_error_bars_and_reference_are_drawn_where_their_numbers_are(figures):
    """Catches bars of another length or direction, a reference that lies elsewhere, a grid that is
    not filled, and a legend that lacks a label."""
    panels = [
        Panel("a", "x", [Line("m", [1], [20], [3])], reference=15),
        Panel("b", "x", [Line("n", [2], [5], [1])]),
    ]
    panel_plot(None, [panels, panels])
    (figure,) = figures
    for first, second in (figure.axes[:2], figure.axes[2:]):
        point, _, (bar,) = first.containers[0]
        assert point.get_xydata().tolist() == [[1, 20]]
        assert [segment.tolist() for segment in bar.get_segments()] == [[[1, 17], [1, 23]]]
        dashed = [line for line in first.lines if line.get_linestyle() == "--"]
        assert [line.get_ydata()[0] for line in dashed] == [15]
        assert second.containers[0][0].get_xydata().tolist() == [[2, 5]]
        assert not [line for line in second.lines if line.get_linestyle() == "--"]
    (legend,) = figure.legends
    assert [text.get_text() for text in legend.get_texts()] == ["m", "n"]


def test_numbers_of_a_heat_map_stand_in_their_cells(figures):
    """Catches the colours of a short row that are those of other columns than its numbers, and a
    scale of colours for each map."""
    maps = [HeatMap("a", ["x", "y"], [[0.25, 0.75], [0.5]]), HeatMap("b", ["x"], [[0.4]])]
    heat_maps(None, maps, xlabel="h", label="c")
    first, second, _ = figures[0].axes
    assert first.images[0].get_array().tolist() == [[0.25, 0.75], [0.5, None]]
    assert first.images[0].get_clim() == second.images[0].get_clim() == (0, 1)
    cells = {text.get_position(): text.get_text() for text in first.texts}
    assert cells == {(0, 0): "0.25", (1, 0): "0.75", (0, 1): "0.50"}


def test_bars_are_drawn_where_their_numbers_are(figures):
    """Catches a bar beside another's name."""
    bar_plot(None, {"panel": {"long": 3.0, "short": 1.0}}, xlabel="x", title="t")
    (axes,) = figures[0].axes
    names = [label.get_text() for label in axes.get_yticklabels()]
    bars = [(bar.get_y() + bar.get_height() / 2, bar.get_width()) for bar in axes.patches]
    assert (names, bars) == (["long", "short"], [(0, 3), (1, 1)])
