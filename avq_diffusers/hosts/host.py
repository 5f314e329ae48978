"""How a kind of model runs AVQ: the contract of its adapter, and what all kinds share.

An adapter (`unet`, `added`, `joint`, `dispatch`, `vision`) knows which layers a model has, where to
read the grid of a call, and how to replace a layer's attention. Installing and undoing, beginning
and ending calls, and reporting what else runs in a layer are written here once.
"""

import threading
import warnings
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from platformdirs import user_cache_path
from torch import nn
from torch.utils.hooks import RemovableHandle

from avq_diffusers.attention import self_check
from avq_diffusers.config import AVQConfig
from avq_diffusers.hosts.checkpointing import forget_calls, keep_calls
from avq_diffusers.hosts.interception import active_backend
from avq_diffusers.hosts.layers import ATTRIBUTE, Layer, Replaced
from avq_diffusers.hosts.state import LayerState, Tokens
from avq_diffusers.hosts.timesteps import Timesteps, argument_of

# For diffusers transformers. On mini-sd3 with 4096 tokens, PSNR to exact attention's images is
# 31 dB, against 20 dB with M64P16C8 (`eval/results/tolerance.md`).
TRANSFORMER_SIZES = "M128P32C8E1024"
# One thread at a time applies AVQ, removes it, or sets sizes.
CHANGES = threading.RLock()


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
        usual_batch: assumed images per call before the first one.
        usual_sizes: default AVQ sizes.
        takes_codebooks: whether layers may have stored codewords and changed projections.
        is_of_diffusers: whether diffusers' attention backends apply to its models.
        has_prompts: whether a pipeline runs the model on prompts; else it takes `pixel_values`.
    """

    kind: str
    usual_batch = 2  # one image with classifier-free guidance
    usual_sizes = "M64P16C8"
    takes_codebooks = False
    is_of_diffusers = True
    has_prompts = True

    @property
    def examples(self) -> str:
        """The argument of `apply_avq` with the examples that a tolerance is measured on."""
        return "prompt" if self.has_prompts else "pixel_values"

    @abstractmethod
    def find(self, module: nn.Module) -> nn.Module | None:
        """The model of this kind in `module`, without wrappers; None if there is none."""

    @abstractmethod
    def layers(self, model: nn.Module) -> list[Layer]:
        """The layers of a model in which AVQ may run, in module order."""

    def default_config(self, model: nn.Module) -> AVQConfig:
        """The usual sizes at the model's finest level with self-attention."""
        levels = [layer.level for layer in self.layers(model)]
        return AVQConfig.parse(self.usual_sizes, levels=(min(levels, default=0),))

    def refuse(self, model: nn.Module) -> None:  # noqa: B027 (most kinds refuse nothing)
        """Refuse a model whose current state rules out AVQ.

        Raises:
            ValueError: the message says what to do.
        """

    @abstractmethod
    def attention_of(self, attn: Any) -> Any:
        """What computes a layer's attention now, for `restore`."""

    @abstractmethod
    def give_avq(self, attn: Any, state: LayerState) -> None:
        """Replace the attention of a layer that carries `state`."""

    @abstractmethod
    def restore(self, attn: Any, own: Replaced, model: nn.Module) -> None:
        """Put `own.previous` back, unless something else has replaced AVQ since."""

    def reinstate(self, attn: Any, own: Replaced, ours: Any) -> None:
        """Undo `restore`; `ours` is what `attention_of` returned before it."""
        assert isinstance(own, LayerState)
        self.give_avq(attn, own)

    def tidy(self, model: nn.Module) -> None:  # noqa: B027 (most kinds have no processors)
        """Remove our processors from layers without AVQ."""

    @abstractmethod
    def other_attention(self, layer: Layer) -> Other | None:
        """What runs in a layer in place of AVQ; None if AVQ does."""

    def runs_without_avq(self, layer: Layer) -> str:
        """The name of a layer's exact attention."""
        return type(layer.attn.processor).__name__

    def interception(self, state: LayerState, attn: Any) -> str | None:
        """What acts on attention scores and would bypass AVQ; None if nothing does."""
        return state.interception()

    @abstractmethod
    def watch(self, layers: Sequence[Layer], others: "Others") -> "Watch":
        """The hooks for a module that calls these layers."""


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
    def states(self) -> dict[Layer, LayerState]:
        """The layers that AVQ was applied to."""
        found = {layer: layer.avq_state for layer in self.host.layers(self.model)}
        return {layer: state for layer, state in found.items() if state is not None}

    @property
    def timesteps(self) -> Timesteps | None:
        """A reader of its calls' timesteps, which sizes may follow; None if they have none."""
        argument = argument_of(type(self.model)) if self.host.has_prompts else None
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
        for layer in self.layers:
            state = layer.avq_state
            if state is None:
                continue  # AVQ was removed through another model
            if layer.checkpointed is not None:
                keep_calls(layer.checkpointed, None if layer.checkpointed is caller else layer.attn)
            state.refuse_replica(caller)
            reason = self.host.interception(state, layer.attn)
            parts = tokens.beside.items()
            num_beside = next((n for part, n in parts if layer.name.startswith(part)), 0)
            state.enter(tokens, reason, num_beside)
            if not torch.compiler.is_compiling():
                other = self.host.other_attention(layer)
                if other is not None:
                    state.count(other.name)
                    self.others.warn()

    def end(self, caller: nn.Module, args: Any, output: Any) -> None:
        """The hook after the module, even if it failed."""
        for layer in self.layers:
            state = layer.avq_state
            if state is not None:
                state.leave()


