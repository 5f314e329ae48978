"""The `avq` command: generate, bench, app, calibrate, inspect."""

import hashlib
import math
import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import typer
from diffusers import DiffusionPipeline
from PIL import Image
from platformdirs import user_cache_path
from rich.console import Console
from torch import nn

from avq_diffusers.cli.comparison import psnr, timed_picture
from avq_diffusers.cli.inspection import codebook_table, plot_codebooks
from avq_diffusers.cli.loading import load_pipeline
from avq_diffusers.cli.options import (
    LARGEST_SEED,
    Dilated,
    check_writable,
    finite,
    first_line,
    folder_to_write,
    multiple_of,
    numbers_of,
    read_prompts,
    usual_prompts,
)
from avq_diffusers.cli.sheet import DIFFERENCE_GAIN, difference, picture_sheet
from avq_diffusers.cli.sweep import (
    capture_choices,
    draw_choices,
    plot_sweep,
    refined_choices,
    sweep_sheet,
    sweep_table,
)
from avq_diffusers.config import AVQConfig
from avq_diffusers.extras.scalecrafter.apply import check_size, scalecrafter
from avq_diffusers.files import atomic_write
from avq_diffusers.mini import (
    MINI_CODEBOOKS,
    MINI_CODEBOOKS_LEVEL1,
    MINI_GUIDANCE_SCALE,
    MINI_SD,
    model_path,
)
from avq_diffusers.plugin.apply import apply_avq, avq_disabled
from avq_diffusers.plugin.calibration import calibrate
from avq_diffusers.plugin.codebooks import FORMAT_VERSION, AVQCodebooks
from avq_diffusers.plugin.elastic import CaptureProfile, measure_capture
from avq_diffusers.plugin.layers import select_layers, unet_of
from avq_diffusers.plugin.prompts import lacks_memory
from avq_diffusers.plugin.refinement import refinable_parents, set_num_refined
from avq_diffusers.plugin.report import summary
from avq_diffusers.plugin.timesteps import are_training_timesteps

DEFAULT_CONFIG = "M64P16C8"
REPORT_WIDTH = 100
CAPTURE_STEPS = 8
FINGERPRINT_VALUES = 1024

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
console = Console()

Model = Annotated[
    str,
    typer.Option(
        callback=model_path,
        help="Folder, .safetensors file or Hub id of a Stable Diffusion model, or mini-sd, the "
        "embedded one.",
    ),
]
Codebooks = Annotated[
    str | None,
    typer.Option(help="Folder or Hub id of codebooks; calibrated once and cached when absent."),
]
Device = Annotated[
    str | None, typer.Option(help="cuda, mps or cpu; by default the fastest present.")
]
Config = Annotated[
    str | None, typer.Option(help=f"Codebook sizes to calibrate, by default {DEFAULT_CONFIG}.")
]
Levels = Annotated[
    str | None,
    typer.Option(
        help="UNet levels to calibrate, as 0,1; by default the highest resolution that has "
        "self-attention."
    ),
]
Exact = Annotated[
    str | None,
    typer.Option(
        help="Layers or modules at these levels, comma-separated, that keep exact attention."
    ),
]
Steps = Annotated[int, typer.Option(min=1, help="Denoising steps.")]
Prompt = Annotated[str, typer.Argument(help="What the picture shows.")]
NegativePrompt = Annotated[str | None, typer.Option(help="What it must not show.")]
Side = Annotated[int | None, typer.Option(callback=multiple_of(8), help="Pixels, a multiple of 8.")]
GuidanceScale = Annotated[
    float | None,
    typer.Option(callback=finite, help="Classifier-free guidance; by default the model's own."),
]
Seed = Annotated[int, typer.Option(min=0, max=LARGEST_SEED, help="Seed of the noise.")]


def _print_versions(is_asked: bool) -> None:
    if is_asked:
        names = ("avq-diffusers", "torch", "diffusers", "transformers")
        console.print(", ".join(f"{name} {version(name)}" for name in names))
        raise typer.Exit


@app.callback()
def avq(
    shows_version: Annotated[
        bool,
        typer.Option("--version", callback=_print_versions, is_eager=True, help="Print versions."),
    ] = False,
) -> None:
    """Stable Diffusion with adaptive vector-quantized (AVQ) attention."""


