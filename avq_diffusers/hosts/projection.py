"""One projection of a self-attention layer, plus what distillation changed in it."""

import threading
from collections import OrderedDict
from collections.abc import Mapping
from contextlib import nullcontext
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.modules.module import (
    _global_forward_hooks,
    _has_any_global_hook,
    register_module_forward_hook,
)

# Held while a layer's weights contain the changes: no other thread may add to them.
_SUMMED = threading.RLock()


def project(
    layer: nn.Module, name: str, hidden_states: Tensor, changes: Mapping[str, Tensor] | None
) -> Tensor:
    """Run a projection with its changes.

    `name` is its path in the attention layer, such as `"to_out.0"`. `changes` holds what is added
    to weights and biases, by path.
    """
    if changes is None:
        return layer(hidden_states)
    weight_change, bias_change = changes[f"{name}.weight"], changes.get(f"{name}.bias")
    if type(layer) is not nn.Linear:  # LoRA and quantized layers must be called
        return _call_and_add(layer, hidden_states, weight_change, bias_change)
    if not _is_hooked(layer):
        if not _has_readable_weight(layer, weight_change):  # offloaded
            return _call_and_add(layer, hidden_states, weight_change, bias_change)
        # Adding weights is far cheaper than a second matmul with the tokens.
        bias = layer.bias if bias_change is None else layer.bias + bias_change
        return F.linear(hidden_states, layer.weight + weight_change, bias)
    # Hooks and patches read the layer itself, so the sum goes there; other threads wait.
    with nullcontext() if torch.compiler.is_compiling() else _SUMMED:
        if not _has_readable_weight(layer, weight_change):
            return _call_and_add(layer, hidden_states, weight_change, bias_change)
        summed = {"weight": layer.weight + weight_change}
        if bias_change is not None:
            summed["bias"] = layer.bias + bias_change
        return functional_call(layer, summed, (hidden_states,))


def _has_readable_weight(layer: nn.Linear, change: Tensor) -> bool:
    weight = layer.weight
    is_here = (weight.device, weight.dtype) == (change.device, change.dtype)
    return type(weight) is nn.Parameter and is_here


def _is_hooked(layer: nn.Linear) -> bool:
    """Whether calling the layer does more than multiply by its weight."""
    forward_hooks = layer._forward_pre_hooks or layer._forward_hooks
    backward_hooks = layer._backward_pre_hooks or layer._backward_hooks
    return bool(
        forward_hooks or backward_hooks or _has_any_global_hook() or "forward" in layer.__dict__
    )


def _call_and_add(
    layer: nn.Module, hidden_states: Tensor, weight_change: Tensor, bias_change: Tensor | None
) -> Tensor:
    if not (layer._forward_pre_hooks or layer._forward_hooks or _has_any_global_hook()):
        return layer(hidden_states) + F.linear(hidden_states, weight_change, bias_change)
    thread = threading.get_ident()

    def add(module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Any:
        if module is not layer or threading.get_ident() != thread:
            return None
        return output + F.linear(inputs[0], weight_change, bias_change)

    # After every pre-hook, before every other hook.
    if _has_any_global_hook():  # these run before the layer's own
        handle, hooks = register_module_forward_hook(add), cast(OrderedDict, _global_forward_hooks)
        hooks.move_to_end(handle.id, last=False)
    else:
        handle = layer.register_forward_hook(add, prepend=True)
    with handle:
        return layer(hidden_states)
