"""`python -m eval bench`: speed against exact attention."""

from dataclasses import replace
from itertools import product
from typing import Annotated

import typer

from avq_diffusers.files import write_text
from avq_diffusers.options import device_of, dtype_name, finite, numbers_of
from eval.commands.options import Device, Output, names_of, some_of
from eval.store.report import RESULTS, read_result

app = typer.Typer(no_args_is_help=True, help="Speed against exact attention.")


@app.command("attention")
def bench_attention_command(
    device: Device = None,
    tokens: Annotated[str, typer.Option(help="Token counts.")] = "1024,4096,16384,65536",
    config: Annotated[str, typer.Option(help="Codebook sizes.")] = "M64P16C8",
    dtype: Annotated[
        str, typer.Option(callback=dtype_name, help="On a GPU: float32, float16 or bfloat16.")
    ] = "float32",
    batch: Annotated[int, typer.Option(min=1, help="Batch size.")] = 2,
    heads: Annotated[int, typer.Option(min=1, help="Heads.")] = 8,
    head_dim: Annotated[int, typer.Option(min=1, help="Head dim.")] = 40,
    output: Output = RESULTS,
) -> None:
    """Time AVQ attention (precompute included) against scaled_dot_product_attention.

    Both with stored codewords and with codewords from the call's own keys.

    Example: python -m eval bench attention --device cpu
    """
    import torch

    from avq_diffusers import AVQConfig
    from eval.benchmarks.contenders import Bench
    from eval.benchmarks.inputs import Shape
    from eval.benchmarks.kernels import run_part
    from eval.benchmarks.parts import Sizes
    from eval.benchmarks.timing import Effort

    sizes = AVQConfig.parse(config)
    methods = [str(replace(sizes, codewords=form)) for form in ("stored", "means")]
    shapes = [Shape(batch, heads, n, head_dim) for n in numbers_of("--tokens", tokens)]
    bench = Bench(device_of(device), Effort(block_ms=300), getattr(torch, dtype))
    run_part(
        "attention",
        bench,
        {"attention": Sizes(shapes, methods)},
        output / f"bench_attention_{bench.device.type}.json",
    )


@app.command("kernels")
def bench_kernels_command(
    device: Device = None,
    parts: Annotated[
        str, typer.Option(help="Comma-separated: table, sd15, joint, gradients.")
    ] = "table,sd15,joint",
    output: Output = RESULTS,
) -> None:
    """Time the kernels: the paper's speed table, SD1.5's shapes, Flux's, and with gradients.

    All have rows with codewords from the call's own keys, table and sd15 with stored ones, too.
    Without CUDA, sizes are tiny.

    Example: python -m eval bench kernels --parts table,sd15
    """
    from eval.benchmarks.contenders import Bench
    from eval.benchmarks.kernels import run_part
    from eval.benchmarks.parts import FULL, KERNEL_PARTS, TINY
    from eval.benchmarks.timing import Effort

    chosen = device_of(device)
    is_cuda = chosen.type == "cuda"
    effort = Effort() if is_cuda else Effort(rounds=2, block_ms=1.0, eager_rounds=2)
    for part in some_of("--parts", parts, KERNEL_PARTS):
        path = output / f"bench_kernels_{part}_{chosen.type}.json"
        run_part(part, Bench(chosen, effort), FULL if is_cuda else TINY, path)


