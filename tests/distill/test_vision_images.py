"""Labelled images for vision models: layouts, modes, labels, augmentation, bad input."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from datasets import ClassLabel, Dataset, DatasetDict, Features
from datasets import Image as ImageColumn
from PIL import Image

from distill.exceptions import DataError
from distill.vision import images
from distill.vision.config import DataConfig
from distill.vision.images import (
    Collator,
    HubImages,
    ImageFolder,
    LabelMaps,
    Prepared,
    random_piece,
)

DATA = DataConfig(
    path="",
    num_labels=3,
    image_size=8,
    resize="squash",
    crop_share=1.0,
    interpolation="bilinear",
    mean=(0.5, 0.5, 0.5),
    std=(0.5, 0.5, 0.5),
    augment="flip",
    workers=0,
    preload=False,
)


def save(path: Path, image: Image.Image) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    image.save(path)


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
            save(tmp_path / "annotations" / split / f"{name}.png", Image.fromarray(labels))
    return tmp_path


@pytest.fixture
def folder(tmp_path):
    for split in ("train", "val"):
        for name in ("dog", "cat"):
            save(tmp_path / split / name / "x.png", ramp())
    return tmp_path


def test_label_maps_are_shifted_and_resized_to_the_nearest(ade):
    """Catches interpolated labels, which are of other classes, and a 0 that is learned."""
    prepared = Prepared(LabelMaps(ade, "training"), DATA, training=False, seed=0)
    sample = prepared[1]
    assert sample["pixels"].shape == (3, 8, 8)
    assert sample["pixels"].dtype == torch.uint8
    assert set(sample["labels"].flatten().tolist()) <= {0, 2, 255}
    full = Prepared(
        LabelMaps(ade, "training"), replace(DATA, image_size=16), training=False, seed=0
    )
    assert set(full[0]["labels"].unique().tolist()) == {0, 2, 255}
    assert (full[0]["labels"][4:, :8] == 0).all()


def test_flips_move_labels_with_pixels_and_repeat(ade):
    prepared = Prepared(LabelMaps(ade, "training"), DATA, training=True, seed=3)
    flipped = set()
    for epoch in range(8):
        prepared.epoch = epoch
        for index in range(2):
            first, again = prepared[index], prepared[index]
            assert torch.equal(first["pixels"], again["pixels"])
            is_flipped = bool(first["pixels"][0, 4, 0] > first["pixels"][0, 4, -1])
            assert bool(first["labels"][4, 0] == 2) == is_flipped
            flipped.add(is_flipped)
    assert flipped == {True, False}
    prepared.preload(2)
    kept = [prepared[index]["pixels"] for index in range(2)]
    prepared.kept = []
    assert all(torch.equal(prepared[index]["pixels"], kept[index]) for index in range(2))


@pytest.mark.parametrize("mode", ["L", "RGBA", "P", "LA", "CMYK", "1"])
def test_images_of_every_mode_become_rgb(folder, mode):
    image = ramp(mode)
    ending = "jpg" if mode == "CMYK" else "png"
    save(folder / "train" / "cat" / f"a.{ending}", image)
    prepared = Prepared(ImageFolder(folder, "training"), DATA, training=False, seed=0)
    assert len(prepared) == 3
    pixels, expected = prepared[0]["pixels"].float(), prepared[1]["pixels"].float()
    assert pixels.shape == expected.shape
    assert mode == "1" or (pixels - expected).abs().mean() < 15


def test_16_bits_become_8(folder):
    """Pillow would make nearly all of them white."""
    path = folder / "train" / "cat" / "a.png"
    wide = np.arange(256, dtype=np.uint16).reshape(16, 16) * 256 + 255
    Image.fromarray(wide).save(path)
    image = ImageFolder(folder, "training")[0].image
    assert image.mode == "RGB"
    assert np.array_equal(np.asarray(image), (wide // 256)[..., None].repeat(3, axis=2))
    Image.fromarray(wide.astype(np.float32)).save(path, "TIFF")
    with pytest.raises(DataError, match=r"8 or 16 bits a channel, but .*a\.png has mode F\."):
        ImageFolder(folder, "training")[0]


def test_classes_are_sorted_and_palettes_are_labels(folder, ade):
    samples = ImageFolder(folder, "validation")
    assert samples.classes == ["cat", "dog"]
    assert [samples[index].label for index in range(2)] == [0, 1]
    path = ade / "annotations" / "training" / "a.png"
    labels = Image.open(path)
    assert labels.mode == "L"
    labels.putpalette([9, 9, 9, 200, 0, 0, 0, 200, 0, 0, 0, 200])  # its mode is P now
    labels.save(path)
    assert set(np.asarray(LabelMaps(ade, "training")[0].label).flatten()) == {0, 1, 3}


def test_batches_are_normalized():
    pixels = torch.tensor([0, 255], dtype=torch.uint8).view(1, 1, 2).expand(3, 1, 2)
    batch = Collator(DATA)([{"pixels": pixels, "labels": 4}] * 2)
    torch.testing.assert_close(batch["pixel_values"][1, 2], torch.tensor([[-1.0, 1.0]]))
    assert batch["labels"].tolist() == [4, 4]


def test_crops_are_central_and_random_pieces_stay_inside():
    image = Image.fromarray(np.arange(200, dtype=np.uint8).reshape(10, 20)).convert("RGB")
    config = replace(DATA, resize="crop", crop_share=0.8, image_size=8)
    prepared = Prepared([images.Sample(image, 0, "x")], config, training=False, seed=0)
    assert torch.equal(
        prepared[0]["pixels"][0], torch.from_numpy(np.array(image)[1:9, 6:14, 0].copy())
    )
    rng = np.random.default_rng(0)
    for size in ((20, 10), (5, 400)):
        for _ in range(50):
            left, top, right, bottom = random_piece(size, rng)
            assert 0 <= left < right <= size[0] + 1e-9
            assert 0 <= top < bottom <= size[1] + 1e-9
            assert 0.7 < (right - left) / (bottom - top) < 1.4
    config = replace(config, augment="crop")
    prepared = Prepared([images.Sample(image, 0, "x")] * 9, config, training=True, seed=0)
    pieces = [prepared[index]["pixels"] for index in range(9)]
    assert all(torch.equal(prepared[index]["pixels"], pieces[index]) for index in range(9))
    assert len({int(piece.max()) - int(piece.min()) for piece in pieces}) > 3


def test_a_data_set_of_the_hub(monkeypatch):
    features = Features({"image": ImageColumn(), "label": ClassLabel(names=["a", "b"])})
    rows = Dataset.from_dict({"image": [ramp("L")] * 2, "label": [0, 1]}, features=features)
    found = DatasetDict({"train": rows})
    monkeypatch.setattr("datasets.load_dataset", lambda name: found)
    samples = HubImages("org/set", "training")
    assert samples.classes == ["a", "b"]
    assert len(samples) == 2
    assert (samples[1].label, samples[1].image.mode) == (1, "RGB")
    with pytest.raises(ValueError, match="org/set must have a split validation, but has"):
        HubImages("org/set", "validation")
    found["train"] = rows.rename_column("label", "class")
    with pytest.raises(ValueError, match="must have columns image and label"):
        HubImages("org/set", "training")


def spoil_labels(place):
    path = place / "annotations" / "training" / "a.png"
    Image.fromarray(np.full((12, 16), 9, np.uint8)).save(path)


def spoil_mode(place):
    ramp("RGB").save(place / "annotations" / "training" / "a.png")


def spoil_size(place):
    Image.fromarray(np.ones((3, 3), np.uint8)).save(place / "annotations" / "training" / "a.png")


def spoil_map(place):
    (place / "annotations" / "training" / "b.png").unlink()


def spoil_bytes(place):
    (place / "images" / "training" / "a.jpg").write_bytes(b"no image")


def spoil_folder(place):
    for path in (place / "images" / "training").iterdir():
        path.unlink()


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (spoil_labels, "labels must be at most num_labels = 3, but .*a.png has 9"),
        (spoil_mode, r"one number a pixel .* a.png has mode RGB|a.png has mode RGB"),
        (spoil_size, r"must have the size of its image, \(16, 12\), but has \(3, 3\)"),
        (spoil_map, "1 of 2 lack one: there is no .*b.png"),
        (spoil_bytes, "a.jpg cannot be read as an image"),
        (spoil_folder, "images/training must hold images, but has none"),
    ],
)
def test_bad_label_maps_get_one_sentence(ade, spoil, message):
    spoil(ade)
    with pytest.raises((DataError, ValueError), match=message):
        Prepared(LabelMaps(ade, "training"), DATA, training=False, seed=0)[0]


def test_bad_folders_get_one_sentence(folder):
    for path in (folder / "val" / "dog").iterdir():
        path.unlink()
    with pytest.raises(ValueError, match="val/dog must hold images, but has none"):
        ImageFolder(folder, "validation")
    (folder / "val" / "dog").rmdir()
    with pytest.raises(ValueError, match=r"val must have the classes of .*train, but lacks dog"):
        ImageFolder(folder, "training")
    (folder / "val" / "bird").mkdir()
    (folder / "val" / "dog").mkdir()
    with pytest.raises(ValueError, match=r"train must have the classes of .*val, but lacks bird"):
        ImageFolder(folder, "training")
    with pytest.raises(ValueError, match=r"there is no folder .*nowhere/train"):
        ImageFolder(folder / "nowhere", "training")
    (folder / "empty" / "train").mkdir(parents=True)
    with pytest.raises(ValueError, match="must hold a folder for each class, but has none"):
        ImageFolder(folder / "empty", "training")
