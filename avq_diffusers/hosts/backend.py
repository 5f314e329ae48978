"""AVQ by name: `model.set_attention_backend("avq")` and `with attention_backend("avq")`.

A backend only sees tensors, but AVQ needs the grid and the text, so the name stands for
`apply_avq`.
"""

import warnings
from functools import wraps
from typing import Any, cast
from weakref import WeakKeyDictionary

import torch
from diffusers import ModelMixin
from diffusers.models.attention_dispatch import AttentionBackendName, _AttentionBackendRegistry
from torch import nn

from avq_diffusers.hosts.core import ATTRIBUTE, AVQ_NAME, COMPILED, DEFAULT_BACKEND
from avq_diffusers.hosts.models import models_of
from avq_diffusers.hosts.verbs import apply_avq, remove_avq

_CALL = nn.Module.__call__
# Models called inside the open `with attention_backend("avq")` -> whether that applied AVQ to them.
_called: WeakKeyDictionary[nn.Module, bool] = WeakKeyDictionary()


def register_backend() -> None:
    """Register AVQ with diffusers as the attention backend `"avq"`, for the whole process.

    `model.set_attention_backend("avq")` calls `apply_avq(model)`; any other name, and
    `model.reset_attention_backend()`, call `remove_avq(model)`. Inside
    `with attention_backend("avq")`, each diffusers model gets AVQ at its first call and loses it
    when the block ends. Calls that AVQ does not serve run diffusers' default backend; a warning
    names models that AVQ does not know. A model that already has AVQ is left unchanged.
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
    """Apply AVQ unless the model has it; return whether it was applied."""
    if any(hosted.states for hosted in models_of(model)):
        return False
    apply_avq(model)
    return True


def _take(model: nn.Module) -> None:
    if any(ATTRIBUTE in vars(module) for module in model.modules()):
        remove_avq(model)


def _call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """`nn.Module.__call__` inside `with attention_backend("avq")`.

    A global pre-hook comes too late: PyTorch collects a call's hooks before it runs the first.
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
