"""Exact runs of a model on examples, with each call repeated with AVQ in some layers."""

from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, TypeAlias

import numpy as np
import torch
from diffusers import DiffusionPipeline
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from avq_diffusers.attention.api import attend
from avq_diffusers.attention.exact import exact_attention
from avq_diffusers.attention.tensors import Attended, Tensors, mean_columns
from avq_diffusers.config import AVQConfig, Spec, check_int
from avq_diffusers.hosts.core import (
    EXACT,
    NUM_TRAIN_TIMESTEPS,
    Hosted,
    LayerSpec,
    LayerState,
    Timesteps,
    are_training_timesteps,
    at_timestep,
    checked_examples,
    installed,
    kept_milliseconds,
    rounded_up,
    run_examples,
    starts_of_parts,
    states_of_config,
)
from avq_diffusers.hosts.measuring.allocation import THRESHOLDS, Floats
from avq_diffusers.hosts.measuring.profile import LayerEffects, Measured
from avq_diffusers.hosts.measuring.progress import Progress, Shown
from avq_diffusers.hosts.models import models_of

# Repeated calls with one layer in AVQ, over all layers.
MOST_REPEATED = 320
# How the effect depends on the threshold hardly differs between parts of the denoising: only in the
# last one all thresholds are tried, else this one.
MIDDLE = len(THRESHOLDS) // 2

# What layers run in a repeated call, by layer name; the rest run exact attention.
Tried: TypeAlias = Mapping[str, Spec | None]
# Repeats the current call and returns the squared relative error of its output.
Repeat: TypeAlias = Callable[[Tried], float]
# How often a call is repeated before the last part of the denoising, and in it.
Repeated: TypeAlias = tuple[int, int]


