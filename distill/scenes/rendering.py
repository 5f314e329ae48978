"""Render scenes to images."""

import math
from functools import cache

import numpy as np

from distill.scenes.layout import IMAGE_SIZE, Box
from distill.scenes.scenes import (
    BACKGROUND_COLORS,
    MOTIF_SHAPE,
    OBJECT_COLORS,
    Background,
    Cells,
    Group,
    Scene,
)
from distill.scenes.shapes import SIZES, shape_mask, texture_weights

PERIOD = 60
MIRROR_AXIS = 130

_OBJECT_SHADE = 0.42
_BACKGROUND_SHADE = 0.16


def render(scene: Scene, size: int = IMAGE_SIZE) -> np.ndarray:
    """Render a scene: uint8 RGB (size, size, 3). The content scales with the size.

    Raises:
        ValueError: `size` is not a positive multiple of 64.
    """
    motifs = [[group.motif] for group in scene.groups]
    return compose(scene, motifs, background_grid(scene.background), size)


def compose(
    scene: Scene, motifs: list[list[Cells | None]], grid: np.ndarray, size: int
) -> np.ndarray:
    """Render with these background cells; a group's objects take its motifs in turn."""
    if size <= 0 or size % 64:
        raise ValueError(f"size must be a multiple of 64, but got {size}.")
    tones = BACKGROUND_TONES[scene.background.color].astype(np.uint8)
    image = _enlarge(tones[grid], size // len(grid))
    for group, group_motifs, boxes in zip(scene.groups, motifs, scene.boxes, strict=True):
        side = scaled(SIZES[group.size], size)
        mask = shape_mask(group.shape, side)
        objects = [_paint_object(group, motif, side) * mask for motif in group_motifs]
        for i, box in enumerate(boxes):
            pixels = crop(image, box)
            pixels[:] = (pixels * (256 - mask) + objects[i % len(objects)]) >> 8
    return image


def background_grid(background: Background) -> np.ndarray:
    """The background's cells over the whole image: 0 and 1, (n, n)."""
    if background.cells is None:
        return np.zeros((1, 1), int)
    _, rows, columns = cell_layout(background.kind)
    return np.array(background.cells)[rows, columns]


@cache
def cell_layout(kind: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Copy, row and column of the cell of each 4-pixel square: int (64, 64) each."""
    y, x = np.indices((IMAGE_SIZE // 4,) * 2)
    if kind == "tiled":
        period = PERIOD // 4
        copies = y // period * math.ceil(len(y) / period) + x // period
        return copies, y % period // 3, x % period // 3
    distance = x - MIRROR_AXIS // 4
    return (distance > 0).astype(int), y // 2, (abs(distance) + 1) // 2


def crop(image: np.ndarray, box: Box) -> np.ndarray:
    left, top, side = (scaled(length, len(image)) for length in box)
    return image[top : top + side, left : left + side]


def scaled(length: int, size: int) -> int:
    return length * size // IMAGE_SIZE


def _paint_object(group: Group, motif: Cells | None, side: int) -> np.ndarray:
    """The pixels of an object's bounding box, before its shape is cut out: uint16."""
    if motif is not None:
        tones = OBJECT_TONES[group.color]
        return _enlarge(tones[np.array(motif)], side // MOTIF_SHAPE[0])
    weights = texture_weights(group.texture, side)
    base, shade = OBJECT_TONES[group.color]
    return (base * (256 - weights) + shade * weights) >> 8


def _enlarge(cells: np.ndarray, cell_size: int) -> np.ndarray:
    return cells.repeat(cell_size, axis=1).repeat(cell_size, axis=0)


def _tones(color: tuple[int, int, int], strength: float) -> np.ndarray:
    """A colour and a shade of it, darker for light colours, lighter for dark ones: (2, 3)."""
    base = np.array(color)
    luminance = base @ (0.299, 0.587, 0.114)
    target = 0 if luminance > 60 else 255
    return np.stack([base, np.rint(base + strength * (target - base))]).astype(np.uint16)


OBJECT_TONES = {name: _tones(color, _OBJECT_SHADE) for name, color in OBJECT_COLORS.items()}
BACKGROUND_TONES = {
    name: _tones(color, _BACKGROUND_SHADE) for name, color in BACKGROUND_COLORS.items()
}
