"""Grids of pictures as one PNG."""

import textwrap
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw

from avq_diffusers.files import atomic_write

CAPTION_HEIGHT = 44


def save_grid(
    path: Path, pictures: Sequence[np.ndarray], *, columns: int, captions: Sequence[str] = ()
) -> None:
    """Write uint8 pictures (size, size, 3) row by row, with captions below if there are any.

    Raises:
        OSError: the disk is full or not writable.
    """
    size = pictures[0].shape[0]
    height = size + (CAPTION_HEIGHT if captions else 0)
    rows = -(-len(pictures) // columns)
    grid = Image.new("RGB", (columns * size, rows * height), "white")
    draw = ImageDraw.Draw(grid)
    for index, picture in enumerate(pictures):
        corner = (index % columns * size, index // columns * height)
        grid.paste(Image.fromarray(picture), corner)
        if captions:
            text = "\n".join(textwrap.wrap(captions[index], max(size // 6, 1)))
            draw.text((corner[0] + 2, corner[1] + size + 1), text, fill="black", font_size=10)
    with atomic_write(path) as temporary:
        grid.save(temporary)
