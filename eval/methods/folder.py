"""Folders of codebooks or LinFusion layers, by their path; `runs/m64/codebooks@P8` refines 8."""

import re
from pathlib import Path

from typing_extensions import Self

from eval.methods.base import UNET_IMAGES, UNET_STEP, AttentionMethod, Word

LINFUSION_CONFIG = "LinFusion"  # the `config` of its rows
FORM = re.compile(r"(.+?)(?:@P(\d+))?")


class Folder(AttentionMethod):
    """What was trained and saved."""

    kind, example = "folder", "runs/m64/codebooks"
    places = (UNET_IMAGES, UNET_STEP)

    @classmethod
    def parse(cls, name: str, levels: tuple[int, ...]) -> Self | None:
        if Path(name).is_dir():
            return cls(name)
        folder, refined = FORM.fullmatch(name).groups()
        return cls(folder, num_refined=int(refined)) if refined and Path(folder).is_dir() else None

    @staticmethod
    def path_of(name: str) -> str:
        """The name without its suffix."""
        return FORM.fullmatch(name)[1]

    @property
    def scheme(self) -> str:
        return "trained"


class LinFusion(Word):
    """LinFusion, linear attention, with random weights; trained layers are in folders."""

    kind = example = "linfusion"
    places = (UNET_STEP,)
    title = "LinFusion"
