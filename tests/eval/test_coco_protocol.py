"""Protocol of COCO: captions, preparation of images, FID, deviations."""

import hashlib
import json
from inspect import signature
from pathlib import Path

import numpy as np
import pytest
import torch
from eval_helpers import noise, protocol_config
from PIL import Image
from scipy.linalg import sqrtm

from eval.commands.coco import coco_generate_command
from eval.quality import captions, coco_score, frechet, protocol
from eval.quality.captions import read_captions


def write_annotations(path, count=40):
    """Two captions of each image, in COCO's format and with its line feeds."""
    annotations = [
        {"id": 1000 - 2 * image + which, "image_id": 7 * image, "caption": f"{image} {which}\n "}
        for image in range(count)
        for which in range(2)
    ]
    path.write_text(json.dumps({"images": [], "annotations": annotations}))
    return path


def test_a_draw_takes_one_caption_of_each_image(tmp_path):
    """Catches an image drawn twice, a draw that no seed repeats, and a pilot that is no prefix."""
    path = write_annotations(tmp_path / "captions.json")
    drawn = read_captions(path, 40)
    images = [int(text.split()[0]) for text in drawn.texts]
    assert sorted(images) == list(range(40))
    assert images != sorted(images)
    assert {text.split()[1] for text in drawn.texts} == {"0", "1"}
    assert read_captions(path, 15).texts == drawn.texts[:15]
    other = read_captions(path, 40, seed=1)
    assert other.texts != drawn.texts
    assert (drawn.origin, other.origin) == (
        "draw of seed 0 from captions.json",
        "draw of seed 1 from captions.json",
    )
    annotations = json.loads(path.read_text())
    annotations["annotations"].reverse()
    path.write_text(json.dumps(annotations))
    assert read_captions(path, 40) == drawn
    assert drawn.texts[:3] == ("21 1", "25 1", "17 1")  # on every machine, for good


def test_a_list_keeps_its_order(tmp_path, monkeypatch):
    path = tmp_path / "captions.txt"
    path.write_bytes("  a fox \r\nübung\x0bx\na fox\nlast\n".encode())
    found = read_captions(path, 3)
    assert found.texts == ("a fox", "übung\x0bx", "a fox")
    assert found.origin == "list captions.txt"
    monkeypatch.setattr(captions, "CAPTIONS_SHA256", hashlib.sha256(path.read_bytes()).hexdigest())
    assert read_captions(path, 4).origin == "LinFusion's list"


def correlated(count, width, seed):
    generator = np.random.default_rng(seed)
    mixing = generator.normal(size=(width, width)) / width**0.5
    return generator.gamma(0.5, size=(count, width)) @ mixing + generator.normal(size=width)


def clean_fid(first, second):
    """The formula of clean-fid: the matrix root of the product of numpy's covariances."""
    covariances = np.cov(first.T), np.cov(second.T)
    means = first.mean(0) - second.mean(0)
    root = sqrtm(covariances[0] @ covariances[1]).real
    return means @ means + np.trace(covariances[0] + covariances[1] - 2 * root)


def test_fid_is_that_of_clean_fid(monkeypatch):
    """Catches ddof 0, half precision, a product of roots in the wrong order, a lost chunk."""
    monkeypatch.setattr(frechet, "CHUNK", 97)
    first, second = correlated(900, 64, 0), correlated(700, 64, 1)
    real, generated = (frechet.fit_gaussian(torch.from_numpy(x)) for x in (first, second))
    expected = clean_fid(first, second)
    assert expected > 10
    assert frechet.frechet_distance(real, generated) == pytest.approx(expected, rel=1e-9)
    assert frechet.frechet_distance(generated, real) == pytest.approx(expected, rel=1e-9)
    assert frechet.frechet_distance(real, real) == pytest.approx(0, abs=1e-9)
    torch.testing.assert_close(real.covariance.numpy(), np.cov(first.T))


def test_fid_of_fewer_images_than_features():
    """A shift changes means only, also where covariances are singular; far means do not cancel."""
    features = torch.from_numpy(correlated(20, 64, 0)) + 1e4
    shift = torch.linspace(0, 1, 64, dtype=torch.float64)
    moved = frechet.fit_gaussian(features + shift)
    distance = frechet.frechet_distance(frechet.fit_gaussian(features), moved)
    assert distance == pytest.approx(float((shift**2).sum()), rel=1e-5)


