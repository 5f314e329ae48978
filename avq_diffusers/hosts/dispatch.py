"""Transformers on diffusers' attention dispatch: a backend that runs AVQ in layers that carry it.

Backends see tensors only. A hook before each layer says whose call it is, so one serves all layers.
It is registered when AVQ is first applied, stands on the processors of the chosen layers only, and
leaves the process's default alone.
"""

from collections.abc import Sequence
from math import prod
from typing import Any, NamedTuple

import torch
from diffusers import ModelMixin
from diffusers.models.attention_dispatch import (
    AttentionBackendName,
    _AttentionBackendRegistry,
    dispatch_attention_fn,
)
from torch import Tensor, nn

from avq_diffusers.config import is_within
from avq_diffusers.hosts.grids import READS_THE_GRID, Family, family_of, parameters_of
from avq_diffusers.hosts.host import Host, Other, Others, Watch
from avq_diffusers.hosts.layers import ATTRIBUTE, Layer, Replaced, own_name
from avq_diffusers.hosts.per_thread import PerThread
from avq_diffusers.hosts.state import AVQ_CALL, LayerState, Tokens, as_attended

# Names of a block's self-attention and joint attention; cross-attention has others.
SELF_ATTENTION = ("attn", "attn1", "attention")
OTHER_KEYS = "other keys than queries"

# Not a member of the Enum, which lists what users may name.
AVQ_BACKEND: Any = str.__new__(AttentionBackendName, "avq")
AVQ_BACKEND._name_, AVQ_BACKEND._value_ = "AVQ", "avq"
AVQ_BACKEND.__deepcopy__ = lambda memo: AVQ_BACKEND  # Python 3.10 would look for a member


class Previous(NamedTuple):
    """The processor of a layer before AVQ, which stays, and the backend it carried, if any."""

    processor: Any
    backend: AttentionBackendName | None


# The layer that runs.
_present: PerThread[LayerState | None] = PerThread(None, shared=False)


def _begin(attn: Any, args: Any) -> None:
    """The hook before a layer, which makes its call known."""
    _present.set(getattr(attn, ATTRIBUTE, None))


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
    backend = None
    if state is not None:
        backend = state.previous.backend
        is_plain = not (dropout_p or is_causal or enable_gqa)
        reason = _exact_because(state, query, key, attn_mask, is_plain, _parallel_config)
        last = state.last_call
        state.count(reason or AVQ_CALL)
        if reason == OTHER_KEYS and last == AVQ_CALL and not torch.compiler.is_compiling():
            state.last_call = last  # the keys of an IP-Adapter, beside the layer's own
        if reason is None:
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
        backend=backend,
        parallel_config=_parallel_config,
    )


def _exact_because(
    state: LayerState,
    query: Tensor,
    key: Tensor,
    attn_mask: Tensor | None,
    is_plain: bool,
    parallel_config: Any,
) -> str | None:
    """Why this call runs exact attention; None if it runs AVQ."""
    return state.exact_because(
        query.shape[1] - state.num_beside,
        query,
        (
            (attn_mask is not None, "attention mask"),
            (parallel_config is not None, "context parallel"),
            (query.shape[1] != key.shape[1], OTHER_KEYS),
            (query.shape[2] != key.shape[2] or not is_plain, "causal, grouped or dropped keys"),
        ),
    )


def _joint_attention(
    state: LayerState, query: Tensor, key: Tensor, value: Tensor, scale: float | None
) -> Tensor:
    """AVQ for all queries; keys beside the grid's are sinks. All are (B, N + T, H, D)."""
    call = state.call.get()
    assert call is not None
    num_beside = call.num_beside
    num_image = query.shape[1] - num_beside
    image, text = slice(num_image), slice(num_image, None)
    if call.beside_first:
        image, text = slice(num_beside, None), slice(num_beside)
    query, key, value = (as_attended(x).transpose(1, 2) for x in (query, key, value))
    return state.attend(
        query,
        key[:, :, image],
        value[:, :, image],
        sink_key=key[:, :, text] if num_beside else None,
        sink_value=value[:, :, text] if num_beside else None,
        scale=scale,
    ).transpose(1, 2)


