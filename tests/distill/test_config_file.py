"""Configuration files: bases and defaults, strict keys, declared types, ranges, published rows."""

import os
import re
from functools import partial

import pytest
import yaml
from tiny_training import CONFIGS, RUN_CONFIG

from avq_diffusers import AVQConfig, ErrorProfile
from avq_diffusers.hosts.core.layers import LayerSpec
from avq_diffusers.hosts.measuring.profile import LayerEffects, Measured, Part
from distill.config import DistillConfig
from distill.config_file import load_config, save_config

distillation = partial(load_config, RUN_CONFIG, DistillConfig)
OTHERS = ("mini_cpu", "mini_vae", "mini_sd", "mini_sd3", "mini_scorer")
ROWS = sorted({path.stem for path in CONFIGS.glob("*.yaml")} - {*OTHERS})


@pytest.mark.parametrize("row", ROWS)
def test_a_row_is_what_its_name_says_on_the_data_of_its_family(row):
    """Catches other sizes, levels or codewords, and rows that cannot be compared."""
    config = load_config(CONFIGS / f"{row}.yaml", DistillConfig, [])
    family = row.partition("_")[0]
    first = load_config(CONFIGS / f"{family}_m64p16c8.yaml", DistillConfig, [])
    for shared in ("base_model", "image_size", "seed", "data", "samples", "batch_size"):
        assert getattr(config, shared) == getattr(first, shared)
    own = "own_" if config.avq.codewords == "means" else ""
    level = "_level1" if config.avq.levels == (0, 1) else ""
    sizes = str(config.avq).removesuffix("/stored").lower()
    name = "linfusion" if config.attention == "linfusion" else f"{own}{sizes}{level}"
    assert row == f"{family}_{name}".replace("p0c0", "")


def test_the_recipe_of_sd15_is_that_of_the_paper():
    config = load_config(CONFIGS / "sd15_m64p16c8.yaml", DistillConfig, [])
    assert (str(config.avq), config.attention) == ("M64P16C8/stored", "avq")
    assert config.avq.levels == (0,)
    assert (config.steps, config.batch_size, config.learning_rate) == (50_000, 96, 1e-4)
    objective = config.objective
    weights = (objective.noise_weight, objective.output_weight, objective.feature_weight)
    assert (*weights, objective.commitment_weight) == (1, 0.5, 0.5, 0.25)
    assert (config.accumulation(8), config.accumulation(1)) == (1, 8)


def test_a_profile_decides_the_sizes_of_layers(tmp_path):
    """Catches sizes of the file that stay beside those of the profile."""
    layers = [
        LayerEffects(
            LayerSpec(name, 1, 2, 8),
            *(64, 2.0),
            {1000: Measured([effect / 2, effect], [200.0, 100.0], [1.0, 0.5])},
        )
        for name, effect in (("up", 0.01), ("down", 0.5))
    ]
    measured = AVQConfig(levels=(0, 1), query_tile=64)
    profile = ErrorProfile(measured, tuple(layers), {1000: Part(1.0)}, (1e-4, 5e-4))
    profile.save(tmp_path / "profile.json")
    chosen = [f"avq.profile={tmp_path / 'profile.json'}", "avq.tolerance=0.02"]
    own = ["codebooks=null", "objective.commitment_weight=0"]
    config = distillation([*own, *chosen])
    assert (config.avq.levels, config.avq.query_tile, config.avq.exact) == ((0, 1), 64, ("down",))
    assert str(config.avq.for_layer("up", 1)) == "M64C8T4.6e-4"
    save_config(config, tmp_path)
    assert load_config(tmp_path / "config.yaml", DistillConfig, []) == config
    with pytest.raises(ValueError, match=r"avq\.profile needs avq\.tolerance, such as 0\.02"):
        distillation(chosen[:1])


def test_a_file_starts_from_its_base(tmp_path):
    """Catches sections that replace those of the base, and values that are merged like sections."""
    (tmp_path / "base.yaml").write_text(
        "base_model: mini-sd\nsteps: 4\ndata: {source: scenes, num_samples: 6}\n"
        "samples: {prompts: [a, b]}\n"
        "avq: {codewords: stored, num_parents: 32, overrides: {'1': {num_parents: 16}}}\n"
    )
    (tmp_path / "middle.yaml").write_text("base: base.yaml\nsteps: 5\nseed: 1\n")
    (tmp_path / "row.yaml").write_text(
        "base: middle.yaml\nseed: 2\navq: {num_refined: 4, overrides: {'2': {num_parents: 8}}}\n"
        "samples: {prompts: [c]}\n"
    )
    config = load_config(tmp_path / "row.yaml", DistillConfig, ["codebooks.dead_every=7"])
    assert (config.steps, config.seed, config.samples.prompts) == (5, 2, ("c",))
    assert (config.avq.num_parents, config.avq.num_refined) == (32, 4)
    assert config.avq.overrides == {"2": {"num_parents": 8}}
    assert (config.codebooks.dead_every, config.codebooks.start_images) == (7, 64)  # defaults
    save_config(config, tmp_path / "run")
    assert load_config(tmp_path / "run" / "config.yaml", DistillConfig, []) == config
    (tmp_path / "base.yaml").write_text("base: row.yaml\n")
    with pytest.raises(ValueError, match=r"base must be another file beside .*row\.yaml, but got"):
        load_config(tmp_path / "row.yaml", DistillConfig, [])


