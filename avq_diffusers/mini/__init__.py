"""mini-sd, the embedded default model: where its weights lie, and the scenes it is trained on.

The seeds of the procedural scenes are split once and for all, so that no evaluation ever meets a
training picture.
"""

from pathlib import Path

from avq_diffusers.mini.scenes import (
    IMAGE_SIZE,
    VOCABULARY,
    Scene,
    copy_agreement,
    corrupt,
    render,
    sample_scene,
    write_coco,
)

__all__ = [
    "IMAGE_SIZE",
    "MINI_CODEBOOKS",
    "MINI_CODEBOOKS_LEVEL1",
    "MINI_GUIDANCE_SCALE",
    "MINI_SD",
    "SCORER",
    "SCORER_SEEDS",
    "TEST_SEEDS",
    "TRAINING_SEEDS",
    "VALIDATION_SEEDS",
    "VOCABULARY",
    "Scene",
    "copy_agreement",
    "corrupt",
    "default_prompts",
    "model_path",
    "render",
    "sample_scene",
    "write_coco",
]

MINI_SD = str(Path(__file__).parent / "mini-sd")
# Distilled by configs/mini_m64p16c8.yaml, and with level 1 by configs/mini_m64p16c8_level1.yaml; to
# be small, changes of projections are in half precision.
MINI_CODEBOOKS = str(Path(__file__).parent / "codebooks")
MINI_CODEBOOKS_LEVEL1 = str(Path(__file__).parent / "codebooks-level1")
MINI_GUIDANCE_SCALE = 3.0
SCORER = str(Path(__file__).parent / "mini-sd" / "scorer")

TRAINING_SEEDS = range(0, 10_000_000)  # VAE and UNet
SCORER_SEEDS = range(10_000_000, 20_000_000)
VALIDATION_SEEDS = range(20_000_000, 30_000_000)  # losses and sample grids while training
TEST_SEEDS = range(30_000_000, 40_000_000)  # published figures


def model_path(name: str) -> str:
    """The folder of mini-sd for the name `"mini-sd"`; any other name is that of its own model."""
    return MINI_SD if name == "mini-sd" else name


def default_prompts(count: int = 8) -> list[str]:
    """Return captions of `count` validation scenes, as prompts for a first try."""
    return [sample_scene(seed).caption for seed in VALIDATION_SEEDS[:count]]
