"""`python -m eval vision`: vision transformers of transformers."""

import os
from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(no_args_is_help=True, help="Vision transformers: data sets, features, tables.")


@app.command()
def data(
    task: Annotated[str, typer.Argument(help="segmentation or classification.")],
    output: Annotated[
        Path | None, typer.Option(help="Folder to make; runs/TASK without it.")
    ] = None,
    training: Annotated[int, typer.Option(min=1, help="Training images.")] = 2000,
    validation: Annotated[int, typer.Option(min=1, help="Validation images.")] = 400,
    size: Annotated[int, typer.Option(help="Side of the images, a multiple of 64.")] = 512,
    seed: Annotated[int, typer.Option(min=0, max=9, help="Of the scenes.")] = 0,
) -> None:
    """Write scenes over photographs in the layout of ADE20K or of ImageNet.

    Example: python -m eval vision data segmentation
    """
    from eval.store.report import RESULTS
    from eval.vision.data_sets import write_data_set

    folder = RESULTS / task if output is None else output
    write_data_set(
        task,
        folder,
        training=training,
        validation=validation,
        size=size,
        seed=seed,
        workers=os.cpu_count() or 1,
    )
    print(folder)
