"""Where images and captions come from, and what becomes of an image before it is encoded."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image
from toy_data import CAPTIONS, NAMES, SCENES, SIZE, make_stream, pictures, source

from distill.data.images import crop, linfusion
from distill.data.sources import open_samples
from distill.scenes import TRAINING_SEEDS, render, sample_scene

pytestmark = pytest.mark.usefixtures("no_traces")


@pytest.mark.parametrize(
    "kind",
    ["folder", "folder txt", "huggingface", "huggingface json", "huggingface tar"],
)
def test_sources_give_images_with_their_captions(kind, tmp_path):
    """Catches rows out of step with captions, lost rows and images of another preprocessing."""
    config = source(kind, tmp_path)
    by_path = [1, 0, 3, 4, 2]  # a, b, deeper [1]/d, e, test_c
    order = by_path if kind.startswith("folder") else range(5)
    texts = [CAPTIONS[i] for i in (range(5) if kind == "folder txt" else order)]
    for preprocessing, function in (("crop", crop), ("linfusion", linfusion)):
        samples = open_samples(replace(config, preprocessing=preprocessing), SIZE)
        assert len(samples) == 5
        for index, (text, i) in enumerate(zip(texts, order, strict=True)):
            assert samples[index]["caption"] == text
            assert torch.equal(samples[index]["image"], function(pictures()[i], SIZE))
    assert len(open_samples(replace(config, num_samples=2), SIZE)) == 2


def test_files_of_the_system_are_no_images(tmp_path):
    """Catches macOS's `._name.png` beside every image of a copied folder, and Jupyter's copies."""
    config = source("folder", tmp_path)
    first = next((tmp_path / "data").rglob("*.png"))
    first.with_name(f"._{first.name}").write_bytes(b"of the system")
    copy = tmp_path / "data" / ".ipynb_checkpoints" / first.name
    copy.parent.mkdir()
    for path in (first, first.with_suffix(".txt")):
        copy.with_name(path.name).write_bytes(path.read_bytes())
    assert len(open_samples(config, 16)) == len(NAMES)


def test_linked_folders_are_read_or_refused(tmp_path):
    """Catches training on the images outside linked subfolders only."""
    config = source("folder", tmp_path)
    (tmp_path / "data").rename(tmp_path / "far")
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "more").symlink_to(tmp_path / "far", target_is_directory=True)
    assert len(open_samples(config, 16)) == len(NAMES)
    columns = {"split": "train", "image_column": "image", "caption_column": "text"}
    with pytest.raises(ValueError, match="more is a link to a folder, which datasets does not"):
        open_samples(replace(config, source="huggingface", **columns), 16)


def test_scenes_are_the_training_scenes():
    samples = open_samples(SCENES, SIZE)
    assert len(samples) == 20
    scene = sample_scene(TRAINING_SEEDS[7])
    assert samples[7]["caption"] == scene.caption
    assert np.array_equal(samples[7]["image"].permute(1, 2, 0), render(scene, SIZE))
    assert open_samples(SCENES, SIZE).fingerprint == samples.fingerprint
    assert open_samples(SCENES, 2 * SIZE).fingerprint != samples.fingerprint


@pytest.mark.parametrize(
    ("kind", "changes", "message"),
    [
        ("folder", {"source": "tar"}, "Input should be 'scenes', 'folder'"),
        ("folder", {"preprocessing": "pad"}, "Input should be 'crop' or 'linfusion'"),
        ("folder", {"path": None}, "source folder needs path"),
        ("folder", {"split": "train"}, "source folder takes no split, but got 'train'"),
        ("huggingface json", {"caption_column": "a"}, "captions and caption_column exclude"),
        ("huggingface", {"caption_column": None}, "needs caption_column or captions"),
        ("huggingface", {"num_samples": 0}, "greater than or equal to 1"),
        ("huggingface", {"workers": -1}, "greater than or equal to 0"),
        ("huggingface", {"num_samples": 6}, "num_samples is 6, but .* has 5 samples"),
        ("huggingface", {"image_column": "image"}, "in the column image: .*'image'"),
        ("huggingface", {"caption_column": "caption"}, "'caption'.*not in"),
        ("huggingface", {"image_column": "unused"}, "images in the column unused: .*int64"),
        ("huggingface", {"split": "test"}, "as source huggingface .*: Unknown split"),
        (
            "huggingface json",
            {"captions": "{root}/short.txt"},
            "per row of .*, 5, but has 2",
        ),
        ("huggingface json", {"captions": "{root}/bad.json"}, "bad.json is not JSON"),
        ("folder", {"path": "{root}/none"}, "there are no images in the folder .*none"),
        ("huggingface", {"path": "{root}/none"}, "none cannot be loaded as source huggingface"),
    ],
)
def test_refusals(kind, changes, message, tmp_path):
    (tmp_path / "short.txt").write_text("a\nb\n")
    (tmp_path / "bad.json").write_text('["a",')
    changes = {
        key: value.format(root=tmp_path) if isinstance(value, str) else value
        for key, value in changes.items()
    }
    config = source(kind, tmp_path)
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        open_samples(replace(config, **changes), SIZE)


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
