"""`pages`, `features` and `models`: results, and what of diffusers AVQ supports, as pages."""

from pathlib import Path
from typing import Annotated

import typer

from avq_diffusers.options import device_of
from eval.commands.options import Device, Results
from eval.store.report import PUBLISHED

app = typer.Typer()


@app.command("pages")
def pages_command(folder: Results = PUBLISHED) -> None:
    """Make the pages and their plots from the JSON files: speed, quality, tolerance, keys, ...

    Example: python -m eval pages
    """
    from eval.pages.render import write_pages

    for path in write_pages(folder):
        print(path)


@app.command("features")
def features_command(
    junit: Annotated[Path, typer.Argument(help="JUnit file of the tests.", exists=True)],
    folder: Results = PUBLISHED,
    device: Device = None,
) -> None:
    """Make the table of diffusers' features from tests that ran on this machine.

    Example: python -m eval features cpu.xml, of pytest -m "feature and not gpu" --junitxml cpu.xml
    On a machine with a GPU, --device cpu says that the tests ran without it.
    """
    from eval.support.features import write_features

    write_features(junit, folder, device_of(device).type)


@app.command("models")
def models_command(folder: Results = PUBLISHED) -> None:
    """Make the table of the models of the installed diffusers.

    Example: python -m eval models
    """
    from eval.support.models import write_models

    write_models(folder)
