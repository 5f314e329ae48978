"""One dial from fast to exact: the error of the model's output.

Layers differ by a factor of 40 in what an error of their attention does to the output, and the
squares of what single layers do add up. So a profile holds the effect on the output and the time of
each size in each layer, and a tolerance gives time to the layers where it removes most error.
"""

import json
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import groupby, pairwise
from pathlib import Path
from typing import Any, NamedTuple

from avq_diffusers.config import AVQConfig, Sizes, check_int
from avq_diffusers.files import atomic_write
from avq_diffusers.hosts.layers import LayerSpec, check_specs
from avq_diffusers.hosts.refinement import EXACT, SizeSchedule
from avq_diffusers.hosts.state import LayerState
from avq_diffusers.hosts.timesteps import NUM_TRAIN_TIMESTEPS

SHOWN_TOLERANCES = (0.01, 0.02, 0.05)
# Units of times, and what less time is called: operations say little of a CPU's time.
MILLISECONDS, OPERATIONS = "ms", "GFLOP"
GAINS = {MILLISECONDS: "times as fast", OPERATIONS: "times as cheap"}


class Choice(NamedTuple):
    """What a layer runs in a part of the denoising.

    Attributes:
        sizes: of AVQ; None is exact attention.
        effect: the error of the output if only this layer ran so, and exact elsewhere.
    """

    sizes: Sizes | None
    effect: float

    def __str__(self) -> str:
        return EXACT if self.sizes is None else str(self.sizes)


@dataclass(frozen=True)
class LayerEffects:
    """What each size does to the model's output in a layer, and the time it takes.

    Attributes:
        layer: name, level and head shape.
        num_tokens: of the measured calls. With fewer, exact attention runs.
        times: per call of the model, by configuration string or "exact", in the unit of the
            profile.
        effects: by the training timestep at which a part of the denoising begins, then by
            configuration string: the error of the output over all calls, if only this layer runs
            these sizes, and only in this part.

    Raises:
        ValueError: a time or effect is missing, negative or not finite.
    """

    layer: LayerSpec
    num_tokens: int
    times: Mapping[str, float]
    effects: Mapping[int, Mapping[str, float]]

    def __post_init__(self) -> None:
        name = self.layer.name
        check_int(f"num_tokens of {name}", self.num_tokens, 1)
        if max(self.effects, default=None) != NUM_TRAIN_TIMESTEPS:
            raise ValueError(f"effects of {name} must begin at timestep {NUM_TRAIN_TIMESTEPS}.")
        for effects in self.effects.values():
            if {*effects, EXACT} != {*self.times}:
                raise ValueError(f"effects and times of {name} have different sizes.")
            if not all(0 <= x < math.inf for x in (*effects.values(), *self.times.values())):
                raise ValueError(f"effects and times of {name} must be finite and not negative.")

    def in_one_part(self) -> "LayerEffects":
        """The effects of sizes that do not change in the denoising."""
        parts = self.effects.values()
        sizes = self.effects[NUM_TRAIN_TIMESTEPS]
        whole = {name: math.hypot(*(effects[name] for effects in parts)) for name in sizes}
        return replace(self, effects={NUM_TRAIN_TIMESTEPS: whole})

    def options(self, start: int, share: float) -> "list[_Option]":
        """The choices of a part from fast to exact, each of which removes error for its time."""
        effects = {**self.effects[start], EXACT: 0.0}
        found: list[_Option] = []
        for option in sorted(
            _Option(share * self.times[sizes], effect**2, sizes)
            for sizes, effect in effects.items()
            if self.times[sizes] <= self.times[EXACT]
        ):
            if not found or option.squared < found[-1].squared:
                found.append(option)
        return found


class _Option(NamedTuple):
    """Of a layer in a part of the denoising."""

    time: float  # of the calls in this part, a share of all
    squared: float  # effect
    sizes: str


class Point(NamedTuple):
    """A point of the curve of time over output error.

    Attributes:
        predicted: error of the output, by the effects of single layers.
        measured: error of the output with all layers so, the largest of the examples.
    """

    predicted: float
    measured: float


@dataclass(frozen=True)
class Allocation:
    """The sizes of every layer within a tolerance.

    Attributes:
        tolerance: that was asked for; None if none was.
        error: predicted error of the output, relative to the exact one.
        time: of the attention of all layers in one call, in the unit of the profile.
        exact_time: of exact attention.
        unit: of times.
        choices: by layer name, then by the timestep from which on the choice holds.
    """

    tolerance: float | None
    error: float
    time: float
    exact_time: float
    unit: str
    choices: Mapping[str, Mapping[int, Choice]] = field(repr=False)

    @property
    def speedup(self) -> float:
        """Time of exact attention over the time of this allocation."""
        return self.exact_time / self.time if self.time else 1.0

    def effect(self, name: str) -> float:
        """The error of the output if AVQ ran in the layer of this name only."""
        return math.hypot(*(choice.effect for choice in self.choices[name].values()))

    def __str__(self) -> str:
        asked = "" if self.tolerance is None else f" (asked: {100 * self.tolerance:g} %)"
        return (
            f"model's output within {100 * self.error:.2g} % of exact attention's{asked}, "
            f"attention {self.speedup:.2g} {GAINS[self.unit]}"
        )


