"""The procedural scenes: captions, layout, hidden bits, images, copy agreement, COCO folder.

Weights and data sets are tied to the scenes, so digests pin them; further tests say what a change
would have to keep.
"""

import json
from dataclasses import replace
from hashlib import sha256

import numpy as np
import pytest
from PIL import Image

from distill.scenes import (
    IMAGE_SIZE,
    Scene,
    copy_agreement,
    corrupt,
    render,
    sample_scene,
    write_coco,
)
from distill.scenes.scenes import Background, Group

MOTIF = tuple(tuple((i * i + 3 * j + i * j) % 5 % 2 for j in range(6)) for i in range(6))
TILE = tuple(tuple((i * i + 3 * j + i * j) % 7 % 2 for j in range(5)) for i in range(5))
HALF = tuple(tuple((i * i + 5 * j + i * j) % 7 % 2 for j in range(17)) for i in range(32))
PLAIN = Background("plain", "white")
TILED = Background("tiled", "navy", TILE)
MIRRORED = Background("mirrored", "pink", HALF)

GOLDEN_SCENES = "3615232ed31055f6"
GOLDEN_IMAGES = {64: "7664b0f23c6d5b72", 256: "09e7c61ec0038446", 320: "660ab70a91300379"}


@pytest.fixture(scope="module")
def scenes() -> list[Scene]:
    return [sample_scene(seed) for seed in range(300)]


def patterned(count: int, shape: str = "square") -> Group:
    return Group(count, "medium", "red", "patterned", shape, MOTIF)


def plain(count: int, size: str = "medium") -> Group:
    return Group(count, size, "blue", "plain", "circle")


def row(*groups: Group, background: Background = PLAIN) -> Scene:
    return Scene(groups, "in a row" if len(groups) == 1 else "above", background)


def crop(image: np.ndarray, box: tuple[int, int, int]) -> np.ndarray:
    left, top, side = box
    return image[top : top + side, left : left + side]


def digest(content: bytes) -> str:
    return sha256(content).hexdigest()[:16]


def test_published_seeds_keep_their_scenes(scenes):
    """Catches any other source of chance, another caption, and another place of an object."""
    content = repr([(scene, scene.caption, scene.boxes) for scene in scenes])
    assert digest(content.encode()) == GOLDEN_SCENES


@pytest.mark.parametrize("size", GOLDEN_IMAGES)
def test_published_scenes_keep_their_images(scenes, size):
    """Catches another pixel of an image, and of one whose copies are broken."""
    images = [render(scene, size) for scene in scenes[:60]]
    images += [corrupt(scene, seed, size) for seed, scene in enumerate(scenes[:20])]
    assert {(image.shape, image.dtype.name) for image in images} == {((size, size, 3), "uint8")}
    assert digest(b"".join(image.tobytes() for image in images)) == GOLDEN_IMAGES[size]


class TestScenes:
    @pytest.mark.parametrize("size", [0, -64, 100])
    def test_bad_size(self, size):
        with pytest.raises(ValueError, match=f"size must be .*got {size}"):
            render(row(plain(1), plain(1)), size)


