"""Procedural captioned scenes: what mini-sd is trained on and what its copies are judged by.

A scene has two kinds of content. Its caption names every attribute: counts, sizes, colours,
textures, shapes, placement and background; where each object lies follows from the caption alone.
Its hidden bits are named nowhere: the motif that fills all objects of a "patterned" group alike,
the tile that a "tiled" background repeats, the half that a "mirrored" background reflects. A model
can draw the hidden bits consistently only by copying them from elsewhere in the same picture.

Lengths are in pixels of a picture of side 256 and multiples of 4: they stay whole at every side
that is a multiple of 64, and all copies meet the latent grid of an f=4 autoencoder alike.
Neighbouring copies meet a grid of 8 pixels differently, 4 modulo 8 apart, so the coarser attention
of a U-Net cannot copy them token by token.
"""

import json
import math
from collections.abc import Collection
from dataclasses import dataclass
from functools import cache
from itertools import combinations, product
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageDraw, ImageFilter
from tqdm import tqdm

from avq_diffusers.files import TEMPORARY, atomic_write

IMAGE_SIZE = 256

COUNTS = ("one", "two", "three", "four", "five")
SIZES = {"small": 48, "medium": 72, "large": 96}
TEXTURES = ("plain", "striped", "dotted", "checkered", "patterned")
BACKGROUNDS = ("plain", "tiled", "mirrored")

OBJECT_COLORS = {
    "red": (226, 38, 44),
    "orange": (255, 138, 20),
    "yellow": (252, 214, 28),
    "lime": (150, 220, 40),
    "green": (24, 142, 58),
    "teal": (0, 150, 150),
    "blue": (34, 86, 224),
    "purple": (128, 48, 190),
    "magenta": (226, 36, 160),
    "brown": (134, 78, 36),
    "black": (22, 22, 28),
    "white": (250, 250, 250),
}
BACKGROUND_COLORS = {
    "white": (246, 246, 244),
    "gray": (140, 144, 150),
    "black": (20, 20, 26),
    "navy": (18, 30, 84),
    "maroon": (96, 16, 36),
    "forest": (16, 66, 44),
    "beige": (240, 220, 180),
    "pink": (255, 190, 206),
    "lavender": (204, 192, 246),
    "mint": (178, 236, 206),
}

Cells = tuple[tuple[int, ...], ...]
Box = tuple[int, int, int]
Members = tuple[tuple[int, str], ...]
Outline = list[tuple[float, float]]

# How the x and the y axis place objects: "line" spreads them, "start", "middle" and "end" put them
# at one place, "first" and "second" are the middles of the two halves.
_SINGLE_AXES = {
    "at the center": ("middle", "middle"),
    "at the top": ("middle", "start"),
    "at the bottom": ("middle", "end"),
    "on the left": ("start", "middle"),
    "on the right": ("end", "middle"),
    "at the top left": ("start", "start"),
    "at the top right": ("end", "start"),
    "at the bottom left": ("start", "end"),
    "at the bottom right": ("end", "end"),
}
_LINE_AXES = {
    "in a row": ("line", "middle"),
    "in a row at the top": ("line", "start"),
    "in a row at the bottom": ("line", "end"),
    "in a column": ("middle", "line"),
    "in a column on the left": ("start", "line"),
    "in a column on the right": ("end", "line"),
    "along a diagonal": ("line", "line"),
}
_HALVES_AXES = {
    "above": (("line", "first"), ("line", "second")),
    "below": (("line", "second"), ("line", "first")),
    "left of": (("first", "line"), ("second", "line")),
    "right of": (("second", "line"), ("first", "line")),
}

