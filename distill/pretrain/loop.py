"""The training loop of the pretraining commands.

Batch and noise of a step depend only on (seed, process, step).
"""

import contextlib
import copy
import math
import time
from pathlib import Path
from typing import Protocol

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedDataParallelKwargs, broadcast_object_list
from torch import Tensor, nn
from tqdm import tqdm

from distill.log import LogFile, reduced_means
from distill.optimizer import make_optimizer
from distill.pretrain.config import PretrainConfig

Batch = dict[str, Tensor]


class Task(Protocol):
    """A model to train. `model(**batch)` returns scalar losses and minimizes `loss`."""

    model: nn.Module

    def batch(self, generator: torch.Generator) -> Batch:
        """Return a random batch on the device."""

    def export(self, model: nn.Module) -> None:
        """Write the averaged `model` in half precision."""


class Schedule:
    """Progress in [0, 1] by steps and time, and the learning rate for it.

    The clock starts at the first `observe`, after compilation. All processes must observe the same
    seconds; then they agree on the rate and the end without synchronizing at every step.
    """

    def __init__(self, config: PretrainConfig) -> None:
        self.config = config
        self.time_progress = self.progress_per_step = 0.0
        self.observed_step: int | None = None
        self.first_seconds = 0.0

    def observe(self, step: int, seconds: float) -> None:
        """Record the running time of the process at a step."""
        if self.config.max_minutes is None:
            return
        if self.observed_step is None:
            self.first_seconds = seconds
        else:
            end = 60 * (self.config.max_minutes - self.config.finish_minutes)
            progress = (seconds - self.first_seconds) / max(end - self.first_seconds, 1e-3)
            self.progress_per_step = (progress - self.time_progress) / (step - self.observed_step)
            self.time_progress = progress
        self.observed_step = step

    def progress(self, step: int) -> float:
        """Return the larger of the step fraction and the extrapolated time fraction."""
        since = step - self.observed_step if self.observed_step is not None else 0
        return max(step / self.config.steps, self.time_progress + since * self.progress_per_step)

    def learning_rate(self, step: int) -> float:
        """Return the learning rate after `step` completed steps."""
        warmup = min(1.0, (step + 1) / max(self.config.warmup_steps, 1))
        cosine = 0.5 * (1 + math.cos(math.pi * min(self.progress(step), 1.0)))
        return self.config.learning_rate * warmup * cosine


def make_accelerator() -> Accelerator:
    """Return an accelerator without autocast, which `train_step` does."""
    ddp = DistributedDataParallelKwargs(broadcast_buffers=False, gradient_as_bucket_view=True)
    return Accelerator(kwargs_handlers=[ddp])


def autocast(config: PretrainConfig, device: torch.device) -> contextlib.AbstractContextManager:
    """Return the context of the configured precision."""
    return torch.autocast(device.type, torch.bfloat16, enabled=config.precision == "bf16")


def fit(
    task: Task, config: PretrainConfig, output: Path, accelerator: Accelerator, started: float
) -> None:
    """Train `task.model` and export its moving average.

    `max_minutes` counts from `started`, a value of `time.monotonic()`.

    Raises:
        FloatingPointError: a loss is not finite.
        OSError: the disk is full or not writable.
    """
    device = accelerator.device
    averaged = copy.deepcopy(task.model).requires_grad_(False).eval()
    optimizer = make_optimizer(task.model, config)
    if config.compile:
        torch._dynamo.config.optimize_ddp = False  # DDP wraps the compiled module
        task.model.compile()
    model = accelerator.prepare_model(task.model)

    schedule = Schedule(config)
    generator = torch.Generator(device)
    is_main = accelerator.is_main_process
    log = LogFile(output, 0) if is_main else None
    totals: dict[str, Tensor] = {}
    step = logged_step = 0
    logged_time = time.monotonic()
    with tqdm(total=config.steps, desc="train", mininterval=2, disable=not is_main) as bar:
        while schedule.progress(step) < 1:
            generator.manual_seed(_step_seed(config.seed, accelerator.process_index, step))
            for group in optimizer.param_groups:
                group["lr"] = schedule.learning_rate(step)
            losses = train_step(model, task.batch(generator), optimizer, config, device)
            step += 1
            update_average(averaged, task.model, config.ema_decay, step)
            totals = {name: totals.get(name, 0) + value for name, value in losses.items()}
            bar.update()
            if step % config.log_every:
                continue
            means = reduced_means(totals, step - logged_step, step, accelerator)
            now = time.monotonic()
            schedule.observe(step, broadcast_object_list([now - started])[0])
            if log is not None:
                speed = (step - logged_step) / (now - logged_time)
                log.write(
                    step,
                    progress=schedule.progress(step),
                    learning_rate=optimizer.param_groups[0]["lr"],
                    minutes=(now - started) / 60,
                    samples_per_second=speed * config.batch_size * accelerator.num_processes,
                    **means,
                )
                bar.set_postfix(
                    loss=f"{means['loss']:.4g}", left=f"{1 - schedule.progress(step):.0%}"
                )
            totals, logged_step, logged_time = {}, step, time.monotonic()
    if totals:  # raises for a loss since the last line that is not finite
        reduced_means(totals, step - logged_step, step, accelerator)
    if is_main:
        task.export(averaged)
    accelerator.wait_for_everyone()
    accelerator.end_training()


def train_step(
    model: nn.Module,
    batch: Batch,
    optimizer: torch.optim.Optimizer,
    config: PretrainConfig,
    device: torch.device,
) -> dict[str, Tensor]:
    """Make one optimizer step; return the detached losses, on the device."""
    with autocast(config, device):
        losses = model(**batch)
    losses["loss"].backward()
    nn.utils.clip_grad_norm_(model.parameters(), config.max_grad_norm)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return {name: value.detach() for name, value in losses.items()}


@torch.no_grad()
def update_average(averaged: nn.Module, model: nn.Module, decay: float, step: int) -> None:
    """Move `averaged` towards `model`; over the first steps the decay rises to `decay`."""
    decay = min(decay, (1 + step) / (10 + step))
    torch._foreach_lerp_(list(averaged.parameters()), list(model.parameters()), 1 - decay)


def _step_seed(seed: int, process: int, step: int) -> int:
    return ((seed * 1_000_003 + process) * 1_000_000_007 + step) % (2**63)
