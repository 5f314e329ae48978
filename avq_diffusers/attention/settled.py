"""What calls that look alike share on a GPU: checks, the backend and launches, found out once.

Eager calls and the operator in compiled code both look a call up here. The first of its kind is
checked and planned; the host of a GPU would take longer to repeat that than to launch the kernels.
"""

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from avq_diffusers.attention.limits import faults
from avq_diffusers.attention.tensors import Tensors
from avq_diffusers.config import Spec


@dataclass
class Settled:
    """What calls that look alike share.

    Attributes:
        backend: the one that runs them.
        repeat: runs the kernels again once a call has run; returns None where that is not possible.
    """

    backend: str
    repeat: Callable[[Tensors], tuple[Tensor, Tensor] | None] | None = None


# By all that checks and launches depend on.
_settled: dict[tuple[object, ...], Settled] = {}
_MOST_SETTLED = 512


def settled_call(tensors: Tensors, spec: Spec, *facts: object, find: Callable[[], str]) -> Settled:
    """What calls like this one share, which also depends on `facts`; for the first of its kind,
    `find` checks the call and returns its backend."""
    call = (spec, *facts, len(faults), *map(_look, tensors))
    found = _settled.get(call)
    if found is None:
        found = Settled(find())
        if len(_settled) >= _MOST_SETTLED:
            _settled.clear()
        _settled[call] = found
    return found


def _look(x: object) -> object:
    """What checks and dispatch look at: properties of a tensor, a number, or the type of others."""
    if isinstance(x, Tensor):
        return x.shape, x.stride(), x.dtype, x.device, x.requires_grad
    return x if x is None or isinstance(x, int | float) else type(x)
