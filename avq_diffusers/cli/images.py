"""Generate and time images with a pipeline."""

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import replace
from inspect import Parameter, signature
from statistics import median
from typing import Any, NamedTuple

import torch
from diffusers import DiffusionPipeline
from PIL import Image

from avq_diffusers.cli.request import ImageRequest
from avq_diffusers.extras.scalecrafter.apply import scalecrafter, usual_scalecrafter
from avq_diffusers.hosts.models import has_unet
from avq_diffusers.hosts.verbs import avq_disabled
from avq_diffusers.mini.loading import usual_guidance

ERROR_STEPS = 6
TIMED_PAIRS = 5  # equal attention passes for faster or slower in 1 of 16 runs
# Needed for a negative prompt with guidance-distilled models such as Flux.
TRUE_GUIDANCE_SCALE = 4.0
USUAL_LATENT_SIZE = 128  # for transformers whose pipelines name none


class TimedImage(NamedTuple):
    """An image and the seconds it took."""

    image: Image.Image
    seconds: float


class StepTimes(NamedTuple):
    """Seconds of denoising steps that ran in turns: exact, AVQ, exact, AVQ, ..."""

    exact: Sequence[float]
    avq: Sequence[float]

    @property
    def gains(self) -> list[float]:
        """How many times as fast AVQ was in each pair of steps, from least to most."""
        return sorted(exact / avq for exact, avq in zip(self.exact, self.avq, strict=True))

    def __str__(self) -> str:
        return f"{_shown(median(self.avq))} instead of {_shown(median(self.exact))} per step"


def training_size(pipe: DiffusionPipeline) -> int:
    """Return the side in pixels of the images that the model was trained on."""
    if has_unet(pipe):
        return pipe.unet.config.sample_size * pipe.vae_scale_factor
    return getattr(pipe, "default_sample_size", USUAL_LATENT_SIZE) * pipe.vae_scale_factor


def largest_side(pipe: DiffusionPipeline) -> int | None:
    """Return the largest side in pixels that the position embedding allows; None if unlimited."""
    config: Any = None if has_unet(pipe) else getattr(pipe.transformer, "config", None)
    most = getattr(config, "pos_embed_max_size", None)
    return None if most is None else most * config.patch_size * pipe.vae_scale_factor


def fit_request(pipe: DiffusionPipeline, request: ImageRequest) -> ImageRequest:
    """Fill in the model's size and guidance scale; refuse early what the pipeline refuses late."""
    side = training_size(pipe)
    height, width = request.height or side, request.width or side
    most = pipe.scheduler.config.num_train_timesteps
    if request.steps > most:
        raise ValueError(
            f"--steps must be at most the model's {most} timesteps, but got {request.steps}."
        )
    most_pixels = largest_side(pipe)
    for name, side in (("height", height), ("width", width)):
        if most_pixels is not None and side > most_pixels:
            raise ValueError(
                f"--{name} must be at most {most_pixels} pixels for this model, but got {side}."
            )
    scale = usual_guidance(pipe) if request.guidance_scale is None else request.guidance_scale
    if request.negative_prompt is not None:
        if "negative_prompt" not in _parameters(pipe):
            raise ValueError(f"--negative-prompt: {type(pipe).__name__} takes none.")
        if "true_cfg_scale" not in _parameters(pipe) and scale <= 1:
            raise ValueError(
                f"--negative-prompt only works with guidance: pass a --guidance-scale above 1, not "
                f"{scale:g}."
            )
    return replace(request, height=height, width=width, guidance_scale=scale)


def dilation(pipe: DiffusionPipeline, request: ImageRequest) -> AbstractContextManager[None]:
    """Run ScaleCrafter inside the `with` block if a request from `fit_request` asks for it."""
    if not request.scalecrafter:
        return nullcontext()
    if not has_unet(pipe):
        raise ValueError("--scalecrafter dilates a UNet's convolutions; this model has no UNet.")
    assert request.height is not None
    assert request.width is not None
    size = request.height, request.width
    return scalecrafter(pipe, *size, config=usual_scalecrafter(pipe, *size))


