"""Quality: `tolerance`, `scenes`, `merge`, `ablate`."""

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from avq_diffusers.options import LARGEST_SEED, Dilated, device_of, numbers_of, tolerances_of
from distill.environment import environment
from eval.commands.options import (
    AnyModel,
    Batch,
    Compiled,
    Device,
    Dtype,
    Images,
    Levels,
    Methods,
    Output,
    Overrides,
    Prompts,
    Scorer,
    Size,
    Steps,
    Tolerances,
    calibration_prompts,
    held_out_scenes,
    names_of,
    result_name,
    some_of,
    usual_dtype,
)
from eval.store.report import (
    RESULTS,
    SCORER,
    complete,
    folder_digest,
    publish,
    read_result,
    save_json,
)

app = typer.Typer()


@app.command("tolerance")
def tolerance_command(
    tolerances: Tolerances = "0.003,0.005,0.01,0.02,0.05,0.1",
    methods: Methods = "M64P16C8,M192,M384",
    model: AnyModel = "mini-sd",
    probed: Annotated[int, typer.Option(min=1, help="Prompts to probe.")] = 4,
    prompts: Prompts = 24,
    steps: Annotated[
        str, typer.Option(help="Denoising steps of the images, comma-separated.")
    ] = "4,8,25",
    levels: Levels = "0,1",
    size: Size = None,
    dtype: Dtype = None,
    device: Device = None,
    output: Output = RESULTS,
) -> None:
    """Thresholds by their effect on the output against one, on prompts that were not probed.

    Example: python -m eval tolerance --methods M64P16C8,tome@.25,tome@.5
    """
    from avq_diffusers import AVQConfig
    from avq_diffusers.mini.loading import usual_guidance
    from eval.methods.running import load_pipeline
    from eval.quality.generation import Sampling
    from eval.quality.tolerance import measure_tolerances, tolerance_panels, tolerance_table
    from eval.store.plots import panel_plot

    numbers = numbers_of("--levels", levels)
    limits, place = tolerances_of("--tolerances", tolerances), device_of(device)
    pipe = load_pipeline(model, place, dtype or usual_dtype(place))
    chosen = [scene.caption for scene in held_out_scenes(prompts)]
    profile, rows = measure_tolerances(
        pipe,
        limits,
        names_of(methods),
        AVQConfig(levels=numbers),
        calibration_prompts()[:probed],
        chosen,
        Sampling(size=size, guidance_scale=usual_guidance(pipe)),
        numbers_of("--steps", steps),
    )
    path = output / f"{result_name('tolerance', model, numbers, size)}.json"
    publish(
        path,
        tolerance_table(rows),
        device=place,
        dtype=str(pipe.dtype).removeprefix("torch."),
        num_probed=probed,
        num_prompts=prompts,
        size=size,
        profile=asdict(profile),
        rows=rows,
    )
    panel_plot(path.with_suffix(".png"), tolerance_panels(rows, model))


@app.command("scenes")
def scenes_command(
    methods: Methods = "exact,M64P16C8,M192,M4,value-projection",
    model: AnyModel = "mini-sd",
    scorer: Scorer = SCORER,
    images: Images = 5000,
    first_seed: Annotated[
        int,
        typer.Option(
            min=0, max=LARGEST_SEED, help="Noise seed of the first image; then counting up."
        ),
    ] = 0,
    steps: Steps = 25,
    batch: Batch = None,
    levels: Levels = "0",
    size: Size = None,
    dilated: Dilated = False,
    compiled: Compiled = False,
    resume: Annotated[
        bool,
        typer.Option("--resume", help="Keep the finished rows of this run."),
    ] = False,
    device: Device = None,
    output: Output = RESULTS,
) -> None:
    """FID, CLIP score, copy agreement and PSNR on held-out scenes, with negative controls.

    PSNR and FID to exact compare with the images of `exact`, if it is among the methods. `merge`
    averages runs with different seeds, which several GPUs can share: give each its own --first-seed
    and the same --methods, with `exact` among them.

    Example: python -m eval scenes --images 5000

    At twice the size: python -m eval scenes --size 512 --scalecrafter --batch 16
    """
    from avq_diffusers.mini.loading import usual_guidance
    from eval.methods.running import load_pipeline, network_of
    from eval.quality.generation import Sampling, dilation_facts
    from eval.quality.metrics import Scorer as SceneScorer
    from eval.quality.scene_rows import finished_rows, scenes_table
    from eval.quality.scenes import SceneTrial, score_methods

    numbers, place = numbers_of("--levels", levels), device_of(device)
    dtype, batch = usual_dtype(place), batch or (64 if place.type == "cuda" else 4)
    pipe = load_pipeline(model, place, dtype)
    own_size = network_of(pipe).config.sample_size * pipe.vae_scale_factor
    size = size or own_size
    drawn = held_out_scenes(2 * images)
    trial = SceneTrial(
        methods=names_of(methods),
        scenes=drawn[:images],
        reference_scenes=drawn[images:],
        settings=Sampling(
            num_inference_steps=steps,
            size=size,
            batch_size=batch,
            is_dilated=dilated,
            is_compiled=compiled,
        ),
        calibration_prompts=calibration_prompts(),
        levels=numbers,
        first_seed=first_seed,
    )
    protocol = {
        "model": Path(model).name,
        "model_sha256": folder_digest(model, "model_index.json"),
        "scorer": Path(scorer).name,
        "scorer_sha256": folder_digest(scorer, "config.json"),
        "images": images,
        "batch": batch,
        "first_seed": first_seed,
        "num_inference_steps": steps,
        "guidance_scale": usual_guidance(pipe),
        "dtype": f"torch.{dtype}",
        "size": size,
        "scalecrafter": dilation_facts(pipe, trial.settings),
        "compiled": compiled,
    }
    name = result_name("scenes", model, numbers, None if size == own_size else size, dilated)
    path = output / f"{name}{f'_seed{first_seed}' if first_seed else ''}.json"
    finished = {}
    if resume and path.exists():
        finished = finished_rows(read_result(path), protocol | environment(place))
    rows, judge = [], SceneScorer(scorer).to(place)
    for row in score_methods(pipe, trial, judge, finished):
        rows.append(row)
        table = scenes_table([row])
        print(table if len(rows) == 1 else table.splitlines()[-1], flush=True)
        later = finished.keys() - {row["method"] for row in rows}
        kept = [row for name, row in finished.items() if name in later]
        save_json(path, device=place, **protocol, rows=[*rows, *kept])
    print(f"{scenes_table(rows)}\nresults: {path}")


