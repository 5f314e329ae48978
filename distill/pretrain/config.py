"""Configurations of the pretraining commands."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from avq_diffusers.mini import TRAINING_SEEDS
from distill.config_file import check_at_least, check_one_of, check_positive, check_seed

PRECISIONS = ("bf16", "fp32")


@dataclass(frozen=True, kw_only=True)
class PretrainConfig:
    """The settings that all trainings share.

    Args:
        seed: seed of weights, batches and noise.
        num_scenes: number of training scenes, over all processes.
        image_size: side of the images in pixels.
        workers: rendering processes per training process; 0 renders in the training process.
        steps: number of optimizer steps.
        max_minutes: time limit of the process, including preparation. The schedule then follows
            the larger of step fraction and time fraction. None counts steps only.
        finish_minutes: part of `max_minutes` that is reserved for the work after the last step.
        batch_size: images per process and step.
        learning_rate: peak learning rate after the warm-up; a cosine to zero follows.
        warmup_steps: number of steps of linear warm-up.
        adam_betas: betas of AdamW.
        weight_decay: weight decay of AdamW.
        max_grad_norm: gradients are clipped to this norm.
        ema_decay: decay of the averaged weights, which are exported.
        precision: `"bf16"` (autocast over fp32 weights) or `"fp32"`.
        compile: use `torch.compile`.
        log_every: number of steps between two lines of `log.jsonl`; each one is a host sync.
    """

    seed: int
    num_scenes: int
    image_size: int
    workers: int
    steps: int
    max_minutes: float | None
    finish_minutes: float
    batch_size: int
    learning_rate: float
    warmup_steps: int
    adam_betas: tuple[float, float]
    weight_decay: float
    max_grad_norm: float
    ema_decay: float
    precision: str
    compile: bool
    log_every: int

    def __post_init__(self) -> None:
        counts = ("num_scenes", "image_size", "steps", "batch_size", "log_every")
        check_at_least(self, 1, *counts)
        check_seed(self)
        check_at_least(self, 0, "workers", "learning_rate", "weight_decay")
        check_positive(self, "max_grad_norm")
        check_one_of(self, "precision", PRECISIONS)
        if self.num_scenes > len(TRAINING_SEEDS):  # the scorer's range is as long
            raise ValueError(
                f"num_scenes must be at most {len(TRAINING_SEEDS)}, but got {self.num_scenes}."
            )
        if not 0 <= self.ema_decay < 1:
            raise ValueError(f"ema_decay must be in [0, 1), but got {self.ema_decay}.")
        if not all(0 <= beta < 1 for beta in self.adam_betas):
            raise ValueError(f"adam_betas must be in [0, 1), but got {self.adam_betas}.")


@dataclass(frozen=True, kw_only=True)
class VAEConfig(PretrainConfig):
    """The autoencoder.

    Args:
        num_validation: validation scenes whose latents are normalized.
        vae: arguments of diffusers' `AutoencoderKL`.
        mse_weight: weight of the mean squared error; the L1 loss has weight 1.
        edge_weight: weight of the L1 loss of horizontal and vertical pixel differences.
        kl_weight: weight of the KL divergence from the unit Gaussian, averaged over elements.
    """

    num_validation: int
    vae: Mapping[str, Any]
    mse_weight: float
    edge_weight: float
    kl_weight: float

    def __post_init__(self) -> None:
        super().__post_init__()
        check_at_least(self, 1, "num_validation")


@dataclass(frozen=True, kw_only=True)
class LatentConfig(PretrainConfig):
    """A model of latents and captions.

    Args:
        caption_dropout: share of captions that are replaced by empty ones.
    """

    caption_dropout: float

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.caption_dropout <= 1:
            raise ValueError(f"caption_dropout must be in [0, 1], but got {self.caption_dropout}.")


@dataclass(frozen=True, kw_only=True)
class SDConfig(LatentConfig):
    """UNet and text encoder.

    Args:
        init_from: folder of an export whose UNet, text encoder, tokenizer and VAE training starts
            from; None starts from random weights.
        unet: arguments of diffusers' `UNet2DConditionModel`.
        text: arguments of transformers' `CLIPTextConfig`, those of the tokenizer aside.
        snr_floor: floor of the loss weights clamp(SNR, snr_floor, snr_gamma) / SNR.
        snr_gamma: gamma of min-SNR.
        layered_noise: strength of the coarse layers of the training noise; 0 is white noise.
    """

    init_from: str | None
    unet: Mapping[str, Any]
    text: Mapping[str, Any]
    snr_floor: float
    snr_gamma: float
    layered_noise: float


@dataclass(frozen=True, kw_only=True)
class SD3Config(LatentConfig):
    """The transformer of mini-sd3.

    Args:
        transformer: arguments of diffusers' `SD3Transformer2DModel`.
        shift: the ratio of noise to signal grows by this factor, in training and sampling.
    """

    transformer: Mapping[str, Any]
    shift: float

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive(self, "shift")


@dataclass(frozen=True, kw_only=True)
class ScorerConfig(PretrainConfig):
    """The CLIP-style scorer.

    Args:
        corrupted_share: share of corrupted images, in the data and in each batch.
        corrupted_weight: weight of the loss of classifying corrupted images.
        projection_dim: width of the shared embedding.
        vision: arguments of transformers' `CLIPVisionConfig`.
        text: arguments of transformers' `CLIPTextConfig`, those of the tokenizer aside.
    """

    corrupted_share: float
    corrupted_weight: float
    projection_dim: int
    vision: Mapping[str, Any]
    text: Mapping[str, Any]

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.corrupted_share < 1:
            raise ValueError(f"corrupted_share must be in (0, 1), but got {self.corrupted_share}.")