def timed_image(
    pipe: DiffusionPipeline, request: ImageRequest, after_step: Callable[..., Any] | None = None
) -> TimedImage:
    """Generate an image and time it, for a request from `fit_request` inside its `dilation`.

    On a GPU, a one-step run first compiles and loads the kernels. `after_step` is the pipeline's
    `callback_on_step_end`.
    """
    arguments = _call_arguments(pipe, request)
    if after_step is not None:
        arguments[_step_callback(pipe)] = after_step
    if pipe.device.type == "cuda":
        pipe(**{**arguments, "num_inference_steps": 1})
        torch.cuda.synchronize()
    start = time.perf_counter()
    image = pipe(**arguments, generator=torch.Generator().manual_seed(request.seed)).images[0]
    return TimedImage(image, time.perf_counter() - start)


def step_times(pipe: DiffusionPipeline, request: ImageRequest) -> StepTimes:
    """Time steps with exact attention and AVQ in turns, after a warm step of each.

    One denoising run alternates between them, so that the machine's drift affects both alike.
    Schedulers such as PNDM and Heun add steps to those asked for, which are not timed.
    """
    seconds: list[float] = []
    arguments = _call_arguments(pipe, request)
    start = time.perf_counter()
    with ExitStack() as exact:
        exact.enter_context(avq_disabled(pipe))

        def after_step(*step: Any) -> Any:
            nonlocal start
            if pipe.device.type == "cuda":
                torch.cuda.synchronize()
            seconds.append(time.perf_counter() - start)
            exact.close()
            if len(seconds) % 2 == 0:
                exact.enter_context(avq_disabled(pipe))
            start = time.perf_counter()
            return step[-1]

        arguments[_step_callback(pipe)] = after_step
        steps = {"num_inference_steps": 2 + 2 * TIMED_PAIRS, "output_type": "latent"}
        pipe(**{**arguments, **steps})
    timed = seconds[2 : 2 + 2 * TIMED_PAIRS]
    return StepTimes(timed[::2], timed[1::2])


def first_steps(pipe: DiffusionPipeline, request: ImageRequest, number: int = 1) -> float:
    """Run steps without decoding; return their seconds, including any compilation."""
    start = time.perf_counter()
    only = {"num_inference_steps": number, "output_type": "latent"}
    pipe(**{**_call_arguments(pipe, request), **only})
    if pipe.device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start


def measured_on(pipe: DiffusionPipeline, request: ImageRequest) -> dict[str, Any]:
    """Arguments of `apply_avq` with a tolerance: one image, in at most `ERROR_STEPS` steps."""
    arguments = _call_arguments(pipe, request)
    arguments["prompt"] = [request.prompt]
    arguments["seed"] = request.seed
    arguments["num_inference_steps"] = min(request.steps, ERROR_STEPS)
    return arguments


def _step_callback(pipe: DiffusionPipeline) -> str:
    """The argument for a function to call after each step; a few pipelines have the older one."""
    name = "callback_on_step_end"
    return name if name in _parameters(pipe) else "callback"


def _shown(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{1000 * seconds:.3g} ms"


def _parameters(pipe: DiffusionPipeline) -> Mapping[str, Parameter]:
    return signature(type(pipe).__call__).parameters


def _call_arguments(pipe: DiffusionPipeline, request: ImageRequest) -> dict[str, Any]:
    arguments = {
        "prompt": request.prompt,
        "negative_prompt": request.negative_prompt,
        "height": request.height,
        "width": request.width,
        "num_inference_steps": request.steps,
        "guidance_scale": request.guidance_scale,
    }
    found = {name: value for name, value in arguments.items() if name in _parameters(pipe)}
    true_scale = _parameters(pipe).get("true_cfg_scale")
    if request.negative_prompt is not None and true_scale is not None and true_scale.default <= 1:
        found["true_cfg_scale"] = TRUE_GUIDANCE_SCALE
    return found