@app.command()
def generate(
    prompt: Prompt,
    model: Model = "mini-sd",
    codebooks: Codebooks = None,
    config: Config = None,
    levels: Levels = None,
    exact: Exact = None,
    negative_prompt: NegativePrompt = None,
    height: Side = None,
    width: Side = None,
    dilated: Dilated = False,
    steps: Steps = 25,
    guidance_scale: GuidanceScale = None,
    seed: Seed = 0,
    num_refined: Annotated[
        int | None,
        typer.Option(
            help="Parents refined per query tile; by default as many as the codebooks say."
        ),
    ] = None,
    capture: Annotated[
        float | None,
        typer.Option(
            help="As few refined parents, by layer and timestep, as get this share of attention, "
            "such as 0.9; measured on this prompt."
        ),
    ] = None,
    device: Device = None,
    out: Annotated[Path, typer.Option(help="The AVQ picture; the sheet lies beside it.")] = Path(
        "avq.png"
    ),
) -> None:
    """Make a picture with AVQ attention, and a sheet with the exact one beside it.

    Example: avq generate "three large red patterned stars in a row on a tiled navy background"
    """
    _check_output(out, _sheet_path(out))
    if capture is not None and num_refined is not None:
        raise ValueError("--num-refined and --capture exclude each other; drop one of them.")
    if capture is not None and not 0 < capture <= 1:
        raise ValueError(f"--capture must be above 0 and at most 1, but got {capture}.")
    refined = [] if num_refined is None else [num_refined]
    pipe, avq_config = _load_model(model, codebooks, config, levels, exact, device)
    if capture is not None and codebooks is None and not avq_config.most_refined:
        raise ValueError(f"--capture chooses refined parents, but {avq_config} has no children.")
    arguments = _picture_arguments(
        pipe, model, prompt, negative_prompt, height, width, dilated, steps, guidance_scale
    )
    _add_avq(pipe, model, codebooks, avq_config, refined)
    if num_refined is not None:
        set_num_refined(pipe, num_refined)
    with _dilation(pipe, arguments, dilated):
        if capture is not None:
            console.print(f"measuring which parents get {capture:.0%} of attention")
            set_num_refined(pipe, _measure_capture(pipe, arguments, seed).at_least(capture))

        console.print("with AVQ attention")
        avq, avq_seconds = timed_picture(pipe, arguments, seed)
        report = summary(pipe)
        console.print("with exact attention")
        with avq_disabled(pipe):
            exact_picture, exact_seconds = timed_picture(pipe, arguments, seed)

    _save(avq, out)
    sheet_path = _sheet_path(out)
    likeness = f"PSNR {psnr(avq, exact_picture):.1f} dB"
    sheet = picture_sheet(
        [[exact_picture, avq, difference(exact_picture, avq)]],
        [
            f"exact, {exact_seconds:.1f} s",
            f"AVQ, {avq_seconds:.1f} s",
            f"difference x{DIFFERENCE_GAIN}, {likeness}",
        ],
        row_titles=[f"{prompt} (seed {seed}, {steps} steps)"],
        table=report.cells(),
    )
    _save(sheet, sheet_path)
    print(report)
    console.print(
        f"exact {exact_seconds:.1f} s, AVQ {avq_seconds:.1f} s, {likeness} to the exact picture"
    )
    print(f"picture: {out}\nsheet:   {sheet_path}")


