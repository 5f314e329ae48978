"""One projection of a self-attention layer, with what distillation changed in it."""

from collections.abc import Mapping

import torch.nn.functional as F
from torch import Tensor, nn


def project(
    layer: nn.Module, name: str, hidden_states: Tensor, changes: Mapping[str, Tensor] | None
) -> Tensor:
    """Run a projection with its changes.

    Args:
        layer: the projection.
        name: its path in the attention layer, such as `"to_out.0"`.
        hidden_states: (B, N, channels).
        changes: what is added to weights and biases, by their paths; None for nothing.
    """
    if changes is None:
        return layer(hidden_states)
    weight_change, bias_change = changes[f"{name}.weight"], changes.get(f"{name}.bias")
    if isinstance(layer, nn.Linear) and _is_plain(layer):
        # Adding weights costs far less than a second product with the tokens.
        bias = layer.bias if bias_change is None else layer.bias + bias_change
        return F.linear(hidden_states, layer.weight + weight_change, bias)
    # LoRA, quantized and offloaded layers have no weight to read: they must be called.
    return layer(hidden_states) + F.linear(hidden_states, weight_change, bias_change)


def _is_plain(layer: nn.Linear) -> bool:
    """Whether a call of the layer is one product with its weight."""
    is_hooked = layer._forward_hooks or layer._forward_pre_hooks or "forward" in layer.__dict__
    return type(layer) is nn.Linear and type(layer.weight) is nn.Parameter and not is_hooked
