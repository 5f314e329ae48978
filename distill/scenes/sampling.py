"""Random scenes."""

from functools import cache
from typing import Any

import numpy as np

from distill.scenes.layout import MANY_PLACEMENTS, RELATIONS, SINGLE_PLACEMENTS, fitting_members
from distill.scenes.rendering import BACKGROUND_TONES, OBJECT_TONES
from distill.scenes.scenes import (
    BACKGROUND_COLORS,
    CELLS_SHAPE,
    MOTIF_SHAPE,
    TEXTURES,
    Background,
    Cells,
    Group,
    Scene,
)
from distill.scenes.shapes import SHAPES, SIZES, shape_mask

# Most images must contain copies of their own parts.
_PATTERNED_SHARE = 0.6
_BACKGROUND_SHARES = {"plain": 0.3, "tiled": 0.35, "mirrored": 0.35}
_TWO_GROUPS_SHARE = 0.45
_SINGLE_SHARE = 0.2
_SYMMETRIC_SHARE = 0.5
_MIN_CONTRAST = 75


def sample_scene(seed: int) -> Scene:
    """Sample a random scene; equal seeds give equal scenes."""
    rng = np.random.default_rng(seed)
    if rng.random() < _TWO_GROUPS_SHARE:
        placement = _choose(rng, RELATIONS)
    elif rng.random() < _SINGLE_SHARE:
        placement = _choose(rng, SINGLE_PLACEMENTS)
    else:
        placement = _choose(rng, MANY_PLACEMENTS)
    members = _choose(rng, fitting_members(placement))

    background_color = _choose(rng, tuple(BACKGROUND_COLORS))
    colors = rng.permutation(_CONTRASTING_COLORS[background_color])
    shapes = rng.permutation(SHAPES)
    groups = tuple(
        _sample_group(rng, count, size, str(color), str(shape))
        for (count, size), color, shape in zip(members, colors, shapes, strict=False)
    )
    return Scene(groups, placement, _sample_background(rng, background_color))


def sample_motif(rng: np.random.Generator, shape: str) -> Cells:
    symmetric = rng.random() < _SYMMETRIC_SHARE
    return _sample_cells(rng, MOTIF_SHAPE, symmetric=symmetric, weights=_cell_coverage(shape))


def _choose(rng: np.random.Generator, options: tuple) -> Any:
    return options[rng.integers(len(options))]


def _sample_group(rng: np.random.Generator, count: int, size: str, color: str, shape: str) -> Group:
    if rng.random() < _PATTERNED_SHARE:
        return Group(count, size, color, "patterned", shape, sample_motif(rng, shape))
    return Group(count, size, color, _choose(rng, TEXTURES[:-1]), shape)


def _sample_background(rng: np.random.Generator, color: str) -> Background:
    kind = str(rng.choice(list(_BACKGROUND_SHARES), p=list(_BACKGROUND_SHARES.values())))
    if kind == "plain":
        return Background(kind, color)
    symmetric = kind == "tiled" and rng.random() < _SYMMETRIC_SHARE
    return Background(kind, color, _sample_cells(rng, CELLS_SHAPE[kind], symmetric=symmetric))


def _sample_cells(
    rng: np.random.Generator,
    shape: tuple[int, int],
    *,
    symmetric: bool = False,
    weights: np.ndarray | None = None,
) -> Cells:
    """Random bits in which each value covers at least 30 % of the weighted area.

    Symmetric ones are mirrored left to right, and half of them also top to bottom.
    """
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


@cache
def _cell_coverage(shape: str) -> np.ndarray:
    """The share of each motif cell that the shape covers: float (6, 6)."""
    rows, columns = MOTIF_SHAPE
    mask = shape_mask(shape, SIZES["large"]) / 256
    return mask.reshape(rows, SIZES["large"] // rows, columns, -1).mean((1, 3))


def _contrast(first: np.ndarray, second: np.ndarray) -> float:
    """Smallest RGB distance between a tone of one and a tone of the other."""
    differences = first[:, None].astype(float) - second[None].astype(float)
    return float(np.sqrt((differences**2).sum(-1)).min())


_CONTRASTING_COLORS = {
    background: [
        name
        for name, tones in OBJECT_TONES.items()
        if _contrast(tones, background_tones) >= _MIN_CONTRAST
    ]
    for background, background_tones in BACKGROUND_TONES.items()
}