@app.command()
def bench(
    prompt: Prompt,
    model: Model = "mini-sd",
    codebooks: Codebooks = None,
    config: Config = None,
    levels: Levels = None,
    exact: Exact = None,
    negative_prompt: NegativePrompt = None,
    height: Side = None,
    width: Side = None,
    dilated: Dilated = False,
    steps: Steps = 25,
    guidance_scale: GuidanceScale = None,
    seed: Seed = 0,
    refined: Annotated[
        str | None,
        typer.Option(help="Numbers of refined parents, as 0,4,16; by default from none to all."),
    ] = None,
    pictures: Annotated[
        int, typer.Option(min=1, help="Pictures per choice; their medians are shown.")
    ] = 1,
    device: Device = None,
    out: Annotated[
        Path, typer.Option(help="The plot of speed and likeness; the pictures lie beside it.")
    ] = Path("avq_bench.png"),
) -> None:
    """Time pictures with exact attention and with AVQ at several numbers of refined parents.

    The last rows refine, by layer and timestep, as few parents as get a share of the attention.

    Example: avq bench "a castle at sunset" --model my-model --height 1024 --width 1024
    """
    _check_output(out, _sheet_path(out))
    numbers = None if refined is None else numbers_of("--refined", refined)
    pipe, avq_config = _load_model(model, codebooks, config, levels, exact, device)
    arguments = _picture_arguments(
        pipe, model, prompt, negative_prompt, height, width, dilated, steps, guidance_scale
    )
    _add_avq(pipe, model, codebooks, avq_config, numbers or ())
    choices = refined_choices(pipe, numbers)
    seeds = range(seed, seed + pictures)
    with _dilation(pipe, arguments, dilated):
        if any(refinable_parents(pipe).values()):
            console.print("measuring which parents get the attention")
            choices += capture_choices(_measure_capture(pipe, arguments, seed))
        drawn = list(draw_choices(pipe, choices, arguments, seeds))
    console.print(sweep_table(drawn))
    title = f"{Path(model).name}, {arguments['width']}x{arguments['height']}, {steps} steps"
    plot_sweep(drawn, title, out)
    sheet_path = _sheet_path(out)
    titles = [f"{prompt} (seed {seed}, {steps} steps)" for seed in seeds]
    _save(sweep_sheet(drawn, titles), sheet_path)
    print(f"plot:     {out}\npictures: {sheet_path}")


