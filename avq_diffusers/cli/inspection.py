"""`avq inspect`: a table of codebooks, and a plot of the codewords of every layer."""

from collections.abc import Mapping
from pathlib import Path

import torch
import torch.nn.functional as F
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from torch import Tensor

from avq_diffusers.codebook.codebook import Codebook
from avq_diffusers.files import atomic_write
from avq_diffusers.hosts.codebooks import AVQCodebooks

REPORT_WIDTH = 100
METRICS = ("quantization_error", "capture", "active_ratio")


def print_codebooks(codebooks: AVQCodebooks) -> None:
    """Print sizes, spread of the codewords and metrics of calibration or training, by layer."""
    metrics, labels = _metrics(codebooks), _labels(codebooks)
    kind = "own codewords" if codebooks.own_codewords else "codebooks"
    table = Table(
        title=f"{codebooks.avq_config} {kind} of {codebooks.config['base_model']}",
        caption="spread: children about their parent; error: of quantization, in key variances;\n"
        "capture: attention on refined parents; active: share of codewords in use",
        box=SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
    )
    for heading in ("layer", "level", "heads", "config", "spread", "error", "capture", "active"):
        table.add_column(heading, justify="left" if heading == "layer" else "right", no_wrap=True)
    for name, spec in codebooks.layer_specs.items():
        measured = metrics.get(name, {})
        table.add_row(
            labels[name],
            str(spec.level),
            f"{spec.num_heads}x{spec.head_dim}",
            str(codebooks.layer_config(name)),
            _spread_cell(codebooks.codebook(name)),
            *(f"{measured[key]:.3f}" if key in measured else "-" for key in METRICS),
        )
    # rich cuts off what does not fit; a narrow terminal wraps it.
    console = Console()
    console.width = max(console.width, REPORT_WIDTH)
    console.print(table)


def plot_codebooks(codebooks: AVQCodebooks, path: Path) -> None:
    """Plot head 0 of every stored codebook on its principal axes, above the metrics of all layers.

    Raises:
        OSError: `path` cannot be written; what was there stays.
    """
    from matplotlib.figure import Figure

    names = list(codebooks.layer_specs)
    metrics, labels = _metrics(codebooks), _labels(codebooks)
    columns = min(5, len(names))
    rows = -(-len(names) // columns)
    figure = Figure(figsize=(3.2 * columns, 3.2 * rows + 2.8), layout="constrained")
    parts = figure.subfigures(2, 1, squeeze=False, height_ratios=[3.2 * rows, 2.8])
    top, bottom = parts.flat
    top.suptitle(f"{codebooks.avq_config}: parents and children of head 0, principal axes")
    for axes, name in zip(top.subplots(rows, columns, squeeze=False).flat, names, strict=False):
        codebook = codebooks.codebook(name)
        assert codebook is not None
        parents, children = _project(codebook.parents[0], codebook.children[0].flatten(0, 1))
        axes.scatter(*children.T, s=4, color="tab:red", alpha=0.6, label="children")
        axes.scatter(*parents.T, s=16, color="tab:blue", marker="s", label="parents")
        axes.set_title(labels[name], fontsize=8)
        axes.set_xticks([])
        axes.set_yticks([])
    top.axes[0].legend(fontsize=7)

    panels = bottom.subplots(1, len(METRICS))
    places = range(len(names))
    short = [
        label.replace("attentions", "a").replace("transformer_blocks", "t")
        for label in labels.values()
    ]
    for axes, key in zip(panels, METRICS, strict=True):
        axes.bar(places, [metrics.get(name, {}).get(key, 0.0) for name in names])
        axes.set_title(key.replace("_", " "), fontsize=9)
        axes.set_xticks(places, short, rotation=60, fontsize=6)
    with atomic_write(path) as temporary:
        figure.savefig(temporary, dpi=110)


def _labels(codebooks: AVQCodebooks) -> dict[str, str]:
    """Names of the layers without the suffix that they share."""
    suffix = ".transformer_blocks.0.attn1"
    if not all(name.endswith(suffix) for name in codebooks.layer_specs):
        suffix = ".attn1"
    return {name: name.removesuffix(suffix) for name in codebooks.layer_specs}


def _metrics(codebooks: AVQCodebooks) -> dict[str, Mapping[str, float]]:
    """What calibration or training measured, by layer."""
    measured = codebooks.config["calibration"] or codebooks.config["training"] or {}
    layers = measured.get("layers")
    if not isinstance(layers, Mapping):
        return {}
    return {name: metrics for name, metrics in layers.items() if isinstance(metrics, Mapping)}


def _spread_cell(codebook: Codebook | None) -> str:
    return "-" if codebook is None else f"{_child_spread(codebook):.3f}"


def _child_spread(codebook: Codebook) -> float:
    """Root mean square distance of children to their parent, over that of parents to their mean."""
    if codebook.children.shape[2] == 0:
        return 0.0
    children = (codebook.children - codebook.parents[:, :, None]).square().sum(-1).mean()
    parents = codebook.parents - codebook.parents.mean(1, keepdim=True)
    return float((children / parents.square().sum(-1).mean()).sqrt())


def _project(parents: Tensor, children: Tensor) -> tuple[Tensor, Tensor]:
    centre = parents.mean(0)
    axes = torch.linalg.svd(parents - centre, full_matrices=False).Vh[:2]
    axes = F.pad(axes, (0, 0, 0, 2 - len(axes)))  # a single parent has no second axis
    return (parents - centre) @ axes.T, (children - centre) @ axes.T
