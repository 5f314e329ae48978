"""What the attention of each layer does to the model's output, measured along exact runs.

Each call of the model runs exact and is then repeated with AVQ in one layer at a time, at a few
thresholds. In the end, an allocation of all layers is measured in the same way, to correct what is
predicted from single layers.
"""

import warnings
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import Any, TypeAlias

import torch
from diffusers import DiffusionPipeline
from torch import Tensor, nn

from avq_diffusers.config import AVQConfig, check_int
from avq_diffusers.hosts.core import (
    NUM_TRAIN_TIMESTEPS,
    Hosted,
    at_timestep,
    checked_examples,
    installed,
    run_examples,
    states_of_config,
)
from avq_diffusers.hosts.measuring.allocation import MILLISECONDS, OPERATIONS, THRESHOLDS, Choice
from avq_diffusers.hosts.measuring.exact_run import ExactRun, Repeat
from avq_diffusers.hosts.measuring.measured_layer import MeasuredLayer
from avq_diffusers.hosts.measuring.profile import ErrorProfile, Part
from avq_diffusers.hosts.measuring.progress import Progress, Shown
from avq_diffusers.hosts.models import models_of

# Repeated calls with one layer in AVQ, over all layers.
MOST_REPEATED = 256
# The tolerance whose allocation is measured to correct predicted errors.
CHECKED = 0.02

# Thresholds, or exact attention, by layer name and by the timestep from which they hold.
Plan: TypeAlias = Mapping[str, Mapping[int, Choice]]
Visit: TypeAlias = Callable[[Hosted, list[MeasuredLayer], ExactRun, Repeat], None]


