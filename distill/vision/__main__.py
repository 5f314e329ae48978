"""Fine-tune vision models with AVQ or another attention: `python -m distill.vision`.

One process per GPU: accelerate launch --num_processes N -m distill.vision train --config FILE
"""

from pathlib import Path
from typing import Annotated

import typer

from avq_diffusers.options import hide_torchvision_notes, restore_threads
from distill.exceptions import exit_on

ATTENTIONS = (
    "exact,M64P16C8/own,M32P8C8/own,M64P16C8E256/own,M64P16C8,M32P8C8,flat@M64P16C8/own,"
    "flat@M32P8C8/own,flat@M64P16C8,flat@M32P8C8,swin,neighbourhood,linformer,performer,"
    "value-projection"
)

app = typer.Typer(
    add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False, help=__doc__
)


@app.command()
def train(
    config: Annotated[Path, typer.Option(help="YAML file with every field.")],
    output: Annotated[
        Path | None, typer.Option(help="Folder of the run; runs/NAME for NAME.yaml.")
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Continue from the newest checkpoint, if there is one.")
    ] = False,
    overrides: Annotated[
        list[str], typer.Option("--set", help="section.key=value, replaces the file's value.")
    ] = (),
) -> None:
    """Fine-tune one model, evaluate it and save it."""
    from distill.config_file import load_config
    from distill.vision.config import VisionConfig

    with exit_on(ValueError, TypeError, ImportError, OSError, FloatingPointError, code=2):
        values = load_config(config, VisionConfig, overrides)
        from distill.checkpointing.run_folder import locked
        from distill.vision.training import fine_tune

        folder = Path("runs") / config.stem if output is None else output
        with locked(folder):
            scores = fine_tune(values, folder, resume=resume)
        print(scores)


@app.command("compare")
def compare_command(
    config: Annotated[Path, typer.Option(help="YAML file with every field, for the teacher.")],
    output: Annotated[
        Path | None, typer.Option(help="Folder of the rows; runs/NAME for NAME.yaml.")
    ] = None,
    attentions: Annotated[
        str, typer.Option(help="Comma-separated; flat@SIZES is flat VQ of equal kernel time.")
    ] = ATTENTIONS,
    steps: Annotated[int, typer.Option(min=1, help="Of each attention, after the teacher.")] = 50,
    rate: Annotated[
        float, typer.Option(help="Learning rates of each attention over those of the teacher.")
    ] = 0.1,
    seeds: Annotated[str, typer.Option(help="Comma-separated, a run for each.")] = "0,1,2",
    elastic: Annotated[
        str,
        typer.Option(help="Refined parents at which runs of the first seed are scored too, or ''."),
    ] = "4,8,16,32",
    seconds: Annotated[float, typer.Option(help="No run starts that would end later.")] = 1e9,
    overrides: Annotated[
        list[str], typer.Option("--set", help="section.key=value, replaces the file's value.")
    ] = (),
) -> None:
    """Fine-tune a teacher, then every attention from it with equal steps.

    At the teacher's own rates exact attention, too, would lose what the teacher has learned.

    `python -m eval vision table OUTPUT/rows.jsonl` shows the rows.
    """
    from avq_diffusers.options import check_positive, numbers_of
    from distill.config_file import load_config
    from distill.vision.config import VisionConfig

    with exit_on(ValueError, TypeError, ImportError, OSError, FloatingPointError, code=2):
        values = load_config(config, VisionConfig, overrides)
        check_positive("--rate", rate)
        numbers = numbers_of("--seeds", seeds), numbers_of("--elastic", elastic) if elastic else ()
        from distill.vision.compare import compare

        compare(
            values,
            attentions.split(","),
            Path("runs") / config.stem if output is None else output,
            steps=steps,
            rate=rate,
            seeds=numbers[0],
            elastic=numbers[1],
            seconds=seconds,
        )


@app.command("analyse")
def analyse_command(
    run: Annotated[Path, typer.Argument(help="Folder of a finished run of train with AVQ.")],
    images: Annotated[int, typer.Option(min=1, help="Validation images for all but scores.")] = 16,
    refined: Annotated[str, typer.Option(help="Refined parents.")] = "4,8,12,16,24,32",
    tiles: Annotated[str, typer.Option(help="Lengths of query tiles.")] = "32,64,128",
) -> None:
    """Elastic inference, query orders, capture of each head, tiled importance.

    `python -m eval vision analyses RUN/analyses.json` shows them.
    """
    from avq_diffusers.options import numbers_of

    with exit_on(ValueError, TypeError, ImportError, OSError, code=2):
        numbers = numbers_of("--refined", refined), numbers_of("--tiles", tiles)
        from distill.vision.analyses import analyse

        analyse(run, num_images=images, refined=numbers[0], tiles=numbers[1])
    print(run / "analyses.json")


if __name__ == "__main__":
    restore_threads()
    hide_torchvision_notes()
    app()
