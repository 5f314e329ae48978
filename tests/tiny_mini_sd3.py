"""A folder in the form of mini-sd3, with a tiny transformer of random weights."""

from pathlib import Path

import torch
from diffusers import SD3Transformer2DModel

from avq_diffusers.mini.loading import shared_parts
from distill.pretrain.export import make_sd3_pipeline, save_sd3


def save_tiny_mini_sd3(folder: Path) -> None:
    """Save it, for images of 64 x 64 pixels and up to twice that side."""
    torch.manual_seed(0)
    transformer = SD3Transformer2DModel(
        sample_size=16,
        in_channels=4,
        out_channels=4,
        num_layers=2,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=384,
        caption_projection_dim=32,
        pooled_projection_dim=384,
        pos_embed_max_size=16,
        dual_attention_layers=(0,),
        qk_norm="rms_norm",
    )
    for name, parameter in transformer.named_parameters():
        if name.endswith("linear.bias"):  # gates that let attention act
            parameter.data.add_(1)
    save_sd3(make_sd3_pipeline(transformer, shared_parts(), 3.0), folder)
