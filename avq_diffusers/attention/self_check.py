"""Kernels on GPUs that nobody verified are compared with the PyTorch path at their first use.

A compiler or driver that makes something else of a kernel must not change an image unseen. The
first call of a kind is computed twice, for one element of its batch, and compared tile by tile.
What has passed is remembered for this GPU, this Triton and this package, in `folder` too if it is
set.
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
from avq_diffusers.attention.spec import Spec, Tensors

# Where passed checks are remembered between processes, if anywhere.
folder: Path | None = None

# Largest distance of a tile of one head, relative to what it should be: several times what rounding
# makes of a tile, and less than one wrong row. Rounding also decides between codewords of equal
# importance: one tile in `RARE` may be off by `FLIPPED` times as much.
LARGEST_ERROR = 0.1
RARE, FLIPPED = 1000, 5
TILE = 64

_passed: set[tuple[Any, ...]] = set()


@cache
def is_verified(device: torch.device) -> bool:
    """Whether tests have run on this kind of GPU with this Triton.

    Args:
        device: others than GPUs count as verified.
    """
    if device.type != "cuda":
        return True
    name, triton = torch.cuda.get_device_name(device), _version("triton")
    return any(name.startswith(card) and triton.startswith(x) for card, x in VERIFIED.items())


def is_due(tensors: Tensors, spec: Spec, *, of: str = "attention") -> bool:
    """Whether this call is the first of its kind on a GPU that is not verified.

    Never while a CUDA graph is captured: a check needs the host.

    Args:
        tensors, spec: of the call, checked.
        of: what is computed, `"attention"` or `"gradients"`.
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
    """Compare what kernels made with what is right; note and warn if it differs.

    Args:
        tensors, spec: of the call, for its kind.
        pairs: (B, H, N, D) by kernels, and as it should be.
        of: what was computed.
    """
    error = max(distance(found, expected) for found, expected in pairs)
    device = tensors.query.device
    if error <= LARGEST_ERROR:
        _remember(_kind(tensors, spec, of))
        return True
    faults[(device,)] = "the kernels gave a wrong result on this GPU"
    warnings.warn(
        f"AVQ's kernels gave a wrong result on this GPU and are off in this process. Please report "
        f"this line: {_environment(device)}; {of}, error {error:.3g}, {tuple(tensors.query.shape)} "
        f"{tensors.query.dtype}, {spec}.",
        stacklevel=2,
    )
    return False


def distance(found: Tensor, expected: Tensor) -> float:
    """The largest relative distance of a tile of one head, rare ones over `FLIPPED` only.

    Infinite if a number is not finite.

    Args:
        found, expected: (B, H, N, D).
    """
    if not found.isfinite().all():
        return float("inf")
    padding = (0, 0, 0, -expected.shape[2] % TILE)
    difference, size = (
        torch.nn.functional.pad(x.float(), padding).unflatten(2, (-1, TILE)).square().sum((3, 4))
        for x in (found.float() - expected.float(), expected)
    )
    # Tiles whose outputs nearly cancel count by the mean of their head.
    size = torch.maximum(size, size.mean(dim=2, keepdim=True) / 4).clamp_min(1e-30)
    errors = (difference / size).sqrt().flatten()
    usual = errors.kthvalue(len(errors) - len(errors) // RARE).values
    return float(torch.maximum(usual, errors.max() / FLIPPED))


def _kind(tensors: Tensors, spec: Spec, of: str) -> tuple[Any, ...]:
    """What the kernels of a call are compiled for."""
    given = tuple(None if x is None else x.dtype for x in tensors)
    return *kind_of_call(tensors, spec), tensors.query.shape[1], given, of


def _name(kind: tuple[Any, ...]) -> str:
    """The name of a file that says that a kind has passed."""
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
    """What a report needs to know."""
    facts: list[Any] = [device.type]
    if device.type == "cuda":
        capability = ".".join(map(str, torch.cuda.get_device_capability(device)))
        facts = [torch.cuda.get_device_name(device), f"compute capability {capability}"]
    facts += [f"{package} {_version(package)}" for package in ("avq-diffusers", "torch", "triton")]
    return ", ".join(facts)


def _version(package: str) -> str:
    """The version of a package; of Triton by its module, because its packages have many names."""
    if package == "triton" and HAS_TRITON:
        return importlib.import_module(package).__version__
    try:
        return version(package)
    except PackageNotFoundError:
        return "unknown"
