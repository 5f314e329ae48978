"""Triton's own launcher, called without what `kernel[grid](...)` repeats at every launch.

To bind, check and specialise arguments takes a host longer than a small kernel takes a GPU. Here,
a kernel is compiled once and launched like at the end of `JITFunction.run`, read from Triton 3.6.0
and 3.7.1. If that function of another version uses other names, or if kernels are interpreted,
`IS_DIRECT` is False, and they are launched the public way.
"""

from collections.abc import Callable, Iterable, Mapping
from threading import Lock
from typing import Any

import triton
from triton import knobs
from triton.runtime import driver
from triton.runtime.jit import JITFunction, MockTensor

_RUNTIME = knobs.runtime
_USED = {"run", "function", "packed_metadata", "launch_metadata", "launch_enter_hook"}
IS_INTERPRETED = bool(_RUNTIME.interpret)
IS_DIRECT = not IS_INTERPRETED and {*JITFunction.run.__code__.co_names} >= _USED

# Triton loads a binary at first use, and not safely where threads share the kernel.
_LOADING = Lock()

# Stands for an aligned pointer to numbers of a dtype.
any_pointer = MockTensor


def current_stream(device_index: int) -> int:
    """Handle of the current stream."""
    return driver.active.get_current_stream(device_index)


def direct_launch(
    kernel: triton.JITFunction, grid: tuple[int, int, int], arguments: Mapping[str, Any]
) -> Callable[[int, Iterable[Any]], None]:
    """The launch of a kernel, compiled for arguments like these and loaded on the current device.

    It takes a stream of that device, and arguments with integers for pointers.
    """
    compiled = kernel.warmup(**arguments, grid=grid)
    with _LOADING:
        run = compiled.run
    about = compiled.function, compiled.packed_metadata

    def launch(stream: int, arguments: Iterable[Any]) -> None:
        enter = leave = metadata = None
        if _RUNTIME.launch_enter_hook.calls or _RUNTIME.launch_exit_hook.calls:
            enter, leave = _RUNTIME.launch_enter_hook, _RUNTIME.launch_exit_hook
            metadata = compiled.launch_metadata(grid, stream, *arguments)
        run(*grid, stream, *about, metadata, enter, leave, *arguments)

    return launch
