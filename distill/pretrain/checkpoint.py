"""What a checkpoint of a pretraining run holds; `distill.checkpointing.checkpoint` keeps it."""

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from distill.checkpointing import checkpoint
from distill.optimizer import load_optimizer, optimizer_tensors
from distill.pretrain.config import RunConfig

PARTS = MODEL, AVERAGED, OPTIMIZER = "model", "averaged", "optimizer"
KEPT = 2
# Fields that may change between a run and its continuation: they do not change its result, or
# (the time budget) are a property of the process.
FREE = ("workers", "max_minutes", "finish_minutes", "log_every", "preview_minutes")
FREE += ("checkpoint_every", "compile")


@dataclass(frozen=True)
class TrainingState:
    """What a checkpoint holds, beside step and progress."""

    model: nn.Module
    averaged: nn.Module
    optimizer: torch.optim.Optimizer

    def save(
        self, output: Path, config: RunConfig, num_processes: int, step: int, progress: float
    ) -> None:
        """Write the checkpoint of a step."""
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
        """Restore the newest checkpoint in place; return its step and progress, 0 without one."""
        found = checkpoint.newest(output)
        if found is None:
            return 0, 0.0
        self.model.load_state_dict(found.tensors(MODEL))
        self.averaged.load_state_dict(found.tensors(AVERAGED))
        load_optimizer(self.model, self.optimizer, found.tensors(OPTIMIZER))
        return found.step, found.run["progress"]


def check_newest(output: Path, config: RunConfig, num_processes: int) -> None:
    """Check that the newest checkpoint, if there is one, is whole and of this configuration.

    Raises:
        ValueError: it is damaged, or of another configuration or number of processes.
    """
    found = checkpoint.newest(output)
    if found is not None:
        checkpoint.check(found, config, free=FREE, num_processes=num_processes)
        for name in PARTS:
            found.tensors(name)