class Measurement:
    """Exact runs of a model on examples, with a visitor for each call.

    Args:
        pipe, examples, config, num_inference_steps, parts, seed, progress, progress_name,
            arguments: as in `measure_error`.
    """

    def __init__(
        self,
        pipe: DiffusionPipeline | nn.Module,
        examples: Any,
        config: AVQConfig | None,
        *,
        num_inference_steps: int = 6,
        parts: int | None = None,
        seed: int = 0,
        progress: Shown = True,
        progress_name: str | None = None,
        **arguments: Any,
    ) -> None:
        self.pipe, self.seed, self.arguments = pipe, seed, arguments
        self.num_inference_steps = num_inference_steps
        self.progress, self.progress_name = progress, progress_name
        self.models = models_of(pipe)
        self.host = self.models[0].host
        self.examples = checked_examples(pipe, self.host, examples, seed, arguments)
        self.scheduler = getattr(pipe, "scheduler", None)
        for name, number in (("num_inference_steps", num_inference_steps), ("parts", parts)):
            if number is not None:
                check_int(name, number, 1, NUM_TRAIN_TIMESTEPS)
        has_timesteps = len(self.models) == 1 and self.models[0].timesteps is not None
        has_parts = has_timesteps and self.scheduler is not None
        usual_parts = max(1, min(3, num_inference_steps // 2)) if has_parts else 1
        self.parts = usual_parts if parts is None else parts
        if self.parts > 1 and not has_parts:
            raise ValueError(
                f"parts must be 1 without a scheduler, with several models, or where calls do not "
                f"tell the timestep, but got {self.parts}."
            )
        model = self.models[0].model
        self.config = self.host.default_config(model) if config is None else config
        _check_measured(self.config)
        for hosted in self.models:
            hosted.host.refuse(hosted.model)
            if getattr(hosted.model, "is_cache_enabled", False):
                raise ValueError(
                    "a diffusers cache reuses results of earlier calls, which repeated calls "
                    "would disturb; measure before enable_cache."
                )

    @property
    def num_steps(self) -> int:
        """The denoising steps of a run, of which each calls the model once or more often."""
        return self.num_inference_steps if self.host.has_prompts else 1

    def runs(self, repeated: int) -> list[list[int]]:
        """The model calls by example and step, each repeated so often: a plan for `Progress`."""
        return [[1 + repeated] * self.num_steps for _ in self.examples]

    def probing_runs(self) -> list[list[int]]:
        """`runs` that probe layers."""
        num_layers = len(states_of_config(self.host.layers(self.models[0].model), self.config))
        turns = self._turns(num_layers)

        def calls(example: int, step: int) -> int:
            first = (example * self.num_steps + step + example) % turns
            return 1 + len(THRESHOLDS) * len(range(first, num_layers, turns))

        return [
            [calls(example, step) for step in range(self.num_steps)]
            for example in range(len(self.examples))
        ]

    def progress_over(self, runs: Sequence[Sequence[int]], name: str) -> Progress:
        """The progress over these runs, by this name if none is given."""
        return Progress(self.progress_name or name, runs, self.progress)

    def follow(
        self, progress: Progress, visit: Visit, *, first_run: int = 0
    ) -> dict[Hosted, list[MeasuredLayer]]:
        """Run all examples and visit each call.

        Args:
            progress: counts the model's calls.
            visit: called after each call with its model, layers, run and what repeats it.
            first_run: number of the first example's run in `progress`.

        Returns:
            The layers of each model.
        """
        run = ExactRun(self.scheduler, self.parts, progress, first_run)
        measured: dict[Hosted, list[MeasuredLayer]] = {}
        # Compiled models run eagerly here, so that measuring leaves no trace in compiled code.
        with ExitStack() as stack:
            for hosted in self.models:
                states = states_of_config(hosted.host.layers(hosted.model), self.config)
                turns = self._turns(len(states))
                layers = measured[hosted] = []
                for number, (layer, state) in enumerate(states.items()):
                    named = replace(layer, name=hosted.prefix + layer.name)
                    turn = number % turns, turns
                    layers.append(MeasuredLayer(named, state, self.config.spec, run, turn))
                    state.function = layers[-1].attend
                stack.enter_context(installed(hosted, states))
                stack.enter_context(run.watch(hosted, partial(visit, hosted, layers, run)))
            stack.enter_context(torch.compiler.set_stance("force_eager"))
            for _ in run_examples(
                self.pipe,
                self.host,
                run.follow(self.examples),
                self.num_inference_steps,
                self.seed,
                self.arguments,
            ):
                pass
        return measured

    def _turns(self, num_layers: int) -> int:
        """Measure each layer in one of this many calls, to stay within `MOST_REPEATED`."""
        num_calls = len(self.examples) * self.num_steps
        turns = -(-len(THRESHOLDS) * num_calls * num_layers // MOST_REPEATED)
        return max(1, min(turns, num_calls // self.parts))


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
    square over the calls, all alike. A call runs exact and is repeated with AVQ. The profile holds
    for the image size that was measured; with four prompts or more it also holds for other prompts.
    The model is left unchanged.

    Args:
        pipe: a pipeline with a `unet` or a `transformer`, or a vision model.
        examples: prompts; prompt i runs with seed `seed + i`. For a vision model, `pixel_values`
            (B, C, H, W), or several batches of one height and width.
        config: levels, exact layers, sizes, tiles and updates; a tolerance replaces its threshold.
            None is the default of `apply_avq`.
        num_inference_steps: denoising steps per prompt.
        parts: how many parts of the denoising, of equally many steps, get thresholds of their own
            and keep a tolerance. None is one per two steps, at most 3. Pipelines with several
            models, and models whose calls do not tell the timestep, accept only 1.
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
            enabled; or several parts for a pipeline, model or sampler that cannot have them.
        RuntimeError: a layer did not run.
    """
    measurement = Measurement(
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
    probing = measurement.probing_runs()
    done = measurement.progress_over(probing + measurement.runs(1), "measuring layers")
    with done.open():
        profile = _single_layers(measurement, done)
        checked = profile.within(CHECKED)
        (errors,) = _errors_of(measurement, [checked.choices], done, len(probing))
    corrections = {
        start: max(error[start] for error in errors) / predicted if predicted else 1.0
        for start, predicted in checked.errors.items()
    }
    corrected = {
        start: part._replace(correction=float(f"{corrections[start]:.4g}") or 1.0)
        for start, part in profile.parts.items()
    }
    return replace(profile, parts=corrected)


@torch.no_grad()
def output_errors(
    pipe: DiffusionPipeline | nn.Module,
    examples: str | Sequence[str] | Tensor | Sequence[Tensor],
    plans: Sequence[Plan],
    config: AVQConfig | None = None,
    **arguments: Any,
) -> list[list[float]]:
    """Measure the error of the model's output under several plans for its layers.

    Args:
        plans: `Choice`s by layer name, then by the timestep from which they hold, such as the
            `choices` of an allocation. Layers without an entry run exact.
        pipe, examples, config: as in `measure_error`.
        **arguments: the other arguments of `measure_error`.

    Returns:
        The error per plan and example, in the part of the denoising where it is largest.

    Raises:
        TypeError, ValueError, RuntimeError: as `measure_error`.
    """
    measurement = Measurement(pipe, examples, config, **arguments)
    runs = measurement.runs(len(plans))
    progress = measurement.progress_over(runs, "measuring output errors")
    with progress.open():
        errors = _errors_of(measurement, plans, progress)
    return [[max(of_parts.values()) for of_parts in of_plan] for of_plan in errors]


def _single_layers(measurement: Measurement, progress: Progress) -> ErrorProfile:
    """The profile of single layers, without corrections."""
    starts: Counter[int] = Counter()
    models: Counter[Hosted] = Counter()

    def visit(hosted: Hosted, layers: list[MeasuredLayer], run: ExactRun, repeat: Repeat) -> None:
        starts[run.start] += 1
        models[hosted] += 1
        for layer in layers:
            layer.probe(repeat)

    measured = measurement.follow(progress, visit)
    total = max(1, starts.total())
    layers = [layer for of_model in measured.values() for layer in of_model]
    found = tuple(
        layer.effects(starts, models[hosted] / total)
        for hosted, of_model in measured.items()
        for layer in of_model
    )
    reasons = [
        str(layer.state.last_call)
        for layer, one in zip(layers, found, strict=True)
        if not one.parts
    ]
    if reasons:
        warnings.warn(
            f"AVQ serves no call of {len(reasons)} of {len(layers)} layers, which stay exact: "
            f"{', '.join(sorted({*reasons}))}.",
            stacklevel=4,
        )
    parts = {start: Part(number / total) for start, number in starts.items()}
    unit = MILLISECONDS if any(layer.is_timed for layer in layers) else OPERATIONS
    return ErrorProfile(measurement.config, found, parts, THRESHOLDS, unit)


def _errors_of(
    measurement: Measurement, plans: Sequence[Plan], progress: Progress, first_run: int = 0
) -> list[list[dict[int, float]]]:
    """The output error per plan, example and part."""
    squared: dict[tuple[int, int, int], list[float]] = defaultdict(list)

    def visit(hosted: Hosted, layers: list[MeasuredLayer], run: ExactRun, repeat: Repeat) -> None:
        for number, plan in enumerate(plans):
            trial = {x: at_timestep(parts, run.start).spec for x, parts in plan.items()}
            squared[number, run.example, run.start].append(repeat(trial))

    measurement.follow(progress, visit, first_run=first_run)
    errors: list[list[dict[int, float]]] = [[{} for _ in measurement.examples] for _ in plans]
    for (number, example, start), values in squared.items():
        errors[number][example][start] = (sum(values) / len(values)) ** 0.5
    return errors


def _check_measured(config: AVQConfig) -> None:
    """Refuse a configuration without a threshold to choose."""
    if not isinstance(config, AVQConfig):
        raise TypeError(f"config must be an AVQConfig, but got {config!r}.")
    for name, refused in (
        ("overrides", config.overrides),
        ("num_refined", config.num_refined is not None),
        ("key_norm", config.key_norm),
    ):
        if refused:
            raise ValueError(
                f"a tolerance chooses thresholds for codewords from the keys of each call; drop "
                f"{name}."
            )
