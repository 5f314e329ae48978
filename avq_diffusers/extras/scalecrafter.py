"""ScaleCrafter: re-dilated convolutions, for pictures larger than a UNet was trained on.

He et al., "ScaleCrafter: Tuning-free Higher-Resolution Visual Generation with Diffusion Models",
arXiv 2310.07702. In the first part of the denoising the 3x3 convolutions of the deeper levels are
dilated, so that they see as much of the picture as in training; without, objects repeat.

A re-dilated convolution (dilation p, d = ceil(p), stride s) resizes its input by d / p, convolves
with the same weights, dilation d and padding d, and resizes to the size that the convolution gives
without dilation; all resizing is bilinear, and none takes place for whole p. Here it runs as the
unchanged convolution on d x d sub-grids of its input (`sub_grids`), which is equal and works with
whatever stands for the convolution: LoRA, quantized or offloaded layers.

The UNet finds out by itself, from the timestep of each call, what to run. The hook that does this
reads a scheduler's timesteps from the device once per picture, and for noise-damped guidance
compares the latents there at each step. It stays outside of compiled code: of `torch.compile(unet)`
there is one graph for each set of dilations that a picture goes through: two, or nine at four times
the training size, for which `torch._dynamo.config.recompile_limit` must be raised to 16. Where the
UNet must compile without a graph break (`fullgraph=True`), compile it by
`pipe.unet = torch.compile(pipe.unet, fullgraph=True)` before `apply_scalecrafter`. While a CUDA
graph is captured nothing is read: the graph holds the convolutions of the call before.
"""

import math
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_map_only, tree_unflatten
from torch.utils.hooks import RemovableHandle

from avq_diffusers.config import check_int
from avq_diffusers.plugin.layers import PipelineOrUNet, uncompiled, unet_of
from avq_diffusers.plugin.timesteps import NUM_TRAIN_TIMESTEPS, Timesteps

# The paper's settings count iterations of DDIM with 50 steps.
NUM_STEPS = 50


@dataclass(frozen=True)
class ScaleCrafterConfig:
    """What ScaleCrafter does for one picture size.

    Attributes:
        dilations: of the convolutions at UNet level 0 (highest resolution), 1, and so on; the last
            one serves all deeper levels and the middle block. 1 leaves a level as it is.
        num_dilated_steps: how many of the first of 50 denoising steps are dilated. With another
            sampler or number of steps: the timesteps that these steps cover.
        progressive: dilations fall, step by step, to 2.
        damped_dilations: for noise-damped guidance, the weaker dilations of a second evaluation:
            the guided noise is weak(uncond) + w (strong(text) - strong(uncond)). None for ordinary
            guidance.

    Raises:
        TypeError: the number of steps is not an int.
        ValueError: a field is out of its range.
    """

    dilations: tuple[float, ...]
    num_dilated_steps: int
    progressive: bool = False
    damped_dilations: tuple[float, ...] | None = None

    def __post_init__(self) -> None:
        for name in ("dilations", "damped_dilations"):
            value = getattr(self, name)
            if value is not None and not _are_dilations(value):
                raise ValueError(
                    f"{name} must hold numbers from 1 to 16, one per level, but got {value}."
                )
        if max(self.dilations) == 1:
            raise ValueError(f"dilations must be above 1 at some level, but got {self.dilations}.")
        check_int("num_dilated_steps", self.num_dilated_steps, 1)
        if self.num_dilated_steps > NUM_STEPS:
            raise ValueError(
                f"num_dilated_steps must be at most {NUM_STEPS}, but got {self.num_dilated_steps}."
            )

    def dilations_at(self, timestep: float, *, damped: bool = False) -> tuple[float, ...] | None:
        """The levels' dilations at a timestep, None outside of the dilated part.

        Args:
            timestep: from 0 to 999.
            damped: those of the weaker evaluation; None without noise-damped guidance.
        """
        dilations = self.damped_dilations if damped else self.dilations
        # DDIM's step i lies at 980 - 20 i, 981 - 20 i or 999 - 20 i, by the scheduler's spacing.
        # Divided last: .58 * 50 is a little less than 29.
        elapsed = (NUM_TRAIN_TIMESTEPS - 1 - timestep) * NUM_STEPS
        step = max(0, math.floor(elapsed / NUM_TRAIN_TIMESTEPS))
        if dilations is None or step >= self.num_dilated_steps:
            return None
        if not self.progressive:
            return dilations
        left = self.num_dilated_steps - step
        return tuple(
            max(math.ceil(dilation * left / self.num_dilated_steps), 2) if dilation > 1 else 1
            for dilation in dilations
        )


