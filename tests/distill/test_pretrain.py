"""Pretraining of mini-sd: every command end to end at toy size, and the parts by hand."""

import json
import math
import multiprocessing
import os
import re
import shutil
import signal
import subprocess
import sys

import numpy as np
import pytest
import torch
from diffusers import (
    AutoencoderKL,
    FlowMatchEulerDiscreteScheduler,
    StableDiffusion3Pipeline,
    StableDiffusionPipeline,
)
from safetensors.torch import load_file
from tiny_training import CONFIGS, ROOT
from transformers import CLIPModel, CLIPTokenizer
from typer.testing import CliRunner

from avq_diffusers.files import read_log
from avq_diffusers.mini import (
    SCORER,
    TEST_SEEDS,
    VOCABULARY,
    corrupt,
    default_prompts,
    render,
    sample_scene,
)
from avq_diffusers.mini.loading import load_mini_sd3, shared_parts
from distill.checkpointing import checkpoint
from distill.config_file import load_config
from distill.log import log_path
from distill.pretrain import data
from distill.pretrain.__main__ import app
from distill.pretrain.config import ScorerConfig, SD3Config, SDConfig, VAEConfig
from distill.pretrain.export import make_sd3_pipeline
from distill.pretrain.loop import Schedule, update_average
from distill.pretrain.scorer import build_scorer, contrastive_loss
from distill.pretrain.sd import (
    build_text_encoder,
    build_unet,
    drop_captions,
    layered_noise,
    snr_weights,
)
from distill.pretrain.sd3 import SD3Model, build_transformer, encode_text, noise_levels
from distill.pretrain.tokenizer import encode, learn_merges, scene_tokenizer
from distill.pretrain.vae import build_vae, latent_statistics, normalize_latents, reconstruct

COMMON = {
    "num_scenes": 48,
    "image_size": 64,
    "workers": 2,
    "steps": 4,
    "max_minutes": "null",
    "batch_size": 4,
    "warmup_steps": 2,
    "precision": "fp32",
    "compile": "false",
    "log_every": 1,
    "preview_minutes": "null",
    "checkpoint_every": 2,
    "num_validation": 4,
}
TOY = {
    "vae": {"block_out_channels": "[8,8,8]", "norm_num_groups": 4},
    "sd": {
        "block_out_channels": "[16,16,32]",
        "layers_per_block": 1,
        "norm_num_groups": 8,
        "text_hidden_size": 32,
        "text_layers": 1,
        "text_heads": 2,
        "num_prompts": 2,
        "sample_steps": 2,
    },
    "sd3": {
        "num_layers": 2,
        "num_attention_heads": 2,
        "attention_head_dim": 16,
        "dual_attention_layers": "[0]",
        "pos_embed_max_size": 16,
        "num_prompts": 2,
        "sample_steps": 2,
    },
    "scorer": {
        "batch_size": 8,
        "hidden_size": 32,
        "projection_size": 32,
        "num_heads": 2,
        "vision_layers": 1,
        "vision_intermediate_size": 32,
        "text_layers": 1,
        "text_intermediate_size": 32,
    },
}
RESULT = {"vae": "vae", "sd": "model", "sd3": "model", "scorer": "scorer"}


def arguments(command, output, *extra, **overrides):
    values = {**COMMON, **TOY[command], **overrides}
    settings = [part for key, value in values.items() for part in ("--set", f"{key}={value}")]
    config = CONFIGS / f"mini_{command}.yaml"
    return [command, "--config", str(config), "--output", str(output), *settings, *extra]


def run(argument_list):
    result = CliRunner().invoke(app, argument_list)
    if type(result.exception) not in (type(None), SystemExit):
        raise result.exception
    return result


def losses(output):
    lines = [json.loads(line) for line in (output / "log.jsonl").read_text().splitlines()]
    return {line["step"]: line["loss"] for line in lines if "loss" in line}


