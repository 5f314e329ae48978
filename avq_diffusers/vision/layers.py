"""The self-attention layers of vision transformers, and codebooks for them.

A layer is found by its structure. It asks transformers' attention interface for its function, its
config has a patch size, it is not causal and adds no bias of positions, and a convolution that cuts
the image into patches comes before it.
"""

import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn
from transformers.modeling_layers import GradientCheckpointingLayer

from avq_diffusers.codebook.codebook import Codebook
from avq_diffusers.config import AVQConfig
from avq_diffusers.plugin.codebooks import AVQCodebooks
from avq_diffusers.plugin.layers import LayerSpec, chosen_layers, own_name

LEVEL = 0  # a vision transformer has one resolution
INTERFACE = "ALL_ATTENTION_FUNCTIONS"


@dataclass(frozen=True)
class VisionLayer(LayerSpec):
    """A self-attention layer of a vision transformer.

    Attributes:
        attn: the module that calls the attention function.
        projection: the convolution whose output is the grid of patches.
        block: the module that gradient checkpointing recomputes, None if there is none.
    """

    attn: Any
    projection: Any
    block: GradientCheckpointingLayer | None

    @property
    def avq_state(self) -> Any:
        """The `LayerState` that `apply_avq` gave the layer; None without AVQ."""
        return getattr(self.attn, "_avq", None)


def select_layers(
    model: nn.Module, exact: tuple[str, ...] = (), overrides: Iterable[str] = ()
) -> list[VisionLayer]:
    """The self-attention layers that can run AVQ, in module order; text towers have none.

    Args:
        model: a vision model of transformers, or any module that holds one.
        exact: names of layers to leave out, or of modules to leave out with all their layers.
        overrides: keys of `AVQConfig.overrides`; each must match a chosen layer.

    Raises:
        TypeError: `model` is not a module.
        ValueError: there is no such layer, a name of `exact` matches none, no layer is left, or an
            override matches none.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"expected a vision model, but got {type(model).__name__}.")
    layers = []
    projection, block, block_path = None, None, ""
    for path, module in model.named_modules():
        if isinstance(module, nn.Conv2d) and module.kernel_size == module.stride:
            projection = module
        elif isinstance(module, GradientCheckpointingLayer):
            block, block_path = module, path
        elif projection is not None and _can_run(module):
            config = module.config
            layers.append(
                VisionLayer(
                    name=own_name(path),
                    level=LEVEL,
                    num_heads=config.num_attention_heads,
                    head_dim=_head_dim(module),
                    attn=module,
                    projection=projection,
                    block=block if path.startswith(f"{block_path}.") else None,
                )
            )
    if not layers:
        raise ValueError(
            f"{type(model).__name__} has no layer for AVQ: one whose attention comes from "
            f"transformers' AttentionInterface and is of all patches of an image, without windows "
            f"and biases of positions."
        )
    return chosen_layers(layers, exact, overrides, "of this model")


def states_of(model: nn.Module) -> dict[VisionLayer, Any]:
    """The `LayerState` of each layer that AVQ was applied to.

    Raises:
        TypeError, ValueError: as `select_layers`.
    """
    return {x: x.avq_state for x in select_layers(model) if x.avq_state is not None}


def gather_codebooks(
    model: nn.Module, config: AVQConfig, codebooks: Mapping[str, Codebook]
) -> AVQCodebooks:
    """The stored codebooks of a vision model, for `apply_avq`.

    With `config.key_norm`, `AVQCodebooks.key_norm(name)` is the LayerNorm of a layer's keys.

    Args:
        model: the model that they are for.
        config: sizes.
        codebooks: one by the name of each layer of `select_layers(model, config.exact)`; copied.

    Raises:
        TypeError: `model` is not a module.
        ValueError: the model has no layer for AVQ, or names or shapes do not fit it and `config`.
    """
    layers = select_layers(model, config.exact, config.overrides)
    return AVQCodebooks.for_layers(layers, config, codebooks)


def forward_of(module: nn.Module) -> Callable[..., Any]:
    """The function that computes a module, below what decorates it."""
    return inspect.unwrap(type(module).forward)


def _can_run(module: nn.Module) -> bool:
    """Whether a module is such a layer, apart from the patches before it."""
    code = getattr(forward_of(module), "__code__", None)
    return (
        code is not None
        and INTERFACE in code.co_names
        and hasattr(getattr(module, "config", None), "patch_size")
        and getattr(module, "is_causal", True) is False
        and not any("relative_position" in name for name, _ in module.named_parameters())
    )


def _head_dim(module: nn.Module) -> int:
    config: Any = module.config
    return getattr(module, "head_dim", config.hidden_size // config.num_attention_heads)
