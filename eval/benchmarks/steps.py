"""Time a denoising step with what people call: `python -m eval bench steps`.

A row is one model, size, way to run and method. `avq` is `apply_avq(pipe)` by its default, routes
included, after the calls that settle them. Weights are random and nothing is downloaded, so its
thresholds are those that give each layer the columns of `Model.columns`, which trained models need
at the default threshold. Of a transformer, a few blocks of each kind are timed, in about the
model's proportions, and times are scaled to all blocks.

columns         codewords and keys that a query tile attends to, mean over the layers that AVQ can
                serve and their tiles; by_level has it per UNet level
layers          layers that run AVQ, and those that AVQ can serve: the route keeps others exact
ms              median time of a step
exact_ms        that of exact attention in turns with it, in eager rows of others: the host of a GPU
                gets slower and faster within seconds, by a third and more
times_as_fast   time of exact attention divided by the row's
seconds         what the row took, with building and compiling
error           of AVQ's calls to the PyTorch path's (without CUDA, the definition's): the largest
                |output - other| / |other| among the first call of each shape; above `bound`, the
                row gets no time
peak_mib        most memory that an eager step takes beside the weights
difference      |output - exact| / |exact|, eager
"""

import math
from collections.abc import Callable, Sequence
from functools import cache, partial
from itertools import product
from operator import itemgetter
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any, NamedTuple

import torch
from torch import Tensor

from eval.benchmarks.contenders import TOLERANCE
from eval.benchmarks.models import MODELS
from eval.benchmarks.networks import NetworkBench
from eval.benchmarks.timing import block_ms
from eval.keys.calls import relative_error
from eval.methods.base import TRANSFORMER_STEP, UNET_STEP
from eval.methods.registry import AVQ, EXACT, LIMIT, check_place
from eval.store.markdown import figure, rows_table
from eval.store.report import complete, environment, read_result, save_json

EAGER, COMPILED = "eager", "compiled"
RUNS = EAGER, COMPILED
_BLOCK = 4  # steps without waiting for the GPU between them, as pipelines run them
_LEAST_TURNS = 4  # the host changes its speed for seconds at a time
METHODS = EXACT, AVQ, LIMIT
COLUMNS = {
    **{name: name for name in ("model", "size", "run", "method")},
    "ms": figure("ms"),
    "times as fast": figure("times_as_fast", ".2f"),
    "columns": figure("columns", ".0f"),
    "layers": lambda row: " of ".join(map(str, row.get("layers", "-"))),
    "peak MiB": figure("peak_mib", ".0f"),
    "error": figure("error", ".1e"),
    "difference": figure("difference", ".1e"),
    "note": lambda row: row.get("note", ""),
}

Row = dict[str, Any]


class Case(NamedTuple):
    """What a row times; `size` are pixels of a side, or lines or frames of a video."""

    model: str
    size: int
    run: str
    method: str


def cases_of(models: str, runs: Sequence[str], methods: Sequence[str]) -> list[Case]:
    """The rows of a command: eager before compiled, which takes minutes, and exact attention and
    AVQ before other methods.

    Args:
        models: such as "sd15@1024,flux@2048", or "sd15" for all its sizes; the most important
            first.
        runs: some of `RUNS`.
        methods: `"avq"`, or names of `eval.methods`.

    Raises:
        ValueError: one is unknown or impossible.
    """
    found = []
    for entry in models.split(","):
        name, _, side = entry.partition("@")
        if name not in MODELS:
            raise ValueError(f"models must be some of {', '.join(MODELS)}, but got {name!r}.")
        model = MODELS[name]
        if side and not side.isdecimal():
            raise ValueError(f"a size must be a number, but got {entry!r}.")
        for size in (int(side),) if side else model.sizes:
            model.check_size(size)
            found.append((name, size))
        for method in methods:
            if method != AVQ:
                check_place(method, UNET_STEP if model.is_unet else TRANSFORMER_STEP)
    pairs = [method for method in methods if method in (EXACT, AVQ)]
    others = [method for method in methods if method not in pairs]
    return [
        Case(*sized, run, method)
        for run, some in product([run for run in RUNS if run in runs], (pairs, others))
        for sized, method in product(found, some)
    ]


def run_steps(
    cases: Sequence[Case],
    device: torch.device,
    path: Path,
    *,
    window: float = 2.0,
    seconds: float | None = None,
) -> list[Row]:
    """Time the cases; write `path` after each, and keep those that it has from the same code and
    environment.

    Args:
        cases: what to time, in this order.
        device: where.
        path: the JSON file.
        window: seconds of steps per row; the second half counts.
        seconds: no row starts after this time.

    Raises:
        ValueError: the file is not a complete result.
    """
    start = perf_counter()
    rows = _kept(path, device)
    bench_of = cache(lambda name: NetworkBench(MODELS[name].for_device(device), device))
    for case in cases:
        if case in rows:
            continue
        if seconds is not None and perf_counter() - start > seconds:
            print(f"Out of time at {' '.join(map(str, case))}; the same command continues there.")
            break
        begin = perf_counter()
        row = measured(bench_of(case.model), case, window)
        rows[case] = case._asdict() | row | {"seconds": perf_counter() - begin}
        found = with_ratios([*rows.values()])
        print(rows_table(COLUMNS, found[-1:]).splitlines()[-1], flush=True)
        save_json(path, device=device, rows=found)
    return with_ratios([*rows.values()])


