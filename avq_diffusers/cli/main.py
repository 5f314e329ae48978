"""The `avq` command: generate, bench, app, calibrate, inspect, info.

This module reads and checks options. A command's code is imported when it runs, so that help and
refused options do not wait for PyTorch.
"""

import sys
from collections.abc import Callable
from functools import wraps
from importlib.metadata import version
from inspect import Parameter, Signature, signature
from pathlib import Path
from typing import Annotated, Any

import typer

from avq_diffusers.cli.hub import check_found, loading_codebooks
from avq_diffusers.cli.output import check_image_path, sheet_path
from avq_diffusers.cli.request import Dial, ImageRequest, ModelRequest
from avq_diffusers.config import AVQConfig
from avq_diffusers.mini import MINI_CODEBOOKS, model_path, usual_prompts
from avq_diffusers.options import (
    LARGEST_SEED,
    Dilated,
    dtype_name,
    finite,
    folder_to_write,
    hide_torchvision_notes,
    multiple_of,
    not_empty,
    numbers_of,
    read_prompts,
    text_or_none,
    thresholds_of,
    tolerances_of,
)

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

Model = Annotated[
    str,
    typer.Option(
        callback=model_path,
        help="Folder, .safetensors file or Hub id of a text-to-image model, or one of the embedded "
        "models, mini-sd and mini-sd3.",
    ),
]
UNetModel = Annotated[
    str,
    typer.Option(
        callback=model_path,
        help="Folder, .safetensors file or Hub id of a Stable Diffusion model with a UNet, or the "
        "embedded mini-sd; transformers have no codebooks.",
    ),
]
Codebooks = Annotated[
    str | None,
    typer.Option(
        help="Folder or Hub id of codebooks for a UNet. They have their own sizes, so they exclude "
        "--config, --levels, --exact, --threshold and --tolerance. By default, codewords come from "
        "the keys of each call."
    ),
]
Device = Annotated[
    str | None, typer.Option(help="cuda, mps or cpu; by default the fastest available.")
]
Dtype = Annotated[
    str | None,
    typer.Option(
        callback=dtype_name,
        help="float32, float16 or bfloat16; by default half precision on an NVIDIA GPU.",
    ),
]
Compiled = Annotated[
    bool,
    typer.Option(
        "--compile", help="Compile the model first, which takes minutes: a UNet into CUDA graphs."
    ),
]
Config = Annotated[
    str | None,
    typer.Option(
        help="Sizes: M64C8T1e-4 has 64 parents with 8 children each and threshold 1e-4; M64P16C8 "
        "refines 16 parents per query tile instead. By default as in apply_avq."
    ),
]
Levels = Annotated[
    str | None,
    typer.Option(
        help="UNet levels that run AVQ, such as 0,1; 0 is the finest, and the only one of a "
        "transformer. By default 0 and 1, or the finest level with self-attention."
    ),
]
Exact = Annotated[
    str | None,
    typer.Option(
        help="Comma-separated layers or modules at these levels that keep exact attention."
    ),
]
Steps = Annotated[int, typer.Option(min=1, help="Denoising steps.")]
Prompt = Annotated[str, typer.Argument(callback=not_empty, help="What the image shows.")]
NegativePrompt = Annotated[
    str | None, typer.Option(callback=text_or_none, help="What it should not show.")
]
Side = Annotated[int | None, typer.Option(callback=multiple_of(8), help="Pixels, a multiple of 8.")]
GuidanceScale = Annotated[
    float | None,
    typer.Option(callback=finite, help="Classifier-free guidance; by default the model's own."),
]
Threshold = Annotated[
    str | None,
    typer.Option(
        help="How finely keys are seen, in place of --config's: larger is faster, smaller closer "
        "to exact attention, which is 0; not with --codebooks. bench takes several, such as "
        "4e-4,1e-4, by default from 1e-3 to 2.5e-5."
    ),
]
NumRefined = Annotated[
    str | None,
    typer.Option(
        help="Instead of a threshold, the number of parents refined per query tile, at most the "
        "parents of --config or --codebooks. bench takes several, with --codebooks by default from "
        "none to all."
    ),
]
Tolerance = Annotated[
    str | None,
    typer.Option(
        help="Instead of a threshold, the largest relative error of the model's output (noise, "
        "velocity), such as 0.02: measures the layers on this prompt first, then runs the fastest "
        "thresholds within it; not with --codebooks. bench takes several."
    ),
]
Seed = Annotated[int, typer.Option(min=0, max=LARGEST_SEED, help="Seed of the noise.")]


