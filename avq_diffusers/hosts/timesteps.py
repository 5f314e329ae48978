"""The training timestep of a UNet call, and values that change with it.

Training timesteps fall from 1000 to 0 during generation. Unlike step indices, they mean the same
for every sampler and number of steps. Samplers that pass the UNet other numbers are refused: EDM
passes the log of the noise level, IPNDM a fraction.
"""

import threading
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

NUM_TRAIN_TIMESTEPS = 1000
Value = TypeVar("Value")


def at_timestep(schedule: Mapping[int, Value], timestep: float) -> Value:
    """The value of a schedule such as {1000: 8, 400: 16}: 8 from 1000 down, 16 from 400 down."""
    starts = (start for start in schedule if start >= timestep)
    return schedule[min(starts, default=NUM_TRAIN_TIMESTEPS)]


class Timesteps(threading.local):
    """Reads the timesteps of UNet calls from the device, once per image instead of once per call.

    Each thread and each copy reads its own.
    """

    def __init__(self) -> None:
        self.table: Tensor | None = None
        self.version: tuple[int, int] | None = None
        self.values: list[float] = []

    def __reduce__(self) -> tuple[type, tuple[()]]:
        return Timesteps, ()

    def of_call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> float | None:
        """The timestep among a UNet's arguments, as a number.

        None during CUDA graph capture, which forbids reading from the device.

        Raises:
            ValueError: the batch has several timesteps, or the sampler has no training timesteps.
        """
        timestep = args[1] if len(args) > 1 else kwargs["timestep"]
        if not isinstance(timestep, Tensor):
            return timestep
        if timestep.is_cuda and torch.cuda.is_current_stream_capturing():
            return None
        if timestep.dim():
            values = set(timestep.flatten().tolist())
            if len(values) != 1:
                raise ValueError(
                    "ScaleCrafter and schedules take one timestep for the whole batch, but got "
                    f"{sorted(values)}."
                )
            return values.pop()
        # Pipelines iterate over the scheduler's timesteps tensor, so each timestep is a view of it.
        size = timestep.untyped_storage().nbytes() // timestep.element_size()
        table = timestep.as_strided((size,), (1,), 0)
        # Reading CPU memory is free, and NumPy changes it without a new version.
        is_read_each_time = table.is_inference() or table.device.type == "cpu"
        version = None if is_read_each_time else (table.data_ptr(), table._version)
        if version is None or version != self.version:
            self.values = _training_timesteps(table)
            # Kept alive so that no other tensor reuses its address.
            self.table, self.version = table, version
        return self.values[timestep.storage_offset()]


def sampling_weights(alphas_cumprod: Tensor, num_steps: int) -> Tensor:
    """Approximate weight (T,) of a predicted noise's squared error in the image's squared error.

    A DDIM step from timestep t to s, the next of `num_steps` timesteps, moves latents / alpha by
    sigma(t) - sigma(s) times the predicted noise, where sigma is noise over signal. With latents of
    unit variance, later steps keep 1 / sqrt(1 + sigma(t)^2) = alpha(t) of an error.
    """
    sigmas = ((1 - alphas_cumprod) / alphas_cumprod).sqrt()
    stride = max(1, len(sigmas) // num_steps)
    steps = sigmas - F.pad(sigmas, (stride, 0))[: len(sigmas)]
    return steps.square() * alphas_cumprod


def are_training_timesteps(values: Sequence[float]) -> bool:
    """Whether a sampler's timesteps fall from 1000 to 0."""
    # Judged by the largest: training timesteps may end in fractions below 1.
    return len(values) < 2 or max(values) >= 2 or not any(value % 1 for value in values)


def _training_timesteps(table: Tensor) -> list[float]:
    values = table.tolist()
    if not are_training_timesteps(values):
        raise ValueError(
            "ScaleCrafter, schedules, and measure_error with several parts need a sampler whose "
            f"timesteps fall from 1000 to 0, but got one with {max(values):.3g} to "
            f"{min(values):.3g}."
        )
    return values
