"""Plots of results, from their JSON files.

Commands plot the file that they have just written, so `python -m eval plot` gives the same plot.
What a document must have is read before the modules that draw are imported, so errors come at once.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from eval.store.report import complete, read_result


def draw(path: Path, *, size: int | None = None) -> None:
    """Plot a result to the PNG beside its JSON file.

    `size` is for tables only: the size of the UNet step whose time is shown.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it is not a complete result, has no plot, or not this size.
    """
    result = read_result(path)
    if result.kind not in PLOTS:
        raise ValueError(
            f"plots are those of {', '.join(PLOTS)}, but {path} is a result of {result.kind}."
        )
    if size is not None and result.kind != "table":
        raise ValueError(f"a size chooses what the plot of a table shows, but {path} is not one.")
    options = {} if size is None else {"size": size}
    with complete(path):
        PLOTS[result.kind](path.with_suffix(".png"), result.document, **options)


def _kernels(path: Path, document: Mapping[str, Any]) -> None:
    rows = document["rows"]
    part = rows[0]["part"]
    from eval.benchmarks.kernels import plot_kernels

    plot_kernels(path, part, rows)


def _unet(path: Path, document: Mapping[str, Any]) -> None:
    side, mode = _size_and_mode(document)
    from eval.benchmarks.unet import plot_unet

    _steps(path, side, mode, plot_unet)


def _transformer(path: Path, document: Mapping[str, Any]) -> None:
    side, mode = _size_and_mode(document)
    from eval.benchmarks.transformer import plot_transformer

    _steps(path, side, mode, plot_transformer)


def _size_and_mode(document: Mapping[str, Any]) -> tuple[int, str]:
    row = document["rows"][0]
    return row["size"], row["mode"]


def _steps(path: Path, side: int, mode: str, plot: Callable[..., None]) -> None:
    """One plot for all modes of a size, from the files beside this one."""
    import torch

    from eval.benchmarks.step_rows import MODES, MODES_WITHOUT_GRAPHS

    device = torch.device(path.stem.rpartition("_")[2])
    modes = MODES if device.type == "cuda" else MODES_WITHOUT_GRAPHS
    stem = path.stem.removesuffix(f"_{side}_{mode}_{device.type}")
    plot(path.parent, stem, side, device, modes)


def _errors(path: Path, document: Mapping[str, Any]) -> None:
    rows, times = document["rows"], document["kernel_times"]
    from eval.codebooks.layer_errors import KernelTimes, error_panels
    from eval.store.plots import panel_plot

    panel_plot(path, error_panels(rows, times and KernelTimes(**times)))


def _analyse(path: Path, document: Mapping[str, Any]) -> None:
    analysis, rows = document["analysis"], document["rows"]
    from eval.codebooks.analyses import ANALYSES

    ANALYSES[analysis].plot(path, rows)


def _keys(path: Path, document: Mapping[str, Any]) -> None:
    rows = document["rows"]
    from eval.keys.measuring import dial_panels, keys_panels
    from eval.store.plots import panel_plot

    panel_plot(path, keys_panels(rows))
    if panels := dial_panels(rows):
        panel_plot(path.with_stem(f"{path.stem}_dial"), [panels])


def _features(path: Path, document: Mapping[str, Any]) -> None:
    rows = document["rows"]
    from eval.store.plots import panel_plot
    from eval.vision.features import features_panels

    panel_plot(path, features_panels(rows))


def _training(path: Path, document: Mapping[str, Any]) -> None:
    from eval.codebooks.training import training_rows
    from eval.store.plots import panel_plot

    panel_plot(path, training_rows(document["runs"]))


def _table(path: Path, document: Mapping[str, Any], size: int | None = None) -> None:
    from eval.quality.method_table import table_panels
    from eval.store.plots import panel_plot

    panel_plot(path, table_panels(document, size))


def _vision_table(path: Path, document: Mapping[str, Any]) -> None:
    from eval.store.plots import panel_plot
    from eval.vision.fine_tuned import fine_tuned_panels

    panel_plot(path, fine_tuned_panels(document))


def _vision_analyses(path: Path, document: Mapping[str, Any]) -> None:
    from eval.store.plots import panel_plot
    from eval.vision.analyses import analyses_panels

    panel_plot(path, analyses_panels(document))


PLOTS: Mapping[str, Callable[..., None]] = {
    "bench kernels": _kernels,
    "bench unet": _unet,
    "bench transformer": _transformer,
    "errors": _errors,
    "analyse": _analyse,
    "keys": _keys,
    "vision features": _features,
    "training": _training,
    "table": _table,
    "vision table": _vision_table,
    "vision analyses": _vision_analyses,
}