class Hooks:
    """AVQ's hooks on a module that calls layers, or on a model with a schedule.

    Attributes:
        watch: begins and ends the calls of layers; None on a model that does not call them itself.
        scheduler: sets sizes by timestep; None without a schedule. Has `attach`, like `Watch`.
        handles: handles of the registered hooks.
    """

    def __init__(self, watch: Watch | None) -> None:
        self.watch = watch
        self.scheduler: Any = None
        self.handles: list[RemovableHandle] = []

    def attach(self, module: nn.Module) -> None:
        # The scheduler first: the watch looks at the sizes of the call that it begins.
        for part in (self.scheduler, self.watch):
            if part is not None:
                self.handles += part.attach(module)

    def detach(self) -> None:
        for handle in self.handles:
            handle.remove()
        self.handles = []


class _Carried(NamedTuple):
    """What AVQ keeps on a module, and for a layer also its attention."""

    module: Any
    own: Any
    ours: Any


@contextmanager
def all_or_nothing(models: Iterable[Hosted]) -> Iterator[None]:
    """Change the AVQ of models inside the `with` block; on failure, restore them."""
    with CHANGES:
        earlier = {hosted: _carried(hosted) for hosted in models}
        try:
            yield
        except BaseException:
            for hosted, carried in earlier.items():
                _take_off(hosted)
                _put_back(hosted, carried)
            raise


def install(of_models: Mapping[Hosted, Mapping[Layer, LayerState]]) -> None:
    """Run layers with these states in place of all earlier ones, or change nothing."""
    self_check.folder = user_cache_path("avq-diffusers") / "checks"
    with all_or_nothing(of_models):
        for hosted, states in of_models.items():
            _take_off(hosted)
            _put_on(hosted, states, stacklevel=4)  # of `apply_avq` or the processor


def uninstall(models: Iterable[Hosted]) -> None:
    """Put the original attention back and leave no trace of AVQ."""
    with CHANGES:
        for hosted in models:
            _take_off(hosted)


@contextmanager
def installed(hosted: Hosted, states: Mapping[Layer, LayerState]) -> Iterator[None]:
    """Run layers with these states inside the `with` block, then with the previous ones."""
    with all_or_nothing([hosted]):
        earlier = _carried(hosted)
        _take_off(hosted)
        _put_on(hosted, states)
    try:
        yield
    finally:
        with CHANGES:
            _take_off(hosted)
            _put_back(hosted, earlier)


def hooks_of(module: nn.Module) -> Hooks:
    """A module's hooks, created if it has none."""
    return vars(module).setdefault(ATTRIBUTE, Hooks(None))


def _put_on(hosted: Hosted, states: Mapping[Layer, LayerState], stacklevel: int = 2) -> None:
    host = hosted.host
    # Read all before replacing any: layers may share a processor.
    for layer, state in states.items():
        state.previous = host.attention_of(layer.attn)
    by_caller: dict[nn.Module, list[Layer]] = {}
    for layer, state in states.items():
        by_caller.setdefault(layer.caller, []).append(layer)
        vars(layer.attn)[ATTRIBUTE] = state
        host.give_avq(layer.attn, state)
        if host.is_of_diffusers:
            state.usual_backend = active_backend()
        weight = getattr(layer.anchor, "weight", layer.anchor)
        device, dtype = weight.device, weight.dtype
        if device.type != "meta":  # where accelerate's offload keeps weights between calls
            state.weights.move_to(device, dtype)
            # In case the model is compiled before its first call.
            images = torch.empty(host.usual_batch, 1, 1, dtype=dtype, device=device)
            workload = state.workload(images, state.config.spec)
            state.route.learn(workload, device)
    others = Others(host, [*states])
    for caller, layers in by_caller.items():
        hooks = vars(caller)[ATTRIBUTE] = Hooks(host.watch(layers, others))
        hooks.attach(caller)
    others.warn(stacklevel)


def _carried(hosted: Hosted) -> list[_Carried]:
    carried = []
    for module in hosted.model.modules():
        own = vars(module).get(ATTRIBUTE) or module._modules.get(ATTRIBUTE)
        if own is not None:
            ours = None if isinstance(own, Hooks) else hosted.host.attention_of(module)
            carried.append(_Carried(module, own, ours))
    return carried


def _take_off(hosted: Hosted) -> None:
    host = hosted.host
    for module in hosted.model.modules():
        forget_calls(module)
        own = vars(module).pop(ATTRIBUTE, None) or module._modules.pop(ATTRIBUTE, None)
        if isinstance(own, Hooks):
            own.detach()
        elif own is not None:
            host.restore(module, own, hosted.model)
    host.tidy(hosted.model)


def _put_back(hosted: Hosted, carried: Sequence[_Carried]) -> None:
    for module, own, ours in carried:
        setattr(module, ATTRIBUTE, own)
        if not isinstance(own, Hooks):
            hosted.host.reinstate(module, own, ours)
    for module, own, _ in carried:  # after all layers: hooks look up the layers' states
        if isinstance(own, Hooks):
            own.attach(module)
