"""Where a request takes its codewords from: the keys of each call, or codebooks."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from diffusers import DiffusionPipeline

from avq_diffusers.cli.hub import loading_codebooks
from avq_diffusers.cli.request import ModelRequest
from avq_diffusers.config import AVQConfig
from avq_diffusers.hosts.codebooks import AVQCodebooks, calibrate
from avq_diffusers.hosts.core import AVQSource
from avq_diffusers.hosts.models import models_of
from avq_diffusers.mini.loading import usual_guidance


def codeword_source(pipe: DiffusionPipeline, model: ModelRequest) -> AVQSource:
    """A request's codebooks, or its configuration."""
    if model.codebooks is not None:
        with loading_codebooks(model.codebooks):
            return AVQCodebooks.from_pretrained(model.codebooks)
    return _config_for(pipe, model)


def calibrate_model(
    pipe: DiffusionPipeline, model: ModelRequest, prompts: Sequence[str], **arguments: Any
) -> AVQCodebooks:
    """Calibrate codebooks in the paper's form; other arguments go to `calibrate`."""
    sizes = model.sizes or AVQConfig.parse("M64P16C8")
    config = replace(_config_for(pipe, replace(model, sizes=sizes)), codewords="stored")
    return calibrate(pipe, prompts, config, guidance_scale=usual_guidance(pipe), **arguments)


def _config_for(pipe: DiffusionPipeline, model: ModelRequest) -> AVQConfig:
    """The request's configuration, with `apply_avq`'s defaults for what it leaves open."""
    hosted = models_of(pipe)[0]
    usual = hosted.host.default_config(hosted.model)
    levels = usual.levels if model.levels is None else model.levels
    return replace(model.sizes or usual, levels=levels, exact=model.exact)
