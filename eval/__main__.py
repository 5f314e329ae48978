"""`python -m eval`: benchmarks and quality tables, each written to a results folder."""

import json
import sys
from pathlib import Path
from typing import Annotated

import torch
import typer
from diffusers import StableDiffusionPipeline

from avq_diffusers import AVQConfig
from avq_diffusers.mini import (
    IMAGE_SIZE,
    MINI_SD,
    SCORER,
    TEST_SEEDS,
    VALIDATION_SEEDS,
    sample_scene,
    write_coco,
)
from eval.benchmarks.attention import attention_rows, attention_table, bench_attention
from eval.report import RESULTS, save_json
from eval.stored import draw, read_result

NUM_CALIBRATION_PROMPTS = 16
DTYPES = ("float32", "float16", "bfloat16")

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Measure AVQ attention: speed, likeness to exact attention, quality on scenes.",
)
bench_app = typer.Typer(no_args_is_help=True, help="Speed against exact attention.")
app.add_typer(bench_app, name="bench")
coco_app = typer.Typer(
    no_args_is_help=True,
    help="FID and CLIP score on COCO under LinFusion's protocol: generate one folder per row, then "
    "score the folders. Scenes written by `write` take the place of COCO for mini-sd.",
)
app.add_typer(coco_app, name="coco")

Device = Annotated[str, typer.Option(help="cpu, cuda or mps.")]
Output = Annotated[Path, typer.Option(help="Folder the results are written to.")]
Methods = Annotated[
    str,
    typer.Option(
        help="Comma-separated: exact, value-projection, tome, configurations to calibrate such as "
        "M64P16C8 or M192, folders of codebooks (these two also with another number of refined "
        "parents, as runs/m64/codebooks@P8) or of LinFusion layers."
    ),
]
Levels = Annotated[
    str, typer.Option(help="UNet levels that change, as 0 or 0,1; folders bring their own.")
]
Pictures = Annotated[int, typer.Option(min=2, help="Pictures a method.")]
Dilated = Annotated[
    bool,
    typer.Option(
        "--scalecrafter/--no-scalecrafter",
        help="Dilate convolutions, for pictures larger than the model was trained on.",
    ),
]
Model = Annotated[str, typer.Option(help="Folder or Hub id of a Stable Diffusion model.")]


@bench_app.command("attention")
def bench_attention_command(
    device: Device = "cpu",
    tokens: Annotated[str, typer.Option(help="Token counts.")] = "1024,4096,16384,65536",
    config: Annotated[str, typer.Option(help="Codebook sizes.")] = "M64P16C8",
    dtype: Annotated[str, typer.Option(help="float32, float16 or bfloat16.")] = "float32",
    batch: int = 2,
    heads: int = 8,
    head_dim: int = 40,
    output: Output = RESULTS,
) -> None:
    """Time AVQ attention (precompute included) against scaled_dot_product_attention.

    Example: python -m eval bench attention --device cpu
    """
    chosen = AVQConfig.parse(config)
    if dtype not in DTYPES:
        raise ValueError(f"--dtype must be one of {', '.join(DTYPES)}, but got {dtype!r}.")
    timings = bench_attention(
        _numbers("--tokens", tokens),
        config=chosen,
        device=_device(device),
        dtype=getattr(torch, dtype),
        batch=batch,
        num_heads=heads,
        head_dim=head_dim,
    )
    print(f"{chosen}, B{batch} H{heads} D{head_dim}, {dtype}, {device}")
    print(attention_table(timings))
    save_json(
        output / f"bench_attention_{torch.device(device).type}.json",
        command=_command(),
        device=device,
        config=str(chosen),
        shape={"batch": batch, "heads": heads, "head_dim": head_dim, "dtype": dtype},
        rows=attention_rows(timings),
    )


@bench_app.command("kernels")
def bench_kernels_command(
    device: Device = "cuda",
    parts: Annotated[
        str, typer.Option(help="Comma-separated: table, sd15, scaling.")
    ] = "table,sd15,scaling",
    output: Output = RESULTS,
) -> None:
    """Time the kernels: the paper's speed table, SD1.5's shapes, and how time scales.

    Example: python -m eval bench kernels --device cuda --parts table,sd15
    """
    from eval.benchmarks.kernels import run_kernels

    run_kernels(_device(device), output, command=_command(), parts=parts.split(","))


