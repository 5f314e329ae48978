"""One progress bar for all runs of a measurement, with a total known before the first."""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeAlias

from tqdm import tqdm

# Whether there is a bar, or a function that gets its name, the calls done and all calls.
Shown: TypeAlias = bool | Callable[[str, int, int], None]


class Progress:
    """Counts model calls.

    Pipelines may call a model less or more often than planned: they skip steps, or run guidance in
    a call of its own. Then the bar keeps to the share of the run's steps that are done.

    Args:
        name: what the bar says.
        total: the model calls planned in all runs.
        shown: as in `measure_error`.
    """

    def __init__(self, name: str, total: int, shown: Shown) -> None:
        self.name, self.total, self.shown = name, total, shown
        self.done = 0
        self.first = self.end = 0  # planned calls before the current run, and at its end
        self.limit = 0  # at the end of the current step

    @contextmanager
    def open(self) -> Iterator[None]:
        """Show the bar inside the `with` block; at its end, it is full."""
        is_hidden = self.shown is not True
        bar = tqdm(desc=self.name, total=self.total, unit="call", disable=is_hidden)
        with bar as self.bar:
            yield
            self._reach(self.total)

    def begin_run(self, calls: int) -> None:
        """Enter the next run, of this many planned calls."""
        self.first, self.end = self.end, self.end + calls
        self._reach(self.first)

    def begin_step(self, before: float, after: float) -> None:
        """Enter a step of the run, between these shares of its planned calls."""
        calls = self.end - self.first
        self._reach(self.first + math.floor(calls * before))
        self.limit = self.first + math.ceil(calls * after)

    def count_call(self) -> None:
        """Note that a model call is done."""
        self._reach(min(self.done + 1, self.limit))

    def _reach(self, calls: int) -> None:
        if calls > self.done:
            self.bar.update(calls - self.done)
            self.done = calls
            if callable(self.shown):
                self.shown(self.name, calls, self.total)
