"""The commands' results as standard folders."""

import json
from pathlib import Path
from typing import Any

from diffusers import (
    AutoencoderKL,
    DDIMScheduler,
    FlowMatchEulerDiscreteScheduler,
    SD3Transformer2DModel,
    StableDiffusion3Pipeline,
    StableDiffusionPipeline,
    UNet2DConditionModel,
)
from transformers import CLIPModel, CLIPTextModel, CLIPTokenizer

MAX_SHARD_SIZE = "15MB"  # every file stays below 16 MiB


def make_scheduler() -> DDIMScheduler:
    """Return SD's noise schedule, with timesteps that start at the last training timestep."""
    return DDIMScheduler(
        num_train_timesteps=1000,
        beta_start=0.00085,
        beta_end=0.012,
        beta_schedule="scaled_linear",
        steps_offset=1,
        clip_sample=False,
        set_alpha_to_one=False,
        timestep_spacing="trailing",
        prediction_type="epsilon",
    )


def save_sd(
    vae: AutoencoderKL,
    unet: UNet2DConditionModel,
    text_encoder: CLIPTextModel,
    tokenizer: CLIPTokenizer,
    folder: Path,
) -> None:
    """Save parts in half precision as a pipeline that plain `from_pretrained` loads as float32."""
    pipeline = StableDiffusionPipeline(
        vae=vae,
        unet=unet,
        text_encoder=text_encoder,
        tokenizer=tokenizer,
        scheduler=make_scheduler(),
        safety_checker=None,
        feature_extractor=None,
        requires_safety_checker=False,
    )
    pipeline.save_pretrained(folder, max_shard_size=MAX_SHARD_SIZE)
    _forget_origin(folder)
    _load_as_float32(folder / "text_encoder")


def make_sd3_pipeline(
    transformer: SD3Transformer2DModel, parts: dict[str, Any], shift: float
) -> StableDiffusion3Pipeline:
    """Return a Stable Diffusion 3 pipeline with mini-sd's `shared_parts`."""
    scheduler = FlowMatchEulerDiscreteScheduler(shift=shift)
    return StableDiffusion3Pipeline(transformer=transformer, scheduler=scheduler, **parts)


def save_sd3(pipeline: StableDiffusion3Pipeline, folder: Path) -> None:
    """Save what `load_mini_sd3` reads: the pipeline without mini-sd's parts."""
    pipeline.save_config(folder)
    pipeline.scheduler.save_pretrained(folder / "scheduler")
    pipeline.transformer.save_pretrained(folder / "transformer", max_shard_size=MAX_SHARD_SIZE)
    _forget_origin(folder)


def save_scorer(model: CLIPModel, tokenizer: CLIPTokenizer, folder: Path) -> None:
    """Save a half-precision scorer that plain `from_pretrained` loads as float32."""
    model.save_pretrained(folder, max_shard_size=MAX_SHARD_SIZE)
    tokenizer.save_pretrained(folder)
    _load_as_float32(folder)


def _forget_origin(folder: Path) -> None:
    """Remove the run's path, which diffusers writes into every configuration."""
    for path in folder.rglob("*.json"):
        config = json.loads(path.read_text())
        if config.pop("_name_or_path", None) is not None:
            path.write_text(json.dumps(config, indent=2) + "\n")


def _load_as_float32(folder: Path) -> None:
    # transformers loads in the dtype of the configuration, diffusers in float32, and a pipeline
    # needs one dtype.
    path = folder / "config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps({**config, "dtype": "float32"}, indent=2) + "\n")
