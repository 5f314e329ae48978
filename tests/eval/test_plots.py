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
    Line,
    Panel,
    bar_plot,
    panel_plot,
)

OTHERS = "is not a result from python -m eval"
NO_PLOT = f"results must be of {', '.join(PLOTS)}, but .* is one of "


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("no JSON", OTHERS),
        ('{"rows": []}', OTHERS),
        ('{"command": "python -m eval"}', OTHERS),
        ('{"command": "python -m distill --config x"}', OTHERS),
        ('{"command": "python -m eval scenes --x"}', f"{NO_PLOT}scenes"),
        ('{"command": "python -m eval coco score x"}', f"{NO_PLOT}coco score"),
        *(
            (f'{{"command": "python -m eval {kind} x"}}', r"x\.json is not a complete result")
            for kind in PLOTS
        ),
    ],
)
def test_other_files_are_refused(text, message, tmp_path):
    """Catches a KeyError that does not say which file it is."""
    (tmp_path / "x.json").write_text(text)
    with pytest.raises(ValueError, match=message):
        draw(tmp_path / "x.json")
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
