"""Samples of a dataset: dicts of `image` (3, S, S) uint8 and `caption`."""

import hashlib
import warnings
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from torch.utils.data import Dataset

from avq_diffusers.images import UNREADABLE
from distill.data import DataError
from distill.data.config import DataConfig
from distill.data.images import PREPROCESS, read_column, to_tensor
from distill.scenes import TRAINING_SEEDS, render, sample_scene

# This many broken samples in a row indicate a broken disk, not a broken file.
MAX_BROKEN = 16


class BrokenSample(ValueError):
    """The image of a sample cannot be read, or its caption is missing or not text."""


class SceneSamples(Dataset):
    """The first scenes of mini-sd's training range, rendered on access.

    `fingerprint` is a digest of the first few.
    """

    def __init__(self, num_samples: int, image_size: int) -> None:
        if num_samples > len(TRAINING_SEEDS):
            raise ValueError(
                f"num_samples must be at most {len(TRAINING_SEEDS)}, but got {num_samples}."
            )
        self.seeds = TRAINING_SEEDS[:num_samples]
        self.image_size = image_size
        digest = hashlib.sha256()
        for sample in map(self.__getitem__, range(min(8, num_samples))):  # raises for a wrong size
            digest.update(sample["image"].numpy())
            digest.update(sample["caption"].encode())
        self.fingerprint = digest.hexdigest()

    def __len__(self) -> int:
        return len(self.seeds)

    def __getitem__(self, index: int) -> dict[str, Any]:
        scene = sample_scene(self.seeds[index])
        return {"image": to_tensor(render(scene, self.image_size)), "caption": scene.caption}


class RowSamples(Dataset):
    """Rows of a folder or a `datasets.Dataset`.

    A broken sample, with a damaged image or a caption that is not text, is replaced by the next
    one, with a warning that names it. Many in a row raise `DataError`.

    Args:
        rows: rows with undecoded images.
        captions: captions that replace the rows' own, or None.
        config: columns, number of samples, preprocessing, and the path for messages. Dots in the
            caption column separate the column from keys of its mapping.
        image_size: S.
        fingerprint: digest of what the rows were made from.
    """

    def __init__(
        self,
        rows: Sequence[Mapping[str, Any]],
        captions: list[str] | None,
        config: DataConfig,
        image_size: int,
        fingerprint: str,
    ) -> None:
        self.rows = rows
        self.captions = captions
        self.num_samples = len(rows) if config.num_samples is None else config.num_samples
        self.columns = config.image_column or "image", config.caption_column or "caption"
        self.path = config.path
        self.preprocess = partial(PREPROCESS[config.preprocessing], size=image_size)
        self.fingerprint = fingerprint

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, index: int) -> dict[str, Any]:
        for following in range(index, index + MAX_BROKEN):
            try:
                return self._read(following % len(self))
            except BrokenSample as error:
                broken = error
                warnings.warn(f"{broken}; the next sample takes its place.", stacklevel=2)
        raise DataError(f"{MAX_BROKEN} samples in a row are broken, the last: {broken}.")

    def _read(self, index: int) -> dict[str, Any]:
        image_column, caption_column = self.columns
        row = self.rows[index]
        file = row[image_column]
        name = f"sample {index} of {self.path}"
        name += f" ({file['path']})" if file and file["path"] else ""
        caption: Any = row if self.captions is None else self.captions[index]
        for key in caption_column.split(".") if self.captions is None else ():
            caption = caption.get(key) if isinstance(caption, dict) else None
        if not isinstance(caption, str):
            raise BrokenSample(f"the caption of {name} must be text, but is {caption!r}")
        try:
            return {"image": self.preprocess(read_column(file)), "caption": caption}
        except UNREADABLE as error:
            raise BrokenSample(f"{name} cannot be read: {error}") from error
