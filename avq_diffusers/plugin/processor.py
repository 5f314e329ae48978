"""`AVQProcessor`: the attention processor that runs AVQ where a layer has codebooks.

The processor itself holds nothing that a call needs. Each chosen `Attention` carries its
`LayerState` as a plain attribute, so one processor serves all layers, survives tools that rebuild
processors as `type(processor)()`, and compiles without a guard per layer.
"""

import copy
import inspect
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
import torch.nn.functional as F
from diffusers import Transformer2DModel
from diffusers.models.attention_processor import (
    Attention,
    AttnProcessor2_0,
    IPAdapterAttnProcessor,
    IPAdapterAttnProcessor2_0,
    IPAdapterXFormersAttnProcessor,
)
from torch import Tensor, nn

from avq_diffusers.attention.api import avq_attention, check_backend, resolve_backend
from avq_diffusers.attention.orders import query_order
from avq_diffusers.plugin.layers import SelfAttentionLayer, select_layers
from avq_diffusers.plugin.routing import (
    BreakEven,
    Shape,
    break_even,
    check_route,
    known_break_even,
    rows_bucket,
)
from avq_diffusers.plugin.weights import AVQCodebooks

AVQ_CALL = "AVQ"
IP_ADAPTERS = (IPAdapterAttnProcessor, IPAdapterAttnProcessor2_0, IPAdapterXFormersAttnProcessor)


class _Own(threading.local):
    value: Any = None

    def __reduce__(self) -> tuple:
        return _Own, ()


class PerThread:
    """A value that each thread sets for itself, as others may draw with the same UNet.

    Compiled code, and threads that have set none, such as autograd's own where it computes a layer
    again, get the last one of any thread. So does a copy.
    """

    def __init__(self, value: Any = None) -> None:
        self.last = value
        self.own = _Own()

    def set(self, value: Any) -> None:
        self.last = value
        if not torch.compiler.is_compiling():
            self.own.value = value

    def get(self) -> Any:
        own = None if torch.compiler.is_compiling() else self.own.value
        return self.last if own is None else own


