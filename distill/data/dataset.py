"""The endless stream of encoded batches that distillation trains on, the same on every run."""

import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from itertools import count
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, default_collate

from distill.data.cache import SHARD, open_cache
from distill.data.encoder import Encoder
from distill.data.sources import BrokenSample, DataConfig, Rows, Scenes, open_samples
from distill.errors import DataError

# Broken samples in a row that stop the run: then it is not one file, but the disk.
MAX_BROKEN = 16
# How PyTorch says that a worker was killed; what a worker raises names it in other words.
KILLED = "DataLoader worker (pid"
# What commands report in one sentence.
REPORTED = (DataError, OSError)
# Pictures encoded at once for the cache: 128 of 256 x 256, 32 of 512 x 512.
CACHED_PIXELS = 2**23


def sample_batches(
    num_samples: int,
    *,
    batch_size: int,
    seed: int,
    first_sample: int,
    process_index: int,
    num_processes: int,
) -> Iterator[list[int]]:
    """Return the endless batches of indices of one process.

    Epoch e is a permutation drawn from (seed, e). Sample s of the run has number s modulo n in
    epoch s // n; of each `num_processes * batch_size` of them, in order from `first_sample` on,
    process r gets the r-th `batch_size`. Nothing else decides the order.
    """
    epoch, order = -1, None
    for start in count(first_sample + process_index * batch_size, batch_size * num_processes):
        indices = []
        for sample in range(start, start + batch_size):
            if sample // num_samples != epoch:
                epoch = sample // num_samples
                order = np.random.default_rng([seed, epoch]).permutation(num_samples)
            indices.append(int(order[sample % num_samples]))
        yield indices


def stream(
    config: DataConfig,
    image_size: int,
    encoder: Encoder,
    *,
    batch_size: int,
    seed: int,
    first_sample: int,
    process_index: int,
    num_processes: int,
) -> Iterator[dict[str, Tensor]]:
    """Return the endless batches of one process, as `Encoder.encode` gives them, on its device.

    The order is that of `sample_batches`, whatever the workers and the cache. A broken sample
    is replaced by the one that follows it in the data set, with a warning that names it and
    counts.

    Args:
        config: the samples, and the cache, which is built first if it is not complete.
        image_size: side of the pictures.
        encoder: not needed any more once a complete cache is open.
        batch_size: per process.
        seed: of the permutations, at least 0.
        first_sample: how many samples all processes have seen so far.
        process_index: of this process.
        num_processes: how many there are.

    Raises:
        ValueError: there are fewer samples than one batch over all processes, or what
            `open_samples` and `open_cache` raise.
        DataError: many samples in a row are broken, the cache is damaged, or a worker died (while
            iterating).
        OSError: the data cannot be read any more (while iterating).
        FloatingPointError: a sample to be cached is infinite or NaN in float16.
    """
    samples = open_samples(config, image_size)
    if len(samples) < batch_size * num_processes:
        raise ValueError(
            f"one batch over all processes takes {batch_size} x {num_processes} samples, but the "
            f"data has {len(samples)}."
        )
    batches = sample_batches(
        len(samples),
        batch_size=batch_size,
        seed=seed,
        first_sample=first_sample,
        process_index=process_index,
        num_processes=num_processes,
    )
    if config.cache is None:
        return _encoded(samples, encoder, batches, config.workers)
    fingerprint = {
        **asdict(config),
        "image_size": image_size,
        "num_samples": len(samples),
        "content": samples.fingerprint(),
        **encoder.fingerprint(),
    }
    for name in ("cache", "workers"):
        del fingerprint[name]
    cached = open_cache(
        config.cache,
        fingerprint,
        partial(_encoded, samples, encoder, workers=config.workers),
        num_samples=len(samples),
        batch_size=min(SHARD, max(1, CACHED_PIXELS // image_size**2)),
        process_index=process_index,
        num_processes=num_processes,
    )
    return _on_device(_load(cached, batches, config.workers, encoder.device), encoder.device)


class _Repaired(Dataset):
    """Samples with the following one in place of a broken one; `broken` says which that was."""

    def __init__(self, samples: Scenes | Rows) -> None:
        self.samples = samples

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> dict[str, Any]:
        broken = []
        for offset in range(MAX_BROKEN):
            try:
                sample = self.samples[(index + offset) % len(self)]
            except BrokenSample as error:
                broken.append(str(error))
            else:
                return {**sample, "broken": "; ".join(broken)}
        raise DataError(f"{MAX_BROKEN} samples in a row are broken, the last: {broken[-1]}.")


class _Batches(Dataset):
    """Collated batches, or the error of one: what a worker raises comes with its traceback."""

    def __init__(self, samples: Dataset) -> None:
        self.samples = samples

    def __getitem__(self, indices: list[int]) -> dict[str, Any] | DataError | OSError:
        try:
            return default_collate([self.samples[index] for index in indices])
        except REPORTED as error:
            return error


def _encoded(
    samples: Scenes | Rows, encoder: Encoder, batches: Iterable[list[int]], workers: int
) -> Iterator[dict[str, Tensor]]:
    replaced = set()
    for batch in _load(_Repaired(samples), batches, workers, encoder.device):
        for broken in filter(None, batch["broken"]):
            if broken not in replaced:
                replaced.add(broken)
                warnings.warn(
                    f"{broken}; the following sample takes its place ({len(replaced)} replaced "
                    f"so far).",
                    stacklevel=2,
                )
        yield encoder.encode(batch["picture"], batch["caption"])


def _on_device(
    batches: Iterable[dict[str, Tensor]], device: torch.device
) -> Iterator[dict[str, Tensor]]:
    for batch in batches:
        moved = {name: value.to(device, non_blocking=True) for name, value in batch.items()}
        yield {name: value.float() for name, value in moved.items()}


def _load(
    samples: Dataset, batches: Iterable[list[int]], workers: int, device: torch.device
) -> Iterator[dict[str, Any]]:
    loader = DataLoader(
        _Batches(samples),
        batch_size=None,
        sampler=batches,
        num_workers=workers,
        pin_memory=device.type == "cuda",
        generator=torch.Generator(),  # leaves torch's own alone
    )
    with deaths_reported():
        for batch in loader:
            if isinstance(batch, REPORTED):
                raise batch
            yield batch


@contextmanager
def deaths_reported() -> Iterator[None]:
    """Say in one sentence that a process that reads data was killed.

    PyTorch raises this wherever the main process is at that moment.

    Raises:
        DataError: a process died.
    """
    try:
        yield
    except (RuntimeError, ConnectionError, EOFError) as error:
        if isinstance(error, RuntimeError) and not str(error).startswith(KILLED):
            raise
        raise DataError(
            f"a process that reads data died ({error}); go on with --resume, and with fewer "
            "data.workers should memory have run out."
        ) from error
