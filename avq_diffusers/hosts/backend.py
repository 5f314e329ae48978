"""AVQ by name: `model.set_attention_backend("avq")`.

A backend of diffusers only sees tensors, but AVQ needs the grid and the text, so the name stands
for `apply_avq`.
"""

from functools import wraps
from typing import Any, cast

from diffusers import ModelMixin
from torch import nn

from avq_diffusers.hosts.core import ATTRIBUTE
from avq_diffusers.hosts.models import models_of
from avq_diffusers.hosts.verbs import apply_avq, remove_avq

AVQ_NAME = "avq"


def register_backend() -> None:
    """Make `"avq"` a name that diffusers' models take as an attention backend, in this process.

    `model.set_attention_backend("avq")` calls `apply_avq(model)`, unless the model already has AVQ;
    any other name, and `model.reset_attention_backend()`, call `remove_avq(model)`.
    """
    models = cast(Any, ModelMixin)
    set_backend, reset_backend = models.set_attention_backend, models.reset_attention_backend
    if hasattr(set_backend, "takes_avq"):
        return

    @wraps(set_backend)
    def set_attention_backend(model: nn.Module, backend: str) -> None:
        if backend.lower() != AVQ_NAME:
            set_backend(model, backend)
            _take(model)
        elif not any(hosted.states for hosted in models_of(model)):
            apply_avq(model)

    @wraps(reset_backend)
    def reset_attention_backend(model: nn.Module) -> None:
        reset_backend(model)
        _take(model)

    cast(Any, set_attention_backend).takes_avq = True
    models.set_attention_backend = set_attention_backend
    models.reset_attention_backend = reset_attention_backend


def _take(model: nn.Module) -> None:
    if any(ATTRIBUTE in vars(module) for module in model.modules()):
        remove_avq(model)
