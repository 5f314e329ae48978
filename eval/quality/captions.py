"""Captions to generate images from: a list, one per line, or a draw from COCO's annotations."""

import hashlib
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

from avq_diffusers.captions import checked_caption, is_json, read_caption_list, read_json
from avq_diffusers.files import sha256
from eval.quality.protocol import CAPTIONS_SHA256, GENERATION

FORM = "captions like COCO's captions_val2014.json: annotations, each with id, image_id, caption"


@dataclass(frozen=True)
class Captions:
    """Captions in image order, and the list or draw that they come from."""

    texts: tuple[str, ...]
    origin: str

    @property
    def sha256(self) -> str:
        return hashlib.sha256("\n".join(self.texts).encode()).hexdigest()


def read_captions(path: Path, num_captions: int, *, seed: int = 0) -> Captions:
    """Read the first captions of a list, or draw some from annotations in COCO's format.

    A draw takes one caption from each of `num_captions` images. With the same seed, a longer draw
    starts with the shorter one.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: the file is malformed, or has too few captions.
    """
    if not path.is_file():
        raise FileNotFoundError(
            f"there is no file {path}; python -m eval coco download gets LinFusion's list, and "
            f"COCO's captions_val2014.json also works."
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
    if "" in texts:
        raise ValueError(f"caption {texts.index('') + 1} of {path} is empty.")
    return Captions(texts, origin)


def _draw(path: Path, seed: int) -> list[str]:
    """One caption per image, ordered by hashes, which need no random generator."""
    document, captions = read_json(path), defaultdict(list)
    try:
        entries = [
            (int(x["id"]), int(x["image_id"]), x["caption"]) for x in document["annotations"]
        ]
    except (LookupError, OverflowError, TypeError, ValueError) as error:
        raise ValueError(f"{path} does not hold {FORM} ({error!r}).") from None
    for number, image, caption in sorted(entries, key=lambda entry: entry[0]):
        checked = checked_caption(caption, f"annotation {number} of {path}: caption")
        # COCO's contain line feeds and trailing blanks.
        captions[image].append(" ".join(checked.split()))
    keys = {image: hashlib.sha256(f"{seed}:{image}".encode()).digest() for image in captions}
    return [
        captions[image][int.from_bytes(keys[image], "big") % len(captions[image])]
        for image in sorted(keys, key=keys.get)
    ]
