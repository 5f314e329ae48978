"""Time one denoising step: `python -m eval bench unet` and `bench transformer`.

Weights are random and nothing is downloaded, but mini-sd has its own. A few blocks of
each kind of a transformer are timed, in about the model's proportion, and the time is multiplied to
that of all blocks.

Rows of one size and mode are timed in turns. A row with wrong output gets no time.
"""

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from eval.benchmarks.contenders import TOLERANCE, Row, relative_error
from eval.benchmarks.models import Model
from eval.benchmarks.networks import (
    COMPILE,
    EAGER,
    FORCED,
    GRAPH,
    NetworkBench,
    bench_of,
    layer_states,
)
from eval.benchmarks.timing import block_ms
from eval.keys.peers import check_peer
from eval.names import CUDNN, EXACT, LIMIT, PEERS, PISA, SOL, method_label, timed_method
from eval.store.markdown import markdown_table, number
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
# The field of a row that is its time over that of a method.
RATIOS = {"over_limit": LIMIT, "over_sdpa": EXACT, "over_cudnn": CUDNN}


def run_steps(
    models: dict[str, Model],
    device: torch.device,
    output: Path,
    *,
    command: str,
    model: str,
    sizes: Sequence[int] | None = None,
    methods: Sequence[str] | None = None,
    modes: Sequence[str] = tuple(MODES),
    seconds: float = 4.0,
    minutes: float | None = None,
) -> None:
    """Time the steps, print tables, and write one JSON file per size and mode, one plot per size.

    The file is rewritten after every row.

    Args:
        models: models by their names in the command.
        device: where the network runs.
        output: folder of the results.
        command: command line to store.
        model: one of `models`.
        sizes: sides of the images, or lines of the videos; None takes the model's.
        methods: methods, the most important first; None takes the model's.
        modes: `"graph"`, `"compile"`, `"eager"`.
        seconds: of steps per row; the second half counts.
        minutes: no row starts after this time.

    Raises:
        ValueError: a model, method, mode or size is unknown or impossible.
    """
    if model not in models:
        raise ValueError(f"--model must be one of {', '.join(models)}, but got {model!r}.")
    sizes = models[model].sizes if sizes is None else sizes
    methods = models[model].methods if methods is None else methods
    check_choices(models[model], sizes, methods, modes)
    deadline = None if minutes is None else perf_counter() + 60 * minutes
    chosen = models[model].for_device(device)
    labels = MODES if device.type == "cuda" else MODES_WITHOUT_GRAPHS
    bench = bench_of(chosen, device)
    if not bench.cuda:
        print(f"{device.type}: {chosen.title}; without CUDA graphs, FA2 and cuDNN")
    for name in methods if bench.cuda else ():
        if (method := timed_method(name)).source in PEERS:
            check_peer(name, method.source, next(bench.network.parameters()))
    blocks = {x: n for x, n in bench.network.config.items() if x.endswith("_layers")}
    facts: Row = {"unet": chosen.title} if chosen.is_unet else {"model": chosen.title}
    facts |= {} if chosen.is_unet else {"timed_blocks": blocks, "multiplied_by": chosen.times}
    for side in sizes:
        for mode in modes:
            rows: list[Row] = []
            for rows in step_rows(
                bench, side, mode, methods=methods, deadline=deadline, window_ms=1000 * seconds
            ):
                save_json(
                    output / f"{chosen.stem}_{side}_{mode}_{device.type}.json",
                    command=command,
                    device=device,
                    **facts,
                    dtype=str(bench.dtype).removeprefix("torch."),
                    batch=chosen.batch,
                    backend=bench.backend,
                    mode=labels[mode],
                    rows=rows,
                )
            print(steps_table(rows), flush=True)
            if chosen.times != 1:
                print(f"A part was timed; times are multiplied by {chosen.times:.3g}.")
        plot_steps(output, chosen.stem, side, device.type)


