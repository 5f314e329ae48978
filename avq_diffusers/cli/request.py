"""What commands are asked for, by the options that they share: a model, a dial, an image."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import typer

from avq_diffusers.config import AVQConfig, check_text
from avq_diffusers.mini import model_path
from avq_diffusers.options import (
    LARGEST_SEED,
    Dilated,
    dtype_name,
    finite,
    multiple_of,
    not_empty,
    numbers_of,
    thresholds_of,
    tolerances_of,
)

# Kinds of dials.
THRESHOLD, NUM_REFINED, TOLERANCE = "threshold", "num_refined", "tolerance"

Side = Annotated[int | None, typer.Option(callback=multiple_of(8), help="Pixels, a multiple of 8.")]
Steps = Annotated[int, typer.Option(min=1, help="Denoising steps.")]
Seed = Annotated[int, typer.Option(min=0, max=LARGEST_SEED, help="Seed of all random numbers.")]


def text_option(help: str, read: Callable[[str, str], Any], *names: str) -> Any:
    """An option with the value that `read` makes of its name and text; None if it is not given."""

    def callback(option: typer.CallbackParam, text: str | None) -> Any:
        return None if text is None else read(option.opts[0], text)

    return typer.Option(*names, parser=str, callback=callback, metavar="<str>", help=help)


@dataclass(frozen=True)
class ModelOptions:
    """A model and the AVQ to run it with; None takes the default of `apply_avq`.

    Attributes:
        sizes: an `AVQConfig`.
        levels: a tuple of ints.
        exact: a tuple of names.
    """

    name: Annotated[
        str,
        typer.Option(
            "--model",
            callback=model_path,
            help="Folder, .safetensors file or Hub id of a text-to-image model, or one of the "
            "embedded models, mini-sd and mini-sd3.",
        ),
    ] = "mini-sd"
    sizes: Annotated[
        Any,
        text_option(
            "Sizes: M64C8T1e-4 has 64 parents with 8 children each and threshold 1e-4; "
            "M64P16C8 refines 16 parents per query tile instead. By default as in apply_avq.",
            lambda _, text: AVQConfig.parse(text),
            "--config",
        ),
    ] = None
    levels: Annotated[
        Any,
        text_option(
            "UNet levels that run AVQ, such as 0,1; 0 is the finest, and the only one of a "
            "transformer. By default 0 and 1, or the finest level with self-attention.",
            numbers_of,
        ),
    ] = None
    exact: Annotated[
        Any,
        text_option(
            "Comma-separated layers or modules at these levels that keep exact attention.",
            lambda _, text: tuple(text.split(",")),
        ),
    ] = None
    device: Annotated[
        str | None, typer.Option(help="cuda, mps or cpu; by default the fastest available.")
    ] = None
    dtype: Annotated[
        str | None,
        typer.Option(
            callback=dtype_name,
            help="float32, float16 or bfloat16; by default half precision on an NVIDIA GPU.",
        ),
    ] = None


@dataclass(frozen=True)
class ModelRequest(ModelOptions):
    """A model that may run with codebooks."""

    codebooks: Annotated[
        str | None,
        typer.Option(
            help="Folder or Hub id of codebooks for a UNet. They have their own sizes, so they "
            "exclude --config, --levels, --exact, --threshold and --tolerance. By default, "
            "codewords come from the keys of each call."
        ),
    ] = None

    def __post_init__(self) -> None:
        if self.codebooks is not None and (self.sizes or self.levels or self.exact):
            raise ValueError(
                "--codebooks bring their own --config, --levels and --exact; drop one of them."
            )


@dataclass(frozen=True)
class Dial:
    """What a command sets, one value after the other: at most one of three kinds."""

    threshold: Annotated[
        Any,
        text_option(
            "How finely keys are seen, in place of --config's: larger is faster, smaller "
            "closer to exact attention, which is 0; not with --codebooks. bench takes several, "
            "such as 4e-4,1e-4, by default from 1e-3 to 2.5e-5.",
            thresholds_of,
        ),
    ] = None
    num_refined: Annotated[
        Any,
        text_option(
            "Instead of a threshold, the number of parents refined per query tile, at most "
            "the parents of --config or --codebooks. bench takes several, with --codebooks by "
            "default from none to all.",
            numbers_of,
        ),
    ] = None
    tolerance: Annotated[
        Any,
        text_option(
            "Instead of a threshold, the largest relative error of the model's output (noise, "
            "velocity), such as 0.02: measures the layers on this prompt first, then runs the "
            "fastest thresholds within it; not with --codebooks. bench takes several.",
            tolerances_of,
        ),
    ] = None

    def __post_init__(self) -> None:
        given = [f"--{kind.replace('_', '-')}" for kind in self._given()]
        if len(given) > 1:
            raise ValueError(f"{' and '.join(given)} exclude each other; drop one of them.")

    def _given(self) -> dict[str, Sequence[float]]:
        return {kind: values for kind, values in vars(self).items() if values is not None}

    @property
    def kind(self) -> str | None:
        """`THRESHOLD`, `NUM_REFINED` or `TOLERANCE`; None sets nothing."""
        return next(iter(self._given()), None)

    @property
    def values(self) -> Sequence[float]:
        """The values that the command sets."""
        return next(iter(self._given().values()), ())

    def check_for(self, model: ModelRequest) -> None:
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
class ImageRequest:
    """An image to generate; None takes the training size or the pipeline's default."""

    prompt: Annotated[str, typer.Argument(callback=not_empty, help="What the image shows.")]
    negative_prompt: Annotated[str | None, text_option("What it should not show.", check_text)] = (
        None
    )
    height: Side = None
    width: Side = None
    steps: Steps = 25
    guidance_scale: Annotated[
        float | None,
        typer.Option(callback=finite, help="Classifier-free guidance; by default the model's own."),
    ] = None
    seed: Seed = 0
    scalecrafter: Dilated = False

    def __str__(self) -> str:
        details = [f"{self.width} x {self.height}", f"seed {self.seed}", f"steps {self.steps}"]
        if self.guidance_scale is not None:
            details.append(f"guidance {self.guidance_scale:g}")
        if self.scalecrafter:
            details.append("ScaleCrafter")
        return f"{self.prompt} ({', '.join(details)})"
