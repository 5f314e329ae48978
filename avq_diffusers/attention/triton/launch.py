"""Launches at little cost for the host: what depends on the problem size is computed once.

Arguments go by the names that the kernels give them: pointer `key_ptr` is the address of `key`.
"""

from collections.abc import Mapping, Sequence
from functools import cache
from math import prod
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor
from triton import knobs
from triton.runtime import driver

# Problem sizes whose launches are kept.
MOST_PLANS = 512

# Axes of tokens (B, H, N, D) whose strides kernels take.
STRIDES = ("batch", "head", "token")

# What a kernel takes for a pointer: an address, or a tensor if it is interpreted.
Pointer = int | Tensor | None

_INTERPRETED = knobs.runtime.interpret


@cache
def capability_of(device: torch.device) -> tuple[int, int]:
    """Compute capability, (0, 0) of a CPU."""
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else (0, 0)


class Part(NamedTuple):
    """A tensor in the memory of a call."""

    shape: Sequence[int]
    dtype: torch.dtype


class Launch:
    """A kernel, its grid and its arguments without the pointers.

    It compiles when it first runs. From then on it belongs to the device that was current.

    Args:
        kernel: takes pointers, then numbers on whose values it is not specialized, then constants.
        grid: programs along each axis.
        dtypes: of what pointers point to, aligned to 16 bytes; a pointer without one is None.
        numbers: integers.
        constants: and options of the launch; a kernel takes those that it names.
    """

    def __init__(
        self,
        kernel: triton.JITFunction,
        grid: tuple[int, int, int],
        dtypes: Mapping[str, torch.dtype],
        numbers: Mapping[str, int],
        constants: Mapping[str, Any],
    ) -> None:
        names = kernel.arg_names
        self.kernel = kernel
        self.grid = grid
        pointers = [name[:-4] for name in names if name.endswith("_ptr")]
        self.pointers = tuple(name if name in dtypes else "" for name in pointers)
        self.dtypes = {name: dtypes.get(name) for name in pointers}
        self.numbers = {name: numbers[name] for name in names if name in numbers}
        options = ("num_warps", "num_stages", "maxnreg")
        self.constants = {x: constants[x] for x in (*names, *options) if x in constants}
        self._values = (*self.numbers.values(), *(constants[x] for x in names if x in constants))
        self._compiled: Any = None

    def __call__(self, pointers: Mapping[str, Pointer], stream: int) -> None:
        """Launch on a stream of the current device."""
        found = map(pointers.get, self.pointers)
        if _INTERPRETED:
            self.kernel[self.grid](*found, **self.numbers, **self.constants)
            return
        compiled = self._compiled
        if compiled is None:
            types = (*self.dtypes.values(), *self.numbers.values())
            compiled = self.kernel.warmup(*types, grid=self.grid, **self.constants)
            self._compiled = compiled
        arguments = (*found, *self._values)
        hooks: tuple[Any, Any] = None, None
        metadata = None
        runtime = knobs.runtime
        if runtime.launch_enter_hook.calls or runtime.launch_exit_hook.calls:
            hooks = runtime.launch_enter_hook, runtime.launch_exit_hook
            metadata = compiled.launch_metadata(self.grid, stream, *arguments)
        # Reading `run` loads the code.
        compiled.run(
            *self.grid,
            stream,
            compiled.function,
            compiled.packed_metadata,
            metadata,
            *hooks,
            *arguments,
        )


class Plan:
    """Launches one after another, and the memory that they need, in one allocation.

    Args:
        parts: of the memory.
        launches: in their order.
    """

    def __init__(self, parts: Mapping[str, Part], launches: Sequence[Launch]) -> None:
        self.parts = parts
        self.launches = launches
        self._starts = {}
        self._size = 0
        for name, part in parts.items():
            self._starts[name] = self._size
            self._size += -(-prod(part.shape) * part.dtype.itemsize // 16) * 16

    def run(self, inputs: Mapping[str, Pointer], device: torch.device) -> Tensor:
        """Launch on the current stream; return the memory.

        Args:
            inputs: pointers to what is not in the memory.
            device: the current one.
        """
        memory = torch.empty(self._size, dtype=torch.uint8, device=device)
        stream = 0
        pointers: dict[str, Pointer]
        if _INTERPRETED:
            pointers = {name: self.part(memory, name) for name in self.parts}
        else:
            stream = driver.active.get_current_stream(device.index)
            first = memory.data_ptr()
            pointers = {name: first + start for name, start in self._starts.items()}
        pointers.update(inputs)
        for launch in self.launches:
            launch(pointers, stream)
        return memory

    def part(self, memory: Tensor, name: str) -> Tensor:
        """A part of the memory as a tensor."""
        shape, dtype = self.parts[name]
        start = self._starts[name]
        flat = memory[start : start + prod(shape) * dtype.itemsize].view(dtype)
        return flat.view(tuple(shape))


def pointer(tensor: Tensor | None) -> Pointer:
    """What a kernel takes for a tensor."""
    return tensor if tensor is None or _INTERPRETED else tensor.data_ptr()


def aligned(order: Tensor | None) -> Tensor | None:
    """The order if kernels can read it, else a copy."""
    return order if order is None or order.data_ptr() % 16 == 0 else order.clone()


def kernel_layout(tensor: Tensor, multiple: int = 1) -> Tensor:
    """The tensor (B, H, N, D) if kernels can read it, else a copy.

    They need a last stride of 1, an address that is a multiple of 16 bytes, and other strides that
    are multiples of `multiple`, a power of two.
    """
    batch, head, token, last = tensor.stride()
    if last == 1 and tensor.data_ptr() % 16 == 0 and (batch | head | token) % multiple == 0:
        return tensor
    return tensor.transpose(1, 2).clone(memory_format=torch.contiguous_format).transpose(1, 2)
