"""Distil AVQ codebooks and projections from a Stable Diffusion model.

One process per GPU: accelerate launch --num_processes N -m distill --config FILE

Several machines: add accelerate's --num_machines, --machine_rank, --main_process_ip and
--main_process_port, and an --output that all machines share.

The result is OUTPUT/codebooks, for AVQCodebooks.from_pretrained, with a model card.
"""

import contextlib
import os
from typing import Annotated

import typer

from distill.config import DistillConfig
from distill.config_file import load_config
from distill.data import DataError
from distill.options import ConfigFile, Output, Overrides, Resume, exit_on, folder_of, run_app

app = typer.Typer(add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False)


@app.command(help=__doc__)
def distill(
    config: ConfigFile,
    output: Output = None,
    resume: Resume = False,
    overrides: Overrides = (),
    repo: Annotated[
        str | None,
        typer.Option(
            "--push-to-hub", metavar="USER/NAME", help="Push the result to this repository."
        ),
    ] = None,
) -> None:
    output = folder_of(config, output)
    with contextlib.ExitStack() as stack:
        with exit_on(ValueError, TypeError, ImportError, OSError, FloatingPointError, code=2):
            values = load_config(config, DistillConfig, overrides)
            from distill.checkpointing.checkpoint import locked
            from distill.checkpointing.hub import check_repository
            from distill.loop import train
            from distill.run import Run

            # Data workers are forked after tokenizers ran; the setting avoids a warning.
            os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")
            if repo is not None:
                repo = check_repository(repo, values)
            stack.enter_context(locked(output))
            run = Run(values, output, resume=resume)
        with exit_on(FloatingPointError, DataError, OSError, code=1):
            train(run, config.stem, repo=repo)


if __name__ == "__main__":
    run_app(app)
