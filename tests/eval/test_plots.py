"""Plots, drawn from results."""

import pytest

from eval.store import plots
from eval.store.plots import Line, Panel, _look, bar_plot, panel_plot


def test_colour_and_marker_together_are_of_one_label():
    """Fails for as many markers as colours, by which the eighth label looks like the first."""
    looks = {(look["color"], look["marker"]) for look in map(_look, range(56))}
    assert len(looks) == 56


@pytest.fixture
def figures(monkeypatch):
    """The figures that are drawn, in place of their files."""
    found = []
    monkeypatch.setattr(plots, "_save", lambda figure, path, **_: found.append(figure))
    return found


def test_lines_are_drawn_where_their_numbers_are(figures):
    """Catches axes that are exchanged or of another scale, a reference that lies elsewhere, a grid
    that is not filled, and a legend of the other lines."""
    lines = [Line("a", [1, 2, 4], [8, 5, 2]), Line("b", [2], [3])]
    both = Panel("both", "x", lines, xscale="log", yscale="log", reference=4, reference_x=3)
    small = Panel("small", "x", [Line("b", [0, 1], [98, 100])])
    panel_plot(None, [[both, small], [both], [Panel("none", "x", [])]])
    (figure,) = figures
    first, second, third, empty = figure.axes
    a, b, reference, reference_x = first.lines
    assert a.get_xydata().tolist() == [[1, 8], [2, 5], [4, 2]]
    assert b.get_xydata().tolist() == [[2, 3]]
    assert reference.get_ydata()[0] == 4
    assert reference_x.get_xdata()[0] == 3
    assert (first.get_xscale(), first.get_yscale()) == ("log", "log")
    assert (second.get_xscale(), second.get_yscale()) == ("linear", "linear")
    assert (third.get_title(), empty.axison) == ("both", False)
    (legend,) = figure.legends
    shown = zip(legend.get_texts(), legend.get_lines(), strict=True)
    assert [(text.get_text(), line.get_color()) for text, line in shown] == [
        ("a", a.get_color()),
        ("b", b.get_color()),
    ]
    assert a.get_color() != b.get_color() == second.lines[0].get_color()


def test_bars_are_drawn_where_their_numbers_are(figures):
    """Catches a bar beside another's name."""
    bar_plot(None, {"panel": {"long": 3.0, "short": 1.0}}, xlabel="x")
    (axes,) = figures[0].axes
    names = [label.get_text() for label in axes.get_yticklabels()]
    bars = [(bar.get_y() + bar.get_height() / 2, bar.get_width()) for bar in axes.patches]
    assert (names, bars) == (["long", "short"], [(0, 3), (1, 1)])
