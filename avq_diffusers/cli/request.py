"""What a command was asked for: a model with AVQ, and an image to generate."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from avq_diffusers.config import AVQConfig

# Kinds of dials.
THRESHOLD, NUM_REFINED, TOLERANCE = "threshold", "num_refined", "tolerance"


class Dial(NamedTuple):
    """What a command sets.

    Attributes:
        kind: `THRESHOLD`, `NUM_REFINED` or `TOLERANCE`; None sets nothing.
        values: the values that it sets one after the other.
    """

    kind: str | None = None
    values: Sequence[float] = ()

    @classmethod
    def of(cls, **options: Sequence[float] | None) -> "Dial":
        """The one of these options that is given; the others are None."""
        given = {name: values for name, values in options.items() if values is not None}
        if len(given) > 1:
            names = " and ".join(f"--{name.replace('_', '-')}" for name in given)
            raise ValueError(f"{names} exclude each other; drop one of them.")
        return cls(*given.popitem()) if given else cls()

    def check_for(self, model: "ModelRequest") -> None:
        """Refuse to set what a model does not have."""
        if model.codebooks is not None and self.kind in (THRESHOLD, TOLERANCE):
            raise ValueError(
                "Thresholds and tolerances exclude --codebooks, whose dial is the number of "
                "refined parents; drop one of them."
            )
        if self.kind == NUM_REFINED and model.sizes is not None:
            most = model.sizes.most_refined
            if not all(0 <= x <= most for x in self.values):
                raise ValueError(
                    f"{model.sizes} can refine 0 to {most} parents, but got "
                    f"{', '.join(map(str, self.values))}."
                )


@dataclass(frozen=True)
class ModelRequest:
    """A model and the AVQ to run it with.

    Attributes:
        name: folder, .safetensors file or Hub id of the model.
        device: cuda, mps or cpu; None takes the fastest available.
        dtype: of the model; None is half precision on an NVIDIA GPU, else float32.
        codebooks: folder or Hub id; None takes codewords from the keys of each call.
        sizes: sizes without codebooks; None is the default of `apply_avq`.
        levels: levels with AVQ; None is the default of `apply_avq`.
        exact: layers or modules that keep exact attention.
    """

    name: str
    device: str | None = None
    dtype: str | None = None
    codebooks: str | None = None
    sizes: AVQConfig | None = None
    levels: tuple[int, ...] | None = None
    exact: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.codebooks is not None and (self.sizes or self.levels or self.exact):
            raise ValueError(
                "--codebooks bring their own --config, --levels and --exact; drop one of them."
            )


@dataclass(frozen=True)
class ImageRequest:
    """An image to generate; None takes the training size or the pipeline's default."""

    prompt: str
    negative_prompt: str | None
    height: int | None
    width: int | None
    steps: int
    guidance_scale: float | None
    seed: int
    scalecrafter: bool

    def __str__(self) -> str:
        details = [f"{self.width} x {self.height}", f"seed {self.seed}", f"steps {self.steps}"]
        if self.guidance_scale is not None:
            details.append(f"guidance {self.guidance_scale:g}")
        if self.scalecrafter:
            details.append("ScaleCrafter")
        return f"{self.prompt} ({', '.join(details)})"