@app.command("app")
def app_command(
    model: Model = "mini-sd",
    codebooks: Codebooks = None,
    config: Config = None,
    levels: Levels = None,
    exact: Exact = None,
    device: Device = None,
    host: Annotated[
        str, typer.Option(help="Address to listen on; 0.0.0.0 lets other machines in.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=1, max=65535, help="Port to listen on.")] = 7860,
    share: Annotated[
        bool, typer.Option("--share", help="Also publish the page through Gradio's servers.")
    ] = False,
) -> None:
    """Serve a page, for a browser, that draws pictures with exact and with AVQ attention.

    Example: avq app --port 8000
    """
    try:
        from avq_diffusers.cli.page import build_page, serve
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "the page needs gradio: pip install 'avq-diffusers[app]'."
        ) from error
    pipe, avq_config = _load_model(model, codebooks, config, levels, exact, device)
    _add_avq(pipe, model, codebooks, avq_config)
    page = build_page(pipe, Path(model).name, usual_prompts(model), **_usual_guidance(model))
    print(f"page: {serve(page, host=host, port=port, share=share)}", flush=True)
    page.block_thread()


@app.command("calibrate")
def calibrate_command(
    out: Annotated[
        Path, typer.Option(callback=folder_to_write, help="Folder to save the codebooks in.")
    ],
    model: Model = "mini-sd",
    prompts: Annotated[
        Path | None,
        typer.Option(help="Text file with one prompt per line; by default a built-in set."),
    ] = None,
    config: Config = None,
    levels: Levels = None,
    exact: Exact = None,
    steps: Steps = 25,
    keys: Annotated[int, typer.Option(min=1, help="Keys sampled in each layer.")] = 32768,
    seed: Annotated[
        int, typer.Option(min=0, max=LARGEST_SEED, help="Seed of noise, sample and k-means.")
    ] = 0,
    device: Device = None,
) -> None:
    """Fit codebooks to a model by running a few prompts; no training.

    Example: avq calibrate --model my-model --prompts prompts.txt --out my-codebooks
    """
    chosen = usual_prompts(model) if prompts is None else read_prompts("--prompts", prompts)
    pipe, avq_config = _load_model(model, None, config, levels, exact, device)
    codebooks = calibrate(
        pipe,
        chosen,
        avq_config,
        num_inference_steps=steps,
        keys_per_layer=keys,
        seed=seed,
        **_usual_guidance(model),
    )
    codebooks.save_pretrained(out)
    print(f"codebooks: {out}")


@app.command()
def inspect(
    codebooks: Annotated[
        str, typer.Argument(help="Folder or Hub id of codebooks; mini-sd's own.")
    ] = MINI_CODEBOOKS,
    out: Annotated[Path, typer.Option(help="The plot to write.")] = Path("codebooks.png"),
) -> None:
    """Print and plot a report on codebooks: sizes, calibration figures, codewords in a projection.

    Example: avq inspect my-codebooks --out report.png
    """
    _check_output(out)
    loaded = _load_codebooks(codebooks)
    # A narrow terminal wraps the table; rich would cut names and figures off.
    Console(width=max(console.width, REPORT_WIDTH)).print(codebook_table(loaded))
    plot_codebooks(loaded, out)
    print(f"plot: {out}")


def main() -> None:
    """Run the command; a mistake of the user's is one sentence and exit code 2."""
    try:
        app()
    except (OSError, ValueError, TypeError, NotImplementedError, ModuleNotFoundError) as error:
        print(f"avq: {error}", file=sys.stderr)
        sys.exit(2)
    except RuntimeError as error:
        if not lacks_memory(error):
            raise
        print(
            "avq: the memory is too small for this size; try a smaller one, or --device cpu on a "
            "GPU.",
            file=sys.stderr,
        )
        sys.exit(2)


def _load_model(
    model: str,
    codebooks: str | None,
    config: str | None,
    levels: str | None,
    exact: str | None,
    device: str | None,
) -> tuple[DiffusionPipeline, AVQConfig]:
    """The pipeline, and what to calibrate it with."""
    if codebooks is not None and any(x is not None for x in (config, levels, exact)):
        raise ValueError(
            "--codebooks bring their own --config, --levels and --exact; drop one of them."
        )
    avq_config = AVQConfig.parse(
        config or DEFAULT_CONFIG,
        levels=(0,) if levels is None else numbers_of("--levels", levels),
        exact=tuple(exact.split(",")) if exact else (),
    )
    pipe = load_pipeline(model, device)
    if levels is None:  # SDXL has no self-attention at level 0
        present = (layer.level for layer in select_layers(unet_of(pipe)))
        avq_config = replace(avq_config, levels=(min(present, default=0),))
    return pipe, avq_config


def _add_avq(
    pipe: DiffusionPipeline,
    model: str,
    codebooks: str | None,
    config: AVQConfig,
    refined: Sequence[int] = (),
) -> None:
    """Apply AVQ; refuse numbers of refined parents that codebooks to calibrate will not have."""
    if codebooks is None and not all(0 <= number <= config.most_refined for number in refined):
        raise ValueError(
            f"{config} can refine 0 to {config.most_refined} parents, but got "
            f"{', '.join(map(str, refined))}."
        )
    apply_avq(pipe, _find_codebooks(pipe, model, codebooks, config), route="always")


def _find_codebooks(
    pipe: DiffusionPipeline, model: str, codebooks: str | None, config: AVQConfig
) -> AVQCodebooks:
    """The codebooks named, mini-sd's own, or calibrated ones from the user's cache."""
    if codebooks is not None:
        return _load_codebooks(codebooks)
    if model == MINI_SD and config in (shipped := _shipped_codebooks()):
        return AVQCodebooks.from_pretrained(shipped[config])
    folder = user_cache_path("avq-diffusers") / _fingerprint(pipe, config)
    if folder.exists():
        print(f"codebooks from the cache: {folder}")
        try:
            return AVQCodebooks.from_pretrained(folder)
        except (OSError, ValueError) as error:
            raise ValueError(
                f"the codebooks in the cache are damaged: {first_line(error)} Delete {folder} to "
                f"calibrate again."
            ) from error
    select_layers(unet_of(pipe), config.levels, config.exact)  # refuses what is not there
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        place = TemporaryDirectory(dir=folder.parent)
    except OSError as error:
        raise ValueError(
            f"the cache {folder.parent} cannot be written ({error.strerror}); make codebooks by "
            f"avq calibrate, and pass them by --codebooks."
        ) from error
    print(f"no codebooks for this model yet: calibrating once, cached in {folder}")
    with place as partial:
        prompts = usual_prompts(model)
        calibrated = calibrate(pipe, prompts, config, **_usual_guidance(model))
        calibrated.save_pretrained(Path(partial) / "codebooks")
        if not folder.exists():  # another process may have been faster
            (Path(partial) / "codebooks").rename(folder)
    return calibrated


def _load_codebooks(name: str) -> AVQCodebooks:
    try:
        return AVQCodebooks.from_pretrained(name)
    except OSError as error:
        raise ValueError(f"codebooks {name} could not be loaded: {first_line(error)}") from error


def _fingerprint(pipe: DiffusionPipeline, config: AVQConfig) -> str:
    """Hash of format and configuration, and of the weights that keys depend on.

    Of each tensor some values spread over it: a fine-tune changes nearly all, and all of them would
    take seconds.
    """
    digest = hashlib.sha256(f"{FORMAT_VERSION} {config!r}".encode())
    modules = {name: part for name, part in pipe.components.items() if isinstance(part, nn.Module)}
    for name, weight in nn.ModuleDict(modules).named_parameters():
        values = weight.detach().flatten()
        values = values[:: math.ceil(len(values) / FINGERPRINT_VALUES)]
        digest.update(name.encode() + values.float().cpu().numpy().tobytes())
    return f"{config}-{digest.hexdigest()[:16]}"


def _picture_arguments(
    pipe: DiffusionPipeline,
    model: str,
    prompt: str,
    negative_prompt: str | None,
    height: int | None,
    width: int | None,
    dilated: bool,
    steps: int,
    guidance_scale: float | None,
) -> dict[str, Any]:
    """Arguments of the pipeline's call; what it would refuse only at its end is refused here."""
    # diffusers takes its default for both sides unless both are given.
    default_side = pipe.unet.config.sample_size * pipe.vae_scale_factor
    arguments = {
        "prompt": prompt,
        "negative_prompt": negative_prompt,
        "height": default_side if height is None else height,
        "width": default_side if width is None else width,
        "num_inference_steps": steps,
    }
    arguments |= _usual_guidance(model)
    if guidance_scale is not None:
        arguments["guidance_scale"] = guidance_scale
    most = pipe.scheduler.config.num_train_timesteps
    if steps > most:
        raise ValueError(f"--steps must be at most the model's {most} timesteps, but got {steps}.")
    if dilated:
        check_size(pipe, arguments["height"], arguments["width"])
    return arguments


def _dilation(
    pipe: DiffusionPipeline, arguments: dict[str, Any], dilated: bool
) -> AbstractContextManager[Any]:
    """ScaleCrafter for the size of the picture, or nothing."""
    if not dilated:
        return nullcontext()
    return scalecrafter(pipe, arguments["height"], arguments["width"])


def _measure_capture(
    pipe: DiffusionPipeline, arguments: dict[str, Any], seed: int
) -> CaptureProfile:
    """The capture on one picture, in fewer steps: it changes slowly from step to step."""
    steps = min(arguments["num_inference_steps"], CAPTURE_STEPS)
    measured = {**arguments, "num_inference_steps": steps}
    pipe.scheduler.set_timesteps(steps)
    if not are_training_timesteps(pipe.scheduler.timesteps.tolist()):
        measured["parts"] = 1
    return measure_capture(pipe, [measured.pop("prompt")], seed=seed, **measured)


def _shipped_codebooks() -> dict[AVQConfig, str]:
    """mini-sd's own."""
    return {
        AVQConfig.parse(DEFAULT_CONFIG, levels=(0,)): MINI_CODEBOOKS,
        AVQConfig.parse(DEFAULT_CONFIG, levels=(0, 1)): MINI_CODEBOOKS_LEVEL1,
    }


def _usual_guidance(model: str) -> dict[str, float]:
    return {"guidance_scale": MINI_GUIDANCE_SCALE} if model == MINI_SD else {}


def _save(picture: Image.Image, path: Path) -> None:
    """Write a PNG in one step: a picture that was there stays until the new one is whole."""
    with atomic_write(path) as temporary:
        picture.save(temporary)


def _sheet_path(out: Path) -> Path:
    return out.parent / f"{out.stem}_sheet{out.suffix}"


def _check_output(path: Path, *others: Path) -> None:
    """Refuse before the work, not after it; `others` are written beside `path`."""
    if path.suffix.lower() != ".png":
        raise ValueError(f"--out must end in .png, but got {str(path)!r}.")
    for file in (path, *others):
        if file.is_dir():
            raise ValueError(f"--out {path} writes {file}, but that is a folder.")
    folder = path.absolute().parent
    if not folder.is_dir():
        raise ValueError(f"--out: the folder {folder} does not exist.")
    check_writable("--out", folder)
