"""`python -m distill.pretrain`: the commands that train mini-sd and mini-sd3."""

import os
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer

from avq_diffusers.options import hide_torchvision_notes, restore_threads
from distill.config_file import load_config
from distill.exceptions import exit_on
from distill.pretrain.config import PretrainConfig, ScorerConfig, SD3Config, SDConfig, VAEConfig

if TYPE_CHECKING:
    from accelerate import Accelerator

    from distill.pretrain.loop import Task

INPUT_ERRORS = (ValueError, TypeError, OSError)
RUN_ERRORS = (FloatingPointError, OSError)

ConfigType = TypeVar("ConfigType", bound=PretrainConfig)

app = typer.Typer(add_completion=False, no_args_is_help=True, help=__doc__)

ConfigPath = Annotated[Path, typer.Option("--config", help="YAML file with every field.")]
Output = Annotated[Path, typer.Option(help="Folder of the run.")]
Resume = Annotated[bool, typer.Option("--resume", help="Continue from the newest checkpoint.")]
Overrides = Annotated[list[str], typer.Option("--set", help="key=value, replaces the file's.")]


@app.command()
def vae(config: ConfigPath, output: Output, resume: Resume = False, overrides: Overrides = ()):
    """Train the VAE; the result is OUTPUT/vae."""

    def make_task(values: VAEConfig, accelerator: "Accelerator") -> "Task":
        from distill.pretrain.vae import VAETask

        return VAETask(values, output, accelerator)

    _train(VAEConfig, make_task, config, output, resume, overrides)


@app.command()
def sd(
    config: ConfigPath,
    output: Output,
    vae: Annotated[Path | None, typer.Option(help="Folder of the VAE's run.")] = None,
    resume: Resume = False,
    overrides: Overrides = (),
):
    """Train UNet and text encoder; the result is OUTPUT/model."""

    def make_task(values: SDConfig, accelerator: "Accelerator") -> "Task":
        if (vae is None) == (values.init_from is None):
            raise ValueError("give either --vae or init_from (an export contains its own VAE).")
        vae_folder = (vae or Path(values.init_from)) / "vae"
        if not vae_folder.is_dir():
            raise FileNotFoundError(f"{vae_folder} does not exist: there is no trained VAE.")
        from distill.pretrain.sd import SDTask

        return SDTask(values, output, accelerator, vae_folder)

    _train(SDConfig, make_task, config, output, resume, overrides)


@app.command()
def sd3(config: ConfigPath, output: Output, resume: Resume = False, overrides: Overrides = ()):
    """Train the transformer of mini-sd3 on mini-sd's latents; the result is OUTPUT/model."""

    def make_task(values: SD3Config, accelerator: "Accelerator") -> "Task":
        from distill.pretrain.sd3 import SD3Task

        return SD3Task(values, output, accelerator)

    _train(SD3Config, make_task, config, output, resume, overrides)


@app.command()
def scorer(config: ConfigPath, output: Output, resume: Resume = False, overrides: Overrides = ()):
    """Train the scorer; the result is OUTPUT/scorer."""

    def make_task(values: ScorerConfig, accelerator: "Accelerator") -> "Task":
        from distill.pretrain.scorer import ScorerTask

        return ScorerTask(values, output, accelerator)

    _train(ScorerConfig, make_task, config, output, resume, overrides)


@app.command()
def export(
    vae: Annotated[Path, typer.Option(help="Folder of the VAE's run.")],
    sd: Annotated[Path, typer.Option(help="Folder of the UNet's run.")],
    scorer: Annotated[Path, typer.Option(help="Folder of the scorer's run.")],
    output: Annotated[Path, typer.Option(help="Folder to assemble; replaced if it exists.")],
):
    """Assemble the folder that the package ships."""
    from distill.pretrain.export import export_mini_sd

    with exit_on(*INPUT_ERRORS, code=2):
        export_mini_sd(vae, sd, scorer, output)


def _train(
    kind: type[ConfigType],
    make_task: Callable[[ConfigType, "Accelerator"], "Task"],
    path: Path,
    output: Path,
    resume: bool,
    overrides: list[str],
) -> None:
    started = time.monotonic()
    with ExitStack() as stack:
        with exit_on(*INPUT_ERRORS, code=2):
            config = load_config(path, kind, overrides)
            from distill.checkpointing.run_folder import locked
            from distill.pretrain.loop import fit

            stack.enter_context(locked(output))
            accelerator = _prepare(config, output, resume)
            task = make_task(config, accelerator)
        with exit_on(*RUN_ERRORS, code=1):
            fit(task, config, output, accelerator=accelerator, resume=resume, started=started)


def _prepare(config: PretrainConfig, output: Path, resume: bool) -> "Accelerator":
    """Check that `output` is free or resumable, seed torch, and return the accelerator."""
    import torch

    from avq_diffusers.files import read_log
    from distill.checkpointing.run_folder import check_unused
    from distill.log import log_path
    from distill.pretrain.checkpoint import check_newest
    from distill.pretrain.loop import make_accelerator

    if not resume:
        check_unused(output)
    # Rendering processes are forked after tokenizers ran; the setting avoids a warning.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")
    torch.set_float32_matmul_precision("high")
    torch.backends.cudnn.benchmark = True
    accelerator = make_accelerator()
    if resume:
        check_newest(output, config, accelerator.num_processes)
    read_log(log_path(output))  # raises for a damaged log before scenes are rendered
    torch.manual_seed(config.seed)
    return accelerator


if __name__ == "__main__":
    restore_threads()
    hide_torchvision_notes()
    app()