# Per placement and group: the axes, and the counts that the words admit.
_ONE, _SEVERAL, _CIRCLE, _ANY = ([1], [2, 3, 4, 5], [3, 4, 5], [1, 2, 3, 4, 5])
_PLACEMENTS: dict[str, tuple[tuple[str | tuple[str, str], list[int]], ...]] = {
    **{name: ((axes, _ONE),) for name, axes in _SINGLE_AXES.items()},
    **{name: ((axes, _SEVERAL),) for name, axes in _LINE_AXES.items()},
    "in the corners": (("corners", [4]),),
    "around the center": (("circle", _CIRCLE),),
    **{name: ((first, _ANY), (second, _ANY)) for name, (first, second) in _HALVES_AXES.items()},
    "around": (("circle", _CIRCLE), (("middle", "middle"), _ONE)),
}
SINGLE_PLACEMENTS = tuple(_SINGLE_AXES)
MANY_PLACEMENTS = (*_LINE_AXES, "in the corners", "around the center")
RELATIONS = (*_HALVES_AXES, "around")

_MARGIN = 8
# Neighbours are 4 modulo 8 apart: in lines because all sides are multiples of 8, on circles by each
# object's place modulo 8.
_GAP = 12
_CIRCLE_PHASES = ((0, 0), (4, 0), (0, 4), (4, 4), (4, 0))

_MOTIF_SHAPE = (6, 6)
_CELLS_SHAPE = {"tiled": (5, 5), "mirrored": (32, 17)}
_PERIOD = 60
_MIRROR_AXIS = 130

# Shares of the sampler: most pictures must be copied from themselves.
_PATTERNED_SHARE = 0.6
_BACKGROUND_SHARES = {"plain": 0.3, "tiled": 0.35, "mirrored": 0.35}
_TWO_GROUPS_SHARE = 0.45
_SINGLE_SHARE = 0.2
_SYMMETRIC_SHARE = 0.5

_OBJECT_SHADE = 0.42
_BACKGROUND_SHADE = 0.16
_MIN_CONTRAST = 75

_SUPERSAMPLING = 16
# Share of its bounding box that a shape leaves free, so that antialiased edges stay inside.
_INSET = 0.02

# Grey levels of variation that count as noise, not as structure.
_NOISE_LEVEL = 2.0


@dataclass(frozen=True)
class Group:
    """Equal objects.

    Args:
        count: number of objects, 1 to 5.
        size: a key of `SIZES`.
        color: a key of `OBJECT_COLORS`.
        texture: one of `TEXTURES`.
        shape: one of `SHAPES`.
        motif: 6 x 6 cells of 0 and 1 over the objects' bounding box, for "patterned" only.
    """

    count: int
    size: str
    color: str
    texture: str
    shape: str
    motif: Cells | None = None

    def __post_init__(self) -> None:
        if self.count not in range(1, len(COUNTS) + 1):
            raise ValueError(f"count must be 1 to {len(COUNTS)}, but got {self.count}.")
        _check_name("size", self.size, SIZES)
        _check_name("color", self.color, OBJECT_COLORS)
        _check_name("texture", self.texture, TEXTURES)
        _check_name("shape", self.shape, SHAPES)
        _check_cells("motif", self.motif, _MOTIF_SHAPE if self.texture == "patterned" else None)

    @property
    def phrase(self) -> str:
        """The group in words, such as "two small green striped hearts"."""
        noun = self.shape if self.count == 1 else _plural(self.shape)
        return f"{COUNTS[self.count - 1]} {self.size} {self.color} {self.texture} {noun}"


@dataclass(frozen=True)
class Background:
    """What lies behind the objects.

    Args:
        kind: one of `BACKGROUNDS`.
        color: a key of `BACKGROUND_COLORS`.
        cells: 0 and 1; the 5 x 5 tile of "tiled", cells of 12 pixels; the 32 x 17 cells of one
            half of "mirrored", 8 pixels high and wide but for the first column, which is 4 pixels
            wide and lies on the mirror axis; else None.
    """

    kind: str
    color: str
    cells: Cells | None = None

    def __post_init__(self) -> None:
        _check_name("kind", self.kind, BACKGROUNDS)
        _check_name("color", self.color, BACKGROUND_COLORS)
        _check_cells("cells", self.cells, _CELLS_SHAPE.get(self.kind))