@torch.no_grad()
def measured(bench: NetworkBench, case: Case, window: float) -> Row:
    """The fields of a row; a note in place of a time if it could not run or its output is wrong."""
    torch.compiler.reset()
    row: Row = {"title": bench.model.title, "batch": bench.model.batch, "ms": None}
    row["dtype"] = str(bench.dtype).removeprefix("torch.")
    inputs = bench.inputs(case.size)
    if reason := bench.cannot_run(case.method):
        return row | {"note": reason}
    exact = bench.predict(*inputs).clone()
    try:
        with bench.method(case.method, inputs) as facts:
            eager = bench.predict(*inputs).clone()
            row |= facts | {"difference": relative_error(eager, exact)}
            if case.method == AVQ:
                row |= bench.layers_run(is_compiled=case.run == COMPILED)
            row |= bench.error(inputs)  # runs AVQ in all layers
            if not row.get("error", 0) <= bound(bench.dtype):
                return row | {"note": f"wrong attention: relative error {row['error']:.3g}"}
            if case.run == EAGER:
                row |= {"peak_mib": _peak_mib(bench, inputs)} if bench.cuda else {}
                output = eager
                is_exact = case.method == EXACT
                exact_step = [] if is_exact else [partial(bench.predict_exact, *inputs)]
                times, *exact_times = _times(bench, inputs, window, exact_step)
                for others in exact_times:
                    row["exact_ms"] = median(others) * bench.model.times
            else:
                with bench.layers_of_compiled():
                    eager = bench.predict(*inputs).clone()
                with bench.compiled():
                    output = bench.predict(*inputs).clone()
                    (times,) = _times(bench, inputs, window)
    except (RuntimeError, ValueError, AttributeError, TypeError) as error:
        # Third-party code (ToMe, compilers, kernels of peers) fails in all of these ways.
        return row | {"note": f"{type(error).__name__}: {str(error).splitlines()[0]}"}
    error = relative_error(output, eager)
    if not error <= TOLERANCE:
        return row | {"note": f"wrong output: {error:.3g} from its eager one"}
    milliseconds = [x * bench.model.times for x in times]
    spread = (max(milliseconds) - min(milliseconds)) / median(milliseconds)
    return row | {"ms": median(milliseconds), "steps": len(times), "spread": spread}


def bound(dtype: torch.dtype) -> float:
    """The largest error of an AVQ call.

    Rounding by epsilon changes a share of about epsilon of the choices of columns. A changed choice
    changes its query's output by at most about the output's size, so the RMS error is at most about
    the square root of epsilon. `bench kernels` measures up to 0.4 of that.
    """
    return math.sqrt(torch.finfo(dtype).eps)


def with_ratios(rows: Sequence[Row]) -> list[Row]:
    """The rows with their times relative to exact attention's of the same model, size and run."""
    place = itemgetter("model", "size", "run")
    exact = {place(row): row["ms"] for row in rows if row["method"] == EXACT}

    def ratio(row: Row) -> float | None:
        base = row.get("exact_ms") or exact.get(place(row))
        return base / row["ms"] if base and row["ms"] else None

    return [row | {"times_as_fast": ratio(row)} for row in rows]


def _kept(path: Path, device: torch.device) -> dict[Case, Row]:
    """The timed rows of an earlier run, by case; none of unknown code or another environment."""
    if not path.is_file():
        return {}
    document, present, case = read_result(path), environment(device), itemgetter(*Case._fields)
    with complete(path):
        is_same = document["environment"] | {"date": present["date"]} == present
        rows = {Case(*case(row)): row for row in document["rows"] if row["ms"] is not None}
    kept = rows if is_same and present["commit"] != "unknown" else {}
    print(f"Of {len(rows)} timed rows in {path}, {len(kept)} are of the same code and are kept.")
    return kept


def _times(
    bench: NetworkBench,
    inputs: Sequence[Tensor],
    window: float,
    others: Sequence[Callable[[], Any]] = (),
) -> list[list[float]]:
    """Milliseconds of the later half of the steps, in turns with others: a GPU needs tenths of a
    second to settle on a clock."""

    def milliseconds(step: Callable[[], Any]) -> float:
        if bench.cuda:
            torch.cuda.synchronize()
        return block_ms(step, _BLOCK, bench.device)

    steps = [partial(bench.predict, *inputs), *others]
    *_, once = ([milliseconds(step) for step in steps] for _ in range(3))
    number = max(_LEAST_TURNS, round(1000 * window / sum(once) / _BLOCK / 2))
    turns = [[milliseconds(step) for step in steps] for _ in range(2 * number)]
    return [list(times) for times in zip(*turns[number:], strict=True)]


def _peak_mib(bench: NetworkBench, inputs: Sequence[Tensor]) -> float:
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    bench.predict(*inputs)
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before) / 2**20
