"""`python -m eval coco`: the COCO protocol, one folder of images per row."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from avq_diffusers.mini import usual_prompts
from avq_diffusers.options import Dilated, device_of, finite, multiple_of, numbers_of, read_prompts
from distill.scenes import TEST_SEEDS, write_coco
from eval.commands.options import (
    Batch,
    Compiled,
    Device,
    Images,
    Levels,
    Model,
    Output,
    PNDMSteps,
    Scorer,
)
from eval.store.report import RESULTS, save_json

BATCH = 8  # on a GPU; a CPU makes one image at a time

app = typer.Typer(
    no_args_is_help=True,
    help="FID and CLIP score on COCO under LinFusion's protocol: generate one folder per row, then "
    "score the folders. Scenes written by `write` take the place of COCO for mini-sd.",
)


@app.command("generate")
def coco_generate_command(
    folder: Annotated[Path, typer.Argument(help="For the row's images; existing ones are kept.")],
    captions: Annotated[
        Path,
        typer.Option(
            help="LinFusion's captions.txt, one caption per line, or COCO's captions_val2014.json, "
            "from which captions are drawn."
        ),
    ],
    method: Annotated[
        str, typer.Option(help="exact, a configuration to calibrate, or a folder; as in `scenes`.")
    ] = "exact",
    model: Model = "stable-diffusion-v1-5/stable-diffusion-v1-5",
    images: Images = 30_000,
    draw_seed: Annotated[int, typer.Option(help="Seed for drawing from annotations.")] = 0,
    size: Annotated[
        int, typer.Option(callback=multiple_of(8), help="Side of the images, a multiple of 8.")
    ] = 512,
    dilated: Dilated = False,
    compiled: Compiled = False,
    steps: PNDMSteps = 25,
    guidance_scale: Annotated[
        float, typer.Option(callback=finite, help="Classifier-free guidance.")
    ] = 7.5,
    levels: Levels = "0",
    calibration: Annotated[
        Path | None,
        typer.Option(help="Text file of prompts to calibrate on; else those of `avq calibrate`."),
    ] = None,
    batch: Batch = None,
    device: Device = None,
) -> None:
    """Generate the images of one row: image i has caption i and noise from seed i.

    If it is killed, run the same command again, on any number of GPUs. The safety checker is off.

    Example: python -m eval coco generate runs/exact --captions captions.txt

    On 8 GPUs: accelerate launch --num_processes 8 -m eval coco generate ... (the same options)
    """
    from eval.quality.captions import read_captions
    from eval.quality.coco import Row
    from eval.quality.generation import Sampling

    prompts = read_prompts("--calibration", calibration) if calibration else usual_prompts(model)
    row = Row(
        folder=folder,
        captions=read_captions(captions, images, seed=draw_seed),
        model=model,
        method=method,
        levels=numbers_of("--levels", levels),
        calibration_prompts=prompts,
        settings=Sampling(
            num_inference_steps=steps,
            guidance_scale=guidance_scale,
            size=size,
            batch_size=batch or BATCH,
            is_dilated=dilated,
            is_compiled=compiled,
        ),
    )
    row.generate(device_of(device))


@app.command("score")
def coco_score_command(
    folders: Annotated[list[Path], typer.Argument(help="From `generate`, one per row.")],
    real: Annotated[Path, typer.Option(help="Folder of real images, such as coco/val2014.")],
    scorer: Scorer = None,
    images: Annotated[
        int | None, typer.Option(min=2, help="Only score the first ones, for FID-5k.")
    ] = None,
    batch: Batch = 64,
    threads: Annotated[int, typer.Option(min=1, help="Threads that read images.")] = 8,
    cache: Annotated[Path | None, typer.Option(help="Folder for features of real images.")] = None,
    device: Device = None,
    name: Annotated[str, typer.Option(help="Name of the file to write.")] = "coco",
    output: Output = RESULTS,
) -> None:
    """FID and CLIP score of folders of images, all made from the same captions.

    Example: python -m eval coco score runs/exact runs/m64 --real coco/val2014
    """
    from functools import partial

    from platformdirs import user_cache_path

    from eval.quality.coco_score import (
        coco_table,
        load_networks,
        read_folders,
        score_folders,
    )
    from eval.quality.protocol import deviations

    chosen, place = read_folders(folders, images), device_of(device)
    scored, remarks = [], []
    scores = score_folders(
        chosen,
        real,
        partial(load_networks, scorer, place, batch, threads),
        cache=user_cache_path("avq-diffusers") / "features" if cache is None else cache,
    )
    for folder, row in zip(chosen, scores, strict=True):
        scored.append(row)
        counts = {name: row[name] for name in ("num_images", "num_real")}
        if found := deviations(folder.config, **counts, scorer=scorer):
            remarks.append(f"Not the protocol: {'; '.join(found)}.")
        remarks = [*dict.fromkeys(remarks)]
        save_json(
            output / f"{name}.json",
            device=place,
            generation=chosen[0].shared,
            made_with=[
                [made["environment"] for made in (*x.manifest["earlier_sessions"], x.manifest)]
                for x in chosen
            ],
            remarks=remarks,
            rows=scored,
        )
    print(coco_table(scored))
    for text in remarks:
        print(f"warning: {text}", file=sys.stderr)


@app.command("download")
def coco_download_command(
    folder: Annotated[Path, typer.Argument(help="For captions.txt and val2014; may be new.")],
) -> None:
    """Download LinFusion's captions and the images of val2014 (6 GB).

    Files from an earlier call are kept.

    Example: python -m eval coco download coco
    """
    from eval.quality.coco_download import download_coco

    download_coco(folder)


@app.command("write")
def coco_write_command(
    folder: Annotated[Path, typer.Argument(help="For the dataset; may be new.")],
    images: Annotated[int, typer.Option(min=1, help="Number of scenes.")] = 5000,
    first: Annotated[
        int,
        typer.Option(min=0, max=len(TEST_SEEDS) - 1, help="The first of mini-sd's test scenes."),
    ] = 0,
    size: Annotated[
        int, typer.Option(callback=multiple_of(64), help="Side of the images, a multiple of 64.")
    ] = 256,
) -> None:
    """Write test scenes as a dataset in COCO's format: images, annotations with captions.

    The captions are FOLDER/annotations/captions_scenes.json, the real images FOLDER/images.

    Example: python -m eval coco write runs/scenes --images 5000
    """
    write_coco(folder, images, first_seed=TEST_SEEDS[first], size=size)
