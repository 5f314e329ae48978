"""Launches with low host overhead: whatever depends on the problem only is computed once.

A plan's pointers are places in a list of addresses, which a run makes anew: tensors that the call
gives, parts of one allocation, and the allocation itself in place of absent ones, which no kernel
reads.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, cached_property
from math import prod
from operator import itemgetter
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.errors import TritonError

from avq_diffusers.attention.triton.launcher import (
    IS_DIRECT,
    IS_INTERPRETED,
    any_pointer,
    current_stream,
    direct_launch,
)

# Number of problem sizes whose launches are cached.
MOST_PLANS = 512

# A kernel takes an address as a pointer, or a tensor if it is launched the public way.
Address = int | Tensor | None


class UnfitError(Exception):
    """Triton cannot make a kernel for this GPU: it needs too much, or does not compile."""


@contextmanager
def _making() -> Iterator[None]:
    """Raise what goes wrong while Triton makes a kernel as `UnfitError`.

    The passes of its compiler raise a plain RuntimeError.
    """
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except (TritonError, RuntimeError) as error:
        raise UnfitError(str(error)) from error


@cache
def capability_of(device: torch.device) -> tuple[int, int]:
    """Compute capability, (0, 0) of a CPU."""
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else (0, 0)


@dataclass(frozen=True)
class Pointer:
    """An argument whose value is an address of each run, aligned to 16 bytes."""

    index: int  # among the addresses
    dtype: torch.dtype


class Buffer(NamedTuple):
    """A tensor in the allocation of a run."""

    start: int
    shape: tuple[int, ...]
    dtype: torch.dtype

    def of(self, allocation: Tensor) -> Tensor:
        stop = self.start + prod(self.shape) * self.dtype.itemsize
        return allocation[self.start : stop].view(self.dtype).view(self.shape)


class Memory:
    """The parts of a plan's allocation.

    Args:
        num_given: number of addresses that come first.
    """

    def __init__(self, num_given: int) -> None:
        self.num_given = num_given
        self.parts: list[Buffer] = []
        self.size = 0

    def add(self, shape: Sequence[int], dtype: torch.dtype) -> Pointer:
        """The pointer to a new part."""
        self.parts.append(Buffer(self.size, tuple(shape), dtype))
        self.size += -(-prod(shape) * dtype.itemsize // 16) * 16
        return Pointer(self.num_given + len(self.parts) - 1, dtype)


def each(function: Callable[[Any], Any], value: Any) -> Any:
    """Apply a function to an argument, or recursively to a tuple of arguments."""
    if not isinstance(value, tuple):
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
        self._addresses = [itemgetter(*_indices(x)) for x in pointers]
        self._values = (*numbers.values(), *self.constants.values())

    def __call__(self, addresses: Sequence[Address], stream: int) -> None:
        """Launch on a stream of the current device, by its handle."""
        if IS_DIRECT:
            self.direct(stream, (*[find(addresses) for find in self._addresses], *self._values))
            return
        filled = {
            name: each(lambda x: x if isinstance(x, int | float) else addresses[_index(x)], value)
            for name, value in self.arguments.items()
        }
        if IS_INTERPRETED:
            self.kernel[self.grid](**filled, **self.constants, **self.options)
            return
        with _making():
            self.kernel[self.grid](**filled, **self.compiled_constants(), **self.options)

    @cached_property
    def direct(self) -> Callable[[int, Iterable[Any]], None]:
        """The launch on the current device; the first compiles and loads the kernel.

        Raises:
            UnfitError: Triton cannot make the kernel.
        """
        kinds = {name: each(_representative, x) for name, x in self.arguments.items()}
        arguments = kinds | self.compiled_constants() | self.options
        with _making():
            return direct_launch(self.kernel, self.grid, arguments)

    def compiled_constants(self) -> dict[str, Any]:
        """The constants in the compiler's form: members of a tuple must be marked as constexpr."""
        constants = self.constants.items()
        return {k: each(tl.constexpr, x) if isinstance(x, tuple) else x for k, x in constants}


def _holds_numbers(value: Any) -> bool:
    return isinstance(value[0] if isinstance(value, tuple) else value, int | float)


def _indices(value: Any) -> list[int]:
    """The places of a pointer or a tuple of pointers; the last is that of absent ones."""
    return [_index(x) for x in (value if isinstance(value, tuple) else (value,))]


def _index(pointer: Pointer | None) -> int:
    return -1 if pointer is None else pointer.index


def _representative(value: Pointer | float | None) -> Any:
    """A stand-in that the compiler specialises on.

    A pointer is aligned to 16 bytes. A number only determines its bit width, because it varies
    between calls: the compiler would specialise on 1 and on multiples of 16.
    """
    if value is None or isinstance(value, Pointer):
        return any_pointer(torch.uint8 if value is None else value.dtype)
    if isinstance(value, float):
        return value
    return 3 if -(2**31) <= value < 2**31 else 2**32 + 3


class Plan:
    """A sequence of launches, with the memory they need in one allocation.

    Args:
        memory: the parts of the allocation.
        launches: the launches, in order.
    """

    def __init__(self, memory: Memory, launches: Sequence[Launch]) -> None:
        self.launches = launches
        self._size = memory.size
        self._parts = memory.parts
        self._starts = [part.start for part in memory.parts]
        self._is_compiled = not IS_DIRECT

    def run(self, given: Sequence[Address], device: torch.device) -> Tensor:
        """Launch on the current stream of the current device; return the allocation.

        `given` are the addresses of everything outside the allocation.
        """
        allocation = torch.empty(self._size, dtype=torch.uint8, device=device)
        stream = 0
        addresses: list[Address]
        if IS_DIRECT:
            stream = current_stream(device.index)
            first = allocation.data_ptr()
            addresses = [*given, *[first + start for start in self._starts], first]
        else:
            addresses = [*given, *[part.of(allocation) for part in self._parts], allocation]
        if not self._is_compiled:
            self._compile(device)
        for launch in self.launches:
            launch(addresses, stream)
        return allocation

    def _compile(self, device: torch.device) -> None:
        """Compile all kernels in parallel: most of the compiler runs outside the GIL."""

        def compile_one(launch: Launch) -> None:
            with torch.cuda.device(device):
                _ = launch.direct

        with ThreadPoolExecutor() as pool:
            list(pool.map(compile_one, self.launches))
        self._is_compiled = True


def addresses_of(*tensors: Tensor | None) -> list[Address]:
    """Addresses of tensors, or the tensors themselves if kernels are launched the public way."""
    return [x.data_ptr() if x is not None and IS_DIRECT else x for x in tensors]


def are_aligned(addresses: Sequence[Address]) -> bool:
    """Whether kernels can read from all these addresses."""
    every = 0
    for address in addresses:
        if address is not None:
            every |= address if isinstance(address, int) else address.data_ptr()
    return every % 16 == 0


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
