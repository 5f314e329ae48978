"""Sources, preprocessing, order, encoder and cache of the distillation data."""

import codecs
import gzip
import json
import multiprocessing
import os
import subprocess
import sys
import tarfile
from dataclasses import replace
from io import BytesIO
from itertools import chain, islice

import datasets
import numpy as np
import pytest
import torch
from diffusers.models.autoencoders.vae import DiagonalGaussianDistribution
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image, ImageFile
from safetensors.torch import load_file, save_file
from tiny import tiny_components, tiny_pipe
from torch.utils.data import Dataset

from avq_diffusers.mini import TRAINING_SEEDS, Scene, render, sample_scene
from distill.data import cache
from distill.data.config import DataConfig
from distill.data.encoder import Encoder
from distill.data.images import crop, image_extensions, linfusion, read_rgb
from distill.data.samples import BrokenSample
from distill.data.sources import open_samples
from distill.data.stream import EncodedSamples, load_batches, sample_order
from distill.exceptions import DataError

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


@pytest.fixture(autouse=True)
def no_traces(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / ".datasets"))
    monkeypatch.setattr(cache, "SHARD", SAMPLES_PER_SHARD)
    datasets.disable_progress_bars()


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


# Sources


@pytest.mark.parametrize(
    "kind",
    [
        "folder",
        "folder jsonl",
        "folder csv",
        "folder parquet",
        "huggingface",
        "huggingface json",
        "huggingface txt",
        "webdataset txt",
        "webdataset json",
    ],
)
def test_sources_give_images_with_their_captions(kind, tmp_path):
    """Catches rows out of step with captions, lost rows and images of another preprocessing."""
    config = source(kind, tmp_path)
    by_path = [1, 0, 3, 4, 2]  # a, b, deeper [1]/d, e, test_c
    order = by_path if kind == "folder" else range(5)
    for preprocessing, function in (("crop", crop), ("linfusion", linfusion)):
        samples = open_samples(replace(config, preprocessing=preprocessing), SIZE)
        assert [sample["caption"] for sample in samples] == [CAPTIONS[i] for i in order]
        for sample, i in zip(samples, order, strict=True):
            assert torch.equal(sample["image"], function(pictures()[i], SIZE))
    first = open_samples(replace(config, num_samples=2), SIZE)
    assert [sample["caption"] for sample in first] == [CAPTIONS[i] for i in order[:2]]


def test_files_of_the_system_are_no_images(tmp_path):
    """Catches macOS's `._name.png` beside every image of a copied folder."""
    config = source("folder", tmp_path)
    first = next((tmp_path / "data").rglob("*.png"))
    first.with_name(f"._{first.name}").write_bytes(b"of the system")
    assert len(open_samples(config, 16)) == len(NAMES)


@pytest.mark.parametrize("splits", [False, True])
def test_a_data_set_that_was_saved_to_disk_is_loaded(splits, tmp_path):
    config = source("huggingface", tmp_path)
    expected = list(open_samples(config, SIZE))
    rows = datasets.load_dataset(config.path, split="train")
    other = rows.select([0])
    saved = datasets.DatasetDict({"other": other, "train": rows}) if splits else rows
    saved.save_to_disk(tmp_path / "saved")
    config = replace(config, path=str(tmp_path / "saved"))
    for found, wanted in zip(open_samples(config, SIZE), expected, strict=True):
        assert found["caption"] == wanted["caption"]
        assert torch.equal(found["image"], wanted["image"])
    names = "other, train" if splits else "train"
    with pytest.raises(ValueError, match=f"huggingface: it has no split test, only {names}"):
        open_samples(replace(config, split="test"), SIZE)


def test_a_saved_data_set_without_split_or_description(tmp_path):
    datasets.Dataset.from_dict({"picture": [None], "text": ["a"]}).cast_column(
        "picture", datasets.Image()
    ).save_to_disk(tmp_path / "saved")
    config = replace(source("huggingface", tmp_path), path=str(tmp_path / "saved"))
    assert len(open_samples(config, SIZE)) == 1
    for damaged in ("{}", "[]", "{"):
        (tmp_path / "saved" / "state.json").write_text(damaged)
        with pytest.raises(ValueError, match=r"saved cannot be loaded as source huggingface: "):
            open_samples(config, SIZE)


def test_scenes_are_the_training_scenes():
    samples = open_samples(SCENES, SIZE)
    assert len(samples) == 20
    scene = sample_scene(TRAINING_SEEDS[7])
    assert samples[7]["caption"] == scene.caption
    assert np.array_equal(samples[7]["image"].permute(1, 2, 0), render(scene, SIZE))


def test_scenes_that_look_or_are_called_otherwise_have_another_fingerprint(monkeypatch):
    """Catches a cache or a run that goes on with the captions of an older grammar."""
    before = open_samples(SCENES, SIZE).fingerprint()
    assert open_samples(SCENES, SIZE).fingerprint() == before
    with monkeypatch.context() as patch:
        patch.setattr(Scene, "caption", "a fox")
        assert open_samples(SCENES, SIZE).fingerprint() != before
    monkeypatch.setattr(
        "distill.data.samples.render", lambda scene, size: render(scene, size)[::-1].copy()
    )
    assert open_samples(SCENES, SIZE).fingerprint() != before


