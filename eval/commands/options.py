"""Options, pipelines and error handling for the commands of `python -m eval`."""

import sys
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from avq_diffusers.mini import is_mini_sd3, model_path
from avq_diffusers.options import device_of, dtype_name, folder_to_write, multiple_of
from distill.scenes import VALIDATION_SEEDS, sample_scene

if TYPE_CHECKING:
    from diffusers import DiffusionPipeline

NUM_CALIBRATION_PROMPTS = 16


Dtype = Annotated[
    str | None,
    typer.Option(
        callback=dtype_name,
        help="float32, float16 or bfloat16; by default float16 on a GPU, else float32.",
    ),
]
Device = Annotated[str, typer.Option(help="cpu, cuda or mps.")]
Output = Annotated[Path, typer.Option(callback=folder_to_write, help="Folder for the results.")]
Methods = Annotated[
    str,
    typer.Option(
        help="Comma-separated: exact, value-projection, tome, configurations to calibrate such as "
        "M64P16C8, M192, M64P16C8/means (mean keys) or, with a block or layer kept exact, "
        "M64P16C8-up_blocks.1, with codewords from the call's own keys, with or without Lloyd "
        "updates (M64P16C8/own, M64P16C8/own1), folders of codebooks (all of these also with "
        "another number of refined parents, as in runs/m64/codebooks@P8) or of LinFusion layers."
    ),
]
Levels = Annotated[
    str, typer.Option(help="UNet levels to change, such as 0 or 0,1; folders bring their own.")
]
Images = Annotated[int, typer.Option(min=2, help="Images per method.")]
Size = Annotated[
    int | None,
    typer.Option(
        callback=multiple_of(64),
        help="Side of the images, a multiple of 64; by default the model's own.",
    ),
]
Compiled = Annotated[
    bool, typer.Option("--compile", help="Compile the UNet; pays off from 1000 images on.")
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


def result_name(
    command: str,
    model: str,
    levels: Iterable[int],
    size: int | None = None,
    dilated: bool = False,
) -> str:
    """Name of a result file without extension; includes a size other than the model's own."""
    suffix = (f"_{size}" if size else "") + ("_scalecrafter" if dilated else "")
    if is_mini_sd3(model):
        return f"{command}_mini_sd3{suffix}"
    return f"{command}_levels{''.join(map(str, levels))}{suffix}"


def calibration_prompts() -> list[str]:
    """Captions of validation scenes, which nothing is measured on."""
    return [sample_scene(seed).caption for seed in VALIDATION_SEEDS[:NUM_CALIBRATION_PROMPTS]]


def load_pipeline(model: str, device: str, dtype: str = "float32") -> "DiffusionPipeline":
    """A pipeline of Stable Diffusion or mini-sd3 on a device, without its own progress bars."""
    import torch
    from diffusers import StableDiffusionPipeline

    from avq_diffusers.mini.loading import load_mini_sd3

    load = load_mini_sd3 if is_mini_sd3(model) else StableDiffusionPipeline.from_pretrained
    pipe = load(model, dtype=getattr(torch, dtype))
    pipe.set_progress_bar_config(disable=True)
    return pipe.to(device_of(device))


def run_app(app: typer.Typer) -> None:
    """Run a command; a user error prints one sentence and exits with code 2."""
    try:
        app()
    except (ImportError, OSError, ValueError, TypeError) as error:
        print(f"eval: {error}", file=sys.stderr)
        sys.exit(2)
