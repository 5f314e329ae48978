"""`prepare`: from a configuration to a run that is ready for its next step."""

import math
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedDataParallelKwargs, DistributedType
from diffusers import StableDiffusionPipeline
from diffusers.optimization import get_scheduler
from safetensors import SafetensorError
from torch import nn
from tqdm import tqdm

from avq_diffusers.mini import model_path
from distill.checkpointing import checkpoint
from distill.checkpointing.run_folder import check_unused
from distill.config import DistillConfig
from distill.data.batches import training_batches
from distill.data.encoder import module_digest
from distill.data.sources import open_samples
from distill.log import read_log
from distill.objective import Batch, Objective
from distill.optimizer import load_optimizer, make_optimizer, optimizer_tensors

# Fields and sections that may differ between a run and its continuation: the result is the same up
# to the rounding of sums, and of samples by the cache to half precision, and to other draws where
# DiVeQ or dead codewords need some.
FREE = ("micro_batch_size", "gradient_checkpointing", "compile", "log_every", "checkpoint_every")
FREE += ("keep_checkpoints", "samples", "tracker", "data.workers", "data.cache")
HALF = {"fp32": None, "fp16": torch.float16, "bf16": torch.bfloat16}
SHARDED = (DistributedType.FSDP, DistributedType.DEEPSPEED, DistributedType.MEGATRON_LM)
PREDICTIONS = ("epsilon", "v_prediction")


@dataclass(frozen=True)
class TrainingState:
    """What a checkpoint holds, beside the step: all that training changes, and what may not change.

    Args:
        base: digest of the base model's UNet.
        data: number of samples, and digest of what they are made from.
        objective, optimizer, schedule, scaler: of the run.
    """

    base: str
    data: str
    objective: Objective
    optimizer: torch.optim.Optimizer
    schedule: torch.optim.lr_scheduler.LambdaLR
    scaler: torch.amp.GradScaler | None

    def save(self, output: Path, step: int, config: DistillConfig) -> None:
        """Write the checkpoint of a step."""
        checkpoint.save(
            output,
            step,
            {
                "objective": self.objective.state_dict(),
                "optimizer": optimizer_tensors(self.objective, self.optimizer),
            },
            config=config,
            keep=config.keep_checkpoints,
            base=self.base,
            data=self.data,
            schedule=self.schedule.state_dict(),
            scaler=None if self.scaler is None else self.scaler.state_dict(),
        )

    def load(self, found: checkpoint.Checkpoint) -> None:
        """Restore a checkpoint in place."""
        self.objective.load_state_dict(found.tensors("objective"))
        tensors = found.tensors("optimizer")
        load_optimizer(self.objective, self.optimizer, tensors)
        self.schedule.load_state_dict(found.run["schedule"])
        for group, rate in zip(
            self.optimizer.param_groups, self.schedule.get_last_lr(), strict=True
        ):
            group["lr"] = rate
        if self.scaler is not None:
            self.scaler.load_state_dict(found.run["scaler"])


@dataclass
class Run:
    """A run that is ready for its next step.

    Args:
        config: of the run.
        output: folder for checkpoints, logs, sheets and the result, seen by all processes.
        accelerator: with the tracker.
        pipe: the base model; its UNet is the teacher.
        objective: what is trained.
        model: the objective as the accelerator prepared it.
        optimizer: as the accelerator prepared it.
        state: what checkpoints hold.
        batches: micro-batches of this process, from the next step on.
        step: completed steps.
    """

    config: DistillConfig
    output: Path
    accelerator: Accelerator
    pipe: StableDiffusionPipeline
    objective: Objective
    model: nn.Module
    optimizer: torch.optim.Optimizer
    state: TrainingState
    batches: Iterator[Batch]
    step: int


def prepare(config: DistillConfig, output: Path, *, resume: bool) -> Run:
    """Load everything, and start the codebooks or restore the newest checkpoint.

    Raises:
        ValueError: the config does not go with this machine, the base model, the data or the
            checkpoint, the base model or the data is not that of the checkpoint, or `output` holds
            a run and is not to be resumed, or a damaged log.
        FileNotFoundError, ImportError: of the data.
        FloatingPointError: the cache cannot hold what the base model makes of the data.
        OSError: the base model cannot be loaded, or the cache cannot be written.
    """
    found = checkpoint.newest(output) if resume else None
    if found is not None:
        checkpoint.check(found, config, free=FREE)
    elif not resume:
        check_unused(output)
    read_log(output)  # a damaged one is refused now, not after the codebooks' start
    accelerator = make_accelerator(config, output)
    device = accelerator.device
    torch.manual_seed(config.seed)
    pipe = load_pipeline(config, device)
    base = module_digest(pipe.unet, pipe.unet.config)
    if found is not None and found.run.get("base") != base:
        raise ValueError(
            f"{found.path} was trained from another {config.base_model}, whose UNet has changed "
            f"since."
        )
    samples = open_samples(config.data, config.image_size)
    data = f"{len(samples)} of {samples.fingerprint()}"
    if found is not None and found.run.get("data") != data:
        raise ValueError(
            f"{found.path} was trained on other data: pictures or captions have changed since."
        )
    objective = Objective(
        pipe.unet,
        config.avq,
        attention=config.attention,
        teacher_dtype=HALF[config.precision] if device.type == "cuda" else None,
        **asdict(config.objective),
    )
    if config.gradient_checkpointing:
        objective.student.enable_gradient_checkpointing()
    optimizer = make_optimizer(objective, config)
    schedule = get_scheduler(
        "constant_with_warmup" if config.schedule == "constant" else config.schedule,
        optimizer,
        num_warmup_steps=config.warmup_steps,
        num_training_steps=config.steps,
    )
    state = TrainingState(base, data, objective, optimizer, schedule, accelerator.scaler)
    step = 0 if found is None else found.step
    batches = training_batches(
        config,
        pipe,
        first_sample=step * config.batch_size,
        process_index=accelerator.process_index,
        num_processes=accelerator.num_processes,
    )
    if found is not None:
        state.load(found)
    elif objective.processors:
        start_codebooks(objective, config, pipe, quiet=not accelerator.is_main_process)
    if config.compile:
        torch._dynamo.config.optimize_ddp = False  # the compiled modules are inside of DDP's
        objective.teacher.compile()
        if not config.gradient_checkpointing:
            objective.student.compile()
    model, prepared = accelerator.prepare(objective, optimizer)
    return Run(config, output, accelerator, pipe, objective, model, prepared, state, batches, step)