@bench_app.command("unet")
def bench_unet_command(
    device: Device = "cuda",
    model: Annotated[
        str,
        typer.Option(help="Whose UNet: sd15, with random weights, or mini-sd, with its own."),
    ] = "sd15",
    sizes: Annotated[
        str,
        typer.Option(help="Sides of the picture, else 512,1024,2048 or for mini-sd 256,512."),
    ] = "",
    methods: Annotated[
        str,
        typer.Option(
            help="Comma-separated, the most important first: sdpa, fa2, limit, tome, linfusion, "
            "M64P16C8, M64P16C8@L0 (level 0 only), M64P16C8/fastest (default route)."
        ),
    ] = "",
    modes: Annotated[str, typer.Option(help="Comma-separated: graph, compile, eager.")] = (
        "graph,compile,eager"
    ),
    minutes: Annotated[
        float | None, typer.Option(help="Start no row after this many minutes.")
    ] = None,
    output: Output = RESULTS,
) -> None:
    """Time one denoising step of a UNet, batch 2.

    Example: python -m eval bench unet --device cuda --sizes 1024 --modes graph

    Of mini-sd: python -m eval bench unet --model mini-sd --device cuda --modes graph
    """
    from eval.benchmarks.unet import METHODS, run_unet

    run_unet(
        _device(device),
        output,
        command=_command(),
        model=model,
        sizes=_numbers("--sizes", sizes) if sizes else None,
        methods=methods.split(",") if methods else METHODS,
        modes=modes.split(","),
        minutes=minutes,
    )


@bench_app.command("counters")
def bench_counters_command(device: Device = "cuda", output: Output = RESULTS) -> None:
    """Read what limits each kernel from the GPU's counters, with Nsight Compute.

    Example: python -m eval bench counters --device cuda
    """
    from eval.benchmarks.counters import run_counters

    run_counters(_device(device), output, command=_command())


@bench_app.command("distill")
def bench_distill_command(
    config: Annotated[Path, typer.Option(help="YAML file of the run that is timed.")] = Path(
        "configs/sd15_m64p16c8.yaml"
    ),
    model: Annotated[
        Path | None, typer.Option(help="Folder of a model; SD1.5 with random weights without it.")
    ] = None,
    size: Annotated[int, typer.Option(help="Side of the pictures.")] = 512,
    batches: Annotated[str, typer.Option(help="Pictures per GPU and step.")] = "4,8,12",
    gpus: Annotated[str, typer.Option(help="Numbers of GPUs.")] = "1",
    attentions: Annotated[
        str, typer.Option(help="Students: exact, avq, linfusion.")
    ] = "exact,avq,linfusion",
    overrides: Annotated[list[str], typer.Option("--set", help="Of the run, key=value.")] = (),
    output: Output = RESULTS,
) -> None:
    """Time the training step at SD1.5's size, by short runs of the real command.

    Example: python -m eval bench distill --gpus 1,2 --batches 12 --attentions avq
    """
    from eval.benchmarks.distillation import run_distillation

    run_distillation(
        config,
        output,
        command=_command(),
        model=model,
        image_size=size,
        batches=_numbers("--batches", batches),
        gpus=_numbers("--gpus", gpus),
        attentions=attentions.split(","),
        overrides=overrides,
    )


