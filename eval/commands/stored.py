"""Plot results from their JSON files.

Commands plot the file they have just written, so `python -m eval plot` gives the same plot.
Documents are checked before the plotting modules are imported, so errors come at once.
"""

from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

from eval.commands.options import command_line
from eval.store.report import complete, read_result, save_json


def publish(path: Path, table: str, *, device: str, **content: Any) -> None:
    """Print a result's table, then write the result and its plot."""
    print(table)
    save_json(path, command=command_line(), device=device, **content)
    draw(path)


def draw(path: Path, *, size: int | None = None) -> None:
    """Plot a result to the PNG beside its JSON file.

    `size` is only for tables: the size of the UNet step whose time is shown.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it is not a complete result, or has no plot or not this size.
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


def _panels(function: str, *fields: str) -> Callable[..., None]:
    """Plots the panels that a function makes from these fields, or from the whole document."""
    module, _, name = function.rpartition(".")

    def plot(path: Path, document: Mapping[str, Any], **options: Any) -> None:
        arguments = [document[field] for field in fields] or [document]
        panels = getattr(import_module(f"eval.{module}"), name)(*arguments, **options)
        import_module("eval.store.plots").panel_plot(path, panels)

    return plot


def _analyse(path: Path, document: Mapping[str, Any]) -> None:
    analysis, rows = document["analysis"], document["rows"]
    from eval.codebooks.analyses import ANALYSES

    ANALYSES[analysis].plot(path, rows)


def _keys(path: Path, document: Mapping[str, Any]) -> None:
    _panels("keys.measuring.keys_panels", "rows")(path, document)
    dial = path.with_stem(f"{path.stem}_dial")
    _panels("keys.measuring.dial_panels", "rows")(dial, document)


PLOTS: Mapping[str, Callable[..., None]] = {
    "bench kernels": _kernels,
    "errors": _panels("codebooks.layer_errors.error_panels", "rows"),
    "analyse": _analyse,
    "keys": _keys,
    "vision features": _panels("vision.features.features_panels", "rows"),
    "table": _panels("quality.method_table.table_panels"),
    "vision table": _panels("vision.fine_tuned.fine_tuned_panels"),
    "vision analyses": _panels("vision.analyses.analyses_panels"),
}
