"""The self-attention layers of any kind of model, and how to choose among them."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, TypeVar

from torch import nn

from avq_diffusers.codebook.tensor_files import check_names
from avq_diffusers.config import LARGEST_COUNT, AVQConfig, check_int, is_within

# Wrappers inside a model hold the wrapped module under one of these names.
COMPILED = "_orig_mod"
_WRAPPED = (COMPILED, "_fsdp_wrapped_module", "_checkpoint_wrapped_module", "module")
# The one attribute that AVQ adds to a model's modules.
ATTRIBUTE = "_avq"


@dataclass(frozen=True)
class LayerSpec:
    """Module path, level and head shape of a self-attention layer."""

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
        """The fields, as stored in files."""
        return {field.name: getattr(self, field.name) for field in fields(LayerSpec)}


def short_names(names: Sequence[str]) -> list[str]:
    """Names of layers without the submodules at the end that all of them share."""
    parts = [name.split(".") for name in names]
    while len(parts) > 1 and all(len(x) > 1 and x[-1] == parts[0][-1] for x in parts):
        parts = [modules[:-1] for modules in parts]
    return [".".join(modules) for modules in parts]


def as_table(rows: Sequence[Sequence[str]]) -> str:
    """Cells in aligned columns, a line per row."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)


class Unchosen:
    """What an attention module without AVQ keeps where others have a `LayerState`."""

    previous: Any  # as in `LayerState`


@dataclass(frozen=True)
class Layer(LayerSpec):
    """A self-attention layer of a model, with its modules.

    Attributes:
        attn: the module whose attention AVQ computes.
        caller: the module whose forward begins and ends the layer's calls.
        anchor: the module whose weight or parameters give the device and dtype of a call.
        checkpointed: the module that holds the gradient checkpointing function; None without one.
    """

    attn: Any
    caller: Any
    anchor: Any
    checkpointed: Any

    @property
    def avq_state(self) -> Any:
        """The layer's `LayerState`; None without AVQ."""
        kept = vars(self.attn).get(ATTRIBUTE)
        return None if isinstance(kept, Unchosen) else kept


AnyLayer = TypeVar("AnyLayer", bound=LayerSpec)


def default_config(layers: Sequence[LayerSpec]) -> AVQConfig:
    """The default of a model with these layers: at the default's levels, or at its finest."""
    config, present = AVQConfig(), {layer.level for layer in layers}
    levels = present.intersection(config.levels) or {min(present, default=0)}
    return config.changed(levels=tuple(levels))


def chosen_layers(
    layers: Sequence[AnyLayer],
    levels: tuple[int, ...] | None,
    exact: tuple[str, ...],
    overrides: Iterable[str],
) -> list[AnyLayer]:
    """The layers at these levels that do not stay exact; arguments as in `select_layers`."""
    present = sorted({layer.level for layer in layers})
    wanted = present if levels is None else levels
    if wanted and not {*wanted}.intersection(present):
        others = f"only at levels {_join(present)}" if present else "and none that AVQ serves"
        raise ValueError(f"this model has no self-attention at level {_join(wanted)}, {others}.")
    layers = [layer for layer in layers if layer.level in wanted]
    scope = f"of this model at the levels {_join(wanted)}"
    for name in exact:
        if not any(is_within(layer.name, name) for layer in layers):
            raise ValueError(
                f"exact must name layers {scope}, but got {name!r}; one of them is "
                f"{layers[0].name}."
            )
    chosen = [x for x in layers if not any(is_within(x.name, name) for name in exact)]
    if layers and not chosen:
        raise ValueError(f"exact leaves no layer {scope}.")
    for key in overrides:
        if not any(key == str(x.level) or is_within(x.name, key) for x in chosen):
            raise ValueError(
                f"overrides must have levels or names of the chosen layers as keys, but got "
                f"{key!r}; one of them is {chosen[0].name} at level {chosen[0].level}."
            )
    return chosen


def check_specs(
    subject: str, specs: Mapping[str, LayerSpec], layers: Sequence[LayerSpec], has: str
) -> None:
    """Refuse layers of a model other than the one that `specs` describe."""
    check_names(f"{subject} of another model", specs, [layer.name for layer in layers])
    for layer in layers:
        spec = specs[layer.name]
        if (layer.num_heads, layer.head_dim) != (spec.num_heads, spec.head_dim):
            raise ValueError(
                f"{subject} of another model: {layer.name} has {layer.num_heads} heads of dim "
                f"{layer.head_dim}, but {has} {spec.num_heads} of dim {spec.head_dim}."
            )


def own_name(path: str) -> str:
    """The path of a module, with wrappers left out."""
    return ".".join(part for part in path.split(".") if part not in _WRAPPED)


def entrance_of(module: nn.Module, owner: nn.Module) -> nn.Module:
    """The wrapper of `torch.compile` around a model in `module`, or the model itself."""
    compiled = (x for x in module.modules() if x._modules.get(COMPILED) is owner)
    return next(compiled, owner)


def _join(values: Sequence[int]) -> str:
    return ", ".join(str(value) for value in values)
