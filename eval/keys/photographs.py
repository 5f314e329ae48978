"""Photographs inside the packages scikit-image and scikit-learn."""

import numpy as np
import torch
from PIL import Image
from torch import Tensor

PHOTOGRAPHS = (
    "astronaut",
    "coffee",
    "chelsea",
    "china.jpg",
    "flower.jpg",
    "rocket",
    "stereo_motorcycle",
    "hubble_deep_field",
    "camera",
    "coins",
    "grass",
)
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # of ImageNet


def photograph(name: str, size: int) -> Tensor:
    """The square centre of a photograph, resized: (1, 3, size, size), normalized as for ImageNet.

    Raises:
        ImportError: scikit-image or scikit-learn is missing.
    """
    image = read_photograph(name)
    side = min(image.size)
    left, top = ((length - side) // 2 for length in image.size)
    box = (left, top, left + side, top + side)
    pixels = np.asarray(image.resize((size, size), Image.Resampling.BICUBIC, box), np.float32)
    normalized = (torch.from_numpy(pixels / 255) - torch.tensor(MEAN)) / torch.tensor(STD)
    return normalized.permute(2, 0, 1)[None]


def read_photograph(name: str) -> Image.Image:
    """A photograph in RGB, of its own size.

    Raises:
        ImportError: scikit-image or scikit-learn is missing.
    """
    return Image.fromarray(_read(name)).convert("RGB")


def _read(name: str) -> np.ndarray:
    try:
        if name.endswith(".jpg"):
            from sklearn.datasets import load_sample_image

            return load_sample_image(name)
        import skimage.data
    except ImportError as error:
        raise ImportError(
            f"photographs need the extra keys: pip install -e '.[keys]' ({error})."
        ) from error
    found = getattr(skimage.data, name)()
    return found[0] if isinstance(found, tuple) else found  # a stereo pair
