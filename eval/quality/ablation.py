"""What each training choice is worth: `python -m eval ablate`.

Each variant is a run of `python -m distill` with a few settings changed. Several run at a time on
one device. The command can be repeated: it resumes runs, leaves finished ones alone, and refuses
runs with other settings.
"""

import subprocess
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import mean
from typing import Any

from diffusers import StableDiffusionPipeline
from tqdm import tqdm

from avq_diffusers.mini.loading import usual_guidance
from eval.methods.prepared import attention_method, load_methods
from eval.quality.repeats import recorded_calls, repeated_errors
from eval.store.markdown import rows_table, standard_error

Row = dict[str, Any]

BASE = "base"
METRICS = {
    "output_error": "output error",
    "quantization_error": "quantization error",
    "active_ratio": "active ratio",
    "capture": "capture",
}
BATCH = 8  # prompts
# Variant -> settings it changes in the ablated configuration.
VARIANTS: dict[str, Mapping[str, Any]] = {
    BASE: {},
    **{f"learning rate {rate}": {"learning_rate": rate} for rate in (0.0005, 0.001)},
    "EMA decay 0.9": {"codebooks.decay_start": 0.9, "codebooks.decay_end": 0.9},
    "EMA decay 0.999": {"codebooks.decay_start": 0.999, "codebooks.decay_end": 0.999},
    **{
        f"commitment {weight}": {"objective.commitment_weight": weight}
        for weight in (0.0, 0.01, 0.1, 1.0)
    },
    "dead codewords move": {"codebooks.dead_threshold": 1.0},
    "DiVeQ": {"objective.diveq": "true"},
    "no noise loss": {"objective.noise_weight": 0.0},
    "no feature loss": {"objective.feature_weight": 0.0},
    "key norm": {"avq.key_norm": "true"},
}


def train_variants(
    config: Path,
    output: Path,
    variants: Sequence[str],
    *,
    seeds: Sequence[int],
    parallel: int,
    overrides: Sequence[str],
) -> dict[str, Path]:
    """Finish training all variants; return the codebooks by `VARIANT, seed S`.

    Args:
        config: YAML file for `distill`.
        output: folder of the runs.
        variants: keys of `VARIANTS`.
        seeds: each variant is trained once per seed.
        parallel: runs at a time.
        overrides: other `--set` options, applied before the variant's.

    Raises:
        ValueError: a run failed.
    """
    runs = {}
    for variant in variants:
        for seed in seeds:
            run = output / f"{config.stem}-{variant.replace(' ', '-').lower()}-seed{seed}"
            changed = [f"{name}={value}" for name, value in VARIANTS[variant].items()]
            runs[f"{variant}, seed {seed}"] = run, [*overrides, f"seed={seed}", *changed]
    with ThreadPoolExecutor(parallel) as pool:
        done = pool.map(lambda run: _distill(config, *run), runs.values())
        list(tqdm(done, desc="runs", total=len(runs)))
    return {name: run / "codebooks" for name, (run, _) in runs.items()}


def ablation_rows(
    pipe: StableDiffusionPipeline,
    trained: Mapping[str, Path],
    prompts: Sequence[str],
    num_inference_steps: int,
) -> list[Row]:
    """Variant, seed and metrics of every run.

    The output error is |s - t| / |t| of the student's and the teacher's predicted noise, root mean
    square over an exact run's steps and mean over prompts. Other metrics are those of the last
    training steps, means over layers; None without codebooks.

    Args:
        pipe: a pipeline without AVQ; its UNet is the teacher.
        trained: what `train_variants` returned.
        prompts: prompts of the exact runs.
        num_inference_steps: their denoising steps.
    """
    folders = [str(folder) for folder in trained.values()]
    methods = load_methods(pipe, folders, levels=(0,))
    settings = {"num_inference_steps": num_inference_steps, "guidance_scale": usual_guidance(pipe)}
    calls = recorded_calls(pipe, prompts, 0, BATCH, **settings)
    rows = []
    for name, method in zip(trained, tqdm(methods, "errors"), strict=True):
        variant, _, seed = name.rpartition(", seed ")
        with attention_method(pipe, method):
            errors = repeated_errors(pipe, calls)
        layers = method.codebooks.config["training"]["layers"].values()
        figures = {"output_error": mean(errors)}
        for figure in METRICS.keys() - figures:
            found = [layer[figure] for layer in layers if figure in layer]  # flat: no capture
            figures[figure] = mean(found) if found else None
        rows.append(
            {"variant": variant, "seed": int(seed), "config": method.facts()["config"], **figures}
        )
    return rows


def ablation_table(rows: Sequence[Row]) -> str:
    """Means over seeds as a Markdown table, with standard errors if there are several.

    Runs with one seed see the same images in the same order, so the output error relative to the
    same seed's `BASE` run varies less.
    """
    base = {
        (row["config"], row["seed"]): row["output_error"] for row in rows if row["variant"] == BASE
    }
    shown = []
    for variant, config in dict.fromkeys((row["variant"], row["config"]) for row in rows):
        runs = [row for row in rows if (row["variant"], row["config"]) == (variant, config)]
        judged = [run for run in runs if (config, run["seed"]) in base]
        over = [run["output_error"] / base[config, run["seed"]] for run in judged]
        shown.append(
            {
                **{"variant": variant, "config": config, "seeds": len(runs)},
                f"error / {BASE}, same seed": _over_seeds(over),
                **{x: _over_seeds([run[name] for run in runs]) for name, x in METRICS.items()},
            }
        )
    return rows_table({title: title for title in shown[0]}, shown)


def _over_seeds(values: Sequence[float | None]) -> str:
    known = [value for value in values if value is not None]
    if not known:
        return "-"
    error = standard_error(known)
    return f"{mean(known):.3g}" + ("" if error is None else f" ± {error:.1g}")


def _distill(config: Path, run: Path, settings: Sequence[str]) -> None:
    command = [sys.executable, "-m", "distill", "--config", str(config), "--output", str(run)]
    changes = [f"--set={setting}" for setting in settings]
    done = subprocess.run([*command, "--resume", *changes], capture_output=True, text=True)
    if done.returncode:
        lines = done.stderr.strip().splitlines() or ["it was killed"]
        said = next((line for line in lines[::-1] if line.startswith("error: ")), lines[-1])
        raise ValueError(f"the run {run} failed: {said.removeprefix('error: ')}")
