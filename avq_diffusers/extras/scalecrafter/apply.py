"""Run ScaleCrafter on a pipeline: `scalecrafter`.

A hook sets the UNet's convolutions by the timestep of each call. It reads a scheduler's timesteps
from the device once per image. It stays outside compiled code. `torch.compile(unet)` makes one
graph per set of dilations that an image goes through: two, or five at four times the training size.
If the UNet must compile without a graph break (`fullgraph=True`), call
`pipe.unet = torch.compile(pipe.unet, fullgraph=True)` before `scalecrafter`. CUDA graph capture
reads nothing: the graph keeps the convolutions of the previous call.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from diffusers import DiffusionPipeline, UNet2DConditionModel
from torch import nn

from avq_diffusers.config import check_int
from avq_diffusers.extras.scalecrafter.convolution import RedilatedConvolution
from avq_diffusers.extras.scalecrafter.settings import (
    MINI_SCALECRAFTER,
    ScaleCrafterConfig,
    at_level,
    usual_config,
)
from avq_diffusers.hosts.core import TIMESTEP, Hosted, Timesteps
from avq_diffusers.hosts.models import unet_of
from avq_diffusers.mini import IMAGE_SIZE, MINI_SD


def usual_scalecrafter(pipe: DiffusionPipeline, height: int, width: int) -> ScaleCrafterConfig:
    """Return mini-sd's own ScaleCrafter settings, or the authors' for another pipeline or size.

    Args:
        pipe: a pipeline with a `unet`.
        height, width: size of the images in pixels.

    Raises:
        TypeError, ValueError: as `scalecrafter`.
    """
    is_mini = pipe.name_or_path == MINI_SD and height == width == 2 * IMAGE_SIZE
    config = MINI_SCALECRAFTER if is_mini else None
    return _ScaleCrafter(pipe, height, width, config).config


@contextmanager
def scalecrafter(
    pipe: DiffusionPipeline | nn.Module,
    height: int,
    width: int,
    *,
    config: ScaleCrafterConfig | None = None,
) -> Iterator[None]:
    """Dilate the UNet's convolutions in the `with` block, for images larger than it was trained on.

    Afterwards the UNet is as before, with any earlier ScaleCrafter. Attention and ControlNets stay
    unchanged. Img2img with a strength below about 0.4 (0.3 from 2.5 times the training size on)
    starts after the dilated part. In the block, the UNet refuses latents of another size, and
    samplers without training timesteps such as EDM's and IPNDM. It serves one thread at a time: all
    its convolutions follow the timestep of the current call.

    Args:
        pipe: a pipeline with a `unet`, or the UNet.
        height: height of the images in pixels; 8 per latent for a UNet without a pipeline.
        width: likewise.
        config: None takes the authors' settings for SD1.5, whatever the model, by the ratio of
            image to training size: 2 x 2, 2.5 x 2.5, 4 x 2, 2 x 4 or 4 x 4; the last three without
            the noise-damped guidance that the authors add. The authors use others for SD2.1 (20
            dilated steps at 2 x 2) and for SDXL (no dilated down block at 2 x 2). mini-sd at 2 x 2
            works best with `MINI_SCALECRAFTER`.

    Raises:
        TypeError: `pipe` has no UNet, a side is not an int, or `config` is not a
            `ScaleCrafterConfig`.
        ValueError: a side is not a multiple of 8, the size is not larger than the training size,
            there are no settings for it, or the UNet has no convolution to dilate or pads with
            something other than zeros.
    """
    state = _ScaleCrafter(pipe, height, width, config)
    unet = unet_of(pipe)
    earlier = getattr(unet.model, "_scalecrafter", None)
    _switch(unet, state)
    try:
        yield
    finally:
        _switch(unet_of(pipe), earlier)


def _switch(hosted: Hosted, state: "_ScaleCrafter | None") -> None:
    """Put a ScaleCrafter, or none, in place of what the UNet has."""
    if hasattr(hosted.model, "_scalecrafter"):
        hosted.model._scalecrafter.uninstall()
        del hosted.model._scalecrafter
    if state is not None:
        state.install(hosted)


class _ScaleCrafter:
    """ScaleCrafter on one UNet: its re-dilated convolutions, and hooks on its calls."""

    def __init__(
        self,
        pipe: DiffusionPipeline | nn.Module,
        height: int,
        width: int,
        config: ScaleCrafterConfig | None,
    ) -> None:
        unet = unet_of(pipe).model
        if not hasattr(unet, "up_blocks"):
            raise TypeError(f"expected a UNet with up_blocks, but got {type(unet).__name__}.")
        factor = getattr(pipe, "vae_scale_factor", 8)
        sample_size = unet.config.sample_size
        if not isinstance(sample_size, int):
            raise ValueError(
                f"sample_size={sample_size!r} in the UNet's config is not a training size."
            )
        training_size = sample_size * factor
        unit = math.lcm(8, factor)  # diffusers' pipelines take multiples of 8
        for name, side in (("height", height), ("width", width)):
            check_int(name, side, unit)
            if side % unit:
                raise ValueError(f"{name} must be a multiple of {unit}, but got {side}.")
        if max(height, width) <= training_size:
            raise ValueError(
                f"ScaleCrafter is for images larger than the training size, {training_size}, but "
                f"got {height} x {width} (height x width); there is nothing to do."
            )
        if config is None:
            config = usual_config(height, width, training_size)
        elif not isinstance(config, ScaleCrafterConfig):
            raise TypeError(
                f"config must be a ScaleCrafterConfig, but got {type(config).__name__}."
            )
        self.convolutions = _convolutions(unet, config)
        if not self.convolutions:
            raise ValueError(
                f"this UNet has no 3x3 convolution at a level that dilations={config.dilations} "
                "dilates."
            )
        self.config = config
        self.size = (height, width)
        self.latent_size = (height // factor, width // factor)
        self.timesteps = Timesteps(type(unet), TIMESTEP)
        self.timestep: float = 0

    def install(self, hosted: Hosted) -> None:
        hosted.model._scalecrafter = self
        self.handle = hosted.entrance.register_forward_pre_hook(self.pre_forward, with_kwargs=True)

    def uninstall(self) -> None:
        self.handle.remove()
        for convolution in self.convolutions:
            convolution.uninstall()

    @torch.compiler.disable
    def pre_forward(self, unet: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        sample = args[0] if args else kwargs["sample"]
        size = tuple(sample.shape[-2:])
        if size != self.latent_size:
            height, width = self.size
            raise ValueError(
                f"ScaleCrafter was applied for images of {height} x {width}, latents of "
                f"{self.latent_size}, but got latents of {size}; apply it for this size, or remove "
                "it."
            )
        timestep = self.timesteps.read(args, kwargs)
        if timestep is not None:
            self.timestep = timestep
        dilations = self.config.dilations_at(self.timestep) or (1,)
        for convolution in self.convolutions:
            convolution.install()
            convolution.dilation = at_level(dilations, convolution.level)


def _convolutions(
    unet: UNet2DConditionModel, config: ScaleCrafterConfig
) -> list[RedilatedConvolution]:
    deepest = len(unet.down_blocks) - 1
    blocks = [
        *enumerate(unet.down_blocks),
        *([] if unet.mid_block is None else [(deepest, unet.mid_block)]),
        *((deepest - index, block) for index, block in enumerate(unet.up_blocks)),
    ]
    found = []
    for level, block in blocks:
        if at_level(config.dilations, level) == 1:
            continue
        holders = [(resnet, name) for resnet in block.resnets for name in ("conv1", "conv2")]
        for samplers in ("downsamplers", "upsamplers") if config.downsamplers else ("upsamplers",):
            holders += [(sampler, "conv") for sampler in getattr(block, samplers, None) or ()]
        for holder, name in holders:
            convolution = getattr(holder, name)
            convolution = getattr(convolution, "base_layer", convolution)  # under a LoRA
            if (
                isinstance(convolution, nn.Conv2d)
                and (convolution.kernel_size, convolution.padding) == ((3, 3), (1, 1))
                and convolution.dilation == (1, 1)
            ):
                if convolution.padding_mode != "zeros":
                    raise ValueError(
                        f"ScaleCrafter pads with zeros, but this UNet's convolutions have "
                        f"padding_mode={convolution.padding_mode!r}; generate at its training size."
                    )
                found.append(RedilatedConvolution(holder, name, level, convolution.stride[0]))
    return found
