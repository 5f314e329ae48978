"""One dial from fast to exact: the error of each layer along a ladder of sizes.

A few denoising steps, or images, give the error of every rung in every layer. For a tolerance, each
layer then runs the cheapest rung that holds it, or exact attention.
"""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

from diffusers import DiffusionPipeline
from torch import nn

from avq_diffusers.config import AVQConfig, Sizes, check_int
from avq_diffusers.files import atomic_write
from avq_diffusers.plugin.codebooks import AVQCodebooks
from avq_diffusers.plugin.layer_state import AVQSource, LayerState, applied_states, check_source
from avq_diffusers.plugin.layers import Layer, LayerSpec
from avq_diffusers.plugin.probe import load_profile
from avq_diffusers.plugin.refinement import EXACT, set_sizes
from avq_diffusers.plugin.tensor_files import check_names
from avq_diffusers.plugin.timesteps import NUM_TRAIN_TIMESTEPS

SHOWN_TOLERANCES = (0.05, 0.1, 0.2)
# What measured errors may take of a tolerance: others are a little larger than those of the probes.
MARGIN = 0.9
WITHOUT_CODEBOOKS = (
    "a tolerance chooses sizes of AVQ with codewords of each call; apply it without codebooks."
)


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
        check_names("error profile of another model", own, [layer.name for layer in layers])
        for layer in layers:
            measured = own[layer.name]
            if (layer.num_heads, layer.head_dim) != (measured.num_heads, measured.head_dim):
                raise ValueError(
                    f"error profile of another model: {layer.name} has {layer.num_heads} heads of "
                    f"dim {layer.head_dim}, but was measured with {measured.num_heads} of dim "
                    f"{measured.head_dim}."
                )

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
        return load_profile(
            cls,
            path,
            lambda document: cls(
                AVQConfig.from_dict(document["config"]), tuple(map(_read, document["layers"]))
            ),
        )

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


def set_tolerance(
    pipe: DiffusionPipeline | nn.Module, profile: ErrorProfile, tolerance: float
) -> None:
    """Set the sizes of a pipeline with AVQ, without codebooks, to those within a tolerance.

    Raises:
        TypeError: `tolerance` is not a number.
        ValueError: it is not above 0, or the profile is of other layers.
    """
    states = applied_states(pipe)
    choices = chosen_sizes(states, profile, tolerance)
    set_sizes(
        pipe,
        {
            state: {start: choice.sizes for start, choice in parts.items()}
            for state, parts in choices.items()
        },
    )
    _note_measurements(states, profile, choices)


def set_constant_sizes(
    states: Mapping[Layer, LayerState], profile: ErrorProfile, tolerance: float | None
) -> None:
    """Set the sizes of layers without timesteps to those within a tolerance.

    Raises:
        TypeError, ValueError: as `set_tolerance`, or the profile has several parts.
    """
    choices = chosen_sizes(states, profile, tolerance)
    if any(len(one.errors) > 1 for one in profile.layers):
        raise ValueError("error profile of another model: its errors change with timesteps.")
    for state, parts in choices.items():
        (choice,) = parts.values()
        state.set_sizes(choice.sizes)
    _note_measurements(states, profile, choices)


def _note_measurements(
    states: Mapping[Layer, LayerState],
    profile: ErrorProfile,
    choices: Mapping[LayerState, Mapping[int, Choice]],
) -> None:
    num_tokens = {one.layer.name: one.num_tokens for one in profile.layers}
    for layer, state in states.items():
        errors = tuple(choice.error for choice in choices[state].values())
        state.note_measurement(errors, num_tokens[layer.name])


def chosen_sizes(
    states: Mapping[Layer, LayerState], profile: ErrorProfile, tolerance: float | None
) -> dict[LayerState, dict[int, Choice]]:
    """What layers run within a tolerance, by the start of each part.

    Raises:
        TypeError, ValueError: as `set_tolerance`.
    """
    plan = profile.within(checked_tolerance(tolerance))
    profile.check_layers([*states])
    return {state: plan[layer.name] for layer, state in states.items()}


def checked_tolerance(tolerance: Any) -> float:
    """Return a tolerance.

    Raises:
        TypeError: it is not a number.
        ValueError: it is not above 0, or not finite.
    """
    if not isinstance(tolerance, int | float) or isinstance(tolerance, bool):
        raise TypeError(f"tolerance must be a number such as 0.1, but got {tolerance!r}.")
    if not 0 < tolerance < math.inf:
        raise ValueError(f"tolerance must be above 0 and finite, but got {tolerance}.")
    return tolerance


def resolve_source(
    source: AVQSource | ErrorProfile | None,
    tolerance: float | None,
    examples: Any,
    measurement: Mapping[str, Any],
    *,
    name: str,
    what: str,
    measure: Callable[..., ErrorProfile],
) -> AVQSource | ErrorProfile | None:
    """What `apply_avq` runs: a profile if there is a tolerance, else `source`.

    Args:
        source, tolerance: arguments of `apply_avq`.
        examples: what errors are measured on, None if nothing was given.
        measurement: further arguments of `measure`.
        name: the parameter of `examples`.
        what: the examples in words.
        measure: takes `examples`, `source` and `measurement`.

    Raises:
        TypeError, ValueError: as `apply_avq`.
    """
    given = [name] * (examples is not None) + [*measurement]
    if tolerance is None and not isinstance(source, ErrorProfile):
        if given:
            raise TypeError(
                f"{', '.join(given)} belong to the measurement of a tolerance; pass tolerance=0.1, "
                f"or drop them."
            )
        check_source(source)
        return source
    checked_tolerance(tolerance)
    if isinstance(source, ErrorProfile):
        if given:
            raise TypeError(
                f"an ErrorProfile is measured already; drop {name} and other arguments."
            )
        return source
    check_source(source)
    if isinstance(source, AVQCodebooks):
        raise ValueError(WITHOUT_CODEBOOKS)
    if examples is None:
        raise TypeError(f"a tolerance is measured on {what}; pass {name}, or an ErrorProfile.")
    return measure(examples, source, **measurement)


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
