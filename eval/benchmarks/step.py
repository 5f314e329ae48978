"""Time one denoising step: `python -m eval bench unet` and `bench transformer`.

Weights are random, except mini-sd's, and nothing is downloaded. Of a transformer, a few blocks of
each kind are timed, in about the model's proportions, and the time is scaled to all blocks.

Rows of one size and mode are timed in turns. A row with wrong output is not timed.
"""

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from operator import itemgetter
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from eval.benchmarks.contenders import FORCED, TOLERANCE, Row, relative_error
from eval.benchmarks.models import Model
from eval.benchmarks.networks import COMPILE, EAGER, GRAPH, NetworkBench, bench_of, layer_states
from eval.benchmarks.timing import block_ms, in_turns, over
from eval.methods.base import TRANSFORMER_STEP, UNET_STEP
from eval.methods.registry import CUDNN, EXACT, LIMIT, check_place, method_label, timed_method
from eval.store.markdown import figure, number, rows_table
from eval.store.plots import bar_plot
from eval.store.report import save_json

TURNS = 5
NUM_INPUTS = 4
MODES = {
    GRAPH: "CUDA graph, not compiled",
    COMPILE: "torch.compile in a CUDA graph",
    EAGER: "eager",
}
MODES_WITHOUT_GRAPHS = {**MODES, COMPILE: "torch.compile"}
# Method -> field with a row's time relative to that method's.
RATIOS = {"over_limit": LIMIT, "over_sdpa": EXACT, "over_cudnn": CUDNN}
COLUMNS = {
    "size": lambda row: str(row["size"]),
    "mode": itemgetter("mode"),
    "method": itemgetter("label"),
    "ms": figure("ms"),
    "/ limit": figure("over_limit", ".3f"),
    "/ SDPA": figure("over_sdpa", ".3f"),
    "/ cuDNN": figure("over_cudnn", ".3f"),
    "peak MiB": figure("peak_mib", ".0f"),
    "error": figure("error", ".1e"),
    "note": lambda row: row.get("note", ""),
}


@dataclass(frozen=True)
class Choice:
    """What to time.

    Attributes:
        model: the model whose step is timed.
        sizes: sides of the images, or lines or frames of the videos.
        methods: methods, the most important first.
        modes: `"graph"`, `"compile"`, `"eager"`.
        seconds: seconds of steps per row; the second half counts.
        minutes: no row starts after this time.

    Raises:
        ValueError: a size, method, level or mode is unknown or impossible.
    """

    model: Model
    sizes: Sequence[int]
    methods: Sequence[str]
    modes: Sequence[str] = tuple(MODES)
    seconds: float = 4.0
    minutes: float | None = None

    def __post_init__(self) -> None:
        model = self.model
        for side in self.sizes:
            if model.multiple is None and side not in model.sizes:
                possible = " or ".join(map(str, model.sizes))
                raise ValueError(f"--sizes must be {possible} for {model.title}, but got {side}.")
            if model.multiple is not None and (side < 64 or side % model.multiple):
                raise ValueError(
                    f"--sizes must be multiples of {model.multiple} from 64 on, but got {side}."
                )
        for mode in self.modes:
            if mode not in MODES:
                raise ValueError(f"modes must be {', '.join(MODES)}, but got {mode!r}.")
        for name in self.methods:
            check_place(name, UNET_STEP if model.is_unet else TRANSFORMER_STEP)
            config = timed_method(name).config
            levels = set() if config is None else set(config.levels)
            if model.is_unet and not levels <= set(model.levels):
                raise ValueError(
                    f"the levels of {model.title} are {', '.join(map(str, model.levels))}, but "
                    f"{name} changes {', '.join(map(str, sorted(levels)))}."
                )


