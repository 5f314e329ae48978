"""Configurations of the pretraining commands."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field
from pydantic.dataclasses import dataclass

from distill.config_file import (
    Config,
    Count,
    Decay,
    Finite,
    Natural,
    Number,
    Positive,
    Seed,
    Share,
    Weight,
)
from distill.scenes import TRAINING_SEEDS

MOST = len(TRAINING_SEEDS)  # the scorer's range is as long
Scenes = Annotated[int, Field(strict=True, ge=1, le=MOST)]
Part = Annotated[Number, Field(gt=0, lt=1)]


@dataclass(frozen=True, kw_only=True)
class PretrainConfig(Config):
    """The settings shared by all training commands.

    Args:
        seed: seed of weights, batches and noise.
        num_scenes: number of training scenes, over all processes.
        image_size: side of the images in pixels.
        workers: rendering processes per training process; 0 renders in the training process.
        steps: number of optimizer steps.
        batch_size: images per process and step.
        learning_rate: peak learning rate after the warm-up; a cosine to zero follows.
        warmup_steps: number of steps of linear warm-up.
        adam_betas: betas of AdamW.
        weight_decay: weight decay of AdamW.
        max_grad_norm: gradients are clipped to this norm.
        ema_decay: decay of the averaged weights, which get exported.
        precision: `"bf16"` (autocast over fp32 weights) or `"fp32"`.
        compile: use `torch.compile`; needs a CUDA GPU.
        log_every: number of steps between two lines of `log.jsonl`; each one is a host sync.
    """

    seed: Seed
    num_scenes: Scenes
    image_size: Count
    workers: Natural
    steps: Count
    batch_size: Count
    learning_rate: Weight
    warmup_steps: Natural
    adam_betas: tuple[Decay, Decay]
    weight_decay: Weight
    max_grad_norm: Positive
    ema_decay: Decay
    precision: Literal["bf16", "fp32"]
    compile: bool
    log_every: Count


@dataclass(frozen=True, kw_only=True)
class VAEConfig(PretrainConfig):
    """The autoencoder.

    Args:
        num_validation: number of validation scenes used to normalize latents.
        vae: arguments of diffusers' `AutoencoderKL`.
        mse_weight: weight of the mean squared error; the L1 loss has weight 1.
        edge_weight: weight of the L1 loss of horizontal and vertical pixel differences.
        kl_weight: weight of the KL divergence from the unit Gaussian, averaged over elements.
    """

    num_validation: Count
    vae: Mapping[str, Any]
    mse_weight: Weight
    edge_weight: Weight
    kl_weight: Weight


@dataclass(frozen=True, kw_only=True)
class LatentConfig(PretrainConfig):
    """A model of latents and captions.

    Args:
        init_from: folder of a trained pipeline whose weights training starts from; None starts from
            random weights.
        caption_dropout: share of captions that are replaced by empty ones.
    """

    init_from: str | None
    caption_dropout: Share


@dataclass(frozen=True, kw_only=True)
class SDConfig(LatentConfig):
    """UNet and text encoder. With `init_from`, the folder determines `unet` and `text`.

    Args:
        unet: arguments of diffusers' `UNet2DConditionModel`.
        text: arguments of transformers' `CLIPTextConfig`, except the tokenizer's.
        snr_floor: floor of the loss weights clamp(SNR, snr_floor, snr_gamma) / SNR.
        snr_gamma: gamma of min-SNR.
        layered_noise: strength of the coarse layers of the training noise; 0 is white noise.
    """

    unet: Mapping[str, Any]
    text: Mapping[str, Any]
    snr_floor: Finite
    snr_gamma: Finite
    layered_noise: Finite


@dataclass(frozen=True, kw_only=True)
class SD3Config(LatentConfig):
    """The transformer of mini-sd3. With `init_from`, position embeddings come from the folder.

    Args:
        transformer: arguments of diffusers' `SD3Transformer2DModel`.
        shift: factor on the noise-to-signal ratio, in training and sampling.
    """

    transformer: Mapping[str, Any]
    shift: Positive


@dataclass(frozen=True, kw_only=True)
class ScorerConfig(PretrainConfig):
    """The CLIP-style scorer.

    Args:
        corrupted_share: share of corrupted images, in the data and per batch.
        corrupted_weight: weight of the loss of classifying corrupted images.
        projection_dim: width of the shared embedding.
        vision: arguments of transformers' `CLIPVisionConfig`.
        text: arguments of transformers' `CLIPTextConfig`, except the tokenizer's.
    """

    corrupted_share: Part
    corrupted_weight: Weight
    projection_dim: Count
    vision: Mapping[str, Any]
    text: Mapping[str, Any]
