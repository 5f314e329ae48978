"""Labelled images on disk or from the Hub, as tensors.

Every image of 8 or 16 bits a channel becomes RGB, whatever its mode. Label maps keep their labels:
they are resized to the nearest one.
"""

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL import Image, UnidentifiedImageError
from torch import Tensor
from torch.utils.data import Dataset, Sampler

from distill.exceptions import DataError
from distill.vision.config import DataConfig, VisionConfig

IGNORED = 255
ENDINGS = {".jpg", ".jpeg", ".png", ".webp", ".bmp"}
SPLITS = {
    "classification": {"training": "train", "validation": "val"},
    "segmentation": {"training": "training", "validation": "validation"},
}
HUB_SPLITS = {"training": "train", "validation": "validation"}
SCALES, RATIOS = (0.08, 1.0), (3 / 4, 4 / 3)  # of random pieces, as usual on ImageNet
TRIALS = 10


class Sample(NamedTuple):
    """An image, and its class or label map; what they are called in messages."""

    image: Image.Image
    label: int | Image.Image
    name: str


class ImageFolder:
    """`{train,val}/CLASS/*`, the layout of ImageNet; classes are sorted by name.

    Raises:
        ValueError: there is no such folder or image, or a class of one split lacks in another.
    """

    def __init__(self, root: Path, split: str) -> None:
        folders = {name: root / part for name, part in SPLITS["classification"].items()}
        classes = {name: _folders(folder) for name, folder in folders.items()}
        for name, other in (("training", "validation"), ("validation", "training")):
            if missing := sorted(set(classes[other]) - set(classes[name])):
                raise ValueError(
                    f"{folders[name]} must have the classes of {folders[other]}, but lacks "
                    f"{', '.join(missing[:5])}."
                )
        self.classes = classes["training"]
        self.samples: list[tuple[Path, int]] = []
        for index, name in enumerate(self.classes):
            found = _images(folders[split] / name)
            self.samples += [(path, index) for path in found]

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> Sample:
        path, label = self.samples[index]
        return Sample(_open(path), label, str(path))


class HubImages:
    """A data set of the Hub with columns image and label, as ImageNet has them there.

    Raises:
        ValueError: it lacks a split or a column.
    """

    def __init__(self, name: str, split: str) -> None:
        from datasets import load_dataset

        found = load_dataset(name)
        if HUB_SPLITS[split] not in found:
            raise ValueError(f"{name} must have a split {HUB_SPLITS[split]}, but has {[*found]}.")
        self.rows = found[HUB_SPLITS[split]]
        self.name = name
        if not {"image", "label"} <= set(self.rows.column_names):
            raise ValueError(
                f"{name} must have columns image and label, but has {self.rows.column_names}."
            )
        self.classes = self.rows.features["label"].names

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Sample:
        row = self.rows[index]
        name = f"{self.name} {index}"
        return Sample(_rgb(row["image"], name), row["label"], name)


class LabelMaps:
    """`images/{training,validation}/NAME.jpg` and `annotations/...NAME.png`, ADE20K's layout.

    Raises:
        ValueError: there is no such folder or image, or an image has no label map.
    """

    def __init__(self, root: Path, split: str) -> None:
        part = SPLITS["segmentation"][split]
        self.images = _images(root / "images" / part)
        annotations = root / "annotations" / part
        self.maps = [annotations / f"{path.stem}.png" for path in self.images]
        missing = [path for path in self.maps if not path.is_file()]
        if missing:
            raise ValueError(
                f"every image needs a label map, but {len(missing)} of {len(self.maps)} lack one: "
                f"there is no {missing[0]}."
            )

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> Sample:
        image, labels = _open(self.images[index]), _open(self.maps[index], convert=False)
        if labels.mode not in ("L", "P"):
            raise DataError(
                f"a label map must hold one number a pixel (mode L or P), but {self.maps[index]} "
                f"has mode {labels.mode}."
            )
        if labels.size != image.size:
            raise DataError(
                f"{self.maps[index]} must have the size of its image, {image.size}, but has "
                f"{labels.size}."
            )
        return Sample(image, labels, str(self.maps[index]))


