"""Which attention is faster on this GPU: break-even numbers of tokens, measured once and kept.

AVQ costs O(N) with a larger constant than exact attention's O(N^2), so each shape has a number of
tokens from which AVQ wins: one for calls that the host makes, which costs time of its own, and a
lower one for calls in compiled code, which are timed in a CUDA graph. `routes.json` holds those of
GPUs that were measured for the package; others are measured at the first call and kept in the
user's cache folder.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from filelock import FileLock
from platformdirs import user_cache_path
from torch import Tensor

from avq_diffusers.attention.api import avq_attention
from avq_diffusers.codebook.codebook import Codebook
from avq_diffusers.files import atomic_write

ROUTES = ("fastest", "always")
TOKENS = (512, 1024, 2048, 4096, 8192, 16384)
NEVER = 2**31
_SHIPPED = Path(__file__).with_name("routes.json")
_ROUNDS, _CALLS = 3, 10


def check_route(route: str) -> None:
    """Refuse an unknown route.

    Raises:
        ValueError: `route` is none of `ROUTES`.
    """
    if route not in ROUTES:
        raise ValueError(f"route must be one of {', '.join(ROUTES)}, but got {route!r}.")


@dataclass(frozen=True)
class Shape:
    """What decides between two attentions, apart from the number of tokens.

    Args:
        rows: batch times heads; a power of two stands for all up to it (`rows_bucket`).
        head_dim: D.
        num_parents, num_refined, num_children: codebook sizes.
        query_tile: queries per tile.
        dtype: of the activations.
    """

    rows: int
    head_dim: int
    num_parents: int
    num_refined: int
    num_children: int
    query_tile: int
    dtype: torch.dtype

    def key(self, device: torch.device) -> str:
        """Name of the entry of `routes.json`."""
        codebook = f"M{self.num_parents}P{self.num_refined}C{self.num_children}"
        dtype = str(self.dtype).removeprefix("torch.")
        return (
            f"{torch.cuda.get_device_name(device)}, {dtype}, {self.rows} rows, D{self.head_dim}, "
            f"{codebook}, tiles of {self.query_tile}"
        )


class BreakEven(NamedTuple):
    """Numbers of tokens from which AVQ is faster.

    Args:
        eager: where the host launches every call.
        compiled: in compiled code, where launches cost the host little.
    """

    eager: int
    compiled: int


def rows_bucket(batch: int, num_heads: int) -> int:
    """The power of two from batch * heads on."""
    return 1 << (batch * num_heads - 1).bit_length()


def known_break_even(shape: Shape, device: torch.device) -> BreakEven | None:
    """The numbers of a shape, None if nobody has measured them."""
    found = _table().get(shape.key(device))
    return found and BreakEven(**found)


def break_even(shape: Shape, device: torch.device) -> BreakEven:
    """The numbers of a shape; measured in about a second where they are not known."""
    known = known_break_even(shape, device)
    if known is not None:
        return known
    measured = measure_break_even(shape, device)
    _table()[shape.key(device)] = measured._asdict()
    _keep(shape.key(device), measured)
    return measured


@torch.no_grad()
def measure_break_even(shape: Shape, device: torch.device) -> BreakEven:
    """The smallest of `TOKENS` from which on AVQ is never slower; `NEVER` if it is at the last."""
    least = {"eager": NEVER, "compiled": NEVER}
    timers = {"eager": _eager_milliseconds, "compiled": _compiled_milliseconds}
    for num_tokens in reversed(TOKENS):
        query, key, value, codebook = _random_case(shape, num_tokens, device)

        def avq(query=query, key=key, value=value, codebook=codebook) -> Tensor:
            return avq_attention(
                query,
                key,
                value,
                codebook,
                num_refined=shape.num_refined,
                query_tile=shape.query_tile,
            )

        def exact(query=query, key=key, value=value) -> Tensor:
            return F.scaled_dot_product_attention(query, key, value)

        # Events and graphs are of the current GPU.
        with torch.accelerator.device_index(device.index):
            for name in list(timers):
                if timers[name](avq) > timers[name](exact):
                    del timers[name]
                else:
                    least[name] = num_tokens
    return BreakEven(**least)


def _random_case(
    shape: Shape, num_tokens: int, device: torch.device
) -> tuple[Tensor, Tensor, Tensor, Codebook]:
    generator = torch.Generator(device).manual_seed(0)

    def normal(*size: int) -> Tensor:
        return torch.randn(size, generator=generator, device=device)

    parents = normal(shape.rows, shape.num_parents, shape.head_dim)
    children = parents[:, :, None] + 0.5 * normal(
        shape.rows, shape.num_parents, shape.num_children, shape.head_dim
    )
    tokens = [
        normal(1, num_tokens, shape.rows, shape.head_dim).to(shape.dtype).transpose(1, 2)
        for _ in range(3)
    ]
    return *tokens, Codebook(parents, children)


def _eager_milliseconds(function: Callable[[], Tensor]) -> float:
    """Best mean time of a call among rounds of calls without a wait."""

    def calls() -> None:
        for _ in range(_CALLS):
            function()

    return _milliseconds(calls)


def _compiled_milliseconds(function: Callable[[], Tensor]) -> float:
    """The same from a CUDA graph of the calls."""
    function()
    graph = torch.cuda.CUDAGraph()
    # The default stream of captures is of the GPU that captured first.
    stream = torch.cuda.Stream()
    # Other threads of the process may go on using the GPU.
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
def _table() -> dict[str, dict[str, int]]:
    return {**_read(_SHIPPED), **_read(_cache_file())}


def _cache_file() -> Path:
    return user_cache_path("avq-diffusers") / "routes.json"


def _read(path: Path) -> dict[str, dict[str, int]]:
    """The whole entries of a table; a broken cache costs new measurements."""
    try:
        table = json.loads(path.read_text())
    except (OSError, RecursionError, ValueError):
        return {}
    if not isinstance(table, dict):
        return {}
    return {key: entry for key, entry in table.items() if _is_whole(entry)}


def _is_whole(entry: object) -> bool:
    return (
        isinstance(entry, dict)
        and entry.keys() == set(BreakEven._fields)
        and all(type(tokens) is int for tokens in entry.values())
    )


def _keep(key: str, measured: BreakEven) -> None:
    path = _cache_file()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(path.with_suffix(".lock")), atomic_write(path) as temporary:
            table = {**_read(path), key: measured._asdict()}
            temporary.write_text(json.dumps(table, indent=1) + "\n")
    except OSError:  # nowhere to keep it: measured again in the next process
        return
