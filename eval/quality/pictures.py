"""Pictures from prompts and seeds: the same picture whatever the batch size."""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from inspect import signature

import numpy as np
import torch
from diffusers import StableDiffusionPipeline
from tqdm import tqdm

from avq_diffusers import scalecrafter
from avq_diffusers.extras.scalecrafter.apply import check_size
from avq_diffusers.extras.scalecrafter.settings import ScaleCrafterConfig
from avq_diffusers.mini import MINI_GUIDANCE_SCALE, MINI_SD
from avq_diffusers.plugin.prompts import quiet

# By side of the pictures: at twice its training size mini-sd is best with a longer window than
# SD1.5's 30 steps.
MINI_SCALECRAFTER = {512: ScaleCrafterConfig((1, 2), num_dilated_steps=42)}
# ScaleCrafter goes through up to nine sets of dilations, each a graph of its own.
MOST_GRAPHS = 16


@dataclass(frozen=True, kw_only=True)
class Drawing:
    """How pictures are drawn.

    Args:
        num_inference_steps: denoising steps.
        guidance_scale: of classifier-free guidance; None is the model's usual one.
        size: side of the pictures; None is the model's own.
        batch_size: pictures drawn at once.
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
    drawing: Drawing,
    *,
    description: str = "pictures",
) -> np.ndarray:
    """Generate one picture per (prompt, seed) pair.

    Args:
        pipe: that draws.
        prompts: n of them.
        seeds: n of them.
        drawing: how.
        description: of the progress bar.

    Returns:
        uint8 array (n, height, width, 3).

    Raises:
        ValueError: prompts and seeds differ in number, or there are none, or ScaleCrafter has no
            settings for the size.
    """
    if not prompts or len(prompts) != len(seeds):
        raise ValueError(
            f"expected as many seeds as prompts and at least one, but got {len(prompts)} prompts "
            f"and {len(seeds)} seeds."
        )
    pictures = None
    with quiet(pipe), dilation(pipe, drawing), compilation(pipe, drawing):
        for start in tqdm(range(0, len(prompts), drawing.batch_size), desc=description):
            chosen = slice(start, start + drawing.batch_size)
            batch = draw_batch(pipe, prompts[chosen], seeds[chosen], drawing)
            if pictures is None:  # batches joined at the end would need the memory twice
                pictures = np.empty((len(prompts), *batch.shape[1:]), np.uint8)
            pictures[chosen] = batch
    return pictures


def usual_guidance(model: str) -> float:
    """mini-sd's guidance scale, or for another model what its pipeline takes by itself."""
    if model == MINI_SD:
        return MINI_GUIDANCE_SCALE
    return signature(StableDiffusionPipeline.__call__).parameters["guidance_scale"].default


def dilation(pipe: StableDiffusionPipeline, drawing: Drawing) -> AbstractContextManager[None]:
    """ScaleCrafter, by mini-sd's own settings or the authors' for SD1.5; or nothing.

    Raises:
        ValueError: there is no size, it is not above the training size, or has no settings.
    """
    if not drawing.is_dilated:
        return nullcontext()
    size, config = _dilated_size(pipe, drawing)
    return scalecrafter(pipe, size, size, config=config)


def check_dilation(pipe: StableDiffusionPipeline, drawing: Drawing) -> None:
    """Raise what `dilation` raises."""
    if drawing.is_dilated:
        size, config = _dilated_size(pipe, drawing)
        check_size(pipe, size, size, config=config)


def _dilated_size(
    pipe: StableDiffusionPipeline, drawing: Drawing
) -> tuple[int, ScaleCrafterConfig | None]:
    if drawing.size is None:
        raise ValueError("ScaleCrafter needs a size above the model's own, but got none.")
    config = MINI_SCALECRAFTER.get(drawing.size) if pipe.name_or_path == MINI_SD else None
    return drawing.size, config


@contextmanager
def compilation(pipe: StableDiffusionPipeline, drawing: Drawing) -> Iterator[None]:
    """Compile the UNet in its next call; or nothing."""
    if not drawing.is_compiled:
        yield
        return
    pipe.unet.compile(dynamic=False)
    with torch._dynamo.config.patch(recompile_limit=MOST_GRAPHS):
        yield


def draw_batch(
    pipe: StableDiffusionPipeline,
    prompts: Sequence[str],
    seeds: Sequence[int],
    drawing: Drawing,
) -> np.ndarray:
    """Generate pictures at once, the noise of each drawn on the CPU from its own seed.

    Args:
        pipe: whose progress bar shows unless `quiet`.
        prompts: n of them.
        seeds: n of them.
        drawing: how; ScaleCrafter and compilation are the caller's.

    Returns:
        uint8 array (n, size, size, 3).

    Raises:
        ValueError: a picture holds NaN.
    """
    guidance_scale = drawing.guidance_scale
    if guidance_scale is None:
        guidance_scale = usual_guidance(pipe.name_or_path)
    images = pipe(
        list(prompts),
        height=drawing.size,
        width=drawing.size,
        num_inference_steps=drawing.num_inference_steps,
        guidance_scale=guidance_scale,
        generator=[torch.Generator().manual_seed(seed) for seed in seeds],
        output_type="pt",
    ).images
    if images.isnan().any():
        raise ValueError(f"the model gave NaN for at least one of the seeds {list(seeds)}.")
    # On the device: only bytes travel.
    images = (images.float() * 255).round().to(torch.uint8)
    return images.permute(0, 2, 3, 1).contiguous().cpu().numpy()
