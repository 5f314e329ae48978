"""One layer during exact runs: what thresholds do to the model's output, and what they cost."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias

import numpy as np

from avq_diffusers.attention.api import attend
from avq_diffusers.attention.exact import exact_attention
from avq_diffusers.attention.tensors import Attended, Tensors
from avq_diffusers.config import Spec
from avq_diffusers.hosts.core import (
    EXACT,
    NUM_TRAIN_TIMESTEPS,
    LayerSpec,
    LayerState,
    kept_milliseconds,
)
from avq_diffusers.hosts.measuring.allocation import Floats
from avq_diffusers.hosts.measuring.profile import LayerEffects, Measured

# What layers run in a repeated call, by layer name; the rest run exact attention.
Trial: TypeAlias = Mapping[str, Spec | None]
# Repeats the current call and returns the squared relative error of its output.
Repeat: TypeAlias = Callable[[Trial], float]


@dataclass
class Position:
    """Where exact runs are.

    Attributes:
        thresholds: what is tried, in this order.
        trial: what a repeated call tries; None in other calls, which run exact attention.
        depth: number of open calls of models, one in the other.
        turn: whose layers measure in the current call.
        start: the timestep at which the current part of the denoising begins.
        example: index of the current example.
    """

    thresholds: tuple[float, ...]
    trial: Trial | None = None
    depth: int = 0
    turn: int = 0
    start: int = NUM_TRAIN_TIMESTEPS
    example: int = 0


class MeasuredLayer:
    """A layer during exact runs.

    Args:
        layer: name, level and head shape.
        state: the layer's state during the measurement.
        position: where they are.
        turn: measures the layer in the calls of this turn.
    """

    def __init__(self, layer: LayerSpec, state: LayerState, position: Position, turn: int) -> None:
        self.layer = LayerSpec(**layer.stored)
        self.state, self.position, self.turn = state, position, turn
        self.spec = state.config.spec
        self.num_tokens = 0  # in the first call
        self.exact_time = 0.0  # in the first call
        self.is_timed = False  # whether times are milliseconds, else billions of operations
        self.is_served = False  # whether AVQ can run in the current call
        self.is_probed = False  # whether the current call measures columns and time
        self.seen = 0.0, 0.0  # columns and share of exact attention's time of the last one
        # Per part, a (3, T) array of squared effects and of what was seen for each probed call.
        self.probes: dict[int, list[Floats]] = defaultdict(list)

    def attend(self, tensors: Tensors, spec: Spec, backend: str) -> Attended:
        """Exact attention in place of AVQ, or what a repeated call tries.

        Raises:
            ValueError: the attention output has NaN or infinity.
        """
        trial = self.position.trial
        tried = None if trial is None else trial.get(self.layer.name)
        if tried is not None:
            found = attend(tensors, tried)
            if self.is_probed and found.shown is not None:
                columns = float(found.shown.float().sum(dim=-1).mean())
                time = self._time(tensors, columns, tried)
                self.seen = columns, time / self._time(tensors, tensors.key.shape[2], None)
            return found
        exact = Attended(exact_attention(tensors), EXACT)
        if trial is None and self.position.depth == 1:
            if not exact.output.isfinite().all():
                raise ValueError(
                    f"the attention of {self.layer.name} returns NaN or infinity; measure a model "
                    f"and dtype whose output is finite."
                )
            if not self.num_tokens:
                self.num_tokens, self.is_timed = tensors.key.shape[2], tensors.key.is_cuda
                self.exact_time = self._time(tensors, self.num_tokens, None)
            self.is_served = tensors.key.shape[2] >= self.spec.least_keys
        return exact

    def probe(self, repeat: Repeat) -> None:
        """Measure each threshold in the current call, if it is the layer's turn."""
        is_served, self.is_served = self.is_served, False
        if not is_served or self.position.turn != self.turn:
            return
        found = []
        self.is_probed = True
        for threshold in self.position.thresholds:
            squared = repeat({self.layer.name: self.spec.changed(threshold=threshold)})
            found.append((squared, *self.seen))
        self.is_probed = False
        self.probes[self.position.start].append(np.array(found).T)

    def effects(self, starts: Iterable[int], called: float) -> LayerEffects:
        """What was measured.

        Args:
            starts: the parts. One in which the layer was not measured gets the others combined.
            called: share of calls that went to the layer's model.

        Raises:
            RuntimeError: the layer did not run.
        """
        if self.state.last_call is None:
            raise RuntimeError(f"{self.layer.name} did not run.")
        every = [probe for probes in self.probes.values() for probe in probes]
        parts = {}
        for start in starts if every else ():
            squared, columns, shares = np.mean(self.probes.get(start, every), axis=0)
            rows = (called * squared) ** 0.5, columns, called * self.exact_time * shares
            parts[start] = Measured(*([float(f"{x:.4g}") for x in row] for row in rows))
        return LayerEffects(self.layer, max(1, self.num_tokens), called * self.exact_time, parts)

    def _time(self, tensors: Tensors, columns: float, spec: Spec | None) -> float:
        """The time of exact attention, or of AVQ that shows this many columns on average."""
        key = tensors.key
        if not key.is_cuda:
            # AVQ also compares each key with the parents and with the children of one.
            compared = 0 if spec is None else spec.num_parents + spec.num_children
            return 4e-9 * key.numel() * (columns + compared)
        call = partial(exact_attention if spec is None else partial(attend, spec=spec), tensors)
        what = EXACT if spec is None else f"{spec.long_name}, {columns:.2g} columns"
        name = f"{what}, {tuple(key.shape)} keys in {str(key.dtype).removeprefix('torch.')}"
        return kept_milliseconds(name, key.device, call)
