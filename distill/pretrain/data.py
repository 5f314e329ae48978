"""Scenes as tensors, rendered in worker processes."""

import mmap
import multiprocessing
import os
import signal
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import closing
from dataclasses import dataclass
from threading import Thread

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from avq_diffusers.mini import corrupt, render, sample_scene
from distill.exceptions import DataError

CHUNK = 2048  # images per chunk; two chunks of 256 x 256 images take 0.8 GB of memory
TASK = 32  # images per task of a worker


@dataclass(frozen=True)
class Chunk:
    """Consecutive scenes.

    Args:
        images: (n, size, size, 3) uint8.
        captions: n captions.
        has_copies: (n,) bool, whether parts of the image are copies of each other.
    """

    images: np.ndarray
    captions: list[str]
    has_copies: np.ndarray


def shard(seeds: Sequence[int], process_index: int, num_processes: int) -> Sequence[int]:
    """Return the seeds of one process. All processes get equally many and share none.

    Raises:
        ValueError: there are fewer seeds than processes.
    """
    if len(seeds) < num_processes:
        raise ValueError(
            f"num_scenes must be at least the number of processes, {num_processes}, but got "
            f"{len(seeds)}."
        )
    return seeds[: len(seeds) // num_processes * num_processes][process_index::num_processes]


def render_chunks(
    seeds: Sequence[int],
    *,
    size: int,
    workers: int,
    corrupted: bool = False,
    progress: str | None = None,
) -> Iterator[Chunk]:
    """Render scenes in order, one chunk ahead of the caller; 0 workers render in this process.

    The images of a chunk are valid until the next chunk. Close the iterator to stop early.
    `progress` is the label of the progress bar; None shows none.

    Raises:
        DataError: a rendering process was killed (while iterating).
    """
    chunk = min(CHUNK, len(seeds))
    shape = (2, chunk, size, size, 3)
    shared = mmap.mmap(-1, int(np.prod(shape)))  # anonymous and shared with forked workers
    buffer = np.frombuffer(shared, np.uint8).reshape(shape)
    starts = range(0, len(seeds), chunk)
    tasks = [
        [
            (index % 2, offset, list(seeds[start + offset : start + min(offset + TASK, chunk)]))
            for offset in range(0, min(chunk, len(seeds) - start), TASK)
        ]
        for index, start in enumerate(starts)
    ]
    with tqdm(total=len(seeds), desc=progress, disable=progress is None, mininterval=2) as bar:
        for index, results in enumerate(_run(tasks, buffer, size, corrupted, workers)):
            captions = [caption for part, _ in results for caption in part]
            bar.update(len(captions))
            yield Chunk(
                buffer[index % 2, : len(captions)],
                captions,
                np.concatenate([has_copies for _, has_copies in results]),
            )


@dataclass(frozen=True)
class RenderedScenes:
    """The fields of `Chunk` for all scenes of a process, with tensors on the device."""

    images: Tensor
    captions: list[str]
    has_copies: Tensor


def load_images(
    seeds: Sequence[int],
    *,
    size: int,
    workers: int,
    device: torch.device,
    corrupted: bool = False,
    progress: str | None = None,
) -> RenderedScenes:
    """Render scenes like `render_chunks`, into the memory of `device`.

    Raises:
        DataError: a rendering process was killed.
    """
    images = torch.empty((len(seeds), size, size, 3), dtype=torch.uint8, device=device)
    captions: list[str] = []
    has_copies = []
    chunks = render_chunks(
        seeds, size=size, workers=workers, corrupted=corrupted, progress=progress
    )
    with closing(chunks):
        for chunk in chunks:
            start = len(captions)
            images[start : start + len(chunk.captions)] = torch.from_numpy(chunk.images)
            captions += chunk.captions
            has_copies.append(torch.from_numpy(chunk.has_copies))
    return RenderedScenes(images, captions, torch.cat(has_copies).to(device))


def to_float(images: Tensor) -> Tensor:
    """Convert (n, h, w, 3) uint8 to (n, 3, h, w) in [-1, 1], channels last in memory."""
    return images.permute(0, 3, 1, 2).float() / 127.5 - 1


def to_uint8(images: Tensor) -> np.ndarray:
    """Convert (n, 3, h, w) in [-1, 1] to (n, h, w, 3) uint8."""
    levels = ((images.float().clamp(-1, 1) + 1) * 127.5).round()
    return levels.to(torch.uint8).permute(0, 2, 3, 1).cpu().numpy()


def _run(tasks: list, buffer: np.ndarray, size: int, corrupted: bool, workers: int) -> Iterator:
    if workers == 0:
        _share(buffer, size, corrupted)
        for chunk in tasks:
            yield [_render(task) for task in chunk]
        return
    context = multiprocessing.get_context("fork")
    pool = ProcessPoolExecutor(workers, context, _start_worker, (buffer, size, corrupted))
    try:
        pending = pool.map(_render, tasks[0])
        for following in [*tasks[1:], None]:
            results = list(pending)
            if following is not None:
                pending = pool.map(_render, following)
            yield results
    except BrokenProcessPool as error:
        raise DataError(
            f"one of {workers} rendering processes was killed; start again, with fewer workers if "
            f"memory ran out."
        ) from error
    finally:
        pool.shutdown(cancel_futures=True)


def _start_worker(buffer: np.ndarray, size: int, corrupted: bool) -> None:
    _share(buffer, size, corrupted)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the main process ends the workers
    Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    """End this worker with the main process; it would wait for tasks forever."""
    multiprocessing.parent_process().join()
    os._exit(1)


def _share(buffer: np.ndarray, size: int, corrupted: bool) -> None:
    global _buffer, _size, _corrupted
    _buffer, _size, _corrupted = buffer, size, corrupted


def _render(task: tuple[int, int, list[int]]) -> tuple[list[str], np.ndarray]:
    slot, offset, seeds = task
    scenes = [sample_scene(seed) for seed in seeds]
    for index, (seed, scene) in enumerate(zip(seeds, scenes, strict=True)):
        image = corrupt(scene, seed, _size) if _corrupted else render(scene, _size)
        _buffer[slot, offset + index] = image
    has_copies = np.array([scene.has_copies for scene in scenes])
    return [scene.caption for scene in scenes], has_copies
