"""Quality of mini-sd on held-out scenes: FID, CLIP score and copy agreement, with controls."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from diffusers import StableDiffusionPipeline
from tqdm import tqdm

from avq_diffusers.mini import Scene, corrupt, render
from eval.methods import attention_method, method_cells, prepare_methods
from eval.metrics import FrechetDistance, Scorer, clip_scores, copy_agreements
from eval.pictures import generate

FIGURES = ("fid", "clip_score", "copy_agreement")
MEASURED = {*FIGURES, *(f"{name}_sem" for name in FIGURES)}
PROTOCOL = ("num_inference_steps", "dtype")
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
    first_seed: int = 0,
) -> Iterator[dict[str, Any]]:
    """Yield a row a method: its pictures of `scenes` against other scenes.

    The noise of picture i has the seed `first_seed + i`, the same for every method. Two rows of
    rendered pictures come first, as ceiling and floor of the figures: other real scenes, and the
    same with their copies broken.
    """
    prepared = prepare_methods(
        pipe, methods, levels=levels, calibration_prompts=calibration_prompts
    )
    captions = [scene.caption for scene in scenes]
    distance = FrechetDistance(scorer, _render_all(reference_scenes))

    def row(facts: dict[str, Any], pictures: np.ndarray) -> dict[str, Any]:
        agreement = copy_agreements(pictures, scenes)
        clip = clip_scores(scorer, pictures, captions)
        return {
            **facts,
            "num_pictures": len(pictures),
            "fid": distance(pictures),
            "clip_score": float(clip.mean()),
            "clip_score_sem": _standard_error(clip),
            "copy_agreement": float(agreement.mean()),
            "copy_agreement_sem": _standard_error(agreement),
        }

    yield row({"method": REAL}, _render_all(scenes))
    yield row({"method": BROKEN}, _render_all(scenes, broken=True))
    for method in prepared:
        with attention_method(pipe, method):
            pictures = generate(
                pipe,
                captions,
                range(first_seed, first_seed + len(captions)),
                num_inference_steps=num_inference_steps,
                batch_size=batch_size,
                description=method.name,
            )
        yield row(method.facts(), pictures)


def merge_runs(runs: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The rows of results that differ in their seed only: means, standard errors over the runs.

    Args:
        runs: the contents of at least two files of `python -m eval scenes`.

    Raises:
        ValueError: there are fewer, a seed comes twice, or the rest of their protocol differs.
    """
    seeds = [run.get("first_seed") for run in runs]
    if len(runs) < 2 or None in seeds or len(set(seeds)) < len(seeds):
        raise ValueError(f"expected results of scenes with different seeds, but got seeds {seeds}.")
    protocols = [
        {name: run[name] for name in PROTOCOL}
        | {
            "rows": [
                {name: row[name] for name in row if name not in MEASURED} for row in run["rows"]
            ]
        }
        for run in runs
    ]
    if any(protocol != protocols[0] for protocol in protocols):
        raise ValueError(
            f"the runs must have the same methods and pictures, and the same {', '.join(PROTOCOL)}."
        )
    merged = []
    for facts, *rows in zip(protocols[0]["rows"], *(run["rows"] for run in runs), strict=True):
        figures = {name: np.array([row[name] for row in rows]) for name in FIGURES}
        merged.append(
            {
                **facts,
                "num_runs": len(runs),
                **{name: float(values.mean()) for name, values in figures.items()},
                **{f"{name}_sem": _standard_error(values) for name, values in figures.items()},
            }
        )
    return merged


def scenes_table(rows: Sequence[dict[str, Any]]) -> str:
    """The rows as a Markdown table."""
    lines = [
        "| method | effective codewords | FID | CLIP score | copy agreement |",
        "|---|---|---|---|---|",
    ]
    for row in rows:
        spread = f" ± {row['fid_sem']:.3f}" if "fid_sem" in row else ""
        lines.append(
            f"| {method_cells(row)} | {row['fid']:.3f}{spread} "
            f"| {row['clip_score']:.2f} ± {row['clip_score_sem']:.2f} "
            f"| {row['copy_agreement']:.3f} ± {row['copy_agreement_sem']:.3f} |"
        )
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
