"""How close calibrated AVQ pictures are to the exact ones at equal prompts and seeds."""

from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from diffusers import StableDiffusionPipeline
from PIL import Image

from avq_diffusers import picture_sheet
from eval.methods import EXACT, attention_method, check_methods
from eval.metrics import psnr, ssim
from eval.pictures import generate


def compare(
    pipe: StableDiffusionPipeline,
    methods: Sequence[str],
    prompts: Sequence[str],
    seeds: Sequence[int],
    *,
    levels: tuple[int, ...] = (0,),
    calibration_prompts: Sequence[str],
    num_inference_steps: int = 25,
) -> tuple[list[dict[str, Any]], dict[str, np.ndarray]]:
    """Generate every prompt at every seed by every method, and measure PSNR and SSIM to exact.

    Returns:
        One row a method with median, 10th percentile and per-picture values; and the uint8
        pictures (len(seeds) * len(prompts), h, w, 3) of each method, prompts running fastest.
    """
    check_methods(pipe, methods, levels)
    all_prompts = [prompt for _ in seeds for prompt in prompts]
    all_seeds = [seed for seed in seeds for _ in prompts]
    pictures = {}
    for method in (EXACT, *methods):
        with attention_method(pipe, method, levels=levels, calibration_prompts=calibration_prompts):
            pictures[method] = generate(
                pipe,
                all_prompts,
                all_seeds,
                num_inference_steps=num_inference_steps,
                description=method,
            )
    rows = []
    for method in methods:
        decibels = psnr(pictures[method], pictures[EXACT])
        similarity = ssim(pictures[method], pictures[EXACT])
        rows.append(
            {
                "method": method,
                "psnr_median": median(decibels),
                "psnr_p10": float(np.percentile(decibels, 10)),
                "ssim_median": median(similarity.tolist()),
                "psnr": decibels.tolist(),
                "ssim": similarity.tolist(),
            }
        )
    return rows, pictures


def compare_table(rows: Sequence[dict[str, Any]]) -> str:
    """The rows as a Markdown table."""
    lines = ["| method | PSNR dB, median | PSNR dB, p10 | SSIM, median |", "|---|---|---|---|"]
    lines += [
        f"| {row['method']} | {row['psnr_median']:.1f} | {row['psnr_p10']:.1f} "
        f"| {row['ssim_median']:.4f} |"
        for row in rows
    ]
    return "\n".join(lines)


def compare_sheet(
    path: Path, pictures: dict[str, np.ndarray], prompts: Sequence[str], *, num_rows: int = 4
) -> None:
    """One row a prompt (first seed), one column a method."""
    rows = [
        [Image.fromarray(images[index]) for images in pictures.values()]
        for index in range(min(num_rows, len(prompts)))
    ]
    picture_sheet(rows, list(pictures), row_titles=prompts[:num_rows]).save(path)