class DispatchHost(Host):
    """Self-attention and joint attention of image and video transformers."""

    kind = "transformer"

    def find(self, module: nn.Module) -> ModelMixin | None:
        model = next((x for x in module.modules() if isinstance(x, ModelMixin)), None)
        is_known = model is not None and _family(model) is not None and self.layers(model)
        return model if is_known else None

    def layers(self, model: nn.Module) -> list[Layer]:
        family = _family(model)
        assert family is not None
        return [
            Layer(own_name(path), 0, x.heads, x.inner_dim // x.heads, x, model, model, model)
            for path, x in model.named_modules()
            if _is_dispatched(own_name(path), x, family.parts)
        ]

    def refuse(self, model: nn.Module) -> None:
        parallel = getattr(model, "_parallel_config", None)
        if getattr(parallel, "context_parallel_config", None) is not None:
            raise ValueError(
                "AVQ does not run in context parallel, whose devices hold parts of an image only."
            )

    def attention_of(self, attn: Any) -> Previous:
        return Previous(attn.processor, _backend_of(attn))

    def give_avq(self, attn: Any, state: LayerState) -> None:
        if AVQ_BACKEND not in _AttentionBackendRegistry._backends:
            _AttentionBackendRegistry.register(AVQ_BACKEND)(_avq_attention)
        attn.processor._attention_backend = AVQ_BACKEND

    def restore(self, attn: Any, own: Replaced, model: nn.Module) -> None:
        processor, backend = own.previous
        if processor._attention_backend is not AVQ_BACKEND:
            return
        if backend is None:
            del processor._attention_backend
        else:
            processor._attention_backend = backend

    def other_attention(self, layer: Layer) -> Other | None:
        processor, backend = layer.attn.processor, _backend_of(layer.attn)
        if backend is AVQ_BACKEND:
            return None
        if backend is None:
            return Other(type(processor).__name__, False)
        return Other(f"attention backend {backend.value}", True)

    def watch(self, layers: Sequence[Layer], others: Others) -> Watch:
        return _TransformerWatch(self, layers, others)


class _TransformerWatch(Watch):
    """The hooks of a transformer, and of each of its layers.

    They stay out of compiled code, which cannot read positions from the device.
    """

    def attach(self, caller: Any) -> list[Any]:
        # Other layers, too, whose processor is that of a layer with AVQ. No hook after a layer:
        # compiled code would have a graph for each.
        of_layers = [
            attn.register_forward_pre_hook(_begin)
            for attn in caller.modules()
            if _backend_of(attn) is AVQ_BACKEND
        ]
        return [*super().attach(caller), *of_layers]

    @torch.compiler.disable(reason=READS_THE_GRID)
    def begin(self, caller: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        family = _family(caller)
        assert family is not None
        arguments = {**dict(zip(parameters_of(type(caller).forward), args, strict=False)), **kwargs}
        grid, tokens = family.read(caller.config, arguments), family.hidden_states(arguments)
        beside = {"": 0}
        if not isinstance(grid, str):
            beside = family.num_beside(arguments, prod(grid))
        self.enter(caller, Tokens(tokens, tokens.dtype, grid, beside, family.beside_first))

    def end(self, caller: nn.Module, args: Any, output: Any) -> None:
        super().end(caller, args, output)
        _present.set(None)


DISPATCH = DispatchHost()


def _backend_of(attn: Any) -> AttentionBackendName | None:
    return getattr(getattr(attn, "processor", None), "_attention_backend", None)


def _family(model: nn.Module) -> Family | None:
    return family_of(parameters_of(type(model).forward))


def _is_dispatched(name: str, attn: nn.Module, parts: tuple[str, ...]) -> bool:
    processor = getattr(attn, "processor", None)
    return (
        name.rpartition(".")[2] in SELF_ATTENTION
        and hasattr(processor, "_attention_backend")
        and hasattr(attn, "heads")
        and hasattr(attn, "inner_dim")
        and (not parts or any(is_within(name, part) for part in parts))
    )
