"""One layer during exact runs: what thresholds do to the model's output, and what they cost."""

from collections import defaultdict
from collections.abc import Callable, Iterable

import numpy as np
from torch import Tensor

from avq_diffusers.attention.api import attend
from avq_diffusers.attention.exact import exact_attention
from avq_diffusers.attention.tensors import Attended, Tensors
from avq_diffusers.config import Spec
from avq_diffusers.hosts.core import EXACT, LayerSpec, LayerState, kept_milliseconds
from avq_diffusers.hosts.measuring.allocation import THRESHOLDS, Floats
from avq_diffusers.hosts.measuring.exact_run import ExactRun, Repeat
from avq_diffusers.hosts.measuring.profile import LayerEffects, Measured


class MeasuredLayer:
    """A layer during exact runs.

    Args:
        layer: name, level and head shape.
        state: the layer's state during the measurement.
        spec: sizes, tiles and updates.
        run: the model's progress.
        turn: (i, n) measures the layer in calls i, i + n, i + 2 n and so on.

    Attributes:
        num_tokens: number of tokens in the first call; 0 before.
        exact_time: time of exact attention in that call: milliseconds on a GPU, elsewhere billions
            of operations.
        is_timed: whether times are milliseconds.
        is_served: whether the current call can run AVQ.
        is_probed: whether the current call measures columns and time.
        seen: columns and time of the last AVQ call that did.
        probes: per part, a (3, T) array of squared effects, columns and times for each probed call.
    """

    def __init__(
        self,
        layer: LayerSpec,
        state: LayerState,
        spec: Spec,
        run: ExactRun,
        turn: tuple[int, int],
    ) -> None:
        self.layer = LayerSpec(**layer.stored)
        self.state = state
        self.spec = spec
        self.run = run
        self.turn = turn
        self.num_tokens = 0
        self.exact_time = 0.0
        self.is_timed = self.is_served = self.is_probed = False
        self.seen = 0.0, 0.0
        self.probes: dict[int, list[Floats]] = defaultdict(list)

    def attend(self, tensors: Tensors, spec: Spec, backend: str) -> Attended:
        """Exact attention in place of AVQ, or what a repeated call tries.

        Raises:
            ValueError: the attention output has NaN or infinity.
        """
        if self.run.trial is not None:
            tried = self.run.trial.get(self.layer.name)
            if tried is None:
                return Attended(exact_attention(tensors), EXACT)
            found = attend(tensors, tried)
            if self.is_probed and found.shown is not None:
                columns = float(found.shown.float().sum(dim=-1).mean())
                self.seen = columns, self._time(tensors, columns, tried)
            return found
        exact = exact_attention(tensors)
        if self.run.depth > 1:
            return Attended(exact, EXACT)
        if not exact.isfinite().all():
            raise ValueError(
                f"the attention of {self.layer.name} returns NaN or infinity; measure a model and "
                f"dtype whose output is finite."
            )
        if not self.num_tokens:
            self.num_tokens = tensors.key.shape[2]
            self.is_timed = tensors.key.is_cuda
            self.exact_time = self._time(tensors, self.num_tokens, None)
        self.is_served = tensors.key.shape[2] >= self.spec.least_keys
        return Attended(exact, EXACT)

    def probe(self, repeat: Repeat) -> None:
        """Measure each threshold in the current call, if it is the layer's turn."""
        is_served, self.is_served = self.is_served, False
        # A different step in each example, so that every part of the denoising is covered.
        first, every = self.turn
        if not is_served or (self.run.number + self.run.example) % every != first:
            return
        self.is_probed = True
        found = []
        for threshold in THRESHOLDS:
            squared = repeat({self.layer.name: self.spec.changed(threshold=threshold)})
            found.append((squared, *self.seen))
        self.is_probed = False
        self.probes[self.run.start].append(np.array(found).T)

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
            squared, columns, times = np.mean(self.probes.get(start, every), axis=0)
            values = (called * squared) ** 0.5, columns, called * times
            parts[start] = Measured(*([float(f"{x:.4g}") for x in row] for row in values))
        return LayerEffects(self.layer, max(1, self.num_tokens), called * self.exact_time, parts)

    def _time(self, tensors: Tensors, columns: float, spec: Spec | None) -> float:
        """The time of exact attention, or of AVQ that shows this many columns on average."""
        key = tensors.key
        if not key.is_cuda:
            # AVQ also compares each key with the parents and with the children of one.
            precompute = 0 if spec is None else self.spec.num_parents + self.spec.num_children
            return 4e-9 * key.numel() * (columns + precompute)
        what = EXACT if spec is None else f"{spec.long_name}, {columns:.2g} columns"
        name = f"{what}, {tuple(key.shape)} keys in {str(key.dtype).removeprefix('torch.')}"
        return kept_milliseconds(name, key.device, _call(tensors, spec))


def _call(tensors: Tensors, spec: Spec | None) -> Callable[[], Tensor]:
    if spec is None:
        return lambda: exact_attention(tensors)
    return lambda: attend(tensors, spec).output
