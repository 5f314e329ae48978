"""Time one denoising step of a UNet, batch 2: `python -m eval bench unet`.

SD1.5 and SDXL have random weights, so nothing is downloaded; mini-sd has its own. Codebooks are
k-means of the UNet's keys. LinFusion runs as published, in every self-attention (arXiv
2409.02097), with random weights.

The limit is the fastest attention possible: at the two highest resolutions it keeps the projections
of self-attention and passes the values on. Rows of one size and mode are timed in turns. A row with
wrong output gets no time.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from diffusers import UNet2DConditionModel

from avq_diffusers import select_layers
from avq_diffusers.mini import MINI_SD
from eval.benchmarks.contenders import Row
from eval.benchmarks.step import BATCH, Model, StepBench
from eval.benchmarks.step_rows import (
    MODES,
    MODES_WITHOUT_GRAPHS,
    plot_steps,
    result_path,
    step_rows,
)
from eval.benchmarks.unet_configs import POOLED_TEXT, SD15, SDXL
from eval.names import EXACT, FA2, LEVELS, LIMIT, LINFUSION, PEERS, timed_method
from eval.store.markdown import markdown_table, number
from eval.store.report import save_json

# The ones a ratio needs first, so that a run that is cut off has them.
METHODS = (
    EXACT,
    LIMIT,
    "M64P16C8/own",
    "M64P16C8",
    "M64P16C8/fastest",
    "M64P16C8/tuned",
    "M64P16C8@L0",
    "M32P8C8",
    "M128P32C8",
    "M136@L0",  # flat VQ of M64P16C8's kernel time
    FA2,
    "tome",
    "tome@L01",
    LINFUSION,
)
# SDXL has no attention at level 0.
SDXL_LEVELS = (1, 2)
SDXL_METHODS = (
    EXACT,
    LIMIT,
    "M64P16C8@L12/own",
    "M64P16C8@L12",
    "M64P16C8@L1",
    "M64P16C8@L12/fastest",
    FA2,
    "tome@L1",
    "tome@L12",
    LINFUSION,
)


def random_unet(
    config: Mapping[str, Any], levels: Sequence[int], device: torch.device
) -> UNet2DConditionModel:
    """A UNet with random weights."""
    torch.manual_seed(0)
    with device:
        unet = UNet2DConditionModel(**config)
    # Untrained keys and queries make attention an average. With these its logits vary by about 1.
    # If they vary more, rounding decides which parents of such keys are refined: no check holds.
    with torch.no_grad():
        for layer in select_layers(unet, levels):
            layer.attn.to_q.weight.mul_(2)
            layer.attn.to_k.weight.mul_(2)
    return unet


def mini_unet(device: torch.device) -> UNet2DConditionModel:
    """mini-sd's UNet."""
    return UNet2DConditionModel.from_pretrained(MINI_SD, subfolder="unet").to(device)


TINY = {
    "sample_size": 64,
    "cross_attention_dim": 32,
    "block_out_channels": (16, 32, 64, 64),
    "norm_num_groups": 8,
    "attention_head_dim": 2,  # the number of heads, by diffusers' name for it
}
TINY_SDXL = {
    **SDXL,
    "sample_size": 32,
    "block_out_channels": (16, 32, 64),
    "norm_num_groups": 8,
    "transformer_layers_per_block": (1, 1, 2),
    "attention_head_dim": 2,
    "cross_attention_dim": 32,
    "addition_time_embed_dim": 8,
    "projection_class_embeddings_input_dim": POOLED_TEXT + 6 * 8,
}
SD15_MODEL = Model(
    unet="SD1.5, random weights",
    build=partial(random_unet, SD15, LEVELS),
    latent_scale=8,
    sizes=(512, 1024, 2048),
    stem="bench_unet",
    methods=METHODS,
)
SDXL_MODEL = Model(
    unet="SDXL, random weights",
    build=partial(random_unet, SDXL, SDXL_LEVELS),
    latent_scale=8,
    sizes=(1024, 2048),
    stem="bench_unet_sdxl",
    methods=SDXL_METHODS,
    levels=SDXL_LEVELS,
)
MINI_MODEL = Model(
    unet="mini-sd",
    build=mini_unet,
    latent_scale=4,
    sizes=(256, 512),
    stem="bench_unet_mini",
    methods=METHODS,
)
MODELS = {"sd15": SD15_MODEL, "sdxl": SDXL_MODEL, "mini-sd": MINI_MODEL}
# What stands for a model off CUDA.
TINY_MODELS = {
    "sd15": replace(
        SD15_MODEL, unet="tiny, random weights", build=partial(random_unet, TINY, LEVELS)
    ),
    "sdxl": replace(
        SDXL_MODEL,
        unet="tiny SDXL, random weights",
        build=partial(random_unet, TINY_SDXL, SDXL_LEVELS),
    ),
}


