"""A profile's curve: gain against output error, and the columns of each layer."""

from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

from avq_diffusers import ErrorProfile
from avq_diffusers.config import LARGEST_TOLERANCE
from avq_diffusers.files import atomic_write

PLOTTED_TOLERANCE = 0.02


def plot_profile(profile: ErrorProfile, path: Path) -> None:
    """Plot gain against output error, and the columns of each layer at a tolerance of 0.02.

    The gain is that of attention, off a GPU the ratio of operations. A line for the thresholds that
    `within` chooses, points for one threshold in all layers.

    Raises:
        OSError: `path` cannot be written; what was there stays.
    """
    figure = Figure(figsize=(13, max(4.5, 0.25 * len(profile.layers))), layout="constrained")
    axes, of_layers = figure.subplots(1, 2)
    equal = {threshold: profile.uniform(threshold) for threshold in profile.thresholds}
    errors = [max(plan.error, 1e-9) for plan in equal.values()]
    least, most = (min(x, LARGEST_TOLERANCE) for x in (min(errors) / 3, max(errors)))
    best = [profile.within(min(x, most)) for x in np.geomspace(least, most, 60).tolist()]
    shown = [(plan.error, plan.speedup) for plan in best if plan.error > 0]
    axes.plot([x for x, _ in shown], [y for _, y in shown], label="within a tolerance")
    for threshold, plan in equal.items():
        axes.plot(plan.error, plan.speedup, "o", label=f"{threshold:g} in all layers")
    axes.axhline(1, color="black", linestyle="--", label="exact")
    gain = "times as fast" if profile.unit == "ms" else "operations of exact attention / AVQ's"
    axes.set(xscale="log", xlabel="error of the output", ylabel=f"attention, {gain}")

    choices = profile.within(PLOTTED_TOLERANCE).choices
    rows = range(len(choices))
    for start in profile.parts:
        columns = [parts[start].columns for parts in choices.values()]
        of_layers.plot(columns, rows, "o", label=f"from timestep {start}")
    of_layers.plot([one.num_tokens for one in profile.layers], rows, "k|", label="exact")
    of_layers.set(xscale="log", xlabel=f"columns within a tolerance of {PLOTTED_TOLERANCE:g}")
    of_layers.set_yticks(rows, [*choices], fontsize=6)
    of_layers.invert_yaxis()
    for panel in (axes, of_layers):
        panel.grid(alpha=0.3)
        panel.legend()
    with atomic_write(path) as temporary:
        figure.savefig(temporary, dpi=110)