@app.command("compare")
def compare_command(
    methods: Methods = "M64P16C8,M192,M4,value-projection",
    model: Model = MINI_SD,
    prompts: Annotated[int, typer.Option(min=1, help="Prompts: captions of test scenes.")] = 8,
    seeds: Annotated[int, typer.Option(min=1, help="Seeds for every prompt.")] = 3,
    steps: Annotated[int, typer.Option(min=1, help="Denoising steps.")] = 25,
    levels: Levels = "0",
    size: Annotated[
        int | None, typer.Option(help="Side of the pictures; the model's own without it.")
    ] = None,
    dilated: Dilated = False,
    device: Device = "cpu",
    output: Output = RESULTS,
) -> None:
    """Pictures of each method against those of exact attention at equal prompts and seeds.

    Besides the figures, a sheet shows four prompts by every method.

    Example: python -m eval compare --methods M64P16C8,M192 --device cuda

    At twice the size: python -m eval compare --size 512 --scalecrafter --device cuda
    """
    from eval.compare import compare, compare_sheet, compare_table

    numbers = _numbers("--levels", levels)
    pipe = StableDiffusionPipeline.from_pretrained(model).to(_device(device))
    chosen = [sample_scene(seed).caption for seed in TEST_SEEDS[:prompts]]
    rows, pictures = compare(
        pipe,
        methods.split(","),
        chosen,
        range(seeds),
        levels=numbers,
        calibration_prompts=_calibration_prompts(),
        num_inference_steps=steps,
        size=size,
        is_dilated=dilated,
    )
    print(compare_table(rows))
    name = f"compare_levels{''.join(map(str, numbers))}{_picture_suffix(size, dilated)}"
    save_json(
        output / f"{name}.json",
        command=_command(),
        device=device,
        prompts=chosen,
        num_seeds=seeds,
        num_inference_steps=steps,
        size=size,
        scalecrafter=dilated,
        rows=rows,
    )
    compare_sheet(output / f"{name}.png", pictures, chosen)


@app.command("scenes")
def scenes_command(
    methods: Methods = "exact,M64P16C8,M192,M4,value-projection",
    model: Model = MINI_SD,
    scorer: Annotated[str, typer.Option(help="Folder of the CLIP-style scorer.")] = SCORER,
    pictures: Pictures = 5000,
    first_seed: Annotated[
        int, typer.Option(min=0, help="Noise seed of the first picture; picture i adds i.")
    ] = 0,
    steps: Annotated[int, typer.Option(min=1, help="Denoising steps.")] = 25,
    batch: Annotated[int, typer.Option(min=1, help="Pictures made at once.")] = 64,
    levels: Levels = "0",
    size: Annotated[int, typer.Option(help="Side of the pictures, a multiple of 64.")] = IMAGE_SIZE,
    dilated: Dilated = False,
    compiled: Annotated[
        bool, typer.Option("--compile", help="Compile the UNet: pays from a thousand pictures on.")
    ] = False,
    device: Device = "cpu",
    output: Output = RESULTS,
) -> None:
    """FID, CLIP score, copy agreement and PSNR on held-out scenes, with negative controls.

    PSNR is to the pictures of `exact`, if it is among the methods. Runs with other seeds can be
    averaged by `merge`.

    Example: python -m eval scenes --pictures 5000 --device cuda

    At twice the size: python -m eval scenes --size 512 --scalecrafter --batch 16 --device cuda
    """
    from eval.metrics import Scorer
    from eval.scenes import scenes_table, score_methods

    numbers = _numbers("--levels", levels)
    dtype = torch.float16 if _device(device).type == "cuda" else torch.float32
    pipe = StableDiffusionPipeline.from_pretrained(model, dtype=dtype).to(device)
    # Convolutions of half precision are fastest in this layout.
    for network in (pipe.unet, pipe.vae):
        network.to(memory_format=torch.channels_last)
    suffix = _picture_suffix(None if size == IMAGE_SIZE else size, dilated)
    suffix += f"_seed{first_seed}" if first_seed else ""
    path = output / f"scenes_levels{''.join(map(str, numbers))}{suffix}.json"
    rows = []
    for row in score_methods(
        pipe,
        methods.split(","),
        [sample_scene(seed) for seed in TEST_SEEDS[:pictures]],
        [sample_scene(seed) for seed in TEST_SEEDS[pictures : 2 * pictures]],
        Scorer(scorer).to(device),
        levels=numbers,
        calibration_prompts=_calibration_prompts(),
        num_inference_steps=steps,
        batch_size=batch,
        first_seed=first_seed,
        size=size,
        is_dilated=dilated,
        is_compiled=compiled,
    ):
        rows.append(row)
        print(scenes_table([row]).splitlines()[-1], flush=True)
        save_json(
            path,
            command=_command(),
            device=device,
            first_seed=first_seed,
            num_inference_steps=steps,
            dtype=str(dtype),
            size=size,
            scalecrafter=dilated,
            compiled=compiled,
            rows=rows,
        )
    print(scenes_table(rows))


