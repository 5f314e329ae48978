"""How operators take a call: the fields of `Tensors`, then a `Spec`."""

from collections.abc import Sequence
from typing import Any

from avq_diffusers.attention.tensors import Tensors
from avq_diffusers.config import Spec

CALL = ", ".join(
    [
        *(f"Tensor {name}" for name in Tensors._fields[:3]),
        *(f"Tensor? {name}" for name in Tensors._fields[3:-1]),
        "float scale",
        "SymInt[] numbers",
        "float? threshold",
    ]
)


def call_of(arguments: Sequence[Any]) -> tuple[Tensors, Spec]:
    """Unpack an operator's arguments."""
    *inputs, numbers, threshold = arguments
    return Tensors(*inputs), Spec.from_numbers(numbers, threshold)


def arguments_of(tensors: Tensors, spec: Spec) -> tuple[Any, ...]:
    """The inverse of `call_of`."""
    return *tensors, spec.numbers, spec.threshold


def query_tile_of(arguments: Sequence[Any]) -> int:
    """The query tile in an operator's arguments, symbolic while a compiler traces."""
    numbers, _ = arguments[-2:]
    return numbers[-1]


def shapes_of(arguments: Sequence[Any]) -> tuple[Sequence[int], int, int, Spec]:
    """The arguments of `flops.forward_flops`, of an operator's with shapes for tensors."""
    shapes: tuple[Any, Spec] = call_of(arguments)
    call, spec = shapes
    num_sinks = 0 if call.sink_key is None else int(call.sink_key[2])
    return call.query, int(call.key[2]), num_sinks, spec
