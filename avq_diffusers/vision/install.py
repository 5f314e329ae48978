"""Put AVQ on the layers of vision models, and take it off.

A layer with AVQ has a copy of its config that names AVQ's attention function. So it runs AVQ
whatever shares the config: another tower, or another model.
"""

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_layers import GradientCheckpointingLayer

from avq_diffusers.plugin.checkpointing import forget_calls, keep_calls
from avq_diffusers.plugin.layer_state import LayerState
from avq_diffusers.vision.attention import NAME, register
from avq_diffusers.vision.layers import VisionLayer

ON_LAYERS = ("_avq", "_avq_config")
HOOK = "_avq_grid_hook"


def install(states: Mapping[VisionLayer, LayerState]) -> None:
    """Run layers without AVQ with these states."""
    register()
    for layer, state in states.items():
        _settle(layer, state)
        attn, projection = layer.attn, layer.projection
        attn._avq, attn._avq_config = state, attn.config
        attn.config = copy.copy(attn.config)
        attn.config._attn_implementation_internal = NAME
        if not hasattr(projection, HOOK):
            after = [layer for layer in states if layer.projection is projection]
            projection._avq_grid_hook = projection.register_forward_hook(_Grid(after))


def uninstall(model: nn.Module) -> None:
    """Put the same configs back, and leave nothing of AVQ."""
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
