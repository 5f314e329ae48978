"""Options that the training commands share, and how a command starts and ends."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from avq_diffusers.options import hide_torchvision_notes, restore_threads

ConfigFile = Annotated[Path, typer.Option("--config", help="YAML file of the run.")]
Output = Annotated[
    Path | None, typer.Option(help="Folder of the run; by default runs/NAME for NAME.yaml.")
]
Resume = Annotated[
    bool, typer.Option("--resume", help="Continue from the newest checkpoint, if there is one.")
]
Overrides = Annotated[
    list[str], typer.Option("--set", help="section.key=value, replaces a value of the file.")
]


def folder_of(config: Path, output: Path | None) -> Path:
    """The folder of a run."""
    return Path("runs") / config.stem if output is None else output


def run_app(app: typer.Typer) -> None:
    """Run the command."""
    restore_threads()
    hide_torchvision_notes()
    app()


@contextmanager
def exit_on(*kinds: type[Exception], code: int) -> Iterator[None]:
    """Print the message of such an exception and exit with this code."""
    try:
        yield
    except kinds as error:
        print(f"error: {error}", file=sys.stderr)
        raise typer.Exit(code) from error