@app.command("merge")
def merge_command(
    results: Annotated[list[Path], typer.Argument(help="Files of `scenes` with other seeds.")],
    output: Annotated[Path, typer.Option(help="The file to write.")],
) -> None:
    """Average results of `scenes` over seeds; ± becomes one standard error over these.

    Example: python -m eval merge scenes_levels0.json scenes_levels0_seed5000.json --output c.json
    """
    from eval.scenes import PROTOCOL, merge_runs, scenes_table

    documents = [json.loads(path.read_text()) for path in results]
    rows = merge_runs(documents)
    print(scenes_table(rows))
    protocol = {name: documents[0].get(name) for name in PROTOCOL}
    for document in documents:
        del document["rows"]
    save_json(output, command=_command(), device="cpu", **protocol, runs=documents, rows=rows)


@app.command("table")
def table_command(
    results: Annotated[
        list[Path], typer.Argument(help="Files of `scenes` or `merge`, and of `bench unet`.")
    ],
    name: Annotated[str, typer.Option(help="Of the file to write.")] = "table",
    output: Output = RESULTS,
) -> None:
    """Join quality and speed of every method in one table, of pictures of one or more sizes.

    A time of `bench unet` stands beside every row of the same configuration at the same levels.

    Example: python -m eval table merged.json merged_512.json bench_unet_1024_graph_cuda.json
    """
    from eval.table import build_table, quality_table

    table = build_table([read_result(path) for path in results])
    print(quality_table(table))
    save_json(output / f"{name}.json", command=_command(), device="cpu", **table)


@app.command("plot")
def plot_command(
    results: Annotated[
        list[Path],
        typer.Argument(
            help="Files of table, errors, analyse, training, bench kernels or bench unet."
        ),
    ],
    size: Annotated[
        int | None,
        typer.Option(help="Of the UNet step over whose time a table is shown, else its first."),
    ] = None,
) -> None:
    """Draw stored results again, each as the PNG beside its file; of a table, quality over time.

    Example: python -m eval plot eval/results/table.json --size 1024
    """
    for path in results:
        draw(path, size=size)


@app.command("errors")
def errors_command(
    methods: Methods = "M64P16C8,M64,M128,M192,M256,M4,value-projection",
    model: Model = MINI_SD,
    refined: Annotated[
        str, typer.Option(help="Numbers of refined parents for codebooks that name none.")
    ] = "0,4,8,16,32,64",
    pictures: Pictures = 16,
    timesteps: Annotated[int, typer.Option(min=1, help="Evenly spread time steps.")] = 8,
    levels: Levels = "0",
    kernels: Annotated[
        Path | None,
        typer.Option(
            help="File of `bench kernels`: adds its times of as many tokens as level 0 has."
        ),
    ] = None,
    device: Device = "cpu",
    output: Output = RESULTS,
) -> None:
    """Error of each layer and of the predicted noise against exact attention, by codebook size.

    Example: python -m eval errors --methods M64P16C8,runs/m64/codebooks,M192 --device cuda
    """
    from eval.errors import (
        add_kernel_times,
        elastic,
        errors_table,
        measure_errors,
        read_kernel_times,
    )
    from eval.methods import prepare_methods

    numbers = _numbers("--levels", levels)
    numbers_refined = _numbers("--refined", refined)
    pipe = StableDiffusionPipeline.from_pretrained(model).to(_device(device))
    num_tokens = pipe.unet.config.sample_size**2
    times = None if kernels is None else read_kernel_times(kernels, num_tokens)
    prepared = prepare_methods(
        pipe,
        methods.split(","),
        levels=numbers,
        calibration_prompts=_calibration_prompts(),
    )
    rows = measure_errors(
        pipe,
        elastic(prepared, numbers_refined),
        [sample_scene(seed) for seed in TEST_SEEDS[:pictures]],
        num_timesteps=timesteps,
    )
    if times is not None:
        add_kernel_times(rows, times)
    print(errors_table(rows))
    path = output / f"errors_levels{''.join(map(str, numbers))}.json"
    save_json(
        path,
        command=_command(),
        device=device,
        num_pictures=pictures,
        num_timesteps=timesteps,
        kernel_times=times and times._asdict(),
        rows=rows,
    )
    draw(path)


