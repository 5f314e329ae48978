"""`avq generate`: an image with AVQ attention, next to the exact one."""

from pathlib import Path
from statistics import median

from avq_diffusers.cli.codebooks import codeword_source
from avq_diffusers.cli.images import (
    TIMED_PAIRS,
    StepTimes,
    dilation,
    first_steps,
    fit_request,
    measured_on,
    step_times,
    timed_image,
)
from avq_diffusers.cli.loading import compile_model, load_pipeline
from avq_diffusers.cli.output import save_image, save_sheet, sheet_path
from avq_diffusers.cli.request import Dial, ImageRequest, ModelRequest
from avq_diffusers.config import AVQConfig
from avq_diffusers.hosts.report import Summary
from avq_diffusers.hosts.verbs import (
    apply_avq,
    avq_disabled,
    set_num_refined,
    set_threshold,
    summary,
)
from avq_diffusers.images import DIFFERENCE_GAIN, difference, image_sheet, psnr

LEGEND = """level 0 has the most tokens; heads: number x dim; config: M parents with C children
each, and T, the error that a further column of a query tile must mend, or P, the parents
that each tile refines; columns: codewords + keys that a tile attends to, on average; calls:
per layer, one per step"""
SETTLING_STEPS = 4  # a route reads the columns of its first calls, then measures
ALIKE, SIMILAR = 40, 30  # PSNR in dB from which images look so


def generate_image(model: ModelRequest, request: ImageRequest, out: Path, dial: Dial) -> None:
    """Write the AVQ image to `out` and a sheet beside it, and print what each layer ran."""
    (tolerance,) = dial.tolerances or (None,)
    pipe = load_pipeline(model.name, model.device, model.dtype)
    request = fit_request(pipe, request)
    source = codeword_source(pipe, model)
    with dilation(pipe, request):
        route = "fastest"
        if tolerance is not None:
            assert isinstance(source, AVQConfig)
            apply_avq(pipe, source, tolerance=tolerance, **measured_on(pipe, request))
        for route in ("fastest", "always") if tolerance is None else ():
            apply_avq(pipe, source, route=route)
            for threshold in dial.thresholds or ():
                set_threshold(pipe, threshold)
            for num_refined in dial.numbers or ():
                set_num_refined(pipe, num_refined)
            print("steps in which each layer finds the faster attention")
            first_steps(pipe, request, SETTLING_STEPS)
            if any(row.runs.startswith("AVQ") for row in summary(pipe).rows):
                break
        if model.is_compiled:
            compile_model(pipe)
        print("with AVQ attention")
        avq = timed_image(pipe, request).image
        report = summary(pipe)
        print("with exact attention")
        with avq_disabled(pipe):
            exact = timed_image(pipe, request).image
        print("steps in turns, for their times")
        times = step_times(pipe, request)

    likeness = psnr(avq, exact)
    save_image(avq, out)
    sheet = image_sheet(
        [[exact, avq, difference(exact, avq)]],
        [
            "exact",
            f"AVQ, {speed_in_words(times)}",
            f"difference x{DIFFERENCE_GAIN}, PSNR {likeness:.1f} dB",
        ],
        row_titles=[str(request)],
        table=report.cells(),
    )
    save_sheet(sheet, out)
    print(f"{report}\n{LEGEND}\n")
    closer = f"--tolerance {0.02 if tolerance is None else tolerance / 4:g}"
    closer = closer if model.codebooks is None else "a larger --num-refined"
    print(outcome(times, likeness, closer))
    if note := route_note(report, is_forced=route != "fastest"):
        print(note)
    if tolerance is not None:
        print("The tolerance is for the model's output (noise, velocity), not for the image.")
    print(f"image: {out}\nsheet: {sheet_path(out)}")


def route_note(report: Summary, *, is_forced: bool) -> str:
    """Say whether exact attention is faster in all layers or in some; empty for none."""
    if is_forced:
        return (
            "Exact attention is at least as fast in every layer here: apply_avq would keep it, but "
            "this command runs AVQ to show it."
        )
    layers = [row for row in report.rows if row.config]
    exact = sum(row.runs == "exact: faster" for row in layers)
    if not exact:
        return ""
    return f"{exact} of {len(layers)} layers run exact attention, which is faster there."


def speed_in_words(times: StepTimes) -> str:
    """Say whether AVQ was faster: in every pair of steps, in none, or only in some (noise)."""
    least, *_, most = times.gains
    if least <= 1 <= most:
        return "as fast, within noise"
    return f"{median(times.gains):.2f} times as fast"


def outcome(times: StepTimes, likeness: float, closer: str) -> str:
    """Say which was faster and how similar the images are; `closer` is how to get more so."""
    least, *_, most = times.gains
    advice = "\nAVQ pays off on larger images (--height, --width)."
    look = "they look alike"
    if likeness < ALIKE:
        look = "details differ" if likeness >= SIMILAR else "they differ visibly"
        look += f". Closer, and slower: {closer}"
    return (
        f"On this device, {times}: AVQ is {speed_in_words(times)}\n"
        f"({least:.2f} to {most:.2f} times in {TIMED_PAIRS} pairs of steps)."
        f"{'' if least > 1 else advice}\n"
        f"PSNR of the two images: {likeness:.1f} dB, {look}."
    )
