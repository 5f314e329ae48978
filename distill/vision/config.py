"""The configuration of a fine-tuning run."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated, Any, Literal

from pydantic import Field
from pydantic.dataclasses import dataclass

from avq_diffusers import AVQConfig
from distill.config import CodebookConfig
from distill.config_file import Config, Count, Finite, Number, Positive, Weight

PartOfSide = Annotated[Number, Field(gt=0, le=1)]

# Fields of `TrainingArguments` that every run sets: other values do not work with its model, its
# optimizer or resuming.
FIXED = {
    "batch_eval_metrics": True,
    "greater_is_better": True,
    "label_names": ["labels"],
    "remove_unused_columns": False,
    "report_to": "none",
    "logging_nan_inf_filter": False,  # would synchronize with the device in each step
    "ddp_broadcast_buffers": False,  # codebooks are updated identically in all processes
    "dataloader_persistent_workers": False,  # would keep the crops of the first epoch
    "optim": "adamw_torch",
    "optim_args": None,
    "label_smoothing_factor": 0.0,
    "save_only_model": False,  # resuming needs the optimizer
    "fp16_full_eval": False,  # would round the weights that are saved
    "bf16_full_eval": False,
}
RESERVED = {*FIXED, "output_dir", "use_cpu", "metric_for_best_model"}


def parse_attention(name: str, **fields: bool) -> AVQConfig | None:
    """Parse `exact`, which is None, or a configuration string.

    Args:
        name: the name.
        fields: other fields of configurations with stored codewords.

    Raises:
        ValueError: there is no such attention.
    """
    if name == "exact":
        return None
    if not name.startswith("M"):
        raise ValueError(
            f"attention must be exact, or sizes such as M64C8T1e-4, M64P16C8 or M64P16C8/stored, "
            f"but got {name!r}."
        )
    config = AVQConfig.parse(name)
    return config if config.means else replace(config, **fields)


@dataclass(frozen=True, kw_only=True)
class ImagesConfig(Config):
    """The images and how they reach the model.

    Args:
        path: for classification a folder `{train,val}/CLASS/*`, or the Hub id of a dataset with
            columns image and label; for segmentation a folder in ADE20K's layout.
        num_labels: segmentation classes, without 0, which is ignored; null for classification.
        image_size: side of the images in pixels.
        resize: `"crop"`, a centre crop, or `"squash"`.
        crop_share: share of a cropped image's shorter side that is kept.
        interpolation: `"bicubic"` or `"bilinear"`; label maps use the nearest label.
        mean, std: per channel, for values from 0 to 1.
        augment: augmentation of training images: `"crop"`, a random crop and flip (classification
            only), `"flip"` or `"none"`.
    """

    path: str
    num_labels: Count | None
    image_size: Count
    resize: Literal["crop", "squash"]
    crop_share: PartOfSide
    interpolation: Literal["bicubic", "bilinear"]
    mean: tuple[Finite, Finite, Finite]
    std: tuple[Finite, Finite, Finite]
    augment: Literal["crop", "flip", "none"]


@dataclass(frozen=True, kw_only=True)
class LearningConfig(CodebookConfig):
    """How stored codebooks are initialized and learned; other attentions ignore it.

    Args:
        key_norm: normalize keys with a learnable LayerNorm, initialized to change them as little as
            possible.
        commitment_weight: weight of the mean squared quantization error of the keys.
        diveq: train the codewords with gradients (DiVeQ) instead of EMA.
    """

    key_norm: bool
    commitment_weight: Weight
    diveq: bool


@dataclass(frozen=True, kw_only=True)
class VisionConfig(Config):
    """One fine-tuning run.

    Args:
        task: `"classification"` or `"segmentation"`.
        model: folder or Hub id of a transformers model, or the Hub id of one of timm's ViTs. For
            segmentation, a model without DPT's head gets one.
        attention: a name for `parse_attention`.
        data: images.
        codebooks: settings of stored codebooks.
        head_rate: learning rate of the head, relative to the other parameters'.
        trainer: fields of transformers' `TrainingArguments`, by name, without those that every run
            sets. Checkpoints are scored by `top1` or `miou`, in percent.
    """

    task: Literal["classification", "segmentation"]
    model: str
    attention: str
    data: ImagesConfig
    codebooks: LearningConfig
    head_rate: Positive
    trainer: Mapping[str, Any]

    def __post_init__(self) -> None:
        parse_attention(self.attention)
        if fixed := sorted(RESERVED & self.trainer.keys()):
            raise ValueError(
                f"trainer must leave out {', '.join(fixed)}, which fine-tuning sets itself."
            )
        is_map = self.task == "segmentation"
        if is_map != (self.data.num_labels is not None):
            raise ValueError(
                f"data.num_labels must be a number for segmentation and null for classification, "
                f"but got {self.data.num_labels} for {self.task}."
            )
        if is_map and (self.data.resize != "squash" or self.data.augment == "crop"):
            raise ValueError(
                "segmentation needs resize: squash and augment: flip or none, so that label maps "
                "stay whole."
            )
