"""UNet and text encoder, trained together on latents and captions of scenes."""

from collections.abc import Sequence
from contextlib import closing
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from diffusers import AutoencoderKL, DiffusionPipeline, UNet2DConditionModel
from torch import Tensor, nn
from transformers import CLIPTextConfig, CLIPTextModel, CLIPTokenizer

from avq_diffusers.files import atomic_write
from avq_diffusers.images import image_sheet
from avq_diffusers.mini import TRAINING_SEEDS, VALIDATION_SEEDS, sample_scene
from distill.checkpointing.folders import replace_folder
from distill.pretrain.config import PretrainConfig, SD3Config, SDConfig
from distill.pretrain.data import render_chunks, shard, to_float
from distill.pretrain.export import make_pipeline, make_scheduler, save_pipeline
from distill.pretrain.loop import Batch
from distill.pretrain.tokenizer import CONTEXT_LENGTH, encode, scene_tokenizer, special_ids

ENCODER_BATCH = 128
NOISE_CELLS = (1, 2, 4, 8)  # cells per side of the grids of `layered_noise`


def build_text_encoder(config: SDConfig, tokenizer: CLIPTokenizer) -> CLIPTextModel:
    """Return an untrained CLIP text encoder for `tokenizer`."""
    return CLIPTextModel(
        CLIPTextConfig(
            vocab_size=len(tokenizer),
            hidden_size=config.text_hidden_size,
            intermediate_size=4 * config.text_hidden_size,
            projection_dim=config.text_hidden_size,
            num_hidden_layers=config.text_layers,
            num_attention_heads=config.text_heads,
            max_position_embeddings=CONTEXT_LENGTH,
            **special_ids(tokenizer),
        )
    )


def build_unet(config: SDConfig, latent_channels: int, latent_size: int) -> UNet2DConditionModel:
    """Return an untrained UNet with attention at all levels but the deepest."""
    crossed = len(config.block_out_channels) - 1
    return UNet2DConditionModel(
        sample_size=latent_size,
        in_channels=latent_channels,
        out_channels=latent_channels,
        block_out_channels=list(config.block_out_channels),
        down_block_types=["CrossAttnDownBlock2D"] * crossed + ["DownBlock2D"],
        up_block_types=["UpBlock2D"] + ["CrossAttnUpBlock2D"] * crossed,
        layers_per_block=config.layers_per_block,
        attention_head_dim=config.num_attention_heads,
        cross_attention_dim=config.text_hidden_size,
        norm_num_groups=config.norm_num_groups,
    )


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


@torch.no_grad()
def encode_scenes(
    seeds: Sequence[int],
    vae: AutoencoderKL,
    tokenizer: CLIPTokenizer,
    config: PretrainConfig,
    *,
    progress: str | None = None,
) -> tuple[Tensor, Tensor]:
    """Render scenes; return scaled latents (n, channels, h, w) in float16 and token ids (n, 77).

    Both are on the device of `vae`. `progress` is the label of the progress bar; None shows none.
    """
    # float16 keeps three more bits than bfloat16; the CPU computes in float32.
    half = vae.device.type == "cuda"
    latents, captions = [], []
    chunks = render_chunks(seeds, size=config.image_size, workers=config.workers, progress=progress)
    with closing(chunks):
        for chunk in chunks:
            images = torch.from_numpy(chunk.images).to(vae.device)
            for part in images.split(ENCODER_BATCH):
                with torch.autocast(vae.device.type, torch.float16, enabled=half):
                    mean = vae.encode(to_float(part)).latent_dist.mean
                latents.append((mean * vae.config.scaling_factor).half())
            captions += chunk.captions
    return torch.cat(latents), encode(tokenizer, captions).to(vae.device)


