"""Error of attention methods on the queries, keys and values of a model: `python -m eval keys`.

columns       codewords and keys of the grid that a query meets, at most; unknown for Sol-Attn
error         |o - exact| / |exact| of a layer's output o, where all layers before are exact
features_off  the same of the model's output, with the method in all layers of so many tokens
ms            of one layer with everything that the method computes; on a GPU only (peers get
              their inputs in order, see eval/keys/peers.py)

Exact attention is computed in float32, of the same inputs. Errors are means over the tests of a
subject, and then over layers.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from math import ceil
from operator import itemgetter
from statistics import mean
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from tqdm import tqdm

from avq_diffusers.attention.api import avq_attention
from avq_diffusers.codebook.codebook import Codebook
from avq_diffusers.codebook.kmeans import fit_codebook
from eval.benchmarks.timing import Effort, time_in_turns
from eval.keys.calls import Call, answered
from eval.keys.peers import arranged, attention_in_order, check_peer
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
from eval.store.plots import Panel, lines

Row = dict[str, Any]
Sizes = tuple[int, int]  # parents and children
Codebooks = Mapping[tuple[str, Sizes], Codebook]  # of layers

MIN_TOKENS = 1024
KEYS_PER_CALL, KEYS_PER_LAYER = 2048, 16384
SCHEMES = {
    POOLED: "pooled blocks",
    PISA: "PISA",
    PISA_ZEROTH: "PISA, zeroth order",
    SOL: "Sol-Attn",
}
METRICS = {"error": "error", "worst": "worst layer", "features_off": "features off", "ms": "ms"}


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
        TypeError: AVQ does not know the model.
        ValueError: a name is no method, a peer cannot run here, or the model has no such layer.
    """
    methods = {name: key_method(name) for name in names}
    for name, method in methods.items():
        if method.source in PEERS:
            check_peer(name, method.source, next(subject.model.parameters()))
    codebooks = calibrated(subject, methods.values(), min_tokens)
    errors: dict[int, dict[str, dict[str, list[float]]]] = {}
    first_calls: dict[int, dict[str, Call]] = {}

    def observe(call: Call) -> Tensor:
        exact = call.exact()
        of_layer = errors.setdefault(call.num_tokens, {}).setdefault(call.layer, {})
        for name, method in methods.items():
            output = _attention(method, codebooks, call)()
            of_layer.setdefault(name, []).append(distance(output, exact))
        if call.query.is_cuda:
            first_calls.setdefault(call.num_tokens, {}).setdefault(call.layer, call)
        return exact

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
        calls = [*first_calls.get(num_tokens, {}).values()]
        times = _times(methods.values(), codebooks, calls) if calls else [{}] * len(methods)
        progress = tqdm(methods.items(), desc=f"features, N = {num_tokens}")
        for (name, method), timing in zip(progress, times, strict=True):
            answer = partial(_answer, method, codebooks, num_tokens)
            with answered(subject.model, answer, min_tokens=min_tokens):
                pairs = zip(subject.tests, outputs, strict=True)
                off = mean(distance(test(), output) for test, output in pairs)
            of_layers = {layer: mean(found[name]) for layer, found in layers.items()}
            rows.append(
                {
                    "method": name,
                    "scheme": scheme_of(method),
                    "size": subject.size,
                    "tokens": num_tokens,
                    "columns": columns_of(method, num_tokens),
                    "error": mean(of_layers.values()),
                    "worst": max(of_layers.values()),
                    "features_off": off,
                    **timing,
                    "layers": of_layers,
                }
            )
    return rows


def keys_table(rows: Sequence[Row]) -> str:
    """The rows as a Markdown table."""
    figures = {name: title for name, title in METRICS.items() if name in rows[0]}
    return markdown_table(
        ["tokens", "method", "columns", *figures.values()],
        (
            [
                str(row["tokens"]),
                row["method"],
                number(row["columns"]),
                *(number(row[name], ".3g") for name in figures),
            ]
            for row in rows
        ),
    )


def keys_panels(rows: Sequence[Row]) -> list[list[Panel]]:
    """A row of panels for each number of tokens: errors over columns and over time.

    A scheme is a line.
    """
    shown = [row for row in rows if row["scheme"] not in (EXACT, NO_ATTENTION)]
    axes = [("columns", "error"), ("columns", "features_off"), ("ms", "error")]
    return [
        [_panel(here, x, y, num_tokens) for x, y in axes if x in rows[0]]
        for num_tokens, here in _by_tokens(shown).items()
    ]


def dial_panels(rows: Sequence[Row]) -> list[list[Panel]]:
    """Error over time of what is faster than exact attention, a panel for each number of tokens.

    Own codewords are one line: the sizes that no others beat in both. A dashed line is the time of
    exact attention. Numbers of tokens where nothing is faster have no panel.
    """
    panels = []
    for num_tokens, here in _by_tokens([row for row in rows if "ms" in row]).items():
        exact = next((row["ms"] for row in here if row["scheme"] == EXACT), 0)
        shown: list[Row] = []
        least = torch.inf
        for row in sorted(here, key=lambda row: row["ms"]):
            is_own = row["scheme"].startswith("AVQ, own")
            if row["scheme"] == NO_ATTENTION or row["ms"] >= exact:
                continue
            if not is_own:
                shown.append(row)
            elif row["error"] < least:
                least = row["error"]
                shown.append(row | {"scheme": "AVQ, own"})
        if shown:
            panels.append(replace(_panel(shown, "ms", "error", num_tokens), reference_x=exact))
    return [panels] if panels else []