class LayerState:
    """What one self-attention layer needs to run AVQ, and what it did so far."""

    def __init__(
        self, layer: SelfAttentionLayer, codebooks: AVQCodebooks, backend: str, route: str
    ) -> None:
        config = codebooks.layer_config(layer.name)
        self.stored_codebook = self.codebook = codebooks.codebook(layer.name)
        self.stored_norm = self.key_norm = codebooks.key_norm(layer.name)
        self.stored_changes = self.projection_changes = codebooks.projection_changes(layer.name)
        self.refined = PerThread(config.num_refined)
        self.query_tile = config.query_tile
        self.importance_tile = config.importance_tile
        self.order_kind = config.query_order
        self.order = PerThread()
        self.num_heads = layer.num_heads
        self.backend = backend
        self.route = route
        self.break_even: dict[Shape, BreakEven] = {}
        self.enabled = True
        self.num_disabling = 0  # blocks of `avq_disabled` that are open
        self.calls: Counter[str] = Counter()
        self.last_call: str | None = None
        self.last_backend: str | None = None

    def __getstate__(self) -> dict[str, Any]:
        # A block of `avq_disabled` that is open here never closes for a copy.
        return {**self.__dict__, "enabled": True, "num_disabling": 0}

    def see_grid(self, hidden_states: Tensor, dtype: torch.dtype) -> None:
        """Prepare for the tokens of `hidden_states` (B, C, h, w), on its device.

        `dtype` is that of the UNet, which autocast does not change.
        """
        height, width = hidden_states.shape[-2:]
        device = hidden_states.device
        # A tensor and not (h, w): torch.compile would guard every block on the two integers.
        self.order.set(query_order(height, width, self.order_kind, device))
        self.move_to(device, dtype)
        if not torch.compiler.is_compiling():
            self.learn_break_even(hidden_states, measure=True)

    @torch.compiler.assume_constant_result
    def move_to(self, device: torch.device, dtype: torch.dtype) -> None:
        """Copy what lies on another device, and changes of another dtype, from the codebooks.

        Where the codebooks are on this device themselves, they are what runs, so that changes to
        them take effect. Compilers run this while they trace, so that what they compile finds
        everything in its place.
        """
        moves = self._codebook_moves(device)
        if self.projection_changes is not None:
            weight = self.projection_changes["to_q.weight"]
            moves |= (weight.device, weight.dtype) != (device, dtype)
        if not moves:
            return
        # On a thread of its own, which knows no inference mode, whose tensors autograd would refuse
        # later and of which the kernels' tables could not be kept, and no fake tensors.
        with ThreadPoolExecutor(max_workers=1) as worker:
            worker.submit(self._move, device, dtype).result()

    def _codebook_moves(self, device: torch.device) -> bool:
        is_stored_here = self.stored_codebook.parents.device == device
        is_stored = self.codebook is self.stored_codebook
        return is_stored != is_stored_here or self.codebook.parents.device != device

    @torch.no_grad()
    def _move(self, device: torch.device, dtype: torch.dtype) -> None:
        if self._codebook_moves(device):
            norm = self.stored_norm
            self.codebook = self.stored_codebook.to(device)
            is_stored = self.codebook is self.stored_codebook
            self.key_norm = norm if is_stored or not norm else copy.deepcopy(norm).to(device)
        if self.stored_changes is not None:
            # From the codebooks, as a copy in another dtype has lost digits.
            self.projection_changes = {
                name: tensor.to(device, dtype) for name, tensor in self.stored_changes.items()
            }

    @property
    def query_order(self) -> Tensor | None:
        """Of the grid that is drawn."""
        return self.order.get()

    @property
    def num_refined(self) -> int:
        """At the timestep that is drawn."""
        return self.refined.get()

    def shape(self, hidden_states: Tensor) -> Shape:
        """What the faster attention depends on, for the batch and dtype of `hidden_states`."""
        codebook, device = self.codebook, hidden_states.device.type
        is_autocast = torch.is_autocast_enabled(device)
        return Shape(
            rows=rows_bucket(hidden_states.shape[0], self.num_heads),
            head_dim=codebook.head_dim,
            num_parents=codebook.num_parents,
            num_refined=self.num_refined,
            num_children=codebook.num_children,
            query_tile=self.query_tile,
            dtype=torch.get_autocast_dtype(device) if is_autocast else hidden_states.dtype,
        )

    def learn_break_even(self, hidden_states: Tensor, *, measure: bool) -> None:
        """Find out from how many tokens on AVQ is faster than exact attention on a GPU."""
        if self.route == "always" or hidden_states.device.type != "cuda":
            return
        shape = self.shape(hidden_states)
        if shape in self.break_even:
            return
        capturing = torch.cuda.is_current_stream_capturing()
        find = break_even if measure and not capturing else known_break_even
        found = find(shape, hidden_states.device)
        if found is not None:
            self.break_even[shape] = found

    def exact_because(
        self,
        attn: Attention,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor | None,
        attention_mask: Tensor | None,
    ) -> str | None:
        """Why this call goes to the exact path; None when AVQ serves it."""
        if not self.enabled:
            return "disabled"
        if encoder_hidden_states is not None:
            return "cross-attention"
        if attention_mask is not None:
            return "attention mask"
        if self.query_order is None or hidden_states.shape[1] != self.query_order.shape[0]:
            return "tokens are not the grid"
        if attn.norm_q is not None or attn.norm_k is not None:
            return "query or key norm"
        if attn.residual_connection:
            return "residual connection"
        if self.break_even and hidden_states.shape[1] < self.least_tokens(hidden_states):
            return "faster"
        return None

    def least_tokens(self, hidden_states: Tensor) -> int:
        """Tokens from which AVQ is faster in this call."""
        found = self.break_even.get(self.shape(hidden_states), BreakEven(0, 0))
        return found.compiled if torch.compiler.is_compiling() else found.eager

    def project(self, layer: nn.Module, name: str, hidden_states: Tensor) -> Tensor:
        """Run the projection `name` of the layer, with what distillation changed in it."""
        changes = self.projection_changes
        if changes is None:
            return layer(hidden_states)
        weight_change, bias_change = changes[f"{name}.weight"], changes.get(f"{name}.bias")
        if _is_plain(layer):
            # Adding weights costs far less than a second product with the tokens.
            bias = layer.bias if bias_change is None else layer.bias + bias_change
            return F.linear(hidden_states, layer.weight + weight_change, bias)
        # LoRA, quantized and offloaded layers answer calls only.
        return layer(hidden_states) + F.linear(hidden_states, weight_change, bias_change)

    def count(self, call: str) -> None:
        self.calls[call] += 1
        self.last_call = call


