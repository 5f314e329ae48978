"""Time functions in turns, so that clock speed and temperature affect all of them alike."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median
from time import perf_counter
from typing import Any

import torch


@dataclass(frozen=True)
class Effort:
    """Number of rounds, with one block per function that repeats it for about `block_ms`."""

    rounds: int = 9
    block_ms: float = 20.0
    eager_rounds: int = 3


def block_ms(function: Callable[[], Any], repeats: int, device: torch.device) -> float:
    """Mean time per call over `repeats` back-to-back calls."""
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


def in_turns(windows: Sequence[Callable[[], Sequence[float]]], rounds: int) -> list[list[float]]:
    """What each window measures over all rounds, which alternate direction."""
    times: list[list[float]] = [[] for _ in windows]
    turn = list(zip(windows, times, strict=True))
    for _ in range(rounds):
        for window, measured in turn:
            measured += window()
        turn.reverse()
    return times


def time_in_turns(
    runs: Sequence[Callable[[int], Any]], num_sets: int, device: torch.device, effort: Effort
) -> list[dict[str, Any]]:
    """Median time of each run over all input sets, in ms per set.

    Args:
        runs: each works on input set i.
        num_sets: number of input sets.
        device: where they run.
        effort: rounds; a run with a CUDA graph gets fewer eager ones.

    Returns:
        For each run `ms` (in a CUDA graph if it can be captured, else eager), `timer`, `eager_ms`,
        and `spread`, the range of its blocks divided by their median. `note` says why there is no
        graph.
    """

    def all_sets(run: Callable[[int], Any]) -> None:
        for index in range(num_sets):
            run(index)

    def window(call: Callable[[], Any]) -> Callable[[], list[float]]:
        block_ms(call, 1, device)
        estimate = max(block_ms(call, 1, device), 1e-3)
        repeats = max(1, min(200, round(effort.block_ms / estimate)))
        return lambda: [block_ms(call, repeats, device)]

    calls = [partial(all_sets, run) for run in runs]
    graphs: dict[int, Callable[[], None]] = {}
    notes: dict[int, str] = {}
    pool = torch.cuda.graph_pool_handle() if device.type == "cuda" else None
    for index, call in enumerate(calls if pool else ()):
        call()  # compiles, and fills caches
        graph = torch.cuda.CUDAGraph()
        try:
            # Results are dropped at once, so all graphs may share one pool.
            with torch.cuda.graph(graph, pool=pool):
                call()
        except RuntimeError as error:
            notes[index] = f"no CUDA graph: {str(error).splitlines()[0]}"
        else:
            graphs[index] = graph.replay

    chosen = [graphs.get(index, call) for index, call in enumerate(calls)]
    times = in_turns([window(call) for call in chosen], effort.rounds)
    eager = in_turns([window(call) for call in calls], effort.eager_rounds) if graphs else times
    return [
        {
            "ms": median(blocks) / num_sets,
            "timer": "graph" if index in graphs else "eager",
            "eager_ms": median(eager[index]) / num_sets,
            "spread": (max(blocks) - min(blocks)) / median(blocks),
            **({"note": notes[index]} if index in notes else {}),
        }
        for index, blocks in enumerate(times)
    ]


def over(
    row: Mapping[str, Any], rows: Sequence[Mapping[str, Any]], method: str | None
) -> float | None:
    """A row's time relative to that of a method among the rows; None without either."""
    base = next((other["ms"] for other in rows if other["method"] == method), None)
    return row["ms"] / base if row["ms"] and base else None
