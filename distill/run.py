"""`Run`: from a configuration to a run that is ready for its next step."""

import math
import sys
from itertools import islice
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType
from diffusers import DDPMScheduler, StableDiffusionPipeline
from diffusers.optimization import get_scheduler
from safetensors import SafetensorError
from tqdm import tqdm

from avq_diffusers.files import read_log
from avq_diffusers.mini import model_path
from distill.accelerator import make_accelerator
from distill.checkpointing import checkpoint
from distill.config import DistillConfig
from distill.data.batches import training_batches
from distill.data.encoder import Encoder, module_digest
from distill.data.sources import open_samples
from distill.data.stream import EncodedSamples
from distill.log import log_path
from distill.objective import Objective
from distill.optimizer import load_optimizer, make_optimizer, optimizer_tensors
from distill.stored import start_codebooks

# Fields and sections that may differ between a run and its continuation. At most they change
# rounding, and the random numbers of DiVeQ and dead codewords.
FREE = ("micro_batch_size", "gradient_checkpointing", "compile", "log_every", "checkpoint_every")
FREE += ("keep_checkpoints", "samples", "tracker", "data.workers", "data.cache")
HALF = {"fp32": None, "fp16": torch.float16, "bf16": torch.bfloat16}
SHARDED = (DistributedType.FSDP, DistributedType.DEEPSPEED, DistributedType.MEGATRON_LM)
PARTS = ("vae", "text_encoder", "tokenizer", "unet", "scheduler")
# Scheduler configuration that describes a noise schedule; flow matching and EDM have none.
NOISE_SCHEDULE = ("num_train_timesteps", "beta_start", "beta_end", "beta_schedule")
NOISE_SCHEDULE += ("prediction_type",)
PREDICTIONS = ("epsilon", "v_prediction")


class Run:
    """A run that is ready for its next step: model and data are loaded, and the codebooks are
    initialized or the newest checkpoint is restored.

    Attributes:
        accelerator: holds the tracker.
        pipe: base model; its UNet is the teacher.
        digests: digests of base model and data, which a resumed run must share.
        objective: what is trained; `model` is the same, prepared by the accelerator.
        batches: micro-batches of this process, from the next step on.
        step: number of completed steps.

    Args:
        config: the run's configuration.
        output: folder for checkpoints, logs, sheets and exports, shared by all processes.
        resume: whether to continue from the newest checkpoint, if there is one.

    Raises:
        ValueError: the configuration does not fit the machine, base model, data or checkpoint; the
            base model or data has changed since the checkpoint; `output` holds a run and `resume`
            is False; or the log is damaged.
        FileNotFoundError, ImportError: the data cannot be opened.
        FloatingPointError: encoded samples overflow the float16 of the cache.
        OSError: the base model cannot be loaded, or the cache cannot be written.
    """

    def __init__(self, config: DistillConfig, output: Path, *, resume: bool) -> None:
        self.config, self.output, self.step = config, output, 0
        found = checkpoint.newest(output) if resume else None
        if resume:
            checkpoint.check_config(output, found, config, free=FREE)
        else:
            checkpoint.check_unused(output, "add --resume or choose another --output")
        read_log(log_path(output))  # raises for a damaged log, before the long preparation

        self.accelerator = accelerator = open_accelerator(config, output)
        torch.manual_seed(config.seed)
        self.pipe = pipe = load_pipeline(config, accelerator.device)
        samples = open_samples(config.data, config.image_size)
        self.digests = {
            "base": module_digest(pipe.unet, pipe.unet.config),
            "data": f"{len(samples)} of {samples.fingerprint}",
        }
        for name, change in (
            ("base", f"from another {config.base_model}; its UNet has"),
            ("data", "on other data; images or captions have"),
        ):
            if found is not None and found.run.get(name) != self.digests[name]:
                raise ValueError(f"{found.path} was trained {change} changed since.")

        self.objective = objective = Objective(
            pipe.unet,
            config.avq,
            config.objective,
            attention=config.attention,
            teacher_dtype=HALF[config.precision] if accelerator.device.type == "cuda" else None,
            alphas_cumprod=DDPMScheduler.from_config(pipe.scheduler.config).alphas_cumprod,
            empty_text_states=pipe.encode_prompt("", accelerator.device, 1, False)[0].detach(),
        )
        if config.gradient_checkpointing:
            objective.student.enable_gradient_checkpointing()
        optimizer = make_optimizer(objective, config)
        self.schedule = get_scheduler(
            "constant_with_warmup" if config.schedule == "constant" else config.schedule,
            optimizer,
            num_warmup_steps=config.warmup_steps,
            num_training_steps=config.steps,
        )

        ranks = {
            "process_index": accelerator.process_index,
            "num_processes": accelerator.num_processes,
        }
        encoder = Encoder(pipe.vae, pipe.text_encoder, pipe.tokenizer)
        encoded = EncodedSamples(samples, config.data, config.image_size, encoder, **ranks)
        first_sample = 0 if found is None else found.step * config.batch_size
        self.batches = training_batches(config, encoded, pipe, first_sample=first_sample, **ranks)
        if found is None and objective.stored:
            is_main = accelerator.is_main_process
            start_from_images(objective, config, encoded, pipe, show_progress=is_main)

        if config.compile:
            torch._dynamo.config.optimize_ddp = False  # DDP wraps the compiled modules
            objective.compile_unets(student=not config.gradient_checkpointing)
        self.model, self.optimizer = accelerator.prepare(objective, optimizer)
        if found is not None:
            self._load(found)

    def save_checkpoint(self) -> None:
        """Save everything that training changes."""
        scaler = self.accelerator.scaler
        checkpoint.save(
            self.output,
            self.step,
            {
                "objective": self.objective.state_dict(),
                "optimizer": optimizer_tensors(self.objective, self.optimizer),
            },
            config=self.config,
            keep=self.config.keep_checkpoints,
            schedule=self.schedule.state_dict(),
            scaler=None if scaler is None else scaler.state_dict(),
            **self.digests,
        )

    def _load(self, found: checkpoint.Checkpoint) -> None:
        """Restore in place what `save_checkpoint` saved."""
        self.objective.load_state_dict(found.tensors("objective"))
        load_optimizer(self.objective, self.optimizer, found.tensors("optimizer"))
        self.schedule.load_state_dict(found.run["schedule"])
        rates = self.schedule.get_last_lr()
        for group, rate in zip(self.optimizer.param_groups, rates, strict=True):
            group["lr"] = rate
        if self.accelerator.scaler is not None:
            self.accelerator.scaler.load_state_dict(found.run["scaler"])
        self.step = found.step


