"""What a command sets on a pipeline: a threshold, a number of refined parents, or a tolerance."""

from collections.abc import Sequence
from typing import Any

from diffusers import DiffusionPipeline

from avq_diffusers.cli.images import measured_on
from avq_diffusers.cli.request import NUM_REFINED, TOLERANCE, ImageRequest
from avq_diffusers.hosts.core import AVQSource
from avq_diffusers.hosts.verbs import apply_avq, set_num_refined, set_threshold, states_of

USUAL_THRESHOLDS = (1e-3, 4e-4, 1e-4, 2.5e-5)


def usual_values(pipe: DiffusionPipeline, kind: str) -> Sequence[float]:
    """Thresholds, or for refined parents 0, 1/16, 1/8, 1/4, 1/2 and all of them."""
    if kind != NUM_REFINED:
        return USUAL_THRESHOLDS
    most = max(_refinable(pipe).values())
    return sorted({0, *(most // part for part in (16, 8, 4, 2, 1))})


def refined_plan(pipe: DiffusionPipeline, number: int) -> dict[str, int]:
    """Refined parents by layer: this number, or all where there are fewer."""
    parents = _refinable(pipe)
    most = max(parents.values())
    if not 0 <= number <= most:
        raise ValueError(f"refined parents must be between 0 and {most}, but got {number}.")
    return {name: min(number, most_here) for name, most_here in parents.items()}


def set_dial(
    pipe: DiffusionPipeline,
    source: AVQSource,
    request: ImageRequest,
    kind: str,
    value: float,
    **measuring: Any,
) -> None:
    """Set a pipeline with AVQ.

    Args:
        pipe, source: the pipeline, and what AVQ was applied with.
        request: the image that a tolerance is measured on.
        kind, value: as in `Dial`.
        **measuring: further arguments of `apply_avq` with a tolerance; by default AVQ always runs.
    """
    if kind == TOLERANCE:
        arguments = {"route": "always", **measured_on(pipe, request), **measuring}
        apply_avq(pipe, source, tolerance=value, **arguments)
    elif kind == NUM_REFINED:
        set_num_refined(pipe, refined_plan(pipe, int(value)))
    else:
        set_threshold(pipe, value)


def _refinable(pipe: DiffusionPipeline) -> dict[str, int]:
    """How many parents each layer can refine, by name: all of them, or 0 if it is flat."""
    return {layer.name: state.config.most_refined for layer, state in states_of(pipe).items()}
