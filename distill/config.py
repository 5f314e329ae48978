"""The configuration of a distillation run."""

from dataclasses import field
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field
from pydantic.dataclasses import dataclass

from avq_diffusers import AVQConfig
from avq_diffusers.config import check_text
from distill.config_file import (
    Config,
    Count,
    Decay,
    Finite,
    Natural,
    Positive,
    Seed,
    Weight,
    plain_values,
)
from distill.data.config import DataConfig

Side = Annotated[int, Field(strict=True, ge=8, multiple_of=8)]


@dataclass(frozen=True, kw_only=True)
class ObjectiveConfig(Config):
    """The losses, and which weights they train. `Objective` defines them.

    Args:
        noise_weight: weight of the loss of the predicted noise.
        output_weight: weight of the distance to the teacher's prediction.
        guided_weight: weight of the distance between the guided predictions of student and
            teacher, which samplers step by. Above 0, each image passes the UNets twice, with its
            caption and with an empty one.
        guidance_scale: scale of classifier-free guidance in this distance. At 3, independent errors
            of the two passes count 13 times.
        feature_weight: weight of the distance to the teacher's attention outputs.
        commitment_weight: weight of the commitment loss, `commitment_loss` / head dim.
        weighting_scheme: weights an image's output, guided and feature losses by its timestep,
            normalized to mean 1 over all timesteps. `"none"` weights all alike. `"inverse_alpha"`
            is 1 / alpha(t), where alpha(t) = sqrt(alphas_cumprod[t]) is the share of the image in
            the latents, so that the first denoising steps count more. `"sampling"` approximates
            what an error in the predicted noise at t adds to an image in 25 steps, for models that
            predict noise.
        diveq: train the codewords with gradients instead of EMA.
    """

    noise_weight: Weight = 1.0
    output_weight: Weight = 0.5
    guided_weight: Weight = 0.0
    guidance_scale: Finite = 3.0
    feature_weight: Weight = 0.5
    commitment_weight: Weight = 0.0
    weighting_scheme: Literal["none", "inverse_alpha", "sampling"] = "none"
    diveq: bool = False


@dataclass(frozen=True, kw_only=True)
class CodebookConfig(Config):
    """How codebooks are initialized and learned.

    Args:
        start_images: number of images whose keys k-means starts from.
        keys_per_layer: number of these keys sampled per layer.
        decay_start: EMA decay of the first step.
        decay_end: EMA decay after the warm-up.
        decay_warmup_steps: number of optimizer steps of the warm-up.
        dead_threshold: a codeword with a smaller EMA count, in keys per step, moves to a badly
            represented key; None moves none.
        dead_every: number of steps between two such moves.
    """

    start_images: Count = 64
    keys_per_layer: Count = 32768
    decay_start: Decay = 0.99
    decay_end: Decay = 0.99
    decay_warmup_steps: Natural = 0
    dead_threshold: Positive | None = None
    dead_every: Count = 100


@dataclass(frozen=True, kw_only=True)
class SampleConfig(Config):
    """The sheets that compare images of teacher and student.

    Args:
        every: number of optimizer steps between two sheets; None only saves one at the end.
        prompts: one image each; image i has seed `seed + i`.
        num_inference_steps: number of denoising steps.
        guidance_scale: scale of classifier-free guidance.
    """

    every: Count | None = None
    prompts: tuple[str, ...]
    num_inference_steps: Count = 25
    guidance_scale: Finite = 7.5

    def __post_init__(self) -> None:
        if not self.prompts:
            raise ValueError("prompts must hold at least one prompt, but got none.")
        for prompt in self.prompts:
            check_text("prompts", prompt)


@dataclass(frozen=True, kw_only=True)
class DistillConfig(Config):
    """One distillation run. A step is an optimizer step.

    Args:
        base_model: folder or Hub id of a Stable Diffusion 1.x or 2.x model, or `"mini-sd"`.
        variant: variant of its weight files, such as `"fp16"`.
        image_size: side of the images in pixels.
        seed: seed of all random numbers.
        attention: `"avq"`, `"linfusion"` for LinFusion's linear attention, or `"exact"`, a control
            that exports nothing.
        avq: sizes, a threshold or `num_refined`, and the `levels` whose self-attention is replaced.
            `codewords: stored` trains codebooks, with all parents refined, and needs `num_refined`;
            `codewords: means` takes
            the codewords from the keys of each call, so that only the projections are trained.
            Instead of sizes, a file may name a saved `ErrorProfile` of the base model, `profile:
            FILE`, and a `tolerance`.
        data: images and captions.
        objective: losses.
        codebooks: initialization and updates of the codebooks; None with `codewords: means`.
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
            would break its graph into many small ones, into CUDA graphs; needs a CUDA GPU.
        log_every: number of steps between two lines of `log.jsonl`.
        checkpoint_every: number of steps between two checkpoints; None only saves one at the end.
        keep_checkpoints: number of newest checkpoints to keep.
        samples: sheets of sample images.
        tracker: a tracker of accelerate, such as `"tensorboard"` or `"wandb"`, or None.
    """

    base_model: str
    variant: str | None = None
    image_size: Side = 512
    seed: Seed = 0
    attention: Literal["avq", "linfusion", "exact"] = "avq"
    avq: AVQConfig = field(default_factory=AVQConfig)
    data: DataConfig
    objective: ObjectiveConfig = field(default_factory=ObjectiveConfig)
    codebooks: CodebookConfig | None = None
    steps: Count
    batch_size: Count = 96
    micro_batch_size: Count = 12
    learning_rate: Finite = 1e-4
    schedule: Literal["constant", "cosine"] = "constant"
    warmup_steps: Natural = 0
    weight_decay: Finite = 0.0
    adam_betas: tuple[Decay, Decay] = (0.9, 0.999)
    max_grad_norm: Positive = 1.0
    precision: Literal["fp32", "fp16", "bf16"] = "fp16"
    gradient_checkpointing: bool = False
    compile: bool = False
    log_every: Count = 50
    checkpoint_every: Count | None = None
    keep_checkpoints: Count = 2
    samples: SampleConfig
    tracker: str | None = None

    @classmethod
    def resolved(cls, values: dict[str, Any]) -> dict[str, Any]:
        """Replace the `avq` section by what `avq.profile` chooses within `avq.tolerance`.

        Raises:
            OSError: the profile cannot be read.
            TypeError: the tolerance is not a number.
            ValueError: the file is not a profile, or the tolerance is missing or out of range.
        """
        section = values.get("avq")
        if not isinstance(section, dict) or "profile" not in section:
            return values
        if "tolerance" not in section:
            raise ValueError("avq.profile needs avq.tolerance, such as 0.02.")
        from avq_diffusers import ErrorProfile  # help must not wait for PyTorch

        profile = ErrorProfile.load(section["profile"])
        chosen = profile.config_within(section["tolerance"])
        return {**values, "avq": plain_values(chosen)}

    def __post_init__(self) -> None:
        self._check_codewords()

    @property
    def base_model_name(self) -> str:
        """The Hub id of the base model, or the name of its folder."""
        path = Path(self.base_model)
        return path.name if path.exists() else self.base_model

    def _check_codewords(self) -> None:
        if self.avq.codewords == "stored":
            if self.codebooks is None:
                raise ValueError(
                    "with avq.codewords: stored, training learns the codewords; set codebooks."
                )
            return
        unused = {
            "codebooks": self.codebooks is not None,
            "avq.key_norm": self.avq.key_norm,
            "objective.commitment_weight": self.objective.commitment_weight != 0,
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
