"""`python -m eval vision features`: a whole vision transformer by each method."""

import json

import numpy as np
import pytest
import torch
from eval_helpers import run_command
from safetensors.torch import save_file
from tiny_vision import choosing
from transformers import Dinov2Config, Dinov2Model

from avq_diffusers import AVQConfig, apply_avq, remove_avq, select_layers
from eval.keys import photographs
from eval.keys.vit import DECODER_FILE, SaliencyDecoder, load_decoder
from eval.vision.features import measure_features


@pytest.fixture(autouse=True)
def noise_for_photographs(monkeypatch):
    """The photographs' packages are no part of the tests."""

    def noise(name):
        return np.random.default_rng([*name.encode()]).integers(0, 256, (60, 80, 3), np.uint8)

    monkeypatch.setattr(photographs, "_read", noise)


EVERY_KEY = "M8C2T0"
METHODS = ["exact", EVERY_KEY, "M8P0C2", "M8P8C2", "M8/stored", "value-projection"]


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


def test_a_model_is_measured_to_json(folder, tmp_path):
    """Catches a method that does not run, errors against something else than exact attention, and
    codebooks of other layers."""
    arguments = ("--sizes", 224, "--images", 2, "--methods", ",".join(METHODS))
    run_command("vision", "features", "--model", folder, *arguments, "--output", tmp_path)
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


def test_errors_are_means_and_the_model_stays_exact():
    """Catches a method that acts on the next, and errors of another photograph."""
    model, decoder, name = tiny_vit(), tiny_decoder(), "M4P2C2"
    names = (name, "M8P8C2", "M4P4C2", "exact")
    row, *_, exact_row = list(measure_features(model, 112, 2, names, decoder))
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