def test_only_data_sets_need_the_package_datasets(tmp_path, monkeypatch):
    for kind in ("folder", "folder csv", "folder parquet", "webdataset txt", "huggingface"):
        (tmp_path / kind).mkdir()
    config = source("huggingface", tmp_path / "huggingface")
    table = source("folder parquet", tmp_path / "folder parquet")
    monkeypatch.setitem(sys.modules, "datasets", None)
    assert take(make_stream(), 1)["moments"].shape == (3, 8, 8, 8)
    for kind in ("folder", "folder csv", "webdataset txt"):
        assert len(open_samples(source(kind, tmp_path / kind), SIZE)) == 5
    with pytest.raises(ImportError, match=r'pip install "avq-diffusers\[train\]"'):
        open_samples(config, SIZE)
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(ImportError, match=r"metadata\.parquet needs the package pyarrow: install"):
        open_samples(table, SIZE)


@pytest.mark.parametrize(
    ("kind", "changes", "message"),
    [
        ("folder", {"source": "tar"}, "source must be one of scenes, folder"),
        ("folder", {"preprocessing": "pad"}, "preprocessing must be one of crop, linfusion"),
        ("folder", {"path": None}, "source folder needs path"),
        ("folder", {"split": "train"}, "source folder takes no split, but got 'train'"),
        ("folder", {"caption_column": "a", "captions": "b"}, "captions must be None when"),
        ("huggingface", {"caption_column": None}, "needs caption_column or captions"),
        ("huggingface", {"image_column": "text"}, "two columns, but image_column is text and"),
        ("webdataset json", {"image_column": "json"}, "image_column is json and .* json.a.b"),
        ("folder", {"caption_column": "image"}, "image_column is image and caption_column image"),
        ("huggingface json", {"image_column": "caption"}, "is caption and caption_column caption"),
        ("huggingface", {"num_samples": 0}, "num_samples must be at least 1"),
        ("huggingface", {"workers": -1}, "workers must be at least 0"),
        ("huggingface", {"num_samples": 6}, "num_samples is 6, but .* has 5 samples"),
        ("huggingface", {"image_column": "image"}, "has no column image, only picture, text"),
        ("huggingface", {"caption_column": "caption"}, "has no column caption"),
        ("huggingface", {"split": "test"}, "cannot be loaded as source huggingface: Unknown split"),
        ("huggingface json", {"captions": "{short}"}, "caption for each of the 5 rows .* has 2"),
        ("huggingface json", {"captions": "{mapping}"}, "must hold a JSON list of strings"),
        ("huggingface json", {"captions": "{damaged}"}, "damaged.json is not JSON"),
        ("huggingface json", {"captions": "{null}"}, "caption 2 of .*null.JSON must be text"),
        ("huggingface json", {"captions": "{latin}"}, "latin.txt is not UTF-8"),
        ("folder", {"path": "{root}/none"}, "there are no images in the folder .*none"),
        ("folder", {"caption_column": "text"}, "data has none of metadata.jsonl, metadata.csv"),
        ("huggingface", {"path": "{root}/none"}, "none cannot be loaded as source huggingface"),
        ("webdataset txt", {"path": "{root}/empty"}, "there are no tars at .*empty"),
        ("webdataset txt", {"path": "{root}/cut.tar"}, "cut.tar is damaged, or no uncompressed"),
    ],
)
def test_refusals(kind, changes, message, tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "cut.tar").write_bytes(b"no tar")
    files = {
        "short": ("short.json", json.dumps(["a", "b"]).encode()),
        "mapping": ("mapping.json", json.dumps({"a": "b"}).encode()),
        "damaged": ("damaged.json", b'["a",'),
        "null": ("null.JSON", b'["a", null]'),
        "latin": ("latin.txt", "grüße".encode("latin-1")),
    }
    for name, content in files.values():
        (tmp_path / name).write_bytes(content)
    names = {key: str(tmp_path / name) for key, (name, _) in files.items()}
    changes = {
        key: value.format(root=tmp_path, **names) if isinstance(value, str) else value
        for key, value in changes.items()
    }
    config = source(kind, tmp_path)
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        open_samples(replace(config, **changes), SIZE)


@pytest.mark.parametrize(
    ("ending", "content", "message"),
    [
        ("jsonl", "[3]", r"entry 1 of .*metadata\.jsonl must be an object, but is \[3\]"),
        ("jsonl", '{"file_name": "a"}', r"entry 1 of .* has no column text, only file_name\."),
        ("jsonl", '{"file_name": 3, "text": "a"}', "entry 1 of .*: file_name must be text, but is"),
        ("csv", f"file_name,text\n{'a' * 200_000},b", r"metadata\.csv is not CSV \("),
        ("parquet", "no table", r"metadata\.parquet is not Parquet \("),
    ],
)
def test_bad_metadata_is_refused(ending, content, message, tmp_path):
    config = source(f"folder {ending}", tmp_path)
    (tmp_path / "data" / f"metadata.{ending}").write_text(content)
    with pytest.raises(ValueError, match=message):
        open_samples(config, SIZE)


