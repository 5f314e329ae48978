"""Configuration files: strict keys, declared types, ranges, and the published rows."""

import re
from dataclasses import replace
from functools import partial

import pytest
import yaml
from tiny_training import CONFIGS, RUN_CONFIG

from avq_diffusers import AVQCodebooks
from avq_diffusers.mini import MINI_DISTILLED, MINI_DISTILLED_LEVEL1
from distill.config import DistillConfig
from distill.config_file import load_config
from distill.pretrain.config import ScorerConfig, SD3Config, SDConfig, VAEConfig

distillation = partial(load_config, RUN_CONFIG, DistillConfig)
KINDS = {"vae": VAEConfig, "sd": SDConfig, "sd3": SD3Config, "scorer": ScorerConfig}


@pytest.mark.parametrize("prefix", ["sd15", "mini"])
@pytest.mark.parametrize(
    ("row", "sizes", "levels"),
    [
        ("m32p8c8", "M32P8C8", (0,)),
        ("m64p16c8", "M64P16C8", (0,)),
        ("m128p32c8", "M128P32C8", (0,)),
        ("m64p16c8_level1", "M64P16C8", (0, 1)),
        ("m64", "M64P0C0", (0,)),
        ("m128", "M128P0C0", (0,)),
        ("m256", "M256P0C0", (0,)),
        ("m256_level1", "M256P0C0", (0, 1)),
        ("linfusion", None, None),
    ],
)
def test_every_row_has_its_file(prefix, row, sizes, levels):
    """Catches a file that differs from its family in more than its row says."""
    config = load_config(CONFIGS / f"{prefix}_{row}.yaml", DistillConfig, [])
    if sizes is None:
        assert config.attention == "linfusion"
    else:
        assert (str(config.avq), config.avq.levels, config.attention) == (sizes, levels, "avq")
    # With level 1 mini-sd trains by SD1.5's losses.
    family = "m64p16c8_level1" if (prefix, levels) == ("mini", (0, 1)) else "m64p16c8"
    texts = [
        (CONFIGS / f"{prefix}_{name}.yaml").read_text().partition("data:")[2]
        for name in (row, family)
    ]
    assert texts[0] == texts[1]
    if prefix == "sd15":
        assert (config.steps, config.batch_size, config.learning_rate) == (50_000, 96, 1e-4)
        assert config.accumulation(8) == 1
        assert config.accumulation(1) == 8


@pytest.mark.parametrize(
    ("row", "stored", "sizes", "learning_rate", "weighting_scheme"),
    [
        ("mini_own_m32p8c8", "mini_m32p8c8", {}, 5e-4, "none"),
        ("mini_own_m128p32c8", "mini_m128p32c8", {}, 5e-4, "none"),
        ("mini_own_m64p16c8_level1", "mini_m64p16c8_level1", {"exact": ()}, 2e-4, "none"),
        (
            "mini_own_m64p16c8e256_level1",
            "mini_m64p16c8_level1",
            {"exact": (), "exact_keys": 256},
            1e-4,
            "inverse_alpha",
        ),
        ("sd15_own_m32p8c8", "sd15_m32p8c8", {}, None, "none"),
        ("sd15_own_m64p16c8", "sd15_m64p16c8", {}, None, "none"),
        ("sd15_own_m128p32c8", "sd15_m128p32c8", {}, None, "none"),
        ("sd15_own_m64p16c8_level1", "sd15_m64p16c8_level1", {}, None, "none"),
        (
            "sd15_own_m64p16c8e256_level1",
            "sd15_m64p16c8_level1",
            {"exact_keys": 256},
            None,
            "none",
        ),
    ],
)
def test_rows_of_own_codewords_train_as_their_family(
    row, stored, sizes, learning_rate, weighting_scheme
):
    """Catches other data, sizes or losses than those of the row with codebooks.

    mini-sd's rows start close to the teacher: they follow it alone, in fewer steps at lower rates,
    with the finer rounding of float16.
    """
    own, other = (
        load_config(CONFIGS / f"{name}.yaml", DistillConfig, []) for name in (row, stored)
    )
    assert own.avq == replace(other.avq, codewords="means", **sizes)
    objective = {"commitment_weight": 0.0, "full_spawning": False, "project_children": False}
    objective["weighting_scheme"] = weighting_scheme
    if learning_rate:
        objective["noise_weight"] = 0.0
        other = replace(other, steps=500, learning_rate=learning_rate, precision="fp16")
    assert own.objective == replace(other.objective, **objective)
    assert own == replace(other, avq=own.avq, objective=own.objective, codebooks=None)


