"""Whether a tolerance that was measured on some prompts holds on others.

A part is one layer in one third of the denoising. Of the parts that run AVQ, over prompts that were
not probed:

largest_error    the largest of the parts' mean errors
parts_over       how many parts have a mean error of more than 1.2 times the tolerance
prompts_over     share of parts and prompts with more than that
sets_held        share of all sets of as many probed prompts that leave no part over on the rest
"""

from collections.abc import Sequence
from dataclasses import replace
from itertools import combinations
from statistics import mean
from typing import Any

from diffusers import StableDiffusionPipeline
from tqdm import tqdm

from avq_diffusers import AVQConfig, ErrorProfile, apply_avq, measure_error, remove_avq
from eval.names import EXACT
from eval.quality.compare import psnr_metrics
from eval.quality.generation import Sampling, generate
from eval.quality.metrics import psnr
from eval.store.markdown import markdown_table, number

SLACK = 1.2
PROBED_STEPS = 6
Row = dict[str, Any]


def measure_tolerances(
    pipe: StableDiffusionPipeline,
    tolerances: Sequence[float],
    config: AVQConfig,
    probed: Sequence[str],
    prompts: Sequence[str],
    settings: Sampling,
) -> list[Row]:
    """Probe some prompts; measure errors of layers and images of others, one row per tolerance."""
    arguments = {"height": settings.size, "width": settings.size}
    if settings.guidance_scale is not None:
        arguments["guidance_scale"] = settings.guidance_scale
    arguments |= {"num_inference_steps": PROBED_STEPS, "progress": False}
    profiles = [
        measure_error(pipe, [prompt], config, seed=i, **arguments)
        for i, prompt in enumerate(tqdm([*probed, *prompts], desc="errors"))
    ]
    profile, others = joined(profiles[: len(probed)]), profiles[len(probed) :]
    seeds = range(len(prompts))
    exact = generate(pipe, prompts, seeds, settings, description=EXACT)
    rows = []
    for tolerance in tolerances:
        apply_avq(pipe, profile, tolerance=tolerance)
        images = generate(pipe, prompts, seeds, settings, description=str(tolerance))
        remove_avq(pipe)
        errors = held_out_errors(profile, others, tolerance)
        rows.append(
            {"tolerance": tolerance, **summarise(errors, tolerance)}
            | {"sets_held": sets_held(profiles, len(probed), tolerance)}
            | psnr_metrics(psnr(images, exact))
        )
    return rows


def joined(profiles: Sequence[ErrorProfile]) -> ErrorProfile:
    """The profile of all measurements together: the largest error of each."""
    layers = []
    for same in zip(*(profile.layers for profile in profiles), strict=True):
        errors = {
            start: {sizes: max(one.errors[start][sizes] for one in same) for sizes in of_start}
            for start, of_start in same[0].errors.items()
        }
        layers.append(replace(same[0], errors=errors))
    return replace(profiles[0], layers=tuple(layers))


def sets_held(profiles: Sequence[ErrorProfile], num_probed: int, tolerance: float) -> float:
    """The share of sets of probed images that leave no part over on the other images."""
    held = []
    for probed in combinations(range(len(profiles)), num_probed):
        others = [one for i, one in enumerate(profiles) if i not in probed]
        errors = held_out_errors(joined([profiles[i] for i in probed]), others, tolerance)
        held.append(summarise(errors, tolerance)["parts_over"] == 0)
    return mean(held)


def held_out_errors(
    profile: ErrorProfile, others: Sequence[ErrorProfile], tolerance: float
) -> list[list[float]]:
    """The errors of each part on each other prompt; none of parts that run exact attention."""
    errors = []
    for place, layer in enumerate(profile.layers):
        choices = layer.within(tolerance)
        for start in layer.errors:
            choice = choices[min(x for x in choices if x >= start)]
            if choice.sizes is None:
                errors.append([])
            else:
                measured = [other.layers[place].errors[start] for other in others]
                errors.append([one[str(choice)] for one in measured])
    return errors


def summarise(errors: Sequence[Sequence[float]], tolerance: float) -> Row:
    """The figures of a tolerance, from the errors of each part on each prompt."""
    means = [mean(part) for part in errors if part]
    single = [error for part in errors for error in part]
    limit = SLACK * tolerance
    return {
        "parts": len(errors),
        "avq_parts": len(means),
        "largest_error": max(means, default=0.0),
        "parts_over": sum(error > limit for error in means),
        "prompts_over": sum(error > limit for error in single) / max(1, len(single)),
    }


def tolerance_table(rows: Sequence[Row]) -> str:
    """The rows as a Markdown table."""
    over = f"over {SLACK} x"
    columns = [
        "tolerance",
        "parts with AVQ",
        "largest error",
        f"parts {over}",
        f"prompts {over}, %",
        "probes that hold, %",
        "PSNR dB, median",
        "PSNR dB, p10",
    ]
    return markdown_table(
        columns,
        (
            [
                str(row["tolerance"]),
                f"{row['avq_parts']} of {row['parts']}",
                number(row["largest_error"]),
                str(row["parts_over"]),
                f"{100 * row['prompts_over']:.1f}",
                f"{100 * row['sets_held']:.0f}",
                f"{row['psnr_median']:.1f}",
                f"{row['psnr_p10']:.1f}",
            ]
            for row in rows
        ),
    )