def open_accelerator(config: DistillConfig, output: Path) -> Accelerator:
    """Create the accelerator of a run.

    Raises:
        ValueError: as `make_accelerator`; or the device does not support the precision, the
            launcher shards weights, the tracker is not installed, or the batch cannot be split
            evenly.
    """
    accelerator = make_accelerator(
        config,
        mixed_precision="no" if config.precision == "fp32" else config.precision,
        log_with=config.tracker,
        project_dir=output,
    )
    if config.precision == "fp16" and accelerator.device.type == "cpu":
        raise ValueError("precision fp16 needs a GPU; choose bf16 or fp32 on a CPU.")
    if accelerator.distributed_type in SHARDED:
        raise ValueError(
            f"distillation trains few weights and does not shard them; launch with DDP instead of "
            f"{accelerator.distributed_type.value}."
        )
    if config.tracker is not None and not accelerator.log_with:
        raise ValueError(
            f"the tracker {config.tracker} is not installed; install it or set tracker to null."
        )
    accelerator.gradient_accumulation_steps = config.accumulation(accelerator.num_processes)
    return accelerator


def load_pipeline(config: DistillConfig, device: torch.device) -> StableDiffusionPipeline:
    """Load the base model in float32.

    Raises:
        ValueError: a file is damaged, the model is not a Stable Diffusion 1.x or 2.x model whose
            UNet takes latents only, or it has fewer timesteps than the sample sheets need.
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
    if problem := unsuited(pipe, config.samples.num_inference_steps):
        raise ValueError(
            f"base_model must be a Stable Diffusion 1.x or 2.x model, but {config.base_model} "
            f"{problem}."
        )
    pipe.set_progress_bar_config(disable=True)
    # Half-precision convolutions are fastest in this layout, and tokens are views of it.
    pipe.unet.to(memory_format=torch.channels_last)
    return pipe.to(device)


def unsuited(pipe: StableDiffusionPipeline, num_steps: int) -> str | None:
    """Return why a pipeline cannot be distilled, or sampled in this many steps; None if it can."""
    if missing := [part for part in PARTS if getattr(pipe, part) is None]:
        return f"has no {', '.join(missing)}"
    unet, schedule = pipe.unet.config, pipe.scheduler.config
    if unet.addition_embed_type is not None:
        return f"takes additional conditions ({unet.addition_embed_type})"
    if unet.in_channels != pipe.vae.config.latent_channels:
        return f"takes {unet.in_channels} channels, like one for inpainting"
    if missing := [name for name in NOISE_SCHEDULE if name not in schedule]:
        return f"has a {type(pipe.scheduler).__name__} without {', '.join(missing)}"
    if schedule.prediction_type not in PREDICTIONS:
        return f"predicts {schedule.prediction_type}, not {' or '.join(PREDICTIONS)}"
    if num_steps > schedule.num_train_timesteps:
        return f"has {schedule.num_train_timesteps} timesteps for {num_steps} of samples"
    return None


def start_from_images(
    objective: Objective,
    config: DistillConfig,
    samples: EncodedSamples,
    pipe: StableDiffusionPipeline,
    *,
    show_progress: bool,
) -> None:
    """Initialize the codebooks from the keys of the first images."""
    num_images, size = config.codebooks.start_images, config.micro_batch_size
    num_batches = math.ceil(num_images / size)
    stream = training_batches(
        config, samples, pipe, first_sample=0, process_index=0, num_processes=1
    )
    progress = tqdm(
        islice(stream, num_batches), "images for k-means", num_batches, disable=not show_progress
    )
    batches = list(progress)
    last = num_images - (num_batches - 1) * size
    batches[-1] = {name: values[:last] for name, values in batches[-1].items()}
    if show_progress:
        tqdm.write(f"fitting {len(objective.stored)} codebooks by k-means", sys.stderr)
    start_codebooks(
        objective.stored,
        objective.teacher_keys(batches),
        num_images=num_images,
        images_per_step=config.batch_size * (2 if objective.is_guided else 1),
        keys_per_layer=config.codebooks.keys_per_layer,
        seed=config.seed,
    )
