"""The training timestep that a UNet is called with, and values that change with it.

Training timesteps fall from 1000 to 0 while a picture is made. Unlike steps, they mean the same for
every sampler and number of steps.
"""

import threading
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

NUM_TRAIN_TIMESTEPS = 1000


def at_timestep(schedule: Mapping[int, Any], timestep: float) -> Any:
    """The value of a schedule such as {1000: 8, 400: 16}: 8 from 1000 down, 16 from 400 down."""
    starts = (start for start in schedule if start >= timestep)
    return schedule[min(starts, default=NUM_TRAIN_TIMESTEPS)]


class Timesteps(threading.local):
    """Reads the timestep of a UNet's calls: from the device once per picture, not once per call.

    Each thread reads for itself, and so does a copy.
    """

    def __init__(self) -> None:
        self.table: Tensor | None = None
        self.version = 0
        self.values: list[float] = []

    def __reduce__(self) -> tuple:
        return Timesteps, ()

    def of_call(self, args: tuple, kwargs: dict[str, Any]) -> float | None:
        """The timestep among a UNet's arguments, as a number.

        None while a CUDA graph is captured, which forbids reads from the device.

        Raises:
            ValueError: the batch has several timesteps.
        """
        timestep = args[1] if len(args) > 1 else kwargs["timestep"]
        if not isinstance(timestep, Tensor):
            return timestep
        if timestep.is_cuda and torch.cuda.is_current_stream_capturing():
            return None
        # Pipelines iterate over the scheduler's timesteps: each is a view of that tensor.
        table = timestep._base
        if timestep.dim() or table is None or table.dim() != 1 or table.is_inference():
            values = set(timestep.flatten().tolist())
            if len(values) != 1:
                raise ValueError(
                    "ScaleCrafter and schedules of refined parents take one timestep for the whole "
                    f"batch, but got {sorted(values)}."
                )
            return values.pop()
        if table is not self.table or table._version != self.version:
            self.table, self.version, self.values = table, table._version, table.tolist()
        return self.values[(timestep.storage_offset() - table.storage_offset()) // table.stride(0)]
