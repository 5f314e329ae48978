"""Diffusers transformers: AVQ in place of the attention that a layer's processor calls.

Processors on the attention dispatch get a backend. It is registered when AVQ is first applied, set
only on the processors of the chosen layers, and leaves the process's default alone. Others call
`scaled_dot_product_attention`, which a PyTorch mode intercepts inside the layer. Both only see
tensors: a hook before each layer records whose call it is, so one backend serves all layers.

Under Ulysses context parallelism the backend is the operator of diffusers' own function, which
exchanges tokens for heads: AVQ gets all tokens of some heads.
"""

from contextlib import nullcontext
from math import prod
from types import MethodType
from typing import Any, NamedTuple

import torch
from diffusers.models.attention_dispatch import (
    AttentionBackendName,
    _AttentionBackendRegistry,
    _templated_context_parallel_attention,
    dispatch_attention_fn,
)
from diffusers.models.attention_processor import (
    Attention,
    AttnAddedKVProcessor,
    AttnProcessor,
    SlicedAttnAddedKVProcessor,
    SlicedAttnProcessor,
    XFormersAttnAddedKVProcessor,
    XFormersAttnProcessor,
)
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from avq_diffusers.attention.schema import arguments_of
from avq_diffusers.attention.tensors import Tensors
from avq_diffusers.hosts.core import (
    ATTRIBUTE,
    AVQ_CALL,
    REST,
    SCALED_DOT_PRODUCT_ATTENTION,
    TIMESTEP,
    Host,
    Layer,
    LayerState,
    Other,
    PerThread,
    Ranks,
    TimestepArgument,
    Tokens,
    Watch,
    as_attended,
    named_arguments,
    own_name,
)
from avq_diffusers.hosts.models.grids import READS_THE_GRID, family_of
from avq_diffusers.hosts.models.masks import Entries, joint_attention, masked_attention, read_groups
from avq_diffusers.hosts.models.parallel import RING, is_ulysses, ranks_of, share_verdict
from avq_diffusers.hosts.models.unet import level_of

# Names of a block's self-attention and joint attention; cross-attention is named differently.
SELF_ATTENTION = ("attn", "attn1", "attention", "self_attention")
OTHER_KEYS = "other keys than queries"
NO_VALUES = "tensors on meta, whose grid has no values to read"

# Exact attention without PyTorch's function, where AVQ would take over.
BYPASSING_PROCESSORS = (
    *(AttnProcessor, SlicedAttnProcessor, XFormersAttnProcessor),
    *(AttnAddedKVProcessor, SlicedAttnAddedKVProcessor, XFormersAttnAddedKVProcessor),
)

# Not a member of the Enum, which lists what users can name.
AVQ_BACKEND: Any = str.__new__(AttentionBackendName, "avq_layer")
AVQ_BACKEND._name_, AVQ_BACKEND._value_ = "AVQ_LAYER", "avq_layer"
AVQ_BACKEND.__deepcopy__ = lambda memo: AVQ_BACKEND  # Python 3.10 would look up a member


class _AttentionCall(NamedTuple):
    """The arguments of PyTorch's attention, and of diffusers' dispatch."""

    query: Tensor
    key: Tensor
    value: Tensor
    attn_mask: Any = None
    dropout_p: float = 0.0
    is_causal: bool = False
    scale: float | None = None
    enable_gqa: bool = False

    # No property: PyTorch 2.10 cannot compile properties of a NamedTuple.
    def is_plain(self) -> bool:
        """Whether all queries see all keys that no mask hides."""
        return not (self.dropout_p or self.is_causal or self.enable_gqa)


class Dispatched(NamedTuple):
    """A layer's processor before AVQ, which stays in place.

    Attributes:
        processor: what the layer calls.
        is_dispatched: whether it calls the attention dispatch, with its own backend attribute.
        backend: that attribute's previous value.
        is_own: whether it was set on the processor itself, not its class.
    """

    processor: Any
    is_dispatched: bool
    backend: AttentionBackendName | None
    is_own: bool


# The layer that is running, and whether it has called attention.
_present: PerThread[LayerState | None] = PerThread(None, shared=False)
_attended: PerThread[bool] = PerThread(False, shared=False)


def _begin(attn: Any, args: Any) -> None:
    """The hook before a layer, which records its call."""
    _present.set(getattr(attn, ATTRIBUTE, None))
    if not torch.compiler.is_compiling():
        _attended.set(False)


def _note_bypass(attn: Any, args: Any, output: Any) -> None:
    """The hook after a layer that is not on the dispatch: did it call PyTorch's attention?"""
    state = getattr(attn, ATTRIBUTE, None)
    if state is None or torch.compiler.is_compiling():
        return
    if _attended.get():
        state.bypassed_by = None
    elif not _bypasses(attn, state):
        state.bypassed_by = type(attn.processor)
        state.count(type(attn.processor).__name__)


