"""mini-sd and mini-sd3, the embedded models: where their weights are, and prompts for them."""

from pathlib import Path

MINI_SD = str(Path(__file__).parent / "mini-sd")
MINI_SD3 = str(Path(__file__).parent / "mini-sd3")
# Stored codebooks, distilled by configs/mini_m64p16c8.yaml.
MINI_CODEBOOKS = str(Path(__file__).parent / "codebooks")
MINI_GUIDANCE_SCALE = 3.0

IMAGE_SIZE = 256  # of the images that mini-sd learned

# Captions of scenes, for mini-sd and mini-sd3.
MINI_PROMPTS = (
    "two small brown plain crosses left of four small red striped stars on a tiled beige "
    "background",
    "four large brown patterned hearts in the corners on a mirrored gray background",
    "three large blue patterned arrows around the center on a mirrored pink background",
    "two medium yellow striped arrows in a row at the top on a tiled gray background",
    "two medium blue patterned diamonds above one medium red patterned triangle on a tiled forest "
    "background",
    "four small yellow striped moons in the corners on a mirrored navy background",
    "three medium yellow patterned squares left of two medium teal patterned drops on a mirrored "
    "gray background",
    "one medium red patterned hexagon at the bottom right on a tiled lavender background",
)
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
    """Return at most eight prompts for a first try of mini-sd or mini-sd3."""
    return list(MINI_PROMPTS[:count])


def usual_prompts(model: str) -> list[str]:
    """Return the prompts to calibrate a model on when the user gives none."""
    return default_prompts() if model in (MINI_SD, MINI_SD3) else list(CALIBRATION_PROMPTS)
