"""Launches at little cost for the host: Triton looks its compiled code up by every argument."""

from collections.abc import Mapping, Sequence

import torch
import triton
from torch import Tensor

_compiled: dict[tuple, tuple] = {}


def launch(
    kernel: triton.JITFunction,
    grid: tuple[int, int, int],
    tensors: Sequence[Tensor | None],
    numbers: Sequence[int],
    constants: Mapping[str, object],
) -> None:
    """`kernel[grid](*tensors, *numbers, **constants)` on the current device.

    Args:
        kernel: takes the tensors, then the numbers, on whose values it is not specialized, then
            constants.
        grid: programs along each axis.
        tensors: pointers are specialized on alignment to 16 bytes.
        numbers: integers.
        constants: and options of the launch; the same object wherever the values are the same.
    """
    if not isinstance(kernel, triton.JITFunction):  # interpreted
        kernel[grid](*tensors, *numbers, **constants)
        return
    key = (
        id(constants),
        torch.cuda.current_device(),
        *(None if x is None else (x.dtype, x.data_ptr() % 16 == 0) for x in tensors),
        *(number.bit_length() > 31 for number in numbers),
    )
    found = _compiled.get(key)
    if found is None:
        compiled = kernel[grid](*tensors, *numbers, **constants)
        values = tuple(constants[name] for name in kernel.arg_names if name in constants)
        _compiled[key] = compiled, values
    else:
        compiled, values = found
        compiled[grid](*tensors, *numbers, *values)
