"""On unverified GPUs, kernels are compared with the PyTorch path at their first use.

A compiler or driver that miscompiles a kernel must not change images silently. The first call of a
kind is computed twice, for one batch element, and compared tile by tile. Passed checks are
remembered per GPU, Triton version and package version, also on disk if `folder` is set.
"""

import hashlib
import importlib
import warnings
from collections.abc import Iterable
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from avq_diffusers.attention.limits import HAS_TRITON, VERIFIED, faults, kind_of_call
from avq_diffusers.attention.tensors import Tensors
from avq_diffusers.config import Spec

# Where passed checks are remembered across processes; None remembers them in this one only.
folder: Path | None = None

# Largest relative distance of one head's tile: several times the rounding error of a tile, less
# than one wrong row. Rounding also decides between codewords of equal importance, so one tile in
# `RARE` may be off by `FLIPPED` times as much.
LARGEST_ERROR = 0.1
RARE, FLIPPED = 1000, 5
TILE = 64

_passed: set[tuple[Any, ...]] = set()


@cache
def is_verified(device: torch.device) -> bool:
    """Whether the tests have run on this kind of GPU, if it is one, with this Triton version."""
    if device.type != "cuda":
        return True
    name, triton = torch.cuda.get_device_name(device), _version("triton")
    return any(name.startswith(card) and triton.startswith(x) for card, x in VERIFIED.items())


def is_due(tensors: Tensors, spec: Spec, *, of: str = "attention") -> bool:
    """Whether this call is the first of its kind on an unverified GPU.

    Never during CUDA graph capture: a check synchronizes with the host. `of` is what is computed,
    `"attention"` or `"gradients"`.
    """
    device = tensors.query.device
    if is_verified(device):
        return False
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        return False
    kind = _kind(tensors, spec, of)
    if kind not in _passed and folder is not None and (folder / _name(kind)).exists():
        _passed.add(kind)
    return kind not in _passed


def passes(
    tensors: Tensors, spec: Spec, pairs: Iterable[tuple[Tensor, Tensor]], *, of: str = "attention"
) -> bool:
    """Compare kernel results (B, H, N, D) with expected ones; on a mismatch, record the fault and
    warn.

    If expected numbers are not finite, nothing is checked: False, without a fault.
    """
    pairs = [*pairs]
    if not all(expected.isfinite().all() for _, expected in pairs):
        return False
    error = max(distance(found, expected) for found, expected in pairs)
    device = tensors.query.device
    if error <= LARGEST_ERROR:
        _remember(_kind(tensors, spec, of))
        return True
    faults[(device,)] = "the kernels gave a wrong result on this GPU"
    warnings.warn(
        f"AVQ's kernels gave a wrong result on this GPU and are off in this process. Please report "
        f"this line: {_environment(device)}; {of}, error {error:.3g}, {tuple(tensors.query.shape)} "
        f"{tensors.query.dtype}, {spec!r}.",
        stacklevel=2,
    )
    return False


def distance(found: Tensor, expected: Tensor) -> float:
    """The largest relative distance of any head's tile, one in `RARE` counting 1 / `FLIPPED`.

    Infinite if any number is not finite. Both are (B, H, N, D).
    """
    if not found.isfinite().all():
        return float("inf")
    # Squares of large numbers would overflow.
    largest = expected.float().abs().amax(dim=(2, 3), keepdim=True).clamp_min(1)
    found, expected = found.float() / largest, expected.float() / largest
    padding = (0, 0, 0, -expected.shape[2] % TILE)
    difference, size = (
        torch.nn.functional.pad(x, padding).unflatten(2, (-1, TILE)).square().sum((3, 4))
        for x in (found - expected, expected)
    )
    # Tiles whose outputs nearly cancel are measured against their head's mean.
    size = torch.maximum(size, size.mean(dim=2, keepdim=True) / 4).clamp_min(1e-30)
    errors = (difference / size).sqrt().flatten()
    usual = errors.kthvalue(len(errors) - len(errors) // RARE).values
    return float(torch.maximum(usual, errors.max() / FLIPPED))


def _kind(tensors: Tensors, spec: Spec, of: str) -> tuple[Any, ...]:
    """What the kernels of a call are compiled for."""
    given = tuple(x.dtype if isinstance(x, Tensor) else None for x in tensors)
    return *kind_of_call(tensors, spec), tensors.query.shape[1], given, of


def _name(kind: tuple[Any, ...]) -> str:
    """The name of the file that records that a kind has passed."""
    device, *facts = kind
    return hashlib.sha256(repr((_environment(device), *facts)).encode()).hexdigest()[:24]


def _remember(kind: tuple[Any, ...]) -> None:
    _passed.add(kind)
    if folder is None:
        return
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / _name(kind)).touch()
    except OSError:
        return


@cache
def _environment(device: torch.device) -> str:
    """The environment, for a bug report."""
    facts: list[Any] = [device.type]
    if device.type == "cuda":
        capability = ".".join(map(str, torch.cuda.get_device_capability(device)))
        facts = [torch.cuda.get_device_name(device), f"compute capability {capability}"]
    return ", ".join([*facts, versions()])


@cache
def versions() -> str:
    """Those of the packages that decide what a GPU runs."""
    packages = "avq-diffusers", "torch", "triton"
    return ", ".join(f"{package} {_version(package)}" for package in packages)


def _version(package: str) -> str:
    """A package's version; Triton's from its module, because it is packaged under many names."""
    if package == "triton" and HAS_TRITON:
        return importlib.import_module(package).__version__
    try:
        return version(package)
    except PackageNotFoundError:
        return "unknown"
