"""The configuration of a distillation run."""

from dataclasses import dataclass

from avq_diffusers import AVQConfig
from distill.config_file import (
    check_at_least_one,
    check_at_least_one_or_none,
    check_finite,
    check_not_negative,
    check_one_of,
    check_positive,
    check_seed,
)
from distill.data.sources import DataConfig

PRECISIONS = ("fp32", "fp16", "bf16")
SCHEDULES = ("constant", "cosine")


@dataclass(frozen=True, kw_only=True)
class ObjectiveConfig:
    """The losses and what is trained, see `Objective`.

    Args:
        noise_weight, output_weight, feature_weight: of the losses.
        commitment_weight: of the commitment loss, `commitment_loss` / head dim.
        full_spawning: refine all parents in training, whatever `avq.num_refined` says.
        project_children: keep the children of each parent averaging to it.
        diveq: let gradients move the codewords, in place of EMA.
        lora_rank: train updates of this rank in place of the full projections.
    """

    noise_weight: float
    output_weight: float
    feature_weight: float
    commitment_weight: float
    full_spawning: bool
    project_children: bool
    diveq: bool
    lora_rank: int | None

    def __post_init__(self) -> None:
        names = ("noise_weight", "output_weight", "feature_weight", "commitment_weight")
        check_not_negative(self, *names)
        check_finite(self, *names)


@dataclass(frozen=True, kw_only=True)
class CodebookConfig:
    """How codebooks start and learn.

    Args:
        start_pictures: pictures whose keys k-means starts from.
        keys_per_layer: size of each layer's sample of these keys.
        decay_start: EMA decay of the first step.
        decay_end: EMA decay after the warm-up.
        decay_warmup_steps: optimizer steps from one to the other.
        dead_threshold: EMA count, in keys per step, below which a codeword moves to a badly
            represented key; None leaves dead codewords alone.
        dead_every: steps between two such moves.
    """

    start_pictures: int
    keys_per_layer: int
    decay_start: float
    decay_end: float
    decay_warmup_steps: int
    dead_threshold: float | None
    dead_every: int

    def __post_init__(self) -> None:
        check_at_least_one(self, "start_pictures", "keys_per_layer", "dead_every")
        check_not_negative(self, "decay_warmup_steps")
        if self.dead_threshold is not None:
            check_positive(self, "dead_threshold")
        for name in ("decay_start", "decay_end"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"{name} must be in [0, 1), but got {getattr(self, name)}.")


@dataclass(frozen=True, kw_only=True)
class SampleConfig:
    """The sheets of pictures of teacher and student.

    Args:
        every: optimizer steps between two sheets; None makes one at the end only.
        prompts: of the pictures; picture i has seed `seed + i`.
        num_inference_steps: denoising steps.
        guidance_scale: classifier-free guidance.
    """

    every: int | None
    prompts: tuple[str, ...]
    num_inference_steps: int
    guidance_scale: float

    def __post_init__(self) -> None:
        check_at_least_one(self, "num_inference_steps")
        check_finite(self, "guidance_scale")
        check_at_least_one_or_none(self, "every")
        if not self.prompts:
            raise ValueError("prompts must hold at least one prompt, but got none.")


@dataclass(frozen=True, kw_only=True)
class DistillConfig:
    """One distillation run. A step is an optimizer step.

    Args:
        base_model: folder or Hub id of a Stable Diffusion 1.x or 2.x model, or `"mini-sd"`.
        variant: of its weight files, such as `"fp16"`.
        image_size: side of the pictures in pixels.
        seed: of everything that is drawn.
        attention: `"avq"`, `"linfusion"` for LinFusion's linear attention, or `"exact"`, a control
            that leaves nothing to load.
        avq: codebook sizes; its `levels` say which self-attentions are replaced.
        data: captioned pictures.
        objective: losses.
        codebooks: start and learning of the codebooks.
        steps: optimizer steps.
        batch_size: pictures per step, over micro-batches and processes.
        micro_batch_size: pictures that one process holds at a time.
        learning_rate: of AdamW.
        schedule: `"constant"`, or `"cosine"` to zero, after the warm-up.
        warmup_steps: steps of linear warm-up.
        weight_decay: of AdamW.
        adam_betas: of AdamW.
        max_grad_norm: gradients are clipped to this norm; `.inf` clips none.
        precision: `"fp32"`, `"fp16"` or `"bf16"`.
        gradient_checkpointing: save the student's memory by computing activations twice.
        compile: use `torch.compile` for the teacher, and for the student unless it checkpoints,
            which would break it into many small pieces.
        log_every: steps between two lines of `log.jsonl`.
        checkpoint_every: steps between two checkpoints; None writes one at the end only.
        keep_checkpoints: how many of the newest checkpoints stay.
        samples: sheets of pictures.
        tracker: any tracker of accelerate, such as `"tensorboard"` or `"wandb"`; None is none.
    """

    base_model: str
    variant: str | None
    image_size: int
    seed: int
    attention: str
    avq: AVQConfig
    data: DataConfig
    objective: ObjectiveConfig
    codebooks: CodebookConfig
    steps: int
    batch_size: int
    micro_batch_size: int
    learning_rate: float
    schedule: str
    warmup_steps: int
    weight_decay: float
    adam_betas: tuple[float, float]
    max_grad_norm: float
    precision: str
    gradient_checkpointing: bool
    compile: bool
    log_every: int
    checkpoint_every: int | None
    keep_checkpoints: int
    samples: SampleConfig
    tracker: str | None

    def __post_init__(self) -> None:
        check_at_least_one(
            self, "steps", "batch_size", "micro_batch_size", "log_every", "keep_checkpoints"
        )
        check_at_least_one_or_none(self, "checkpoint_every")
        check_seed(self)
        check_not_negative(self, "warmup_steps")
        check_positive(self, "max_grad_norm")
        check_finite(self, "learning_rate", "weight_decay")
        if self.image_size % 8 or self.image_size < 8:
            raise ValueError(f"image_size must be a multiple of 8, but got {self.image_size}.")
        check_one_of(self, "precision", PRECISIONS)
        check_one_of(self, "schedule", SCHEDULES)

    def accumulation(self, num_processes: int) -> int:
        """Micro-batches per process and step.

        Raises:
            ValueError: `batch_size` is not a multiple of what the processes hold at a time.
        """
        held = self.micro_batch_size * num_processes
        if self.batch_size % held:
            raise ValueError(
                f"batch_size must be a multiple of micro_batch_size x processes = "
                f"{self.micro_batch_size} x {num_processes}, but got {self.batch_size}."
            )
        return self.batch_size // held
