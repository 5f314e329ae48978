"""Checkpoints of a pretraining run."""

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from distill.checkpointing import checkpoint
from distill.optimizer import load_optimizer, optimizer_tensors
from distill.pretrain.config import PretrainConfig

FILES = MODEL, AVERAGED, OPTIMIZER = "model", "averaged", "optimizer"
KEPT = 2
# Fields that may differ between a run and its continuation. They do not change the result, or
# belong to the process, like the time limit.
FREE = ("workers", "max_minutes", "finish_minutes", "log_every", "preview_minutes")
FREE += ("checkpoint_every", "compile")


@dataclass(frozen=True)
class ModelInTraining:
    """A model, its moving average, and its optimizer: all that a checkpoint holds as tensors."""

    model: nn.Module
    averaged: nn.Module
    optimizer: torch.optim.Optimizer

    def save(
        self, output: Path, config: PretrainConfig, num_processes: int, step: int, progress: float
    ) -> None:
        """Save the checkpoint of a step."""
        checkpoint.save(
            output,
            step,
            {
                MODEL: self.model.state_dict(),
                AVERAGED: self.averaged.state_dict(),
                OPTIMIZER: optimizer_tensors(self.model, self.optimizer),
            },
            config=config,
            keep=KEPT,
            num_processes=num_processes,
            progress=progress,
        )

    def load_newest(self, output: Path) -> tuple[int, float]:
        """Restore the newest checkpoint in place; return its step and progress, or zeros."""
        found = checkpoint.newest(output)
        if found is None:
            return 0, 0.0
        self.model.load_state_dict(found.tensors(MODEL))
        self.averaged.load_state_dict(found.tensors(AVERAGED))
        load_optimizer(self.model, self.optimizer, found.tensors(OPTIMIZER))
        return found.step, found.run["progress"]


def check_newest(output: Path, config: PretrainConfig, num_processes: int) -> None:
    """Check that the newest checkpoint, if there is one, is intact and fits the configuration.

    Raises:
        ValueError: it is damaged, or its configuration or number of processes differs.
    """
    found = checkpoint.newest(output)
    if found is not None:
        checkpoint.check_config(found, config, free=FREE, num_processes=num_processes)
        for name in FILES:
            found.tensors(name)
