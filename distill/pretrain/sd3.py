"""The transformer of mini-sd3: rectified flow on latents and captions of scenes.

As in SD3 (Esser et al., 2024), a latent is mixed with noise by its noise level sigma,
(1 - sigma) latent + sigma noise, and the model predicts the velocity, noise - latent. The logit of
sigma is normal, and sigma is then shifted towards noise.
"""

from functools import partial
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from diffusers import SD3Transformer2DModel
from torch import Tensor, nn
from transformers import CLIPTextModelWithProjection

from avq_diffusers.mini import TRAINING_SEEDS, VALIDATION_SEEDS, sample_scene
from avq_diffusers.mini.loading import shared_parts
from distill.checkpointing.folders import replace_folder
from distill.pretrain.config import SD3Config
from distill.pretrain.data import shard
from distill.pretrain.export import make_sd3_pipeline, save_sd3
from distill.pretrain.loop import Batch
from distill.pretrain.sd import drop_captions, encode_scenes, save_samples
from distill.pretrain.tokenizer import encode

T5_TOKENS = 256  # zeros in the pipeline, which has no T5
TIMESTEPS = 1000


def build_transformer(
    config: SD3Config, *, latent_channels: int, latent_size: int, text_size: int
) -> SD3Transformer2DModel:
    """Return an untrained transformer for a CLIP encoder of width `text_size`, used twice.

    It starts as DiT does (Peebles and Xie, 2023): the gates of all blocks and the output are zero.
    """
    transformer = SD3Transformer2DModel(
        sample_size=latent_size,
        patch_size=config.patch_size,
        in_channels=latent_channels,
        out_channels=latent_channels,
        num_layers=config.num_layers,
        attention_head_dim=config.attention_head_dim,
        num_attention_heads=config.num_attention_heads,
        joint_attention_dim=2 * text_size,
        caption_projection_dim=config.num_attention_heads * config.attention_head_dim,
        pooled_projection_dim=2 * text_size,
        pos_embed_max_size=config.pos_embed_max_size,
        dual_attention_layers=list(config.dual_attention_layers),
        qk_norm="rms_norm",
    )
    for module in transformer.modules():
        if isinstance(module, nn.Linear):
            nn.init.xavier_uniform_(module.weight)
            nn.init.zeros_(module.bias)
    modulations = [
        norm.linear
        for block in transformer.transformer_blocks
        for norm in (block.norm1, block.norm1_context)
    ]
    for module in (*modulations, transformer.norm_out.linear, transformer.proj_out):
        nn.init.zeros_(module.weight)
    return transformer


def freeze_unused(transformer: SD3Transformer2DModel) -> None:
    """Freeze the last block's text queries: the model drops what they attend to."""
    attn = transformer.transformer_blocks[-1].attn
    for module in (attn.add_q_proj, attn.norm_added_q):
        module.requires_grad_(False)


def noise_levels(shape: tuple[int, ...], shift: float, **options: Any) -> Tensor:
    """Return noise levels in (0, 1): sigmoids of normal numbers, then shifted as by the scheduler.

    Args:
        shape: of the result.
        shift: the ratio of noise to signal grows by this factor.
        options: `generator` and `device`.
    """
    sigmas = torch.randn(shape, **options).sigmoid()
    return shift * sigmas / (1 + (shift - 1) * sigmas)


@torch.no_grad()
def encode_text(encoder: CLIPTextModelWithProjection, ids: Tensor) -> tuple[Tensor, Tensor]:
    """Return what SD3's pipeline makes of token ids (n, 77), for one encoder in both places.

    Returns:
        text states (n, 77 + 256, 2 width), whose last 256 are zero, and their pooled form
        (n, 2 width).
    """
    output = encoder(ids, output_hidden_states=True)
    states = output.hidden_states[-2].repeat(1, 1, 2)
    zeros = states.new_zeros(len(ids), T5_TOKENS, states.shape[-1])
    return torch.cat([states, zeros], 1), output.text_embeds.repeat(1, 2)


class SD3Model(nn.Module):
    """The transformer with the loss of rectified flow."""

    def __init__(self, transformer: SD3Transformer2DModel) -> None:
        super().__init__()
        self.transformer = transformer

    def forward(
        self, latents: Tensor, noise: Tensor, sigmas: Tensor, text: Tensor, pooled: Tensor
    ) -> dict[str, Tensor]:
        """Return the `loss`, the mean squared error of the predicted velocity.

        Args:
            latents: scaled latents (n, channels, h, w).
            noise: of the same shape.
            sigmas: noise levels (n,) in (0, 1).
            text, pooled: see `encode_text`.
        """
        mixed = torch.lerp(latents, noise, sigmas.view(-1, 1, 1, 1))
        velocity = self.transformer(mixed, text, pooled, TIMESTEPS * sigmas, return_dict=False)[0]
        return {"loss": (velocity.float() - (noise - latents)).square().mean()}


