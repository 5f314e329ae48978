"""Labelled images on disk or from the Hub, as tensors.

Every image becomes RGB, upright and on white. Label maps keep their labels: they are resized to the
nearest one.
"""

from collections.abc import Callable, Iterable, Sequence
from io import BytesIO
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, Protocol

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.utils import data

from avq_diffusers.images import UNREADABLE, read_rgb, read_upright
from distill.data.images import to_tensor
from distill.exceptions import DataError
from distill.vision.config import DataConfig, VisionConfig

SPLITS = ("training", "validation")
HUB_SPLITS = {"training": "train", "validation": "validation"}
IGNORED = 255
SCALES, RATIOS = (0.08, 1.0), (3 / 4, 4 / 3)  # of random pieces, as usual on ImageNet
TRIALS = 10


class Sample(NamedTuple):
    """An image, and its class or label map; what they are called in messages."""

    image: Image.Image
    label: int | Image.Image
    name: str


class Samples(Protocol):
    """Numbered samples."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Sample: ...


class ClassifiedImages:
    """A split of a data set with columns image and label.

    Args:
        rows: with undecoded images.
        labels: the values of the column label, in the order of the classes.
    """

    def __init__(self, rows: Any, labels: Iterable[Any]) -> None:
        self.rows = rows
        self.numbers = {label: number for number, label in enumerate(labels)}

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Sample:
        row = self.rows[index]
        path, content = row["image"]["path"], row["image"]["bytes"]
        name = f"image {index}" if path is None else path
        image = _read(read_rgb, path if content is None else BytesIO(content), name)
        return Sample(image, self.numbers[row["label"]], name)


class LabelMaps:
    """`images/{training,validation}/NAME.jpg` and `annotations/...NAME.png`, ADE20K's layout.

    Raises:
        ValueError: there is no image, or one has no label map.
    """

    def __init__(self, root: Path, split: str) -> None:
        self.images = sorted(path for path in (root / "images" / split).glob("*") if path.suffix)
        if not self.images:
            raise ValueError(f"{root / 'images' / split} must hold images, but has none.")
        self.maps = [root / "annotations" / split / f"{path.stem}.png" for path in self.images]
        missing = [path for path in self.maps if not path.is_file()]
        if missing:
            raise ValueError(
                f"every image needs a label map, but {len(missing)} of {len(self.maps)} lack one: "
                f"there is no {missing[0]}."
            )

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> Sample:
        path = self.maps[index]
        image = _read(read_rgb, self.images[index], self.images[index])
        labels = _read(read_upright, path, path)
        if labels.mode not in ("L", "P") or labels.size != image.size:
            raise DataError(
                f"a label map must hold one number a pixel (mode L or P) and have the size of its "
                f"image, {image.size}, but {path} has mode {labels.mode} and size {labels.size}."
            )
        return Sample(image, labels, str(path))


class Prepared(data.Dataset):
    """Samples as the model takes them: `pixel_values`, uint8 (3, S, S), and `labels`.

    `labels` is a class, or (S, S) uint8 in which 255 is ignored. Random pieces and flips depend on
    seed, `epoch` and index only, so a resumed run sees the same ones.

    Args:
        samples: images and labels.
        config: of the data.
        seed: of random pieces and flips; None makes none.
    """

    def __init__(self, samples: Samples, config: DataConfig, seed: int | None) -> None:
        self.samples, self.config, self.seed = samples, config, seed
        self.augment = "none" if seed is None else config.augment
        self.epoch = 0

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> dict[str, Any]:
        image, label, name = self.samples[index]
        rng = np.random.default_rng((self.seed or 0, self.epoch, index))
        size = (self.config.image_size,) * 2
        resampling = Image.Resampling[self.config.interpolation.upper()]
        pixels = to_tensor(image.resize(size, resampling, self._box(image.size, rng)))
        labels: Any = label
        if isinstance(label, Image.Image):
            labels = self._labels(label.resize(size, Image.Resampling.NEAREST), name)
        if self.augment != "none" and rng.random() < 0.5:
            pixels = pixels.flip(-1)
            labels = labels.flip(-1) if isinstance(labels, Tensor) else labels
        return {"pixel_values": pixels, "labels": labels}

    def first(self, count: int) -> Tensor:
        """The first images, or all if they are fewer, not augmented."""
        plain = Prepared(self.samples, self.config, None)
        return torch.stack([plain[i]["pixel_values"] for i in range(min(count, len(plain)))])

    def _box(
        self, size: tuple[int, int], rng: np.random.Generator
    ) -> tuple[float, float, float, float]:
        if self.augment == "crop":
            return random_piece(size, rng)
        return (
            central(size, self.config.crop_share) if self.config.resize == "crop" else (0, 0, *size)
        )

    def _labels(self, image: Image.Image, name: str) -> Tensor:
        """Labels from 0; ADE20K's 0, "other", becomes 255, which is ignored."""
        labels = np.asarray(image)
        if labels.max() > self.config.num_labels:
            raise DataError(
                f"labels must be at most num_labels = {self.config.num_labels}, but {name} has "
                f"{labels.max()}."
            )
        return torch.from_numpy((labels - 1).astype(np.uint8))  # 0 wraps to 255


