"""Pretraining of mini-sd: every command end to end at toy size, and the parts by hand."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from accelerate.state import AcceleratorState
from diffusers import (
    AutoencoderKL,
    FlowMatchEulerDiscreteScheduler,
    StableDiffusion3Pipeline,
    StableDiffusionPipeline,
    UNet2DConditionModel,
)
from safetensors.torch import load_file
from tiny_training import CONFIGS
from transformers import CLIPModel, CLIPTokenizer
from typer.testing import CliRunner

from avq_diffusers.files import read_log
from avq_diffusers.mini import default_prompts
from avq_diffusers.mini.loading import load_mini_sd3, shared_parts
from distill.accelerator import make_accelerator
from distill.config_file import load_config
from distill.log import log_path
from distill.pretrain import data
from distill.pretrain.__main__ import app
from distill.pretrain.config import ScorerConfig, SD3Config, SDConfig, VAEConfig
from distill.pretrain.export import make_scheduler, make_sd3_pipeline
from distill.pretrain.loop import update_average
from distill.pretrain.scorer import build_scorer, contrastive_loss
from distill.pretrain.sd import build_text_encoder, drop_captions, layered_noise, snr_weights
from distill.pretrain.sd3 import SD3Model, build_transformer, encode_text, noise_levels
from distill.pretrain.tokenizer import encode, scene_tokenizer
from distill.pretrain.vae import latent_statistics, normalize_latents
from distill.scenes import corrupt, render, sample_scene

COMMON = {
    "num_scenes": 24,
    "image_size": 64,
    "workers": 0,
    "steps": 2,
    "batch_size": 4,
    "warmup_steps": 0,
    "precision": "fp32",
    "compile": "false",
    "log_every": 1,
}
CLIP = {
    "hidden_size": 32,
    "num_attention_heads": 2,
    "projection_dim": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
}
TOY = {
    "vae": {
        "num_validation": 4,
        "vae.block_out_channels": "[8,8,8]",
        "vae.norm_num_groups": 4,
        "vae.sample_size": 64,
    },
    "sd": {
        "unet.block_out_channels": "[8,8,8]",
        "unet.layers_per_block": 1,
        "unet.norm_num_groups": 4,
        "unet.sample_size": 16,
        "unet.cross_attention_dim": 32,
        **{f"text.{name}": value for name, value in CLIP.items()},
    },
    "sd3": {
        "init_from": "null",
        "transformer.num_layers": 2,
        "transformer.num_attention_heads": 2,
        "transformer.attention_head_dim": 16,
        "transformer.caption_projection_dim": 32,
        "transformer.dual_attention_layers": "[0]",
        "transformer.pos_embed_max_size": 16,
        "transformer.sample_size": 16,
    },
    "scorer": {
        "batch_size": 8,
        "projection_dim": 32,
        "vision.image_size": 64,
        **{f"{part}.{name}": value for part in ("vision", "text") for name, value in CLIP.items()},
    },
}
RESULT = {"vae": "vae", "sd": "model", "sd3": "model", "scorer": "scorer"}
KINDS = {"vae": VAEConfig, "sd": SDConfig, "sd3": SD3Config, "scorer": ScorerConfig}


def settings(command, **overrides):
    values = {**COMMON, **TOY[command], **overrides}
    return [f"{key}={value}" for key, value in values.items()]


def config_of(command, **overrides):
    file = CONFIGS / f"mini_{command}.yaml"
    return load_config(file, KINDS[command], settings(command, **overrides))


def run(command, output, *extra, code=0, **overrides):
    """Run a training; return what it writes to standard error."""
    given = [command, "--config", CONFIGS / f"mini_{command}.yaml", "--output", output, *extra]
    given += [f"--set={setting}" for setting in settings(command, **overrides)]
    result = CliRunner().invoke(app, [str(x) for x in given])
    assert result.exit_code == code, (result.output, result.exception)
    return result.stderr


def tensors(folder):
    files = sorted(folder.rglob("*.safetensors"))
    loaded = {path.relative_to(folder): load_file(path) for path in files}
    return {(file, key): value for file, part in loaded.items() for key, value in part.items()}


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """The trained toy models."""
    root = tmp_path_factory.mktemp("runs")
    for command in RESULT:
        run(command, root / command, *(["--vae", root / "vae"] if command == "sd" else []))
    return root


@pytest.fixture(scope="module")
def weights(runs):
    """The result of the UNet's run: the form of mini-sd."""
    return runs / "sd" / "model"


