"""Error of attention methods on the queries, keys and values of a model: `python -m eval keys`.

columns       codewords and keys that a query meets, at most; the mean for Sol-Attn
error         |o - exact| / |exact| of a layer's output o, where all layers before are exact
features_off  the same of the model's output, with the method in all layers of so many tokens
ms            of one layer with everything that the method computes; on a GPU only (peers get
              their inputs in order, see eval/keys/peers.py)

Exact attention is computed in float32, of the same inputs. Errors are means over the tests of a
subject, and then over layers.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from math import ceil, isqrt
from statistics import mean
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from tqdm import tqdm

from avq_diffusers.attention.api import avq_attention
from avq_diffusers.attention.orders import joint_order, query_order
from avq_diffusers.codebook.codebook import Codebook
from avq_diffusers.codebook.kmeans import fit_codebook
from eval.benchmarks.timing import Effort, time_in_turns
from eval.keys.calls import Call, answered
from eval.keys.peers import check_peer, peer_attention, prepared, sol_columns
from eval.keys.pooled import BLOCK, pooled_attention, pooled_columns
from eval.keys.subjects import Subject
from eval.names import (
    EXACT,
    KEYS_ONLY,
    NO_ATTENTION,
    PEERS,
    PISA,
    PISA_ZEROTH,
    POOLED,
    SOL,
    MethodName,
    parse_method,
)
from eval.store.markdown import markdown_table, number
from eval.store.plots import Line, Panel

Row = dict[str, Any]
Answer = Callable[[Call], Tensor]
Order = Callable[[int, torch.device], Tensor]  # of so many tokens
Sizes = tuple[int, int]  # parents and children
Codebooks = Mapping[tuple[str, Sizes], Codebook]  # of layers

MIN_TOKENS = 1024
MOST_BEFORE = 8  # CLS, distillation token and registers
KEYS_PER_CALL, KEYS_PER_LAYER = 2048, 16384
USUAL_COLUMNS = 192
SCHEMES = {
    POOLED: "pooled blocks",
    PISA: "PISA",
    PISA_ZEROTH: "PISA, zeroth order",
    SOL: "Sol-Attn",
}
METRICS = {"error": "error", "worst": "worst layer", "features_off": "features off"}


def key_method(name: str) -> MethodName:
    """Parse the name of a method that can be measured on keys.

    Raises:
        ValueError: there is no such method.
    """
    method = parse_method(name, levels=(0,))
    if method.config is None:
        is_known = method.source in (EXACT, NO_ATTENTION, *KEYS_ONLY)
    else:
        is_known = name.partition("/")[0] == method.source and not method.tuned
        is_known &= method.route == "always"
    if not is_known:
        raise ValueError(
            f"methods of keys are {EXACT}, {NO_ATTENTION}, {POOLED}@E256, {PISA}@.15, {SOL}@1.3 "
            "and configurations such as M64P16C8, M64P16C8/means and M64P16C8/own, but got "
            f"{name!r}."
        )
    if method.source in (PISA, PISA_ZEROTH) and not 0 < method.setting <= 1:
        raise ValueError(f"a density of {PISA} is above 0 and at most 1, but got {name!r}.")
    if method.source == POOLED and method.exact_keys % BLOCK:
        raise ValueError(f"{POOLED} has whole blocks of {BLOCK} keys, but got {name!r}.")
    return method


@torch.no_grad()
def measure(subject: Subject, names: Sequence[str], *, min_tokens: int = MIN_TOKENS) -> list[Row]:
    """Measure methods in all self-attention layers of at least `min_tokens` tokens.

    Args:
        subject: a model and its passes.
        names: of methods, see `key_method`.

    Returns:
        A row for each number of tokens and each method. `layers` has the error of each layer.

    Raises:
        ImportError: the package of a peer is missing.
        ValueError: a name is no method, a peer cannot run here, or the model has no such layer.
    """
    methods = {name: key_method(name) for name in names}
    for name, method in methods.items():
        if method.source in PEERS:
            check_peer(name, method.source, next(subject.model.parameters()))
    codebooks = calibrated(subject, methods.values(), min_tokens)
    order_of = partial(token_order, subject.size, text_first=subject.text_first)
    answers = {
        name: partial(_attend, method, order_of, codebooks) for name, method in methods.items()
    }
    errors: dict[int, dict[str, dict[str, list[float]]]] = {}
    columns: dict[tuple[int, str], list[float]] = {}
    first_calls: dict[int, dict[str, Call]] = {}

    def observe(call: Call) -> Tensor:
        exact = _exact(call)
        layers = errors.setdefault(call.num_tokens, {}).setdefault(call.layer, {})
        for name, answer in answers.items():
            layers.setdefault(name, []).append(distance(answer(call), exact))
            met = met_columns(methods[name], order_of, call)
            columns.setdefault((call.num_tokens, name), []).append(met)
        if call.query.is_cuda:
            first_calls.setdefault(call.num_tokens, {}).setdefault(call.layer, call)
        return exact.to(call.query.dtype)

    outputs = []
    for test in tqdm(subject.tests, desc="layers"):
        with answered(subject.model, observe, min_tokens=min_tokens):
            outputs.append(test())
    if not errors:
        raise ValueError(
            f"at {subject.size} pixels, the model has no self-attention of {min_tokens} tokens."
        )

    rows = []
    for num_tokens, layers in errors.items():
        calls = list(first_calls.get(num_tokens, {}).values())
        runs = [
            [_run(method, order_of, codebooks, call) for call in calls]
            for method in methods.values()
        ]
        times = _times(runs, calls[0].query.device) if calls else [{}] * len(answers)
        progress = tqdm(answers.items(), desc=f"features, N = {num_tokens}")
        for (name, answer), timing in zip(progress, times, strict=True):
            only = partial(_answer_of_length, answer, num_tokens)
            with answered(subject.model, only, min_tokens=min_tokens):
                off = [
                    distance(test(), output)
                    for test, output in zip(subject.tests, outputs, strict=True)
                ]
            of_layers = {layer: mean(values[name]) for layer, values in layers.items()}
            rows.append(
                {
                    "method": name,
                    "scheme": scheme_of(methods[name]),
                    "size": subject.size,
                    "tokens": num_tokens,
                    "columns": round(mean(columns[num_tokens, name])),
                    "error": mean(of_layers.values()),
                    "worst": max(of_layers.values()),
                    "features_off": mean(off),
                    **timing,
                    "layers": of_layers,
                }
            )
    return rows


@cache
def token_order(
    size: int, num_tokens: int, device: torch.device, text_first: bool = False
) -> Tensor:
    """Gilbert order of the tokens of a square image, a cached tensor.

    The side of the grid is the largest divisor of `size` that leaves no grid of more than
    `num_tokens` places. A few tokens more are before the grid, such as CLS, and come first. Others
    are a text, which comes first or last, as in memory.
    """
    side = next(side for side in range(isqrt(num_tokens), 0, -1) if size % side == 0)
    others = num_tokens - side**2
    order = query_order(side, side, "gilbert", device)
    if others > MOST_BEFORE and not text_first:
        return joint_order(order, others, text_first=False)
    return torch.cat([torch.arange(others, device=device, dtype=order.dtype), order + others])


def keys_table(rows: Sequence[Row]) -> str:
    """The rows as a Markdown table."""
    figures = METRICS | ({"ms": "ms"} if "ms" in rows[0] else {})
    return markdown_table(
        ["tokens", "method", "columns", *figures.values()],
        (
            [
                str(row["tokens"]),
                row["method"],
                str(row["columns"]),
                *(number(row[name], ".3g") for name in figures),
            ]
            for row in rows
        ),
    )


def keys_panels(rows: Sequence[Row]) -> list[list[Panel]]:
    """A row of panels for each number of tokens: errors over columns and over time, and of layers.

    A scheme is a line. In layers, its method of about 192 columns stands for it.
    """
    panels = []
    for num_tokens in dict.fromkeys(row["tokens"] for row in rows):
        schemes: dict[str, list[Row]] = {}
        for row in sorted(rows, key=lambda row: row["columns"]):
            if row["tokens"] == num_tokens and row["scheme"] not in (EXACT, NO_ATTENTION):
                schemes.setdefault(row["scheme"], []).append(row)
        title = f"N = {num_tokens}"
        panels.append(
            [
                _panel(schemes, "columns", "error", f"error of a layer, {title}"),
                _panel(schemes, "columns", "features_off", f"features off, {title}"),
            ]
        )
        if "ms" in rows[0]:
            panels[-1].append(_panel(schemes, "ms", "error", f"error of a layer, {title}"))
        panels[-1].append(_layers_panel(schemes, title))
    return panels


def dial_panels(rows: Sequence[Row]) -> list[Panel]:
    """Error over time of what is faster than exact attention, a panel for each number of tokens.

    Own codewords are one line: the sizes that no others beat in both. A dashed line is the time of
    exact attention. Numbers of tokens where nothing is faster have no panel.
    """
    panels = []
    for num_tokens in dict.fromkeys(row["tokens"] for row in rows):
        here = [
            row
            for row in rows
            if row["tokens"] == num_tokens and row["scheme"] != NO_ATTENTION and "ms" in row
        ]
        exact = next((row["ms"] for row in here if row["scheme"] == EXACT), 0)
        schemes: dict[str, list[Row]] = {}
        for row in sorted(here, key=lambda row: row["ms"]):
            is_own = row["scheme"].startswith("AVQ, own")
            of_scheme = schemes.setdefault("AVQ, own" if is_own else row["scheme"], [])
            is_beaten = is_own and of_scheme and of_scheme[-1]["error"] <= row["error"]
            if row["ms"] < exact and not is_beaten:
                of_scheme.append(row)
        schemes = {label: found for label, found in schemes.items() if found}
        if schemes:
            panel = _panel(schemes, "ms", "error", f"error of a layer, N = {num_tokens}")
            panels.append(replace(panel, reference_x=exact))
    return panels


def _panel(schemes: Mapping[str, Sequence[Row]], x: str, y: str, title: str) -> Panel:
    lines = []
    for label, rows in schemes.items():
        rows = sorted(rows, key=lambda row: row[x])
        lines.append(Line(label, [row[x] for row in rows], [row[y] for row in rows]))
    return Panel(title, x, lines, xscale="log", yscale="log")


def _layers_panel(schemes: Mapping[str, Sequence[Row]], title: str) -> Panel:
    shown = {
        label: min(rows, key=lambda row: abs(row["columns"] - USUAL_COLUMNS))
        for label, rows in schemes.items()
    }
    names = list(next(iter(shown.values()))["layers"])
    lines = [
        Line(label, range(len(names)), list(row["layers"].values())) for label, row in shown.items()
    ]
    return Panel(f"error near {USUAL_COLUMNS} columns, {title}", "layer", lines, from_zero=True)


def scheme_of(method: MethodName) -> str:
    """What a curve has in common: how codewords come about, but not how many they are."""
    if method.config is None:
        return SCHEMES.get(method.source, method.source)
    config = method.config
    parts = ["AVQ" if config.num_children else "flat VQ", "own" if method.own else "stored"]
    if not method.own and config.codewords == "means":
        parts.append("mean keys")
    if config.num_updates:
        parts.append(f"{config.num_updates} update{'s' * (config.num_updates > 1)}")
    if config.exact_keys:
        parts.append("exact keys")
    return ", ".join(parts)


def columns_of(method: MethodName, num_tokens: int) -> int:
    """Codewords and keys that a query meets at most, whatever the keys are."""
    if method.config is not None:
        return min(method.config.effective_codewords + method.config.exact_keys, num_tokens)
    if method.source == POOLED:
        return pooled_columns(num_tokens, method.exact_keys // BLOCK)
    if method.source in (PISA, PISA_ZEROTH):
        return pooled_columns(num_tokens, max(1, int(method.setting * ceil(num_tokens / BLOCK))))
    return num_tokens if method.source == EXACT else 0


def met_columns(method: MethodName, order_of: Order, call: Call) -> float:
    """Columns in a call. Sol-Attn takes as many blocks as the queries want; theirs is the mean."""
    if method.source != SOL:
        return columns_of(method, call.num_tokens)
    return sol_columns(
        call.query,
        call.key,
        threshold=method.setting,
        query_order=order_of(call.num_tokens, call.key.device),
        scale=call.scale,
    )


def _attend(method: MethodName, order_of: Order, codebooks: Codebooks, call: Call) -> Tensor:
    tensors = call.query, call.key, call.value
    if method.source == NO_ATTENTION:
        return call.value
    if method.source == EXACT:
        return F.scaled_dot_product_attention(*tensors, scale=call.scale)
    order = order_of(call.num_tokens, call.key.device)
    if method.source == POOLED:
        num_exact = method.exact_keys // BLOCK
        return pooled_attention(*tensors, num_exact=num_exact, query_order=order, scale=call.scale)
    if method.source in PEERS:
        peer = method.source, method.setting
        return peer_attention(*peer, *tensors, query_order=order, scale=call.scale)
    config = method.config
    sizes = config.num_parents, config.num_children
    return avq_attention(
        *tensors,
        None if method.own else codebooks[call.layer, sizes],
        query_order=order,
        scale=call.scale,
        **config.attention_arguments,
    )


def _run(
    method: MethodName, order_of: Order, codebooks: Codebooks, call: Call
) -> Callable[[], Tensor]:
    """What is timed of a call."""
    if method.source not in PEERS:
        return partial(_attend, method, order_of, codebooks, call)
    order = order_of(call.num_tokens, call.key.device)
    peer = method.source, method.setting
    tensors = call.query, call.key, call.value
    return prepared(*peer, *tensors, query_order=order, scale=call.scale)


def _answer_of_length(answer: Answer, num_tokens: int, call: Call) -> Tensor:
    """The answer to calls of so many tokens, and exact attention for all others."""
    if call.num_tokens == num_tokens:
        return answer(call)
    return _exact(call).to(call.query.dtype)


def _exact(call: Call) -> Tensor:
    dtype = torch.promote_types(call.query.dtype, torch.float32)
    tensors = (x.to(dtype) for x in (call.query, call.key, call.value))
    return F.scaled_dot_product_attention(*tensors, scale=call.scale)


def distance(output: Tensor, exact: Tensor) -> float:
    """The relative error |output - exact| / |exact|."""
    exact = exact.float()
    return float((output.float() - exact).norm() / exact.norm())


def calibrated(subject: Subject, methods: Sequence[MethodName], min_tokens: int) -> Codebooks:
    """Codebooks of all layers for the methods with stored codewords, from a sample of keys."""
    sizes = dict.fromkeys(
        (method.config.num_parents, method.config.num_children)
        for method in methods
        if method.config is not None and not method.own
    )
    if not sizes:
        return {}
    kept: dict[str, list[Tensor]] = {}

    def keep(call: Call) -> Tensor:
        pieces = kept.setdefault(call.layer, [])
        key = call.key.float().movedim(1, 0).flatten(1, 2)
        pieces.append(_sample(key, KEYS_PER_CALL, seed=len(pieces)))
        return _exact(call).to(call.query.dtype)

    for one in tqdm(subject.calibration, desc="calibration"):
        with answered(subject.model, keep, min_tokens=min_tokens):
            one()
    keys = {
        layer: _sample(torch.cat(pieces, dim=1), KEYS_PER_LAYER, seed=0)
        for layer, pieces in kept.items()
    }
    pairs = [(layer, pair) for layer in keys for pair in sizes]
    progress = tqdm(pairs, desc="codebooks")
    return {(layer, pair): fit_codebook(keys[layer], *pair) for layer, pair in progress}


def _sample(keys: Tensor, count: int, *, seed: int) -> Tensor:
    """At most `count` random keys of (H, S, D)."""
    chosen = torch.randperm(keys.shape[1], generator=torch.Generator().manual_seed(seed))[:count]
    return keys[:, chosen.to(keys.device)]


def _times(runs: Sequence[Sequence[Callable[[], Tensor]]], device: torch.device) -> list[Row]:
    """Time of each method from its runs of the layers: the mean over them."""
    timings = time_in_turns(
        [lambda index, run=run: run[index]() for run in runs], len(runs[0]), device, Effort()
    )
    return [
        {name: timing[name] for name in ("ms", "timer", "eager_ms", "spread")} for timing in timings
    ]
