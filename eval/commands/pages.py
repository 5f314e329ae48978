"""`pages`, `features` and `models`: results, and what of diffusers AVQ supports, as pages."""

from pathlib import Path
from typing import Annotated

import typer

from eval.commands.options import Device
from eval.store.report import PUBLISHED

app = typer.Typer()
Folder = Annotated[Path, typer.Argument(help="Folder of the results.")]


@app.command("pages")
def pages_command(
    folder: Folder = PUBLISHED,
) -> None:
    """Make the pages and their plots from the JSON files: speed, quality, tolerance, keys, ...

    Example: python -m eval pages
    """
    from eval.pages.render import write_pages

    for path in write_pages(folder):
        print(path)


@app.command("features")
def features_command(
    junit: Annotated[Path, typer.Argument(help="JUnit file of the tests.", exists=True)],
    folder: Folder = PUBLISHED,
    device: Device = "cpu",
) -> None:
    """Make the table of diffusers' features from tests that ran on this machine.

    Example: python -m eval features cpu.xml, of pytest -m "feature and not gpu" --junitxml cpu.xml
    On a machine with a GPU, -m "feature and gpu" and --device cuda fill the other column.
    """
    from eval.support.features import write_features

    write_features(junit, folder, device)


@app.command("models")
def models_command(folder: Folder = PUBLISHED) -> None:
    """Make the table of the models of the installed diffusers.

    Example: python -m eval models
    """
    from eval.support.models import write_models

    write_models(folder)