def _bypasses(attn: Any, state: LayerState | None) -> bool:
    """Whether the layer's processor is known to compute attention without PyTorch's function."""
    processor = type(attn.processor)
    is_known = processor in BYPASSING_PROCESSORS
    return is_known or (state is not None and processor is state.bypassed_by)


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
    call = _AttentionCall(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
    state = _present.get()
    if state is not None and call.is_plain() and is_ulysses(_parallel_config):
        # Exact attention, too: the ranks exchange tokens alike, whatever each of them runs.
        return _templated_context_parallel_attention(
            query,
            key,
            value,
            attn_mask,
            scale=scale,
            forward_op=_ulysses_forward,
            backward_op=_ulysses_backward,
            _parallel_config=_parallel_config,
        )
    output = _attend(call)
    if output is not None:
        return output
    backend = None if state is None else state.previous.backend
    return dispatch_attention_fn(*call, backend=backend, parallel_config=_parallel_config)


def _ulysses_forward(
    ctx: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *others: Any,
    _save_ctx: bool,
    **options: Any,
) -> Tensor:
    """Attention of this rank's heads for all tokens."""
    attn_mask, _, _, scale, *_ = others  # as in `_avq_attention`
    if _save_ctx:
        state = _present.get()
        assert state is not None
        ctx.save_for_backward(query, key, value)
        ctx.rerun = state, state.call.get(), attn_mask, scale
    return _avq_attention(query, key, value, attn_mask, scale=scale)


def _ulysses_backward(ctx: Any, grad_output: Tensor, *others: Any, **options: Any) -> Any:
    """Recompute the attention and return the gradients to query, key and value."""
    state, call, attn_mask, scale = ctx.rerun
    tokens = query, key, value = [x.detach().requires_grad_() for x in ctx.saved_tensors]
    present = _present.get()
    _present.set(state)
    try:
        with torch.enable_grad(), state.recomputing(call):
            output = _avq_attention(query, key, value, attn_mask, scale=scale)
        return torch.autograd.grad(output, tokens, grad_output)
    finally:
        _present.set(present)


class _InPlaceOfTorch(TorchFunctionMode):
    """Runs AVQ in layers that call PyTorch's attention, with tensors (B, H, N, D)."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, output = kwargs or {}, None
        if func is SCALED_DOT_PRODUCT_ATTENTION:  # also where a tool has replaced it and calls it
            call = _AttentionCall(*args, **kwargs)
            query, key, value = (x.transpose(1, 2) for x in call[:3])
            output = _attend(call._replace(query=query, key=key, value=value))
        return func(*args, **kwargs) if output is None else output.transpose(1, 2)


_IN_PLACE_OF_TORCH = _InPlaceOfTorch()


class _Intercepted:
    """The `forward` of a layer that is not on the dispatch, until `remove`.

    A hook after the layer could not leave the mode: none runs after `KeyboardInterrupt`.
    """

    def __init__(self, attn: Any) -> None:
        self.attn = attn
        self.is_active = True
        self.replaced = vars(attn).get("forward")
        self.__wrapped__ = attn.forward
        attn.forward = self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        try:
            with _IN_PLACE_OF_TORCH if self.is_active else nullcontext():
                return self.__wrapped__(*args, **kwargs)
        finally:
            _present.set(None)

    def remove(self) -> None:
        """Put the layer's own back; one that another tool has wrapped stays, and does nothing."""
        self.is_active = False
        if vars(self.attn).get("forward") is self:
            del self.attn.forward
            if self.replaced is not None:
                self.attn.forward = self.replaced


def _has_lost_avq(attn: Any) -> bool:
    """Whether a tool has put a `forward` back that it found before AVQ was applied."""
    forward = attn.forward
    while not isinstance(forward, MethodType):
        if isinstance(forward, _Intercepted) and forward.is_active:
            return False
        forward = getattr(forward, "__wrapped__", getattr(forward, "func", None))
        if forward is None:
            return False  # a function that does not say what it calls
    return True


def _attend(attention: _AttentionCall) -> Tensor | None:
    """AVQ for the current layer's call, (B, N, H, D); None if it runs exact attention."""
    state = _present.get()
    if state is None:
        return None
    if not torch.compiler.is_compiling():
        _attended.set(True)
    query, key, value, mask, *_, scale, _ = attention
    grid, call = _grid(state, key), state.call.get()
    joined = None if call is None else call.joined
    num_tokens, num_queries, num_keys = grid.stop - grid.start, query.shape[1], key.shape[1]
    is_plain = attention.is_plain() and query.shape[2] == key.shape[2]
    reasons = (
        (num_queries not in (num_keys, num_tokens), OTHER_KEYS),
        (num_tokens > num_keys, "tokens are not the grid"),
        (not is_plain, "causal, grouped or dropped keys"),
    )
    reason = state.exact_because(num_tokens, query, reasons)
    if reason is None and joined is not None:
        query, key, value = (x[:, joined.indices] for x in (query, key, value))
        if isinstance(mask, Tensor) and mask.shape[-1] == key.shape[1]:
            mask = mask[..., joined.indices]
    groups = _groups(mask, query, key, value, grid) if reason is None else None
    if groups is None:
        reason = reason or "attention mask"
    last = state.last_call
    state.count(reason or AVQ_CALL)
    if reason == OTHER_KEYS and last == AVQ_CALL and not torch.compiler.is_compiling():
        state.last_call = last  # these are an IP-Adapter's keys, not the layer's own
    if groups is None:
        return None
    query, key, value = (as_attended(x) for x in (query, key, value))
    if mask is None or not torch.compiler.is_compiling():
        output = joint_attention(state.attend, query, key, value, grid, scale, groups)
    else:
        heads = query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)
        output = _masked(state, Tensors.of(*heads, scale=scale), mask, grid)
    return output if joined is None else output[:, joined.tokens]