def test_guided_rows_differ_in_what_they_say():
    """Catches data or sizes other than those of the rows beside them."""
    guided, flat, plain = (
        load_config(CONFIGS / f"mini_own_{name}.yaml", DistillConfig, [])
        for name in ("m64p16c8", "m192", "m32p8c8")
    )
    avq = replace(plain.avq, num_parents=64, num_refined=16, num_updates=1)
    objective = replace(plain.objective, guided_weight=1.0, weighting_scheme="sampling")
    training = {"steps": 3500, "learning_rate": 1e-4, "compile": True}
    assert guided == replace(plain, avq=avq, objective=objective, **training)
    avq = replace(plain.avq, num_parents=192, num_children=0, num_refined=0)
    assert flat == replace(guided, avq=avq, learning_rate=3e-4)


@pytest.mark.parametrize("folder", [MINI_DISTILLED, MINI_DISTILLED_LEVEL1])
def test_shipped_students_are_of_their_rows(folder):
    shipped = AVQCodebooks.from_pretrained(folder)
    training = shipped.config["training"]
    row = load_config(CONFIGS / f"{training['config']}.yaml", DistillConfig, [])
    assert shipped.avq_config == row.avq
    found = training["steps"], training["samples"], training["seed"]
    assert found == (row.steps, row.steps * row.batch_size, row.seed)


@pytest.mark.parametrize(
    ("row", "overrides", "message"),
    [
        ("m64p16c8", ["avq.num_updates=1"], "training learns the codewords; set codebooks, and"),
        ("m64p16c8", ["codebooks=null"], "training learns the codewords; set codebooks, and"),
        (
            "m64p16c8",
            ["avq.codewords=means"],
            "no codebook to train; set codebooks, objective.commitment_weight, "
            "objective.full_spawning, objective.project_children to null, false or 0",
        ),
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


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda values: values.update(lerning_rate=1), "unknown key lerning_rate"),
        (lambda values: values["avq"].update(parents=1), "unknown key avq.parents"),
        (lambda values: values["data"].pop("workers"), "lacks the key data.workers"),
        (lambda values: values.pop("samples"), "lacks the key samples"),
    ],
)
def test_unknown_and_missing_keys_are_named(tmp_path, change, message):
    values = yaml.safe_load(RUN_CONFIG.read_text())
    change(values)
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(values))
    with pytest.raises(ValueError, match=message):
        load_config(path, DistillConfig, [])


