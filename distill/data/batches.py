"""Micro-batches for the objective: encoded samples of the stream, with noise.

What is drawn for a sample depends only on the seed and the sample's number in the stream. So a
resumed run needs no random state, and the split into micro-batches and processes changes no draw.
"""

from collections.abc import Iterator
from itertools import count

import torch
from diffusers import DDPMScheduler, StableDiffusionPipeline
from diffusers.models.autoencoders.vae import DiagonalGaussianDistribution

from distill.config import DistillConfig
from distill.data.dataset import stream
from distill.data.encoder import Encoder
from distill.objective import Batch


def training_batches(
    config: DistillConfig,
    pipe: StableDiffusionPipeline,
    *,
    first_sample: int,
    process_index: int,
    num_processes: int,
) -> Iterator[Batch]:
    """Endless micro-batches of one process, as arguments of the objective.

    torch's own generators, from which DiVeQ draws, are seeded for each.
    """
    size = config.micro_batch_size
    encoded = stream(
        config.data,
        config.image_size,
        Encoder(pipe.vae, pipe.text_encoder, pipe.tokenizer),
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
            yield noised(batch, seeds, scheduler, scaling_factor)

    return batches()


def noised(
    encoded: Batch, seeds: list[int], scheduler: DDPMScheduler, scaling_factor: float
) -> Batch:
    """Arguments of the objective for encoded samples.

    Args:
        encoded: `moments` (B, 2 C, h, w) of the VAE and `text_states` (B, tokens, channels).
        seeds: of each sample's latent, noise and timestep.
        scheduler: noise schedule and prediction type of the base model.
        scaling_factor: of the VAE's latents.
    """
    posterior = DiagonalGaussianDistribution(encoded["moments"].float())
    mean = posterior.mean
    generator = torch.Generator(mean.device)
    num_timesteps = scheduler.config.num_train_timesteps
    noises, timesteps = [], []
    for seed in seeds:
        generator.manual_seed(seed)
        draw = {"generator": generator, "device": mean.device}
        noises.append(torch.randn((2, *mean.shape[1:]), **draw))
        timesteps.append(torch.randint(num_timesteps, (1,), **draw))
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
    """Seed of everything that is drawn for one sample of the stream."""
    return (seed * 1_000_000_007 + number) % 2**63
