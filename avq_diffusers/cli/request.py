"""What a command was asked for: a model with AVQ, and an image to generate."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from avq_diffusers.config import AVQConfig
from avq_diffusers.options import numbers_of


@dataclass(frozen=True)
class Dial:
    """What a command sets; at most one of these is given, the others are None.

    Attributes:
        thresholds: thresholds of all layers.
        numbers: numbers of refined parents.
        tolerances: relative errors of the model's output.

    Raises:
        ValueError: more than one is given.
    """

    thresholds: Sequence[float] | None = None
    numbers: Sequence[int] | None = None
    tolerances: Sequence[float] | None = None

    def __post_init__(self) -> None:
        options = {
            "--threshold": self.thresholds,
            "--num-refined": self.numbers,
            "--tolerance": self.tolerances,
        }
        given = [name for name, values in options.items() if values is not None]
        if len(given) > 1:
            raise ValueError(f"{' and '.join(given)} exclude each other; drop one of them.")

    @property
    def needs_own_codewords(self) -> bool:
        """Whether it sets thresholds, which codebooks do not have."""
        return self.thresholds is not None or self.tolerances is not None


NO_DIAL = Dial()


@dataclass(frozen=True)
class ModelRequest:
    """A model and the AVQ to run it with.

    Attributes:
        name: folder, .safetensors file or Hub id of the model.
        device: cuda, mps or cpu; None takes the fastest available.
        codebooks: folder or Hub id; None takes codewords from the keys of each call.
        sizes: sizes without codebooks; None is the default of `apply_avq`.
        levels: levels with AVQ; None is the default of `apply_avq`.
        exact: layers or modules that keep exact attention.
        dtype: of the model; None is half precision on an NVIDIA GPU, else float32.
        is_compiled: whether to compile the model.
    """

    name: str
    device: str | None
    codebooks: str | None
    sizes: AVQConfig | None
    levels: tuple[int, ...] | None
    exact: tuple[str, ...]
    dtype: str | None = None
    is_compiled: bool = False

    @classmethod
    def from_options(
        cls,
        model: str,
        codebooks: str | None,
        config: str | None,
        levels: str | None,
        exact: str | None,
        device: str | None,
        dial: Dial = NO_DIAL,
        **others: Any,
    ) -> "ModelRequest":
        """Read a command's options.

        Args:
            model, codebooks, config, levels, exact, device: the options of these names.
            dial: what the command will set.
            **others: further fields of the class.

        Raises:
            ValueError: an option has a bad value or contradicts another.
        """
        if codebooks is not None and any(x is not None for x in (config, levels, exact)):
            raise ValueError(
                "--codebooks bring their own --config, --levels and --exact; drop one of them."
            )
        if codebooks is not None and dial.needs_own_codewords:
            raise ValueError(
                "Thresholds and tolerances exclude --codebooks, whose dial is the number of "
                "refined parents; drop one of them."
            )
        sizes = None if config is None else AVQConfig.parse(config)
        refined = dial.numbers or ()
        if sizes is not None and not all(0 <= x <= sizes.most_refined for x in refined):
            raise ValueError(
                f"{sizes} can refine 0 to {sizes.most_refined} parents, but got "
                f"{', '.join(map(str, refined))}."
            )
        return cls(
            *(model, device, codebooks, sizes),
            None if levels is None else numbers_of("--levels", levels),
            () if exact is None else tuple(exact.split(",")),
            **others,
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
