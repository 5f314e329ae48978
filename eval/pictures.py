"""Pictures from prompts and seeds: the same picture whatever the batch size."""

from collections.abc import Sequence

import numpy as np
import torch
from diffusers import StableDiffusionPipeline
from tqdm import tqdm


def generate(
    pipe: StableDiffusionPipeline,
    prompts: Sequence[str],
    seeds: Sequence[int],
    *,
    num_inference_steps: int = 25,
    guidance_scale: float = 3.0,
    batch_size: int = 8,
    description: str = "pictures",
) -> np.ndarray:
    """Generate one picture per (prompt, seed) pair.

    Returns:
        uint8 array (len(prompts), height, width, 3).

    Raises:
        ValueError: prompts and seeds differ in number, or there are none.
    """
    if not prompts or len(prompts) != len(seeds):
        raise ValueError(
            f"expected as many seeds as prompts and at least one, but got {len(prompts)} prompts "
            f"and {len(seeds)} seeds."
        )
    pipe.set_progress_bar_config(disable=True)
    batches = []
    for start in tqdm(range(0, len(prompts), batch_size), desc=description):
        chosen = slice(start, start + batch_size)
        generators = [torch.Generator().manual_seed(seed) for seed in seeds[chosen]]
        images = pipe(
            list(prompts[chosen]),
            num_inference_steps=num_inference_steps,
            guidance_scale=guidance_scale,
            generator=generators,
            output_type="np",
        ).images
        batches.append((images * 255).round().astype(np.uint8))
    return np.concatenate(batches)