class Prepared(Dataset):
    """Samples as the model takes them: `pixels`, uint8 (3, S, S), and `labels`.

    `labels` is a class, or (S, S) uint8 in which 255 is ignored. Random pieces and flips depend on
    seed, `epoch` and index only, so a resumed run sees the same ones.

    Args:
        samples: images and labels.
        config: of the data.
        training: whether images are augmented.
        seed: of random pieces and flips.
    """

    def __init__(
        self, samples: Sequence[Sample] | Any, config: DataConfig, *, training: bool, seed: int
    ) -> None:
        self.samples, self.config, self.seed = samples, config, seed
        self.augment = config.augment if training else "none"
        self.epoch = 0
        self.kept: list[tuple[Tensor, Any]] = []

    def preload(self, threads: int) -> None:
        """Read all images now."""
        with ThreadPoolExecutor(threads) as pool:
            self.kept = list(pool.map(self._read, range(len(self))))

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> dict[str, Any]:
        rng = np.random.default_rng((self.seed, self.epoch, index))
        pixels, labels = self.kept[index] if self.kept else self._read(index, rng)
        if self.augment != "none" and rng.random() < 0.5:
            pixels = pixels.flip(-1)
            labels = labels.flip(-1) if isinstance(labels, Tensor) else labels
        return {"pixels": pixels, "labels": labels}

    def _read(
        self, index: int, rng: np.random.Generator | None = None
    ) -> tuple[Tensor, int | Tensor]:
        image, label, name = self.samples[index]
        config, size = self.config, (self.config.image_size,) * 2
        if self.augment == "crop" and rng is not None:
            box = random_piece(image.size, rng)
        elif config.resize == "crop":
            side = min(image.size) * config.crop_share
            box = tuple((x + sign * side) / 2 for sign in (-1, 1) for x in image.size)
        else:
            box = (0, 0, *image.size)
        resampling = Image.Resampling[config.interpolation.upper()]
        array = np.array(image.resize(size, resampling, box))
        pixels = torch.from_numpy(array).permute(2, 0, 1).contiguous()
        if isinstance(label, Image.Image):
            return pixels, self._labels(label.resize(size, Image.Resampling.NEAREST), name)
        return pixels, label

    def _labels(self, image: Image.Image, name: str) -> Tensor:
        """Labels from 0; ADE20K's 0, "other", becomes 255, which is ignored."""
        labels = np.asarray(image)
        if labels.max() > self.config.num_labels:
            raise DataError(
                f"labels must be at most num_labels = {self.config.num_labels}, but {name} has "
                f"{labels.max()}."
            )
        return torch.from_numpy((labels - 1).astype(np.uint8))  # 0 wraps to 255


class Shuffled(Sampler[int]):
    """All indices of the images, in an order that depends on their seed and epoch only."""

    def __init__(self, images: Prepared) -> None:
        self.images = images

    def __len__(self) -> int:
        return len(self.images)

    def __iter__(self) -> Iterator[int]:
        rng = np.random.default_rng((self.images.seed, self.images.epoch))
        return iter(rng.permutation(len(self.images)).tolist())


class Collator:
    """Batches of `Prepared`: `pixel_values` (B, 3, S, S) float32, normalized; `labels` int64."""

    def __init__(self, config: DataConfig) -> None:
        mean, std = (255 * torch.tensor(x)[:, None, None] for x in (config.mean, config.std))
        self.mean, self.std = mean, std

    def __call__(self, samples: Sequence[Mapping[str, Any]]) -> dict[str, Tensor]:
        pixels = torch.stack([sample["pixels"] for sample in samples])
        labels = [sample["labels"] for sample in samples]
        is_map = isinstance(labels[0], Tensor)
        stacked = torch.stack(labels).long() if is_map else torch.tensor(labels)
        pixels = pixels.float().sub_(self.mean).div_(self.std)  # in place, in a third of the time
        return {"pixel_values": pixels, "labels": stacked}


def open_images(config: VisionConfig, split: str) -> tuple[Prepared, list[str] | None]:
    """The `"training"` or `"validation"` images of a run, and the names of the classes.

    Raises:
        ValueError: the data are not as `DataConfig` says, or empty.
        OSError: the Hub cannot be read.
    """
    root = Path(config.data.path)
    classes = None
    if config.task == "segmentation":
        samples: Any = LabelMaps(root, split)
    else:
        samples = ImageFolder(root, split) if root.is_dir() else HubImages(str(root), split)
        classes = samples.classes
    prepared = Prepared(samples, config.data, training=split == "training", seed=config.seed)
    if config.data.preload:
        prepared.preload(max(config.data.workers, 1))
    return prepared, classes


@contextmanager
def told_briefly() -> Iterator[None]:
    """Leave out the traceback that a data loader's worker adds to the message of an error.

    Raises:
        DataError: the block raised one.
    """
    try:
        yield
    except DataError as error:
        last = str(error).strip().splitlines()[-1]
        kind = f"{DataError.__module__}.{DataError.__name__}: "
        raise DataError(last.removeprefix(kind)) from error


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
    side = min(size)
    return (width - side) / 2, (height - side) / 2, (width + side) / 2, (height + side) / 2


def _folders(folder: Path) -> list[str]:
    if not folder.is_dir():
        raise ValueError(f"there is no folder {folder}.")
    found = sorted(path.name for path in folder.iterdir() if path.is_dir())
    if not found:
        raise ValueError(f"{folder} must hold a folder for each class, but has none.")
    return found


def _images(folder: Path) -> list[Path]:
    if not folder.is_dir():
        raise ValueError(f"there is no folder {folder}.")
    found = sorted(path for path in folder.iterdir() if path.suffix.lower() in ENDINGS)
    if not found:
        raise ValueError(f"{folder} must hold images, but has none.")
    return found


def _rgb(image: Image.Image, name: str) -> Image.Image:
    if image.mode.startswith("I;16"):  # Pillow would make all but the darkest pixels white
        image = Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))
    if image.mode in ("I", "F"):
        raise DataError(
            f"an image must have 8 or 16 bits a channel, but {name} has mode {image.mode}."
        )
    return image.convert("RGB")


def _open(path: Path, *, convert: bool = True) -> Image.Image:
    try:
        with Image.open(path) as image:
            return _rgb(image, str(path)) if convert else image.copy()
    except (OSError, UnidentifiedImageError) as error:
        raise DataError(f"{path} cannot be read as an image: {error}.") from error