@pytest.fixture(scope="module")
def tokenizer():
    return scene_tokenizer()


# --- the commands ---


@pytest.mark.parametrize("command", RESULT)
def test_a_run_leaves_losses_and_a_result(runs, command):
    first, second = read_log(log_path(runs / command))
    assert [first["step"], second["step"]] == [1, 2]
    assert 0 < first["loss"] != second["loss"] > 0
    assert tensors(runs / command / RESULT[command])
    assert not list((runs / command).rglob(".writing-*"))


def test_a_run_can_be_repeated_by_any_number_of_workers(runs, tmp_path):
    """Catches random numbers that depend on the rendering, and scenes out of order."""
    run("vae", tmp_path, workers=2)
    expected, found = tensors(runs / "vae" / "vae"), tensors(tmp_path / "vae")
    assert all(torch.equal(found[name], value) for name, value in expected.items())


def test_a_loss_that_is_not_finite_ends_with_one_sentence(tmp_path):
    """Catches a traceback, and an export of NaN; no line is logged before the end."""
    error = run("vae", tmp_path, code=1, learning_rate=1e30, steps=3, log_every=9)
    assert error.splitlines()[-1].startswith("error: training stopped: a loss or ")
    assert not (tmp_path / RESULT["vae"]).exists()


def test_the_launcher_changes_nothing(monkeypatch):
    """Catches the autocast that `accelerate launch --mixed_precision` asks for, and compiled blocks
    by `--dynamo_backend`, whose gradients are wrong on a CPU."""
    AcceleratorState._reset_state(reset_partial_state=True)
    with monkeypatch.context() as launcher:
        launcher.setenv("ACCELERATE_DYNAMO_BACKEND", "INDUCTOR")
        with pytest.raises(ValueError, match=r"compile decides .* no instead of inductor\.$"):
            make_accelerator(config_of("vae"))
    AcceleratorState._reset_state(reset_partial_state=True)
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    assert not make_accelerator(config_of("vae")).native_amp


def test_init_from_starts_at_the_weights_of_a_result(weights, tmp_path):
    """And the optimizer moves every parameter."""
    for name, rate in (("still", 0), ("moved", 0.01)):
        run("sd", tmp_path / name, init_from=weights, learning_rate=rate, steps=1, ema_decay=0)
        for part in ("unet", "text_encoder"):
            before, after = tensors(weights / part), tensors(tmp_path / name / "model" / part)
            equal = {key for key in before if torch.equal(before[key], after[key])}
            assert equal == (set(before) if rate == 0 else set())


