"""One dial from fast to exact: the error of the model's output.

The same attention error has up to 40 times the effect on the output in one layer as in another. So
a profile holds the effect and time of each layer at a few thresholds, and a tolerance spends time
on the layers where it removes the most error.
"""

import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from avq_diffusers.config import (
    LARGEST_COUNT,
    LARGEST_TOLERANCE,
    AVQConfig,
    check_int,
    check_threshold,
    check_tolerance,
)
from avq_diffusers.files import atomic_write
from avq_diffusers.hosts.core import (
    EXACT,
    NUM_TRAIN_TIMESTEPS,
    LayerSpec,
    as_table,
    check_specs,
    short_names,
)
from avq_diffusers.hosts.measuring.allocation import (
    FASTER,
    MILLISECONDS,
    UNITS,
    Allocation,
    Choice,
    Floats,
    allocate,
    choices_of,
    power_laws,
)

SHOWN_TOLERANCES = (0.01, 0.02, 0.05)
PLOTTED_TOLERANCE = 0.02
# Shares of a tolerance that the first part of the denoising and those before the last keep to:
# an early error changes what is drawn, a late one hardly.
FIRST_SHARE, MIDDLE_SHARE = 0.1, 0.5
# Far above any effect or time; its square is finite.
_LARGEST = 1e100
# What a file raises that is not a saved profile.
_UNREADABLE = ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError


@dataclass(frozen=True)
class Measured:
    """A layer in a part of the denoising; each attribute has a value per threshold.

    Attributes:
        effects: error of the model's output if only this layer runs AVQ.
        columns: codewords and keys that a query tile attends to, on average.
        times: time per call of the model, in the profile's unit.
    """

    effects: Sequence[float]
    columns: Sequence[float]
    times: Sequence[float]

    @property
    def rows(self) -> Floats:
        """The attributes as (3, T)."""
        return np.array([self.effects, self.columns, self.times], dtype=np.float64)