@app.command("analyse")
def analyse_command(
    names: Annotated[
        list[str], typer.Argument(help="Of heads, layers, utilisation, order, importance.")
    ],
    methods: Annotated[
        str | None,
        typer.Option(
            help="Comma-separated configurations to calibrate or folders of codebooks, as in "
            "`errors`; each analysis has its own default."
        ),
    ] = None,
    model: Model = MINI_SD,
    pictures: Pictures = 16,
    timesteps: Annotated[int, typer.Option(min=1, help="Evenly spread time steps.")] = 8,
    levels: Levels = "0,1",
    device: Device = "cpu",
    output: Output = RESULTS,
) -> None:
    """The paper's analyses of codebooks, each with a table and a plot.

    heads: capture of each head, as a heat map.

    layers: commitment loss and quantization error of each layer.

    utilisation: share of codewords in use, two-level against flat.

    order: query orders and sizes of query tiles.

    importance: tiled against exact.

    Elastic inference and accuracy against cost are `errors`.

    Example: python -m eval analyse heads layers --methods runs/m64/codebooks --device cuda
    """
    from eval.analyses import ANALYSES, analyse, check_methods
    from eval.methods import prepare_methods

    if unknown := [name for name in names if name not in ANALYSES]:
        raise ValueError(f"analyses are {', '.join(ANALYSES)}, but got {unknown[0]!r}.")
    numbers = _numbers("--levels", levels)
    pipe = StableDiffusionPipeline.from_pretrained(model).to(_device(device))
    chosen = {name: methods or ANALYSES[name].methods for name in names}
    prepared = {
        text: prepare_methods(
            pipe,
            text.split(","),
            levels=numbers,
            calibration_prompts=_calibration_prompts(),
        )
        for text in dict.fromkeys(chosen.values())
    }
    for name, text in chosen.items():
        check_methods(name, prepared[text])
    shown = [sample_scene(seed) for seed in TEST_SEEDS[:pictures]]
    for name, text in chosen.items():
        analysis = ANALYSES[name]
        rows = analyse(pipe, analysis, prepared[text], shown, num_timesteps=timesteps)
        path = output / f"{name}_levels{''.join(map(str, numbers))}.json"
        save_json(
            path,
            command=_command(),
            device=device,
            num_pictures=pictures,
            num_timesteps=timesteps,
            analysis=name,
            rows=rows,
        )
        print(analysis.table(rows))
        draw(path)


@app.command("ablate")
def ablate_command(
    config: Annotated[Path, typer.Option(help="YAML file of distill.")] = Path(
        "configs/mini_m64p16c8.yaml"
    ),
    runs: Annotated[Path, typer.Option(help="Folder of the runs.")] = Path("runs/ablation"),
    variants: Annotated[str, typer.Option(help="Comma-separated; all without it.")] = "",
    seeds: Annotated[str, typer.Option(help="Of the training.")] = "0",
    parallel: Annotated[int, typer.Option(min=1, help="Runs at a time.")] = 1,
    overrides: Annotated[list[str], typer.Option("--set", help="Of every run, key=value.")] = (),
    refined: Annotated[str, typer.Option(help="Numbers of refined parents to judge by.")] = "16",
    model: Model = MINI_SD,
    pictures: Pictures = 16,
    timesteps: Annotated[int, typer.Option(min=1, help="Evenly spread time steps.")] = 8,
    device: Device = "cpu",
    output: Output = RESULTS,
) -> None:
    """Train variants of a distillation and compare their errors against the teacher.

    Example: python -m eval ablate --seeds 0,1,2 --parallel 4 --set steps=1000 --device cuda
    """
    from eval.ablation import VARIANTS, ablation_rows, ablation_table, train_variants
    from eval.errors import elastic, measure_errors
    from eval.methods import prepare_methods

    trained = train_variants(
        config,
        runs,
        variants.split(",") if variants else list(VARIANTS),
        seeds=_numbers("--seeds", seeds),
        parallel=parallel,
        overrides=overrides,
    )
    pipe = StableDiffusionPipeline.from_pretrained(model).to(_device(device))
    names = {str(path): name for name, path in trained.items()}
    prepared = prepare_methods(pipe, list(names), levels=(0,), calibration_prompts=())
    errors = measure_errors(
        pipe,
        elastic(prepared, _numbers("--refined", refined)),
        [sample_scene(seed) for seed in TEST_SEEDS[:pictures]],
        num_timesteps=timesteps,
    )
    rows = ablation_rows(errors, names)
    print(ablation_table(rows))
    save_json(
        output / f"ablation_{config.stem}.json",
        command=_command(),
        device=device,
        config=config.name,
        overrides=list(overrides),
        num_pictures=pictures,
        num_timesteps=timesteps,
        rows=rows,
    )


