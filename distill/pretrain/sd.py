"""UNet and text encoder, trained together on latents and captions of scenes."""

from pathlib import Path

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from diffusers import AutoencoderKL, UNet2DConditionModel
from torch import Tensor, nn
from transformers import CLIPTextConfig, CLIPTextModel, CLIPTokenizer

from avq_diffusers.mini import TRAINING_SEEDS
from distill.checkpointing.folders import replace_folder
from distill.pretrain.config import LatentConfig, SDConfig
from distill.pretrain.data import render_batches, shard, to_float
from distill.pretrain.export import make_pipeline, make_scheduler, save_pipeline
from distill.pretrain.loop import Batch
from distill.pretrain.tokenizer import encode, scene_tokenizer, text_sizes

NOISE_CELLS = (1, 2, 4, 8)  # cells per side of the grids of `layered_noise`


def build_text_encoder(config: SDConfig, tokenizer: CLIPTokenizer) -> CLIPTextModel:
    """Return an untrained CLIP text encoder for `tokenizer`."""
    return CLIPTextModel(CLIPTextConfig(**config.text, **text_sizes(tokenizer)))


def snr_weights(alphas_cumprod: Tensor, floor: float, gamma: float) -> Tensor:
    """Return clamp(SNR, floor, gamma) / SNR per timestep.

    These are the min-SNR-gamma weights of epsilon prediction (Hang et al., 2023), raised where the
    SNR is below `floor`. There the caption decides the layout, but the errors are small.
    """
    snr = alphas_cumprod / (1 - alphas_cumprod)
    return snr.clamp(floor, gamma) / snr


def layered_noise(
    shape: tuple[int, ...], strength: float, generator: torch.Generator, device: torch.device
) -> Tensor:
    """Return noise of unit variance: white noise plus noise that is constant over grid cells.

    This is offset noise (Guttenberg, 2023) at several scales. At the last timestep of SD's
    schedule, mean colour and layout of these plain images are still visible. A model trained on
    white noise would read them from its input instead of the caption, and miss them in sampling.
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

    def __init__(
        self, unet: UNet2DConditionModel, text_encoder: CLIPTextModel, config: SDConfig
    ) -> None:
        super().__init__()
        self.unet = unet
        self.text_encoder = text_encoder
        alphas = make_scheduler().alphas_cumprod
        self.register_buffer("signal", alphas.sqrt(), persistent=False)
        self.register_buffer("sigma", (1 - alphas).sqrt(), persistent=False)
        weights = snr_weights(alphas, config.snr_floor, config.snr_gamma)
        self.register_buffer("weights", weights, persistent=False)

    def forward(
        self, latents: Tensor, noise: Tensor, timesteps: Tensor, ids: Tensor
    ) -> dict[str, Tensor]:
        """Return the weighted `loss` and the plain `mse` of the predicted noise.

        Args:
            latents: scaled latents (n, channels, h, w).
            noise: of the same shape.
            timesteps: (n,) in [0, 1000).
            ids: token ids (n, 77).
        """
        shape = (-1, 1, 1, 1)
        noisy = self.signal[timesteps].view(shape) * latents
        noisy = noisy + self.sigma[timesteps].view(shape) * noise
        context = self.text_encoder(input_ids=ids).last_hidden_state
        predicted = self.unet(noisy, timesteps, encoder_hidden_states=context).sample.float()
        error = (predicted - noise).square().mean((1, 2, 3))
        return {"loss": (self.weights[timesteps] * error).mean(), "mse": error.mean()}


class SDTask:
    """Latents and token ids on the device, and export as a folder `model`.

    Raises:
        ValueError: `init_from` is of another architecture, or there are fewer scenes than
            processes.
        OSError: the VAE or `init_from` cannot be loaded.
    """

    def __init__(
        self, config: SDConfig, output: Path, accelerator: Accelerator, vae_folder: Path
    ) -> None:
        self.config, self.output = config, output
        device = accelerator.device
        self.vae = AutoencoderKL.from_pretrained(vae_folder).requires_grad_(False).eval()
        self.vae.to(device, memory_format=torch.channels_last)
        self.tokenizer = scene_tokenizer()
        if config.init_from is not None:
            self.tokenizer = CLIPTokenizer.from_pretrained(Path(config.init_from) / "tokenizer")
        unet = UNet2DConditionModel(**config.unet)
        text_encoder = build_text_encoder(config, self.tokenizer)
        if config.init_from is not None:
            _load_start(config.init_from, unet, text_encoder)
        self.model = SDModel(unet, text_encoder, config)
        self.model.to(device, memory_format=torch.channels_last)
        self.data = Latents(config, accelerator, self.vae, self.tokenizer)

    def batch(self, generator: torch.Generator) -> Batch:
        latents, ids = self.data.batch(generator)
        options = {"generator": generator, "device": latents.device}
        timesteps = torch.randint(len(self.model.weights), (len(latents),), **options)
        noise = layered_noise(latents.shape, self.config.layered_noise, **options)
        return {
            "latents": latents.to(memory_format=torch.channels_last),
            "noise": noise.to(memory_format=torch.channels_last),
            "timesteps": timesteps,
            "ids": ids,
        }

    def export(self, model: SDModel) -> None:
        parts = (part.half() for part in (self.vae, model.unet, model.text_encoder))
        with replace_folder(self.output / "model") as folder:
            save_pipeline(make_pipeline(*parts, self.tokenizer), folder)


def _load_start(folder: str, unet: UNet2DConditionModel, text_encoder: CLIPTextModel) -> None:
    start = UNet2DConditionModel.from_pretrained(folder, subfolder="unet")
    text = CLIPTextModel.from_pretrained(folder, subfolder="text_encoder", dtype=torch.float32)
    try:
        unet.load_state_dict(start.state_dict())
        text_encoder.load_state_dict(text.state_dict())
    except RuntimeError as error:
        raise ValueError(f"{folder} is of another size than the configuration: {error}") from error
