"""One dial from fast to exact: the error of each layer along a ladder of sizes.

A few denoising steps, or images, give the error of every rung in every layer. For a tolerance, each
layer then runs the cheapest rung that holds it, or exact attention.
"""

import json
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

from avq_diffusers.config import AVQConfig, Sizes, check_int
from avq_diffusers.files import atomic_write
from avq_diffusers.hosts.layers import LayerSpec, check_specs
from avq_diffusers.hosts.refinement import EXACT, SizeSchedule
from avq_diffusers.hosts.state import LayerState
from avq_diffusers.hosts.timesteps import NUM_TRAIN_TIMESTEPS

SHOWN_TOLERANCES = (0.05, 0.1, 0.2)
# What measured errors may take of a tolerance: others are a little larger than those of the probes.
MARGIN = 0.9


class Choice(NamedTuple):
    """What a layer runs in a part of the denoising.

    Attributes:
        sizes: of AVQ; None is exact attention.
        error: the measured one.
    """

    sizes: Sizes | None
    error: float

    def __str__(self) -> str:
        return EXACT if self.sizes is None else str(self.sizes)


@dataclass(frozen=True)
class LayerErrors:
    """The errors and costs of a layer, by configuration string.

    Attributes:
        layer: name, level and head shape.
        num_tokens: of the measured calls. With fewer, exact attention runs.
        costs: the time of AVQ over that of exact attention, or on a CPU the columns that a query
            meets over the number of tokens.
        errors: by the training timestep at which a part of the denoising begins, then by
            configuration string.
    """

    layer: LayerSpec
    num_tokens: int
    costs: Mapping[str, float]
    errors: Mapping[int, Mapping[str, float]]

    def __post_init__(self) -> None:
        check_int(f"num_tokens of {self.layer.name}", self.num_tokens, 1)
        if max(self.errors, default=None) != NUM_TRAIN_TIMESTEPS:
            raise ValueError(
                f"errors of {self.layer.name} must begin at timestep {NUM_TRAIN_TIMESTEPS}."
            )
        for errors in self.errors.values():
            if errors.keys() != self.costs.keys():
                raise ValueError(f"errors and costs of {self.layer.name} have different sizes.")
            if not all(0 <= x < math.inf for x in (*errors.values(), *self.costs.values())):
                raise ValueError(f"errors and costs of {self.layer.name} must be finite.")

    def within(self, tolerance: float) -> dict[int, Choice]:
        """The cheapest choice in each part; equal ones in a row are one."""
        limit = MARGIN * tolerance
        choices = {start: self._cheapest(errors, limit) for start, errors in self.errors.items()}
        runs = (list(run) for _, run in groupby(choices, key=lambda start: choices[start].sizes))
        return {run[0]: max(map(choices.__getitem__, run), key=_error_of) for run in runs}

    def _cheapest(self, errors: Mapping[str, float], limit: float) -> Choice:
        held = [x for x, error in errors.items() if error <= limit and self.costs[x] < 1]
        if not held:
            return Choice(None, 0.0)
        cheapest = min(held, key=self.costs.__getitem__)
        return Choice(AVQConfig.parse(cheapest).sizes, errors[cheapest])


@dataclass(frozen=True)
class ErrorProfile:
    """The error of every layer of a model along the ladder of sizes, for `apply_avq`.

    `str()` is a table of what `within` chooses for some tolerances.

    Attributes:
        config: levels, tiles and updates that the errors were measured with.
        layers: errors and costs.

    Raises:
        ValueError: there is no layer, or a layer lacks errors or costs.
    """

    config: AVQConfig = field(repr=False)
    layers: tuple[LayerErrors, ...] = field(repr=False)

    def __post_init__(self) -> None:
        if not self.layers:
            raise ValueError("an error profile must have a layer.")

    def within(self, tolerance: float) -> dict[str, dict[int, Choice]]:
        """The cheapest sizes whose measured error is at most `MARGIN` times a tolerance.

        Args:
            tolerance: the largest relative error of a layer's attention; above 0.

        Returns:
            By layer name, then by the timestep from which on the choice holds.

        Raises:
            TypeError: `tolerance` is not a number.
            ValueError: it is not above 0, or not finite.
        """
        checked_tolerance(tolerance)
        return {one.layer.name: one.within(tolerance) for one in self.layers}

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
        document = {
            "config": asdict(self.config),
            "layers": [
                {
                    "layer": one.layer.stored,
                    "num_tokens": one.num_tokens,
                    "costs": one.costs,
                    "errors": one.errors,
                }
                for one in self.layers
            ],
        }
        with atomic_write(Path(path)) as temporary:
            temporary.write_text(json.dumps(document, indent=1) + "\n")

    @classmethod
    def load(cls, path: str | Path) -> "ErrorProfile":
        """Read a file that `save` wrote.

        Raises:
            OSError: the file cannot be read.
            ValueError: it holds something else.
        """
        try:
            document = json.loads(Path(path).read_text())
            config = AVQConfig.from_dict(document["config"])
            return cls(config, tuple(map(_read, document["layers"])))
        except (
            AttributeError,
            KeyError,
            OverflowError,
            RecursionError,
            TypeError,
            ValueError,
        ) as error:
            raise ValueError(f"{path} is not a saved {cls.__name__}: {error!r}.") from error

    def __str__(self) -> str:
        plans = [self.within(tolerance) for tolerance in SHOWN_TOLERANCES]
        cells = [["layer", *map(str, SHOWN_TOLERANCES)]] + [
            [
                one.layer.name,
                *(", ".join(map(str, plan[one.layer.name].values())) for plan in plans),
            ]
            for one in self.layers
        ]
        widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
        return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in cells)


def chosen_sizes(
    states: Mapping[LayerSpec, LayerState], profile: ErrorProfile, tolerance: float
) -> dict[LayerState, SizeSchedule]:
    """The sizes of layers by timestep that are within a tolerance; errors as in `apply_avq`."""
    plan = profile.within(tolerance)
    profile.check_layers([*states])
    return {
        state: {start: choice.sizes for start, choice in plan[layer.name].items()}
        for layer, state in states.items()
    }


def note_measurements(
    states: Mapping[LayerSpec, LayerState], profile: ErrorProfile, tolerance: float
) -> None:
    """Note in the states of layers which errors were measured, and at how many tokens."""
    plan = profile.within(tolerance)
    num_tokens = {one.layer.name: one.num_tokens for one in profile.layers}
    for layer, state in states.items():
        errors = tuple(choice.error for choice in plan[layer.name].values())
        state.note_measurement(errors, num_tokens[layer.name])


def checked_tolerance(tolerance: Any) -> float:
    """Return a tolerance, or raise a TypeError or ValueError that says why it is none."""
    if not isinstance(tolerance, int | float) or isinstance(tolerance, bool):
        raise TypeError(f"tolerance must be a number such as 0.1, but got {tolerance!r}.")
    if not 0 < tolerance <= sys.float_info.max:  # an int may be larger than any float
        raise ValueError(f"tolerance must be above 0 and finite, but got {tolerance}.")
    return tolerance


def _error_of(choice: Choice) -> float:
    return choice.error


def _read(stored: Mapping[str, Any]) -> LayerErrors:
    for sizes in stored["costs"]:
        AVQConfig.parse(sizes)
    return LayerErrors(
        LayerSpec(**stored["layer"]),
        stored["num_tokens"],
        stored["costs"],
        {int(start): errors for start, errors in stored["errors"].items()},
    )
