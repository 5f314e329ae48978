"""Noise and timesteps of the samples of distillation."""

import torch
from diffusers import DDPMScheduler
from diffusers.models.autoencoders.vae import DiagonalGaussianDistribution

from distill.data.batches import add_noise, sample_seed


def encoded(samples=6):
    generator = torch.Generator().manual_seed(0)
    moments = torch.randn(samples, 8, 4, 4, generator=generator)
    return {"moments": moments, "text_states": torch.randn(samples, 5, 32, generator=generator)}


def schedule(prediction_type):
    return DDPMScheduler(beta_schedule="scaled_linear", prediction_type=prediction_type)


def test_both_predictions_are_of_one_latent_sample():
    """Catches targets of the other type, a latent that is not sampled, and a missing scale."""
    batch, seeds = encoded(), list(range(6))
    noise = add_noise(batch, seeds, schedule("epsilon"), 0.2)
    velocity = add_noise(batch, seeds, schedule("v_prediction"), 0.2)
    assert torch.equal(noise["noisy_latents"], velocity["noisy_latents"])
    assert torch.equal(noise["timesteps"], velocity["timesteps"])
    alpha = schedule("epsilon").alphas_cumprod[noise["timesteps"]].view(-1, 1, 1, 1)
    signal, sigma = alpha.sqrt(), (1 - alpha).sqrt()
    latents = signal * velocity["noisy_latents"] - sigma * velocity["target"]
    torch.testing.assert_close(
        noise["noisy_latents"], signal * latents + sigma * noise["target"], rtol=1e-4, atol=1e-5
    )
    posterior = DiagonalGaussianDistribution(batch["moments"])
    sample = (latents / 0.2 - posterior.mean) / posterior.std
    assert 0.8 < sample.std() < 1.2
    correlation = torch.corrcoef(torch.stack([sample.flatten(), noise["target"].flatten()]))
    assert correlation[0, 1].abs() < 0.2


def test_draws_depend_on_the_sample_only():
    """Catches one draw for the batch, and draws that depend on the place in it."""
    batch, seeds = encoded(), list(range(6))
    whole = add_noise(batch, seeds, schedule("epsilon"), 1.0)
    part = {name: value[2:4] for name, value in batch.items()}
    half = add_noise(part, seeds[2:4], schedule("epsilon"), 1.0)
    for name, value in half.items():
        assert torch.equal(value, whole[name][2:4])
    assert len({tuple(x.flatten().tolist()) for x in whole["target"]}) == 6


def test_runs_of_neighbouring_seeds_share_no_draw():
    """Catches a sum of seed and number, which sample 1 of seed 0 shares with sample 0 of seed 1."""
    seeds = {sample_seed(seed, number) for seed in range(8) for number in range(1000)}
    assert len(seeds) == 8000
    assert 0 <= min(seeds) <= max(seeds) < 2**63


def test_timesteps_are_uniform():
    """Catches a last timestep, of the most noise, that is never drawn."""
    moments = torch.zeros(1, 2, 1, 1).expand(4000, -1, -1, -1)
    batch = {"moments": moments, "text_states": moments}
    drawn = add_noise(batch, list(range(4000)), schedule("epsilon"), 1.0)["timesteps"]
    assert (drawn.min(), drawn.max()) == (0, 999)
    shares = torch.histc(drawn.float(), bins=10, min=0, max=1000) / 4000
    assert (shares - 0.1).abs().max() < 0.02
