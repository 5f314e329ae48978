"""UNets of published models, by their differences from the defaults of `UNet2DConditionModel`."""

from collections.abc import Callable, Mapping
from typing import Any

from diffusers import UNet2DConditionModel
from torch import Tensor

POOLED_TEXT = 1280  # of SDXL's second text encoder

SD15 = {"sample_size": 64, "cross_attention_dim": 768}
SDXL_TEXT = {
    "use_linear_projection": True,
    "addition_embed_type": "text_time",
    "addition_time_embed_dim": 256,
}
SDXL = {
    **SDXL_TEXT,
    "sample_size": 128,
    "block_out_channels": (320, 640, 1280),
    "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
    "up_block_types": ("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"),
    "transformer_layers_per_block": (1, 2, 10),
    "attention_head_dim": (5, 10, 20),
    "cross_attention_dim": 2048,
    "projection_class_embeddings_input_dim": 2816,
}


def added_conditions(
    unet: UNet2DConditionModel, batch: int, normal: Callable[..., Tensor]
) -> dict[str, Mapping[str, Any]]:
    """Random `added_cond_kwargs` for SDXL's UNets; nothing for others.

    `normal` makes normal numbers of a shape, as `torch.randn` does.
    """
    config = unet.config
    if config.addition_embed_type != "text_time":
        return {}
    width = config.projection_class_embeddings_input_dim - POOLED_TEXT
    conditions = {
        "text_embeds": normal(batch, POOLED_TEXT),
        "time_ids": normal(batch, width // config.addition_time_embed_dim),
    }
    return {"added_cond_kwargs": conditions}
