"""mini-sd and mini-sd3 as shipped: small, stock pipelines, trained, and close with codebooks."""

from functools import cache
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from diffusers import StableDiffusionPipeline
from safetensors import safe_open
from tiny import tiny_pipe
from torch import Tensor
from transformers import CLIPTokenizer

from avq_diffusers import (
    AVQCodebooks,
    AVQConfig,
    apply_avq,
    gather_codebooks,
    remove_avq,
    select_layers,
    summary,
)
from avq_diffusers.codebook.codebook import Codebook, constraint_error
from avq_diffusers.extras.scalecrafter.apply import usual_scalecrafter
from avq_diffusers.extras.scalecrafter.settings import MINI_SCALECRAFTER, SD15_1024, SD15_2048
from avq_diffusers.mini import (
    MINI_CODEBOOKS,
    MINI_SD,
    MINI_SD3,
    default_prompts,
    model_path,
)
from avq_diffusers.mini.loading import load_mini_sd3
from distill.scenes import (
    SCORER_SEEDS,
    TEST_SEEDS,
    TRAINING_SEEDS,
    VALIDATION_SEEDS,
    render,
    sample_scene,
)
from eval.quality.metrics import Scorer
from eval.store.report import SCORER

MEBIBYTE = 2**20
NUM_TOKENS = {0: 4096, 1: 1024}
HEAD_DIMS = {0: 40, 1: 80}
SIGMA, TIMESTEP, SCENE = 0.5, 300, sample_scene(TEST_SEEDS[70])


@pytest.fixture(scope="module")
def mini():
    pipe = StableDiffusionPipeline.from_pretrained(MINI_SD)
    pipe.set_progress_bar_config(disable=True)
    return pipe


@pytest.fixture(scope="module")
def exact(mini):
    """The output of `noisy_step`, and the number of tokens of each layer in it."""
    tokens = {}
    handles = [
        layer.attn.register_forward_pre_hook(
            lambda module, inputs, name=layer.name: tokens.update({name: inputs[0].shape[1]})
        )
        for layer in select_layers(mini.unet, (0, 1))
    ]
    output = noisy_step(mini)
    for handle in handles:
        handle.remove()
    return output, tokens


@pytest.fixture(scope="module")
def shipped():
    return AVQCodebooks.from_pretrained(MINI_CODEBOOKS)


@pytest.fixture(scope="module")
def scorer():
    return Scorer(SCORER)


def scenes(count: int, first: int = 0):
    return [sample_scene(seed) for seed in TEST_SEEDS[first : first + count]]


def pixels(images: np.ndarray) -> Tensor:
    return torch.from_numpy(images).permute(0, 3, 1, 2).float() / 127.5 - 1


@cache
@torch.no_grad()
def latents_of(pipe, size: int = 256) -> Tensor:
    """Those of one held-out scene."""
    latents = pipe.vae.encode(pixels(render(SCENE, size)[None])).latent_dist.mean
    return latents * pipe.vae.config.scaling_factor


@torch.no_grad()
def noisy_step(pipe, caption: str | None = None, size: int = 256) -> Tensor:
    """The UNet's output for the noisy latents of one held-out scene and its or another caption."""
    latents = latents_of(pipe, size)
    noise = torch.randn(latents.shape, generator=torch.Generator().manual_seed(0))
    caption = SCENE.caption if caption is None else caption
    tokens = pipe.tokenizer(caption, padding="max_length", return_tensors="pt").input_ids
    text = pipe.text_encoder(tokens).last_hidden_state
    noisy = pipe.scheduler.add_noise(latents, noise, torch.tensor([TIMESTEP]))
    return pipe.unet(noisy, TIMESTEP, text).sample


def test_its_name_stands_for_its_folder():
    assert model_path("mini-sd") == MINI_SD
    assert model_path("runs/mini-sd") == "runs/mini-sd"


@pytest.mark.parametrize(
    ("folders", "most"),
    [((MINI_SD, MINI_CODEBOOKS, SCORER), 40), ((MINI_SD3,), 24)],
)
def test_the_files_are_small_safe_and_finite(folders, most):
    """Fails for a shard that the file limit refuses, or for a pickle."""
    files = [path for folder in folders for path in Path(folder).rglob("*.*") if path.is_file()]
    assert {path.suffix for path in files} == {".json", ".safetensors"}
    assert max(path.stat().st_size for path in files) <= 16 * MEBIBYTE
    assert sum(path.stat().st_size for path in files) <= most * MEBIBYTE
    for path in (path for path in files if path.suffix == ".safetensors"):
        with safe_open(path, "pt") as file:
            for name in file.keys():  # noqa: SIM118 - a file, not a dict
                assert file.get_tensor(name).isfinite().all(), (path, name)


