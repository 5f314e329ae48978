"""UNet and text encoder, trained together on latents and captions of scenes."""

from pathlib import Path

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from diffusers import AutoencoderKL, DDIMScheduler, UNet2DConditionModel
from diffusers.training_utils import compute_snr
from torch import Tensor, nn
from transformers import CLIPTextConfig, CLIPTextModel, CLIPTokenizer

from avq_diffusers.mini import MINI_SD
from distill.pretrain.config import LatentConfig, SDConfig
from distill.pretrain.data import render_batches, shard, to_float
from distill.pretrain.export import make_scheduler, save_sd
from distill.pretrain.loop import Batch
from distill.pretrain.tokenizer import encode, scene_tokenizer, text_sizes
from distill.scenes import TRAINING_SEEDS

NOISE_CELLS = (1, 2, 4, 8)  # cells per side of the grids of `layered_noise`


def build_text_encoder(config: SDConfig, tokenizer: CLIPTokenizer) -> CLIPTextModel:
    """Return an untrained CLIP text encoder for `tokenizer`."""
    return CLIPTextModel(CLIPTextConfig(**config.text, **text_sizes(tokenizer)))


def snr_weights(scheduler: DDIMScheduler, timesteps: Tensor, config: SDConfig) -> Tensor:
    """Return clamp(SNR, snr_floor, snr_gamma) / SNR of timesteps (n,).

    The min-SNR-gamma weights for epsilon prediction (Hang et al., 2023), raised where the SNR is
    below the floor: there the caption determines the layout, but the errors are small.
    """
    snr = compute_snr(scheduler, timesteps)
    return snr.clamp(config.snr_floor, config.snr_gamma) / snr


def layered_noise(
    shape: tuple[int, ...], strength: float, generator: torch.Generator, device: torch.device
) -> Tensor:
    """Return noise of unit variance: white noise plus noise that is constant over grid cells.

    This is offset noise (Guttenberg, 2023) at several scales. At the last timestep of SD's
    schedule, the mean colour and layout of these plain images are still visible. A model trained on
    white noise would read them from its input instead of the caption, and lack them when sampling.
    """
    noise = torch.randn(shape, generator=generator, device=device)
    for cells in NOISE_CELLS:
        coarse = torch.randn((*shape[:2], cells, cells), generator=generator, device=device)
        noise += strength * F.interpolate(coarse, size=shape[2:], mode="nearest")
    return noise / (1 + len(NOISE_CELLS) * strength**2) ** 0.5


def drop_captions(ids: Tensor, empty: Tensor, share: float, generator: torch.Generator) -> Tensor:
    """Replace each row of `ids` (n, length) by `empty` (length,) with probability `share`."""
    chance = torch.rand((len(ids), 1), generator=generator, device=ids.device)
    return torch.where(chance < share, empty, ids)


class Latents:
    """The training scenes of a process, on its device.

    Attributes:
        latents: scaled latents (n, channels, h, w) in float16.
        ids: token ids (n, 77) of the captions.
        empty: token ids (77,) of the empty caption.

    Raises:
        ValueError: there are fewer scenes than processes.
    """

    @torch.no_grad()
    def __init__(
        self,
        config: LatentConfig,
        accelerator: Accelerator,
        vae: AutoencoderKL,
        tokenizer: CLIPTokenizer,
    ) -> None:
        self.config, self.device = config, accelerator.device
        seeds = TRAINING_SEEDS[: config.num_scenes]
        seeds = shard(seeds, accelerator.process_index, accelerator.num_processes)
        # float16 keeps three more bits than bfloat16; the CPU computes in float32.
        half = self.device.type == "cuda"
        label = "render and encode" if accelerator.is_main_process else None
        options = {"size": config.image_size, "workers": config.workers, "progress": label}
        latents, captions = [], []
        for scenes in render_batches(seeds, **options):
            with torch.autocast(self.device.type, torch.float16, enabled=half):
                mean = vae.encode(to_float(scenes.images.to(self.device))).latent_dist.mean
            latents.append((mean * vae.config.scaling_factor).half())
            captions += scenes.captions
        self.latents = torch.cat(latents)
        self.ids = encode(tokenizer, captions).to(self.device)
        self.empty = encode(tokenizer, [""]).to(self.device)[0]

    def batch(self, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Random latents, and their token ids after `drop_captions`."""
        shape = (self.config.batch_size,)
        index = torch.randint(len(self.ids), shape, generator=generator, device=self.device)
        ids = drop_captions(self.ids[index], self.empty, self.config.caption_dropout, generator)
        return self.latents[index].float(), ids


class SDModel(nn.Module):
    """UNet and text encoder with the denoising loss."""

    def __init__(self, unet: UNet2DConditionModel, text_encoder: CLIPTextModel) -> None:
        super().__init__()
        self.unet = unet
        self.text_encoder = text_encoder

    def forward(
        self, noisy: Tensor, noise: Tensor, timesteps: Tensor, weights: Tensor, ids: Tensor
    ) -> dict[str, Tensor]:
        """Return the weighted `loss` and the plain `mse` of the predicted noise.

        Args:
            noisy: scaled latents with noise (n, channels, h, w).
            noise: of the same shape.
            timesteps: (n,) in [0, 1000).
            weights: (n,).
            ids: token ids (n, 77).
        """
        context = self.text_encoder(input_ids=ids).last_hidden_state
        predicted = self.unet(noisy, timesteps, encoder_hidden_states=context).sample.float()
        error = (predicted - noise).square().mean((1, 2, 3))
        return {"loss": (weights * error).mean(), "mse": error.mean()}


class SDTask:
    """Latents and token ids on the device.

    Raises:
        ValueError: there are fewer scenes than processes.
        OSError: the VAE or `init_from` cannot be loaded.
    """

    result = "model"

    def __init__(self, config: SDConfig, accelerator: Accelerator, vae_folder: Path) -> None:
        self.config = config
        device = accelerator.device
        self.vae = AutoencoderKL.from_pretrained(vae_folder).requires_grad_(False).eval()
        self.vae.to(device, memory_format=torch.channels_last)
        start = config.init_from
        self.tokenizer = scene_tokenizer(start or MINI_SD)
        if start is None:
            unet = UNet2DConditionModel(**config.unet)
            text_encoder = build_text_encoder(config, self.tokenizer)
        else:
            unet = UNet2DConditionModel.from_pretrained(start, subfolder="unet")
            text_encoder = CLIPTextModel.from_pretrained(start, subfolder="text_encoder")
        self.model = SDModel(unet, text_encoder).train()
        self.model.to(device, memory_format=torch.channels_last)
        self.data = Latents(config, accelerator, self.vae, self.tokenizer)
        self.scheduler = make_scheduler()

    def batch(self, generator: torch.Generator) -> Batch:
        latents, ids = self.data.batch(generator)
        options = {"generator": generator, "device": latents.device}
        num_timesteps = self.scheduler.config.num_train_timesteps
        timesteps = torch.randint(num_timesteps, (len(latents),), **options)
        noise = layered_noise(latents.shape, self.config.layered_noise, **options)
        noisy = self.scheduler.add_noise(latents, noise, timesteps)
        return {
            "noisy": noisy.to(memory_format=torch.channels_last),
            "noise": noise.to(memory_format=torch.channels_last),
            "timesteps": timesteps,
            "weights": snr_weights(self.scheduler, timesteps, self.config),
            "ids": ids,
        }

    def save(self, model: SDModel, folder: Path) -> None:
        parts = (part.half() for part in (self.vae, model.unet, model.text_encoder))
        save_sd(*parts, self.tokenizer, folder)
