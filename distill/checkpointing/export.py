"""Export of a trained student: codebooks for `AVQCodebooks`, or layers for `load_linfusion`."""

from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

from avq_diffusers import AVQCodebooks
from avq_diffusers.extras.linfusion import save_linfusion
from distill.config import DistillConfig
from distill.objective import Objective

PACKAGES = ("accelerate", "diffusers", "torch", "transformers")


def export(
    output: Path, objective: Objective, config: DistillConfig, training: Mapping[str, Any]
) -> None:
    """Save the student as `output / "codebooks"` or `output / "linfusion"`.

    A student with exact attention is a control and is not exported. Seed and package versions are
    added to `training`.

    Raises:
        OSError: the disk is full or not writable.
    """
    versions = {name: version(name) for name in PACKAGES}
    training = {**training, "seed": config.seed, "versions": versions}
    if config.attention == "avq":
        make_codebooks(objective, config, training).save_pretrained(output / "codebooks")
    elif config.attention == "linfusion":
        layers = {
            name: {key.removeprefix("processor."): x for key, x in layer.items()}
            for name, layer in objective.projections().items()
        }
        save_linfusion(
            objective.student,
            layers,
            output / "linfusion",
            base_model=base_model(config),
            training=training,
        )


def make_codebooks(
    objective: Objective, config: DistillConfig, training: Mapping[str, Any] | None = None
) -> AVQCodebooks:
    """Return the current codebooks, projection changes and key norms of the student.

    A student with own codewords has projection changes only.
    """
    made = AVQCodebooks.from_codebooks(
        config.avq,
        None if config.codebooks is None else objective.codebooks(),
        objective.student,
        base_model=base_model(config),
        training=training,
        projection_changes=objective.projection_changes(),
    )
    for name, norm in objective.key_norms().items():
        made.key_norm(name).load_state_dict(norm.state_dict())
    return made


def base_model(config: DistillConfig) -> str:
    """Return the Hub id of the base model, or the name of its folder."""
    path = Path(config.base_model)
    return path.name if path.exists() else config.base_model
