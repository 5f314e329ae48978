"""Launches at little cost for the host: a call looks up what its launches need."""

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

import torch
import triton
from torch import Tensor
from triton import knobs
from triton.runtime import driver

# Different problem sizes whose launches are kept.
MOST_PLANS = 512

# What a kernel takes for a pointer: an address, or a tensor if it is interpreted.
Pointer = int | Tensor | None

_INTERPRETED = knobs.runtime.interpret


class Launch:
    """A kernel, its grid and its arguments without the pointers.

    It compiles when it first runs. From then on it belongs to the device that was current.

    Args:
        kernel: takes pointers, then numbers on whose values it is not specialized, then constants.
        grid: programs along each axis.
        dtypes: of what the pointers point to, aligned to 16 bytes; None where they are None.
        numbers: integers.
        constants: and options of the launch.
    """

    def __init__(
        self,
        kernel: triton.JITFunction,
        grid: tuple[int, int, int],
        dtypes: Sequence[torch.dtype | None],
        numbers: Sequence[int],
        constants: Mapping[str, object],
    ) -> None:
        self.kernel = kernel
        self.grid = grid
        self.dtypes = dtypes
        self.numbers = numbers
        self.constants = constants
        self._values: tuple[object, ...] = ()
        self._compiled: Any = None

    def __call__(self, *pointers: Pointer) -> None:
        """Launch on the current device and stream."""
        if _INTERPRETED:
            self.kernel[self.grid](*pointers, *self.numbers, **self.constants)
            return
        if self._compiled is None:
            self._compile()
        compiled, hooks = self._compiled, knobs.runtime
        stream = driver.active.get_current_stream(driver.active.get_current_device())
        arguments = (*pointers, *self._values)
        compiled.run(  # reading `run` loads the code
            *self.grid,
            stream,
            compiled.function,
            compiled.packed_metadata,
            compiled.launch_metadata(self.grid, stream, *arguments),
            hooks.launch_enter_hook,
            hooks.launch_exit_hook,
            *arguments,
        )

    def _compile(self) -> None:
        arguments = (*self.dtypes, *self.numbers)
        names = self.kernel.arg_names[len(arguments) :]
        self._values = (*self.numbers, *(self.constants[name] for name in names))
        self._compiled = self.kernel.warmup(*arguments, grid=self.grid, **self.constants)


class Workspace:
    """Memory that only a call needs, allocated at once.

    Args:
        shapes: of its parts.
        dtypes: of its parts.
    """

    def __init__(self, shapes: Sequence[Sequence[int]], dtypes: Sequence[torch.dtype]) -> None:
        self.shapes = shapes
        self.dtypes = dtypes
        self._starts = [0]
        for shape, dtype in zip(shapes, dtypes, strict=True):
            size = prod(shape) * dtype.itemsize
            self._starts.append(self._starts[-1] + -(-size // 16) * 16)

    def allocate(self, device: torch.device) -> tuple[Tensor, list[Pointer]]:
        """The memory, to be kept until the last launch, and pointers to its parts."""
        memory = torch.empty(self._starts[-1], dtype=torch.uint8, device=device)
        if _INTERPRETED:
            parts = zip(self._starts, self.shapes, self.dtypes, strict=False)
            return memory, [
                memory[start : start + prod(shape) * dtype.itemsize].view(dtype).view(shape)
                for start, shape, dtype in parts
            ]
        first = memory.data_ptr()
        return memory, [first + start for start in self._starts[:-1]]


def pointer(tensor: Tensor | None) -> Pointer:
    """What a kernel takes for a tensor."""
    return tensor if tensor is None or _INTERPRETED else tensor.data_ptr()


def aligned(tensor: Tensor) -> Tensor:
    """The tensor, copied if its address is not a multiple of 16 bytes."""
    return tensor if tensor.data_ptr() % 16 == 0 else tensor.clone()
