"""Codebooks and their training: `errors`, `ablate`."""

from pathlib import Path
from typing import Annotated

import typer

from avq_diffusers.options import Dilated, device_of, numbers_of
from eval.commands.options import (
    Device,
    Images,
    Levels,
    Methods,
    Model,
    Output,
    Overrides,
    Size,
    Timesteps,
    calibration_prompts,
    held_out_scenes,
    result_name,
    some_of,
)
from eval.store.report import RESULTS, publish

app = typer.Typer()


@app.command("errors")
def errors_command(
    methods: Methods = "M64P16C8,M64,M128,M160,M256,M4,value-projection",
    model: Model = "mini-sd",
    images: Images = 16,
    timesteps: Timesteps = 8,
    levels: Levels = "0",
    size: Size = None,
    dilated: Dilated = False,
    device: Device = None,
    output: Output = RESULTS,
) -> None:
    """Error per layer and of the predicted noise against exact attention, by codebook size.

    Example: python -m eval errors --methods M64P16C8,runs/m64/codebooks,M160

    At twice the size: python -m eval errors --size 512 --scalecrafter
    """
    from eval.codebooks.layer_errors import errors_table, measure_errors
    from eval.methods.prepared import prepare_methods
    from eval.methods.registry import TOME
    from eval.methods.running import load_pipeline
    from eval.quality.generation import Sampling, dilation, dilation_facts

    names = methods.split(",")
    if TOME in names:
        raise ValueError(f"errors are per layer, but layers of {TOME} see merged tokens.")
    numbers, place = numbers_of("--levels", levels), device_of(device)
    pipe = load_pipeline(model, place)
    settings = Sampling(size=size, is_dilated=dilated)
    scalecrafter = dilation_facts(pipe, settings)
    prompts = calibration_prompts()
    prepared = prepare_methods(pipe, names, levels=numbers, calibration_prompts=prompts)
    with dilation(pipe, settings):
        rows = measure_errors(
            pipe, prepared, held_out_scenes(images), num_timesteps=timesteps, size=size
        )
    publish(
        output / f"{result_name('errors', model, numbers, size, dilated)}.json",
        errors_table(rows),
        device=place,
        num_images=images,
        num_timesteps=timesteps,
        size=size,
        scalecrafter=scalecrafter,
        rows=rows,
    )


@app.command("ablate")
def ablate_command(
    config: Annotated[Path, typer.Option(help="YAML file of distill.")] = Path(
        "configs/mini_m64p16c8.yaml"
    ),
    runs: Annotated[Path, typer.Option(help="Folder of the runs.")] = Path("runs/ablation"),
    variants: Annotated[str, typer.Option(help="Comma-separated; by default all.")] = "",
    seeds: Annotated[str, typer.Option(help="Training seeds.")] = "0",
    parallel: Annotated[int, typer.Option(min=1, help="Runs at a time.")] = 1,
    overrides: Overrides = (),
    model: Model = "mini-sd",
    images: Images = 16,
    timesteps: Timesteps = 8,
    device: Device = None,
    output: Output = RESULTS,
) -> None:
    """Train variants of a distillation and compare their errors against the teacher.

    Repeat it with more seeds or variants to add them: finished runs are kept.

    Example: python -m eval ablate --seeds 0,1,2 --parallel 4 --set steps=1000
    """
    from eval.codebooks.ablation import VARIANTS, ablation_rows, ablation_table, train_variants
    from eval.codebooks.layer_errors import measure_errors
    from eval.methods.prepared import prepare_methods
    from eval.methods.running import load_pipeline

    chosen = some_of("--variants", variants or ",".join(VARIANTS), VARIANTS)
    place = device_of(device)
    pipe = load_pipeline(model, place)
    trained = train_variants(
        config,
        runs,
        chosen,
        seeds=numbers_of("--seeds", seeds),
        parallel=parallel,
        overrides=overrides,
    )
    names = {str(path): name for name, path in trained.items()}
    prepared = prepare_methods(pipe, list(names), levels=(0,), calibration_prompts=())
    errors = measure_errors(pipe, prepared, held_out_scenes(images), num_timesteps=timesteps)
    rows = ablation_rows(errors, names)
    publish(
        output / f"ablation_{config.stem}.json",
        ablation_table(rows),
        device=place,
        config=config.name,
        overrides=list(overrides),
        num_images=images,
        num_timesteps=timesteps,
        rows=rows,
    )