class TestCopyAgreement:
    @pytest.mark.parametrize("size", [64, 256])
    def test_images_of_scenes_agree(self, scenes, size):
        for scene in scenes[:20]:
            agreement = copy_agreement(render(scene, size), scene)
            assert (agreement is not None) == scene.has_copies
            assert agreement is None or 0.9999 < agreement <= 1

    def test_images_whose_copies_are_broken_do_not(self, scenes):
        agreements = [
            copy_agreement(corrupt(scene, i, 64), scene) for i, scene in enumerate(scenes[:150])
        ]
        agreements = [agreement for agreement in agreements if agreement is not None]
        assert abs(np.mean(agreements)) < 0.04
        assert np.percentile(agreements, 99) < 0.6

    def test_every_pair_of_objects_counts(self):
        scene = row(patterned(3))
        image = render(scene)
        pixels = crop(image, scene.boxes[0][2])
        pixels[:] = np.random.default_rng(0).integers(0, 256, pixels.shape)
        assert copy_agreement(image, scene) == pytest.approx(1 / 3, abs=0.05)

    def test_outline_mean_colour_and_noise_do_not_count(self):
        """Flat objects of one shape agree in outline and colour, and in nothing that is hidden."""
        flat = render(row(replace(patterned(3, "star"), texture="plain", motif=None)))
        assert copy_agreement(flat, row(patterned(3, "star"))) == 0
        scene = row(patterned(2))
        image = render(scene)
        crop(image, scene.boxes[0][0])[:] //= 2
        assert copy_agreement(image, scene) > 0.999
        image = np.full((IMAGE_SIZE, IMAGE_SIZE, 3), 128, np.uint8)
        noise = np.random.default_rng(0).integers(0, 2, (72, 72, 3))
        for box in scene.boxes[0]:
            crop(image, box)[:] += noise.astype(np.uint8)
        assert copy_agreement(image, scene) < 0.1

    @pytest.mark.parametrize("background", [TILED, MIRRORED])
    def test_backgrounds_count_beside_the_objects(self, background):
        """Parts are averaged; pixels of objects are no background; a flat one does not agree."""
        scene = row(patterned(2), background=background)
        image, truth = corrupt(scene, 0), render(scene)
        for box in scene.boxes[0]:
            crop(image, box)[:] = crop(truth, box)
        assert copy_agreement(image, scene) == pytest.approx(0.5, abs=0.1)
        scene = Scene((plain(1, size="large"),), "at the top left", background)
        image = render(scene)
        crop(image, scene.boxes[0][0])[:] = np.random.default_rng(0).integers(0, 256, (96, 96, 3))
        assert copy_agreement(image, scene) > 0.999
        flat = render(row(plain(2)))
        assert copy_agreement(flat, row(plain(2), background=background)) == 0

    @pytest.mark.parametrize("axis", [0, 1])
    def test_tiles_repeat_along_both_axes(self, axis):
        """Shifting every other tile row or column by half a period breaks one of the axes."""
        scene = row(plain(2), background=TILED)
        image = np.moveaxis(render(scene), axis, 0)
        for start in (0, 120):
            image[start : start + 60] = np.roll(image[start : start + 60], 30, axis=1)
        assert copy_agreement(np.moveaxis(image, 0, axis), scene) < 0.75


class TestCoco:
    def test_format(self, tmp_path):
        write_coco(tmp_path, 5, first_seed=40, size=64)
        data = json.loads((tmp_path / "annotations" / "captions_scenes.json").read_text())
        files = sorted(path.name for path in (tmp_path / "images").iterdir())
        assert files == [f"{number:012d}.png" for number in range(1, 6)]
        assert [image["file_name"] for image in data["images"]] == files
        assert all(image["height"] == image["width"] == 64 for image in data["images"])
        assert len({annotation["id"] for annotation in data["annotations"]}) == 5
        captions = {entry["image_id"]: entry["caption"] for entry in data["annotations"]}
        for image in data["images"]:
            scene = sample_scene(40 + image["id"] - 1)
            assert image["seed"] == 40 + image["id"] - 1
            assert captions[image["id"]] == scene.caption
            with Image.open(tmp_path / "images" / image["file_name"]) as image:
                np.testing.assert_array_equal(np.asarray(image), render(scene, 64))

    def test_restart_finishes_and_other_data_is_refused(self, tmp_path):
        def contents():
            return {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}

        write_coco(tmp_path, 4, size=64)
        finished = contents()
        annotations, missing, truncated = sorted(finished)[:3]
        annotations.unlink()
        missing.unlink()
        truncated.write_bytes(finished[truncated][:60])
        write_coco(tmp_path, 4, size=64)
        assert contents() == finished
        for change in ({"first_seed": 1}, {"size": 128}, {"num_images": 2}):
            with pytest.raises(ValueError, match="folder must be empty or hold these scenes"):
                write_coco(tmp_path, **{"num_images": 4, "size": 64} | change)
        annotations.unlink()
        with pytest.raises(ValueError, match=r"folder must be empty .* has .*4\.png"):
            write_coco(tmp_path, 3, size=64)
        assert contents() == {x: content for x, content in finished.items() if x != annotations}

    def test_a_bad_size_writes_nothing(self, tmp_path):
        with pytest.raises(ValueError, match="size must be a multiple of 64, but got 250"):
            write_coco(tmp_path, 1, size=250)
        assert not list(tmp_path.rglob("*.*"))