@dataclass(frozen=True)
class ErrorProfile:
    """The effect of every layer's attention on a model's output, for `apply_avq`.

    `str()` shows time over error, and which sizes layers get, for some tolerances.

    Attributes:
        config: levels, tiles and updates that were measured.
        layers: effects and times.
        shares: of the calls of the model, by the timestep at which a part of the denoising begins.
        curve: predicted and measured errors of allocations, which correct those of others.
        unit: of times: `"ms"` on a GPU; elsewhere `"GFLOP"`, counted by columns that queries meet.

    Raises:
        ValueError: there is no layer, two have one name, parts differ between layers, or the unit
            is another.
    """

    config: AVQConfig = field(repr=False)
    layers: tuple[LayerEffects, ...] = field(repr=False)
    shares: Mapping[int, float] = field(repr=False)
    curve: tuple[Point, ...] = field(repr=False, default=())
    unit: str = MILLISECONDS

    def __post_init__(self) -> None:
        names = [one.layer.name for one in self.layers]
        if not names:
            raise ValueError("an error profile must have a layer.")
        if self.unit not in GAINS:
            raise ValueError(f"the unit must be one of {', '.join(GAINS)}, but is {self.unit!r}.")
        if len({*names}) < len(names):
            raise ValueError("an error profile must have each layer once.")
        if any(one.effects.keys() != self.shares.keys() for one in self.layers):
            raise ValueError("an error profile must have the same parts in every layer.")
        for numbers in (self.shares.values(), *self.curve):
            if not all(0 < x < math.inf for x in numbers):
                raise ValueError("shares and errors of an error profile must be above 0.")

    def within(self, tolerance: float) -> Allocation:
        """The fastest sizes whose output error is within a tolerance.

        From the fastest sizes on, layers get the next ones in the order of error removed per time.
        Where that removed more than it had to, layers get faster ones again.

        Args:
            tolerance: the largest error of the output, relative to the exact one; above 0.

        Raises:
            TypeError: `tolerance` is not a number.
            ValueError: it is not above 0, or not finite.
        """
        limit = self._uncorrected(checked_tolerance(tolerance)) ** 2
        parts = {
            (one.layer.name, start): one.options(start, share)
            for one in self.layers
            for start, share in self.shares.items()
        }
        chosen = {place: options[0] for place, options in parts.items()}
        steps = [
            (_gain(*pair), place, pair[1])
            for place, options in parts.items()
            for pair in pairwise(_hull(options))
        ]
        for _, place, option in sorted(steps, key=_by_gain):
            if _squared(chosen) <= limit:
                break
            chosen[place] = option
        for place in sorted(parts, key=lambda place: -chosen[place].time):
            room = limit - _squared(chosen) + chosen[place].squared
            chosen[place] = next(x for x in parts[place] if x.squared <= room or x == chosen[place])
        return self._allocation(chosen, tolerance)

    def config_within(self, tolerance: float) -> AVQConfig:
        """`within` with the same sizes in the whole denoising, as a configuration.

        Distillation needs it: the calls of a batch are from all parts of the denoising.

        Raises:
            TypeError: `tolerance` is not a number.
            ValueError: it is not above 0 or not finite, or all layers need exact attention.
        """
        start = NUM_TRAIN_TIMESTEPS
        layers = tuple(one.in_one_part() for one in self.layers)
        allocation = replace(self, layers=layers, shares={start: 1.0}).within(tolerance)
        chosen = {name: choices[start].sizes for name, choices in allocation.choices.items()}
        exact = tuple(name for name, sizes in chosen.items() if sizes is None)
        if len(exact) == len(chosen):
            raise ValueError(f"within {tolerance} of exact attention, all layers must be exact.")
        overrides = {name: asdict(sizes) for name, sizes in chosen.items() if sizes is not None}
        return replace(self.config, exact=(*self.config.exact, *exact), overrides=overrides)

    def taking(self, time: float) -> Allocation:
        """The sizes of least output error that take at most a time; the fastest if none do."""
        low, high = 1e-6, 1e3
        for _ in range(60):
            middle = (low * high) ** 0.5
            if self.within(middle).time <= time:
                high = middle
            else:
                low = middle
        return self.within(high)

    def uniform(self, sizes: str) -> Allocation:
        """The same sizes in all layers, exact attention where they were not measured."""
        chosen = {}
        for one in self.layers:
            own = sizes if sizes in one.times else EXACT
            for start, share in self.shares.items():
                squared = 0.0 if own == EXACT else one.effects[start][own] ** 2
                chosen[one.layer.name, start] = _Option(share * one.times[own], squared, own)
        return self._allocation(chosen)

    def _allocation(
        self, chosen: Mapping[tuple[str, int], _Option], tolerance: float | None = None
    ) -> Allocation:
        predicted = _squared(chosen) ** 0.5
        return Allocation(
            tolerance,
            predicted * self._correction(predicted),
            math.fsum(x.time for x in chosen.values()),
            math.fsum(self.exact_times.values()),
            self.unit,
            {one.layer.name: _runs(one.layer.name, chosen) for one in self.layers},
        )

    @property
    def exact_times(self) -> dict[str, float]:
        """Times of exact attention by layer name."""
        return {one.layer.name: one.times[EXACT] for one in self.layers}

    def _correction(self, predicted: float) -> float:
        """Measured over predicted error, between the points of the curve by their logarithm."""
        points = sorted(self.curve)
        if not points or predicted <= 0:
            return 1.0
        below = max((x for x in points if x.predicted <= predicted), default=points[0])
        above = min((x for x in points if x.predicted >= predicted), default=points[-1])
        low, high = (x.measured / x.predicted for x in (below, above))
        if above.predicted <= below.predicted:
            return max(low, high)
        way = math.log(predicted / below.predicted) / math.log(above.predicted / below.predicted)
        return low ** (1 - way) * high**way

    def _uncorrected(self, tolerance: float) -> float:
        """The predicted error whose corrected one is a tolerance."""
        low, high = 0.0, 100 * tolerance
        for _ in range(60):
            middle = (low + high) / 2
            if middle * self._correction(middle) <= tolerance:
                low = middle
            else:
                high = middle
        return low

    def check_layers(self, layers: Sequence[LayerSpec]) -> None:
        """Refuse other layers than those that were measured.

        Raises:
            ValueError: a layer is missing, unexpected or of another head shape.
        """
        own = {one.layer.name: one.layer for one in self.layers}
        check_specs("error profile", own, layers, "was measured with")

    def save(self, path: str | Path) -> None:
        """Write a JSON file, in one step.

        Raises:
            OSError: the disk is full or not writable.
        """
        with atomic_write(Path(path)) as temporary:
            temporary.write_text(json.dumps(self.document, indent=1) + "\n")

    @property
    def document(self) -> dict[str, Any]:
        """What a file holds."""
        return {
            "config": asdict(self.config),
            "unit": self.unit,
            "shares": self.shares,
            "curve": [point._asdict() for point in self.curve],
            "layers": [
                {
                    "layer": one.layer.stored,
                    "num_tokens": one.num_tokens,
                    "times": one.times,
                    "effects": one.effects,
                }
                for one in self.layers
            ],
        }

    @classmethod
    def load(cls, path: str | Path) -> "ErrorProfile":
        """Read a file that `save` wrote, whatever the order of its keys.

        Raises:
            OSError: the file cannot be read.
            ValueError: it holds something else.
        """
        try:
            document = json.loads(Path(path).read_text())
            return cls(
                AVQConfig.from_dict(document["config"]),
                tuple(map(_read, document["layers"])),
                _by_start(document["shares"]),
                tuple(Point(**point) for point in document["curve"]),
                document["unit"],
            )
        except (
            AttributeError,
            KeyError,
            OverflowError,
            RecursionError,
            TypeError,
            ValueError,
        ) as error:
            raise ValueError(f"{path} is not a saved {cls.__name__}: {error!r}.") from error

    def plot(self, path: str | Path) -> None:
        """Draw how much faster attention is over the error of the output.

        A line of the sizes that `within` chooses, and points of the same sizes in all layers. Needs
        matplotlib.

        Raises:
            OSError: `path` cannot be written; what was there stays.
        """
        from matplotlib.figure import Figure

        sizes = dict.fromkeys(x for one in self.layers for x in one.times if x != EXACT)
        equal = {x: self.uniform(x) for x in sizes}
        errors = [plan.error for plan in equal.values()]
        low, high = math.log10(min(errors) / 3), math.log10(max(errors))
        tolerances = [10 ** (low + (high - low) * step / 60) for step in range(61)]
        best = [plan for plan in map(self.within, tolerances) if plan.error > 0]
        figure = Figure(figsize=(7, 4.5), layout="constrained")
        axes = figure.subplots()
        axes.plot([x.error for x in best], [x.speedup for x in best], label="within a tolerance")
        axes.plot(errors, [x.speedup for x in equal.values()], "o", label="equal in all layers")
        for name, plan in equal.items():
            place: dict[str, Any] = {"xytext": (6, -8), "textcoords": "offset points"}
            axes.annotate(name, (plan.error, plan.speedup), fontsize=7, **place)
        axes.axhline(1, color="black", linestyle="--", label="exact")
        axes.set(
            xscale="log", xlabel="error of the output", ylabel=f"attention, {GAINS[self.unit]}"
        )
        axes.grid(alpha=0.3)
        axes.legend()
        with atomic_write(Path(path)) as temporary:
            figure.savefig(temporary, dpi=110)

    def __str__(self) -> str:
        plans = [self.within(tolerance) for tolerance in SHOWN_TOLERANCES]
        rows = [
            ["tolerance", *(f"{tolerance:g}" for tolerance in SHOWN_TOLERANCES)],
            ["output error", *(f"{plan.error:.2g}" for plan in plans)],
            [GAINS[self.unit], *(f"{plan.speedup:.2g}" for plan in plans)],
        ] + [
            [name, *(", ".join(map(str, plan.choices[name].values())) for plan in plans)]
            for name in self.exact_times
        ]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)


