"""Which threshold each layer gets within a tolerance, and what that costs.

Effect and time of a layer are smooth in the threshold, so three measured ones give all others by
power laws. Squared effects of single layers add up. So for one multiplier, each layer takes the
threshold with the least time + multiplier x squared effect, and the multiplier decides all.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from avq_diffusers.config import Spec
from avq_diffusers.hosts.core import EXACT, SpecSchedule

Floats: TypeAlias = NDArray[np.float64]
# The measured thresholds, ascending.
THRESHOLDS = (2.5e-5, 1.5e-4, 1e-3)
# Thresholds that layers may get; 20 gain less than 0.5 % of the time. Where blocks are compiled one
# by one, each is a graph, and seven with exact attention are as many as PyTorch allows.
PER_DECADE = 3
# Units of times; operations say little about time on a CPU, so no text speaks of a gain in them.
MILLISECONDS, OPERATIONS = UNITS = "ms", "GFLOP"
FASTER = "times as fast"
_TINY = 1e-12  # effects below this count as none


class Choice(NamedTuple):
    """What a layer runs in a part of the denoising.

    Attributes:
        spec: AVQ's options; None is exact attention.
        effect: the output error if only this layer ran so.
        columns: codewords and keys that a query tile attends to, on average.
    """

    spec: Spec | None
    effect: float
    columns: float

    def __str__(self) -> str:
        return EXACT if self.spec is None else str(self.spec)


@dataclass(frozen=True)
class Allocation:
    """The thresholds of every layer within a tolerance.

    Attributes:
        tolerance: the tolerance asked for, or None.
        errors: predicted errors of the output, relative to exact attention's, by the training
            timestep at which a part of the denoising begins.
        time: attention time of all layers in one call, in the profile's unit.
        exact_time: the same for exact attention.
        unit: unit of the times.
        choices: by layer name, then by the timestep from which the choice holds.
        num_tokens: by layer name, how many tokens were measured.
    """

    tolerance: float | None
    errors: Mapping[int, float]
    time: float
    exact_time: float
    unit: str
    choices: Mapping[str, Mapping[int, Choice]] = field(repr=False)
    num_tokens: Mapping[str, int] = field(repr=False)

    @property
    def error(self) -> float:
        """The predicted error in the part where it is largest."""
        return max(self.errors.values())

    @property
    def speedup(self) -> float:
        """Time of exact attention divided by the time of this allocation."""
        return self.exact_time / self.time if self.time else 1.0

    def effect(self, name: str) -> float:
        """The output error if AVQ ran in this layer only, in the part where it is largest."""
        return max(choice.effect for choice in self.choices[name].values())

    def schedule(self, name: str) -> SpecSchedule:
        """A layer's options by timestep; equal ones of consecutive parts are one entry."""
        choices = self.choices[name]
        parts = groupby(choices, key=lambda start: choices[start].spec)
        return {next(starts): spec for spec, starts in parts}

    def __str__(self) -> str:
        asked = "" if self.tolerance is None else f" (asked: {100 * self.tolerance:g} %)"
        output = f"model's output within {100 * self.error:.2g} % of exact attention's{asked}"
        if self.unit == OPERATIONS:
            return output
        return f"{output}, attention {self.speedup:.2g} {FASTER}"


def choices_of(thresholds: Sequence[float]) -> list[float]:
    """What layers may get besides exact attention: thresholds down to a quarter of the finest
    measured one."""
    first = math.ceil(PER_DECADE * math.log10(thresholds[0] / 4))
    last = math.floor(PER_DECADE * math.log10(thresholds[-1]))
    return [float(f"{10 ** (step / PER_DECADE):.2g}") for step in range(first, last + 1)]


def power_laws(thresholds: Sequence[float], measured: Floats, wanted: Sequence[float]) -> Floats:
    """Values at other thresholds: straight lines between logarithms, and beyond the outer ones.

    Args:
        thresholds: at least two, ascending.
        measured: (3, T) effects, which rise with the threshold, and columns and times, which fall;
            one that does not takes its finer neighbour's.
        wanted: G thresholds.

    Returns:
        (3, G).
    """
    effects, *costs = np.maximum(measured, _TINY)
    values = [np.maximum.accumulate(effects), *map(np.minimum.accumulate, costs)]
    known, sought, logs = np.log(thresholds), np.log(wanted), np.log(values)
    slopes = np.diff(logs) / np.diff(known)
    piece = (np.searchsorted(known, sought) - 1).clip(0, len(known) - 2)
    result: Floats = np.exp(logs[:, piece] + slopes[:, piece] * (sought - known[piece]))
    return result


def allocate(times: Floats, squared: Floats, limit: float) -> NDArray[np.intp]:
    """The fastest choices whose squared effects sum to at most `limit`, as indices (L,).

    No choices with as small a sum are faster. Where a layer's next choice is far better, as exact
    attention can be, the sum may stay below the limit.

    Args:
        times, squared: (L, G), time and squared effect of each layer's choices; one has no effect.
        limit: at least 0.
    """
    low, high = -100.0, 100.0  # logarithms of the multiplier

    def choose(log_multiplier: float) -> NDArray[np.intp]:
        return (times + np.exp(log_multiplier) * squared).argmin(axis=1)

    for _ in range(60):
        middle = (low + high) / 2
        if np.take_along_axis(squared, choose(middle)[:, None], axis=1).sum() <= limit:
            high = middle
        else:
            low = middle
    return choose(high)
