"""What a run leaves: codebooks for `AVQCodebooks.from_pretrained`, or for `load_linfusion`."""

from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

from avq_diffusers import AVQCodebooks
from avq_diffusers.extras.linfusion import save_linfusion
from distill.config import DistillConfig
from distill.objective import Objective

VERSIONED = ("accelerate", "diffusers", "torch", "transformers")


def export(
    output: Path, objective: Objective, config: DistillConfig, training: Mapping[str, Any]
) -> Path | None:
    """Write the result of a run into `output / "codebooks"` or `output / "linfusion"`.

    A student with exact attention is a control and leaves nothing.

    Args:
        output: folder of the run.
        objective: trained.
        config: of the run.
        training: summary for `config.json`; seed and versions are added.

    Returns:
        The folder, if there is one.

    Raises:
        OSError: the disk is full or not writable.
    """
    if config.attention == "exact":
        return None
    versions = {name: version(name) for name in VERSIONED}
    training = {**training, "seed": config.seed, "versions": versions}
    if config.attention == "avq":
        path = output / "codebooks"
        make_codebooks(objective, config, training).save_pretrained(path)
        return path
    path = output / config.attention
    layers = {
        name: {key.removeprefix("processor."): x for key, x in layer.items()}
        for name, layer in objective.projections().items()
    }
    save_linfusion(
        objective.student, layers, path, base_model=base_model(config), training=training
    )
    return path


def make_codebooks(
    objective: Objective, config: DistillConfig, training: Mapping[str, Any] | None = None
) -> AVQCodebooks:
    """The student's codebooks, changes of projections and key norms, as they are now."""
    made = AVQCodebooks.from_codebooks(
        config.avq,
        objective.codebooks(),
        objective.student,
        base_model=base_model(config),
        training=training,
        projection_changes=objective.projection_changes(),
    )
    for name, norm in objective.key_norms().items():
        made.key_norm(name).load_state_dict(norm.state_dict())
    return made


def base_model(config: DistillConfig) -> str:
    """The Hub id, or the last part of a folder's path."""
    path = Path(config.base_model)
    return path.name if path.exists() else config.base_model
