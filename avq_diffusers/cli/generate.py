"""`avq generate`: an image with AVQ attention, next to the exact one."""

from math import inf
from pathlib import Path
from statistics import median

from diffusers import DiffusionPipeline

from avq_diffusers.cli.codebooks import codeword_source
from avq_diffusers.cli.dials import set_dial
from avq_diffusers.cli.images import (
    TIMED_PAIRS,
    StepTimes,
    dilation,
    first_steps,
    fit_request,
    step_times,
    timed_image,
)
from avq_diffusers.cli.loading import compile_model, load_pipeline
from avq_diffusers.cli.output import save_image, save_sheet, sheet_path
from avq_diffusers.cli.request import TOLERANCE, Dial, ImageRequest, ModelRequest
from avq_diffusers.hosts.report import Summary
from avq_diffusers.hosts.verbs import apply_avq, avq_disabled, summary
from avq_diffusers.images import DIFFERENCE_GAIN, difference, image_sheet, psnr

LEGEND = """level: 0 has the most tokens; heads: number x dim; config: parents (M), children (C) of
each, and the threshold (T) or number (P) of refined parents; columns: the codewords and keys
that a query attends to, on average; calls: one per step"""
EFFECT_LEGEND = "effect: error of the model's output if AVQ ran in this layer only"
SETTLING_STEPS = 4  # a route reads the columns of its first calls, then measures
ALIKE, SIMILAR = 40, 30  # PSNR in dB from which images look so


def generate_image(
    model: ModelRequest, request: ImageRequest, output: Path, dial: Dial, *, is_compiled: bool
) -> None:
    """Write the AVQ image to `output` and a sheet beside it, and print what each layer ran."""
    tolerance = dial.values[0] if dial.kind == TOLERANCE else None
    pipe = load_pipeline(model.name, model.device, model.dtype)
    request = fit_request(pipe, request)
    source = codeword_source(pipe, model)
    with dilation(pipe, request):
        route = "fastest"
        if tolerance is not None:
            set_dial(pipe, source, request, TOLERANCE, tolerance, route=route)
        for route in ("fastest", "always") if tolerance is None else ():
            apply_avq(pipe, source, route=route)
            if dial.kind is not None:
                set_dial(pipe, source, request, dial.kind, dial.values[0])
            name_progress(pipe, "choosing the faster attention for each layer")
            first_steps(pipe, request, SETTLING_STEPS)
            if any(row.runs.startswith("AVQ") for row in summary(pipe).rows):
                break
        if is_compiled:
            compile_model(pipe)
        name_progress(pipe, "image with AVQ attention")
        avq = timed_image(pipe, request).image
        report = summary(pipe)
        name_progress(pipe, "image with exact attention")
        with avq_disabled(pipe):
            exact = timed_image(pipe, request).image
        likeness = psnr(avq, exact)
        images = [exact, avq, difference(exact, avq)]
        titles = ["exact", "AVQ", f"difference x{DIFFERENCE_GAIN}, PSNR {likeness:.1f} dB"]
        save_image(avq, output)
        save_sheet(image_sheet([images], titles, row_titles=[str(request)]), output)
        name_progress(pipe, "timing steps of both in turns")
        times = step_times(pipe, request)

    titles[1] += f", {speed_in_words(times)}"
    save_sheet(image_sheet([images], titles, row_titles=[str(request)]), output)
    legend = LEGEND if tolerance is None else f"{LEGEND}\n{EFFECT_LEGEND}"
    print(f"{report}\n{legend}\n")
    smaller = 0.02
    if tolerance is not None:
        # The fastest thresholds may stay far within the tolerance.
        reached = tolerance if report.allocation is None else report.allocation.error
        smaller = min(tolerance, reached or tolerance) / 4
    closer = f"--tolerance {smaller:.2g}"
    closer = closer if model.codebooks is None else "a larger --num-refined"
    print(f"{request}\n{speed_line(times)}\n{likeness_line(likeness, closer)}")
    print(layers_line(report, is_forced=route != "fastest"))
    if tolerance is not None:
        print("  tolerance: of the model's output (noise, velocity), not of the image")
    print(f"  image: {output}\n  sheet: {sheet_path(output)} (exact, AVQ, difference)")


def name_progress(pipe: DiffusionPipeline, name: str) -> None:
    """Name the progress bar of denoising, which vanishes at the end."""
    pipe.set_progress_bar_config(desc=name, leave=False)


def layers_line(report: Summary, *, is_forced: bool) -> str:
    """Say in how many layers AVQ ran, and why not in others."""
    layers = [row.runs for row in report.rows if row.config]
    others = [runs for runs in layers if not runs.startswith("AVQ")]
    text = f"  layers: AVQ in {len(layers) - len(others)} of {len(layers)}"
    if {*others} - {"exact: faster"}:
        return f"{text}; the table says why not in the others"
    if is_forced:
        return f"{text}, to show it; exact attention is at least as fast, so apply_avq keeps it"
    if len(others) == len(layers):
        return f"{text}, after first steps that measured: exact attention is faster in all of them"
    return f"{text}; exact attention is faster in the others" if others else text


def speed_in_words(times: StepTimes) -> str:
    """Say whether AVQ was faster: in every pair of steps, in none, or only in some (noise)."""
    least, *_, most = times.gains
    if least <= 1 <= most:
        return "as fast, within noise"
    return f"{median(times.gains):.2f}x as fast"


def speed_line(times: StepTimes) -> str:
    """Say which attention was faster."""
    least, *_, most = times.gains
    advice = "" if least > 1 else "\n  AVQ pays off on larger images (--height, --width)"
    return (
        f"  speed: {speed_in_words(times)} ({least:.2f}x to {most:.2f}x in {TIMED_PAIRS} pairs of "
        f"steps), {times}{advice}"
    )


def likeness_line(likeness: float, closer: str) -> str:
    """Say how similar the images are; `closer` is how to get more so."""
    if likeness == inf:
        return "  PSNR of the two images: inf dB, they are identical"
    look = "they look alike"
    if likeness < ALIKE:
        look = "details differ" if likeness >= SIMILAR else "they differ visibly"
        look += f"; closer, and slower: {closer}"
    return f"  PSNR of the two images: {likeness:.1f} dB, {look}"