def chosen_sizes(
    states: Mapping[LayerSpec, LayerState], profile: ErrorProfile, allocation: Allocation
) -> dict[LayerState, SizeSchedule]:
    """The sizes of layers by timestep; errors as in `apply_avq`."""
    profile.check_layers([*states])
    return {
        state: {start: x.sizes for start, x in allocation.choices[layer.name].items()}
        for layer, state in states.items()
    }


def note_allocation(
    states: Mapping[LayerSpec, LayerState], profile: ErrorProfile, allocation: Allocation
) -> None:
    """Note in the states of layers what was chosen, and at how many tokens it was measured."""
    num_tokens = {one.layer.name: one.num_tokens for one in profile.layers}
    for layer, state in states.items():
        state.note_allocation(allocation, num_tokens[layer.name])


def checked_tolerance(tolerance: Any) -> float:
    """A tolerance as a float; a TypeError or ValueError says why it is none."""
    if not isinstance(tolerance, int | float) or isinstance(tolerance, bool):
        raise TypeError(f"tolerance must be a number such as 0.02, but got {tolerance!r}.")
    if not 0 < tolerance <= sys.float_info.max:  # an int may be larger than any float
        raise ValueError(f"tolerance must be above 0 and finite, but got {tolerance}.")
    return float(tolerance)


