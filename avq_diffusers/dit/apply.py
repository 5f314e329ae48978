"""Put AVQ on transformers, change how much it refines, and take it off."""

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeAlias

import torch
from diffusers import DiffusionPipeline, ModelMixin
from diffusers.models.attention_processor import JointAttnProcessor2_0
from torch import nn

from avq_diffusers.attention.api import check_backend
from avq_diffusers.config import AVQConfig
from avq_diffusers.dit.dispatch import (
    AVQ_BACKEND,
    DispatchedState,
    forget_layer,
    register_backend,
    watch,
)
from avq_diffusers.dit.grids import Family
from avq_diffusers.dit.joint import AVQJointProcessor
from avq_diffusers.dit.layers import (
    TransformerLayer,
    family_of_model,
    layers_of_config,
    parameters_of,
    transformer_layers,
    transformers_of,
)
from avq_diffusers.plugin.checkpointing import forget_calls, keep_calls
from avq_diffusers.plugin.error_profile import ErrorProfile, set_constant_sizes
from avq_diffusers.plugin.interception import score_interception
from avq_diffusers.plugin.layer_state import LayerState, refuse_without_codebooks
from avq_diffusers.plugin.refinement import planned_sizes
from avq_diffusers.plugin.routing import check_route

# By transformer and layer.
States: TypeAlias = dict[ModelMixin, dict[TransformerLayer, LayerState]]


def apply_to_transformers(
    pipe: DiffusionPipeline | nn.Module,
    source: object,
    backend: str,
    route: str | int,
    tolerance: float | None = None,
) -> None:
    """Run the layers of a configuration with AVQ; None is the default one, in all blocks.

    Or the sizes of an `ErrorProfile` that are within a tolerance.

    Raises:
        TypeError: AVQ does not know the transformer, or `source` is something else.
        ValueError: configuration or profile do not fit the transformer, backend or route are
            unknown, or the transformer runs in context parallel.
    """
    config = source.config if isinstance(source, ErrorProfile) else source
    if not isinstance(config, AVQConfig | None):
        raise TypeError(
            f"a transformer takes its codewords from the keys of each call: expected an AVQConfig "
            f"or nothing, but got {type(config).__name__}."
        )
    check_backend(backend)
    check_route(route)
    states = make_states(pipe, AVQConfig() if config is None else config, backend, route)
    if isinstance(source, ErrorProfile):
        set_constant_sizes(by_full_name(pipe, states), source, tolerance)
    for model in states:
        uninstall(model)
    for model, of_model in states.items():
        install(model, of_model).warn_of_others(stacklevel=3)  # of `apply_avq`


def make_states(
    pipe: DiffusionPipeline | nn.Module, config: AVQConfig, backend: str, route: str | int
) -> States:
    """New states for the layers of a configuration.

    Raises:
        TypeError: AVQ does not know the transformer.
        ValueError: the configuration does not fit the transformer, or it runs in context parallel.
    """
    refuse_without_codebooks(config)
    states: States = {}
    for model in transformers_of(pipe).values():
        layers = layers_of_config(model, config)
        parallel = getattr(model, "_parallel_config", None)
        if getattr(parallel, "context_parallel_config", None) is not None:
            raise ValueError(
                "AVQ does not run in context parallel, whose devices hold parts of an image only."
            )
        text_first = family_of_model(model).text_first
        states[model] = {
            layer: LayerState(layer, config, backend, route)
            if layer.is_joint
            else DispatchedState(layer, config, backend, route, text_first=text_first)
            for layer in layers
        }
    return states


def present_states(pipe: DiffusionPipeline | nn.Module) -> States:
    """The states of the layers that AVQ was applied to."""
    return {
        model: {x: x.avq_state for x in transformer_layers(model) if x.avq_state}
        for model in transformers_of(pipe).values()
    }


def by_full_name(
    pipe: DiffusionPipeline | nn.Module, states: States
) -> dict[TransformerLayer, LayerState]:
    """States of all transformers, their layers named as in `summary`."""
    return {
        replace(layer, name=prefix + layer.name): state
        for prefix, model in transformers_of(pipe).items()
        for layer, state in states[model].items()
    }


def install(model: ModelMixin, states: Mapping[TransformerLayer, LayerState]) -> "_PreForward":
    """Run layers of a transformer without AVQ with these states."""
    family = family_of_model(model)
    joint = AVQJointProcessor()
    for layer, state in states.items():
        processor = layer.attn.processor
        layer.attn._avq = state
        if not isinstance(state, DispatchedState):
            if type(processor) is JointAttnProcessor2_0:
                layer.attn._avq_previous = processor
                layer.attn.set_processor(joint)
        else:
            previous = processor._attention_backend
            state.previous_backend = None if previous is AVQ_BACKEND else previous
            layer.attn._avq_previous = processor
    if model.device.type != "meta":  # accelerate's offload keeps weights there between calls
        # For a transformer that is compiled before its first call: one image with guidance.
        guided_image = torch.empty(2, 1, 1, dtype=model.dtype, device=model.device)
        for state in states.values():
            state.route.learn(state.workload(guided_image), model.device, measure=False)
    for layer in states:
        if not layer.is_joint:
            layer.attn.processor._attention_backend = AVQ_BACKEND
            register_backend()
    watch(model)
    pre_forward = _PreForward(model, [*states], family)
    vars(model)["_avq_hooks"] = (
        model.register_forward_pre_hook(pre_forward, with_kwargs=True),
        model.register_forward_hook(forget_layer, always_call=True),
    )
    return pre_forward