@app.command("variants")
def bench_variants_command(
    dtype: Annotated[str, typer.Option(callback=dtype_name, help="Dtype of tokens.")] = "float16",
    capabilities: Annotated[
        str, typer.Option(help="Compute capabilities: 80, 86, 89, 90, 100, 120.")
    ] = "80,86,89,90,100,120",
    head_dims: Annotated[str, typer.Option(help="Head dims.")] = "40,64,80,128",
    methods: Annotated[
        str, typer.Option(help="Configurations, with own codewords or /stored.")
    ] = "M64P16C8/stored,M64P16C8,M64C8T1e-4",
    sinks: Annotated[str, typer.Option(help="Numbers of sink keys.")] = "0,333",
    output: Output = RESULTS,
) -> None:
    """Compile every kernel for GPUs that are not present: registers, spills and shared memory.

    Also writes variants.md, from the results of all dtypes in the folder. Compiling takes an hour
    on one core; if it is killed, the same command continues where it stopped.

    Example: python -m eval bench variants --dtype bfloat16 --capabilities 90 --head-dims 64
    """
    import torch

    from eval.benchmarks.variants import MOST_SHARED, KernelCase, variant_rows, variants_page
    from eval.store.report import save_json

    targets = map(int, some_of("--capabilities", capabilities, [*map(str, MOST_SHARED)]))
    dims, numbers = numbers_of("--head-dims", head_dims), numbers_of("--sinks", sinks)
    if min(dims) < 1:
        raise ValueError(f"--head-dims must be at least 1, but got {min(dims)}.")
    calls = product(targets, [getattr(torch, dtype)], dims, names_of(methods), numbers)
    cases = [KernelCase(*call) for call in calls]
    if not any(case.is_served for case in cases):
        raise ValueError(
            f"--head-dims {head_dims} must be smaller for --dtype {dtype} and --capabilities "
            f"{capabilities}: the kernels serve none of these calls."
        )
    rows = variant_rows(cases)
    path = output / f"bench_variants_{dtype}.json"
    save_json(path, device="cpu", rows=rows)
    page = variants_page([read_result(x) for x in sorted(output.glob("bench_variants_*"))])
    write_text(output / "variants.md", page)
    print(page)


@app.command("steps")
def bench_steps_command(
    device: Device = None,
    models: Annotated[
        str,
        typer.Option(
            help="Comma-separated, the most important first, with or without a size: sd15, sdxl, "
            "sd35-medium, flux, wan, minimax-h3. Sizes are sides of images, or lines or frames of "
            "videos."
        ),
    ] = "sd15@1024,sdxl@1024,sdxl@2048,sd35-medium@1024,sd35-medium@2048,flux@1024,flux@2048,"
    "sd15@512,sd15@2048,wan@480",
    runs: Annotated[str, typer.Option(help="Comma-separated: eager, compiled.")] = "eager,compiled",
    methods: Annotated[
        str,
        typer.Option(
            help="Comma-separated: exact, avq (the default), limit, M64P16C8. For a UNet "
            "also tome, tome@L01, linfusion, or a folder of codebooks; for a transformer "
            "pisa@.15, sol@1.3. eval/methods explains them."
        ),
    ] = "exact,avq,limit",
    window: Annotated[
        float,
        typer.Option(callback=finite, help="Seconds of steps per row; the second half counts."),
    ] = 2.0,
    seconds: Annotated[
        float | None,
        typer.Option(help="Start no row after this time; the same command continues there."),
    ] = None,
    output: Output = RESULTS,
) -> None:
    """Time denoising steps with exact attention and with `apply_avq(pipe)`.

    Networks have random weights and the thresholds that give AVQ the columns of trained ones.
    Without CUDA they are tiny.

    Example: python -m eval bench steps --models sd15@1024,flux@2048 --seconds 300
    """
    from eval.benchmarks.steps import RUNS, cases_of, run_steps

    cases = cases_of(models, some_of("--runs", runs, RUNS), names_of(methods))
    chosen = device_of(device)
    path = output / f"bench_steps_{chosen.type}.json"
    run_steps(cases, chosen, path, window=window, seconds=seconds)


@app.command("parallel")
def bench_parallel_command(
    device: Device = None,
    models: Annotated[
        str, typer.Option(help="Comma-separated: wan, minimax-h3, with random weights.")
    ] = "wan,minimax-h3",
    output: Output = RESULTS,
) -> None:
    """Time one block of a video transformer on one GPU, and on all by Ulysses context parallelism.

    Wan 14B at 720 lines and MiniMax-H3 at 345 frames, in bf16; without CUDA, tiny ones. Start one
    process per GPU with torchrun.

    Example: torchrun --nproc-per-node 2 -m eval bench parallel
    """
    from eval.benchmarks.parallel import SIDES, run_parallel

    names = some_of("--models", models, SIDES)
    kind = device_of(device).type
    if kind not in ("cpu", "cuda"):
        raise ValueError(f"--device must be cpu or cuda, but got {kind}.")
    run_parallel(names, kind, output)
