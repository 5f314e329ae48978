"""Labelled images for vision models: layouts, labels, augmentation, bad input."""

import json
from dataclasses import replace
from io import BytesIO
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from tiny_training import CONFIGS

from distill.config_file import load_config
from distill.data import DataError
from distill.vision.config import VisionConfig
from distill.vision.images import Prepared, label_maps, open_images, random_piece

CONFIG = load_config(CONFIGS / "vision" / "imagenet_m64p16c8.yaml", VisionConfig, [])
PLAIN = {"resize": "squash", "interpolation": "bilinear", "augment": "flip"}
DATA = replace(CONFIG.data, num_labels=3, image_size=8, **PLAIN)


def save(path: Path, image: Image.Image, **options) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    image.save(path, **options)


def ramp(mode="RGB", size=(16, 12)):
    columns = np.tile(np.arange(size[0], dtype=np.uint8) * 15, (size[1], 1))
    return Image.fromarray(columns).convert(mode)


@pytest.fixture
def ade(tmp_path):
    """Two images a split; label 1 is the left half, 3 the right, 0 the first row."""
    labels = np.full((12, 16), 1, np.uint8)
    labels[:, 8:] = 3
    labels[0] = 0
    for split in ("training", "validation"):
        for name in "ab":
            save(tmp_path / "images" / split / f"{name}.jpg", ramp())
            image = Image.fromarray(labels)
            if name == "b":  # a palette: its mode is P, and its colours mean nothing
                image.putpalette([9, 9, 9, 200, 0, 0, 0, 200, 0, 0, 0, 200])
            save(tmp_path / "annotations" / split / f"{name}.png", image)
    return tmp_path


def test_label_maps_are_shifted_and_resized_to_the_nearest(ade):
    """Catches interpolated labels, which are of other classes, and a 0 that is learned."""
    prepared = maps(ade)
    sample = prepared[1]
    assert sample["pixel_values"].shape == (3, 8, 8)
    assert sample["pixel_values"].dtype == torch.uint8
    assert set(sample["labels"].flatten().tolist()) <= {0, 2, 255}
    full = maps(ade, image_size=16)
    for sample in (full[0], full[1]):
        assert set(sample["labels"].unique().tolist()) == {0, 2, 255}
        assert (sample["labels"][4:, :8] == 0).all()
    assert torch.equal(
        prepared.first(9), torch.stack([prepared[i]["pixel_values"] for i in (0, 1)])
    )


def maps(root, seed=None, **changes):
    return Prepared(label_maps(root, "training"), replace(DATA, **changes), seed, {})


def test_label_maps_lie_where_their_images_do(ade):
    """Catches files of the system that need a label map, and maps of deeper images not found."""
    (ade / "images" / "training" / "._a.jpg").touch()
    for kind in ("images", "annotations"):
        (ade / kind / "validation").rename(ade / kind / "training" / "more")
    found = [row["label"].relative_to(ade / "annotations") for row in label_maps(ade, "training")]
    names = ["a.png", "b.png", "more/a.png", "more/b.png"]
    assert found == [Path("training") / name for name in names]


@pytest.mark.parametrize("turned", ["images", "annotations"])
def test_label_maps_lie_on_upright_images(tmp_path, turned):
    """Catches an orientation that is heeded for one of the two, which then differ silently."""
    pixels = np.full((16, 16), 1, np.uint8)
    pixels[:8] = 255
    labels = np.full((16, 16), 1, np.uint8)
    labels[:8] = 2
    exif = Image.Exif()
    exif[0x0112] = 6  # turn it clockwise to see it
    for array, folder, name in ((pixels, "images", "a.jpg"), (labels, "annotations", "a.png")):
        image, options = Image.fromarray(array), {}
        if turned == folder:
            image, options = image.transpose(Image.Transpose.ROTATE_90), {"exif": exif}
        save(tmp_path / folder / "training" / name, image, **options)
    sample = maps(tmp_path, image_size=16)[0]
    assert torch.equal(sample["pixel_values"][0] > 128, sample["labels"] == 1)
    assert (sample["labels"][:8] == 1).all()


def test_flips_move_labels_with_pixels_and_repeat(ade):
    prepared = maps(ade, seed=3)
    flipped = set()
    for epoch in range(8):
        prepared.epoch = epoch
        for index in range(2):
            first, again = prepared[index], prepared[index]
            assert torch.equal(first["pixel_values"], again["pixel_values"])
            is_flipped = bool(first["pixel_values"][0, 4, 0] > first["pixel_values"][0, 4, -1])
            assert bool(first["labels"][4, 0] == 2) == is_flipped
            flipped.add(is_flipped)
    assert flipped == {True, False}


