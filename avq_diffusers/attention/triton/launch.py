"""Launches at little cost for the host: what depends on the problem size is computed once.

Arguments go by the names that the kernels give them: pointer `key_ptr` is the address of `key`. A
name that is missing raises; a pointer that is absent is None.
"""

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache, cached_property
from math import prod
from operator import itemgetter
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton import knobs
from triton.runtime import driver
from triton.runtime.jit import MockTensor

# Problem sizes whose launches are kept.
MOST_PLANS = 512

# What a kernel takes for a pointer: an address, or a tensor if it is interpreted.
Address = int | Tensor | None

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
    """An argument whose value is the address that a call gives the name, a multiple of 16."""

    name: str
    dtype: torch.dtype


Pointers = Mapping[str, Pointer | None]


def group(kind: type[Any], pointers: Pointers) -> Any:
    """A NamedTuple of the pointers that its fields name."""
    return kind(*(pointers[name] for name in kind._fields))


def each(function: Callable[[Any], Any], value: Any) -> Any:
    """A function of an argument, or of all that a tuple of arguments holds."""
    if isinstance(value, Pointer) or not isinstance(value, tuple):
        return function(value)
    results = map(function, value)
    return type(value)(*results) if hasattr(value, "_fields") else tuple(results)


class Launch:
    """A kernel, its grid and its arguments.

    It compiles when it first runs. From then on it belongs to the device that was current.

    Args:
        kernel: takes pointers, then numbers, then constants, whose names are upper case.
        grid: programs along each axis.
        arguments: what the kernel takes, and perhaps more. Pointers and numbers may be in tuples of
            their own, constants in a NamedTuple.
        **options: of the compiler.
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
            addresses: of all pointers; that of None is None.
            stream: its handle.
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

    @cached_property
    def compiled(self) -> Any:
        """The kernel, compiled for the current device."""
        kinds = {name: each(_representative, x) for name, x in self.arguments.items()}
        constants = self.compiled_constants()
        return self.kernel.warmup(**kinds, **constants, grid=self.grid, **self.options)

    def compiled_constants(self) -> dict[str, Any]:
        """The constants as the compiler takes them: what a tuple holds must say that it is one."""
        constants = self.constants.items()
        return {k: each(tl.constexpr, x) if isinstance(x, tuple) else x for k, x in constants}


def _holds_numbers(value: Any) -> bool:
    return isinstance(value[0] if isinstance(value, tuple) else value, int)


def _names(value: Any) -> list[str | None]:
    """The names of a pointer or a tuple of pointers; None of one that is absent."""
    pointers = value if isinstance(value, tuple) and not isinstance(value, Pointer) else (value,)
    return [None if x is None else x.name for x in pointers]


def _representative(value: Pointer | int | None) -> Any:
    """What the compiler sees of an argument.

    A pointer is aligned to 16 bytes. A number says no more than how many bits it needs, because it
    differs from call to call: the compiler would treat 1, and multiples of 16, in their own way.
    """
    if isinstance(value, Pointer):
        return MockTensor(value.dtype)
    if value is None:
        return None
    return 3 if -(2**31) <= value < 2**31 else 2**32 + 3


class Plan:
    """Launches one after another, and the memory that they need, in one allocation.

    Args:
        parts: of the memory.
        launches: in their order.
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

        `inputs` are addresses of what is not in the memory.
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
        """Compile all kernels side by side: most of the compiler runs outside the GIL."""

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
