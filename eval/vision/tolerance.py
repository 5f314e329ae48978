"""The dial for a vision transformer, on photographs that were not probed.

Rows as in `eval.quality.tolerance`; the output is the last hidden states.
"""

from collections.abc import Sequence
from statistics import mean

from torch import nn

from avq_diffusers import ErrorProfile, measure_error
from avq_diffusers.hosts import output_errors
from eval.keys.photographs import PHOTOGRAPHS, photograph
from eval.keys.subjects import vision_arguments
from eval.quality.tolerance import Row, plan_row, plans_of


def measure_tolerances(
    model: nn.Module, tolerances: Sequence[float], size: int, num_probed: int, num_images: int
) -> tuple[ErrorProfile, list[Row]]:
    """Probe some photographs; measure the features of the others, one row per plan."""
    names = PHOTOGRAPHS[: num_images + num_probed]
    images = [vision_arguments(model, photograph(name, size)) for name in names]
    pixels = [one.pop("pixel_values") for one in images]
    profile = measure_error(model, pixels[num_images:], **images[0])
    plans = plans_of(profile, tolerances)
    choices = [plan.choices for plan in plans.values()]
    errors = output_errors(model, pixels[:num_images], choices, profile.config, **images[0])
    rows = []
    for (name, plan), of_plan in zip(plans.items(), errors, strict=True):
        columns = [one.columns for layer in plan.choices.values() for one in layer.values()]
        rows.append(plan_row(name, plan, of_plan) | {"columns": mean(columns)})
    return profile, rows
