"""Scenes as tensors, rendered in worker processes."""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.data import Dataset
from tqdm import tqdm

from distill.data.stream import load_batches
from distill.scenes import corrupt, render, sample_scene

BATCH = 128


class Scenes(NamedTuple):
    """Scenes in order.

    Args:
        images: (n, size, size, 3) uint8.
        captions: n captions.
        has_copies: (n,) bool, whether parts of the image are copies of each other.
    """

    images: Tensor
    captions: list[str]
    has_copies: Tensor


def shard(seeds: Sequence[int], process_index: int, num_processes: int) -> Sequence[int]:
    """Return the seeds of one process. All processes get the same number and share none.

    Raises:
        ValueError: there are fewer seeds than processes.
    """
    if len(seeds) < num_processes:
        raise ValueError(
            f"num_scenes must be at least the number of processes, {num_processes}, but got "
            f"{len(seeds)}."
        )
    return seeds[: len(seeds) // num_processes * num_processes][process_index::num_processes]


def render_batches(
    seeds: Sequence[int],
    *,
    size: int,
    workers: int,
    corrupted: bool = False,
    progress: str | None = None,
) -> Iterator[Scenes]:
    """Render scenes in batches, in order; 0 workers render in this process.

    `progress` is the label of the progress bar; None shows none.
    """
    order = [seeds[start : start + BATCH] for start in range(0, len(seeds), BATCH)]
    batches = load_batches(_Rendered(size, corrupted), order, workers, torch.device("cpu"))
    with tqdm(total=len(seeds), desc=progress, disable=progress is None, mininterval=2) as bar:
        for batch in batches:
            bar.update(len(batch["captions"]))
            yield Scenes(**batch)


def load_images(
    seeds: Sequence[int], *, size: int, device: torch.device, **options: int | str | bool | None
) -> Scenes:
    """Render scenes like `render_batches`, with its options, into `device` memory."""
    images = torch.empty((len(seeds), size, size, 3), dtype=torch.uint8, device=device)
    captions: list[str] = []
    has_copies = []
    for batch in render_batches(seeds, size=size, **options):
        start = len(captions)
        captions += batch.captions
        images[start : len(captions)] = batch.images
        has_copies.append(batch.has_copies)
    return Scenes(images, captions, torch.cat(has_copies).to(device))


def to_float(images: Tensor) -> Tensor:
    """Convert (n, h, w, 3) uint8 to (n, 3, h, w) in [-1, 1], channels last in memory."""
    return images.permute(0, 3, 1, 2).float() / 127.5 - 1


class _Rendered(Dataset):
    """Scenes by seed."""

    def __init__(self, size: int, corrupted: bool) -> None:
        self.size, self.corrupted = size, corrupted

    def __getitem__(self, seed: int) -> dict[str, Any]:
        scene = sample_scene(seed)
        image = corrupt(scene, seed, self.size) if self.corrupted else render(scene, self.size)
        return {"images": image, "captions": scene.caption, "has_copies": scene.has_copies}
