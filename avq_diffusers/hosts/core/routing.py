"""Which attention is faster on this device: break-even numbers of tokens, measured once and kept.

AVQ costs O(N) with a larger constant than exact attention's O(N^2), so each workload has a number
of tokens from which AVQ is faster. There are two: one for eager calls, whose launches cost host
time, and a lower one for compiled code. Both follow from times in a CUDA graph. Calls narrow them
down: a call of a size about which nothing is known is measured first, which takes seconds and shows
progress. Results are cached in `routes.json` in the user's cache folder, like times that a
tolerance chooses from; with another version of this package, PyTorch or Triton, they are measured
again.

The time of a call with a threshold depends on the columns that its tokens need (`columns`): random
tokens are given a threshold at which they need as many.
"""

import json
import math
import platform
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from filelock import FileLock
from platformdirs import user_cache_path
from tqdm import tqdm

from avq_diffusers.attention.self_check import versions
from avq_diffusers.attention.tensors import Attended, mean_columns
from avq_diffusers.config import Spec, check_int
from avq_diffusers.files import atomic_write
from avq_diffusers.hosts.core.ranks import Ranks, agreed

ROUTES = ("fastest", "always")
NEVER = 2**31
MEASURED = "cuda", "cpu"  # types of devices; on others, AVQ always runs
_ROUNDS, _CALLS = 3, 10
_LONG = 10.0  # milliseconds from which calls are timed one by one: launches no longer matter
# Times 1 / sqrt(N), a threshold with which tiles of N random tokens attend to parents alone.
_COARSE = 0.25
_TRIED, _CLOSE = 14, 0.04
# Logits of exact attention; beyond that, only some heads are timed.
_MOST_LOGITS = {"cuda": 2**31, "cpu": 2**25}
_LONG_ON_CPU = 300.0  # milliseconds of both attentions from which they are timed only twice
# What AVQ costs a layer on a GPU beside its kernels, in milliseconds: an eager step that waits for
# its host gets slower by 0.21 in SD1.5 and 0.20 in SD3.5; compiled, the operations around the call
# fuse less, which takes 0.03 in SDXL and 0.04 in SD3.5.
_AROUND = {"eager": 0.2, "compiled": 0.04}


