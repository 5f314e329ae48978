"""`python -m eval pages`: the results as pages for readers."""

from pathlib import Path
from typing import Annotated

import typer

from eval.store.report import PUBLISHED

app = typer.Typer()


@app.command("pages")
def pages_command(
    folder: Annotated[Path, typer.Argument(help="Folder of the results.")] = PUBLISHED,
) -> None:
    """Make the pages and their plots from the JSON files: speed, quality, tolerance, keys, ...

    Example: python -m eval pages
    """
    from eval.pages.render import write_pages

    for path in write_pages(folder):
        print(path)
