"""Write `eval/results/models.md`: which image and video models of diffusers run AVQ.

Run it from the root of the repository:

    python -m tests.reliability.models

A model is served if it has a row in the contract's tests: with all keys exact, a real one at tiny
size gives what it gives without AVQ. What is found in the installed diffusers is kept in
`models.json`.
"""

import inspect
import json
import re
import sys
from pathlib import Path
from typing import Any

import diffusers
from diffusers.pipelines.auto_pipeline import (
    AUTO_TEXT2IMAGE_PIPELINES_MAPPING,
    AUTO_TEXT2VIDEO_PIPELINES_MAPPING,
)

from eval.store.markdown import markdown_table
from eval.store.report import save_json

sys.path += [str(Path(__file__).parents[1])]

from hosts.zoo import ZOO
from tiny_transformers import SIZES

RESULTS = Path(__file__).resolve().parents[2] / "eval" / "results"
# Components of a pipeline that AVQ is applied to.
DENOISERS = ("unet", "transformer", "transformer_2", "unconditional_transformer")
# The rows of the contract's tests, and models with tests of their own.
SERVED = {
    *ZOO,
    *(cls.__name__ for cls in SIZES),
    *("ZImageTransformer2DModel", "QwenImage21Transformer2DModel"),
    *("UNet2DConditionModel", "UNetMotionModel"),
}
REFERENCES = "exact with reference images"
BUT_FOR = {
    **dict.fromkeys(
        ("FluxTransformer2DModel", "Flux2Transformer2DModel", "Flux3Transformer2DModel")
        + ("QwenImageTransformer2DModel", "ZImageTransformer2DModel"),
        REFERENCES,
    ),
    "QwenImage21Transformer2DModel": "exact in the first step, which attends part by part",
}
NOT_SERVED = {
    "SanaTransformer2DModel": "linear attention of its own",
}


def text_pipelines() -> dict[str, list[str]]:
    """Pipelines from a text alone to an image or video, with the classes that AVQ is applied to."""
    named = {
        pipe.__name__
        for mapping in (AUTO_TEXT2IMAGE_PIPELINES_MAPPING, AUTO_TEXT2VIDEO_PIPELINES_MAPPING)
        for pipe in mapping.values()
    }
    return {}
