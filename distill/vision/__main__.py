"""Fine-tune vision models with AVQ: `python -m distill.vision`.

One process per GPU: accelerate launch --num_processes N -m distill.vision train --config FILE
"""

import typer

from distill.config_file import load_config
from distill.options import ConfigFile, Output, Overrides, Resume, exit_on, folder_of, run_app

ERRORS = (ValueError, TypeError, ImportError, OSError, FloatingPointError)

app = typer.Typer(
    add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False, help=__doc__
)


@app.callback()
def vision() -> None:
    """Makes typer keep the name of the only command."""


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


if __name__ == "__main__":
    run_app(app)
