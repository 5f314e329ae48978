"""Vision models for fine-tuning: from transformers, from timm, or a backbone with DPT's head."""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from safetensors import SafetensorError
from torch import Tensor
from transformers import (
    MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING,
    AutoBackbone,
    AutoConfig,
    AutoModelForImageClassification,
    DPTConfig,
    DPTForSemanticSegmentation,
    PreTrainedModel,
    ViTConfig,
    ViTForImageClassification,
)
from transformers.modeling_outputs import SemanticSegmenterOutput
from transformers.models.auto.modeling_auto import MODEL_FOR_BACKBONE_MAPPING_NAMES
from transformers.models.dpt.modeling_dpt import (
    DPTNeck,
    DPTPreTrainedModel,
    DPTSemanticSegmentationHead,
)

from distill.vision.config import VisionConfig
from distill.vision.images import IGNORED

TIMM = "timm/"
TIMM_NAMES = {
    r"^(cls_token)": r"vit.embeddings.\1",
    r"^pos_embed": "vit.embeddings.position_embeddings",
    r"^patch_embed.proj": "vit.embeddings.patch_embeddings.projection",
    r"^norm\.": "vit.layernorm.",
    r"^head\.": "classifier.",
    r"^blocks": "vit.encoder.layer",
    r"norm1": "layernorm_before",
    r"norm2": "layernorm_after",
    r"attn.proj": "attention.output.dense",
    r"attn.qkv": "attention.attention.qkv",
    r"mlp.fc1": "intermediate.dense",
    r"mlp.fc2": "output.dense",
}
NECK_SIZES, FUSION_SIZE = (48, 96, 192, 384), 64  # DPT's head on a small backbone