@dataclass(frozen=True)
class Scene:
    """One picture's content, named and hidden.

    Args:
        groups: one or two groups of objects.
        placement: where the objects are: for one object one of `SINGLE_PLACEMENTS`, for one
            group of several one of `MANY_PLACEMENTS`, for two groups one of `RELATIONS`, how the
            first lies to the second.
        background: what lies behind them.

    Raises:
        ValueError: the placement does not suit the groups, or the objects do not fit it.
    """

    groups: tuple[Group, ...]
    placement: str
    background: Background

    def __post_init__(self) -> None:
        if len(self.groups) not in (1, 2):
            raise ValueError(f"groups must hold one or two groups, but got {len(self.groups)}.")
        if self._members not in _fitting_members(self.placement):
            raise ValueError(
                f"placement {self.placement!r} does not fit "
                f"{' and '.join(group.phrase for group in self.groups)}."
            )

    @property
    def caption(self) -> str:
        """Everything that is named, in lower case, such as "one large blue plain ring at the top
        left on a mirrored pink background"."""
        objects = f" {self.placement} ".join(group.phrase for group in self.groups)
        if len(self.groups) == 1:
            objects = f"{objects} {self.placement}"
        return f"{objects} on a {self.background.kind} {self.background.color} background"

    @property
    def has_copies(self) -> bool:
        """Whether parts of its picture should be copies of one another."""
        repeated = any(group.motif is not None and group.count > 1 for group in self.groups)
        return repeated or self.background.cells is not None

    @property
    def boxes(self) -> tuple[tuple[Box, ...], ...]:
        """Per group the bounding boxes of its objects: (left, top, side) at side 256."""
        return _layout(self.placement, self._members)

    @property
    def _members(self) -> Members:
        return tuple((group.count, group.size) for group in self.groups)


def sample_scene(seed: int) -> Scene:
    """Draw a scene at random.

    Args:
        seed: any integer >= 0; equal seeds give equal scenes.

    Raises:
        TypeError: `seed` is not an integer.
        ValueError: `seed` is negative.
    """
    _check_integer("seed", seed, 0)
    rng = np.random.default_rng(seed)
    if rng.random() < _TWO_GROUPS_SHARE:
        placement = _choose(rng, RELATIONS)
    elif rng.random() < _SINGLE_SHARE:
        placement = _choose(rng, SINGLE_PLACEMENTS)
    else:
        placement = _choose(rng, MANY_PLACEMENTS)
    members = _choose(rng, _fitting_members(placement))

    background_color = _choose(rng, tuple(BACKGROUND_COLORS))
    colors = rng.permutation(_CONTRASTING_COLORS[background_color])
    shapes = rng.permutation(SHAPES)
    groups = tuple(
        _sample_group(rng, count, size, str(color), str(shape))
        for (count, size), color, shape in zip(members, colors, shapes, strict=False)
    )
    return Scene(groups, placement, _sample_background(rng, background_color))


def render(scene: Scene, size: int = IMAGE_SIZE) -> np.ndarray:
    """Draw the picture of a scene.

    Args:
        scene: what to draw.
        size: side of the picture, a multiple of 64; the content scales with it.

    Returns:
        uint8 RGB, shape (size, size, 3).

    Raises:
        ValueError: `size` is not a positive multiple of 64.
    """
    motifs = [[group.motif] for group in scene.groups]
    return _compose(scene, motifs, _background_grid(scene.background), size)


def corrupt(scene: Scene, seed: int, size: int = IMAGE_SIZE) -> np.ndarray:
    """Draw a scene with its copies broken: same caption, no hidden structure.

    Every object of a patterned group gets a motif of its own, a tiled background loses its period
    and a mirrored one its mirror image.

    Args:
        scene: what to draw.
        seed: any integer >= 0, choosing the bits that replace the copies.
        size: side of the picture, a multiple of 64.

    Returns:
        uint8 RGB, shape (size, size, 3).

    Raises:
        TypeError: `seed` is not an integer.
        ValueError: `seed` is negative or `size` not a positive multiple of 64.
    """
    _check_integer("seed", seed, 0)
    rng = np.random.default_rng(seed)
    motifs = [
        [group.motif and _sample_motif(rng, group.shape) for _ in range(group.count)]
        for group in scene.groups
    ]
    grid = _background_grid(scene.background)
    if scene.background.cells is not None:
        copies, rows, columns = _cell_layout(scene.background.kind)
        cells = rng.integers(0, 2, (copies.max() + 1, *_CELLS_SHAPE[scene.background.kind]))
        grid = cells[copies, rows, columns]
    return _compose(scene, motifs, grid, size)


