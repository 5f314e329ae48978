"""One dial from fast to exact: the error of the model's output.

The same attention error has up to 40 times the effect on the output in one layer as in another. So
a profile holds the effect and time of each layer at a few thresholds, and a tolerance spends time
on the layers where it removes the most error.
"""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from avq_diffusers.config import AVQConfig, check_int, check_threshold, check_tolerance
from avq_diffusers.files import atomic_write
from avq_diffusers.hosts.core import (
    EXACT,
    NUM_TRAIN_TIMESTEPS,
    LayerSpec,
    LayerState,
    SpecSchedule,
    check_specs,
)
from avq_diffusers.hosts.measuring.allocation import (
    CHOICES,
    FASTER,
    MILLISECONDS,
    THRESHOLDS,
    UNITS,
    Allocation,
    Choice,
    Floats,
    allocate,
    power_law,
)

SHOWN_TOLERANCES = (0.01, 0.02, 0.05)
PLOTTED_TOLERANCE = 0.02
# Far above any effect or time; its square is finite.
_LARGEST = 1e100


class Measured(NamedTuple):
    """A layer in a part of the denoising; each attribute has a value per threshold.

    Attributes:
        effects: error of the model's output if only this layer runs AVQ.
        columns: codewords and keys that a query tile attends to, on average.
        times: time per call of the model, in the profile's unit.
    """

    effects: Sequence[float]
    columns: Sequence[float]
    times: Sequence[float]


class Part(NamedTuple):
    """A part of the denoising.

    Attributes:
        share: its share of the model's calls.
        correction: measured over predicted error of an allocation, the largest over the examples.
    """

    share: float
    correction: float = 1.0


@dataclass(frozen=True)
class LayerEffects:
    """A layer's effect on the model's output and its time.

    Attributes:
        layer: name, level and head shape.
        num_tokens: number of tokens measured. With fewer, exact attention runs.
        exact_time: time of exact attention per call of the model, in the profile's unit.
        parts: by the training timestep at which a part of the denoising begins; empty if AVQ served
            no call.

    Raises:
        ValueError: a number is out of range.
    """

    layer: LayerSpec
    num_tokens: int
    exact_time: float
    parts: Mapping[int, Measured]

    def __post_init__(self) -> None:
        check_int(f"num_tokens of {self.layer.name}", self.num_tokens, 1)
        numbers = [self.exact_time, *(x for part in self.parts.values() for y in part for x in y)]
        if not all(0 <= x < _LARGEST for x in numbers):
            raise ValueError(f"numbers of {self.layer.name} must be finite and not negative.")

    def in_one_part(self, shares: Mapping[int, float]) -> "LayerEffects":
        """With thresholds that stay the same over the denoising: the largest effects."""
        if not self.parts:
            return self
        effects, columns, times = np.array([self.parts[start] for start in shares]).swapaxes(0, 1)
        means = (np.average(x, axis=0, weights=[*shares.values()]) for x in (columns, times))
        whole = Measured(*(x.tolist() for x in (effects.max(axis=0), *means)))
        return replace(self, parts={NUM_TRAIN_TIMESTEPS: whole})


class _Table(NamedTuple):
    """Exact attention, then thresholds, in each layer and a part of the denoising, (L, 1 + G)."""

    effects: Floats
    columns: Floats
    times: Floats


