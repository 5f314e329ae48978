"""A backend of diffusers' attention dispatch that runs AVQ in the layers that carry it.

Backends see tensors only. A hook before each layer says whose call it is, so one serves all layers.
It is registered when AVQ is first applied, stands on the processors of the chosen layers only, and
leaves the process's default alone.
"""

from typing import Any

import torch
from diffusers.models.attention_dispatch import (
    AttentionBackendName,
    _AttentionBackendRegistry,
    dispatch_attention_fn,
)
from torch import Tensor, nn

from avq_diffusers.dit.joint import as_attended
from avq_diffusers.plugin.layer_state import AVQ_CALL, AVQSource, LayerState
from avq_diffusers.plugin.layers import LayerSpec
from avq_diffusers.plugin.per_thread import PerThread


class DispatchedState(LayerState):
    """The AVQ of a layer on the attention dispatch.

    Attributes:
        text_first: whether text tokens come before those of the grid; None if there are none.
        previous_backend: of the layer, which serves the calls that AVQ does not.
    """

    def __init__(
        self,
        layer: LayerSpec,
        source: AVQSource,
        backend: str,
        route: str | int,
        *,
        text_first: bool | None,
    ) -> None:
        super().__init__(layer, source, backend, route)
        self.text_first = text_first
        self.previous_backend: AttentionBackendName | None = None


# Not a member of the Enum, which lists what users may name.
AVQ_BACKEND: Any = str.__new__(AttentionBackendName, "avq")
AVQ_BACKEND._name_, AVQ_BACKEND._value_ = "AVQ", "avq"

OTHER_KEYS = "other keys than queries"
# The layer that runs.
_present: PerThread[DispatchedState | None] = PerThread(None)


def register_backend() -> None:
    """Let the attention dispatch find AVQ."""
    if AVQ_BACKEND not in _AttentionBackendRegistry._backends:
        _AttentionBackendRegistry.register(AVQ_BACKEND)(_avq_attention)


def watch(model: nn.Module) -> None:
    """Make the calls of the layers known whose processors carry the backend."""
    for attn in model.modules():
        processor = getattr(attn, "processor", None)
        if getattr(processor, "_attention_backend", None) is AVQ_BACKEND:
            # No hook after the call: compiled code would have a graph for each.
            vars(attn)["_avq_hooks"] = (attn.register_forward_pre_hook(_begin),)


def _begin(attn: Any, args: Any) -> None:
    _present.set(getattr(attn, "_avq", None))


def forget_layer(model: nn.Module, args: Any, output: Any) -> None:
    """The hook that ends the calls of a model's layers."""
    _present.set(None)


def _avq_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    _parallel_config: Any = None,
) -> Tensor:
    """What the dispatch calls, with tensors (B, N, H, D)."""
    state = _present.get()
    reason: str | None = "not a layer of AVQ"
    if state is not None:
        is_plain = not (dropout_p or is_causal or enable_gqa)
        reason = _exact_because(state, query, key, attn_mask, is_plain, _parallel_config)
        if not torch.compiler.is_compiling():
            last = state.last_call
            state.count(AVQ_CALL if reason is None else reason)
            if reason == OTHER_KEYS and last == AVQ_CALL:
                state.last_call = last  # the keys of an IP-Adapter, beside the layer's own
    if state is not None and reason is None:
        return _joint_attention(state, query, key, value, scale)
    return dispatch_attention_fn(
        query,
        key,
        value,
        attn_mask,
        dropout_p,
        is_causal,
        scale,
        enable_gqa,
        backend=None if state is None else state.previous_backend,
        parallel_config=_parallel_config,
    )


def _exact_because(
    state: DispatchedState,
    query: Tensor,
    key: Tensor,
    attn_mask: Tensor | None,
    is_plain: bool,
    parallel_config: Any,
) -> str | None:
    """Why this call runs exact attention; None if it runs AVQ."""
    call = state.present_call()
    if call.exact_because is not None:
        return call.exact_because
    if attn_mask is not None:
        return "attention mask"
    if parallel_config is not None:
        return "context parallel"
    if query.shape[1] != key.shape[1]:
        return OTHER_KEYS
    if query.shape[2] != key.shape[2] or not is_plain:
        return "causal, grouped or dropped keys"
    num_text = -1 if call.query_order is None else query.shape[1] - call.query_order.shape[0]
    if num_text < 0 or (num_text > 0 and state.text_first is None):
        return "tokens are not the grid"
    return state.routed_because(query.shape[1] - num_text, query)


def _joint_attention(
    state: DispatchedState, query: Tensor, key: Tensor, value: Tensor, scale: float | None
) -> Tensor:
    """AVQ for the queries of grid and text, whose keys are sinks; all (B, N + T, H, D)."""
    order = state.present_call().query_order
    assert order is not None
    num_image = order.shape[0]
    num_text = query.shape[1] - num_image
    image, text = slice(num_image), slice(num_image, None)
    if state.text_first:
        image, text = slice(num_text, None), slice(num_text)
    query, key, value = (as_attended(x).transpose(1, 2) for x in (query, key, value))
    return state.attend(
        query,
        key[:, :, image],
        value[:, :, image],
        sink_key=key[:, :, text] if num_text else None,
        sink_value=value[:, :, text] if num_text else None,
        text_first=bool(state.text_first),
        scale=scale,
    ).transpose(1, 2)