@dataclass(frozen=True)
class Part:
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
    """

    layer: LayerSpec
    num_tokens: int
    exact_time: float
    parts: Mapping[int, Measured]


@dataclass(frozen=True)
class ErrorProfile:
    """The effect of every layer's attention on a model's output, for `apply_avq`.

    `str()` shows errors, the columns of layers and, on a GPU, speed, for some tolerances.

    Attributes:
        config: levels, sizes and tiles that were measured.
        layers: effects and times.
        parts: parts of the denoising, by the training timestep at which they begin.
        thresholds: the measured ones, ascending.
        unit: unit of times: `"ms"` on a GPU; elsewhere `"GFLOP"`, from the columns.
        margin: how far below a tolerance predicted errors stay, as a divisor: other examples than
            the measured ones have larger errors.

    Raises:
        ValueError: there is no layer, two layers share a name, parts differ between layers, a
            number is missing or out of range, or the unit is unknown.
    """

    config: AVQConfig = field(repr=False)
    layers: tuple[LayerEffects, ...] = field(repr=False)
    parts: Mapping[int, Part] = field(repr=False)
    thresholds: tuple[float, ...]
    unit: str = MILLISECONDS
    margin: float = 1.0

    def __post_init__(self) -> None:
        rows = [part.rows for one in self.layers for part in one.parts.values()]
        numbers = [one.exact_time for one in self.layers] + [x for row in rows for x in row.flat]
        part_values = [x for part in self.parts.values() for x in (part.share, part.correction)]
        ascending = sorted({check_threshold(x) for x in self.thresholds} - {0, math.inf})
        names = {one.layer.name for one in self.layers}
        for one in self.layers:
            check_int(f"num_tokens of {one.layer.name}", one.num_tokens, 1, LARGEST_COUNT)
        for holds, rule in (
            (len(names) == len(self.layers) > 0, "layers of different names"),
            (self.unit in UNITS, f"one of the units {', '.join(UNITS)}"),
            (max(self.parts, default=0) == NUM_TRAIN_TIMESTEPS, "a part from timestep 1000"),
            (
                all(not x.parts or x.parts.keys() == self.parts.keys() for x in self.layers),
                "the same parts in every layer",
            ),
            (len(ascending) > 1 and ascending == [*self.thresholds], "rising thresholds"),
            (all(x.shape == (3, len(ascending)) for x in rows), "a number for each threshold"),
            (all(0 <= x < _LARGEST for x in numbers), "finite numbers that are not negative"),
            (all(0 < x < _LARGEST for x in part_values), "shares and corrections above 0"),
            (1 <= self.margin < _LARGEST, "a margin of at least 1"),
        ):
            if not holds:
                raise ValueError(f"an error profile must have {rule}.")

    def within(self, tolerance: float) -> Allocation:
        """The fastest thresholds with which the output error stays within a tolerance.

        Args:
            tolerance: the largest relative error of the output; above 0 and at most 0.5. Of several
                parts of the denoising, the first keeps to a tenth and those before the last to half
                of it: errors there change the image more.

        Raises:
            TypeError: `tolerance` is not a number.
            ValueError: it is not above 0 and at most 0.5.
        """
        return self.bounded(self.limits(tolerance), tolerance)

    def limits(self, tolerance: float) -> dict[int, float]:
        """The largest output error of each part within a tolerance, as in `within`."""
        tolerance = check_tolerance(tolerance)
        number = len(self.parts)
        shares = [FIRST_SHARE, *[MIDDLE_SHARE] * (number - 2), 1.0][-number:]
        return {x: tolerance * share for x, share in zip(self.parts, shares, strict=True)}

    def bounded(self, limits: Mapping[int, float], tolerance: float | None = None) -> Allocation:
        """The fastest thresholds with which the output error of each part stays within its limit.

        Args:
            limits: by part.
            tolerance: what they come from.
        """
        choices, chosen = choices_of(self.thresholds), {}
        for start, part in self.parts.items():
            effects, _, times = self._table(start, choices)
            limit = limits[start] / (self.margin * part.correction)
            chosen[start] = allocate(times, effects**2, limit**2)
        return self._allocation(choices, chosen, tolerance)

    def config_within(self, tolerance: float) -> AVQConfig:
        """`within` with each layer's finest threshold over the denoising, as a configuration.

        For distillation, where a batch mixes timesteps from all parts of the denoising.

        Raises:
            TypeError: `tolerance` is not a number.
            ValueError: it is not above 0 and at most 0.5, or all layers need exact attention.
        """
        finest = {
            name: min(0.0 if x.spec is None else x.spec.threshold or 0.0 for x in parts.values())
            for name, parts in self.within(tolerance).choices.items()
        }
        exact = tuple(name for name, threshold in finest.items() if not threshold)
        if len(exact) == len(finest):
            raise ValueError(f"within {tolerance} of exact attention, all layers must be exact.")
        overrides = {name: {"threshold": x} for name, x in finest.items() if x}
        return replace(self.config, exact=(*self.config.exact, *exact), overrides=overrides)

    def uniform(self, threshold: float) -> Allocation:
        """One threshold, above 0, in all layers that AVQ serves."""
        is_served = np.array([bool(one.parts) for one in self.layers], dtype=np.intp)
        return self._allocation((threshold,), dict.fromkeys(self.parts, is_served))

    def _table(self, start: int, thresholds: Sequence[float]) -> Floats:
        """Effects, columns and times, (3, L, 1 + G), of exact attention and of thresholds."""
        table = np.zeros((3, len(self.layers), 1 + len(thresholds)))
        table[2, :, 1:] = np.inf  # where AVQ serves no call
        for row, one in enumerate(self.layers):
            table[1:, row, 0] = one.num_tokens, one.exact_time
            if one.parts:
                known = one.parts[start].rows
                table[:, row, 1:] = power_laws(self.thresholds, known, thresholds)
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
            table = self._table(start, thresholds)[:, range(len(self.layers)), chosen[start]]
            effects, columns, times = table.tolist()
            time += part.share * math.fsum(times)
            errors[start] = part.correction * math.hypot(*effects)
            for row, parts in enumerate(choices.values()):
                parts[start] = Choice(specs[chosen[start][row]], effects[row], columns[row])
        exact_time = math.fsum(one.exact_time for one in self.layers)
        num_tokens = {one.layer.name: one.num_tokens for one in self.layers}
        return Allocation(tolerance, errors, time, exact_time, self.unit, choices, num_tokens)

    def check_layers(self, layers: Sequence[LayerSpec]) -> None:
        """Refuse layers other than the measured ones.

        Raises:
            ValueError: a layer is missing, unexpected or has another head shape.
        """
        layers_by_name = {one.layer.name: one.layer for one in self.layers}
        check_specs("error profile", layers_by_name, layers, "was measured with")

    def save(self, path: str | Path) -> None:
        """Write a JSON file atomically, with the numbers of a list on one line.

        Raises:
            OSError: the disk is full or not writable.
        """
        text = json.dumps(asdict(self), indent=1)
        text = re.sub(r"\[[^][{}]*\]", lambda found: " ".join(found[0].split()), text)
        with atomic_write(Path(path), shared=True) as temporary:
            temporary.write_text(text + "\n")

    @classmethod
    def load(cls, path: str | Path) -> "ErrorProfile":
        """Read a file that `save` wrote; its keys may be in any order.

        Raises:
            OSError: the file cannot be read.
            ValueError: the file is not a saved profile.
        """
        try:
            stored = json.loads(Path(path).read_text())
            layers = tuple(
                LayerEffects(
                    LayerSpec(**one.pop("layer")),
                    parts=_by_start(Measured, one.pop("parts")),
                    **one,
                )
                for one in stored.pop("layers")
            )
            config = AVQConfig.from_dict(stored.pop("config"))
            parts = _by_start(Part, stored.pop("parts"))
            thresholds = tuple(map(float, stored.pop("thresholds")))
            return cls(config, layers, parts, thresholds, **stored)
        except _UNREADABLE as error:
            raise ValueError(f"{path} is not a saved {cls.__name__}: {error!r}.") from error

    def plot(self, path: str | Path) -> None:
        """Plot gain against output error, and the columns of each layer at a tolerance of 0.02.

        The gain is that of attention, off a GPU the ratio of operations. A line for the thresholds
        that `within` chooses, points for one threshold in all layers. Needs matplotlib.

        Raises:
            OSError: `path` cannot be written; what was there stays.
        """
        from matplotlib.figure import Figure

        figure = Figure(figsize=(13, max(4.5, 0.25 * len(self.layers))), layout="constrained")
        axes, layer_axes = figure.subplots(1, 2)
        equal = {threshold: self.uniform(threshold) for threshold in self.thresholds}
        errors = [max(plan.error, 1e-9) for plan in equal.values()]
        least, most = (min(x, LARGEST_TOLERANCE) for x in (min(errors) / 3, max(errors)))
        best = [self.within(min(x, most)) for x in np.geomspace(least, most, 60).tolist()]
        shown = [(plan.error, plan.speedup) for plan in best if plan.error > 0]
        axes.plot([x for x, _ in shown], [y for _, y in shown], label="within a tolerance")
        for threshold, plan in equal.items():
            axes.plot(plan.error, plan.speedup, "o", label=f"{threshold:g} in all layers")
        axes.axhline(1, color="black", linestyle="--", label="exact")
        gain = FASTER if self.unit == MILLISECONDS else "operations of exact attention / AVQ's"
        axes.set(xscale="log", xlabel="error of the output", ylabel=f"attention, {gain}")

        choices = self.within(PLOTTED_TOLERANCE).choices
        rows = range(len(choices))
        for start in self.parts:
            columns = [parts[start].columns for parts in choices.values()]
            layer_axes.plot(columns, rows, "o", label=f"from timestep {start}")
        layer_axes.plot([one.num_tokens for one in self.layers], rows, "k|", label="exact")
        layer_axes.set(xscale="log", xlabel=f"columns within a tolerance of {PLOTTED_TOLERANCE:g}")
        layer_axes.set_yticks(rows, short_names([*choices]), fontsize=8)
        layer_axes.invert_yaxis()
        for panel in (axes, layer_axes):
            panel.grid(alpha=0.3)
            panel.legend()
        with atomic_write(Path(path)) as temporary:
            figure.savefig(temporary, dpi=110)

    def __str__(self) -> str:
        plans = [self.within(tolerance) for tolerance in SHOWN_TOLERANCES]
        rows = [
            ["tolerance", *(f"{tolerance:g}" for tolerance in SHOWN_TOLERANCES)],
            ["output error", *(f"{plan.error:.2g}" for plan in plans)],
        ]
        if self.unit == MILLISECONDS:
            rows.append([FASTER, *(f"{plan.speedup:.2g}" for plan in plans)])
        rows.append(["columns of", *("" for _ in plans)])
        for name in plans[0].choices:
            rows.append([name, *(_columns(plan.choices[name]) for plan in plans)])
        return as_table(rows)


def _columns(choices: Mapping[int, Choice]) -> str:
    """The columns of a layer in each part of the denoising."""
    return ", ".join(EXACT if x.spec is None else f"{x.columns:.0f}" for x in choices.values())


def _by_start(kind: Callable[..., Any], stored: Mapping[str, Mapping[str, Any]]) -> dict[int, Any]:
    """Parts of the denoising, first to last; a file may have them in any order."""
    starts = sorted(map(int, stored), reverse=True)
    return {start: kind(**stored[str(start)]) for start in starts}
