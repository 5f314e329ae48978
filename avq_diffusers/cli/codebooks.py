"""Where a request takes its codewords from: the keys of each call, or codebooks."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from diffusers import DiffusionPipeline

from avq_diffusers.cli.request import ModelOptions, ModelRequest
from avq_diffusers.config import AVQConfig
from avq_diffusers.hosts.codebooks import AVQCodebooks, calibrate
from avq_diffusers.hosts.core import AVQSource
from avq_diffusers.hosts.models import models_of
from avq_diffusers.mini.loading import usual_guidance
from avq_diffusers.options import first_line


def codeword_source(pipe: DiffusionPipeline, model: ModelRequest) -> AVQSource:
    """A request's codebooks, or its configuration."""
    return _config_for(pipe, model) if model.codebooks is None else read_codebooks(model.codebooks)


def read_codebooks(name: str) -> AVQCodebooks:
    """Load codebooks, or name them in one sentence if that fails."""
    try:
        return AVQCodebooks.from_pretrained(name)
    except OSError as error:
        raise ValueError(f"codebooks {name} could not be loaded: {first_line(error)}") from error


def calibrate_model(
    pipe: DiffusionPipeline, model: ModelOptions, prompts: Sequence[str], **arguments: Any
) -> AVQCodebooks:
    """Calibrate codebooks in the paper's form; other arguments go to `calibrate`."""
    sizes = model.sizes or AVQConfig.parse("M64P16C8")
    config = replace(_config_for(pipe, replace(model, sizes=sizes)), codewords="stored")
    return calibrate(pipe, prompts, config, guidance_scale=usual_guidance(pipe), **arguments)


def _config_for(pipe: DiffusionPipeline, model: ModelOptions) -> AVQConfig:
    """The request's configuration, with `apply_avq`'s defaults for what it leaves open."""
    hosted = models_of(pipe)[0]
    usual = hosted.host.default_config(hosted.model)
    levels = usual.levels if model.levels is None else model.levels
    return replace(model.sizes or usual, levels=levels, exact=model.exact or ())
