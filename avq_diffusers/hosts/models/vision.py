"""Vision models of transformers: self-attention through transformers' `AttentionInterface`.

A layer with AVQ has its own copy of the config that names AVQ's attention function, so other towers
or models that share the config are unaffected. Tokens before the grid (CLS, distillation,
registers) are sinks: all queries attend to their keys exactly, and their own queries attend to all
keys exactly. The patches run AVQ.

Shapes: B batch, H heads, N tokens of which the first T are sinks, D head dim.
"""

import copy
import inspect
from collections.abc import Callable
from itertools import takewhile
from posixpath import commonpath
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.utils.output_capturing import _active_collector

from avq_diffusers.hosts.core import (
    ATTRIBUTE,
    AVQ_CALL,
    Host,
    Layer,
    LayerState,
    Other,
    Tokens,
    Watch,
    own_name,
)
from avq_diffusers.hosts.models.masks import joint_attention

NAME = "avq"
# Parameters that hold the tokens before the grid.
PREFIX = ("cls_token", "class_embedding", "distillation_token", "register_tokens")
# Arguments of attention functions that change what is computed.
CHANGING_ARGUMENTS = ("position_bias", "softcap", "sliding_window", "s_aux", "cache")
OTHER_FUNCTION = "another attention function"


def register() -> None:
    """Register the function with transformers, once."""
    if NAME not in ALL_ATTENTION_FUNCTIONS:
        AttentionInterface.register(NAME, vision_attention)


def vision_attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **arguments: Any,
) -> tuple[Tensor, Tensor | None]:
    """Attend in a layer with AVQ, or hand the call to the layer's previous function.

    Takes the arguments of every function of the interface, with query, key and value (B, H, N, D),
    and returns (B, N, H, D), with attention weights if the previous function returns them.
    """
    state: LayerState = getattr(module, ATTRIBUTE)
    collected = _active_collector.get() or ()
    wants_weights = arguments.get("output_attentions") or "attentions" in collected
    reasons = (
        (_has_other_function(module, state), OTHER_FUNCTION),
        (_tells_keys_apart(attention_mask), "attention mask"),
        (arguments.get("is_causal") or module.is_causal, "causal attention"),
        (dropout, "dropout"),
        (wants_weights, "attention weights"),
        *((arguments.get(name) is not None, name) for name in CHANGING_ARGUMENTS),
        (not query.shape == key.shape == value.shape, "keys of another shape"),
    )
    reason = state.exact_because(query.shape[2] - state.num_beside, query, reasons)
    state.count(reason or AVQ_CALL)
    if reason is None:
        return _attend(state, query, key, value, scaling), None
    arguments.setdefault("is_causal", False)
    return _previous_function(module, state)(
        module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **arguments
    )


def _previous_function(module: Any, state: LayerState) -> Callable[..., Any]:
    """What would compute the layer's attention now without AVQ."""
    eager = _forward_of(module).__globals__["eager_attention_forward"]
    implementation = state.previous._attn_implementation
    return ALL_ATTENTION_FUNCTIONS.get_interface(implementation, eager)


def _has_other_function(module: Any, state: LayerState) -> bool:
    """Whether that is neither transformers' nor the model's, so it may act on attention scores."""
    function = _previous_function(module, state)
    function = getattr(function, "func", function)  # kernels of the Hub are partial functions
    home = getattr(function, "__globals__", {}).get("__name__", "")
    is_of_model = home == _forward_of(module).__globals__["__name__"]
    return not is_of_model and not home.startswith("transformers.")


def _tells_keys_apart(attention_mask: Any) -> bool:
    """Whether a mask hides keys; the one transformers builds for `torch.export` hides none."""
    is_expanded = isinstance(attention_mask, Tensor) and attention_mask.stride(-1) == 0
    return attention_mask is not None and not is_expanded


def _attend(
    state: LayerState, query: Tensor, key: Tensor, value: Tensor, scaling: float | None
) -> Tensor:
    """(B, N, H, D)."""
    # Rotated queries and keys may be wider than the values.
    query, key = query.to(value.dtype), state.weights.normed(key).to(value.dtype)
    sinks = state.num_beside
    patches, keys, values = (x.transpose(1, 2) for x in (query[:, :, sinks:], key, value))
    grid = slice(sinks, key.shape[2])
    output = joint_attention(state.attend, patches, keys, values, grid, scaling)
    if not sinks:
        return output
    sink_output = F.scaled_dot_product_attention(query[:, :, :sinks], key, value, scale=scaling)
    return torch.cat([sink_output.transpose(1, 2).to(output.dtype), output], dim=1)


