"""A value per thread, for threads that share a UNet."""

import threading
from typing import Generic, TypeVar

import torch

Value = TypeVar("Value")


class PerThread(Generic[Value]):
    """A value that each thread sets for itself.

    Compiled code reads the value that any thread set last.

    Args:
        value: initial value.
        shared: whether threads and copies that have not set a value read the one set last; if
            False, they read the initial one.
    """

    def __init__(self, value: Value, *, shared: bool = True) -> None:
        self.first = self.last = value
        self.shared = shared
        self.own = _ThreadLocal()

    def set(self, value: Value) -> None:
        self.last = value
        if not torch.compiler.is_compiling():
            self.own.value = value

    def get(self) -> Value:
        if torch.compiler.is_compiling():
            return self.last
        return getattr(self.own, "value", self.last if self.shared else self.first)


class _ThreadLocal(threading.local):
    def __reduce__(self) -> tuple[type, tuple[()]]:
        return _ThreadLocal, ()
