"""Scenes as a data set in COCO's captions format."""

import json
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from tqdm import tqdm

from avq_diffusers.config import check_int
from avq_diffusers.files import TEMPORARY, atomic_write
from avq_diffusers.mini.layout import IMAGE_SIZE
from avq_diffusers.mini.rendering import check_image_size, render
from avq_diffusers.mini.sampling import sample_scene
from avq_diffusers.mini.scenes import Scene


def write_coco(
    folder: str | Path, num_images: int, *, first_seed: int = 0, size: int = IMAGE_SIZE
) -> None:
    """Write scenes as a data set in COCO's captions format.

    `folder/images/000000000001.png` shows the scene of `first_seed`, and so on.
    `folder/annotations/captions_scenes.json` is written last and holds one caption per image.
    Images that an interrupted call finished stay.

    Args:
        folder: where to write; created if missing.
        num_images: number of scenes, at least 1.
        first_seed: seed of the first scene.
        size: side of the images, a multiple of 64.

    Raises:
        TypeError: a number is not an integer.
        ValueError: a number is out of range, or `folder` is a file or holds other data.
    """
    check_int("num_images", num_images, 1)
    check_int("first_seed", first_seed, 0)
    check_image_size(size)
    folder = Path(folder)
    images = folder / "images"
    annotations = folder / "annotations" / "captions_scenes.json"
    for parent in (images, annotations.parent):
        try:
            parent.mkdir(parents=True, exist_ok=True)
        except (FileExistsError, NotADirectoryError):
            raise ValueError(f"folder must be a directory, but {folder} is in its way.") from None

    scenes = [sample_scene(seed) for seed in range(first_seed, first_seed + num_images)]
    content = json.dumps(_coco_annotations(scenes, first_seed, size), indent=1) + "\n"
    if annotations.exists() and annotations.read_text() != content:
        raise ValueError(f"folder must be empty or hold these scenes, but {annotations} differs.")
    expected = {_file_name(i + 1) for i in range(num_images)}
    for path in images.glob("*.png"):
        if path.name.removeprefix(TEMPORARY) not in expected:
            raise ValueError(f"folder must be empty or hold these scenes, but has {path}.")

    for i, scene in enumerate(tqdm(scenes, desc="scenes", unit="image")):
        path = images / _file_name(i + 1)
        image = render(scene, size)
        stored = _read_image(path)
        if stored is None:
            with atomic_write(path) as temporary:
                Image.fromarray(image).save(temporary)
        elif not np.array_equal(stored, image):
            raise ValueError(f"folder must be empty or hold these scenes, but {path} differs.")
    with atomic_write(annotations) as temporary:
        temporary.write_text(content)


def _file_name(number: int) -> str:
    return f"{number:012d}.png"


def _read_image(path: Path) -> np.ndarray | None:
    """The stored image; None if it is missing or unreadable."""
    try:
        with Image.open(path) as image:
            return np.asarray(image)
    except (OSError, SyntaxError):
        return None


def _coco_annotations(scenes: list[Scene], first_seed: int, size: int) -> dict[str, Any]:
    """COCO's captions format; each image also names the seed of its scene."""
    images = [
        {
            "id": number,
            "file_name": _file_name(number),
            "height": size,
            "width": size,
            "seed": first_seed + number - 1,
        }
        for number in range(1, len(scenes) + 1)
    ]
    annotations = [
        {"id": number, "image_id": number, "caption": scene.caption}
        for number, scene in enumerate(scenes, 1)
    ]
    info = {"description": "Procedural captioned scenes of avq-diffusers"}
    return {"info": info, "licenses": [], "images": images, "annotations": annotations}
