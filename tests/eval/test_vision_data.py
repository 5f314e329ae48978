"""`python -m eval vision data`: data sets in the layouts of ADE20K and ImageNet."""

import numpy as np
import pytest
from eval_helpers import failed_command, run_command
from PIL import Image

from distill.scenes import sample_scene
from distill.scenes.shapes import SHAPES
from eval.vision import data_sets
from eval.vision.data_sets import LABELS, compose_over_photograph, majority_shape, write_data_set


@pytest.fixture(autouse=True)
def noise_for_photographs(monkeypatch):
    """The photographs' packages are no part of the tests."""

    def noise(name):
        pixels = np.random.default_rng(len(name)).integers(0, 256, (90, 120, 3), np.uint8)
        return Image.fromarray(pixels)

    monkeypatch.setattr(data_sets, "_pixels", noise)


def files(folder):
    return {path.relative_to(folder): path.read_bytes() for path in folder.rglob("*.*")}


@pytest.mark.parametrize("task", data_sets.TASKS)
def test_sets_are_repeatable_and_splits_differ(tmp_path, task):
    sizes = {"training": 3, "validation": 2, "size": 64, "workers": 1}
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        write_data_set(task, tmp_path / name, seed=seed, **sizes)
    first = files(tmp_path / "a")
    assert first == files(tmp_path / "b")
    assert first.keys().isdisjoint(files(tmp_path / "c"))
    names = [path.name for path in first if path.suffix == ".jpg"]
    assert len(set(names)) == 5
    splits = {path.parts[1 if task == "segmentation" else 0] for path in first}
    assert splits == ({"training", "validation"} if task == "segmentation" else {"train", "val"})


def test_labels_are_where_the_objects_are():
    """Catches labels of other boxes, shapes or sides."""
    scene = sample_scene(5)
    image, labels = compose_over_photograph([scene], 256, 5, ("a", "bb"))
    other, _ = compose_over_photograph([scene], 256, 6, ("a", "bb"))
    assert image.shape == (256, 256, 3)
    assert (image != other).any()
    shapes = {1 + SHAPES.index(group.shape) for group in scene.groups}
    assert set(np.unique(labels)) == {0, len(LABELS)} | shapes
    for group, boxes in zip(scene.groups, scene.boxes, strict=True):
        for left, top, side in boxes:
            inside = labels[top : top + side, left : left + side]
            assert (inside == 1 + SHAPES.index(group.shape)).mean() > 0.2
            labels[top : top + side, left : left + side] = len(LABELS)
    assert (labels == len(LABELS)).all()


def test_the_class_is_the_shape_of_most_objects(tmp_path):
    scenes = [sample_scene(seed) for seed in range(200)]
    counts = [[group.count for group in scene.groups] for scene in scenes]
    assert {len(set(x)) for x in counts if len(x) == 2} == {1, 2}
    for scene, count in zip(scenes, counts, strict=True):
        if len(count) == 2 and count[0] == count[1]:
            assert majority_shape(scene) is None
        else:
            assert majority_shape(scene) == scene.groups[int(np.argmax(count))].shape


def test_the_command_does_not_overwrite(tmp_path, monkeypatch, capsys):
    options = ["--training", "2", "--validation", "1", "--output", tmp_path / "set"]
    command = ["vision", "data", "segmentation", *options, "--size", "64"]
    run_command(monkeypatch, *command)
    assert len(files(tmp_path / "set")) == 6
    assert "File exists" in failed_command(monkeypatch, capsys, *command)[1]