def test_a_bad_tar_is_refused(tmp_path):
    config = source("webdataset txt", tmp_path)
    path = tmp_path / "data" / "1.tar"
    for size in (3000, 0):
        path.write_bytes(path.read_bytes()[:size])
        with pytest.raises(ValueError, match=r"1\.tar is damaged, or no uncompressed tar: "):
            open_samples(config, SIZE)


def member(name, **values):
    """A JSON member as img2dataset writes it: fields that nobody needs are null, or text."""
    fields = {"caption": f"a picture of {name}", "url": "http://x", "width": 90, **values}
    return f"{name}.json", json.dumps(fields).encode()


def samples_of(root, caption_column="json.caption", path="*.tar"):
    config = replace(
        SCENES,
        source="webdataset",
        path=str(root / path),
        image_column="png",
        caption_column=caption_column,
        num_samples=None,
    )
    return open_samples(config, SIZE)


def test_tars_of_img2dataset_are_read_whatever_other_fields_hold(tmp_path):
    """Catches types that are guessed from the first samples, and a read of unneeded members."""
    picture = png(pictures()[0])
    values = [{"error": None}] * 6 + [{"error": "timeout", "width": "90"}, {"exif": {"a": 1}}]
    files = []
    for number, fields in enumerate(values):
        name = f"00000000{number}"
        files += [(f"{name}.png", picture), member(name, **fields)]
        if number % 2:
            files += [(f"{name}.txt", b"\xff"), (f"{name}.cls", b"no number"), (f"{name}.npy", b"")]
    write_tar(tmp_path / "00000.tar", [("readme", b""), *files, ("__MACOSX/._0.png", b"")])
    # The second shard has all images first.
    last = [("dir/x.png", picture), ("dir/y.png", picture), member("dir/x"), member("dir/y")]
    write_tar(tmp_path / "00001.tar", last)
    captions = [f"a picture of 00000000{number}" for number in range(8)]
    captions += ["a picture of dir/x", "a picture of dir/y"]
    assert [sample["caption"] for sample in samples_of(tmp_path)] == captions


PICTURE = ("c.png", None)


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ([PICTURE, ("c.json", b"{}")], r"\(.*0\.tar/c\.png\) has no caption"),
        ([PICTURE, member("c", caption=3)], r"c\.png\) is int, not text"),
        ([PICTURE, ("c.json", b"{")], r" cannot be read: .*0\.tar/c\.json is not JSON"),
        ([PICTURE, ("c.json", b'"\xff"')], r" cannot be read: .*0\.tar/c\.json is not UTF-8"),
        ([PICTURE], r"\(.*0\.tar/c\.png\) has no caption"),
        ([member("c")], r"\(.*0\.tar/c\.png\) has no image"),
        ([("c.png", b""), member("c")], r"\(.*0\.tar/c\.png\) has no image"),
    ],
)
def test_a_broken_sample_of_a_tar_is_named(tmp_path, files, message):
    picture = png(pictures()[0])
    files = [(name, picture if content is None else content) for name, content in files]
    write_tar(tmp_path / "0.tar", [("a.png", picture), member("a"), *files])
    samples = samples_of(tmp_path)
    assert samples[0]["caption"] == "a picture of a"
    with pytest.raises(BrokenSample, match=f"sample 1 of .*{message}"):
        samples[1]


def test_tars_that_cannot_be_read_in_place_are_refused(tmp_path):
    write_tar(tmp_path / "0.tar", [("a.png", b"a"), member("a"), ("a.png", b"b")])
    with pytest.raises(ValueError, match=r"0\.tar has the member a\.png twice"):
        samples_of(tmp_path)
    write_tar(tmp_path / "0.tar", [("a.png", b"a"), member("a")])
    (tmp_path / "1.tar.gz").write_bytes(gzip.compress((tmp_path / "0.tar").read_bytes()))
    with pytest.raises(ValueError, match=r"1\.tar\.gz is damaged, or no uncompressed tar: "):
        samples_of(tmp_path, path="*.gz")
    with pytest.raises(ValueError, match="has no column txt, only png, json"):
        samples_of(tmp_path, caption_column="txt")


@pytest.mark.parametrize("kind", ["list", "sidecar", "jsonl", "csv", "tar txt", "tar json"])
def test_a_mark_of_the_byte_order_is_no_part_of_a_caption(kind, tmp_path):
    kinds = {"list": "huggingface txt", "sidecar": "folder", "jsonl": "folder jsonl"}
    kinds |= {"csv": "folder csv", "tar txt": "webdataset txt", "tar json": "webdataset json"}
    config = source(kinds[kind], tmp_path)
    data = tmp_path / "data"
    paths = {"list": [tmp_path / "captions.txt"], "sidecar": data.rglob("*.txt")}
    for path in paths.get(kind, data.glob("metadata.*")):
        path.write_bytes(codecs.BOM_UTF8 + path.read_bytes())
    for path in data.glob("*.tar"):
        with tarfile.open(path) as tar:
            files = [(member.name, tar.extractfile(member).read()) for member in tar]
        marked = [(x, c if x.endswith("png") else codecs.BOM_UTF8 + c) for x, c in files]
        write_tar(path, marked)
    samples = open_samples(config, SIZE)
    assert sorted(sample["caption"] for sample in samples) == sorted(CAPTIONS)


