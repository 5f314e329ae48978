"""`python -m eval bench`: speed against exact attention."""

from itertools import product
from pathlib import Path
from typing import Annotated

import typer

from avq_diffusers.options import device_of, numbers_of
from eval.commands.options import Device, Output, command_line, dtype_name
from eval.store.report import RESULTS

app = typer.Typer(no_args_is_help=True, help="Speed against exact attention.")

Modes = Annotated[str, typer.Option(help="Comma-separated: graph, compile, eager.")]
Seconds = Annotated[float, typer.Option(help="Of steps per row; the second half counts.")]
Minutes = Annotated[float | None, typer.Option(help="Start no row after this many minutes.")]


@app.command("attention")
def bench_attention_command(
    device: Device = "cpu",
    tokens: Annotated[str, typer.Option(help="Token counts.")] = "1024,4096,16384,65536",
    config: Annotated[str, typer.Option(help="Codebook sizes.")] = "M64P16C8",
    dtype: Annotated[
        str, typer.Option(callback=dtype_name, help="Of a GPU: float32, float16 or bfloat16.")
    ] = "float32",
    batch: int = 2,
    heads: int = 8,
    head_dim: int = 40,
    output: Output = RESULTS,
) -> None:
    """Time AVQ attention (precompute included) against scaled_dot_product_attention.

    Codewords are stored ones and, beside them, those of the call's own keys.

    Example: python -m eval bench attention --device cpu
    """
    import torch

    from eval.benchmarks.contenders import Bench
    from eval.benchmarks.inputs import Shape
    from eval.benchmarks.kernels import run_part
    from eval.benchmarks.parts import Sizes
    from eval.benchmarks.timing import Effort

    shapes = [Shape(batch, heads, n, head_dim) for n in numbers_of("--tokens", tokens)]
    bench = Bench(device_of(device), Effort(block_ms=300), getattr(torch, dtype))
    run_part(
        "attention",
        bench,
        {"attention": Sizes(shapes, (config, f"{config}/own"))},
        output / f"bench_attention_{bench.device.type}.json",
        command=command_line(),
    )


@app.command("kernels")
def bench_kernels_command(
    device: Device = "cuda",
    parts: Annotated[
        str, typer.Option(help="Comma-separated: table, sd15, joint, scaling.")
    ] = "table,sd15,joint,scaling",
    output: Output = RESULTS,
) -> None:
    """Time the kernels: the paper's speed table, SD1.5's shapes, Flux's, and how time scales.

    All but the last also have rows of codewords from the call's own keys. Off CUDA, sizes are tiny.

    Example: python -m eval bench kernels --device cuda --parts table,sd15
    """
    from eval.benchmarks.parts import KERNEL_PARTS

    for part in (names := parts.split(",")):
        if part not in KERNEL_PARTS:
            raise ValueError(
                f"--parts must be some of {', '.join(KERNEL_PARTS)}, but got {part!r}."
            )
    for part in names:
        _run_sized(part, f"bench_kernels_{part}", device, output)


@app.command("gradients")
def bench_gradients_command(device: Device = "cuda", output: Output = RESULTS) -> None:
    """Time attention with its gradients, as in training, against exact attention.

    Half precision on a GPU; a CPU times one small size in float32.

    Example: python -m eval bench gradients --device cuda
    """
    _run_sized("gradients", "bench_gradients", device, output)


def _run_sized(part: str, name: str, device: str, output: Path) -> None:
    """A part at its own sizes."""
    from eval.benchmarks.contenders import Bench
    from eval.benchmarks.kernels import run_part
    from eval.benchmarks.parts import FULL, TINY
    from eval.benchmarks.timing import Effort
    from eval.commands.stored import draw

    chosen = device_of(device)
    is_cuda = chosen.type == "cuda"
    effort = Effort() if is_cuda else Effort(rounds=2, block_ms=1.0, eager_rounds=2)
    path = output / f"{name}_{chosen.type}.json"
    bench = Bench(chosen, effort)
    run_part(part, bench, FULL if is_cuda else TINY, path, command=command_line())
    if part != "gradients":
        draw(path)


