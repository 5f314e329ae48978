"""Image sheets: images stay as they are, at the places their titles name."""

import numpy as np
import pytest
from PIL import Image, ImageChops, ImageOps

from avq_diffusers.images import DIFFERENCE_GAIN, MARGIN, difference, image_sheet

WIDTH, HEIGHT = 120, 64


def noise(seed: int, width: int = WIDTH, height: int = HEIGHT) -> Image.Image:
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8)
    return Image.fromarray(pixels)


def find(sheet: Image.Image, image: Image.Image) -> tuple[int, int]:
    """Left and top of a image of noise on the sheet; fails if it is not there unchanged."""
    pixels, wanted = np.asarray(sheet), np.asarray(image)
    height, width = wanted.shape[:2]
    corners = (pixels == wanted[0, 0]).all(-1)[: -height + 1, : -width + 1]
    places = [
        (int(left), int(top))
        for top, left in np.argwhere(corners)
        if np.array_equal(pixels[top : top + height, left : left + width], wanted)
    ]
    assert len(places) == 1
    return places[0]


def has_ink(sheet: Image.Image, box: tuple[int, int, int, int]) -> bool:
    return np.asarray(sheet.crop(box).convert("L")).min() < 128


def test_images_lie_unchanged_on_a_grid_with_margins():
    """Fails for swapped rows and columns, rescaling, or images that overlap."""
    rows = [[noise(10 * row + column) for column in range(3)] for row in range(2)]
    sheet = image_sheet(rows, ["a", "b", "c"])
    places = [[find(sheet, image) for image in row] for row in rows]
    lefts, tops = [place[0] for place in places[0]], [row[0][1] for row in places]
    assert places == [[(left, top) for left in lefts] for top in tops]
    assert np.diff(lefts).tolist() == [WIDTH + MARGIN] * 2
    assert tops[1] - tops[0] == HEIGHT + MARGIN
    assert sheet.width == lefts[-1] + WIDTH + MARGIN
    assert tops[-1] + HEIGHT <= sheet.height <= tops[-1] + HEIGHT + 3 * MARGIN
    assert sheet.mode == "RGB"


def test_titles_stand_above_their_columns():
    """Fails for a title over a image or over another column."""
    rows = [[noise(0), noise(1)]]
    sheet = image_sheet(rows, ["", "title"])
    (first, top), (second, _) = (find(sheet, image) for image in rows[0])
    assert not has_ink(sheet, (0, 0, first + WIDTH, top))
    assert has_ink(sheet, (second, 0, second + WIDTH, top))


def test_row_titles_stand_above_their_rows_and_widen_the_sheet():
    rows = [[noise(0)], [noise(1)]]
    plain = image_sheet(rows, [""])
    sheet = image_sheet(rows, [""], row_titles=["", "a long title " * 10])
    (_, first), (_, second) = (find(sheet, row[0]) for row in rows)
    assert not has_ink(sheet, (0, 0, sheet.width, first))
    assert has_ink(sheet, (0, first + HEIGHT, sheet.width, second))
    assert sheet.width > plain.width
    last_column = (sheet.width - MARGIN, 0, sheet.width, sheet.height)
    assert not has_ink(sheet, last_column)


def test_every_row_and_column_of_the_table_is_drawn():
    """Fails where the sheet is too short for the table, or a cell overwrites the one before."""
    image = noise(0)
    plain = image_sheet([[image]], ["t"])
    table = [["layer", "runs"], ["up_blocks.3.attentions.0.transformer_blocks.0", "AVQ"], ["a", ""]]
    sheet = image_sheet([[image]], ["t"], table=table)
    top = find(sheet, image)[1] + HEIGHT
    line = (sheet.height - plain.height) / len(table)
    assert line == int(line) > 10
    for row, cells in enumerate(table):
        box = (0, top + MARGIN + row * int(line), sheet.width, top + MARGIN + (row + 1) * int(line))
        assert has_ink(sheet, box) == any(cells)
    one_row_less = image_sheet([[image]], ["t"], table=table[:2])
    assert sheet.height - one_row_less.height == line

    first_column = image_sheet([[image]], ["t"], table=[[row[0], ""] for row in table])
    assert first_column.height == sheet.height
    region = (0, top, first_column.width, sheet.height)
    inked = ImageOps.invert(first_column.crop(region)).getbbox()
    common = (0, 0, first_column.width, sheet.height)
    second = ImageChops.difference(sheet.crop(common), first_column).getbbox()
    assert sheet.width > first_column.width
    assert second is None or second[0] > inked[2]
    assert has_ink(sheet, (inked[2] + 1, top, sheet.width, sheet.height))
    assert not has_ink(sheet, (sheet.width - 1, 0, sheet.width, sheet.height))


def test_a_wide_table_widens_the_sheet():
    image = noise(0)
    sheet = image_sheet([[image]], ["t"], table=[["x" * 200]])
    assert sheet.width > 1000
    assert find(sheet, image)


def test_difference_is_absolute_amplified_and_saturates():
    """Fails for a signed difference (wraps around) or a missing gain."""
    first = Image.new("RGB", (4, 2), (10, 100, 0))
    second = Image.new("RGB", (4, 2), (13, 90, 200))
    expected = (3 * DIFFERENCE_GAIN, 10 * DIFFERENCE_GAIN, 255)
    assert set(difference(first, second).get_flattened_data()) == {expected}
    assert set(difference(second, first).get_flattened_data()) == {expected}
    assert np.asarray(difference(first, first)).max() == 0


def test_rows_of_a_table_must_have_one_length():
    with pytest.raises(ValueError, match=r"shorter|longer"):
        image_sheet([[noise(0)]], ["t"], table=[["a", "b"], ["c"]])


def test_a_prompt_of_several_lines_is_read_in_one():
    """Catches a second line behind the image."""
    sheets = [
        image_sheet([[noise(0)]], ["a"], row_titles=[title])
        for title in ("a fox\n on ice", "a fox on ice")
    ]
    assert sheets[0].tobytes() == sheets[1].tobytes()