@pytest.mark.parametrize("ending", ["jsonl", "csv"])
def test_columns_of_metadata_that_nobody_needs_may_hold_anything(ending, tmp_path):
    config = source(f"folder {ending}", tmp_path)
    path = tmp_path / "data" / f"metadata.{ending}"
    header, *lines = path.read_text(encoding="utf-8").splitlines()
    values = (None, 1, 2.5, "text", True)
    if ending == "csv":
        lines = [f"{line},{value}" for line, value in zip(lines, values, strict=True)]
        lines.insert(0, f"{header},unused")
    else:
        rows = [json.loads(line) for line in (header, *lines)]
        lines = [json.dumps({**r, "unused": x}) for r, x in zip(rows, values, strict=True)]
    path.write_text("\n".join(lines), encoding="utf-8")
    assert [sample["caption"] for sample in open_samples(config, SIZE)] == list(CAPTIONS)


def test_endings_are_of_images_that_pillow_decodes():
    """Catches files of data, video and drawings, whose every sample would be a broken one."""
    endings = image_extensions()
    assert endings >= {".png", ".jpg", ".jpeg", ".webp", ".avif", ".bmp", ".gif", ".tiff"}
    assert not endings & {".h5", ".hdf", ".grib", ".bufr", ".mpg", ".mpeg", ".ps", ".eps", ".wmf"}
    openers = [Image.OPEN[Image.registered_extensions()[ending]][0] for ending in endings]
    classes = [opener for opener in openers if isinstance(opener, type)]
    assert not any(issubclass(opener, ImageFile.StubImageFile) for opener in classes)


@pytest.mark.parametrize(
    ("values", "kind"), [([1, 2], "int64"), ([["a"], ["b"]], "List"), ([0.5, 1.0], "float64")]
)
def test_an_image_column_without_images_is_refused(tmp_path, values, kind):
    """Catches the errors of pyarrow and datasets, each of another type."""
    (tmp_path / "data").mkdir()
    rows = datasets.Dataset.from_dict({"picture": values, "text": ["a", "b"]})
    rows.to_parquet(tmp_path / "data" / "train.parquet")
    config = replace(
        SCENES,
        source="huggingface",
        path=str(tmp_path / "data"),
        split="train",
        image_column="picture",
        caption_column="text",
        num_samples=None,
    )
    message = rf"column picture of .*data holds .*{kind}.*, not images; name another image_column"
    with pytest.raises(ValueError, match=message):
        open_samples(config, SIZE)


def test_an_image_without_caption_is_named(tmp_path):
    config = source("folder", tmp_path)
    (tmp_path / "data" / "e.txt").unlink()
    with pytest.raises(FileNotFoundError, match=r"1 of 5 images have no caption .*e\.txt"):
        open_samples(config, SIZE)


@pytest.mark.parametrize(
    ("changes", "size", "message"),
    [
        ({"num_samples": 10_000_001}, SIZE, "num_samples must be at most 10000000"),
        ({}, 72, "multiple of 64"),
        ({"num_samples": 5}, SIZE, "takes 3 x 2 samples, but the data has 5"),
    ],
)
def test_refusals_of_scenes(changes, size, message):
    """Catches an error that only appears in a worker, or at the first batch."""
    with pytest.raises(ValueError, match=message):
        make_stream(replace(SCENES, **changes), size=size, num_processes=2)


# Preprocessing


def test_crop_takes_the_middle_square():
    columns = np.zeros((2, 4, 3), np.uint8)
    columns[:, 1], columns[:, 2] = (0, 255, 0), (0, 0, 255)
    expected = [[[0, 0]] * 2, [[255, 0]] * 2, [[0, 255]] * 2]
    assert crop(Image.fromarray(columns), 2).tolist() == expected
    assert crop(Image.fromarray(columns.swapaxes(0, 1)), 2)[1].tolist() == [[255, 255], [0, 0]]


def test_crop_is_antialiased_and_linfusion_is_not():
    """At a third of the side LinFusion's samples are single pixels; a mean is not."""
    noise = np.random.default_rng(0).integers(0, 256, (96, 96, 3), np.uint8)
    picture = Image.fromarray(noise)
    assert np.array_equal(linfusion(picture, 32).permute(1, 2, 0), noise[1::3, 1::3])
    assert crop(picture, 32).float().std() < 0.6 * linfusion(picture, 32).float().std()


def test_linfusion_is_opencv():
    """`cv2.resize(grey, (4, 4), interpolation=cv2.INTER_CUBIC)` gave these figures."""
    grey = (np.arange(35) ** 2 * 31 % 256).astype(np.uint8).reshape(5, 7)
    expected = torch.tensor(
        [[28, 127, 226, 53], [219, 137, 110, 133], [122, 0, 154, 122], [218, 217, 12, 243]]
    )
    found = linfusion(Image.fromarray(grey).convert("RGB"), 4)
    assert (found.int() - expected).abs().max() <= 1  # OpenCV has 11 bits for a weight
    # By hand: at half the side the weights are a/8 = -3/32 and (5 + ...)/8 = 19/32, edges repeat.
    line = Image.fromarray(np.array([[0, 200, 0, 0]] * 4, np.uint8)).convert("RGB")
    assert linfusion(line, 2)[0].tolist() == [[round(200 * 19 / 32), 0]] * 2


