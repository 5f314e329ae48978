"""What the attention of each layer does to the model's output, measured along exact runs.

Each call of the model runs exact and is then repeated with AVQ in one layer at a time, at two sizes
per layer. The other sizes follow from the error of the layer's own attention: the effect of a small
error on the output is proportional to it.
"""

import warnings
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple, TypeAlias

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
from avq_diffusers.hosts.measuring.exact_run import ExactRun, Repeat, Trial, squared, tensors_of
from avq_diffusers.hosts.measuring.measured_layer import MeasuredLayer
from avq_diffusers.hosts.measuring.profile import (
    MILLISECONDS,
    OPERATIONS,
    Choice,
    ErrorProfile,
    Point,
)
from avq_diffusers.hosts.measuring.progress import Progress, Shown
from avq_diffusers.hosts.models import models_of

# Repeated calls with one layer in AVQ, over all layers: on an H200 they take up to a minute for
# SD1.5 at 1024 pixels, and up to three for Flux at 2048.
MOST_REPEATED = 256
# Predicted errors at which whole allocations are measured.
CHECKED = (0.005, 0.01, 0.02, 0.05, 0.1)

# Sizes, or exact attention, by layer name and by the timestep from which they hold.
Plan: TypeAlias = Mapping[str, Mapping[int, Choice]]


