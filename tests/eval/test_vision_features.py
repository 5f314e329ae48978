"""`python -m eval vision features`: a whole vision transformer by each method."""

import json

import pytest
import torch
from eval_helpers import run_command
from safetensors.torch import save_file
from tiny_vision import choosing
from transformers import Dinov2Config, Dinov2Model

from avq_diffusers import select_layers
from eval.__main__ import main
from eval.keys.vit import DECODER_FILE, SaliencyDecoder, load_decoder
from eval.vision import features
from eval.vision.features import feature_method, features_panels, measure_features

EVERY_KEY = "M8P8C2E256/own"  # of 16 x 16 patches
METHODS = ["exact", EVERY_KEY, "M8P0C2/own", "M8P8C2/own", "M8", "value-projection"]


@pytest.fixture(autouse=True)
def noise_for_photographs(monkeypatch):
    """The photographs' packages are no part of the tests."""

    def noise(name, size):
        seed = torch.Generator().manual_seed(ord(name[0]))
        return torch.randn(1, 3, size, size, generator=seed)

    monkeypatch.setattr(features, "photograph", noise)
    monkeypatch.setattr(features, "PHOTOGRAPHS", ("a", "b", "c"))


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
    assert [row["columns"] for row in rows.values()] == [257, 256, 8, 24, 8, 0]
    assert fine["runs"] == ["AVQ (torch backend)"]
    assert path.with_suffix(".png").stat().st_size > 10_000
    ((_, elastic, _),) = features_panels(list(rows.values()))
    (line,) = elastic.lines
    assert line.x == (0, 8)


def test_copies_leave_the_model_exact_and_errors_are_means(monkeypatch):
    """Catches methods that act on each other, copies that hold weights of their own, and the time
    of exact attention in the place of the method's."""
    model, decoder, name = tiny_vit(), tiny_decoder(), "M4P2C2/own"
    copied = features.with_method(model, feature_method(name), {})
    assert all(layer.avq_state is None for layer in select_layers(model))
    assert all(layer.avq_state is not None for layer in select_layers(copied))
    pairs = zip(model.parameters(), copied.parameters(), strict=True)
    assert all(own is shared for own, shared in pairs)
    (row,) = measure_features(model, 112, 2, [name], decoder)
    off, maps_off = [], []
    with torch.no_grad():
        for pixels in (features.photograph(one, 112) for one in "ab"):
            found, exact = (one(pixels)[0] for one in (copied, model))
            off.append(float((found - exact).norm() / exact.norm()))
            maps_off.append(float((decoder(found) - decoder(exact)).abs().mean()))
    assert row["features_off"] == pytest.approx(sum(off) / 2, rel=1e-4)
    assert row["map_off"] == pytest.approx(sum(maps_off) / 2, rel=1e-4)
    seen = []

    def timings(runs, num_sets, device, effort):
        seen.extend(run(0) for run in runs)
        return [{"ms": 1.0}, {"ms": 3.0}]

    monkeypatch.setattr(features, "time_in_turns", timings)
    assert features.times(copied, model, pixels) == {"ms": 1.0, "speedup": 3.0}
    assert torch.equal(seen[0], found)
    assert torch.equal(seen[1], exact)


def test_panels_show_schemes_and_elastic_curves():
    names = ("M4P2C2/own", "M4P4C2/own", "M8/own", "exact")
    timed = {"ms": 1.0, "speedup": 3.0}
    rows = [row | timed for row in measure_features(tiny_vit(), 112, 1, names, None)]
    ((columns, speedups, elastic),) = features_panels(rows)
    assert [len(panel.lines) for panel in (columns, speedups, elastic)] == [2, 2, 1]
    assert elastic.lines[0].x == (2, 4)


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


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "there is no runs/vit; --download fetches it."),
        (("--methods", "tome"), "methods of features are exact, value-projection and"),
        (("--methods", "M8/fastest"), "methods of features are exact, value-projection and"),
        (("--sizes", "14"), "--sizes must be at least 64, but got 14."),
        (("--model", "none/here"), "--model none/here is neither a pipeline of diffusers nor a"),
    ],
)
def test_a_mistake_is_one_sentence(arguments, message, monkeypatch, capsys, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["eval", "vision", "features", *arguments])
    with pytest.raises(SystemExit):
        main()
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"eval: {message}")
