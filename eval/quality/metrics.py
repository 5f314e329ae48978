"""From images to metrics: PSNR, CLIP score, copy agreement."""

from collections.abc import Sequence
from pathlib import Path
from statistics import median

import numpy as np
import torch
from torch import Tensor, nn
from transformers import CLIPModel, CLIPTokenizer

from avq_diffusers.images import psnr as psnr_of_image
from distill.scenes import Scene, copy_agreement

SCORER_IMAGE_SIZE = 256
SCORER_BATCH = 256
SCORER_MEAN = 0.5
SCORER_STD = 0.5


def psnr(images: np.ndarray, reference: np.ndarray) -> np.ndarray:
    """Peak signal-to-noise ratio in dB of each uint8 image (n, h, w, 3) to its reference."""
    return np.array([psnr_of_image(*pair) for pair in zip(images, reference, strict=True)])


def psnr_metrics(decibels: np.ndarray) -> dict[str, float]:
    """Median and 10th percentile of the PSNR of images (n,)."""
    return {
        "psnr_median": median(decibels.tolist()),
        # Identical images have an infinite PSNR, which cannot be interpolated.
        "psnr_p10": float(np.percentile(decibels, 10, method="lower")),
    }


class Scorer(nn.Module):
    """The CLIP-style scorer: pooled vision features for FID, embeddings for the CLIP score."""

    def __init__(self, folder: str | Path) -> None:
        super().__init__()
        self.model = CLIPModel.from_pretrained(folder).eval().requires_grad_(False)
        self.tokenizer = CLIPTokenizer.from_pretrained(folder)

    @torch.no_grad()
    def forward(self, images: Tensor) -> Tensor:
        """uint8 images (n, 3, h, w) to pooled features (n, D)."""
        return self.model.vision_model(self._pixels(images)).pooler_output

    def cosines(self, images: Tensor, captions: Sequence[str]) -> Tensor:
        """Cosine between each image's embedding and its caption's, (n,)."""
        return self.text_cosines(self(images), captions)

    @torch.no_grad()
    def text_cosines(self, features: Tensor, captions: Sequence[str]) -> Tensor:
        """The same from the images' features (n, D)."""
        tokens = self.tokenizer(
            list(captions), padding="max_length", truncation=True, return_tensors="pt"
        ).to(self.model.device)
        image = self.model.visual_projection(features)
        text = self.model.text_projection(self.model.text_model(**tokens).pooler_output)
        return nn.functional.cosine_similarity(image, text)

    def _pixels(self, images: Tensor) -> Tensor:
        # Transfer bytes, then convert: a single `to` would convert on the CPU first.
        pixels = images.to(self.model.device).to(self.model.dtype) / 255
        if pixels.shape[-1] != SCORER_IMAGE_SIZE:
            pixels = nn.functional.interpolate(
                pixels, (SCORER_IMAGE_SIZE, SCORER_IMAGE_SIZE), mode="bilinear", antialias=True
            )
        return (pixels - SCORER_MEAN) / SCORER_STD


def image_features(scorer: Scorer, images: np.ndarray) -> Tensor:
    """Features (n, D) of uint8 images (n, h, w, 3), for FID and the CLIP score."""
    batches = (
        images[start : start + SCORER_BATCH] for start in range(0, len(images), SCORER_BATCH)
    )
    return torch.cat([scorer(torch.from_numpy(batch).permute(0, 3, 1, 2)) for batch in batches])


def clip_scores(scorer: Scorer, features: Tensor, captions: Sequence[str]) -> np.ndarray:
    """CLIP score of each image with its caption, 100 x cosine, (n,)."""
    cosines = [
        scorer.text_cosines(batch, captions[start : start + SCORER_BATCH])
        for start, batch in zip(
            range(0, len(features), SCORER_BATCH), features.split(SCORER_BATCH), strict=True
        )
    ]
    return 100 * torch.cat(cosines).float().cpu().numpy()


def copy_agreements(images: np.ndarray, scenes: Sequence[Scene]) -> np.ndarray:
    """Copy agreement of the images whose scenes have copies."""
    values = (copy_agreement(image, scene) for image, scene in zip(images, scenes, strict=True))
    return np.array([value for value in values if value is not None])