def _masked(state: LayerState, tensors: Tensors, mask: Tensor, grid: slice) -> Tensor:
    """`masked_attention` of the current call."""
    call, previous = state.call.get(), state.previous
    assert call is not None
    exact = previous.backend if previous.is_dispatched else AttentionBackendName.NATIVE
    return masked_attention(
        *arguments_of(tensors._replace(key_order=call.query_order), call.spec),
        mask if mask.dtype == torch.bool else as_attended(mask),
        grid.start,
        grid.stop,
        None if exact is None else exact.value,
        state.backend,
    )


def _groups(
    mask: Any, query: Tensor, key: Tensor, value: Tensor, grid: slice
) -> list[Entries] | None:
    """`read_groups`; no groups without a mask, or if compiled code reads it at run time."""
    if mask is None:
        return []
    if not torch.compiler.is_compiling():
        return read_groups(mask, query, key, grid, keep=True)
    needs_grad = torch.is_grad_enabled() and any(x.requires_grad for x in (query, key, value))
    is_served = isinstance(mask, Tensor) and mask.ndim == 4 and not needs_grad
    return [] if is_served else None


def _grid(state: LayerState, key: Tensor) -> slice:
    """The grid's slice of the keys (B, N + T, H, D)."""
    call, num_keys = state.call.get(), key.shape[1]
    if call is None or call.query_order is None:
        return slice(0, num_keys)
    num_beside = call.num_beside
    if num_beside == REST:
        num_beside = num_keys - call.query_order.shape[0]
    start = num_beside if call.beside_first else 0
    return slice(start, start + num_keys - num_beside)


