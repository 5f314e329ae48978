"""Exact runs of a model on examples, with each call repeated with AVQ in some layers."""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any, TypeAlias

import torch
from diffusers import DiffusionPipeline
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from avq_diffusers.config import AVQConfig, check_int
from avq_diffusers.hosts.core import (
    NUM_TRAIN_TIMESTEPS,
    Hosted,
    Timesteps,
    at_timestep,
    checked_examples,
    installed,
    rounded_up,
    run_examples,
    starts_of_parts,
    states_of_config,
)
from avq_diffusers.hosts.measuring.allocation import THRESHOLDS
from avq_diffusers.hosts.measuring.measured_layer import MeasuredLayer, Position, Repeat, Trial
from avq_diffusers.hosts.measuring.progress import Progress, Shown
from avq_diffusers.hosts.models import models_of

# Repeated calls with one layer in AVQ, over all layers.
MOST_REPEATED = 512

# Called after each call, with its model, what was measured in it and what repeats it.
Visit: TypeAlias = Callable[[Hosted, list[MeasuredLayer], Repeat], None]


class ExactRuns:
    """Runs examples and keeps the position in them.

    The second evaluation of noise-damped ScaleCrafter belongs to the UNet call that contains it.

    Args:
        pipe, examples, config, num_inference_steps, parts, seed, progress, progress_name,
            arguments: as in `measure_error`.

    Attributes:
        ranks: the ranks that run the model together; None if it runs in one process.
        position: where they are.
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
        check_int("parts", 1 if parts is None else parts, 1, NUM_TRAIN_TIMESTEPS)
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
        self.num_layers = len(states_of_config(self.host.layers(self.models[0].model), self.config))
        bounds = sorted({self.num_steps * part // self.parts for part in range(self.parts + 1)})
        self.steps_of_parts = [range(*pair) for pair in pairwise(bounds)]
        num_repeated = len(THRESHOLDS) * len(self.examples) * self.num_steps * self.num_layers
        most = len(self.examples) * min(map(len, self.steps_of_parts))
        # A layer is measured in one of this many calls of each part.
        self.turns = max(1, min(-(-num_repeated // MOST_REPEATED), most))

    def planned(self, repeated: int | None = None) -> list[list[int]]:
        """The model calls by example and step, for `progress_over`.

        Args:
            repeated: how often each call is repeated; None to probe the layers whose turn it is.
        """

        def calls(index: int) -> int:
            probed = range(self.turn_of(index), self.num_layers, self.turns)
            return 1 + (len(THRESHOLDS) * len(probed) if repeated is None else repeated)

        return [
            [
                calls(example * len(part) + step)
                for part in self.steps_of_parts
                for step in range(len(part))
            ]
            for example in range(len(self.examples))
        ]

    def turn_of(self, index: int) -> int:
        """Which layers' turn it is in the call of this index in a part: another each round."""
        return (index + index // self.turns) % self.turns

    def progress_over(self, runs: Sequence[Sequence[int]], name: str) -> Progress:
        """The progress of the runs to follow, by this name if none is given."""
        shown = self.shown if self.ranks is None or self.ranks.is_first else False
        self.progress = Progress(self.progress_name or name, runs, shown)
        return self.progress

    def follow(self, visit: Visit, *, first_run: int = 0) -> dict[Hosted, list[MeasuredLayer]]:
        """Run all examples and visit each call.

        Args:
            visit: called after each call.
            first_run: number of the first example's run in the progress.

        Returns:
            The layers of each model.
        """
        self.position, self.numbers = Position(THRESHOLDS), Counter[int]()
        measured: dict[Hosted, list[MeasuredLayer]] = {}
        # Compiled models run eagerly here, so that measuring leaves no trace in compiled code.
        with ExitStack() as stack:
            for hosted in self.models:
                states = states_of_config(hosted.host.layers(hosted.model), self.config)
                layers = measured[hosted] = []
                for number, (layer, state) in enumerate(states.items()):
                    named = replace(layer, name=hosted.prefix + layer.name)
                    layers.append(MeasuredLayer(named, state, self.position, number % self.turns))
                    state.function = layers[-1].attend
                stack.enter_context(installed(hosted, states))
                stack.enter_context(self._watched(hosted, partial(visit, hosted, layers)))
            stack.enter_context(torch.compiler.set_stance("force_eager"))
            examples, steps = self._counted(first_run), self.num_inference_steps
            arguments = self.host, examples, steps, self.seed, self.arguments
            for _ in run_examples(self.pipe, *arguments):
                pass
        return measured

    def _counted(self, first_run: int) -> Iterator[Any]:
        for number, example in enumerate(self.examples):
            self.position.example, self.step = number, -1
            self.timestep: float | None = None  # what the last call told
            self.progress.begin_run(first_run + number)
            yield example

    @contextmanager
    def _watched(self, hosted: Hosted, visit: Callable[[Repeat], None]) -> Iterator[None]:
        """Follow the calls of a model inside the `with` block; `visit` follows each."""

        def leave(model: nn.Module, args: tuple, kwargs: dict, output: Any) -> None:
            try:
                if self.position.depth == 1 and output is not None:
                    self.progress.count_call()
                    visit(partial(self._repeat, partial(model, *args, **kwargs), output))
            finally:
                self.position.depth -= 1

        enter = partial(self._enter, hosted.timesteps)
        with (
            hosted.entrance.register_forward_pre_hook(enter, with_kwargs=True),
            hosted.entrance.register_forward_hook(leave, with_kwargs=True, always_call=True),
        ):
            yield

    def _repeat(self, call: Callable[[], Any], exact: Any, trial: Trial) -> float:
        """Repeat a call and return the squared relative error of its output."""
        self.position.trial = trial
        try:
            pairs = [*zip(_tensors_of(call()), _tensors_of(exact), strict=True)]
        finally:
            self.position.trial = None
            self.progress.count_call()
        size = sum(float(x.square().sum()) for _, x in pairs)
        return sum(float((a - b).square().sum()) for a, b in pairs) / size if size else 0.0

    def _enter(
        self, timesteps: Timesteps | None, model: nn.Module, args: tuple, kwargs: dict
    ) -> None:
        self.position.depth += 1
        if self.position.depth > 1:
            return
        told = None if timesteps is None else timesteps.told(args, kwargs)
        if told is None or told != self.timestep:
            self.timestep, self.step = told, self.step + 1
            steps = getattr(self.scheduler, "timesteps", None)
            if told is None or steps is None:
                self.progress.begin_step(self.step)
            else:
                self.progress.begin_step(self.step, len({*_left(steps.tolist(), told)}))
        if timesteps is not None and self.parts > 1:
            timestep = timesteps.of_call(args, kwargs)
            if timestep is not None:
                if not self.numbers:
                    steps = _left(self.scheduler.timesteps.tolist(), timestep)
                    self.starts = {start: start for start in starts_of_parts(steps, self.parts)}
                self.position.start = at_timestep(self.starts, timestep)
        start = self.position.start
        self.position.turn = self.turn_of(self.numbers[start])
        self.numbers[start] += 1


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
