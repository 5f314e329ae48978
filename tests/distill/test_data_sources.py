"""Where images and captions come from: folders, tars, data sets and scenes."""

import codecs
import gzip
import json
import sys
import tarfile
from dataclasses import replace

import datasets
import numpy as np
import pytest
import torch
from PIL import Image, ImageFile
from toy_data import (
    CAPTIONS,
    NAMES,
    SCENES,
    SIZE,
    make_stream,
    pictures,
    png,
    source,
    take,
    write_tar,
)

from avq_diffusers.mini import TRAINING_SEEDS, Scene, render, sample_scene
from distill.data.images import crop, image_extensions, linfusion
from distill.data.samples import BrokenSample
from distill.data.sources import open_samples

pytestmark = pytest.mark.usefixtures("no_traces")


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
