"""Images: read upright and on white; sheets leave them as they are, where their titles say."""

import os
from io import BytesIO
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from avq_diffusers.images import (
    DIFFERENCE_GAIN,
    MARGIN,
    difference,
    image_files,
    image_sheet,
    read_rgb,
    refuse_linked_folders,
)

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


def test_titles_stand_above_their_columns_and_rows():
    """Fails for a title over an image or another column, or one that the sheet cuts off."""
    rows = [[noise(0), noise(1)], [noise(2), noise(3)]]
    sheet = image_sheet(rows, ["", "title"], row_titles=["", "a long\ntitle " * 20])
    (first, top), (second, _) = (find(sheet, image) for image in rows[0])
    low = find(sheet, rows[1][0])[1]
    assert not has_ink(sheet, (0, 0, first + WIDTH, top))
    assert has_ink(sheet, (second, 0, second + WIDTH, top))
    assert has_ink(sheet, (0, top + HEIGHT, sheet.width, low))
    assert sheet.width > image_sheet(rows, ["", "title"]).width
    assert not has_ink(sheet, (sheet.width - MARGIN, 0, sheet.width, sheet.height))


def test_difference_is_absolute_amplified_and_saturates():
    """Fails for a signed difference (wraps around) or a missing gain."""
    first = Image.new("RGB", (4, 2), (10, 100, 0))
    second = Image.new("RGB", (4, 2), (13, 90, 200))
    expected = (3 * DIFFERENCE_GAIN, 10 * DIFFERENCE_GAIN, 255)
    for pair in ((first, second), (second, first)):
        assert (np.asarray(difference(*pair)) == expected).all()
    assert np.asarray(difference(first, first)).max() == 0


def stored(picture: Image.Image, form: str, **options) -> BytesIO:
    file = BytesIO()
    picture.save(file, form, **options)
    return file


@pytest.mark.parametrize(
    ("picture", "expected"),
    [
        (Image.new("RGBA", (2, 2), (200, 0, 0, 128)), (227, 127, 127)),
        (Image.new("LA", (2, 2), (0, 0)), (255, 255, 255)),
        (Image.new("L", (2, 2), 9), (9, 9, 9)),
        (Image.new("1", (2, 2), 1), (255, 255, 255)),
        (Image.new("RGB", (2, 2), (1, 2, 3)).convert("P"), None),
        (Image.fromarray(np.full((2, 2), 0x4080, np.uint16)), (64, 64, 64)),
    ],
)
def test_pictures_become_rgb(picture, expected):
    """Catches transparent pixels in their hidden colour, and 16 bits clipped to white."""
    found = read_rgb(stored(picture, "png"))
    assert found.mode == "RGB"
    assert found.getpixel((1, 1)) == (expected or picture.convert("RGB").getpixel((1, 1)))


def test_numbers_of_more_than_16_bits():
    """Catches images that are clipped to white or black without a word."""
    file = BytesIO(b"P5 2 2 65535\n" + np.full(4, 0x4080, ">u2").tobytes())
    assert read_rgb(file).getpixel((1, 1)) == (64, 64, 64)
    for mode in ("I", "F"):
        file = stored(Image.new(mode, (2, 2), 1), "tiff")
        with pytest.raises(ValueError, match=f"TIFF of mode {mode} does not say what is white"):
            read_rgb(file)


def test_images_are_upright_and_palettes_transparent():
    palette = Image.new("P", (2, 2), 0)
    palette.putpalette([10, 20, 30])
    assert read_rgb(stored(palette, "png", transparency=0)).getpixel((0, 0)) == (255, 255, 255)

    wide = Image.fromarray(np.repeat([[[255] * 3, [0] * 3]], 16, 1).repeat(16, 0).astype(np.uint8))
    exif = Image.Exif()
    exif[0x0112] = 6  # turn by 90 degrees clockwise: left becomes top
    upright = read_rgb(stored(wide, "jpeg", exif=exif, quality=95))
    assert upright.size == (16, 32)
    assert upright.getpixel((8, 4))[0] > 200 > 50 > upright.getpixel((8, 28))[0]


def tree(folder: Path, *names: str) -> Path:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).touch()
    return folder


def listed(folder: Path, *endings: str) -> list[str]:
    return [str(path.relative_to(folder)) for path in image_files(folder, endings or None)]


def test_images_of_a_folder_are_its_visible_regular_files(tmp_path):
    """Catches copies that Jupyter and file managers keep, and pipes, on which reading blocks."""
    folder = tree(
        tmp_path / ".data",
        *("b.JPG", "a.webp", "sub/c.tif", ".d.png", "._a.jpg", "notes.pdf", "folder.png/e.png"),
        *(".ipynb_checkpoints/b.jpg", "sub/.thumbnails/c.png", "Thumbs.db", "readme.md"),
    )
    os.mkfifo(folder / "pipe.png")
    assert listed(folder) == ["a.webp", "b.JPG", "folder.png/e.png", "sub/c.tif"]
    assert listed(folder, ".jpg", ".png") == ["b.JPG", "folder.png/e.png"]
    assert listed(folder / "missing") == listed(folder / "a.webp") == []
    with pytest.raises(OSError, match=r"pipe\.png is a pipe, not a file"):
        read_rgb(folder / "pipe.png")


def test_linked_folders_are_read_once(tmp_path):
    """Catches linked folders that are left out, endless loops, and images counted twice."""
    folder, far = tree(tmp_path / "near", "a.png", "sub/b.png"), tree(tmp_path / "far", "c.png")
    (folder / "more").symlink_to(far, target_is_directory=True)
    (folder / "again").symlink_to(far, target_is_directory=True)
    (folder / "sub" / "loop").symlink_to(folder, target_is_directory=True)
    (far / "back").symlink_to(folder / "sub", target_is_directory=True)
    (folder / "d.png").symlink_to(far / "c.png")
    assert listed(folder) == ["a.png", "again/c.png", "d.png", "sub/b.png"]
    with pytest.raises(ValueError, match="again is a link to a folder, which datasets does not"):
        refuse_linked_folders(folder)
    refuse_linked_folders(tree(tmp_path / "plain", "a/b.png"))
    (folder / "gone").symlink_to(tmp_path / "gone")
    with pytest.raises(FileNotFoundError, match=r"gone is a link to .*gone, which is missing"):
        image_files(folder)
