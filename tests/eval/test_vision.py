"""`python -m eval vision`: data sets, features of whole models, rows of trained ones."""

import json

import numpy as np
import pytest
import torch
from eval_helpers import failed_command, run_command
from PIL import Image
from safetensors.torch import save_file
from tiny_vision import choosing
from transformers import Dinov2Config, Dinov2Model

from avq_diffusers import AVQConfig, apply_avq, remove_avq, select_layers
from distill.scenes import sample_scene
from distill.scenes.shapes import SHAPES
from eval.keys import photographs
from eval.keys.vit import DECODER_FILE, SaliencyDecoder, load_decoder
from eval.vision import data_sets
from eval.vision.data_sets import LABELS, compose_over_photograph, majority_shape, write_data_set
from eval.vision.features import features_panels, measure_features
from eval.vision.fine_tuned import differences, fine_tuned_table, read_rows


@pytest.fixture(autouse=True)
def noise_for_photographs(monkeypatch):
    """The photographs' packages are no part of the tests."""

    def noise(name):
        return np.random.default_rng([*name.encode()]).integers(0, 256, (60, 80, 3), np.uint8)

    monkeypatch.setattr(data_sets, "_pixels", lambda name: Image.fromarray(noise(name)))
    monkeypatch.setattr(photographs, "_read", noise)


# Data sets in the layouts of ADE20K and ImageNet


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


# A whole vision transformer by each method

EVERY_KEY = "M8C2T0"
METHODS = ["exact", EVERY_KEY, "M8P0C2/own", "M8P8C2/own", "M8", "value-projection"]


def tiny_vit():
    config = Dinov2Config(
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        mlp_ratio=1,
        image_size=56,
        patch_size=14,
        layerscale_value=1.0,
    )
    return choosing(lambda: Dinov2Model(config))


def tiny_decoder():
    torch.manual_seed(1)
    decoder = SaliencyDecoder(32, 6, 4).eval()
    decoder.final_conv.weight.data.mul_(20)
    return decoder


@pytest.fixture
def folder(tmp_path):
    tiny_vit().save_pretrained(tmp_path / "model")
    save_file(tiny_decoder().state_dict(), tmp_path / "model" / DECODER_FILE)
    return tmp_path / "model"


def test_a_model_is_measured_to_json_and_plot(folder, tmp_path, monkeypatch):
    """Catches a method that does not run, errors against something else than exact attention, and
    codebooks of other layers."""
    arguments = ("--sizes", 224, "--images", 2, "--methods", ",".join(METHODS))
    run_command(
        monkeypatch, "vision", "features", "--model", folder, *arguments, "--output", tmp_path
    )
    path = tmp_path / "vision_features_model_cpu.json"
    rows = {row["method"]: row for row in json.loads(path.read_text())["rows"]}
    assert list(rows) == METHODS
    assert rows["exact"]["features_off"] == rows["exact"]["map_off"] == 0
    assert rows[EVERY_KEY]["features_off"] < 1e-5
    assert rows[EVERY_KEY]["map_off"] < 1e-5
    assert rows[EVERY_KEY]["map_r"] > 0.9999
    _, _, coarse, fine, stored, control = rows.values()
    assert 0.001 < fine["features_off"] < coarse["features_off"] < control["features_off"]
    assert fine["features_off"] < stored["features_off"]
    assert fine["map_r"] > control["map_r"]
    assert {row["tokens"] for row in rows.values()} == {257}
    columns = [row["columns"] for row in rows.values()]
    assert [*columns[:3], *columns[4:]] == [257, 256, 8, 8, 0]
    assert 20 < columns[3] <= 24  # some codewords have no key
    assert fine["runs"] == ["AVQ (torch backend)"]
    assert path.with_suffix(".png").stat().st_size > 10_000


