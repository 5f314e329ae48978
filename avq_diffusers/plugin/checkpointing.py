"""Gradient checkpointing: a block is recomputed with the call that it ran in.

diffusers checkpoints the blocks of a transformer one by one. Backward then runs a block again
without the transformer, when other calls of the UNet may have passed. So the function that the
checkpoint keeps for the block also holds the call.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from avq_diffusers.plugin.layer_state import Call, LayerState


def keep_calls(owner: nn.Module, attn: nn.Module | None = None) -> None:
    """Make checkpoints keep the call of the layer that they run.

    Args:
        owner: the module whose function they are.
        attn: the layer; None is `attn1` of the block that they are called with.
    """
    checkpoint: Any = getattr(owner, "_gradient_checkpointing_func", None)
    if not torch.compiler.is_compiling() and not isinstance(checkpoint, _Checkpoint | None):
        vars(owner)["_gradient_checkpointing_func"] = _Checkpoint(checkpoint, attn)


def forget_calls(module: nn.Module) -> None:
    """Undo `keep_calls`."""
    checkpoint = getattr(module, "_gradient_checkpointing_func", None)
    if isinstance(checkpoint, _Checkpoint):
        vars(module)["_gradient_checkpointing_func"] = checkpoint.function


class _Checkpoint:
    """A checkpointing function, called with blocks that hold their call."""

    def __init__(self, function: Callable[..., Tensor], attn: nn.Module | None) -> None:
        self.function = function
        self.attn = attn

    def __call__(self, block: Callable[..., Tensor], *args: Any) -> Tensor:
        attn = getattr(block, "attn1", None) if self.attn is None else self.attn
        state: LayerState | None = getattr(attn, "_avq", None)
        if attn is None or state is None or torch.compiler.is_compiling():
            return self.function(block, *args)
        return self.function(_BlockInCall(block, attn, state, state.call.get()), *args)


class _BlockInCall:
    def __init__(
        self, block: Callable[..., Tensor], attn: nn.Module, state: LayerState, call: Call
    ) -> None:
        self.block = block
        self.attn = attn
        self.state = state
        self.call = call

    def __call__(self, *args: Any) -> Tensor:
        if getattr(self.attn, "_avq", None) is not self.state:
            raise RuntimeError(
                "backward must come before remove_avq and the next apply_avq, but a checkpointed "
                "block has lost the AVQ that it ran with; run backward first."
            )
        with self.state.recomputing(self.call):
            return self.block(*args)
