"""LinFusion's COCO protocol, which the paper follows, as named constants.

The code is src/eval of the repository Huage001/LinFusion (eval.py, calculate_metrics.py). Its
captions and metrics came from GigaGAN by way of SiD-LSG. Every row here differs in three ways:

- The safety checker is off. LinFusion also scores its black images.
- Noise is drawn on the CPU, so that every machine starts from the same noise. LinFusion's is drawn
  on the GPU.
- The CLIP score sees unchanged images. LinFusion's conversion lowers 63 of 256 levels by 1.
"""

from collections.abc import Mapping
from pathlib import PurePath
from typing import Any

# Images: eval.py and examples/eval/eval.sh. Image i has caption i and noise from seed i. At 1024
# the paper adds ScaleCrafter, with settings that it does not state.
SIZES = (512, 1024)
GENERATION = {
    "model": "stable-diffusion-v1-5",  # from any owner, or a folder of this name
    "captions": "LinFusion's list",
    "num_images": 30_000,
    "sampler": "PNDM",  # SD1.5's default; 26 UNet evaluations
    "num_inference_steps": 25,
    "guidance_scale": 7.5,  # without a negative prompt
    "dtype": "float16",
}
CAPTIONS_SHA256 = "edabd2a556026cbf5d36a5fffa35ad43d7ba71b72f6d640b727c1edefb7f1945"

# FID: calculate_metrics.py with --eval_res 256, clean-fid's mode "clean". Every image of val2014
# is a reference. Centre crop, Lanczos to FID_SIZE in bytes, bicubic to INCEPTION_SIZE in floats.
# Images are read as clean-fid reads them, with Pillow's convert("RGB"): EXIF orientation is not
# applied, transparent pixels keep their hidden colour (usually black), and grey values of 16 bits
# are clipped at 255 (usually to white).
NUM_REAL = 40_504
FID_SIZE = 256
INCEPTION_SIZE = 299

# CLIP score: calculate_metrics.sh passes --clip_model ViT-G/14, which selects these weights. Plain
# cosine: not times 100, not clamped.
CLIP_MODEL = "ViT-g-14"
CLIP_WEIGHTS = "laion2b_s12b_b42k"
CLIP_PREFIX = "A photo depicts "


def deviations(
    generation: Mapping[str, Any], *, num_images: int, num_real: int, scorer: str | None
) -> list[str]:
    """Describe what differs from the protocol; empty for metrics that may be compared.

    Args:
        generation: configuration of a folder of images.
        num_images: number of scored images.
        num_real: number of real images.
        scorer: folder that stands in for Inception and CLIP.
    """
    model = PurePath(generation["model"]).name
    actual = {**generation, "model": model, "num_images": num_images, "num_real": num_real}
    actual["scalecrafter"] = bool(generation["scalecrafter"])
    expected = {**GENERATION, "scalecrafter": generation["size"] == 1024, "num_real": NUM_REAL}
    found = [
        f"{name} is {actual.get(name)}, not {value}"
        for name, value in expected.items()
        if actual.get(name) != value
    ]
    if generation["size"] not in SIZES:
        found.append(f"size is {generation['size']}, not {' or '.join(map(str, SIZES))}")
    if scorer is not None:
        found.append("a scorer stands in for Inception and CLIP")
    return found
