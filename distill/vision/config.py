"""The configuration of a fine-tuning run."""

import re
from dataclasses import dataclass

from avq_diffusers import AVQConfig
from distill.config_file import (
    check_at_least,
    check_at_least_one_or_none,
    check_finite,
    check_one_of,
    check_positive,
    check_seed,
)
from distill.vision.baselines import BASELINES

TASKS = ("classification", "segmentation")
PRECISIONS = ("fp32", "fp16", "bf16")
SCHEDULES = ("constant", "cosine")
RESIZINGS = ("crop", "squash")
AUGMENTATIONS = ("crop", "flip", "none")
INTERPOLATIONS = ("bicubic", "bilinear")
AVQ_FORM = re.compile(r"(M[^/]+)(?:/(?:(means)|own(\d*)))?")


@dataclass(frozen=True)
class AttentionName:
    """The parsed name of an attention.

    Args:
        baseline: one of `BASELINES`, or None.
        avq: sizes of AVQ, or None.
        own: whether its codewords come from the keys of each call.
    """

    baseline: str | None = None
    avq: AVQConfig | None = None
    own: bool = False

    @property
    def learns_codebooks(self) -> bool:
        return self.avq is not None and not self.own


def parse_attention(name: str, **fields: bool) -> AttentionName:
    """Parse `exact`, a name of `BASELINES`, or sizes of AVQ.

    `M64P16C8` has stored codewords, the paper's form, `M64P16C8/means` stored ones that mean keys
    represent, `M64P16C8/own` those of each call, and `M64P16C8/own1` these after an update. `M192`
    is flat VQ.

    Raises:
        ValueError: there is no such attention.
    """
    if name == "exact":
        return AttentionName()
    if name in BASELINES:
        return AttentionName(baseline=name)
    if form := AVQ_FORM.fullmatch(name):
        sizes, means, updates = form.groups()
        own = updates is not None
        config = AVQConfig.parse(
            sizes,
            codewords="means" if own or means else "stored",
            num_updates=int(updates or 0),
            **({} if own else fields),
        )
        return AttentionName(avq=config, own=own)
    raise ValueError(
        f"attention must be exact, {', '.join(BASELINES)}, or sizes such as M64P16C8, M192 or "
        f"M64P16C8/own, but got {name!r}."
    )


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """The images and how they reach the model.

    Args:
        path: for classification a folder `{train,val}/CLASS/*`, or the Hub id of a data set with
            columns image and label; for segmentation a folder in ADE20K's layout.
        num_labels: classes of segmentation, without 0, which is ignored; null for classification.
        image_size: side of the images in pixels.
        resize: `"crop"`, the square centre, or `"squash"`.
        crop_share: share of a cropped image's shorter side that is seen.
        interpolation: `"bicubic"` or `"bilinear"`; label maps take the nearest label.
        mean, std: of each colour, from 0 to 1.
        augment: of training images: `"crop"`, a random piece and a flip (classification only),
            `"flip"` or `"none"`.
        workers: processes that read images; 0 reads in the training process.
        preload: keep all images in memory, already resized; not with random pieces.
    """

    path: str
    num_labels: int | None
    image_size: int
    resize: str
    crop_share: float
    interpolation: str
    mean: tuple[float, float, float]
    std: tuple[float, float, float]
    augment: str
    workers: int
    preload: bool

    def __post_init__(self) -> None:
        check_at_least(self, 1, "image_size")
        check_at_least(self, 0, "workers")
        check_at_least_one_or_none(self, "num_labels")
        check_one_of(self, "resize", RESIZINGS)
        check_one_of(self, "interpolation", INTERPOLATIONS)
        check_one_of(self, "augment", AUGMENTATIONS)
        if not 0 < self.crop_share <= 1:
            raise ValueError(f"crop_share must be above 0, at most 1, but got {self.crop_share}.")
        if self.preload and self.augment == "crop":
            raise ValueError("preload keeps resized images; augment must be flip or none with it.")


