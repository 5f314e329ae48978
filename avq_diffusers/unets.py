"""The UNet of a pipeline: every public function takes either, compiled or not."""

from typing import Any, TypeVar

from torch import nn

PipelineOrUNet = TypeVar("PipelineOrUNet")


def unet_of(pipe: Any) -> nn.Module:
    """`pipe.unet`, or `pipe` where it is a UNet itself.

    Raises:
        TypeError: `pipe` has no UNet.
    """
    unet = pipe if isinstance(pipe, nn.Module) else getattr(pipe, "unet", None)
    if unet is None:
        raise TypeError(
            f"expected a pipeline with a unet or a UNet, but got {type(pipe).__name__}."
        )
    return unet


def uncompiled(unet: nn.Module) -> nn.Module:
    """What is inside of `torch.compile`'s wrapper, which puts itself into the paths of modules."""
    return getattr(unet, "_orig_mod", unet)
