"""Features of a vision transformer with AVQ in all layers: `python -m eval vision features`.

columns       codewords and keys that a patch attends to, for AVQ the mean over tiles and layers;
              CLS and registers do not count
features_off  |f - exact| / |exact| of the last hidden states f; exact is in float32
map_off       mean difference in the map of salient pixels, whose values are between 0 and 1
map_r         correlation of that map with the exact one
ms            time of a forward pass, only on a GPU
speedup       exact attention's time, measured in turns, divided by that

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

from avq_diffusers import summary
from eval.benchmarks.timing import Effort, time_in_turns
from eval.keys.calls import answered, columns_noted, relative_error
from eval.keys.measuring import measured_method, stored_codebooks
from eval.keys.photographs import PHOTOGRAPHS, photograph
from eval.keys.subjects import Subject, subject_of, vision_pass
from eval.methods.base import AttentionMethod
from eval.methods.registry import EXACT, NO_ATTENTION
from eval.methods.running import avq_in
from eval.store.markdown import Column, figure, rows_table

Row = dict[str, Any]

WORDS = (EXACT, NO_ATTENTION)
COLUMNS: dict[str, Column] = {
    "pixels": "size",
    "tokens": "tokens",
    "method": "method",
    "columns": figure("columns", ".0f"),
    "features off": "features_off",
    "map off": "map_off",
    "map r": "map_r",
    "ms": "ms",
    "exact / ms": "speedup",
}
MIN_TOKENS = 2  # CLIP and SigLIP pool with one query


@torch.no_grad()
def measure_features(
    model: nn.Module,
    size: int,
    num_images: int,
    names: Sequence[str],
    decoder: Callable[[Tensor], Tensor] | None,
) -> Iterator[Row]:
    """Measure methods at one image size, one row each.

    Args:
        model: a vision transformer in evaluation mode, without AVQ; left unchanged.
        size: side of the images.
        num_images: photographs to measure on; the others are for calibration.
        names: configurations and `WORDS`.
        decoder: maps last hidden states to salient pixels (B, h, w) in float32, or None.

    Raises:
        TypeError: the model has no layer for AVQ.
        ValueError: a name is not a method.
    """
    methods = {name: measured_method(name, WORDS) for name in names}
    subject = subject_of(model, size, num_images, ())
    images = [photograph(name, size) for name in PHOTOGRAPHS[:num_images]]
    plain, wide = copy.deepcopy(model), copy.deepcopy(model).float()
    exact = [vision_pass(wide, image)() for image in images]
    for name, method in tqdm(methods.items(), f"{size} pixels"):
        with _running(subject, method):
            with columns_noted(model) as columns:
                pairs = [
                    (one().float(), other) for one, other in zip(subject.tests, exact, strict=True)
                ]
            with_avq = [row for row in summary(model).rows if row.config and method.config]
            timing = {}
            if next(model.parameters()).is_cuda and method.source != NO_ATTENTION:
                timing = times(subject.tests[0], vision_pass(plain, images[0]), exact[0].device)
        num_tokens = exact[0].shape[1]
        row = {
            "method": name,
            "scheme": method.scheme,
            "size": size,
            "tokens": num_tokens,
            "columns": mean(columns) if columns else method.columns(num_tokens),
            "runs": sorted({row.runs for row in with_avq}),
            "features_off": mean(relative_error(*pair) for pair in pairs),
        }
        if decoder:
            maps = [torch.stack([decoder(output).flatten() for output in pair]) for pair in pairs]
            row["map_off"] = mean(float((one - other).abs().mean()) for one, other in maps)
            row["map_r"] = mean(float(torch.corrcoef(pair)[0, 1]) for pair in maps)
        yield row | timing


def _running(subject: Subject, method: AttentionMethod) -> AbstractContextManager[None]:
    """Run all layers with a method inside the `with` block; the control uses their own values."""
    if method.source == NO_ATTENTION:
        return answered(subject.model, lambda layer, call: call.value, min_tokens=MIN_TOKENS)
    if method.config is None:
        return nullcontext()
    return avq_in(subject.model, stored_codebooks(subject, method) or method.config)


def times(run: Callable[[], Any], exact: Callable[[], Any], device: torch.device) -> Row:
    """The time of a forward pass, measured in turns with exact attention's."""
    runs = [lambda index, one=one: one() for one in (run, exact)]
    timing, exact_timing = time_in_turns(runs, 1, device, Effort())
    return {**timing, "speedup": exact_timing["ms"] / timing["ms"]}


def features_table(rows: Sequence[Row]) -> str:
    """The rows as a Markdown table."""
    return rows_table(COLUMNS, rows, ".3g")
