"""Quality of mini-sd on held-out scenes: FID, CLIP score and copy agreement, with controls."""

from collections.abc import Iterator, Mapping, Sequence
from time import perf_counter
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from diffusers import StableDiffusionPipeline
from tqdm import tqdm

from avq_diffusers.mini import Scene, corrupt, render
from eval.methods import Method, attention_method, calibrated, load_methods
from eval.names import EXACT
from eval.quality.frechet import fit_gaussian
from eval.quality.generation import Sampling, check_dilation, generate
from eval.quality.metrics import Scorer, clip_scores, copy_agreements, image_features, psnr
from eval.quality.samples import Sample, figures, likeness
from eval.quality.scene_rows import BROKEN, REAL


def score_methods(
    pipe: StableDiffusionPipeline,
    methods: Sequence[str],
    scenes: Sequence[Scene],
    reference_scenes: Sequence[Scene],
    scorer: Scorer,
    settings: Sampling,
    *,
    levels: tuple[int, ...] = (0,),
    calibration_prompts: Sequence[str],
    first_seed: int = 0,
    finished: Mapping[str, Mapping[str, Any]] = MappingProxyType({}),
) -> Iterator[Mapping[str, Any]]:
    """Yield one row per method: its images of `scenes` against `reference_scenes`.

    Image i has the noise of seed `first_seed + i` for every method. Two rows of rendered images
    come first, a ceiling and a floor: other real scenes, and the same with their copies broken.
    `exact` comes next, because PSNR and "FID to exact" compare with its images. "FID to exact"
    separates methods that FID does not, because FID varies with the noise.

    Copy agreement is measured at the size of the images. The scorer resizes them for FID and CLIP
    score. Seconds per image include the first calls. Two rows of images are in memory at a time.

    Args:
        pipe: a pipeline without AVQ.
        methods: names for `load_methods`.
        scenes: scenes whose captions are prompts.
        reference_scenes: real images for FID.
        scorer: gives features and CLIP scores.
        settings: a compiled UNet is compiled for each method.
        levels: UNet levels that change.
        calibration_prompts: prompts at the model's own size.
        first_seed: seed of the first image.
        finished: rows of an earlier run by method. They are kept unless their folder has changed or
            they still need a comparison with `exact`.

    Raises:
        FileNotFoundError, ValueError: see `load_methods`; or the size is not a multiple of 64 or
            has no ScaleCrafter settings, or batches to compile for differ in size.
    """
    size, batch_size = settings.size, settings.batch_size
    if size is None or size <= 0 or size % 64:
        raise ValueError(f"the size must be a multiple of 64, but got {size}.")
    if settings.is_compiled and len(scenes) % batch_size:
        raise ValueError(
            f"a compiled UNet needs batches of one size, but {len(scenes)} images are not "
            f"a multiple of {batch_size}."
        )
    check_dilation(pipe, settings)
    noise = range(first_seed, first_seed + len(scenes))
    loaded = load_methods(pipe, methods, levels=levels)
    captions = [scene.caption for scene in scenes]
    finished = _still_valid(finished, loaded)
    prepared = [
        method if method.name in finished else calibrated(pipe, method, calibration_prompts)
        for method in loaded
    ]
    reference = fit_gaussian(image_features(scorer, _render_all(reference_scenes, size)))

    def measure(images: np.ndarray, exact: np.ndarray | None) -> Sample:
        features = image_features(scorer, images)
        values = (
            clip_scores(scorer, features, captions),
            copy_agreements(images, scenes),
            np.empty(0) if exact is None else psnr(images, exact),
        )
        return Sample(features, *map(torch.from_numpy, values))

    for name in (REAL, BROKEN):
        breaks = range(len(scenes)) if name == BROKEN else None
        sample = measure(_render_all(scenes, size, breaks), None)
        yield {"method": name, **figures(sample, reference)}
    exact = exact_features = None
    are_all_finished = len(finished) == len(prepared)
    for method in sorted(prepared, key=lambda method: method.name != EXACT):
        if method.name in finished and (are_all_finished or method.name != EXACT):
            yield finished[method.name]
            continue
        torch.compiler.reset()  # the code of the method before would count as a recompilation
        start = perf_counter()
        with attention_method(pipe, method):
            images = generate(pipe, captions, noise, settings, description=method.name)
        seconds = (perf_counter() - start) / len(captions)
        sample = measure(images, exact)
        alike = likeness(sample, exact_features)
        if method.name == EXACT:
            exact, exact_features = images, fit_gaussian(sample.features)
        unusual = {"fields": fields} if (fields := method.unusual_fields) else {}
        yield {
            **method.facts(),
            **unusual,
            **figures(sample, reference),
            **alike,
            "seconds_per_image": seconds,
        }
        del images  # before the next ones are made


def _still_valid(
    finished: Mapping[str, Mapping[str, Any]],
    methods: Sequence[Method],
) -> dict[str, Mapping[str, Any]]:
    """The finished rows of these methods that can be kept, by method."""
    is_compared = any(method.name == EXACT for method in methods)
    return {
        method.name: row
        for method in methods
        if (row := finished.get(method.name)) is not None
        and row["sha256"] == method.sha256
        and (method.name == EXACT or not is_compared or row["fid_to_exact"] is not None)
    }


def _render_all(
    scenes: Sequence[Scene], size: int, breaks: Sequence[int] | None = None
) -> np.ndarray:
    """Images of the scenes, with copies broken by these seeds."""
    images = np.empty((len(scenes), size, size, 3), np.uint8)
    for index, scene in enumerate(tqdm(scenes, desc="rendering")):
        images[index] = (
            render(scene, size) if breaks is None else corrupt(scene, breaks[index], size)
        )
    return images
