"""Plot results from their JSON files.

Commands plot the file they have just written, so `python -m eval plot` gives the same plot.
"""

from importlib import import_module
from pathlib import Path
from typing import Any

from eval.store.report import complete, read_result, save_json

# By command: the suffix of the plot's name, and the function that makes its panels from rows.
PLOTS = {
    "keys": ("_dial", "keys.measuring.dial_panels"),
    "vision features": ("", "vision.features.features_panels"),
}


def publish(path: Path, table: str, *, device: Any = "cpu", **content: Any) -> None:
    """Print a result's table, then write the result and, if it has one, its plot."""
    print(table)
    save_json(path, device=device, **content)
    if read_result(path).kind in PLOTS:
        draw(path)


def draw(path: Path) -> None:
    """Plot a result beside its JSON file.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it is not a complete result, or has no plot.
    """
    result = read_result(path)
    if result.kind not in PLOTS:
        raise ValueError(
            f"plots are those of {', '.join(PLOTS)}, but {path} is a result of {result.kind}."
        )
    suffix, function = PLOTS[result.kind]
    module, _, name = function.rpartition(".")
    with complete(path):
        rows = result.document["rows"]
        panels = getattr(import_module(f"eval.{module}"), name)(rows)
        plot = path.with_name(f"{path.stem}{suffix}.png")
        import_module("eval.store.plots").panel_plot(plot, panels)