def _are_dilations(values: Any) -> bool:
    return (
        isinstance(values, tuple | list)
        and len(values) > 0
        and all(isinstance(value, int | float) and 1 <= value <= 16 for value in values)
    )


# The settings that the authors give for SD1.5, whose training size is 512, with DDIM, 50 steps and
# guidance 7.5 (their dilate_tau is num_dilated_steps; their ndcfg_tau is 0 or the same).
SD15_1024 = ScaleCrafterConfig(dilations=(1, 2), num_dilated_steps=30)
SD15_1280 = ScaleCrafterConfig(dilations=(1, 2.5), num_dilated_steps=35)
SD15_2048 = ScaleCrafterConfig(
    dilations=(1, 2, 3, 4),
    num_dilated_steps=35,
    progressive=True,
    damped_dilations=(1, 1, 3, 4),
)

# By height and width in units of the training size.
SETTINGS = {
    (2, 2): SD15_1024,
    (2.5, 2.5): SD15_1280,
    (4, 2): SD15_2048,
    (2, 4): SD15_2048,
    (4, 4): SD15_2048,
}


def apply_scalecrafter(
    pipe: PipelineOrUNet,
    height: int,
    width: int,
    *,
    config: ScaleCrafterConfig | None = None,
    training_size: int | None = None,
) -> PipelineOrUNet:
    """Dilate the UNet's convolutions for pictures of this size, larger than it was trained on.

    An earlier ScaleCrafter is removed first. Attention is left alone, and so are ControlNets.
    Img2img of a strength below some .4 begins where the dilated part has ended (.3 from 2.5 times
    the training size on). The UNet then refuses latents of another size and samplers without
    training timesteps, such as EDM's and IPNDM, and serves one thread at a time: the timestep of
    its call is that of all its convolutions.

    Args:
        pipe: a pipeline with a `unet`, or the UNet. Noise-damped guidance needs the pipeline that
            draws, to know whether it guides. Where another one with the same UNet (`from_pipe`)
            draws, damping is on or off by whether this one guided last; batches that do not fit are
            refused.
        height: of the pictures, in pixels; 8 per latent for a UNet without pipeline.
        width: likewise.
        config: None takes the authors' settings for SD1.5, whatever the model, by the ratio of
            picture and training size: 2 x 2, 2.5 x 2.5, 4 x 2, 2 x 4 or 4 x 4. They give others for
            SD2.1 (20 dilated steps at 2 x 2) and for SDXL (at 2 x 2 no down block is dilated).
        training_size: in pixels; None takes what the UNet's config says.

    Returns:
        `pipe`.

    Raises:
        TypeError: `pipe` has no UNet, a side or size is not an int, or `config` is not a
            `ScaleCrafterConfig`.
        ValueError: a side is not a multiple of 8, the size is not larger than the training size,
            there are no settings for it, or the UNet has no convolution to dilate.
        NotImplementedError: noise-damped guidance of a pipeline that guides by an image as well,
            such as InstructPix2Pix.
    """
    state = _ScaleCrafter(pipe, height, width, config, training_size)
    remove_scalecrafter(pipe)
    state.install(unet_of(pipe))
    return pipe


def remove_scalecrafter(pipe: PipelineOrUNet) -> PipelineOrUNet:
    """Undo `apply_scalecrafter`; without ScaleCrafter nothing happens.

    Raises:
        TypeError: `pipe` has no UNet.
    """
    unet = uncompiled(unet_of(pipe))
    if hasattr(unet, "_scalecrafter"):
        unet._scalecrafter.uninstall()
        del unet._scalecrafter
    return pipe


@contextmanager
def scalecrafter(
    pipe: Any,
    height: int,
    width: int,
    *,
    config: ScaleCrafterConfig | None = None,
    training_size: int | None = None,
) -> Iterator[None]:
    """`apply_scalecrafter` inside the `with` block; afterwards what was there before is back.

    Args:
        pipe, height, width, config, training_size: as `apply_scalecrafter`.

    Raises:
        TypeError, ValueError, NotImplementedError: as `apply_scalecrafter`.
    """
    earlier = getattr(uncompiled(unet_of(pipe)), "_scalecrafter", None)
    apply_scalecrafter(pipe, height, width, config=config, training_size=training_size)
    try:
        yield
    finally:
        remove_scalecrafter(pipe)
        if earlier is not None:
            earlier.install(unet_of(pipe))