@pytest.mark.parametrize(
    ("picture", "expected"),
    [
        (Image.new("RGBA", (2, 2), (200, 0, 0, 128)), (227, 127, 127)),
        (Image.new("LA", (2, 2), (0, 0)), (255, 255, 255)),
        (Image.new("L", (2, 2), 9), (9, 9, 9)),
        (Image.new("1", (2, 2), 1), (255, 255, 255)),
        (Image.new("RGB", (2, 2), (1, 2, 3)).convert("P"), None),
        (Image.fromarray(np.full((2, 2), 0x4080, np.uint16)), (64, 64, 64)),
    ],
)
def test_pictures_become_rgb(picture, expected):
    """Catches transparent pixels in their hidden colour, and 16 bits clipped to white."""
    found = read_rgb(BytesIO(png(picture)))
    assert found.mode == "RGB"
    assert found.getpixel((1, 1)) == (expected or picture.convert("RGB").getpixel((1, 1)))


def test_numbers_of_more_than_16_bits():
    """Catches images that are clipped to white or black without a word."""
    file = BytesIO(b"P5 2 2 65535\n" + np.full(4, 0x4080, ">u2").tobytes())
    assert read_rgb(file).getpixel((1, 1)) == (64, 64, 64)
    for mode in ("I", "F"):
        file = BytesIO()
        Image.new(mode, (2, 2), 1).save(file, "tiff")
        with pytest.raises(ValueError, match=f"TIFF of mode {mode} does not say what is white"):
            read_rgb(file)


def test_images_are_upright_and_palettes_transparent():
    palette = Image.new("P", (2, 2), 0)
    palette.putpalette([10, 20, 30])
    file = BytesIO()
    palette.save(file, "png", transparency=0)
    assert read_rgb(file).getpixel((0, 0)) == (255, 255, 255)

    wide = Image.fromarray(np.repeat([[[255] * 3, [0] * 3]], 16, 1).repeat(16, 0).astype(np.uint8))
    exif = Image.Exif()
    exif[0x0112] = 6  # turn by 90 degrees clockwise: left becomes top
    file = BytesIO()
    wide.save(file, "jpeg", exif=exif, quality=95)
    upright = read_rgb(file)
    assert upright.size == (16, 32)
    assert upright.getpixel((8, 4))[0] > 200 > 50 > upright.getpixel((8, 28))[0]


# Broken samples


def test_a_broken_image_is_named_replaced_and_counted(tmp_path):
    config = source("folder jsonl", tmp_path)
    whole = make_stream(config, batch_size=5, seed=3)
    encoded = take(whole, 1)
    order = next(sample_order(5, **arguments(batch_size=5, seed=3)))
    (tmp_path / "data" / "a.png").write_bytes(png(pictures()[1])[:400])
    (tmp_path / "data" / "e.png").write_text("no picture")

    samples = open_samples(config, SIZE)
    with pytest.raises(BrokenSample, match=r"sample 1 of .*a\.png\) cannot be read: "):
        samples[1]
    with pytest.warns(UserWarning, match="takes its place") as caught:
        repaired = take(make_stream(config, batch_size=5, seed=3), 2)
    assert len(caught) == 2  # once each, though two epochs met them
    texts = [str(warning.message) for warning in caught]
    assert any("e.png" in text for text in texts)
    assert any("2 replaced so far" in text for text in texts)
    for place, index in enumerate(order):
        expected = order.index({1: 2, 4: 0}.get(index, index))
        for name in encoded:
            assert torch.allclose(repaired[name][place], encoded[name][expected], atol=1e-5)


@pytest.mark.parametrize(
    ("captions", "message"),
    [
        ([*CAPTIONS[:4], None], r"^sample 4 of .* has no caption"),
        ([1, 2, 3, 4, 5], r"^the caption of sample 4 of .*data is int, not text"),
        ([{"a": "b"}] * 5, r"^the caption of sample 4 of .*data is dict, not text"),
    ],
)
def test_a_missing_caption_is_a_broken_sample(captions, message, tmp_path):
    """Also catches numbers that are said to be missing."""
    config = source("huggingface", tmp_path)
    parquet(tmp_path / "data" / "train.parquet", captions)
    samples = open_samples(config, SIZE)
    with pytest.raises(BrokenSample, match=message):
        samples[4]


@pytest.mark.parametrize("workers", [0, 1])
def test_a_broken_disk_stops_the_run(tmp_path, workers):
    """Catches a worker's error, which comes with a traceback in its message."""
    config = replace(source("folder", tmp_path), workers=workers)
    for path in (tmp_path / "data").rglob("*.png"):
        path.write_text("no picture")
    batches = make_stream(config)
    with pytest.raises(DataError, match=r"^16 samples in a row are broken, the last: sample"):
        next(batches)


