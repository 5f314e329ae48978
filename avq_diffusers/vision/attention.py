"""The attention function that layers with AVQ get from transformers' `AttentionInterface`.

Tokens before the grid (CLS, distillation, registers) are sinks: all queries meet their keys as
themselves, and their own queries meet all keys. The patches run AVQ.

Shapes: B batch, H heads, N tokens of which the first T are sinks, D head dim.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AttentionInterface
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.utils.output_capturing import _active_collector

from avq_diffusers.plugin.layer_state import AVQ_CALL, LayerState
from avq_diffusers.vision.layers import forward_of

NAME = "avq"
CLS_AND_DISTILLATION = 2
# Arguments of attention functions that change what attention means.
CHANGING_ARGUMENTS = ("position_bias", "softcap", "sliding_window", "s_aux", "cache")


def register() -> None:
    """Make the function known to transformers, once."""
    if NAME not in ALL_ATTENTION_FUNCTIONS:
        AttentionInterface.register(NAME, vision_attention)


def vision_attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **arguments: Any,
) -> tuple[Tensor, Tensor | None]:
    """Attend in a layer with AVQ, or hand the call to the layer's previous function.

    Args:
        module: the layer.
        query, key, value: (B, H, N, D).
        attention_mask, dropout, scaling, **arguments: as every function of the interface.

    Returns:
        (B, N, H, D), and the attention weights if the previous function gives them.
    """
    state: LayerState = module._avq
    reason = _exact_because(module, query, key, value, attention_mask, dropout, arguments)
    if not torch.compiler.is_compiling():
        state.count(AVQ_CALL if reason is None else reason)
    if reason is None:
        return _attend(state, query, key, value, scaling), None
    function = ALL_ATTENTION_FUNCTIONS.get_interface(
        module._avq_config._attn_implementation,
        forward_of(module).__globals__["eager_attention_forward"],
    )
    arguments.setdefault("is_causal", False)
    return function(
        module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **arguments
    )


def _exact_because(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float,
    arguments: dict[str, Any],
) -> str | None:
    """Why this call runs exact attention; None if it runs AVQ."""
    state: LayerState = module._avq
    call = state.present_call()
    if call.exact_because is not None:
        return call.exact_because
    if attention_mask is not None:
        return "attention mask"
    if arguments.get("is_causal") or module.is_causal:
        return "causal attention"
    if dropout:
        return "dropout"
    if arguments.get("output_attentions") or "attentions" in (_active_collector.get() or ()):
        return "attention weights"
    for name in CHANGING_ARGUMENTS:
        if arguments.get(name) is not None:
            return name
    if not query.shape == key.shape == value.shape:
        return "keys of another shape"
    num_patches = 0 if call.query_order is None else call.query_order.shape[0]
    num_sinks = query.shape[2] - num_patches
    registers = getattr(module.config, "num_register_tokens", 0)
    if not num_patches or not 0 <= num_sinks <= CLS_AND_DISTILLATION + registers:
        return "tokens are not the grid"
    return state.routed_because(num_patches, query)


def _attend(
    state: LayerState, query: Tensor, key: Tensor, value: Tensor, scaling: float | None
) -> Tensor:
    """(B, N, H, D)."""
    order = state.present_call().query_order
    assert order is not None
    # Rotated queries and keys may be wider than the values.
    query, key = query.to(value.dtype), state.weights.normed(key).to(value.dtype)
    sinks = query.shape[2] - order.shape[0]
    output = state.attend(
        query[:, :, sinks:],
        key[:, :, sinks:],
        value[:, :, sinks:],
        sink_key=key[:, :, :sinks] if sinks else None,
        sink_value=value[:, :, :sinks] if sinks else None,
        scale=scaling,
    )
    output = output.transpose(1, 2)
    if not sinks:
        return output
    of_sinks = F.scaled_dot_product_attention(query[:, :, :sinks], key, value, scale=scaling)
    return torch.cat([of_sinks.transpose(1, 2).to(output.dtype), output], dim=1)
