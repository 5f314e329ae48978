"""Transformers of published models, by their differences from the defaults of diffusers.

Sources are `transformer/config.json` of the models on the Hub, or the defaults of diffusers' class
where these are the model's.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

Normal = Callable[..., Tensor]
Inputs = tuple[dict[str, Tensor], dict[str, Tensor]]

# stabilityai/stable-diffusion-3.5-medium
SD35_MEDIUM = {
    "num_layers": 24,
    "num_attention_heads": 24,
    "caption_projection_dim": 1536,
    "dual_attention_layers": tuple(range(13)),
    "pos_embed_max_size": 384,
    "qk_norm": "rms_norm",
}
# stabilityai/stable-diffusion-3.5-large
SD35_LARGE = {
    "num_layers": 38,
    "num_attention_heads": 38,
    "caption_projection_dim": 2432,
    "pos_embed_max_size": 192,
    "qk_norm": "rms_norm",
}
# black-forest-labs/FLUX.1-dev
FLUX = {"guidance_embeds": True}
# Wan-AI/Wan2.1-T2V-14B-Diffusers: the defaults, one block of 40
WAN = {"num_layers": 1}

SD3_TEXT = 77 + 256  # CLIP's tokens and T5's
FLUX_TEXT = 512
WAN_TEXT = 512
WAN_LATENTS = {480: (21, 60, 104), 720: (21, 90, 160)}  # of 81 frames, by lines


def sd3_inputs(config: Mapping[str, Any], side: int, batch: int, normal: Normal) -> Inputs:
    """Inputs that change from call to call, and inputs that stay: those of SD3's transformer.

    Args:
        config: of the transformer.
        side: of the image in pixels.
        batch: entries.
        normal: makes normal numbers of a shape, as `torch.randn` does.
    """
    tensors = {
        "hidden_states": normal(batch, config["in_channels"], side // 8, side // 8),
        "encoder_hidden_states": normal(batch, SD3_TEXT, config["joint_attention_dim"]),
        "pooled_projections": normal(batch, config["pooled_projection_dim"]),
    }
    return tensors, {"timestep": 150 * torch.ones_like(tensors["pooled_projections"][:, 0])}


def flux_inputs(config: Mapping[str, Any], side: int, batch: int, normal: Normal) -> Inputs:
    """The same for Flux."""
    lines = side // 16
    tensors = {
        "hidden_states": normal(batch, lines**2, config["in_channels"]),
        "encoder_hidden_states": normal(batch, FLUX_TEXT, config["joint_attention_dim"]),
        "pooled_projections": normal(batch, config["pooled_projection_dim"]),
    }
    ones = torch.ones_like(tensors["pooled_projections"][:, 0])
    rows, columns = torch.meshgrid(*[torch.arange(lines, device=ones.device)] * 2, indexing="ij")
    image = torch.stack([torch.zeros_like(rows), rows, columns], -1).flatten(0, 1)
    fixed = {
        "timestep": 0.125 * ones,
        "guidance": 4 * ones,
        "img_ids": image.to(ones.dtype),
        "txt_ids": ones.new_zeros(FLUX_TEXT, 3),
    }
    return tensors, fixed


def wan_inputs(
    config: Mapping[str, Any],
    side: int,
    batch: int,
    normal: Normal,
    latents: Mapping[int, tuple[int, int, int]] = WAN_LATENTS,
) -> Inputs:
    """The same for Wan; `side` are the lines of the video, whose latents have this size."""
    tensors = {
        "hidden_states": normal(batch, config["in_channels"], *latents[side]),
        "encoder_hidden_states": normal(batch, WAN_TEXT, config["text_dim"]),
    }
    ones = torch.ones_like(tensors["encoder_hidden_states"][:, 0, 0])
    return tensors, {"timestep": 150 * ones}
