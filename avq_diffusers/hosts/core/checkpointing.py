"""Gradient checkpointing: recompute a block as part of the call it ran in.

diffusers checkpoints a transformer block by block. Backward reruns a block without its transformer,
possibly after further UNet calls, so the checkpointed function carries the call along.
"""

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn

from avq_diffusers.hosts.core.layers import ATTRIBUTE
from avq_diffusers.hosts.core.state import Call, LayerState


def keep_calls(owner: nn.Module, attn: nn.Module | None = None) -> None:
    """Make a module's checkpoints keep the calls of one layer, or of every layer they run."""
    checkpoint: Any = vars(owner).get("_gradient_checkpointing_func")
    if checkpoint is None or torch.compiler.is_compiling():
        return
    if not isinstance(checkpoint, _Checkpoint):
        vars(owner)["_gradient_checkpointing_func"] = _Checkpoint(checkpoint, attn)


def forget_calls(module: nn.Module) -> None:
    """Undo `keep_calls`."""
    checkpoint = getattr(module, "_gradient_checkpointing_func", None)
    if isinstance(checkpoint, _Checkpoint):
        vars(module)["_gradient_checkpointing_func"] = checkpoint.function


class _Checkpoint:
    """A checkpointing function that passes on blocks bound to their call."""

    def __init__(self, function: Callable[..., Tensor], attn: nn.Module | None) -> None:
        self.function = function
        self.attn = attn

    def __call__(self, block: Any, *args: Any) -> Tensor:
        if torch.compiler.is_compiling():
            return self.function(block, *args)
        module = getattr(block, "__self__", block)  # a block, or its `__call__`
        layers = module.modules() if self.attn is None else [self.attn]
        states = {attn: vars(attn).get(ATTRIBUTE) for attn in layers}
        calls = {
            attn: (state, state.call.get())
            for attn, state in states.items()
            if isinstance(state, LayerState)
        }
        return self.function(_BlockInCall(block, calls) if calls else block, *args)


class _BlockInCall:
    def __init__(self, block: Any, calls: dict[Any, tuple[LayerState, Call | None]]) -> None:
        self.block = block
        self.calls = calls

    def __call__(self, *args: Any) -> Tensor:
        if any(vars(attn).get(ATTRIBUTE) is not state for attn, (state, _) in self.calls.items()):
            raise RuntimeError(
                "a checkpointed block no longer has the AVQ that it ran with; run backward before "
                "remove_avq or another apply_avq."
            )
        with ExitStack() as stack:
            for state, call in self.calls.values():
                stack.enter_context(state.recomputing(call))
            return self.block(*args)