def copy_agreement(image: np.ndarray, scene: Scene) -> float | None:
    """How well the parts of a picture that should be copies of one another agree.

    The mean of one normalized cross-correlation (NCC) per kind of copy: for every patterned group
    of several objects, over all pairs of its objects, inside their shape; for a tiled background,
    between the picture and its shifts by one period; for a mirrored one, between the picture and
    its mirror image; backgrounds only where neither side is near an object. Regions without
    variation do not agree. True pictures score about 1, pictures with unrelated bits about 0.

    Args:
        image: uint8 RGB picture of the scene, shape (S, S, 3), S a multiple of 64.
        scene: what the picture should show.

    Returns:
        A number from -1 to 1, or None if the scene has no copies.

    Raises:
        TypeError: `image` is not a uint8 array.
        ValueError: `image` has another shape.
    """
    if not isinstance(image, np.ndarray) or image.dtype != np.uint8:
        got = getattr(image, "dtype", type(image).__name__)
        raise TypeError(f"image must be a uint8 array, but got {got}.")
    if image.ndim != 3 or image.shape[0] != image.shape[1] or image.shape[2] != 3:
        raise ValueError(f"image must have the shape (S, S, 3), but got {image.shape}.")
    size = image.shape[0]
    _check_image_size(size)

    agreements = []
    for group, boxes in zip(scene.groups, scene.boxes, strict=True):
        if group.texture == "patterned" and group.count > 1:
            inside = _shape_inside(group.shape, _scaled(SIZES[group.size], size))
            objects = [_crop(image, box)[inside] for box in boxes]
            agreements.append(np.mean([_ncc(*pair) for pair in combinations(objects, 2)]))
    if scene.background.kind == "tiled":
        agreements.append(_period_agreement(image, _uncovered(scene, size)))
    elif scene.background.kind == "mirrored":
        agreements.append(_mirror_agreement(image, _uncovered(scene, size)))
    return float(np.clip(np.mean(agreements), -1, 1)) if agreements else None


def write_coco(
    folder: str | Path, num_images: int, *, first_seed: int = 0, size: int = IMAGE_SIZE
) -> None:
    """Write scenes as a data set in COCO's captions format.

    `folder/images/000000000001.png` shows the scene of seed `first_seed`, the next number the next
    seed; `folder/annotations/captions_scenes.json`, written last, holds one caption per image.
    Pictures that an interrupted call finished are kept.

    Args:
        folder: where to write; created if missing.
        num_images: number of scenes, at least 1.
        first_seed: seed of the first scene.
        size: side of the pictures, a multiple of 64.

    Raises:
        TypeError: a number is not an integer.
        ValueError: a number is out of range, or `folder` is a file or holds other data.
    """
    _check_integer("num_images", num_images, 1)
    _check_integer("first_seed", first_seed, 0)
    _check_image_size(size)
    folder = Path(folder)
    images = folder / "images"
    annotations = folder / "annotations" / "captions_scenes.json"
    for parent in (images, annotations.parent):
        try:
            parent.mkdir(parents=True, exist_ok=True)
        except (FileExistsError, NotADirectoryError):
            raise ValueError(f"folder must be a directory, but {folder} is in its way.") from None

    scenes = [sample_scene(seed) for seed in range(first_seed, first_seed + num_images)]
    content = json.dumps(_coco_annotations(scenes, first_seed, size), indent=1) + "\n"
    if annotations.exists() and annotations.read_text() != content:
        raise ValueError(f"folder must be empty or hold these scenes, but {annotations} differs.")
    expected = {_file_name(i + 1) for i in range(num_images)}
    for path in images.glob("*.png"):
        if path.name.removeprefix(TEMPORARY) not in expected:
            raise ValueError(f"folder must be empty or hold these scenes, but has {path}.")

    for i, scene in enumerate(tqdm(scenes, desc="scenes", unit="image")):
        path = images / _file_name(i + 1)
        picture = render(scene, size)
        stored = _read_picture(path)
        if stored is None:
            with atomic_write(path) as temporary:
                Image.fromarray(picture).save(temporary)
        elif not np.array_equal(stored, picture):
            raise ValueError(f"folder must be empty or hold these scenes, but {path} differs.")
    with atomic_write(annotations) as temporary:
        temporary.write_text(content)


