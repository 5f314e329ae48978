"""Codebooks for a model: named by the user, mini-sd's own, or calibrated once and cached."""

import hashlib
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from diffusers import DiffusionPipeline
from platformdirs import user_cache_path
from torch import nn

from avq_diffusers.cli.images import usual_guidance
from avq_diffusers.cli.options import first_line, usual_prompts
from avq_diffusers.cli.request import DEFAULT_CONFIG, ModelRequest
from avq_diffusers.config import AVQConfig
from avq_diffusers.mini import MINI_CODEBOOKS, MINI_CODEBOOKS_LEVEL1, MINI_SD
from avq_diffusers.plugin.calibration import calibrate
from avq_diffusers.plugin.codebooks import FORMAT_VERSION, AVQCodebooks
from avq_diffusers.plugin.layers import select_layers, unet_of

FINGERPRINT_VALUES = 1024
SHIPPED = {
    AVQConfig.parse(DEFAULT_CONFIG, levels=(0,)): MINI_CODEBOOKS,
    AVQConfig.parse(DEFAULT_CONFIG, levels=(0, 1)): MINI_CODEBOOKS_LEVEL1,
}


def find_codebooks(pipe: DiffusionPipeline, model: ModelRequest) -> AVQCodebooks:
    """Load the codebooks of a request; calibrate them unless they are in the user's cache.

    Raises:
        ValueError: they cannot be loaded or cached, or the model has no such layers.
    """
    if model.codebooks is not None:
        return load_codebooks(model.codebooks)
    config = _calibration_config(pipe, model)
    if model.name == MINI_SD and config in SHIPPED:
        return AVQCodebooks.from_pretrained(SHIPPED[config])
    folder = user_cache_path("avq-diffusers") / _fingerprint(pipe, config)
    if folder.exists():
        print(f"codebooks from the cache: {folder}")
        try:
            return AVQCodebooks.from_pretrained(folder)
        except (OSError, ValueError) as error:
            raise ValueError(
                f"the codebooks in the cache are damaged: {first_line(error)} Delete {folder} to "
                f"calibrate again."
            ) from error
    select_layers(unet_of(pipe), config.levels, config.exact)  # refuses what is not there
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        place = TemporaryDirectory(dir=folder.parent)
    except OSError as error:
        raise ValueError(
            f"the cache {folder.parent} cannot be written ({error.strerror}); make codebooks by "
            f"avq calibrate, and pass them by --codebooks."
        ) from error
    print(f"no codebooks for this model yet: calibrating once, cached in {folder}")
    with place as temporary:
        calibrated = calibrate_model(pipe, model, usual_prompts(model.name))
        calibrated.save_pretrained(Path(temporary) / "codebooks")
        if not folder.exists():  # another process may have been faster
            (Path(temporary) / "codebooks").rename(folder)
    return calibrated


def load_codebooks(name: str) -> AVQCodebooks:
    """Load codebooks from a folder or the Hub.

    Raises:
        ValueError: they cannot be loaded.
    """
    try:
        return AVQCodebooks.from_pretrained(name)
    except OSError as error:
        raise ValueError(f"codebooks {name} could not be loaded: {first_line(error)}") from error


def calibrate_model(
    pipe: DiffusionPipeline, model: ModelRequest, prompts: Sequence[str], **arguments: Any
) -> AVQCodebooks:
    """Calibrate the codebooks of a request; further arguments go to `calibrate`."""
    config, guidance_scale = _calibration_config(pipe, model), usual_guidance(pipe)
    return calibrate(pipe, prompts, config, guidance_scale=guidance_scale, **arguments)


def _calibration_config(pipe: DiffusionPipeline, model: ModelRequest) -> AVQConfig:
    """The request's configuration, by default at the finest level with self-attention."""
    if model.has_levels:
        return model.config
    present = (layer.level for layer in select_layers(unet_of(pipe)))
    return replace(model.config, levels=(min(present, default=0),))  # SDXL's is level 1


def _fingerprint(pipe: DiffusionPipeline, config: AVQConfig) -> str:
    """Hash the format, the configuration and the weights that keys depend on.

    Hashing whole tensors would take seconds. Values spread over each of them are enough: a
    fine-tune changes nearly all.
    """
    digest = hashlib.sha256(f"{FORMAT_VERSION} {config!r}".encode())
    modules = {name: part for name, part in pipe.components.items() if isinstance(part, nn.Module)}
    for name, weight in nn.ModuleDict(modules).named_parameters():
        values = weight.detach().flatten()
        values = values[:: math.ceil(len(values) / FINGERPRINT_VALUES)]
        digest.update(name.encode() + values.float().cpu().numpy().tobytes())
    return f"{config}-{digest.hexdigest()[:16]}"
