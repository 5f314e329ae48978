"""`python -m eval ablate`: real short runs on a tiny model."""

import json
from pathlib import Path
from statistics import mean

import pytest
import torch
from tiny_training import RUN_CONFIG, TINY_RUN
from typer.testing import CliRunner

from avq_diffusers import AVQCodebooks, apply_avq, remove_avq
from distill.config import DistillConfig
from distill.config_file import load_config
from distill.scenes import TEST_SEEDS, sample_scene
from eval.__main__ import app
from eval.methods.running import load_pipeline
from eval.quality import ablation
from eval.quality.ablation import ablation_table, train_variants

SHARED = [f"--set={key}={value}" for key, value in TINY_RUN.items()]


@torch.no_grad()
def error_by_hand(model, folder):
    """The mean error of two prompts' predicted noise in the only step."""
    pipe = load_pipeline(model, torch.device("cpu"))
    errors = []
    for seed, scene in enumerate(map(sample_scene, TEST_SEEDS[:2])):
        calls = []
        hook = pipe.unet.register_forward_pre_hook(
            lambda _, args, kwargs, calls=calls: calls.append((args, kwargs)), with_kwargs=True
        )
        noise = torch.Generator().manual_seed(seed)
        pipe(scene.caption, num_inference_steps=1, guidance_scale=3.0, generator=noise)
        hook.remove()
        ((args, kwargs),) = calls
        exact = pipe.unet(*args, **kwargs)[0]
        apply_avq(pipe, AVQCodebooks.from_pretrained(folder), route="always")
        errors.append(float((pipe.unet(*args, **kwargs)[0] - exact).norm() / exact.norm()))
        remove_avq(pipe)
    return mean(errors)


@pytest.mark.long
def test_ablate(model, tmp_path):
    """Catches variants that do not reach the run, and another teacher than that of the training."""
    arguments = ["--config", RUN_CONFIG, "--runs", tmp_path / "runs"]
    arguments += ["--output", tmp_path, "--prompts", 2, "--steps", 1]
    arguments += ["--variants", "base,commitment 1.0", "--parallel", "2"]
    arguments += [f"--set=base_model={model}", *SHARED, "--set=steps=2"]
    result = CliRunner().invoke(app, ["ablate", *map(str, arguments)])
    assert result.exit_code == 0, result.output

    document = json.loads((tmp_path / "ablation_mini_m64p16c8.json").read_text())
    assert document["model"] == Path(model).name
    rows = document["rows"]
    assert [(row["variant"], row["seed"], row["config"]) for row in rows] == [
        ("base", 0, "M4P2C2/stored"),
        ("commitment 1.0", 0, "M4P2C2/stored"),
    ]
    assert rows[0]["output_error"] != rows[1]["output_error"] > 0
    for row, name in zip(rows, ("base", "commitment-1.0"), strict=True):
        folder = tmp_path / "runs" / f"mini_m64p16c8-{name}-seed0" / "codebooks"
        layers = json.loads((folder / "config.json").read_text())["training"]["layers"].values()
        for figure in ("quantization_error", "active_ratio", "capture"):
            assert row[figure] == mean(layer[figure] for layer in layers)
        assert row["output_error"] == pytest.approx(error_by_hand(model, folder), rel=1e-4)
    states = [
        json.loads(path.read_text())["config"]["objective"]["commitment_weight"]
        for path in sorted(tmp_path.glob("runs/*-seed0/checkpoints/*/run.json"))
    ]
    assert set(states) == {TINY_RUN["objective.commitment_weight"], 1.0}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--device", "tpu"], "--device tpu cannot be used"),
        (["--set=base_model=/nowhere"], "/nowhere"),
        (["--output", __file__], f"--output must be a folder, but {__file__} is a file."),
    ],
)
def test_mistakes_are_found_before_the_training(options, message, monkeypatch):
    monkeypatch.setattr(ablation, "train_variants", lambda *x, **y: pytest.fail("trained"))
    result = CliRunner().invoke(app, ["ablate", *options])
    assert message in str(result.exception)