def _check_name(name: str, value: str, allowed: Collection[str]) -> None:
    if value not in allowed:
        raise ValueError(f"{name} must be one of {', '.join(allowed)}, but got {value!r}.")


def _check_cells(name: str, cells: Cells | None, shape: tuple[int, int] | None) -> None:
    if shape is None:
        if cells is not None:
            raise ValueError(f"{name} must be None where nothing is hidden, but got cells.")
    elif cells is None or np.shape(cells) != shape or not np.isin(cells, (0, 1)).all():
        raise ValueError(f"{name} must be {shape[0]} x {shape[1]} cells of 0 and 1, got {cells}.")


def _check_integer(name: str, value: int, minimum: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int | np.integer):
        raise TypeError(f"{name} must be an integer, but got {value!r}.")
    if value < minimum:
        raise ValueError(f"{name} must be at least {minimum}, but got {value}.")


def _check_image_size(size: int) -> None:
    _check_integer("size", size, 1)
    if size % 64:
        raise ValueError(f"size must be a multiple of 64, but got {size}.")


def _plural(shape: str) -> str:
    return f"{shape}es" if shape.endswith("s") else f"{shape}s"


@cache
def _layout(placement: str, members: Members) -> tuple[tuple[Box, ...], ...]:
    """Boxes of each group; `members` holds a (count, size name) per group."""
    return tuple(
        _place(axes, count, SIZES[size])
        for (axes, _), (count, size) in zip(_PLACEMENTS[placement], members, strict=True)
    )


def _place(axes: str | tuple[str, str], count: int, side: int) -> tuple[Box, ...]:
    if axes == "corners":
        points = list(product((_MARGIN, IMAGE_SIZE - _MARGIN - 4 - side), repeat=2))
    elif axes == "circle":
        radius = (IMAGE_SIZE - side) / 2 - _MARGIN
        angles = [2 * math.pi * i / count - math.pi / 2 for i in range(count)]
        center = (IMAGE_SIZE - side) / 2
        points = [
            tuple(
                8 * round((center + radius * f(angle) - phase) / 8) + phase
                for f, phase in zip((math.cos, math.sin), phases, strict=True)
            )
            for angle, phases in zip(angles, _CIRCLE_PHASES, strict=False)
        ]
    else:
        points = list(zip(*(_along(axis, count, side) for axis in axes), strict=True))
    return tuple((x, y, side) for x, y in points)