@pytest.mark.parametrize(
    ("row", "overrides", "message"),
    [
        ("m64p16c8", ["codebooks=null"], "training learns the codewords; set codebooks."),
        (
            "own_m64p16c8",
            ["avq.key_norm=true", "objective.diveq=true"],
            "no codebook to train; set avq.key_norm, objective.diveq to null, false or 0",
        ),
    ],
)
def test_what_trains_codewords_is_refused_without_them(row, overrides, message):
    """Catches settings that have no effect."""
    with pytest.raises(ValueError, match=message):
        load_config(CONFIGS / f"mini_{row}.yaml", DistillConfig, overrides)


def test_all_problems_of_a_configuration_are_named_at_once(tmp_path):
    values = yaml.safe_load("{base_model: mini-sd, data: {}, samples: {prompts: [a], every: 0}}")
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(values))
    settings = ["avq.levels=[0, b]", "new=1", "data.old=2", "log_every=abc"]
    with pytest.raises(ValueError, match="; ") as error:
        load_config(path, DistillConfig, settings)
    assert str(error.value).splitlines() == [str(error.value)]
    for part in (
        "the key new is unknown",
        "; the key data.old is unknown; ",
        "; the key steps is missing; ",
        "; the key data.source is missing; ",
        "log_every must be a valid integer, but got 'abc'",
        f"{path}: avq.levels.1 must be a valid integer",
        "samples.every must be greater than or equal to 1, but got 0",
    ):
        assert part in str(error.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("steps: 1\nsteps: 2\n", "the key steps is given twice"),
        ("- a", "must be a YAML mapping, but holds list"),
        ("a: [", "is not a YAML file: "),
        ("a: &a [x, x]\nb: &b [*a, *a]\nc: [*b, *b]", r"write the values of the alias \*a again"),
        ("a: &a {b: 1}\nc: {<<: *a}", r"write the values of the alias \*a again"),
        ("steps: " + "[" * 500, "is not a YAML file: maximum recursion depth"),
        ("a: " + "1" * 100_000, "must have at most 100000 bytes, but has more"),
        ("base: 3", "base must be another file beside .*config.yaml, but got 3"),
    ],
)
def test_a_file_that_is_no_mapping_of_keys_is_refused(tmp_path, text, message):
    (tmp_path / "config.yaml").write_text(text)
    with pytest.raises(ValueError, match=message) as error:
        load_config(tmp_path / "config.yaml", DistillConfig, [])
    assert len(str(error.value)) < 1000


def test_a_file_that_is_not_regular_is_refused(tmp_path):
    """Catches a pipe, on which reading waits for ever."""
    os.mkfifo(tmp_path / "config.yaml")
    (tmp_path / "row.yaml").write_text("base: config.yaml")
    for name in ("config.yaml", "row.yaml"):
        with pytest.raises(ValueError, match=r"config\.yaml must be a regular file\."):
            load_config(tmp_path / name, DistillConfig, [])


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("steps=true", "steps must be a valid integer, but got True."),
        (
            "data=scenes",
            "data must be a dictionary or an instance of DataConfig, but got 'scenes'.",
        ),
        ("steps", "--set must be key=value, but got 'steps'."),
        ("steps=0", "steps must be greater than or equal to 1, but got 0."),
        ("image_size=60", "image_size must be a multiple of 8, but got 60."),
        ("codebooks.decay_end=1", "codebooks.decay_end must be less than 1, but got 1."),
        ("samples.prompts=[]", "samples: prompts must hold at least one prompt, but got none."),
        (
            r'samples.prompts=["\udcff"]',
            r"prompts must be text, but its character 1 is a lone surrogate, '\udcff'.",
        ),
        ("precision=fp8", "precision must be 'fp32', 'fp16' or 'bf16', but got 'fp8'."),
        ("max_grad_norm=.nan", "max_grad_norm must be greater than 0, but got nan."),
        ("learning_rate=true", "learning_rate must be a valid number, but got True."),
        ("adam_betas=[0.9,false]", "adam_betas.1 must be a valid number, but got False."),
        ("learning_rate=.inf", "learning_rate must be a finite number, but got inf."),
        (f"seed={2**63}", f"seed must be less than or equal to {2**63 - 1}, but got {2**63}."),
        (
            "objective.noise_weight=-1",
            "noise_weight must be greater than or equal to 0, but got -1.",
        ),
    ],
)
def test_wrong_values_are_named(override, message):
    """Once for each kind of field. Catches a modulo by zero after k-means, and clipping that turns
    gradients around."""
    with pytest.raises(ValueError, match=f"{re.escape(message)}$"):
        distillation([override])


def test_values_arrive_as_declared():
    """Also catches checks that refuse what the docstrings offer."""
    settings = ["learning_rate=1e-3", "weight_decay=0", "avq.overrides={'1': {num_parents: 16}}"]
    settings += ["checkpoint_every=null", "samples.every=null", "max_grad_norm=.inf", "seed=0"]
    config = distillation(settings)
    assert (config.learning_rate, config.weight_decay) == (0.001, 0.0)
    assert type(config.weight_decay) is float
    assert config.avq.for_layer("x", 1).num_parents == 16
    assert config.adam_betas == (0.9, 0.999)
    assert config.checkpoint_every is config.samples.every is None
    assert (config.max_grad_norm, config.seed) == (float("inf"), 0)
