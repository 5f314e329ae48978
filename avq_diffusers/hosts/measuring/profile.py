"""One dial from fast to exact: the error of the model's output.

The same attention error has up to 40 times the effect on the output in one layer as in another, and
squared effects of single layers add up. So a profile holds each size's effect and time in each
layer, and a tolerance spends time on the layers where it removes the most error.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import groupby, pairwise
from pathlib import Path
from typing import Any, NamedTuple

from avq_diffusers.config import SIZES, AVQConfig, Spec, check_int, check_tolerance, sizes_of
from avq_diffusers.files import atomic_write
from avq_diffusers.hosts.core import (
    EXACT,
    NUM_TRAIN_TIMESTEPS,
    LayerSpec,
    LayerState,
    SpecSchedule,
    check_specs,
)

SHOWN_TOLERANCES = (0.01, 0.02, 0.05)
# Units of times; operations say little about time on a CPU, so no text speaks of a gain in them.
MILLISECONDS, OPERATIONS = UNITS = "ms", "GFLOP"
FASTER = "times as fast"
# Far above any effect or time; its square is finite.
_LARGEST = 1e100


class Choice(NamedTuple):
    """What a layer runs in a part of the denoising.

    Attributes:
        spec: AVQ's options; None is exact attention.
        effect: the output error if only this layer ran so, only in this part.
    """

    spec: Spec | None
    effect: float

    def __str__(self) -> str:
        return EXACT if self.spec is None else str(self.spec)


@dataclass(frozen=True)
class LayerEffects:
    """A layer's effect on the model's output and its time, per size.

    Attributes:
        layer: name, level and head shape.
        num_tokens: number of tokens measured. With fewer, exact attention runs.
        times: time per call of the model, by configuration string or "exact", in the profile's
            unit.
        effects: by the training timestep at which a part of the denoising begins, then by
            configuration string: the output error over all calls if only this layer runs these
            sizes, only in this part.

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
            if not all(0 <= x < _LARGEST for x in (*effects.values(), *self.times.values())):
                raise ValueError(f"effects and times of {name} must be finite and not negative.")

    def in_one_part(self) -> "LayerEffects":
        """The effects of sizes that stay the same over the denoising."""
        parts = self.effects.values()
        sizes = self.effects[NUM_TRAIN_TIMESTEPS]
        whole = {name: math.hypot(*(effects[name] for effects in parts)) for name in sizes}
        return replace(self, effects={NUM_TRAIN_TIMESTEPS: whole})

    def options(self, start: int, share: float) -> "list[_Option]":
        """A part's choices from fast to exact; each removes error for the time it adds."""
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
    """A choice for a layer in a part of the denoising."""

    time: float  # times the part's share of all calls
    squared: float  # effect
    sizes: str


class Point(NamedTuple):
    """A point of the curve of time over output error.

    Attributes:
        predicted: output error predicted from the effects of single layers.
        measured: output error of the whole allocation, the largest over the examples.
    """

    predicted: float
    measured: float


@dataclass(frozen=True)
class Allocation:
    """The sizes of every layer within a tolerance.

    Attributes:
        tolerance: the tolerance asked for, or None.
        error: predicted error of the output, relative to exact attention's.
        time: attention time of all layers in one call, in the profile's unit.
        exact_time: the same for exact attention.
        unit: unit of the times.
        choices: by layer name, then by the timestep from which the choice holds.
    """

    tolerance: float | None
    error: float
    time: float
    exact_time: float
    unit: str
    choices: Mapping[str, Mapping[int, Choice]] = field(repr=False)

    @property
    def speedup(self) -> float:
        """Time of exact attention divided by the time of this allocation."""
        return self.exact_time / self.time if self.time else 1.0

    def effect(self, name: str) -> float:
        """The output error if AVQ ran in this layer only."""
        return math.hypot(*(choice.effect for choice in self.choices[name].values()))

    def __str__(self) -> str:
        asked = "" if self.tolerance is None else f" (asked: {100 * self.tolerance:g} %)"
        output = f"model's output within {100 * self.error:.2g} % of exact attention's{asked}"
        if self.unit == OPERATIONS:
            return output
        return f"{output}, attention {self.speedup:.2g} {FASTER}"