def _by_tokens(rows: Sequence[Row]) -> dict[int, list[Row]]:
    groups: dict[int, list[Row]] = {}
    for row in rows:
        groups.setdefault(row["tokens"], []).append(row)
    return groups


def _panel(rows: Sequence[Row], x: str, y: str, num_tokens: int) -> Panel:
    title = {"error": "error of a layer", "features_off": "features off"}[y]
    curves = lines(rows, itemgetter("scheme"), x, y)
    return Panel(f"{title}, N = {num_tokens}", x, curves, xscale="log", yscale="log")


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


def columns_of(method: MethodName, num_tokens: int) -> int | None:
    """Codewords and keys that a query meets at most; None for Sol-Attn, whose queries choose."""
    if method.config is not None:
        return min(method.config.effective_codewords + method.config.exact_keys, num_tokens)
    if method.source == POOLED:
        return pooled_columns(num_tokens, method.exact_keys // BLOCK)
    if method.source in (PISA, PISA_ZEROTH):
        return pooled_columns(num_tokens, max(1, int(method.setting * ceil(num_tokens / BLOCK))))
    return {EXACT: num_tokens, NO_ATTENTION: 0}.get(method.source)


def distance(output: Tensor, exact: Tensor) -> float:
    """The relative error |output - exact| / |exact|."""
    exact = exact.float()
    return float((output.float() - exact).norm() / exact.norm())


def calibrated(subject: Subject, methods: Iterable[MethodName], min_tokens: int) -> Codebooks:
    """Codebooks of all layers for the methods with stored codewords, from a sample of keys."""
    sizes = dict.fromkeys(
        (method.config.num_parents, method.config.num_children)
        for method in methods
        if method.config is not None and not method.own
    )
    kept: dict[str, list[Tensor]] = {}

    def keep(call: Call) -> Tensor:
        pieces = kept.setdefault(call.layer, [])
        key = call.key.float().movedim(1, 0).flatten(1, 2)
        pieces.append(_sample(key, KEYS_PER_CALL, seed=len(pieces)))
        return call.exact()

    for one in tqdm(subject.calibration if sizes else (), desc="calibration"):
        with answered(subject.model, keep, min_tokens=min_tokens):
            one()
    keys = {
        layer: _sample(torch.cat(pieces, dim=1), KEYS_PER_LAYER, seed=0)
        for layer, pieces in kept.items()
    }
    pairs = tqdm([(layer, pair) for layer in keys for pair in sizes], desc="codebooks")
    return {(layer, pair): fit_codebook(keys[layer], *pair) for layer, pair in pairs}


def _sample(keys: Tensor, count: int, *, seed: int) -> Tensor:
    """At most `count` random keys of (H, S, D)."""
    chosen = torch.randperm(keys.shape[1], generator=torch.Generator().manual_seed(seed))[:count]
    return keys[:, chosen.to(keys.device)]


def _attention(
    method: MethodName, codebooks: Codebooks, call: Call, *, timed: bool = False
) -> Callable[[], Tensor]:
    """What computes a call by a method. A timed peer leaves its tokens in the order of blocks."""
    if method.config is not None:
        sizes = method.config.num_parents, method.config.num_children
        codebook = None if method.own else codebooks[call.layer, sizes]
        arguments = call.arguments | method.config.attention_arguments
        return partial(avq_attention, codebook=codebook, **arguments)
    keys, values = call.columns
    if method.source == EXACT:
        tensors = call.query, keys, values
        return partial(F.scaled_dot_product_attention, *tensors, scale=call.scale)
    num_queries = call.query.shape[2]
    if method.source == NO_ATTENTION:
        return lambda: values[:, :, :num_queries]
    # Blocks are cut of one sequence. Keys stand in for queries that tokens beside the grid lack.
    queries = torch.cat([call.query, keys[:, :, num_queries:]], dim=2)
    beside = torch.arange(call.num_tokens, keys.shape[2], device=keys.device)
    order = torch.cat([call.key_order.long(), beside])
    tensors = queries, keys, values
    if method.source == POOLED:
        num_exact = method.exact_keys // BLOCK
        options = {"num_exact": num_exact, "query_order": order, "scale": call.scale}
        run = partial(pooled_attention, *tensors, **options)
    else:
        inputs = arranged(method.source, *tensors, query_order=order)
        run = partial(attention_in_order, method.source, method.setting, inputs, call.scale)
        if timed:
            return run
        run = partial(_out_of_order, run, order)
    return lambda: run()[:, :, :num_queries]


def _out_of_order(run: Callable[[], Tensor], order: Tensor) -> Tensor:
    output = run()
    return torch.empty_like(output).index_copy_(2, order, output)


def _answer(method: MethodName, codebooks: Codebooks, num_tokens: int, call: Call) -> Tensor:
    """The method for calls of so many tokens, exact attention for all others."""
    return _attention(method, codebooks, call)() if call.num_tokens == num_tokens else call.exact()


def _times(methods: Iterable[MethodName], codebooks: Codebooks, calls: Sequence[Call]) -> list[Row]:
    """Time of each method in these layers: the mean over them."""
    runs = [[_attention(x, codebooks, call, timed=True) for call in calls] for x in methods]
    turns = [lambda index, run=run: run[index]() for run in runs]
    timings = time_in_turns(turns, len(calls), calls[0].query.device, Effort())
    names = ("ms", "timer", "eager_ms", "spread")
    return [{name: timing[name] for name in names} for timing in timings]
