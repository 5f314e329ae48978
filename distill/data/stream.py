"""`EncodedSamples`: endless batches of encoded samples, in the same order on every run."""

import gc
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from functools import lru_cache
from itertools import count
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from distill.data import DataError
from distill.data.cache import SHARD, open_cache
from distill.data.config import DataConfig
from distill.data.encoder import Encoder
from distill.data.samples import RowSamples, SceneSamples

# Starts of PyTorch's messages: a worker was killed, or raised an exception.
KILLED, CAUGHT = "DataLoader worker (pid", "Caught "
# Pixels encoded at once for the cache: 128 images of 256 x 256, or 32 of 512 x 512.
CACHED_PIXELS = 2**23


class EncodedSamples:
    """Samples encoded by `Encoder.encode`, from a cache if the config names one.

    Args:
        samples: what `open_samples` returned for `config` and `image_size`.
        config: workers and cache. An incomplete cache is built here; afterwards `encoder` is no
            longer needed.
        image_size: side of the images.
        encoder: encoder on the device of the batches.
        process_index: index of this process.
        num_processes: number of processes.

    Raises:
        ValueError, OSError, FloatingPointError: see `open_cache`.
    """

    def __init__(
        self,
        samples: SceneSamples | RowSamples,
        config: DataConfig,
        image_size: int,
        encoder: Encoder,
        *,
        process_index: int,
        num_processes: int,
    ) -> None:
        self.samples = samples
        self.encoder = encoder
        self.workers = config.workers
        self.cached = None
        if config.cache is not None:
            free = ("cache", "workers")
            fingerprint = {
                **{name: value for name, value in asdict(config).items() if name not in free},
                "image_size": image_size,
                "num_samples": len(samples),
                "content": samples.fingerprint,
                **encoder.fingerprint(),
            }
            self.cached = open_cache(
                config.cache,
                fingerprint,
                self._encode,
                num_samples=len(samples),
                batch_size=min(SHARD, max(1, CACHED_PIXELS // image_size**2)),
                process_index=process_index,
                num_processes=num_processes,
            )

    def batches(
        self, *, batch_size: int, num_processes: int, **order: int
    ) -> Iterator[dict[str, Tensor]]:
        """Return the endless batches of one process; arguments as in `sample_order`.

        Raises:
            ValueError: there are fewer samples than one batch over all processes.
            DataError: many samples in a row are broken, the cache is damaged, or a worker died
                (while iterating).
            OSError: the data can no longer be read (while iterating).
        """
        num_samples = len(self.samples)
        if num_samples < batch_size * num_processes:
            raise ValueError(
                f"one batch over all processes takes {batch_size} x {num_processes} samples, but "
                f"the data has {num_samples}."
            )
        sizes = {"batch_size": batch_size, "num_processes": num_processes}
        indices = sample_order(num_samples, **sizes, **order)
        return self._encode(indices) if self.cached is None else self._read_cache(indices)

    def _encode(self, order: Iterable[list[int]]) -> Iterator[dict[str, Tensor]]:
        for batch in load_batches(self.samples, order, self.workers, self.encoder.device):
            yield self.encoder.encode(batch["image"], batch["caption"])

    def _read_cache(self, order: Iterable[list[int]]) -> Iterator[dict[str, Tensor]]:
        device = self.encoder.device
        for batch in load_batches(self.cached, order, self.workers, device):
            yield {name: x.to(device, non_blocking=True).float() for name, x in batch.items()}


def sample_order(
    num_samples: int,
    *,
    batch_size: int,
    seed: int,
    first_sample: int,
    process_index: int,
    num_processes: int,
) -> Iterator[list[int]]:
    """Yield the endless batches of sample indices of one process.

    Epoch e is a random permutation with seed (seed, e). Sample s of the run is entry s modulo n of
    epoch s // n. From `first_sample` on, each `num_processes * batch_size` consecutive samples are
    split among the processes in order. Nothing else affects the order.

    Args:
        num_samples: n.
        batch_size: samples per batch and process.
        seed: seed of the permutations, at least 0.
        first_sample: number of samples that all processes together have seen so far.
        process_index: index of this process.
        num_processes: number of processes.
    """

    @lru_cache(maxsize=1)
    def permutation(epoch: int) -> np.ndarray:
        return np.random.default_rng([seed, epoch]).permutation(num_samples)

    for start in count(first_sample + process_index * batch_size, batch_size * num_processes):
        places = (divmod(sample, num_samples) for sample in range(start, start + batch_size))
        yield [int(permutation(epoch)[place]) for epoch, place in places]


def load_batches(
    samples: Dataset, order: Iterable[list[int]], workers: int, device: torch.device
) -> Iterator[dict[str, Any]]:
    """Yield the collated batches of these indices, read by worker processes.

    Raises:
        DataError, OSError: reading a sample raised it, or a worker died.
    """
    loader = DataLoader(
        samples,
        batch_sampler=order,
        num_workers=workers,
        pin_memory=device.type == "cuda",
        generator=torch.Generator(),  # leaves torch's global generator alone
        worker_init_fn=keep_inherited_objects,
    )
    with report_worker_errors():
        yield from loader


def keep_inherited_objects(worker: int) -> None:
    """Keep the garbage of the main process in a forked worker.

    An image decoder whose threads only the main process has would wait for them forever.
    """
    gc.freeze()


@contextmanager
def report_worker_errors() -> Iterator[None]:
    """Report a killed worker, or a worker's `DataError` or `OSError`, in one sentence.

    PyTorch raises the error of a killed worker wherever the main process happens to be, and the
    message of others ends with their traceback.

    Raises:
        DataError, OSError: a worker raised it, or died.
    """
    try:
        yield
    except (RuntimeError, ConnectionError, EOFError) as error:
        if isinstance(error, RuntimeError) and not str(error).startswith(KILLED):
            raise
        raise DataError(
            f"a data worker died ({error}); continue with --resume, and with fewer data workers if "
            f"memory ran out."
        ) from error
    except (DataError, OSError) as error:
        if not str(error).startswith(CAUGHT):
            raise
        message = str(error).rpartition(f"{type(error).__name__}: ")[2].strip()
        raise type(error)(message) from None