def assert_same_state(first, second):
    for name in ("model", "averaged", "optimizer"):
        one, two = (load_file(folder / f"{name}.safetensors") for folder in (first, second))
        assert one.keys() == two.keys()
        assert all(torch.equal(one[key], two[key]) for key in one)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """The trained toy models."""
    root = tmp_path_factory.mktemp("runs")
    for command in RESULT:
        # A run may be told to go on where it has not begun.
        extra = {"sd": ["--vae", str(root / "vae")], "sd3": ["--resume"]}.get(command, [])
        assert run(arguments(command, root / command, *extra)).exit_code == 0
    return root


@pytest.fixture(scope="module")
def weights(runs):
    """The assembled export."""
    parts = [part for name in ("vae", "sd", "scorer") for part in (f"--{name}", str(runs / name))]
    assert run(["export", *parts, "--output", str(runs / "weights")]).exit_code == 0
    return runs / "weights"


@pytest.fixture(scope="module")
def tokenizer():
    return scene_tokenizer()


# --- the commands ---


@pytest.mark.parametrize("command", RESULT)
def test_a_run_leaves_losses_result_and_checkpoints(runs, command):
    output = runs / command
    assert list(losses(output)) == [1, 2, 3, 4]
    assert (output / RESULT[command]).is_dir()
    assert [path.name for path in checkpoint.checkpoints(output)] == [
        "step-00000002",
        "step-00000004",
    ]
    assert not list(output.rglob(".writing-*"))
    if command != "scorer":
        assert (output / "samples" / "step-00000004.png").is_file()


@pytest.mark.parametrize("command", ["sd", "sd3"])
def test_the_optimizer_moves_every_parameter(runs, command):
    """But for positions, and for the text queries of SD3's last block, which lead nowhere."""
    first, second = (
        load_file(path / "model.safetensors") for path in checkpoint.checkpoints(runs / command)
    )
    fixed = {name for name in first if torch.equal(first[name], second[name])}
    unused = {"add_q_proj.weight", "add_q_proj.bias", "norm_added_q.weight"}
    unused = {f"transformer.transformer_blocks.1.attn.{name}" for name in unused}
    assert fixed == ({*unused, "transformer.pos_embed.pos_embed"} if command == "sd3" else set())


@pytest.mark.parametrize("command", RESULT)
def test_two_and_two_steps_equal_four(runs, tmp_path, command):
    output = runs / command
    extra = ["--vae", str(runs / "vae")] if command == "sd" else []
    (tmp_path / "checkpoints").mkdir()
    middle, last = checkpoint.checkpoints(output)
    (tmp_path / "checkpoints" / middle.name).symlink_to(middle)
    # What a kill while writing leaves behind is no checkpoint.
    (tmp_path / "checkpoints" / ".writing-step-00000004").mkdir()

    assert run(arguments(command, tmp_path, "--resume", *extra)).exit_code == 0

    assert losses(tmp_path) == {step: losses(output)[step] for step in (3, 4)}
    assert_same_state(tmp_path / "checkpoints" / last.name, last)


def test_resuming_a_finished_run_writes_its_end_again(runs, tmp_path):
    """Catches final figures that stand twice in the log."""
    shutil.copytree(runs / "vae", tmp_path, dirs_exist_ok=True)
    assert run(arguments("vae", tmp_path, "--resume")).exit_code == 0
    assert read_log(log_path(tmp_path)) == read_log(log_path(runs / "vae"))


def test_a_damaged_log_is_refused_before_scenes_are_rendered(runs, tmp_path):
    """Catches a log that is read when training begins, and one that is lost."""
    shutil.copytree(runs / "vae", tmp_path, dirs_exist_ok=True)
    log_path(tmp_path).write_text('{"step": 1}\n{"st\n{"step": 3}\n')
    before = log_path(tmp_path).read_bytes()
    result = run(arguments("vae", tmp_path, "--resume"))
    assert result.exit_code == 2
    assert f"line 2 of {log_path(tmp_path)} is not a JSON object with a step" in result.stderr
    assert "render" not in result.stderr
    assert log_path(tmp_path).read_bytes() == before


