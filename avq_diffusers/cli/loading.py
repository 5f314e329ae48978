"""Load text-to-image pipelines by name: a folder, a Hub id, or a single file with all weights."""

from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch
from diffusers import DiffusionPipeline
from diffusers.utils import logging as diffusers_logging
from huggingface_hub.errors import LocalEntryNotFoundError
from huggingface_hub.utils.tqdm import enable_progress_bars
from safetensors import SafetensorError, safe_open
from torch import nn
from transformers.utils import logging as transformers_logging

from avq_diffusers.hosts.models import has_unet, unet_of
from avq_diffusers.mini import is_mini_sd3
from avq_diffusers.options import device_of, first_line

COMPILE_UNET: Mapping[str, Any] = {"mode": "reduce-overhead", "dynamic": False}


def load_pipeline(
    model: str, device: str | None = None, dtype: str | None = None
) -> DiffusionPipeline:
    """Load a text-to-image pipeline, without the libraries' bars for its parts.

    Args:
        model: folder or Hub id of a model, or a .safetensors file of Stable Diffusion or SDXL in
            the original layout, as used for sharing fine-tunes. A file's configuration comes from
            the Hub.
        device: cuda, mps or cpu; None takes the fastest available.
        dtype: float32, float16 or bfloat16. None is half precision on an NVIDIA GPU (float16 for
            UNets, bfloat16 for transformers, whose values are larger), else float32.
    """
    diffusers_logging.disable_progress_bar()
    transformers_logging.disable_progress_bar()
    enable_progress_bars()  # of downloads, which the line above hides, too
    place = device_of(device)
    if place.type != "cuda":
        dtype = dtype or "float32"
    chosen = None if dtype is None else getattr(torch, dtype)
    try:
        load = _single_file if Path(model).is_file() else _folder
        pipe = load(model, chosen)
    except LocalEntryNotFoundError as error:
        raise ValueError(
            f"--model {model}: its configuration is not in the cache, and the Hub cannot be "
            f"reached; go online once."
        ) from error
    except (OSError, ValueError, TypeError, SafetensorError) as error:
        raise ValueError(f"--model {model} could not be loaded: {first_line(error)}") from error
    if getattr(pipe, "vae", None) is None:
        raise ValueError(f"--model {model} has no VAE, unlike Stable Diffusion.")
    if getattr(pipe, "text_encoder", None) is None:
        raise ValueError(
            f"--model {model} has no text_encoder, like SDXL's refiner; name a model that "
            f"generates images from a prompt alone."
        )
    if has_unet(pipe):
        _check_unet(pipe, model)
    return pipe.to(place)


def _check_unet(pipe: DiffusionPipeline, model: str) -> None:
    """Refuse UNets without a single training size, or that need more than a prompt."""
    config = unet_of(pipe).model.config
    if not isinstance(config.sample_size, int):
        raise ValueError(
            f"--model {model} must have one training size, but its UNet has "
            f"sample_size={config.sample_size}."
        )
    if config.in_channels != pipe.vae.config.latent_channels:
        raise ValueError(
            f"--model {model} needs more than a prompt: its UNet takes {config.in_channels} "
            f"channels, and latents have {pipe.vae.config.latent_channels}."
        )


def _folder(model: str, dtype: torch.dtype | None) -> DiffusionPipeline:
    from diffusers import AutoPipelineForText2Image

    if is_mini_sd3(model):
        from avq_diffusers.mini.loading import load_mini_sd3

        return load_mini_sd3(model, dtype or torch.float16)
    parts = dict(DiffusionPipeline.load_config(model))
    if dtype is None:
        dtype = torch.bfloat16 if "transformer" in parts else torch.float16
    # diffusers must be told which optional parts, such as SD3's T5, are missing.
    absent = {name: None for name, part in parts.items() if part == [None, None]}
    load = partial(AutoPipelineForText2Image.from_pretrained, model, dtype=dtype, **absent)
    try:
        return load()
    except (OSError, ValueError):
        # Many models only ship half-precision files, such as model.fp16.safetensors.
        with suppress(OSError, ValueError):
            return load(variant="fp16")
        raise


def _single_file(path: str, dtype: torch.dtype | None) -> DiffusionPipeline:
    return _single_file_class(path).from_single_file(path, dtype=dtype or torch.float16)


def compile_model(pipe: DiffusionPipeline) -> None:
    """Compile the UNet into CUDA graphs, or a transformer block by block."""
    if has_unet(pipe):
        pipe.unet.compile(**COMPILE_UNET)
        return
    for blocks in pipe.transformer.children():
        if isinstance(blocks, nn.ModuleList):
            for block in blocks:
                block.compile()


def _single_file_class(path: str) -> type[DiffusionPipeline]:
    from diffusers import StableDiffusionPipeline, StableDiffusionXLPipeline

    if Path(path).suffix != ".safetensors":
        raise ValueError("weights are only read from .safetensors files.")
    with safe_open(path, "pt") as file:
        names = set(file.keys())
    if "model.diffusion_model.input_blocks.0.0.weight" not in names:
        raise ValueError("it is not a complete Stable Diffusion model.")
    # SDXL's two text encoders are stored under this name.
    is_xl = any(name.startswith("conditioner.embedders.") for name in names)
    return StableDiffusionXLPipeline if is_xl else StableDiffusionPipeline