def check_route(route: str | int) -> None:
    """Refuse an unknown route."""
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
        spec: options of the call.
        columns: codewords and keys that each query attends to.
        dtype: dtype of the activations.
    """

    batch_heads: int
    head_dim: int
    spec: Spec
    columns: int
    dtype: torch.dtype

    def may_be_faster(self, num_tokens: int) -> bool:
        """Whether AVQ attends to so much less that it need be measured."""
        # Numbers of columns are rounded by up to an eighth.
        return 8 * self.columns < 7 * num_tokens

    def key(self, device: torch.device) -> str:
        """The name of the entry in `routes.json`."""
        dtype = str(self.dtype).removeprefix("torch.")
        # The columns say what a threshold costs.
        spec = self.spec if self.spec.threshold is None else self.spec.any_refinement
        return (
            f"{device_name(device)}, {versions()}, {dtype}, {self.batch_heads} rows, "
            f"D{self.head_dim}, {self.columns} columns, {spec.long_name}"
        )


class BreakEven(NamedTuple):
    """The numbers of tokens from which AVQ is faster, and up to which exact attention is.

    In between, nothing is known. Eager calls and compiled code, which has little launch overhead on
    a GPU, have separate numbers.

    Attributes:
        eager, compiled: AVQ is faster from here on.
        eager_exact, compiled_exact: exact attention is faster up to here; `NEVER` leaves no gap.
    """

    eager: int
    compiled: int
    eager_exact: int = NEVER
    compiled_exact: int = NEVER

    def least_tokens(self) -> int:
        """The number of tokens from which AVQ runs, in the code that asks."""
        return self.compiled if torch.compiler.is_compiling() else self.eager

    def unknown(self, num_tokens: int) -> list[str]:
        """For which of `"eager"` and `"compiled"` this number falls into the gap."""
        names = {"eager": self.eager_exact, "compiled": self.compiled_exact}
        return [name for name, exact in names.items() if exact < num_tokens < getattr(self, name)]

    def learned(self, num_tokens: int, is_faster: Mapping[str, bool]) -> "BreakEven":
        """Updated after measuring whether AVQ is faster at this number of tokens."""
        found = {
            name if faster else f"{name}_exact": num_tokens for name, faster in is_faster.items()
        }
        return self._replace(**found)


NOTHING_KNOWN = BreakEven(NEVER, NEVER, 0, 0)
NEVER_FASTER = BreakEven(NEVER, NEVER)


class Trial(NamedTuple):
    """A layer's calls, for measuring on random tokens with the same kernels.

    Attributes:
        attend: computes a call of the layer with the options that it is given first.
        shape: (B, N + T, H, D).
        num_tokens: N, the grid's tokens.
    """

    attend: Callable[..., Attended]
    shape: tuple[int, int, int, int]
    num_tokens: int


class LayerRoute:
    """The choice between AVQ and exact attention in one layer, by the workload of each call.

    Attributes:
        route: as in `apply_avq`.
        break_even: the break-evens learned so far, by device and workload.
        agreed: those that several ranks have in common.
        chosen_at: the number of tokens at which a tolerance measured and chose AVQ; no break-even
            is learned then.
    """

    def __init__(self, route: str | int) -> None:
        self.route = route
        self.break_even: dict[tuple[torch.device, Workload], BreakEven] = {}
        self.agreed: dict[tuple[torch.device, Workload], BreakEven] = {}
        self.chosen_at: int | None = None

    @property
    def few_tokens(self) -> int:
        """With fewer tokens than this, exact attention runs."""
        if isinstance(self.route, int):
            return self.route
        if self.route == "fastest" and self.chosen_at is not None:
            return self.chosen_at
        return 0

    def is_open(self, device: torch.device) -> bool:
        """Whether the faster attention runs, whichever that is."""
        is_open = self.route == "fastest" and self.chosen_at is None
        return is_open and (device.type in MEASURED or bool(self.break_even))

    def learn(
        self,
        workload: Workload,
        device: torch.device,
        trial: Trial | None = None,
        ranks: Ranks | None = None,
    ) -> BreakEven | None:
        """From how many tokens on AVQ is faster; None if that is unknown, or the route not open.

        If it is unknown for the trial's number of tokens, measure it, unless a CUDA graph is being
        captured or something watches the operations. The first of several ranks measures for all.
        """
        if not self.is_open(device):
            return None
        known = self.break_even if ranks is None else self.agreed
        learned = known.get((device, workload))
        if torch.compiler.is_compiling() or device.type not in MEASURED:
            return learned
        if learned is not None and (trial is None or not learned.unknown(trial.num_tokens)):
            return learned
        found: BreakEven | None
        if trial is not None and not is_recorded(device):
            found = agreed(ranks, partial(break_even, workload, device, trial))
        elif ranks is None:
            found = known_break_even(workload, device)
        else:
            return learned  # no other rank may be asking
        if found is not None:
            known[device, workload] = found
        return found

    def learn_compiled(self, workload: Workload, device: torch.device, trial: Trial) -> None:
        """`learn` for code that is being compiled, from a thread that is not."""
        learned = self.break_even.get((device, workload), NOTHING_KNOWN)
        if device.type in MEASURED and "compiled" in learned.unknown(trial.num_tokens):
            found = break_even(workload, device, trial, ["compiled"])
            self.break_even[device, workload] = found


def is_recorded(device: torch.device) -> bool:
    """Whether a CUDA graph, a trace or a mode, such as a counter's, records what runs now."""
    return (
        device.type == "meta"
        or (device.type == "cuda" and torch.cuda.is_current_stream_capturing())
        or torch._C._get_tracing_state() is not None
        or torch._C._len_torch_dispatch_stack() > 0
    )


