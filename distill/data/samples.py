"""Samples of a data set: a dict of `image` (3, S, S) uint8 and `caption`."""

import hashlib
from functools import partial
from io import BytesIO
from typing import TYPE_CHECKING, Any

from torch.utils.data import Dataset

from avq_diffusers.images import UNREADABLE, read_rgb
from avq_diffusers.mini import TRAINING_SEEDS, render, sample_scene
from distill.data.config import DataConfig
from distill.data.images import PREPROCESS, to_tensor

if TYPE_CHECKING:
    import datasets


class BrokenSample(ValueError):
    """The image of a sample cannot be read, or its caption is missing or not text."""


class SceneSamples(Dataset):
    """The first scenes of mini-sd's training range, rendered when they are read.

    `fingerprint` is a digest of the first ones.
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

    Reading a row raises `BrokenSample` if its image is damaged, or its caption is missing or not
    text.

    Args:
        rows: rows with undecoded images.
        captions: captions that replace those of the rows, or None.
        config: columns, number of samples, preprocessing, and the path for messages. Dots in the
            caption column separate the column from keys of its mapping.
        image_size: S.
        fingerprint: digest of what the rows were made from.
    """

    def __init__(
        self,
        rows: "datasets.Dataset | list[dict[str, Any]]",
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
        if index >= len(self):
            raise IndexError(f"there are {len(self)} samples, but got index {index}.")
        name = f"sample {index} of {self.path}"
        row = self.rows[index]
        image_column, caption_column = self.columns
        file = row[image_column] or {"path": None, "bytes": b""}
        name += f" ({file['path']})" if file["path"] else ""
        if self.captions is None:
            caption = row
            for key in caption_column.split("."):
                caption = caption.get(key) if isinstance(caption, dict) else None
        else:
            caption = self.captions[index]
        if caption is None:
            raise BrokenSample(f"{name} has no caption")
        if not isinstance(caption, str):
            raise BrokenSample(f"the caption of {name} is {type(caption).__name__}, not text")
        if file["bytes"] == b"" or not (file["bytes"] or file["path"]):
            raise BrokenSample(f"{name} has no image")
        try:
            image = read_rgb(BytesIO(file["bytes"]) if file["bytes"] else file["path"])
        except UNREADABLE as error:
            raise BrokenSample(f"{name} cannot be read: {error}") from error
        return {"image": self.preprocess(image), "caption": caption}
