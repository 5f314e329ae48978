"""Options that `avq` and `python -m eval` share: what their values stand for, which are refused."""

import math
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import torch
import typer

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

Dilated = Annotated[
    bool,
    typer.Option(
        "--scalecrafter/--no-scalecrafter",
        help="Dilate convolutions, for pictures larger than the model was trained on.",
    ),
]


def numbers_of(option: str, text: str) -> tuple[int, ...]:
    """The integers, none below 0, of a comma-separated list; errors name `option`."""
    if re.fullmatch(r"\s*\d+\s*(,\s*\d+\s*)*", text) is None:
        raise ValueError(f"{option} must be numbers such as 0 or 0,1, but got {text!r}.")
    return tuple(map(int, text.split(",")))


def usual_prompts(model: str) -> list[str]:
    """The prompts that a model is calibrated on where none are given."""
    return default_prompts() if model == MINI_SD else list(CALIBRATION_PROMPTS)


def read_prompts(option: str, path: Path) -> list[str]:
    """The lines of a file that are not blank; errors name `option`."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise ValueError(f"{option} {path} cannot be read ({error.strerror}).") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"{option} {path} is not UTF-8 ({error.reason}).") from error
    prompts = [line.strip() for line in lines if line.strip()]
    if not prompts:
        raise ValueError(f"{option} {path} holds no prompt; write one per line.")
    return prompts


def device_of(name: str) -> torch.device:
    """The device, if this machine has it."""
    try:
        return torch.empty(0, device=name).device
    except (AssertionError, RuntimeError) as error:
        raise ValueError(f"--device {name} cannot be used: {first_line(error)}") from error


def first_line(error: Exception) -> str:
    """What an error of a library says first, for a message of one line."""
    return str(error).strip().splitlines()[0]


def finite(option: typer.CallbackParam, value: float | None) -> float | None:
    """Callback of an option that is a number: refuse infinity and NaN."""
    if value is not None and not math.isfinite(value):
        raise ValueError(f"{option.opts[0]} must be finite, but got {value}.")
    return value


def multiple_of(unit: int) -> Callable[[typer.CallbackParam, int | None], int | None]:
    """Callback of an option that is a side of pictures."""

    def check(option: typer.CallbackParam, side: int | None) -> int | None:
        if side is not None and (side < unit or side % unit):
            raise ValueError(f"{option.opts[0]} must be a multiple of {unit}, but got {side}.")
        return side

    return check


def folder_to_write(option: typer.CallbackParam, path: Path) -> Path:
    """Callback of an option that is a folder, there or not."""
    check_writable(option.opts[0], path)
    return path


def check_writable(option: str, folder: Path) -> None:
    """Refuse before the work, not after it; errors name `option`."""
    place = folder.absolute()
    present = next(path for path in (place, *place.parents) if path.exists())
    if not present.is_dir():
        raise ValueError(f"{option} must be a folder, but {present} is a file.")
    if not os.access(present, os.W_OK):
        raise ValueError(f"{option}: the folder {present} is not writable.")
