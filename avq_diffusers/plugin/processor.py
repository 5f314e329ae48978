"""`AVQProcessor`: the attention processor that runs AVQ in the chosen layers.

The processor itself holds nothing that a call needs. Each chosen `Attention` carries its
`LayerState` as a plain attribute. So one processor serves all layers, survives tools that rebuild
processors as `type(processor)()`, and compiles without a guard per layer.
"""

import inspect
import warnings
from collections.abc import Sequence
from typing import Any

import torch
from diffusers import Transformer2DModel, UNet2DConditionModel
from diffusers.hooks._helpers import AttentionProcessorMetadata, AttentionProcessorRegistry
from diffusers.models.attention_dispatch import AttentionBackendName, _AttentionBackendRegistry
from diffusers.models.attention_processor import (
    Attention,
    AttentionProcessor,
    AttnProcessor,
    AttnProcessor2_0,
    AttnProcessorNPU,
    CustomDiffusionAttnProcessor,
    CustomDiffusionAttnProcessor2_0,
    CustomDiffusionXFormersAttnProcessor,
    FusedAttnProcessor2_0,
    IPAdapterAttnProcessor,
    IPAdapterAttnProcessor2_0,
    IPAdapterXFormersAttnProcessor,
    SlicedAttnProcessor,
    XFormersAttnProcessor,
    XLAFlashAttnProcessor2_0,
)
from torch import Tensor

from avq_diffusers.attention.api import check_backend
from avq_diffusers.config import AVQConfig
from avq_diffusers.plugin.checkpointing import forget_calls, keep_calls
from avq_diffusers.plugin.interception import score_interception
from avq_diffusers.plugin.layer_state import (
    AVQ_CALL,
    AVQSource,
    LayerState,
    check_source,
    default_source,
    refuse_without_codebooks,
)
from avq_diffusers.plugin.layers import SelfAttentionLayer, select_layers
from avq_diffusers.plugin.projection import project
from avq_diffusers.plugin.routing import check_route

IP_ADAPTERS = (IPAdapterAttnProcessor, IPAdapterAttnProcessor2_0, IPAdapterXFormersAttnProcessor)
# Their self-attention is exact attention. A class derived from one may do something else.
PLAIN_PROCESSORS = (
    *(AttnProcessor, AttnProcessor2_0, FusedAttnProcessor2_0, SlicedAttnProcessor),
    *(XFormersAttnProcessor, AttnProcessorNPU, XLAFlashAttnProcessor2_0),
    *IP_ADAPTERS,  # they add to the output of cross-attention only
)
CUSTOM_DIFFUSION = (
    CustomDiffusionAttnProcessor,
    CustomDiffusionAttnProcessor2_0,
    CustomDiffusionXFormersAttnProcessor,
)
# What other tools replace to act on the attention of every layer.
_GET_ATTENTION_SCORES = Attention.get_attention_scores


