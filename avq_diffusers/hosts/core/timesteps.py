"""The training timestep of a model's call, and values that change with it.

Training timesteps fall from 1000 to 0 during generation. Unlike step indices, they mean the same
for every sampler and number of steps. With flow matching they are mostly 1000 times the noise
level.
Samplers that pass a UNet other numbers in several steps are refused: EDM passes the log of the
noise level, IPNDM a fraction.
"""

from collections.abc import Mapping, Sequence
from math import ceil
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from avq_diffusers.hosts.core.arguments import named_arguments
from avq_diffusers.hosts.core.reading import read_once

NUM_TRAIN_TIMESTEPS = 1000
DIGITS = 2  # kept of a timestep: fractions in float32 are off by up to 1e-4
Value = TypeVar("Value")


def at_timestep(schedule: Mapping[int, Value], timestep: float) -> Value:
    """The value of a schedule such as {1000: 8, 400: 16}: 8 from 1000 down, 16 from 400 down."""
    starts = (start for start in schedule if start >= timestep)
    return schedule[min(starts, default=NUM_TRAIN_TIMESTEPS)]


class TimestepArgument(NamedTuple):
    """The argument that tells a model the training timestep.

    Attributes:
        name: parameter of the model's `forward`.
        scale, offset: what turns it into the timestep.
    """

    name: str = "timestep"
    scale: float = 1.0
    offset: float = 0.0

    def timestep(self, told: Any) -> Any:
        """The timestep that a number or tensor tells."""
        return self.offset + self.scale * told


TIMESTEP = TimestepArgument()


class Timesteps(NamedTuple):
    """Reads the timesteps of a model's calls from the device.

    Views of a scheduler's timesteps are read once per image instead of once per call.

    Attributes:
        model: the model's class.
        argument: the argument that tells the timestep.
    """

    model: type[nn.Module]
    argument: TimestepArgument

    def read(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> float | None:
        """The timestep among a model's arguments, as a number.

        Of the timesteps of one image's tokens, the largest: given frames have timestep 0. Rounded,
        because fractions are not exact. None during CUDA graph capture, which forbids reading from
        the device.
        """
        told = named_arguments(self.model, args, kwargs)[self.argument.name]
        if not isinstance(told, Tensor):
            return round(self.argument.timestep(told), DIGITS)
        if told.is_cuda and torch.cuda.is_current_stream_capturing():
            return None
        if not any(told.stride()):
            return self._of_view(told)
        token_timesteps = self.argument.timestep(told.float()).reshape(len(told), -1)
        values = set(token_timesteps.amax(dim=1).tolist())
        if len(values) != 1:
            raise ValueError(
                "ScaleCrafter and schedules take one timestep for the whole batch, but got "
                f"{', '.join(f'{value:g}' for value in sorted(values))}."
            )
        return round(values.pop(), DIGITS)

    def told(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> float | None:
        """The largest number that a call tells as its timestep; of any sampler."""
        told = named_arguments(self.model, args, kwargs).get(self.argument.name)
        return None if told is None else float(self.argument.timestep(torch.as_tensor(told)).max())

    def _of_view(self, timestep: Tensor) -> float:
        """The timestep that a view of one number tells, mostly of a scheduler's timesteps."""
        size = timestep.untyped_storage().nbytes() // timestep.element_size()
        table = timestep.as_strided((size,), (1,), 0)

        def read() -> list[float]:
            values = [round(self.argument.timestep(told), DIGITS) for told in table.tolist()]
            return _training_timesteps(values)

        # Reading CPU memory is free, and NumPy changes it without a new version.
        is_read_each_time = table.device.type == "cpu"
        values = read() if is_read_each_time else read_once(table, read, self.argument)
        return values[timestep.storage_offset()]


def starts_of_parts(timesteps: Sequence[float], parts: int) -> list[int]:
    """Where parts of equally many denoising steps start: at 1000, then at a part's first step."""
    steps = [*dict.fromkeys(timesteps)]
    firsts = sorted({len(steps) * part // parts for part in range(1, parts)} - {0})
    return [NUM_TRAIN_TIMESTEPS, *(ceil(rounded_up(steps[first])) for first in firsts)]


def rounded_up(timestep: float) -> float:
    """The largest number read for a timestep that a pipeline passes in bfloat16."""
    return 1.008 * timestep + 4


def are_training_timesteps(values: Sequence[float]) -> bool:
    """Whether a sampler's timesteps fall from 1000 to 0."""
    # Judged by the largest: training timesteps may end in fractions below 1. So a single value, as
    # of a sampler with one step, tells nothing.
    return len(values) < 2 or max(values) >= 2 or not any(value % 1 for value in values)


def _training_timesteps(values: list[float]) -> list[float]:
    if not are_training_timesteps(values):
        raise ValueError(
            "ScaleCrafter, schedules, and measure_error with several parts need a sampler whose "
            f"timesteps fall from 1000 to 0, but got one with {max(values):.3g} to "
            f"{min(values):.3g}."
        )
    return values
