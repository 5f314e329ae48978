"""Real vision models of transformers at tiny size, with random weights; no download."""

import torch
from torch import Tensor, nn
from transformers import (
    Aimv2VisionModel,
    CLIPConfig,
    CLIPModel,
    CLIPVisionModel,
    DeiTModel,
    Dinov2Model,
    Dinov2WithRegistersModel,
    DINOv3ViTModel,
    DPTForSemanticSegmentation,
    SiglipVisionModel,
    ViTModel,
)

from avq_diffusers.config import AVQConfig

COARSE = AVQConfig.parse("M4P2C2", query_tile=16)
ANY_SIZE = {"interpolate_pos_encoding": True}  # which DINO does without
LAYERS = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
SIZES = LAYERS | {"image_size": 64, "patch_size": 8}
WIDE = {**SIZES, "intermediate_size": 32}
DINOV2 = SIZES | {"mlp_ratio": 1}
REGISTERS = {"num_register_tokens": 4}
DPT = WIDE | {
    "num_hidden_layers": 4,
    "backbone_out_indices": [0, 1, 2, 3],
    "neck_hidden_sizes": [8] * 4,
    "fusion_hidden_size": 8,
    "num_labels": 5,
}
# By family: the class, its sizes, and how many tokens come before the grid.
FAMILIES = {
    "vit": (ViTModel, WIDE, 1),
    "deit": (DeiTModel, WIDE, 2),
    "dinov2": (Dinov2Model, DINOV2, 1),
    "dinov2 with registers": (Dinov2WithRegistersModel, DINOV2 | REGISTERS, 5),
    "dinov3": (DINOv3ViTModel, WIDE | REGISTERS, 5),
    "dpt": (DPTForSemanticSegmentation, DPT, 1),
    "clip": (CLIPVisionModel, WIDE, 1),
    "aimv2": (Aimv2VisionModel, WIDE | {"is_native": True}, 0),
    "siglip": (SiglipVisionModel, WIDE, 0),
}


def tiny_vision(family: str = "vit", **sizes: int) -> nn.Module:
    """A model of a family, perhaps of other sizes."""
    make, usual, _ = FAMILIES[family]
    return choosing(lambda: make(make.config_class(**usual | sizes)))


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
    text = LAYERS | {"intermediate_size": 32, "vocab_size": 99}
    return choosing(lambda: CLIPModel(CLIPConfig(text_config=text, vision_config=WIDE)))


def images(height: int = 64, width: int = 64) -> Tensor:
    return torch.randn(2, 3, height, width, generator=torch.Generator().manual_seed(height))


def features(model: nn.Module, pixels: Tensor | None = None, **arguments) -> Tensor:
    """The first output, without a gradient."""
    with torch.no_grad():
        return model(images() if pixels is None else pixels, **arguments)[0]
