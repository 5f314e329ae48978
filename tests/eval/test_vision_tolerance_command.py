"""`python -m eval vision tolerance`: whether a tolerance holds on other photographs."""

import json

import pytest
import torch
from eval_helpers import run_command
from tiny_vision import WIDE, choosing
from transformers import ViTConfig, ViTModel

from avq_diffusers import apply_avq, measure_error
from avq_diffusers.hosts import measurement
from eval.vision import tolerance

COARSE, FINE = "M4P0C0", "M8P8C4E16"
ANY_SIZE = {"interpolate_pos_encoding": True}


def noise(name, size):
    seed = torch.Generator().manual_seed(ord(name[0]))
    return torch.randn(1, 3, size, size, generator=seed)


def test_a_tolerance_on_other_photographs(tmp_path, monkeypatch, capsys):
    """Catches errors of the photographs that were probed, features of a model without AVQ, and one
    tolerance for all rows."""
    monkeypatch.setattr(measurement, "LADDER", (COARSE, FINE))
    monkeypatch.setattr(tolerance, "photograph", noise)
    monkeypatch.setattr(tolerance, "PHOTOGRAPHS", ("a", "b", "c", "d"))
    model = choosing(lambda: ViTModel(ViTConfig(**WIDE)))
    model.save_pretrained(tmp_path / "tiny")
    arguments = ["--model", tmp_path / "tiny", "--size", 80, "--probed", 2, "--images", 2]
    arguments += ["--tolerances", "0.0001,9", "--output", tmp_path]
    run_command(monkeypatch, "vision", "tolerance", *arguments)
    exact, coarse = json.loads((tmp_path / "vision_tolerance_tiny_80_cpu.json").read_text())["rows"]
    assert (exact["avq_layers"], exact["columns"], exact["features_off"]) == (0, 100, 0)
    assert (coarse["avq_layers"], coarse["columns"], coarse["layers"]) == (2, 4, 2)
    held_out = [noise(name, 80) for name in "ab"]
    errors = [measure_error(model, pixels, **ANY_SIZE) for pixels in held_out]
    means = [
        sum(one.layers[i].errors[1000][COARSE] for one in errors) / len(errors) for i in range(2)
    ]
    assert coarse["largest_error"] == pytest.approx(max(means), rel=1e-4)
    assert (coarse["layers_over"], coarse["images_over"]) == (0, 0)
    probed = [noise(name, 80) for name in "cd"]
    off = []
    with torch.no_grad():
        expected = [model(pixels, **ANY_SIZE)[0] for pixels in held_out]
        apply_avq(model, tolerance=9, pixel_values=probed, **ANY_SIZE)
        for pixels, features in zip(held_out, expected, strict=True):
            found = model(pixels, **ANY_SIZE)[0]
            off.append(float((found - features).norm() / features.norm()))
    assert coarse["features_off"] == pytest.approx(sum(off) / 2, rel=1e-4)
    assert "| 9.0 | 2 of 2 | 4 of 100 |" in capsys.readouterr().out
