"""Small data sets of every source, and streams of them."""

import json
import tarfile
from dataclasses import replace
from io import BytesIO
from itertools import islice

import datasets
import numpy as np
import torch
from PIL import Image
from tiny import tiny_encoders, tiny_tokenizer

from distill.data.config import DataConfig
from distill.data.encoder import Encoder
from distill.data.sources import open_samples
from distill.data.stream import EncodedSamples

SIZE = 64
NAMES = ("b", "a", "test_c", "d", "e")  # "test" in a name means a split to `datasets`
CAPTIONS = tuple(f"a picture of {name}, grüße" for name in NAMES)
SCENES = DataConfig(source="scenes", num_samples=20, workers=0)
SAMPLES_PER_SHARD = 8


def encoder():
    return Encoder(**tiny_encoders(), tokenizer=tiny_tokenizer())


def pictures():
    rng = np.random.default_rng(0)
    return [Image.fromarray(rng.integers(0, 256, (40, 90, 3), np.uint8)) for _ in NAMES]


def png(picture):
    file = BytesIO()
    picture.save(file, "png")
    return file.getvalue()


def folder(root):
    (root / "deeper [1]").mkdir(parents=True)
    paths = [root / ("deeper [1]" if name == "d" else "") / f"{name}.png" for name in NAMES]
    for path, picture, caption in zip(paths, pictures(), CAPTIONS, strict=True):
        path.write_bytes(png(picture))
        path.with_suffix(".txt").write_text(caption + "\n", encoding="utf-8")


def tar(path):
    """A webdataset tar whose captions lie in a mapping of JSON."""
    path.parent.mkdir()
    with tarfile.open(path, "w") as file:
        for name, picture, caption in zip(NAMES, pictures(), CAPTIONS, strict=True):
            fields = json.dumps({"caption": caption, "error_message": None, "width": 90}).encode()
            for ending, content in (("png", png(picture)), ("json", fields)):
                info = tarfile.TarInfo(f"{name}.{ending}")
                info.size = len(content)
                file.addfile(info, BytesIO(content))


def parquet(path):
    path.parent.mkdir(parents=True)
    rows = {"picture": [{"bytes": png(picture), "path": None} for picture in pictures()]}
    rows = datasets.Dataset.from_dict(rows | {"text": CAPTIONS, "unused": [1] * 5})
    rows.cast_column("picture", datasets.Image()).to_parquet(path)


def source(kind, root):
    """A configuration whose samples are NAMES in some order."""
    name, _, captions = kind.partition(" ")
    data = root / "data"
    changes = {"source": name, "path": str(data), "num_samples": None}
    if name == "folder":
        folder(data)
    elif captions == "tar":
        tar(data / "0.tar")
        changes |= {"split": "train", "image_column": "png", "caption_column": "json.caption"}
    else:
        parquet(data / "train.parquet")
        changes |= {"split": "train", "image_column": "picture"}
        changes |= {"caption_column": None if captions else "text"}
    if captions in ("json", "txt"):
        listed = root / f"captions.{captions}"
        text = json.dumps(CAPTIONS) if captions == "json" else "\n".join(CAPTIONS) + "\n"
        listed.write_text(text, encoding="utf-8")
        changes |= {"captions": str(listed)}
    return replace(SCENES, **changes)


def arguments(**changes):
    defaults = {"batch_size": 3, "seed": 1, "first_sample": 0, "process_index": 0}
    return {**defaults, "num_processes": 1, **changes}


def make_stream(config=SCENES, parts=None, size=SIZE, process_index=0, num_processes=1, **changes):
    ranks = {"process_index": process_index, "num_processes": num_processes}
    samples = EncodedSamples(open_samples(config, size), config, size, parts or encoder(), **ranks)
    return samples.batches(**arguments(**ranks, **changes))


def take(batches, count):
    found = list(islice(batches, count))
    return {name: torch.cat([batch[name] for batch in found]) for name in found[0]}


def assert_same(found, expected):
    assert found.keys() == expected.keys()
    for name in found:
        assert torch.equal(found[name], expected[name]), name