class Call(NamedTuple):
    """A call of an exact run.

    Attributes:
        hosted: the model that was called.
        layers: the layers measured in it.
        run: progress of its run.
        output: squared norm of its output.
        repeat: repeats it with other attention.
    """

    hosted: Hosted
    layers: list[MeasuredLayer]
    run: ExactRun
    output: float
    repeat: Repeat


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
        _check_steps(num_inference_steps, 1 if parts is None else parts)
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

    @property
    def each_run(self) -> list[list[int]]:
        """One model call per step, in the run of each example: a plan for `progress`."""
        return [[1] * self.num_steps for _ in self.examples]

    def probing_runs(self) -> list[list[int]]:
        """The model calls in runs that probe layers, by example and step."""
        num_layers = len(states_of_config(self.host.layers(self.models[0].model), self.config))
        turns = self._turns(num_layers)
        coarse = 1 if self.parts > 1 else 0

        def calls(example: int, step: int) -> int:
            first = (example * self.num_steps + step + example) % turns
            return 1 + 2 * len(range(first, num_layers, turns)) + coarse

        return [
            [calls(example, step) for step in range(self.num_steps)]
            for example in range(len(self.examples))
        ]

    def progress_over(self, runs: Sequence[Sequence[int]], name: str) -> Progress:
        """The progress over these runs, by this name if none is given."""
        return Progress(self.progress_name or name, runs, self.progress)

    def follow(
        self,
        progress: Progress,
        visit: Callable[[Call], None],
        *,
        first_run: int = 0,
        is_probed: bool = False,
        plan: Mapping[int, Trial] | None = None,
    ) -> tuple[dict[Hosted, list[MeasuredLayer]], list[Tensor]]:
        """Run all examples and visit each call.

        Args:
            progress: counts the model's calls.
            visit: called with each call.
            first_run: number of the first example's run in `progress`.
            is_probed: whether to measure the errors of the layers' own attention.
            plan: what layers run in place of exact attention, by the start of a part.

        Returns:
            The layers of each model and, with several parts, the final latents.
        """
        run = ExactRun(self.scheduler, self.parts, plan or {}, progress, first_run)
        measured: dict[Hosted, list[MeasuredLayer]] = {}
        # Compiled models run eagerly here, so that measuring leaves no trace in compiled code.
        with ExitStack() as stack:
            for hosted in self.models:
                states = states_of_config(hosted.host.layers(hosted.model), self.config)
                turns = self._turns(len(states)) if is_probed else None
                layers = measured[hosted] = []
                for number, (layer, state) in enumerate(states.items()):
                    named = replace(layer, name=hosted.prefix + layer.name)
                    turn = None if turns is None else (number % turns, turns)
                    layers.append(MeasuredLayer(named, state, self.config, run, turn))
                    state.function = layers[-1].attend
                stack.enter_context(installed(hosted, states))
                on_call = partial(_visit, visit, hosted, layers, run)
                stack.enter_context(run.watch(hosted, on_call))
            stack.enter_context(torch.compiler.set_stance("force_eager"))
            outputs = run_examples(
                self.pipe,
                self.host,
                run.follow(self.examples),
                self.num_inference_steps,
                self.seed,
                self.arguments,
            )
            kept = [tensors_of(one) if self.parts > 1 else [] for one in outputs]
        return measured, [latents for tensors in kept for latents in tensors]

    def _turns(self, num_layers: int) -> int:
        """Measure each layer in one of this many calls, to stay within `MOST_REPEATED`."""
        num_calls = len(self.examples) * self.num_steps
        turns = -(-2 * num_calls * num_layers // MOST_REPEATED)
        return max(1, min(turns, num_calls // self.parts))


def _visit(visit: Callable[[Call], None], *call: Any) -> None:
    visit(Call(*call))


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
    """Measure what AVQ does to the model's output, at several sizes, one layer at a time.

    The output error is |model(AVQ) - model(exact)| / |model(exact)|, where the output is the
    predicted noise or velocity, or a vision model's first output. Over a run it is the root mean
    square of the calls' errors, weighted by how much an error changes the image, measured for each
    part of the denoising. Each call runs exact and is repeated with AVQ. The profile holds for the
    image size that was measured; with four prompts or more it also holds for other prompts. The
    model is left unchanged.

    Args:
        pipe: a pipeline with a `unet` or a `transformer`, or a vision model.
        examples: prompts; prompt i runs with seed `seed + i`. For a vision model, `pixel_values`
            (B, C, H, W), or several batches of one height and width.
        config: levels, exact layers, tiles and updates; its sizes are measured too. None is the
            finest level with self-attention.
        num_inference_steps: denoising steps per prompt.
        parts: how many parts of the denoising, of equally many steps, may get sizes of their own.
            None is one per two steps, at most 3. Pipelines with several models, and models whose
            calls do not tell the timestep, accept only 1. Then the errors of all calls count alike.
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
        ValueError: no example, step, part or layer; `config` has overrides, stored codewords or a
            key norm; attention returns NaN or infinity; a diffusers cache is enabled; or several
            parts for a pipeline, model or sampler that cannot have them.
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
    each = measurement.each_run
    of_parts = [calls for _ in range(measurement.parts) for calls in each]
    single = measurement.probing_runs() + (of_parts if measurement.parts > 1 else [])
    together = _with_repeats(each, len(CHECKED))
    done = measurement.progress_over(single + together, "measuring layers")
    with done.open():
        profile = _single_layers(measurement, done)
        plans = [profile.within(tolerance).choices for tolerance in CHECKED]
        errors = _errors_of(measurement, plans, profile.weights, done, len(single))
    curve = []
    for tolerance, of_examples in zip(CHECKED, errors, strict=True):
        predicted = profile.within(tolerance).error
        if predicted > 0 and max(of_examples) > 0:
            curve.append(Point(predicted, max(of_examples)))
    return replace(profile, curve=tuple(dict.fromkeys(curve)))


@torch.no_grad()
def output_errors(
    pipe: DiffusionPipeline | nn.Module,
    examples: str | Sequence[str] | Tensor | Sequence[Tensor],
    plans: Sequence[Plan],
    config: AVQConfig | None = None,
    *,
    weights: Mapping[int, float] | None = None,
    **arguments: Any,
) -> list[list[float]]:
    """Measure the error of the model's output under several plans for its layers.

    Args:
        plans: `Choice`s by layer name, then by the timestep from which they hold, such as the
            `choices` of an allocation. Layers without an entry run exact.
        pipe, examples, config: as in `measure_error`.
        weights: weights of the parts, such as a profile's; None weights all parts equally.
        **arguments: the other arguments of `measure_error`.

    Returns:
        The error per plan and example.

    Raises:
        TypeError, ValueError, RuntimeError: as `measure_error`.
    """
    measurement = Measurement(pipe, examples, config, **arguments)
    runs = _with_repeats(measurement.each_run, len(plans))
    progress = measurement.progress_over(runs, "measuring output errors")
    with progress.open():
        return _errors_of(measurement, plans, weights or {}, progress)


def _with_repeats(runs: Sequence[Sequence[int]], number: int) -> list[list[int]]:
    return [[(1 + number) * calls for calls in steps] for steps in runs]


def _single_layers(measurement: Measurement, progress: Progress) -> ErrorProfile:
    """The profile of single layers, without a curve."""
    outputs: dict[int, float] = defaultdict(float)
    starts: Counter[int] = Counter()
    models: Counter[Hosted] = Counter()
    errors: dict[int, float] = defaultdict(float)  # with coarse sizes in all layers

    def visit(call: Call) -> None:
        outputs[call.run.start] += call.run.weight * call.output
        starts[call.run.start] += 1
        models[call.hosted] += 1
        for layer in call.layers:
            layer.probe(call.output, call.repeat)
        if measurement.parts > 1:
            errors[call.run.start] += call.run.weight * call.repeat(_coarse(call.layers))

    measured, latents = measurement.follow(progress, visit, is_probed=True)
    coarse = _coarse(layer for layers in measured.values() for layer in layers)
    weights = {}
    if len(starts) > 1:
        weights = _image_weights(measurement, progress, coarse, errors, latents)
    for start, weight in weights.items():
        outputs[start] *= weight
    total = max(1, starts.total())
    found = tuple(
        layer.effects(outputs, models[hosted] / total)
        for hosted, layers in measured.items()
        for layer in layers
    )
    _warn_of_unserved([layer for layers in measured.values() for layer in layers])
    shares = {start: number / total for start, number in starts.items()}
    units = {layer.unit for layers in measured.values() for layer in layers}
    unit = MILLISECONDS if MILLISECONDS in units else OPERATIONS
    return ErrorProfile(measurement.config, found, shares, weights=weights, unit=unit)


def _warn_of_unserved(layers: Sequence[MeasuredLayer]) -> None:
    reasons = [str(layer.state.last_call) for layer in layers if not layer.times]
    if reasons:
        warnings.warn(
            f"AVQ serves no call of {len(reasons)} of {len(layers)} layers, which stay exact: "
            f"{', '.join(sorted({*reasons}))}.",
            stacklevel=5,
        )


def _coarse(layers: Iterable[MeasuredLayer]) -> Trial:
    """Coarse sizes in all layers that AVQ serves."""
    return {layer.layer.name: layer.coarse for layer in layers if layer.times}


def _image_weights(
    measurement: Measurement,
    progress: Progress,
    coarse: Trial,
    errors: Mapping[int, float],
    exact: Sequence[Tensor],
) -> dict[int, float]:
    """What a squared output error adds to the image's, by part of the denoising, with mean 1.

    Measured with coarse sizes in one part at a time, relative to `step_weight`, which does not know
    that early errors change what later steps draw.

    Args:
        measurement: runs the model.
        progress: counts its calls.
        coarse: coarse sizes by layer.
        errors: squared output errors with these sizes, by part.
        exact: the exact run's latents.
    """
    ratios = {}
    for part, (start, error) in enumerate(errors.items(), 1):
        first_run = part * len(measurement.examples)
        _, found = measurement.follow(
            progress, lambda call: None, first_run=first_run, plan={start: coarse}
        )
        ratios[start] = squared(found, exact) / error if error else 0.0
    mean = sum(ratios.values()) / len(ratios)
    return {start: ratio / mean for start, ratio in ratios.items()} if mean else {}


def _errors_of(
    measurement: Measurement,
    plans: Sequence[Plan],
    weights: Mapping[int, float],
    progress: Progress,
    first_run: int = 0,
) -> list[list[float]]:
    """The output error per plan and example."""
    sums = torch.zeros(len(plans), len(measurement.examples), 2, dtype=torch.float64)

    def visit(call: Call) -> None:
        run = call.run
        for place, plan in enumerate(plans):
            trial = {x: at_timestep(parts, run.start).spec for x, parts in plan.items()}
            found = torch.tensor([call.repeat(trial), call.output], dtype=torch.float64)
            weight = run.weight * (at_timestep(weights, run.start) if weights else 1.0)
            sums[place, run.example] += weight * found

    measurement.follow(progress, visit, first_run=first_run)
    return (sums[..., 0] / sums[..., 1]).sqrt().tolist()


def _check_steps(num_inference_steps: int, parts: int) -> None:
    for name, number in (("num_inference_steps", num_inference_steps), ("parts", parts)):
        check_int(name, number, 1)
        if number > NUM_TRAIN_TIMESTEPS:
            raise ValueError(f"{name} must be at most {NUM_TRAIN_TIMESTEPS}, but got {number}.")


def _check_measured(config: AVQConfig) -> None:
    """Refuse a configuration whose sizes cannot be a rung."""
    if not isinstance(config, AVQConfig):
        raise TypeError(f"config must be an AVQConfig, but got {config!r}.")
    for name, refused in (
        ("overrides", config.overrides),
        ('codewords="stored"', config.codewords == "stored"),
        ("key_norm", config.key_norm),
    ):
        if refused:
            raise ValueError(
                f"a tolerance chooses sizes for codewords from the keys of each call; drop {name}."
            )
