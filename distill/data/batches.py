"""Micro-batches for the objective: encoded samples with noise.

A sample's noise and timestep only depend on the seed and the sample's number in the run. So a
resumed run needs no random state, and micro-batches and processes change no random numbers.
"""

from collections.abc import Iterator
from itertools import count

import torch
from diffusers import DDPMScheduler, StableDiffusionPipeline
from diffusers.models.autoencoders.vae import DiagonalGaussianDistribution

from distill.config import DistillConfig
from distill.data.stream import EncodedSamples
from distill.objective import Batch


def training_batches(
    config: DistillConfig,
    samples: EncodedSamples,
    pipe: StableDiffusionPipeline,
    *,
    first_sample: int,
    process_index: int,
    num_processes: int,
) -> Iterator[Batch]:
    """Return the endless micro-batches of one process, as arguments of the objective.

    Each one seeds torch's global generators, which DiVeQ uses.

    Raises:
        ValueError: there are fewer samples than one micro-batch over all processes.
    """
    size = config.micro_batch_size
    encoded = samples.batches(
        batch_size=size,
        seed=config.seed,
        first_sample=first_sample,
        process_index=process_index,
        num_processes=num_processes,
    )
    scheduler = DDPMScheduler.from_config(pipe.scheduler.config)
    scaling_factor = pipe.vae.config.scaling_factor

    def batches() -> Iterator[Batch]:
        starts = count(first_sample + process_index * size, size * num_processes)
        for start, batch in zip(starts, encoded, strict=False):
            seeds = [sample_seed(config.seed, start + index) for index in range(size)]
            torch.manual_seed(seeds[0])
            yield add_noise(batch, seeds, scheduler, scaling_factor)

    return batches()


def add_noise(
    encoded: Batch, seeds: list[int], scheduler: DDPMScheduler, scaling_factor: float
) -> Batch:
    """Turn encoded samples into arguments for the objective.

    Args:
        encoded: `moments` (B, 2C, h, w) of the VAE and `text_states` (B, tokens, channels).
        seeds: one seed per sample for its latent, noise and timestep.
        scheduler: noise schedule and prediction type of the base model.
        scaling_factor: scaling factor of the VAE's latents.
    """
    posterior = DiagonalGaussianDistribution(encoded["moments"].float())
    mean = posterior.mean
    generator = torch.Generator(mean.device)
    num_timesteps = scheduler.config.num_train_timesteps
    noises, timesteps = [], []
    for seed in seeds:
        generator.manual_seed(seed)
        options = {"generator": generator, "device": mean.device}
        noises.append(torch.randn((2, *mean.shape[1:]), **options))
        timesteps.append(torch.randint(num_timesteps, (1,), **options))
    latent_noise, noise = torch.stack(noises, dim=1)
    timesteps = torch.cat(timesteps)
    latents = scaling_factor * (mean + posterior.std * latent_noise)
    is_velocity = scheduler.config.prediction_type == "v_prediction"
    return {
        "noisy_latents": scheduler.add_noise(latents, noise, timesteps),
        "timesteps": timesteps,
        "text_states": encoded["text_states"],
        "target": scheduler.get_velocity(latents, noise, timesteps) if is_velocity else noise,
    }


def sample_seed(seed: int, number: int) -> int:
    """Return the seed of sample `number` of a run with `seed`."""
    return (seed * 1_000_000_007 + number) % 2**63