@pytest.mark.parametrize("workers", [0, 1])
def test_a_broken_avif_is_replaced(tmp_path, workers):
    """Catches the RuntimeError of its decoder, and its name for that of a killed worker."""
    config = replace(source("folder", tmp_path), workers=workers)
    file = BytesIO()
    pictures()[0].save(file, "avif")
    head, pixels = file.getvalue().split(b"mdat")
    damaged = head + b"mdat" + bytes(len(pixels))
    with pytest.raises(RuntimeError, match="Failed to decode"):
        read_rgb(BytesIO(damaged))
    (tmp_path / "data" / "a.png").write_bytes(damaged)
    with pytest.warns(UserWarning, match=r"a\.png\) cannot be read: Failed to decode .*; the foll"):
        take(make_stream(config, batch_size=5), 1)


class Unreadable(Dataset):
    def __getitem__(self, index):
        raise self.error


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize(
    ("error", "message"),
    [
        (OSError("the disk is gone"), r"the disk is gone"),
        (RuntimeError("a mistake"), r"(Caught RuntimeError in DataLoader worker .*)?a mistake\n?"),
    ],
)
def test_what_a_worker_raises_is_not_taken_for_its_death(error, message, workers):
    """Catches advice to use fewer workers, and a traceback in a message that is one sentence."""
    samples = Unreadable()
    samples.error = error
    with pytest.raises(type(error), match=rf"(?s)\A{message}\Z"):
        next(load_batches(samples, [[0]], workers, torch.device("cpu")))


def test_a_killed_worker_ends_in_one_sentence():
    """Catches a traceback where memory ran out."""
    batches = make_stream(replace(SCENES, workers=1))
    next(batches)
    (worker,) = multiprocessing.active_children()
    worker.kill()
    with pytest.raises(DataError, match=r"^a data worker died .* continue with --resume"):
        take(batches, 20)


# Order


@settings(max_examples=60, deadline=None)
@given(
    st.integers(1, 40), st.integers(1, 5), st.integers(1, 4), st.integers(0, 5), st.integers(0, 200)
)
def test_epochs_are_permutations_over_all_processes(num, batch_size, processes, seed, first):
    """Catches samples lost or repeated at the end of an epoch, between processes, by a resume."""
    streams = [
        sample_order(
            num,
            **arguments(
                batch_size=batch_size,
                seed=seed,
                first_sample=first,
                process_index=index,
                num_processes=processes,
            ),
        )
        for index in range(processes)
    ]
    drawn = []
    while len(drawn) < 3 * num:
        drawn += [index for batches in streams for index in next(batches)]
    alone = sample_order(num, **arguments(batch_size=first + len(drawn), seed=seed))
    whole = next(alone)
    assert whole[first:] == drawn
    epochs = [whole[start : start + num] for start in range(0, len(whole) - num + 1, num)]
    assert all(sorted(epoch) == list(range(num)) for epoch in epochs)


def test_epochs_and_seeds_differ():
    one = next(sample_order(50, **arguments(batch_size=100)))
    other = next(sample_order(50, **arguments(batch_size=100, seed=2)))
    assert one[:50] != one[50:] != other[50:] != other[:50] != one[:50] != list(range(50))


def test_stream_gives_what_its_order_says():
    samples, parts = open_samples(SCENES, SIZE), encoder()
    batches = sample_order(20, **arguments())
    for found, indices in islice(zip(make_stream(parts=parts), batches, strict=False), 8):
        chosen = [samples[index] for index in indices]
        pixels = torch.stack([sample["image"] for sample in chosen])
        assert_same(found, parts.encode(pixels, [sample["caption"] for sample in chosen]))


def test_stream_resumes_and_does_not_depend_on_workers():
    """21 samples are past the end of the first epoch of 20."""
    parts = encoder()
    state = torch.get_rng_state()
    whole = take(make_stream(parts=parts), 9)
    assert_same(take(make_stream(replace(SCENES, workers=2), parts), 9), whole)
    resumed = take(make_stream(parts=parts, first_sample=21), 2)
    assert_same(resumed, {name: value[21:] for name, value in whole.items()})
    assert torch.equal(torch.get_rng_state(), state)  # the loop may use torch's own generator


# Encoder


def test_encoder_is_the_pipeline():
    """Catches other pixel ranges, scaled latents, another layer of the text encoder."""
    pipe = tiny_pipe()
    parts = Encoder(pipe.vae, pipe.text_encoder, pipe.tokenizer)
    captions = ["a red fox", "", "a fox " * 40]  # 77 tokens hold less than 40 foxes
    images = [picture.resize((64, 64)) for picture in pictures()[:3]]
    pixels = torch.stack([crop(image, 64) for image in images])
    found = parts.encode(pixels, captions)
    with torch.no_grad():
        expected = pipe.vae.encode(pipe.image_processor.preprocess(images)).latent_dist
        states, _ = pipe.encode_prompt(captions, "cpu", 1, False)
    assert torch.allclose(found["text_states"], states, atol=1e-6)
    posterior = DiagonalGaussianDistribution(found["moments"])
    assert torch.allclose(posterior.mean, expected.mean, atol=1e-5)
    assert torch.allclose(posterior.std, expected.std, atol=1e-5)
    assert not any(value.requires_grad for value in found.values())
    assert {value.dtype for value in found.values()} == {torch.float32}


