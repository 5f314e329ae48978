"""Damages to the files that a job goes on from, or that others read, and how they are mended."""

import hashlib
import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from eval.fault_jobs import NEWEST

WEIGHTS = "diffusion_pytorch_model.safetensors"


def _truncate(path: Path) -> None:
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 2])


def _overwrite(path: Path) -> None:
    """The header."""
    content = path.read_bytes()
    path.write_bytes(b"\xff" * 64 + content[64:])


def _flip(path: Path) -> None:
    """One bit in the middle, which the format does not notice."""
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def _put_nan(path: Path) -> None:
    """NaN in one tensor; a checkpoint's digest is that of the file with it."""
    tensors = load_file(path)
    name = max(tensors, key=lambda name: tensors[name].numel())
    tensors[name].view(-1)[0] = torch.nan
    save_file(tensors, path)
    run = path.with_name("run.json")
    if run.exists():
        values = json.loads(run.read_text())
        values["sha256"][path.stem] = hashlib.sha256(path.read_bytes()).hexdigest()
        run.write_text(json.dumps(values))


def _swap_sizes(path: Path) -> None:
    """The weights of codebooks of another size."""
    tensors = load_file(path)
    save_file({name: x[:, :-1].contiguous() for name, x in tensors.items()}, path)


def _swap_training(path: Path) -> None:
    """The weights of other codebooks of the same sizes."""
    save_file({name: 0.5 * x for name, x in load_file(path).items()}, path)


def _swap_steps(path: Path) -> None:
    """The file of the checkpoint before, of the same shapes."""
    others = sorted(path.parent.parent.glob("step-*"))
    shutil.copy(others[-2] / path.name, path)


def _swap_names(path: Path) -> None:
    """The file of the optimizer in the place of the trained tensors."""
    shutil.copy(path.with_name("optimizer.safetensors"), path)


def _delete_codebooks(folder: Path, path: Path) -> None:
    shutil.rmtree(folder / "codebooks")


def _delete_checkpoint(folder: Path, path: Path) -> None:
    """What the message says."""
    shutil.rmtree(path.parent)


_CODEBOOK_DAMAGES = (
    (WEIGHTS, "truncated", _truncate),
    (WEIGHTS, "corrupted", _overwrite),
    (WEIGHTS, "corrupted, one bit", _flip),
    (WEIGHTS, "swapped for another size", _swap_sizes),
    (WEIGHTS, "swapped for another training", _swap_training),
    (WEIGHTS, "NaN", _put_nan),
    ("config.json", "truncated", _truncate),
)
# By kind: pattern of the file, name of the damage, the damage, how it is mended.
DAMAGES = {
    "calibration": [(*damage, None) for damage in _CODEBOOK_DAMAGES],
    "generation": [
        (f"codebooks/{target}", *damage, _delete_codebooks) for target, *damage in _CODEBOOK_DAMAGES
    ],
    "distillation": [
        (f"{NEWEST}/{target}", *damage, _delete_checkpoint)
        for target, *damage in (
            ("objective.safetensors", "truncated", _truncate),
            ("objective.safetensors", "corrupted, one bit", _flip),
            ("objective.safetensors", "swapped for the step before", _swap_steps),
            ("objective.safetensors", "swapped for the optimizer", _swap_names),
            ("objective.safetensors", "NaN", _put_nan),
            ("optimizer.safetensors", "truncated", _truncate),
            ("optimizer.safetensors", "NaN", _put_nan),
            ("run.json", "truncated", _truncate),
        )
    ],
    "scoring": [
        ("cache/*.safetensors", "truncated", _truncate, None),
        ("cache/*.safetensors", "corrupted", _overwrite, None),
    ],
}
