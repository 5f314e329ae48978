"""Whether a tolerance that was measured on some prompts holds on others.

A part is one layer in one third of the denoising. Of the parts that run AVQ, over prompts that were
not probed:

largest_error    the largest of the parts' mean errors
parts_over       how many parts have a mean error of more than 1.2 times the tolerance
prompts_over     share of parts and prompts with more than that
"""

from collections.abc import Sequence
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
    profile = measure_error(pipe, probed, config, **arguments)
    others = [
        measure_error(pipe, [prompt], config, seed=len(probed) + i, **arguments)
        for i, prompt in enumerate(tqdm(prompts, desc="errors"))
    ]
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
            | psnr_metrics(psnr(images, exact))
        )
    return rows


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
    ]
    columns += [f"prompts {over}, %", "PSNR dB, median", "PSNR dB, p10"]
    return markdown_table(
        columns,
        (
            [
                str(row["tolerance"]),
                f"{row['avq_parts']} of {row['parts']}",
                number(row["largest_error"]),
                str(row["parts_over"]),
                f"{100 * row['prompts_over']:.1f}",
                f"{row['psnr_median']:.1f}",
                f"{row['psnr_p10']:.1f}",
            ]
            for row in rows
        ),
    )