def run_unet(
    device: torch.device,
    output: Path,
    *,
    command: str,
    model: str = "sd15",
    sizes: Sequence[int] | None = None,
    methods: Sequence[str] | None = None,
    modes: Sequence[str] = tuple(MODES),
    minutes: float | None = None,
) -> None:
    """Time the steps, print tables, and write one JSON file per size and mode, one plot per size.

    The file is rewritten after every row. Off CUDA, tiny UNets take the place of SD1.5's and
    SDXL's.

    Args:
        device: where the UNet runs.
        output: folder of the results.
        command: command line to store.
        model: one of `MODELS`.
        sizes: sides of the images; None takes the model's.
        methods: methods, the most important first; None takes the model's.
        modes: `"graph"`, `"compile"`, `"eager"`.
        minutes: no row starts after this time.

    Raises:
        ValueError: a model, method, mode or size is unknown or impossible.
    """
    if model not in MODELS:
        raise ValueError(f"--model must be one of {', '.join(MODELS)}, but got {model!r}.")
    chosen = MODELS[model]
    methods = chosen.methods if methods is None else methods
    check_choices(chosen, methods, modes)
    sizes = chosen.sizes if sizes is None else sizes
    for side in sizes:
        if side < 64 or side % 64:
            raise ValueError(f"--sizes must be multiples of 64, but got {side}.")
    deadline = None if minutes is None else perf_counter() + 60 * minutes
    cuda = device.type == "cuda"
    labels = MODES if cuda else MODES_WITHOUT_GRAPHS
    if not cuda:
        chosen = TINY_MODELS.get(model, chosen)
        print(f"{device.type}: {chosen.unet}; without CUDA graphs and FA2")
    bench = StepBench(chosen, device)
    for side in sizes:
        for mode in modes:
            rows: list[Row] = []
            for rows in step_rows(bench, side, mode, methods=methods, deadline=deadline):
                save_json(
                    result_path(output, chosen.stem, side, mode, device),
                    command=command,
                    device=device,
                    unet=chosen.unet,
                    dtype=str(bench.dtype).removeprefix("torch."),
                    batch=BATCH,
                    backend=bench.backend,
                    mode=labels[mode],
                    rows=rows,
                )
            print(unet_table(rows, labels), flush=True)
        plot_unet(output, chosen.stem, side, device, labels)


def unet_table(rows: Sequence[Row], modes: Mapping[str, str]) -> str:
    """The rows as Markdown."""
    return markdown_table(
        ["size", "mode", "method", "ms", "/ limit", "/ SDPA", "peak MiB", "error", "note"],
        (
            [
                str(row["size"]),
                modes[row["mode"]],
                row["label"],
                number(row["ms"]),
                number(row["over_limit"], ".3f"),
                number(row["over_sdpa"], ".3f"),
                number(row.get("peak_mib"), ".0f"),
                number(row.get("error"), ".1e"),
                row.get("note", ""),
            ]
            for row in rows
        ),
    )


def plot_unet(
    output: Path, stem: str, side: int, device: torch.device, modes: Mapping[str, str]
) -> None:
    """Plot the times of one size as bars, one panel per mode with a result in the folder."""
    plot_steps(output, stem, side, device, modes, "UNet step at {side} x {side} ({unet})")


def check_choices(model: Model, methods: Sequence[str], modes: Sequence[str]) -> None:
    """Refuse unknown methods and modes, and levels that the model lacks.

    Raises:
        ValueError: there is one.
    """
    for mode in modes:
        if mode not in MODES:
            raise ValueError(f"modes must be {', '.join(MODES)}, but got {mode!r}.")
    for name in methods:
        method = timed_method(name)
        if method.source in PEERS:
            raise ValueError(f"methods: {name} is timed by bench transformer only.")
        config = method.config
        if config is not None and not set(config.levels) <= set(model.levels):
            raise ValueError(
                f"the levels of {model.unet} are {', '.join(map(str, model.levels))}, but {name} "
                f"changes {', '.join(map(str, config.levels))}."
            )
