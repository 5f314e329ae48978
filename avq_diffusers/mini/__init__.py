"""mini-sd and mini-sd3, the embedded models: where their weights are, and the scenes they learned.

Training and evaluation draw scene seeds from disjoint ranges.
"""

from pathlib import Path

from avq_diffusers.mini.coco import write_coco
from avq_diffusers.mini.copies import copy_agreement, corrupt
from avq_diffusers.mini.layout import IMAGE_SIZE
from avq_diffusers.mini.rendering import render
from avq_diffusers.mini.sampling import sample_scene
from avq_diffusers.mini.scenes import VOCABULARY, Scene

__all__ = [
    "CALIBRATION_PROMPTS",
    "IMAGE_SIZE",
    "MINI_CODEBOOKS",
    "MINI_GUIDANCE_SCALE",
    "MINI_SD",
    "MINI_SD3",
    "SCORER_SEEDS",
    "TEST_SEEDS",
    "TRAINING_SEEDS",
    "VALIDATION_SEEDS",
    "VOCABULARY",
    "Scene",
    "copy_agreement",
    "corrupt",
    "default_prompts",
    "is_mini_sd3",
    "model_path",
    "render",
    "sample_scene",
    "usual_prompts",
    "write_coco",
]

MINI_SD = str(Path(__file__).parent / "mini-sd")
MINI_SD3 = str(Path(__file__).parent / "mini-sd3")
# Stored codebooks, distilled by configs/mini_m64p16c8.yaml.
MINI_CODEBOOKS = str(Path(__file__).parent / "codebooks")
MINI_GUIDANCE_SCALE = 3.0

TRAINING_SEEDS = range(0, 10_000_000)  # VAE and UNet
SCORER_SEEDS = range(10_000_000, 20_000_000)
VALIDATION_SEEDS = range(20_000_000, 30_000_000)  # losses and sample grids during training
TEST_SEEDS = range(30_000_000, 40_000_000)  # published results

CALIBRATION_PROMPTS = (
    "a photo of a mountain lake at sunrise, pine trees in the foreground",
    "portrait of an old fisherman, dramatic light, detailed skin",
    "a busy street market at night with neon signs",
    "a bowl of fruit on a wooden table, oil painting",
    "an astronaut riding a horse, digital art",
    "close-up of a dragonfly on a leaf, macro photography",
    "a modern living room with a sofa, large windows and plants",
    "aerial view of a coastline with cliffs and waves",
)


def model_path(name: str) -> str:
    """Return the folder of `"mini-sd"` or `"mini-sd3"`, or any other name unchanged."""
    return {"mini-sd": MINI_SD, "mini-sd3": MINI_SD3}.get(name, name)


def is_mini_sd3(folder: str | Path) -> bool:
    """Whether a folder is mini-sd3 or the result of training it: a transformer without a VAE."""
    return (Path(folder) / "transformer").is_dir() and not (Path(folder) / "vae").exists()


def default_prompts(count: int = 8) -> list[str]:
    """Return captions of `count` validation scenes, as prompts for a first try."""
    return [sample_scene(seed).caption for seed in VALIDATION_SEEDS[:count]]


def usual_prompts(model: str) -> list[str]:
    """Return the prompts to calibrate a model on when the user gives none."""
    return default_prompts() if model in (MINI_SD, MINI_SD3) else list(CALIBRATION_PROMPTS)
