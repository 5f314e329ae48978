"""Scenes as a dataset in COCO's captions format."""

import json
from pathlib import Path
from typing import Any

from PIL import Image
from tqdm import tqdm

from avq_diffusers.files import atomic_write, write_text
from avq_diffusers.images import image_files
from distill.scenes.layout import IMAGE_SIZE
from distill.scenes.rendering import render
from distill.scenes.sampling import sample_scene
from distill.scenes.scenes import Scene


def write_coco(
    folder: str | Path, num_images: int, *, first_seed: int = 0, size: int = IMAGE_SIZE
) -> None:
    """Write scenes as a dataset in COCO's captions format.

    `folder/images/000000000001.png` shows the scene of `first_seed`, and so on.
    `folder/annotations/captions_scenes.json` is written last and holds one caption per image.
    Repeated calls write the same files.

    Raises:
        ValueError: `size` is not a multiple of 64, or `folder` holds other data.
    """
    images = Path(folder) / "images"
    annotations = Path(folder) / "annotations" / "captions_scenes.json"
    scenes = [sample_scene(seed) for seed in range(first_seed, first_seed + num_images)]
    content = json.dumps(_coco_annotations(scenes, first_seed, size), indent=1) + "\n"
    if annotations.exists() and annotations.read_text() != content:
        raise ValueError(f"folder must be empty or hold these scenes, but {annotations} differs.")
    expected = {_file_name(i + 1) for i in range(num_images)}
    for path in image_files(images):
        if path.name not in expected:
            raise ValueError(f"folder must be empty or hold these scenes, but has {path}.")
    for i, scene in enumerate(tqdm(scenes, desc="scenes", unit="image")):
        image = Image.fromarray(render(scene, size))
        with atomic_write(images / _file_name(i + 1)) as temporary:
            image.save(temporary)
    write_text(annotations, content)


def _file_name(number: int) -> str:
    return f"{number:012d}.png"


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
