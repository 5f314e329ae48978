"""Plot results from their JSON files."""

from pathlib import Path

from eval.store.report import complete, read_result

PLOTS = {"keys": "_dial", "vision features": ""}  # suffix of the plot's name, by command


def draw(path: Path) -> None:
    """Plot a result beside its JSON file.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it is not a complete result, or has no plot.
    """
    result = read_result(path, PLOTS)
    from eval.keys.measuring import dial_panels
    from eval.store.plots import panel_plot
    from eval.vision.features import features_panels

    panels_of = {"keys": dial_panels, "vision features": features_panels}[result.kind]
    with complete(path):
        plot = path.with_name(f"{path.stem}{PLOTS[result.kind]}.png")
        panel_plot(plot, panels_of(result.document["rows"]))