def requested_model(
    model: Model = "mini-sd",
    codebooks: Codebooks = None,
    config: Config = None,
    levels: Levels = None,
    exact: Exact = None,
    device: Device = None,
    dtype: Dtype = None,
) -> ModelRequest:
    """The options for a model."""
    return ModelRequest(
        model,
        device,
        dtype,
        codebooks,
        None if config is None else AVQConfig.parse(config),
        None if levels is None else numbers_of("--levels", levels),
        () if exact is None else tuple(exact.split(",")),
    )


def requested_unet(
    model: UNetModel = "mini-sd",
    config: Config = None,
    levels: Levels = None,
    exact: Exact = None,
    device: Device = None,
) -> ModelRequest:
    """The options for a model that gets codebooks."""
    return requested_model(model, None, config, levels, exact, device)


def requested_image(
    prompt: Prompt,
    negative_prompt: NegativePrompt = None,
    height: Side = None,
    width: Side = None,
    dilated: Dilated = False,
    steps: Steps = 25,
    guidance_scale: GuidanceScale = None,
    seed: Seed = 0,
) -> ImageRequest:
    """The options for an image."""
    return ImageRequest(
        prompt, negative_prompt, height, width, steps, guidance_scale, seed, scalecrafter=dilated
    )


def requested_dial(
    threshold: Threshold = None, num_refined: NumRefined = None, tolerance: Tolerance = None
) -> Dial:
    """The option for what AVQ is set to."""
    return Dial.of(
        threshold=None if threshold is None else thresholds_of("--threshold", threshold),
        num_refined=None if num_refined is None else numbers_of("--num-refined", num_refined),
        tolerance=None if tolerance is None else tolerances_of("--tolerance", tolerance),
    )


