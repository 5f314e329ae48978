"""The configuration of a distillation run."""

from dataclasses import dataclass, field
from pathlib import Path

from avq_diffusers import AVQConfig
from distill.config_file import (
    check_at_least,
    check_at_least_one_or_none,
    check_finite,
    check_one_of,
    check_positive,
    check_seed,
)
from distill.data.config import DataConfig

PRECISIONS = ("fp32", "fp16", "bf16")
SCHEDULES = ("constant", "cosine")
WEIGHTING_SCHEMES = ("none", "inverse_alpha", "sampling")


@dataclass(frozen=True, kw_only=True)
class ObjectiveConfig:
    """The losses, and which weights they train. `Objective` defines them.

    Args:
        noise_weight: weight of the loss of the predicted noise.
        output_weight: weight of the distance to the teacher's prediction.
        guided_weight: weight of the distance between the guided predictions of student and
            teacher, by which samplers step. Above 0, every image passes the UNets twice, with its
            caption and with an empty one.
        guidance_scale: scale of classifier-free guidance in this distance. At 3, independent errors
            of both passes count 13 times.
        feature_weight: weight of the distance to the teacher's attention outputs.
        commitment_weight: weight of the commitment loss, `commitment_loss` / head dim.
        weighting_scheme: weights of the output, guided and feature losses of an image by its
            timestep, over the mean of the weights over all timesteps. `"none"` weights all alike.
            `"inverse_alpha"` is 1 / alpha(t), where alpha(t) = sqrt(alphas_cumprod[t]) is the share
            of the image in the latents, so that the first denoising steps count more. `"sampling"`
            is about what an error of the predicted noise at t adds to an image in 25 steps, for
            models that predict noise.
        full_spawning: refine all parents during training and ignore `avq.num_refined` and
            `avq.exact_keys`.
        project_children: keep the mean of each parent's children at the parent.
        diveq: train the codewords by gradients instead of EMA.
    """

    noise_weight: float = 1.0
    output_weight: float = 0.5
    guided_weight: float = 0.0
    guidance_scale: float = 3.0
    feature_weight: float = 0.5
    commitment_weight: float = 0.0
    weighting_scheme: str = "none"
    full_spawning: bool = False
    project_children: bool = False
    diveq: bool = False

    def __post_init__(self) -> None:
        names = ("noise_weight", "output_weight", "guided_weight", "feature_weight")
        names += ("commitment_weight",)
        check_at_least(self, 0, *names)
        check_finite(self, *names, "guidance_scale")
        check_one_of(self, "weighting_scheme", WEIGHTING_SCHEMES)


@dataclass(frozen=True, kw_only=True)
class CodebookConfig:
    """How codebooks start and learn.

    Args:
        start_images: number of images whose keys initialize k-means.
        keys_per_layer: number of these keys that each layer samples.
        decay_start: EMA decay of the first step.
        decay_end: EMA decay after the warm-up.
        decay_warmup_steps: number of optimizer steps of the warm-up.
        dead_threshold: a codeword with a smaller EMA count, in keys per step, moves to a badly
            represented key; None moves none.
        dead_every: number of steps between two such moves.
    """

    start_images: int = 64
    keys_per_layer: int = 32768
    decay_start: float = 0.99
    decay_end: float = 0.99
    decay_warmup_steps: int = 0
    dead_threshold: float | None = None
    dead_every: int = 100

    def __post_init__(self) -> None:
        check_at_least(self, 1, "start_images", "keys_per_layer", "dead_every")
        check_at_least(self, 0, "decay_warmup_steps")
        if self.dead_threshold is not None:
            check_positive(self, "dead_threshold")
        for name in ("decay_start", "decay_end"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"{name} must be in [0, 1), but got {getattr(self, name)}.")


@dataclass(frozen=True, kw_only=True)
class SampleConfig:
    """The sheets that compare images of teacher and student.

    Args:
        every: number of optimizer steps between two sheets; None saves one at the end only.
        prompts: one image each; image i has seed `seed + i`.
        num_inference_steps: number of denoising steps.
        guidance_scale: scale of classifier-free guidance.
    """

    every: int | None = None
    prompts: tuple[str, ...]
    num_inference_steps: int = 25
    guidance_scale: float = 7.5

    def __post_init__(self) -> None:
        check_at_least(self, 1, "num_inference_steps")
        check_finite(self, "guidance_scale")
        check_at_least_one_or_none(self, "every")
        if not self.prompts:
            raise ValueError("prompts must hold at least one prompt, but got none.")


