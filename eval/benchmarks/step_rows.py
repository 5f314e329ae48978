"""Rows of one size and mode, each one step by one method, timed in turns; their files and plots.

A row with wrong output gets no time.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from statistics import median
from time import perf_counter

import torch
from torch import Tensor

from eval.benchmarks.contenders import TOLERANCE, Row, relative_error
from eval.benchmarks.step import COMPILE, EAGER, FORCED, GRAPH, NetworkBench, Step
from eval.names import EXACT, LIMIT, method_label, timed_method
from eval.store.markdown import number
from eval.store.plots import bar_plot

TURNS = 5
NUM_INPUTS = 4
MODES = {
    GRAPH: "CUDA graph, not compiled",
    COMPILE: "torch.compile in a CUDA graph",
    EAGER: "eager",
}
MODES_WITHOUT_GRAPHS = {**MODES, COMPILE: "torch.compile"}
# What must equal the default SDPA.
EXACT_ROWS = (EXACT, *FORCED)


@torch.no_grad()
def step_rows(
    bench: NetworkBench,
    side: int,
    mode: str,
    *,
    methods: Sequence[str],
    deadline: float | None = None,
    window_ms: float = 4000.0,
) -> Iterator[list[Row]]:
    """Time one step at side x side pixels. Yield all rows so far after every row, and at the end.

    No row starts after `deadline`, a value of `perf_counter`. Each row takes `window_ms`; its
    second half counts.
    """
    torch.compiler.reset()
    inputs = [bench.inputs(side) for _ in range(NUM_INPUTS)]
    pool = torch.cuda.graph_pool_handle() if bench.cuda and mode != EAGER else None
    exact: Tensor | None = None
    rows: list[Row] = []
    ready: list[tuple[Row, Step]] = []
    for name in methods:
        row: Row = {"size": side, "mode": mode, "method": name, "label": method_label(name)}
        row["ms"] = None
        rows.append(row)
        if deadline is not None and perf_counter() > deadline:
            row["note"] = "not started: out of time"
        elif reason := bench.cannot_run(name, mode):
            row["note"] = reason
        else:
            step = Step(bench, name, inputs)
            try:
                eager, facts = step.first_runs(mode, pool, exact)
            except (RuntimeError, ValueError, AttributeError, TypeError) as error:
                # Foreign code (ToMe, compilers, backends) fails in all of these ways.
                row["note"] = f"{type(error).__name__}: {str(error).splitlines()[0]}"
            else:
                exact = eager if name == EXACT else exact
                row |= facts
                row["difference_from_sdpa"] = (
                    None if exact is None else relative_error(eager, exact)
                )
                if reason := wrong_output(row):
                    row |= {"ms": None, "note": reason}
                else:
                    ready.append((row, step))
        print(
            f"{side} {mode} {row['label']}: {number(row['ms'])} ms {row.get('note', '')}",
            flush=True,
        )
        yield with_ratios(rows)
    # A compiled step that is not captured would be compiled again for another turn.
    if mode == EAGER or pool is not None:
        _time_in_turns(ready, window_ms)
    yield with_ratios(rows)


def wrong_output(row: Row) -> str | None:
    """Why a row gets no time; None if its output is right.

    The output must be closer to its oracle than half-way to SDPA. Otherwise the method did not run.
    A method that may be exact must only be close.
    """
    name, distance = row["method"], row["difference_from_sdpa"]
    if distance is None or name in EXACT_ROWS or timed_method(name).route == "fastest":
        limit, compared = TOLERANCE, ""
    else:
        limit, compared = distance / 2, f", difference from SDPA {distance:.3g}"
    if row["error"] < limit:
        return None
    return f"wrong output: relative error {row['error']:.3g}{compared}"


def _time_in_turns(ready: Sequence[tuple[Row, Step]], window_ms: float) -> None:
    """Replace the first times by medians of steps taken in turns.

    A row takes many steps per turn, and the later half counts: a GPU at its power limit needs
    tenths of a second to settle on a clock.
    """
    half_turn_ms = window_ms / TURNS / 2
    counts = [max(1, round(half_turn_ms / row["ms"])) for row, _ in ready]
    times: list[list[float]] = [[] for _ in ready]
    turns = list(zip(ready, counts, times, strict=True))
    for _ in range(TURNS):
        for (_, step), count, samples in turns:
            # A captured step has its method in it.
            method = step.bench.method(step.name) if step.replay is None else nullcontext()
            with method:
                taken = [step.milliseconds(index) for index in range(2 * count)]
            samples += taken[count:]
        turns.reverse()
    for (row, _), samples in zip(ready, times, strict=True):
        row["ms"] = median(samples)
        row["steps"] = len(samples)
        row["spread"] = (max(samples) - min(samples)) / row["ms"]


def with_ratios(rows: Sequence[Row]) -> list[Row]:
    """Add each row's time over that of the limit and of SDPA."""
    times = {row["method"]: row["ms"] for row in rows}

    def over(row: Row, method: str) -> float | None:
        base = times.get(method)
        return row["ms"] / base if row["ms"] and base else None

    return [{**row, "over_limit": over(row, LIMIT), "over_sdpa": over(row, EXACT)} for row in rows]


def result_path(output: Path, stem: str, side: int, mode: str, device: torch.device) -> Path:
    """The file of the rows of one size and mode."""
    return output / f"{stem}_{side}_{mode}_{device.type}.json"


def plot_steps(
    output: Path, stem: str, side: int, device: torch.device, modes: Mapping[str, str], title: str
) -> None:
    """Plot the times of one size as bars, one panel per mode with a result in the folder.

    If their devices differ, the panels name them. `title` has the fields of a result, and `side`,
    in braces.
    """
    paths = [result_path(output, stem, side, mode, device) for mode in MODES]
    documents = [json.loads(path.read_text()) for path in paths if path.is_file()]
    devices = [document["environment"]["device"] for document in documents]
    panels: dict[str, dict[str, float]] = {}
    for document, name in zip(documents, devices, strict=True):
        rows = document["rows"]
        if bars := {row["label"]: row["ms"] for row in rows if row["ms"] is not None}:
            panel = modes[rows[0]["mode"]]
            panels[panel if len(set(devices)) == 1 else f"{panel}\n{name}"] = bars
    bar_plot(
        output / f"{stem}_{side}_{device.type}.png",
        panels,
        xlabel="time per step (ms)",
        title=title.format(**documents[0], side=side),
    )
