"""What the attention of each layer does to the model's output, measured along exact runs.

Each call of the model runs exact and is then repeated with AVQ in one layer at a time, at one
threshold and, in the last part of the denoising, at all. In the end, an allocation of all layers is
measured in the same way, to correct what is predicted from single layers.
"""

import warnings
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeAlias

import torch
from diffusers import DiffusionPipeline
from torch import Tensor, nn

from avq_diffusers.config import AVQConfig
from avq_diffusers.hosts.core import AVQ_CALL, Hosted, agreed, at_timestep
from avq_diffusers.hosts.measuring.allocation import MILLISECONDS, OPERATIONS, Choice
from avq_diffusers.hosts.measuring.exact_runs import ExactRuns, MeasuredLayer, Repeat
from avq_diffusers.hosts.measuring.profile import ErrorProfile, Part
from avq_diffusers.hosts.measuring.progress import Shown

# The error in every part whose allocation is measured to correct predicted errors.
CHECKED = 0.01
# Other prompts than the measured ones have up to this many times their errors.
MARGIN = 2.25

# Thresholds, or exact attention, by layer name and by the timestep from which they hold.
Plan: TypeAlias = Mapping[str, Mapping[int, Choice]]


@torch.no_grad()
def measure_error(
    pipe: DiffusionPipeline | nn.Module,
    examples: str | Sequence[str] | Tensor | Sequence[Tensor],
    config: AVQConfig | None = None,
    *,
    num_inference_steps: int = 6,
    parts: int | None = None,
    seed: int = 0,
    progress: Shown = True,
    progress_name: str | None = None,
    **arguments: Any,
) -> ErrorProfile:
    """Measure what AVQ does to the model's output, at several thresholds, one layer at a time.

    The error is |model(AVQ) - model(exact)| / |model(exact)|, where the output is the predicted
    noise or velocity, or a vision model's first output: in each part of the denoising the root mean
    square over the calls, all alike. A call runs exact and is repeated with AVQ: in the last part
    at three thresholds, in the others at the middle one, which the other two follow. The profile
    holds for the image size that was measured. Predicted errors stay 2.25 times below a tolerance,
    so that it also holds on most other prompts; measure on several. The model is left unchanged.

    Args:
        pipe: a pipeline with a `unet` or a `transformer`, or a vision model.
        examples: prompts; prompt i runs with seed `seed + i`. For a vision model, `pixel_values`
            (B, C, H, W), or several batches of one height and width.
        config: levels, exact layers, sizes and tiles; a tolerance replaces its threshold.
            None is the default of `apply_avq`.
        num_inference_steps: denoising steps per prompt.
        parts: how many parts of the denoising, of equally many steps, get thresholds of their own
            and a share of a tolerance. None is one per two steps, at most 3. Pipelines with several
            models, models whose calls do not tell the timestep, and samplers without training
            timesteps, such as EDM's, only have 1.
        seed: seeds the noise.
        progress: show a progress bar, which counts model calls. A function is called in its place
            with its name, the calls done and all calls.
        progress_name: what the bar says; None is "measuring layers".
        **arguments: passed on to the pipeline or model, such as `height`.

    Returns:
        A profile for `apply_avq(pipe, profile, tolerance=0.02)`.

    Raises:
        TypeError: AVQ does not know the model, it needs a pipeline to run, or an argument has the
            wrong type or is set by this function.
        ValueError: no example, step, part or layer; `config` has overrides, refined parents, stored
            codewords or a key norm; attention returns NaN or infinity; a diffusers cache is
            enabled; several parts for a pipeline, model or sampler that cannot have them; or a
            callback stops the denoising before its last part.
        RuntimeError: a layer did not run.
    """
    runs = ExactRuns(
        pipe,
        examples,
        config,
        num_inference_steps=num_inference_steps,
        parts=parts,
        seed=seed,
        progress=progress,
        progress_name=progress_name,
        **arguments,
    )
    with runs.open_progress("measuring layers", runs.num_probed, (1, 1)):
        single = _single_layers(runs)
        profile = agreed(runs.ranks, lambda: single)  # times differ between ranks
        checked = profile.bounded(dict.fromkeys(profile.parts, CHECKED))
        (errors,) = _errors_of(runs, [checked.choices])
    measured = {}
    for start, part in profile.parts.items():
        largest = max(error.get(start, 0.0) for error in errors)
        predicted = checked.errors[start]
        correction = largest / predicted if largest and predicted else 1.0
        measured[start] = replace(part, correction=float(f"{correction:.4g}"))
    return replace(profile, parts=measured, margin=MARGIN)


