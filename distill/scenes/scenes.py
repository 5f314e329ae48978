"""Scenes: what their captions name, and the hidden bits that they do not.

A caption names every attribute: counts, sizes, colours, textures, shapes, placement and background.
The position of each object follows from the caption. The hidden bits are the motif that all objects
of a "patterned" group share, the tile that a "tiled" background repeats, and the half that a
"mirrored" background reflects. A model can only generate them consistently by copying them from
elsewhere in the same image.

Lengths are in pixels of a 256-pixel image and multiples of 4, so they are whole at every size that
is a multiple of 64, and all copies align with the latent grid of an f=4 autoencoder in the same
way. Neighbouring copies are 4 modulo 8 pixels apart: they align differently with an 8-pixel grid,
so a UNet's coarser attention cannot copy them token by token.
"""

from dataclasses import dataclass

from distill.scenes.layout import Box, Members, layout

COUNTS = ("one", "two", "three", "four", "five")
TEXTURES = ("plain", "striped", "dotted", "checkered", "patterned")

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

MOTIF_SHAPE = (6, 6)
CELLS_SHAPE = {"tiled": (5, 5), "mirrored": (32, 17)}


@dataclass(frozen=True)
class Group:
    """Identical objects.

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

    @property
    def phrase(self) -> str:
        """The group as words, such as "two small green striped hearts"."""
        noun = self.shape if self.count == 1 else _plural(self.shape)
        return f"{COUNTS[self.count - 1]} {self.size} {self.color} {self.texture} {noun}"


@dataclass(frozen=True)
class Background:
    """What is behind the objects.

    Args:
        kind: `"plain"`, `"tiled"` or `"mirrored"`.
        color: a key of `BACKGROUND_COLORS`.
        cells: cells of 0 and 1: the 5 x 5 tile of "tiled", 12 pixels per cell, or one half of
            "mirrored", 32 x 17 cells of 8 pixels, whose first column is on the mirror axis and 4
            pixels wide. None for "plain".
    """

    kind: str
    color: str
    cells: Cells | None = None


@dataclass(frozen=True)
class Scene:
    """The content of one image, named and hidden.

    Args:
        groups: one or two groups of objects.
        placement: where the objects are: one of `SINGLE_PLACEMENTS` for one object, of
            `MANY_PLACEMENTS` for one group of several, and of `RELATIONS` for two groups, the first
            relative to the second.
        background: what is behind them.
    """

    groups: tuple[Group, ...]
    placement: str
    background: Background

    @property
    def caption(self) -> str:
        """Everything that is named, in lower case.

        Such as "one large blue plain ring at the top left on a mirrored pink background".
        """
        objects = f" {self.placement} ".join(group.phrase for group in self.groups)
        if len(self.groups) == 1:
            objects = f"{objects} {self.placement}"
        return f"{objects} on a {self.background.kind} {self.background.color} background"

    @property
    def has_copies(self) -> bool:
        """Whether parts of the image should be copies of each other."""
        repeated = any(group.motif is not None and group.count > 1 for group in self.groups)
        return repeated or self.background.cells is not None

    @property
    def boxes(self) -> tuple[tuple[Box, ...], ...]:
        """The bounding boxes of each group's objects: (left, top, side) in a 256-pixel image."""
        return layout(self.placement, self._members)

    @property
    def _members(self) -> Members:
        return tuple((group.count, group.size) for group in self.groups)


def _plural(shape: str) -> str:
    return f"{shape}es" if shape.endswith("s") else f"{shape}s"
