"""The dial on examples that were not probed: thresholds by effect, one threshold, and peers.

A row is a plan for all layers (one threshold, the thresholds with least error in the same time, or
those within a tolerance) or another method.

times_as_fast    time of exact attention divided by the plan's, all layers
predicted        output error predicted by the profile
errors           output error per example, |model(row) - model(exact)| / |model(exact)|, in the part
                 of the denoising where it is largest
columns          codewords and keys that a query attends to in calls that AVQ serves, mean over its
                 tiles and calls; for plans of a vision model, as in the profile
ms               time of a step of the whole model for one image, on a GPU
psnr             PSNR to exact attention's images from the same noise, by number of steps
"""

import math
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from operator import itemgetter
from statistics import mean, median
from typing import Any

from diffusers import DiffusionPipeline
from torch import nn
from tqdm import tqdm

from avq_diffusers import AVQConfig, ErrorProfile, measure_error
from avq_diffusers.config import LARGEST_TOLERANCE
from avq_diffusers.hosts import Allocation, output_errors
from eval.benchmarks.networks import by_peer, self_attention_by
from eval.keys.calls import columns_noted
from eval.keys.photographs import PHOTOGRAPHS, photograph
from eval.keys.subjects import vision_arguments
from eval.methods.peer import Peer
from eval.methods.prepared import attention_method, load_methods
from eval.methods.registry import EXACT, parse_method
from eval.methods.running import avq_in, network_of
from eval.quality.generation import Sampling, generate
from eval.quality.metrics import psnr, psnr_metrics
from eval.quality.repeats import CapturedSteps, recorded_calls, repeated_errors
from eval.store.markdown import Column, figure, number, rows_table
from eval.store.plots import Panel, lines

UNIFORM = (5e-4, 2e-4, 1e-4, 5e-5)
# Factor by which an error may exceed a tolerance that still counts as held.
SLACK = 1.2
PROBED_STEPS = 6
FIXED = "AVQ, fixed sizes"
EQUAL, DIAL = "one threshold in all layers", "thresholds by their effect"
Row = dict[str, Any]


def measure_tolerances(
    pipe: DiffusionPipeline,
    tolerances: Sequence[float],
    methods: Sequence[str],
    config: AVQConfig,
    probed: Sequence[str],
    prompts: Sequence[str],
    settings: Sampling,
    num_steps: Sequence[int],
) -> tuple[ErrorProfile, list[Row]]:
    """Probe some prompts; measure output errors and images of others, one row per plan or method.

    Raises:
        ValueError: a method is unknown or cannot run here.
    """
    arguments = {"height": settings.size, "width": settings.size}
    if settings.guidance_scale is not None:
        arguments["guidance_scale"] = settings.guidance_scale
    arguments["num_inference_steps"] = PROBED_STEPS
    others = load_methods(pipe, (EXACT, *methods), levels=config.levels)
    # Times layers with as many images as a step of the rows has.
    images = settings.batch_size
    profile = measure_error(pipe, probed, config, num_images_per_prompt=images, **arguments)
    # Noise that the probes did not use.
    seeds = range(len(probed), len(probed) + len(prompts))
    calls = recorded_calls(pipe, prompts, seeds[0], settings.batch_size, profile.parts, **arguments)
    steps = CapturedSteps(pipe, calls[:PROBED_STEPS]) if calls[0].output.is_cuda else None
    draws = {
        number: partial(generate, settings=replace(settings, num_inference_steps=number))
        for number in num_steps
    }
    exact = {x: draw(pipe, prompts, seeds, description=EXACT) for x, draw in draws.items()}

    plans = plans_of(profile, tolerances)
    ways = {name: _planned(pipe, name, plan, profile) for name, plan in plans.items()}
    ways |= {method.name: attention_method(pipe, method) for method in others}
    peers = {method.name: method for method in others if isinstance(method, Peer)}
    rows = []
    for name, way in tqdm(ways.items(), "plans and methods"):
        with way:
            with columns_noted(network_of(pipe)) as noted:
                errors = repeated_errors(pipe, calls)
            images = {x: draw(pipe, prompts, seeds, description=name) for x, draw in draws.items()}
            if steps is not None and name not in peers:
                steps.capture()
        if steps is not None and name in peers:
            # Excludes reordering tokens, which a model could do once for all layers.
            with self_attention_by(partial(by_peer, peers[name])):
                steps.capture()
        row = plan_row(name, plans[name], errors) if name in plans else _method_row(name, errors)
        row["columns"] = mean(noted) if noted else None
        row["psnr"] = {x: psnr_metrics(psnr(images[x], exact[x])) for x in draws}
        rows.append(row)
    if steps is not None:
        for row, milliseconds in zip(rows, steps.milliseconds(), strict=True):
            row["ms"] = milliseconds / len(calls[0].prompts)
    return profile, rows