def run_steps(choice: Choice, device: torch.device, output: Path, *, command: str) -> None:
    """Time the steps, print tables, and write one JSON file per size and mode, one plot per size.

    The file is rewritten after every row.
    """
    deadline = None if choice.minutes is None else perf_counter() + 60 * choice.minutes
    model = choice.model.for_device(device)
    labels = MODES if device.type == "cuda" else MODES_WITHOUT_GRAPHS
    bench = bench_of(model, device)
    if not bench.cuda:
        print(f"{device.type}: {model.title}; no CUDA graphs, FA2 or cuDNN")
    for name in choice.methods if bench.cuda else ():
        timed_method(name).check(next(bench.network.parameters()))
    facts: Row = {"unet": model.title}
    if not model.is_unet:
        blocks = {x: n for x, n in bench.network.config.items() if x.endswith("_layers")}
        facts = {"model": model.title, "timed_blocks": blocks, "multiplied_by": model.times}
    for side in choice.sizes:
        for mode in choice.modes:
            rows: list[Row] = []
            window_ms = 1000 * choice.seconds
            for rows in step_rows(bench, side, mode, choice.methods, deadline, window_ms):
                save_json(
                    output / f"{model.stem}_{side}_{mode}_{device.type}.json",
                    command=command,
                    device=device,
                    **facts,
                    dtype=str(bench.dtype).removeprefix("torch."),
                    batch=model.batch,
                    backend=bench.backend,
                    mode=labels[mode],
                    rows=rows,
                )
            print(rows_table(COLUMNS, rows), flush=True)
            if model.times != 1:
                print(f"Only some blocks were timed; times are scaled by {model.times:.3g}.")
        plot_steps(output, model.stem, side, device.type)


