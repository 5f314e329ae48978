"""The training loop of the pretraining commands.

A step's batch and noise depend only on (seed, process, step).
"""

import copy
from pathlib import Path
from typing import Protocol

import torch
from accelerate import Accelerator
from diffusers.optimization import get_scheduler
from torch import Tensor, nn
from tqdm import tqdm

from distill.checkpointing.folders import replace_folder
from distill.log import Log, Meter
from distill.optimizer import make_optimizer
from distill.pretrain.config import PretrainConfig

Batch = dict[str, Tensor]


class Task(Protocol):
    """A model to train. `model(**batch)` returns scalar losses and minimizes `loss`.

    `result` is the folder that a run produces.
    """

    model: nn.Module
    result: str

    def batch(self, generator: torch.Generator) -> Batch:
        """Return a random batch on the device."""

    def save(self, model: nn.Module, folder: Path) -> None:
        """Write the averaged `model` in half precision."""


def fit(task: Task, config: PretrainConfig, output: Path, accelerator: Accelerator) -> None:
    """Train `task.model` and export its moving average.

    Raises:
        FloatingPointError: a loss is not finite.
        OSError: the disk is full or not writable.
    """
    device, is_main = accelerator.device, accelerator.is_main_process
    averaged = copy.deepcopy(task.model).requires_grad_(False).eval()
    optimizer = make_optimizer(task.model, config)
    schedule = get_scheduler(
        "cosine", optimizer, num_warmup_steps=config.warmup_steps, num_training_steps=config.steps
    )
    if config.compile:
        torch._dynamo.config.optimize_ddp = False  # DDP wraps the compiled module
        task.model.compile()
    model = accelerator.prepare_model(task.model)

    generator = torch.Generator(device)
    log = Log(output, config, accelerator, 0)
    meter = Meter(accelerator, 0)
    images = config.batch_size * accelerator.num_processes
    bar = tqdm(range(1, config.steps + 1), "train", mininterval=2, disable=not is_main)
    for step in bar:
        generator.manual_seed(_step_seed(config.seed, accelerator.process_index, step))
        with torch.autocast(device.type, torch.bfloat16, enabled=config.precision == "bf16"):
            losses = model(**task.batch(generator))
        losses["loss"].backward()
        nn.utils.clip_grad_norm_(model.parameters(), config.max_grad_norm)
        rate = schedule.get_last_lr()[0]
        optimizer.step()
        schedule.step()
        optimizer.zero_grad(set_to_none=True)
        update_average(averaged, task.model, config.ema_decay, step)
        meter.add(losses)
        if step % config.log_every and step < config.steps:
            continue
        means = meter.means(step, images)
        log.write(step, learning_rate=rate, **means)
        bar.set_postfix(loss=f"{means['loss']:.4g}")
        meter = Meter(accelerator, step)
    if is_main:
        with replace_folder(output / task.result) as folder:
            task.save(averaged, folder)
        print(f"{output / task.result} holds the result.")
    accelerator.wait_for_everyone()
    accelerator.end_training()


@torch.no_grad()
def update_average(averaged: nn.Module, model: nn.Module, decay: float, step: int) -> None:
    """Move `averaged` towards `model`; the decay rises to `decay` over the first steps."""
    decay = min(decay, (1 + step) / (10 + step))
    torch._foreach_lerp_(list(averaged.parameters()), list(model.parameters()), 1 - decay)


def _step_seed(seed: int, process: int, step: int) -> int:
    return ((seed * 1_000_003 + process) * 1_000_000_007 + step) % (2**63)
