"""How a kind of model runs AVQ: the contract of its adapter.

An adapter (`unet`, `joint`, `dispatch`, `vision`) knows which layers a model has, where to read the
grid of a call, and how to replace a layer's attention. Beginning and ending calls and reporting
what else runs in a layer are written here once; `installing` puts AVQ into a model.
"""

import warnings
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from diffusers import ModelMixin
from torch import nn
from torch.utils.hooks import RemovableHandle

from avq_diffusers.config import AVQConfig
from avq_diffusers.hosts.core.checkpointing import keep_calls
from avq_diffusers.hosts.core.layers import Layer, default_config
from avq_diffusers.hosts.core.ranks import Ranks
from avq_diffusers.hosts.core.state import LayerState, Tokens
from avq_diffusers.hosts.core.timesteps import TIMESTEP, TimestepArgument, Timesteps


class Other(NamedTuple):
    """What runs in a layer in place of AVQ, because it was there before or was set since.

    Attributes:
        name: name of the processor or backend.
        is_exact: whether it is known to compute exact attention.
    """

    name: str
    is_exact: bool


class Host(ABC):
    """The adapter for one kind of model; stateless.

    Attributes:
        kind: the kind of model, in words.
        takes_codebooks: whether layers may have stored codewords and changed projections.
        is_of_diffusers: whether diffusers' attention backends apply to its models.
        has_prompts: whether a pipeline runs the model on prompts; else it takes `pixel_values`.
        watch: the hooks for a module that calls layers.
    """

    kind: str
    watch: "type[Watch]"
    takes_codebooks = False
    is_of_diffusers = True
    has_prompts = True

    @property
    def examples(self) -> str:
        """The argument of `apply_avq` with the examples that a tolerance is measured on."""
        return "prompt" if self.has_prompts else "pixel_values"

    def find(self, module: nn.Module) -> nn.Module | None:
        """The model of this kind in `module`, without wrappers; None if there is none."""
        model = next((x for x in module.modules() if isinstance(x, ModelMixin)), None)
        return model if model is not None and self.layers(model) else None

    @abstractmethod
    def layers(self, model: nn.Module) -> list[Layer]:
        """The layers of a model in which AVQ may run, in module order."""

    def default_config(self, model: nn.Module) -> AVQConfig:
        """`default_config` of its layers."""
        return default_config(self.layers(model))

    def timestep_of(self, model: nn.Module) -> TimestepArgument | None:
        """The argument that tells a model the training timestep; None if nothing does."""
        return TIMESTEP

    def refuse(self, model: nn.Module) -> None:
        """Raise a ValueError, which says what to do, if a model's state rules out AVQ."""
        return None  # most kinds refuse nothing

    def prepare(self, model: nn.Module) -> None:
        """Apply the AVQ that a user has set on a model's layers by hand."""
        return None  # most kinds have no processors

    def ranks(self, model: nn.Module) -> Ranks | None:
        """The ranks that run a model together; None if it runs in one process."""
        return None

    @abstractmethod
    def attention_of(self, attn: Any) -> Any:
        """What computes a layer's attention now, for `restore`."""

    @abstractmethod
    def give_avq(self, attn: Any, state: LayerState) -> None:
        """Replace the attention of a layer that carries `state`."""

    @abstractmethod
    def restore(self, attn: Any, state: LayerState) -> None:
        """Put `state.previous` back, unless something else has replaced AVQ since."""

    def reinstate(self, attn: Any, state: LayerState, ours: Any) -> None:
        """Undo `restore`; `ours` is what `attention_of` returned before it."""
        self.give_avq(attn, state)

    def tidy(self, model: nn.Module) -> None:
        """Remove our processors from layers without AVQ."""
        return None  # most kinds have no processors

    @abstractmethod
    def other_attention(self, layer: Layer) -> Other | None:
        """What runs in a layer in place of AVQ; None if AVQ does."""

    def runs_without_avq(self, layer: Layer) -> str:
        """The name of a layer's exact attention."""
        return type(layer.attn.processor).__name__

    def interception(self, state: LayerState, attn: Any) -> str | None:
        """What acts on attention scores and would bypass AVQ; None if nothing does."""
        return state.interception()