@pytest.mark.parametrize("rare", [{"log_every": 3}, {"log_every": 9, "checkpoint_every": "null"}])
def test_a_loss_that_is_not_finite_ends_with_one_sentence(tmp_path, rare):
    """Catches a traceback, and a checkpoint or an export of NaN."""
    result = run(arguments("vae", tmp_path, learning_rate=1e30, **rare))
    assert result.exit_code == 1
    assert result.stderr.splitlines()[-1].startswith("error: training stopped: a loss or ")
    assert not checkpoint.checkpoints(tmp_path)
    assert not (tmp_path / RESULT["vae"]).exists()


def test_max_minutes_ends_a_run_annealed(runs, tmp_path):
    # 0.02 minutes are over long before a million steps.
    limits = {"steps": 1_000_000, "max_minutes": 0.02, "finish_minutes": 0}
    vae = ["--vae", str(runs / "vae")]
    assert run(arguments("sd", tmp_path, *vae, **limits, checkpoint_every="null")).exit_code == 0
    lines = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert lines[-1]["final"]
    assert [line for line in lines if "progress" in line][-1]["progress"] >= 1
    assert (tmp_path / "model" / "model_index.json").is_file()


@pytest.mark.parametrize(
    ("command", "part"), [("sd", "unet"), ("sd3", "transformer")], ids=["sd", "sd3"]
)
def test_init_from_starts_at_the_exported_weights(runs, weights, tmp_path, command, part):
    source = weights if command == "sd" else runs / "sd3" / "model"
    start = {"init_from": source, "learning_rate": 0, "checkpoint_every": "null"}
    assert run(arguments(command, tmp_path, **start)).exit_code == 0
    name = f"{part}/diffusion_pytorch_model.safetensors"
    before, after = (load_file(folder / name) for folder in (source, tmp_path / "model"))
    assert all(torch.equal(before[key], after[key]) for key in before)


@pytest.mark.parametrize(
    ("command", "extra", "overrides", "message"),
    [
        ("vae", ["--output", "RUNS/vae"], {}, "holds a run: add --resume or choose another"),
        (
            "vae",
            ["--output", "RUNS/vae", "--resume"],
            {"seed": 1, "learning_rate": 0.5, "workers": 0},
            "it differs in learning_rate, seed.",
        ),
        ("vae", ["--config", str(CONFIGS / "mini_sd.yaml")], {}, "unknown key"),
        (
            "sd",
            [],
            {"init_from": "RUNS/weights", "block_out_channels": "[16,32,32]"},
            "block_out_channels is (16, 32, 32) in the configuration, but",
        ),
        (
            "sd3",
            [],
            {"init_from": "RUNS/sd3/model", "num_layers": 3},
            "num_layers is 3 in the configuration, but 2 in",
        ),
        ("sd", ["--vae", "none"], {"init_from": "RUNS/weights"}, "either --vae or init_from"),
        ("sd", ["--vae", "none"], {}, "there is no trained VAE"),
        ("scorer", [], {"num_scenes": 1}, "num_scenes must leave each process an intact scene"),
        (
            "scorer",
            [],
            {"num_scenes": 4, "corrupted_share": 0.9},
            "num_scenes must leave each process an intact scene",
        ),
    ],
)
def test_refusals(runs, weights, tmp_path, command, extra, overrides, message):
    """Catches a traceback, and a mistake that is found when all scenes are rendered."""
    given = arguments(command, tmp_path, *extra, **overrides)
    result = run([part.replace("RUNS", str(runs)) for part in given])
    assert result.exit_code == 2
    error = result.stderr.splitlines()[-1]
    assert error.startswith("error: ")
    assert message in error
    assert "render" not in result.stderr


@pytest.mark.parametrize("name", ["model", "averaged", "optimizer"])
def test_a_damaged_checkpoint_is_refused(runs, tmp_path, name):
    """Catches one changed bit that is found, if at all, when the data are loaded and it is late."""
    shutil.copytree(runs / "scorer" / "checkpoints", tmp_path / "checkpoints")
    path = tmp_path / "checkpoints" / "step-00000004" / f"{name}.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    result = run(arguments("scorer", tmp_path, "--resume"))
    assert result.exit_code == 2
    assert re.fullmatch(
        rf"error: .*{name}\.safetensors is damaged \(.*\); delete .*step-00000004 to resume .*\n",
        result.stderr,
    )


# --- configuration ---