def test_encoder_keeps_the_dtype_of_its_parts():
    parts = encoder()
    expected = parts.encode(torch.zeros(1, 3, 64, 64, dtype=torch.uint8), ["a"])
    parts.vae.bfloat16()
    parts.text_encoder.bfloat16()
    found = parts.encode(torch.zeros(1, 3, 64, 64, dtype=torch.uint8), ["a"])
    for name in found:
        assert not torch.equal(found[name], expected[name])
        assert torch.allclose(found[name], expected[name], rtol=0.05, atol=0.05)


@pytest.mark.gpu
def test_encoder_computes_in_half_precision_on_cuda():
    """Also catches pinned batches that are overwritten before they are copied."""
    samples, parts = open_samples(SCENES, SIZE), encoder()
    order = next(sample_order(20, **arguments(batch_size=60)))
    pixels = torch.stack([samples[index]["image"] for index in order])
    expected = parts.encode(pixels, [samples[index]["caption"] for index in order])
    parts.vae.cuda()
    parts.text_encoder.cuda()
    found = take(make_stream(replace(SCENES, workers=2), parts), 20)
    for name in found:
        assert found[name].device.type == "cuda"
        error = (found[name].cpu() - expected[name]).norm() / expected[name].norm()
        assert 1e-5 < error < 1e-2


# Cache


def test_cache_equals_no_cache(tmp_path):
    config = replace(SCENES, cache=str(tmp_path / "cache"))
    parts = encoder()
    expected = take(make_stream(parts=parts), 9)
    found = take(make_stream(config, parts), 9)
    for name in found:
        assert found[name].dtype == torch.float32
        assert torch.equal(found[name], found[name].half().float())
        assert torch.allclose(found[name], expected[name], rtol=1e-3, atol=1e-4)
    # 20 samples in shards of 8.
    shards = sorted(path.name for path in (tmp_path / "cache").glob("*.safetensors"))
    assert shards == [f"shard-00000{number}.safetensors" for number in range(3)]

    parts.encode = None  # a complete cache needs no encoder
    resumed = take(make_stream(replace(config, workers=2), parts, first_sample=15), 4)
    assert_same(resumed, {name: value[15:] for name, value in found.items()})


def test_cache_holds_the_replacement_of_a_broken_image(tmp_path):
    config = source("folder", tmp_path)
    (tmp_path / "data" / "a.png").write_text("no picture")
    cached = replace(config, cache=str(tmp_path / "cache"))
    with pytest.warns(UserWarning, match=r"a\.png"):
        found = take(make_stream(cached, batch_size=5), 1)
    with pytest.warns(UserWarning, match=r"a\.png"):
        expected = take(make_stream(config, batch_size=5), 1)
    assert torch.allclose(found["moments"], expected["moments"], rtol=1e-3, atol=1e-4)


def change_encoder(parts, key):
    if key == "vae":
        with torch.no_grad():
            parts.vae.encoder.conv_in.weight[0, 0, 0, 0] += 0.01
    elif key == "text_encoder":
        parts.text_encoder.config.hidden_act = "gelu"
    else:
        parts.tokenizer.add_tokens(["fox"])


@pytest.mark.parametrize("key", ["vae", "text_encoder", "tokenizer"])
def test_a_cache_of_another_encoder_is_refused(key, tmp_path):
    """Fails also where only keys that both fingerprints have are compared."""
    config = replace(SCENES, cache=str(tmp_path / "cache"), num_samples=4)
    make_stream(config)
    parts = encoder()
    parts.encode(torch.zeros(1, 3, 64, 64, dtype=torch.uint8), ["a"])  # leaves padding behind
    make_stream(config, parts)
    change_encoder(parts, key)
    message = f"differs in {key}: delete it or choose another folder"
    with pytest.raises(ValueError, match=message):
        make_stream(config, parts)
    path = tmp_path / "cache" / "fingerprint.json"
    said = json.loads(path.read_text())
    path.write_text(json.dumps({name: said[name] for name in said if name != key}))
    with pytest.raises(ValueError, match=message):
        make_stream(config)
    path.write_text("[]")
    with pytest.raises(ValueError, match=r"is damaged \(it holds list, not a mapping\); delete"):
        make_stream(config)


@pytest.mark.parametrize(
    ("kind", "file"),
    [
        ("huggingface", "train.parquet"),
        ("webdataset txt", "0.tar"),
        ("folder", "e.txt"),
        ("folder", "e.png"),
    ],
)
def test_a_cache_of_other_data_is_refused(kind, file, tmp_path):
    """Catches a fingerprint of the path alone, and images of an older file of the same name."""
    place = tmp_path / "data" if kind == "folder" else tmp_path
    config = replace(source(kind, tmp_path), cache=str(place / "cache"))
    make_stream(config)
    make_stream(replace(config, workers=1))
    if kind == "huggingface":
        others = {"preprocessing": "linfusion", "num_samples": 4, "caption_column": "unused"}
        for name, other in others.items():
            with pytest.raises(ValueError, match=f"differs in {name}: delete"):
                make_stream(replace(config, **{name: other}))
    if file == "e.txt":
        (tmp_path / "data" / file).write_text("another caption")
    else:
        os.utime(tmp_path / "data" / file, (1, 1))  # as of another download
    with pytest.raises(ValueError, match="differs in content: delete"):
        make_stream(config)
    with pytest.raises(ValueError, match=r"differs in .*image_size: delete"):
        make_stream(config, size=128)


