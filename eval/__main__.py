"""`python -m eval`: benchmarks and quality tables, each written to a results folder."""

import sys
from pathlib import Path
from typing import Annotated

import torch
import typer
from diffusers import StableDiffusionPipeline

from avq_diffusers import AVQConfig
from avq_diffusers.mini import MINI_SD, SCORER, TEST_SEEDS, VALIDATION_SEEDS, sample_scene
from eval.bench import attention_rows, attention_table, bench_attention
from eval.report import RESULTS, save_json

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

Device = Annotated[str, typer.Option(help="cpu, cuda or mps.")]
Output = Annotated[Path, typer.Option(help="Folder the results are written to.")]
Methods = Annotated[
    str, typer.Option(help="Comma-separated: exact, value-projection, M64P16C8, M192, ...")
]
Levels = Annotated[str, typer.Option(help="UNet levels that change, as 0 or 0,1.")]
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
    quick: Annotated[bool, typer.Option("--quick", help="Fewer sizes and rounds.")] = False,
    output: Output = RESULTS,
) -> None:
    """Time the kernels: the paper's speed table, SD1.5's shapes, and how time scales.

    Example: python -m eval bench kernels --device cuda --parts table,sd15
    """
    from eval.kernels import run_kernels

    run_kernels(_device(device), output, command=_command(), parts=parts.split(","), quick=quick)


@bench_app.command("unet")
def bench_unet_command(
    device: Device = "cuda",
    sizes: Annotated[str, typer.Option(help="Sides of the picture.")] = "512,1024,2048",
    methods: Annotated[
        str,
        typer.Option(
            help="Comma-separated, the most important first: sdpa, fa2, limit, tome, M64P16C8, "
            "M64P16C8@0 (level 0 only), M64P16C8/fastest (default route)."
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
    """Time one denoising step of SD1.5's UNet, random weights, batch 2.

    Example: python -m eval bench unet --device cuda --sizes 1024 --modes graph
    """
    from eval.unet import METHODS, run_unet

    run_unet(
        _device(device),
        output,
        command=_command(),
        sizes=_numbers("--sizes", sizes),
        methods=methods.split(",") if methods else METHODS,
        modes=modes.split(","),
        minutes=minutes,
    )


@bench_app.command("counters")
def bench_counters_command(device: Device = "cuda", output: Output = RESULTS) -> None:
    """Read what limits each kernel from the GPU's counters, with Nsight Compute.

    Example: python -m eval bench counters --device cuda
    """
    from eval.counters import run_counters

    run_counters(_device(device), output, command=_command())


@app.command("compare")
def compare_command(
    methods: Methods = "M64P16C8,M192,M4,value-projection",
    model: Model = MINI_SD,
    prompts: Annotated[int, typer.Option(min=1, help="Prompts: captions of test scenes.")] = 8,
    seeds: Annotated[int, typer.Option(min=1, help="Seeds for every prompt.")] = 3,
    steps: Annotated[int, typer.Option(min=1, help="Denoising steps.")] = 25,
    levels: Levels = "0",
    device: Device = "cpu",
    output: Output = RESULTS,
) -> None:
    """Pictures of calibrated codebooks against exact attention at equal prompts and seeds.

    Example: python -m eval compare --methods M64P16C8,M192 --device cuda
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
    )
    print(compare_table(rows))
    name = f"compare_levels{''.join(map(str, numbers))}"
    save_json(
        output / f"{name}.json",
        command=_command(),
        device=device,
        prompts=chosen,
        num_seeds=seeds,
        num_inference_steps=steps,
        rows=rows,
    )
    compare_sheet(output / f"{name}.png", pictures, chosen)


@app.command("scenes")
def scenes_command(
    methods: Methods = "exact,M64P16C8,M192,M4,value-projection",
    model: Model = MINI_SD,
    scorer: Annotated[str, typer.Option(help="Folder of the CLIP-style scorer.")] = SCORER,
    pictures: Annotated[int, typer.Option(min=2, help="Pictures a method.")] = 5000,
    steps: Annotated[int, typer.Option(min=1, help="Denoising steps.")] = 25,
    levels: Levels = "0",
    device: Device = "cpu",
    output: Output = RESULTS,
) -> None:
    """FID, CLIP score and copy agreement on held-out scenes, with negative controls.

    Example: python -m eval scenes --pictures 5000 --device cuda
    """
    from eval.metrics import Scorer
    from eval.scenes import scenes_table, score_methods

    numbers = _numbers("--levels", levels)
    dtype = torch.float16 if _device(device).type == "cuda" else torch.float32
    pipe = StableDiffusionPipeline.from_pretrained(model, dtype=dtype).to(device)
    path = output / f"scenes_levels{''.join(map(str, numbers))}.json"
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
    ):
        rows.append(row)
        print(scenes_table([row]).splitlines()[-1], flush=True)
        save_json(
            path,
            command=_command(),
            device=device,
            num_inference_steps=steps,
            dtype=str(dtype),
            rows=rows,
        )
    print(scenes_table(rows))


def main() -> None:
    """Run the command; a mistake of the user's is one sentence and exit code 2."""
    try:
        app()
    except (OSError, ValueError, TypeError) as error:
        print(f"eval: {error}", file=sys.stderr)
        sys.exit(2)


def _calibration_prompts() -> list[str]:
    return [sample_scene(seed).caption for seed in VALIDATION_SEEDS[:NUM_CALIBRATION_PROMPTS]]


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
    return " ".join(["python -m eval", *sys.argv[1:]])


if __name__ == "__main__":
    main()
