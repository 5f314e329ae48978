"""Re-dilated convolutions: the unchanged convolution on sub-grids of its input.

A re-dilated convolution (dilation p, d = ceil(p), stride s) resizes its input by d / p, convolves
with the same weights, dilation d and padding d, and resizes the result to the undilated size. All
resizing is bilinear; an integer p needs none. Running the unchanged convolution on d x d sub-grids
(`sub_grids`) gives the same result, and works with LoRA, quantized or offloaded layers in its
place.
"""

import math

import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle


def sub_grids(x: Tensor, dilation: int, stride: int) -> Tensor:
    """Cut an input into the sub-grids on which a dilated 3x3 convolution is an ordinary one.

    Sub-grid (v, w) holds the points x[stride v + dilation m, stride w + dilation n]. On it, a
    convolution of this stride and padding 1 gives the rows v, v + dilation, ... and the columns
    w, w + dilation, ... of x's convolution with this dilation and padding.

    Args:
        x: (B, C, height, width).
        dilation: d.
        stride: stride of the convolution. Above 1, each sub-grid starts with `stride` additional
            points, because some points before its first one lie inside x.

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
        # A new last axis along each sub-grid; sub-grids overlap if the stride is above 1.
        x = x.unfold(axis, span, stride)[..., ::dilation]
    return x.permute(0, 2, 3, 1, 4, 5).flatten(0, 2)


def join_sub_grids(x: Tensor, dilation: int, stride: int, size: tuple[int, int]) -> Tensor:
    """Join the results of a convolution on `sub_grids`.

    Args:
        x: (B d d, C, h, w).
        dilation: d.
        stride: stride of the convolution.
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


class RedilatedConvolution:
    """Hooks that re-dilate the convolution under one attribute of a UNet block.

    Args:
        block: the module that holds the convolution.
        attribute: its name there.
        level: UNet level.
        stride: stride of the convolution.

    Attributes:
        dilation: set before each call; 1 leaves the convolution unchanged.
    """

    def __init__(self, block: nn.Module, attribute: str, level: int, stride: int) -> None:
        self.block = block
        self.attribute = attribute
        self.level = level
        self.stride = stride
        self.dilation: float = 1
        self.module: nn.Module | None = None
        self.handles: list[RemovableHandle] = []

    def install(self) -> None:
        """Hook the block's current convolution: loading a LoRA wraps it."""
        module = getattr(self.block, self.attribute)
        if module is not self.module:
            self.uninstall()
            self.module = module
            self.handles = [
                module.register_forward_pre_hook(self.split),
                module.register_forward_hook(self.join),
            ]

    def uninstall(self) -> None:
        """Remove the hooks."""
        for handle in self.handles:
            handle.remove()
        self.module, self.handles = None, []

    def split(self, module: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor] | None:
        """Before the convolution: resize its input and cut it into sub-grids."""
        if self.dilation == 1:
            return None
        (x,) = args
        dilation = math.ceil(self.dilation)
        height, width = x.shape[2:]
        self.input_size = self.scaled_size = (height, width)
        if dilation != self.dilation:
            scale = dilation / self.dilation
            self.scaled_size = (round(height * scale), round(width * scale))
            x = _resize(x, self.scaled_size)
        return (sub_grids(x, dilation, self.stride),)

    def join(self, module: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> Tensor | None:
        """After the convolution: join the sub-grids and resize to the undilated size."""
        if self.dilation == 1:
            return None
        scaled, plain = (
            (math.ceil(height / self.stride), math.ceil(width / self.stride))
            for height, width in (self.scaled_size, self.input_size)
        )
        output = join_sub_grids(output, math.ceil(self.dilation), self.stride, scaled)
        return output if scaled == plain else _resize(output, plain)


def _resize(x: Tensor, size: tuple[int, int]) -> Tensor:
    return F.interpolate(x, size, mode="bilinear", align_corners=False)