def test_a_cache_of_another_format_is_refused(tmp_path, monkeypatch):
    """Catches shards of an older version, whose numbers mean something else."""
    make_stream(replace(SCENES, cache=str(tmp_path)))
    monkeypatch.setattr(cache, "FORMAT", cache.FORMAT + 1)
    with pytest.raises(ValueError, match="differs in format: delete"):
        make_stream(replace(SCENES, cache=str(tmp_path)))


@pytest.mark.parametrize("name", ["moments", "text_states"])
def test_a_cached_number_that_changed_is_found(name, tmp_path):
    """Catches a checksum of only the last of a sample's tensors."""
    config = replace(SCENES, cache=str(tmp_path), num_samples=4)
    make_stream(config)
    path = tmp_path / "shard-000000.safetensors"
    tensors = {key: value.clone() for key, value in load_file(path).items()}
    tensors[name][2, 0] += 1
    save_file(tensors, path)
    with pytest.raises(DataError, match="sample 2 is not the one that was saved"):
        take(make_stream(config), 2)


@pytest.mark.long
def test_a_fingerprint_is_the_same_in_every_process(tmp_path):
    """Catches a digest of addresses or of randomly seeded hashes, which refuses its own cache."""
    kinds = ("folder", "folder csv", "huggingface json", "webdataset txt")
    configs = [SCENES]
    for kind in kinds:
        (tmp_path / kind).mkdir()
        configs.append(source(kind, tmp_path / kind))
    code = f"""
import datasets
datasets.config.HF_DATASETS_CACHE = {datasets.config.HF_DATASETS_CACHE!r}
from distill.data.encoder import Encoder
from distill.data.sources import DataConfig, open_samples
from tiny import tiny_components
for config in {configs}:
    print(open_samples(config, {SIZE}).fingerprint())
parts = tiny_components()
print(Encoder(parts["vae"], parts["text_encoder"], parts["tokenizer"]).fingerprint())
"""
    environment = {**os.environ, "PYTHONHASHSEED": "7", "PYTHONPATH": os.pathsep.join(sys.path)}
    found = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    ).stdout.splitlines()
    expected = [open_samples(config, SIZE).fingerprint() for config in configs]
    assert found == [*expected, str(encoder().fingerprint())]
    assert len(set(expected)) == len(expected)


def test_a_foreign_folder_is_left_alone(tmp_path):
    (tmp_path / "thesis.txt").write_text("precious")
    with pytest.raises(ValueError, match="is not a cache, but is not empty; choose another"):
        make_stream(replace(SCENES, cache=str(tmp_path)))
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.txt"]


def test_a_cache_that_lacks_a_process_share_is_refused(tmp_path):
    """As when each machine has a disk of its own."""
    with pytest.raises(ValueError, match=r"1 of 3 shards of the cache .* all processes share"):
        make_stream(replace(SCENES, cache=str(tmp_path / "cache")), num_processes=2)


def test_moments_beyond_half_precision_are_refused(tmp_path):
    parts = encoder()
    with torch.no_grad():
        parts.vae.quant_conv.bias += 1e6
    with pytest.raises(FloatingPointError, match="moments of samples 0 to 7 are not finite"):
        make_stream(replace(SCENES, cache=str(tmp_path / "cache")), parts)


def test_a_full_disk_is_a_clear_error(tmp_path, monkeypatch):
    def fill(tensors, path):
        path.write_bytes(b"half")
        raise OSError(28, "No space left on device")

    config = replace(SCENES, cache=str(tmp_path / "cache"))
    with monkeypatch.context() as full:
        full.setattr(cache, "save_file", fill)
        with pytest.raises(
            OSError, match=r"shard-000000.* could not be written .* Free disk space"
        ):
            make_stream(config)
    assert [path.name for path in (tmp_path / "cache").iterdir()] == ["fingerprint.json"]
    take(make_stream(config), 1)


def test_an_interrupted_build_continues(tmp_path):
    """Catches complete shards that are built again, and half a shard that is taken for one."""
    config = replace(SCENES, cache=str(tmp_path / "cache"))
    parts = encoder()
    with pytest.raises(KeyboardInterrupt):
        make_stream(config, Interrupted(parts))
    (tmp_path / "cache" / ".writing-shard-000002.safetensors-1").write_text("half")
    kept = {path: path.stat().st_ino for path in (tmp_path / "cache").glob("shard-*")}
    assert len(kept) == 2
    found = take(make_stream(config, parts), 6)
    assert all(path.stat().st_ino == inode for path, inode in kept.items())
    assert not list((tmp_path / "cache").glob(".writing-*"))
    other = replace(config, cache=str(tmp_path / "undisturbed"))
    assert_same(found, take(make_stream(other, parts), 6))


class Interrupted(Encoder):
    """An encoder that is interrupted in its third batch."""

    def __init__(self, parts):
        super().__init__(parts.vae, parts.text_encoder, parts.tokenizer)
        self.left = 2

    def encode(self, *batch):
        if self.left == 0:
            raise KeyboardInterrupt
        self.left -= 1
        return super().encode(*batch)
