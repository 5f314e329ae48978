"""Gradient checkpointing: a block is recomputed with the call that it ran in.

diffusers checkpoints the blocks of a transformer one by one. Backward then runs a block again
without the transformer, when other calls of the UNet may have passed. So the function that the
checkpoint keeps for the block also holds the call.
"""

from collections.abc import Callable
from typing import Any

import torch
from diffusers import Transformer2DModel
from torch import Tensor, nn

from avq_diffusers.plugin.layer_state import Call, LayerState


def keep_calls(transformer: Transformer2DModel) -> None:
    """Make the checkpoints of a transformer's blocks keep the call of each block."""
    checkpoint: Any = transformer._gradient_checkpointing_func
    if not torch.compiler.is_compiling() and not isinstance(checkpoint, _Checkpoint | None):
        vars(transformer)["_gradient_checkpointing_func"] = _Checkpoint(checkpoint)


def forget_calls(module: nn.Module) -> None:
    """Undo `keep_calls`."""
    checkpoint = getattr(module, "_gradient_checkpointing_func", None)
    if isinstance(checkpoint, _Checkpoint):
        vars(module)["_gradient_checkpointing_func"] = checkpoint.function


class _Checkpoint:
    """The checkpointing function of a transformer, called with blocks that hold their call."""

    def __init__(self, function: Callable[..., Tensor]) -> None:
        self.function = function

    def __call__(self, block: nn.Module, *args: Any) -> Tensor:
        state: LayerState | None = getattr(block.attn1, "_avq", None)
        if state is None or torch.compiler.is_compiling():
            return self.function(block, *args)
        return self.function(_BlockInCall(block, state, state.call.get()), *args)


class _BlockInCall:
    def __init__(self, block: nn.Module, state: LayerState, call: Call) -> None:
        self.block = block
        self.state = state
        self.call = call

    def __call__(self, *args: Any) -> Tensor:
        if getattr(self.block.attn1, "_avq", None) is not self.state:
            raise RuntimeError(
                "backward must come before remove_avq and the next apply_avq, but a checkpointed "
                "block has lost the AVQ that it ran with; run backward first."
            )
        with self.state.recomputing(self.call):
            return self.block(*args)
