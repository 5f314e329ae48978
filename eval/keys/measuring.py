"""Error of attention methods on the queries, keys and values of a model: `python -m eval keys`.

tokens        of the layers; a model with layers of several sizes also has rows for all of them
columns       codewords and keys of the grid that a query attends to, for AVQ the mean over its
              tiles; unknown for Sol-Attn
error         |o - exact| / |exact| of a layer's output o, with all layers before it exact
features_off  the same for the model's output, with the method in all of these layers
ms            time of one layer, with everything that the method computes; only on a GPU (peers get
              their inputs in order, see eval/methods/peer.py)

Exact attention is computed in float32 from the same inputs. Errors and columns are means over a
subject's tests, and then over layers.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from operator import itemgetter
from statistics import mean
from typing import Any, NamedTuple

import torch
from torch import Tensor
from tqdm import tqdm

from avq_diffusers import AVQCodebooks, select_layers
from avq_diffusers.attention.api import attend
from avq_diffusers.attention.tensors import Attended, Tensors, mean_columns
from eval.benchmarks.timing import Effort, time_in_turns
from eval.keys.calls import answered, exactly, relative_error
from eval.keys.subjects import Subject
from eval.methods.avq import Stored
from eval.methods.base import KEYS, AttentionMethod
from eval.methods.registry import EXACT, NO_ATTENTION, WORDS, parse_method
from eval.store.markdown import Column, figure, rows_table
from eval.store.plots import LOGS, Panel, lines

Row = dict[str, Any]
Attention = Callable[..., Callable[[], Attended]]  # makes the function that computes a call

MIN_TOKENS = 1024
ALL = "all"  # the `tokens` of rows for all layers
COLUMNS: dict[str, Column] = {
    "tokens": "tokens",
    "method": "method",
    "columns": figure("columns", ".0f"),
    "error": "error",
    "worst layer": "worst",
    "features off": "features_off",
    "ms": "ms",
}


def measured_method(name: str, words: Sequence[str]) -> AttentionMethod:
    """Parse the name of a method that can be measured without training: a configuration, or one of
    these words.

    Raises:
        ValueError: it is neither.
    """
    method = parse_method(name, levels=(0,))
    is_wrong = method.source not in words if method.config is None else "@L" in name
    if is_wrong:
        raise ValueError(
            f"methods here are {', '.join(words)} and configurations such as M64C8T1e-4, M64P16C8, "
            f"M64P16C8/stored and M64P16C8@P8/means, but got {name!r}."
        )
    return method


def key_method(name: str) -> AttentionMethod:
    """Parse the name of a method that can be measured on keys.

    Raises:
        ValueError: there is no such method.
    """
    method = measured_method(name, [word.kind for word in WORDS if KEYS in word.places])
    if method.config is not None and method.config.exact:
        raise ValueError(f"each layer is measured alone, so none can stay exact in {name!r}.")
    return method


@torch.no_grad()
def measure(subject: Subject, names: Sequence[str], *, min_tokens: int = MIN_TOKENS) -> list[Row]:
    """Measure methods in all self-attention layers of at least `min_tokens` tokens.

    Args:
        subject: a model and its passes.
        names: names of methods, see `key_method`.

    Returns:
        A row per number of tokens and method; if layers differ in tokens, then a row per method for
        all of them. `layers` has the error of each layer.

    Raises:
        ImportError: the package of a peer is missing.
        TypeError: AVQ does not know the model.
        ValueError: a name is not a method, a peer cannot run here, or the model has no such layer.
    """
    methods = {name: key_method(name) for name in names}
    for method in methods.values():
        method.check(next(subject.model.parameters()))
    attentions = {
        name: partial(_attention, method, stored_codebooks(subject, method))
        for name, method in methods.items()
    }
    # By number of tokens: errors and columns by layer and method, and one call per layer.
    found: dict[int, dict[str, dict[str, list[_Found]]]] = {}
    first_calls: dict[int, dict[str, Tensors]] = {}

    def observe(layer: str, call: Tensors) -> Tensor:
        exact, num_tokens = exactly(call), call.key.shape[2]
        layer_found = found.setdefault(num_tokens, {}).setdefault(layer, {})
        for name, attention in attentions.items():
            attended = attention(layer, call)()
            if attended.shown is None:
                columns = methods[name].columns(num_tokens)
            else:
                columns = mean_columns(attended.shown)
            call_found = _Found(relative_error(attended.output, exact), columns)
            layer_found.setdefault(name, []).append(call_found)
        if call.query.is_cuda:  # to be timed
            first_calls.setdefault(num_tokens, {}).setdefault(layer, call)
        return exact

    run_by = partial(answered, subject.model, min_tokens=min_tokens, frames=subject.frames)
    with run_by(observe):
        outputs = [test() for test in tqdm(subject.tests, desc="layers")]
    if not found:
        raise ValueError(
            f"at {subject.size} pixels, the model has no self-attention of {min_tokens} tokens."
        )

    groups: dict[int | str, dict[str, dict[str, list[_Found]]]] = {**found}
    if len(found) > 1:
        groups[ALL] = {name: layer for layers in found.values() for name, layer in layers.items()}
    rows = []
    for num_tokens, layers in groups.items():
        times = _times(attentions.values(), first_calls.get(num_tokens, {}))
        progress = tqdm(methods.items(), desc=f"features, N = {num_tokens}")
        for (name, method), timing in zip(progress, times, strict=True):
            answer = partial(_answer, attentions[name], layers)
            with run_by(answer):
                pairs = zip(subject.tests, outputs, strict=True)
                off = mean(relative_error(test(), output) for test, output in pairs)
            layer_errors = {
                layer: mean(call.error for call in calls[name]) for layer, calls in layers.items()
            }
            columns = [call.columns for calls in layers.values() for call in calls[name]]
            rows.append(
                {
                    "method": name,
                    "scheme": method.scheme,
                    "size": subject.size,
                    "tokens": num_tokens,
                    "columns": None if None in columns else mean(columns),
                    "error": mean(layer_errors.values()),
                    "worst": max(layer_errors.values()),
                    "features_off": off,
                    **timing,
                    "layers": layer_errors,
                }
            )
    return rows


class _Found(NamedTuple):
    """The error and the columns of one call by one method."""

    error: float
    columns: float | None


def keys_table(rows: Sequence[Row]) -> str:
    """The rows as a Markdown table."""
    return rows_table(COLUMNS, rows, ".3g")


def dial_panels(rows: Sequence[Row]) -> list[list[Panel]]:
    """Error against time for what is faster than exact attention, a panel per number of tokens.

    Own codewords are one line: the sizes that no others beat in both. A dashed line marks exact
    attention's time.
    """
    panels = []
    for same_size in by_tokens([row for row in rows if "ms" in row]):
        exact = next((row["ms"] for row in same_size if row["scheme"] == EXACT), 0)
        rivals = [row for row in same_size if row["ms"] < exact and row["scheme"] != NO_ATTENTION]
        shown: list[Row] = []
        least = torch.inf
        for row in sorted(rivals, key=itemgetter("ms")):
            if not row["scheme"].startswith("AVQ, own"):
                shown.append(row)
            elif row["error"] < least:
                least = row["error"]
                shown.append(row | {"scheme": "AVQ, own"})
        if shown:
            curves = lines(shown, lambda row: row["scheme"].removesuffix(", own"), "ms", "error")
            title = f"error of one layer, {shown[0]['tokens']} tokens"
            time = "ms of the layer; dashed: exact attention"
            panels.append(Panel(title, time, curves, **LOGS, reference_x=exact))
    return [panels]


def by_tokens(rows: Sequence[Row]) -> list[list[Row]]:
    """The rows of each number of tokens."""
    numbers = dict.fromkeys(row["tokens"] for row in rows)
    return [[row for row in rows if row["tokens"] == number] for number in numbers]


def stored_codebooks(subject: Subject, method: AttentionMethod) -> AVQCodebooks | None:
    """The codebooks of a method with stored codewords, for all levels; None for others."""
    if not isinstance(method, Stored):
        return None
    levels = tuple(sorted({layer.level for layer in select_layers(subject.model)}))
    codebooks = subject.calibrate(replace(method.config, levels=levels))
    return codebooks.to(next(subject.model.parameters()).device)


def _attention(
    method: AttentionMethod,
    codebooks: AVQCodebooks | None,
    layer: str,
    call: Tensors,
    *,
    timed: bool = False,
) -> Callable[[], Attended]:
    """A method's attention. A timed peer leaves its tokens in the order of blocks."""
    if method.config is not None:
        inputs = call if codebooks is None else call.with_codebook(codebooks.codebook(layer))
        return lambda: attend(inputs, method.config.spec)
    run = method.on_keys(call, timed=timed)
    return lambda: Attended(run(), method.source)


def _answer(attention: Attention, layers: Collection[str], layer: str, call: Tensors) -> Tensor:
    """The method for calls of these layers, exact attention for all others."""
    return attention(layer, call)().output if layer in layers else exactly(call)


def _times(attentions: Collection[Attention], calls: Mapping[str, Tensors]) -> list[Row]:
    """Time of each method, averaged over these layers; unknown without layers."""
    if not calls:
        return [{} for _ in attentions]
    runs = [[attention(*call, timed=True) for call in calls.items()] for attention in attentions]
    turns = [lambda index, run=run: run[index]() for run in runs]
    device = next(iter(calls.values())).query.device
    timings = time_in_turns(turns, len(calls), device, Effort())
    names = ("ms", "timer", "eager_ms", "spread")
    return [{name: timing[name] for name in names} for timing in timings]
