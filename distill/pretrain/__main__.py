"""`python -m distill.pretrain`: the commands that train and assemble mini-sd."""

import os
import time
from pathlib import Path
from typing import Annotated

import torch
import typer
from accelerate import Accelerator

from distill.__main__ import one_sentence
from distill.checkpoint import checkpoints
from distill.config import load_config
from distill.log import read_log
from distill.pretrain.config import RunConfig, ScorerConfig, SDConfig, VAEConfig

INPUT_ERRORS = (ValueError, TypeError, OSError)
RUN_ERRORS = (FloatingPointError, OSError)

app = typer.Typer(add_completion=False, no_args_is_help=True, help=__doc__)

ConfigPath = Annotated[Path, typer.Option("--config", help="YAML file with every field.")]
Output = Annotated[Path, typer.Option(help="Folder of the run.")]
Resume = Annotated[bool, typer.Option("--resume", help="Go on from the newest checkpoint.")]
Overrides = Annotated[list[str], typer.Option("--set", help="key=value, over the file.")]


@app.command()
def vae(config: ConfigPath, output: Output, resume: Resume = False, overrides: Overrides = ()):
    """Train the VAE; the result is OUTPUT/vae."""
    started = time.monotonic()
    with one_sentence(*INPUT_ERRORS, code=2):
        values = load_config(config, VAEConfig, overrides)
        accelerator = _prepare(values, output, resume)
        from distill.pretrain.loop import fit
        from distill.pretrain.vae import VAETask

        task = VAETask(values, output, accelerator)
    with one_sentence(*RUN_ERRORS, code=1):
        fit(task, values, output, accelerator=accelerator, resume=resume, started=started)


@app.command()
def sd(
    config: ConfigPath,
    output: Output,
    vae: Annotated[Path | None, typer.Option(help="Folder of the VAE's run.")] = None,
    resume: Resume = False,
    overrides: Overrides = (),
):
    """Train UNet and text encoder; the result is OUTPUT/model."""
    started = time.monotonic()
    with one_sentence(*INPUT_ERRORS, code=2):
        values = load_config(config, SDConfig, overrides)
        if (vae is None) == (values.init_from is None):
            raise ValueError("give either --vae or init_from (an export brings its own VAE).")
        vae_folder = (vae or Path(values.init_from)) / "vae"
        if not vae_folder.is_dir():
            raise FileNotFoundError(f"{vae_folder} does not exist: there is no trained VAE.")
        accelerator = _prepare(values, output, resume)
        from distill.pretrain.loop import fit
        from distill.pretrain.sd import SDTask

        task = SDTask(values, output, accelerator, vae_folder)
    with one_sentence(*RUN_ERRORS, code=1):
        fit(task, values, output, accelerator=accelerator, resume=resume, started=started)


@app.command()
def scorer(config: ConfigPath, output: Output, resume: Resume = False, overrides: Overrides = ()):
    """Train the scorer; the result is OUTPUT/scorer."""
    started = time.monotonic()
    with one_sentence(*INPUT_ERRORS, code=2):
        values = load_config(config, ScorerConfig, overrides)
        accelerator = _prepare(values, output, resume)
        from distill.pretrain.loop import fit
        from distill.pretrain.scorer import ScorerTask

        task = ScorerTask(values, output, accelerator)
    with one_sentence(*RUN_ERRORS, code=1):
        fit(task, values, output, accelerator=accelerator, resume=resume, started=started)


@app.command()
def export(
    vae: Annotated[Path, typer.Option(help="Folder of the VAE's run.")],
    sd: Annotated[Path, typer.Option(help="Folder of the UNet's run.")],
    scorer: Annotated[Path, typer.Option(help="Folder of the scorer's run.")],
    output: Annotated[Path, typer.Option(help="Folder to assemble; replaced if it exists.")],
):
    """Assemble the folder that the package ships."""
    from distill.pretrain.export import export_mini_sd

    with one_sentence(*INPUT_ERRORS, code=2):
        export_mini_sd(vae, sd, scorer, output)


def _prepare(config: RunConfig, output: Path, resume: bool) -> Accelerator:
    """Check that `output` can take the run, seed torch, return the accelerator."""
    if not resume and checkpoints(output):
        raise ValueError(
            f"{output} holds the checkpoints of a run: add --resume or choose another --output."
        )
    from distill.pretrain.checkpoint import check_newest
    from distill.pretrain.loop import make_accelerator

    # Renderers are forked after tokenizers ran; saying so keeps it from warning about that.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")
    torch.set_float32_matmul_precision("high")
    torch.backends.cudnn.benchmark = True
    accelerator = make_accelerator()
    if resume:
        check_newest(output, config, accelerator.num_processes)
    read_log(output)  # a damaged one is refused now, not after all scenes are rendered
    output.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(config.seed)
    return accelerator


if __name__ == "__main__":
    app()
