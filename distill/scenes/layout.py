"""Positions of a scene's objects, from the words of its placement."""

import math
from functools import cache
from itertools import combinations, product

from avq_diffusers.mini import IMAGE_SIZE
from distill.scenes.shapes import SIZES

Box = tuple[int, int, int]
Members = tuple[tuple[int, str], ...]

# How the x and y axes place objects: "line" spreads them, "start", "middle" and "end" put them in
# one place, "first" and "second" are the middles of the two halves.
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

# Per placement and group: the axes, and the allowed counts.
_ONE, _SEVERAL, _CIRCLE, _ANY = ([1], [2, 3, 4, 5], [3, 4, 5], [1, 2, 3, 4, 5])
PLACEMENTS: dict[str, tuple[tuple[str | tuple[str, str], list[int]], ...]] = {
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
# Neighbours are 4 modulo 8 apart: in lines because all sides are multiples of 8, on circles through
# each object's position modulo 8.
_GAP = 12
_CIRCLE_PHASES = ((0, 0), (4, 0), (0, 4), (4, 4), (4, 0))


@cache
def layout(placement: str, members: Members) -> tuple[tuple[Box, ...], ...]:
    """Boxes of each group; `members` holds a (count, size name) per group."""
    return tuple(
        _place(axes, count, SIZES[size])
        for (axes, _), (count, size) in zip(PLACEMENTS[placement], members, strict=True)
    )


@cache
def fitting_members(placement: str) -> tuple[Members, ...]:
    """The counts and sizes that fit a placement."""
    counts = product(*(counts for _, counts in PLACEMENTS.get(placement, ())))
    candidates = (
        tuple(zip(numbers, sizes, strict=True))
        for numbers in counts
        for sizes in product(SIZES, repeat=len(numbers))
    )
    return tuple(members for members in candidates if members and _fits(layout(placement, members)))


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


def _fits(layout: tuple[tuple[Box, ...], ...]) -> bool:
    boxes = [box for boxes in layout for box in boxes]
    inside = all(0 <= v <= IMAGE_SIZE - side for x, y, side in boxes for v in (x, y))
    return inside and not any(_overlap(a, b) for a, b in combinations(boxes, 2))


def _overlap(a: Box, b: Box) -> bool:
    return all(a[i] < b[i] + b[2] and b[i] < a[i] + a[2] for i in (0, 1))
