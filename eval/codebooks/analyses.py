"""The paper's analyses of codebooks: `python -m eval analyse`.

Each analysis varies its methods, measures the variants by `layer_errors`, and shows some metrics:

heads        capture of each head (paper, Fig. perhead_capture)
layers       commitment loss, quantization error and sensitivity of each layer (Tab.
             perlayer_imagenet)
utilisation  how many codewords are in use, two-level against flat (Tab. active_ratio)
order        query orders and sizes of query tiles (Tab. gilbert_ablation)
importance   tiled against exact importance (Tab. tiled_capture)

Elastic inference (Tab. elastic_p) and accuracy against cost (Fig. accuracy_cost) are `python -m
eval errors`.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import itemgetter
from pathlib import Path
from statistics import mean
from typing import Any

import torch
from diffusers import StableDiffusionPipeline
from torch import Tensor, nn
from tqdm import tqdm

from avq_diffusers import set_num_refined, summary
from avq_diffusers.mini import Scene
from eval.codebooks.layer_errors import Row, measure_errors
from eval.methods import Method, attention_method
from eval.names import codewords_form, row_label
from eval.store.markdown import markdown_table, number
from eval.store.plots import HeatMap, Line, Panel, heat_maps, panel_plot

QUERY_ORDERS = ("gilbert", "raster", "random")
QUERY_TILES = (16, 32, 64, 128, 256, 512)
IMPORTANCE_TILES = (8, 16, 32, 64, 128)
PARTS = ("down_blocks", "mid_block", "up_blocks")  # of a UNet, as it runs them

LAYER_METRICS = {
    "commitment_loss": "commitment loss",
    "quantization_error": "quantization error",
    "feature_relative_mse": "feature, relative MSE",
    "output_error_alone": "output error, replaced alone",
}
UTILISATION_METRICS = {
    "active_ratio": "active ratio",
    "perplexity": "perplexity",
    "evenness": "perplexity / codewords",
}
ORDER_METRICS = {
    "output_error": "output error",
    "feature_relative_mse": "feature, relative MSE",
    "capture": "capture",
}
IMPORTANCE_METRICS = {
    "overlap": "refined as by exact importance",
    "capture": "capture",
    "best_capture": "best capture",
    "output_error": "output error",
}

Fields = dict[str, Any]


@dataclass(frozen=True)
class Analysis:
    """One analysis.

    Attributes:
        methods: default methods, comma-separated.
        table: formats its rows as Markdown.
        plot: writes a PNG of its rows.
        variants: fields of `AVQConfig` to replace, once per variant of a method.
        refines: whether its methods must refine parents.
        sensitivity: whether it measures the sensitivity to each layer, as `output_error_alone`.
    """

    methods: str
    table: Callable[[Sequence[Row]], str]
    plot: Callable[[Path, Sequence[Row]], None]
    variants: Callable[[Method], Sequence[Fields]] = lambda method: [{}]
    refines: bool = True
    sensitivity: bool = False


def check_methods(name: str, methods: Sequence[Method]) -> None:
    """Refuse methods that an analysis cannot use.

    Raises:
        ValueError: a method has no codewords, or refines no parents where the analysis needs it.
    """
    for method in methods:
        configs = method.layer_configs
        if not configs:
            raise ValueError(
                f"the analysis {name} needs methods with codewords, but got {method.name!r}."
            )
        if ANALYSES[name].refines and not all(config.num_refined for config in configs):
            raise ValueError(
                f"the analysis {name} needs methods that refine parents, but got {method.name!r}."
            )


def analyse(
    pipe: StableDiffusionPipeline,
    analysis: Analysis,
    methods: Sequence[Method],
    scenes: Sequence[Scene],
    *,
    num_timesteps: int,
) -> list[Row]:
    """Measure every variant of every method: rows of `measure_errors` with the replaced fields.

    Variants run one after the other, because each keeps a sample of its keys.

    Args:
        pipe: a pipeline without AVQ.
        analysis: one of `ANALYSES`.
        methods: methods prepared for `pipe`.
        scenes: their images are noised; their captions are prompts for the sensitivity.
        num_timesteps: timesteps, and denoising steps for the sensitivity.
    """
    rows = []
    for method in methods:
        for fields in analysis.variants(method):
            variant = method.with_fields(**fields)
            (row,) = measure_errors(pipe, [variant], scenes, num_timesteps=num_timesteps)
            if analysis.sensitivity:
                captions = [scene.caption for scene in scenes]
                for name, error in errors_alone(pipe, variant, captions, num_timesteps).items():
                    row["layers"][name]["output_error_alone"] = error
            rows.append(row | fields)
    return rows


@torch.no_grad()
def errors_alone(
    pipe: StableDiffusionPipeline, method: Method, prompts: Sequence[str], num_steps: int
) -> dict[str, float]:
    """By layer, |s - t| / |t| of the predicted noise s with AVQ in that layer alone.

    The pipeline runs exact attention, whose prediction is t. Prompt i runs with seed i.
    """
    calls: list[tuple[Any, Any, Tensor]] = []

    def keep(unet: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        calls.append((args, kwargs, output[0].float()))

    errors = {}
    with attention_method(pipe, method):
        names = [row.name for row in summary(pipe).rows if row.config]
        configs = method.layer_configs
        configs *= len(names) // len(configs)  # own codewords have one for all layers
        set_num_refined(pipe, "exact")
        with pipe.unet.register_forward_hook(keep, with_kwargs=True):
            for seed, prompt in enumerate(prompts):
                noise = torch.Generator().manual_seed(seed)
                pipe(prompt, num_inference_steps=num_steps, generator=noise, output_type="latent")
        expected = sum(float(exact.square().sum()) for *_, exact in calls)
        pairs = list(zip(names, configs, strict=True))
        for name, config in tqdm(pairs, desc="sensitivity"):
            set_num_refined(pipe, config.num_refined, layer=name)
            error = sum(
                float((pipe.unet(*args, **kwargs)[0].float() - exact).square().sum())
                for args, kwargs, exact in calls
            )
            set_num_refined(pipe, "exact", layer=name)
            errors[name] = (error / expected) ** 0.5
    return errors


def heads_table(rows: Sequence[Row]) -> str:
    """Capture by layer: mean, minimum and maximum over heads."""
    return markdown_table(
        ["method", "layer", "level", "capture", "least head", "most head"],
        (
            [
                row_label(row),
                label,
                str(layer["level"]),
                *(f"{of(layer['heads']['capture']):.3f}" for of in (mean, min, max)),
            ]
            for row in rows
            for label, layer in zip(_labels(row["layers"]), row["layers"].values(), strict=True)
        ),
    )


def heads_maps(rows: Sequence[Row]) -> list[HeatMap]:
    """A map of layers and heads for each method."""
    return [
        HeatMap(
            row_label(row),
            _labels(row["layers"]),
            [layer["heads"]["capture"] for layer in row["layers"].values()],
        )
        for row in rows
    ]


def layers_table(rows: Sequence[Row]) -> str:
    """The metrics of each layer, one column per method, and their means over each level."""
    layers = _layer_levels(rows)
    groups = {label: [name] for label, name in zip(_labels(layers), layers, strict=True)}
    for level in sorted(set(layers.values())):
        groups[f"mean of level {level}"] = [name for name in layers if layers[name] == level]
    header = [f"{title}, {row_label(row)}" for title in LAYER_METRICS.values() for row in rows]

    def cells(names: Sequence[str]) -> list[str]:
        found = [
            [row["layers"][name][figure] for name in names if name in row["layers"]]
            for figure in LAYER_METRICS
            for row in rows
        ]
        return [number(mean(values) if values else None, ".3g") for values in found]

    return markdown_table(
        ["layer", "level", *header],
        ([title, str(layers[names[0]]), *cells(names)] for title, names in groups.items()),
    )


def layers_panels(rows: Sequence[Row]) -> list[Panel]:
    """One panel per metric, over the layers."""
    layers = _layer_levels(rows)
    return [
        Panel(
            title,
            "",
            [
                Line(
                    row_label(row),
                    range(len(layers)),
                    [row["layers"].get(name, {}).get(figure) for name in layers],
                )
                for row in rows
            ],
            ticks=_labels(layers),
            from_zero=True,
        )
        for figure, title in LAYER_METRICS.items()
    ]


def utilisation_table(rows: Sequence[Row]) -> str:
    """How many codewords are in use, means over heads and layers."""
    return _table(rows, {"num_codewords": "codewords"}, UTILISATION_METRICS)


def utilisation_panels(rows: Sequence[Row]) -> list[Panel]:
    """Share and evenness of use over the number of codewords."""

    def kind(row: Row) -> str:
        kind = "flat VQ" if row["is_flat"] else "AVQ"
        return f"{kind}{codewords_form(row['config'])}, {row['origin']}"

    figures = {name: UTILISATION_METRICS[name] for name in ("active_ratio", "evenness")}
    return _panels(rows, figures, kind, itemgetter("num_codewords"), "codewords, M0 (1 + C)")


def order_variants(method: Method) -> list[Fields]:
    """Every query order with every size of query tile."""
    return [
        {"query_order": order, "query_tile": tile} for order in QUERY_ORDERS for tile in QUERY_TILES
    ]


def order_table(rows: Sequence[Row]) -> str:
    """A row for each query order and size of query tile."""
    fields = {"query_order": "query order", "query_tile": "query tile"}
    return _table(rows, fields, ORDER_METRICS)


def order_panels(rows: Sequence[Row]) -> list[Panel]:
    """The figures over the size of the query tile, a line for each query order."""

    def order(row: Row) -> str:
        return f"{row_label(row)}, {row['query_order']}"

    return _panels(rows, ORDER_METRICS, order, itemgetter("query_tile"), "query tile")


def importance_variants(method: Method) -> list[Fields]:
    """Importance tiles smaller than the number of parents, and exact importance."""
    most = max(config.num_parents for config in method.layer_configs)
    tiles = [tile for tile in IMPORTANCE_TILES if tile < most]
    return [{"importance_tile": tile} for tile in (*tiles, None)]


def importance_table(rows: Sequence[Row]) -> str:
    """A row for each importance tile."""
    return _table(rows, {"importance_tile": "importance tile"}, IMPORTANCE_METRICS)


def importance_panels(rows: Sequence[Row]) -> list[Panel]:
    """The metrics over the importance tile; a tile that holds all parents is exact importance."""

    def tile(row: Row) -> float:
        return row["importance_tile"] or row["num_parents"]

    xlabel = "importance tile (the largest: exact)"
    overlap, capture, best, error = _panels(rows, IMPORTANCE_METRICS, row_label, tile, xlabel)
    capture = replace(capture, title="capture; faint: of the best choice", faint=best.lines)
    return [overlap, capture, error]


def _plot(panels: Callable[[Sequence[Row]], list[Panel]]) -> Callable[[Path, Sequence[Row]], None]:
    return lambda path, rows: panel_plot(path, [panels(rows)])


ANALYSES: Mapping[str, Analysis] = {
    "heads": Analysis(
        "M64P8C8",
        heads_table,
        lambda path, rows: heat_maps(path, heads_maps(rows), xlabel="head", label="capture"),
    ),
    "layers": Analysis(
        "M64P16C8,M128P16C8",
        layers_table,
        _plot(layers_panels),
        refines=False,
        sensitivity=True,
    ),
    "utilisation": Analysis(
        "M32P8C8,M64P16C8,M128P32C8,M32,M64,M128,M288,M576,M1152",
        utilisation_table,
        _plot(utilisation_panels),
        refines=False,
    ),
    "order": Analysis("M64P16C8", order_table, _plot(order_panels), order_variants),
    "importance": Analysis(
        "M64P16C8,M256P32C8", importance_table, _plot(importance_panels), importance_variants
    ),
}


def _table(rows: Sequence[Row], fields: Mapping[str, str], figures: Mapping[str, str]) -> str:
    """A row for each row: the method, the fields (None is "exact"), the figures."""
    return markdown_table(
        ["method", *fields.values(), *figures.values()],
        (
            [
                row_label(row),
                *(format(row[name] or "exact") for name in fields),
                *(number(row[name]) for name in figures),
            ]
            for row in rows
        ),
    )


def _panels(
    rows: Sequence[Row],
    figures: Mapping[str, str],
    label: Callable[[Row], str],
    x: Callable[[Row], float],
    xlabel: str,
) -> list[Panel]:
    """A panel a figure, with a line for each label."""
    groups: dict[str, list[Row]] = {}
    for row in sorted(rows, key=x):
        groups.setdefault(label(row), []).append(row)
    return [
        Panel(
            title,
            xlabel,
            [
                Line(label, list(map(x, group)), [row[figure] for row in group])
                for label, group in groups.items()
            ],
            xscale="log",
            from_zero=True,
        )
        for figure, title in figures.items()
    ]


def _layer_levels(rows: Sequence[Row]) -> dict[str, int]:
    """The level of every layer, in the order in which the UNet runs them."""
    levels = {name: layer["level"] for row in rows for name, layer in row["layers"].items()}
    return {name: levels[name] for name in sorted(levels, key=_place)}


def _place(name: str) -> tuple[int, list[int]]:
    """Sort key of a layer by when the UNet runs it."""
    part, *path = name.split(".")
    return PARTS.index(part), [int(step) for step in path if step.isdecimal()]


def _labels(names: Iterable[str]) -> list[str]:
    """The names without their common end."""
    names = list(names)
    end = ".transformer_blocks.0.attn1"
    if not all(name.endswith(end) for name in names):
        end = ".attn1"
    return [name.removesuffix(end) for name in names]
