"""The arguments of a model's call, by name."""

import inspect
from collections.abc import Mapping
from functools import cache
from typing import Any

from torch import nn


def named_arguments(
    model: type[nn.Module], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> dict[str, Any]:
    """The arguments of a call to a class's `forward`, by name."""
    return {**dict(zip(_parameters_of(model.forward), args, strict=False)), **kwargs}


@cache
def _parameters_of(forward: Any) -> tuple[str, ...]:
    """The parameter names of a class's `forward`, in order."""
    return tuple(inspect.signature(forward).parameters)[1:]
