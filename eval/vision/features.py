"""Features of a vision transformer with AVQ in all its layers: `python -m eval vision features`.

columns       codewords and keys that a patch meets, at most, CLS and registers apart
features_off  |f - exact| / |exact| of the last hidden states f; exact is in float32
map_off       mean difference of the map of salient pixels, whose values lie between 0 and 1
map_r         correlation of that map with the exact one
ms            of a forward, on a GPU only
speedup       time of exact attention, measured in turns with it, over that time

Errors are means over photographs. Nothing is trained.
"""

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from statistics import mean
from typing import Any

import torch
from torch import Tensor, nn
from tqdm import tqdm

from avq_diffusers import AVQConfig, apply_avq, gather_codebooks, select_layers, summary
from eval.benchmarks.timing import Effort, time_in_turns
from eval.keys.calls import answered
from eval.keys.measuring import Codebooks, calibrated, columns_of, distance, scheme_of
from eval.keys.photographs import PHOTOGRAPHS, photograph
from eval.keys.subjects import Subject, vision_pass
from eval.names import EXACT, NO_ATTENTION, MethodName, parse_method
from eval.store.markdown import markdown_table, number
from eval.store.plots import Line, Panel

Row = dict[str, Any]

METRICS = {
    "features_off": "features off",
    "map_off": "map off",
    "map_r": "map r",
    "ms": "ms",
    "speedup": "exact / ms",
}
LOGS = {"xscale": "log", "yscale": "log"}
MIN_TOKENS = 2  # CLIP and SigLIP pool by one query


def feature_method(name: str) -> MethodName:
    """Parse the name of a method that runs in a whole vision transformer.

    Raises:
        ValueError: there is no such method.
    """
    method = parse_method(name, levels=(0,))
    if method.config is None:
        is_known = method.source in (EXACT, NO_ATTENTION)
    else:
        is_known = method.route == "always" and not method.tuned and "@L" not in name
    if not is_known:
        raise ValueError(
            f"methods of features are {EXACT}, {NO_ATTENTION} and configurations such as M64P16C8, "
            f"M64P16C8/means, M64P16C8@P8/own and M64P16C8E256/own, but got {name!r}."
        )
    return method


@torch.no_grad()
def measure_features(
    model: nn.Module,
    size: int,
    num_images: int,
    names: Sequence[str],
    decoder: Callable[[Tensor], Tensor] | None,
) -> Iterator[Row]:
    """Measure methods at one size of the images; a row for each.

    Args:
        model: a vision transformer in evaluation mode.
        size: side of the images.
        num_images: photographs to measure on; the others are for calibration.
        names: of methods, see `feature_method`.
        decoder: makes the map of salient pixels (B, h, w) of last hidden states in float32; None if
            there is none.

    Raises:
        ValueError: the model has no layer for AVQ, or a name is no method.
    """
    select_layers(model)
    methods = {name: feature_method(name) for name in names}
    images = [photograph(name, size) for name in PHOTOGRAPHS[:num_images]]
    is_stored = any(x.config is not None and not x.own for x in methods.values())
    rest = PHOTOGRAPHS[num_images:] if is_stored else ()
    calibration = [vision_pass(model, photograph(name, size)) for name in rest]
    subject = Subject(model, size, [], calibration)
    codebooks = calibrated(subject, list(methods.values()), MIN_TOKENS)
    wide = copy.deepcopy(model).float()
    exact = [vision_pass(wide, image)() for image in images]
    for name, method in tqdm(methods.items(), f"{size} pixels"):
        changed = with_method(model, method, codebooks)
        passes = [vision_pass(changed, image) for image in images]
        is_control = method.source == NO_ATTENTION
        with own_values(changed) if is_control else nullcontext():
            pairs = [(one().float(), other) for one, other in zip(passes, exact, strict=True)]
        with_avq = [row for row in summary(changed).rows if row.config]
        num_tokens = exact[0].shape[1]
        row = {
            "method": name,
            "scheme": scheme_of(method),
            "family": family_of(method),
            "num_refined": None if method.config is None else method.config.num_refined,
            "size": size,
            "tokens": num_tokens,
            "columns": columns_of(method, with_avq[0].num_tokens if with_avq else num_tokens),
            "runs": sorted({row.runs for row in with_avq}),
            "features_off": mean(distance(*pair) for pair in pairs),
        }
        if decoder:
            maps = [[decoder(output) for output in pair] for pair in pairs]
            row["map_off"] = mean(float((one - other).abs().mean()) for one, other in maps)
            row["map_r"] = mean(correlation(*pair) for pair in maps)
        if next(model.parameters()).is_cuda and not is_control:
            row |= times(changed, model, images[0])
        yield row


