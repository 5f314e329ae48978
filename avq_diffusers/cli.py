"""The `avq` command: generate, calibrate, inspect."""

import hashlib
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import numpy as np
import torch
import typer
from diffusers import AutoPipelineForText2Image, DiffusionPipeline
from PIL import Image
from platformdirs import user_cache_path
from rich.console import Console

from avq_diffusers.calibrate import calibrate
from avq_diffusers.config import AVQConfig
from avq_diffusers.elastic import measure_capture
from avq_diffusers.inspection import codebook_table, plot_codebooks
from avq_diffusers.mini import MINI_CODEBOOKS, MINI_GUIDANCE_SCALE, MINI_SD, default_prompts
from avq_diffusers.pipeline import apply_avq, avq_disabled, set_num_refined, summary
from avq_diffusers.sheet import difference, picture_sheet
from avq_diffusers.weights import AVQCodebooks, select_layers

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

DEFAULT_CONFIG = "M64P16C8"
DEFAULT_LEVELS = "0"
REPORT_WIDTH = 100
CAPTURE_STEPS = 8  # capture changes slowly from step to step

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Stable Diffusion with adaptive vector-quantized (AVQ) attention.",
)
console = Console()

Model = Annotated[
    str, typer.Option(help="Folder or Hub id of a Stable Diffusion model; the embedded mini-sd.")
]
Device = Annotated[str | None, typer.Option(help="cuda, mps or cpu; the fastest present.")]
Config = Annotated[
    str | None, typer.Option(help=f"Codebook sizes to calibrate, as {DEFAULT_CONFIG}.")
]
Levels = Annotated[
    str | None, typer.Option(help=f"UNet levels to calibrate, as {DEFAULT_LEVELS} or 0,1.")
]
Steps = Annotated[int, typer.Option(min=1, help="Denoising steps.")]