class Hosted(NamedTuple):
    """A model with its adapter.

    Attributes:
        host: adapter for its kind.
        model: the model that holds the layers.
        entrance: what callers call: the model, or its compiled wrapper.
        prefix: prefix of its layers' names in a pipeline with several models.
    """

    host: Host
    model: Any
    entrance: nn.Module
    prefix: str

    @property
    def ranks(self) -> Ranks | None:
        """The ranks that run it together; None if it runs in one process."""
        return self.host.ranks(self.model)

    @property
    def states(self) -> dict[Layer, LayerState]:
        """The layers that AVQ was applied to."""
        found = {layer: layer.avq_state for layer in self.host.layers(self.model)}
        return {layer: state for layer, state in found.items() if state is not None}

    @property
    def timesteps(self) -> Timesteps | None:
        """A reader of its calls' timesteps, which sizes may follow; None if they have none."""
        argument = self.host.timestep_of(self.model)
        return argument and Timesteps(type(self.model), argument)


class Others:
    """Warns of a model's layers that run something other than AVQ, once per layer."""

    def __init__(self, host: Host, layers: Sequence[Layer]) -> None:
        self.host = host
        self.layers = layers
        self.said: set[str] = set()

    def warn(self, stacklevel: int = 2) -> None:
        """Warn of layers not named yet."""
        found = {
            layer.name: other.name
            for layer in self.layers
            if layer.name not in self.said and (other := self.host.other_attention(layer))
        }
        if found:
            self.said.update(found)
            warnings.warn(
                f"AVQ does not run in the layers that keep {', '.join(sorted({*found.values()}))}: "
                f"{', '.join(found)}.",
                stacklevel=stacklevel + 1,
            )


class Watch(ABC):
    """Hooks on a module that begin and end the calls of its layers.

    Args:
        host: adapter of the model.
        layers: the layers that the module calls.
        others: warns for the whole model.
    """

    def __init__(self, host: Host, layers: Sequence[Layer], others: Others) -> None:
        self.host = host
        self.layers = layers
        self.others = others

    @property
    def states(self) -> list[LayerState]:
        """Of the layers that still have AVQ, which may have been removed through another model."""
        found = [layer.avq_state for layer in self.layers]  # no `:=`, which Dynamo does not trace
        return [state for state in found if state is not None]

    def attach(self, caller: nn.Module) -> list[RemovableHandle]:
        """Register the hooks."""
        return [
            caller.register_forward_pre_hook(self.begin, with_kwargs=True),
            caller.register_forward_hook(self.end, always_call=True),
        ]

    @abstractmethod
    def begin(self, caller: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """The hook before the module."""

    def enter(self, caller: nn.Module, tokens: Tokens) -> None:
        """Begin the layers' calls on these tokens."""
        is_compiling = torch.compiler.is_compiling()
        for layer in self.layers:
            state = layer.avq_state
            if state is None:
                continue
            if layer.checkpointed is not None:
                keep_calls(layer.checkpointed, None if layer.checkpointed is caller else layer.attn)
            state.refuse_replica(caller)
            reason = self.host.interception(state, layer.attn)
            name, parts = layer.name, tokens.beside.items()
            fitting = (n for part, n in parts if name.startswith(part) or name.endswith(part))
            state.enter(tokens, reason, next(fitting, 0))
            other = None if is_compiling else self.host.other_attention(layer)
            if other is not None:
                state.count(other.name)
                self.others.warn()

    def end(self, caller: nn.Module, args: Any, output: Any) -> None:
        """The hook after the module, even if it failed."""
        for state in self.states:
            state.leave()
