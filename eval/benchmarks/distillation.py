"""Speed and memory of a training step at SD1.5's size: `python -m eval bench distill`.

Each row is measured by short runs of the real command, on encoded scenes. SD1.5 has random weights
unless a model is given. The rows with exact attention come first: the same step without AVQ. If the
UNets are not compiled, small batches wait for the host, whose speed varies: use several rounds.
"""

import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product
from operator import itemgetter
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import torch
from diffusers import AutoencoderKL, StableDiffusionPipeline, UNet2DConditionModel
from tqdm import tqdm
from transformers import CLIPTextConfig, CLIPTextModel

from avq_diffusers.mini import MINI_SD
from eval.benchmarks.models import SD15
from eval.store.markdown import figure, rows_table
from eval.store.report import save_json

STEPS, LOG_EVERY, WARMUP_LINES = 100, 10, 3
VAE = {
    "block_out_channels": (128, 256, 512, 512),
    "down_block_types": ("DownEncoderBlock2D",) * 4,
    "up_block_types": ("UpDecoderBlock2D",) * 4,
    "layers_per_block": 2,
    "sample_size": 512,
}
TEXT = {
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_attention_heads": 12,
    "projection_dim": 768,
}
SETTINGS = {
    "variant": "null",
    "checkpoint_every": "null",
    "tracker": "null",
    "samples": "{every: null, prompts: [x], num_inference_steps: 1, guidance_scale: 1}",
}
DATA = {
    "source": "scenes",
    **dict.fromkeys(("path", "split", "image_column", "caption_column", "captions")),
    "num_samples": 512,
    "preprocessing": "crop",
    "workers": 4,
}


COLUMNS = {
    "GPUs": lambda row: str(row["gpus"]),
    "student": itemgetter("attention"),
    "images per GPU": lambda row: str(row["batch_per_gpu"]),
    "samples/s": figure("samples_per_second", ".3g"),
    "step / exact": figure("step_over_exact", ".3g"),
    "x one GPU": figure("speedup_over_one_gpu", ".3g"),
    "peak GiB": figure("peak_memory_gib", ".3g"),
}


@dataclass(frozen=True)
class Run:
    """The training run whose steps are timed.

    Attributes:
        config: YAML file for `distill`.
        model: folder of a Stable Diffusion model; None builds SD1.5 with random weights.
        image_size: side of the images in pixels.
        overrides: other `--set` options for `distill`.
    """

    config: Path
    model: Path | None
    image_size: int
    overrides: Sequence[str]


def run_distillation(
    run: Run, cases: Sequence[tuple[int, int, str]], rounds: int, output: Path
) -> None:
    """Time the steps, print a table, and write a JSON file after every run.

    Args:
        run: the training run.
        cases: number of processes, images per GPU and step, and the student's attention.
        rounds: runs per case, in turns. The speed is the median over the windows of all runs.
        output: folder for the result.
    """
    device = "cuda" if torch.cuda.is_available() else "cpu"
    with TemporaryDirectory() as scratch:
        folder = Path(scratch)
        if run.model is None:
            run = replace(run, model=folder / "sd15")
            random_sd15().save_pretrained(run.model)
        rows = [{"gpus": g, "attention": a, "batch_per_gpu": b} for g, b, a in cases]
        for turn, row in tqdm(list(product(range(rounds), rows)), desc="runs"):
            if "note" in row:
                continue
            try:
                found = _run(run, row, folder, f"{rows.index(row)}-{turn}")
            except subprocess.CalledProcessError as error:
                row["note"] = last_error(error.stderr)
            else:
                row["windows"] = row.get("windows", []) + found.pop("windows")
                row |= found | {"samples_per_second": median(row["windows"])}
            save_json(
                output / f"bench_distill_{device}.json",
                device=device,
                config=run.config.name,
                image_size=run.image_size,
                steps=STEPS,
                rows=with_ratios(rows),
            )
    print(distillation_table(with_ratios(rows)))


def random_sd15() -> StableDiffusionPipeline:
    """SD1.5's configuration with random weights, and mini-sd's tokenizer."""
    torch.manual_seed(0)
    return StableDiffusionPipeline.from_pretrained(
        MINI_SD,
        unet=UNet2DConditionModel(**SD15),
        vae=AutoencoderKL(**VAE),
        text_encoder=CLIPTextModel(CLIPTextConfig(**TEXT)),
    )


def with_ratios(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Add each row's step time relative to the exact student's, and its speed-up over one GPU."""
    names = ("gpus", "attention", "batch_per_gpu")
    speeds = {tuple(row[x] for x in names): row.get("samples_per_second") for row in rows}

    def over(row: dict[str, Any], **other: Any) -> float | None:
        speed, base = (speeds.get(tuple(one[x] for x in names)) for one in (row, {**row, **other}))
        return speed / base if speed and base else None

    filled = []
    for row in rows:
        speed = over(row, attention="exact")
        ratios = {"step_over_exact": speed and 1 / speed, "speedup_over_one_gpu": over(row, gpus=1)}
        filled.append({**row, **ratios})
    return filled


def distillation_table(rows: Sequence[dict[str, Any]]) -> str:
    """The rows as Markdown."""
    return rows_table(COLUMNS, rows)


def last_error(output: str) -> str:
    """The error message of `distill`, else the last line of its output."""
    lines = output.strip().splitlines()
    sentences = [line for line in lines if line.startswith("error: ")]
    return (sentences or lines or ["it was killed"])[-1].removeprefix("error: ")


def _run(run: Run, row: dict[str, Any], folder: Path, name: str) -> dict[str, Any]:
    """Train with a row's settings, in a new folder of this name."""
    gpus, batch = row["gpus"], row["batch_per_gpu"]
    settings = {
        **SETTINGS,
        "base_model": run.model,
        "image_size": run.image_size,
        "data": json.dumps({**DATA, "cache": str(folder / "cache")}),
        "attention": row["attention"],
        "micro_batch_size": batch,
        "batch_size": batch * gpus,
        "steps": STEPS,
        "log_every": LOG_EVERY,
    }
    launcher = [sys.executable, "-m", "accelerate.commands.launch", "--num_processes", str(gpus)]
    launcher += ["--multi_gpu"] if gpus > 1 else []
    command = [*launcher, "-m", "distill", "--config", str(run.config)]
    command += ["--output", str(folder / name)]
    for value in (*(f"{name}={value}" for name, value in settings.items()), *run.overrides):
        command += ["--set", value]
    subprocess.run(command, check=True, capture_output=True, text=True)
    lines = [json.loads(x) for x in (folder / name / "log.jsonl").read_text().splitlines()]
    return {
        "windows": [x["samples_per_second"] for x in lines[WARMUP_LINES:]],
        "peak_memory_gib": lines[-1].get("peak_memory_gib"),
        "loss": lines[-1]["loss"],
    }