@dataclass(frozen=True)
class ErrorProfile:
    """The effect of every layer's attention on a model's output, for `apply_avq`.

    `str()` shows errors, the columns of layers and, on a GPU, speed, for some tolerances.

    Attributes:
        config: levels, sizes, tiles and updates that were measured.
        layers: effects and times.
        parts: parts of the denoising, by the training timestep at which they begin.
        thresholds: the measured ones, ascending.
        unit: unit of times: `"ms"` on a GPU; elsewhere `"GFLOP"`, from the columns.

    Raises:
        ValueError: there is no layer, two layers share a name, parts differ between layers, a
            number is out of range, or the unit is unknown.
    """

    config: AVQConfig = field(repr=False)
    layers: tuple[LayerEffects, ...] = field(repr=False)
    parts: Mapping[int, Part] = field(repr=False)
    thresholds: tuple[float, ...] = THRESHOLDS
    unit: str = MILLISECONDS

    def __post_init__(self) -> None:
        names = [one.layer.name for one in self.layers]
        if not names:
            raise ValueError("an error profile must have a layer.")
        if self.unit not in UNITS:
            raise ValueError(f"the unit must be one of {', '.join(UNITS)}, but is {self.unit!r}.")
        if len({*names}) < len(names):
            raise ValueError("an error profile must have each layer once.")
        if max(self.parts, default=None) != NUM_TRAIN_TIMESTEPS:
            raise ValueError(f"parts must begin at timestep {NUM_TRAIN_TIMESTEPS}.")
        if any(one.parts and one.parts.keys() != self.parts.keys() for one in self.layers):
            raise ValueError("an error profile must have the same parts in every layer.")
        count = len(self.thresholds)
        if count < 2 or [*self.thresholds] != sorted({*map(check_threshold, self.thresholds)}):
            raise ValueError("an error profile must have two ascending thresholds or more.")
        of_parts = (part for one in self.layers for part in one.parts.values())
        if any(len(values) != count for part in of_parts for values in part):
            raise ValueError("an error profile must have a number for each threshold.")
        if not all(0 < x < _LARGEST for part in self.parts.values() for x in part):
            raise ValueError("shares and corrections of an error profile must be above 0.")

    def within(self, tolerance: float) -> Allocation:
        """The fastest thresholds with which the output error stays within a tolerance.

        Args:
            tolerance: the largest relative error of the output in each part of the denoising; above
                0 and at most 0.5.

        Raises:
            TypeError: `tolerance` is not a number.
            ValueError: it is not above 0 and at most 0.5.
        """
        return self._within(checked_tolerance(tolerance))

    def config_within(self, tolerance: float) -> AVQConfig:
        """`within` with the same thresholds over the whole denoising, as a configuration.

        For distillation, where a batch mixes timesteps from all parts of the denoising.

        Raises:
            TypeError: `tolerance` is not a number.
            ValueError: it is not above 0 and at most 0.5, or all layers need exact attention.
        """
        shares = {start: part.share for start, part in self.parts.items()}
        layers = tuple(one.in_one_part(shares) for one in self.layers)
        whole = Part(1.0, max(part.correction for part in self.parts.values()))
        one_part = replace(self, layers=layers, parts={NUM_TRAIN_TIMESTEPS: whole})
        chosen = {
            name: choices[NUM_TRAIN_TIMESTEPS].spec
            for name, choices in one_part.within(tolerance).choices.items()
        }
        exact = tuple(name for name, spec in chosen.items() if spec is None)
        if len(exact) == len(chosen):
            raise ValueError(f"within {tolerance} of exact attention, all layers must be exact.")
        overrides = {
            name: {"threshold": spec.threshold} for name, spec in chosen.items() if spec is not None
        }
        return replace(self.config, exact=(*self.config.exact, *exact), overrides=overrides)

    def taking(self, time: float) -> Allocation:
        """The thresholds with the least output error within a time; the fastest if none fit."""
        low, high = 1e-6, 1e3
        for _ in range(60):
            middle = (low * high) ** 0.5
            if self._within(middle).time <= time:
                high = middle
            else:
                low = middle
        return self._within(high)

    def uniform(self, threshold: float) -> Allocation:
        """One threshold in all layers that AVQ serves.

        Raises:
            TypeError: `threshold` is not a number.
            ValueError: it is not above 0 and finite.
        """
        if not 0 < check_threshold(threshold) < math.inf:
            raise ValueError(f"threshold must be above 0 and finite, but got {threshold}.")
        is_served = np.array([bool(one.parts) for one in self.layers], dtype=np.intp)
        return self._allocation((threshold,), dict.fromkeys(self.parts, is_served))

    def _within(self, tolerance: float) -> Allocation:
        chosen = {}
        for start, part in self.parts.items():
            table = self._table(start, CHOICES)
            limit = (tolerance / part.correction) ** 2
            chosen[start] = allocate(table.times, table.effects**2, limit)
        return self._allocation(CHOICES, chosen, tolerance)

    def _table(self, start: int, thresholds: Sequence[float]) -> _Table:
        """Exact attention, then these thresholds, in a part; AVQ takes forever where it cannot."""
        shape = len(self.layers), 1 + len(thresholds)
        table = _Table(np.zeros(shape), np.zeros(shape), np.full(shape, np.inf))
        table.columns[:, 0] = [one.num_tokens for one in self.layers]
        table.times[:, 0] = [one.exact_time for one in self.layers]
        served = [row for row, one in enumerate(self.layers) if one.parts]
        for number, values in enumerate(table if served else ()):
            measured = np.array([self.layers[row].parts[start][number] for row in served])
            rises = values is table.effects
            values[served, 1:] = power_law(self.thresholds, measured, thresholds, rises=rises)
        return table

    def _allocation(
        self,
        thresholds: Sequence[float],
        chosen: Mapping[int, NDArray[np.intp]],
        tolerance: float | None = None,
    ) -> Allocation:
        """The allocation of these columns of `_table`, by part and layer."""
        time, errors = 0.0, {}
        choices: dict[str, dict[int, Choice]] = {one.layer.name: {} for one in self.layers}
        specs = [None, *(self.config.spec.changed(threshold=x) for x in thresholds)]
        for start, part in self.parts.items():
            rows = range(len(self.layers))
            picked = (x[rows, chosen[start]].tolist() for x in self._table(start, thresholds))
            effects, columns, times = picked
            time += part.share * math.fsum(times)
            errors[start] = part.correction * math.hypot(*effects)
            for row, parts in enumerate(choices.values()):
                parts[start] = Choice(specs[chosen[start][row]], effects[row], columns[row])
        exact_time = math.fsum(one.exact_time for one in self.layers)
        return Allocation(tolerance, errors, time, exact_time, self.unit, choices)

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
            "thresholds": self.thresholds,
            "parts": {start: part._asdict() for start, part in self.parts.items()},
            "layers": [
                {
                    "layer": one.layer.stored,
                    "num_tokens": one.num_tokens,
                    "exact_time": one.exact_time,
                    "parts": {start: part._asdict() for start, part in one.parts.items()},
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
            layers = tuple(
                LayerEffects(
                    LayerSpec(**stored["layer"]),
                    stored["num_tokens"],
                    stored["exact_time"],
                    _by_start(Measured, stored["parts"]),
                )
                for stored in document["layers"]
            )
            return cls(
                AVQConfig.from_dict(document["config"]),
                layers,
                _by_start(Part, document["parts"]),
                tuple(document["thresholds"]),
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
        """Plot gain against output error, and the columns of each layer at a tolerance of 0.02.

        The gain is that of attention, off a GPU the ratio of operations. A line for the thresholds
        that `within` chooses, points for one threshold in all layers. Needs matplotlib.

        Raises:
            OSError: `path` cannot be written; what was there stays.
        """
        from matplotlib.figure import Figure

        equal = {x: self.uniform(x) for x in self.thresholds}
        errors = [plan.error for plan in equal.values()]
        best = [self._within(x) for x in np.geomspace(min(errors) / 3, max(errors), 60).tolist()]
        curve = [(plan.error, plan.speedup) for plan in best if plan.error > 0]
        figure = Figure(figsize=(13, max(4.5, 0.25 * len(self.layers))), layout="constrained")
        axes, by_layer = figure.subplots(1, 2)
        axes.plot(*zip(*curve, strict=True), label="within a tolerance")
        speedups = [plan.speedup for plan in equal.values()]
        axes.plot(errors, speedups, "o", label="one threshold in all layers")
        for threshold, plan in equal.items():
            place: dict[str, Any] = {"xytext": (6, -8), "textcoords": "offset points"}
            axes.annotate(f"{threshold:g}", (plan.error, plan.speedup), fontsize=7, **place)
        axes.axhline(1, color="black", linestyle="--", label="exact")
        gain = FASTER if self.unit == MILLISECONDS else "operations of exact attention / AVQ's"
        axes.set(xscale="log", xlabel="error of the output", ylabel=f"attention, {gain}")
        axes.grid(alpha=0.3)
        axes.legend()

        plan = self.within(PLOTTED_TOLERANCE)
        names = [*plan.choices]
        for start in self.parts:
            columns = [plan.choices[name][start].columns for name in names]
            by_layer.plot(columns, range(len(names)), "o", label=f"from timestep {start}")
        tokens = [one.num_tokens for one in self.layers]
        by_layer.plot(tokens, range(len(names)), "k|", markersize=10, label="exact")
        by_layer.set(xscale="log", xlabel=f"columns within {PLOTTED_TOLERANCE:g}")
        by_layer.set_yticks(range(len(names)), names, fontsize=6)
        by_layer.invert_yaxis()
        by_layer.legend()
        with atomic_write(Path(path)) as temporary:
            figure.savefig(temporary, dpi=110)

    def __str__(self) -> str:
        plans = [self.within(tolerance) for tolerance in SHOWN_TOLERANCES]
        is_timed = self.unit == MILLISECONDS
        rows = [
            ["tolerance", *(f"{tolerance:g}" for tolerance in SHOWN_TOLERANCES)],
            ["output error", *(f"{plan.error:.2g}" for plan in plans)],
            *([[FASTER, *(f"{plan.speedup:.2g}" for plan in plans)]] if is_timed else []),
            ["columns of", *("" for _ in plans)],
            *(
                [name, *(_columns(plan.choices[name]) for plan in plans)]
                for name in plans[0].choices
            ),
        ]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)


def chosen_specs(
    states: Mapping[LayerSpec, LayerState], profile: ErrorProfile, allocation: Allocation
) -> dict[LayerState, SpecSchedule]:
    """Each layer's options by timestep; raises what `apply_avq` raises."""
    profile.check_layers([*states])
    return {state: _schedule(allocation.choices[layer.name]) for layer, state in states.items()}


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


def _schedule(choices: Mapping[int, Choice]) -> SpecSchedule:
    """The options of a layer; equal ones of consecutive parts are one entry."""
    runs = groupby(choices, key=lambda start: choices[start].spec)
    return {next(starts): spec for spec, starts in runs}


def _columns(choices: Mapping[int, Choice]) -> str:
    """The columns of a layer in each part of the denoising."""
    return ", ".join(EXACT if x.spec is None else f"{x.columns:.0f}" for x in choices.values())


def _by_start(kind: Callable[..., Any], stored: Mapping[str, Mapping[str, Any]]) -> dict[int, Any]:
    """Parts of the denoising, first to last; a file may have them in any order."""
    starts = sorted(map(int, stored), reverse=True)
    return {start: kind(**stored[str(start)]) for start in starts}
