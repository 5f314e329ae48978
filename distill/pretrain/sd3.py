"""The transformer of mini-sd3: rectified flow on latents and captions of scenes.

As in SD3 (Esser et al., 2024), a latent is mixed with noise at a noise level sigma,
(1 - sigma) latent + sigma noise, and the model predicts the velocity, noise - latent. The logit of
sigma is normally distributed, and sigma is then shifted towards noise.
"""

from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from diffusers import SD3Transformer2DModel
from torch import Tensor, nn
from transformers import CLIPTextModelWithProjection

from avq_diffusers.mini.loading import shared_parts
from distill.pretrain.config import SD3Config
from distill.pretrain.export import make_sd3_pipeline, save_sd3
from distill.pretrain.loop import Batch
from distill.pretrain.sd import Latents

T5_TOKENS = 256  # zeros in the pipeline, which has no T5
TIMESTEPS = 1000


def build_transformer(config: SD3Config) -> SD3Transformer2DModel:
    """Return an untrained transformer, or one with the weights of `config.init_from`.

    An untrained one is initialized like DiT (Peebles and Xie, 2023): the gates of all blocks and
    the output are zero. The last block's text queries are frozen: the model drops their output.

    Raises:
        OSError: `init_from` cannot be loaded.
        RuntimeError: its weights do not fit `config.transformer`.
    """
    transformer = SD3Transformer2DModel(**config.transformer)
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
    attn = transformer.transformer_blocks[-1].attn
    for module in (attn.add_q_proj, attn.norm_added_q):
        module.requires_grad_(False)
    if config.init_from is not None:
        trained = SD3Transformer2DModel.from_pretrained(config.init_from, subfolder="transformer")
        transformer.load_state_dict(trained.state_dict())
    return transformer


def noise_levels(shape: tuple[int, ...], shift: float, **options: Any) -> Tensor:
    """Return noise levels in (0, 1): sigmoids of normal numbers, shifted as in the scheduler.

    Args:
        shape: shape of the result.
        shift: factor on the noise-to-signal ratio.
        options: `generator` and `device`.
    """
    sigmas = torch.randn(shape, **options).sigmoid()
    return shift * sigmas / (1 + (shift - 1) * sigmas)


@torch.no_grad()
def encode_text(encoder: CLIPTextModelWithProjection, ids: Tensor) -> tuple[Tensor, Tensor]:
    """Encode token ids (n, 77) like SD3's pipeline, with one encoder as both CLIP encoders.

    Returns:
        Text states (n, 77 + 256, 2 width), whose last 256 are zero, and their pooled form
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
    """Latents and token ids on the device.

    Raises:
        ValueError: there are fewer scenes than processes.
        OSError: `init_from` cannot be loaded.
    """

    result = "model"

    def __init__(self, config: SD3Config, accelerator: Accelerator) -> None:
        self.config = config
        self.parts = shared_parts()
        vae, self.encoder = self.parts["vae"], self.parts["text_encoder"]
        for module in (vae, self.encoder):
            module.requires_grad_(False).to(accelerator.device)
        vae.to(memory_format=torch.channels_last)
        transformer = build_transformer(config)
        self.model = SD3Model(transformer).to(accelerator.device)
        self.data = Latents(config, accelerator, vae, self.parts["tokenizer"])

    def batch(self, generator: torch.Generator) -> Batch:
        latents, ids = self.data.batch(generator)
        options = {"generator": generator, "device": latents.device}
        text, pooled = encode_text(self.encoder, ids)
        return {
            "latents": latents,
            "noise": torch.randn(latents.shape, **options),
            "sigmas": noise_levels((len(latents),), self.config.shift, **options),
            "text": text,
            "pooled": pooled,
        }

    def save(self, model: SD3Model, folder: Path) -> None:
        save_sd3(make_sd3_pipeline(model.transformer.half(), self.parts, self.config.shift), folder)
