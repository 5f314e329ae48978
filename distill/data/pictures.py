"""Picture files as training pictures: uint8 RGB tensors (3, S, S)."""

import struct
import zlib
from typing import BinaryIO

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image, ImageOps
from torch import Tensor

# What Pillow's readers raise on damaged files: they trust lengths, offsets and types they read.
# AVIF's raises RuntimeError.
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
# Formats that Pillow knows, but leaves to other programs: data, video and drawings.
FOREIGN = ("BUFR", "EPS", "GRIB", "HDF5", "MPEG", "WMF")


def read_rgb(file: str | BinaryIO) -> Image.Image:
    """Read a picture upright and in RGB; what is transparent lies on white.

    Raises:
        UNREADABLE: one of these, if the file is damaged, is not a picture, or holds numbers whose
            white is not known.
    """
    with Image.open(file) as picture:
        upright = ImageOps.exif_transpose(picture)
        # `convert` would clip numbers at 255.
        if upright.mode.startswith("I;16") or (upright.mode, picture.format) == ("I", "PPM"):
            upright = Image.fromarray((np.asarray(upright) >> 8).astype(np.uint8))
        elif upright.mode in ("I", "F"):
            raise ValueError(f"{picture.format} of mode {upright.mode} does not say what is white")
        if upright.has_transparency_data:
            white = Image.new("RGBA", upright.size, "white")
            upright = Image.alpha_composite(white, upright.convert("RGBA"))
        return upright.convert("RGB")


def picture_endings() -> set[str]:
    """The endings of the files that `read_rgb` reads, such as `.png`."""
    endings = Image.registered_extensions()
    formats = Image.OPEN.keys() - set(FOREIGN)
    return {ending for ending, name in endings.items() if name in formats}


def crop(picture: Image.Image, size: int) -> Tensor:
    """Cut the largest square from the middle and resize it, antialiased, by Lanczos."""
    return to_tensor(ImageOps.fit(picture, (size, size), Image.Resampling.LANCZOS))


def linfusion(picture: Image.Image, size: int) -> Tensor:
    """Stretch to a square as LinFusion's code does: bicubic, a = -0.75, not antialiased.

    That is OpenCV's `INTER_CUBIC`, whose fixed-point arithmetic may differ by one level.
    """
    pixels = to_tensor(picture)[None].float()
    resized = F.interpolate(pixels, (size, size), mode="bicubic", align_corners=False)[0]
    return resized.round().clamp(0, 255).to(torch.uint8)


def to_tensor(picture: Image.Image | np.ndarray) -> Tensor:
    """Turn RGB (h, w, 3) into uint8 (3, h, w)."""
    return torch.from_numpy(np.array(picture)).permute(2, 0, 1).contiguous()


PREPROCESSINGS = {"crop": crop, "linfusion": linfusion}