class SD3Task:
    """Latents and token ids on the device, previews, and export as a folder `model`.

    Raises:
        ValueError: `init_from` is of another architecture, or there are fewer scenes than
            processes.
        OSError: `init_from` cannot be loaded.
    """

    def __init__(self, config: SD3Config, output: Path, accelerator: Accelerator) -> None:
        self.config, self.output = config, output
        self.device = accelerator.device
        self.parts = shared_parts()
        self.vae, self.encoder = self.parts["vae"], self.parts["text_encoder"]
        for module in (self.vae, self.encoder):
            module.requires_grad_(False).to(self.device)
        self.vae.to(memory_format=torch.channels_last)
        transformer = build_transformer(
            config,
            latent_channels=self.vae.config.latent_channels,
            latent_size=config.image_size >> (len(self.vae.config.block_out_channels) - 1),
            text_size=self.encoder.config.hidden_size,
        )
        if config.init_from is not None:
            transformer = _load_start(config.init_from, transformer)
        freeze_unused(transformer)
        self.model = SD3Model(transformer).to(self.device)
        tokenizer = self.parts["tokenizer"]
        encode_seeds = partial(encode_scenes, vae=self.vae, tokenizer=tokenizer, config=config)
        seeds = TRAINING_SEEDS[: config.num_scenes]
        seeds = shard(seeds, accelerator.process_index, accelerator.num_processes)
        label = "render and encode" if accelerator.is_main_process else None
        self.latents, self.ids = encode_seeds(seeds, progress=label)
        self.empty = encode(tokenizer, [""]).to(self.device)[0]
        if accelerator.is_main_process:
            self.validation = encode_seeds(VALIDATION_SEEDS[: config.num_validation])
            seeds = VALIDATION_SEEDS[: config.num_prompts]
            self.prompts = [sample_scene(seed).caption for seed in seeds]

    def batch(self, generator: torch.Generator) -> Batch:
        shape = (self.config.batch_size,)
        options = {"generator": generator, "device": self.device}
        index = torch.randint(len(self.latents), shape, **options)
        ids = drop_captions(self.ids[index], self.empty, self.config.caption_dropout, generator)
        text, pooled = encode_text(self.encoder, ids)
        return {
            "latents": self.latents[index].float(),
            "noise": torch.randn((*shape, *self.latents.shape[1:]), **options),
            "sigmas": noise_levels(shape, self.config.shift, **options),
            "text": text,
            "pooled": pooled,
        }

    @torch.no_grad()
    def preview(self, model: SD3Model, step: int) -> dict[str, float]:
        pipeline = make_sd3_pipeline(model.transformer, self.parts, self.config.shift)
        path = self.output / "samples" / f"step-{step:08d}.png"
        save_samples(path, pipeline, self.prompts, self.config)
        return {"validation_loss": self._validation_loss(model)}

    @torch.no_grad()
    def finish(self, model: SD3Model) -> dict[str, float]:
        # The export is in half precision; the final loss is that of the rounded weights.
        model.transformer.half()
        pipeline = make_sd3_pipeline(model.transformer, self.parts, self.config.shift)
        with replace_folder(self.output / "model") as folder:
            save_sd3(pipeline, folder)
        model.transformer.float()
        return {"validation_loss_exported": self._validation_loss(model)}

    def _validation_loss(self, model: SD3Model) -> float:
        """Return the mean loss over the validation scenes, at evenly spaced noise levels."""
        latents, ids = self.validation
        generator = torch.Generator(self.device).manual_seed(self.config.seed)
        noise = torch.randn(latents.shape, generator=generator, device=self.device)
        sigmas = (torch.arange(len(latents), device=self.device) + 0.5) / len(latents)
        inputs = (latents.float(), noise, sigmas, *encode_text(self.encoder, ids))
        batches = zip(*(x.split(self.config.batch_size) for x in inputs), strict=True)
        total = sum(model(*batch)["loss"] * len(batch[0]) for batch in batches)
        return (total / len(latents)).item()


def _load_start(folder: str, untrained: SD3Transformer2DModel) -> SD3Transformer2DModel:
    transformer = SD3Transformer2DModel.from_pretrained(folder, subfolder="transformer")
    for name, wanted in untrained.config.items():
        found = transformer.config[name]
        if not name.startswith("_") and found != wanted:
            raise ValueError(f"{name} is {wanted} in the configuration, but {found} in {folder}.")
    return transformer
