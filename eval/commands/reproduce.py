"""`python -m eval reproduce`: published tables from downloads to metrics."""

from pathlib import Path
from typing import Annotated

import typer

from avq_diffusers.options import device_of, numbers_of
from eval.commands.options import Device, Images, Model, Overrides, PNDMSteps, Scorer, some_of

app = typer.Typer(no_args_is_help=True, help="Make a published table, from downloads to metrics.")


@app.callback()
def reproduce() -> None:
    """Makes typer keep the name of the only command."""


@app.command("sd15")
def sd15_command(
    output: Annotated[Path, typer.Argument(help="Folder for everything.")] = Path("runs/sd15"),
    rows: Annotated[str, typer.Option(help="Comma-separated; by default all.")] = "",
    sizes: Annotated[
        str, typer.Option(help="The training size, then sizes that run ScaleCrafter.")
    ] = "512,1024",
    images: Images = 30_000,
    steps: PNDMSteps = 25,
    processes: Annotated[
        int, typer.Option(min=1, help="Processes that train and generate, one per GPU.")
    ] = 1,
    model: Model = "stable-diffusion-v1-5/stable-diffusion-v1-5",
    captions: Annotated[
        Path | None, typer.Option(help="Captions, in place of the download.")
    ] = None,
    real: Annotated[
        Path | None, typer.Option(help="Folder of real images, in place of the download.")
    ] = None,
    scorer: Scorer = None,
    overrides: Overrides = (),
    only_plan: Annotated[
        bool, typer.Option("--plan", help="Print the steps with hours and disk space, and stop.")
    ] = False,
    device: Device = None,
) -> None:
    """The paper's table of SD1.5 on COCO: downloads, distils, generates, scores.

    Prints the expected hours and disk space first, and at the end each measured metric beside the
    published one. If it is killed, the same command continues where it stopped; finished steps are
    not repeated.

    Example: python -m eval reproduce sd15 runs/sd15 --processes 8
    """
    from avq_diffusers.files import locked, write_text
    from eval.quality.sd15 import ROWS, Request, carry_out, measured, paper_table, plan, plan_table

    request = Request(
        output=output,
        rows=some_of("--rows", rows or ",".join(ROWS), ROWS),
        sizes=numbers_of("--sizes", sizes),
        model=model,
        captions=captions,
        real=real,
        scorer=scorer,
        images=images,
        steps=steps,
        overrides=overrides,
        processes=processes,
        device=device_of(device).type,
    )
    chosen = plan(request)
    print(plan_table(request, chosen), flush=True)
    if only_plan:
        return
    message = f"another command is writing {output}; wait for it."
    with locked(output, 1, message):
        carry_out(request, chosen)
        table = paper_table(measured(request), request.sizes)
        write_text(output / "table.md", table + "\n")
    print(f"\nMeasured (published):\n\n{table}")