@dataclass(frozen=True)
class ErrorProfile:
    """The effect of every layer's attention on a model's output, for `apply_avq`.

    `str()` shows errors, the sizes that layers get and, on a GPU, speed, for some tolerances.

    Attributes:
        config: levels, tiles and updates that were measured.
        layers: effects and times.
        shares: share of the model's calls, by the timestep at which a part of the denoising begins.
        curve: predicted and measured errors of allocations, used to correct other predictions.
        weights: weight of a squared error, by part like `shares`; empty if all parts count alike.
        unit: unit of times: `"ms"` on a GPU; elsewhere `"GFLOP"`, from the columns per query.

    Raises:
        ValueError: there is no layer, two layers share a name, parts differ between layers or from
            those of `weights`, a number is out of range, or the unit is unknown.
    """

    config: AVQConfig = field(repr=False)
    layers: tuple[LayerEffects, ...] = field(repr=False)
    shares: Mapping[int, float] = field(repr=False)
    curve: tuple[Point, ...] = field(repr=False, default=())
    weights: Mapping[int, float] = field(repr=False, default_factory=dict)
    unit: str = MILLISECONDS

    def __post_init__(self) -> None:
        names = [one.layer.name for one in self.layers]
        if not names:
            raise ValueError("an error profile must have a layer.")
        if self.unit not in UNITS:
            raise ValueError(f"the unit must be one of {', '.join(UNITS)}, but is {self.unit!r}.")
        if len({*names}) < len(names):
            raise ValueError("an error profile must have each layer once.")
        if any(one.effects.keys() != self.shares.keys() for one in self.layers):
            raise ValueError("an error profile must have the same parts in every layer.")
        for numbers in (self.shares.values(), *self.curve):
            if not all(0 < x < math.inf for x in numbers):
                raise ValueError("shares and errors of an error profile must be above 0.")
        if self.weights and self.weights.keys() != self.shares.keys():
            raise ValueError("weights of an error profile must be those of its parts.")
        if not all(0 <= x < math.inf for x in self.weights.values()):
            raise ValueError("weights of an error profile must be finite and not negative.")

    def within(self, tolerance: float) -> Allocation:
        """The fastest sizes whose output error is within a tolerance.

        Starting from the fastest sizes, layers move up in order of error removed per time. Where
        that overshoots, layers move back to faster sizes.

        Args:
            tolerance: the largest output error, relative to exact attention's output; above 0
                and at most 0.5.

        Raises:
            TypeError: `tolerance` is not a number.
            ValueError: it is not above 0 and at most 0.5.
        """
        return self._within(checked_tolerance(tolerance))

    def _within(self, tolerance: float) -> Allocation:
        limit = self._uncorrected(tolerance) ** 2
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
        """`within` with the same sizes over the whole denoising, as a configuration.

        For distillation, where a batch mixes timesteps from all parts of the denoising.

        Raises:
            TypeError: `tolerance` is not a number.
            ValueError: it is not above 0 and at most 0.5, or all layers need exact attention.
        """
        start = NUM_TRAIN_TIMESTEPS
        layers = tuple(one.in_one_part() for one in self.layers)
        allocation = replace(self, layers=layers, shares={start: 1.0}).within(tolerance)
        chosen = {name: choices[start].spec for name, choices in allocation.choices.items()}
        exact = tuple(name for name, spec in chosen.items() if spec is None)
        if len(exact) == len(chosen):
            raise ValueError(f"within {tolerance} of exact attention, all layers must be exact.")
        overrides = {
            name: {size: getattr(spec, size) for size in SIZES}
            for name, spec in chosen.items()
            if spec is not None
        }
        return replace(self.config, exact=(*self.config.exact, *exact), overrides=overrides)

    def taking(self, time: float) -> Allocation:
        """The sizes with the least output error within a time budget; the fastest if none fit."""
        low, high = 1e-6, 1e3
        for _ in range(60):
            middle = (low * high) ** 0.5
            if self._within(middle).time <= time:
                high = middle
            else:
                low = middle
        return self._within(high)

    def uniform(self, sizes: str) -> Allocation:
        """The same sizes in all layers; exact attention where they were not measured."""
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
            {
                one.layer.name: _runs(one.layer.name, chosen, self.config.spec)
                for one in self.layers
            },
        )

    @property
    def exact_times(self) -> dict[str, float]:
        """Times of exact attention by layer name."""
        return {one.layer.name: one.times[EXACT] for one in self.layers}

    def _correction(self, predicted: float) -> float:
        """Measured over predicted error, interpolated between the curve's points in log space."""
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
        """The predicted error that the correction maps to a tolerance."""
        low, high = 0.0, 100 * tolerance
        for _ in range(60):
            middle = (low + high) / 2
            if middle * self._correction(middle) <= tolerance:
                low = middle
            else:
                high = middle
        return low

    def check_layers(self, layers: Sequence[LayerSpec]) -> None:
        """Refuse layers other than the measured ones.

        Raises:
            ValueError: a layer is missing, unexpected or has another head shape.
        """
        own = {one.layer.name: one.layer for one in self.layers}
        check_specs("error profile", own, layers, "was measured with")

    def save(self, path: str | Path) -> None:
        """Write a JSON file atomically.

        Raises:
            OSError: the disk is full or not writable.
        """
        with atomic_write(Path(path)) as temporary:
            temporary.write_text(json.dumps(self.document, indent=1) + "\n")

    @property
    def document(self) -> dict[str, Any]:
        """The content of a saved file."""
        return {
            "config": asdict(self.config),
            "unit": self.unit,
            "shares": self.shares,
            "curve": [point._asdict() for point in self.curve],
            "weights": self.weights,
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
        """Read a file that `save` wrote; its keys may be in any order.

        Raises:
            OSError: the file cannot be read.
            ValueError: the file is not a saved profile.
        """
        try:
            document = json.loads(Path(path).read_text())
            return cls(
                AVQConfig.from_dict(document["config"]),
                tuple(map(_read, document["layers"])),
                _by_start(document["shares"]),
                tuple(Point(**point) for point in document["curve"]),
                _by_start(document["weights"]),
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
        """Plot the attention speedup, off a GPU the ratio of operations, against the output error.

        A line for the sizes that `within` chooses, points for equal sizes in all layers. Needs
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
        best = [plan for plan in map(self._within, tolerances) if plan.error > 0]
        figure = Figure(figsize=(7, 4.5), layout="constrained")
        axes = figure.subplots()
        axes.plot([x.error for x in best], [x.speedup for x in best], label="within a tolerance")
        axes.plot(errors, [x.speedup for x in equal.values()], "o", label="equal in all layers")
        for name, plan in equal.items():
            place: dict[str, Any] = {"xytext": (6, -8), "textcoords": "offset points"}
            axes.annotate(name, (plan.error, plan.speedup), fontsize=7, **place)
        axes.axhline(1, color="black", linestyle="--", label="exact")
        gain = FASTER if self.unit == MILLISECONDS else "operations of exact attention / AVQ's"
        axes.set(xscale="log", xlabel="error of the output", ylabel=f"attention, {gain}")
        axes.grid(alpha=0.3)
        axes.legend()
        with atomic_write(Path(path)) as temporary:
            figure.savefig(temporary, dpi=110)

    def __str__(self) -> str:
        plans = [self.within(tolerance) for tolerance in SHOWN_TOLERANCES]
        is_timed = self.unit == MILLISECONDS
        rows = [
            ["tolerance", *(f"{tolerance:g}" for tolerance in SHOWN_TOLERANCES)],
            ["output error", *(f"{plan.error:.2g}" for plan in plans)],
            *([[FASTER, *(f"{plan.speedup:.2g}" for plan in plans)]] if is_timed else []),
            *(
                [name, *(", ".join(map(str, plan.choices[name].values())) for plan in plans)]
                for name in self.exact_times
            ),
        ]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)


def chosen_specs(
    states: Mapping[LayerSpec, LayerState], profile: ErrorProfile, allocation: Allocation
) -> dict[LayerState, SpecSchedule]:
    """Each layer's options by timestep; raises what `apply_avq` raises."""
    profile.check_layers([*states])
    return {
        state: {start: x.spec for start, x in allocation.choices[layer.name].items()}
        for layer, state in states.items()
    }


def note_allocation(
    states: Mapping[LayerSpec, LayerState], profile: ErrorProfile, allocation: Allocation
) -> None:
    """Record the allocation, and the number of tokens it was measured at, in the layers' states."""
    num_tokens = {one.layer.name: one.num_tokens for one in profile.layers}
    for layer, state in states.items():
        state.note_allocation(allocation, num_tokens[layer.name])


def checked_tolerance(tolerance: Any) -> float:
    """The tolerance as a float; raises TypeError or ValueError if it is invalid."""
    if not isinstance(tolerance, int | float) or isinstance(tolerance, bool):
        raise TypeError(f"tolerance must be a number such as 0.02, but got {tolerance!r}.")
    check_tolerance("tolerance", tolerance)
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
    """The squared output error: the sum over layers."""
    return math.fsum(option.squared for option in chosen.values())


def _gain(before: _Option, after: _Option) -> float:
    """Squared error removed per unit of time."""
    return (before.squared - after.squared) / (after.time - before.time)


def _by_gain(step: tuple[float, tuple[str, int], _Option]) -> tuple[float, float]:
    """Sort key; ties go by time, the order of a layer's own steps."""
    gain, _, option = step
    return -gain, option.time


def _runs(name: str, chosen: Mapping[tuple[str, int], _Option], spec: Spec) -> dict[int, Choice]:
    """The choices of a layer; consecutive equal ones are merged."""
    own = [(start, option) for (layer, start), option in chosen.items() if layer == name]
    found = {}
    for sizes, run in groupby(own, key=lambda part: part[1].sizes):
        (start, first), *others = run
        effect = math.fsum(x.squared for x in (first, *(other for _, other in others))) ** 0.5
        found[start] = Choice(None if sizes == EXACT else spec.resized(sizes), effect)
    return found


def _by_start(stored: Mapping[str, Any]) -> dict[int, Any]:
    """Parts of the denoising, first to last; a file may have them in any order."""
    return {start: stored[str(start)] for start in sorted(map(int, stored), reverse=True)}


def _read(stored: Mapping[str, Any]) -> LayerEffects:
    for sizes in stored["times"]:
        if sizes != EXACT:
            sizes_of(sizes)
    return LayerEffects(
        LayerSpec(**stored["layer"]),
        stored["num_tokens"],
        stored["times"],
        _by_start(stored["effects"]),
    )
