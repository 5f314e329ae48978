"""Real vision models of transformers at tiny size, with random weights; no download."""

import torch
from torch import Tensor, nn
from transformers import (
    Aimv2VisionConfig,
    Aimv2VisionModel,
    CLIPConfig,
    CLIPModel,
    CLIPVisionConfig,
    CLIPVisionModel,
    DeiTConfig,
    DeiTModel,
    Dinov2Config,
    Dinov2Model,
    Dinov2WithRegistersConfig,
    Dinov2WithRegistersModel,
    DINOv3ViTConfig,
    DINOv3ViTModel,
    DPTConfig,
    DPTForSemanticSegmentation,
    SiglipVisionConfig,
    SiglipVisionModel,
    ViTConfig,
    ViTModel,
)

from avq_diffusers.config import AVQConfig

COARSE = AVQConfig.parse("M4P2C2", query_tile=16)
ANY_SIZE = {"interpolate_pos_encoding": True}  # which DINO does without
SIZES = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 64,
    "patch_size": 8,
}
WIDE = {**SIZES, "intermediate_size": 32}
DPT = {
    "num_hidden_layers": 4,
    "backbone_out_indices": [0, 1, 2, 3],
    "neck_hidden_sizes": [8] * 4,
    "fusion_hidden_size": 8,
    "num_labels": 5,
}
TEXT = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "vocab_size": 99,
}


def sized(model, config, sizes):
    """How to make a model, perhaps of other sizes."""
    return lambda **others: model(config(**sizes | others))


# By family: how to make one, and how many tokens come before the grid.
REGISTERS = {"mlp_ratio": 1, "num_register_tokens": 4}
FAMILIES = {
    "vit": (sized(ViTModel, ViTConfig, WIDE), 1),
    "deit": (sized(DeiTModel, DeiTConfig, WIDE), 2),
    "dinov2": (sized(Dinov2Model, Dinov2Config, SIZES | {"mlp_ratio": 1}), 1),
    "dinov2 with registers": (
        sized(Dinov2WithRegistersModel, Dinov2WithRegistersConfig, SIZES | REGISTERS),
        5,
    ),
    "dinov3": (sized(DINOv3ViTModel, DINOv3ViTConfig, WIDE | {"num_register_tokens": 4}), 5),
    "dpt": (sized(DPTForSemanticSegmentation, DPTConfig, WIDE | DPT), 1),
    "clip": (sized(CLIPVisionModel, CLIPVisionConfig, WIDE), 1),
    "aimv2": (sized(Aimv2VisionModel, Aimv2VisionConfig, WIDE | {"is_native": True}), 0),
    "siglip": (sized(SiglipVisionModel, SiglipVisionConfig, WIDE), 0),
}


def tiny_vision(family: str = "vit", **sizes: int) -> nn.Module:
    """A model of a family."""
    return choosing(lambda: FAMILIES[family][0](**sizes))


def choosing(make) -> nn.Module:
    """What `make` makes, with queries and keys that make attention choose."""
    torch.manual_seed(0)
    model = make().eval()
    ends = tuple(f"{name}.weight" for name in ("q_proj", "k_proj", "query", "key"))
    for name, parameter in model.named_parameters():
        if name.endswith(ends):
            nn.init.normal_(parameter, std=0.5)
    return model


def tiny_clip() -> CLIPModel:
    return choosing(lambda: CLIPModel(CLIPConfig(text_config=TEXT, vision_config=WIDE)))


def images(height: int = 64, width: int = 64) -> Tensor:
    return torch.randn(2, 3, height, width, generator=torch.Generator().manual_seed(height))


def features(model: nn.Module, pixels: Tensor | None = None, **arguments) -> Tensor:
    """The first output, without a gradient."""
    with torch.no_grad():
        return model(images() if pixels is None else pixels, **arguments)[0]