def test_the_published_models_fit_the_package(tokenizer):
    vae, sd, scorer = (
        load_config(CONFIGS / f"mini_{name}.yaml", kind, [])
        for name, kind in (("vae", VAEConfig), ("sd", SDConfig), ("scorer", ScorerConfig))
    )
    with torch.device("meta"):
        unet = build_unet(sd, latent_channels=4, latent_size=64)
        parts = [
            (unet, 27.6e6),
            (build_vae(vae), 4.0e6),
            (build_text_encoder(sd, tokenizer), 2.5e6),
            (build_scorer(scorer, tokenizer), 3.5e6),
        ]
    for model, limit in parts:
        assert 2 * sum(parameter.numel() for parameter in model.parameters()) <= limit
    heads = {
        name: (module.heads, module.inner_dim // module.heads)
        for name, module in unet.named_modules()
        if name.endswith("attn1")
    }
    head_dims = sorted(dim for _, dim in heads.values())
    assert head_dims == [40] * 5 + [80] * 6
    assert {count for count, _ in heads.values()} == {2}


def test_the_published_transformer_fits_the_package():
    """22 MiB in half precision, tables of positions included, up to twice the training size."""
    config = load_config(CONFIGS / "mini_sd3.yaml", SD3Config, [])
    with torch.device("meta"):
        transformer = build_transformer(config, latent_channels=4, latent_size=64, text_size=192)
    assert 2 * sum(value.numel() for value in transformer.state_dict().values()) <= 22 * 2**20
    assert config.pos_embed_max_size * config.patch_size == 2 * 64
    assert transformer.config.attention_head_dim == 64


# --- schedule and average ---


def make_config(**overrides):
    settings = [f"{key}={value}" for key, value in {**COMMON, **TOY["vae"], **overrides}.items()]
    return load_config(CONFIGS / "mini_vae.yaml", VAEConfig, settings)


def test_the_learning_rate_follows_steps():
    schedule = Schedule(make_config(steps=100, warmup_steps=10, learning_rate=2.0))
    assert schedule.learning_rate(0) == pytest.approx(0.2)
    assert schedule.learning_rate(50) == pytest.approx(1.0)
    assert schedule.learning_rate(100) == pytest.approx(0.0)


def test_the_learning_rate_follows_the_larger_of_steps_and_time():
    limits = {"max_minutes": 2.0, "finish_minutes": 0.5}
    schedule = Schedule(make_config(steps=1000, warmup_steps=1, learning_rate=1.0, **limits))
    schedule.observe(10, 30.0)  # compiled; one minute is left
    assert schedule.progress(10) == pytest.approx(0.01)
    schedule.observe(20, 45.0)
    assert schedule.progress(20) == pytest.approx(0.25)
    assert schedule.progress(24) == pytest.approx(0.35)  # extrapolated
    assert schedule.learning_rate(20) == pytest.approx(0.5 * (1 + math.cos(math.pi / 4)))
    schedule.observe(30, 90.0)
    assert schedule.progress(30) == pytest.approx(1.0)


def test_a_resumed_time_budget_goes_on_from_the_saved_progress():
    limits = {"max_minutes": 1.0, "finish_minutes": 0.0}
    schedule = Schedule(make_config(steps=1000, **limits), progress=0.5)
    schedule.observe(110, 20.0)
    assert schedule.progress(110) == pytest.approx(0.5)
    schedule.observe(120, 40.0)
    assert schedule.progress(120) == pytest.approx(0.75)


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


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("corrupted", [False, True])
def test_images_arrive_in_order(monkeypatch, workers, corrupted):
    # Five chunks in two alternating buffers: a chunk overwritten too early would differ.
    monkeypatch.setattr(data, "CHUNK", 5)
    monkeypatch.setattr(data, "TASK", 2)
    seeds = range(100, 123)
    loaded = data.load_images(
        seeds, size=64, workers=workers, device=torch.device("cpu"), corrupted=corrupted
    )
    scenes = [sample_scene(seed) for seed in seeds]
    for index, (seed, scene) in enumerate(zip(seeds, scenes, strict=True)):
        expected = corrupt(scene, seed, 64) if corrupted else render(scene, 64)
        assert np.array_equal(loaded.images[index].numpy(), expected)
    assert loaded.captions == [scene.caption for scene in scenes]


def test_a_killed_rendering_process_ends_the_command_with_one_sentence(monkeypatch, tmp_path):
    """Catches waiting for ever for what the process was to render."""
    monkeypatch.setattr(data, "render", lambda *_: os.kill(os.getpid(), signal.SIGKILL))
    result = run(arguments("vae", tmp_path))
    assert result.exit_code == 2
    error = result.stderr.splitlines()[-1]
    assert error.startswith("error: one of 2 rendering processes was killed; start again")
    assert multiprocessing.active_children() == []


def test_a_process_killed_between_two_chunks_is_missed(monkeypatch):
    """Catches a pool that puts another process in its place, and waits for the lost task."""
    monkeypatch.setattr(data, "CHUNK", 64)
    chunks = data.render_chunks(range(6400), size=64, workers=2)
    assert len(next(chunks).captions) == 64
    multiprocessing.active_children()[0].kill()
    with pytest.raises(
        data.DataError, match=r"one of 2 rendering processes was killed; .* fewer workers"
    ):
        list(chunks)


def test_nothing_more_is_rendered_once_a_chunk_failed(monkeypatch):
    """Catches an error that is told after all of the next chunk is rendered."""

    def refuse(_):
        raise MemoryError("no room")

    monkeypatch.setattr(data, "CHUNK", 64)
    monkeypatch.setattr(torch, "from_numpy", refuse)
    with pytest.raises(MemoryError) as caught:
        data.load_images(range(6400), size=64, workers=2, device=torch.device("cpu"))
    assert caught.traceback  # which holds the iterator
    assert multiprocessing.active_children() == []


def test_no_rendering_process_outlives_a_killed_command():
    """Catches processes that wait for tasks for ever and hold the memory of their images."""
    code = """
import multiprocessing, os, signal
from distill.pretrain import data
data.CHUNK = 64
chunks = data.render_chunks(range(6400), size=64, workers=2)
next(chunks)
print(len(multiprocessing.active_children()), flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""
    # The end of the output is there when no process is left that could write to it.
    command = [sys.executable, "-c", code]
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=100)
    assert (found.stdout, found.returncode) == ("2\n", -signal.SIGKILL)


def test_corrupting_changes_exactly_the_scenes_with_copies():
    device = torch.device("cpu")
    seeds = range(60)
    loaded = data.load_images(seeds, size=64, workers=0, device=device, corrupted=True)
    assert 0 < loaded.has_copies.sum() < len(seeds)
    for seed, has_copies in zip(seeds, loaded.has_copies.tolist(), strict=True):
        scene = sample_scene(seed)
        if has_copies:
            assert not np.array_equal(loaded.images[seed].numpy(), render(scene, 64))


# --- tokenizer ---


def test_every_caption_word_is_one_token(tokenizer, tmp_path):
    captions = [sample_scene(seed).caption for seed in TEST_SEEDS[:300]]
    for caption in [*captions, *VOCABULARY]:
        tokens = tokenizer.tokenize(caption)
        assert tokens == [f"{word}</w>" for word in caption.split()]
    ids = encode(tokenizer, captions)
    assert tokenizer.batch_decode(ids, skip_special_tokens=True) == captions
    assert (ids[:, -1] == tokenizer.eos_token_id).all()
    assert (ids[:, 0] == tokenizer.bos_token_id).all()

    tokenizer.save_pretrained(tmp_path)
    loaded = CLIPTokenizer.from_pretrained(tmp_path)
    assert torch.equal(encode(loaded, captions), ids)
    assert loaded.model_max_length == 77


def test_any_other_text_tokenizes_without_loss(tokenizer):
    text = "a zebra éclair, 12 ☃"
    ids = tokenizer(text).input_ids
    assert tokenizer.unk_token_id not in ids[1:-1]
    decoded = tokenizer.decode(ids, skip_special_tokens=True)
    assert decoded.replace(" ", "") == text.replace(" ", "")


def test_merges_by_hand_and_the_same_in_every_process(tokenizer):
    # "a b" occurs in all three words, then all pairs once: alphabetical order decides.
    assert learn_merges(["abc", "abd", "ab"]) == [
        ("a", "b"),
        ("a", "b</w>"),
        ("ab", "c</w>"),
        ("ab", "d</w>"),
    ]
    # Merged pairs do not overlap: "aaa" + "a</w>".
    assert learn_merges(["aaaa"]) == [("a", "a"), ("a", "a</w>"), ("aa", "aa</w>")]
    assert CLIPTokenizer.from_pretrained(SCORER).get_vocab() == tokenizer.get_vocab()


# --- losses ---


def test_snr_weights_by_hand():
    # SNR 9, 5, 1 and 1/4: what lies above gamma is reduced, what lies below the floor raised.
    alphas = torch.tensor([0.9, 5 / 6, 0.5, 0.2], dtype=torch.float64)
    for floor, last in ((0.0, 1), (0.5, 2)):
        expected = torch.tensor([5 / 9, 1, 1, last], dtype=torch.float64)
        torch.testing.assert_close(snr_weights(alphas, floor, 5.0), expected)


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
    vae = build_vae(make_config())
    seeds = range(8)
    device = torch.device("cpu")
    images = data.load_images(seeds, size=64, workers=0, device=device).images
    before = reconstruct(vae, images)
    mean, std = latent_statistics(vae, images)
    assert (mean.abs() > 0.01).any()
    logvar = vae.encode(data.to_float(images)).latent_dist.logvar

    normalize_latents(vae, mean, std)

    torch.testing.assert_close(reconstruct(vae, images), before, rtol=1e-3, atol=1e-4)
    mean, scaled = latent_statistics(vae, images)
    torch.testing.assert_close(mean, torch.zeros(4), rtol=0, atol=1e-4)
    torch.testing.assert_close(scaled, torch.ones(4), rtol=1e-3, atol=0)
    shift = vae.encode(data.to_float(images)).latent_dist.logvar - logvar
    torch.testing.assert_close(shift, (-2 * std.log()).view(1, 4, 1, 1).expand_as(shift))


# --- rectified flow ---


def test_the_untrained_transformer_is_zero_and_every_block_the_identity():
    """Catches gates that are not zero, with which training is slow."""
    transformer = toy_transformer()
    latents = torch.randn(1, 4, 8, 8)
    tokens = {}
    for name in ("pos_embed", "norm_out"):
        module = transformer.get_submodule(name)
        if name == "norm_out":
            module.register_forward_pre_hook(lambda _, inputs: tokens.update(last=inputs[0]))
        else:
            module.register_forward_hook(lambda *args: tokens.update(first=args[-1]))
    output = transformer(latents, torch.randn(1, 5, 64), torch.randn(1, 64), torch.tensor([500.0]))
    assert torch.equal(tokens["first"], tokens["last"])
    assert not output.sample.any()


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


def test_the_scheduler_follows_the_velocity_back_to_the_latents():
    """Ten Euler steps along a straight line end at its start: training and sampling agree."""
    latents, noise = torch.randn(2, 1, 4, 8, 8)
    scheduler = FlowMatchEulerDiscreteScheduler(shift=3.0)
    scheduler.set_timesteps(10)
    sample = noise
    for timestep in scheduler.timesteps:
        sample = scheduler.step(noise - latents, timestep, sample).prev_sample
    torch.testing.assert_close(sample, latents, rtol=0, atol=1e-5)


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
    pipe = make_sd3_pipeline(toy_transformer(joint_attention_dim=384), parts, 3.0)
    captions = default_prompts(2)
    expected = pipe.encode_prompt(*[captions] * 3, do_classifier_free_guidance=False)
    text, pooled = encode_text(parts["text_encoder"], encode(parts["tokenizer"], captions))
    assert torch.equal(text, expected[0])
    assert torch.equal(pooled, expected[2])
    assert text.shape == (2, 333, 384)


def toy_transformer(joint_attention_dim=64):
    config = load_config(
        CONFIGS / "mini_sd3.yaml", SD3Config, [f"{k}={v}" for k, v in TOY["sd3"].items()]
    )
    return build_transformer(
        config, latent_channels=4, latent_size=8, text_size=joint_attention_dim // 2
    )


@pytest.mark.parametrize("standalone", [False, True])
def test_the_trained_transformer_loads_with_the_parts_of_mini_sd(runs, tmp_path, standalone):
    folder = runs / "sd3" / "model"
    pipe = load_mini_sd3(folder)
    if standalone:  # as anyone loads SD3 without T5
        pipe.save_pretrained(tmp_path)
        without = {"text_encoder_3": None, "tokenizer_3": None}
        pipe = StableDiffusion3Pipeline.from_pretrained(tmp_path, **without)
    else:
        assert {path.name for path in folder.iterdir()} == {
            "model_index.json",
            "scheduler",
            "transformer",
        }
    pipe.set_progress_bar_config(disable=True)

    def image(prompt):
        generator = torch.Generator().manual_seed(0)
        call = {"num_inference_steps": 2, "generator": generator, "output_type": "np"}
        return pipe(prompt, height=64, width=64, guidance_scale=3.0, **call).images

    first, second = (image(prompt) for prompt in default_prompts(2))
    assert first.shape == (1, 64, 64, 3)
    assert np.isfinite(first).all()
    assert not np.array_equal(first, second)


# --- export ---


def test_the_export_is_a_plain_pipeline(weights):
    pipeline = StableDiffusionPipeline.from_pretrained(weights)
    pipeline.set_progress_bar_config(disable=True)
    assert pipeline.safety_checker is None
    scheduler = pipeline.scheduler.config
    assert scheduler.beta_schedule == "scaled_linear"
    assert (scheduler.timestep_spacing, scheduler.steps_offset) == ("trailing", 1)
    assert (scheduler.clip_sample, scheduler.set_alpha_to_one) == (False, False)
    assert pipeline.text_encoder.config.eos_token_id == pipeline.tokenizer.eos_token_id

    def image(prompt):
        generator = torch.Generator().manual_seed(0)
        call = {"num_inference_steps": 2, "generator": generator, "output_type": "np"}
        return pipeline(prompt, height=64, width=64, **call).images

    first, second = (image(prompt) for prompt in default_prompts(2))
    assert first.shape == (1, 64, 64, 3)
    assert np.isfinite(first).all()
    assert not np.array_equal(first, second)


def test_the_export_is_half_precision_safetensors_with_a_scorer(weights):
    files = [path for path in weights.rglob("*") if path.suffix not in (".json",)]
    tensors = [load_file(path) for path in files if path.is_file()]
    assert len(tensors) == 4
    assert {value.dtype for part in tensors for value in part.values()} == {torch.float16}

    scorer = CLIPModel.from_pretrained(weights / "scorer", dtype=torch.float32)
    ids = encode(CLIPTokenizer.from_pretrained(weights / "scorer"), default_prompts(2))
    assert scorer(input_ids=ids, pixel_values=torch.zeros(1, 3, 64, 64)).logits_per_text.shape == (
        2,
        1,
    )


def test_the_export_names_no_path_of_the_run(runs, weights):
    """Catches configurations that carry the folder names of whoever trained."""
    texts = [path.read_text() for path in weights.rglob("*.json")]
    assert len(texts) > 5
    assert not any("_name_or_path" in text or str(runs) in text for text in texts)


def test_export_refuses_another_vae_and_an_unfinished_run(runs, weights, tmp_path):
    other = tmp_path / "other"
    AutoencoderKL.from_pretrained(runs / "vae" / "vae").apply(
        lambda module: torch.nn.init.ones_(module.weight) if hasattr(module, "weight") else None
    ).half().save_pretrained(other / "vae")
    common = ["--scorer", str(runs / "scorer"), "--output", str(tmp_path / "weights")]
    result = run(["export", "--vae", str(other), "--sd", str(runs / "sd"), *common])
    assert result.exit_code == 2
    assert "was trained with another VAE" in result.stderr
    result = run(["export", "--vae", str(runs / "vae"), "--sd", str(tmp_path), *common])
    assert result.exit_code == 2
    assert "that run has not finished" in result.stderr
    assert not (tmp_path / "weights").exists()
