"""Image files as training images: uint8 RGB tensors (3, S, S)."""

import struct
import zlib
from typing import BinaryIO

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image, ImageOps
from torch import Tensor

# What Pillow's decoders raise for damaged files. AVIF's raises RuntimeError.
UNREADABLE = (
    OSError,
    SyntaxError,
    ValueError,
    TypeError,
    EOFError,
    LookupError,
    ArithmeticError,
    RuntimeError,
    struct.error,
    zlib.error,
    Image.DecompressionBombError,
)


def read_rgb(file: str | BinaryIO) -> Image.Image:
    """Read an image upright and in RGB, with transparent pixels on white.

    Raises:
        UNREADABLE: the file is damaged, is no image, or stores numbers without a known maximum.
    """
    with Image.open(file) as image:
        upright = ImageOps.exif_transpose(image)
        # `convert` would clip 16-bit values at 255.
        if upright.mode.startswith("I;16") or (upright.mode, image.format) == ("I", "PPM"):
            upright = Image.fromarray((np.asarray(upright) >> 8).astype(np.uint8))
        elif upright.mode in ("I", "F"):
            raise ValueError(f"{image.format} of mode {upright.mode} does not say what is white")
        if upright.has_transparency_data:
            white = Image.new("RGBA", upright.size, "white")
            upright = Image.alpha_composite(white, upright.convert("RGBA"))
        return upright.convert("RGB")


def crop(image: Image.Image, size: int) -> Tensor:
    """Crop the largest middle square and resize it by Lanczos with antialiasing."""
    return to_tensor(ImageOps.fit(image, (size, size), Image.Resampling.LANCZOS))


def linfusion(image: Image.Image, size: int) -> Tensor:
    """Stretch to a square as LinFusion's code does: bicubic, a = -0.75, without antialiasing.

    LinFusion uses OpenCV's `INTER_CUBIC`, whose fixed-point arithmetic may differ by one level.
    """
    pixels = to_tensor(image)[None].float()
    resized = F.interpolate(pixels, (size, size), mode="bicubic", align_corners=False)[0]
    return resized.round().clamp(0, 255).to(torch.uint8)


def to_tensor(image: Image.Image | np.ndarray) -> Tensor:
    """Convert RGB (h, w, 3) to uint8 (3, h, w)."""
    return torch.from_numpy(np.array(image)).permute(2, 0, 1).contiguous()


PREPROCESS = {"crop": crop, "linfusion": linfusion}