def test_errors_are_means_and_the_model_stays_exact():
    """Catches a method that acts on the next, and errors of another photograph."""
    model, decoder, name = tiny_vit(), tiny_decoder(), "M4P2C2/own"
    names = (name, "M8P8C2/own", "M4P4C2/own", "exact")
    row, *_, exact_row = rows = list(measure_features(model, 112, 2, names, decoder))
    assert exact_row["features_off"] == 0
    assert all(layer.avq_state is None for layer in select_layers(model))
    off, maps_off = [], []
    with torch.no_grad():
        for pixels in (photographs.photograph(one, 112) for one in photographs.PHOTOGRAPHS[:2]):
            exact = model(pixels)[0]
            apply_avq(model, AVQConfig.parse("M4P2C2"), route="always")
            found = model(pixels)[0]
            remove_avq(model)
            off.append(float((found - exact).norm() / exact.norm()))
            maps_off.append(float((decoder(found) - decoder(exact)).abs().mean()))
    assert row["features_off"] == pytest.approx(sum(off) / 2, rel=1e-4)
    assert row["map_off"] == pytest.approx(sum(maps_off) / 2, rel=1e-4)
    ((columns, speedups, elastic, maps),) = features_panels([x | {"speedup": 3.0} for x in rows])
    assert [len(panel.lines) for panel in (columns, speedups, elastic, maps)] == [1, 1, 1, 1]
    assert elastic.lines[0].x == [2, 4]


def test_the_decoder_sees_patches_in_their_places(folder):
    """Catches CLS among the patches, and rows for columns."""
    decoder = load_decoder(folder)
    tokens = torch.randn(1, 17, 32)
    moved = tokens.clone()
    moved[0, 1 + 3] += 9  # the patch in the first row, last column
    with torch.no_grad():
        change = (decoder(moved) - decoder(tokens))[0].abs()
    assert change.shape == (16, 16)
    assert change[:4, 12:].min() > 0
    assert change[8:].max() == change[:, :8].max() == 0  # beyond the reach of the kernels
    assert load_decoder(folder.parent) is None


# Rows of `distill.vision`

TEACHER = {"name": "teacher", "attention": "exact", "step": 9, "score": 80.0}


def row(name, seed, score, *, attention=None, untrained=None):
    return {
        "name": name,
        "seed": seed,
        "attention": attention or name,
        "step": 4,
        "metric": "miou",
        "score": score,
        "untrained": untrained,
        "ms": untrained and 0.25,
    }


ROWS = [
    TEACHER,
    row("M4P2C2", 0, 70.0, untrained=10.0),
    row("flat@M4P2C2", 1, 68.0, attention="M9", untrained=5.0),
    row("flat@M4P2C2", 0, 69.0, attention="M9"),
    row("M4P2C2", 1, 72.0),
    row("swin", 0, 1.0),
]


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "run" / "rows.jsonl"
    path.parent.mkdir()
    path.write_text("".join(json.dumps(line) + "\n" for line in ROWS) + '{"name": "cut')
    return path


def test_seeds_are_joined_and_pairs_are_of_one_seed(path):
    """Catches differences between means of other seeds, and an error of the wrong n."""
    result = read_rows(path)
    assert fine_tuned_table(result).splitlines()[2:] == [
        "| M4P2C2 | 0.25 | 10.0 | 71.00 ± 1.00 | 2 |",
        "| M9 (time of M4P2C2) | 0.25 | 5.0 | 68.50 ± 0.50 | 2 |",
        "| swin | - | - | 1.00 | 1 |",
    ]
    (pair,) = differences(result)
    assert (pair["avq"], pair["flat"]) == ("M4P2C2", "M9")
    assert pair["difference"] == pytest.approx(2.5)
    assert pair["error"] == pytest.approx(1.5)


def test_command_and_its_errors(path, monkeypatch, capsys, tmp_path):
    run_command(monkeypatch, "vision", "table", path, "--output", tmp_path)
    assert "M4P2C2 minus M9: 2.50 ± 1.50" in capsys.readouterr().out
    assert (tmp_path / "vision_run.json").is_file()
    for content, message in (
        (json.dumps(TEACHER) + "\n", "has no rows of attentions and their teacher"),
        ('{"step": 1}\n', "is not a complete result (KeyError"),
    ):
        path.write_text(content)
        assert message in failed_command(monkeypatch, capsys, "vision", "table", path)[1]