def test_all_problems_of_a_configuration_are_named_at_once(tmp_path):
    values = yaml.safe_load(RUN_CONFIG.read_text())
    del values["learning_rate"], values["data"]["workers"]
    values["samples"]["every"] = 0
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(values))
    with pytest.raises(ValueError, match="; ") as error:
        load_config(path, DistillConfig, ["steps=abc", "avq.levels=[0, b]", "new=1"])
    assert str(error.value).splitlines() == [str(error.value)]
    for part in (
        f"{path} has the unknown key new for DistillConfig; ",
        f"{path} lacks the key learning_rate of DistillConfig; ",
        f"{path} lacks the key data.workers of DataConfig",
        "steps must be int, but got 'abc'",
        "avq.levels[1] must be int, but got 'b'",
        "samples: every must be at least 1 or null, but got 0",
    ):
        assert part in str(error.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (RUN_CONFIG.read_text() + "learning_rate: 5.0\n", "the key learning_rate is given twice"),
        ("- a", "must be a YAML mapping, but holds list"),
        ("a: [", "is not a YAML file: "),
    ],
)
def test_a_file_that_is_no_mapping_of_keys_is_refused(tmp_path, text, message):
    (tmp_path / "config.yaml").write_text(text)
    with pytest.raises(ValueError, match=message):
        load_config(tmp_path / "config.yaml", DistillConfig, [])


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("steps=many", "steps must be int, but got 'many'."),
        ("compile=1", "compile must be bool, but got 1."),
        ("avq.levels=0", "avq.levels must be tuple[int, ...], but got 0."),
        ("avq.levels=[a]", "avq.levels[0] must be int, but got 'a'."),
        ("data=scenes", "data must be a section, but got 'scenes'."),
        ("steps=null", "steps must be int, but got None."),
        ("adam_betas=[0.9]", "adam_betas must be tuple[float, float], but got [0.9]."),
    ],
)
def test_wrong_types_are_named(override, message):
    with pytest.raises(TypeError, match=f"^{re.escape(message)}$"):
        distillation([override])


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("books.decay=3", "--set names the unknown section books."),
        ("steps", "--set must be key=value, but got 'steps'."),
        ("steps=0", "steps must be at least 1, but got 0."),
        ("image_size=60", "image_size must be a multiple of 8, but got 60."),
        ("codebooks.decay_end=1.0", "codebooks: decay_end must be in [0, 1), but got 1.0."),
        ("samples.prompts=[]", "samples: prompts must hold at least one prompt, but got none."),
        ("precision=fp8", "precision must be one of fp32, fp16, bf16, but got 'fp8'."),
        ("schedule=linear", "schedule must be one of constant, cosine, but got 'linear'."),
        ("checkpoint_every=0", "checkpoint_every must be at least 1 or null, but got 0."),
        ("samples.every=0", "samples: every must be at least 1 or null, but got 0."),
        ("max_grad_norm=-1", "max_grad_norm must be above 0, but got -1.0."),
        ("max_grad_norm=0", "max_grad_norm must be above 0, but got 0.0."),
        ("max_grad_norm=.nan", "max_grad_norm must be above 0, but got nan."),
        ("learning_rate=.inf", "learning_rate must be finite, but got inf."),
        ("seed=-1", f"seed must be between 0 and {2**63 - 1}, but got -1."),
        (f"seed={2**63}", f"seed must be between 0 and {2**63 - 1}, but got {2**63}."),
        ("warmup_steps=-5", "warmup_steps must be at least 0, but got -5."),
        ("objective.noise_weight=-1", "objective: noise_weight must be at least 0, but got -1.0."),
        ("objective.output_weight=.inf", "objective: output_weight must be finite, but got inf."),
        (
            "objective.weighting_scheme=snr",
            "objective: weighting_scheme must be one of none, inverse_alpha, sampling, but got "
            "'snr'.",
        ),
        ("codebooks.dead_threshold=0", "codebooks: dead_threshold must be above 0, but got 0.0."),
        ("samples.guidance_scale=.nan", "samples: guidance_scale must be finite, but got nan."),
    ],
)
def test_values_out_of_range_are_refused(override, message):
    """Catches a modulo by zero after k-means, and clipping that turns gradients around."""
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        distillation([override])


@pytest.mark.parametrize(
    ("command", "override", "message"),
    [
        ("vae", "learning_rate=-1", "learning_rate must be at least 0, but got -1.0"),
        ("vae", "num_scenes=10000001", "num_scenes must be at most 10000000, but got 10000001"),
        ("vae", "precision=fp32x", "precision must be one of bf16, fp32, but got 'fp32x'"),
        ("vae", "ema_decay=1.5", "ema_decay must be in"),
        ("vae", "adam_betas=[0.9,1.5]", "adam_betas must be in .*, but got .*0.9, 1.5"),
        ("vae", "adam_betas=[-0.1,0.9]", "adam_betas must be in"),
        ("vae", "adam_betas=[0.9,.nan]", "adam_betas must be in"),
        ("vae", "num_validation=0", "num_validation must be at least 1, but got 0"),
        ("sd", "num_validation=0", "num_validation must be at least 1, but got 0"),
        ("sd", "num_prompts=0", "num_prompts must be at least 1, but got 0"),
        ("sd", "sample_steps=0", "sample_steps must be at least 1, but got 0"),
        ("sd", "caption_dropout=1.1", "caption_dropout must be in"),
        ("sd3", "caption_dropout=-0.1", "caption_dropout must be in"),
        ("scorer", "num_validation=0", "num_validation must be at least 1, but got 0"),
        ("scorer", "corrupted_share=1.0", "corrupted_share must be in"),
    ],
)
def test_values_of_pretraining_out_of_range_are_refused(command, override, message):
    """Catches scenes that are silently fewer, and values that fail after a whole training."""
    with pytest.raises(ValueError, match=message):
        load_config(CONFIGS / f"mini_{command}.yaml", KINDS[command], [override])


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