@dataclass(frozen=True, kw_only=True)
class DistillConfig:
    """One distillation run. A step is an optimizer step.

    Args:
        base_model: folder or Hub id of a Stable Diffusion 1.x or 2.x model, or `"mini-sd"`.
        variant: variant of its weight files, such as `"fp16"`.
        image_size: side of the images in pixels.
        seed: seed of all random numbers.
        attention: `"avq"`, `"linfusion"` for LinFusion's linear attention, or `"exact"`, a control
            that exports nothing.
        avq: sizes, and the `levels` whose self-attentions are replaced. `codewords: stored` trains
            codebooks; `codewords: means` takes the codewords from the keys of each call, so that
            only the projections are trained.
        data: images and captions.
        objective: losses.
        codebooks: start and updates of the codebooks; None with `codewords: means`.
        steps: number of optimizer steps.
        batch_size: images per step, over all micro-batches and processes.
        micro_batch_size: images per forward pass of one process.
        learning_rate: peak learning rate of AdamW.
        schedule: `"constant"`, or `"cosine"` to zero, after the warm-up.
        warmup_steps: number of steps of linear warm-up.
        weight_decay: weight decay of AdamW.
        adam_betas: betas of AdamW.
        max_grad_norm: gradients are clipped to this norm; `.inf` disables clipping.
        precision: `"fp32"`, `"fp16"` or `"bf16"`.
        gradient_checkpointing: recompute the student's activations in the backward pass.
        compile: compile the teacher, and the student unless it uses gradient checkpointing, which
            would break its graph into many small ones. On a GPU they become CUDA graphs.
        log_every: number of steps between two lines of `log.jsonl`.
        checkpoint_every: number of steps between two checkpoints; None saves one at the end only.
        keep_checkpoints: number of newest checkpoints to keep.
        samples: sheets of sample images.
        tracker: a tracker of accelerate, such as `"tensorboard"` or `"wandb"`, or None.
    """

    base_model: str
    variant: str | None = None
    image_size: int = 512
    seed: int = 0
    attention: str = "avq"
    avq: AVQConfig = field(default_factory=AVQConfig)
    data: DataConfig
    objective: ObjectiveConfig = field(default_factory=ObjectiveConfig)
    codebooks: CodebookConfig | None = None
    steps: int
    batch_size: int = 96
    micro_batch_size: int = 12
    learning_rate: float = 1e-4
    schedule: str = "constant"
    warmup_steps: int = 0
    weight_decay: float = 0.0
    adam_betas: tuple[float, float] = (0.9, 0.999)
    max_grad_norm: float = 1.0
    precision: str = "fp16"
    gradient_checkpointing: bool = False
    compile: bool = False
    log_every: int = 50
    checkpoint_every: int | None = None
    keep_checkpoints: int = 2
    samples: SampleConfig
    tracker: str | None = None

    def __post_init__(self) -> None:
        counts = ("steps", "batch_size", "micro_batch_size", "log_every", "keep_checkpoints")
        check_at_least(self, 1, *counts)
        check_at_least_one_or_none(self, "checkpoint_every")
        check_seed(self)
        check_at_least(self, 0, "warmup_steps")
        check_positive(self, "max_grad_norm")
        self._check_codewords()
        check_finite(self, "learning_rate", "weight_decay")
        if self.image_size % 8 or self.image_size < 8:
            raise ValueError(f"image_size must be a multiple of 8, but got {self.image_size}.")
        check_one_of(self, "precision", PRECISIONS)
        check_one_of(self, "schedule", SCHEDULES)

    @property
    def base_model_name(self) -> str:
        """The Hub id of the base model, or the name of its folder."""
        path = Path(self.base_model)
        return path.name if path.exists() else self.base_model

    def _check_codewords(self) -> None:
        if self.avq.codewords == "stored":
            if self.avq.num_updates or self.codebooks is None:
                raise ValueError(
                    "with avq.codewords: stored, training learns the codewords; set codebooks, and "
                    "avq.num_updates to 0."
                )
            return
        unused = {
            "codebooks": self.codebooks is not None,
            "avq.key_norm": self.avq.key_norm,
            "objective.commitment_weight": self.objective.commitment_weight != 0,
            "objective.full_spawning": self.objective.full_spawning,
            "objective.project_children": self.objective.project_children,
            "objective.diveq": self.objective.diveq,
        }
        if any(unused.values()):
            raise ValueError(
                f"with avq.codewords: means there is no codebook to train; set "
                f"{', '.join(name for name, is_set in unused.items() if is_set)} to null, false or "
                f"0."
            )

    def accumulation(self, num_processes: int) -> int:
        """Return the number of micro-batches per process and step.

        Raises:
            ValueError: `batch_size` is not a multiple of `micro_batch_size * num_processes`.
        """
        at_once = self.micro_batch_size * num_processes
        if self.batch_size % at_once:
            raise ValueError(
                f"batch_size must be a multiple of micro_batch_size x processes = "
                f"{self.micro_batch_size} x {num_processes}, but got {self.batch_size}."
            )
        return self.batch_size // at_once