@app.command("training")
def training_command(
    runs: Annotated[str, typer.Option(help="Comma-separated folders with a log.jsonl.")],
    name: Annotated[str, typer.Option(help="Of the files to write.")] = "training",
    points: Annotated[int, typer.Option(min=1, help="Most points of a curve that are kept.")] = 60,
    output: Output = RESULTS,
) -> None:
    """Plot losses, quantization error and active ratio of distillation runs over training.

    Example: python -m eval training --runs runs/m64p16c8,runs/m192
    """
    from eval.training import read_log, thin

    curves = {run: thin(read_log(Path(run)), points) for run in runs.split(",")}
    path = output / f"{name}.json"
    save_json(path, command=_command(), device="cpu", runs=curves)
    draw(path)


@app.command("faults")
def faults_command(
    kills: Annotated[int, typer.Option(min=1, help="Of every job.")] = 50,
    jobs: Annotated[
        str, typer.Option(help="Comma-separated: calibration, distillation, generation, scoring.")
    ] = "calibration,distillation,generation,scoring",
    seed: Annotated[int, typer.Option(help="Of the moments of kills.")] = 0,
    output: Output = RESULTS,
) -> None:
    """Kill the real commands at random moments, fill their disks, damage their files.

    Nothing half-written may count as whole, and what is run again must end in the same bytes. Runs
    on the CPU with a tiny model; the exit code is 1 if anything went wrong.

    Example: python -m eval faults --kills 50
    """
    from tempfile import TemporaryDirectory

    from eval.faults import failures_of, faults_table, run_faults

    with TemporaryDirectory() as place:
        killed, faults = run_faults(Path(place), jobs.split(","), kills=kills, seed=seed)
    print(faults_table(killed, faults))
    failures = failures_of([*killed, *faults])
    save_json(
        output / "faults_cpu.json",
        command=_command(),
        device="cpu",
        seed=seed,
        kills=killed,
        faults=faults,
        num_failures=len(failures),
    )
    for text in failures:
        print(f"failure: {text}", file=sys.stderr)
    if failures:
        raise typer.Exit(1)


@app.command("soak")
def soak_command(
    minutes: Annotated[float, typer.Option(min=0, help="Of cases, after the pictures.")] = 10,
    seed: Annotated[int, typer.Option(help="Of all cases.")] = 0,
    first: Annotated[int, typer.Option(min=0, help="Number of the first case.")] = 0,
    generations: Annotated[int, typer.Option(min=20, help="Pictures to see memory over.")] = 500,
    device: Device = "cpu",
    output: Output = RESULTS,
) -> None:
    """Random problems against the definition, damaged files, memory over pictures, threads.

    Kernels on cuda, PyTorch elsewhere. The exit code is 1 if anything went wrong.

    Example: python -m eval soak --minutes 12

    One case again: python -m eval soak --seed 0 --first 1234 --minutes 0 --generations 20
    """
    from eval.soak import soak, soak_table

    found = soak(
        minutes, device=_device(device), seed=seed, first_case=first, generations=generations
    )
    print(soak_table(found))
    name = torch.device(device).type
    save_json(output / f"soak_{name}.json", command=_command(), device=device, **found)
    for failure in found["failures"]:
        print(f"failure: {failure}", file=sys.stderr)
    if found["failures"]:
        raise typer.Exit(1)


