"""Quality of mini-sd on held-out scenes: FID, CLIP score and copy agreement, with controls."""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from diffusers import StableDiffusionPipeline
from tqdm import tqdm

from avq_diffusers.mini import Scene, corrupt, render
from eval.methods import attention_method, check_methods
from eval.metrics import Scorer, clip_scores, copy_agreements, fid
from eval.pictures import generate

REAL = "real scenes"
BROKEN = "real scenes, copies broken"


def score_methods(
    pipe: StableDiffusionPipeline,
    methods: Sequence[str],
    scenes: Sequence[Scene],
    reference_scenes: Sequence[Scene],
    scorer: Scorer,
    *,
    levels: tuple[int, ...] = (0,),
    calibration_prompts: Sequence[str],
    num_inference_steps: int = 25,
    batch_size: int = 64,
) -> Iterator[dict[str, Any]]:
    """Yield a row a method: its pictures of `scenes` (seed i for scene i) against other scenes.

    Two rows of rendered pictures come first, as ceiling and floor of the figures: other real
    scenes, and the same with their copies broken.
    """
    check_methods(pipe, methods, levels)
    captions = [scene.caption for scene in scenes]
    real = _render_all(reference_scenes)

    def row(name: str, pictures: np.ndarray) -> dict[str, Any]:
        agreement = copy_agreements(pictures, scenes)
        clip = clip_scores(scorer, pictures, captions)
        return {
            "method": name,
            "num_pictures": len(pictures),
            "fid": fid(scorer, real, pictures),
            "clip_score": float(clip.mean()),
            "clip_score_sem": _standard_error(clip),
            "copy_agreement": float(agreement.mean()),
            "copy_agreement_sem": _standard_error(agreement),
        }

    yield row(REAL, _render_all(scenes))
    yield row(BROKEN, _render_all(scenes, broken=True))
    for method in methods:
        with attention_method(pipe, method, levels=levels, calibration_prompts=calibration_prompts):
            pictures = generate(
                pipe,
                captions,
                range(len(captions)),
                num_inference_steps=num_inference_steps,
                batch_size=batch_size,
                description=method,
            )
        yield row(method, pictures)


def scenes_table(rows: Sequence[dict[str, Any]]) -> str:
    """The rows as a Markdown table."""
    lines = ["| method | FID | CLIP score | copy agreement |", "|---|---|---|---|"]
    lines += [
        f"| {row['method']} | {row['fid']:.3f} "
        f"| {row['clip_score']:.2f} ± {row['clip_score_sem']:.2f} "
        f"| {row['copy_agreement']:.3f} ± {row['copy_agreement_sem']:.3f} |"
        for row in rows
    ]
    return "\n".join(lines)


def _render_all(scenes: Sequence[Scene], *, broken: bool = False) -> np.ndarray:
    return np.stack(
        [
            corrupt(scene, seed) if broken else render(scene)
            for seed, scene in enumerate(tqdm(scenes, desc="rendering"))
        ]
    )


def _standard_error(values: np.ndarray) -> float:
    return float(values.std(ddof=1) / len(values) ** 0.5)
