"""Scores of rows: features of real images, patches, networks."""

import json
import shutil
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from coco_rows import noise, rows_of, score, write_row
from PIL import Image

from avq_diffusers.images import read_rgb
from eval.quality import coco_score
from eval.quality.networks import Inception

pytestmark = pytest.mark.usefixtures("own_state")


def test_real_images_are_all_that_lie_in_the_folder(tmp_path):
    """Catches images of COCO's folders by year, or of cameras, that are no reference."""
    (tmp_path / "val2014").mkdir()
    names = ["b.JPG", "d.webp", "e.bmp", "f.tif", "val2014/a.jpeg", "val2014/c.png"]
    (tmp_path / ".thumbnails").mkdir()
    for name in (*names, "a.txt", "clip.gif", "val2014/._a.jpeg", ".thumbnails/b.jpg"):
        (tmp_path / name).touch()
    assert coco_score.real_images(tmp_path) == [tmp_path / name for name in names]
    (tmp_path / "more").symlink_to(tmp_path / ".thumbnails", target_is_directory=True)
    assert tmp_path / "more/b.jpg" in coco_score.real_images(tmp_path)


@pytest.mark.parametrize("name", ["turned.jpg", "transparent.png", "grey16.png"])
def test_images_are_read_as_clean_fid_reads_them(tmp_path, name):
    """Catches another reader, with which an FID no longer compares with published ones."""
    exif = Image.Exif()
    exif[0x0112] = 6
    images = {
        "turned.jpg": (noise(64, 48, 0)[1], {"exif": exif}),
        "transparent.png": (Image.new("RGBA", (8, 8), (0, 0, 0, 0)), {}),
        "grey16.png": (Image.fromarray(np.full((8, 8), 0x4080, np.uint16)), {}),
    }
    image, options = images[name]
    image.save(tmp_path / name, **options)
    seen = coco_score._read(tmp_path / name, 0, lambda image, _: np.asarray(image))
    # clean-fid: `np.array(Image.open(path).convert("RGB"))`
    with Image.open(tmp_path / name) as opened:
        assert np.array_equal(seen, np.asarray(opened.convert("RGB")))
    assert not np.array_equal(seen, np.asarray(read_rgb(tmp_path / name)))


@pytest.mark.parametrize("name", ["method", "levels", "captions", "size", "dtype"])
def test_rows_of_one_table_differ_in_model_and_method_only(tmp_path, name):
    """Catches figures of other settings beside each other, and a method that none stands beside."""
    for folder, value in (("one", "a"), ("two", "b")):
        write_row(tmp_path / folder, [noise(64, 64, seed)[1] for seed in range(2)], 64)
        manifest = json.loads((tmp_path / folder / "manifest.json").read_text())
        manifest["config"][name] = value
        (tmp_path / folder / "manifest.json").write_text(json.dumps(manifest))
    folders = tmp_path / "one", tmp_path / "two"
    if name in coco_score.FREE:
        assert [x.config[name] for x in coco_score.read_folders(folders)] == ["a", "b"]
        return
    with pytest.raises(ValueError, match=f"cannot go into one table; they differ in {name}."):
        coco_score.read_folders(folders)


def test_inception_is_the_port_past_its_resizing(monkeypatch):
    """With random weights, as its own would be downloaded; at 299 the port resizes nothing.
    Catches a layer that is left out or out of order, and pixels of another scale."""
    port = pytest.importorskip("torch_fidelity.feature_extractor_inceptionv3")
    for owner in (torch.hub, port):
        monkeypatch.setattr(owner, "load_state_dict_from_url", lambda *_, **__: {})
    monkeypatch.setattr(port.FeatureExtractorInceptionV3, "load_state_dict", lambda *_: None)
    torch.manual_seed(0)
    whole = port.FeatureExtractorInceptionV3("inception-v3-compat", ["2048"])
    torch.manual_seed(0)
    past = Inception()
    images = torch.randint(0, 256, (2, 3, 299, 299), dtype=torch.uint8)
    (expected,) = whole(images)
    assert expected.shape == (2, 2048)
    torch.testing.assert_close(past(images.float()), expected, rtol=1e-3, atol=0)


def test_features_of_other_networks_and_preparations_are_not_these(scorer_folder, tmp_path):
    """Catches features of real images by a scorer that was trained again in its place, and those
    of another preparation, that the cache takes for these."""
    device, cache, real = torch.device("cpu"), tmp_path / "cache", tmp_path / "real"
    real.mkdir()
    for index in range(2):
        noise(64, 64, index)[1].save(real / f"{index}.png")
    shutil.copytree(scorer_folder, tmp_path / "scorer")
    config = tmp_path / "scorer/config.json"
    load = partial(coco_score.load_networks, device=device, batch_size=2, threads=1)
    networks = [load(x) for x in (scorer_folder, tmp_path / "scorer")]
    assert networks[0].name == networks[1].name
    config.write_text(config.read_text() + "\n")
    networks[1] = load(tmp_path / "scorer")
    whole, files = coco_score.prepare_whole, coco_score.real_images(real)

    def features(network, prepare, kind):
        return coco_score.real_features(real, files, network, prepare, kind, cache)

    def upside_down(image, number):
        return whole(image.rotate(180), number)

    first = features(networks[0], whole, "whole")
    assert not torch.equal(features(networks[0], upside_down, "upside down"), first)
    mean = replace(networks[1], features=lambda x: x.mean((2, 3)))
    assert features(mean, whole, "whole").shape == (2, 3)
    assert torch.equal(features(networks[0], whole, "whole"), first)
    assert len(list(cache.iterdir())) == 3


def test_patch_fid_sees_detail_that_fid_does_not(tmp_path):
    """Images that differ in pixel noise only, which shrinking averages away. Catches the cache of
    one size in a table of another, and a row that is its own reference."""
    generator = np.random.default_rng(0)
    smooth = [
        Image.fromarray(generator.integers(60, 200, (4, 4, 3), np.uint8)).resize((640, 640))
        for _ in range(4)
    ]
    rough = [
        Image.fromarray(
            (np.asarray(image) + generator.integers(-40, 40, (640, 640, 3))).astype(np.uint8)
        )
        for image in smooth
    ]
    write_row(tmp_path / "smooth", smooth, 640)
    write_row(tmp_path / "rough", rough, 640)
    write_row(tmp_path / "small", [image.resize((320, 320)) for image in rough], 320)
    reference = tmp_path / "smooth/images"
    code, table, _ = score(tmp_path, "smooth", "rough", real=reference, patches=reference)
    assert code == 0
    assert "| CLIP score | patch FID |" in table
    own, other = rows_of(tmp_path)
    assert own["fid"] == pytest.approx(0, abs=1e-3)
    assert own["patch_fid"] is None
    assert table.splitlines()[2].endswith(" | - |")
    assert other["patch_fid"] > 5 * other["fid"] > 0
    found = []
    for cache in ("cache", "fresh"):
        score(tmp_path, "small", real=reference, patches=reference, cache=tmp_path / cache)
        found += rows_of(tmp_path)
    assert found[0] == found[1]
    code, _, errors = score(tmp_path, "smooth", real=reference, patches=tmp_path / "small/images")
    assert code == 2
    assert "0.png cannot be used: patches need images of at least 640, but it has" in errors