def test_variants_are_trained_with_their_settings_and_seeds(tmp_path, monkeypatch):
    """Catches seeds that train one run under several names, overrides that undo a variant, and a
    folder that does not say the config."""
    started = {}
    monkeypatch.setattr(
        ablation, "_distill", lambda config, run, settings: started.update({run.name: settings})
    )
    overrides = ["steps=2", "objective.diveq=false"]
    train_variants(
        RUN_CONFIG, tmp_path, ["base", "DiVeQ"], seeds=[0, 3], parallel=2, overrides=overrides
    )
    assert started == {
        f"{RUN_CONFIG.stem}-{name}-seed{seed}": [*overrides, f"seed={seed}", *changed]
        for name, changed in (("base", []), ("diveq", ["objective.diveq=true"]))
        for seed in (0, 3)
    }
    decays = {}
    for name, settings in ablation.VARIANTS.items():
        changed = [f"{key}={value}" for key, value in settings.items()]
        codebooks = load_config(RUN_CONFIG, DistillConfig, changed).codebooks
        decays[name] = codebooks.decay_start, codebooks.decay_end
    assert decays["EMA decay 0.9"] == (0.9, 0.9)
    assert decays["base"] == decays["DiVeQ"] == (0.9, 0.99)


@pytest.mark.long
def test_failed_runs_are_refused(tmp_path):
    with pytest.raises(ValueError, match=r"base-seed0 failed: .* the key nothing is unknown"):
        train_variants(
            RUN_CONFIG, tmp_path, ["base"], seeds=[0], parallel=1, overrides=["nothing=1"]
        )


def test_ablation_table_by_hand():
    """Catches a mean over variants, a wrong error, one of a single seed, and another base."""
    shared = {**dict.fromkeys(ablation.METRICS, 0.5), "config": "M256", "capture": None}
    cases = [("EMA decay 0.9", 0, 0.1), ("EMA decay 0.9", 12, 0.3), ("base", 0, 0.7)]
    rows = [
        {**shared, "variant": variant, "seed": seed, "output_error": error}
        for variant, seed, error in (*cases, ("base", 12, 0.1))
    ]
    table = ablation_table(rows).splitlines()[2:]
    # 1 / 7 and 3
    assert table[0].startswith("| EMA decay 0.9 | M256 | 2 | 1.57 ± 1 | 0.2 ± 0.1 | 0.5 ± 0 |")
    assert table[0].endswith("| - |")
    assert table[1].startswith("| base | M256 | 2 | 1 ± 0 | 0.4 ± 0.3 | 0.5 ± 0 |")
    single = ablation_table(rows[:3]).splitlines()[2:]
    assert single[0].startswith("| EMA decay 0.9 | M256 | 2 | 0.143 | 0.2 ± 0.1 |")
    assert single[1].startswith("| base | M256 | 1 | 1 | 0.7 | 0.5 |")
    assert ablation_table(rows[:1]).splitlines()[2].startswith("| EMA decay 0.9 | M256 | 1 | - |")


def test_a_run_is_measured_by_the_base_at_its_own_configuration():
    """One run is judged at several numbers of refined parents: catches the last of them as the
    measure for all, and a measure where there is none."""
    figures = {**dict.fromkeys(ablation.METRICS, 0.5), "seed": 0}
    cases = [("base", "M4P4C2", 0.1), ("base", "M4P1C2", 0.2), ("DiVeQ", "M4P4C2", 0.3)]
    cases += [("DiVeQ", "M4P1C2", 0.4), ("DiVeQ", "M4P0C2", 0.4)]
    rows = [
        {**figures, "variant": variant, "config": config, "output_error": error}
        for variant, config, error in cases
    ]
    lines = [line.split(" | ") for line in ablation_table(rows).splitlines()[2:]]
    assert [line[3] for line in lines] == ["1", "1", "3", "2", "-"]
