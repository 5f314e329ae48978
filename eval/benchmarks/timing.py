"""Time functions in turns, so that clock and temperature affect all of them alike."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median
from time import perf_counter
from typing import Any

import torch


@dataclass(frozen=True)
class Effort:
    """Rounds of one block per function. A block repeats the function for about `block_ms`."""

    rounds: int = 9
    block_ms: float = 20.0
    eager_rounds: int = 3


def block_ms(function: Callable[[], Any], repeats: int, device: torch.device) -> float:
    """Mean time of one call among `repeats` calls back to back."""
    if device.type != "cuda":
        start = perf_counter()
        for _ in range(repeats):
            function()
        return (perf_counter() - start) * 1e3 / repeats
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(repeats):
        function()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / repeats


def time_in_turns(
    runs: Sequence[Callable[[int], Any]], num_sets: int, device: torch.device, effort: Effort
) -> list[dict[str, Any]]:
    """Median time of each run over all input sets, in ms per set.

    Args:
        runs: each works on input set i.
        num_sets: number of input sets.
        device: where they run.
        effort: rounds; a run with a CUDA graph has fewer eager ones.

    Returns:
        `ms` of each run (CUDA graph if it can be captured, else eager), `timer`, `eager_ms`, and
        `spread`, the range of its blocks over their median. `note` says why there is no graph.
    """

    def all_sets(run: Callable[[int], Any]) -> None:
        for index in range(num_sets):
            run(index)

    calls = [partial(all_sets, run) for run in runs]
    replays: dict[int, Callable[[], None]] = {}
    notes: dict[int, str] = {}
    if device.type == "cuda":
        pool = torch.cuda.graph_pool_handle()
        for index, call in enumerate(calls):
            call()  # compiles, and fills what runs keep between calls
            graph = torch.cuda.CUDAGraph()
            try:
                # Results are dropped at once, so all graphs may share one pool.
                with torch.cuda.graph(graph, pool=pool):
                    call()
            except RuntimeError as error:
                notes[index] = f"no CUDA graph: {str(error).splitlines()[0]}"
            else:
                replays[index] = graph.replay

    eager = [
        _Blocks(call, effort.eager_rounds if index in replays else effort.rounds, effort, device)
        for index, call in enumerate(calls)
    ]
    graphs = {
        index: _Blocks(replay, effort.rounds, effort, device) for index, replay in replays.items()
    }
    blocks = [*eager, *graphs.values()]
    for turn in range(effort.rounds):
        for one in blocks if turn % 2 == 0 else reversed(blocks):
            if turn < one.rounds:
                one.time()

    timings = []
    for index in range(len(runs)):
        times = graphs.get(index, eager[index]).times
        timing = {
            "ms": median(times) / num_sets,
            "timer": "graph" if index in graphs else "eager",
            "eager_ms": median(eager[index].times) / num_sets,
            "spread": (max(times) - min(times)) / median(times),
        }
        if index in notes:
            timing["note"] = notes[index]
        timings.append(timing)
    return timings


class _Blocks:
    """Times of one call in ms, in blocks. A first estimate decides how often a block repeats it."""

    def __init__(
        self, call: Callable[[], Any], rounds: int, effort: Effort, device: torch.device
    ) -> None:
        self.call, self.rounds, self.device = call, rounds, device
        self.times: list[float] = []
        block_ms(call, 1, device)
        estimate = block_ms(call, 1, device)
        self.repeats = max(1, min(200, round(effort.block_ms / max(estimate, 1e-3))))

    def time(self) -> None:
        self.times.append(block_ms(self.call, self.repeats, self.device))
