"""The models of a pipeline and their self-attention layers."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from typing import Any, TypeVar

from diffusers import DiffusionPipeline, ModelMixin, Transformer2DModel, UNet2DConditionModel
from diffusers.models.attention_processor import Attention
from torch import nn

from avq_diffusers.config import LARGEST_COUNT, check_int, is_within

# Under these names, wrappers of modules inside a UNet hold what they wrap.
_COMPILED = "_orig_mod"
_WRAPPED = (_COMPILED, "_fsdp_wrapped_module", "_checkpoint_wrapped_module", "module")
# Functions that return the pipeline or UNet that they are given.
PipelineOrUNet = TypeVar("PipelineOrUNet", bound=DiffusionPipeline | nn.Module)


def unet_of(pipe: DiffusionPipeline | nn.Module) -> UNet2DConditionModel:
    """The UNet of a pipeline, or that in `pipe` if it is a UNet itself, wrapped or not.

    A compiled UNet stays in the wrapper of `torch.compile`.

    Raises:
        TypeError: `pipe` has no UNet, or several.
    """
    unet = pipe if isinstance(pipe, nn.Module) else getattr(pipe, "unet", None)
    if unet is None:
        raise TypeError(
            f"expected a pipeline with a unet or a UNet, but got {type(pipe).__name__}."
        )
    owner = unwrapped(unet)
    compiled = (x for x in unet.modules() if x._modules.get(_COMPILED) is owner)
    return next(compiled, owner)


def models_of(pipe: DiffusionPipeline | nn.Module) -> dict[str, ModelMixin]:
    """The UNet and the ControlNets of a pipeline, or `pipe` if it is such a model itself.

    Keys are the prefixes of their layers' names, `""` for the UNet.

    Raises:
        TypeError: `pipe` has no UNet.
    """
    models = {"": unet_of(pipe)}
    if not isinstance(pipe, nn.Module):
        controlnet = getattr(pipe, "controlnet", None)
        several = {f"nets.{i}.": net for i, net in enumerate(getattr(controlnet, "nets", ()))}
        for name, model in (several or {"": controlnet}).items():
            if isinstance(model, nn.Module):
                models[f"controlnet.{name}"] = unwrapped(model)
    return models


def unwrapped(model: nn.Module) -> ModelMixin:
    """The model that owns the blocks, inside wrappers such as those of PEFT, FSDP or a compiler.

    Raises:
        TypeError: no model in `model` has blocks, or several have.
    """
    owners = {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, ModelMixin) and "down_blocks" in module._modules
    }
    if not owners:
        raise TypeError(f"expected a UNet with down_blocks, but got {type(model).__name__}.")
    if len(owners) > 1:
        raise TypeError(
            f"expected one UNet, but {type(model).__name__} holds {', '.join(owners)}; pass one "
            f"of them."
        )
    return next(iter(owners.values()))


@dataclass(frozen=True)
class LayerSpec:
    """Module path, UNet level and head shape of a self-attention layer, as a codebook needs them.

    Raises:
        TypeError: a field has another type.
        ValueError: a number is out of range.
    """

    name: str
    level: int
    num_heads: int
    head_dim: int

    def __post_init__(self) -> None:
        if not isinstance(self.name, str):
            raise TypeError(f"name of a layer must be str, but got {self.name!r}.")
        for name, minimum in (("level", 0), ("num_heads", 1), ("head_dim", 1)):
            check_int(f"{name} of a layer", getattr(self, name), minimum, LARGEST_COUNT)

    @property
    def stored(self) -> dict[str, Any]:
        """The fields that a file holds."""
        return {field.name: getattr(self, field.name) for field in fields(LayerSpec)}


Layer = TypeVar("Layer", bound=LayerSpec)


@dataclass(frozen=True)
class SelfAttentionLayer(LayerSpec):
    """A self-attention layer found in a UNet, with its modules."""

    attn: Attention
    transformer: Transformer2DModel

    @property
    def avq_state(self) -> Any:
        """The `LayerState` that `apply_avq` gave the layer; None without AVQ."""
        return getattr(self.attn, "_avq", None)

    @property
    def has_linfusion(self) -> bool:
        """Whether `load_linfusion` changed the layer, whatever its processor is now."""
        return hasattr(self.attn, "_linfusion_previous")


def select_layers(
    unet: nn.Module,
    levels: tuple[int, ...] | None = None,
    exact: tuple[str, ...] = (),
    overrides: Iterable[str] = (),
) -> list[SelfAttentionLayer]:
    """The spatial self-attention layers of a UNet or ControlNet, in module order.

    Args:
        unet: a UNet or ControlNet. Temporal layers (motion modules) are never chosen.
        levels: UNet levels to choose, 0 being the highest resolution; None chooses all.
        exact: names of layers to leave out, or of modules to leave out with all their layers.
        overrides: keys of `AVQConfig.overrides`; each must match a chosen layer.

    Raises:
        TypeError: `unet` is not such a model.
        ValueError: a level has no self-attention, a name of `exact` matches no layer at these
            levels, no layer is left, or an override matches none.
    """
    if not isinstance(unet, nn.Module):
        raise TypeError(f"expected a UNet with down_blocks, but got {type(unet).__name__}.")
    unet = unwrapped(unet)
    layers = []
    for path, transformer in unet.named_modules():
        if not isinstance(transformer, Transformer2DModel):
            continue
        for wrapped_name, attn in transformer.named_modules(prefix=path):
            name = own_name(wrapped_name)
            if not isinstance(attn, Attention) or not name.endswith(".attn1"):
                continue
            if attn.is_cross_attention:
                continue
            layers.append(
                SelfAttentionLayer(
                    name=name,
                    level=_level(unet, name),
                    num_heads=attn.heads,
                    head_dim=attn.inner_dim // attn.heads,
                    attn=attn,
                    transformer=transformer,
                )
            )
    present = sorted({layer.level for layer in layers})
    chosen_levels = present if levels is None else levels
    absent = [level for level in chosen_levels if level not in present]
    if absent:
        raise ValueError(
            f"this UNet has no self-attention at level {_join(absent)}, "
            f"only at levels {_join(present) or '(none)'}."
        )
    layers = [layer for layer in layers if layer.level in chosen_levels]
    place = f"of this UNet at the levels {_join(chosen_levels)}"
    return chosen_layers(layers, exact, overrides, place)


def chosen_layers(
    layers: Sequence[Layer], exact: tuple[str, ...], overrides: Iterable[str], place: str
) -> list[Layer]:
    """The layers that do not stay exact.

    Args:
        layers: of a model.
        exact: names of layers to leave out, or of modules to leave out with all their layers.
        overrides: keys of `AVQConfig.overrides`.
        place: of all these layers, for messages.

    Raises:
        ValueError: a name of `exact` matches no layer, no layer is left, or an override matches
            none.
    """
    for name in exact:
        if not any(is_within(layer.name, name) for layer in layers):
            raise ValueError(
                f"exact must name layers {place}, but got {name!r}; one of them is "
                f"{layers[0].name}."
            )
    chosen = [x for x in layers if not any(is_within(x.name, name) for name in exact)]
    if layers and not chosen:
        raise ValueError(f"exact leaves no layer {place}.")
    for key in overrides:
        if not any(key == str(x.level) or is_within(x.name, key) for x in chosen):
            raise ValueError(
                f"overrides must have levels or names of the chosen layers as keys, but got "
                f"{key!r}; one of them is {chosen[0].name} at level {chosen[0].level}."
            )
    return chosen


def own_name(path: str) -> str:
    """The path of a module without the wrappers around those that hold it."""
    return ".".join(part for part in path.split(".") if part not in _WRAPPED)


def _level(unet: ModelMixin, name: str) -> int:
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


def _join(values: Sequence[int]) -> str:
    return ", ".join(str(value) for value in values)
