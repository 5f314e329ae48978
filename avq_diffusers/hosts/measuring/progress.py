"""One progress bar for all runs of a measurement, with a total known before the first."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate
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
        runs: the model calls planned in each run of the model, by denoising step.
        shown: as in `measure_error`.
    """

    def __init__(self, name: str, runs: Sequence[Sequence[int]], shown: Shown) -> None:
        self.name, self.shown = name, shown
        ends = [*accumulate((calls for steps in runs for calls in steps), initial=0)]
        self.total = ends[-1]
        firsts = accumulate(map(len, runs), initial=0)
        # Calls done before each step of a run, and after its last.
        self.bounds = [ends[x : x + len(steps) + 1] for x, steps in zip(firsts, runs, strict=False)]
        self.done = self.run = 0
        self.limit = 0  # at the end of the current step

    @contextmanager
    def open(self) -> Iterator[None]:
        """Show the bar inside the `with` block; at its end, it is full."""
        is_hidden = self.shown is not True
        bar = tqdm(desc=self.name, total=self.total, unit="call", disable=is_hidden)
        with bar as self.bar:
            yield
            self._reach(self.total)

    def begin_run(self, run: int) -> None:
        """Enter a run; those before it that did not take place count as done."""
        self.run = run
        self.begin_step(0)

    def begin_step(self, done: int, left: int | None = None) -> None:
        """Enter a step of the run, after `done` others and with `left` to do, None as planned."""
        bounds = self.bounds[self.run]
        planned = len(bounds) - 1
        steps = done + (max(1, planned - done) if left is None else left)
        self._reach(bounds[done * planned // steps])
        self.limit = bounds[-(-(done + 1) * planned // steps)]

    def count_call(self) -> None:
        """Note that a model call is done."""
        self._reach(min(self.done + 1, self.limit))

    def _reach(self, calls: int) -> None:
        if calls > self.done:
            self.bar.update(calls - self.done)
            self.done = calls
            if callable(self.shown):
                self.shown(self.name, calls, self.total)
