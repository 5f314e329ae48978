"""Export of a trained student: codebooks for `AVQCodebooks`, or layers for `load_linfusion`."""

from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

from avq_diffusers import AVQCodebooks
from avq_diffusers.extras.linfusion import save_linfusion
from avq_diffusers.files import write_text
from distill.checkpointing.hub import CARD, model_card, push
from distill.config import DistillConfig
from distill.objective import Objective
from distill.stored import learned_codebooks

FOLDERS = {"avq": "codebooks", "linfusion": "linfusion"}
PACKAGES = ("accelerate", "diffusers", "torch", "transformers")


def export(
    output: Path,
    objective: Objective,
    config: DistillConfig,
    training: Mapping[str, Any],
    *,
    repo: str | None,
) -> Path | None:
    """Save the student and its model card as `output / "codebooks"` or `output / "linfusion"`.

    A student with exact attention is a control and is not exported. Seed and package versions are
    added to `training`. Returns the folder.

    Args:
        output: the run's folder.
        objective: holds the student.
        config: the run's configuration.
        training: summary of the training.
        repo: Hub repository to push the export to; None pushes nothing.

    Raises:
        OSError: the disk is full or not writable, or the Hub refuses or is unreachable.
    """
    if config.attention == "exact":
        return None
    versions = {name: version(name) for name in PACKAGES}
    training = {**training, "seed": config.seed, "versions": versions}
    folder = output / FOLDERS[config.attention]
    if config.attention == "avq":
        make_codebooks(objective, config, training).save_pretrained(folder)
    else:
        layers = {
            name: {key.removeprefix("processor."): x for key, x in layer.items()}
            for name, layer in objective.projections().items()
        }
        save_linfusion(
            objective.student,
            layers,
            folder,
            base_model=config.base_model_name,
            training=training,
        )
    write_text(folder / CARD, model_card(config, training, source=repo or folder.name))
    if repo is not None:
        push(folder, repo)
    return folder


def make_codebooks(
    objective: Objective, config: DistillConfig, training: Mapping[str, Any] | None = None
) -> AVQCodebooks:
    """Return the current codebooks, projection changes and key norms of the student.

    A student with own codewords only has projection changes.
    """
    return learned_codebooks(
        objective.student,
        config.avq,
        objective.stored,
        base_model=config.base_model_name,
        training=training,
        projection_changes=objective.projection_changes(),
    )
