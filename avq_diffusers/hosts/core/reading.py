"""Read a tensor on the host, which synchronizes with the device: once, until it changes."""

from collections.abc import Callable, Hashable
from typing import Any, TypeVar

from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

Found = TypeVar("Found")

# Base tensor -> its version, and what was read from its views.
_read: WeakTensorKeyDictionary = WeakTensorKeyDictionary()


def read_once(tensor: Tensor, read: Callable[[], Found], *others: Hashable) -> Found:
    """`read()`, cached for a tensor and equal views of the same memory until that changes.

    Args:
        tensor: the tensor that `read` reads.
        read: reads it.
        others: everything else that the result depends on.
    """
    if tensor.is_inference():  # no version counter
        return read()
    owner = tensor if tensor._base is None else tensor._base
    version, found = _read.get(owner, (None, {}))
    if version != tensor._version:
        found = {}
        _read[owner] = tensor._version, found
    view: Any = tensor.shape, tensor.stride(), tensor.storage_offset(), tensor.dtype, others
    if view not in found:
        found[view] = read()
    return found[view]
