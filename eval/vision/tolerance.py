"""Whether a tolerance of a vision transformer holds on photographs that were not probed.

columns        codewords and keys that a patch meets, at most, CLS apart; mean over layers
largest_error  the largest of the layers' mean errors, of those with AVQ
layers_over    how many of these have a mean error of more than 1.2 times the tolerance
images_over    share of these layers and photographs with more than that
sets_held      share of all sets of as many probed photographs that leave no layer over on the rest
features_off   |f - exact| / |exact| of the last hidden states f, mean over photographs
"""

from collections.abc import Iterator, Sequence
from statistics import mean
from typing import Any

import torch
from torch import Tensor, nn
from tqdm import tqdm

from avq_diffusers import ErrorProfile, apply_avq, measure_error, remove_avq, summary
from eval.keys.measuring import distance
from eval.keys.photographs import PHOTOGRAPHS, photograph
from eval.keys.subjects import vision_arguments
from eval.quality.tolerance import SLACK, held_out_errors, joined, sets_held, summarise
from eval.store.markdown import markdown_table, number

Row = dict[str, Any]


@torch.no_grad()
def measure_tolerances(
    model: nn.Module, tolerances: Sequence[float], size: int, num_probed: int, num_images: int
) -> Iterator[Row]:
    """Probe some photographs; measure layers and features on others. A row per tolerance."""
    names = PHOTOGRAPHS[: num_images + num_probed]
    images = [vision_arguments(model, photograph(name, size)) for name in names]
    profiles = [_profile(model, **one) for one in tqdm(images, "errors")]
    held_out, others = images[:num_images], profiles[:num_images]
    profile = joined(profiles[num_images:])
    exact = [model(**one)[0] for one in held_out]
    for tolerance in tolerances:
        plan = profile.within(tolerance).values()
        choices = [choice.sizes for parts in plan for choice in parts.values()]
        apply_avq(model, profile, tolerance=tolerance, route="always")
        outputs = [model(**one)[0] for one in held_out]
        num_tokens = summary(model).rows[0].num_tokens
        remove_avq(model)
        figures = summarise(held_out_errors(profile, others, tolerance), tolerance)
        yield {
            "tolerance": tolerance,
            "layers": figures["parts"],
            "avq_layers": figures["avq_parts"],
            "columns": mean(num_tokens if x is None else x.columns for x in choices),
            "tokens": num_tokens,
            "largest_error": figures["largest_error"],
            "layers_over": figures["parts_over"],
            "images_over": figures["prompts_over"],
            "sets_held": sets_held(profiles, num_probed, tolerance),
            "features_off": mean(map(distance, outputs, exact)),
        }


def _profile(model: nn.Module, pixel_values: Tensor, **options: Any) -> ErrorProfile:
    return measure_error(model, pixel_values, progress=False, **options)


def tolerances_table(rows: Sequence[Row]) -> str:
    """The rows as a Markdown table."""
    over = f"over {SLACK} x"
    return markdown_table(
        [
            "tolerance",
            "layers with AVQ",
            "columns",
            "largest error",
            f"layers {over}",
            f"layers and images {over}, %",
            "probes that hold, %",
            "features off",
        ],
        (
            [
                str(row["tolerance"]),
                f"{row['avq_layers']} of {row['layers']}",
                f"{row['columns']:.0f} of {row['tokens']}",
                number(row["largest_error"]),
                str(row["layers_over"]),
                f"{100 * row['images_over']:.1f}",
                f"{100 * row['sets_held']:.0f}",
                number(row["features_off"]),
            ]
            for row in rows
        ),
    )
