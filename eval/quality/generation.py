"""Generate images from prompts and seeds, the same for any batch size."""

import json
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from diffusers import StableDiffusionPipeline
from tqdm import tqdm

from avq_diffusers import scalecrafter
from avq_diffusers.extras.scalecrafter.apply import usual_scalecrafter
from avq_diffusers.extras.scalecrafter.settings import ScaleCrafterConfig
from avq_diffusers.mini.loading import usual_guidance
from eval.methods.running import network_of

# ScaleCrafter goes through up to five sets of dilations in each attention; each is a graph.
MOST_GRAPHS = 16


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How to generate images.

    Args:
        num_inference_steps: denoising steps.
        guidance_scale: scale of classifier-free guidance; None takes the model's usual one.
        size: side of the images; None takes the model's own.
        batch_size: images per batch.
        is_dilated: use ScaleCrafter, which needs a size.
        is_compiled: compile the UNet, which needs batches of one size.
    """

    num_inference_steps: int = 25
    guidance_scale: float | None = None
    size: int | None = None
    batch_size: int = 8
    is_dilated: bool = False
    is_compiled: bool = False


def generate(
    pipe: StableDiffusionPipeline,
    prompts: Sequence[str],
    seeds: Sequence[int],
    settings: Sampling,
    *,
    description: str = "images",
) -> np.ndarray:
    """Generate one image per (prompt, seed) pair.

    Returns:
        uint8 array (n, height, width, 3).

    Raises:
        ValueError: prompts and seeds differ in number, there are none, or ScaleCrafter has no
            settings for the size.
    """
    if not prompts or len(prompts) != len(seeds):
        raise ValueError(
            f"expected as many seeds as prompts and at least one, but got {len(prompts)} prompts "
            f"and {len(seeds)} seeds."
        )
    images, total = None, len(prompts) * settings.num_inference_steps
    with (
        dilation(pipe, settings),
        compilation(pipe, settings),
        tqdm(desc=description, total=total, unit="step") as bar,
    ):
        for start in range(0, len(prompts), settings.batch_size):
            chosen = slice(start, start + settings.batch_size)
            batch = generate_batch(pipe, prompts[chosen], seeds[chosen], settings, bar)
            if images is None:  # concatenating batches at the end would need twice the memory
                images = np.empty((len(prompts), *batch.shape[1:]), np.uint8)
            images[chosen] = batch
    return images


def dilation_config(pipe: StableDiffusionPipeline, settings: Sampling) -> ScaleCrafterConfig | None:
    """ScaleCrafter's settings, mini-sd's own or the authors'; None if not asked for.

    Raises:
        ValueError: the model has no UNet, or the size is missing, not above the training size, or
            has no settings.
    """
    if not settings.is_dilated:
        return None
    if getattr(pipe, "unet", None) is None:
        raise ValueError(
            f"ScaleCrafter dilates a UNet's convolutions, but got {type(pipe).__name__}."
        )
    if settings.size is None:
        raise ValueError("ScaleCrafter needs a size above the model's own, but got none.")
    return usual_scalecrafter(pipe, settings.size, settings.size)


def dilation(pipe: StableDiffusionPipeline, settings: Sampling) -> AbstractContextManager[None]:
    """ScaleCrafter with `dilation_config`."""
    config = dilation_config(pipe, settings)
    if config is None:
        return nullcontext()
    return scalecrafter(pipe, settings.size, settings.size, config=config)


def dilation_facts(pipe: StableDiffusionPipeline, settings: Sampling) -> dict[str, Any] | bool:
    """`dilation_config` as read back from JSON, for resumed runs; False without one."""
    config = dilation_config(pipe, settings)
    return False if config is None else json.loads(json.dumps(asdict(config)))


@contextmanager
def compilation(pipe: StableDiffusionPipeline, settings: Sampling) -> Iterator[None]:
    """Compile the UNet or transformer at its next call, if the settings ask for it."""
    if not settings.is_compiled:
        yield
        return
    network_of(pipe).compile(dynamic=False)
    with torch._dynamo.config.patch(recompile_limit=MOST_GRAPHS):
        yield


def generate_batch(
    pipe: StableDiffusionPipeline,
    prompts: Sequence[str],
    seeds: Sequence[int],
    settings: Sampling,
    bar: tqdm | None = None,
) -> np.ndarray:
    """Generate a batch of images. Each has noise from its own seed, drawn on the CPU.

    A bar counts the steps of all images. ScaleCrafter and compilation are up to the caller.

    Returns:
        uint8 array (n, size, size, 3).

    Raises:
        ValueError: an image holds NaN.
    """
    guidance_scale = settings.guidance_scale
    if guidance_scale is None:
        guidance_scale = usual_guidance(pipe)

    def after_step(_, step: int, timestep: int, tensors: dict[str, Any]) -> dict[str, Any]:
        if bar is not None:
            bar.update(len(prompts))
        return tensors

    images = pipe(
        list(prompts),
        height=settings.size,
        width=settings.size,
        num_inference_steps=settings.num_inference_steps,
        guidance_scale=guidance_scale,
        generator=[torch.Generator().manual_seed(seed) for seed in seeds],
        output_type="pt",
        callback_on_step_end=after_step,
    ).images
    if images.isnan().any():
        raise ValueError(f"the model returned NaN for at least one of the seeds {list(seeds)}.")
    # Convert on the device, to transfer only bytes.
    images = (images.float() * 255).round().to(torch.uint8)
    return images.permute(0, 2, 3, 1).contiguous().cpu().numpy()