def times(model: nn.Module, exact: nn.Module, image: Tensor) -> Row:
    """The time of a forward of one photograph, in turns with that of exact attention."""
    passes = [vision_pass(one, image) for one in (model, exact)]
    runs = [lambda index, one=one: one() for one in passes]
    timing, of_exact = time_in_turns(runs, 1, next(model.parameters()).device, Effort())
    return {**timing, "speedup": of_exact["ms"] / timing["ms"]}


def own_values(model: nn.Module) -> AbstractContextManager[None]:
    """The control: every token gets its own value."""
    return answered(model, lambda call: call.value, min_tokens=MIN_TOKENS)


def with_method(model: nn.Module, method: MethodName, codebooks: Codebooks) -> nn.Module:
    """A copy of a model that shares its weights and runs AVQ; others stay exact."""
    shared = [*model.parameters(), *model.buffers()]
    model = copy.deepcopy(model, {id(tensor): tensor for tensor in shared})
    config: AVQConfig | None = method.config
    if config is None:
        return model
    if method.own:
        return apply_avq(model, config, route="always")
    sizes = config.num_parents, config.num_children
    layers = select_layers(model, config.levels, config.exact)
    found = {layer.name: codebooks[layer.name, sizes] for layer in layers}
    device = next(model.parameters()).device
    return apply_avq(model, gather_codebooks(model, config, found).to(device), route="always")


def correlation(one: Tensor, other: Tensor) -> float:
    """Pearson's, of all entries."""
    return float(torch.corrcoef(torch.stack([one.flatten(), other.flatten()]))[0, 1])


def family_of(method: MethodName) -> str | None:
    """What an elastic curve has in common: all but the refined parents."""
    config = method.config
    if config is None or not config.num_children:
        return None
    exact = f"E{config.exact_keys}" if config.exact_keys else ""
    sizes = f"M{config.num_parents}C{config.num_children}{exact}"
    return f"{sizes}, {scheme_of(method).partition(', ')[2]}"


def features_table(rows: Sequence[Row]) -> str:
    """The rows as a Markdown table."""
    figures = {name: title for name, title in METRICS.items() if any(name in row for row in rows)}
    return markdown_table(
        ["pixels", "tokens", "method", "columns", *figures.values()],
        (
            [
                str(row["size"]),
                str(row["tokens"]),
                row["method"],
                str(row["columns"]),
                *(number(row.get(name), ".3g") for name in figures),
            ]
            for row in rows
        ),
    )


def features_panels(rows: Sequence[Row]) -> list[list[Panel]]:
    """A row of panels for each number of tokens: errors over columns and time, elastic curves."""
    rows = [row for row in rows if row["runs"]]
    panels = []
    for num_tokens in dict.fromkeys(row["tokens"] for row in rows):
        here = [row for row in rows if row["tokens"] == num_tokens]
        title = f"features off, N = {num_tokens}"
        panels.append([Panel(title, "columns", _lines(here, "scheme", "columns"), **LOGS)])
        if any("speedup" in row for row in here):
            lines = _lines(here, "scheme", "speedup")
            panels[-1].append(Panel(title, "speed-up of the forward", lines, **LOGS))
        lines = [one for one in _lines(here, "family", "num_refined") if len(one.x) > 1]
        panels[-1].append(Panel(f"elastic, {title}", "refined parents", lines, yscale="log"))
        if any("map_r" in row for row in here):
            lines = _lines(here, "scheme", "columns", "map_r")
            title = f"correlation of maps, N = {num_tokens}"
            panels[-1].append(Panel(title, "columns", lines, xscale="log"))
    return panels


def _lines(rows: Sequence[Row], label: str, x: str, y: str = "features_off") -> list[Line]:
    """A line for each value of the field `label`."""
    points: dict[str, list[tuple[float, float]]] = {}
    for row in rows:
        if row[label] is not None and x in row and y in row:
            points.setdefault(row[label], []).append((row[x], row[y]))
    return [Line(name, *zip(*sorted(found), strict=True)) for name, found in points.items()]
