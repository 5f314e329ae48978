"""Options that `avq`, `python -m eval` and `python -m distill` share, and checks of their values.

Nothing here imports PyTorch before it is needed, so that a program refuses a bad value at once.
"""

import logging
import math
import os
import re
import sys
from collections.abc import Callable
from io import TextIOWrapper
from pathlib import Path
from tempfile import TemporaryFile
from typing import TYPE_CHECKING, Annotated

import typer

from avq_diffusers.captions import read_caption_list
from avq_diffusers.config import check_text, check_threshold, check_tolerance

if TYPE_CHECKING:
    import torch

LARGEST_SEED = 2**63 - 1
DTYPES = ("float32", "float16", "bfloat16")

Dilated = Annotated[
    bool,
    typer.Option(
        "--scalecrafter/--no-scalecrafter",
        help="Dilate convolutions, for images larger than the model was trained on.",
    ),
]


def dtype_name(name: str | None) -> str | None:
    """Callback for a dtype."""
    if name not in (None, *DTYPES):
        raise ValueError(f"--dtype must be one of {', '.join(DTYPES)}, but got {name!r}.")
    return name


def numbers_of(option: str, text: str) -> tuple[int, ...]:
    """Read a comma-separated list of non-negative integers; errors name `option`."""
    if re.fullmatch(r"\s*\d{1,18}\s*(,\s*\d{1,18}\s*)*", text, re.ASCII) is None:
        raise ValueError(f"{option} must be numbers such as 0 or 0,1, but got {text!r}.")
    return tuple(map(int, text.split(",")))


def tolerances_of(option: str, text: str) -> tuple[float, ...]:
    """Read a comma-separated list of tolerances; errors name `option`."""
    return tuple(check_tolerance(x, option) for x in _fractions_of(option, text))


def thresholds_of(option: str, text: str) -> tuple[float, ...]:
    """Read a comma-separated list of thresholds; errors name `option`."""
    return tuple(check_threshold(x, option) for x in _fractions_of(option, text))


def _fractions_of(option: str, text: str) -> tuple[float, ...]:
    try:
        return tuple(map(float, text.split(",")))
    except ValueError as error:
        raise ValueError(
            f"{option} must be numbers such as 0.1 or 0.05,0.1, but got {text!r}."
        ) from error


def read_prompts(option: str, path: Path) -> list[str]:
    """Read the prompts of a file like `read_caption_list`, without empty ones.

    Raises:
        ValueError: the file cannot be read or holds no prompt; the message names `option`.
    """
    try:
        prompts = [prompt for prompt in read_caption_list(path) if prompt]
    except OSError as error:
        raise ValueError(f"{option} {path} cannot be read ({error.strerror}).") from error
    except ValueError as error:
        raise ValueError(f"{option}: {error}") from error
    if not prompts:
        raise ValueError(f"{option} {path} holds no prompt; write one per line.")
    return prompts


def device_of(name: str | None) -> "torch.device":
    """Return the device of this name; None takes the fastest available.

    Raises:
        ValueError: this machine has no such device.
    """
    import torch

    if name is None:
        name = next((x for x in ("cuda", "mps") if getattr(torch, x).is_available()), "cpu")
    try:
        return torch.empty(0, device=name).device
    except (AssertionError, RuntimeError) as error:
        raise ValueError(f"--device {name} cannot be used: {first_line(error)}") from error


def restore_threads() -> None:
    """Let PyTorch, not yet imported, use all cores where `accelerate launch` restricts it to one.

    The launcher sets OMP_NUM_THREADS to 1 even for a machine's only process.
    """
    launched = "ACCELERATE_DYNAMO_BACKEND" in os.environ and "LOCAL_WORLD_SIZE" not in os.environ
    if launched and os.environ.get("OMP_NUM_THREADS") == "1":
        del os.environ["OMP_NUM_THREADS"]


def hide_torchvision_notes() -> None:
    """Hide notes that image processors imported by diffusers fall back to PIL, not torchvision."""

    def is_other(record: logging.LogRecord) -> bool:
        return "requires torchvision" not in record.getMessage()

    logging.getLogger("transformers.utils.import_utils").addFilter(is_other)


def print_any_text() -> None:
    """Let stdout show escapes of characters that its encoding lacks, rather than fail."""
    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")


def first_line(error: Exception) -> str:
    """Return the first line of a library's error, for a one-line message."""
    return str(error).strip().splitlines()[0]


def finite(option: typer.CallbackParam, value: float | None) -> float | None:
    """Callback for a number option: refuse infinity and NaN."""
    if value is not None and not math.isfinite(value):
        raise ValueError(f"{option.opts[0]} must be finite, but got {value}.")
    return value


def not_empty(text: str) -> str:
    """Callback for a prompt: refuse an empty one, and bytes that are not UTF-8."""
    if not text.strip():
        raise ValueError("the prompt is empty; say what the image shows.")
    return check_text("the prompt", text)


def multiple_of(unit: int) -> Callable[[typer.CallbackParam, int | None], int | None]:
    """Make the callback for an option that sets the height or width of images."""

    def check(option: typer.CallbackParam, side: int | None) -> int | None:
        if side is not None and (side < unit or side % unit):
            raise ValueError(f"{option.opts[0]} must be a multiple of {unit}, but got {side}.")
        return side

    return check


def folder_to_write(option: typer.CallbackParam, path: Path) -> Path:
    """Callback for an output folder, whether it exists or not."""
    place = path.absolute()
    present = next(path for path in (place, *place.parents) if path.exists())
    if not present.is_dir():
        raise ValueError(f"{option.opts[0]} must be a folder, but {present} is a file.")
    try:
        TemporaryFile(dir=present).close()
    except OSError as error:
        raise ValueError(
            f"{option.opts[0]}: the folder {present} is not writable ({error.strerror})."
        ) from error
    return path