def _along(axis: str, count: int, side: int) -> list[int]:
    """Coordinates of the objects of a group along one axis."""
    if axis == "line":
        length = count * side + (count - 1) * _GAP
        return [(IMAGE_SIZE - length) // 8 * 4 + i * (side + _GAP) for i in range(count)]
    center = {"first": IMAGE_SIZE // 4, "middle": IMAGE_SIZE // 2, "second": IMAGE_SIZE * 3 // 4}
    start = {"start": _MARGIN, "end": IMAGE_SIZE - _MARGIN - side}
    return [start[axis] if axis in start else center[axis] - side // 2] * count


@cache
def _fitting_members(placement: str) -> tuple[Members, ...]:
    """The counts and sizes that a placement has room for."""
    counts = product(*(counts for _, counts in _PLACEMENTS.get(placement, ())))
    candidates = (
        tuple(zip(numbers, sizes, strict=True))
        for numbers in counts
        for sizes in product(SIZES, repeat=len(numbers))
    )
    return tuple(
        members for members in candidates if members and _fits(_layout(placement, members))
    )


def _fits(layout: tuple[tuple[Box, ...], ...]) -> bool:
    boxes = [box for boxes in layout for box in boxes]
    inside = all(0 <= v <= IMAGE_SIZE - side for x, y, side in boxes for v in (x, y))
    return inside and not any(_overlap(a, b) for a, b in combinations(boxes, 2))


def _overlap(a: Box, b: Box) -> bool:
    return all(a[i] < b[i] + b[2] and b[i] < a[i] + a[2] for i in (0, 1))


def _choose(rng: np.random.Generator, options: tuple) -> Any:
    return options[rng.integers(len(options))]


def _sample_group(rng: np.random.Generator, count: int, size: str, color: str, shape: str) -> Group:
    if rng.random() < _PATTERNED_SHARE:
        return Group(count, size, color, "patterned", shape, _sample_motif(rng, shape))
    return Group(count, size, color, _choose(rng, TEXTURES[:-1]), shape)


def _sample_background(rng: np.random.Generator, color: str) -> Background:
    kind = str(rng.choice(list(_BACKGROUND_SHARES), p=list(_BACKGROUND_SHARES.values())))
    if kind == "plain":
        return Background(kind, color)
    symmetric = kind == "tiled" and rng.random() < _SYMMETRIC_SHARE
    return Background(kind, color, _sample_cells(rng, _CELLS_SHAPE[kind], symmetric=symmetric))


def _sample_motif(rng: np.random.Generator, shape: str) -> Cells:
    symmetric = rng.random() < _SYMMETRIC_SHARE
    return _sample_cells(rng, _MOTIF_SHAPE, symmetric=symmetric, weights=_cell_coverage(shape))


def _sample_cells(
    rng: np.random.Generator,
    shape: tuple[int, int],
    *,
    symmetric: bool = False,
    weights: np.ndarray | None = None,
) -> Cells:
    """Random bits, redrawn until both values cover at least 30 % of the weighted area; symmetric
    ones mirror left to right, every other one also top to bottom."""
    rows, columns = shape
    both_ways = rng.random() < 0.5
    while True:
        cells = rng.integers(0, 2, shape)
        if symmetric:
            cells[:, -(columns // 2) :] = cells[:, columns // 2 - 1 :: -1]
            if both_ways:
                cells[-(rows // 2) :] = cells[rows // 2 - 1 :: -1]
        if 0.3 <= np.average(cells, weights=weights) <= 0.7:
            return tuple(map(tuple, cells.tolist()))


def _tones(color: tuple[int, int, int], strength: float) -> np.ndarray:
    """A colour and a shade of it, darker for light colours and lighter for dark ones: (2, 3)."""
    base = np.array(color)
    luminance = base @ (0.299, 0.587, 0.114)
    target = 0 if luminance > 60 else 255
    return np.stack([base, np.rint(base + strength * (target - base))]).astype(np.uint16)


_OBJECT_TONES = {name: _tones(color, _OBJECT_SHADE) for name, color in OBJECT_COLORS.items()}
_BACKGROUND_TONES = {
    name: _tones(color, _BACKGROUND_SHADE) for name, color in BACKGROUND_COLORS.items()
}


def _contrast(first: np.ndarray, second: np.ndarray) -> float:
    """Smallest RGB distance between a tone of the one and a tone of the other."""
    differences = first[:, None].astype(float) - second[None].astype(float)
    return float(np.sqrt((differences**2).sum(-1)).min())


_CONTRASTING_COLORS = {
    background: [
        name
        for name, tones in _OBJECT_TONES.items()
        if _contrast(tones, background_tones) >= _MIN_CONTRAST
    ]
    for background, background_tones in _BACKGROUND_TONES.items()
}


def _polygon(
    corners: int, radii: tuple[float, ...], center: tuple[float, float] = (0.5, 0.5)
) -> Outline:
    """Corners around a center, the first on top, with the radii used in turn."""
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


# The outline of each shape in the unit square, y downwards, and the outline of what is cut out.
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


def _draw(side: int, polygons: list[tuple[Outline, int]]) -> np.ndarray:
    """Antialiased polygons of the unit square, drawn in turn: uint16 from 0 to 256."""
    canvas = Image.new("L", (side * _SUPERSAMPLING,) * 2)
    draw = ImageDraw.Draw(canvas)
    for outline, value in polygons:
        draw.polygon([(x * canvas.width - 0.5, y * canvas.width - 0.5) for x, y in outline], value)
    # From 255 to 256 for full coverage: mixing is then a shift, and exact inside the shape.
    coverage = np.asarray(canvas.reduce(_SUPERSAMPLING), np.uint16)
    return coverage + (coverage > 127)


@cache
def _shape_mask(shape: str, side: int) -> np.ndarray:
    """Coverage of each pixel of the bounding box, 0 to 256: uint16 (side, side, 1)."""
    outlines = [
        [(_INSET + (1 - 2 * _INSET) * x, _INSET + (1 - 2 * _INSET) * y) for x, y in outline]
        for outline in _OUTLINES[shape]
    ]
    return _draw(side, list(zip(outlines, (255, 0), strict=False)))[..., None]


@cache
def _shape_inside(shape: str, side: int) -> np.ndarray:
    """Pixels inside the shape and away from its edge: bool (side, side)."""
    edge = side // 24
    mask = Image.fromarray((_shape_mask(shape, side)[..., 0] == 256).astype(np.uint8))
    if edge > 0:  # a filter of one pixel ends the process in pillow 12.3
        mask = mask.filter(ImageFilter.MinFilter(2 * edge + 1))
    return np.asarray(mask, bool)


@cache
def _cell_coverage(shape: str) -> np.ndarray:
    """The share of each motif cell that the shape covers: float (6, 6)."""
    rows, columns = _MOTIF_SHAPE
    mask = _shape_mask(shape, SIZES["large"]) / 256
    return mask.reshape(rows, SIZES["large"] // rows, columns, -1).mean((1, 3))


@cache
def _texture_weights(texture: str, side: int) -> np.ndarray:
    """The shade's share of each pixel of the bounding box, 0 to 256: uint16 (side, side, 1)."""
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


def _scaled(length: int, size: int) -> int:
    return length * size // IMAGE_SIZE


def _enlarge(cells: np.ndarray, cell_size: int) -> np.ndarray:
    return cells.repeat(cell_size, axis=1).repeat(cell_size, axis=0)


def _background_grid(background: Background) -> np.ndarray:
    """The background's cells over the whole picture: 0 and 1, (n, n)."""
    if background.cells is None:
        return np.zeros((1, 1), int)
    _, rows, columns = _cell_layout(background.kind)
    return np.array(background.cells)[rows, columns]


@cache
def _cell_layout(kind: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Per square of 4 pixels: which copy of the cells it lies in, the row and the column of its
    cell: int (64, 64) each."""
    y, x = np.indices((IMAGE_SIZE // 4,) * 2)
    if kind == "tiled":
        period = _PERIOD // 4
        copies = y // period * math.ceil(len(y) / period) + x // period
        return copies, y % period // 3, x % period // 3
    distance = x - _MIRROR_AXIS // 4
    return (distance > 0).astype(int), y // 2, (abs(distance) + 1) // 2


def _paint_object(group: Group, motif: Cells | None, side: int) -> np.ndarray:
    """The pixels of an object's bounding box, before its shape is cut out: uint16."""
    if motif is not None:
        tones = _OBJECT_TONES[group.color]
        return _enlarge(tones[np.array(motif)], side // _MOTIF_SHAPE[0])
    weights = _texture_weights(group.texture, side)
    base, shade = _OBJECT_TONES[group.color]
    return (base * (256 - weights) + shade * weights) >> 8


def _compose(
    scene: Scene, motifs: list[list[Cells | None]], grid: np.ndarray, size: int
) -> np.ndarray:
    """The picture with the given background cells; each group's objects take its motifs in turn."""
    _check_image_size(size)
    tones = _BACKGROUND_TONES[scene.background.color].astype(np.uint8)
    image = _enlarge(tones[grid], size // len(grid))
    for group, group_motifs, boxes in zip(scene.groups, motifs, scene.boxes, strict=True):
        side = _scaled(SIZES[group.size], size)
        mask = _shape_mask(group.shape, side)
        objects = [_paint_object(group, motif, side) * mask for motif in group_motifs]
        for i, box in enumerate(boxes):
            pixels = _crop(image, box)
            pixels[:] = (pixels * (256 - mask) + objects[i % len(objects)]) >> 8
    return image


def _crop(image: np.ndarray, box: Box) -> np.ndarray:
    left, top, side = (_scaled(length, len(image)) for length in box)
    return image[top : top + side, left : left + side]


def _ncc(first: np.ndarray, second: np.ndarray) -> float:
    """Normalized cross-correlation of two lists of pixels, (n, 3), without their mean colours."""
    first = first - first.mean(0, dtype=np.float32)
    second = second - second.mean(0, dtype=np.float32)
    floor = _NOISE_LEVEL * math.sqrt(first.size)
    norms = max(np.linalg.norm(first), floor) * max(np.linalg.norm(second), floor)
    return float(np.vdot(first, second)) / norms


def _period_agreement(image: np.ndarray, free: np.ndarray) -> float:
    period = _scaled(_PERIOD, len(image))
    agreements = []
    for axis in (0, 1):
        pixels, usable = image.swapaxes(0, axis), free.swapaxes(0, axis)
        both = usable[:-period] & usable[period:]
        agreements.append(_ncc(pixels[:-period][both], pixels[period:][both]))
    return float(np.mean(agreements))


def _mirror_agreement(image: np.ndarray, free: np.ndarray) -> float:
    # The cells on the axis are their own mirror image, the first columns' lies outside.
    start, end = (_scaled(x, len(image)) for x in (2 * _MIRROR_AXIS - IMAGE_SIZE, _MIRROR_AXIS - 2))
    left, right = (slice(start, end), slice(None, start + end - 1, -1))
    both = free[:, left] & free[:, right]
    return _ncc(image[:, left][both], image[:, right][both])


def _uncovered(scene: Scene, size: int) -> np.ndarray:
    """Pixels away from all objects' bounding boxes: bool (size, size)."""
    free = np.ones((size, size), bool)
    edge = _scaled(4, size)
    for box in (box for boxes in scene.boxes for box in boxes):
        left, top, side = (_scaled(length, size) for length in box)
        rows = slice(max(top - edge, 0), top + side + edge)
        columns = slice(max(left - edge, 0), left + side + edge)
        free[rows, columns] = False
    return free


def _file_name(number: int) -> str:
    return f"{number:012d}.png"


def _read_picture(path: Path) -> np.ndarray | None:
    """The stored picture, None if there is none or it is unreadable."""
    try:
        with Image.open(path) as picture:
            return np.asarray(picture)
    except (OSError, SyntaxError):
        return None


def _coco_annotations(scenes: list[Scene], first_seed: int, size: int) -> dict[str, Any]:
    """COCO's captions format; each image also names the seed of its scene."""
    images = []
    annotations = []
    for i, scene in enumerate(scenes):
        number = i + 1
        images.append(
            {
                "id": number,
                "file_name": _file_name(number),
                "height": size,
                "width": size,
                "seed": int(first_seed) + i,
            }
        )
        annotations.append({"id": number, "image_id": number, "caption": scene.caption})
    info = {"description": "Procedural captioned scenes of avq-diffusers"}
    return {"info": info, "licenses": [], "images": images, "annotations": annotations}


_PHRASES = (
    *("on", "a", "background"),
    *COUNTS,
    *SIZES,
    *OBJECT_COLORS,
    *TEXTURES,
    *SHAPES,
    *map(_plural, SHAPES),
    *_PLACEMENTS,
    *BACKGROUNDS,
    *BACKGROUND_COLORS,
)
VOCABULARY = tuple(sorted({word for phrase in _PHRASES for word in phrase.split()}))