def sub_grids(x: Tensor, dilation: int, stride: int) -> Tensor:
    """Cut a picture into the sub-grids on which a dilated 3x3 convolution is an ordinary one.

    Sub-grid (v, w) holds the points x[stride v + dilation m, stride w + dilation n]. A convolution
    of the same stride and padding 1 gives on it the rows v, v + dilation, ... and the columns
    w, w + dilation, ... of the convolution with this dilation, and padding, of x.

    Args:
        x: (B, C, height, width).
        dilation: d.
        stride: of the convolution. Above 1 the sub-grids start with stride additional points,
            since those before a sub-grid's first are not all outside of x.

    Returns:
        (B d d, C, h, w).
    """
    context = stride if stride > 1 else 0
    spans, padding = [], []
    for size in x.shape[:1:-1]:  # width, height, as `pad` takes them
        num_outputs = math.ceil(math.ceil(size / stride) / dilation)
        span = dilation * (context + stride * num_outputs - 1) + 1
        spans.append(span)
        before = dilation * context
        padding += [before, stride * (dilation - 1) + span - before - size]
    if any(padding):
        x = F.pad(x, padding)
    for axis, span in ((2, spans[1]), (3, spans[0])):
        # A new last axis along each sub-grid; sub-grids overlap where the stride is above 1.
        x = x.unfold(axis, span, stride)[..., ::dilation]
    return x.permute(0, 2, 3, 1, 4, 5).flatten(0, 2)


def join_sub_grids(x: Tensor, dilation: int, stride: int, size: tuple[int, int]) -> Tensor:
    """Put the results of a convolution on `sub_grids` together.

    Args:
        x: (B d d, C, h, w).
        dilation: d.
        stride: of the convolution.
        size: height and width of the result.

    Returns:
        (B, C, *size).
    """
    first = 1 if stride > 1 else 0
    x = x[..., first:, first:].unflatten(0, (-1, dilation, dilation))
    batch, _, _, channels, rows, columns = x.shape
    x = x.permute(0, 3, 4, 1, 5, 2)
    x = x.reshape(batch, channels, rows * dilation, columns * dilation)
    return x[..., : size[0], : size[1]]


