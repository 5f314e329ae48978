"""`avq generate`: an image with AVQ attention, beside the exact one."""

from pathlib import Path

from avq_diffusers.cli.codebooks import codeword_source
from avq_diffusers.cli.images import dilation, fit_request, measured_on, timed_image
from avq_diffusers.cli.loading import load_pipeline
from avq_diffusers.cli.output import save_image, save_sheet, sheet_path
from avq_diffusers.cli.request import ImageRequest, ModelRequest
from avq_diffusers.config import AVQConfig
from avq_diffusers.hosts.verbs import apply_avq, avq_disabled, set_num_refined, summary
from avq_diffusers.images import DIFFERENCE_GAIN, difference, image_sheet, psnr


def generate_image(
    model: ModelRequest,
    request: ImageRequest,
    out: Path,
    *,
    num_refined: int | None,
    tolerance: float | None,
) -> None:
    """Write the AVQ image to `out` and the sheet beside it, and print what each layer ran."""
    pipe = load_pipeline(model.name, model.device)
    request = fit_request(pipe, request)
    source = codeword_source(pipe, model)
    apply_avq(pipe, source, route="always")
    if num_refined is not None:
        set_num_refined(pipe, num_refined)
    with dilation(pipe, request):
        if tolerance is not None:
            assert isinstance(source, AVQConfig)
            print("measuring what the attention of each layer does to the output")
            arguments = measured_on(pipe, request)
            apply_avq(pipe, source, tolerance=tolerance, route="always", **arguments)
        print("with AVQ attention")
        avq, avq_seconds = timed_image(pipe, request)
        report = summary(pipe)
        print("with exact attention")
        with avq_disabled(pipe):
            exact, exact_seconds = timed_image(pipe, request)

    save_image(avq, out)
    likeness = f"PSNR {psnr(avq, exact):.1f} dB"
    sheet = image_sheet(
        [[exact, avq, difference(exact, avq)]],
        [
            f"exact, {exact_seconds:.1f} s",
            f"AVQ, {avq_seconds:.1f} s",
            f"difference x{DIFFERENCE_GAIN}, {likeness}",
        ],
        row_titles=[str(request)],
        table=report.cells(),
    )
    save_sheet(sheet, out)
    print(report)
    print(f"exact {exact_seconds:.1f} s, AVQ {avq_seconds:.1f} s, {likeness} to the exact image")
    print(f"image: {out}\nsheet: {sheet_path(out)}")
