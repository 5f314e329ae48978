"""Captions to generate images from: a list with one per line, or a draw from COCO's annotations."""

import hashlib
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from avq_diffusers.captions import checked_caption, is_json, read_caption_list, read_json
from avq_diffusers.files import sha256
from eval.quality.protocol import CAPTIONS_SHA256, GENERATION

FORM = "as COCO's captions_val2014.json does: annotations, each with id, image_id and caption"


@dataclass(frozen=True)
class Captions:
    """Captions in the order of their images, and the list or draw that they come from."""

    texts: tuple[str, ...]
    origin: str

    @property
    def sha256(self) -> str:
        return hashlib.sha256("\n".join(self.texts).encode()).hexdigest()


def read_captions(path: Path, num_captions: int, *, seed: int = 0) -> Captions:
    """Read the first captions of a list, or draw some from annotations in COCO's format.

    A draw takes one caption from each of `num_captions` images. A longer draw with the same seed
    begins with the shorter one.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: the file has another form, or fewer captions.
    """
    if not path.is_file():
        raise FileNotFoundError(
            f"there is no file {path}; put there LinFusion's list, which is assets/captions.txt of "
            f"github.com/Huage001/LinFusion, or COCO's captions_val2014.json, which is in "
            f"images.cocodataset.org/annotations/annotations_trainval2014.zip."
        )
    if is_json(path):
        texts, origin = _draw(path, seed), f"draw of seed {seed} from {path.name}"
    else:
        texts = read_caption_list(path)
        is_linfusion = sha256(path) == CAPTIONS_SHA256
        origin = GENERATION["captions"] if is_linfusion else f"list {path.name}"
    if len(texts) < num_captions:
        raise ValueError(f"{num_captions} captions are needed, but {path} has {len(texts)}.")
    texts = tuple(texts[:num_captions])
    for number, caption in enumerate(texts, 1):
        if not caption:
            raise ValueError(f"caption {number} of {path} is empty.")
    return Captions(texts, origin)


def _draw(path: Path, seed: int) -> list[str]:
    """One caption of every image. Hashes decide the order, so it needs no random generator."""
    captions = defaultdict(list)
    for annotation in sorted(_annotations(path), key=lambda entry: entry["id"]):
        # Those of COCO hold line feeds and blanks at the end.
        captions[annotation["image_id"]].append(" ".join(annotation["caption"].split()))
    keys = {image: hashlib.sha256(f"{seed}:{image}".encode()).digest() for image in captions}
    return [
        captions[image][int.from_bytes(keys[image]) % len(captions[image])]
        for image in sorted(keys, key=keys.get)
    ]


def _annotations(path: Path) -> list[dict[str, Any]]:
    document = read_json(path)
    annotations = document.get("annotations") if isinstance(document, dict) else None
    if not isinstance(annotations, list):
        raise ValueError(f"{path} does not hold captions {FORM}.")
    for number, entry in enumerate(annotations, 1):
        name = f"annotation {number} of {path}"
        if not isinstance(entry, dict) or not entry.keys() >= {"id", "image_id", "caption"}:
            raise ValueError(f"{name} does not hold a caption {FORM}.")
        for key in ("id", "image_id"):
            if type(entry[key]) is not int:
                raise ValueError(f"{name}: {key} must be an integer, but is {entry[key]!r}.")
        checked_caption(entry["caption"], f"{name}: caption")
    return annotations