class _Convolution:
    """Hooks that re-dilate one convolution, where its UNet block holds it."""

    def __init__(self, block: nn.Module, attribute: str, level: int, stride: int) -> None:
        self.block = block
        self.attribute = attribute
        self.level = level
        self.stride = stride
        self.dilation: float = 1
        self.module: nn.Module | None = None
        self.handles: list[RemovableHandle] = []

    def install(self) -> None:
        """Hook what the block holds now: a LoRA wraps the convolution when it is loaded."""
        module = getattr(self.block, self.attribute)
        if module is not self.module:
            self.uninstall()
            self.module = module
            self.handles = [
                module.register_forward_pre_hook(self.split),
                module.register_forward_hook(self.join),
            ]

    def uninstall(self) -> None:
        for handle in self.handles:
            handle.remove()
        self.module, self.handles = None, []

    def split(self, module: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor] | None:
        if self.dilation == 1:
            return None
        (x,) = args
        dilation = math.ceil(self.dilation)
        self.input_size = tuple(x.shape[2:])
        self.scaled_size = self.input_size
        if dilation != self.dilation:
            scale = dilation / self.dilation
            self.scaled_size = tuple(round(side * scale) for side in self.input_size)
            x = _resize(x, self.scaled_size)
        return (sub_grids(x, dilation, self.stride),)

    def join(self, module: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> Tensor | None:
        if self.dilation == 1:
            return None
        dilation = math.ceil(self.dilation)
        scaled, plain = (
            tuple(math.ceil(side / self.stride) for side in size)
            for size in (self.scaled_size, self.input_size)
        )
        output = join_sub_grids(output, dilation, self.stride, scaled)
        return output if scaled == plain else _resize(output, plain)


class _PipeReference(weakref.ref):
    """To a pipeline; in a copy of the pipeline, to the copy."""

    def __deepcopy__(self, memo: dict[int, Any]) -> "_PipeReference":
        pipe = self()
        return self if pipe is None else _PipeReference(memo.get(id(pipe), pipe))


class _ScaleCrafter:
    """What `apply_scalecrafter` puts on a UNet: convolutions, and hooks that watch its calls."""

    def __init__(
        self,
        pipe: Any,
        height: int,
        width: int,
        config: ScaleCrafterConfig | None,
        training_size: int | None,
    ) -> None:
        unet = uncompiled(unet_of(pipe))
        if not hasattr(unet, "up_blocks"):
            raise TypeError(f"expected a UNet with up_blocks, but got {type(unet).__name__}.")
        factor = getattr(pipe, "vae_scale_factor", 8)
        if training_size is None:
            training_size = _sample_size(unet) * factor
        check_int("training_size", training_size, 1)
        unit = math.lcm(8, factor)  # diffusers' pipelines take multiples of 8
        for name, side in (("height", height), ("width", width)):
            check_int(name, side, unit)
            if side % unit:
                raise ValueError(f"{name} must be a multiple of {unit}, but got {side}.")
        if max(height, width) <= training_size:
            raise ValueError(
                f"ScaleCrafter is for pictures larger than the training size, {training_size}, but "
                f"got {height} x {width} (height x width); there is nothing to do."
            )
        if config is None:
            config = _settings(height, width, training_size)
        elif not isinstance(config, ScaleCrafterConfig):
            raise TypeError(
                f"config must be a ScaleCrafterConfig, but got {type(config).__name__}."
            )
        if config.damped_dilations and not hasattr(type(pipe), "do_classifier_free_guidance"):
            raise ValueError(
                f"noise-damped guidance needs a pipeline with guidance, but got "
                f"{type(pipe).__name__}; pass one, or a config without damped_dilations."
            )
        if config.damped_dilations and hasattr(type(pipe), "image_guidance_scale"):
            raise NotImplementedError(
                f"noise-damped guidance is for pairs (uncond, text), but {type(pipe).__name__} "
                "guides by an image as well; pass a config without damped_dilations."
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
        self.pipe = _PipeReference(pipe) if config.damped_dilations else None
        self.timesteps = Timesteps()
        self.timestep: float = 0
        self.inputs: Any = None
        self.in_damped_call = False
        self.handles: list[RemovableHandle] = []

    def install(self, unet: nn.Module) -> None:
        uncompiled(unet)._scalecrafter = self
        self.handles = [unet.register_forward_pre_hook(self.see_call, with_kwargs=True)]
        if self.pipe is not None:
            self.handles.append(
                # Also where the UNet raises: it frees the inputs.
                unet.register_forward_hook(self.damp, with_kwargs=True, always_call=True)
            )

    def uninstall(self) -> None:
        for handle in self.handles:
            handle.remove()
        for convolution in self.convolutions:
            convolution.uninstall()

    @torch.compiler.disable
    def see_call(self, unet: nn.Module, args: tuple, kwargs: dict) -> None:
        if self.in_damped_call:
            return
        size = tuple(_sample(args, kwargs).shape[-2:])
        if size != self.latent_size:
            height, width = self.size
            raise ValueError(
                f"ScaleCrafter was applied for {height} x {width} pictures, latents of "
                f"{self.latent_size}, but got latents of {size}; apply it for this size, or remove "
                "it."
            )
        timestep = self.timesteps.of_call(args, kwargs)
        if timestep is not None:
            self.timestep = timestep
        for convolution in self.convolutions:
            convolution.install()
        self.dilate(self.config.dilations_at(self.timestep))
        if self.pipe is not None:
            # Flattened: the UNet takes a T2I-Adapter's features out of the list that it is given.
            self.inputs = tree_flatten((args, kwargs))

    # Not recursive: the second evaluation runs compiled where the first does.
    @torch.compiler.disable(recursive=False)
    def damp(self, unet: nn.Module, args: tuple, kwargs: dict, output: Any) -> Any:
        """Exchange the pair (uncond, text) so that ordinary guidance gives the damped noise."""
        if self.in_damped_call:
            return None
        inputs, self.inputs = self.inputs, None
        dilations = self.config.dilations_at(self.timestep, damped=True)
        if output is None or dilations is None:
            return None
        pipe = self.pipe()
        if pipe is None:
            raise RuntimeError(
                "the pipeline that ScaleCrafter was applied to is gone; apply it to the one that "
                "draws."
            )
        if not hasattr(pipe, "do_classifier_free_guidance"):
            raise ValueError(
                "the pipeline that ScaleCrafter was applied to has not drawn yet, and noise-damped "
                "guidance must know whether it guides; apply it to the one that draws."
            )
        if not pipe.do_classifier_free_guidance:
            return None
        if getattr(pipe, "do_perturbed_attention_guidance", False):
            raise NotImplementedError(
                "noise-damped guidance does not work with perturbed-attention guidance; pass a "
                "config without damped_dilations."
            )
        noise = output[0]
        batch = len(noise)
        if not _is_pair(_sample(args, kwargs)):
            raise ValueError(
                f"noise-damped guidance needs a batch (uncond, text) with the same latents twice, "
                f"which this batch of {batch} is not; apply ScaleCrafter to the pipeline that "
                "draws, or pass a config without damped_dilations."
            )

        def first_half(x: Tensor) -> Tensor:
            return x[: batch // 2] if x.dim() and len(x) == batch else x

        args, kwargs = tree_map_only(Tensor, first_half, tree_unflatten(*inputs))
        self.dilate(dilations)
        self.in_damped_call = True
        try:
            damped = unet(*args, **kwargs)[0]
        finally:
            self.in_damped_call = False
        unconditional, conditional = noise.chunk(2)
        noise = torch.cat([damped, damped + (conditional - unconditional)])
        return (noise,) if isinstance(output, tuple) else type(output)(sample=noise)

    def dilate(self, dilations: tuple[float, ...] | None) -> None:
        for convolution in self.convolutions:
            convolution.dilation = 1 if dilations is None else _at(dilations, convolution.level)


def _settings(height: int, width: int, training_size: int) -> ScaleCrafterConfig:
    config = SETTINGS.get((height / training_size, width / training_size))
    if config is None:
        sizes = ", ".join(
            f"{rows * training_size:g} x {columns * training_size:g}" for rows, columns in SETTINGS
        )
        raise ValueError(
            f"there are ScaleCrafter settings for {sizes} (height x width) at a training size of "
            f"{training_size}, but got {height} x {width}; for others apply_scalecrafter takes a "
            f"ScaleCrafterConfig."
        )
    return config


def _convolutions(unet: nn.Module, config: ScaleCrafterConfig) -> list[_Convolution]:
    deepest = len(unet.down_blocks) - 1
    blocks = [
        *enumerate(unet.down_blocks),
        *([] if unet.mid_block is None else [(deepest, unet.mid_block)]),
        *((deepest - index, block) for index, block in enumerate(unet.up_blocks)),
    ]
    found = []
    for level, block in blocks:
        if _at(config.dilations, level) == 1 == _at(config.damped_dilations or (1,), level):
            continue
        holders = [(resnet, name) for resnet in block.resnets for name in ("conv1", "conv2")]
        for samplers in ("downsamplers", "upsamplers"):
            holders += [(sampler, "conv") for sampler in getattr(block, samplers, None) or ()]
        for holder, name in holders:
            convolution = getattr(holder, name)
            convolution = getattr(convolution, "base_layer", convolution)  # of a LoRA
            if (
                isinstance(convolution, nn.Conv2d)
                and (convolution.kernel_size, convolution.padding) == ((3, 3), (1, 1))
                and convolution.dilation == (1, 1)
            ):
                found.append(_Convolution(holder, name, level, convolution.stride[0]))
    return found


def _at(dilations: tuple[float, ...], level: int) -> float:
    return dilations[min(level, len(dilations) - 1)]


def _sample(args: tuple, kwargs: dict[str, Any]) -> Tensor:
    return args[0] if args else kwargs["sample"]


def _is_pair(sample: Tensor) -> bool:
    if sample.is_cuda and torch.cuda.is_current_stream_capturing():
        return True  # a capture forbids reading; the call before it was compared
    return torch.equal(*sample.tensor_split(2))


def _sample_size(unet: nn.Module) -> int:
    size = unet.config.sample_size
    if not isinstance(size, int):
        raise ValueError(
            f"the UNet's config has sample_size={size!r}, which is not a training size; pass "
            "training_size."
        )
    return size


def _resize(x: Tensor, size: tuple[int, ...]) -> Tensor:
    return F.interpolate(x, size, mode="bilinear", align_corners=False)
