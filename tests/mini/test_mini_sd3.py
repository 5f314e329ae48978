"""mini-sd3 as shipped: small, in SD3's form with mini-sd's parts, and trained."""

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors import safe_open
from torch import Tensor

from avq_diffusers import apply_avq, remove_avq, set_num_refined, summary
from avq_diffusers.mini import MINI_SD3, TEST_SEEDS, render, sample_scene
from avq_diffusers.mini.loading import load_mini_sd3

MEBIBYTE = 2**20
SIGMA = 0.5


@pytest.fixture(scope="module")
def mini():
    pipe = load_mini_sd3()
    pipe.set_progress_bar_config(disable=True)
    return pipe


def test_the_files_are_small_safe_and_finite():
    files = [path for path in Path(MINI_SD3).rglob("*.*") if path.is_file()]
    assert {path.suffix for path in files} == {".json", ".safetensors"}
    assert max(path.stat().st_size for path in files) <= 16 * MEBIBYTE
    assert sum(path.stat().st_size for path in files) <= 24 * MEBIBYTE
    for path in Path(MINI_SD3).rglob("*.safetensors"):
        with safe_open(path, "pt") as file:
            for name in file.keys():  # noqa: SIM118 - a file, not a dict
                tensor = file.get_tensor(name)
                assert tensor.dtype == torch.float16
                assert tensor.isfinite().all(), (path, name)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_it_loads_in_one_dtype(dtype):
    pipe = load_mini_sd3(dtype=dtype)
    for part in (pipe.transformer, pipe.vae, pipe.text_encoder):
        assert {parameter.dtype for parameter in part.parameters()} == {dtype}
        assert not any(parameter.is_meta for parameter in part.parameters())


def test_the_transformer_is_of_sd35_in_small(mini):
    config = mini.transformer.config
    assert (config.patch_size, config.attention_head_dim, config.qk_norm) == (2, 64, "rms_norm")
    assert [block.attn2 is not None for block in mini.transformer.transformer_blocks] == (
        [True] * 3 + [False] * 4
    )
    assert mini.default_sample_size * mini.vae_scale_factor == 256


@torch.no_grad()
def velocity(pipe, caption: str | None = None) -> tuple[Tensor, Tensor]:
    """The predicted and the true velocity of one held-out scene, for its or another caption."""
    scene = sample_scene(TEST_SEEDS[70])
    image = torch.from_numpy(render(scene)[None]).permute(0, 3, 1, 2).float() / 127.5 - 1
    latents = pipe.vae.encode(image).latent_dist.mean * pipe.vae.config.scaling_factor
    noise = torch.randn(latents.shape, generator=torch.Generator().manual_seed(0))
    texts = [scene.caption if caption is None else caption] * 3
    text, _, pooled, _ = pipe.encode_prompt(*texts, do_classifier_free_guidance=False)
    mixed = torch.lerp(latents, noise, SIGMA)
    timestep = torch.tensor([1000 * SIGMA])
    predicted = pipe.transformer(mixed, text, pooled, timestep).sample
    return predicted, noise - latents


def test_it_predicts_the_velocity_of_held_out_scenes_and_reads_the_caption(mini):
    """Fails for an untrained transformer, another encoder or scaling, and velocities reversed."""
    predicted, expected = velocity(mini)
    error = F.mse_loss(predicted, expected)
    assert error < 0.1  # zeros would reach 2
    other, _ = velocity(mini, sample_scene(TEST_SEEDS[99]).caption)
    assert F.mse_loss(other, expected) > 1.5 * error


def test_avq_runs_in_every_layer_and_stays_close(mini):
    """The image's own second attention is what 192 columns of 1024 tokens change most."""
    exact, _ = velocity(mini)
    apply_avq(mini, route="always")
    try:
        output, _ = velocity(mini)
        rows = summary(mini).rows
        set_num_refined(mini, {row.name: "exact" for row in rows if row.name.endswith("attn2")})
        joint, _ = velocity(mini)
    finally:
        remove_avq(mini)
    assert len(rows) == 10
    assert all(row.runs.startswith("AVQ") for row in rows)
    assert 0 < ((output - exact).norm() / exact.norm()).item() < 0.2
    assert 0 < ((joint - exact).norm() / exact.norm()).item() < 0.05
