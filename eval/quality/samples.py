"""Measurements of images, and the metrics that summarize them."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from eval.quality.compare import psnr_metrics
from eval.quality.frechet import Gaussian, fit_gaussian, frechet_distance, jackknife_error
from eval.quality.protocol import JACKKNIFE_BLOCKS
from eval.quality.scene_rows import LIKENESS


class Sample(NamedTuple):
    """Measurements of n images; those that were not made are empty.

    features: (n, D) of the scorer. clip_score: (n,). copy_agreement: of images whose scene holds
    copies. psnr: (n,), in dB to exact attention's image with the same noise.
    """

    features: Tensor
    clip_score: Tensor = torch.empty(0)
    copy_agreement: Tensor = torch.empty(0)
    psnr: Tensor = torch.empty(0)


def figures(sample: Sample, reference: Gaussian) -> dict[str, Any]:
    """Number of images, FID to a reference, CLIP score and copy agreement.

    Standard errors are over images, that of FID by the jackknife.
    """
    return {
        "num_images": len(sample.features),
        "fid": frechet_distance(reference, fit_gaussian(sample.features)),
        "fid_sem": jackknife_error(reference, sample.features, JACKKNIFE_BLOCKS),
        "clip_score": sample.clip_score.mean().item(),
        "clip_score_sem": _standard_error(sample.clip_score),
        "copy_agreement": sample.copy_agreement.mean().item(),
        "copy_agreement_sem": _standard_error(sample.copy_agreement),
    }


def likeness(sample: Sample, exact: Gaussian | None) -> dict[str, float | None]:
    """FID and PSNR to exact attention's images; None where they were not compared."""
    if exact is None or not len(sample.psnr):
        return dict.fromkeys(LIKENESS)
    distance = frechet_distance(exact, fit_gaussian(sample.features))
    return {"fid_to_exact": distance, **psnr_metrics(sample.psnr.numpy())}


def _standard_error(values: Tensor) -> float:
    return (values.std() / len(values) ** 0.5).item()
