"""The autoencoder with a downsampling factor of 4."""

from pathlib import Path

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from diffusers import AutoencoderKL
from PIL import Image
from torch import Tensor, nn

from avq_diffusers.files import atomic_write
from avq_diffusers.images import image_sheet
from avq_diffusers.mini import TRAINING_SEEDS, VALIDATION_SEEDS
from distill.checkpointing.folders import replace_folder
from distill.pretrain.config import VAEConfig
from distill.pretrain.data import load_images, shard, to_float, to_uint8
from distill.pretrain.export import MAX_SHARD_SIZE
from distill.pretrain.loop import Batch

PREVIEWED = 8
BATCH = 64  # images at once in evaluation


def build_vae(config: VAEConfig) -> AutoencoderKL:
    """Return an untrained autoencoder."""
    levels = len(config.block_out_channels)
    return AutoencoderKL(
        in_channels=3,
        out_channels=3,
        down_block_types=["DownEncoderBlock2D"] * levels,
        up_block_types=["UpDecoderBlock2D"] * levels,
        block_out_channels=list(config.block_out_channels),
        layers_per_block=config.layers_per_block,
        latent_channels=config.latent_channels,
        norm_num_groups=config.norm_num_groups,
        mid_block_add_attention=False,
        sample_size=config.image_size,
        scaling_factor=1.0,
    )


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
    """Training images on the device, previews, and export as a folder `vae`.

    Raises:
        ValueError: there are fewer scenes than processes.
    """

    def __init__(self, config: VAEConfig, output: Path, accelerator: Accelerator) -> None:
        self.config, self.output = config, output
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
        vae = build_vae(config).to(device, memory_format=torch.channels_last)
        self.model = VAEModel(vae, config)
        side = config.image_size >> (len(config.block_out_channels) - 1)
        self.latent_shape = (config.batch_size, config.latent_channels, side, side)

    def batch(self, generator: torch.Generator) -> Batch:
        device = self.images.device
        shape = (self.config.batch_size,)
        index = torch.randint(len(self.images), shape, generator=generator, device=device)
        noise = torch.randn(self.latent_shape, generator=generator, device=device)
        return {"images": to_float(self.images[index]), "noise": noise}

    @torch.no_grad()
    def preview(self, model: VAEModel, step: int) -> dict[str, float]:
        images = self.validation[:PREVIEWED]
        decoded = reconstruct(model.vae, images)
        rows = [
            [Image.fromarray(image) for image in to_uint8(batch)]
            for batch in (to_float(images), decoded)
        ]
        sheet = image_sheet(rows, [""] * len(images), row_titles=["original", "reconstruction"])
        with atomic_write(self.output / "samples" / f"step-{step:08d}.png") as temporary:
            sheet.save(temporary)
        return {"psnr": self._psnr(model.vae)}

    @torch.no_grad()
    def finish(self, model: VAEModel) -> dict[str, float]:
        vae = model.vae
        with torch.autocast(self.images.device.type, enabled=False):
            mean, std = latent_statistics(vae, self.validation)
            normalize_latents(vae, mean, std)
            latents = torch.cat([_encode(vae, part) for part in self.validation.split(BATCH)])
            vae.register_to_config(scaling_factor=round(1 / latents.std().item(), 6))
            half = vae.half()
            with replace_folder(self.output / "vae") as folder:
                half.save_pretrained(folder, max_shard_size=MAX_SHARD_SIZE)
            psnr = self._psnr(half.float())
        return {"psnr_exported": psnr, "scaling_factor": vae.config.scaling_factor}

    def _psnr(self, vae: AutoencoderKL) -> float:
        errors = [
            F.mse_loss(reconstruct(vae, part).clamp(-1, 1), to_float(part), reduction="none")
            for part in self.validation.split(BATCH)
        ]
        per_image = torch.cat([error.mean((1, 2, 3)) for error in errors])
        return (10 * torch.log10(4 / per_image.clamp(min=1e-10))).mean().item()


def reconstruct(vae: AutoencoderKL, images: Tensor) -> Tensor:
    """Return the reconstruction (n, 3, h, w) of uint8 `images` from their mean latents."""
    return vae.decode(_encode(vae, images)).sample.float()


def latent_statistics(vae: AutoencoderKL, images: Tensor) -> tuple[Tensor, Tensor]:
    """Return mean and standard deviation (channels,) of the mean latents of uint8 `images`."""
    latents = torch.cat([_encode(vae, part) for part in images.split(BATCH)])
    return latents.mean((0, 2, 3)), latents.std((0, 2, 3))


def normalize_latents(vae: AutoencoderKL, mean: Tensor, std: Tensor) -> None:
    """Give every latent channel mean 0 and standard deviation 1.

    `quant_conv` scales the latents and `post_quant_conv` undoes it, so reconstructions stay.
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