@app.command("features")
def features_command(
    full_size: Annotated[
        bool, typer.Option("--full-size", help="Build UNets of the real sizes as well.")
    ] = False,
    output: Output = RESULTS,
) -> None:
    """Run the tests that show which features of diffusers work with AVQ, and write the table.

    On a machine with a GPU these are the tests that need one, and the GPU's column is written.

    Example: python -m eval features --full-size
    """
    from eval.features import run_features

    if not run_features(output, command=_command(), full_size=full_size):
        raise typer.Exit(1)


@coco_app.command("generate")
def coco_generate_command(
    folder: Annotated[Path, typer.Argument(help="Of the row's pictures, goes on if it has some.")],
    captions: Annotated[
        Path,
        typer.Option(
            help="LinFusion's captions.txt, one caption a line, or COCO's captions_val2014.json, "
            "of which captions are drawn."
        ),
    ],
    method: Annotated[
        str, typer.Option(help="exact, a configuration to calibrate, or a folder; as in `scenes`.")
    ] = "exact",
    model: Model = "stable-diffusion-v1-5/stable-diffusion-v1-5",
    pictures: Annotated[int, typer.Option(min=2, help="Number of captions.")] = 30_000,
    draw_seed: Annotated[int, typer.Option(help="Of the draw from annotations.")] = 0,
    size: Annotated[int, typer.Option(min=8, help="Side of the pictures.")] = 512,
    dilated: Dilated = False,
    steps: Annotated[int, typer.Option(min=2, help="Denoising steps of PNDM.")] = 25,
    guidance: Annotated[float, typer.Option(help="Guidance scale.")] = 7.5,
    levels: Levels = "0",
    calibration: Annotated[
        Path | None,
        typer.Option(help="Text file with prompts to calibrate on, else captions of scenes."),
    ] = None,
    batch: Annotated[
        int, typer.Option(min=1, help="Pictures a GPU makes at once; a CPU makes one.")
    ] = 8,
    device: Device = "cpu",
) -> None:
    """Make the pictures of one row: picture i has caption i and the noise of seed i.

    Run the same command again after a kill, on as many GPUs as there are now. The safety checker
    is off.

    Example: python -m eval coco generate runs/exact --captions captions.txt --device cuda

    On 8 GPUs: accelerate launch --num_processes 8 -m eval coco generate ... (the same options)
    """
    from eval.captions import read_captions
    from eval.coco import generate_folder

    generate_folder(
        folder,
        read_captions(captions, pictures, seed=draw_seed),
        model=model,
        method=method,
        levels=_numbers("--levels", levels),
        calibration_prompts=_prompts(calibration),
        size=size,
        is_dilated=dilated,
        num_inference_steps=steps,
        guidance_scale=guidance,
        batch_size=batch,
        device=_device(device),
        command=_command(),
    )


