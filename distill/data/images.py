"""Image files as training images: uint8 RGB tensors (3, S, S)."""

from collections.abc import Mapping
from io import BytesIO
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image, ImageOps
from torch import Tensor

from avq_diffusers.images import read_rgb


def read_column(image: Mapping[str, Any] | None) -> Image.Image:
    """Read an undecoded image of a dataset upright and in RGB: its `bytes`, or the file at `path`.

    Raises:
        UNREADABLE: as `read_rgb`, or there is no image.
    """
    if image is None or image["path"] is image["bytes"] is None:
        raise ValueError("there is no image")
    return read_rgb(image["path"] if image["bytes"] is None else BytesIO(image["bytes"]))


def crop(image: Image.Image, size: int) -> Tensor:
    """Crop the largest centre square and resize it with antialiased Lanczos."""
    return to_tensor(ImageOps.fit(image, (size, size), Image.Resampling.LANCZOS))


def linfusion(image: Image.Image, size: int) -> Tensor:
    """Stretch to a square like LinFusion's code: bicubic, a = -0.75, without antialiasing.

    LinFusion uses OpenCV's `INTER_CUBIC`, whose fixed-point arithmetic may differ by one level.
    """
    pixels = to_tensor(image)[None].float()
    resized = F.interpolate(pixels, (size, size), mode="bicubic", align_corners=False)[0]
    return resized.round().clamp(0, 255).to(torch.uint8)


def to_tensor(image: Image.Image | np.ndarray) -> Tensor:
    """Convert RGB (h, w, 3) to uint8 (3, h, w)."""
    return torch.from_numpy(np.array(image)).permute(2, 0, 1).contiguous()


PREPROCESS = {"crop": crop, "linfusion": linfusion}
