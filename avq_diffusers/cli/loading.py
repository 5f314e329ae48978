"""Text-to-image pipelines by name: a folder, an id of the Hub, or one file with all weights."""

from contextlib import suppress
from functools import partial
from pathlib import Path

import torch
from diffusers import (
    AutoPipelineForText2Image,
    DiffusionPipeline,
    StableDiffusionPipeline,
    StableDiffusionXLPipeline,
)
from huggingface_hub.errors import LocalEntryNotFoundError
from safetensors import SafetensorError, safe_open

from avq_diffusers.cli.options import device_of, first_line
from avq_diffusers.plugin.layers import unet_of


def load_pipeline(model: str, device: str | None = None) -> DiffusionPipeline:
    """Load a text-to-image pipeline, in float16 on an NVIDIA GPU and else in float32.

    Args:
        model: folder or Hub id of a model, or a .safetensors file of Stable Diffusion or SDXL in
            its first layout, as fine-tunes are shared. Its configuration comes from the Hub.
        device: cuda, mps or cpu; the fastest present if None.

    Raises:
        ValueError: the device cannot be used, or the model cannot be loaded, has no single training
            size or does not draw from a prompt alone.
    """
    if device is None:
        device = next(
            (name for name in ("cuda", "mps") if getattr(torch, name).is_available()), "cpu"
        )
    dtype = torch.float16 if device_of(device).type == "cuda" else torch.float32
    try:
        if Path(model).is_file():
            pipe = _single_file_class(model).from_single_file(model, dtype=dtype)
        else:
            pipe = _pretrained(model, dtype)
    except LocalEntryNotFoundError as error:
        raise ValueError(
            f"--model {model}: its configuration is not in the cache, and the Hub cannot be "
            f"reached; go online once."
        ) from error
    except (OSError, ValueError, TypeError, SafetensorError) as error:
        raise ValueError(f"--model {model} could not be loaded: {first_line(error)}") from error
    if getattr(pipe, "vae", None) is None:
        raise ValueError(f"--model {model} has no VAE, as Stable Diffusion has.")
    size = unet_of(pipe).config.sample_size
    if not isinstance(size, int):
        raise ValueError(
            f"--model {model} must have one training size, but its UNet has sample_size={size}."
        )
    channels = unet_of(pipe).config.in_channels
    if channels != pipe.vae.config.latent_channels:
        raise ValueError(
            f"--model {model} draws from more than a prompt: its UNet takes {channels} channels, "
            f"and latents have {pipe.vae.config.latent_channels}."
        )
    return pipe.to(device)


def _pretrained(model: str, dtype: torch.dtype) -> DiffusionPipeline:
    load = partial(AutoPipelineForText2Image.from_pretrained, model, dtype=dtype)
    try:
        return load()
    except (OSError, ValueError):
        # Many models come with files of half precision only, such as model.fp16.safetensors.
        with suppress(OSError, ValueError):
            return load(variant="fp16")
        raise


def _single_file_class(path: str) -> type[DiffusionPipeline]:
    if Path(path).suffix != ".safetensors":
        raise ValueError("weights are read from .safetensors files only.")
    with safe_open(path, "pt") as file:
        names = set(file.keys())
    if "model.diffusion_model.input_blocks.0.0.weight" not in names:
        raise ValueError("it is not a complete Stable Diffusion model.")
    # SDXL's two text encoders have this name.
    is_xl = any(name.startswith("conditioner.embedders.") for name in names)
    return StableDiffusionXLPipeline if is_xl else StableDiffusionPipeline
