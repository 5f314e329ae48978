"""Values of options that `avq` and `python -m eval` share."""

import re

from avq_diffusers.mini import MINI_SD, default_prompts

LARGEST_SEED = 2**63 - 1
CALIBRATION_PROMPTS = (
    "a photo of a mountain lake at sunrise, pine trees in the foreground",
    "portrait of an old fisherman, dramatic light, detailed skin",
    "a busy street market at night with neon signs",
    "a bowl of fruit on a wooden table, oil painting",
    "an astronaut riding a horse, digital art",
    "close-up of a dragonfly on a leaf, macro photography",
    "a modern living room with a sofa, large windows and plants",
    "aerial view of a coastline with cliffs and waves",
)


def numbers_of(option: str, text: str) -> tuple[int, ...]:
    """The integers, none below 0, of a comma-separated list; errors name `option`."""
    if re.fullmatch(r"\s*\d+\s*(,\s*\d+\s*)*", text) is None:
        raise ValueError(f"{option} must be numbers such as 0 or 0,1, but got {text!r}.")
    return tuple(map(int, text.split(",")))


def usual_prompts(model: str) -> list[str]:
    """The prompts that a model is calibrated on where none are given."""
    return default_prompts() if model == MINI_SD else list(CALIBRATION_PROMPTS)
