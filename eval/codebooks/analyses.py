"""The paper's analyses of codebooks: `python -m eval analyse`.

Each analysis varies its methods, measures the variants with `layer_errors`, and shows some metrics:

heads        capture per head (paper, Fig. perhead_capture)
layers       commitment loss and quantization error per layer (Tab. perlayer_imagenet)
utilisation  how many codewords are in use, two-level against flat (Tab. active_ratio)
order        query orders and sizes of query tiles (Tab. gilbert_ablation)
importance   tiled against exact importance (Tab. tiled_capture)

Elastic inference (Tab. elastic_p) and accuracy against cost (Fig. accuracy_cost) are `python -m
eval errors`.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from operator import itemgetter
from pathlib import Path
from statistics import mean
from typing import Any

from diffusers import StableDiffusionPipeline

from distill.scenes import Scene
from eval.codebooks.layer_errors import Row, measure_errors
from eval.methods.avq import codewords_form
from eval.methods.prepared import Method
from eval.methods.registry import row_label
from eval.store.markdown import rows_table
from eval.store.plots import HeatMap, Line, Panel, heat_maps, lines, panel_plot

QUERY_ORDERS = ("gilbert", "raster", "random")
QUERY_TILES = (16, 32, 64, 128, 256, 512)
IMPORTANCE_TILES = (8, 16, 32, 64, 128)
PARTS = ("down_blocks", "mid_block", "up_blocks")  # of a UNet, in execution order

Fields = dict[str, Any]


@dataclass(frozen=True)
class Analysis:
    """One analysis.

    Attributes:
        methods: default methods, comma-separated.
        table: formats rows as Markdown.
        plot: plots rows to a PNG.
        variants: `AVQConfig` fields to replace, per variant of a method.
        refines: whether its methods must refine parents.
    """

    methods: str
    table: Callable[[Sequence[Row]], str]
    plot: Callable[[Path, Sequence[Row]], None]
    variants: Callable[[Method], Sequence[Fields]] = lambda method: [{}]
    refines: bool = True


@dataclass(frozen=True)
class OfVariants:
    """How to show rows of variants: one table, and a panel per metric.

    Attributes:
        fields: title -> field that the table shows beside the method.
        metrics: title -> metric.
        x, xlabel: the field on the panels' x axis, and its title.
        label: label of a row's line.
    """

    fields: Mapping[str, str]
    metrics: Mapping[str, str]
    x: str
    xlabel: str
    label: Callable[[Row], str] = row_label

    def table(self, rows: Sequence[Row]) -> str:
        """One line per row; an importance tile of None is exact importance."""
        rows = [row | {self.x: row[self.x] or "exact"} for row in rows]
        return rows_table({"method": row_label, **self.fields, **self.metrics}, rows)

    def plot(self, path: Path, rows: Sequence[Row]) -> None:
        panel_plot(path, [self.panels(rows)])

    def panels(self, rows: Sequence[Row]) -> list[Panel]:
        """A line per label. An importance tile with all parents is exact importance."""
        rows = [row | {self.x: row[self.x] or row["num_parents"]} for row in rows]
        shown = {x: lines(rows, self.label, self.x, name) for x, name in self.metrics.items()}
        return [Panel(x, self.xlabel, y, xscale="log", from_zero=True) for x, y in shown.items()]


# Title -> metric of a layer.
LAYERS = {
    "commitment loss": itemgetter("commitment_loss"),
    "quantization error": itemgetter("quantization_error"),
    "feature, relative MSE": itemgetter("feature_relative_mse"),
}
HEADS = {
    "capture": lambda layer: mean(layer["heads"]["capture"]),
    "least head": lambda layer: min(layer["heads"]["capture"]),
    "most head": lambda layer: max(layer["heads"]["capture"]),
}


def layers_table(rows: Sequence[Row], metrics: Mapping[str, Callable[[Row], float]]) -> str:
    """A row per layer and method, and means per level."""
    shown = []
    for row in rows:
        layers = in_order(row["layers"])
        groups = [
            (name, [layer]) for name, layer in zip(labels(layers), layers.values(), strict=True)
        ]
        for level in sorted({layer["level"] for layer in layers.values()}):
            of_level = [layer for layer in layers.values() if layer["level"] == level]
            groups.append((f"mean of level {level}", of_level))
        for name, group in groups:
            facts = {"method": row_label(row), "layer": name, "level": group[0]["level"]}
            means = {title: mean(map(metric, group)) for title, metric in metrics.items()}
            shown.append(facts | means)
    return rows_table({title: title for title in shown[0]}, shown, ".3g")


def layers_plot(path: Path, rows: Sequence[Row]) -> None:
    """A panel per metric, over the layers."""
    layers = in_order({name: layer for row in rows for name, layer in row["layers"].items()})
    places = range(len(layers))
    panels = []
    for title, metric in LAYERS.items():
        drawn = []
        for row in rows:
            values = [metric(row["layers"][x]) if x in row["layers"] else None for x in layers]
            drawn.append(Line(row_label(row), places, values))
        panels.append(Panel(title, "", drawn, ticks=labels(layers), from_zero=True))
    panel_plot(path, [panels])


def heads_plot(path: Path, rows: Sequence[Row]) -> None:
    """A map of layers and heads per method."""
    maps = []
    for row in rows:
        layers = in_order(row["layers"])
        captures = [layer["heads"]["capture"] for layer in layers.values()]
        maps.append(HeatMap(row_label(row), labels(layers), captures))
    heat_maps(path, maps, xlabel="head", label="capture")


def in_order(layers: Mapping[str, Any]) -> dict[str, Any]:
    """A UNet's layers in execution order; the middle block is last among its modules."""
    return {name: layers[name] for name in sorted(layers, key=_place)}


