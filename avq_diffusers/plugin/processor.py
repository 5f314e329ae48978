"""`AVQProcessor`: the attention processor that runs AVQ in the layers with codebooks.

The processor itself holds nothing that a call needs. Each chosen `Attention` carries its
`LayerState` as a plain attribute. So one processor serves all layers, survives tools that rebuild
processors as `type(processor)()`, and compiles without a guard per layer.
"""

import inspect
from typing import Any

import torch
from diffusers import Transformer2DModel, UNet2DConditionModel
from diffusers.models.attention_processor import (
    Attention,
    AttentionProcessor,
    AttnProcessor2_0,
    IPAdapterAttnProcessor,
    IPAdapterAttnProcessor2_0,
    IPAdapterXFormersAttnProcessor,
)
from torch import Tensor

from avq_diffusers.attention.api import attention_and_backend, check_backend
from avq_diffusers.plugin.codebooks import AVQCodebooks
from avq_diffusers.plugin.layer_state import LayerState
from avq_diffusers.plugin.layers import SelfAttentionLayer, select_layers
from avq_diffusers.plugin.projection import project
from avq_diffusers.plugin.routing import check_route

AVQ_CALL = "AVQ"
IP_ADAPTERS = (IPAdapterAttnProcessor, IPAdapterAttnProcessor2_0, IPAdapterXFormersAttnProcessor)


