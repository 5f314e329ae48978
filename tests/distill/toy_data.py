"""Small data sets of every source, and streams of them."""

import json
import tarfile
from dataclasses import replace
from io import BytesIO
from itertools import chain, islice

import datasets
import numpy as np
import torch
from PIL import Image
from tiny import tiny_components

from distill.data.config import DataConfig
from distill.data.encoder import Encoder
from distill.data.sources import open_samples
from distill.data.stream import EncodedSamples

SIZE = 64
NAMES = ("b", "a", "test_c", "d", "e")  # "test" in a name means a split to `datasets`
CAPTIONS = tuple(f"a picture of {name}, grüße" for name in NAMES)
SCENES = DataConfig(
    source="scenes",
    path=None,
    split=None,
    image_column=None,
    caption_column=None,
    captions=None,
    num_samples=20,
    preprocessing="crop",
    cache=None,
    workers=0,
)
SAMPLES_PER_SHARD = 8


def encoder():
    parts = tiny_components()
    return Encoder(parts["vae"], parts["text_encoder"], parts["tokenizer"])


def pictures():
    rng = np.random.default_rng(0)
    return [Image.fromarray(rng.integers(0, 256, (40, 90, 3), np.uint8)) for _ in NAMES]


def png(picture):
    file = BytesIO()
    picture.save(file, "png")
    return file.getvalue()


def folder(root, *, sidecars=True):
    (root / "deeper [1]").mkdir(parents=True)
    paths = [root / ("deeper [1]" if name == "d" else "") / f"{name}.png" for name in NAMES]
    for path, picture, caption in zip(paths, pictures(), CAPTIONS, strict=True):
        path.write_bytes(png(picture))
        if sidecars:
            path.with_suffix(".txt").write_text(caption + "\n", encoding="utf-8")
    return paths


def write_tar(path, files):
    with tarfile.open(path, "w") as tar:
        for name, content in files:
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, BytesIO(content))


def tars(root, caption_files):
    """Two tars, the first with two samples."""
    root.mkdir()
    samples = [
        ((f"{name}.png", png(picture)), (f"{name}.{ending}", content))
        for name, picture, (ending, content) in zip(NAMES, pictures(), caption_files, strict=True)
    ]
    write_tar(root / "0.tar", chain(*samples[:2]))
    write_tar(root / "1.tar", chain(*samples[2:]))


def parquet(path, captions=CAPTIONS):
    path.parent.mkdir(exist_ok=True)
    rows = {"picture": [{"bytes": png(picture), "path": None} for picture in pictures()]}
    rows = datasets.Dataset.from_dict(rows | {"text": captions, "unused": list(NAMES)})
    rows.cast_column("picture", datasets.Image()).to_parquet(path)


def source(kind, root):
    """A configuration whose samples are NAMES in some order."""
    name, _, captions = kind.partition(" ")
    data = root / "data"
    changes = {"source": name, "path": str(data), "num_samples": None}
    if name == "folder":
        paths = folder(data, sidecars=not captions)
        if captions:
            write_metadata(data, paths, captions)
            changes |= {"caption_column": "text"}
    elif name == "huggingface":
        parquet(data / "train.parquet")
        changes |= {"split": "train", "image_column": "picture"}
        if captions:
            listed = root / f"captions.{captions}"
            text = json.dumps(CAPTIONS) if captions == "json" else "\n".join(CAPTIONS) + "\n"
            listed.write_text(text, encoding="utf-8")
            changes |= {"captions": str(listed)}
        else:
            changes |= {"caption_column": "text"}
    elif captions == "txt":
        tars(data, [("txt", caption.encode()) for caption in CAPTIONS])
        changes |= {"image_column": "png", "caption_column": "txt"}
    else:
        tars(data, [("json", json.dumps({"a": {"b": text}}).encode()) for text in CAPTIONS])
        changes |= {"path": f"{data}/*.tar", "image_column": "png", "caption_column": "json.a.b"}
    return replace(SCENES, **changes)


def write_metadata(root, paths, ending):
    rows = [(str(path.relative_to(root)), text) for path, text in zip(paths, CAPTIONS, strict=True)]
    if ending == "jsonl":
        lines = [json.dumps({"file_name": name, "text": text}) for name, text in rows]
    elif ending == "csv":
        lines = ["file_name,text", *(f'{name},"{text}"' for name, text in rows)]
    else:
        table = dict(zip(("file_name", "text"), zip(*rows, strict=True), strict=True))
        datasets.Dataset.from_dict(table).to_parquet(root / "metadata.parquet")
        return
    (root / f"metadata.{ending}").write_text("\n".join(lines), encoding="utf-8")


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
