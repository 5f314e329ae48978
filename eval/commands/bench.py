"""`python -m eval bench`: speed against exact attention."""

from pathlib import Path
from typing import Annotated

import typer

from avq_diffusers.options import device_of, numbers_of
from eval.commands.options import Device, Output, command_line, dtype_name
from eval.store.report import RESULTS, save_json

app = typer.Typer(no_args_is_help=True, help="Speed against exact attention.")


@app.command("attention")
def bench_attention_command(
    device: Device = "cpu",
    tokens: Annotated[str, typer.Option(help="Token counts.")] = "1024,4096,16384,65536",
    config: Annotated[str, typer.Option(help="Codebook sizes.")] = "M64P16C8",
    dtype: Annotated[
        str, typer.Option(callback=dtype_name, help="float32, float16 or bfloat16.")
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

    from avq_diffusers import AVQConfig
    from eval.benchmarks.attention import attention_table, bench_attention

    chosen = AVQConfig.parse(config)
    rows = bench_attention(
        numbers_of("--tokens", tokens),
        config=chosen,
        device=device_of(device),
        dtype=getattr(torch, dtype),
        batch=batch,
        num_heads=heads,
        head_dim=head_dim,
    )
    print(f"{chosen}, B{batch} H{heads} D{head_dim}, {dtype}, {device}")
    print(attention_table(rows))
    save_json(
        output / f"bench_attention_{torch.device(device).type}.json",
        command=command_line(),
        device=device,
        config=str(chosen),
        shape={"batch": batch, "heads": heads, "head_dim": head_dim, "dtype": dtype},
        rows=rows,
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

    All but the last also have rows of codewords from the call's own keys.

    Example: python -m eval bench kernels --device cuda --parts table,sd15
    """
    from eval.benchmarks.kernels import run_kernels

    run_kernels(device_of(device), output, command=command_line(), parts=parts.split(","))


@app.command("gradients")
def bench_gradients_command(device: Device = "cuda", output: Output = RESULTS) -> None:
    """Time attention with its gradients, as in training, against exact attention.

    Half precision on a GPU; a CPU times one small size in float32.

    Example: python -m eval bench gradients --device cuda
    """
    import torch

    from avq_diffusers import AVQConfig
    from eval.benchmarks import gradients

    chosen = device_of(device)
    is_cuda = chosen.type == "cuda"
    rows = gradients.bench_gradients(
        gradients.SHAPES if is_cuda else gradients.SMALL,
        configs=[AVQConfig.parse(config) for config in gradients.CONFIGS],
        device=chosen,
        dtype=torch.float16 if is_cuda else torch.float32,
    )
    print(gradients.gradients_table(rows))
    save_json(
        output / f"bench_gradients_{chosen.type}.json",
        command=command_line(),
        device=device,
        rows=rows,
    )


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

    Of SDXL: python -m eval bench unet --model sdxl --device cuda --modes graph
    """
    from eval.benchmarks.unet import run_unet

    run_unet(
        device_of(device),
        output,
        command=command_line(),
        model=model,
        sizes=numbers_of("--sizes", sizes) if sizes else None,
        methods=methods.split(",") if methods else None,
        modes=modes.split(","),
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
    modes: Annotated[str, typer.Option(help="Comma-separated: graph, compile, eager.")] = (
        "compile,graph,eager"
    ),
    whole: Annotated[
        bool,
        typer.Option("--whole", help="Time all blocks; otherwise a part, multiplied to all."),
    ] = False,
    seconds: Annotated[float, typer.Option(help="Of steps per row; the second half counts.")] = 4.0,
    minutes: Annotated[
        float | None, typer.Option(help="Start no row after this many minutes.")
    ] = None,
    output: Output = RESULTS,
) -> None:
    """Time one denoising step of a transformer, in bf16.

    Example: python -m eval bench transformer --model flux --device cuda --modes compile
    """
    from eval.benchmarks.transformer import METHODS, run_transformer

    run_transformer(
        device_of(device),
        output,
        command=command_line(),
        model=model,
        sizes=numbers_of("--sizes", sizes) if sizes else None,
        methods=methods.split(",") if methods else METHODS,
        modes=modes.split(","),
        whole=whole,
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

    run_distillation(
        config,
        output,
        command=command_line(),
        model=model,
        image_size=size,
        batches=numbers_of("--batches", batches),
        gpus=numbers_of("--gpus", gpus),
        attentions=attentions.split(","),
        rounds=rounds,
        overrides=overrides,
    )
