"""UNets and ControlNets: self-attention through diffusers' attention processors.

The processor is stateless; each chosen `Attention` carries its `LayerState`. So one processor
serves all layers, survives tools that rebuild processors as `type(processor)()`, and compiles
without a guard per layer.
"""

import warnings
import weakref
from collections.abc import Sequence
from typing import Any

import torch
from diffusers import ModelMixin, Transformer2DModel
from diffusers.hooks._helpers import AttentionProcessorMetadata, AttentionProcessorRegistry
from diffusers.models.attention_processor import (
    Attention,
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
from diffusers.models.transformers.transformer_temporal import TransformerSpatioTemporalModel
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.utils.hooks import RemovableHandle

from avq_diffusers.attention.api import check_backend
from avq_diffusers.config import AVQConfig
from avq_diffusers.hosts.core import (
    ATTRIBUTE,
    AVQ_CALL,
    CHANGES,
    CONFIG_FIELDS,
    AVQSource,
    Hosted,
    Layer,
    LayerState,
    Tokens,
    Unchosen,
    Watch,
    all_or_nothing,
    check_known,
    check_route,
    default_config,
    install,
    make_states,
    own_name,
    project,
    resolved_source,
)
from avq_diffusers.hosts.models.processors import Previous, ProcessorHost

IP_ADAPTERS = (IPAdapterAttnProcessor, IPAdapterAttnProcessor2_0, IPAdapterXFormersAttnProcessor)
# Their self-attention is exact. Subclasses may do something else.
PLAIN_PROCESSORS = (
    *(AttnProcessor, AttnProcessor2_0, FusedAttnProcessor2_0, SlicedAttnProcessor),
    *(XFormersAttnProcessor, AttnProcessorNPU, XLAFlashAttnProcessor2_0),
    *IP_ADAPTERS,  # only add to the output of cross-attention
)
CUSTOM_DIFFUSION = (
    CustomDiffusionAttnProcessor,
    CustomDiffusionAttnProcessor2_0,
    CustomDiffusionXFormersAttnProcessor,
)
# They multiply scores by `attn.scale`; the others always by 1 / sqrt(head dim).
SCALING_PROCESSORS = (
    *(AttnProcessor, SlicedAttnProcessor, XFormersAttnProcessor, IPAdapterAttnProcessor),
    *(CustomDiffusionAttnProcessor, CustomDiffusionXFormersAttnProcessor),
)
SPATIAL_TRANSFORMERS = (Transformer2DModel, TransformerSpatioTemporalModel)
# Other tools replace these to act on every layer's attention.
_GET_ATTENTION_SCORES = Attention.get_attention_scores
FOR_UNETS = (
    "AVQProcessor only serves UNets, but was set on a transformer, which lost its own processors; "
    "reload the transformer and call apply_avq(pipe)."
)
UNPREPARED = (
    "an AVQProcessor prepares the first UNet that is called with it; set a new one on each UNet, "
    "and use apply_avq for a block that is called by itself."
)
REBUILT = (
    "with an IP-Adapter, this UNet's AVQProcessor runs with its defaults; if you passed it others, "
    "load_ip_adapter has dropped them: call apply_avq(pipe, ...) in its place."
)
NO_LAYERS = "AVQ runs in the self-attention of a UNet's spatial transformers, but this {} has none."
OTHER_SCORES = "get_attention_scores is replaced"


class AVQProcessor(AttnProcessor2_0):
    """Attention processor that runs AVQ in the self-attention of a UNet.

    `unet.set_attn_processor(AVQProcessor())` is enough: the next call of the UNet, compiled or not,
    or the next function of this package that gets it, applies AVQ to the layers that carry the
    processor, as `apply_avq` would, and gives all others diffusers' default processor.

    Every call that AVQ cannot serve goes to the layer's previous processor. So do calls of layers
    whose previous processor is not one of diffusers' plain ones, and all calls while another tool
    acts on attention scores.

    Args:
        source: `AVQCodebooks`, or an `AVQConfig` or its string, such as `"M64C8T1e-4"`, which is
            the default, for codewords from the keys of each call.
        backend, route: as in `apply_avq`.
        **config_fields: fields of `AVQConfig`, such as `threshold=1e-3`. The levels are 0 and 1
            unless `levels` or an `AVQConfig` names others.

    Raises:
        TypeError: `source` is something else, or an argument is unknown.
        ValueError: the codebooks belong to another model, a field is out of range, or backend or
            route is unknown.
    """

    def __init__(
        self,
        source: AVQSource | str | None = None,
        *,
        backend: str = "auto",
        route: str | int = "fastest",
        **config_fields: Any,
    ) -> None:
        super().__init__()
        check_backend(backend)
        check_route(route)
        check_known(type(self).__name__, config_fields, CONFIG_FIELDS)
        resolved_source(source, config_fields, AVQConfig())
        self.source = source
        self.config_fields = config_fields
        self.backend = backend
        self.route = route
        self.is_prepared = False
        self.previous: Previous | None = None  # shared by all layers of the UNet it prepared
        _await_call(self)

    @property
    def is_default(self) -> bool:
        """Whether it has the default configuration."""
        return self.source is None and not self.config_fields

    def source_for(self, layers: Sequence[Layer]) -> AVQSource:
        """Codebooks, or the configuration for a UNet with these layers."""
        return resolved_source(self.source, self.config_fields, default_config(layers))

    def make_states(self, layers: Sequence[Layer]) -> dict[Layer, LayerState]:
        """New states for those of a UNet's layers that the source chooses."""
        return make_states(layers, self.source_for(layers), self.backend, self.route)

    def stop_waiting(self) -> None:
        """Prepare no UNet at its next call: AVQ was applied in another way."""
        with CHANGES:
            _awaiting.discard(self)
            _stop_waiting()

    def is_prepared_for(self, attn: Attention) -> bool:
        """Whether the layer's UNet was; IP-Adapter rebuilds the processors of prepared layers."""
        kept: LayerState | Unchosen | None = getattr(attn, ATTRIBUTE, None)
        if self.is_prepared or kept is None:
            return self.is_prepared
        is_rebuilt = self.is_default and isinstance(kept, LayerState)
        return is_rebuilt or self.previous is kept.previous

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        if not self.is_prepared:
            _await_call(self)

    def __repr__(self) -> str:
        """What diffusers shows where it refuses a processor that is not its own."""
        return "AVQProcessor; call remove_avq(pipe) first to set other processors"

    def __call__(
        self,
        attn: Attention,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor | tuple[Tensor, ...] | None = None,
        attention_mask: Tensor | None = None,
        temb: Tensor | None = None,
    ) -> Tensor:
        """Attend within hidden_states (B, N, channels); the output has the same shape.

        Raises:
            TypeError: this processor was set on the attention of a transformer.
            RuntimeError: no UNet was prepared for this processor.
        """
        state: LayerState | Unchosen | None = getattr(attn, ATTRIBUTE, None)
        is_prepared = state is not None and isinstance(state.previous, Previous)
        is_plain = encoder_hidden_states is None or getattr(attn, "is_cross_attention", False)
        if not (is_prepared or (is_plain and isinstance(attn, Attention))):
            raise TypeError(FOR_UNETS)
        if not isinstance(state, LayerState):
            if not self.is_prepared_for(attn):
                raise RuntimeError(UNPREPARED)
            # Put back after AVQ was removed, or where AVQ does not run.
            call = hidden_states, encoder_hidden_states, attention_mask, temb
            return super().__call__(attn, *call)
        if state.previous.is_plain:
            reasons = (
                (encoder_hidden_states is not None, "cross-attention"),
                (attention_mask is not None, "attention mask"),
                (_has_other_scores(attn), OTHER_SCORES),
                (attn.norm_q is not None or attn.norm_k is not None, "query or key norm"),
                (attn.residual_connection, "residual connection"),
            )
            reason = state.exact_because(hidden_states.shape[1], hidden_states, reasons)
            state.count(reason or AVQ_CALL)
            if reason is None:
                return _attend(attn, state, hidden_states)
        optional = {} if temb is None else {"temb": temb}  # not every processor takes it
        return state.previous.processor(
            attn,
            hidden_states,
            encoder_hidden_states=encoder_hidden_states,
            attention_mask=attention_mask,
            **optional,
        )


# diffusers' layer-skipping guiders look processors up by exact class. Its own `register` would
# import every diffusers transformer.
AttentionProcessorRegistry._registry[AVQProcessor] = AttentionProcessorMetadata(
    skip_processor_output_fn=lambda attn, hidden_states, *args, **kwargs: hidden_states
)


def _has_other_scores(attn: Attention) -> bool:
    return (
        Attention.get_attention_scores is not _GET_ATTENTION_SCORES
        or "get_attention_scores" in attn.__dict__
    )


def _attend(attn: Attention, state: LayerState, hidden_states: Tensor) -> Tensor:
    weights, replaced = state.weights, type(state.previous.processor)
    is_fused = replaced is FusedAttnProcessor2_0
    query, key, value = weights.project_heads(attn, hidden_states, is_fused=is_fused)
    scale = attn.scale if replaced in SCALING_PROCESSORS else None
    output = state.attend(query, key, value, scale=scale)
    output = output.transpose(1, 2).flatten(2)
    output = project(attn.to_out[0], "to_out.0", output, weights.projection_changes)
    output = attn.to_out[1](output)
    if attn.rescale_output_factor != 1:
        output = output / attn.rescale_output_factor
    return output


class _SpatialWatch(Watch):
    """The hooks of a `Transformer2DModel`; its input is the grid."""

    def begin(self, caller: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        hidden_states = args[0] if args else kwargs["hidden_states"]
        # The norm's dtype: quantized and layerwise-cast linear layers store a dtype they do not
        # compute in.
        dtype = caller.norm.weight.dtype
        self.enter(caller, Tokens(hidden_states, dtype, hidden_states.shape[-2:]))


class UNetHost(ProcessorHost):
    """Self-attention of the spatial transformers of a UNet or ControlNet."""

    kind = "UNet"
    watch = _SpatialWatch
    takes_codebooks = True
    usual = AttnProcessor2_0

    def find(self, module: nn.Module) -> ModelMixin | None:
        owners = {
            name: found
            for name, found in module.named_modules()
            if isinstance(found, ModelMixin) and "down_blocks" in found._modules
        }
        if len(owners) > 1:
            raise TypeError(
                f"expected one UNet, but {type(module).__name__} holds {', '.join(owners)}; pass "
                f"one of them."
            )
        return next(iter(owners.values()), None)

    def layers(self, model: nn.Module) -> list[Layer]:
        """Temporal layers (motion modules) are left out."""
        layers = []
        for path, transformer in model.named_modules():
            if not isinstance(transformer, SPATIAL_TRANSFORMERS):
                continue
            for wrapped_name, attn in transformer.named_modules(prefix=path):
                name = own_name(wrapped_name)
                if not isinstance(attn, Attention) or not name.endswith(".attn1"):
                    continue
                if ".temporal_transformer_blocks." in name:
                    continue
                if attn.is_cross_attention:
                    continue
                layers.append(
                    Layer(
                        name=name,
                        level=level_of(model, name),
                        num_heads=attn.heads,
                        head_dim=attn.inner_dim // attn.heads,
                        attn=attn,
                        caller=transformer,
                        anchor=transformer.norm,
                        checkpointed=transformer,
                    )
                )
        return layers

    def refuse(self, model: nn.Module) -> None:
        if not self.layers(model):
            raise ValueError(NO_LAYERS.format(type(model).__name__))
        if any(getattr(layer.attn.processor, "replaced", ()) for layer in self.layers(model)):
            raise ValueError("this UNet has LinFusion layers; call remove_linfusion(unet) first.")

    def prepare(self, model: nn.Module) -> None:
        """Apply the AVQ of processors that `set_attn_processor` has set, unless it was."""
        with CHANGES:
            ours = _attentions_of(model)
            found = {x.processor for x in ours if not x.processor.is_prepared_for(x)}
            _awaiting.difference_update(attn.processor for attn in ours)
            _stop_waiting()
            if not found:
                return
            processor, *others = found
            if any(vars(other) != vars(processor) for other in others):
                raise ValueError(
                    f"a UNet takes one AVQProcessor, but its layers carry {len(found)} that "
                    f"differ; pass overrides=... to one to vary sizes by layer."
                )
            layers = [layer for layer in self.layers(model) if layer.attn in ours]
            if not layers:
                raise TypeError(
                    f"AVQProcessor serves self-attention in the spatial transformers of a UNet, "
                    f"but {type(model).__name__} has none; reload the model and call apply_avq."
                )
            self.refuse(model)
            if processor.is_default and _has_ip_adapter(model):
                warnings.warn(REBUILT, stacklevel=2)
            hosted = Hosted(self, model, model, "")
            with all_or_nothing([hosted]):
                states = processor.make_states(layers)
                self.tidy(model)
                install({hosted: states})
                # Others may keep these processors and put them back, into all layers.
                previous = Previous(self.usual(), True)
                for attn in _attentions(model):
                    vars(attn).setdefault(ATTRIBUTE, Unchosen()).previous = previous
                for processor in found:
                    processor.previous = previous

    def is_plain(self, processor: Any) -> bool:
        if type(processor) in CUSTOM_DIFFUSION:
            return not (processor.train_kv or processor.train_q_out)
        return type(processor) in PLAIN_PROCESSORS

    def interception(self, state: LayerState, attn: Attention) -> str | None:
        return state.interception() or (OTHER_SCORES if _has_other_scores(attn) else None)


UNET = UNetHost()


def _attentions(model: nn.Module) -> list[Attention]:
    return [x for x in model.modules() if isinstance(x, Attention)]


def _attentions_of(model: nn.Module) -> list[Attention]:
    """The attention modules that carry a processor of ours."""
    return [attn for attn in _attentions(model) if isinstance(attn.processor, AVQProcessor)]


def _has_ip_adapter(model: nn.Module) -> bool:
    return any(isinstance(getattr(x, "processor", None), IP_ADAPTERS) for x in model.modules())


# Processors of which no UNet has been prepared. While there are some, a hook on all modules waits
# for the first call of a UNet: `set_attn_processor` tells a processor nothing of its model, and
# AVQ must be in place before the call begins.
_awaiting: weakref.WeakSet[AVQProcessor] = weakref.WeakSet()
_hook: RemovableHandle | None = None


def _await_call(processor: AVQProcessor) -> None:
    global _hook
    with CHANGES:
        _awaiting.add(processor)
        if _hook is None:
            _hook = register_module_forward_pre_hook(_before_any_module)


def _stop_waiting() -> None:
    global _hook
    with CHANGES:
        if _hook is not None and not _awaiting:
            _hook.remove()
            _hook = None


_prepare_outside_graphs = torch.compiler.disable(UNET.prepare)


def _before_any_module(module: nn.Module, args: Any) -> None:
    if not torch.compiler.is_compiling() and not _awaiting:
        _stop_waiting()  # all were forgotten
        return
    for model in (module, *module.children()):  # or a wrapper, such as that of torch.compile
        if not (isinstance(model, ModelMixin) and "down_blocks" in model._modules):
            continue
        # Preparing breaks a graph: UNets that need none compile into one.
        prepared = [x.processor.is_prepared_for(x) for x in _attentions_of(model)]
        if not torch.compiler.is_compiling() or not all(prepared):
            _prepare_outside_graphs(model)


UNetHost.ours = AVQProcessor()
UNetHost.ours.is_prepared = True
UNetHost.ours.stop_waiting()


def level_of(unet: Any, name: str) -> int:
    """The level of the layer at this path, 0 being the highest resolution."""
    part, index = name.split(".")[:2]
    if part == "down_blocks":
        return int(index)
    if part == "up_blocks":
        return len(unet.up_blocks) - 1 - int(index)
    if part == "mid_block":
        return len(unet.down_blocks) - 1
    raise TypeError(
        f"expected self-attention in down_blocks, mid_block and up_blocks, but "
        f"{type(unet).__name__} has {name}."
    )
