"""ScaleCrafter's settings per image size: the authors' for SD1.5, and mini-sd's own."""

import math
from dataclasses import dataclass

from avq_diffusers.config import check_int
from avq_diffusers.hosts.core import NUM_TRAIN_TIMESTEPS

# The paper's settings count steps of DDIM with 50 steps.
NUM_STEPS = 50


@dataclass(frozen=True)
class ScaleCrafterConfig:
    """What ScaleCrafter does for one image size.

    Attributes:
        dilations: dilation of the convolutions at UNet level 0 (highest resolution), 1, and so on.
            The last one serves all deeper levels and the middle block. 1 leaves a level unchanged.
        num_dilated_steps: dilate this many steps, the first of 50. With another sampler or number
            of steps: the timesteps that these steps cover.
        progressive: dilations decrease step by step to 2.
        downsamplers: dilate stride-2 convolutions, too, as the authors do.

    Raises:
        TypeError: the number of steps is not an int.
        ValueError: a field is out of range.
    """

    dilations: tuple[float, ...]
    num_dilated_steps: int
    progressive: bool = False
    downsamplers: bool = True

    def __post_init__(self) -> None:
        if not _are_dilations(self.dilations):
            raise ValueError(
                f"dilations must hold numbers from 1 to 16, one per level, but got "
                f"{self.dilations}."
            )
        if max(self.dilations) == 1:
            raise ValueError(f"dilations must be above 1 at some level, but got {self.dilations}.")
        check_int("num_dilated_steps", self.num_dilated_steps, 1)
        if self.num_dilated_steps > NUM_STEPS:
            raise ValueError(
                f"num_dilated_steps must be at most {NUM_STEPS}, but got {self.num_dilated_steps}."
            )

    def dilations_at(self, timestep: float) -> tuple[float, ...] | None:
        """The dilation of each level at a timestep (0 to 999); None outside the dilated part."""
        # DDIM's step i is at 980 - 20 i, 981 - 20 i or 999 - 20 i, depending on the spacing.
        # Divided last: 0.58 * 50 is slightly less than 29.
        elapsed = (NUM_TRAIN_TIMESTEPS - 1 - timestep) * NUM_STEPS
        step = max(0, math.floor(elapsed / NUM_TRAIN_TIMESTEPS))
        if step >= self.num_dilated_steps:
            return None
        if not self.progressive:
            return self.dilations
        left = self.num_dilated_steps - step
        return tuple(
            max(math.ceil(dilation * left / self.num_dilated_steps), 2) if dilation > 1 else 1
            for dilation in self.dilations
        )


def at_level(dilations: tuple[float, ...], level: int) -> float:
    """The entry of `dilations` for a UNet `level`; the last one covers all deeper levels."""
    return dilations[min(level, len(dilations) - 1)]


def usual_config(height: int, width: int, training_size: int) -> ScaleCrafterConfig:
    """The authors' settings for an image size, without their noise-damped guidance.

    Args:
        height, width, training_size: in pixels.

    Raises:
        ValueError: there are none for this size.
    """
    config = SETTINGS.get((height / training_size, width / training_size))
    if config is None:
        sizes = ", ".join(
            f"{rows * training_size:g} x {columns * training_size:g}" for rows, columns in SETTINGS
        )
        raise ValueError(
            f"there are ScaleCrafter settings for {sizes} (height x width) at a training size of "
            f"{training_size}, but got {height} x {width}; pass a ScaleCrafterConfig for others."
        )
    return config


def _are_dilations(values: object) -> bool:
    return (
        isinstance(values, tuple | list)
        and len(values) > 0
        and all(isinstance(value, int | float) and 1 <= value <= 16 for value in values)
    )


# The authors' settings for SD1.5 (training size 512) with DDIM, 50 steps and guidance 7.5. Their
# dilate_tau is num_dilated_steps. At four times a side, they also use noise-damped guidance, which
# is left out: a second, weaker dilated evaluation of the UNet gives the unconditional noise.
SD15_1024 = ScaleCrafterConfig(dilations=(1, 2), num_dilated_steps=30)
SD15_1280 = ScaleCrafterConfig(dilations=(1, 2.5), num_dilated_steps=35)
SD15_2048 = ScaleCrafterConfig(dilations=(1, 2, 3, 4), num_dilated_steps=35, progressive=True)

# By height and width in units of the training size.
SETTINGS = {
    (2, 2): SD15_1024,
    (2.5, 2.5): SD15_1280,
    (4, 2): SD15_2048,
    (2, 4): SD15_2048,
    (4, 4): SD15_2048,
}

# For twice mini-sd's training size. Undilated steps, even late ones, shrink objects and tiles back
# to their size in training. Dilated downsamplers deform them.
MINI_SCALECRAFTER = ScaleCrafterConfig(dilations=(1, 2), num_dilated_steps=50, downsamplers=False)
