"""`python -m distill.pretrain`: the commands that train mini-sd and mini-sd3."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from distill.config_file import load_config
from distill.options import ConfigFile, Output, Overrides, exit_on, folder_of, run_app
from distill.pretrain.config import PretrainConfig, ScorerConfig, SD3Config, SDConfig, VAEConfig

if TYPE_CHECKING:
    from distill.pretrain.loop import Task

INPUT_ERRORS = (ValueError, TypeError, OSError)

ConfigType = TypeVar("ConfigType", bound=PretrainConfig)

app = typer.Typer(add_completion=False, no_args_is_help=True, help=__doc__)


@app.command()
def vae(config: ConfigFile, output: Output = None, overrides: Overrides = ()) -> None:
    """Train the VAE; the result is OUTPUT/vae."""
    from distill.pretrain.vae import VAETask

    _train(VAEConfig, VAETask, config, output, overrides)


@app.command()
def sd(
    config: ConfigFile,
    output: Output = None,
    vae: Annotated[Path | None, typer.Option(help="Folder of the VAE's run.")] = None,
    overrides: Overrides = (),
) -> None:
    """Train the UNet and text encoder; the result is OUTPUT/model."""
    from distill.pretrain.sd import SDTask

    def make_task(values: SDConfig, accelerator: Any) -> SDTask:
        if (vae is None) == (values.init_from is None):
            raise ValueError("give either --vae or init_from (an export contains its own VAE).")
        vae_folder = (vae or Path(values.init_from)) / "vae"
        if not vae_folder.is_dir():
            raise FileNotFoundError(f"{vae_folder} does not exist: there is no trained VAE.")
        return SDTask(values, accelerator, vae_folder)

    _train(SDConfig, make_task, config, output, overrides)


@app.command()
def sd3(config: ConfigFile, output: Output = None, overrides: Overrides = ()) -> None:
    """Train the transformer of mini-sd3 on mini-sd's latents; the result is OUTPUT/model."""
    from distill.pretrain.sd3 import SD3Task

    _train(SD3Config, SD3Task, config, output, overrides)


@app.command()
def scorer(config: ConfigFile, output: Output = None, overrides: Overrides = ()) -> None:
    """Train the scorer; the result is OUTPUT/scorer."""
    from distill.pretrain.scorer import ScorerTask

    _train(ScorerConfig, ScorerTask, config, output, overrides)


def _train(
    kind: type[ConfigType],
    make_task: Callable[..., "Task"],
    path: Path,
    output: Path | None,
    overrides: list[str],
) -> None:
    output = folder_of(path, output)
    with exit_on(*INPUT_ERRORS, code=2):
        config = load_config(path, kind, overrides)
        import torch

        from distill.accelerator import make_accelerator
        from distill.checkpointing.checkpoint import check_unused
        from distill.pretrain.loop import fit

        check_unused(output, "choose another --output")
        # Rendering processes are forked after tokenizers ran; the setting avoids a warning.
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")
        torch.set_float32_matmul_precision("high")
        torch.backends.cudnn.benchmark = True
        accelerator = make_accelerator(config)
        torch.manual_seed(config.seed)
        task = make_task(config, accelerator)
    with exit_on(FloatingPointError, OSError, code=1):
        fit(task, config, output, accelerator)


if __name__ == "__main__":
    run_app(app)