class ExactRuns:
    """Runs examples and keeps the position in them.

    Args:
        pipe, examples, config, num_inference_steps, parts, seed, progress, progress_name,
            arguments: as in `measure_error`.

    Attributes:
        ranks: the ranks that run the model together; None if it runs in one process.
        thresholds: what is tried, in this order.
        num_probed: how often a call is repeated to probe the layers whose turn it is, before the
            last part of the denoising and in it.
        tried: what a repeated call tries; None in other calls, which run exact attention.
        turn: whose layers are probed in the current call.
        start: the timestep at which the current part of the denoising begins.
        example: index of the current example.
        numbers: the calls so far, by part of the denoising.
    """

    def __init__(
        self,
        pipe: DiffusionPipeline | nn.Module,
        examples: Any,
        config: AVQConfig | None,
        *,
        num_inference_steps: int = 6,
        parts: int | None = None,
        seed: int = 0,
        progress: Shown = True,
        progress_name: str | None = None,
        **arguments: Any,
    ) -> None:
        self.pipe, self.seed, self.arguments = pipe, seed, arguments
        self.num_inference_steps = num_inference_steps
        self.shown, self.progress_name = progress, progress_name
        self.models = models_of(pipe)
        self.host = self.models[0].host
        self.ranks = self.models[0].ranks
        self.examples = checked_examples(pipe, self.host, examples, seed, arguments)
        self.scheduler: Any = getattr(pipe, "scheduler", None)
        check_int("num_inference_steps", num_inference_steps, 1, NUM_TRAIN_TIMESTEPS)
        self.least_parts = 1 if parts is None else parts
        check_int("parts", self.least_parts, 1, NUM_TRAIN_TIMESTEPS)
        has_timesteps = len(self.models) == 1 and self.models[0].timesteps is not None
        has_parts = has_timesteps and self.scheduler is not None
        usual_parts = max(1, min(3, num_inference_steps // 2)) if has_parts else 1
        self.parts = usual_parts if parts is None else parts
        if self.parts > 1 and not has_parts:
            raise ValueError(
                f"parts must be 1 without a scheduler, with several models, or where calls do not "
                f"tell the timestep, but got {self.parts}."
            )
        self.config = self.host.default_config(self.models[0].model) if config is None else config
        _check_measured(self.config)
        for hosted in self.models:
            hosted.host.refuse(hosted.model)
            if getattr(hosted.model, "is_cache_enabled", False):
                raise ValueError(
                    "a diffusers cache reuses results of earlier calls, which repeated calls "
                    "would disturb; measure before enable_cache."
                )
        # Denoising steps of a run, of which each calls the model once or more often.
        self.num_steps = num_inference_steps if self.host.has_prompts else 1
        num_layers = len(states_of_config(self.host.layers(self.models[0].model), self.config))
        self.thresholds = THRESHOLDS
        num_tried = self.parts - 1 + len(THRESHOLDS)  # of a layer, over the parts
        num_repeated = num_tried * len(self.examples) * self.num_steps * num_layers // self.parts
        most = len(self.examples) * max(1, self.num_steps // self.parts)
        # A layer is measured in one of this many calls of each part.
        self.turns = max(1, min(-(-num_repeated // MOST_REPEATED), most))
        num_probed = -(-num_layers // self.turns)
        self.num_probed = num_probed, len(THRESHOLDS) * num_probed

    @property
    def is_last_part(self) -> bool:
        """Whether the current call is in the last part of the denoising."""
        return self.start == min(self.starts)

    def open_progress(self, name: str, *repeated: Repeated) -> AbstractContextManager[None]:
        """Show the progress of the runs inside the `with` block, by this name if none is given.

        Args:
            name: what the bar says.
            repeated: for each `follow`, how often it repeats a call, as in `num_probed`.
        """
        shown = self.shown if self.ranks is None or self.ranks.is_first else False
        steps = self.num_steps
        total = len(self.examples) * sum(self._planned(steps, steps, one) for one in repeated)
        self.progress = Progress(self.progress_name or name, total, shown)
        return self.progress.open()

    def follow(
        self, visit: Callable[[Hosted, list["MeasuredLayer"], Repeat], None], repeated: Repeated
    ) -> dict[Hosted, list["MeasuredLayer"]]:
        """Run all examples and visit each call.

        Args:
            visit: called after each call, with its model, what was measured in it and what repeats
                it.
            repeated: how often `visit` repeats a call, as in `num_probed`, for the progress.

        Returns:
            The layers of each model.
        """
        self.tried: Tried | None = None
        self.turn, self.repeated = 0, repeated
        self.start, self.numbers = NUM_TRAIN_TIMESTEPS, Counter[int]()
        self.starts = {self.start: self.start}
        measured: dict[Hosted, list[MeasuredLayer]] = {}
        # Compiled models run eagerly here, so that measuring leaves no trace in compiled code.
        with ExitStack() as stack:
            for hosted in self.models:
                states = states_of_config(hosted.host.layers(hosted.model), self.config)
                layers = measured[hosted] = []
                for number, (layer, state) in enumerate(states.items()):
                    named = replace(layer, name=hosted.prefix + layer.name)
                    layers.append(MeasuredLayer(named, state, self, number % self.turns))
                stack.enter_context(installed(hosted, states))
                stack.enter_context(self._watched(hosted, partial(visit, hosted, layers)))
            stack.enter_context(torch.compiler.set_stance("force_eager"))
            steps = self.num_inference_steps
            arguments = self.host, self._counted(), steps, self.seed, self.arguments
            for _ in run_examples(self.pipe, *arguments):
                pass
        return measured

    def _planned(self, done: int, steps: int, repeated: Repeated) -> int:
        """The calls in the first `done` of a run's steps."""
        before_last = min(done, steps * (self.parts - 1) // self.parts)
        early, late = repeated
        return done + early * before_last + late * (done - before_last)

    def _counted(self) -> Iterator[Any]:
        for number, example in enumerate(self.examples):
            self.example, self.step = number, -1
            self.timestep: float | None = None  # what the last call told
            steps = self.num_steps
            self.progress.begin_run(self._planned(steps, steps, self.repeated))
            yield example

    @contextmanager
    def _watched(self, hosted: Hosted, visit: Callable[[Repeat], None]) -> Iterator[None]:
        """Follow the calls of a model inside the `with` block; `visit` follows each."""

        def leave(model: nn.Module, args: tuple, kwargs: dict, output: Any) -> None:
            if self.tried is None:
                self.progress.count_call()
                visit(partial(self._repeat, partial(model, *args, **kwargs), output))

        enter = partial(self._enter, hosted.timesteps)
        with (
            hosted.entrance.register_forward_pre_hook(enter, with_kwargs=True),
            hosted.entrance.register_forward_hook(leave, with_kwargs=True),
        ):
            yield

    def _repeat(self, call: Callable[[], Any], exact: Any, tried: Tried) -> float:
        """Repeat a call and return the squared relative error of its output."""
        self.tried = tried
        try:
            pairs = [*zip(_tensors_of(call()), _tensors_of(exact), strict=True)]
        finally:
            self.tried = None
            self.progress.count_call()
        size = sum(float(x.square().sum()) for _, x in pairs)
        return sum(float((a - b).square().sum()) for a, b in pairs) / size if size else 0.0

    def _enter(
        self, timesteps: Timesteps | None, model: nn.Module, args: tuple, kwargs: dict
    ) -> None:
        if self.tried is not None:
            return
        told = None if timesteps is None else timesteps.told(args, kwargs)
        if told is None or told != self.timestep:
            self.timestep, self.step = told, self.step + 1
            steps = max(self.num_steps, self.step + 1)
            scheduled = getattr(self.scheduler, "timesteps", None)
            if told is not None and scheduled is not None:
                steps = self.step + len({*_left(scheduled.tolist(), told)})
            before, after, every = (
                self._planned(done, steps, self.repeated)
                for done in (self.step, self.step + 1, steps)
            )
            self.progress.begin_step(before / every, after / every)
        is_first = self.parts > self.least_parts and not self.numbers
        if is_first and not are_training_timesteps(self.scheduler.timesteps.tolist()):
            self.parts = self.least_parts
        if timesteps is not None and self.parts > 1:
            timestep = timesteps.read(args, kwargs)
            if timestep is not None:
                if not self.numbers:
                    left = _left(self.scheduler.timesteps.tolist(), timestep)
                    left = left[: getattr(self.pipe, "num_timesteps", None)]  # by denoising_end
                    self.starts = {start: start for start in starts_of_parts(left, self.parts)}
                self.start = at_timestep(self.starts, timestep)
        number = self.numbers[self.start]
        self.turn = (number + number // self.turns) % self.turns  # another each round
        self.numbers[self.start] += 1


class MeasuredLayer:
    """A layer during exact runs: what thresholds do to the model's output, and what they cost.

    Args:
        layer: name, level and head shape.
        state: the layer's state during the measurement.
        runs: the runs, which tell the position.
        turn: probes the layer in the calls of this turn.
    """

    def __init__(self, layer: LayerSpec, state: LayerState, runs: ExactRuns, turn: int) -> None:
        self.layer = LayerSpec(**layer.stored)
        self.state, self.runs, self.turn = state, runs, turn
        self.spec = state.config.spec
        self.num_tokens = 0  # in the first call
        self.exact_time = 0.0  # in the first call
        self.is_timed = False  # whether times are milliseconds, else billions of operations
        self.is_probed = False  # whether AVQ can run in the current call, which is the layer's turn
        self.costs: list[tuple[float, float]] = []  # in it, by threshold
        # Per part, a (3, T) array of squared effects, NaN if not tried, and costs per probed call.
        self.probes: dict[int, list[Floats]] = defaultdict(list)
        state.function = self.attend

    def attend(self, tensors: Tensors, spec: Spec, backend: str) -> Attended:
        """Exact attention in place of AVQ, or what a repeated call tries."""
        tried = self.runs.tried
        spec_tried = None if tried is None else tried.get(self.layer.name)
        if spec_tried is not None:
            return attend(tensors, spec_tried)
        exact = Attended(exact_attention(tensors), EXACT)
        if tried is None:
            if not exact.output.isfinite().all():
                raise ValueError(
                    f"the attention of {self.layer.name} returns NaN or infinity; measure a model "
                    f"and dtype whose output is finite."
                )
            if not self.num_tokens:
                self.num_tokens, self.is_timed = tensors.key.shape[2], tensors.key.is_cuda
                self.exact_time = self._time(tensors, self.num_tokens, None)
            is_served = tensors.key.shape[2] >= self.spec.least_keys
            self.is_probed = is_served and self.runs.turn == self.turn
            if self.is_probed:
                self.costs = [self._cost(tensors, spec) for spec in self._tried()]
        return exact

    def probe(self, repeat: Repeat) -> None:
        """Measure thresholds in the current call, if it is the layer's turn."""
        if not self.is_probed:
            return
        self.is_probed = False
        squared = [np.nan] * len(self.costs)
        for number, spec in enumerate(self._tried()):
            if self.runs.is_last_part or number == MIDDLE:
                squared[number] = repeat({self.layer.name: spec})
        self.probes[self.runs.start].append(np.array([squared, *zip(*self.costs, strict=True)]))

    def effects(self, starts: Collection[int], called: float) -> LayerEffects:
        """What was measured.

        Args:
            starts: the parts. One in which the layer was not measured gets the others combined. If
                that is the last one, where all thresholds are tried, the layer stays exact.
            called: share of calls that went to the layer's model.
        """
        if self.state.last_call is None:
            raise RuntimeError(f"{self.layer.name} did not run.")
        every = [probe for probes in self.probes.values() for probe in probes]
        last = self.probes.get(min(starts), [])
        parts = {}
        for start in starts if last else ():
            squared, columns, shares = np.mean(self.probes.get(start, every), axis=0)
            last_squared = np.mean(last, axis=0)[0]
            scale = np.clip(squared[MIDDLE] / max(last_squared[MIDDLE], 1e-30), 1e-2, 1e2)
            squared = np.where(np.isnan(squared), scale * last_squared, squared)
            rows = (called * squared) ** 0.5, columns, called * self.exact_time * shares
            parts[start] = Measured(*([float(f"{x:.4g}") for x in row] for row in rows))
        return LayerEffects(self.layer, max(1, self.num_tokens), called * self.exact_time, parts)

    def _tried(self) -> list[Spec]:
        return [self.spec.changed(threshold=threshold) for threshold in self.runs.thresholds]

    def _cost(self, tensors: Tensors, spec: Spec) -> tuple[float, float]:
        """The columns of a call, and its time relative to exact attention's."""
        columns = mean_columns(attend(tensors, spec).shown)
        exact = self._time(tensors, tensors.key.shape[2], None)
        return columns, self._time(tensors, columns, spec) / exact

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


def _left(steps: list[float], timestep: float) -> list[float]:
    """The scheduler's steps from a call's timestep on."""
    # img2img skips steps; a call that fills a cache comes before all of them.
    return [step for step in steps if step <= rounded_up(timestep)] or steps


def _tensors_of(output: Any) -> list[Tensor]:
    """The tensors in the first output of a model, in float32."""
    first = output if isinstance(output, Tensor) else output[0]
    return [x.float() for x in pytree.tree_leaves(first) if isinstance(x, Tensor)]


def _check_measured(config: AVQConfig) -> None:
    """Refuse a configuration without a threshold to choose."""
    if not isinstance(config, AVQConfig):
        raise TypeError(f"config must be an AVQConfig, but got {config!r}.")
    for name, refused in (
        ("overrides", config.overrides),
        ('codewords="stored"', not config.means),
        ("num_refined", config.num_refined is not None),
        ("key_norm", config.key_norm),
    ):
        if refused:
            raise ValueError(f"a tolerance chooses thresholds for own codewords; drop {name}.")
