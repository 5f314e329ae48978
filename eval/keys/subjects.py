"""Models to measure on, and their passes."""

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

import torch
from diffusers import DiffusionPipeline
from torch import Tensor, nn
from transformers import AutoModel

from avq_diffusers import AVQCodebooks, AVQConfig, calibrate
from avq_diffusers.hosts import has_unet
from avq_diffusers.options import first_line
from eval.keys.photographs import PHOTOGRAPHS, photograph
from eval.methods.running import load_pipeline, network_of
from eval.quality.repeats import recorded_calls

NUM_STEPS = 6
KEYS_PER_LAYER = 16384
MEASURED_CALLS = (1, 3, 5)  # of the denoiser, counting from 0

Model: TypeAlias = DiffusionPipeline | nn.Module


@dataclass(frozen=True)
class Subject:
    """A model at one image size.

    Attributes:
        model: the network whose self-attention is measured.
        size: side of the images.
        tests: each runs the model once, on its own inputs, and returns the output: last hidden
            states, or predicted noise.
        calibrate: makes codebooks for a configuration with `avq_diffusers.calibrate`, on other
            images.
        frames: batch entries that form a video.
    """

    model: nn.Module
    size: int
    tests: Sequence[Callable[[], Tensor]]
    calibrate: Callable[[AVQConfig], AVQCodebooks]
    frames: int = 1


def load_model(name: str, device: torch.device, dtype: str) -> Model:
    """Load a diffusers pipeline or a transformers vision model, by folder or Hub id.

    Raises:
        ValueError: there is no such model.
    """
    try:
        DiffusionPipeline.load_config(name)
    except OSError:
        return _vision_model(name, dtype).eval().to(device)
    return load_pipeline(name, device, dtype)


def _vision_model(name: str, dtype: str) -> nn.Module:
    try:
        model = AutoModel.from_pretrained(name, dtype=dtype)
    except (OSError, ValueError) as error:
        raise ValueError(
            f"--model {name} cannot be loaded as a diffusers pipeline or a transformers model: "
            f"{first_line(error)}"
        ) from error
    return getattr(model, "vision_model", model)


def own_size(model: Model) -> int:
    """The side of the images that the model was trained on.

    Raises:
        ValueError: the model does not specify it.
    """
    if isinstance(model, DiffusionPipeline):
        size = getattr(model, "default_sample_size", None) or network_of(model).config.sample_size
        scale = model.vae_scale_factor
    else:
        size, scale = getattr(model.config, "image_size", None), 1
    if not isinstance(size, int):
        raise ValueError(f"--sizes must give the side of the images: the model's own is {size}.")
    return size * scale


def takes_stored(model: Model) -> bool:
    """Whether codebooks can be made for the model: all except diffusers transformers."""
    return not isinstance(model, DiffusionPipeline) or has_unet(model)


def subject_of(
    model: Model, size: int, num_images: int, prompts: Sequence[str], frames: int = 1
) -> Subject:
    """Prepare a model for images of one size.

    A vision model gets photographs, or camera pans over them, whose frames attend to each other. A
    pipeline makes images from prompts in a few steps; three calls of its denoiser are an image's
    tests.

    Args:
        num_images: number of photographs or prompts to test on; the rest are for calibration.
        prompts: prompts for a pipeline.
        frames: frames per pan; 1 for photographs.

    Raises:
        ValueError: `frames` is above 1 for a pipeline.
    """
    if not isinstance(model, DiffusionPipeline):
        images = [vision_arguments(model, photograph(name, size, frames)) for name in PHOTOGRAPHS]
        tests = [partial(_output, model, **image) for image in images[:num_images]]
        others = [image.pop("pixel_values") for image in images[num_images:]]
        fit = partial(_calibrate, model, others, **images[-1])
        return Subject(model, size, tests, fit, frames)
    if frames > 1:
        raise ValueError(f"--frames is for vision models, but got {frames} for a pipeline.")
    denoiser, tests = network_of(model), []
    arguments = {"height": size, "width": size, "num_inference_steps": NUM_STEPS}
    calls = recorded_calls(model, prompts[:num_images], 0, 1, **arguments)
    for prompt in range(num_images):
        made = [call for call in calls if prompt in call.prompts]
        chosen = [made[number] for number in MEASURED_CALLS]
        tests += [partial(_output, denoiser, *call.args, **call.kwargs) for call in chosen]
    fit = partial(_calibrate, model, prompts[num_images:], seed=num_images, **arguments)
    return Subject(denoiser, size, tests, fit)


def _calibrate(model: Model, examples: Any, config: AVQConfig, **arguments: Any) -> AVQCodebooks:
    return calibrate(model, examples, config, keys_per_layer=KEYS_PER_LAYER, **arguments)


def vision_pass(model: nn.Module, pixels: Tensor) -> Callable[[], Tensor]:
    """A forward pass of a vision model, at any image size."""
    return partial(_output, model, **vision_arguments(model, pixels))


def vision_arguments(model: nn.Module, pixels: Tensor) -> dict[str, Any]:
    """The arguments of a forward pass."""
    parameters = inspect.signature(model.forward).parameters
    options = {"interpolate_pos_encoding": True} if "interpolate_pos_encoding" in parameters else {}
    return {"pixel_values": pixels.to(next(model.parameters())), **options}


@torch.no_grad()
def _output(model: nn.Module, *args: Any, **kwargs: Any) -> Tensor:
    return model(*args, **kwargs)[0]
