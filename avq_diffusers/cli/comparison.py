"""Exact against AVQ: pictures with their times, and how alike they are."""

import time
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL import Image


class Picture(NamedTuple):
    """A picture and the seconds that it took."""

    image: Image.Image
    seconds: float


def timed_picture(pipe: Any, arguments: dict[str, Any], seed: int) -> Picture:
    """One picture and its seconds; on a GPU after a one-step run that loads the kernels."""
    on_cuda = pipe.device.type == "cuda"
    if on_cuda:
        pipe(**{**arguments, "num_inference_steps": 1})
        torch.cuda.synchronize()
    start = time.perf_counter()
    image = pipe(**arguments, generator=torch.Generator().manual_seed(seed)).images[0]
    return Picture(image, time.perf_counter() - start)


def psnr(image: Image.Image, reference: Image.Image) -> float:
    """Peak signal-to-noise ratio of two pictures of one size, in dB; infinite for equal ones."""
    error = np.asarray(image, np.float64) - np.asarray(reference, np.float64)
    mean_square = (error**2).mean()
    return float("inf") if mean_square == 0 else float(10 * np.log10(255.0**2 / mean_square))
