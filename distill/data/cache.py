"""A cache of encoded samples: safetensors shards, in a folder named after their inputs' digest.

A rename makes a shard appear complete, so a killed build continues where it stopped, and several
processes can build one cache. Other data or another encoder get their own folder.
"""

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import chain, islice
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch.utils.data import Dataset
from tqdm import tqdm

from avq_diffusers.files import TEMPORARY, atomic_write
from distill.checkpointing.folders import sync
from distill.data import DataError

FORMAT = 3
SHARD = 512  # samples

Encode = Callable[[Iterable[list[int]]], Iterator[dict[str, Tensor]]]


class CachedSamples(Dataset):
    """The samples of a complete cache, each a dict of float16 tensors.

    Reading a sample from a damaged shard raises `DataError`.

    Args:
        folder: folder of the shards.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.shards = {}

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        number, row = divmod(index, SHARD)
        path = shard_path(self.folder, number)
        try:
            if number not in self.shards:  # each worker maps files for itself
                self.shards[number] = safe_open(path, framework="pt")
            shard = self.shards[number]
            names = shard.keys()
            return {name: shard.get_slice(name)[row] for name in names}
        except (IndexError, FileNotFoundError, SafetensorError) as error:
            raise DataError(f"{path} is damaged ({error}); delete it to build it again.") from error


def open_cache(
    root: str | Path,
    fingerprint: Mapping[str, Any],
    encode: Encode,
    *,
    num_samples: int,
    batch_size: int,
    process_index: int,
    num_processes: int,
) -> CachedSamples:
    """Build the missing shards of a cache and return its samples.

    All processes call this function; each builds its part, on a shared file system.

    Args:
        root: parent of the cache's folder, created if missing.
        fingerprint: JSON values that determine the output of `encode`.
        encode: maps lists of sample indices to batches of encoded samples.
        num_samples: number of samples to cache.
        batch_size: samples per call of the encoder.
        process_index: index of this process.
        num_processes: number of processes that build the cache.

    Raises:
        ValueError: the processes do not share the folder.
        OSError: a shard cannot be written.
        FloatingPointError: a sample is infinite or NaN in float16.
    """
    said = json.dumps({"format": FORMAT, **fingerprint}, sort_keys=True)
    folder = Path(root) / hashlib.sha256(said.encode()).hexdigest()[:16]
    paths = [shard_path(folder, number) for number in range(-(-num_samples // SHARD))]
    missing = [path for path in paths[process_index::num_processes] if not path.exists()]
    _build(missing, encode, num_samples, batch_size, progress=process_index == 0)
    if dist.is_initialized():
        dist.barrier()
    if missing := [path for path in paths if not path.exists()]:
        raise ValueError(
            f"{len(missing)} of {len(paths)} shards of the cache {folder} are missing; put it "
            f"on a disk that all processes share."
        )
    if process_index == 0:
        for leftover in folder.glob(f"{TEMPORARY}*"):  # from killed builds
            leftover.unlink(missing_ok=True)
    return CachedSamples(folder)


def shard_path(folder: Path, number: int) -> Path:
    """Return the file of the samples from `number * SHARD` on."""
    return folder / f"shard-{number:06d}.safetensors"


def _build(
    paths: list[Path], encode: Encode, num_samples: int, batch_size: int, *, progress: bool
) -> None:
    numbers = [int(path.stem.removeprefix("shard-")) for path in paths]
    shards = [range(SHARD * i, min(SHARD * i + SHARD, num_samples)) for i in numbers]
    batches = [
        [list(shard[start : start + batch_size]) for start in range(0, len(shard), batch_size)]
        for shard in shards
    ]
    encoded = encode(list(chain(*batches)))
    total = sum(map(len, shards))
    with tqdm(desc="cache", total=total, unit="sample", disable=not (progress and total)) as bar:
        for path, shard, parts in zip(paths, shards, batches, strict=True):
            found = [
                {name: value.half().cpu() for name, value in batch.items()}
                for batch in islice(encoded, len(parts))
            ]
            tensors = {name: torch.cat([batch[name] for batch in found]) for name in found[0]}
            for name, value in tensors.items():
                if not value.isfinite().all():
                    raise FloatingPointError(
                        f"{name} of samples {shard.start} to {shard.stop - 1} are not finite in "
                        f"float16; train without a cache, with a VAE in float32 or bfloat16."
                    )
            _save(tensors, path)
            bar.update(len(shard))


def _save(tensors: dict[str, Tensor], path: Path) -> None:
    try:
        with atomic_write(path, shared=True) as temporary:
            save_file(tensors, temporary)
            sync(temporary)
        sync(path.parent)
    except OSError as error:
        if path.exists():  # another run has built the same shard
            return
        raise OSError(
            f"{error} Free disk space and start again; complete shards are kept."
        ) from error
