"""Fréchet distance of Gaussians fitted to features: FID once the network is left out.

d² = |m - n|² + tr(S) + tr(T) - 2 tr((S T)^(1/2)), in float64, with covariances over n - 1 as
clean-fid and torchmetrics have them.
"""

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

CHUNK = 8192  # features that are float64 at one time


@dataclass(frozen=True)
class Gaussian:
    """Mean (D,) and covariance (D, D) in float64."""

    mean: Tensor
    covariance: Tensor

    @cached_property
    def root(self) -> Tensor:
        """The symmetric square root of the covariance, (D, D)."""
        values, vectors = torch.linalg.eigh(self.covariance)
        return (vectors * values.clamp(min=0).sqrt()) @ vectors.mT


def fit_gaussian(features: Tensor, counts: Tensor | None = None) -> Gaussian:
    """The Gaussian of features (n, D), of which row i counts `counts[i]` times (once without)."""
    if features.device.type == "mps":  # has no float64
        features = features.cpu()
    counts = torch.ones(len(features)) if counts is None else counts
    counts = counts.to(features.device, torch.float64)
    total = counts.sum()
    # Centred first: sums of squares would cancel where the mean is large.
    mean = (
        sum(
            (share.double() * count[:, None]).sum(0)
            for share, count in zip(features.split(CHUNK), counts.split(CHUNK), strict=True)
        )
        / total
    )
    covariance = torch.zeros(len(mean), len(mean), dtype=torch.float64, device=mean.device)
    for share, count in zip(features.split(CHUNK), counts.split(CHUNK), strict=True):
        centred = share.double() - mean
        covariance.addmm_(centred.mT * count, centred)
    return Gaussian(mean, covariance / (total - 1))


def frechet_distance(first: Gaussian, second: Gaussian) -> float:
    """d² of two Gaussians.

    The eigenvalues of S T are those of S^(1/2) T S^(1/2), which is symmetric: unlike a matrix root
    of S T this is stable where a covariance is singular, and the root of S serves many T.
    """
    product = first.root @ second.covariance @ first.root
    overlap = torch.linalg.eigvalsh(product).clamp(min=0).sqrt().sum()
    means = ((first.mean - second.mean) ** 2).sum()
    return float(means + first.covariance.trace() + second.covariance.trace() - 2 * overlap)


def bootstrap_error(real: Gaussian, features: Tensor, num_bootstraps: int) -> float:
    """Standard error of the distance of features (n, D) to `real`, over which pictures there are.

    It is the standard deviation of the distance over resamples of n rows with replacement. These
    hold fewer different rows, so that it is too large where n is not many times D: by four tenths
    at 4 D, by a tenth at 15 D.
    """
    generator = torch.Generator().manual_seed(0)
    num = len(features)
    distances = [
        frechet_distance(
            real,
            fit_gaussian(
                features,
                torch.randint(num, (num,), generator=generator).bincount(minlength=num),
            ),
        )
        for _ in range(num_bootstraps)
    ]
    return float(torch.tensor(distances, dtype=torch.float64).std())