def make_accelerator(config: DistillConfig, output: Path) -> Accelerator:
    """The accelerator of a run.

    Raises:
        ValueError: the machine lacks the precision, the launcher asks for sharded weights, the
            tracker is not installed, or the batch cannot be shared out.
    """
    accelerator = Accelerator(
        mixed_precision="no" if config.precision == "fp32" else config.precision,
        log_with=config.tracker,
        project_dir=output,
        # A step's codebook statistics are reduced once, by the objective.
        kwargs_handlers=[
            DistributedDataParallelKwargs(broadcast_buffers=False, gradient_as_bucket_view=True)
        ],
    )
    if config.precision == "fp16" and accelerator.device.type == "cpu":
        raise ValueError("precision fp16 needs a GPU; take bf16 or fp32 on a CPU.")
    if accelerator.distributed_type in SHARDED:
        raise ValueError(
            f"what is trained is small and stays whole on every process; launch with DDP in place "
            f"of {accelerator.distributed_type.value}."
        )
    if config.tracker is not None and not accelerator.log_with:
        raise ValueError(f"the tracker {config.tracker} is not installed; install it or set null.")
    accelerator.gradient_accumulation_steps = config.accumulation(accelerator.num_processes)
    return accelerator


def load_pipeline(config: DistillConfig, device: torch.device) -> StableDiffusionPipeline:
    """The base model in float32.

    Raises:
        ValueError: a file is damaged, or it is not a Stable Diffusion 1.x or 2.x model that
            denoises latents alone, or has fewer timesteps than sheets take.
    """
    try:
        pipe = StableDiffusionPipeline.from_pretrained(
            model_path(config.base_model),
            variant=config.variant,
            dtype=torch.float32,
            safety_checker=None,
            feature_extractor=None,
            requires_safety_checker=False,
        )
    except SafetensorError as error:
        raise ValueError(f"base_model {config.base_model} has a damaged file: {error}.") from error
    if pipe.unet.config.addition_embed_type is not None:
        raise ValueError(
            f"base_model must be a Stable Diffusion 1.x or 2.x model, but {config.base_model} "
            f"has further conditions ({pipe.unet.config.addition_embed_type})."
        )
    inputs, latents = pipe.unet.config.in_channels, pipe.vae.config.latent_channels
    if inputs != latents:
        raise ValueError(
            f"base_model must denoise latents of {latents} channels alone, but the UNet of "
            f"{config.base_model} takes {inputs}, as for inpainting."
        )
    if pipe.scheduler.config.prediction_type not in PREDICTIONS:
        raise ValueError(
            f"base_model must predict one of {', '.join(PREDICTIONS)}, but {config.base_model} "
            f"predicts {pipe.scheduler.config.prediction_type}."
        )
    most = pipe.scheduler.config.num_train_timesteps
    if config.samples.num_inference_steps > most:
        raise ValueError(
            f"samples.num_inference_steps must be at most the {most} timesteps of "
            f"{config.base_model}, but got {config.samples.num_inference_steps}."
        )
    pipe.set_progress_bar_config(disable=True)
    # Convolutions of half precision are fastest in this layout, and tokens are a view of it.
    pipe.unet.to(memory_format=torch.channels_last)
    return pipe.to(device)


def start_codebooks(
    objective: Objective, config: DistillConfig, pipe: StableDiffusionPipeline, *, quiet: bool
) -> None:
    """Start the codebooks from the keys of the first pictures of the stream."""
    num_batches = math.ceil(config.codebooks.start_pictures / config.micro_batch_size)
    first = training_batches(config, pipe, first_sample=0, process_index=0, num_processes=1)
    first = tqdm(islice(first, num_batches), "pictures for k-means", num_batches, disable=quiet)
    batches = list(first)
    last = config.codebooks.start_pictures - (num_batches - 1) * config.micro_batch_size
    batches[-1] = {name: values[:last] for name, values in batches[-1].items()}
    if not quiet:
        tqdm.write(f"fitting {len(objective.processors)} codebooks by k-means", sys.stderr)
    objective.start_codebooks(
        batches,
        samples_per_step=config.batch_size,
        keys_per_layer=config.codebooks.keys_per_layer,
        seed=config.seed,
    )
