"""How a kind of model runs AVQ: the contract of its adapter, and what all kinds do alike.

An adapter (`unet`, `added`, `joint`, `dispatch`, `vision`) says which layers a model has, where the
grid of a call is told, and how a layer's attention is exchanged. Install and undo, the begin and
end of calls, and what keeps a layer from AVQ are written here once.
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

# Of transformers of diffusers. With 4096 tokens, images of mini-sd3 are at 31 dB to exact
# attention's, with M64P16C8 at 20 (`eval/results/tolerance.md`).
TRANSFORMER_SIZES = "M128P32C8E1024"
# One thread at a time puts AVQ on, takes it off, or sets sizes.
CHANGES = threading.RLock()


class Other(NamedTuple):
    """What runs a layer in place of AVQ, because it was there before or was set since.

    Attributes:
        name: of the processor or backend.
        is_exact: whether it is known to compute exact attention.
    """

    name: str
    is_exact: bool


class Host(ABC):
    """The adapter of one kind of model. It has no state of its own.

    Attributes:
        kind: of models, in words.
        usual_batch: images in a call if nothing is known yet.
        usual_sizes: of AVQ, unless others are asked for.
        has_timesteps: whether calls name a training timestep, so that sizes may follow it.
        takes_codebooks: whether layers may have stored codewords and changed projections.
        is_of_diffusers: whether diffusers' attention backends reach its models.
        has_prompts: whether a pipeline runs the model on prompts; else it takes `pixel_values`.
    """

    kind: str
    usual_batch = 2  # one image with guidance
    usual_sizes = "M64P16C8"
    has_timesteps = False
    takes_codebooks = False
    is_of_diffusers = True
    has_prompts = True

    @property
    def examples(self) -> str:
        """The argument of `apply_avq` that a tolerance is measured on."""
        return "prompt" if self.has_prompts else "pixel_values"

    @abstractmethod
    def find(self, module: nn.Module) -> nn.Module | None:
        """The model of this kind in `module`, inside wrappers; None if there is none."""

    @abstractmethod
    def layers(self, model: nn.Module) -> list[Layer]:
        """The layers of a model in which AVQ may run, in module order."""

    def default_config(self, model: nn.Module) -> AVQConfig:
        """The usual sizes at the finest level of a model that has self-attention."""
        levels = [layer.level for layer in self.layers(model)]
        return AVQConfig.parse(self.usual_sizes, levels=(min(levels, default=0),))

    def refuse(self, model: nn.Module) -> None:  # noqa: B027 (most kinds refuse nothing)
        """Refuse a model in a condition in which AVQ cannot run.

        Raises:
            ValueError: says what to do.
        """

    @abstractmethod
    def attention_of(self, attn: Any) -> Any:
        """What computes a layer's attention at this moment, for `restore`."""

    @abstractmethod
    def give_avq(self, attn: Any, state: LayerState) -> None:
        """Exchange the attention of a layer that carries `state`."""

    @abstractmethod
    def restore(self, attn: Any, own: Replaced, model: nn.Module) -> None:
        """Put back the attention that `own.previous` keeps, unless it was exchanged again."""

    def reinstate(self, attn: Any, own: Replaced, ours: Any) -> None:
        """Put AVQ back on a layer that `restore` took it from; `attention_of` gave `ours` then."""
        assert isinstance(own, LayerState)
        self.give_avq(attn, own)

    def tidy(self, model: nn.Module) -> None:  # noqa: B027 (most kinds have no processors)
        """Take away processors of ours that were set on layers without AVQ."""

    @abstractmethod
    def other_attention(self, layer: Layer) -> Other | None:
        """What runs a layer in place of AVQ; None if AVQ does."""

    def runs_without_avq(self, layer: Layer) -> str:
        """The name of a layer's exact attention."""
        return type(layer.attn.processor).__name__

    def interception(self, state: LayerState, attn: Any) -> str | None:
        """What acts on the scores of exact attention, and would miss AVQ; None if nothing does."""
        return state.interception()

    @abstractmethod
    def watch(self, layers: Sequence[Layer], others: "Others") -> "Watch":
        """The hooks of a module that calls these layers."""


