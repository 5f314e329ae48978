"""Puts AVQ into models and takes it out again: all of it, or nothing."""

import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

from platformdirs import user_cache_path
from torch import nn
from torch.utils.hooks import RemovableHandle

from avq_diffusers.attention import self_check
from avq_diffusers.hosts.core.checkpointing import forget_calls
from avq_diffusers.hosts.core.host import Hosted, Others, Watch
from avq_diffusers.hosts.core.interception import active_backend
from avq_diffusers.hosts.core.layers import ATTRIBUTE, Layer
from avq_diffusers.hosts.core.state import LayerState

# One thread at a time applies AVQ, removes it, or sets options.
CHANGES = threading.RLock()


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
    kept: Any
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


def install(states_by_model: Mapping[Hosted, Mapping[Layer, LayerState]]) -> None:
    """Run layers with these states in place of all earlier ones, or change nothing."""
    self_check.folder = user_cache_path("avq-diffusers") / "checks"
    with all_or_nothing(states_by_model):
        for hosted, states in states_by_model.items():
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
    others = Others(host, [*states])
    for caller, layers in by_caller.items():
        hooks = vars(caller)[ATTRIBUTE] = Hooks(host.watch(host, layers, others))
        hooks.attach(caller)
    others.warn(stacklevel)


def _carried(hosted: Hosted) -> list[_Carried]:
    carried = []
    for module in hosted.model.modules():
        kept = vars(module).get(ATTRIBUTE)
        if kept is not None:
            ours = None if isinstance(kept, Hooks) else hosted.host.attention_of(module)
            carried.append(_Carried(module, kept, ours))
    return carried


def _take_off(hosted: Hosted) -> None:
    host = hosted.host
    for module in hosted.model.modules():
        forget_calls(module)
        kept = vars(module).pop(ATTRIBUTE, None)
        if isinstance(kept, Hooks):
            kept.detach()
        elif kept is not None:
            host.restore(module, kept)
    host.tidy(hosted.model)


def _put_back(hosted: Hosted, carried: Sequence[_Carried]) -> None:
    for module, kept, ours in carried:
        vars(module)[ATTRIBUTE] = kept
        if not isinstance(kept, Hooks):
            hosted.host.reinstate(module, kept, ours)
    for module, kept, _ in carried:  # after all layers: hooks look up the layers' states
        if isinstance(kept, Hooks):
            kept.attach(module)
