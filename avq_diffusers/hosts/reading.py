"""Reading a tensor on the host, which waits for the device: once, until it changes."""

from collections.abc import Callable, Hashable
from typing import Any, TypeVar

from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

Found = TypeVar("Found")

# By the tensor that holds the memory: its version, and what was found in its views.
_read: WeakTensorKeyDictionary = WeakTensorKeyDictionary()


def read_once(tensor: Tensor, read: Callable[[], Found], *others: Hashable) -> Found:
    """What `read` makes of a tensor or of another view of the same, until its memory changes.

    Args:
        tensor: what is read.
        read: reads it.
        others: all else that the result depends on.
    """
    if tensor.is_inference():  # has no version
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