def taking(*requests: Callable[..., Any]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command the options of these functions as well; it gets what they return, in order."""

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        shared = [[*signature(request).parameters.values()] for request in requests]
        own = [*signature(command).parameters.values()][len(requests) :]

        @wraps(command)
        def run(**values: Any) -> None:
            read = [
                request(**{option.name: values.pop(option.name) for option in options})
                for request, options in zip(requests, shared, strict=True)
            ]
            command(*read, **values)

        every = [*(option for options in shared for option in options), *own]
        by_name = [option.replace(kind=Parameter.KEYWORD_ONLY) for option in every]
        read_by_typer: Any = run
        read_by_typer.__signature__ = Signature(by_name)
        read_by_typer.__annotations__ = {option.name: option.annotation for option in every}
        return run

    return decorate


def _print_versions(is_asked: bool) -> None:
    if is_asked:
        names = ("avq-diffusers", "torch", "diffusers", "transformers")
        print(", ".join(f"{name} {version(name)}" for name in names))
        raise typer.Exit


def _say(text: str) -> None:
    """Print at once what takes seconds: importing PyTorch alone does."""
    print(text, file=sys.stderr, flush=True)


def _begin(model: ModelRequest) -> None:
    """Say what is loaded, and refuse names that lead nowhere."""
    _say(f"loading {Path(model.name).name}")
    check_found("--model", model.name, "model_index.json")
    if model.codebooks is not None:
        check_found("--codebooks", model.codebooks, "config.json")


@app.callback()
def avq(
    shows_version: Annotated[
        bool,
        typer.Option("--version", callback=_print_versions, is_eager=True, help="Print versions."),
    ] = False,
) -> None:
    """Images of diffusers models with adaptive vector-quantized (AVQ) attention."""


@app.command()
@taking(requested_model, requested_image, requested_dial)
def generate(
    model: ModelRequest,
    request: ImageRequest,
    dial: Dial,
    compiled: Compiled = False,
    out: Annotated[Path, typer.Option(help="The AVQ image; the sheet goes beside it.")] = Path(
        "avq.png"
    ),
) -> None:
    """Generate an image with AVQ attention, and a sheet with the exact one beside it.

    As in `apply_avq`, layers in which exact attention is faster keep it, unless all would.

    Example: avq generate "three large red patterned stars in a row on a tiled navy background"
    """
    check_image_path(out, sheet_path(out))
    if len(dial.values) > 1:
        raise ValueError("avq generate sets one value; avq bench compares several.")
    dial.check_for(model)
    _begin(model)

    from avq_diffusers.cli.generate import generate_image

    generate_image(model, request, out, dial, is_compiled=compiled)


@app.command()
@taking(requested_model, requested_image, requested_dial)
def bench(
    model: ModelRequest,
    request: ImageRequest,
    dial: Dial,
    images: Annotated[
        int, typer.Option(min=1, help="Images per choice; the table shows medians.")
    ] = 1,
    compiled: Compiled = False,
    out: Annotated[
        Path, typer.Option(help="The plot of speed and PSNR; the sheet goes beside it.")
    ] = Path("avq_bench.png"),
) -> None:
    """Time images with exact attention and with AVQ, at several thresholds, numbers of refined
    parents or tolerances. AVQ runs in all layers, also where exact attention is faster.

    Example: avq bench "a castle at sunset" --model my-model --height 1024 --width 1024
    """
    check_image_path(out, sheet_path(out))
    dial.check_for(model)
    _begin(model)

    from avq_diffusers.cli.bench import bench_model

    bench_model(model, request, out, dial, num_images=images, is_compiled=compiled)


@app.command("app")
@taking(requested_model)
def app_command(
    model: ModelRequest,
    host: Annotated[
        str, typer.Option(help="Address to listen on; 0.0.0.0 lets other machines in.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=1, max=65535, help="Port to listen on.")] = 7860,
    share: Annotated[
        bool, typer.Option("--share", help="Also publish the page through Gradio's servers.")
    ] = False,
) -> None:
    """Serve a web page that generates images with exact and with AVQ attention.

    Example: avq app --port 8000
    """
    _begin(model)
    try:
        from avq_diffusers.cli.page import build_page, serve
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "the page needs gradio: in a clone of the repository, pip install -e '.[app]'."
        ) from error
    from avq_diffusers.cli.codebooks import codeword_source
    from avq_diffusers.cli.loading import load_pipeline

    pipe = load_pipeline(model.name, model.device, model.dtype)
    name, prompts = Path(model.name).name, usual_prompts(model.name)
    page = build_page(pipe, name, prompts, codeword_source(pipe, model))
    print(f"page: {serve(page, host=host, port=port, share=share)}", flush=True)
    page.block_thread()


@app.command("calibrate")
@taking(requested_unet)
def calibrate_command(
    model: ModelRequest,
    out: Annotated[
        Path, typer.Option(callback=folder_to_write, help="Folder to save the codebooks in.")
    ],
    prompts: Annotated[
        Path | None,
        typer.Option(help="Text file with one prompt per line; by default a built-in set."),
    ] = None,
    steps: Steps = 25,
    keys: Annotated[
        int, typer.Option(min=1, help="Keys sampled per layer, at least as many as parents.")
    ] = 32768,
    seed: Annotated[
        int, typer.Option(min=0, max=LARGEST_SEED, help="Seed of noise, sampling and k-means.")
    ] = 0,
) -> None:
    """Fit codebooks to a model by running a few prompts, without training.

    Example: avq calibrate --model my-model --prompts prompts.txt --out my-codebooks
    """
    texts = usual_prompts(model.name) if prompts is None else read_prompts("--prompts", prompts)
    _begin(model)

    from avq_diffusers.cli.codebooks import calibrate_model
    from avq_diffusers.cli.loading import load_pipeline

    pipe = load_pipeline(model.name, model.device)
    calibrated = calibrate_model(
        pipe, model, texts, num_inference_steps=steps, keys_per_layer=keys, seed=seed
    )
    calibrated.save_pretrained(out)
    print(f"codebooks: {out}, for avq generate --codebooks {out}")


@app.command()
def inspect(
    codebooks: Annotated[
        str,
        typer.Argument(help="Folder or Hub id of codebooks.", show_default="mini-sd's own"),
    ] = MINI_CODEBOOKS,
) -> None:
    """Print the sizes and metrics of every layer of codebooks.

    Example: avq inspect my-codebooks
    """
    _say(f"loading {Path(codebooks).name}")
    check_found("codebooks", codebooks, "config.json")

    from avq_diffusers.cli.inspection import print_codebooks
    from avq_diffusers.hosts.codebooks import AVQCodebooks

    with loading_codebooks(codebooks):
        stored = AVQCodebooks.from_pretrained(codebooks)
    print_codebooks(stored)


@app.command()
def info() -> None:
    """Print versions, GPU, backends and cache folders, for a bug report."""
    _say("looking at packages and devices")
    from avq_diffusers.cli.info import print_info

    print_info()


def main() -> None:
    """Run the command; a user error prints one sentence and exits with code 2."""
    hide_torchvision_notes()
    try:
        app()
    except (OSError, ValueError, TypeError, NotImplementedError, ModuleNotFoundError) as error:
        print(f"avq: {error}", file=sys.stderr)
        sys.exit(2)
    except RuntimeError as error:
        from avq_diffusers.hosts.core import lacks_memory

        if not lacks_memory(error):
            raise
        print(
            "avq: out of memory at this size; try a smaller one, or --device cpu on a GPU.",
            file=sys.stderr,
        )
        sys.exit(2)