def check_choices(
    model: Model, sizes: Sequence[int], methods: Sequence[str], modes: Sequence[str]
) -> None:
    """Refuse what cannot be timed.

    Raises:
        ValueError: a size, method, level or mode is unknown or impossible.
    """
    for side in sizes:
        if model.multiple is None and side not in model.sizes:
            possible = " or ".join(map(str, model.sizes))
            raise ValueError(f"--sizes must be {possible} for {model.title}, but got {side}.")
        if model.multiple is not None and (side < 64 or side % model.multiple):
            raise ValueError(
                f"--sizes must be multiples of {model.multiple} from 64 on, but got {side}."
            )
    for mode in modes:
        if mode not in MODES:
            raise ValueError(f"modes must be {', '.join(MODES)}, but got {mode!r}.")
    for name in methods:
        method = timed_method(name)
        if model.is_unet and method.source in PEERS:
            raise ValueError(f"methods: {name} is timed by bench transformer only.")
        levels = set() if method.config is None else set(method.config.levels)
        if model.is_unet and not levels <= set(model.levels):
            raise ValueError(
                f"the levels of {model.title} are {', '.join(map(str, model.levels))}, but {name} "
                f"changes {', '.join(map(str, sorted(levels)))}."
            )
        is_known = method.source in (EXACT, LIMIT, *FORCED, *PEERS)
        if not (model.is_unet or is_known or method.own or method.route == "fastest"):
            raise ValueError(
                f"methods of a transformer are {', '.join((EXACT, *FORCED, LIMIT))}, PISA and "
                f"Sol-Attn as {PISA}@.15 and {SOL}@1.3, and configurations with /own or /fastest, "
                f"but got {name!r}."
            )


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
        shown = f"{number(row['ms'])} ms {row.get('note', '')}"
        print(f"{side} {mode} {row['label']}: {shown}", flush=True)
        yield in_all_blocks(rows, bench.model.times)
    # A compiled step that is not captured would be compiled again for another turn.
    if mode == EAGER or pool is not None:
        _time_in_turns(ready, window_ms)
    yield in_all_blocks(rows, bench.model.times)


def wrong_output(row: Row) -> str | None:
    """Why a row gets no time; None if its output is right.

    The output must be closer to its oracle than half-way to SDPA. Otherwise the method did not run.
    A method that may be exact must only be close.
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


def in_all_blocks(rows: Sequence[Row], times: float) -> list[Row]:
    """The rows with their times for all blocks, and with the `RATIOS` of these."""
    found = [{**row, "ms": row["ms"] and row["ms"] * times} for row in rows]
    ms = {row["method"]: row["ms"] for row in found}
    for row in found:
        for field, method in RATIOS.items():
            base = ms.get(method)
            row[field] = row["ms"] / base if row["ms"] and base else None
    return found


class Step:
    """One eager, compiled or captured step: `prepare` copies the next inputs in, `run` runs it."""

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
        """The output; None from a captured step."""
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
            The eager output, and fields of the row with a first time.
        """
        bench, name, method = self.bench, self.name, self.method
        may_be_exact = method.route == "fastest"
        with bench.method(name):
            eager = self.run().clone()
            if mode == COMPILE and may_be_exact:  # by the route of compiled calls
                for state in layer_states(bench.network):
                    state.route.break_even = {
                        workload: found._replace(eager=found.compiled)
                        for workload, found in state.route.break_even.items()
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
        facts["error"] = torch.tensor(errors).max().item()  # Python's maximum loses NaN
        return eager, facts

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
        # What AVQ's layers hold goes away with the method, and the graph still reads it.
        self.alive = layer_states(self.bench.network)
        return output.clone()

    def _peak_mib(self) -> float:
        """Weights, codebooks and the step's own allocations at their peak."""
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        self.run()
        torch.cuda.synchronize()
        peak = torch.cuda.max_memory_allocated() - before
        tensors = [*self.bench.network.parameters(), *self.bench.weights_of(self.method)]
        return (peak + sum(tensor.nbytes for tensor in tensors)) / 2**20


def steps_table(rows: Sequence[Row]) -> str:
    """The rows as Markdown."""
    columns = {"ms": ".4g", **dict.fromkeys(RATIOS, ".3f"), "peak_mib": ".0f", "error": ".1e"}
    return markdown_table(
        [
            "size",
            "mode",
            "method",
            "ms",
            "/ limit",
            "/ SDPA",
            "/ cuDNN",
            "peak MiB",
            "error",
            "note",
        ],
        (
            [
                *(str(row["size"]), row["mode"], row["label"]),
                *(number(row.get(name), form) for name, form in columns.items()),
                row.get("note", ""),
            ]
            for row in rows
        ),
    )


def plot_steps(folder: Path, stem: str, side: int, device_type: str) -> None:
    """Plot the times of one size as bars, one panel per mode with a result in the folder.

    If their devices differ, the panels name them.
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
