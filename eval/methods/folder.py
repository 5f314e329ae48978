"""Folders of codebooks or LinFusion layers, by their path; `runs/m64/codebooks@P8` refines 8."""

import json
import re
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from typing_extensions import Self

from avq_diffusers import AVQCodebooks, select_layers
from avq_diffusers.extras.linfusion import LinFusionProcessor, load_linfusion, remove_linfusion
from eval.methods.avq import AVQMethod
from eval.methods.base import UNET_IMAGES, UNET_STEP, AttentionMethod, Word
from eval.methods.running import layers_run_by
from eval.store.report import folder_digest

LINFUSION_CONFIG = "LinFusion"  # the `config` of its rows
FORM = re.compile(r"(.+?)(?:@P(\d+))?")


class Folder(AVQMethod):
    """Codebooks, or own codewords with trained projections; `TrainedLinFusion` once it is read."""

    kind, example = "folder", "runs/m64/codebooks"
    places = (UNET_IMAGES, UNET_STEP)

    @classmethod
    def parse(cls, name: str, levels: tuple[int, ...]) -> Self | None:
        if Path(name).is_dir():
            return cls(name, name)
        folder, refined = FORM.fullmatch(name).groups()
        if refined and Path(folder).is_dir():
            return cls(name, folder, num_refined=int(refined))
        return None

    @staticmethod
    def path_of(name: str) -> str:
        """The name without its suffix."""
        return FORM.fullmatch(name)[1]

    @property
    def scheme(self) -> str:
        return "trained"

    @property
    def origin(self) -> str:
        return "calibrated" if self.codebooks.config["training"] is None else "distilled"

    def loaded(self, pipe: Any, levels: tuple[int, ...]) -> "Folder":
        digest = folder_digest(self.source, "config.json")
        if _has_linfusion(self.source):
            return self._linfusion(pipe, digest)
        codebooks = AVQCodebooks.from_pretrained(self.source).to(pipe.device)
        config, refined = codebooks.avq_config, self.num_refined
        layers = select_layers(pipe.unet, config.levels, config.exact)
        codebooks.check_layers(layers)
        for layer in layers:
            most = codebooks.layer_config(layer.name).most_refined
            if refined is not None and refined > most:
                raise ValueError(
                    f"num_refined must be between 0 and {most} in {layer.name}, but got {refined}."
                )
        return replace(self, levels=config.levels, codebooks=codebooks, sha256=digest)

    def _linfusion(self, pipe: Any, digest: str | None) -> "TrainedLinFusion":
        if self.num_refined is not None:
            raise ValueError(f"LinFusion layers refine no parents, but got {self.name!r}.")
        load_linfusion(pipe, self.source)
        layers = linfusion_layers(pipe)
        processors = {layer.name: layer.attn.processor for layer in layers}
        remove_linfusion(pipe)
        levels = tuple(sorted({layer.level for layer in layers}))
        return TrainedLinFusion(
            self.name, self.source, levels=levels, sha256=digest, processors=processors
        )


@dataclass(frozen=True)
class TrainedLinFusion(Folder):
    """Trained LinFusion layers, by layer name."""

    processors: Mapping[str, LinFusionProcessor] = field(default_factory=dict)
    origin = "distilled"

    def applied(self, pipe: Any) -> AbstractContextManager[None]:
        return layers_run_by(pipe.unet, self.processors)

    def facts(self) -> dict[str, Any]:
        return AttentionMethod.facts(self) | {"config": LINFUSION_CONFIG}


class LinFusion(Word):
    """LinFusion, linear attention, with random weights; trained layers are in folders."""

    kind = example = "linfusion"
    places = (UNET_STEP,)
    title = "LinFusion"


def linfusion_layers(pipe: Any) -> list[Any]:
    """The layers of a pipeline's UNet that run LinFusion."""
    return [
        layer
        for layer in select_layers(pipe.unet)
        if isinstance(layer.attn.processor, LinFusionProcessor)
    ]


def _has_linfusion(folder: str) -> bool:
    try:
        config = json.loads((Path(folder) / "config.json").read_text(encoding="utf-8"))
        return config["_class_name"] == LinFusionProcessor.__name__
    except (OSError, ValueError, KeyError, TypeError):
        return False  # AVQCodebooks will report what is wrong
