"""The training loop of `python -m distill`."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from tqdm import tqdm

from distill.checkpointing.export import export
from distill.checkpointing.hub import LOADING
from distill.config import DistillConfig
from distill.data.batches import sample_seed
from distill.data.stream import report_worker_errors
from distill.log import Log, Meter
from distill.objective import Batch, Objective
from distill.preview import save_sheet
from distill.run import Run
from distill.stored import update_codebooks


def train(run: Run, config_name: str, *, repo: str | None = None) -> None:
    """Run the remaining steps and export the student.

    Args:
        run: the run to finish.
        config_name: recorded in the export's summary.
        repo: Hub repository to push the export to; None pushes nothing.

    Raises:
        FloatingPointError: a loss is not finite.
        DataError: the data cannot be read.
        OSError: the disk is full or not writable, or the export could not be pushed.
    """
    config, accelerator, objective = run.config, run.accelerator, run.objective
    is_main = accelerator.is_main_process
    log = Log(run.output, config, accelerator, run.step)
    sheet = sheet_path(run.output, run.step)
    is_sampled = run.step > 0 and is_due(run.step, config.samples.every, config)
    if is_main and is_sampled and not sheet.exists():  # missing if the run was killed
        save_sheet(sheet, objective, config, run.pipe)
    meter = Meter(accelerator, run.step)
    objective.train()
    if accelerator.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()  # excludes cache and k-means
    with tqdm(
        desc="distill",
        total=config.steps,
        initial=run.step,
        unit="step",
        mininterval=1,
        disable=not is_main,
    ) as bar:
        while run.step < config.steps:
            with report_worker_errors():
                losses = train_step(run.model, run.batches, run.optimizer, config, accelerator)
            rates = {"learning_rate": run.schedule.get_last_lr()[0]}
            if config.codebooks is not None:
                seed = sample_seed(config.seed, run.step + 1)
                rates["decay"] = update_codebooks(
                    objective.stored, config.codebooks, run.step, seed
                )
            run.schedule.step()
            run.step += 1
            meter.add(losses)
            bar.update()

            is_saved, is_sampled, is_logged = (
                is_due(run.step, every, config)
                for every in (config.checkpoint_every, config.samples.every, config.log_every)
            )
            if not (is_saved or is_sampled or is_logged):
                continue
            # Raises if a loss is not finite, before anything is saved.
            means = meter.means(run.step, config.batch_size)
            if is_main:
                if accelerator.device.type == "cuda":
                    means["peak_memory_gib"] = torch.cuda.max_memory_allocated() / 2**30
                samples = run.step * config.batch_size
                figures = layer_metrics(objective)
                log.write(run.step, samples=samples, **rates, **means, **figures)
                bar.set_postfix(
                    loss=f"{means['loss']:.4g}", samples_per_s=f"{means['samples_per_second']:.1f}"
                )
                if is_saved:  # before the sheet, which may run out of memory
                    run.save_checkpoint()
                if is_sampled:
                    save_sheet(sheet_path(run.output, run.step), objective, config, run.pipe)
            meter = Meter(accelerator, run.step)
    if is_main:
        training = training_summary(run, log.last, config_name)
        folder = export(run.output, objective, config, training, repo=repo)
        print(f"{sheet_path(run.output, run.step)} compares images of teacher and student.")
        if folder is not None:
            print(f"{folder} holds the student: {LOADING[config.attention].format(source=folder)}")
    accelerator.wait_for_everyone()
    (run.model,) = accelerator.free_memory(run.model)  # DDP's threads must end before the group
    accelerator.end_training()


def is_due(step: int, every: int | None, config: DistillConfig) -> bool:
    """Return whether something that happens every `every` steps, and at the end, is due."""
    return step == config.steps or (every is not None and step % every == 0)


def sheet_path(output: Path, step: int) -> Path:
    """Return the path of the sample sheet of a step."""
    return output / "samples" / f"step-{step:08d}.png"


def train_step(
    model: nn.Module,
    batches: Iterator[Batch],
    optimizer: torch.optim.Optimizer,
    config: DistillConfig,
    accelerator: Accelerator,
) -> dict[str, Tensor]:
    """Run one optimizer step; return its mean losses and gradient norm, on the device."""
    totals: dict[str, Tensor] = {}
    for _ in range(accelerator.gradient_accumulation_steps):
        with accelerator.accumulate(model):
            losses = model(**next(batches))
            accelerator.backward(losses["loss"])
            if accelerator.sync_gradients:
                norm = accelerator.clip_grad_norm_(model.parameters(), config.max_grad_norm)
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)  # see `Objective.compile_unets`
        for name, value in losses.items():
            share = value.detach() / accelerator.gradient_accumulation_steps
            totals[name] = totals.get(name, 0) + share
    return {**totals, "grad_norm": norm}


def training_summary(run: Run, last: Mapping[str, Any], config_name: str) -> dict[str, Any]:
    """Summarize the training for the export, from the last line of the log."""
    layers: dict[str, dict[str, float]] = {name: {} for name in run.objective.stored}
    for metric, values in last.items():
        if isinstance(values, dict):
            for layer, value in values.items():
                layers[layer][metric] = value
    return {
        "config": config_name,
        "steps": run.config.steps,
        "samples": run.config.steps * run.config.batch_size,
        "losses": {name: last[name] for name in (*run.objective.weights, "loss") if name in last},
        "layers": layers,
    }


def layer_metrics(objective: Objective) -> dict[str, dict[str, float]]:
    """Return the objective's diagnostics by name and layer, averaged over heads.

    Synchronizes with the device once.
    """
    found = objective.diagnostics()
    if not found:
        return {}
    means = [value.float().mean() for metrics in found.values() for value in metrics.values()]
    numbers = iter(torch.stack(means).tolist())
    by_name: dict[str, dict[str, float]] = {}
    for layer, metrics in found.items():
        for name in metrics:
            by_name.setdefault(name, {})[layer] = next(numbers)
    return by_name
