"""Ulysses context parallelism: one block of a transformer on several GPUs, against one.

Every process runs the block alone at first, and then with the others. Attention is timed where the
model calls diffusers' dispatch, with the all-to-alls that exchange tokens for heads.
"""

import os
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from diffusers import ContextParallelConfig
from diffusers.models import attention_dispatch
from torch import Tensor, nn

from avq_diffusers import apply_avq, remove_avq, set_threshold, summary
from eval.benchmarks.models import MODELS
from eval.benchmarks.networks import NetworkBench
from eval.keys.calls import relative_error
from eval.methods.registry import AVQ
from eval.store.report import save_json

# Sides as in `Model.sizes`: the longest video of each.
SIDES = {"wan": 720, "minimax-h3": 345}
EXACT_BACKENDS = {"cuda": ("_native_cudnn", "native"), "cpu": ("native",)}
ROUNDS, WARM_UP = 7, 2


def enable_parallelism(network: nn.Module, config: Any, **options: Any) -> None:
    """`network.enable_parallelism`, which a CPU can run, too.

    Args:
        network: a transformer of diffusers.
        config: how ranks share it.
        **options: passed on.
    """
    # diffusers numbers the ranks' devices by how many accelerators there are, and a CPU is none.
    devices = max(1, torch.accelerator.device_count())
    with patch("torch.accelerator.device_count", return_value=devices):
        network.enable_parallelism(config=config, **options)


class Stopwatch:
    """Times what wrapped functions do on a device, in ms.

    Attributes:
        tokens: queries of a rank in the last self-attention.
    """

    def __init__(self, device: torch.device) -> None:
        self.is_cuda = device.type == "cuda"
        self.spans: dict[str, list[Any]] = defaultdict(list)
        self.tokens = 0

    def now(self) -> Any:
        if not self.is_cuda:
            return perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def timed(self, name: str, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call a function and keep its span under a name."""
        start = self.now()
        result = function(*args, **kwargs)
        self.spans[name].append((start, self.now()))
        return result

    def read(self) -> dict[str, float]:
        """The time under each name since the last reading."""
        if self.is_cuda:
            torch.cuda.synchronize()
        found = {
            name: sum(a.elapsed_time(b) if self.is_cuda else 1e3 * (b - a) for a, b in spans)
            for name, spans in self.spans.items()
        }
        self.spans.clear()
        return found


@contextmanager
def watched(network: nn.Module, watch: Stopwatch) -> Iterator[None]:
    """Time a transformer's self-attention and all-to-alls inside the `with` block."""
    module, dispatch = sys.modules[type(network).__module__], "dispatch_attention_fn"
    attention = getattr(module, dispatch)

    def attend(query: Tensor, key: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if query.shape[1] != key.shape[1]:  # a text's
            return attention(query, key, *args, **kwargs)
        watch.tokens = query.shape[1]
        return watch.timed("attention", attention, query, key, *args, **kwargs)

    exchange = partial(watch.timed, "all_to_all", attention_dispatch._all_to_all_single)
    with (
        patch.object(module, dispatch, attend),
        patch.object(attention_dispatch, "_all_to_all_single", exchange),
    ):
        yield


@contextmanager
def attention_by(bench: NetworkBench, method: str, inputs: tuple[Tensor, ...]) -> Iterator[Any]:
    """Run attention by AVQ with as many columns as in real models, or by a backend of diffusers.

    The `with` block gets facts about its row.
    """
    network: Any = bench.network
    if method != AVQ:
        network.set_attention_backend(method)
        try:
            yield {}
        finally:
            network.reset_attention_backend()
        return
    with torch.no_grad():
        thresholds, facts = bench.solve_columns(inputs)  # found by one process
    apply_avq(network, route="always")
    try:
        set_threshold(network, thresholds)
        yield {"columns": facts["columns"]}
        (row,) = summary(network).rows
        if not row.runs.startswith("AVQ"):
            raise RuntimeError(f"AVQ did not run: {row.runs}.")
    finally:
        remove_avq(network)


@torch.no_grad()
def measured(bench: NetworkBench, inputs: tuple[Tensor, ...]) -> tuple[dict[str, Any], Tensor]:
    """The median times of a step, its peak memory, and its output."""
    watch, times = Stopwatch(bench.device), defaultdict(list)
    with watched(bench.network, watch):
        for number in range(WARM_UP + ROUNDS):
            if bench.cuda:
                torch.cuda.reset_peak_memory_stats()
            dist.barrier()
            output = watch.timed("block", bench.predict, *inputs)
            found = watch.read()
            for name in found if number >= WARM_UP else ():
                times[f"{name}_ms"].append(found[name])
    row = {"tokens_of_rank": watch.tokens} | {x: median(values) for x, values in times.items()}
    if bench.cuda:
        row["peak_gib"] = torch.cuda.max_memory_allocated() / 2**30
    return row, output


def run_parallel(names: list[str], device_type: str, output: Path) -> Path:
    """Time blocks by one process and by all, and write the rows of the first process as it goes.

    Args:
        names: keys of `SIDES`.
        device_type: "cuda", or "cpu" for tiny stand-ins.
        output: folder of the results.

    Returns:
        The file of the results.
    """
    is_cuda = device_type == "cuda"
    device = torch.device(device_type)
    if is_cuda:
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if is_cuda else "gloo", device_id=device if is_cuda else None)
    rank, size = dist.get_rank(), dist.get_world_size()
    path, rows = output / f"bench_parallel_{device_type}_x{size}.json", []
    for name in names:
        bench = NetworkBench(MODELS[name].for_device(device), device)
        inputs = bench.inputs(SIDES[name])
        alone: dict[str, Tensor] = {}
        tokens = 0
        for degree in sorted({1, size}):
            if degree > 1:
                config = ContextParallelConfig(
                    ulysses_degree=degree, ulysses_anything=tokens % degree > 0
                )
                enable_parallelism(bench.network, config)
            for method in (*EXACT_BACKENDS[device_type], AVQ):
                row = {"model": bench.model.title, "method": method, "degree": degree}
                try:
                    with attention_by(bench, method, inputs) as facts:
                        found, result = measured(bench, inputs)
                except (RuntimeError, ValueError) as error:
                    row["error"] = str(error)
                else:
                    alone.setdefault(method, result)
                    tokens = max(tokens, found["tokens_of_rank"])
                    exact = next(iter(alone.values()))
                    row |= {
                        **facts,
                        **found,
                        "error_to_one_process": relative_error(result, alone[method]),
                        "error_to_exact": relative_error(result, exact),
                    }
                rows.append(row)
                if rank == 0:
                    save_json(path, device=device, processes=size, rows=rows)
                    print(", ".join(f"{key} {_short(x)}" for key, x in row.items()), flush=True)
        del bench, inputs, alone
    dist.barrier()
    dist.destroy_process_group()
    return path


def _short(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