class Hosted(NamedTuple):
    """A model with its adapter.

    Attributes:
        host: adapter of its kind.
        model: that holds the layers.
        entrance: what is called: a compiled wrapper, or the model.
        prefix: of its layers' names in a pipeline of several models.
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


class Others:
    """Names the layers of a model that something else runs than AVQ, each once."""

    def __init__(self, host: Host, layers: Sequence[Layer]) -> None:
        self.host = host
        self.layers = layers
        self.said: set[str] = set()

    def warn(self, stacklevel: int = 2) -> None:
        """Warn of layers that were not named yet."""
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
    """Hooks that begin and end the calls of layers, with the module that calls them.

    Args:
        host: adapter of the model.
        layers: that the module calls.
        others: of the whole model.
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
        """Begin the calls of the layers on these tokens."""
        for layer in self.layers:
            state = layer.avq_state
            if state is None:
                continue  # AVQ was taken off by way of another model
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
        """The hook after the module, whether it failed or not."""
        for layer in self.layers:
            state = layer.avq_state
            if state is not None:
                state.leave()


class Hooks:
    """What a module that calls layers, or a model with a schedule, carries of AVQ.

    Attributes:
        watch: begins and ends the calls of layers; None on a model that does not call them itself.
        scheduler: sets sizes by timestep; None without a schedule. It has `attach` as `Watch`.
        handles: of the registered hooks.
    """

    def __init__(self, watch: Watch | None) -> None:
        self.watch = watch
        self.scheduler: Any = None
        self.handles: list[RemovableHandle] = []

    def attach(self, module: nn.Module) -> None:
        for part in (self.watch, self.scheduler):
            if part is not None:
                self.handles += part.attach(module)

    def detach(self) -> None:
        for handle in self.handles:
            handle.remove()
        self.handles = []


class _Carried(NamedTuple):
    """What AVQ has on a module, and the attention of a layer beside it."""

    module: Any
    own: Any
    ours: Any


@contextmanager
def all_or_nothing(models: Iterable[Hosted]) -> Iterator[None]:
    """Change the AVQ of models inside the `with` block; if it fails, they are as they were."""
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
    """Run layers of models with these states, in place of all earlier ones, or change nothing."""
    self_check.folder = user_cache_path("avq-diffusers") / "checks"
    with all_or_nothing(of_models):
        for hosted, states in of_models.items():
            _take_off(hosted)
            _put_on(hosted, states, stacklevel=4)  # of `apply_avq` or the processor


def uninstall(models: Iterable[Hosted]) -> None:
    """Put the same attention back, and leave nothing of AVQ."""
    with CHANGES:
        for hosted in models:
            _take_off(hosted)


@contextmanager
def installed(hosted: Hosted, states: Mapping[Layer, LayerState]) -> Iterator[None]:
    """Run layers with these states inside the `with` block, then with the earlier ones again."""
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
    """The hooks of a module, new ones if it has none."""
    return vars(module).setdefault(ATTRIBUTE, Hooks(None))


def _put_on(hosted: Hosted, states: Mapping[Layer, LayerState], stacklevel: int = 2) -> None:
    host = hosted.host
    # All before the first exchange: layers may share a processor.
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
        if device.type != "meta":  # accelerate's offload keeps weights there between calls
            state.weights.move_to(device, dtype)
            # For a model that is compiled before its first call.
            images = torch.empty(host.usual_batch, 1, 1, dtype=dtype, device=device)
            workload = state.workload(images, state.config.sizes)
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
    for module, own, _ in carried:  # after all layers: hooks look for what they carry
        if isinstance(own, Hooks):
            own.attach(module)
