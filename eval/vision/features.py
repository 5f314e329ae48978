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
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from statistics import mean
from typing import Any

import torch
from torch import Tensor, nn

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
USUAL_COLUMNS = 192
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


class FeatureSubject:
    """A vision transformer at one size of its images, and what exact attention makes of them.

    Args:
        model: in evaluation mode.
        size: side of the images.
        num_images: photographs to measure on; the others are for calibration.
        methods: that will be measured.
        decoder: makes the map of salient pixels (B, h, w) of last hidden states in float32; None if
            there is none.

    Raises:
        ValueError: the model has no layer for AVQ.
    """

    @torch.no_grad()
    def __init__(
        self,
        model: nn.Module,
        size: int,
        num_images: int,
        methods: Sequence[MethodName],
        decoder: Callable[[Tensor], Tensor] | None,
    ) -> None:
        select_layers(model)
        self.model, self.size, self.decoder = model, size, decoder
        self.images = [photograph(name, size) for name in PHOTOGRAPHS[:num_images]]
        rest = PHOTOGRAPHS[num_images:] if needs_codebooks(methods) else ()
        calibration = [vision_pass(model, photograph(name, size)) for name in rest]
        self.codebooks = calibrated(Subject(model, size, [], calibration), methods, MIN_TOKENS)
        wide = copy.deepcopy(model).float()
        self.exact = [vision_pass(wide, image)() for image in self.images]

    @torch.no_grad()
    def measure(self, name: str) -> Row:
        """The row of a method."""
        method = feature_method(name)
        model = with_method(self.model, method, self.codebooks)
        passes = [vision_pass(model, image) for image in self.images]
        is_control = method.source == NO_ATTENTION
        with own_values(model) if is_control else nullcontext():
            outputs = [one().float() for one in passes]
        is_timed = not is_control and next(model.parameters()).is_cuda
        pairs = list(zip(outputs, self.exact, strict=True))
        with_avq = [row for row in summary(model).rows if row.config]
        grid = outputs[0].shape[1]
        return {
            "method": name,
            "scheme": scheme_of(method),
            "family": family_of(method),
            "num_refined": None if method.config is None else method.config.num_refined,
            "size": self.size,
            "tokens": grid,
            "columns": columns_of(method, with_avq[0].num_tokens if with_avq else grid),
            "runs": sorted({row.runs for row in with_avq}),
            "features_off": mean(distance(*pair) for pair in pairs),
            **(self._map_errors(pairs) if self.decoder else {}),
            **(self._times(model) if is_timed else {}),
        }

    def _map_errors(self, pairs: Sequence[tuple[Tensor, Tensor]]) -> Row:
        maps = [[self.decoder(output) for output in pair] for pair in pairs]
        return {
            "map_off": mean(float((found - exact).abs().mean()) for found, exact in maps),
            "map_r": mean(correlation(*pair) for pair in maps),
        }

    def _times(self, model: nn.Module) -> Row:
        """The time of a forward of one photograph, in turns with that of exact attention."""
        passes = [vision_pass(one, self.images[0]) for one in (model, self.model)]
        runs = [lambda index, one=one: one() for one in passes]
        timing, exact = time_in_turns(runs, 1, next(model.parameters()).device, Effort())
        return {**timing, "speedup": exact["ms"] / timing["ms"]}


def own_values(model: nn.Module) -> AbstractContextManager[None]:
    """The control: every token gets its own value."""
    return answered(model, lambda call: call.value, min_tokens=MIN_TOKENS)


def needs_codebooks(methods: Sequence[MethodName]) -> bool:
    """Whether any method has stored codewords."""
    return any(method.config is not None and not method.own for method in methods)


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
    """A row of panels for each number of tokens: errors over columns and time, elastic curves.

    The last row has speed-ups over tokens, of the method of about 192 columns of each scheme.
    """
    rows = [row for row in rows if row["runs"]]
    is_timed = any("speedup" in row for row in rows)
    panels = []
    for num_tokens in dict.fromkeys(row["tokens"] for row in rows):
        here = [row for row in rows if row["tokens"] == num_tokens]
        title = f"features off, N = {num_tokens}"
        panels.append([Panel(title, "columns", _lines(here, "scheme", "columns"), **LOGS)])
        if is_timed:
            lines = _lines(here, "scheme", "speedup")
            panels[-1].append(Panel(title, "speed-up of the forward", lines, **LOGS))
        lines = [one for one in _lines(here, "family", "num_refined") if len(one.x) > 1]
        panels[-1].append(Panel(f"elastic, {title}", "refined parents", lines, yscale="log"))
        if any("map_r" in row for row in here):
            lines = _lines(here, "scheme", "columns", "map_r")
            title = f"correlation of maps, N = {num_tokens}"
            panels[-1].append(Panel(title, "columns", lines, xscale="log"))
    if is_timed:
        schemes: dict[str, Row] = {}
        for row in sorted(rows, key=lambda row: -abs(row["columns"] - USUAL_COLUMNS)):
            schemes[row["scheme"]] = row
        usual = {row["method"] for row in schemes.values()}
        lines = _lines(
            [row for row in rows if row["method"] in usual], "scheme", "tokens", "speedup"
        )
        panels.append([Panel("speed-up of the forward", "tokens", lines, xscale="log")])
    return panels


def _lines(rows: Sequence[Row], label: str, x: str, y: str = "features_off") -> list[Line]:
    """A line for each value of the field `label`."""
    points: dict[str, list[tuple[float, float]]] = {}
    for row in rows:
        if row[label] is not None and x in row and y in row:
            points.setdefault(row[label], []).append((row[x], row[y]))
    return [Line(name, *zip(*sorted(found), strict=True)) for name, found in points.items()]