def test_the_jackknife_leaves_each_block_out(monkeypatch):
    """Against fits of what is left: catches a wrong block, mean, covariance or factor, and blocks
    without a row, which would leave out nothing."""
    monkeypatch.setattr(frechet, "CHUNK", 3)
    real = frechet.fit_gaussian(torch.from_numpy(correlated(40, 4, 1)))
    features = torch.from_numpy(correlated(22, 4, 0))
    distances = [
        frechet.frechet_distance(
            real, frechet.fit_gaussian(features[torch.arange(22) % 5 != block])
        )
        for block in range(5)
    ]
    expected = (4 / 5 * sum((x - np.mean(distances)) ** 2 for x in distances)) ** 0.5
    assert frechet.jackknife_error(real, features, 5) == pytest.approx(expected)
    few = features[:3]
    assert frechet.jackknife_error(real, few, 5) == frechet.jackknife_error(real, few, 3) > 0
    assert np.isnan(frechet.jackknife_error(real, features[:2], 5))


def test_the_middle_square_is_that_of_torchvision():
    """round((length - side) / 2): 1.5 to 2, 0.5 to 0; no resize where none is needed."""
    values, image = noise(256, 259)
    prepared = coco_score.prepare(image)
    assert prepared["bytes"].dtype == torch.uint8
    assert np.array_equal(prepared["bytes"].permute(1, 2, 0), values[:, 2:258])
    values, image = noise(257, 256)
    prepared = coco_score.prepare(image)
    assert np.array_equal(prepared["bytes"].permute(1, 2, 0), values[:256])


def test_pixels_are_enlarged_in_floats_from_bytes_at_256():
    """clean-fid's mode "clean"; catches bytes at 299, no clip, and a resize in one step."""
    _, image = noise(400, 300)
    prepared = coco_score.prepare(image)
    small = image.crop((0, 50, 300, 350)).resize((256, 256), Image.Resampling.LANCZOS)
    assert np.array_equal(prepared["bytes"].permute(1, 2, 0), np.asarray(small))
    for channel, pixels in zip(small.split(), prepared["pixels"], strict=True):
        enlarged = channel.convert("F").resize((299, 299), Image.Resampling.BICUBIC)
        assert np.asarray(enlarged).min() < 0
        assert np.asarray(enlarged).max() > 255
        np.testing.assert_array_equal(pixels, np.asarray(enlarged).clip(0, 255))
    assert (prepared["pixels"] % 1 != 0).any()


def test_the_command_follows_the_protocol_by_itself():
    """Catches an option whose default is another number: 30 000 images would not compare."""
    options = signature(coco_generate_command).parameters
    names = {"images": "num_images", "steps": "num_inference_steps"}
    for option in (*names, "guidance_scale"):
        assert options[option].default == protocol.GENERATION[names.get(option, option)], option
    assert options["size"].default == protocol.SIZES[0]
    assert Path(options["model"].default).name == protocol.GENERATION["model"]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("captions.txt", None, r"no file .*captions.txt; .* coco download .*captions_val2014.json"),
        ("captions.txt", b"one\ntwo\n", "3 captions are needed, but .*captions.txt has 2"),
        ("captions.txt", b"one\n \nthree\n", "caption 2 of .* is empty"),
        ("captions.json", b"[]", "does not hold captions like COCO's captions_val2014.json"),
        (
            "captions.json",
            b'{"annotations": [{"id": 1e400, "image_id": 2, "caption": "a fox"}]}',
            "does not hold captions like COCO's captions_val2014.json: .*OverflowError",
        ),
        ("captions.json", b'{"annotations": [{"id": 1, "image_id": 2}]}', "KeyError..caption"),
    ],
)
def test_bad_captions_are_refused(tmp_path, name, content, message):
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        read_captions(tmp_path / name, 3)


def test_deviations_are_named():
    """Catches figures of 5000 images, or of part of COCO, that pass for published ones."""
    published = {"num_images": 30_000, "num_real": 40_504, "scorer": None}
    assert protocol.deviations(protocol_config(), **published) == []
    assert protocol.deviations(protocol_config(model="me/stable-diffusion-v1-5"), **published) == []
    config = protocol_config(size=640, num_inference_steps=50, model="me/other")
    assert protocol.deviations(protocol_config(size=1024), **published) == [
        "scalecrafter is False, not True"
    ]
    partly = {"num_images": 5000, "num_real": 40_503, "scorer": "folder"}
    assert protocol.deviations(config, **partly) == [
        "model is other, not stable-diffusion-v1-5",
        "num_images is 5000, not 30000",
        "num_inference_steps is 50, not 25",
        "num_real is 40503, not 40504",
        "size is 640, not 512 or 1024",
        "a scorer stands in for Inception and CLIP",
    ]