@torch.no_grad()
def step_rows(
    bench: NetworkBench,
    side: int,
    mode: str,
    methods: Sequence[str],
    deadline: float | None = None,
    window_ms: float = 4000.0,
) -> Iterator[list[Row]]:
    """Time one step at side x side pixels; yield all rows so far after each row, and at the end.

    No row starts after `deadline`, in terms of `perf_counter`. Each row takes `window_ms`; its
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
                # Third-party code (ToMe, compilers, backends) fails in all of these ways.
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
        shown = f"{number(row['ms'])} ms {row.get('note', '')}"
        print(f"{side} {mode} {row['label']}: {shown}", flush=True)
        yield in_all_blocks(rows, bench.model.times)
    # A compiled step that is not captured would recompile on each turn.
    if mode == EAGER or pool is not None:
        _time_in_turns(ready, window_ms)
    yield in_all_blocks(rows, bench.model.times)


def wrong_output(row: Row) -> str | None:
    """Why a row is not timed; None if its output is right.

    The output must be closer to its oracle than half-way to SDPA, or the method did not run. A
    method that may run exact attention only has to be close.
    """
    name, distance = row["method"], row["difference_from_sdpa"]
    if distance is None or name in (EXACT, *FORCED) or timed_method(name).route == "fastest":
        limit, compared = TOLERANCE, ""
    else:
        limit, compared = distance / 2, f", difference from SDPA {distance:.3g}"
    if row["error"] < limit:
        return None
    return f"wrong output: relative error {row['error']:.3g}{compared}"


def _time_in_turns(ready: Sequence[tuple[Row, "Step"]], window_ms: float) -> None:
    """Replace the first times by medians of steps taken in turns.

    Each turn takes many steps of a row, and the later half counts: a GPU at its power limit needs
    tenths of a second to settle on a clock.
    """
    half_turn_ms = window_ms / TURNS / 2
    windows = [partial(step.window, max(1, round(half_turn_ms / row["ms"]))) for row, step in ready]
    for (row, _), samples in zip(ready, in_turns(windows, TURNS), strict=True):
        row["ms"] = median(samples)
        row["steps"] = len(samples)
        row["spread"] = (max(samples) - min(samples)) / row["ms"]


def in_all_blocks(rows: Sequence[Row], times: float) -> list[Row]:
    """The rows with times scaled to all blocks, and the `RATIOS` of these."""
    found = [{**row, "ms": row["ms"] and row["ms"] * times} for row in rows]
    return [
        row | {field: over(row, found, method) for field, method in RATIOS.items()} for row in found
    ]


class Step:
    """One eager, compiled or captured step: `prepare` copies in the next inputs, `run` runs it."""

    def __init__(
        self, bench: NetworkBench, name: str, inputs: Sequence[tuple[Tensor, ...]]
    ) -> None:
        def step(*tensors: Tensor) -> Tensor:
            return bench.predict(*tensors)

        self.bench, self.name, self.inputs = bench, name, inputs
        self.method = timed_method(name)
        self.current = tuple(tensor.clone() for tensor in inputs[0])
        self.model: Callable[..., Tensor] = step
        self.replay: Callable[[], None] | None = None
        self.alive: list[Any] = []

    def prepare(self, index: int) -> None:
        for target, source in zip(self.current, self.inputs[index % len(self.inputs)], strict=True):
            target.copy_(source)

    def run(self) -> Tensor | None:
        """The output; None for a captured step."""
        return self.model(*self.current) if self.replay is None else self.replay()

    def first_runs(
        self, mode: str, pool: tuple[int, int] | None, exact: Tensor | None
    ) -> tuple[Tensor, Row]:
        """Bring the step into its mode, `"graph"`, `"compile"` or `"eager"`.

        Args:
            mode: the mode.
            pool: memory of the CUDA graph; None if the step is not captured.
            exact: SDPA's eager output for FA2 and cuDNN to match, if known.

        Returns:
            The eager output, and fields of the row, including a first time.
        """
        bench, name, method = self.bench, self.name, self.method
        may_be_exact = method.route == "fastest"
        with bench.method(name):
            eager = self.run().clone()
            if mode == COMPILE and may_be_exact:  # according to the route for compiled calls
                for state in layer_states(bench.network):
                    state.route.break_even = {
                        key: found._replace(eager=found.compiled)
                        for key, found in state.route.break_even.items()
                    }
                eager = self.run().clone()
        errors = []
        if name in FORCED and exact is not None:
            errors.append(relative_error(eager, exact))
        elif method.config is not None and not may_be_exact:
            with bench.method(name, oracle=True):
                errors.append(relative_error(eager, self.run()))
        facts: Row = {}
        with bench.method(name):
            if mode == COMPILE:
                self.model = bench.compiled(self.model, name)
            output = self.run().clone()
            self.run()
            if bench.cuda:
                facts["peak_mib"] = self._peak_mib()
            if pool is not None:
                output = self._capture(pool)
            facts["ms"] = median(self.milliseconds(index) for index in range(3))
        errors.append(relative_error(output, eager))
        facts["error"] = torch.tensor(errors).max().item()  # Python's max drops NaN
        return eager, facts

    def window(self, count: int) -> list[float]:
        """Times of the later half of twice as many steps."""
        # A captured step includes its method.
        with self.bench.method(self.name) if self.replay is None else nullcontext():
            return [self.milliseconds(index) for index in range(2 * count)][count:]

    def milliseconds(self, index: int) -> float:
        """Time of one step, without copying its inputs."""
        self.prepare(index)
        if self.bench.cuda:
            torch.cuda.synchronize()
        return block_ms(self.run, 1, self.bench.device)

    def _capture(self, pool: tuple[int, int]) -> Tensor:
        """Record the step; its output for the first inputs."""
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool):
            output = self.run()
        self.prepare(0)
        graph.replay()
        self.replay = graph.replay
        # The method's end frees what AVQ's layers hold, but the graph still reads it.
        self.alive = layer_states(self.bench.network)
        return output.clone()

    def _peak_mib(self) -> float:
        """Peak of weights, codebooks and the step's own allocations."""
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        self.run()
        torch.cuda.synchronize()
        peak = torch.cuda.max_memory_allocated() - before
        tensors = [*self.bench.network.parameters(), *self.bench.weights_of(self.method)]
        return (peak + sum(tensor.nbytes for tensor in tensors)) / 2**20


def plot_steps(folder: Path, stem: str, side: int, device_type: str) -> None:
    """Plot one size's times as bars, one panel per mode with a result in the folder.

    Panels name their devices if these differ.
    """
    modes = MODES if device_type == "cuda" else MODES_WITHOUT_GRAPHS
    paths = [folder / f"{stem}_{side}_{mode}_{device_type}.json" for mode in modes]
    documents = [json.loads(path.read_text()) for path in paths if path.is_file()]
    devices = [document["environment"]["device"] for document in documents]
    panels: dict[str, dict[str, float]] = {}
    for document, name in zip(documents, devices, strict=True):
        rows = document["rows"]
        if bars := {row["label"]: row["ms"] for row in rows if row["ms"] is not None}:
            panel = modes[rows[0]["mode"]]
            panels[panel if len(set(devices)) == 1 else f"{panel}\n{name}"] = bars
    of_unet = "UNet step at {side} x {side} ({unet})"
    title = of_unet if "unet" in documents[0] else "Transformer step at {side} ({model})"
    bar_plot(
        folder / f"{stem}_{side}_{device_type}.png",
        panels,
        xlabel="time per step (ms)",
        title=title.format(**documents[0], side=side),
    )
