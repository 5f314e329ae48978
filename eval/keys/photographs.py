"""Photographs shipped with scikit-image and scikit-learn."""

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
WINDOW = 0.75  # side of a pan's frame, as a share of the square that the camera passes over
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # of ImageNet


def photograph(name: str, size: int, frames: int = 1) -> Tensor:
    """A photograph's centre square, resized: (1, 3, size, size), normalized as for ImageNet.

    With `frames`, a camera pan over it from corner to corner: (frames, 3, size, size).

    Raises:
        ImportError: scikit-image or scikit-learn is missing.
    """
    image = Image.fromarray(_read(name)).convert("RGB")
    square = min(image.size)
    left, top = ((length - square) // 2 for length in image.size)
    side = square if frames == 1 else WINDOW * square
    pan = []
    for shift in np.linspace(0, square - side, frames):
        box = (left + shift, top + shift, left + shift + side, top + shift + side)
        pan.append(np.asarray(image.resize((size, size), Image.Resampling.BICUBIC, box)))
    pixels = torch.from_numpy(np.stack(pan).astype(np.float32) / 255)
    return ((pixels - torch.tensor(MEAN)) / torch.tensor(STD)).permute(0, 3, 1, 2)


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