def device_name(device: torch.device) -> str:
    """The name of a GPU, or that of the CPU with PyTorch's number of threads."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{_cpu_name()} (threads: {torch.get_num_threads()})"


@cache
def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:  # not Linux
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return next(filter(None, names), platform.processor() or platform.machine())


def next_power_of_two(number: int) -> int:
    """The smallest power of two that is at least `number`."""
    return 1 << (number - 1).bit_length()


def known_break_even(workload: Workload, device: torch.device) -> BreakEven | None:
    """The break-even of a workload; None if it has never been measured."""
    found = _table().get(workload.key(device))
    return None if found is None else BreakEven(**found)


def break_even(
    workload: Workload,
    device: torch.device,
    trial: Trial,
    names: Sequence[str] = ("eager", "compiled"),
) -> BreakEven:
    """The break-even of a workload, measured if unknown for the trial's number of tokens.

    Args:
        workload, device, trial: what is measured.
        names: the code that is measured: a compiler slows down eager calls.
    """
    known = known_break_even(workload, device) or NOTHING_KNOWN
    unknown = [name for name in known.unknown(trial.num_tokens) if name in names]
    if not unknown:
        return known
    found = known.learned(trial.num_tokens, measure(unknown, workload, device, trial))
    _table()[workload.key(device)] = found._asdict()
    _keep(workload.key(device), found._asdict())
    return found


@torch.no_grad()
def measure(
    names: Sequence[str], workload: Workload, device: torch.device, trial: Trial
) -> dict[str, bool]:
    """Whether AVQ is no slower, for `"eager"` and `"compiled"`; takes seconds.

    On a GPU, AVQ must gain more than it costs around its kernels. Whether an eager step waits for
    its host is not known: it is taken to do so. A CPU runs batch elements one after another.
    """
    if device.type == "cpu":
        trial = trial._replace(shape=(1, *trial.shape[1:]))
    text = f"AVQ measures once which attention is faster with {trial.num_tokens} tokens"
    with tqdm(total=1, desc=text, leave=False) as bar:
        avq, exact, share = _both_attentions(workload, device, trial)
        if device.type == "cpu":
            is_faster = dict.fromkeys(names, _is_faster_on_cpu(avq, exact, share))
        else:
            # Events and graphs belong to the current GPU.
            with torch.accelerator.device_index(device.index):
                avq_ms, exact_ms = _graph_milliseconds(avq), _graph_milliseconds(exact)
            is_faster = {name: share * (avq_ms + _AROUND[name]) <= exact_ms for name in names}
        bar.update()
    return is_faster


def _is_faster_on_cpu(avq: Callable[[], Any], exact: Callable[[], Any], share: float) -> bool:
    """Whether AVQ is no slower: the best of a few times each, in turns."""
    rounds: list[list[float]] = []
    # The first round also warms up, which takes long on a busy machine.
    while len(rounds) < 2 or (len(rounds) <= _ROUNDS and sum(rounds[-1]) < _LONG_ON_CPU):
        rounds.append([_wall_milliseconds(attend) for attend in (avq, exact)])
    avq_ms, exact_ms = map(min, zip(*rounds, strict=True))
    return share * avq_ms <= exact_ms


def kept_milliseconds(name: str, device: torch.device, attend: Callable[[], Any]) -> float:
    """The time of a call in a CUDA graph, measured once and cached by GPU, versions and name."""
    key = f"{device_name(device)}, {versions()}, {name}, ms"
    table = _table()
    if key not in table:
        with torch.accelerator.device_index(device.index):
            table[key] = _graph_milliseconds(attend)
        _keep(key, table[key])
    return table[key]


def _both_attentions(
    workload: Workload, device: torch.device, trial: Trial
) -> tuple[Callable[[], Any], Callable[[], Any], float]:
    """AVQ on random tokens, exact attention on some of their heads, and the share of these."""
    generator = torch.Generator(device).manual_seed(0)
    tokens = torch.randn(3, *trial.shape, generator=generator, device=device, dtype=workload.dtype)
    query, key, value = tokens.transpose(2, 3)
    batch, num_all, num_heads, _ = trial.shape
    grid, beside = slice(trial.num_tokens), slice(trial.num_tokens, None)
    has_sinks = num_all > trial.num_tokens
    with_spec = partial(
        trial.attend,
        query=query,
        key=key[:, :, grid],
        value=value[:, :, grid],
        sink_key=key[:, :, beside] if has_sinks else None,
        sink_value=value[:, :, beside] if has_sinks else None,
    )
    spec = workload.spec
    if spec.threshold is not None:
        spec = _showing(workload.columns, with_spec, spec, _COARSE / trial.num_tokens**0.5)
    avq = partial(with_spec, spec)
    rows = max(1, _MOST_LOGITS[device.type] // num_all**2)
    if rows >= batch * num_heads:
        return avq, partial(F.scaled_dot_product_attention, query, key, value), 1.0
    timed = slice(min(rows, num_heads))
    part = (x[:1, timed] for x in (query, key, value))
    share = timed.stop / (batch * num_heads)
    return avq, partial(F.scaled_dot_product_attention, *part), share


def _showing(columns: int, attend: Callable[[Spec], Attended], spec: Spec, coarse: float) -> Spec:
    """The same options with a threshold at which tiles attend to about this many columns.

    Args:
        coarse: a threshold with fewer columns: those with many more take long on a CPU.
    """
    few, many, off = coarse, None, {}
    for _ in range(_TRIED):
        threshold = few / 2 if many is None else math.sqrt(few * many)
        tried = spec.changed(threshold=threshold)
        ratio = mean_columns(attend(tried).shown) / columns
        off[tried] = abs(ratio - 1)
        if off[tried] < _CLOSE:
            break
        few, many = (few, threshold) if ratio > 1 else (threshold, many)
    return min(off, key=off.__getitem__)


def _graph_milliseconds(function: Callable[[], Any]) -> float:
    """The mean time of a call in a CUDA graph, in the best round; for long calls, the best single
    time outside."""
    function()  # warms up and compiles
    once = _elapsed(function)
    if once > _LONG:
        return min(once, *(_elapsed(function) for _ in range(_ROUNDS - 1)))
    calls = _captured(function)
    calls()
    return min(_elapsed(calls) for _ in range(_ROUNDS)) / _CALLS


def _captured(function: Callable[[], Any]) -> Callable[[], None]:
    """Calls in a CUDA graph."""
    graph = torch.cuda.CUDAGraph()
    # The default capture stream belongs to the first GPU that captured.
    stream = torch.cuda.Stream()
    # Other threads of the process may keep using the GPU.
    with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
        for _ in range(_CALLS):
            function()
    return graph.replay


def _elapsed(calls: Callable[[], Any]) -> float:
    """Milliseconds on the GPU."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    calls()
    end.record()
    end.synchronize()
    return start.elapsed_time(end)


def _wall_milliseconds(function: Callable[[], Any]) -> float:
    start = time.perf_counter()
    function()
    return 1e3 * (time.perf_counter() - start)


@cache
def _table() -> dict[str, Any]:
    return _read(_cache_file())


def _cache_file() -> Path:
    return user_cache_path("avq-diffusers") / "routes.json"


def _read(path: Path) -> dict[str, Any]:
    """The valid entries of a table; what is missing from a broken cache is measured again."""
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
        and {"eager", "compiled"} <= entry.keys() <= set(BreakEven._fields)
        and all(type(tokens) is int for tokens in entry.values())
    )


def _keep(key: str, entry: Any) -> None:
    path = _cache_file()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(path.with_suffix(".lock"), timeout=5), atomic_write(path) as temporary:
            table = {**_read(path), key: entry}
            temporary.write_text(json.dumps(table, indent=1) + "\n")
    except OSError:  # not writable, or locked for long: the next process measures again
        return