@pytest.mark.parametrize(
    ("command", "extra", "overrides", "message"),
    [
        ("vae", ["--output", "RUNS/vae"], {}, "holds a run: choose another --output."),
        ("vae", [], {"precision": "fp8"}, "precision must be 'bf16' or 'fp32', but got 'fp8'"),
        ("vae", [], {"compile": "true"}, "compile: true needs a CUDA GPU; set compile to false."),
        ("sd", ["--vae", "none"], {"init_from": "RUNS/sd/model"}, "either --vae or init_from"),
        ("sd", ["--vae", "none"], {}, "there is no trained VAE"),
        ("scorer", [], {"num_scenes": 1}, "num_scenes must leave each process an intact scene"),
        ("scorer", [], {"corrupted_share": 0.99}, "must leave each process an intact scene"),
        ("scorer", [], {"batch_size": 1}, "batch_size must leave each process an intact scene"),
        ("scorer", [], {"corrupted_share": 0.94}, "beside its 8 corrupted of 8; raise batch_size"),
        ("scorer", [], {"corrupted_share": 1}, "corrupted_share must be less than 1, but got 1"),
        ("sd3", [], {"shift": 0}, "shift must be greater than 0, but got 0"),
        ("sd3", [], {"num_scenes": 10**8}, "equal to 10000000, but got 100000000"),
    ],
)
def test_refusals(runs, weights, tmp_path, command, extra, overrides, message):
    """Catches wrong gradients of compiled blocks, a traceback, advice that names an option of other
    commands, and a mistake that is found when all scenes are rendered."""
    extra = [str(part).replace("RUNS", str(runs)) for part in extra]
    overrides = {key: str(part).replace("RUNS", str(runs)) for key, part in overrides.items()}
    error = run(command, tmp_path, *extra, code=2, **overrides)
    assert "error: " in error
    assert message in error
    assert "render" not in error


# --- configuration ---


