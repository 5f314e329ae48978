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

from avq_diffusers.cli.hub import check_found
from avq_diffusers.cli.output import check_image_path
from avq_diffusers.cli.request import Dial, ImageRequest, ModelOptions, ModelRequest, Seed, Steps
from avq_diffusers.mini import MINI_CODEBOOKS, usual_prompts
from avq_diffusers.options import (
    folder_to_write,
    hide_torchvision_notes,
    print_any_text,
    read_prompts,
)

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

Compiled = Annotated[
    bool,
    typer.Option(
        "--compile", help="Compile the model first, which takes minutes: a UNet into CUDA graphs."
    ),
]


def taking(*requests: type[Any]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command the fields of these classes as options; it gets an object of each, in order.

    Further parameters of the command are options of its own.
    """
    shared = [[*signature(request).parameters.values()] for request in requests]

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        further = [*signature(command).parameters.values()][len(requests) :]
        options = [option for fields in (*shared, further) for option in fields]

        @wraps(command)
        def run(**values: Any) -> None:
            read = [
                request(**{field.name: values.pop(field.name) for field in fields})
                for request, fields in zip(requests, shared, strict=True)
            ]
            command(*read, **values)

        read_by_typer: Any = run
        read_by_typer.__signature__ = Signature(
            [option.replace(kind=Parameter.KEYWORD_ONLY) for option in options]
        )
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


def _begin(model: ModelOptions) -> None:
    """Say what is loaded, and refuse names that lead nowhere."""
    _say(f"loading {Path(model.name).name}")
    check_found("--model", model.name, "model_index.json")
    if isinstance(model, ModelRequest) and model.codebooks is not None:
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
@taking(ModelRequest, ImageRequest, Dial)
def generate(
    model: ModelRequest,
    request: ImageRequest,
    dial: Dial,
    compiled: Compiled = False,
    output: Annotated[Path, typer.Option(help="The AVQ image; the sheet goes beside it.")] = Path(
        "avq.png"
    ),
) -> None:
    """Generate an image with AVQ attention, and a sheet with the exact one beside it.

    As in `apply_avq`, layers in which exact attention is faster keep it, unless all would.

    Example: avq generate "three large red patterned stars in a row on a tiled navy background"
    """
    check_image_path(output)
    if len(dial.values) > 1:
        raise ValueError("avq generate sets one value; avq bench compares several.")
    dial.check_for(model)
    _begin(model)

    from avq_diffusers.cli.generate import generate_image

    generate_image(model, request, output, dial, is_compiled=compiled)


@app.command()
@taking(ModelRequest, ImageRequest, Dial)
def bench(
    model: ModelRequest,
    request: ImageRequest,
    dial: Dial,
    images: Annotated[
        int, typer.Option(min=1, help="Images per choice; the table shows medians.")
    ] = 1,
    compiled: Compiled = False,
    output: Annotated[
        Path, typer.Option(help="The plot of speed and PSNR; the sheet goes beside it.")
    ] = Path("avq_bench.png"),
) -> None:
    """Time images with exact attention and with AVQ, at several thresholds, numbers of refined
    parents or tolerances. AVQ runs in all layers, also where exact attention is faster.

    Example: avq bench "a castle at sunset" --model my-model --height 1024 --width 1024
    """
    check_image_path(output)
    dial.check_for(model)
    _begin(model)

    from avq_diffusers.cli.bench import bench_model

    bench_model(model, request, output, dial, num_images=images, is_compiled=compiled)


@app.command("app")
@taking(ModelRequest)
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
@taking(ModelOptions)
def calibrate_command(
    model: ModelOptions,
    output: Annotated[
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
    seed: Seed = 0,
) -> None:
    """Fit codebooks to a model's UNet by running a few prompts, without training.

    Transformers have no codebooks.

    Example: avq calibrate --model my-model --prompts prompts.txt --output my-codebooks
    """
    texts = usual_prompts(model.name) if prompts is None else read_prompts("--prompts", prompts)
    _begin(model)

    from avq_diffusers.cli.codebooks import calibrate_model
    from avq_diffusers.cli.loading import load_pipeline

    pipe = load_pipeline(model.name, model.device, model.dtype)
    calibrated = calibrate_model(
        pipe, model, texts, num_inference_steps=steps, keys_per_layer=keys, seed=seed
    )
    calibrated.save_pretrained(output)
    print(f"codebooks: {output}, for avq generate --codebooks {output}")


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

    from avq_diffusers.cli.codebooks import read_codebooks
    from avq_diffusers.cli.inspection import print_codebooks

    print_codebooks(read_codebooks(codebooks))


@app.command()
def info() -> None:
    """Print versions, GPU, backends and cache folders, for a bug report."""
    _say("looking at packages and devices")
    from avq_diffusers.cli.info import print_info

    print_info()


def main() -> None:
    """Run the command; a user error prints one sentence and exits with code 2."""
    hide_torchvision_notes()
    print_any_text()
    try:
        app()
    except (OSError, ValueError, TypeError, NotImplementedError, ModuleNotFoundError) as error:
        print(f"avq: {error}", file=sys.stderr)
        sys.exit(2)
    except RuntimeError as error:  # only CUDA has an exception of its own for lack of memory
        if not any(text in str(error) for text in ("out of memory", "can't allocate memory")):
            raise
        print(
            "avq: out of memory at this size; try a smaller one, or --device cpu on a GPU.",
            file=sys.stderr,
        )
        sys.exit(2)
