"""The autoencoder with a downsampling factor of 4."""

from pathlib import Path

import torch
from accelerate import Accelerator
from diffusers import AutoencoderKL
from torch import Tensor, nn

from distill.pretrain.config import VAEConfig
from distill.pretrain.data import load_images, shard, to_float
from distill.pretrain.export import MAX_SHARD_SIZE
from distill.pretrain.loop import Batch
from distill.scenes import TRAINING_SEEDS, VALIDATION_SEEDS

BATCH = 64  # images per batch in evaluation


class VAEModel(nn.Module):
    """The autoencoder with its losses."""

    def __init__(self, vae: AutoencoderKL, config: VAEConfig) -> None:
        super().__init__()
        self.vae = vae
        self.config = config

    def forward(self, images: Tensor, noise: Tensor) -> dict[str, Tensor]:
        """Return the losses of `images` (n, 3, h, w) with latent `noise`."""
        posterior = self.vae.encode(images).latent_dist
        mean, logvar = posterior.mean.float(), posterior.logvar.float()
        latents = mean + torch.exp(0.5 * logvar) * noise
        error = self.vae.decode(latents).sample.float() - images
        losses = {
            "l1": error.abs().mean(),
            "mse": error.square().mean(),
            "edge": edge_loss(error),
            "kl": 0.5 * (mean.square() + logvar.exp() - 1 - logvar).mean(),
        }
        total = losses["l1"] + self.config.mse_weight * losses["mse"]
        total = total + self.config.edge_weight * losses["edge"]
        return {"loss": total + self.config.kl_weight * losses["kl"], **losses}


def edge_loss(error: Tensor) -> Tensor:
    """Return the mean L1 norm of the horizontal and vertical differences of `error`."""
    return (error.diff(dim=-1).abs().mean() + error.diff(dim=-2).abs().mean()) / 2


class VAETask:
    """Training images on the device.

    Raises:
        ValueError: there are fewer scenes than processes.
    """

    result = "vae"

    def __init__(self, config: VAEConfig, accelerator: Accelerator) -> None:
        self.config = config
        device = accelerator.device
        common = {"size": config.image_size, "workers": config.workers, "device": device}
        seeds = TRAINING_SEEDS[: config.num_scenes]
        seeds = shard(seeds, accelerator.process_index, accelerator.num_processes)
        label = "render" if accelerator.is_main_process else None
        self.images = load_images(seeds, progress=label, **common).images
        self.validation = None
        if accelerator.is_main_process:
            seeds = VALIDATION_SEEDS[: config.num_validation]
            self.validation = load_images(seeds, **common).images
        vae = AutoencoderKL(**config.vae).to(device, memory_format=torch.channels_last)
        self.model = VAEModel(vae, config)
        side = config.image_size >> (len(vae.config.block_out_channels) - 1)
        self.latent_shape = (config.batch_size, vae.config.latent_channels, side, side)

    def batch(self, generator: torch.Generator) -> Batch:
        device = self.images.device
        shape = (self.config.batch_size,)
        index = torch.randint(len(self.images), shape, generator=generator, device=device)
        noise = torch.randn(self.latent_shape, generator=generator, device=device)
        return {"images": to_float(self.images[index]), "noise": noise}

    @torch.no_grad()
    def save(self, model: VAEModel, folder: Path) -> None:
        vae = model.vae
        normalize_latents(vae, *latent_statistics(vae, self.validation))
        latents = torch.cat([_encode(vae, part) for part in self.validation.split(BATCH)])
        vae.register_to_config(scaling_factor=round(1 / latents.std().item(), 6))
        vae.half().save_pretrained(folder, max_shard_size=MAX_SHARD_SIZE)


def latent_statistics(vae: AutoencoderKL, images: Tensor) -> tuple[Tensor, Tensor]:
    """Return mean and standard deviation (channels,) of the mean latents of uint8 `images`."""
    latents = torch.cat([_encode(vae, part) for part in images.split(BATCH)])
    return latents.mean((0, 2, 3)), latents.std((0, 2, 3))


def normalize_latents(vae: AutoencoderKL, mean: Tensor, std: Tensor) -> None:
    """Give every latent channel mean 0 and standard deviation 1.

    `quant_conv` scales the latents and `post_quant_conv` undoes it: reconstructions stay the same.
    """
    channels = len(mean)
    first, last = vae.quant_conv, vae.post_quant_conv
    shape = (-1, 1, 1, 1)
    first.weight[:channels] /= std.view(shape)
    first.bias[:channels] = (first.bias[:channels] - mean) / std
    first.bias[channels:] -= 2 * std.log()
    last.bias += last.weight[:, :, 0, 0] @ mean
    last.weight *= std.view(1, -1, 1, 1)


def _encode(vae: AutoencoderKL, images: Tensor) -> Tensor:
    return vae.encode(to_float(images)).latent_dist.mean.float()
