"""The transformers of a pipeline, and the layers in which their images attend to themselves."""

import inspect
from dataclasses import dataclass
from typing import Any

from diffusers import DiffusionPipeline, ModelMixin
from diffusers.models.attention import JointTransformerBlock
from torch import nn

from avq_diffusers.config import AVQConfig, is_within
from avq_diffusers.dit.grids import Family, family_of
from avq_diffusers.plugin.layers import LayerSpec, chosen_layers, own_name

# Names of a block's self-attention and joint attention; cross-attention has others.
SELF_ATTENTION = ("attn", "attn1", "attention")
LEVEL = 0  # a transformer has one resolution
TRANSFORMERS = ("transformer", "transformer_2")


@dataclass(frozen=True)
class TransformerLayer(LayerSpec):
    """An attention layer of a transformer, with its module.

    Attributes:
        attn: the module that holds the processor.
        is_joint: whether its processor computes SD3's joint attention, and not what the attention
            dispatch of diffusers is asked for.
    """

    attn: Any
    is_joint: bool

    @property
    def avq_state(self) -> Any:
        """The `LayerState` that `apply_avq` gave the layer; None without AVQ."""
        return getattr(self.attn, "_avq", None)


def is_transformer(pipe: object) -> bool:
    """Whether `pipe` is a transformer of diffusers, wrapped or not, or a pipeline with one."""
    if not isinstance(pipe, nn.Module):
        pipe = None if getattr(pipe, "unet", None) else getattr(pipe, "transformer", None)
    return isinstance(pipe, nn.Module) and _owner(pipe) is not None


def transformer_of(model: nn.Module) -> ModelMixin:
    """The transformer in `model`, inside wrappers such as those of PEFT or a compiler.

    Raises:
        TypeError: there is none.
    """
    owner = _owner(model)
    if owner is None:
        raise TypeError(f"expected a transformer of diffusers, but got {type(model).__name__}.")
    return owner


def _owner(model: nn.Module) -> ModelMixin | None:
    owner = next((x for x in model.modules() if isinstance(x, ModelMixin)), None)
    return None if owner is None or "down_blocks" in owner._modules else owner


def transformers_of(pipe: DiffusionPipeline | nn.Module) -> dict[str, ModelMixin]:
    """The transformers of a pipeline, or `pipe` itself, by the prefix of their layers' names."""
    if isinstance(pipe, nn.Module):
        return {"": transformer_of(pipe)}
    found = {name: getattr(pipe, name, None) for name in TRANSFORMERS}
    return {
        "" if name == TRANSFORMERS[0] else f"{name}.": transformer_of(model)
        for name, model in found.items()
        if model is not None
    }


def parameters_of(model: ModelMixin) -> tuple[str, ...]:
    """The parameters of a model's `forward`, in their order."""
    return tuple(inspect.signature(type(model).forward).parameters)[1:]


def family_of_model(model: ModelMixin) -> Family:
    """How a transformer tells its grid.

    Raises:
        TypeError: AVQ does not know it.
    """
    family = family_of(parameters_of(model))
    if family is None or not _layers(model, family):
        raise TypeError(
            f"AVQ does not know the attention of {type(model).__name__}; it knows joint attention "
            f"as in SD3, and image or video transformers on the attention dispatch of diffusers."
        )
    return family


def transformer_layers(model: ModelMixin) -> list[TransformerLayer]:
    """All layers of a transformer in which its image attends to itself, in module order.

    Raises:
        TypeError: AVQ does not know the transformer.
    """
    return _layers(model, family_of_model(model))


def _layers(model: ModelMixin, family: Family) -> list[TransformerLayer]:
    joint = {
        attn
        for block in model.modules()
        if isinstance(block, JointTransformerBlock)
        for attn in (block.attn, block.attn2)
    }
    return [
        TransformerLayer(name, LEVEL, attn.heads, attn.inner_dim // attn.heads, attn, attn in joint)
        for name, attn in ((own_name(path), attn) for path, attn in model.named_modules())
        if attn in joint or (_is_dispatched(name, attn) and _is_in(name, family.parts))
    ]


def _is_dispatched(name: str, attn: nn.Module) -> bool:
    processor = getattr(attn, "processor", None)
    return (
        name.rpartition(".")[2] in SELF_ATTENTION
        and hasattr(processor, "_attention_backend")
        and hasattr(attn, "heads")
        and hasattr(attn, "inner_dim")
    )


def _is_in(name: str, parts: tuple[str, ...]) -> bool:
    return not parts or any(is_within(name, part) for part in parts)


def layers_of_config(model: ModelMixin, config: AVQConfig) -> list[TransformerLayer]:
    """The layers of a configuration.

    Raises:
        TypeError: AVQ does not know the transformer.
        ValueError: the configuration has other levels than 0, `exact` leaves nothing or names no
            layer, or an override matches none.
    """
    if config.levels != (LEVEL,):
        raise ValueError(
            f"a transformer has one resolution, so levels must be (0,), but got {config.levels}."
        )
    layers = transformer_layers(model)
    return chosen_layers(layers, config.exact, config.overrides, "of this transformer")
