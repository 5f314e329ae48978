"""Captions to generate images from: a list with one per line, or a draw from COCO's annotations."""

import hashlib
import json
import re
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eval.quality.protocol import CAPTIONS_SHA256, GENERATION

# No text in UTF-8, but JSON can spell it.
SURROGATE = re.compile("[\ud800-\udfff]")


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
    content = path.read_bytes()
    try:
        text = content.decode()
    except UnicodeDecodeError:
        raise ValueError(f"{path} is not UTF-8 text.") from None
    if path.suffix == ".json":
        texts, origin = _draw(path, text, seed), f"draw of seed {seed} from {path.name}"
    else:
        # Not splitlines, which also ends a line where a caption holds a rarer separator.
        texts = [line.strip() for line in text.removesuffix("\n").split("\n")]
        is_linfusion = hashlib.sha256(content).hexdigest() == CAPTIONS_SHA256
        origin = GENERATION["captions"] if is_linfusion else f"list {path.name}"
    if len(texts) < num_captions:
        raise ValueError(f"{num_captions} captions are needed, but {path} has {len(texts)}.")
    texts = tuple(texts[:num_captions])
    for number, caption in enumerate(texts, 1):
        if not caption:
            raise ValueError(f"caption {number} of {path} is empty.")
        if SURROGATE.search(caption):
            raise ValueError(f"caption {number} of {path} holds half of a surrogate pair.")
    return Captions(texts, origin)


def _draw(path: Path, text: str, seed: int) -> list[str]:
    """One caption of every image. Hashes decide the order, so it needs no random generator."""
    captions = defaultdict(list)
    for annotation in sorted(_annotations(path, text), key=lambda entry: entry["id"]):
        # Those of COCO hold line feeds and blanks at the end.
        captions[annotation["image_id"]].append(" ".join(annotation["caption"].split()))
    keys = {image: hashlib.sha256(f"{seed}:{image}".encode()).digest() for image in captions}
    return [
        captions[image][int.from_bytes(keys[image]) % len(captions[image])]
        for image in sorted(keys, key=keys.get)
    ]


def _annotations(path: Path, text: str) -> list[dict[str, Any]]:
    try:
        document = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not JSON ({error}); unpack it again.") from None
    annotations = document.get("annotations") if isinstance(document, dict) else None
    if not isinstance(annotations, list) or not all(map(_is_caption, annotations)):
        raise ValueError(
            f"{path} does not hold captions as COCO's captions_val2014.json does: annotations, "
            f"each with id, image_id and caption."
        )
    return annotations


def _is_caption(entry: Any) -> bool:
    return (
        isinstance(entry, dict)
        and isinstance(entry.get("id"), int)
        and isinstance(entry.get("image_id"), int)
        and isinstance(entry.get("caption"), str)
    )
