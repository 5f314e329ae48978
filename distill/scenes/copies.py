"""Copies within an image: how to break them, and how well they agree."""

import math
from itertools import combinations
from typing import Any

import numpy as np

from distill.scenes.layout import IMAGE_SIZE
from distill.scenes.rendering import (
    MIRROR_AXIS,
    PERIOD,
    background_grid,
    cell_layout,
    compose,
    crop,
    scaled,
)
from distill.scenes.sampling import sample_motif
from distill.scenes.scenes import CELLS_SHAPE, Scene
from distill.scenes.shapes import SIZES, shape_inside

# Variation in grey levels that counts as noise, not structure.
_NOISE_LEVEL = 2.0


def corrupt(scene: Scene, seed: int, size: int = IMAGE_SIZE) -> np.ndarray:
    """Render a scene with its copies broken: same caption, no hidden structure.

    Each object of a patterned group gets its own motif. A tiled background loses its period, a
    mirrored one its mirror image. `seed` chooses the bits that replace the copies.

    Returns:
        uint8 RGB, shape (size, size, 3).
    """
    rng = np.random.default_rng(seed)
    motifs = [
        [group.motif and sample_motif(rng, group.shape) for _ in range(group.count)]
        for group in scene.groups
    ]
    grid = background_grid(scene.background)
    if scene.background.cells is not None:
        copies, rows, columns = cell_layout(scene.background.kind)
        cells = rng.integers(0, 2, (copies.max() + 1, *CELLS_SHAPE[scene.background.kind]))
        grid = cells[copies, rows, columns]
    return compose(scene, motifs, grid, size)


def copy_agreement(image: np.ndarray, scene: Scene) -> float | None:
    """Return how well parts of an image agree that should be copies of each other.

    This is the mean of one normalized cross-correlation (NCC) per kind of copy:

    - a patterned group of several objects: over all pairs of objects, inside their shape;
    - a tiled background: between the image and its shifts by one period;
    - a mirrored background: between the image and its mirror image.

    Backgrounds only count where neither side is near an object. Regions without variation count as
    disagreeing. True images score about 1, images with unrelated bits about 0.

    Args:
        image: uint8 RGB, shape (S, S, 3), S a multiple of 64.
        scene: what the image should show.

    Returns:
        A number from -1 to 1, or None if the scene has no copies.
    """
    size = len(image)
    agreements: list[float] = []
    for group, boxes in zip(scene.groups, scene.boxes, strict=True):
        if group.texture == "patterned" and group.count > 1:
            inside = shape_inside(group.shape, scaled(SIZES[group.size], size))
            objects = [crop(image, box)[inside] for box in boxes]
            pairs = combinations(objects, 2)
            agreements.append(float(np.mean([_ncc(*pair) for pair in pairs])))
    if scene.background.kind == "tiled":
        agreements.append(_period_agreement(image, _uncovered(scene, size)))
    elif scene.background.kind == "mirrored":
        agreements.append(_mirror_agreement(image, _uncovered(scene, size)))
    return float(np.clip(np.mean(agreements), -1, 1)) if agreements else None


def _ncc(first: np.ndarray, second: np.ndarray) -> float:
    """Normalized cross-correlation of two lists of pixels (n, 3), mean colours removed."""
    first = first - first.mean(0, dtype=np.float32)
    second = second - second.mean(0, dtype=np.float32)
    floor = _NOISE_LEVEL * math.sqrt(first.size)
    norms: list[Any] = [max(np.linalg.norm(pixels), floor) for pixels in (first, second)]
    return float(np.vdot(first, second)) / (norms[0] * norms[1])


def _period_agreement(image: np.ndarray, free: np.ndarray) -> float:
    period = scaled(PERIOD, len(image))
    agreements = []
    for axis in (0, 1):
        pixels, usable = image.swapaxes(0, axis), free.swapaxes(0, axis)
        both = usable[:-period] & usable[period:]
        agreements.append(_ncc(pixels[:-period][both], pixels[period:][both]))
    return float(np.mean(agreements))


def _mirror_agreement(image: np.ndarray, free: np.ndarray) -> float:
    # Cells on the axis are their own mirror image; the first columns' is outside the image.
    start, end = (scaled(x, len(image)) for x in (2 * MIRROR_AXIS - IMAGE_SIZE, MIRROR_AXIS - 2))
    left, right = (slice(start, end), slice(None, start + end - 1, -1))
    both = free[:, left] & free[:, right]
    return _ncc(image[:, left][both], image[:, right][both])


def _uncovered(scene: Scene, size: int) -> np.ndarray:
    """Pixels away from the bounding boxes of all objects: bool (size, size)."""
    free = np.ones((size, size), bool)
    edge = scaled(4, size)
    for box in (box for boxes in scene.boxes for box in boxes):
        left, top, side = (scaled(length, size) for length in box)
        rows = slice(max(top - edge, 0), top + side + edge)
        columns = slice(max(left - edge, 0), left + side + edge)
        free[rows, columns] = False
    return free