class AVQProcessor(AttnProcessor2_0):
    """Attention processor that runs AVQ in the chosen layers.

    Every other call goes to the layer's previous processor, or to `AttnProcessor2_0` in a layer
    that was never prepared. So does every call of a layer whose previous processor is none of
    diffusers' plain ones, and every call while another tool acts on attention scores.

    Args:
        source: `AVQCodebooks`, or an `AVQConfig` for codewords from the keys of each call, for
            `AVQStableDiffusionPipeline.set_attn_processor` or for `unet`. None is the default of
            `apply_avq`.
        unet: prepare this UNet at once. `unet.set_attn_processor` then takes this processor for
            all layers. After that, IP-Adapter's scale setter no longer finds its processors;
            `apply_avq` leaves them in place.
        backend, route: as `apply_avq`.

    Raises:
        TypeError: `source` is something else.
        ValueError: the codebooks belong to another model, or backend or route are unknown.
    """

    def __init__(
        self,
        source: AVQSource | None = None,
        unet: UNet2DConditionModel | None = None,
        *,
        backend: str = "auto",
        route: str | int = "fastest",
    ) -> None:
        super().__init__()
        check_backend(backend)
        check_route(route)
        self.source = source
        self.backend = backend
        self.route = route
        check_source(source)
        if unet is not None:
            install(unet, default_source(unet) if source is None else source, backend, route)
            layers = [attn for attn in unet.modules() if isinstance(attn, Attention)]
            _warn_of_lost_arguments(layers)
            for attn in layers:
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
            RuntimeError: this processor has codewords, but was set on a UNet that is not prepared.
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
        if previous is None and self.source is not None:
            raise RuntimeError(
                "this UNet is not prepared for its AVQProcessor; use apply_avq(pipe) or "
                "AVQProcessor(unet=pipe.unet)."
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


# diffusers' guiders that skip layers look processors up by their exact class. Its `register` would
# import every transformer of diffusers.
AttentionProcessorRegistry._registry[AVQProcessor] = AttentionProcessorMetadata(
    skip_processor_output_fn=lambda attn, hidden_states, *args, **kwargs: hidden_states
)


def _exact_because(
    state: LayerState,
    attn: Attention,
    hidden_states: Tensor,
    encoder_hidden_states: Tensor | tuple[Tensor, ...] | None,
    attention_mask: Tensor | None,
) -> str | None:
    """Why this call runs exact attention; None if it runs AVQ."""
    previous: str | None = getattr(attn, "_avq_custom", None)
    if previous is not None:
        return previous
    switched_off = state.present_call().exact_because
    if switched_off is not None:
        return switched_off
    if encoder_hidden_states is not None:
        return "cross-attention"
    if attention_mask is not None:
        return "attention mask"
    interception = _interception(attn)
    if interception is not None:
        return interception
    if not state.is_on_grid(hidden_states):
        return "tokens are not the grid"
    if attn.norm_q is not None or attn.norm_k is not None:
        return "query or key norm"
    if attn.residual_connection:
        return "residual connection"
    return state.routed_because(hidden_states.shape[1], hidden_states)


def _interception(attn: Attention) -> str | None:
    """What acts on the scores of exact attention, and would miss AVQ; None if nothing does."""
    interception = score_interception()
    if interception is not None:
        return interception
    if (
        Attention.get_attention_scores is not _GET_ATTENTION_SCORES
        or "get_attention_scores" in attn.__dict__
    ):
        return "get_attention_scores is replaced"
    backend = _AttentionBackendRegistry._active_backend
    if backend != AttentionBackendName.NATIVE:
        return f"attention backend {backend.value}"
    return None


def _attend(attn: Attention, state: LayerState, hidden_states: Tensor) -> Tensor:
    weights = state.weights
    output = state.attend(
        weights.project_heads(attn, "to_q", hidden_states),
        weights.project_heads(attn, "to_k", hidden_states),
        weights.project_heads(attn, "to_v", hidden_states),
    )
    output = output.transpose(1, 2).flatten(2)
    output = project(attn.to_out[0], "to_out.0", output, weights.projection_changes)
    output = attn.to_out[1](output)
    if attn.rescale_output_factor != 1:
        output = output / attn.rescale_output_factor
    return output


def install(
    unet: UNet2DConditionModel, source: AVQSource, backend: str, route: str | int
) -> list[SelfAttentionLayer]:
    """Give the layers of `source` their state and their grid hook; leave their processors."""
    check_backend(backend)
    check_route(route)
    refuse_without_codebooks(source)
    if isinstance(source, AVQConfig):
        layers = select_layers(unet, source.levels, source.exact, source.overrides)
    else:
        layers = source.layers_of(unet)
    if any(layer.has_linfusion for layer in select_layers(unet)):
        raise ValueError("this UNet has LinFusion layers; call remove_linfusion(unet) first.")
    states = [LayerState(layer, source, backend, route) for layer in layers]
    for layer, state in zip(layers, states, strict=True):
        weight = layer.transformer.norm.weight
        if weight.device.type != "meta":  # accelerate's offload keeps weights there between calls
            dtype = _dtype(layer.transformer)
            state.weights.move_to(weight.device, dtype)
            # For a UNet that is compiled before its first call: one image with guidance.
            guided_image = torch.empty(2, 1, 1, dtype=dtype, device=weight.device)
            state.route.learn(state.workload(guided_image), weight.device, measure=False)
    uninstall(unet)
    pre_forward = _PreForward(layers)
    for layer, state in zip(layers, states, strict=True):
        layer.attn._avq = state
        if not hasattr(layer.transformer, "_avq_hook"):
            layer.transformer._avq_hook = layer.transformer.register_forward_pre_hook(
                pre_forward, with_kwargs=True
            )
    pre_forward.warn_of_custom_processors(stacklevel=3)  # of `apply_avq` or the processor
    return layers


def remember_processor(attn: Attention, previous: AttentionProcessor) -> None:
    """Make `previous` the processor that serves the calls AVQ does not."""
    accepted = inspect.signature(previous.__call__).parameters
    optional = ("temb", "ip_adapter_masks", "ip_hidden_states")
    attn._avq_previous = previous
    attn._avq_optional = tuple(name for name in optional if name in accepted)
    attn._avq_custom = None if _is_plain(previous) else type(previous).__name__


def custom_processor(attn: Attention) -> str | None:
    """The class that serves a layer in place of AVQ, because its attention is not plain."""
    if isinstance(attn.processor, AVQProcessor):
        return getattr(attn, "_avq_custom", None)
    return None if _is_plain(attn.processor) else type(attn.processor).__name__


def _is_plain(processor: AttentionProcessor) -> bool:
    if type(processor) in CUSTOM_DIFFUSION:
        return not (processor.train_kv or processor.train_q_out)
    return type(processor) in PLAIN_PROCESSORS


def _warn_of_lost_arguments(layers: Sequence[Attention]) -> None:
    # diffusers passes a processor the arguments that it names.
    known = {*inspect.signature(AVQProcessor.__call__).parameters, "args", "kwargs"}
    lost = {
        name
        for attn in layers
        for name in inspect.signature(attn.processor.__call__).parameters
        if not _is_plain(attn.processor) and name not in known
    }
    if lost:
        warnings.warn(
            f"the arguments {', '.join(sorted(lost))} of cross_attention_kwargs no longer reach "
            f"the processors that take them; apply_avq leaves those in place.",
            stacklevel=3,
        )


def uninstall(unet: UNet2DConditionModel) -> None:
    """Remove states and hooks, and put back the processors that ours replaced.

    Two processors give way to diffusers' default: one of ours that a tool or the user set again,
    and that of an IP-Adapter unloaded since.
    """
    has_adapter = getattr(unet, "encoder_hid_proj", None) is not None
    for module in unet.modules():
        forget_calls(module)
        own = module.__dict__.keys() | module._modules.keys()  # wrappers pass on what is inside
        for name in ("_avq_hook", "_avq_scheduler"):  # of the grid; of `set_num_refined`
            if name in own:
                getattr(module, name).remove()
                delattr(module, name)
        previous = getattr(module, "_avq_previous", None)
        if isinstance(module, Attention) and isinstance(module.processor, AVQProcessor):
            if previous is None or (isinstance(previous, IP_ADAPTERS) and not has_adapter):
                previous = AttnProcessor2_0()
            module.set_processor(previous)
        for name in ("_avq_previous", "_avq_optional", "_avq_custom", "_avq"):
            if name in own:
                delattr(module, name)


class _PreForward:
    """Begins the calls of each transformer's layers, and watches their processors.

    Args:
        layers: all those that AVQ is applied to.
    """

    def __init__(self, layers: Sequence[SelfAttentionLayer]) -> None:
        self.layers = layers
        self.said: set[str] = set()

    def __call__(
        self, transformer: Transformer2DModel, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        hidden_states = args[0] if args else kwargs["hidden_states"]
        keep_calls(transformer)
        for block in transformer.transformer_blocks:
            state = getattr(block.attn1, "_avq", None)
            if state is None:
                continue
            state.refuse_replica(transformer)
            grid, dtype = hidden_states.shape[-2:], _dtype(transformer)
            state.enter(hidden_states, grid, dtype, _interception(block.attn1))
            processor = block.attn1.processor
            if not isinstance(processor, AVQProcessor) and not torch.compiler.is_compiling():
                state.count(type(processor).__name__)
                self.warn_of_custom_processors()

    def warn_of_custom_processors(self, stacklevel: int = 2) -> None:
        """Name the layers that keep a custom processor, once."""
        found = {
            layer.name: kind
            for layer in self.layers
            if layer.name not in self.said and (kind := custom_processor(layer.attn))
        }
        if found:
            self.said.update(found)
            warnings.warn(
                f"AVQ does not run in the layers that keep their processor "
                f"{', '.join(sorted(set(found.values())))}: {', '.join(found)}.",
                stacklevel=stacklevel + 1,
            )


def _dtype(transformer: Transformer2DModel) -> torch.dtype:
    # The norm's: quantized and layerwise-cast linear layers store another dtype than they compute.
    return transformer.norm.weight.dtype