class BackboneForSemanticSegmentation(DPTPreTrainedModel):
    """A transformers backbone with DPT's neck and head.

    Args:
        config: its `backbone_config` has four feature maps that are not reshaped.
    """

    def __init__(self, config: DPTConfig) -> None:
        super().__init__(config)
        self.backbone = AutoBackbone.from_config(config.backbone_config)
        self.neck = DPTNeck(config)
        self.head = DPTSemanticSegmentationHead(config)
        self.post_init()

    def forward(self, pixel_values: Tensor, labels: Tensor | None = None) -> Any:
        """Return `logits` (B, labels, h, w) and, given labels (B, S, S), `loss`."""
        maps = self.backbone(pixel_values).feature_maps
        patch = self.config.backbone_config.patch_size
        height, width = (side // patch for side in pixel_values.shape[-2:])
        logits = self.head(self.neck(list(maps), height, width))
        loss = None
        if labels is not None:
            loss = F.cross_entropy(at_size_of(labels, logits), labels, ignore_index=IGNORED)
        return SemanticSegmenterOutput(loss=loss, logits=logits)


def at_size_of(labels: Tensor, logits: Tensor) -> Tensor:
    """Logits (B, labels, h, w), resized to labels (B, S, S)."""
    return F.interpolate(logits.float(), labels.shape[-2:], mode="bilinear", align_corners=False)


def load_model(config: VisionConfig, classes: Sequence[str]) -> PreTrainedModel:
    """The model of a run, with exact attention and float32 weights.

    Raises:
        OSError, ValueError: as `load_classifier` and `load_segmenter`, or the weights are damaged.
    """
    try:
        if config.task == "segmentation":
            return load_segmenter(config.model, config.data.num_labels)
        return load_classifier(config.model, classes)
    except SafetensorError as error:
        raise ValueError(f"the weights of {config.model} cannot be read: {error}.") from error


def load_classifier(name: str, classes: Sequence[str]) -> PreTrainedModel:
    """A classifier for these classes; its head is new unless the model has as many classes.

    Raises:
        OSError: there is no such model.
        ValueError: transformers has no classifier of its kind, or there is only one class.
    """
    if len(classes) < 2:
        raise ValueError(f"a classifier needs two classes or more, but got {', '.join(classes)}.")
    labels = dict(enumerate(classes))
    options: dict[str, Any] = {
        "id2label": labels,
        "label2id": {label: index for index, label in labels.items()},
        "num_labels": len(classes),
    }
    if name.startswith(TIMM):
        return _load_timm(name, options)
    config = AutoConfig.from_pretrained(name)
    if type(config) not in MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING:
        raise ValueError(
            f"model must be a vision model that classifies, but {name} is of type "
            f"{config.model_type}."
        )
    return AutoModelForImageClassification.from_pretrained(
        name, dtype=torch.float32, ignore_mismatched_sizes=True, **options
    )


def load_segmenter(name: str, num_labels: int) -> PreTrainedModel:
    """A segmentation model: DPT, one that this command saved, or a backbone with a new DPT head.

    A head for another number of labels is new.

    Raises:
        OSError: there is no such model.
        ValueError: transformers has no backbone of its kind.
    """
    config = AutoConfig.from_pretrained(name)
    options = {"num_labels": num_labels, "dtype": torch.float32, "ignore_mismatched_sizes": True}
    if BackboneForSemanticSegmentation.__name__ in (config.architectures or ()):
        return BackboneForSemanticSegmentation.from_pretrained(name, **options)
    if config.model_type == "dpt":
        return DPTForSemanticSegmentation.from_pretrained(name, **options)
    is_plain = hasattr(config, "num_hidden_layers") and not hasattr(config, "depths")
    if config.model_type not in MODEL_FOR_BACKBONE_MAPPING_NAMES or not is_plain:
        raise ValueError(
            f"model must be DPT, or a single-grid vision transformer that transformers has as a "
            f"backbone, but {name} is of type {config.model_type}."
        )
    config.out_indices = [config.num_hidden_layers * quarter // 4 for quarter in range(1, 5)]
    config.reshape_hidden_states = False
    # `AutoBackbone.from_pretrained` does not read folders.
    kind = type(AutoBackbone.from_config(config))
    backbone = kind.from_pretrained(name, config=config, dtype=torch.float32)
    model = BackboneForSemanticSegmentation(
        DPTConfig(
            backbone_config=config,
            neck_hidden_sizes=list(NECK_SIZES),
            fusion_hidden_size=FUSION_SIZE,
            num_labels=num_labels,
            use_auxiliary_head=False,
            use_batch_norm_in_fusion_residual=True,  # as in DPT for ADE20K
        )
    )
    model.backbone = backbone
    return model


def _load_timm(name: str, options: Mapping[str, Any]) -> ViTForImageClassification:
    from huggingface_hub import hf_hub_download
    from safetensors.torch import load_file

    with open(hf_hub_download(name, "config.json")) as file:
        size = json.load(file)["pretrained_cfg"]["input_size"][-1]
    return vit_from_timm(load_file(hf_hub_download(name, "model.safetensors")), size, options)


def vit_from_timm(
    weights: Mapping[str, Tensor], image_size: int, options: Mapping[str, Any]
) -> ViTForImageClassification:
    """Convert a timm ViT to transformers, with equal outputs.

    Args:
        weights: weights under timm's names.
        image_size: side of its images.
        options: fields of the `ViTConfig`; a head for other classes is new.

    Raises:
        ValueError: the weights are not those of a plain ViT with a class token.
    """
    renamed: dict[str, Tensor] = {}
    for name, value in weights.items():
        for pattern, other in TIMM_NAMES.items():
            name = re.sub(pattern, other, name)
        if ".qkv." in name:
            for part, piece in zip(("query", "key", "value"), value.chunk(3), strict=True):
                renamed[name.replace("qkv", part)] = piece
        else:
            renamed[name] = value
    try:
        width, _, patch_size, _ = weights["patch_embed.proj.weight"].shape
        config = ViTConfig(
            hidden_size=width,
            num_hidden_layers=sum(name.endswith("qkv.weight") for name in weights),
            num_attention_heads=width // 64,
            intermediate_size=len(weights["blocks.0.mlp.fc1.bias"]),
            image_size=image_size,
            patch_size=patch_size,
            layer_norm_eps=1e-6,
            **options,
        )
    except KeyError as error:
        raise ValueError(f"the weights are not a timm ViT: there is no {error}.") from error
    model, found = ViTForImageClassification.from_pretrained(
        None,
        config=config,
        state_dict=renamed,
        ignore_mismatched_sizes=True,
        output_loading_info=True,
    )
    if found["missing_keys"] or found["unexpected_keys"]:
        raise ValueError(
            f"the weights are not a timm ViT: they lack {sorted(found['missing_keys'])} and "
            f"have {sorted(found['unexpected_keys'])}."
        )
    return model
