"""One of two processes that train together."""

import os
import sys
from pathlib import Path

import torch
from tiny_training import reassign_dead

from distill.config import DistillConfig
from distill.config_file import load_config
from distill.data import cache
from distill.loop import train
from distill.run import Run


def main() -> None:
    rank, port, config, folder, *settings = sys.argv[1:]
    os.environ |= {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": "2"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    os.environ |= {"ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1"}
    cache.SHARD = 2  # so that both processes build a part
    output = Path(folder) / "two"
    run = Run(load_config(Path(config), DistillConfig, settings), output, resume=False)
    run.accelerator.end_training = lambda: None  # it would part the processes
    train(run, "two")
    assert run.accelerator.num_processes == 2
    objective = run.objective
    trained = {name: value.clone() for name, value in objective.state_dict().items()}
    reassign_dead(objective, threshold=60.0, seed=5)
    state = {"trained": trained, "reassigned": objective.state_dict()}
    torch.save(state, f"{folder}/{rank}.pt")
