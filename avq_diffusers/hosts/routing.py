"""Which attention is faster on this GPU: break-even numbers of tokens, measured once and kept.

AVQ costs O(N) with a larger constant than the O(N^2) of exact attention, so each workload has a
number of tokens from which AVQ is faster. There are two: one for eager calls, whose launches cost
the host time, and a lower one for compiled code, timed in a CUDA graph. `routes.json` holds the
numbers that were measured for the package. Others are measured at the first call and kept in the
user's cache folder, as are the times among which a tolerance chooses.
"""

import json
import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from filelock import FileLock
from platformdirs import user_cache_path
from torch import Tensor

from avq_diffusers.attention.api import avq_attention
from avq_diffusers.config import Sizes, check_int
from avq_diffusers.files import atomic_write

ROUTES = ("fastest", "always")
TOKENS = (512, 1024, 2048, 4096, 8192, 16384)
NEVER = 2**31
_SHIPPED = Path(__file__).with_name("routes.json")
_ROUNDS, _CALLS = 3, 10
# What an eager call of AVQ costs a step, as a multiple of its own time. SD1.5's step at 512 pixels
# waits for the host and gets slower by AVQ, whose calls alone take .4 of exact attention's time.
_EAGER_COST = 3


def check_route(route: str | int) -> None:
    """Refuse an unknown route.

    Raises:
        ValueError: `route` is neither of `ROUTES` nor a number of tokens.
    """
    if isinstance(route, int) and not isinstance(route, bool):
        check_int("route", route, 0)
    elif route not in ROUTES:
        raise ValueError(
            f"route must be {', '.join(ROUTES)} or a number of tokens, but got {route!r}."
        )


@dataclass(frozen=True)
class Workload:
    """What decides between the two attentions, apart from the number of tokens.

    Attributes:
        batch_heads: batch times heads, rounded up by `next_power_of_two`.
        head_dim: D.
        sizes: parents, refined parents, children and exact keys.
        query_tile: queries per tile.
        dtype: of the activations.
        num_updates: Lloyd updates of the parents.
    """

    batch_heads: int
    head_dim: int
    sizes: Sizes
    query_tile: int
    dtype: torch.dtype
    num_updates: int = 0

    def key(self, device: torch.device) -> str:
        """The name of the entry in `routes.json`."""
        dtype = str(self.dtype).removeprefix("torch.")
        updates = f", {self.num_updates} updates" if self.num_updates else ""
        return (
            f"{torch.cuda.get_device_name(device)}, {dtype}, {self.batch_heads} rows, "
            f"D{self.head_dim}, {self.sizes}, tiles of {self.query_tile}{updates}"
        )


class BreakEven(NamedTuple):
    """The numbers of tokens from which AVQ is faster.

    Attributes:
        eager: if the host launches every call.
        compiled: in compiled code, whose launches cost the host little.
    """

    eager: int
    compiled: int


class LayerRoute:
    """The choice between AVQ and exact attention in one layer, by the workload of each call.

    Attributes:
        route: as in `apply_avq`.
        num_heads: of the layer.
        break_even: what was learned.
        chosen_at: the number of tokens at which AVQ was measured and chosen within a tolerance.
            Then no break-even is learned.
    """

    def __init__(self, route: str | int, num_heads: int) -> None:
        self.route = route
        self.num_heads = num_heads
        self.break_even: dict[Workload, BreakEven] = {}
        self.chosen_at: int | None = None

    @property
    def few_tokens(self) -> int:
        """With fewer tokens than this, exact attention runs."""
        if isinstance(self.route, int):
            return self.route
        if self.route == "fastest" and self.chosen_at is not None:
            return self.chosen_at
        return 0

    def learn(self, workload: Workload, device: torch.device, *, measure: bool) -> None:
        """Find out from how many tokens on AVQ is faster on a GPU; elsewhere AVQ always runs.

        With `measure`, what nobody has measured is measured, unless a CUDA graph is being captured.
        """
        is_open = self.route == "fastest" and self.chosen_at is None
        if not is_open or device.type != "cuda" or workload in self.break_even:
            return
        found: BreakEven | None
        if measure and not torch.cuda.is_current_stream_capturing():
            found = break_even(workload, device, self.num_heads)
        else:
            found = known_break_even(workload, device)
        if found is not None:
            self.break_even[workload] = found

    def least_tokens(self, workload: Workload) -> int:
        """The number of tokens from which AVQ runs."""
        found = self.break_even.get(workload, BreakEven(0, 0))
        return found.compiled if torch.compiler.is_compiling() else found.eager


def next_power_of_two(number: int) -> int:
    """The smallest power of two that is not below `number`."""
    return 1 << (number - 1).bit_length()


def known_break_even(workload: Workload, device: torch.device) -> BreakEven | None:
    """The break-even of a workload, None if nobody has measured it."""
    found = _table().get(workload.key(device))
    return None if found is None else BreakEven(**found)


