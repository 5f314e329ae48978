"""Configurations of the pretraining commands."""

from dataclasses import dataclass

from avq_diffusers.mini import TRAINING_SEEDS
from distill.config_file import (
    check_at_least,
    check_at_least_one_or_none,
    check_one_of,
    check_positive,
    check_seed,
)

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
        preview_minutes: minutes between two previews; None saves one at the end only.
        checkpoint_every: number of steps between two checkpoints; None saves none.
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
    preview_minutes: float | None
    checkpoint_every: int | None

    def __post_init__(self) -> None:
        check_at_least(self, 1, "num_scenes", "image_size", "steps", "batch_size", "log_every")
        check_at_least_one_or_none(self, "checkpoint_every")
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
        block_out_channels: widths of the levels; n levels divide the side by 2^(n-1).
        layers_per_block: residual blocks per level of the encoder.
        latent_channels: channels of the latents.
        norm_num_groups: groups of the group normalizations.
        mse_weight: weight of the mean squared error; the L1 loss has weight 1.
        edge_weight: weight of the L1 loss of horizontal and vertical pixel differences.
        kl_weight: weight of the KL divergence from the unit Gaussian, averaged over elements.
        num_validation: validation images for the PSNR and the latent statistics.
    """

    block_out_channels: tuple[int, ...]
    layers_per_block: int
    latent_channels: int
    norm_num_groups: int
    mse_weight: float
    edge_weight: float
    kl_weight: float
    num_validation: int

    def __post_init__(self) -> None:
        super().__post_init__()
        check_at_least(self, 1, "num_validation")


@dataclass(frozen=True, kw_only=True)
class SDConfig(PretrainConfig):
    """UNet and text encoder.

    Args:
        init_from: folder of an export whose UNet, text encoder, tokenizer and VAE training starts
            from; None starts from random weights.
        block_out_channels: widths of the UNet's levels; all but the deepest have attention.
        layers_per_block: residual (and attention) blocks per level.
        num_attention_heads: heads of every attention (diffusers' `attention_head_dim`).
        norm_num_groups: groups of the group normalizations.
        text_hidden_size: width of the text encoder and of the cross-attention.
        text_layers: layers of the text encoder.
        text_heads: heads of the text encoder.
        snr_floor: floor of the loss weights clamp(SNR, snr_floor, snr_gamma) / SNR.
        snr_gamma: gamma of min-SNR.
        layered_noise: strength of the coarse layers of the training noise; 0 is white noise.
        caption_dropout: share of captions that are replaced by empty ones.
        num_validation: validation scenes for the validation loss.
        num_prompts: validation captions for the sample sheets.
        sample_steps: DDIM steps of the sample sheets.
        guidance_scale: guidance scale of the sample sheets.
    """

    init_from: str | None
    block_out_channels: tuple[int, ...]
    layers_per_block: int
    num_attention_heads: int
    norm_num_groups: int
    text_hidden_size: int
    text_layers: int
    text_heads: int
    snr_floor: float
    snr_gamma: float
    layered_noise: float
    caption_dropout: float
    num_validation: int
    num_prompts: int
    sample_steps: int
    guidance_scale: float

    def __post_init__(self) -> None:
        super().__post_init__()
        check_at_least(self, 1, "num_validation", "num_prompts", "sample_steps")
        if not 0 <= self.caption_dropout <= 1:
            raise ValueError(f"caption_dropout must be in [0, 1], but got {self.caption_dropout}.")


@dataclass(frozen=True, kw_only=True)
class SD3Config(PretrainConfig):
    """The transformer of mini-sd3.

    Args:
        init_from: folder of an earlier result whose transformer training starts from; None starts
            from random weights.
        patch_size: side of a token in latents.
        num_layers: joint blocks.
        num_attention_heads: heads of every attention.
        attention_head_dim: channels of a head.
        dual_attention_layers: blocks with a second attention over the image alone.
        pos_embed_max_size: side of the table of positions in tokens, which bounds the image size.
        shift: shift of the noise levels in training and sampling, as in SD3's scheduler.
        caption_dropout: share of captions that are replaced by empty ones.
        num_validation: validation scenes for the validation loss.
        num_prompts: validation captions for the sample sheets.
        sample_steps: Euler steps of the sample sheets.
        guidance_scale: guidance scale of the sample sheets.
    """

    init_from: str | None
    patch_size: int
    num_layers: int
    num_attention_heads: int
    attention_head_dim: int
    dual_attention_layers: tuple[int, ...]
    pos_embed_max_size: int
    shift: float
    caption_dropout: float
    num_validation: int
    num_prompts: int
    sample_steps: int
    guidance_scale: float

    def __post_init__(self) -> None:
        super().__post_init__()
        check_at_least(self, 1, "num_layers", "num_validation", "num_prompts", "sample_steps")
        check_positive(self, "shift")
        if not 0 <= self.caption_dropout <= 1:
            raise ValueError(f"caption_dropout must be in [0, 1], but got {self.caption_dropout}.")


@dataclass(frozen=True, kw_only=True)
class ScorerConfig(PretrainConfig):
    """The CLIP-style scorer.

    Args:
        corrupted_share: share of corrupted images, in the data and in each batch.
        patch_size: side of a patch in pixels.
        hidden_size: width of both encoders.
        projection_size: width of the shared embedding.
        num_heads: heads of both encoders.
        vision_layers: layers of the image encoder.
        vision_intermediate_size: width of its MLPs.
        text_layers: layers of the text encoder.
        text_intermediate_size: width of its MLPs.
        corrupted_weight: weight of the loss of classifying corrupted images.
        num_validation: validation scenes; retrieval is measured in batches of 256.
    """

    corrupted_share: float
    patch_size: int
    hidden_size: int
    projection_size: int
    num_heads: int
    vision_layers: int
    vision_intermediate_size: int
    text_layers: int
    text_intermediate_size: int
    corrupted_weight: float
    num_validation: int

    def __post_init__(self) -> None:
        super().__post_init__()
        check_at_least(self, 1, "num_validation")
        if not 0 < self.corrupted_share < 1:
            raise ValueError(f"corrupted_share must be in (0, 1), but got {self.corrupted_share}.")