@app.command()
def generate(
    prompt: Annotated[str, typer.Argument(help="What the picture shows.")],
    model: Model = MINI_SD,
    codebooks: Annotated[
        str | None,
        typer.Option(help="Folder or Hub id of codebooks; calibrated once and cached when absent."),
    ] = None,
    config: Config = None,
    levels: Levels = None,
    negative_prompt: Annotated[str | None, typer.Option(help="What it must not show.")] = None,
    height: Annotated[int | None, typer.Option(help="Pixels, a multiple of 8.")] = None,
    width: Annotated[int | None, typer.Option(help="Pixels, a multiple of 8.")] = None,
    steps: Steps = 25,
    guidance_scale: Annotated[
        float | None, typer.Option(help="Classifier-free guidance; the model's usual value.")
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the noise.")] = 0,
    num_refined: Annotated[
        int | None, typer.Option(help="Parents refined per query tile; the codebooks' value.")
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
    _check_output(out)
    if codebooks is not None and (config is not None or levels is not None):
        raise ValueError("--codebooks bring their own --config and --levels; drop one of them.")
    if capture is not None and num_refined is not None:
        raise ValueError("--num-refined and --capture exclude each other; drop one of them.")
    if capture is not None and not 0 < capture <= 1:
        raise ValueError(f"--capture must be above 0 and at most 1, but got {capture}.")
    avq_config = _parse_config(config, levels)
    pipe = _load_pipeline(model, device)
    apply_avq(pipe, _find_codebooks(pipe, model, codebooks, avq_config), route="always")
    if num_refined is not None:
        set_num_refined(pipe, num_refined)
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
    if capture is not None:
        console.print(f"measuring which parents get {capture:.0%} of attention")
        measured = {name: value for name, value in arguments.items() if name != "prompt"}
        measured["num_inference_steps"] = min(steps, CAPTURE_STEPS)
        profile = measure_capture(pipe, [prompt], seed=seed, **measured)
        set_num_refined(pipe, profile.at_least(capture))

    console.print("with AVQ attention")
    avq, avq_seconds = _timed_picture(pipe, arguments, seed)
    report = summary(pipe)
    console.print("with exact attention")
    with avq_disabled(pipe):
        exact, exact_seconds = _timed_picture(pipe, arguments, seed)

    avq.save(out)
    sheet_path = out.with_stem(out.stem + "_sheet")
    likeness = f"PSNR {_psnr(avq, exact):.1f} dB"
    picture_sheet(
        [[exact, avq, difference(exact, avq)]],
        [
            f"exact, {exact_seconds:.1f} s",
            f"AVQ, {avq_seconds:.1f} s",
            f"difference x4, {likeness}",
        ],
        row_titles=[f"{prompt} (seed {seed}, {steps} steps)"],
        table=report.cells(),
    ).save(sheet_path)
    print(report)
    console.print(
        f"exact {exact_seconds:.1f} s, AVQ {avq_seconds:.1f} s, {likeness} to the exact picture"
    )
    console.print(f"picture: {out}\nsheet:   {sheet_path}")


@app.command("calibrate")
def calibrate_command(
    out: Annotated[Path, typer.Option(help="Folder to save the codebooks in.")],
    model: Model = MINI_SD,
    prompts: Annotated[
        Path | None, typer.Option(help="Text file with one prompt a line; a built-in set.")
    ] = None,
    config: Config = None,
    levels: Levels = None,
    steps: Steps = 25,
    keys: Annotated[int, typer.Option(min=1, help="Keys sampled in each layer.")] = 32768,
    seed: Annotated[int, typer.Option(min=0, help="Seed of noise, sample and k-means.")] = 0,
    device: Device = None,
) -> None:
    """Fit codebooks to a model by running a few prompts; no training.

    Example: avq calibrate --model my-model --prompts prompts.txt --out my-codebooks
    """
    chosen = _calibration_prompts(model) if prompts is None else _read_prompts(prompts)
    avq_config = _parse_config(config, levels)
    pipe = _load_pipeline(model, device)
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
    console.print(f"codebooks: {out}")


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
    loaded = AVQCodebooks.from_pretrained(codebooks)
    # A narrow terminal wraps the table; rich would cut names and figures off.
    Console(width=max(console.width, REPORT_WIDTH)).print(codebook_table(loaded))
    plot_codebooks(loaded, out)
    console.print(f"plot: {out}")


def main() -> None:
    """Run the command; a mistake of the user's is one sentence and exit code 2."""
    try:
        app()
    except (OSError, ValueError, TypeError, NotImplementedError, ModuleNotFoundError) as error:
        print(f"avq: {error}", file=sys.stderr)
        sys.exit(2)


def _load_pipeline(model: str, device: str | None) -> DiffusionPipeline:
    if device is None:
        device = next(
            (name for name in ("cuda", "mps") if getattr(torch, name).is_available()), "cpu"
        )
    try:
        on_cuda = torch.empty(0, device=device).is_cuda
    except (AssertionError, RuntimeError) as error:
        raise ValueError(f"--device {device} cannot be used: {_first_line(error)}") from error
    dtype = torch.float16 if on_cuda else torch.float32
    try:
        pipe = AutoPipelineForText2Image.from_pretrained(model, dtype=dtype)
    except (OSError, ValueError) as error:
        raise ValueError(f"--model {model} could not be loaded: {_first_line(error)}") from error
    return pipe.to(device)


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0]


def _find_codebooks(
    pipe: DiffusionPipeline, model: str, codebooks: str | None, config: AVQConfig
) -> AVQCodebooks:
    """The codebooks named, mini-sd's own, or calibrated ones from the user's cache."""
    if codebooks is not None:
        return AVQCodebooks.from_pretrained(codebooks)
    if model == MINI_SD and config == _parse_config(None, None):
        return AVQCodebooks.from_pretrained(MINI_CODEBOOKS)
    folder = user_cache_path("avq-diffusers") / _fingerprint(pipe, config)
    if folder.exists():
        console.print(f"codebooks from the cache: {folder}")
        return AVQCodebooks.from_pretrained(folder)
    console.print(f"no codebooks for this model yet: calibrating once, cached in {folder}")
    prompts = _calibration_prompts(model)
    calibrated = calibrate(pipe, prompts, config, **_usual_guidance(model))
    folder.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(dir=folder.parent) as partial:
        calibrated.save_pretrained(Path(partial) / "codebooks")
        if not folder.exists():  # another process may have been faster
            (Path(partial) / "codebooks").rename(folder)
    return calibrated


def _fingerprint(pipe: DiffusionPipeline, config: AVQConfig) -> str:
    """Hash of the configuration and of the key projections that the codebooks depend on."""
    digest = hashlib.sha256(repr(config).encode())
    for layer in select_layers(pipe.unet, config.levels):
        weight = layer.attn.to_k.weight.detach().float().cpu().contiguous()
        digest.update(layer.name.encode() + weight.numpy().tobytes())
    return f"{config}-{digest.hexdigest()[:16]}"


def _calibration_prompts(model: str) -> list[str]:
    return default_prompts() if model == MINI_SD else list(CALIBRATION_PROMPTS)


def _usual_guidance(model: str) -> dict[str, float]:
    return {"guidance_scale": MINI_GUIDANCE_SCALE} if model == MINI_SD else {}


def _timed_picture(
    pipe: DiffusionPipeline, arguments: dict[str, Any], seed: int
) -> tuple[Image.Image, float]:
    """One picture and its seconds; on a GPU after a one-step run that loads the kernels."""
    on_cuda = pipe.device.type == "cuda"
    if on_cuda:
        pipe(**{**arguments, "num_inference_steps": 1})
        torch.cuda.synchronize()
    start = time.perf_counter()
    image = pipe(**arguments, generator=torch.Generator().manual_seed(seed)).images[0]
    return image, time.perf_counter() - start


def _psnr(image: Image.Image, reference: Image.Image) -> float:
    error = np.asarray(image, np.float64) - np.asarray(reference, np.float64)
    mean_square = (error**2).mean()
    return float("inf") if mean_square == 0 else float(10 * np.log10(255.0**2 / mean_square))


def _parse_config(config: str | None, levels: str | None) -> AVQConfig:
    config, levels = config or DEFAULT_CONFIG, levels or DEFAULT_LEVELS
    try:
        numbers = tuple(int(level) for level in levels.split(","))
    except ValueError:
        raise ValueError(
            f"--levels must be numbers such as 0 or 0,1, but got {levels!r}."
        ) from None
    return AVQConfig.parse(config, levels=numbers)


def _read_prompts(path: Path) -> list[str]:
    prompts = [line.strip() for line in path.read_text().splitlines() if line.strip()]
    if not prompts:
        raise ValueError(f"{path} holds no prompt; write one a line.")
    return prompts


def _check_output(path: Path) -> None:
    """Refuse before the work, not after it."""
    if path.suffix.lower() != ".png":
        raise ValueError(f"--out must end in .png, but got {str(path)!r}.")
    if not path.absolute().parent.is_dir():
        raise ValueError(f"--out: the folder {path.absolute().parent} does not exist.")
