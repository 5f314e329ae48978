"""Pipelines of the embedded models: assembling mini-sd3, and the usual guidance scale.

mini-sd3 is a Stable Diffusion 3 pipeline that shares mini-sd's VAE, text encoder and tokenizer. Its
folder has SD3's form without these parts, so that their weights are stored once. The pipeline's
`save_pretrained` writes a self-contained folder; diffusers loads it with `text_encoder_3=None,
tokenizer_3=None`, like any SD3 without T5.
"""

from inspect import signature
from pathlib import Path
from typing import Any

import torch
from diffusers import AutoencoderKL, DiffusionPipeline, StableDiffusion3Pipeline
from torch import nn
from transformers import CLIPTextModel, CLIPTextModelWithProjection, CLIPTokenizer

from avq_diffusers.mini import (
    MINI_GUIDANCE_SCALE,
    MINI_SD,
    MINI_SD3,
    is_mini_sd3,
)


def load_mini_sd3(
    folder: str | Path = MINI_SD3, dtype: torch.dtype = torch.float32
) -> StableDiffusion3Pipeline:
    """Load mini-sd3, or a folder that `python -m distill.pretrain sd3` trained.

    Raises:
        OSError: the folder lacks a file.
    """
    return StableDiffusion3Pipeline.from_pretrained(folder, dtype=dtype, **shared_parts(dtype))


def shared_parts(dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    """Return the components of `StableDiffusion3Pipeline` taken from mini-sd, or None if missing.

    Both CLIP encoders are mini-sd's, with the identity as projection. There is no T5; the pipeline
    puts zeros in its place.
    """
    vae = AutoencoderKL.from_pretrained(MINI_SD, subfolder="vae", torch_dtype=dtype)
    vae.register_to_config(shift_factor=0.0)  # SD3's pipeline adds it
    tokenizer = CLIPTokenizer.from_pretrained(MINI_SD, subfolder="tokenizer")
    text = CLIPTextModel.from_pretrained(MINI_SD, subfolder="text_encoder", dtype=dtype)
    encoder = CLIPTextModelWithProjection(text.config).to(dtype).eval()
    encoder.text_model.load_state_dict(getattr(text, "text_model", text).state_dict())
    nn.init.eye_(encoder.text_projection.weight)
    return {
        "vae": vae,
        "text_encoder": encoder,
        "text_encoder_2": encoder,
        "text_encoder_3": None,
        "tokenizer": tokenizer,
        "tokenizer_2": tokenizer,
        "tokenizer_3": None,
    }


def usual_guidance(pipe: DiffusionPipeline) -> float:
    """Return the guidance scale of mini-sd and mini-sd3, or the default of another pipeline."""
    name = pipe.name_or_path  # None if the pipeline was built from parts
    if name is not None and (name == MINI_SD or is_mini_sd3(name)):
        return MINI_GUIDANCE_SCALE
    return signature(type(pipe).__call__).parameters["guidance_scale"].default