def test_folders_of_classes(tmp_path, no_traces):
    """Catches images on their side, transparent pixels that turn black, and splits exchanged."""
    config = replace(CONFIG, data=replace(DATA, path=str(tmp_path), num_labels=None, image_size=12))
    with pytest.raises((ValueError, OSError)):
        open_images(config, seed=0)
    turned = ramp().transpose(Image.Transpose.ROTATE_90)
    exif = Image.Exif()
    exif[0x0112] = 6  # turn it clockwise to see it
    save(tmp_path / "train" / "dog" / "a.jpg", turned, exif=exif, quality=100)
    save(tmp_path / "train" / "cat" / "b.png", Image.new("RGBA", (12, 12)))
    with pytest.raises(ValueError, match=r"splits train and validation \(or val\) with columns"):
        open_images(config, seed=0)
    save(tmp_path / "val" / "cat" / "c.png", ramp("L"))
    (training, validation), classes = open_images(config, seed=0)
    assert classes == ["cat", "dog"]
    assert [training[i]["labels"] for i in range(2)] == [0, 1]
    assert (training[0]["pixel_values"] == 255).all()
    assert [len(training), len(validation)] == [2, 1]
    difference = training.first(2)[1].float() - validation[0]["pixel_values"].float()
    assert difference.abs().mean() < 5
    (tmp_path / "train" / "fox").symlink_to(tmp_path / "val" / "cat")
    with pytest.raises(ValueError, match="fox is a link to a folder, which datasets does not read"):
        open_images(config, seed=0)
    (tmp_path / "val" / "cat" / "c.png").write_bytes(b"no image")
    with pytest.raises(DataError, match=r"c\.png cannot be read as an image"):
        validation[0]


def labelled(root, training, validation):
    """Images with a file of their labels, as data sets of the Hub have them."""
    for split, labels in (("train", training), ("val", validation)):
        for index, label in enumerate(labels):
            save(root / split / f"{index}.png", ramp("L"))
            with (root / split / "metadata.jsonl").open("a") as file:
                file.write(json.dumps({"file_name": f"{index}.png", "label": label}) + "\n")
    return replace(CONFIG, data=replace(DATA, path=str(root), num_labels=None))


@pytest.mark.parametrize(
    ("training", "validation", "numbers", "classes"),
    [
        ([10, 2, 2], [2, 10], [1, 0, 0], ["2", "10"]),
        (["dog", "cat"], ["cat"], [1, 0], ["cat", "dog"]),
    ],
)
def test_labels_without_names_are_classes_in_order(
    tmp_path, no_traces, training, validation, numbers, classes
):
    """Catches labels that are taken for numbers of classes, and numbers sorted as texts."""
    (found, other), names = open_images(labelled(tmp_path, training, validation), seed=0)
    assert names == classes
    assert [found[index]["labels"] for index in range(len(numbers))] == numbers
    assert [classes[other[i]["labels"]] for i in range(len(validation))] == [*map(str, validation)]


@pytest.mark.parametrize(
    ("training", "validation", "message"),
    [
        ([0.5, 1.0], [1.0], "must hold classes, all int or all str, but holds float"),
        (["a", None], ["a"], "must hold classes, all int or all str, but holds NoneType, str"),
        ([0, 1], [1, 7], "labels of the split validation of .* but 7 is not"),
    ],
)
def test_labels_that_are_no_classes_get_one_sentence(
    tmp_path, no_traces, training, validation, message
):
    with pytest.raises(ValueError, match=message):
        open_images(labelled(tmp_path, training, validation), seed=0)


def test_crops_are_central_and_random_pieces_stay_inside():
    pixels, content = np.arange(200, dtype=np.uint8).reshape(10, 20), BytesIO()
    Image.fromarray(pixels).save(content, "PNG")
    row = {"image": {"path": None, "bytes": content.getvalue()}, "label": "b"}
    config = replace(DATA, resize="crop", crop_share=0.8, image_size=8)
    sample = Prepared([row], config, None, {"a": 0, "b": 1})[0]
    assert sample["labels"] == 1
    assert torch.equal(sample["pixel_values"][2], torch.from_numpy(pixels[1:9, 6:14].copy()))
    rng = np.random.default_rng(0)
    for size in ((20, 10), (5, 400)):
        for _ in range(50):
            left, top, right, bottom = random_piece(size, rng)
            assert 0 <= left < right <= size[0] + 1e-9
            assert 0 <= top < bottom <= size[1] + 1e-9
            assert 0.7 < (right - left) / (bottom - top) < 1.4
    prepared = Prepared([row] * 9, replace(config, augment="crop"), 0, {"b": 0})
    pieces = [prepared[index]["pixel_values"] for index in range(9)]
    assert all(torch.equal(prepared[index]["pixel_values"], pieces[index]) for index in range(9))
    assert len({int(piece.max()) - int(piece.min()) for piece in pieces}) > 3


def flat(value, size=(16, 12), mode="L"):
    return lambda path: Image.new(mode, size, value).save(path)


@pytest.mark.parametrize(
    ("file", "spoil", "message"),
    [
        ("annotations/a.png", flat(9), "labels must be at most num_labels = 3, but .*a.png has 9"),
        ("annotations/a.png", flat(1, mode="RGB"), r"one number per pixel .*a.png has mode RGB"),
        ("annotations/a.png", flat(1, (3, 3)), r"size of its image, \(16, 12\).* size \(3, 3\)"),
        ("annotations/b.png", Path.unlink, "1 of 2 lack one: there is no .*b.png"),
        ("annotations/a.png", lambda path: path.write_bytes(b"no"), "a.png cannot be read as an"),
        ("images/a.jpg", lambda path: path.write_bytes(b"no"), "a.jpg cannot be read as an image"),
    ],
)
def test_bad_label_maps_get_one_sentence(ade, file, spoil, message):
    kind, name = file.split("/")
    spoil(ade / kind / "training" / name)
    with pytest.raises(ValueError if spoil is Path.unlink else DataError, match=message):
        maps(ade)[0]