def test_the_published_models_fit_the_package(tokenizer):
    """SD3's in 22 MiB in half precision, with positions for 64 x 64 tokens."""
    vae, sd, sd3, scorer = (
        load_config(CONFIGS / f"mini_{name}.yaml", kind, []) for name, kind in KINDS.items()
    )
    with torch.device("meta"):
        unet = UNet2DConditionModel(**sd.unet)
        transformer = build_transformer(replace(sd3, init_from=None))
        parts = [
            (unet, 27.6e6),
            (AutoencoderKL(**vae.vae), 4.0e6),
            (build_text_encoder(sd, tokenizer), 2.5e6),
            (build_scorer(scorer, tokenizer), 3.5e6),
        ]
    for model, limit in parts:
        assert 2 * sum(parameter.numel() for parameter in model.parameters()) <= limit
    heads = [m for name, m in unet.named_modules() if name.endswith("attn1")]
    assert sorted(module.inner_dim // module.heads for module in heads) == [40] * 5 + [80] * 6
    assert {module.heads for module in heads} == {2}
    assert 2 * sum(value.numel() for value in transformer.state_dict().values()) <= 22 * 2**20
    assert transformer.config.pos_embed_max_size * transformer.config.patch_size == 128
    assert transformer.config.attention_head_dim == 64


# --- average ---


def test_the_average_moves_with_a_rising_decay():
    averaged, model = torch.nn.Linear(1, 1), torch.nn.Linear(1, 1)
    torch.nn.init.zeros_(averaged.weight)
    torch.nn.init.ones_(model.weight)
    update_average(averaged, model, decay=0.9, step=1)  # decay 2 / 11
    assert averaged.weight.item() == pytest.approx(9 / 11)
    torch.nn.init.zeros_(averaged.weight)
    update_average(averaged, model, decay=0.9, step=10_000)
    assert averaged.weight.item() == pytest.approx(0.1)


# --- data ---


def test_shards_are_equal_and_disjoint():
    shards = [data.shard(range(11), rank, 3) for rank in range(3)]
    assert [len(part) for part in shards] == [3, 3, 3]
    assert sorted(seed for part in shards for seed in part) == list(range(9))
    with pytest.raises(ValueError, match="at least the number of processes, 3, but got 2"):
        data.shard(range(2), 0, 3)


@pytest.mark.parametrize(("workers", "corrupted"), [(0, True), (2, False)])
def test_images_arrive_in_order(workers, corrupted):
    """Corrupting changes exactly the scenes with copies."""
    seeds = range(100, 101 + data.BATCH)
    options = {"size": 64, "workers": workers, "corrupted": corrupted}
    loaded = data.load_images(seeds, device=torch.device("cpu"), **options)
    scenes = [sample_scene(seed) for seed in seeds]
    for index, (seed, scene) in enumerate(zip(seeds, scenes, strict=True)):
        expected = corrupt(scene, seed, 64) if corrupted else render(scene, 64)
        assert np.array_equal(loaded.images[index].numpy(), expected)
        assert bool(loaded.has_copies[index]) == scene.has_copies
        if scene.has_copies and corrupted:
            assert not np.array_equal(expected, render(scene, 64))
    assert loaded.captions == [scene.caption for scene in scenes]
    assert 0 < loaded.has_copies.sum() < len(seeds)


# --- tokenizer ---


def test_any_other_text_tokenizes_without_loss(tokenizer):
    text = "a zebra éclair, 12 ☃"
    ids = tokenizer(text).input_ids
    assert tokenizer.unk_token_id not in ids[1:-1]
    decoded = tokenizer.decode(ids, skip_special_tokens=True)
    assert decoded.replace(" ", "") == text.replace(" ", "")


# --- losses ---


def test_snr_weights_by_hand():
    # SNR 9, 5, 1 and 1/4: what lies above gamma is reduced, what lies below the floor raised.
    scheduler = make_scheduler()
    scheduler.alphas_cumprod = torch.tensor([0.9, 5 / 6, 0.5, 0.2])
    for floor, last in ((0.0, 1.0), (0.5, 2.0)):
        config = config_of("sd", snr_floor=floor, snr_gamma=5.0)
        found = snr_weights(scheduler, torch.arange(4), config)
        torch.testing.assert_close(found, torch.tensor([5 / 9, 1, 1, last]))


def test_layered_noise_has_unit_variance_and_coarse_layers():
    def sample(strength):
        generator = torch.Generator().manual_seed(0)
        return layered_noise((500, 4, 16, 16), strength, generator, torch.device("cpu"))

    white, layered = sample(0.0), sample(0.5)
    assert layered.var().item() == pytest.approx(1, abs=0.05)
    assert white.mean((2, 3)).var().item() == pytest.approx(1 / 256, rel=0.1)
    # Per layer of c x c cells the image's mean gets strength^2 / c^2; the sum is normalized.
    layers = 0.25 * (1 + 1 / 4 + 1 / 16 + 1 / 64)
    expected = (1 / 256 + layers) / (1 + 4 * 0.25)
    assert layered.mean((2, 3)).var().item() == pytest.approx(expected, rel=0.1)


def test_captions_are_dropped_whole_and_at_the_given_rate():
    ids, empty = torch.ones(20_000, 7), torch.zeros(7)
    dropped = drop_captions(ids, empty, 0.1, torch.Generator().manual_seed(0))
    rows = (dropped == 0).all(-1)
    assert (rows | (dropped == 1).all(-1)).all()
    assert rows.float().mean().item() == pytest.approx(0.1, abs=3 * math.sqrt(0.09 / 20_000))
    assert torch.equal(drop_captions(ids, empty, 0.0, torch.Generator()), ids)


def test_equal_captions_share_the_contrastive_target():
    logits = torch.tensor([[9.0, 9.0, 0.0], [9.0, 9.0, 0.0], [0.0, 0.0, 9.0]])
    repeated = contrastive_loss(logits, torch.tensor([[1, 2], [1, 2], [3, 4]]))
    # Two equal captions can do no better than share their mass: log 2 for two of three rows.
    assert repeated.item() == pytest.approx(2 / 3 * math.log(2), abs=1e-3)
    shifted = logits[:, [2, 0, 1]]
    wrong = contrastive_loss(shifted, torch.tensor([[1, 2], [3, 4], [5, 6]]))
    assert wrong > 3


@torch.no_grad()
def test_normalized_latents_leave_the_reconstruction():
    torch.manual_seed(0)
    vae = AutoencoderKL(**config_of("vae").vae)
    seeds = range(8)
    device = torch.device("cpu")
    images = data.load_images(seeds, size=64, workers=0, device=device).images

    def reconstruct():
        return vae.decode(vae.encode(data.to_float(images)).latent_dist.mean).sample

    before = reconstruct()
    mean, std = latent_statistics(vae, images)
    assert (mean.abs() > 0.01).any()
    logvar = vae.encode(data.to_float(images)).latent_dist.logvar

    normalize_latents(vae, mean, std)

    torch.testing.assert_close(reconstruct(), before, rtol=1e-3, atol=1e-4)
    mean, scaled = latent_statistics(vae, images)
    torch.testing.assert_close(mean, torch.zeros(4), rtol=0, atol=1e-4)
    torch.testing.assert_close(scaled, torch.ones(4), rtol=1e-3, atol=0)
    shift = vae.encode(data.to_float(images)).latent_dist.logvar - logvar
    torch.testing.assert_close(shift, (-2 * std.log()).view(1, 4, 1, 1).expand_as(shift))


# --- rectified flow ---


def test_the_untrained_transformer_is_zero_and_every_block_the_identity():
    """Catches gates that are not zero, with which training is slow."""
    transformer = build_transformer(config_of("sd3"))
    latents = torch.randn(1, 4, 8, 8)
    tokens = {}
    for name in ("pos_embed", "norm_out"):
        module = transformer.get_submodule(name)
        if name == "norm_out":
            module.register_forward_pre_hook(lambda _, inputs: tokens.update(last=inputs[0]))
        else:
            module.register_forward_hook(lambda *args: tokens.update(first=args[-1]))
    output = transformer(
        latents, torch.randn(1, 5, 384), torch.randn(1, 384), torch.tensor([500.0])
    )
    assert torch.equal(tokens["first"], tokens["last"])
    assert not output.sample.any()


def test_the_loss_reaches_every_parameter_that_is_trained():
    """The text queries of SD3's last block lead nowhere."""
    transformer = build_transformer(config_of("sd3"))
    trained = {name for name, value in transformer.named_parameters() if value.requires_grad}
    queries = ("add_q_proj.weight", "add_q_proj.bias", "norm_added_q.weight")
    frozen = {f"transformer_blocks.1.attn.{name}" for name in queries}
    assert trained == {name for name, _ in transformer.named_parameters()} - frozen
    for parameter in transformer.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    latents, noise = torch.randn(2, 2, 4, 8, 8)
    text, pooled = torch.randn(2, 5, 384), torch.randn(2, 384)
    SD3Model(transformer)(latents, noise, torch.rand(2), text, pooled)["loss"].backward()
    moved = {name for name, value in transformer.named_parameters() if value.grad is not None}
    assert moved == trained
    assert all(value.grad.any() for value in transformer.parameters() if value.requires_grad)


def test_the_loss_is_zero_for_the_velocity_alone():
    """Catches a swapped sign or direction, and sigmas that do not reach the model as timesteps."""
    latents, noise = torch.randn(2, 2, 4, 8, 8)
    sigmas = torch.tensor([0.25, 1.0])
    seen = {}

    class Known(torch.nn.Module):
        def forward(self, mixed, text, pooled, timesteps, return_dict):
            seen.update(mixed=mixed, timesteps=timesteps)
            return (noise - latents,)

    losses = SD3Model(Known())(latents, noise, sigmas, None, None)
    assert losses["loss"] == 0
    torch.testing.assert_close(seen["mixed"][0], 0.75 * latents[0] + 0.25 * noise[0])
    assert torch.equal(seen["mixed"][1], noise[1])
    assert seen["timesteps"].tolist() == [250, 1000]


def test_noise_levels_are_those_of_the_shifted_scheduler():
    generator = torch.Generator().manual_seed(0)
    sigmas = noise_levels((100_000,), 3.0, generator=generator, device="cpu")
    assert sigmas.min() > 0
    assert sigmas.max() < 1
    logits = sigmas.logit()
    assert logits.mean().item() == pytest.approx(math.log(3), abs=0.02)
    assert logits.std().item() == pytest.approx(1, abs=0.02)
    scheduler = FlowMatchEulerDiscreteScheduler(shift=3.0)
    middle = scheduler.sigmas[len(scheduler.sigmas) // 2].item()
    assert sigmas.median().item() == pytest.approx(middle, abs=0.01)


def test_text_is_encoded_as_by_the_pipeline():
    """Catches another layer of the encoder, other padding, and zeros of T5 that are missing."""
    parts = shared_parts()
    pipe = make_sd3_pipeline(build_transformer(config_of("sd3")), parts, 3.0)
    captions = default_prompts(2)
    expected = pipe.encode_prompt(*[captions] * 3, do_classifier_free_guidance=False)
    text, pooled = encode_text(parts["text_encoder"], encode(parts["tokenizer"], captions))
    assert torch.equal(text, expected[0])
    assert torch.equal(pooled, expected[2])
    assert text.shape == (2, 333, 384)


def assert_draws(pipe):
    """A pipeline draws different images of different prompts."""
    pipe.set_progress_bar_config(disable=True)
    first, second = (
        pipe(
            prompt,
            height=64,
            width=64,
            num_inference_steps=2,
            generator=torch.Generator().manual_seed(0),
            output_type="np",
        ).images
        for prompt in default_prompts(2)
    )
    assert first.shape == (1, 64, 64, 3)
    assert np.isfinite(first).all()
    assert not np.array_equal(first, second)


def test_the_trained_transformer_loads_with_the_parts_of_mini_sd(runs, tmp_path):
    folder = runs / "sd3" / "model"
    parts = {"model_index.json", "scheduler", "transformer"}
    assert {path.name for path in folder.iterdir()} == parts
    pipe = load_mini_sd3(folder)
    assert_draws(pipe)
    pipe.save_pretrained(tmp_path)  # as anyone loads SD3 without T5
    without = {"text_encoder_3": None, "tokenizer_3": None}
    assert_draws(StableDiffusion3Pipeline.from_pretrained(tmp_path, **without))
    # A further stage starts from its weights.
    further = build_transformer(replace(config_of("sd3"), init_from=str(folder))).state_dict()
    for name, value in pipe.transformer.state_dict().items():
        assert torch.equal(further[name], value)


# --- results ---


def test_the_result_is_a_plain_pipeline(weights):
    pipeline = StableDiffusionPipeline.from_pretrained(weights)
    assert pipeline.safety_checker is None
    scheduler = pipeline.scheduler.config
    assert scheduler.beta_schedule == "scaled_linear"
    assert (scheduler.timestep_spacing, scheduler.steps_offset) == ("trailing", 1)
    assert (scheduler.clip_sample, scheduler.set_alpha_to_one) == (False, False)
    assert pipeline.text_encoder.config.eos_token_id == pipeline.tokenizer.eos_token_id
    assert_draws(pipeline)


def test_results_are_in_half_precision_without_a_path(runs):
    """Also catches configurations that carry the folder names of whoever trained."""
    folders = [runs / command / result for command, result in RESULT.items()]
    parts = [load_file(path) for folder in folders for path in folder.rglob("*.safetensors")]
    assert len(parts) == 6
    assert {value.dtype for part in parts for value in part.values()} == {torch.float16}
    texts = [path.read_text() for folder in folders for path in folder.rglob("*.json")]
    assert len(texts) > 10
    assert not any("_name_or_path" in text or str(runs) in text for text in texts)


def test_the_trained_scorer_loads_as_float32(runs):
    folder = runs / "scorer" / "scorer"
    scorer = CLIPModel.from_pretrained(folder)
    ids = encode(CLIPTokenizer.from_pretrained(folder), default_prompts(2))
    found = scorer(input_ids=ids, pixel_values=torch.zeros(1, 3, 64, 64))
    assert found.logits_per_text.shape == (2, 1)
