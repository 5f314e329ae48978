"""Images generated and timed with a pipeline, and their likeness."""

import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from inspect import Parameter, signature
from typing import Any, NamedTuple

import numpy as np
import torch
from diffusers import DiffusionPipeline
from PIL import Image

from avq_diffusers.cli.request import ImageRequest
from avq_diffusers.config import AVQConfig
from avq_diffusers.dit.layers import is_transformer
from avq_diffusers.extras.scalecrafter.apply import checked_config, scalecrafter
from avq_diffusers.extras.scalecrafter.settings import MINI_SCALECRAFTER, ScaleCrafterConfig
from avq_diffusers.mini import IMAGE_SIZE, MINI_GUIDANCE_SCALE, MINI_SD, is_mini_sd3
from avq_diffusers.plugin.elastic import CaptureProfile, measure_capture
from avq_diffusers.plugin.error_profile import ErrorProfile
from avq_diffusers.plugin.timesteps import are_training_timesteps
from avq_diffusers.verbs import measure_error

CAPTURE_STEPS = 8
ERROR_STEPS = 6
USUAL_LATENT_SIZE = 128  # of transformers whose pipelines name none


class TimedImage(NamedTuple):
    """An image and the seconds it took."""

    image: Image.Image
    seconds: float


def training_size(pipe: DiffusionPipeline) -> int:
    """Return the side in pixels of the images that the model was trained on."""
    if is_transformer(pipe):
        return getattr(pipe, "default_sample_size", USUAL_LATENT_SIZE) * pipe.vae_scale_factor
    return pipe.unet.config.sample_size * pipe.vae_scale_factor


def usual_guidance(pipe: DiffusionPipeline) -> float:
    """Return the guidance scale of mini-sd and mini-sd3, or the default of another pipeline."""
    name = pipe.name_or_path  # None if the pipeline was made of parts
    if name is not None and (name == MINI_SD or is_mini_sd3(name)):
        return MINI_GUIDANCE_SCALE
    return _parameters(pipe)["guidance_scale"].default


def usual_scalecrafter(pipe: DiffusionPipeline, height: int, width: int) -> ScaleCrafterConfig:
    """Return mini-sd's own ScaleCrafter settings, or the authors' for another pipeline or size.

    Args:
        pipe: a pipeline with a `unet`.
        height, width: of the images, in pixels.

    Raises:
        ValueError, NotImplementedError: as `checked_config`.
    """
    is_mini = pipe.name_or_path == MINI_SD and height == width == 2 * IMAGE_SIZE
    return checked_config(pipe, height, width, config=MINI_SCALECRAFTER if is_mini else None)


def fit_request(pipe: DiffusionPipeline, request: ImageRequest) -> ImageRequest:
    """Fill in the model's size and guidance scale; refuse what the pipeline would refuse too late.

    Raises:
        ValueError: there are too many steps, ScaleCrafter has no settings for the size or no UNet,
            or the model takes no negative prompt.
    """
    side = training_size(pipe)
    height, width = request.height or side, request.width or side
    most = pipe.scheduler.config.num_train_timesteps
    if request.steps > most:
        raise ValueError(
            f"--steps must be at most the model's {most} timesteps, but got {request.steps}."
        )
    if request.scalecrafter and is_transformer(pipe):
        raise ValueError("--scalecrafter dilates the convolutions of a UNet; this model has none.")
    if request.scalecrafter:
        usual_scalecrafter(pipe, height, width)
    if request.negative_prompt is not None and "negative_prompt" not in _parameters(pipe):
        raise ValueError(f"--negative-prompt: {type(pipe).__name__} takes none.")
    scale = usual_guidance(pipe) if request.guidance_scale is None else request.guidance_scale
    return replace(request, height=height, width=width, guidance_scale=scale)


def dilation(pipe: DiffusionPipeline, request: ImageRequest) -> AbstractContextManager[None]:
    """Run ScaleCrafter inside the `with` block if the request asks for it."""
    if not request.scalecrafter:
        return nullcontext()
    side = training_size(pipe)
    height, width = request.height or side, request.width or side
    return scalecrafter(pipe, height, width, config=usual_scalecrafter(pipe, height, width))


def timed_image(
    pipe: DiffusionPipeline, request: ImageRequest, after_step: Callable[..., Any] | None = None
) -> TimedImage:
    """Generate an image and time it, for a request of `fit_request` with its ScaleCrafter running.

    On a GPU, a run of one step comes first. It compiles and loads the kernels. `after_step` is the
    pipeline's `callback_on_step_end`.
    """
    arguments = _call_arguments(pipe, request)
    if after_step is not None:
        arguments["callback_on_step_end"] = after_step
    if pipe.device.type == "cuda":
        pipe(**{**arguments, "num_inference_steps": 1})
        torch.cuda.synchronize()
    start = time.perf_counter()
    image = pipe(**arguments, generator=torch.Generator().manual_seed(request.seed)).images[0]
    return TimedImage(image, time.perf_counter() - start)


def image_capture(pipe: DiffusionPipeline, request: ImageRequest) -> CaptureProfile:
    """Measure the capture on one image.

    It changes slowly from step to step, so `CAPTURE_STEPS` steps are enough.
    """
    arguments = _probe_arguments(pipe, request, CAPTURE_STEPS)
    return measure_capture(pipe, [request.prompt], **arguments)


def image_error(
    pipe: DiffusionPipeline,
    config: AVQConfig,
    request: ImageRequest,
    after_step: Callable[..., Any] | None = None,
) -> ErrorProfile:
    """Measure the error of AVQ with several sizes on one image, in at most `ERROR_STEPS` steps.

    `after_step` is the pipeline's `callback_on_step_end`.
    """
    arguments = _probe_arguments(pipe, request, ERROR_STEPS)
    if after_step is not None:
        arguments["callback_on_step_end"] = after_step
    return measure_error(pipe, [request.prompt], config, **arguments)


def psnr(image: Image.Image, reference: Image.Image) -> float:
    """Return the peak signal-to-noise ratio in dB of an image to another of its size.

    It is infinite for equal images.
    """
    error = np.asarray(image, np.float64) - np.asarray(reference, np.float64)
    mean_square = (error**2).mean()
    return float("inf") if mean_square == 0 else float(10 * np.log10(255.0**2 / mean_square))


def _probe_arguments(
    pipe: DiffusionPipeline, request: ImageRequest, most_steps: int
) -> dict[str, Any]:
    arguments = _call_arguments(pipe, request)
    del arguments["prompt"]
    steps = arguments["num_inference_steps"] = min(request.steps, most_steps)
    if not is_transformer(pipe):
        pipe.scheduler.set_timesteps(steps)
    if is_transformer(pipe) or not are_training_timesteps(pipe.scheduler.timesteps.tolist()):
        arguments["parts"] = 1
    return {**arguments, "seed": request.seed}


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
    return {name: value for name, value in arguments.items() if name in _parameters(pipe)}
