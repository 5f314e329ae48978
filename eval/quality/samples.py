"""What is measured of each picture, so that parts of a run can be pooled, and figures of it."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from avq_diffusers.files import atomic_write
from eval.quality.compare import psnr_figures
from eval.quality.frechet import Gaussian, fit_gaussian, frechet_distance, jackknife_error
from eval.quality.protocol import JACKKNIFE_BLOCKS

LIKENESS = ("fid_to_exact", "psnr_median", "psnr_p10")


class Sample(NamedTuple):
    """Of n pictures, in their order.

    features: (n, D) of the scorer.
    clip_score: (n,); as the others, empty where it is not measured.
    copy_agreement: of the pictures whose scene holds copies.
    psnr: (n,), in dB to exact attention's picture of the same noise.
    """

    features: Tensor
    clip_score: Tensor = torch.empty(0)
    copy_agreement: Tensor = torch.empty(0)
    psnr: Tensor = torch.empty(0)

    @classmethod
    def join(cls, samples: Sequence["Sample"]) -> "Sample":
        """The pictures of several samples, one after the other."""
        return cls(*map(torch.cat, zip(*samples, strict=True)))


def figures(sample: Sample, reference: Gaussian) -> dict[str, Any]:
    """Number of pictures, FID to a reference, CLIP score and copy agreement.

    Standard errors are over pictures, that of FID by the jackknife.
    """
    return {
        "num_pictures": len(sample.features),
        "fid": frechet_distance(reference, fit_gaussian(sample.features)),
        "fid_sem": jackknife_error(reference, sample.features, JACKKNIFE_BLOCKS),
        "clip_score": sample.clip_score.mean().item(),
        "clip_score_sem": _standard_error(sample.clip_score),
        "copy_agreement": sample.copy_agreement.mean().item(),
        "copy_agreement_sem": _standard_error(sample.copy_agreement),
    }


def likeness(sample: Sample, exact: Gaussian | None) -> dict[str, float | None]:
    """FID and PSNR to exact attention's pictures; None where they were not compared."""
    if exact is None or not len(sample.psnr):
        return dict.fromkeys(LIKENESS)
    distance = frechet_distance(exact, fit_gaussian(sample.features))
    return {"fid_to_exact": distance, **psnr_figures(sample.psnr.numpy())}


def save_samples(path: Path, samples: Mapping[str, Sample]) -> None:
    """Write samples by name as safetensors, in one step.

    Raises:
        OSError: the disk is full or not writable.
    """
    tensors = {
        f"{name}|{field}": tensor.contiguous().cpu()
        for name, sample in samples.items()
        for field, tensor in sample._asdict().items()
    }
    with atomic_write(path) as temporary:
        save_file(tensors, temporary)


def load_samples(path: Path) -> dict[str, Sample]:
    """Read what `save_samples` wrote.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it is damaged, or of something else.
    """
    if not path.is_file():
        raise FileNotFoundError(f"there is no file {path}.")
    try:
        fields: dict[str, dict[str, Tensor]] = {}
        for key, tensor in load_file(path).items():
            name, _, field = key.rpartition("|")
            fields.setdefault(name, {})[field] = tensor
        return {name: Sample(**tensors) for name, tensors in fields.items()}
    except (SafetensorError, TypeError) as error:
        raise ValueError(f"{path} does not hold the samples of scenes: {error}") from error


def _standard_error(values: Tensor) -> float:
    return (values.std() / len(values) ** 0.5).item()