def measure_vision_tolerances(
    model: nn.Module, tolerances: Sequence[float], size: int, num_probed: int, num_images: int
) -> tuple[ErrorProfile, list[Row]]:
    """Probe some photographs; measure a vision model's features of others, one row per plan.

    The output is the last hidden states.
    """
    names = PHOTOGRAPHS[: num_images + num_probed]
    images = [vision_arguments(model, photograph(name, size)) for name in names]
    pixels = [one.pop("pixel_values") for one in images]
    profile = measure_error(model, pixels[num_images:], **images[0])
    plans = plans_of(profile, tolerances)
    choices = [plan.choices for plan in plans.values()]
    errors = output_errors(model, pixels[:num_images], choices, profile.config, **images[0])
    rows = []
    for (name, plan), plan_errors in zip(plans.items(), errors, strict=True):
        columns = [one.columns for layer in plan.choices.values() for one in layer.values()]
        largest = [max(parts.values()) for parts in plan_errors]
        rows.append(plan_row(name, plan, largest) | {"columns": mean(columns)})
    return profile, rows


def _planned(
    pipe: DiffusionPipeline, name: str, plan: Allocation, profile: ErrorProfile
) -> AbstractContextManager[None]:
    """Run the pipeline with a plan inside the `with` block."""
    if plan.tolerance is None:
        return avq_in(pipe, AVQConfig.parse(name, levels=profile.config.levels))
    return avq_in(pipe, profile, tolerance=plan.tolerance)


def plans_of(profile: ErrorProfile, tolerances: Sequence[float]) -> dict[str, Allocation]:
    """One threshold, the best ones in the same time, and those within tolerances, by name."""
    plans = {}
    for threshold in UNIFORM:
        name, uniform = str(profile.config.changed(threshold=threshold)), profile.uniform(threshold)
        plans[name] = uniform
        plans[f"at the time of {name}"] = taking(profile, uniform.time)
    return plans | {f"tolerance {x:g}": profile.within(x) for x in tolerances}


def taking(profile: ErrorProfile, time: float) -> Allocation:
    """The thresholds with the least output error within a time; the fastest if none fit."""
    low, high = 1e-6, LARGEST_TOLERANCE
    for _ in range(60):
        middle = (low * high) ** 0.5
        if profile.within(middle).time <= time:
            high = middle
        else:
            low = middle
    return profile.within(high)


def plan_row(name: str, plan: Allocation, errors: Sequence[float]) -> Row:
    """The measurements of a plan, except the images' and columns."""
    return {
        "plan": name,
        "scheme": EQUAL if plan.tolerance is None else DIAL,
        "tolerance": plan.tolerance,
        "time": plan.time,
        "times_as_fast": plan.speedup,
        "predicted": plan.error,
        "errors": [*errors],
        "thresholds": {
            layer: {start: str(x) for start, x in choices.items()}
            for layer, choices in plan.choices.items()
        },
    }


def _method_row(name: str, errors: Sequence[float]) -> Row:
    return {"plan": name, "scheme": parse_method(name, (0,)).scheme, "errors": [*errors]}


def tolerance_table(rows: Sequence[Mapping[str, Any]]) -> str:
    """The rows as a Markdown table."""
    images: dict[str, Column] = {
        f"PSNR dB, {x} steps": lambda row, x=x: number(row["psnr"][x]["psnr_median"], ".1f")
        for x in rows[0].get("psnr", ())
    }
    return rows_table({**COLUMNS, **images}, rows)


def tolerance_panels(rows: Sequence[Mapping[str, Any]], title: str) -> list[list[Panel]]:
    """Output error and PSNR against the time of a step; a dashed line marks exact attention."""
    exact = next(row.get("ms") for row in rows if row["scheme"] == EXACT)
    shown = [
        row | {"error": median(row["errors"]), "decibels": last_psnr(row)}
        for row in rows
        if max(row["errors"])
    ]

    def curve(row: Mapping[str, Any]) -> str:
        return FIXED if row["scheme"].startswith("AVQ") else row["scheme"].removesuffix(", own")

    time = "ms of a step; dashed: exact attention"
    return [
        [
            Panel(f"{name}, {title}", time, curves, yscale=scale, reference_x=exact)
            for name, curves, scale in (
                ("error of the output", lines(shown, curve, "ms", "error"), "log"),
                ("PSNR, dB", lines(shown, curve, "ms", "decibels"), "linear"),
            )
        ]
    ]


def last_psnr(row: Mapping[str, Any]) -> float:
    """The median PSNR of the images with the most steps; infinite for exact attention's."""
    found = [*row["psnr"].values()][-1]["psnr_median"]
    return math.inf if found is None else found


def _held(row: Mapping[str, Any]) -> str:
    if row.get("tolerance") is None:
        return "-"
    return f"{100 * mean(error <= SLACK * row['tolerance'] for error in row['errors']):.0f}"


COLUMNS = {
    "plan": itemgetter("plan"),
    "columns": figure("columns", ".0f"),
    "ms": "ms",
    "attention, times as fast": figure("times_as_fast", ".2f"),
    "output error, predicted": figure("predicted"),
    "median": lambda row: number(median(row["errors"])),
    "largest": lambda row: number(max(row["errors"])),
    f"within {SLACK} x the tolerance, %": _held,
}