def open_images(config: VisionConfig, seed: int) -> tuple[list[Prepared], list[str]]:
    """The training and the validation images of a run, and the names of the classes, if any.

    Raises:
        ValueError: the data are not as `DataConfig` says.
        OSError: there is no such data set.
    """
    root = Path(config.data.path)
    samples: Sequence[Samples]
    classes: list[str] = []
    if config.task == "segmentation":
        samples = [LabelMaps(root, split) for split in SPLITS]
    else:
        from datasets import Image as ImageColumn
        from datasets import load_dataset

        of_folder = ("imagefolder", None, str(root)) if root.is_dir() else (str(root),)
        found = load_dataset(*of_folder)
        for name in HUB_SPLITS.values():
            if name not in found or not {"image", "label"} <= set(found[name].column_names):
                raise ValueError(
                    f"{root} must have splits train and validation (or val) with columns image and "
                    f"label, but has {found.column_names}."
                )
        rows = found.cast_column("image", ImageColumn(decode=False))
        labels, classes = labels_of(rows, str(root))
        samples = [ClassifiedImages(rows[name], labels) for name in HUB_SPLITS.values()]
    training, validation = samples
    return [Prepared(training, config.data, seed), Prepared(validation, config.data, None)], classes


def labels_of(rows: Any, name: str) -> tuple[list[Any], list[str]]:
    """The values of the column label in the order of the classes, and the names of the classes.

    Whole numbers and texts without names are classes in sorted order.

    Raises:
        ValueError: the labels are no classes, or a split has a label that training images lack.
    """
    found = {split: set(rows[split].unique("label")) for split in HUB_SPLITS.values()}
    if names := getattr(rows["train"].features["label"], "names", None):
        labels = [*range(len(names))]
    elif any(all(isinstance(x, kind) for x in found["train"]) for kind in (int, str)):
        labels = sorted(found["train"])
    else:
        kinds = ", ".join(sorted({type(x).__name__ for x in found["train"]}))
        raise ValueError(
            f"column label of {name} must hold classes, all int or all str, but holds {kinds}."
        )
    for split, used in found.items():
        if unknown := used - {*labels}:
            raise ValueError(
                f"labels of the split {split} of {name} must be those of training images, but "
                f"{min(unknown, key=str)!r} is not."
            )
    return labels, names or [str(label) for label in labels]


def central(size: tuple[int, int], share: float) -> tuple[float, float, float, float]:
    """The box of a square in the middle, of this share of the shorter side."""
    side = min(size) * share
    return tuple((length + sign * side) / 2 for sign in (-1, 1) for length in size)


def random_piece(
    size: tuple[int, int], rng: np.random.Generator
) -> tuple[float, float, float, float]:
    """A random box of 8 to 100 % of the area and sides of 3:4 to 4:3 (RandomResizedCrop)."""
    width, height = size
    for _ in range(TRIALS):
        area = width * height * rng.uniform(*SCALES)
        ratio = np.exp(rng.uniform(*np.log(RATIOS)))
        w, h = (area * ratio) ** 0.5, (area / ratio) ** 0.5
        if w <= width and h <= height:
            left, top = rng.uniform(0, width - w), rng.uniform(0, height - h)
            return left, top, left + w, top + h
    return central(size, 1)


def _read(
    reader: Callable[[Any], Image.Image], file: Path | str | BinaryIO, name: Path | str
) -> Image.Image:
    try:
        return reader(file)
    except UNREADABLE as error:
        raise DataError(f"{name} cannot be read as an image: {error}.") from error