class AVQProcessor(AttnProcessor2_0):
    """Attention processor that runs AVQ in the layers that have codebooks.

    Every other call goes to the processor that the layer had before, and to `AttnProcessor2_0` on
    a layer that was never prepared.

    Args:
        codebooks: for `AVQStableDiffusionPipeline.set_attn_processor`, or for `unet`.
        unet: prepare this UNet at once; `unet.set_attn_processor` then takes this processor for
            all of its layers. IP-Adapter's scale setter no longer finds its processors after that;
            `apply_avq` leaves them in place.
        backend, route: as `apply_avq`.

    Raises:
        TypeError: `codebooks` is not an `AVQCodebooks`, or `unet` comes without it.
        ValueError: the codebooks are those of another model, or backend or route are unknown.
    """

    def __init__(
        self,
        codebooks: AVQCodebooks | None = None,
        unet: nn.Module | None = None,
        *,
        backend: str = "auto",
        route: str = "fastest",
    ) -> None:
        super().__init__()
        check_backend(backend)
        check_route(route)
        self.codebooks = codebooks
        self.backend = backend
        self.route = route
        if (codebooks is not None or unet is not None) and not isinstance(codebooks, AVQCodebooks):
            raise TypeError(f"codebooks must be AVQCodebooks, but got {type(codebooks).__name__}.")
        if unet is not None:
            install(unet, codebooks, backend, route)
            for attn in unet.modules():
                if isinstance(attn, Attention):
                    attn._avq_previous = attn.processor

    def __call__(
        self,
        attn: Attention,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor | tuple[Tensor, ...] | None = None,
        attention_mask: Tensor | None = None,
        temb: Tensor | None = None,
        ip_adapter_masks: Tensor | list[Tensor] | None = None,
        ip_hidden_states: list[Tensor] | None = None,
    ) -> Tensor:
        """Attend; hidden_states (B, N, channels) in, the same shape out."""
        state = getattr(attn, "_avq", None)
        if state is not None:
            reason = state.exact_because(attn, hidden_states, encoder_hidden_states, attention_mask)
            if not torch.compiler.is_compiling():
                state.count(AVQ_CALL if reason is None else reason)
            if reason is None:
                return _attend(attn, state, hidden_states)
        previous = getattr(attn, "_avq_previous", None)
        if previous is None and self.codebooks is not None:
            raise RuntimeError(
                "AVQProcessor(codebooks) was set on a UNet that it was not made for; use "
                "apply_avq(pipe, codebooks) or AVQProcessor(codebooks, unet=pipe.unet)."
            )
        is_unloaded = isinstance(previous, IP_ADAPTERS) and isinstance(
            encoder_hidden_states, Tensor
        )
        if previous is None or is_unloaded:
            return super().__call__(
                attn, hidden_states, encoder_hidden_states, attention_mask, temb
            )
        optional = {
            "temb": temb,
            "ip_adapter_masks": ip_adapter_masks,
            "ip_hidden_states": ip_hidden_states,
        }
        accepted = inspect.signature(previous.__call__).parameters
        return previous(
            attn,
            hidden_states,
            encoder_hidden_states=encoder_hidden_states,
            attention_mask=attention_mask,
            **{name: value for name, value in optional.items() if name in accepted},
        )