def remove_from_transformers(pipe: DiffusionPipeline | nn.Module) -> None:
    """Undo `apply_to_transformers`."""
    for model in transformers_of(pipe).values():
        uninstall(model)


def transformer_states(pipe: DiffusionPipeline | nn.Module) -> dict[TransformerLayer, LayerState]:
    """The layers that AVQ was applied to."""
    return {
        layer: state for states in present_states(pipe).values() for layer, state in states.items()
    }


def set_transformer_refinement(
    pipe: DiffusionPipeline | nn.Module, num_refined: Any, level: int | None, layer: str | None
) -> None:
    """`avq_diffusers.set_num_refined` of transformers.

    Raises:
        TypeError, ValueError: as there.
    """
    states = transformer_states(pipe)
    if not states:
        raise ValueError("this transformer has no AVQ layer; call apply_avq(pipe) first.")
    plan = planned_sizes(states, num_refined, level=level, layer=layer)
    if any(len(schedule) > 1 for schedule in plan.values()):
        raise ValueError("a transformer takes numbers of parents, no schedules by timestep.")
    for state, schedule in plan.items():
        (sizes,) = schedule.values()
        state.set_sizes(sizes)


def uninstall(model: ModelMixin) -> None:
    """Put the same processors and backends back, and leave nothing of AVQ."""
    for module in model.modules():
        own = vars(module)
        forget_calls(module)
        for hook in own.get("_avq_hooks", ()):
            hook.remove()
        state = own.get("_avq")
        previous = own.get("_avq_previous")
        if isinstance(state, DispatchedState):
            if previous._attention_backend is AVQ_BACKEND:
                _restore_backend(previous, state)
        elif isinstance(getattr(module, "processor", None), AVQJointProcessor):
            module.set_processor(previous or JointAttnProcessor2_0())
        for name in ("_avq", "_avq_previous", "_avq_hooks"):
            if name in own:
                delattr(module, name)


def _restore_backend(processor: Any, state: DispatchedState) -> None:
    if state.previous_backend is None:
        del processor._attention_backend
    else:
        processor._attention_backend = state.previous_backend


def other_attention(layer: TransformerLayer) -> str | None:
    """What runs a layer in place of AVQ, because a processor or a backend was set over it."""
    processor = layer.attn.processor
    if layer.is_joint:
        return None if isinstance(processor, AVQJointProcessor) else type(processor).__name__
    backend = getattr(processor, "_attention_backend", None)
    if backend is AVQ_BACKEND:
        return None
    return type(processor).__name__ if backend is None else f"attention backend {backend.value}"


class _PreForward:
    """Begins the calls of a transformer's layers, and watches their processors.

    It stays out of compiled code, which cannot read positions from the device.

    Args:
        model: the transformer.
        layers: those that AVQ is applied to.
        family: of the transformer.
    """

    def __init__(
        self, model: ModelMixin, layers: Sequence[TransformerLayer], family: Family
    ) -> None:
        self.layers = layers
        self.family = family
        self.parameters = parameters_of(model)
        self.said: set[str] = set()

    @torch.compiler.disable
    def __call__(self, model: ModelMixin, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        arguments = {**dict(zip(self.parameters, args, strict=False)), **kwargs}
        found = self.family.read(model.config, arguments)
        hidden_states = self.family.hidden_states(arguments)
        keep_calls(model)
        reason = score_interception()
        grid = None if isinstance(found, str) else found
        if isinstance(found, str):
            reason = reason or found
        for layer in self.layers:
            state: LayerState = layer.attn._avq
            state.enter(hidden_states, grid, hidden_states.dtype, reason)
            if other := other_attention(layer):
                state.count(other)
                self.warn_of_others()

    def warn_of_others(self, stacklevel: int = 2) -> None:
        """Name the layers that run something else, once."""
        found = {
            layer.name: other
            for layer in self.layers
            if layer.name not in self.said and (other := other_attention(layer))
        }
        if found:
            self.said.update(found)
            warnings.warn(
                f"AVQ does not run in the layers that keep {', '.join(sorted({*found.values()}))}: "
                f"{', '.join(found)}.",
                stacklevel=stacklevel + 1,
            )
