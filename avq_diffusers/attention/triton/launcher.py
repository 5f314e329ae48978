"""Triton's own launcher, called without what `kernel[grid](...)` repeats at every launch.

To bind, check and specialise arguments takes a host longer than a small kernel takes a GPU. Here,
a kernel is compiled once and launched like at the end of `JITFunction.run`, read from Triton 3.6.0
and 3.7.1. If that function of another version uses other names, or if kernels are interpreted,
`IS_DIRECT` is False, and they are launched the public way.
"""

from collections.abc import Mapping
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


def compile_and_load(
    kernel: triton.JITFunction, arguments: Mapping[str, Any], **options: Any
) -> Any:
    """The kernel for arguments like these, on the current device."""
    compiled = kernel.warmup(**arguments, **options)
    with _LOADING:
        _ = compiled.run
    return compiled


def current_stream(device_index: int) -> int:
    """Handle of the current stream."""
    return driver.active.get_current_stream(device_index)


def launch_compiled(
    compiled: Any, grid: tuple[int, int, int], stream: int, arguments: tuple[Any, ...]
) -> None:
    """Launch on a stream of the current device; pointers are integers."""
    enter = leave = metadata = None
    if _RUNTIME.launch_enter_hook.calls or _RUNTIME.launch_exit_hook.calls:
        enter, leave = _RUNTIME.launch_enter_hook, _RUNTIME.launch_exit_hook
        metadata = compiled.launch_metadata(grid, stream, *arguments)
    about = compiled.function, compiled.packed_metadata, metadata
    compiled.run(*grid, stream, *about, enter, leave, *arguments)
