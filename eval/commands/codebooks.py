"""Codebooks and their training: `errors`, `ablate`."""

from pathlib import Path
from typing import Annotated

import typer

from avq_diffusers.options import Dilated, numbers_of
from distill.scenes import TEST_SEEDS, Scene, sample_scene
from eval.commands.options import (
    Device,
    Images,
    Levels,
    Methods,
    Model,
    Output,
    Size,
    calibration_prompts,
    load_pipeline,
    result_name,
)
from eval.store.report import RESULTS, save_json

app = typer.Typer()
Timesteps = Annotated[int, typer.Option(min=1, help="Evenly spread timesteps.")]


def scenes(number: int) -> list[Scene]:
    """Held-out scenes."""
    return [sample_scene(seed) for seed in TEST_SEEDS[:number]]


@app.command("errors")
def errors_command(
    methods: Methods = "M64P16C8,M64,M128,M160,M256,M4,value-projection",
    model: Model = "mini-sd",
    images: Images = 16,
    timesteps: Timesteps = 8,
    levels: Levels = "0",
    size: Size = None,
    dilated: Dilated = False,
    device: Device = "cpu",
    output: Output = RESULTS,
) -> None:
    """Error per layer and of the predicted noise against exact attention, by codebook size.

    Example: python -m eval errors --methods M64P16C8,runs/m64/codebooks,M160 --device cuda

    At twice the size: python -m eval errors --size 512 --scalecrafter --device cuda
    """
    from eval.codebooks.layer_errors import errors_table, measure_errors
    from eval.methods.prepared import prepare_methods
    from eval.methods.registry import TOME
    from eval.quality.generation import Sampling, dilation, dilation_facts

    names = methods.split(",")
    if TOME in names:
        raise ValueError(f"errors are per layer, but layers of {TOME} see merged tokens.")
    numbers = numbers_of("--levels", levels)
    pipe = load_pipeline(model, device)
    settings = Sampling(size=size, is_dilated=dilated)
    scalecrafter = dilation_facts(pipe, settings)
    prompts = calibration_prompts()
    prepared = prepare_methods(pipe, names, levels=numbers, calibration_prompts=prompts)
    with dilation(pipe, settings):
        rows = measure_errors(pipe, prepared, scenes(images), num_timesteps=timesteps, size=size)
    print(errors_table(rows))
    save_json(
        output / f"{result_name('errors', model, numbers, size, dilated)}.json",
        device=device,
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
    overrides: Annotated[list[str], typer.Option("--set", help="key=value, for every run.")] = (),
    model: Model = "mini-sd",
    images: Images = 16,
    timesteps: Timesteps = 8,
    device: Device = "cpu",
    output: Output = RESULTS,
) -> None:
    """Train variants of a distillation and compare their errors against the teacher.

    `merge` adds runs with other seeds or variants to the table.

    Example: python -m eval ablate --seeds 0,1,2 --parallel 4 --set steps=1000 --device cuda
    """
    from eval.codebooks.ablation import VARIANTS, ablation_rows, ablation_table, train_variants
    from eval.codebooks.layer_errors import measure_errors
    from eval.methods.prepared import prepare_methods

    pipe = load_pipeline(model, device)
    trained = train_variants(
        config,
        runs,
        variants.split(",") if variants else list(VARIANTS),
        seeds=numbers_of("--seeds", seeds),
        parallel=parallel,
        overrides=overrides,
    )
    names = {str(path): name for name, path in trained.items()}
    prepared = prepare_methods(pipe, list(names), levels=(0,), calibration_prompts=())
    errors = measure_errors(pipe, prepared, scenes(images), num_timesteps=timesteps)
    rows = ablation_rows(errors, names)
    print(ablation_table(rows))
    save_json(
        output / f"ablation_{config.stem}.json",
        device=device,
        config=config.name,
        overrides=list(overrides),
        num_images=images,
        num_timesteps=timesteps,
        rows=rows,
    )
