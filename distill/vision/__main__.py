"""Fine-tune vision models with AVQ or another attention: `python -m distill.vision`.

One process per GPU: accelerate launch --num_processes N -m distill.vision train --config FILE
"""

from typing import Annotated

import typer

from avq_diffusers.options import check_positive, numbers_of
from distill.config_file import load_config
from distill.options import ConfigFile, Output, Overrides, Resume, exit_on, folder_of, run_app

ATTENTIONS = (
    "exact,M64C8T1e-4,M64P16C8/own,M32P8C8/own,M64P16C8,M32P8C8,flat@M64P16C8/own,"
    "flat@M32P8C8/own,flat@M64P16C8,flat@M32P8C8,swin,neighbourhood,linformer,performer,"
    "value-projection"
)
ERRORS = (ValueError, TypeError, ImportError, OSError, FloatingPointError)

app = typer.Typer(
    add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False, help=__doc__
)


@app.command()
def train(
    config: ConfigFile,
    output: Output = None,
    resume: Resume = False,
    overrides: Overrides = (),
) -> None:
    """Fine-tune one model, evaluate it and save it."""
    with exit_on(*ERRORS, code=2):
        from distill.checkpointing.checkpoint import locked
        from distill.vision.config import VisionConfig
        from distill.vision.training import fine_tune

        values = load_config(config, VisionConfig, overrides)
        folder = folder_of(config, output)
        with locked(folder):
            print(fine_tune(values, folder, resume=resume))


@app.command("compare")
def compare_command(
    config: ConfigFile,
    output: Output = None,
    attentions: Annotated[
        str, typer.Option(help="Comma-separated; flat@SIZES is flat VQ of equal kernel time.")
    ] = ATTENTIONS,
    steps: Annotated[int, typer.Option(min=1, help="Steps per attention, after the teacher.")] = 50,
    rate: Annotated[
        float, typer.Option(help="Learning rate of each attention, relative to the teacher's.")
    ] = 0.1,
    seeds: Annotated[str, typer.Option(help="Comma-separated, one run each.")] = "0,1,2",
    overrides: Overrides = (),
) -> None:
    """Fine-tune a teacher, then each attention from it for the same number of steps.

    At the teacher's own learning rates, even exact attention would lose what it learned.

    `python -m eval vision table OUTPUT/rows.jsonl` shows the rows.
    """
    with exit_on(*ERRORS, code=2):
        from distill.vision.compare import compare
        from distill.vision.config import VisionConfig

        values = load_config(config, VisionConfig, overrides)
        check_positive("--rate", rate)
        folder = folder_of(config, output)
        compared = numbers_of("--seeds", seeds)
        compare(values, attentions.split(","), folder, steps=steps, rate=rate, seeds=compared)


if __name__ == "__main__":
    run_app(app)
