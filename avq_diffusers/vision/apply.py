"""Switch AVQ on and off in vision models of transformers, and report what their layers run.

A layer with AVQ has a copy of its config that names AVQ's attention function. So it runs AVQ
whatever shares the config: another tower, or another model.
"""

import copy
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from transformers.modeling_layers import GradientCheckpointingLayer

from avq_diffusers.attention.api import check_backend
from avq_diffusers.config import AVQConfig
from avq_diffusers.plugin.checkpointing import forget_calls, keep_calls
from avq_diffusers.plugin.layer_state import (
    AVQSource,
    LayerState,
    check_source,
    disabled,
    refuse_without_codebooks,
)
from avq_diffusers.plugin.per_thread import PerThread
from avq_diffusers.plugin.refinement import planned_sizes
from avq_diffusers.plugin.report import Summary, layer_report, runs_by_state
from avq_diffusers.plugin.routing import check_route
from avq_diffusers.vision.attention import NAME, register
from avq_diffusers.vision.layers import VisionLayer, select_layers

Model = TypeVar("Model", bound=nn.Module)
ON_LAYERS = ("_avq", "_avq_config")
HOOK = "_avq_grid_hook"


def apply_avq(
    model: Model,
    source: AVQSource | None = None,
    *,
    backend: str = "auto",
    route: str | int = "fastest",
) -> Model:
    """Run the self-attention of a vision model with AVQ.

    Without codebooks, the codewords are keys of each call: nothing is calibrated or stored. Patches
    are tokens of the grid that the model's patch projection makes, at any size of images. CLS,
    distillation and register tokens are met as themselves, and meet all tokens.

    An earlier AVQ is removed first. The model's own attention, such as SDPA, serves the calls that
    AVQ does not: those with masks, dropout or attention weights asked for, and of tokens that are
    not the grid. It is the one that `model.set_attn_implementation` sets, before or later.

    Models that share a config do not share AVQ. Text towers stay as they are.

    Compiled ViT and DeiT of transformers 5.17 give their attention a mask, and so stay exact.

    Args:
        model: ViT, DeiT, DINOv2, DINOv3, DPT, CLIP, SigLIP or others of their kind, with any head;
            or a module that holds one, such as a compiled model.
        source: an `AVQConfig`, whose `levels` have no meaning here, or `AVQCodebooks` of
            `gather_codebooks`. None is M64P16C8 in all layers.
        backend: as for `avq_attention`.
        route: `"fastest"` runs exact attention where that is faster on this GPU, `"always"` runs
            AVQ, a number runs AVQ from that many patches on.

    Returns:
        `model`.

    Raises:
        TypeError: `model` is not a module, or `source` is something else.
        ValueError: the model has no layer for AVQ, codebooks belong to another model, a
            configuration needs codebooks, or backend or route are unknown.
    """
    check_source(source)
    source = AVQConfig() if source is None else source
    check_backend(backend)
    check_route(route)
    refuse_without_codebooks(source, "gather_codebooks(model, config, codebooks)")
    config = source if isinstance(source, AVQConfig) else source.avq_config
    layers = select_layers(model, config.exact, config.overrides)
    if not isinstance(source, AVQConfig):
        source.check_layers(layers)
    states = {layer: LayerState(layer, source, backend, route) for layer in layers}
    register()
    remove_avq(model)
    for layer, state in states.items():
        _settle(layer, state)
        attn, projection = layer.attn, layer.projection
        attn._avq, attn._avq_config = state, attn.config
        attn.config = copy.copy(attn.config)
        attn.config._attn_implementation_internal = NAME
        if not hasattr(projection, "_avq_grid_hook"):
            after = [layer for layer in layers if layer.projection is projection]
            projection._avq_grid_hook = projection.register_forward_hook(_Grid(after))
    return model