@pytest.mark.parametrize("load", [StableDiffusionPipeline.from_pretrained, load_mini_sd3])
def test_it_loads_in_half_precision(load):
    """Fails where a class, a component or a shard index is not as diffusers expects."""
    pipe = load(MINI_SD if load != load_mini_sd3 else MINI_SD3, dtype=torch.float16)
    model = pipe.transformer if load == load_mini_sd3 else pipe.unet
    for part in (model, pipe.vae, pipe.text_encoder):
        assert {parameter.dtype for parameter in part.parameters()} == {torch.float16}
        assert not any(parameter.is_meta for parameter in part.parameters())


def test_the_unet_has_the_topology_of_avq(mini, exact):
    """Five self-attentions at levels 0 and 1 each, with SD1.5's head dims and token counts."""
    assert type(mini) is StableDiffusionPipeline
    assert mini.safety_checker is None
    assert mini.scheduler.config.prediction_type == "epsilon"
    layers = select_layers(mini.unet, (0, 1))
    assert [layer.level for layer in layers].count(0) == 5
    assert [layer.level for layer in layers].count(1) == 5
    assert all(layer.head_dim == HEAD_DIMS[layer.level] for layer in layers)
    assert mini.unet.config.sample_size * mini.vae_scale_factor == 256
    assert exact[1] == {layer.name: NUM_TOKENS[layer.level] for layer in layers}


@pytest.mark.parametrize("folder", [Path(MINI_SD) / "tokenizer", SCORER], ids=["text", "scorer"])
def test_every_word_of_a_caption_is_one_token(folder):
    """Fails for a word that falls into letters, and for captions that are cut off."""
    tokenizer = CLIPTokenizer.from_pretrained(folder)
    vocabulary = {word for scene in scenes(1500) for word in scene.caption.split()}
    known = {word: tokenizer(word, add_special_tokens=False).input_ids for word in vocabulary}
    assert all(len(tokens) == 1 for tokens in known.values())
    assert len({tokens[0] for tokens in known.values()}) == len(vocabulary)
    for scene in scenes(100):
        words = scene.caption.split()
        tokens = tokenizer(scene.caption, truncation=True).input_ids[1:-1]
        assert tokens == [known[word][0] for word in words], scene.caption


def test_the_codebooks_keep_the_constraint(shipped, recwarn):
    """Fails for codebooks of another run, or that training left with dead children."""
    assert shipped.avq_config == AVQConfig.parse("M64P16C8", levels=(0,), codewords="stored")
    assert (shipped.config["base_model"], shipped.config["tuned"]) == ("mini-sd", True)
    training = shipped.config["training"]
    assert training["config"] == "mini_m64p16c8"
    assert set(training["layers"]) == set(shipped.layer_specs)
    for name in shipped.layer_specs:
        codebook = shipped.codebook(name)
        assert constraint_error(codebook).max() < 1e-3
        assert codebook.children.flatten(0, 2).unique(dim=0).shape[0] > 0.9 * 2 * 64 * 8
    assert not [warning for warning in recwarn if "average to their parent" in str(warning.message)]


def test_the_codebooks_are_those_of_these_layers(mini, shipped):
    """A UNet step stays close to the exact one; codebooks of swapped layers do not keep it so."""
    names = list(shipped.layer_specs)
    swapped = gather_codebooks(
        mini.unet,
        shipped.avq_config,
        {
            name: Codebook(
                shipped.codebook(other).parents.clone(), shipped.codebook(other).children.clone()
            )
            for name, other in zip(names, names[1:] + names[:1], strict=True)
        },
    )
    exact = noisy_step(mini, size=128)
    errors = [error_of(mini, exact, codebooks) for codebooks in (shipped, swapped)]
    assert 0 < errors[0] < 0.03
    assert errors[1] > 3 * errors[0]


def error_of(pipe, exact, source) -> float:
    """The relative error of a step with AVQ, which must run in all layers of level 0."""
    apply_avq(pipe, source)
    try:
        step = noisy_step(pipe, size=128)
        ran = [row.name for row in summary(pipe).rows if row.runs.startswith("AVQ")]
    finally:
        remove_avq(pipe)
    assert ran == [layer.name for layer in select_layers(pipe.unet, (0,))]
    return float((step - exact).norm() / exact.norm())


def test_the_unet_denoises_held_out_scenes_and_reads_the_caption(mini, exact):
    """Fails for another noise schedule, an untrained UNet, or a text encoder of another UNet."""
    noise = torch.randn(1, 4, 64, 64, generator=torch.Generator().manual_seed(0))
    error = F.mse_loss(exact[0], noise)
    assert error < 0.01  # zeros would reach 1
    other = scenes(1, first=99)[0].caption
    assert F.mse_loss(noisy_step(mini, caption=other), noise) > 10 * error


