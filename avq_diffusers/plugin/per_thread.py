"""A value per thread, for threads that generate with one UNet at the same time."""

import threading
from typing import Generic, TypeVar

import torch

Value = TypeVar("Value")


class PerThread(Generic[Value]):
    """A value that each thread sets for itself.

    Three readers get the value set last by any thread: compiled code, threads that have set none,
    and copies.
    """

    def __init__(self, value: Value) -> None:
        self.last = value
        self.own = _ThreadLocal()

    def set(self, value: Value) -> None:
        self.last = value
        if not torch.compiler.is_compiling():
            self.own.value = value

    def get(self) -> Value:
        if torch.compiler.is_compiling():
            return self.last
        return getattr(self.own, "value", self.last)


class _ThreadLocal(threading.local):
    def __reduce__(self) -> tuple[type, tuple[()]]:
        return _ThreadLocal, ()
