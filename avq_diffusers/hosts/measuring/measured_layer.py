"""One layer during exact runs: its attention errors, effects on the model's output, and times."""

import math
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import torch
from torch import Tensor

from avq_diffusers.attention.api import attend
from avq_diffusers.attention.exact import exact_attention
from avq_diffusers.attention.tensors import Tensors
from avq_diffusers.config import AVQConfig, Spec
from avq_diffusers.hosts.core import EXACT, LayerSpec, LayerState, kept_milliseconds
from avq_diffusers.hosts.measuring.exact_run import ExactRun, Repeat, squared
from avq_diffusers.hosts.measuring.profile import MILLISECONDS, OPERATIONS, LayerEffects

# From fast to exact. On real keys, more parents and refined parents pay off first, then exact keys.
LADDER = (
    "M32P4C8",
    "M64P8C8",
    "M64P16C8",
    "M64P32C8",
    "M128P32C8",
    "M64P16C8E256",
    "M128P32C8E256",
    "M128P32C8E512",
    "M64P32C8E1024",
)


class MeasuredLayer:
    """A layer during exact runs: its own attention errors, and their effect on the output.

    Args:
        layer: name, level and head shape.
        state: the layer's state during the measurement.
        config: its sizes are added to `LADDER`.
        run: the model's progress.
        turn: (i, n) measures the layer in calls i, i + n, i + 2 n and so on; None in no call.

    Attributes:
        num_tokens: number of tokens in the first call.
        times: time per configuration string at `num_tokens`, and of exact attention. Sizes with as
            many columns as tokens are left out.
        unit: unit of `times`.
    """

    def __init__(
        self,
        layer: LayerSpec,
        state: LayerState,
        config: AVQConfig,
        run: ExactRun,
        turn: tuple[int, int] | None,
    ) -> None:
        self.layer = LayerSpec(**layer.stored)
        self.state = state
        self.config = config
        self.run = run
        self.turn = turn
        self.num_tokens = 0
        self.times: dict[str, float] = {}
        self.unit = OPERATIONS
        self.own: list[float] = []  # squared errors of the current call by size
        # Per part and anchor: weighted squares of the effect, the output and the own errors.
        self.sums: dict[tuple[int, str], Tensor] = {}

    @property
    def sizes(self) -> list[str]:
        """The measured sizes, from few to many columns."""
        return [sizes for sizes in self.times if sizes != EXACT]

    @property
    def anchors(self) -> list[str]:
        """The sizes whose effect on the output is measured directly."""
        sizes = self.sizes
        return [*dict.fromkeys(sizes[len(sizes) * part // 3] for part in (1, 2))] if sizes else []

    @property
    def coarse(self) -> Spec | None:
        """The coarser anchor; None if all sizes meet all tokens."""
        return self._spec(self.anchors[0]) if self.anchors else None

    @property
    def is_probed(self) -> bool:
        """Whether the layer is measured in the current call of the model."""
        # A different step in each example, so that every part of the denoising is covered.
        first, every = self.turn or (1, 1)
        return (self.run.number + self.run.example) % every == first

    def attend(self, tensors: Tensors, spec: Spec, backend: str) -> tuple[Tensor, str]:
        """Exact attention in place of AVQ, or what a repeated call tries.

        Raises:
            ValueError: the attention output has NaN or infinity.
        """
        key = tensors.key

        def avq(spec: Spec) -> Tensor:
            return attend(tensors, spec)[0]

        if self.run.trial is not None:
            tried = self.run.trial.get(self.layer.name)
            return (exact_attention(tensors) if tried is None else avq(tried)), EXACT
        exact = exact_attention(tensors)
        if self.run.depth > 1:
            return exact, EXACT
        if not exact.isfinite().all():
            raise ValueError(
                f"the attention of {self.layer.name} returns NaN or infinity; measure a model and "
                f"dtype whose output is finite."
            )
        if not self.times:
            self.num_tokens = key.shape[2]
            rungs = {x: partial(avq, self._spec(x)) for x in self._ladder(key)}
            attentions = {**rungs, EXACT: partial(exact_attention, tensors)}
            if key.is_cuda:
                self.run.progress.note("compiling kernels")
                self._compile(rungs.values(), key.device)
            self.times = {x: self._time(x, key, call) for x, call in attentions.items()}
            if key.is_cuda:
                self.run.progress.note("")
        if self.is_probed:
            norm = float(exact.float().square().sum())
            errors = [squared([avq(self._spec(x))], [exact]) for x in self.sizes]
            self.own = [error / norm for error in errors]
        return exact, EXACT

    def probe(self, output: float, repeat: Repeat) -> None:
        """Measure what the anchors do to the current call's output, whose squared norm is given."""
        own, self.own = self.own, []
        if not own:
            return  # not measured, or not served, in this call
        weight = self.run.weight
        for anchor in self.anchors:
            effect = repeat({self.layer.name: self._spec(anchor)})
            sums = torch.tensor([effect, output, *own], dtype=torch.float64) * weight
            place = self.run.start, anchor
            self.sums[place] = self.sums.get(place, 0) + sums

    def effects(self, output: Mapping[int, float], called: float) -> LayerEffects:
        """The effects and times of all sizes.

        Args:
            output: weighted squares of the outputs of all calls, by part. A part in which the layer
                was not measured gets the effects of the others combined.
            called: share of calls that went to the layer's model.

        Raises:
            RuntimeError: the layer did not run.
        """
        if self.state.last_call is None:
            raise RuntimeError(f"{self.layer.name} did not run.")
        if not self.times:  # no call that AVQ serves
            return LayerEffects(self.layer, 1, {EXACT: 0.0}, {start: {} for start in output})
        every: dict[str, Tensor] = defaultdict(lambda: torch.zeros(2 + len(self.sizes)).double())
        for (_, anchor), sums in self.sums.items():
            every[anchor] += sums
        total = sum(output.values())
        effects = {
            start: self._effects_of(
                {anchor: self.sums.get((start, anchor), every[anchor]) for anchor in self.anchors},
                squared / total,
            )
            for start, squared in output.items()
        }
        times = {sizes: called * time for sizes, time in self.times.items()}
        return LayerEffects(self.layer, self.num_tokens, times, effects)

    def _effects_of(self, sums: Mapping[str, Tensor], share: float) -> dict[str, float]:
        """Effect per size, from each anchor's sums; `share` is the part's share of the output."""
        found = {}
        for place, sizes in enumerate(self.sizes):
            # The anchor with the closest error: proportionality only holds nearby.
            nearest, ratio = None, 1.0
            for of_anchor, anchor in zip(sums.values(), self.anchors, strict=True):
                own = of_anchor[2:].clamp(min=torch.finfo(torch.float32).tiny)
                times_own = float(own[place] / own[self.sizes.index(anchor)])
                if nearest is None or abs(math.log(times_own)) < abs(math.log(ratio)):
                    nearest, ratio = of_anchor, times_own
            assert nearest is not None
            effect, output, *_ = nearest.tolist()
            found[sizes] = (share * ratio * effect / output) ** 0.5 if output else 0.0
        return found

    def _ladder(self, key: Tensor) -> list[str]:
        """The sizes with fewer columns than tokens, from few to many."""
        every, num_tokens = dict.fromkeys([*LADDER, str(self.config)]), key.shape[2]
        specs = sorted(map(self._spec, every), key=lambda x: x.columns)
        return [str(x) for x in specs if x.columns < num_tokens and x.least_keys <= num_tokens]

    def _spec(self, sizes: str) -> Spec:
        return self.config.spec.resized(sizes)

    def _time(self, sizes: str, key: Tensor, attend: Callable[[], Tensor]) -> float:
        """Milliseconds on a GPU; elsewhere operations, from the number of columns per query."""
        batch, num_heads, num_tokens, head_dim = key.shape
        if not key.is_cuda:
            columns = num_tokens if sizes == EXACT else self._spec(sizes).columns
            return 4e-9 * batch * num_heads * num_tokens * columns * head_dim
        self.unit = MILLISECONDS
        what = EXACT if sizes == EXACT else self._spec(sizes).long_name
        name = f"{what}, {tuple(key.shape)} keys in {str(key.dtype).removeprefix('torch.')}"
        return kept_milliseconds(name, key.device, attend)

    def _compile(self, calls: Collection[Callable[[], Tensor]], device: torch.device) -> None:
        """Run each call once, in threads: their kernels compile in parallel, outside the GIL."""

        @torch.no_grad()
        def run(call: Callable[[], Tensor]) -> None:
            with torch.accelerator.device_index(device.index):
                call()

        with ThreadPoolExecutor() as pool:
            list(pool.map(run, calls))  # waits, and raises an error of a thread
