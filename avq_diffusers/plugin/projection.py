"""The projections of a self-attention layer, with what distillation changed in them."""

from collections.abc import Mapping

import torch.nn.functional as F
from diffusers.models.attention_processor import Attention
from torch import Tensor, nn

from avq_diffusers.plugin.layer_weights import LayerWeights


def project_heads(
    attn: Attention, name: str, hidden_states: Tensor, weights: LayerWeights
) -> Tensor:
    """Project tokens to the queries, keys or values that AVQ sees.

    Args:
        attn: the layer.
        name: `"to_q"`, `"to_k"` or `"to_v"`.
        hidden_states: (B, N, channels).
        weights: of the layer, on its device. Keys pass `weights.key_norm`.

    Returns:
        (B, H, N, D) view of (B, N, H, D) memory, dtype of the projection.
    """
    projected = project(getattr(attn, name), name, hidden_states, weights.projection_changes)
    heads = projected.unflatten(-1, (attn.heads, -1)).transpose(1, 2)
    if name == "to_k" and weights.key_norm is not None:
        return weights.key_norm(heads.float()).to(heads.dtype)
    return heads


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
