"""Images: finding and reading files, PSNR and difference, and sheets of images side by side."""

import os
import struct
import zlib
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import BinaryIO

import numpy as np
from PIL import Image, ImageChops, ImageDraw, ImageFont, ImageOps

# What Pillow's decoders raise for damaged files. AVIF's raises RuntimeError.
UNREADABLE = (
    OSError,
    SyntaxError,
    ValueError,
    TypeError,
    EOFError,
    LookupError,
    ArithmeticError,
    RuntimeError,
    struct.error,
    zlib.error,
    Image.DecompressionBombError,
)
MARGIN = 12
TITLE_SIZE = 16
TEXT_SIZE = 13
DIFFERENCE_GAIN = 4


def image_files(folder: Path, endings: Collection[str] | None = None) -> list[Path]:
    """Return the images in a folder and its subfolders, sorted by path.

    Links are followed, and each subfolder is read once, however many links lead to it. Hidden files
    and subfolders are left out, such as `.ipynb_checkpoints` and macOS's `._x.jpg`, and so is what
    is not a regular file.

    Args:
        folder: a missing folder holds no images.
        endings: lower-case name endings of images; None takes all that Pillow opens.

    Raises:
        FileNotFoundError: a link leads nowhere.
        OSError: a subfolder cannot be read.
    """
    if endings is None:
        known = Image.registered_extensions()
        endings = [ending for ending, form in known.items() if form in Image.OPEN]
    found, waiting, seen = [], [folder] if folder.is_dir() else [], set()
    while waiting:
        inside = waiting.pop(0)
        state = inside.stat()
        if (state.st_dev, state.st_ino) in seen:
            continue
        seen.add((state.st_dev, state.st_ino))
        with os.scandir(inside) as entries:
            visible = sorted(entry.name for entry in entries if not entry.name.startswith("."))
        for path in map(inside.joinpath, visible):
            if path.is_dir():
                waiting.append(path)
            elif path.is_symlink() and not path.exists():
                raise FileNotFoundError(f"{path} is a link to {path.readlink()}, which is missing.")
            elif path.suffix.lower() in endings and path.is_file():
                found.append(path)
    return sorted(found)


def refuse_linked_folders(folder: Path) -> None:
    """Check a folder for `datasets.load_dataset`, which silently leaves out linked subfolders.

    Raises:
        ValueError: a subfolder that is not hidden is a link.
    """
    for inside, names, _ in os.walk(folder):
        names[:] = [name for name in names if not name.startswith(".")]
        for path in (Path(inside, name) for name in names):
            if path.is_symlink():
                raise ValueError(
                    f"{path} is a link to a folder, which datasets does not read; put the folder "
                    f"itself there."
                )


def read_upright(file: str | Path | BinaryIO) -> Image.Image:
    """Read an image in its stored mode, rotated by its EXIF orientation.

    Raises:
        UNREADABLE: the file is damaged, not an image or not a regular file.
    """
    if isinstance(file, str | Path) and Path(file).is_fifo():
        raise OSError(f"{file} is a pipe, not a file")
    with Image.open(file) as image:
        upright = ImageOps.exif_transpose(image)
    upright.format = image.format
    return upright


def read_rgb(file: str | Path | BinaryIO) -> Image.Image:
    """Read an image upright and in RGB, with transparent pixels on white.

    Raises:
        UNREADABLE: the file is damaged, not an image, or stores values without a known maximum.
    """
    image = read_upright(file)
    # `convert` would clip 16-bit values at 255.
    if image.mode.startswith("I;16") or (image.mode, image.format) == ("I", "PPM"):
        image = Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))
    elif image.mode in ("I", "F"):
        raise ValueError(f"{image.format} of mode {image.mode} does not say what is white")
    if image.has_transparency_data:
        white = Image.new("RGBA", image.size, "white")
        image = Image.alpha_composite(white, image.convert("RGBA"))
    return image.convert("RGB")


def psnr(image: Image.Image, reference: Image.Image) -> float:
    """Return the peak signal-to-noise ratio in dB between two images of one size.

    Infinite for equal images.
    """
    error = np.asarray(image, np.float64) - np.asarray(reference, np.float64)
    mean_square = (error**2).mean()
    return float("inf") if mean_square == 0 else float(10 * np.log10(255.0**2 / mean_square))


def difference(first: Image.Image, second: Image.Image) -> Image.Image:
    """Return the absolute difference of two RGB images of one size, times `DIFFERENCE_GAIN`."""
    return ImageChops.difference(first, second).point(lambda value: value * DIFFERENCE_GAIN)


def image_sheet(
    rows: Sequence[Sequence[Image.Image]],
    column_titles: Sequence[str],
    *,
    row_titles: Sequence[str] = (),
) -> Image.Image:
    """Lay out rows of images under column titles.

    Args:
        rows: rows of len(column_titles) RGB images, all of one size.
        column_titles: one line above each column.
        row_titles: one line above each row, line breaks removed; may be empty.

    Returns:
        RGB image.
    """
    width, height = rows[0][0].size
    row_titles = [" ".join(title.split()) for title in row_titles]
    title_font = ImageFont.load_default(TITLE_SIZE)
    text_font = ImageFont.load_default(TEXT_SIZE)
    head = TITLE_SIZE + 2 * MARGIN
    row_head = TEXT_SIZE + 5 if row_titles else 0
    sheet_width = max(
        MARGIN + len(column_titles) * (width + MARGIN),
        2 * MARGIN + int(max(text_font.getlength(title) for title in row_titles or [""])),
    )
    sheet_height = head + len(rows) * (height + row_head + MARGIN) + MARGIN

    sheet = Image.new("RGB", (sheet_width, sheet_height), "white")
    draw = ImageDraw.Draw(sheet)
    for column, title in enumerate(column_titles):
        draw.text((MARGIN + column * (width + MARGIN), MARGIN), title, "black", title_font)
    for row, images in enumerate(rows):
        top = head + row * (height + row_head + MARGIN)
        if row_titles:
            draw.text((MARGIN, top), row_titles[row], "black", text_font)
        for column, image in enumerate(images):
            sheet.paste(image, (MARGIN + column * (width + MARGIN), top + row_head))
    return sheet
