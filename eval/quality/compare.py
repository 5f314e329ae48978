"""How close AVQ images are to exact ones for the same prompts and seeds."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from diffusers import StableDiffusionPipeline
from PIL import Image

from avq_diffusers.images import image_sheet
from eval.methods.prepared import attention_method, prepare_methods
from eval.methods.registry import EXACT, METHOD_COLUMNS
from eval.quality.generation import Sampling, dilation_config, generate
from eval.quality.metrics import psnr, ssim
from eval.store.markdown import figure, rows_table

UNDILATED = "exact, without ScaleCrafter"
COLUMNS = {
    **METHOD_COLUMNS,
    "PSNR dB, median": figure("psnr_median", ".1f"),
    "PSNR dB, p10": figure("psnr_p10", ".1f"),
    "SSIM, median": figure("ssim_median", ".4f"),
}
SHEET_COLUMNS = 4
SHEET_QUALITY = 90  # for lossy formats


def compare(
    pipe: StableDiffusionPipeline,
    methods: Sequence[str],
    prompts: Sequence[str],
    seeds: Sequence[int],
    settings: Sampling,
    *,
    levels: tuple[int, ...] = (0,),
    calibration_prompts: Sequence[str],
) -> tuple[list[dict[str, Any]], dict[str, np.ndarray]]:
    """Generate each prompt with each seed and method; measure PSNR and SSIM to exact attention's.

    With ScaleCrafter, images of exact attention without it are included.

    Returns:
        One row per method with median, 10th percentile and values per image; and each method's
        uint8 images (len(seeds) * len(prompts), h, w, 3), all prompts of the first seed first.

    Raises:
        FileNotFoundError, ValueError: see `prepare_methods`; or ScaleCrafter has no settings for
            the size.
    """
    dilation_config(pipe, settings)
    prepared = prepare_methods(
        pipe, (EXACT, *methods), levels=levels, calibration_prompts=calibration_prompts
    )
    draw = partial(
        generate,
        pipe,
        [prompt for _ in seeds for prompt in prompts],
        [seed for seed in seeds for _ in prompts],
    )
    images = {}
    if settings.is_dilated:
        images[UNDILATED] = draw(replace(settings, is_dilated=False), description=UNDILATED)
    for method in prepared:
        with attention_method(pipe, method):
            images[method.name] = draw(settings, description=method.name)
    rows = []
    for method in prepared[1:]:
        decibels = psnr(images[method.name], images[EXACT])
        similarity = ssim(images[method.name], images[EXACT])
        figures = {"ssim_median": median(similarity.tolist()), "psnr": decibels.tolist()}
        figures |= {"ssim": similarity.tolist()}
        rows.append(method.facts() | psnr_metrics(decibels) | figures)
    return rows, images


def psnr_metrics(decibels: np.ndarray) -> dict[str, float]:
    """Median and 10th percentile of the PSNR of images (n,)."""
    return {
        "psnr_median": median(decibels.tolist()),
        # Identical images have an infinite PSNR, which cannot be interpolated.
        "psnr_p10": float(np.percentile(decibels, 10, method="lower")),
    }


def compare_table(rows: Sequence[dict[str, Any]]) -> str:
    """The rows as a Markdown table."""
    return rows_table(COLUMNS, rows)


def compare_sheet(path: Path, images: Mapping[str, np.ndarray], prompts: Sequence[str]) -> None:
    """One row per method, one column per prompt (first seed), with the prompts below."""
    shown = prompts[:SHEET_COLUMNS]
    rows = [[Image.fromarray(one) for one in some[: len(shown)]] for some in images.values()]
    numbers = [str(number) for number in range(1, len(shown) + 1)]
    table = list(zip(numbers, shown, strict=True))
    sheet = image_sheet(rows, numbers, row_titles=list(images), table=table)
    sheet.save(path, quality=SHEET_QUALITY)
