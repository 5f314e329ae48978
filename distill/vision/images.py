"""Labelled images from disk or the Hub, as tensors.

Every image is converted to RGB, upright and on white. Label maps are resized with nearest-neighbour
interpolation.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.utils import data

from avq_diffusers.images import UNREADABLE, image_files, read_upright, refuse_linked_folders
from distill.data import DataError
from distill.data.images import read_column, to_tensor
from distill.vision.config import ImagesConfig, VisionConfig

HUB_SPLITS = {"training": "train", "validation": "validation"}
IGNORED = 255
SCALES, RATIOS = (0.08, 1.0), (3 / 4, 4 / 3)  # of random crops, as usual on ImageNet
TRIALS = 10

Rows = Sequence[Mapping[str, Any]]


class Prepared(data.Dataset):
    """Labelled images in the model's format: `pixel_values`, uint8 (3, S, S), and `labels`.

    `labels` is a class, or (S, S) uint8 in which 255 is ignored. Random crops and flips only depend
    on seed, `epoch` and index, so a resumed run sees the same ones. Reading an image raises
    `DataError` if it or its label map is damaged, or the map does not fit.

    Args:
        rows: `image`, undecoded as in `datasets`, and `label`, a class or the path of a map.
        config: configuration of the data.
        seed: seeds random crops and flips; None makes none.
        numbers: class number by label; empty for maps.
    """

    def __init__(
        self, rows: Rows, config: ImagesConfig, seed: int | None, numbers: Mapping[Any, int]
    ) -> None:
        self.rows, self.config, self.seed, self.numbers = rows, config, seed, numbers
        self.augment = "none" if seed is None else config.augment
        self.epoch = 0

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        row = self.rows[index]
        image = _read(read_column, row["image"], row["image"]["path"] or f"image {index}")
        rng = np.random.default_rng((self.seed or 0, self.epoch, index))
        size = (self.config.image_size,) * 2
        resampling = Image.Resampling[self.config.interpolation.upper()]
        pixels = to_tensor(image.resize(size, resampling, self._box(image.size, rng)))
        label = row["label"]
        labels: Any = self.numbers[label] if self.numbers else self._map(label, image.size)
        if self.augment != "none" and rng.random() < 0.5:
            pixels = pixels.flip(-1)
            labels = labels.flip(-1) if isinstance(labels, Tensor) else labels
        return {"pixel_values": pixels, "labels": labels}

    def first(self, count: int) -> Tensor:
        """The first `count` images, or all if there are fewer, without augmentation."""
        plain = Prepared(self.rows, self.config, None, self.numbers)
        return torch.stack([plain[i]["pixel_values"] for i in range(min(count, len(plain)))])

    def _box(
        self, size: tuple[int, int], rng: np.random.Generator
    ) -> tuple[float, float, float, float]:
        if self.augment == "crop":
            return random_piece(size, rng)
        return (
            central(size, self.config.crop_share) if self.config.resize == "crop" else (0, 0, *size)
        )

    def _map(self, path: Path, size: tuple[int, int]) -> Tensor:
        """Labels from 0; ADE20K's 0, "other", becomes 255, which is ignored."""
        image = _read(read_upright, path, path)
        if image.mode not in ("L", "P") or image.size != size:
            raise DataError(
                f"a label map must hold one number per pixel (mode L or P), with the size of its "
                f"image, {size}, but {path} has mode {image.mode} and size {image.size}."
            )
        labels = np.asarray(image.resize((self.config.image_size,) * 2, Image.Resampling.NEAREST))
        if labels.max() > self.config.num_labels:
            raise DataError(
                f"labels must be at most num_labels = {self.config.num_labels}, but {path} has "
                f"{labels.max()}."
            )
        return torch.from_numpy((labels - 1).astype(np.uint8))  # 0 wraps to 255


def open_images(config: VisionConfig, seed: int) -> tuple[list[Prepared], list[str]]:
    """The training and the validation images of a run, and the names of the classes, if any.

    Raises:
        ValueError: the data are not as described in `ImagesConfig`.
        OSError: there is no such dataset.
    """
    root = Path(config.data.path)
    splits: list[Rows]
    numbers: dict[Any, int] = {}
    classes: list[str] = []
    if config.task == "segmentation":
        splits = [label_maps(root, split) for split in HUB_SPLITS]
    else:
        from datasets import Image as ImageColumn
        from datasets import load_dataset

        refuse_linked_folders(root)
        builder = ("imagefolder", None, str(root)) if root.is_dir() else (str(root),)
        found = load_dataset(*builder)
        for name in HUB_SPLITS.values():
            if name not in found or not {"image", "label"} <= set(found[name].column_names):
                raise ValueError(
                    f"{root} must have splits train and validation (or val) with columns image and "
                    f"label, but has {found.column_names}."
                )
        rows = found.cast_column("image", ImageColumn(decode=False))
        labels, classes = labels_of(rows, str(root))
        numbers = {label: number for number, label in enumerate(labels)}
        splits = [rows[name] for name in HUB_SPLITS.values()]
    training, validation = splits
    return [
        Prepared(training, config.data, seed, numbers),
        Prepared(validation, config.data, None, numbers),
    ], classes


def label_maps(root: Path, split: str) -> Rows:
    """`images/{training,validation}/NAME.jpg` and `annotations/...NAME.png`, ADE20K's layout.

    Raises:
        ValueError: there is no image, or one has no label map.
    """
    folder = root / "images" / split
    images = image_files(folder)
    if not images:
        raise ValueError(f"{folder} must hold images, but has none.")
    annotations = root / "annotations" / split
    maps = [annotations / path.relative_to(folder).with_suffix(".png") for path in images]
    if missing := [path for path in maps if not path.is_file()]:
        raise ValueError(
            f"every image needs a label map, but {len(missing)} of {len(maps)} lack one: "
            f"there is no {missing[0]}."
        )
    return [
        {"image": {"path": str(path), "bytes": None}, "label": labels}
        for path, labels in zip(images, maps, strict=True)
    ]


def labels_of(rows: Any, name: str) -> tuple[list[Any], list[str]]:
    """The values of the label column in class order, and the class names.

    Integers and strings without class names are sorted.

    Raises:
        ValueError: the labels are not classes, or a split has a label that training images lack.
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
    """The box of a centre square with this share of the shorter side."""
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


def _read(reader: Callable[[Any], Image.Image], file: Any, name: Path | str) -> Image.Image:
    try:
        return reader(file)
    except UNREADABLE as error:
        raise DataError(f"{name} cannot be read as an image: {error}.") from error
