"""Tensors in safetensors files, with a config beside them: reading, checks and digest."""

import hashlib
import json
import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

WEIGHT_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def check_names(subject: str, got: Collection[str], expected: Collection[str]) -> None:
    """Refuse missing and unexpected names.

    Args:
        subject: what has the names, for the message.
        got, expected: the names.

    Raises:
        ValueError: the names differ; the message begins with `subject`.
    """
    missing = [name for name in expected if name not in got]
    unexpected = [name for name in got if name not in expected]
    if missing:
        raise ValueError(f"{subject}: {missing[0]} is missing ({len(missing)} missing in all).")
    if unexpected:
        raise ValueError(
            f"{subject}: {unexpected[0]} is unexpected ({len(unexpected)} unexpected in all)."
        )


def check_tensors(subject: str, got: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    """Refuse tensors with other names or shapes, of less than 16 bits, or with NaN or infinity.

    Args:
        subject: what holds the tensors, for the message.
        got: the tensors by name.
        expected: tensors with the expected names and shapes, for instance on the meta device.

    Raises:
        ValueError: the message begins with `subject` and names the tensor.
    """
    check_names(subject, got, expected)
    for name, tensor in got.items():
        if tensor.shape != expected[name].shape:
            raise ValueError(
                f"{subject}: {name} must have shape {tuple(expected[name].shape)}, but got "
                f"{tuple(tensor.shape)}."
            )
        if tensor.dtype not in WEIGHT_DTYPES:
            raise ValueError(
                f"{subject}: {name} must be floating point of 16 bits or more, but got "
                f"{tensor.dtype}."
            )
        if not tensor.isfinite().all():
            raise ValueError(f"{subject}: {name} holds NaN or infinity.")


def tensor_digest(tensors: Mapping[str, Tensor]) -> str:
    """The SHA-256 of names, shapes and values, independent of the floating-point dtype.

    Args:
        tensors: the tensors by name.
    """
    digest = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        digest.update(f"{name} {tuple(tensor.shape)}".encode())
        digest.update(tensor.float().cpu().numpy().tobytes())
    return digest.hexdigest()


def read_config(path: Path, class_name: str, version: int) -> dict[str, Any]:
    """Read the config beside a tensor file.

    Args:
        path: the JSON file.
        class_name: the class that it must name.
        version: the version of the file format that it must have.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it is damaged or another config; the message names `path`.
    """
    if not path.is_file():
        raise FileNotFoundError(f"{class_name}: there is no file {path}.")
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not a JSON file: {error}.") from error
    found = config.get("_class_name") if isinstance(config, dict) else config
    if found != class_name:
        raise ValueError(f"{path}: expected the config of {class_name}, but got one of {found}.")
    if config.get("format_version") != version:
        raise ValueError(
            f"{path}: {class_name} of format version {version} are supported, but got version "
            f"{config.get('format_version')}."
        )
    return config


def load_tensors(
    path: Path, expected: Mapping[str, Tensor], sha256: str | None
) -> dict[str, Tensor]:
    """Read a safetensors file.

    Args:
        path: the file.
        expected: as in `check_tensors`.
        sha256: the `tensor_digest` that the file must have; None accepts any.

    Raises:
        ValueError: the file is damaged or does not match; the message names `path`.
    """
    try:
        tensors = load_file(path)
    except SafetensorError as error:
        unknown = re.search(r"unknown variant `(\w+)`", str(error))
        if unknown:
            raise ValueError(
                f"{path} holds a tensor of the unknown dtype {unknown[1]}; expected floating point "
                f"of 16 bits or more."
            ) from error
        raise ValueError(f"{path} is not a complete safetensors file: {error}.") from error
    check_tensors(str(path), tensors, expected)
    if sha256 not in (None, tensor_digest(tensors)):
        raise ValueError(
            f"{path} does not hold the tensors that its config.json was saved with: it is damaged "
            f"or belongs to another training run."
        )
    return tensors