def test_seed_ranges_are_disjoint():
    """Every two of the four ranges: no evaluation meets an image of training."""
    ranges = (TRAINING_SEEDS, SCORER_SEEDS, VALIDATION_SEEDS, TEST_SEEDS)
    for first, second in combinations(ranges, 2):
        assert max(first.start, second.start) >= min(first.stop, second.stop)
    assert min(map(len, ranges)) >= 1_000_000
    assert len(TRAINING_SEEDS) == len(SCORER_SEEDS)  # `num_scenes` has one limit for both


def test_default_prompts_are_validation_captions():
    prompts = default_prompts()
    assert prompts == [sample_scene(seed).caption for seed in VALIDATION_SEEDS[:8]]


@torch.no_grad()
@pytest.mark.long
def test_the_scorer_retrieves_held_out_scenes(scorer):
    """Top-1 among 64 both ways; an untrained scorer or another tokenizer finds 1 in 64."""
    shown = scenes(64)
    images = torch.from_numpy(np.stack([render(scene) for scene in shown]))
    model = scorer.model
    image = F.normalize(model.visual_projection(scorer(images.permute(0, 3, 1, 2))), dim=-1)
    tokens = scorer.tokenizer(
        [scene.caption for scene in shown], padding="max_length", return_tensors="pt"
    )
    text = F.normalize(model.text_projection(model.text_model(**tokens).pooler_output), dim=-1)
    similarity = image @ text.T
    for direction in (similarity, similarity.T):
        assert (direction.argmax(1) == torch.arange(64)).float().mean() >= 0.95


@torch.no_grad()
def test_the_vae_reconstructs_held_out_scenes(mini):
    """Fails for fp16 damage, a wrong scaling of images, or a decoder of another encoder."""
    latents = latents_of(mini)
    copy = mini.vae.decode(latents / mini.vae.config.scaling_factor).sample.clamp(-1, 1)
    assert -10 * ((copy - pixels(render(SCENE)[None])) / 2).square().mean().log10() >= 34
    assert 0.5 < latents.std() < 2


def test_it_has_scalecrafter_settings_of_its_own(mini):
    """Catches those of SD1.5 for mini-sd, and mini-sd's for other models or sizes."""
    cases = (mini, 512, MINI_SCALECRAFTER), (mini, 1024, SD15_2048), (tiny_pipe(), 256, SD15_1024)
    for pipe, side, config in cases:
        assert usual_scalecrafter(pipe, side, side) is config


@pytest.fixture(scope="module")
def mini_sd3():
    pipe = load_mini_sd3()
    pipe.set_progress_bar_config(disable=True)
    return pipe


def test_the_transformer_is_of_sd35_in_small(mini_sd3):
    config = mini_sd3.transformer.config
    assert (config.patch_size, config.attention_head_dim, config.qk_norm) == (2, 64, "rms_norm")
    assert [block.attn2 is not None for block in mini_sd3.transformer.transformer_blocks] == (
        [True] * 3 + [False] * 4
    )
    assert mini_sd3.default_sample_size * mini_sd3.vae_scale_factor == 512


@torch.no_grad()
def velocity(pipe, caption: str | None = None) -> tuple[Tensor, Tensor]:
    """The predicted and the true velocity of one held-out scene, for its or another caption."""
    latents = latents_of(pipe, 384)  # near its 512, at a third of the time
    noise = torch.randn(latents.shape, generator=torch.Generator().manual_seed(0))
    texts = [SCENE.caption if caption is None else caption] * 3
    text, _, pooled, _ = pipe.encode_prompt(*texts, do_classifier_free_guidance=False)
    mixed = torch.lerp(latents, noise, SIGMA)
    predicted = pipe.transformer(mixed, text, pooled, torch.tensor([1000 * SIGMA])).sample
    return predicted, noise - latents


@pytest.fixture(scope="module")
def exact_velocity(mini_sd3):
    return velocity(mini_sd3)


def test_mini_sd3_predicts_the_velocity_of_held_out_scenes_and_reads_the_caption(
    mini_sd3, exact_velocity
):
    """Fails for an untrained transformer, another encoder or scaling, and velocities reversed."""
    predicted, expected = exact_velocity
    error = F.mse_loss(predicted, expected)
    assert error < 0.1  # zeros would reach 2
    other, _ = velocity(mini_sd3, scenes(1, first=99)[0].caption)
    assert F.mse_loss(other, expected) > 1.5 * error


def test_avq_in_every_layer_of_mini_sd3_stays_close(mini_sd3, exact_velocity):
    exact, _ = exact_velocity
    apply_avq(mini_sd3, route="always")
    try:
        output, _ = velocity(mini_sd3)
        rows = summary(mini_sd3).rows
    finally:
        remove_avq(mini_sd3)
    assert len(rows) == 10
    assert all(row.runs.startswith("AVQ") for row in rows)
    assert 0 < (output - exact).norm() / exact.norm() < 0.015
