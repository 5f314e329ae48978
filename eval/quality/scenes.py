"""Quality of mini-sd on held-out scenes: FID, CLIP score and copy agreement, with controls."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from time import perf_counter
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from diffusers import StableDiffusionPipeline
from tqdm import tqdm

from distill.scenes import Scene, corrupt, render
from eval.methods.base import AttentionMethod
from eval.methods.prepared import attention_method, load_methods
from eval.methods.registry import EXACT
from eval.quality.frechet import Gaussian, distances, fit_gaussian, frechet_distance
from eval.quality.generation import Sampling, dilation_config, generate
from eval.quality.metrics import (
    Scorer,
    clip_scores,
    copy_agreements,
    image_features,
    psnr,
    psnr_metrics,
)
from eval.quality.scene_rows import BROKEN, LIKENESS, REAL


@dataclass(frozen=True, kw_only=True)
class SceneTrial:
    """What to generate, and what to compare it with.

    Attributes:
        methods: names for `load_methods`.
        scenes: scenes whose captions are prompts. Image i has noise from seed `first_seed + i`.
        reference_scenes: real images for FID.
        settings: if they compile the UNet, it is compiled per method.
        calibration_prompts: prompts at the model's own size.
        levels: UNet levels to change.
        first_seed: seed of the first image.

    Raises:
        ValueError: batches for a compiled UNet differ in size.
    """

    methods: Sequence[str]
    scenes: Sequence[Scene]
    reference_scenes: Sequence[Scene]
    settings: Sampling
    calibration_prompts: Sequence[str]
    levels: tuple[int, ...] = (0,)
    first_seed: int = 0

    def __post_init__(self) -> None:
        batch_size = self.settings.batch_size
        if self.settings.is_compiled and len(self.scenes) % batch_size:
            raise ValueError(
                f"a compiled UNet needs batches of one size, but {len(self.scenes)} images are not "
                f"a multiple of {batch_size}."
            )


def score_methods(
    pipe: StableDiffusionPipeline,
    trial: SceneTrial,
    scorer: Scorer,
    finished: Mapping[str, Mapping[str, Any]] = MappingProxyType({}),
) -> Iterator[Mapping[str, Any]]:
    """Yield one row per method: its images of the scenes against the reference scenes.

    Two rows of rendered images come first, a ceiling and a floor: other real scenes, and the same
    with their copies broken. `exact` comes next, because PSNR and "FID to exact" compare with its
    images. "FID to exact" separates methods that FID does not, because FID varies with the noise.

    Copy agreement is measured at the images' size. The scorer resizes them for FID and CLIP score.
    Seconds per image include the first calls. Two rows of images are in memory at a time.

    Args:
        pipe: a pipeline without AVQ.
        trial: what to do.
        scorer: computes features and CLIP scores.
        finished: an earlier run's rows by method, kept unless their folder has changed or they
            still need a comparison with `exact`. `exact` is drawn again for a method to compare.

    Raises:
        FileNotFoundError, ValueError: see `load_methods` and `dilation_config`.
    """
    scenes, settings = trial.scenes, trial.settings
    dilation_config(pipe, settings)
    loaded = load_methods(pipe, trial.methods, levels=trial.levels)
    finished = _still_valid(finished, loaded)
    prepared = [
        method if method.name in finished else method.calibrated(pipe, trial.calibration_prompts)
        for method in loaded
    ]
    real = _render_all(trial.reference_scenes, settings.size)
    measure = Measure(scorer, scenes, fit_gaussian(image_features(scorer, real)))
    for name in (REAL, BROKEN):
        breaks = range(len(scenes)) if name == BROKEN else None
        yield {"method": name, **measure(_render_all(scenes, settings.size, breaks))[0]}
    exact: tuple[np.ndarray, Gaussian] | None = None
    in_order = sorted(prepared, key=lambda method: method.name != EXACT)
    for number, method in enumerate(in_order, 1):
        if method.name in finished:
            yield finished[method.name]
            continue
        torch.compiler.reset()  # the previous method's code would count as a recompilation
        noise = range(trial.first_seed, trial.first_seed + len(scenes))
        start = perf_counter()
        with attention_method(pipe, method):
            description = f"{method.name} ({number} of {len(prepared)})"
            images = generate(pipe, measure.captions, noise, settings, description=description)
        seconds = (perf_counter() - start) / len(scenes)
        figures, gaussian = measure(images)
        alike: dict[str, float | None] = dict.fromkeys(LIKENESS)
        if exact is not None:
            alike = {"fid_to_exact": frechet_distance(exact[1], gaussian)}
            alike |= psnr_metrics(psnr(images, exact[0]))
        if method.name == EXACT:
            exact = images, gaussian
        yield {**method.facts(), **figures, **alike, "seconds_per_image": seconds}
        del images  # before generating the next


@dataclass(frozen=True)
class Measure:
    """FID to real images, CLIP score and copy agreement of images of scenes.

    Standard errors are over images, for FID with a jackknife.
    """

    scorer: Scorer
    scenes: Sequence[Scene]
    reference: Gaussian

    @property
    def captions(self) -> list[str]:
        return [scene.caption for scene in self.scenes]

    def __call__(self, images: np.ndarray) -> tuple[dict[str, Any], Gaussian]:
        """The metrics, and the Gaussian of the images' features."""
        features = image_features(self.scorer, images)
        gaussian = fit_gaussian(features)
        figures = {"num_images": len(images), **distances(self.reference, features)}
        for name, values in (
            ("clip_score", clip_scores(self.scorer, features, self.captions)),
            ("copy_agreement", copy_agreements(images, self.scenes)),
        ):
            values = torch.from_numpy(values)
            figures[name] = values.mean().item()
            figures[f"{name}_sem"] = (values.std() / len(values) ** 0.5).item()
        return figures, gaussian


def _still_valid(
    finished: Mapping[str, Mapping[str, Any]], methods: Sequence[AttentionMethod]
) -> dict[str, Mapping[str, Any]]:
    """The finished rows that can be kept, by method."""
    is_compared = any(method.name == EXACT for method in methods)
    kept = {
        method.name: row
        for method in methods
        if (row := finished.get(method.name)) is not None
        and row["sha256"] == method.sha256
        and (method.name == EXACT or not is_compared or row["fid_to_exact"] is not None)
    }
    if len(kept) < len(methods):
        kept.pop(EXACT, None)
    return kept


def _render_all(
    scenes: Sequence[Scene], size: int, breaks: Sequence[int] | None = None
) -> np.ndarray:
    """Images of the scenes, with copies broken by these seeds if given."""
    images = np.empty((len(scenes), size, size, 3), np.uint8)
    for index, scene in enumerate(tqdm(scenes, desc="rendering")):
        images[index] = (
            render(scene, size) if breaks is None else corrupt(scene, breaks[index], size)
        )
    return images
