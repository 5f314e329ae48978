"""Exact runs of a model, with each call repeated with AVQ in some layers."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from avq_diffusers.config import Spec
from avq_diffusers.hosts.core import (
    NUM_TRAIN_TIMESTEPS,
    Hosted,
    Timesteps,
    at_timestep,
    rounded_up,
    starts_of_parts,
)
from avq_diffusers.hosts.measuring.progress import Progress

# What layers run in a repeated call, by layer name; the rest run exact attention.
Trial: TypeAlias = Mapping[str, Spec | None]
# Repeats the current call and returns the squared relative error of its output.
Repeat: TypeAlias = Callable[[Trial], float]


class ExactRun:
    """Position in the exact runs of a model, and their repeated calls.

    The second evaluation of noise-damped ScaleCrafter belongs to the UNet call that contains it.

    Args:
        scheduler: the pipeline's scheduler; None without one.
        parts: number of parts of the denoising to keep apart.
        progress: counts the model's calls, exact and repeated.
        first_run: number of the first run in `progress`.

    Attributes:
        start: the timestep at which the current part begins.
        number: index of the current call, over all examples.
        example: index of the current example.
        timestep: what the last call told; None if nothing.
        step: number of denoising steps of the current example before that timestep.
        depth: nesting depth of model calls.
        trial: what the current call runs; None is exact attention.
    """

    def __init__(self, scheduler: Any, parts: int, progress: Progress, first_run: int) -> None:
        self.scheduler = scheduler
        self.parts = parts
        self.starts = {NUM_TRAIN_TIMESTEPS: NUM_TRAIN_TIMESTEPS}
        self.progress = progress
        self.first_run = first_run
        self.start = NUM_TRAIN_TIMESTEPS
        self.number = -1
        self.example = -1
        self.timestep: float | None = None
        self.step = -1
        self.depth = 0
        self.trial: Trial | None = None

    def follow(self, examples: Iterable[Any]) -> Iterator[Any]:
        """The examples, counted."""
        for self.example, example in enumerate(examples):
            self.timestep, self.step = None, -1
            self.progress.begin_run(self.first_run + self.example)
            yield example

    @contextmanager
    def watch(self, hosted: Hosted, visit: Callable[[Repeat], None]) -> Iterator[None]:
        """Follow the calls of a model inside the `with` block; `visit` follows each."""

        def leave(model: nn.Module, args: tuple, kwargs: dict, output: Any) -> None:
            try:
                if self.depth == 1 and output is not None:
                    exact = _tensors_of(output)
                    size = _squared(exact)

                    def repeat(trial: Trial) -> float:
                        self.trial = trial
                        try:
                            found = _tensors_of(model(*args, **kwargs))
                        finally:
                            self.trial = None
                            self.progress.count_call()
                        pairs = zip(found, exact, strict=True)
                        error = _squared([a.float() - b.float() for a, b in pairs])
                        return error / size if size else 0.0

                    self.progress.count_call()
                    visit(repeat)
            finally:
                self.depth -= 1

        enter = partial(self._enter, timesteps=hosted.timesteps)
        with (
            hosted.entrance.register_forward_pre_hook(enter, with_kwargs=True),
            hosted.entrance.register_forward_hook(leave, with_kwargs=True, always_call=True),
        ):
            yield

    def _enter(
        self, model: nn.Module, args: tuple, kwargs: dict, *, timesteps: Timesteps | None
    ) -> None:
        self.depth += 1
        if self.depth > 1:
            return
        self.number += 1
        self._follow_steps(None if timesteps is None else timesteps.told(args, kwargs))
        if timesteps is not None and self.parts > 1:
            timestep = timesteps.of_call(args, kwargs)
            if timestep is not None:
                if self.number == 0:
                    steps = self.scheduler.timesteps.tolist()
                    starts = starts_of_parts(_left(steps, timestep), self.parts)
                    self.starts = {start: start for start in starts}
                self.start = at_timestep(self.starts, timestep)

    def _follow_steps(self, timestep: float | None) -> None:
        """Tell the progress if this call, at `timestep` if it tells one, begins a step."""
        if timestep is not None and timestep == self.timestep:
            return
        self.timestep, self.step = timestep, self.step + 1
        steps = getattr(self.scheduler, "timesteps", None)
        if timestep is None or steps is None:
            self.progress.begin_step(self.step)
        else:
            self.progress.begin_step(self.step, len({*_left(steps.tolist(), timestep)}))


def _left(steps: list[float], timestep: float) -> list[float]:
    """The scheduler's steps from a call's timestep on."""
    # img2img skips steps; a call that fills a cache comes before all of them.
    return [step for step in steps if step <= rounded_up(timestep)] or steps


def _tensors_of(output: Any) -> list[Tensor]:
    """The tensors in the first output of a model."""
    first = output if isinstance(output, Tensor) else output[0]
    return [x for x in pytree.tree_leaves(first) if isinstance(x, torch.Tensor)]


def _squared(tensors: Sequence[Tensor]) -> float:
    return sum(float(x.float().square().sum()) for x in tensors)
