"""Launches with low host overhead: whatever depends on the problem size is computed once.

Arguments are matched by the kernels' parameter names: pointer `key_ptr` is the address of `key`. A
missing name raises; an absent pointer is None.
"""

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache, cached_property
from math import prod
from operator import itemgetter
from threading import Lock
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton import knobs
from triton.runtime import driver
from triton.runtime.jit import MockTensor

# Number of problem sizes whose launches are cached.
MOST_PLANS = 512

# A kernel takes an address as a pointer, or a tensor if it is interpreted.
Address = int | Tensor | None

# Triton loads a binary at first use, and not safely where threads share the kernel.
_LOADING = Lock()

_RUNTIME = knobs.runtime
_INTERPRETED = _RUNTIME.interpret


@cache
def capability_of(device: torch.device) -> tuple[int, int]:
    """Compute capability, (0, 0) of a CPU."""
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else (0, 0)


class Part(NamedTuple):
    """A tensor in the memory of a call."""

    shape: Sequence[int]
    dtype: torch.dtype


class Pointer(NamedTuple):
    """An argument whose value is the address that a call passes under this name, 16-aligned."""

    name: str
    dtype: torch.dtype


Pointers = Mapping[str, Pointer | None]


def group(kind: type[Any], pointers: Pointers) -> Any:
    """A NamedTuple of pointers, looked up by its field names."""
    return kind(*(pointers[name] for name in kind._fields))


def each(function: Callable[[Any], Any], value: Any) -> Any:
    """Apply a function to an argument, or recursively to a tuple of arguments."""
    if isinstance(value, Pointer) or not isinstance(value, tuple):
        return function(value)
    results = map(function, value)
    return type(value)(*results) if hasattr(value, "_fields") else tuple(results)


class Launch:
    """A kernel, its grid and its arguments.

    Compiles at its first run, for the device that is current then.

    Args:
        kernel: takes pointers, then numbers, then constants with upper-case names.
        grid: programs along each axis.
        arguments: the kernel's arguments; others are ignored. Pointers and numbers may be grouped
            in tuples, constants in a NamedTuple.
        **options: compiler options.
    """

    def __init__(
        self,
        kernel: triton.JITFunction,
        grid: tuple[int, int, int],
        arguments: Mapping[str, Any],
        **options: int | None,
    ) -> None:
        self.kernel = kernel
        self.grid = grid
        self.options = {name: x for name, x in options.items() if x is not None}
        named = {name: arguments[name] for name in kernel.arg_names}
        self.arguments = {name: x for name, x in named.items() if not name.isupper()}
        self.constants = {name: x for name, x in named.items() if name.isupper()}
        numbers = {name: x for name, x in self.arguments.items() if _holds_numbers(x)}
        pointers = [x for name, x in self.arguments.items() if name not in numbers]
        self._addresses = [itemgetter(*_names(x)) for x in pointers]
        self._values = (*numbers.values(), *self.constants.values())

    def __call__(self, addresses: Mapping[str | None, Address], stream: int) -> None:
        """Launch on a stream of the current device.

        Args:
            addresses: address per pointer name; None maps to None.
            stream: handle of the stream.
        """
        if _INTERPRETED:
            filled = {
                name: each(lambda x: addresses[x.name] if isinstance(x, Pointer) else x, value)
                for name, value in self.arguments.items()
            }
            self.kernel[self.grid](**filled, **self.constants)
            return
        compiled = self.compiled
        arguments = (*[find(addresses) for find in self._addresses], *self._values)
        hooks: tuple[Any, Any] = None, None
        metadata = None
        if _RUNTIME.launch_enter_hook.calls or _RUNTIME.launch_exit_hook.calls:
            hooks = _RUNTIME.launch_enter_hook, _RUNTIME.launch_exit_hook
            metadata = compiled.launch_metadata(self.grid, stream, *arguments)
        compiled.run(
            *self.grid,
            stream,
            compiled.function,
            compiled.packed_metadata,
            metadata,
            *hooks,
            *arguments,
        )

    @cached_property
    def compiled(self) -> Any:
        """The kernel, compiled for the current device and loaded."""
        kinds = {name: each(_representative, x) for name, x in self.arguments.items()}
        constants = self.compiled_constants()
        compiled = self.kernel.warmup(**kinds, **constants, grid=self.grid, **self.options)
        with _LOADING:
            _ = compiled.run
        return compiled

    def compiled_constants(self) -> dict[str, Any]:
        """The constants in the compiler's form: members of a tuple must be marked as constexpr."""
        constants = self.constants.items()
        return {k: each(tl.constexpr, x) if isinstance(x, tuple) else x for k, x in constants}