@torch.no_grad()
def output_errors(
    pipe: DiffusionPipeline | nn.Module,
    examples: str | Sequence[str] | Tensor | Sequence[Tensor],
    plans: Sequence[Plan],
    config: AVQConfig | None = None,
    **arguments: Any,
) -> list[list[dict[int, float]]]:
    """Measure the error of the model's output under several plans for its layers.

    Args:
        plans: `Choice`s by layer name, then by the timestep from which they hold, such as the
            `choices` of an allocation. Layers without an entry run exact.
        pipe, examples, config: as in `measure_error`.
        **arguments: the other arguments of `measure_error`.

    Returns:
        Per plan and example, the errors by the timestep at which a part of the denoising begins.

    Raises:
        TypeError, ValueError, RuntimeError: as `measure_error`.
    """
    runs = ExactRuns(pipe, examples, config, **arguments)
    with runs.open_progress("measuring output errors", (len(plans), len(plans))):
        return _errors_of(runs, plans)


def _single_layers(runs: ExactRuns) -> ErrorProfile:
    """The profile of single layers, without corrections."""
    starts: Counter[int] = Counter()
    models: Counter[Hosted] = Counter()

    def visit(hosted: Hosted, layers: list[MeasuredLayer], repeat: Repeat) -> None:
        starts[runs.start] += 1
        models[hosted] += 1
        for layer in layers:
            layer.probe(repeat)

    measured = runs.follow(visit, runs.num_probed)
    total = max(1, starts.total())
    found = {
        layer: layer.effects(starts, models[hosted] / total)
        for hosted, layers in measured.items()
        for layer in layers
    }
    if min(runs.starts) not in starts:
        raise ValueError(
            "the denoising stopped before its last part; measure without the callback that stops "
            "it, or pass parts=1."
        )
    last_calls = [layer.state.last_call for layer, one in found.items() if not one.parts]
    reasons = ["too few calls" if x == AVQ_CALL else str(x) for x in last_calls]
    if reasons:
        warnings.warn(
            f"AVQ serves no measured call of {len(reasons)} of {len(found)} layers, which stay "
            f"exact: {', '.join(sorted({*reasons}))}.",
            stacklevel=4,
        )
    parts = {start: Part(number / total) for start, number in starts.items()}
    unit = MILLISECONDS if any(layer.is_timed for layer in found) else OPERATIONS
    return ErrorProfile(runs.config, tuple(found.values()), parts, runs.thresholds, unit)


def _errors_of(runs: ExactRuns, plans: Sequence[Plan]) -> list[list[dict[int, float]]]:
    """The output error per plan, example and part."""
    squared: dict[tuple[int, int, int], list[float]] = defaultdict(list)

    def visit(hosted: Hosted, layers: list[MeasuredLayer], repeat: Repeat) -> None:
        for number, plan in enumerate(plans):
            tried = {name: at_timestep(parts, runs.start).spec for name, parts in plan.items()}
            squared[number, runs.example, runs.start].append(repeat(tried))

    runs.follow(visit, (len(plans), len(plans)))
    errors: list[list[dict[int, float]]] = [[{} for _ in runs.examples] for _ in plans]
    for (number, example, start), values in squared.items():
        errors[number][example][start] = (sum(values) / len(values)) ** 0.5
    return errors
