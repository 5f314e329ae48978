"""The training loop of `python -m distill`."""

import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from tqdm import tqdm

from avq_diffusers.codebook.ema import ema_decay
from distill.checkpointing.export import export
from distill.config import DistillConfig
from distill.data.batches import sample_seed
from distill.data.dataset import deaths_reported
from distill.log import Log, reduced_means
from distill.objective import Batch, Objective
from distill.preview import draw_sheet
from distill.run import Run


def train(run: Run, config_name: str) -> None:
    """Make the remaining steps and leave the result.

    Args:
        run: of `prepare`.
        config_name: kept in the summary of the result.

    Raises:
        FloatingPointError: a loss is not finite.
        DataError: the data cannot be read.
        OSError: the disk is full or not writable.
    """
    config, output, accelerator = run.config, run.output, run.accelerator
    step, schedule, codebooks = run.step, run.state.schedule, run.config.codebooks
    log = Log(output, config, accelerator, step)
    totals: dict[str, Tensor] = {}
    is_resumed = step > 0 and accelerator.is_main_process
    sheet = sheet_path(output, step)
    if is_resumed and is_due(step, config.samples.every, config) and not sheet.exists():
        draw_sheet(sheet, run.objective, config, run.pipe)
    logged_step, logged_time = step, time.monotonic()
    run.objective.train()
    if accelerator.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()  # leaves out the cache and k-means
    with tqdm(
        desc="distill",
        total=config.steps,
        initial=step,
        unit="step",
        mininterval=1,
        disable=not accelerator.is_main_process,
    ) as bar:
        while step < config.steps:
            with deaths_reported():
                losses = train_step(run.model, run.batches, run.optimizer, config, accelerator)
            decay = ema_decay(
                step, codebooks.decay_warmup_steps, codebooks.decay_start, codebooks.decay_end
            )
            run.objective.update_codebooks(decay)
            learning_rate = schedule.get_last_lr()[0]
            schedule.step()
            step += 1
            if codebooks.dead_threshold is not None and step % codebooks.dead_every == 0:
                run.objective.reassign_dead(
                    threshold=codebooks.dead_threshold, seed=sample_seed(config.seed, step)
                )
            totals = {name: totals.get(name, 0) + value for name, value in losses.items()}
            bar.update()

            is_saved, is_drawn, is_logged = (
                is_due(step, every, config)
                for every in (config.checkpoint_every, config.samples.every, config.log_every)
            )
            if not (is_saved or is_drawn or is_logged):
                continue
            # Before anything is kept: a loss that is not finite ends the run here.
            means = reduced_means(totals, step - logged_step, step, accelerator)
            seconds = time.monotonic() - logged_time
            speed = (step - logged_step) * config.batch_size / seconds
            if accelerator.is_main_process:
                if accelerator.device.type == "cuda":
                    means["peak_memory_gib"] = torch.cuda.max_memory_allocated() / 2**30
                log.write(
                    step,
                    samples=step * config.batch_size,
                    samples_per_second=speed,
                    learning_rate=learning_rate,
                    decay=decay,
                    **means,
                    **layer_figures(run.objective),
                )
                bar.set_postfix(loss=f"{means['loss']:.4g}", samples_per_s=f"{speed:.1f}")
                if is_saved:  # before the sheet, which may take more memory than there is
                    run.state.save(output, step, config)
                if is_drawn:
                    draw_sheet(sheet_path(output, step), run.objective, config, run.pipe)
            totals = {}
            logged_step, logged_time = step, time.monotonic()
    if accelerator.is_main_process:
        summary = training_summary(run, log.file.last, config_name)
        export(output, run.objective, config, summary)
    accelerator.wait_for_everyone()
    (run.model,) = accelerator.free_memory(run.model)  # its threads must not outlive the group
    accelerator.end_training()


def is_due(step: int, every: int | None, config: DistillConfig) -> bool:
    """Whether what comes every so many steps, and at the end, comes after this one."""
    return step == config.steps or (every is not None and step % every == 0)


def sheet_path(output: Path, step: int) -> Path:
    """The sheet of pictures of a step."""
    return output / "samples" / f"step-{step:08d}.png"


def train_step(
    model: nn.Module,
    batches: Iterator[Batch],
    optimizer: torch.optim.Optimizer,
    config: DistillConfig,
    accelerator: Accelerator,
) -> dict[str, Tensor]:
    """Make one optimizer step; return its mean losses and gradient norm, still on the device."""
    totals: dict[str, Tensor] = {}
    for _ in range(accelerator.gradient_accumulation_steps):
        with accelerator.accumulate(model):
            losses = model(**next(batches))
            accelerator.backward(losses["loss"])
            if accelerator.sync_gradients:
                norm = accelerator.clip_grad_norm_(model.parameters(), config.max_grad_norm)
            optimizer.step()
            optimizer.zero_grad()
        for name, value in losses.items():
            share = value.detach() / accelerator.gradient_accumulation_steps
            totals[name] = totals.get(name, 0) + share
    return {**totals, "grad_norm": norm}


def training_summary(run: Run, last: Mapping[str, Any], config_name: str) -> dict[str, Any]:
    """What the result says of its training, from the last line of the log."""
    names = (*run.objective.weights, "loss")
    return {
        "config": config_name,
        "steps": run.config.steps,
        "samples": run.config.steps * run.config.batch_size,
        "losses": {name: last[name] for name in names if name in last},
        "layers": figures_by_layer(last),
    }


def figures_by_layer(line: Mapping[str, Any]) -> dict[str, dict[str, float]]:
    """What a line of the log says of every layer, as `calibrate` keeps it."""
    layers: dict[str, dict[str, float]] = {}
    for figure, values in line.items():
        if isinstance(values, dict):
            for layer, value in values.items():
                layers.setdefault(layer, {})[figure] = value
    return layers


def layer_figures(objective: Objective) -> dict[str, dict[str, float]]:
    """Means over heads of the objective's diagnostics, by figure and layer; waits once."""
    found = [
        (figure, layer, values.float().mean())
        for layer, figures in objective.diagnostics().items()
        for figure, values in figures.items()
    ]
    by_figure: dict[str, dict[str, float]] = {}
    if found:
        means = torch.stack([mean for *_, mean in found]).tolist()
        for (figure, layer, _), mean in zip(found, means, strict=True):
            by_figure.setdefault(figure, {})[layer] = mean
    return by_figure
