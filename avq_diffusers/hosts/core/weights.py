"""What codebooks hold for one layer, on the device of its UNet, and how projections add it."""

import copy
import threading
from collections import OrderedDict
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from typing import Any, cast

import torch
import torch.nn.functional as F
from diffusers.models.attention_processor import Attention
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.modules.module import (
    _global_forward_hooks,
    _has_any_global_hook,
    register_module_forward_hook,
)

from avq_diffusers.codebook.codebook import Codebook

PROJECTIONS = ("to_q", "to_k", "to_v")  # in the order of `to_qkv`
# Held while a layer's weights contain the changes: no other thread may add to them.
_SUMMED = threading.RLock()


class LayerWeights:
    """Codebook, key norm and projection changes of one layer.

    On the codebooks' device these are the stored tensors themselves, so in-place changes take
    effect as in `Codebook`; on another device they are copies. Without a codebook, codewords come
    from the keys of each call.

    Attributes:
        codebook: in float32, or None.
        key_norm: the norm of the layer's keys, or None.
        projection_changes: added to the projections' weights and biases, by path in the layer, in
            the UNet's dtype; or None.
    """

    def __init__(
        self,
        codebook: Codebook | None = None,
        key_norm: nn.LayerNorm | None = None,
        projection_changes: dict[str, Tensor] | None = None,
    ) -> None:
        self.stored_codebook = self.codebook = codebook
        self.stored_norm = self.key_norm = key_norm
        self.stored_changes = self.projection_changes = projection_changes

    @property
    def are_stored(self) -> bool:
        """Whether there are tensors that must be on the device of a call."""
        return self.stored_codebook is not None or self.stored_changes is not None

    def project_heads(
        self, attn: Attention, hidden_states: Tensor, *, is_fused: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values for AVQ: (B, H, N, D), views of (B, N, ..., D) memory.

        hidden_states is (B, N, channels). `is_fused` is whether the layer computes with the
        one projection `to_qkv` that diffusers fuses. The key norm applies to keys.
        """
        changes = self.projection_changes
        if is_fused:
            if changes is not None:
                weights = [changes[f"{name}.weight"] for name in PROJECTIONS]
                changes = {"to_qkv.weight": torch.cat(weights)}
            projected = project(attn.to_qkv, "to_qkv", hidden_states, changes).chunk(3, dim=-1)
        else:
            projected = tuple(
                project(getattr(attn, name), name, hidden_states, changes) for name in PROJECTIONS
            )
        query, key, value = (x.unflatten(-1, (attn.heads, -1)).transpose(1, 2) for x in projected)
        return query, self.normed(key), value

    def normed(self, key: Tensor) -> Tensor:
        """The keys (B, H, N, D), after the key norm if there is one."""
        return key if self.key_norm is None else self.key_norm(key.float()).to(key.dtype)

    @torch.compiler.assume_constant_result
    def move_to(self, device: torch.device, dtype: torch.dtype) -> None:
        """Copy codebooks from another device, and projection changes of another dtype.

        Compilers run this while tracing, so compiled code finds everything in place.
        """
        moves = self._codebook_moves(device)
        if self.projection_changes is not None:
            weight = self.projection_changes["to_q.weight"]
            moves |= (weight.device, weight.dtype) != (device, dtype)
        if not moves:
            return
        # A new thread has inference mode and fake tensors off. Autograd would later refuse
        # inference tensors, and the kernels could not cache tables built from them.
        with ThreadPoolExecutor(max_workers=1) as worker:
            worker.submit(self._move, device, dtype).result()

    def _codebook_moves(self, device: torch.device) -> bool:
        if self.stored_codebook is None or self.codebook is None:
            return False
        is_stored_here = self.stored_codebook.parents.device == device
        is_stored = self.codebook is self.stored_codebook
        return is_stored != is_stored_here or self.codebook.parents.device != device

    @torch.no_grad()
    def _move(self, device: torch.device, dtype: torch.dtype) -> None:
        if self.stored_codebook is not None and self._codebook_moves(device):
            norm = self.stored_norm
            self.codebook = self.stored_codebook.to(device)
            is_stored = self.codebook is self.stored_codebook
            self.key_norm = norm if is_stored or not norm else copy.deepcopy(norm).to(device)
        if self.stored_changes is not None:
            # From the stored ones: a copy in another dtype has lost precision.
            self.projection_changes = {
                name: tensor.to(device, dtype) for name, tensor in self.stored_changes.items()
            }


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