@coco_app.command("score")
def coco_score_command(
    folders: Annotated[list[Path], typer.Argument(help="Of `generate`, one a row.")],
    real: Annotated[Path, typer.Option(help="Folder of real pictures, such as coco/val2014.")],
    scorer: Annotated[
        str | None,
        typer.Option(help=f"Folder of a CLIP-style scorer, in place of both networks: {SCORER}"),
    ] = None,
    pictures: Annotated[
        int | None, typer.Option(min=2, help="Score the first ones only, for FID-5k.")
    ] = None,
    patches: Annotated[
        Path | None,
        typer.Option(
            help="Folder of pictures of at least the same size, real ones or those of exact "
            "attention: adds an FID of patches, which sees fine detail."
        ),
    ] = None,
    batch: Annotated[int, typer.Option(min=1, help="Pictures in a network at once.")] = 64,
    threads: Annotated[int, typer.Option(min=1, help="That read pictures.")] = 8,
    cache: Annotated[
        Path | None, typer.Option(help="Folder for features of real pictures.")
    ] = None,
    device: Device = "cpu",
    name: Annotated[str, typer.Option(help="Of the file to write.")] = "coco",
    output: Output = RESULTS,
) -> None:
    """FID, KID and CLIP score of folders of pictures, all made of the same captions.

    Example: python -m eval coco score runs/exact runs/m64 --real coco/val2014 --device cuda
    """
    from functools import partial

    from platformdirs import user_cache_path

    from eval.coco_score import (
        coco_table,
        load_networks,
        read_folders,
        score_folders,
        warnings_of,
    )

    chosen = read_folders(folders, pictures)
    scored, remarks = [], []
    for row in score_folders(
        chosen,
        real,
        partial(load_networks, scorer, _device(device)),
        batch_size=batch,
        threads=threads,
        cache=user_cache_path("avq-diffusers") / "features" if cache is None else cache,
        patches=patches,
    ):
        scored.append(row)
        found = warnings_of(chosen[0].config, row, scorer)
        remarks += [text for text in found if text not in remarks]
        save_json(
            output / f"{name}.json",
            command=_command(),
            device=device,
            generation=chosen[0].shared,
            made_with=[folder.manifest["environment"] for folder in chosen],
            remarks=remarks,
            rows=scored,
        )
    print(coco_table(scored))
    for text in remarks:
        print(f"warning: {text}", file=sys.stderr)


@coco_app.command("write")
def coco_write_command(
    folder: Annotated[Path, typer.Argument(help="Of the data set, made if need be.")],
    pictures: Annotated[int, typer.Option(min=1, help="Number of scenes.")] = 5000,
    first: Annotated[int, typer.Option(min=0, help="The first of mini-sd's test scenes.")] = 0,
    size: Annotated[int, typer.Option(help="Side of the pictures.")] = 256,
) -> None:
    """Write test scenes as a data set in COCO's format: images, annotations with captions.

    The captions are FOLDER/annotations/captions_scenes.json, the real pictures FOLDER/images.

    Example: python -m eval coco write runs/scenes --pictures 5000
    """
    write_coco(folder, pictures, first_seed=TEST_SEEDS[first], size=size)


def main() -> None:
    """Run the command; a mistake of the user's is one sentence and exit code 2."""
    try:
        app()
    except (ImportError, OSError, ValueError, TypeError) as error:
        print(f"eval: {error}", file=sys.stderr)
        sys.exit(2)


def _calibration_prompts() -> list[str]:
    return [sample_scene(seed).caption for seed in VALIDATION_SEEDS[:NUM_CALIBRATION_PROMPTS]]


def _picture_suffix(size: int | None, dilated: bool) -> str:
    """Of the name of a file on pictures that are not the model's usual ones."""
    return (f"_{size}" if size else "") + ("_scalecrafter" if dilated else "")


def _prompts(path: Path | None) -> list[str]:
    """The lines of a file of prompts, else those for calibration."""
    if path is None:
        return _calibration_prompts()
    prompts = [line.strip() for line in path.read_text(encoding="utf-8").splitlines()]
    if not all(prompts) or not prompts:
        raise ValueError(f"{path} must hold prompts, one a line, and no empty line.")
    return prompts


def _numbers(option: str, text: str) -> tuple[int, ...]:
    try:
        return tuple(int(number) for number in text.split(","))
    except ValueError:
        raise ValueError(f"{option} must be numbers such as 0 or 0,1, but got {text!r}.") from None


def _device(name: str) -> torch.device:
    """The device, if this machine has it."""
    try:
        return torch.empty(0, device=name).device
    except (AssertionError, RuntimeError) as error:
        raise ValueError(f"--device {name} cannot be used: {str(error).splitlines()[0]}") from None


def _command() -> str:
    """What was typed, but for where the results go: it is kept beside them."""
    arguments = list(sys.argv[1:])
    if "--output" in arguments:
        place = arguments.index("--output")
        del arguments[place : place + 2]
    return " ".join(["python -m eval", *arguments])


if __name__ == "__main__":
    main()