def _hull(options: Sequence[_Option]) -> list[_Option]:
    """The corners of the convex hull of time and squared effect."""
    hull: list[_Option] = []
    for option in options:
        while len(hull) > 1 and _gain(hull[-2], hull[-1]) <= _gain(hull[-1], option):
            hull.pop()
        hull.append(option)
    return hull


def _squared(chosen: Mapping[tuple[str, int], _Option]) -> float:
    """The squared error of the output; those of layers add up."""
    return math.fsum(option.squared for option in chosen.values())


def _gain(before: _Option, after: _Option) -> float:
    """The squared error that a step removes per time."""
    return (before.squared - after.squared) / (after.time - before.time)


def _by_gain(step: tuple[float, tuple[str, int], _Option]) -> tuple[float, float]:
    """Equal gains in the order of time: the steps of one layer are in that order."""
    gain, _, option = step
    return -gain, option.time


def _runs(name: str, chosen: Mapping[tuple[str, int], _Option]) -> dict[int, Choice]:
    """The choices of a layer; equal ones in a row are one."""
    own = [(start, option) for (layer, start), option in chosen.items() if layer == name]
    found = {}
    for sizes, run in groupby(own, key=lambda part: part[1].sizes):
        (start, first), *others = run
        effect = math.fsum(x.squared for x in (first, *(other for _, other in others))) ** 0.5
        found[start] = Choice(None if sizes == EXACT else AVQConfig.parse(sizes).sizes, effect)
    return found


def _by_start(stored: Mapping[str, Any]) -> dict[int, Any]:
    """Parts of the denoising from the first on; a file may have them in any order."""
    return {start: stored[str(start)] for start in sorted(map(int, stored), reverse=True)}


def _read(stored: Mapping[str, Any]) -> LayerEffects:
    for sizes in stored["times"]:
        if sizes != EXACT:
            AVQConfig.parse(sizes)
    return LayerEffects(
        LayerSpec(**stored["layer"]),
        stored["num_tokens"],
        stored["times"],
        _by_start(stored["effects"]),
    )
