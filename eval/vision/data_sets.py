"""Datasets for vision models: shapes from scenes over real photographs, with known labels.

Objects are placed over a crop of a photograph; for segmentation they come from three scenes and
partly hide each other. Each group keeps the colour and texture of its scene, or is cut out of
another photograph. Validation images use separate photographs and scenes.

segmentation    like ADE20K: `images/{training,validation}/NAME.jpg` and label maps
                `annotations/{training,validation}/NAME.png`. Label i is the i-th of `LABELS`;
                0, "other", is the antialiased edge of an object.
classification  like ImageNet: `{train,val}/CLASS/NAME.jpg`. The class is the shape of most objects.
"""

from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import cache, partial
from itertools import count, islice
from pathlib import Path

import numpy as np
from PIL import Image
from tqdm import tqdm

from avq_diffusers.files import atomic_write
from distill.scenes import (
    TEST_SEEDS,
    TRAINING_SEEDS,
    Scene,
    render,
    sample_scene,
)
from distill.scenes.layout import IMAGE_SIZE
from distill.scenes.shapes import SHAPES, SIZES, shape_mask
from eval.keys.photographs import PHOTOGRAPHS, read_photograph

TASKS = ("segmentation", "classification")
LABELS = (*SHAPES, "photograph")  # from 1
VALIDATION_PHOTOGRAPHS = PHOTOGRAPHS[::3]
TRAINING_PHOTOGRAPHS = tuple(name for name in PHOTOGRAPHS if name not in VALIDATION_PHOTOGRAPHS)
SPLITS = {
    "training": (TRAINING_SEEDS, TRAINING_PHOTOGRAPHS),
    "validation": (TEST_SEEDS, VALIDATION_PHOTOGRAPHS),
}
IMAGENET_SPLITS = {"training": "train", "validation": "val"}
SEEDS_PER_SET = 1_000_000
SCENES_PER_IMAGE = 3  # for segmentation
SMALLEST_PIECE = 0.4  # of a photograph's shorter side
QUALITY = 92


def write_data_set(
    task: str, folder: Path, *, training: int, validation: int, size: int, seed: int, workers: int
) -> None:
    """Write a dataset; equal arguments give equal files.

    Args:
        task: one of `TASKS`.
        folder: created; must not exist.
        training, validation: images per split.
        size: side of the images, a multiple of 64.
        seed: seed of the scenes, below 10.
        workers: number of processes.

    Raises:
        ValueError: an argument has an invalid value.
        FileExistsError: the folder exists.
        ImportError: scikit-image or scikit-learn is missing.
    """
    if task not in TASKS:
        raise ValueError(f"the task must be one of {', '.join(TASKS)}, but got {task!r}.")
    folder.mkdir(parents=True)
    for name in PHOTOGRAPHS:  # raises for a missing package here, not in a worker
        _pixels(name)
    is_segmented = task == "segmentation"
    with ProcessPoolExecutor(workers) as pool:
        for split, number in (("training", training), ("validation", validation)):
            seeds = count(SPLITS[split][0][seed * SEEDS_PER_SET])
            useful = seeds if is_segmented else filter(_has_majority, seeds)
            write = partial(_write_segmented if is_segmented else _write_classified, folder, split)
            done = pool.map(partial(write, size), islice(useful, number), chunksize=8)
            list(tqdm(done, split, number, unit="image"))  # waits, and raises workers' errors


def compose_over_photograph(
    scenes: Sequence[Scene], size: int, seed: int, photographs: tuple[str, ...]
) -> tuple[np.ndarray, np.ndarray]:
    """Objects from scenes over a photograph, later scenes in front.

    Returns:
        uint8 RGB (size, size, 3), and uint8 labels (size, size) as in the module's description.
    """
    rng = np.random.default_rng(seed)
    names = rng.permutation(photographs)
    image = _piece(str(names[0]), size, rng).astype(np.uint16)
    labels = np.full((size, size), len(LABELS), np.uint8)
    for scene in scenes:
        painted = render(scene, size)
        for group, boxes in zip(scene.groups, scene.boxes, strict=True):
            mask = shape_mask(group.shape, SIZES[group.size] * size // IMAGE_SIZE)
            filling = painted
            if rng.random() < 0.5:
                filling = _piece(str(rng.choice(names[1:])), size, rng)
            for box in boxes:
                left, top, side = (length * size // IMAGE_SIZE for length in box)
                place = slice(top, top + side), slice(left, left + side)
                image[place] = (image[place] * (256 - mask) + filling[place] * mask) >> 8
                inside = mask[..., 0]
                labels[place][inside > 0] = 0
                labels[place][inside == 256] = 1 + SHAPES.index(group.shape)
    return image.astype(np.uint8), labels


def majority_shape(scene: Scene) -> str | None:
    """The shape of most objects; None if two groups are equally large."""
    first, *others = sorted(scene.groups, key=lambda group: -group.count)
    return None if others and others[0].count == first.count else first.shape


def _has_majority(seed: int) -> bool:
    return majority_shape(sample_scene(seed)) is not None


def _write_segmented(folder: Path, split: str, size: int, seed: int) -> None:
    step = SEEDS_PER_SET // SCENES_PER_IMAGE
    scenes = [sample_scene(seed + i * step) for i in range(SCENES_PER_IMAGE)]
    image, labels = compose_over_photograph(scenes, size, seed, SPLITS[split][1])
    _save(folder / "images" / split / f"scene_{seed:08d}.jpg", image)
    _save(folder / "annotations" / split / f"scene_{seed:08d}.png", labels)


def _write_classified(folder: Path, split: str, size: int, seed: int) -> None:
    scene = sample_scene(seed)
    image, _ = compose_over_photograph([scene], size, seed, SPLITS[split][1])
    place = folder / IMAGENET_SPLITS[split] / str(majority_shape(scene))
    _save(place / f"scene_{seed:08d}.jpg", image)


def _save(path: Path, pixels: np.ndarray) -> None:
    with atomic_write(path) as temporary:
        Image.fromarray(pixels).save(temporary, quality=QUALITY, subsampling=0)


def _piece(name: str, size: int, rng: np.random.Generator) -> np.ndarray:
    """A random square of a photograph, uint8 RGB (size, size, 3)."""
    photograph = _pixels(name)
    side = round(min(photograph.size) * rng.uniform(SMALLEST_PIECE, 1))
    left, top = (int(rng.integers(0, length - side + 1)) for length in photograph.size)
    box = (left, top, left + side, top + side)
    piece = np.asarray(photograph.resize((size, size), Image.Resampling.BILINEAR, box))
    return piece[:, ::-1] if rng.random() < 0.5 else piece


@cache
def _pixels(name: str) -> Image.Image:
    return read_photograph(name)