class AVQProcessor(AttnProcessor2_0):
    """Attention processor that runs AVQ in the layers with codebooks.

    Every other call goes to the layer's previous processor, or to `AttnProcessor2_0` in a layer
    that was never prepared.

    Args:
        codebooks: for `AVQStableDiffusionPipeline.set_attn_processor`, or for `unet`.
        unet: prepare this UNet at once. `unet.set_attn_processor` then takes this processor for
            all layers. After that, IP-Adapter's scale setter no longer finds its processors;
            `apply_avq` leaves them in place.
        backend, route: as `apply_avq`.

    Raises:
        TypeError: `codebooks` is not an `AVQCodebooks`, or `unet` comes without it.
        ValueError: the codebooks belong to another model, or backend or route are unknown.
    """

    def __init__(
        self,
        codebooks: AVQCodebooks | None = None,
        unet: UNet2DConditionModel | None = None,
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
        if codebooks is None and unet is None:
            return
        if not isinstance(codebooks, AVQCodebooks):
            raise TypeError(f"codebooks must be AVQCodebooks, but got {type(codebooks).__name__}.")
        if unet is not None:
            install(unet, codebooks, backend, route)
            for attn in unet.modules():
                if isinstance(attn, Attention):
                    remember_processor(attn, attn.processor)

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
        """Attend with hidden_states (B, N, channels); the output has the same shape.

        Raises:
            RuntimeError: this processor has codebooks, but was set on a UNet without them.
        """
        state: LayerState | None = getattr(attn, "_avq", None)
        if state is not None:
            reason = _exact_because(
                state, attn, hidden_states, encoder_hidden_states, attention_mask
            )
            if not torch.compiler.is_compiling():
                state.count(AVQ_CALL if reason is None else reason)
            if reason is None:
                return _attend(attn, state, hidden_states)
        previous = getattr(attn, "_avq_previous", None)
        if previous is None and self.codebooks is not None:
            raise RuntimeError(
                "AVQProcessor(codebooks) was set on a UNet without these codebooks; use "
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
        return previous(
            attn,
            hidden_states,
            encoder_hidden_states=encoder_hidden_states,
            attention_mask=attention_mask,
            **{name: optional[name] for name in attn._avq_optional},
        )


def _exact_because(
    state: LayerState,
    attn: Attention,
    hidden_states: Tensor,
    encoder_hidden_states: Tensor | tuple[Tensor, ...] | None,
    attention_mask: Tensor | None,
) -> str | None:
    """Why this call runs exact attention; None if it runs AVQ."""
    if not state.enabled:
        return "disabled"
    if encoder_hidden_states is not None:
        return "cross-attention"
    if attention_mask is not None:
        return "attention mask"
    if not state.is_on_grid(hidden_states):
        return "tokens are not the grid"
    if attn.norm_q is not None or attn.norm_k is not None:
        return "query or key norm"
    if attn.residual_connection:
        return "residual connection"
    route = state.route
    if route.break_even and hidden_states.shape[1] < route.least_tokens(
        state.workload(hidden_states)
    ):
        return "faster"
    return None


def _attend(attn: Attention, state: LayerState, hidden_states: Tensor) -> Tensor:
    weights, config = state.weights, state.config
    output, backend = attention_and_backend(
        weights.project_heads(attn, "to_q", hidden_states),
        weights.project_heads(attn, "to_k", hidden_states),
        weights.project_heads(attn, "to_v", hidden_states),
        weights.codebook,
        num_refined=state.num_refined,
        query_tile=config.query_tile,
        query_order=state.query_order,
        importance_tile=config.importance_tile,
        backend=state.backend,
    )
    if not torch.compiler.is_compiling():
        state.last_backend = backend
    output = output.transpose(1, 2).flatten(2)
    output = project(attn.to_out[0], "to_out.0", output, weights.projection_changes)
    output = attn.to_out[1](output)
    if attn.rescale_output_factor != 1:
        output = output / attn.rescale_output_factor
    return output


def install(
    unet: UNet2DConditionModel, codebooks: AVQCodebooks, backend: str, route: str
) -> list[SelfAttentionLayer]:
    """Give the layers of `codebooks` their state and their grid hook; leave their processors."""
    check_backend(backend)
    check_route(route)
    layers = codebooks.layers_of(unet)
    if any(layer.has_linfusion for layer in select_layers(unet)):
        raise ValueError("this UNet has LinFusion layers; call remove_linfusion(unet) first.")
    states = [LayerState(layer, codebooks, backend, route) for layer in layers]
    for layer, state in zip(layers, states, strict=True):
        weight = next(layer.attn.parameters())
        if weight.device.type != "meta":  # accelerate's offload keeps weights there between calls
            dtype = _dtype(layer.transformer)
            state.weights.move_to(weight.device, dtype)
            # For a UNet that is compiled before its first call: one image with guidance.
            guided_image = torch.empty(2, 1, 1, dtype=dtype, device=weight.device)
            state.route.learn(state.workload(guided_image), weight.device, measure=False)
    uninstall(unet)
    for layer, state in zip(layers, states, strict=True):
        layer.attn._avq = state
        if not hasattr(layer.transformer, "_avq_hook"):
            layer.transformer._avq_hook = layer.transformer.register_forward_pre_hook(
                _pre_forward, with_kwargs=True
            )
    return layers


def remember_processor(attn: Attention, previous: AttentionProcessor) -> None:
    """Make `previous` the processor that serves the calls AVQ does not."""
    accepted = inspect.signature(previous.__call__).parameters
    optional = ("temb", "ip_adapter_masks", "ip_hidden_states")
    attn._avq_previous = previous
    attn._avq_optional = tuple(name for name in optional if name in accepted)


def uninstall(unet: UNet2DConditionModel) -> None:
    """Remove states and hooks, and put back the processors that ours replaced.

    Two processors give way to diffusers' default: one of ours that a tool or the user set again,
    and that of an IP-Adapter unloaded since.
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
        for name in ("_avq_previous", "_avq_optional", "_avq"):
            if hasattr(module, name):
                delattr(module, name)


def _pre_forward(
    transformer: Transformer2DModel, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    """Show the layers of a transformer the grid of its tokens."""
    hidden_states = args[0] if args else kwargs["hidden_states"]
    for block in transformer.transformer_blocks:
        state = getattr(block.attn1, "_avq", None)
        if state is not None:
            state.see_grid(hidden_states, _dtype(transformer))


def _dtype(transformer: Transformer2DModel) -> torch.dtype:
    # The norm's: quantized and layerwise-cast linear layers store another dtype than they compute.
    return transformer.norm.weight.dtype