class TransformerWatch(Watch):
    """The hooks of a transformer, outside compiled code, which cannot read positions."""

    @torch.compiler.disable(reason=READS_THE_GRID)
    def begin(self, caller: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        family = family_of(caller)
        assert family is not None
        arguments = named_arguments(type(caller), args, kwargs)
        tokens = family.hidden_states(arguments)
        grid = NO_VALUES if tokens.is_meta else family.read(caller.config, arguments)
        ranks, beside = self.host.ranks(caller), {"": 0}
        if ranks is not None:
            share_verdict(ranks, tokens.device)
            grid = RING if ranks.kind == RING else grid
        if not isinstance(grid, str):
            beside = family.beside.number(arguments, prod(grid))
        self.enter(caller, Tokens(tokens, tokens.dtype, grid, beside, family.beside.first, ranks))


class _DispatchWatch(TransformerWatch):
    """The hooks of a transformer and of each of its layers."""

    def attach(self, caller: Any) -> list[Any]:
        # Includes other layers that share a processor with an AVQ layer. No hooks after layers:
        # compiled code would get a graph for each.
        layer_hooks, chosen = [], {layer.attn for layer in self.layers}
        for attn in caller.modules():
            if _backend_of(attn) is AVQ_BACKEND or attn in chosen:
                layer_hooks.append(attn.register_forward_pre_hook(_begin))
            if attn in chosen and not getattr(attn, ATTRIBUTE).previous.is_dispatched:
                layer_hooks += [_Intercepted(attn), attn.register_forward_hook(_note_bypass)]
        return [*super().attach(caller), *layer_hooks]

    def enter(self, caller: nn.Module, tokens: Tokens) -> None:
        if "_is_replica" in vars(caller):  # of `nn.DataParallel`, whose layers share attributes
            for attn in caller.modules():
                if isinstance(vars(attn).get("forward"), _Intercepted):
                    del attn.forward
                    _Intercepted(attn)
        elif not torch.compiler.is_compiling():
            for layer in self.layers:
                state = layer.avq_state
                is_own = state is not None and not state.previous.is_dispatched
                if is_own and _has_lost_avq(layer.attn):
                    vars(caller)[ATTRIBUTE].handles.append(_Intercepted(layer.attn))
        super().enter(caller, tokens)

    def end(self, caller: nn.Module, args: Any, output: Any) -> None:
        super().end(caller, args, output)
        _present.set(None)
        if torch.compiler.is_compiling():
            return
        if any(state.bypassed_by is not None for state in self.states):
            self.others.warn()


class _BlockWatch(_DispatchWatch):
    """The hooks of a UNet's block; the block's input is the grid."""

    def begin(self, caller: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        hidden_states = args[0] if args else kwargs["hidden_states"]
        grid, dtype = hidden_states.shape[-2:], self.layers[0].anchor.weight.dtype
        self.enter(caller, Tokens(hidden_states, dtype, grid, {"": REST}, beside_first=True))


class DispatchHost(Host):
    """Self-attention and joint attention of image and video transformers.

    Layers that are not on the dispatch run AVQ with any processor that calls PyTorch's attention.
    """

    kind = "transformer"
    watch = _DispatchWatch

    def layers(self, model: nn.Module) -> list[Layer]:
        family = family_of(model)
        if family is None:
            return []
        return [
            Layer(own_name(path), 0, *_head_shape(x), x, model, model, model)
            for path, x in model.named_modules()
            if _is_self_attention(own_name(path), x, family.parts)
        ]

    def timestep_of(self, model: nn.Module) -> TimestepArgument | None:
        family = family_of(model)
        return TIMESTEP if family is None else family.timestep

    def ranks(self, model: nn.Module) -> Ranks | None:
        return ranks_of(model)

    def attention_of(self, attn: Any) -> Dispatched:
        processor, name = attn.processor, "_attention_backend"
        is_own = name in vars(processor)
        return Dispatched(processor, hasattr(processor, name), _backend_of(attn), is_own)

    def give_avq(self, attn: Any, state: LayerState) -> None:
        if not state.previous.is_dispatched:
            return  # its hooks suffice
        if AVQ_BACKEND not in _AttentionBackendRegistry._backends:
            register = _AttentionBackendRegistry.register
            register(AVQ_BACKEND, supports_context_parallel=True)(_avq_attention)
        attn.processor._attention_backend = AVQ_BACKEND

    def restore(self, attn: Any, state: LayerState) -> None:
        processor, is_dispatched, backend, is_own = state.previous
        if not is_dispatched or processor._attention_backend is not AVQ_BACKEND:
            return
        if is_own:
            processor._attention_backend = backend
        else:
            del processor._attention_backend

    def other_attention(self, layer: Layer) -> Other | None:
        processor, backend, state = layer.attn.processor, _backend_of(layer.attn), layer.avq_state
        is_dispatched = state is None or state.previous.is_dispatched
        if not is_dispatched and _bypasses(layer.attn, state):
            return Other(type(processor).__name__, type(processor) in BYPASSING_PROCESSORS)
        if backend is AVQ_BACKEND or not is_dispatched:
            return None
        if backend is None:
            return Other(type(processor).__name__, False)
        return Other(f"attention backend {backend.value}", True)


DISPATCH = DispatchHost()


class AddedHost(DispatchHost):
    """UNets that attend to image and text at once: DeepFloyd IF, Kandinsky 2.

    Their attention sits directly in the UNet blocks, without a spatial transformer; text keys come
    before image keys.
    """

    kind = "UNet"
    watch = _BlockWatch

    def layers(self, model: nn.Module) -> list[Layer]:
        found = []
        for path, block in model.named_modules():
            for index, attn in enumerate(getattr(block, "attentions", ())):
                if isinstance(attn, Attention) and attn.added_kv_proj_dim is not None:
                    name = own_name(f"{path}.attentions.{index}")
                    shape = attn.heads, attn.inner_dim // attn.heads
                    layer = Layer(
                        name, level_of(model, name), *shape, attn, block, attn.group_norm, None
                    )
                    found.append(layer)
        return found


ADDED = AddedHost()


def _backend_of(attn: Any) -> AttentionBackendName | None:
    return getattr(getattr(attn, "processor", None), "_attention_backend", None)


def _is_self_attention(name: str, attn: nn.Module, parts: tuple[str, ...]) -> bool:
    return (
        name.rpartition(".")[2] in SELF_ATTENTION
        and hasattr(attn, "processor")
        and (not parts or any(f".{part}." in f".{name}" for part in parts))
    )


def _head_shape(attn: Any) -> tuple[int, int]:
    """Heads and head dim."""
    heads = getattr(attn, "heads", None) or attn.num_heads
    projection = next(x for x in attn.children() if hasattr(x, "out_features"))
    return heads, getattr(attn, "inner_dim", projection.out_features) // heads