def save_samples(
    path: Path, pipeline: DiffusionPipeline, prompts: Sequence[str], config: SDConfig | SD3Config
) -> None:
    """Write a sheet with an image of each prompt, all of them from one seed."""
    pipeline.set_progress_bar_config(disable=True)
    images = pipeline(
        prompts,
        height=config.image_size,
        width=config.image_size,
        num_inference_steps=config.sample_steps,
        guidance_scale=config.guidance_scale,
        generator=torch.Generator(pipeline.device).manual_seed(config.seed),
    ).images
    sheet = image_sheet([[image] for image in images], [""], row_titles=prompts)
    with atomic_write(path) as temporary:
        sheet.save(temporary)


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
    """Latents and token ids on the device, previews, and export as a folder `model`.

    Raises:
        ValueError: `init_from` is of another architecture, or there are fewer scenes than
            processes.
        OSError: the VAE or `init_from` cannot be loaded.
    """

    def __init__(
        self, config: SDConfig, output: Path, accelerator: Accelerator, vae_folder: Path
    ) -> None:
        self.config, self.output = config, output
        self.device = accelerator.device
        self.vae = AutoencoderKL.from_pretrained(vae_folder).requires_grad_(False).eval()
        self.vae.to(self.device, memory_format=torch.channels_last)
        if config.init_from is None:
            self.tokenizer = scene_tokenizer()
            side = config.image_size >> (len(self.vae.config.block_out_channels) - 1)
            unet = build_unet(config, self.vae.config.latent_channels, side)
            text_encoder = build_text_encoder(config, self.tokenizer)
        else:
            self.tokenizer = CLIPTokenizer.from_pretrained(Path(config.init_from) / "tokenizer")
            unet, text_encoder = _load_start(config)
        self.model = SDModel(unet, text_encoder, config)
        self.model.to(self.device, memory_format=torch.channels_last)
        seeds = TRAINING_SEEDS[: config.num_scenes]
        seeds = shard(seeds, accelerator.process_index, accelerator.num_processes)
        label = "render and encode" if accelerator.is_main_process else None
        encode_seeds = partial(encode_scenes, vae=self.vae, tokenizer=self.tokenizer, config=config)
        self.latents, self.ids = encode_seeds(seeds, progress=label)
        self.empty = encode(self.tokenizer, [""]).to(self.device)[0]
        if accelerator.is_main_process:
            seeds = VALIDATION_SEEDS[: config.num_validation]
            self.validation = encode_seeds(seeds)
            seeds = VALIDATION_SEEDS[: config.num_prompts]
            self.prompts = [sample_scene(seed).caption for seed in seeds]

    def batch(self, generator: torch.Generator) -> Batch:
        shape = (self.config.batch_size,)
        options = {"generator": generator, "device": self.device}
        index = torch.randint(len(self.latents), shape, **options)
        ids = drop_captions(self.ids[index], self.empty, self.config.caption_dropout, generator)
        timesteps = torch.randint(len(self.model.weights), shape, **options)
        noise = layered_noise(
            (*shape, *self.latents.shape[1:]), self.config.layered_noise, **options
        )
        return {
            "latents": self.latents[index].float().to(memory_format=torch.channels_last),
            "noise": noise.to(memory_format=torch.channels_last),
            "timesteps": timesteps,
            "ids": ids,
        }

    @torch.no_grad()
    def preview(self, model: SDModel, step: int) -> dict[str, float]:
        pipeline = make_pipeline(self.vae, model.unet, model.text_encoder, self.tokenizer)
        path = self.output / "samples" / f"step-{step:08d}.png"
        save_samples(path, pipeline, self.prompts, self.config)
        return self._validation_losses(model)

    @torch.no_grad()
    def finish(self, model: SDModel) -> dict[str, float]:
        pipeline = make_pipeline(self.vae, model.unet, model.text_encoder, self.tokenizer)
        # The export is in half precision; the final losses are those of the rounded weights.
        parts = (self.vae, model.unet, model.text_encoder)
        for part in parts:
            part.half()
        with replace_folder(self.output / "model") as folder:
            save_pipeline(pipeline, folder)
        for part in parts:
            part.float()
        losses = self._validation_losses(model)
        return {f"{name}_exported": value for name, value in losses.items()}

    def _validation_losses(self, model: SDModel) -> dict[str, float]:
        """Return the mean losses over the validation scenes, at evenly spaced timesteps."""
        latents, ids = self.validation
        generator = torch.Generator(self.device).manual_seed(self.config.seed)
        noise = torch.randn(latents.shape, generator=generator, device=self.device)
        spread = torch.arange(len(latents), device=self.device) * len(model.weights)
        timesteps = spread // len(latents)
        inputs = (latents.float(), noise, timesteps, ids)
        totals: dict[str, Tensor] = {}
        for batch in zip(*(x.split(self.config.batch_size) for x in inputs), strict=True):
            losses = model(*batch)
            totals = {name: totals.get(name, 0) + x * len(batch[0]) for name, x in losses.items()}
        return {f"validation_{name}": x.item() / len(latents) for name, x in totals.items()}


def _load_start(config: SDConfig) -> tuple[UNet2DConditionModel, CLIPTextModel]:
    unet = UNet2DConditionModel.from_pretrained(config.init_from, subfolder="unet")
    text_encoder = CLIPTextModel.from_pretrained(
        config.init_from, subfolder="text_encoder", dtype=torch.float32
    )
    expected = {
        "block_out_channels": (list(unet.config.block_out_channels), config.block_out_channels),
        "layers_per_block": (unet.config.layers_per_block, config.layers_per_block),
        "num_attention_heads": (unet.config.attention_head_dim, config.num_attention_heads),
        "text_hidden_size": (text_encoder.config.hidden_size, config.text_hidden_size),
        "text_layers": (text_encoder.config.num_hidden_layers, config.text_layers),
    }
    for name, (found, wanted) in expected.items():
        if found != (list(wanted) if isinstance(wanted, tuple) else wanted):
            raise ValueError(
                f"{name} is {wanted} in the configuration, but {found} in {config.init_from}."
            )
    return unet, text_encoder