@app.command("unet")
def bench_unet_command(
    device: Device = "cuda",
    model: Annotated[
        str,
        typer.Option(
            help="Whose UNet: sd15 or sdxl, with random weights, or mini-sd, with its own."
        ),
    ] = "sd15",
    sizes: Annotated[
        str,
        typer.Option(help="Sides of the image, else from the training size on, as 512,1024,2048."),
    ] = "",
    methods: Annotated[
        str,
        typer.Option(
            help="Comma-separated, the most important first: exact, fa2, limit, tome, "
            "tome@L01 (levels 0 and 1), linfusion, M64P16C8, M64P16C8/own (codewords from the "
            "call's own keys), M64P16C8/means (mean keys), M64P16C8@L0 (level 0 only), "
            "for sdxl M64P16C8@L12 (levels 1 and 2), "
            "M64P16C8-up_blocks.2 (that block exact), M64P16C8/fastest (default route), "
            "M64P16C8/tuned (with changes of projections)."
        ),
    ] = "",
    modes: Modes = "graph,compile,eager",
    seconds: Seconds = 4.0,
    minutes: Minutes = None,
    output: Output = RESULTS,
) -> None:
    """Time one denoising step of a UNet, batch 2.

    Example: python -m eval bench unet --device cuda --sizes 1024 --modes graph

    Of SDXL: python -m eval bench unet --model sdxl --device cuda --modes graph
    """
    from eval.benchmarks.models import UNETS
    from eval.benchmarks.step import run_steps

    run_steps(
        UNETS,
        device_of(device),
        output,
        command=command_line(),
        model=model,
        sizes=numbers_of("--sizes", sizes) if sizes else None,
        methods=methods.split(",") if methods else None,
        modes=modes.split(","),
        seconds=seconds,
        minutes=minutes,
    )


@app.command("transformer")
def bench_transformer_command(
    device: Device = "cuda",
    model: Annotated[
        str, typer.Option(help="sd35-medium, sd35-large, flux or wan, with random weights.")
    ] = "sd35-medium",
    sizes: Annotated[
        str,
        typer.Option(
            help="Sides of the image, else 1024,2048,4096; of wan lines of the video, 480,720."
        ),
    ] = "",
    methods: Annotated[
        str,
        typer.Option(
            help="Comma-separated, the most important first: exact, cudnn, fa2, limit, "
            "M64P16C8/own (codewords from the call's own keys), M64P16C8E256/own (and 256 exact "
            "keys), M64P16C8/fastest (default route), pisa@.15, pisa0@.15, sol@1.3 (peers, by "
            "their own kernels)."
        ),
    ] = "",
    modes: Modes = "compile,graph,eager",
    seconds: Seconds = 4.0,
    minutes: Minutes = None,
    output: Output = RESULTS,
) -> None:
    """Time one denoising step of a transformer, in bf16.

    Example: python -m eval bench transformer --model flux --device cuda --modes compile
    """
    from eval.benchmarks.models import TRANSFORMERS
    from eval.benchmarks.step import run_steps

    run_steps(
        TRANSFORMERS,
        device_of(device),
        output,
        command=command_line(),
        model=model,
        sizes=numbers_of("--sizes", sizes) if sizes else None,
        methods=methods.split(",") if methods else None,
        modes=modes.split(","),
        seconds=seconds,
        minutes=minutes,
    )


@app.command("distill")
def bench_distill_command(
    config: Annotated[Path, typer.Option(help="YAML file of the run that is timed.")] = Path(
        "configs/sd15_m64p16c8.yaml"
    ),
    model: Annotated[
        Path | None, typer.Option(help="Folder of a model; SD1.5 with random weights without it.")
    ] = None,
    size: Annotated[int, typer.Option(help="Side of the images.")] = 512,
    batches: Annotated[str, typer.Option(help="Images per GPU and step.")] = "4,8,12",
    gpus: Annotated[str, typer.Option(help="Numbers of GPUs.")] = "1",
    attentions: Annotated[
        str, typer.Option(help="Students: exact, avq, linfusion.")
    ] = "exact,avq,linfusion",
    rounds: Annotated[
        int, typer.Option(min=1, help="Runs of every row, in turns, for a host of varying speed.")
    ] = 1,
    overrides: Annotated[list[str], typer.Option("--set", help="Of the run, key=value.")] = (),
    output: Output = RESULTS,
) -> None:
    """Time the training step at SD1.5's size, by short runs of the real command.

    Example: python -m eval bench distill --gpus 1,2 --batches 12 --attentions avq
    """
    from eval.benchmarks.distillation import run_distillation

    numbers = numbers_of("--gpus", gpus), numbers_of("--batches", batches)
    run_distillation(
        config,
        output,
        command=command_line(),
        model=model,
        image_size=size,
        cases=list(product(*numbers, attentions.split(","))),
        rounds=rounds,
        overrides=overrides,
    )