def _place(name: str) -> tuple[int, list[int]]:
    part, *path = name.split(".")
    return PARTS.index(part), [int(step) for step in path if step.isdecimal()]


def labels(layers: Iterable[str]) -> list[str]:
    """The names without their common suffix."""
    names = list(layers)
    end = ".transformer_blocks.0.attn1"
    if not all(name.endswith(end) for name in names):
        end = ".attn1"
    return [name.removesuffix(end) for name in names]


def order_variants(method: Method) -> list[Fields]:
    """Every query order with every size of query tile."""
    return [
        {"query_order": order, "query_tile": tile} for order in QUERY_ORDERS for tile in QUERY_TILES
    ]


def importance_variants(method: Method) -> list[Fields]:
    """Importance tiles smaller than the number of parents, and exact importance."""
    most = max(config.num_parents for config in method.layer_configs)
    tiles = [tile for tile in IMPORTANCE_TILES if tile < most]
    return [{"importance_tile": tile} for tile in (*tiles, None)]


def _kind(row: Row) -> str:
    kind = "flat VQ" if row["is_flat"] else "AVQ"
    return f"{kind}{codewords_form(row['config'])}, {row['origin']}"


UTILISATION = OfVariants(
    {"codewords": "num_codewords"},
    {
        "active ratio": "active_ratio",
        "perplexity": "perplexity",
        "perplexity / codewords": "evenness",
    },
    "num_codewords",
    "codewords, M0 (1 + C)",
    _kind,
)
ORDER = OfVariants(
    {"query order": "query_order", "query tile": "query_tile"},
    {
        "output error": "output_error",
        "feature, relative MSE": "feature_relative_mse",
        "capture": "capture",
    },
    "query_tile",
    "query tile",
    lambda row: f"{row_label(row)}, {row['query_order']}",
)
IMPORTANCE = OfVariants(
    {"importance tile": "importance_tile"},
    {
        "refined as by exact importance": "overlap",
        "capture": "capture",
        "best capture": "best_capture",
        "output error": "output_error",
    },
    "importance_tile",
    "importance tile (the largest: exact)",
)
ANALYSES: Mapping[str, Analysis] = {
    "heads": Analysis("M64P8C8", partial(layers_table, metrics=HEADS), heads_plot),
    "layers": Analysis(
        "M64P16C8,M128P16C8",
        partial(layers_table, metrics=LAYERS),
        layers_plot,
        refines=False,
    ),
    "utilisation": Analysis(
        "M32P8C8,M64P16C8,M128P32C8,M32,M64,M128,M288,M576,M1152",
        UTILISATION.table,
        UTILISATION.plot,
        refines=False,
    ),
    "order": Analysis("M64P16C8", ORDER.table, ORDER.plot, order_variants),
    "importance": Analysis(
        "M64P16C8,M256P32C8", IMPORTANCE.table, IMPORTANCE.plot, importance_variants
    ),
}


def check_methods(name: str, methods: Sequence[Method]) -> None:
    """Refuse methods that an analysis cannot use.

    Raises:
        ValueError: a method has no codewords, or does not refine parents where that is needed.
    """
    for method in methods:
        configs = method.layer_configs
        refines = all(config.num_refined for config in configs)
        if not configs or (ANALYSES[name].refines and not refines):
            needs = "refine parents" if configs else "have codewords"
            raise ValueError(
                f"the analysis {name} needs methods that {needs}, but got {method.name!r}."
            )


def analyse(
    pipe: StableDiffusionPipeline,
    analysis: Analysis,
    methods: Sequence[Method],
    scenes: Sequence[Scene],
    *,
    num_timesteps: int,
) -> list[Row]:
    """Measure each variant of each method: rows from `measure_errors` with the replaced fields.

    Args:
        pipe: a pipeline without AVQ.
        analysis: one of `ANALYSES`.
        methods: methods prepared for `pipe`.
        scenes: scenes whose images are noised.
        num_timesteps: as in `measure_errors`.
    """
    cases = [(method, fields) for method in methods for fields in analysis.variants(method)]
    variants = [method.with_fields(**fields) for method, fields in cases]
    rows = measure_errors(pipe, variants, scenes, num_timesteps=num_timesteps)
    return [row | fields for row, (_, fields) in zip(rows, cases, strict=True)]
