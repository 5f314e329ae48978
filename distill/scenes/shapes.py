"""Shapes and textures of objects, as antialiased masks of their bounding box."""

import math
from functools import cache
from itertools import product

import numpy as np
from PIL import Image, ImageDraw, ImageFilter

Outline = list[tuple[float, float]]

SIZES = {"small": 48, "medium": 72, "large": 96}

_SUPERSAMPLING = 16
# Share of its bounding box that a shape leaves empty, so that antialiased edges stay inside.
_INSET = 0.02


def _polygon(
    corners: int, radii: tuple[float, ...], center: tuple[float, float] = (0.5, 0.5)
) -> Outline:
    """Corners around a center, the first at the top, cycling through the radii."""
    angles = [2 * math.pi * i / corners - math.pi / 2 for i in range(corners)]
    return [
        (
            center[0] + radii[i % len(radii)] * math.cos(a),
            center[1] + radii[i % len(radii)] * math.sin(a),
        )
        for i, a in enumerate(angles)
    ]


def _circle(radius: float, center: tuple[float, float] = (0.5, 0.5)) -> Outline:
    return _polygon(128, (radius,), center)


def _heart() -> Outline:
    t = np.linspace(0, 2 * np.pi, 128, endpoint=False)
    x = 16 * np.sin(t) ** 3
    y = 5 * np.cos(2 * t) + 2 * np.cos(3 * t) + np.cos(4 * t) - 13 * np.cos(t)
    return list(zip(0.5 + x / 32, 0.45 + y / 31, strict=True))


def _drop() -> Outline:
    angles = np.linspace(-0.18 * np.pi, 1.18 * np.pi, 96)
    return [
        (0.5, 0.0),
        *zip(0.5 + 0.37 * np.cos(angles), 0.63 + 0.37 * np.sin(angles), strict=True),
    ]


def _cross() -> Outline:
    corners = [(0.3, 0.3), (0.3, 0.0), (0.7, 0.0)]
    for _ in range(3):
        corners += [(1 - y, x) for x, y in corners[-3:]]
    return corners


# The outline of each shape in the unit square, y pointing down, and of what is cut out of it.
_OUTLINES: dict[str, tuple[Outline, ...]] = {
    "circle": (_circle(0.5),),
    "square": ([(0.05, 0.05), (0.95, 0.05), (0.95, 0.95), (0.05, 0.95)],),
    "triangle": ([(0.5, 0.04), (1, 0.94), (0, 0.94)],),
    "star": (_polygon(10, (0.54, 0.27), (0.5, 0.55)),),
    "heart": (_heart(),),
    "diamond": ([(0.5, 0), (0.88, 0.5), (0.5, 1), (0.12, 0.5)],),
    "hexagon": (_polygon(6, (0.5,)),),
    "cross": (_cross(),),
    "ring": (_circle(0.5), _circle(0.2)),
    "moon": (_circle(0.5), _circle(0.4, (0.8, 0.36))),
    "arrow": (
        [(0, 0.28), (0.5, 0.28), (0.5, 0.02), (1, 0.5), (0.5, 0.98), (0.5, 0.72), (0, 0.72)],
    ),
    "drop": (_drop(),),
}
SHAPES = tuple(_OUTLINES)


@cache
def shape_mask(shape: str, side: int) -> np.ndarray:
    """Coverage of each pixel of the bounding box, 0 to 256: uint16 (side, side, 1)."""
    outlines = [
        [(_INSET + (1 - 2 * _INSET) * x, _INSET + (1 - 2 * _INSET) * y) for x, y in outline]
        for outline in _OUTLINES[shape]
    ]
    return _draw(side, list(zip(outlines, (255, 0), strict=False)))[..., None]


@cache
def shape_inside(shape: str, side: int) -> np.ndarray:
    """Pixels inside the shape and away from its edge: bool (side, side)."""
    edge = side // 24
    mask = Image.fromarray((shape_mask(shape, side)[..., 0] == 256).astype(np.uint8))
    if edge > 0:  # a one-pixel filter crashes the process in pillow 12.3
        mask = mask.filter(ImageFilter.MinFilter(2 * edge + 1))
    return np.asarray(mask, bool)


@cache
def texture_weights(texture: str, side: int) -> np.ndarray:
    """The shade's share of each pixel in the bounding box, 0 to 256: uint16 (side, side, 1)."""
    polygons: list[tuple[Outline, int]] = []
    if texture == "striped":
        polygons = [
            ([(x, 0), (x + 1 / 6, 0), (x - 5 / 6, 1), (x - 1, 1)], 255) for x in np.arange(6) / 3
        ]
    elif texture == "dotted":
        centers = product((np.arange(4) + 0.5) / 4, repeat=2)
        polygons = [(_circle(1 / 12, center), 255) for center in centers]
    elif texture == "checkered":
        polygons = [
            ([(x, y), (x + 1 / 6, y), (x + 1 / 6, y + 1 / 6), (x, y + 1 / 6)], 255)
            for x, y in product(np.arange(6) / 6, repeat=2)
            if round((x + y) * 6) % 2
        ]
    return _draw(side, polygons)[..., None]


def _draw(side: int, polygons: list[tuple[Outline, int]]) -> np.ndarray:
    """Antialiased polygons in the unit square, drawn in turn: uint16 from 0 to 256."""
    canvas = Image.new("L", (side * _SUPERSAMPLING,) * 2)
    draw = ImageDraw.Draw(canvas)
    for outline, value in polygons:
        draw.polygon([(x * canvas.width - 0.5, y * canvas.width - 0.5) for x, y in outline], value)
    # Map 255 to 256 for full coverage: mixing is then a shift, and exact inside the shape.
    coverage = np.asarray(canvas.reduce(_SUPERSAMPLING), np.uint16)
    return coverage + (coverage > 127)
