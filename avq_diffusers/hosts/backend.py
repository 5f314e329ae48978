"""AVQ by name: `model.set_attention_backend("avq")` and `with attention_backend("avq")`.

A backend sees tensors only, and AVQ needs the grid and the text: the name means `apply_avq`.
"""

import warnings
from functools import wraps
from typing import Any, cast
from weakref import WeakKeyDictionary

import torch
from diffusers import ModelMixin
from diffusers.models.attention_dispatch import AttentionBackendName, _AttentionBackendRegistry
from torch import nn

from avq_diffusers.hosts.interception import AVQ_NAME, DEFAULT_BACKEND
from avq_diffusers.hosts.layers import ATTRIBUTE, COMPILED
from avq_diffusers.hosts.models import models_of
from avq_diffusers.hosts.verbs import apply_avq, remove_avq

_CALL = nn.Module.__call__
# Models that were called inside the open `with attention_backend("avq")`, with whether that gave
# them AVQ.
_called: WeakKeyDictionary[nn.Module, bool] = WeakKeyDictionary()


def register_backend() -> None:
    """Let diffusers know AVQ by the name `"avq"`, in the whole process.

    `model.set_attention_backend("avq")` is `apply_avq(model)`; another name, or
    `model.reset_attention_backend()`, is `remove_avq(model)`. Inside
    `with attention_backend("avq")`, each model of diffusers gets AVQ when it is first called, until
    the block ends. What AVQ does not serve there runs diffusers' default backend, and a warning
    names models that AVQ does not know. A model that has AVQ already keeps it as it is.
    """
    registry, models, modules = _AttentionBackendRegistry, ModelMixin, cast(Any, nn.Module)
    if AVQ_NAME in registry._backends:
        return
    name: Any = str.__new__(AttentionBackendName, AVQ_NAME)
    name._name_, name._value_ = AVQ_NAME.upper(), AVQ_NAME
    AttentionBackendName._value2member_map_[AVQ_NAME] = name
    registry.register(name)(registry._backends[DEFAULT_BACKEND])
    set_backend, reset_backend = models.set_attention_backend, models.reset_attention_backend
    set_active = registry.set_active_backend

    @wraps(set_backend)
    def set_attention_backend(model: nn.Module, backend: str) -> None:
        if backend.lower() == AVQ_NAME:
            _give(model)
        else:
            set_backend(model, backend)
            _take(model)

    @wraps(reset_backend)
    def reset_attention_backend(model: nn.Module) -> None:
        reset_backend(model)
        _take(model)

    @wraps(set_active)
    def set_active_backend(backend: str) -> None:
        for model, has_got_avq in _called.items():
            if has_got_avq:
                _take(model)
        _called.clear()
        set_active(backend)
        if backend == AVQ_NAME:
            modules.__call__ = _call
        elif modules.__call__ is _call:
            modules.__call__ = _CALL

    models.set_attention_backend = set_attention_backend
    models.reset_attention_backend = reset_attention_backend
    registry.set_active_backend = set_active_backend


def _give(model: nn.Module) -> bool:
    """Apply AVQ to a model without it; return whether it had none."""
    if any(hosted.states for hosted in models_of(model)):
        return False
    apply_avq(model)
    return True


def _take(model: nn.Module) -> None:
    if any(ATTRIBUTE in vars(module) for module in model.modules()):
        remove_avq(model)


def _call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """`nn.Module.__call__` inside `with attention_backend("avq")`.

    A hook before all modules would not do: the hooks of a call are chosen before the first runs.
    """
    model = module._modules.get(COMPILED, module)
    if isinstance(model, ModelMixin) and not torch.compiler.is_compiling() and model not in _called:
        _called[model] = False
        try:
            _called[model] = _give(module)
        except TypeError as error:
            processors = (getattr(x, "processor", None) for x in model.modules())
            if any(hasattr(x, "_attention_backend") for x in processors):
                warnings.warn(f"{error} It runs exact attention.", stacklevel=2)
    return _CALL(module, *args, **kwargs)