def break_even(workload: Workload, device: torch.device, num_heads: int) -> BreakEven:
    """The break-even of a workload; an unknown one is measured on tokens of so many heads."""
    known = known_break_even(workload, device)
    if known is not None:
        return known
    measured = measure_break_even(workload, device, num_heads)
    _table()[workload.key(device)] = measured._asdict()
    _keep(workload.key(device), measured._asdict())
    return measured


@torch.no_grad()
def measure_break_even(workload: Workload, device: torch.device, num_heads: int) -> BreakEven:
    """The smallest of `TOKENS` from which AVQ is never slower; `NEVER` if it loses at the last.

    An eager call of AVQ keeps the host busy for longer than the call alone shows, so it counts
    more. Tokens lie as a layer of `num_heads` heads has them, so that its calls use the same
    kernels.
    """
    least = {"eager": NEVER, "compiled": NEVER}
    timers = {"eager": _eager_milliseconds, "compiled": _compiled_milliseconds}
    costs = {"eager": _EAGER_COST, "compiled": 1}
    for num_tokens in reversed(TOKENS):
        avq, exact = _both_attentions(workload, num_tokens, device, num_heads)
        # Events and graphs belong to the current GPU.
        with torch.accelerator.device_index(device.index):
            for name in list(timers):
                if costs[name] * timers[name](avq) > timers[name](exact):
                    del timers[name]
                else:
                    least[name] = num_tokens
    return BreakEven(**least)


def kept_milliseconds(name: str, device: torch.device, attend: Callable[[], Tensor]) -> float:
    """The time of a call in a CUDA graph, measured once and kept by this GPU and name."""
    key = f"{torch.cuda.get_device_name(device)}, {name}, ms"
    table = _table()
    if key not in table:
        with torch.accelerator.device_index(device.index):
            table[key] = _compiled_milliseconds(attend)
        _keep(key, table[key])
    return table[key]


def _both_attentions(
    workload: Workload, num_tokens: int, device: torch.device, num_heads: int
) -> tuple[Callable[[], Tensor], Callable[[], Tensor]]:
    """AVQ and exact attention of the same random tokens."""
    generator = torch.Generator(device).manual_seed(0)
    batch = max(1, workload.batch_heads // num_heads)
    size = (3, batch, num_tokens, num_heads, workload.head_dim)
    tokens = torch.randn(size, generator=generator, device=device).to(workload.dtype)
    query, key, value = tokens.transpose(2, 3)
    avq = partial(
        avq_attention,
        query,
        key,
        value,
        **asdict(workload.sizes),
        query_tile=workload.query_tile,
        num_updates=workload.num_updates,
        query_order=torch.arange(num_tokens, device=device),
    )
    return avq, partial(F.scaled_dot_product_attention, query, key, value)


def _eager_milliseconds(function: Callable[[], Tensor]) -> float:
    """The mean time of an eager call, in the best round."""

    def calls() -> None:
        for _ in range(_CALLS):
            function()

    return _milliseconds(calls)


def _compiled_milliseconds(function: Callable[[], Tensor]) -> float:
    """The mean time of a call in a CUDA graph, in the best round."""
    function()
    graph = torch.cuda.CUDAGraph()
    # The default capture stream belongs to the GPU that captured first.
    stream = torch.cuda.Stream()
    # Other threads of the process may keep using the GPU.
    with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
        for _ in range(_CALLS):
            function()
    return _milliseconds(graph.replay)


def _milliseconds(calls: Callable[[], None]) -> float:
    calls()  # warms up
    times = []
    for _ in range(_ROUNDS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        calls()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / _CALLS)
    return min(times)


@cache
def _table() -> dict[str, Any]:
    return {**_read(_SHIPPED), **_read(_cache_file())}


def _cache_file() -> Path:
    return user_cache_path("avq-diffusers") / "routes.json"


def _read(path: Path) -> dict[str, Any]:
    """The valid entries of a table; what a broken cache lacks is measured again."""
    try:
        table = json.loads(path.read_text())
    except (OSError, RecursionError, ValueError):
        return {}
    if not isinstance(table, dict):
        return {}
    return {key: entry for key, entry in table.items() if _is_valid(entry)}


def _is_valid(entry: object) -> bool:
    """Whether an entry is a time or a break-even."""
    if isinstance(entry, float):
        return 0 < entry < math.inf
    return (
        isinstance(entry, dict)
        and entry.keys() == set(BreakEven._fields)
        and all(type(tokens) is int for tokens in entry.values())
    )


def _keep(key: str, entry: Any) -> None:
    path = _cache_file()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(path.with_suffix(".lock")), atomic_write(path) as temporary:
            table = {**_read(path), key: entry}
            temporary.write_text(json.dumps(table, indent=1) + "\n")
    except OSError:  # not writable: the next process measures again
        return