def _holds_numbers(value: Any) -> bool:
    return isinstance(value[0] if isinstance(value, tuple) else value, int)


def _names(value: Any) -> list[str | None]:
    """The names in a pointer or a tuple of pointers; None for an absent one."""
    pointers = value if isinstance(value, tuple) and not isinstance(value, Pointer) else (value,)
    return [None if x is None else x.name for x in pointers]


def _representative(value: Pointer | int | None) -> Any:
    """A stand-in that the compiler specialises on.

    A pointer is aligned to 16 bytes. A number only determines its bit width, because it varies
    between calls: the compiler would specialise on 1 and on multiples of 16.
    """
    if isinstance(value, Pointer):
        return MockTensor(value.dtype)
    if value is None:
        return None
    return 3 if -(2**31) <= value < 2**31 else 2**32 + 3


class Plan:
    """A sequence of launches, with the memory they need in one allocation.

    Args:
        parts: parts of the memory.
        launches: the launches, in order.
    """

    def __init__(self, parts: Mapping[str, Part], launches: Sequence[Launch]) -> None:
        self.parts = parts
        self.launches = launches
        self._is_compiled = _INTERPRETED
        self._starts = {}
        self._size = 0
        for name, part in parts.items():
            self._starts[name] = self._size
            self._size += -(-prod(part.shape) * part.dtype.itemsize // 16) * 16

    def run(self, inputs: Mapping[str, Address], device: torch.device) -> Tensor:
        """Launch on the current stream of the current device; return the memory.

        `inputs` are the addresses of everything outside the memory.
        """
        memory = torch.empty(self._size, dtype=torch.uint8, device=device)
        stream = 0
        addresses: dict[str | None, Address]
        if _INTERPRETED:
            addresses = {name: self.part(memory, name) for name in self.parts}
        else:
            stream = driver.active.get_current_stream(device.index)
            first = memory.data_ptr()
            addresses = {name: first + start for name, start in self._starts.items()}
        addresses.update(inputs)
        addresses[None] = None
        if not self._is_compiled:
            self._compile(device)
        for launch in self.launches:
            launch(addresses, stream)
        return memory

    def _compile(self, device: torch.device) -> None:
        """Compile all kernels in parallel: most of the compiler runs outside the GIL."""

        def compile_one(launch: Launch) -> None:
            with torch.cuda.device(device):
                _ = launch.compiled

        with ThreadPoolExecutor() as pool:
            list(pool.map(compile_one, self.launches))
        self._is_compiled = True

    def part(self, memory: Tensor, name: str) -> Tensor:
        """A part of the memory as a tensor."""
        shape, dtype = self.parts[name]
        start = self._starts[name]
        flat = memory[start : start + prod(shape) * dtype.itemsize].view(dtype)
        return flat.view(tuple(shape))


def address(tensor: Tensor | None) -> Address:
    """A tensor's address, or the tensor itself if kernels are interpreted."""
    return tensor if tensor is None or _INTERPRETED else tensor.data_ptr()


def aligned(order: Tensor | None) -> Tensor | None:
    """The order, copied if kernels cannot read it."""
    return order if order is None or order.data_ptr() % 16 == 0 else order.clone()


def kernel_layout(tensor: Tensor, multiple: int = 1) -> Tensor:
    """The tensor (B, H, N, D), copied if kernels cannot read it.

    They need a last stride of 1, a 16-byte aligned address, and other strides that are multiples of
    `multiple`, a power of two.
    """
    batch, head, token, last = tensor.stride()
    if last == 1 and tensor.data_ptr() % 16 == 0 and (batch | head | token) % multiple == 0:
        return tensor
    return tensor.transpose(1, 2).clone(memory_format=torch.contiguous_format).transpose(1, 2)
