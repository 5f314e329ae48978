"""The dial on examples that were not probed: sizes by their effect beside equal sizes.

A row is a plan for all layers: equal sizes, the sizes of least error at their time, or those within
a tolerance.

times_as_fast    time of exact attention over that of the plan, all layers
predicted        error of the output by the profile
errors           that of each example, |model(AVQ) - model(exact)| / |model(exact)|
"""

from collections.abc import Mapping, Sequence
from operator import itemgetter
from statistics import mean, median
from typing import Any

from diffusers import DiffusionPipeline
from tqdm import tqdm

from avq_diffusers import AVQConfig, ErrorProfile, apply_avq, measure_error, remove_avq
from avq_diffusers.hosts import Allocation, output_errors
from eval.names import EXACT
from eval.quality.compare import psnr_metrics
from eval.quality.generation import Sampling, generate
from eval.quality.metrics import psnr
from eval.store.markdown import figure, number, rows_table

UNIFORM = ("M64P16C8", "M64P16C8E256", "M128P32C8E256")
# What an error may exceed a tolerance by, and still be held.
SLACK = 1.2
PROBED_STEPS = 6
Row = dict[str, Any]


def measure_tolerances(
    pipe: DiffusionPipeline,
    tolerances: Sequence[float],
    config: AVQConfig,
    probed: Sequence[str],
    prompts: Sequence[str],
    settings: Sampling,
) -> tuple[ErrorProfile, list[Row]]:
    """Probe some prompts; measure output errors and images of others, one row per plan."""
    arguments = {"height": settings.size, "width": settings.size, "parts": None}
    if settings.guidance_scale is not None:
        arguments["guidance_scale"] = settings.guidance_scale
    arguments["num_inference_steps"] = PROBED_STEPS
    profile = measure_error(pipe, probed, config, **arguments)
    plans = plans_of(profile, tolerances)
    # Other noise than that of the probes.
    seed = len(probed)
    choices = [plan.choices for plan in plans.values()]
    errors = output_errors(pipe, prompts, choices, config, seed=seed, **arguments)
    seeds = range(seed, seed + len(prompts))
    exact = generate(pipe, prompts, seeds, settings, description=EXACT)
    rows = []
    for (name, plan), of_plan in zip(tqdm(plans.items(), "plans"), errors, strict=True):
        if plan.tolerance is None:
            apply_avq(pipe, AVQConfig.parse(name, levels=config.levels), route="always")
        else:
            apply_avq(pipe, profile, tolerance=plan.tolerance, route="always")
        images = generate(pipe, prompts, seeds, settings, description=name)
        remove_avq(pipe)
        rows.append(plan_row(name, plan, of_plan) | psnr_metrics(psnr(images, exact)))
    return profile, rows


def plans_of(profile: ErrorProfile, tolerances: Sequence[float]) -> dict[str, Allocation]:
    """Equal sizes, the best ones at the same time, and those of tolerances, by name."""
    plans = {}
    for sizes in UNIFORM:
        uniform = profile.uniform(sizes)
        plans[sizes] = uniform
        plans[f"at the time of {sizes}"] = profile.taking(uniform.time)
    return plans | {f"tolerance {x:g}": profile.within(x) for x in tolerances}


def plan_row(name: str, plan: Allocation, errors: Sequence[float]) -> Row:
    """The figures of a plan, but for the images'."""
    return {
        "plan": name,
        "tolerance": plan.tolerance,
        "time": plan.time,
        "times_as_fast": plan.speedup,
        "predicted": plan.error,
        "errors": [*errors],
        "sizes": {
            layer: {start: str(x) for start, x in choices.items()}
            for layer, choices in plan.choices.items()
        },
    }


def tolerance_table(rows: Sequence[Mapping[str, Any]]) -> str:
    """The rows as a Markdown table."""
    return rows_table(COLUMNS | (IMAGE_COLUMNS if "psnr_median" in rows[0] else {}), rows)


def _held(row: Mapping[str, Any]) -> str:
    if row["tolerance"] is None:
        return "-"
    return f"{100 * mean(error <= SLACK * row['tolerance'] for error in row['errors']):.0f}"


COLUMNS = {
    "plan": itemgetter("plan"),
    "attention, times as fast": figure("times_as_fast", ".2f"),
    "output error, predicted": figure("predicted"),
    "median": lambda row: number(median(row["errors"])),
    "largest": lambda row: number(max(row["errors"])),
    f"within {SLACK} x the tolerance, %": _held,
}
IMAGE_COLUMNS = {
    "PSNR dB, median": figure("psnr_median", ".1f"),
    "PSNR dB, p10": figure("psnr_p10", ".1f"),
}
