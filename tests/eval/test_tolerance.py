"""`eval tolerance`, of pipelines and vision models: plans on examples that were not probed."""

import json
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from eval_helpers import run_command
from tiny import two_level_pipe
from tiny_vision import WIDE
from transformers import ViTConfig, ViTModel

from avq_diffusers import AVQConfig, apply_avq, measure_error, remove_avq
from avq_diffusers.hosts import output_errors, select_layers
from avq_diffusers.hosts.measuring import exact_runs
from avq_diffusers.hosts.measuring.allocation import Choice
from eval.quality import tolerance
from eval.quality.repeats import recorded_calls, repeated_errors

SIZES = {"num_parents": 4, "num_children": 2}
COARSE, FINE = "M4C2T10", "M4C2T0.1"
ANY_SIZE = {"interpolate_pos_encoding": True}


@pytest.fixture(autouse=True)
def short_probes(monkeypatch):
    def measured(pipe, examples, config=None, **arguments):
        config = replace(config or AVQConfig(levels=(0,)), **SIZES)
        return measure_error(pipe, examples, config, **arguments)

    monkeypatch.setattr(tolerance, "measure_error", measured)
    monkeypatch.setattr(exact_runs, "MOST_REPEATED", 24)
    monkeypatch.setattr(tolerance, "UNIFORM", (10, 0.1))
    monkeypatch.setattr(tolerance, "PROBED_STEPS", 2)


def rows_of(path):
    return {row["plan"]: row for row in json.loads(path.read_text())["rows"]}


def test_images_of_prompts_that_were_not_probed(tmp_path):
    """Catches images of another plan than the one whose time and error are told, and a result that
    replaces that of another model."""
    two_level_pipe().save_pretrained(tmp_path / "model")
    arguments = ["--model", tmp_path / "model", "--probed", 1, "--prompts", 2, "--steps", "1,2"]
    arguments += ["--tolerances", "0.00001,0.5", "--methods", f"{COARSE},tome@.5"]
    arguments += ["--output", tmp_path]
    run_command("tolerance", *arguments)
    rows = rows_of(tmp_path / "tolerance_model_levels01.json")
    asked, exact = rows["tolerance 1e-05"], rows["exact"]
    assert (asked["psnr"], asked["times_as_fast"]) == (exact["psnr"], 1)
    assert asked["errors"] == exact["errors"] == [0.0, 0.0]
    coarse, fine = rows[COARSE], rows[FINE]
    assert 4 <= coarse["columns"] < fine["columns"]
    assert coarse["errors"][0] != pytest.approx(coarse["errors"][1], rel=0.01)
    for name in ("errors", "psnr", "columns"):
        assert coarse[name] == rows[f"{COARSE}"][name]
    assert max(rows["tolerance 0.5"]["errors"]) < 0.5
    for steps in ("1", "2"):
        decibels = [rows[name]["psnr"][steps]["psnr_median"] for name in ("tome@.5", COARSE, FINE)]
        assert decibels == sorted(decibels)
    best = rows[f"at the time of {FINE}"]
    assert best["time"] <= rows[FINE]["time"]
    assert best["predicted"] <= rows[FINE]["predicted"]


@pytest.mark.gpu
def test_every_step_is_timed_on_a_gpu(tmp_path):
    two_level_pipe().save_pretrained(tmp_path / "model")
    arguments = ["--model", tmp_path / "model", "--probed", 1, "--prompts", 2, "--steps", "1"]
    arguments += ["--tolerances", "0.5", "--methods", "M4,tome@.5", "--output", tmp_path]
    run_command("tolerance", *arguments, "--device", "cuda")
    rows = rows_of(tmp_path / "tolerance_model_levels01.json")
    assert all(row["ms"] > 0 for row in rows.values())


def test_errors_of_batches_are_those_of_each_prompt_alone():
    """Catches errors of another prompt, of one half of the guidance alone, or of all parts."""
    pipe, config = two_level_pipe(), AVQConfig.parse(COARSE, levels=(0,))
    prompts = ["a cat", "a dog", "a house"]
    arguments = {"num_inference_steps": 2, "height": 64, "width": 64}
    choice = Choice(config.spec, 0.0, 0.0)
    plan = {layer.name: {1000: choice} for layer in select_layers(pipe.unet, (0,))}
    (found,) = output_errors(pipe, prompts, [plan], config, seed=5, parts=2, **arguments)
    expected = [max(of_parts.values()) for of_parts in found]
    calls = recorded_calls(pipe, prompts, 5, 2, (1000, 500), **arguments)
    apply_avq(pipe, config, route="always")
    assert repeated_errors(pipe, calls) == pytest.approx(expected, rel=1e-3)
    assert min(abs(a / b - 1) for a, b in pairwise(expected)) > 0.01


def noise(name, size):
    seed = torch.Generator().manual_seed(ord(name[0]))
    return torch.randn(1, 3, size, size, generator=seed)


@torch.no_grad()
def test_features_of_photographs_that_were_not_probed(tmp_path, monkeypatch):
    """Catches errors of the photographs that were probed, and features of a model without AVQ."""
    monkeypatch.setattr(tolerance, "photograph", noise)
    monkeypatch.setattr(tolerance, "PHOTOGRAPHS", ("a", "b", "c", "d"))
    torch.manual_seed(0)
    model = ViTModel(ViTConfig(**WIDE, initializer_range=0.1)).eval()
    model.save_pretrained(tmp_path / "tiny")
    arguments = ["--model", tmp_path / "tiny", "--size", 80, "--probed", 2, "--images", 2]
    arguments += ["--tolerances", "0.5", "--output", tmp_path]
    printed = run_command("vision", "tolerance", *arguments)
    rows = rows_of(tmp_path / "vision_tolerance_tiny_80_cpu.json")
    expected = []
    for name in "ab":
        pixels = noise(name, 80)
        exact = model(pixels, **ANY_SIZE)[0]
        apply_avq(model, AVQConfig.parse(COARSE, levels=(0,)), route="always")
        found = model(pixels, **ANY_SIZE)[0]
        expected.append(float((found - exact).norm() / exact.norm()))
        remove_avq(model)
    assert rows[COARSE]["errors"] == pytest.approx(expected, rel=1e-3)
    assert 0 < rows[COARSE]["columns"] <= rows[FINE]["columns"]
    assert "| tolerance 0.5 |" in printed