def _attend(attn: Attention, state: LayerState, hidden_states: Tensor) -> Tensor:
    query, key, value = (
        state.project(layer, name, hidden_states).unflatten(-1, (attn.heads, -1)).transpose(1, 2)
        for layer, name in ((attn.to_q, "to_q"), (attn.to_k, "to_k"), (attn.to_v, "to_v"))
    )
    if state.key_norm is not None:
        key = state.key_norm(key.float()).to(query.dtype)
    inputs = (query, key, value, state.codebook)
    sizes = {"num_refined": state.num_refined, "query_tile": state.query_tile}
    backend = resolve_backend(state.backend, *inputs, **sizes)
    if not torch.compiler.is_compiling():
        state.last_backend = backend
    output = avq_attention(
        *inputs,
        **sizes,
        query_order=state.query_order,
        importance_tile=state.importance_tile,
        backend=backend,
    )
    output = state.project(attn.to_out[0], "to_out.0", output.transpose(1, 2).flatten(2))
    output = attn.to_out[1](output)
    if attn.rescale_output_factor != 1:
        output = output / attn.rescale_output_factor
    return output


def install(
    unet: nn.Module, codebooks: AVQCodebooks, backend: str, route: str
) -> list[SelfAttentionLayer]:
    """Give the layers of `codebooks` their state and their grid hook; processors stay."""
    check_backend(backend)
    check_route(route)
    layers = codebooks.layers_of(unet)
    if any(layer.has_linfusion for layer in select_layers(unet)):
        raise ValueError("this UNet has LinFusion layers; call remove_linfusion(unet) first.")
    states = [LayerState(layer, codebooks, backend, route) for layer in layers]
    for layer, state in zip(layers, states, strict=True):
        weight = next(layer.attn.parameters())
        if weight.device.type != "meta":  # where accelerate's offload keeps weights between calls
            state.move_to(weight.device, _dtype(layer.transformer))
            # For a UNet that is compiled before its first call: one picture with guidance.
            picture = torch.empty(2, 1, 1, dtype=_dtype(layer.transformer), device=weight.device)
            state.learn_break_even(picture, measure=False)
    uninstall(unet)
    for layer, state in zip(layers, states, strict=True):
        layer.attn._avq = state
        if not hasattr(layer.transformer, "_avq_hook"):
            layer.transformer._avq_hook = layer.transformer.register_forward_pre_hook(
                _see_grid, with_kwargs=True
            )
    return layers


def uninstall(unet: nn.Module) -> None:
    """Take away states and hooks, and put back the processors that ours replaced.

    One of ours that a tool set again, or the user by hand, becomes diffusers' default, and so does
    that of an IP-Adapter which was unloaded since.
    """
    has_adapter = getattr(unet, "encoder_hid_proj", None) is not None
    for module in unet.modules():
        for name in ("_avq_hook", "_avq_scheduler"):  # of the grid; of `set_num_refined`
            if hasattr(module, name):
                getattr(module, name).remove()
                delattr(module, name)
        previous = getattr(module, "_avq_previous", None)
        if isinstance(module, Attention) and isinstance(module.processor, AVQProcessor):
            if previous is None or (isinstance(previous, IP_ADAPTERS) and not has_adapter):
                previous = AttnProcessor2_0()
            module.set_processor(previous)
        for name in ("_avq_previous", "_avq"):
            if hasattr(module, name):
                delattr(module, name)


def _see_grid(transformer: Transformer2DModel, args: tuple, kwargs: dict) -> None:
    hidden_states = args[0] if args else kwargs["hidden_states"]
    for block in transformer.transformer_blocks:
        state = getattr(block.attn1, "_avq", None)
        if state is not None:
            state.see_grid(hidden_states, _dtype(transformer))


def _is_plain(layer: nn.Module) -> bool:
    """Whether a call of the layer is a product with its weight as it is there now."""
    is_hooked = layer._forward_hooks or layer._forward_pre_hooks or "forward" in layer.__dict__
    return type(layer) is nn.Linear and type(layer.weight) is nn.Parameter and not is_hooked


def _dtype(transformer: Transformer2DModel) -> torch.dtype:
    # Of the norm: quantized and layerwise-cast linear layers store another dtype than they compute.
    return transformer.norm.weight.dtype