@app.command("merge")
def merge_command(
    results: Annotated[list[Path], typer.Argument(help="Files of `scenes`.")],
    output: Annotated[Path, typer.Option(help="The file to write.")],
) -> None:
    """Average results of `scenes` over seeds.

    ± becomes one standard error over the seeds; FID, CLIP score and copy agreement are also given
    as differences to exact attention, seed by seed. Rows of one seed may come from several files;
    rows that a seed lacks are left out.

    Example: python -m eval merge scenes_levels0.json scenes_levels0_seed5000.json --output c.json
    """
    from eval.quality.scene_rows import (
        PROTOCOL,
        differences_table,
        merge_runs,
        row_key,
        scenes_table,
        without_differences,
    )

    documents = [_scenes_document(path) for path in results]
    rows = merge_runs(documents)
    print(f"{scenes_table(rows)}\n\nDifferences to exact attention, with the same noise:\n")
    print(f"{differences_table(rows)}\n")
    if alone := without_differences(rows):
        print(f"No differences without `exact` in the same files: {', '.join(alone)}")
    merged = set(map(row_key, rows))
    for key in dict.fromkeys(row_key(row) for document in documents for row in document["rows"]):
        if key not in merged:
            print(f"Left out because a seed lacks it: {key[0]}, levels {list(key[1])}")
    protocol = {name: documents[0].get(name) for name in PROTOCOL}
    runs = [{x: value for x, value in one.items() if x != "rows"} for one in documents]
    save_json(output, device="cpu", **protocol, runs=runs, rows=rows)


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
    prompts: Prompts = 16,
    steps: Steps = 8,
    device: Device = None,
    output: Output = RESULTS,
) -> None:
    """Train variants of a distillation and compare their errors against the teacher.

    The teacher is the configuration's base_model. Repeat it with more seeds or variants to add
    them: finished runs are kept.

    Example: python -m eval ablate --seeds 0,1,2 --parallel 4 --set steps=1000
    """
    from avq_diffusers.mini import model_path
    from distill.config import DistillConfig
    from distill.config_file import load_config
    from eval.methods.running import load_pipeline
    from eval.quality.ablation import VARIANTS, ablation_rows, ablation_table, train_variants

    chosen = some_of("--variants", variants or ",".join(VARIANTS), VARIANTS)
    place = device_of(device)
    base = load_config(config, DistillConfig, overrides)
    pipe = load_pipeline(model_path(base.base_model), place)
    trained = train_variants(
        config,
        runs,
        chosen,
        seeds=numbers_of("--seeds", seeds),
        parallel=parallel,
        overrides=overrides,
    )
    captions = [scene.caption for scene in held_out_scenes(prompts)]
    rows = ablation_rows(pipe, trained, captions, steps)
    publish(
        output / f"ablation_{config.stem}.json",
        ablation_table(rows),
        device=place,
        config=config.name,
        model=base.base_model_name,
        overrides=list(overrides),
        num_prompts=prompts,
        num_inference_steps=steps,
        rows=rows,
    )


def _scenes_document(path: Path) -> Mapping[str, Any]:
    """The content of a file from `scenes`."""
    from eval.quality.scene_rows import noise_seeds, scenes_table

    document = read_result(path, "scenes")
    with complete(path):
        noise_seeds(document)
        scenes_table(document["rows"])
    return document
