"""The captioned scenes that the embedded models learned: drawing, captions, agreement of copies.

Training and evaluation draw scene seeds from disjoint ranges.
"""

from distill.scenes.coco import write_coco
from distill.scenes.copies import copy_agreement, corrupt
from distill.scenes.layout import IMAGE_SIZE
from distill.scenes.rendering import render
from distill.scenes.sampling import sample_scene
from distill.scenes.scenes import Scene

__all__ = [
    "IMAGE_SIZE",
    "SCORER_SEEDS",
    "TEST_SEEDS",
    "TRAINING_SEEDS",
    "VALIDATION_SEEDS",
    "Scene",
    "copy_agreement",
    "corrupt",
    "render",
    "sample_scene",
    "write_coco",
]

TRAINING_SEEDS = range(0, 10_000_000)  # VAE and UNet
SCORER_SEEDS = range(10_000_000, 20_000_000)
VALIDATION_SEEDS = range(20_000_000, 30_000_000)  # losses and sample grids during training
TEST_SEEDS = range(30_000_000, 40_000_000)  # published results