class _VisionWatch(Watch):
    """The hooks of a module that cuts an image into patches and calls layers on them."""

    def __setstate__(self, content: dict[str, Any]) -> None:
        register()  # the model may be unpickled in a process that has not applied AVQ
        self.__dict__.update(content)

    def attach(self, caller: nn.Module) -> list[Any]:
        self.num_sinks = _num_prefix_tokens(caller, self.layers[0].attn)
        hook = self.layers[0].anchor.register_forward_hook(self.see_grid)
        return [*super().attach(caller), hook]

    def begin(self, caller: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """The grid is known as soon as the patches are."""
        for state in self.states:
            state.enter_without_grid("no grid")

    def see_grid(self, projection: nn.Module, inputs: tuple[Any, ...], patches: Tensor) -> None:
        """The hook after the patch projection."""
        if any(state.call.get() is not None for state in self.states):
            beside = {"": self.num_sinks}
            self.enter(projection, Tokens(patches, patches.dtype, patches.shape[-2:], beside, True))


class VisionHost(Host):
    """ViT, DeiT, DINOv2, DINOv3, DPT, CLIP, SigLIP and similar models.

    Layers are found by structure: the layer looks up its function in transformers' attention
    interface, its config has a patch size, it is not causal and adds no position bias, and a
    convolution that cuts the image into patches, its anchor, comes before it.
    """

    kind = "vision model"
    watch = _VisionWatch
    takes_codebooks = True
    is_of_diffusers = False
    has_prompts = False

    def find(self, module: nn.Module) -> nn.Module | None:
        return module if self.layers(module) else None

    def layers(self, model: nn.Module) -> list[Layer]:
        """Layers of text towers are left out."""
        found: dict[str, list[tuple[str, Any, Any]]] = {}
        projection, projection_path, block, block_path = None, "", None, ""
        modules = dict(model.named_modules())
        for path, module in modules.items():
            if isinstance(module, nn.Conv2d) and module.kernel_size == module.stride:
                projection, projection_path = module, path
            elif isinstance(module, GradientCheckpointingLayer):
                block, block_path = module, path
            elif projection is not None and _can_run(module):
                layer_block = block if path.startswith(f"{block_path}.") else None
                found.setdefault(projection_path, []).append((path, module, layer_block))
        layers: list[Layer] = []
        for start, served in found.items():
            paths = [x.rpartition(".")[0] for x in (start, *(path for path, *_ in served))]
            caller = modules[commonpath(x.replace(".", "/") for x in paths).replace("/", ".")]
            layers += [
                Layer(
                    name=own_name(path),
                    level=0,
                    num_heads=attn.config.num_attention_heads,
                    head_dim=_head_dim(attn),
                    attn=attn,
                    caller=caller,
                    anchor=modules[start],
                    checkpointed=layer_block,
                )
                for path, attn, layer_block in served
            ]
        return layers

    def timestep_of(self, model: nn.Module) -> None:
        return None

    def attention_of(self, attn: Any) -> Any:
        return attn.config

    def give_avq(self, attn: Any, state: LayerState) -> None:
        register()
        attn.config = copy.copy(state.previous)
        attn.config._attn_implementation_internal = NAME

    def restore(self, attn: Any, state: LayerState) -> None:
        attn.config = state.previous

    def other_attention(self, layer: Layer) -> Other | None:
        return None

    def runs_without_avq(self, layer: Layer) -> str:
        return layer.attn.config._attn_implementation

    def interception(self, state: LayerState, attn: Any) -> str | None:
        reason = OTHER_FUNCTION if _has_other_function(attn, state) else None
        return state.interception() or reason


VISION = VisionHost()


def _num_prefix_tokens(caller: nn.Module, attn: nn.Module) -> int:
    """How many tokens the model puts before the patches, from parameters before those of a layer.

    A head behind the layers may have tokens of its own, as AIMv2's has.
    """
    first = next(attn.parameters())
    before = takewhile(lambda named: named[1] is not first, caller.named_parameters())
    tokens = {name.rpartition(".")[2]: x for name, x in before}
    return sum(tokens[name].shape[:-1].numel() for name in PREFIX if name in tokens)


def _forward_of(module: nn.Module) -> Callable[..., Any]:
    """A module's forward function, without decorators."""
    return inspect.unwrap(type(module).forward)


def _can_run(module: nn.Module) -> bool:
    """Whether a module is such a layer, disregarding the patches before it."""
    code = getattr(_forward_of(module), "__code__", None)
    return (
        code is not None
        and "ALL_ATTENTION_FUNCTIONS" in code.co_names
        and hasattr(getattr(module, "config", None), "patch_size")
        and getattr(module, "is_causal", True) is False
        and not any("relative_position" in name for name, _ in module.named_parameters())
    )


def _head_dim(module: nn.Module) -> int:
    config: Any = module.config
    return getattr(module, "head_dim", config.hidden_size // config.num_attention_heads)