@dataclass(frozen=True, kw_only=True)
class CodebookConfig:
    """How the codebooks of stored codewords start and learn; other attentions ignore it.

    Args:
        key_norm: normalize keys by a learnable LayerNorm, which starts as near to no change as it
            can.
        full_spawning: refine all parents during training.
        commitment_weight: weight of the mean squared quantization error of the keys.
        project_children: keep the mean of each parent's children at the parent.
        diveq: train the codewords by gradients (DiVeQ) instead of EMA.
        start_images: images whose keys initialize k-means.
        keys_per_layer: keys that each layer samples of them.
        decay_start: EMA decay of the first step.
        decay_end: EMA decay after the warm-up.
        decay_warmup: share of the steps until then.
        dead_threshold: a codeword with a smaller EMA count, in keys per step, moves to a badly
            represented key; null moves none.
        dead_every: steps between two such moves.
    """

    key_norm: bool
    full_spawning: bool
    commitment_weight: float
    project_children: bool
    diveq: bool
    start_images: int
    keys_per_layer: int
    decay_start: float
    decay_end: float
    decay_warmup: float
    dead_threshold: float | None
    dead_every: int

    def __post_init__(self) -> None:
        check_at_least(self, 1, "start_images", "keys_per_layer", "dead_every")
        check_at_least(self, 0, "commitment_weight")
        check_finite(self, "commitment_weight")
        if self.dead_threshold is not None:
            check_positive(self, "dead_threshold")
        for name in ("decay_start", "decay_end"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"{name} must be in [0, 1), but got {getattr(self, name)}.")
        if not 0 <= self.decay_warmup <= 1:
            raise ValueError(f"decay_warmup must be in [0, 1], but got {self.decay_warmup}.")
        if self.diveq and not self.full_spawning:
            raise ValueError(
                "diveq needs full_spawning, where attention is a function of the codewords that "
                "has gradients."
            )


@dataclass(frozen=True, kw_only=True)
class VisionConfig:
    """One fine-tuning run. A step is an optimizer step.

    Args:
        task: `"classification"` or `"segmentation"`.
        model: folder or Hub id of a transformers model, or the Hub id of one of timm's ViTs. A
            model without DPT's head gets one for segmentation.
        seed: seed of all random numbers.
        attention: name of `parse_attention`.
        data: images.
        codebooks: of stored codewords.
        epochs: passes over the training images.
        max_steps: fewer steps than `epochs` take; null takes all.
        batch_size: images per step, over all micro-batches and processes.
        micro_batch_size: images per forward pass of one process.
        learning_rate: peak learning rate of AdamW.
        head_learning_rate: that of the head; null takes `learning_rate`.
        schedule: `"constant"`, or `"cosine"` to zero, after the warm-up.
        warmup: share of the steps with linear warm-up.
        weight_decay: weight decay of AdamW.
        max_grad_norm: gradients are clipped to this norm.
        precision: `"fp32"`, `"fp16"` or `"bf16"`.
        log_every: steps between two lines of the log.
        evaluate_every: steps between two checkpoints, each with its score; null saves and scores
            at the end only.
        keep_checkpoints: the newest ones, and the best.
        best: end with the best checkpoint instead of the last.
    """

    task: str
    model: str
    seed: int
    attention: str
    data: DataConfig
    codebooks: CodebookConfig
    epochs: float
    max_steps: int | None
    batch_size: int
    micro_batch_size: int
    learning_rate: float
    head_learning_rate: float | None
    schedule: str
    warmup: float
    weight_decay: float
    max_grad_norm: float
    precision: str
    log_every: int
    evaluate_every: int | None
    keep_checkpoints: int
    best: bool

    def __post_init__(self) -> None:
        check_one_of(self, "task", TASKS)
        check_one_of(self, "schedule", SCHEDULES)
        check_one_of(self, "precision", PRECISIONS)
        check_seed(self)
        parse_attention(self.attention)
        names = ("batch_size", "micro_batch_size", "log_every", "keep_checkpoints")
        check_at_least(self, 1, *names)
        check_at_least_one_or_none(self, "max_steps")
        check_at_least_one_or_none(self, "evaluate_every")
        check_at_least(self, 0, "weight_decay")
        for name in ("epochs", "learning_rate", "max_grad_norm"):
            check_positive(self, name)
        check_finite(self, "epochs", "learning_rate", "weight_decay")
        if not 0 <= self.warmup < 1:
            raise ValueError(f"warmup must be in [0, 1), but got {self.warmup}.")
        if self.batch_size % self.micro_batch_size:
            raise ValueError(
                f"batch_size must be a multiple of micro_batch_size, but got {self.batch_size} and "
                f"{self.micro_batch_size}."
            )
        if (self.task == "segmentation") != (self.data.num_labels is not None):
            raise ValueError(
                f"data.num_labels must be a number for segmentation and null for classification, "
                f"but got {self.data.num_labels} for {self.task}."
            )
        if self.task == "segmentation" and (self.data.augment, self.data.resize) not in (
            ("flip", "squash"),
            ("none", "squash"),
        ):
            raise ValueError(
                "segmentation needs resize: squash and augment: flip or none, so that label maps "
                "stay whole."
            )
        if self.best and self.evaluate_every is None:
            raise ValueError("best needs evaluate_every, the steps between two checkpoints.")