def remove_avq(model: Model) -> Model:
    """Undo `apply_avq`: put the same configs back, and leave nothing of AVQ.

    Raises:
        TypeError: `model` is not a module.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"expected a vision model, but got {type(model).__name__}.")
    for module in model.modules():
        own = module.__dict__
        if "_avq_config" in own:
            module.config = own["_avq_config"]
        if HOOK in own:
            own[HOOK].remove()
        if isinstance(module, GradientCheckpointingLayer):
            forget_calls(module)
        for name in (*ON_LAYERS, HOOK):
            if name in own:
                delattr(module, name)
    return model


@contextmanager
def avq_disabled(model: nn.Module) -> Iterator[None]:
    """Run the model's own attention inside the `with` block, in all threads that use the model.

    Blocks may be nested, and may overlap in threads: AVQ is back when the last one has ended.

    Raises:
        TypeError, ValueError: `model` is no vision model.
    """
    states = [layer.avq_state for layer in select_layers(model)]
    with disabled(state for state in states if state is not None):
        yield


def set_num_refined(
    model: Model,
    num_refined: int | str | Mapping[str, int | str],
    *,
    layer: str | None = None,
) -> Model:
    """Change how many parents each query tile refines: quality against speed, without reloading.

    Args:
        model: with AVQ.
        num_refined: between 0 and the number of parents of every layer concerned; `"exact"` is
            exact attention. Or a plan: numbers by the name of a layer, or of a module for all its
            layers. Longer names win over shorter ones. Layers without an entry stay as they are.
        layer: change only the layer of this name, or the layers in this module.

    Returns:
        `model`.

    Raises:
        TypeError: `model` is not a module, or a number of parents is not an int.
        ValueError: no AVQ layer matches, a plan's entry names none of the matching layers, a layer
            cannot refine that many parents, or the numbers change with a timestep.
    """
    states = {x: x.avq_state for x in select_layers(model) if x.avq_state is not None}
    if not states:
        raise ValueError("this model has no AVQ layer; call apply_avq(model) first.")
    schedules = planned_sizes(states, num_refined, level=None, layer=layer)
    if any(len(schedule) > 1 for schedule in schedules.values()):
        raise ValueError("vision models have no timesteps, but num_refined changes with them.")
    for state, schedule in schedules.items():
        (sizes,) = schedule.values()
        state.sizes = PerThread(sizes)
    return model


def summary(model: nn.Module) -> Summary:
    """Report whether each self-attention layer runs AVQ or exact attention, and why.

    Layers that AVQ can never serve, such as those of a text tower, are not listed.

    Raises:
        TypeError: `model` is not a module.
        ValueError: it has no layer for AVQ.
    """
    rows = []
    for layer in select_layers(model):
        state = layer.avq_state
        if state is None:
            runs = f"exact: {layer.attn.config._attn_implementation}"
        else:
            runs = runs_by_state(state)
        rows.append(layer_report(layer.name, layer, state, runs, {}))
    return Summary(tuple(rows))


def _settle(layer: VisionLayer, state: LayerState) -> None:
    """Prepare for a model that is compiled before its first call: one image, where it lies."""
    weight = layer.projection.weight
    if weight.device.type != "meta":  # accelerate's offload keeps weights there between calls
        state.weights.move_to(weight.device, weight.dtype)
        image = torch.empty(1, 1, 1, dtype=weight.dtype, device=weight.device)
        state.route.learn(state.workload(image), weight.device, measure=False)


class _Grid:
    """The hook of a patch projection: begins the calls of the layers behind it."""

    def __init__(self, layers: list[VisionLayer]) -> None:
        self.layers = layers

    def __setstate__(self, content: dict[str, Any]) -> None:
        register()  # a model may arrive in a process that has not applied AVQ
        self.__dict__.update(content)

    def __call__(self, projection: nn.Module, inputs: tuple[Any, ...], patches: Tensor) -> None:
        for layer in self.layers:
            layer.avq_state.refuse_replica(projection)
            layer.avq_state.enter(patches, patches.shape[-2:], patches.dtype, None)
            if layer.block is not None:
                keep_calls(layer.block, layer.attn)
