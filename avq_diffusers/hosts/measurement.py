"""What the attention of each layer does to the model's output, measured along exact runs.

Every call of the model runs exact, and is then repeated with AVQ in one layer at a time. That is
done for two sizes of each layer. The others follow from the errors of the layer's own attention:
what a small error does to the output is proportional to it.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, replace
from functools import partial
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from diffusers import DiffusionPipeline
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from tqdm import tqdm

from avq_diffusers.attention.api import avq_attention
from avq_diffusers.config import AVQConfig, Sizes, check_int
from avq_diffusers.hosts.examples import checked_examples, run_examples
from avq_diffusers.hosts.host import Host, Hosted, installed
from avq_diffusers.hosts.layers import LayerSpec
from avq_diffusers.hosts.models import models_of
from avq_diffusers.hosts.profile import Choice, ErrorProfile, LayerEffects, Point
from avq_diffusers.hosts.refinement import EXACT
from avq_diffusers.hosts.routing import kept_milliseconds
from avq_diffusers.hosts.sources import default_config, states_of_config
from avq_diffusers.hosts.state import LayerState, with_sinks
from avq_diffusers.hosts.timesteps import (
    NUM_TRAIN_TIMESTEPS,
    Timesteps,
    at_timestep,
    sampling_weights,
)

# From fast to exact. On real keys more parents and refined parents pay first, then exact keys.
LADDER = (
    "M32P4C8",
    "M64P8C8",
    "M64P16C8",
    "M64P32C8",
    "M128P32C8",
    "M64P16C8E256",
    "M128P32C8E256",
    "M128P32C8E512",
    "M64P32C8E1024",
)
# Calls of the model that are repeated with one layer in AVQ, in all layers together. A minute of
# SD1.5 at 1024 pixels, three of Flux at 2048 on an H200 have room for them.
MOST_REPEATED = 256
# Predicted errors at which allocations are measured as a whole.
CHECKED = (0.005, 0.01, 0.02, 0.05, 0.1)

# What each layer runs in a repeated call; exact attention in layers that it does not name.
Trial: TypeAlias = Mapping["MeasuredLayer", Sizes | None]
# Sizes, or exact attention, by layer name and by the timestep from which they hold.
Plan: TypeAlias = Mapping[str, Mapping[int, Choice]]


class Run:
    """Where exact runs of a model are, and the repeated calls beside them.

    Second evaluations of noise-damped ScaleCrafter, inside a call of the UNet, are part of it.

    Args:
        parts: how many equal parts of the training timesteps are kept apart.
        weights: of the errors of calls, by training timestep; None if all count alike.
        bar: moves by one per call of the exact runs.

    Attributes:
        start: the timestep at which the present part begins.
        weight: of the present call's error.
        number: of the present call, over all examples.
        example: number of the present example.
        depth: calls of the model under way.
        trial: what a repeated call runs; None in the exact one.
    """

    def __init__(self, parts: int, weights: Tensor | None, bar: tqdm) -> None:
        starts = [NUM_TRAIN_TIMESTEPS * (parts - part) // parts for part in range(parts)]
        self.starts = {start: start for start in starts}
        self.weights = weights
        self.bar = bar
        self.start = NUM_TRAIN_TIMESTEPS
        self.weight = 1.0
        self.number = -1
        self.example = -1
        self.depth = 0
        self.trial: Trial | None = None
        self.timesteps = Timesteps()

    def follow(self, examples: Iterable[Any]) -> Iterator[Any]:
        """The examples, counted."""
        for self.example, example in enumerate(examples):
            yield example

    @contextmanager
    def watch(
        self, hosted: Hosted, visit: Callable[[float, Callable[[Trial], float]], None]
    ) -> Iterator[None]:
        """Follow the calls of a model inside the `with` block.

        After each call, `visit` gets the squared norm of its output, and a function that repeats
        the call and returns the squared error.
        """

        def leave(model: nn.Module, args: tuple, kwargs: dict, output: Any) -> None:
            try:
                if self.depth == 1 and output is not None:
                    exact = _tensors_of(output)

                    def repeat(trial: Trial) -> float:
                        self.trial = trial
                        try:
                            return _squared(_tensors_of(model(*args, **kwargs)), exact)
                        finally:
                            self.trial = None

                    visit(_squared(exact), repeat)
            finally:
                self.depth -= 1

        enter = partial(self._enter, has_timesteps=hosted.host.has_timesteps)
        with (
            hosted.entrance.register_forward_pre_hook(enter, with_kwargs=True),
            hosted.entrance.register_forward_hook(leave, with_kwargs=True, always_call=True),
        ):
            yield

    def _enter(self, model: nn.Module, args: tuple, kwargs: dict, *, has_timesteps: bool) -> None:
        self.depth += 1
        if self.depth > 1:
            return
        self.number += 1
        self.bar.update()
        if len(self.starts) > 1 and has_timesteps:
            timestep = self.timesteps.of_call(args, kwargs)
            if timestep is not None:
                if self.number == 0:  # parts before the first call take its sizes
                    first = at_timestep(self.starts, timestep)
                    self.starts |= {x: NUM_TRAIN_TIMESTEPS for x in self.starts if x >= first}
                self.start = at_timestep(self.starts, timestep)
                if self.weights is not None:
                    self.weight = float(self.weights[min(int(timestep), len(self.weights) - 1)])


class MeasuredLayer:
    """A layer along exact runs: the errors of its own attention, and their effect on the output.

    Args:
        layer: name, level and head shape.
        state: of the layer during the measurement.
        config: its sizes join those of `LADDER`.
        run: where the model is.

    Attributes:
        every: in which of so many calls the layer is measured; a call out of them each.
        first: the number of the first such call.
        num_tokens: of the first call.
        times: by configuration string, for these tokens, and of exact attention; sizes that meet as
            many columns as there are tokens are left out.
    """

    def __init__(self, layer: LayerSpec, state: LayerState, config: AVQConfig, run: Run) -> None:
        self.layer = LayerSpec(**layer.stored)
        self.state = state
        self.config = config
        self.run = run
        self.every, self.first = 1, 0
        self.num_tokens = 0
        self.times: dict[str, float] = {}
        self.own: list[float] = []  # squared errors of the present call by size
        # By part and anchor: weighted squares of the effect, of the output and of own errors.
        self.sums: dict[tuple[int, str], Tensor] = {}

    @property
    def sizes(self) -> list[str]:
        """The sizes that are measured, from few to many columns."""
        return [sizes for sizes in self.times if sizes != EXACT]

    @property
    def anchors(self) -> list[str]:
        """The sizes whose effect is measured on the output itself."""
        sizes = self.sizes
        return [*dict.fromkeys(sizes[len(sizes) * part // 3] for part in (1, 2))] if sizes else []

    @property
    def is_probed(self) -> bool:
        """Whether the layer is measured in the present call of the model."""
        # Another step in each example, so that every part of the denoising has its turn.
        return (self.run.number + self.run.example) % self.every == self.first

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, codebook: None, **options: Any
    ) -> tuple[Tensor, str]:
        """Exact attention in place of `attention_and_backend`, or what a repeated call tries.

        Raises:
            ValueError: attention has NaN or infinity.
        """
        keys, values = with_sinks(key, value, **options)
        exact_attention = partial(
            F.scaled_dot_product_attention, query, keys, values, scale=options["scale"]
        )

        def avq(sizes: Sizes) -> Tensor:
            return avq_attention(query, key, value, **options | asdict(sizes))

        if self.run.trial is not None:
            sizes = self.run.trial.get(self)
            return (exact_attention() if sizes is None else avq(sizes)), EXACT
        exact = exact_attention()
        if self.run.depth > 1:
            return exact, EXACT
        if not exact.isfinite().all():
            raise ValueError(
                f"the attention of {self.layer.name} gives NaN or infinity; measure a model and "
                f"dtype whose output is finite."
            )
        if not self.times:
            self.num_tokens = key.shape[2]
            rungs = {x: partial(avq, _sizes(x)) for x in self._ladder(key)}
            if key.is_cuda:
                self._compile(rungs.values(), key.device)
            attentions = {**rungs, EXACT: exact_attention}
            self.times = {x: self._time(x, key, attend) for x, attend in attentions.items()}
        if self.is_probed:
            norm = float(exact.float().square().sum())
            errors = [_squared([avq(_sizes(x))], [exact]) for x in self.sizes]
            self.own = [error / norm for error in errors]
        return exact, EXACT

    def probe(self, squared: float, repeat: Callable[[Trial], float]) -> None:
        """Measure what the anchors do to the output of the present call, of this squared norm."""
        own, self.own = self.own, []
        if not own:
            return  # the layer is not measured, or not served, in this call
        weight = self.run.weight
        for anchor in self.anchors:
            effect = repeat({self: _sizes(anchor)})
            sums = torch.tensor([effect, squared, *own], dtype=torch.float64) * weight
            place = self.run.start, anchor
            self.sums[place] = self.sums.get(place, 0) + sums

    def effects(self, output: Mapping[int, float], called: float) -> LayerEffects:
        """The effects and times of all sizes.

        Args:
            output: weighted squares of the outputs of all calls, by part. A part in which the layer
                was not measured has the effects of all others together.
            called: share of the calls that were of the layer's model.

        Raises:
            RuntimeError: there is none; the message says why.
        """
        if not self.times:
            raise RuntimeError(
                f"{self.layer.name} has no call that AVQ serves: "
                f"{self.state.last_call or 'it did not run'}."
            )
        every: dict[str, Tensor] = defaultdict(lambda: torch.zeros(2 + len(self.sizes)).double())
        for (_, anchor), sums in self.sums.items():
            every[anchor] += sums
        total = sum(output.values())
        effects = {
            start: self._effects_of(
                {anchor: self.sums.get((start, anchor), every[anchor]) for anchor in self.anchors},
                squared / total,
            )
            for start, squared in output.items()
        }
        times = {sizes: called * time for sizes, time in self.times.items()}
        return LayerEffects(self.layer, self.num_tokens, times, effects)

    def _effects_of(self, sums: Mapping[str, Tensor], share: float) -> dict[str, float]:
        """By size, from sums of each anchor; `share` is that of the part in all outputs."""
        found = {}
        for place, sizes in enumerate(self.sizes):
            # The anchor of the most similar error: far from it the effect is not proportional.
            nearest, ratio = None, 1.0
            for of_anchor, anchor in zip(sums.values(), self.anchors, strict=True):
                own = of_anchor[2:].clamp(min=torch.finfo(torch.float32).tiny)
                times_own = float(own[place] / own[self.sizes.index(anchor)])
                if nearest is None or abs(math.log(times_own)) < abs(math.log(ratio)):
                    nearest, ratio = of_anchor, times_own
            assert nearest is not None
            effect, output, *_ = nearest.tolist()
            found[sizes] = (share * ratio * effect / output) ** 0.5 if output else 0.0
        return found

    def _ladder(self, key: Tensor) -> list[str]:
        """The sizes that meet fewer columns than there are tokens."""
        every = dict.fromkeys([*LADDER, str(self.config)])
        fewer = [x for x in every if _sizes(x).columns < key.shape[2]]
        return sorted(fewer, key=lambda x: _sizes(x).columns)

    def _time(self, sizes: str, key: Tensor, attend: Callable[[], Tensor]) -> float:
        """Milliseconds on a GPU, else billions of operations by the columns that a query meets."""
        batch, num_heads, num_tokens, head_dim = key.shape
        if not key.is_cuda:
            columns = num_tokens if sizes == EXACT else _sizes(sizes).columns
            return 4e-9 * batch * num_heads * num_tokens * columns * head_dim
        tile, updates = self.config.query_tile, self.config.num_updates
        name = (
            f"{sizes} with tiles of {tile} and {updates} updates, {tuple(key.shape)} keys in "
            f"{str(key.dtype).removeprefix('torch.')}"
        )
        return kept_milliseconds(name, key.device, attend)

    def _compile(self, calls: Collection[Callable[[], Tensor]], device: torch.device) -> None:
        """Run calls once in threads. Their kernels compile side by side, outside the GIL."""

        @torch.no_grad()
        def run(call: Callable[[], Tensor]) -> None:
            with torch.accelerator.device_index(device.index):
                call()

        with ThreadPoolExecutor() as pool:
            done = pool.map(run, calls)
            hidden = self.run.bar.disable
            list(tqdm(done, "kernels", total=len(calls), leave=False, disable=hidden))


class Measurement:
    """Exact runs of a model on examples, with what is measured beside them.

    Args:
        pipe, examples, config, num_inference_steps, seed, progress, arguments: as `measure_error`.
        parts: as `measure_error`, not None.
    """

    def __init__(
        self,
        pipe: DiffusionPipeline | nn.Module,
        examples: Any,
        config: AVQConfig | None,
        *,
        num_inference_steps: int,
        parts: int | None,
        seed: int,
        progress: bool,
        arguments: Mapping[str, Any],
    ) -> None:
        self.pipe, self.seed, self.arguments = pipe, seed, arguments
        self.models = models_of(pipe)
        host = self.models[0].host
        self.examples = checked_examples(pipe, host, examples, arguments)
        self.parts = (3 if host.has_timesteps else 1) if parts is None else parts
        _check_steps(num_inference_steps, self.parts)
        if self.parts > 1 and not host.has_timesteps:
            raise ValueError(
                f"a {host.kind} has no schedules, so parts must be 1, but got {self.parts}."
            )
        layers = host.layers(self.models[0].model)
        self.config = default_config(layers) if config is None else config
        _check_measured(self.config)
        self.num_inference_steps, self.progress = num_inference_steps, progress

    @contextmanager
    def along(self, description: str) -> Iterator["_Along"]:
        """Exact attention in all layers, inside the `with` block."""
        total = _num_calls(self.models[0].host, self.examples, self.num_inference_steps)
        bar = tqdm(desc=description, unit=" calls", total=total, disable=not self.progress)
        run = Run(self.parts, _weights(self.pipe, self.num_inference_steps), bar)
        # Compiled models run eagerly: a measurement leaves no trace in compiled code.
        with bar, ExitStack() as stack:
            layers: dict[Hosted, list[MeasuredLayer]] = {}
            for hosted in self.models:
                hosted.host.refuse(hosted.model)
                if getattr(hosted.model, "is_cache_enabled", False):
                    raise ValueError(
                        "a cache of diffusers reuses what earlier calls computed, and a "
                        "measurement repeats calls; measure before enable_cache."
                    )
                states = states_of_config(hosted.host.layers(hosted.model), self.config)
                layers[hosted] = []
                for layer, state in states.items():
                    named = replace(layer, name=hosted.prefix + layer.name)
                    layers[hosted].append(MeasuredLayer(named, state, self.config, run))
                    state.function = layers[hosted][-1].attend
                stack.enter_context(installed(hosted, states))
            stack.enter_context(torch.compiler.set_stance("force_eager"))
            yield _Along(self, run, layers, stack)


class _Along:
    """Measured layers while exact runs are under way."""

    def __init__(
        self,
        measurement: Measurement,
        run: Run,
        layers: Mapping[Hosted, list[MeasuredLayer]],
        stack: ExitStack,
    ) -> None:
        self.measurement, self.run, self.layers, self.stack = measurement, run, layers, stack

    def each_call(self, visit: Callable[[Hosted, float, Callable[[Trial], float]], None]) -> None:
        """Run all examples; `visit` as for `Run.watch`, with the model that was called."""
        for hosted in self.layers:
            self.stack.enter_context(self.run.watch(hosted, partial(visit, hosted)))
        one = self.measurement
        run_examples(
            one.pipe,
            one.models[0].host,
            self.run.follow(one.examples),
            one.num_inference_steps,
            one.seed,
            one.arguments,
        )


@torch.no_grad()
def measure_error(
    pipe: DiffusionPipeline | nn.Module,
    examples: Sequence[str] | Tensor | Sequence[Tensor],
    config: AVQConfig | None = None,
    *,
    num_inference_steps: int = 6,
    parts: int | None = None,
    seed: int = 0,
    progress: bool = True,
    **arguments: Any,
) -> ErrorProfile:
    """Measure what AVQ at several sizes, in one layer at a time, does to the model's output.

    The error of the output is |model(AVQ) - model(exact)| / |model(exact)|: of the predicted noise
    or velocity, or of a vision model's first output. Over the calls of a run it is the root of the
    mean square; calls of a UNet count as an error of their noise changes the image. Every call runs
    exact, and is repeated with AVQ. It holds for images of the size that was measured; four prompts
    or more make it hold for other prompts. The model is left as it was.

    Args:
        pipe: a pipeline with a `unet` or a `transformer`, or a vision model.
        examples: prompts, of which number i runs with seed `seed + i`; of a vision model,
            `pixel_values` (B, C, H, W), or several batches of one height and width.
        config: levels, exact layers, tiles and updates; its sizes join those that are measured.
            None is the finest level with self-attention.
        num_inference_steps: denoising steps of each prompt.
        parts: how many equal parts of the training timesteps may get sizes of their own. A part
            without a denoising step takes the sizes of the part before. None is 3 for a UNet and 1
            for other models, which take no other number.
        seed: of the noise.
        progress: show progress bars.
        **arguments: further arguments of the pipeline's or model's call, such as `height`.

    Returns:
        A profile for `apply_avq(pipe, profile, tolerance=0.02)`.

    Raises:
        TypeError: AVQ does not know the model, it needs a pipeline to run, or an argument has the
            wrong type or is one that is set for each prompt.
        ValueError: there is no example, step, part or layer; `config` has overrides, stored
            codewords or a key norm; attention has NaN or infinity; a cache of diffusers is
            enabled; or several parts are asked of a model or sampler without training timesteps.
        RuntimeError: AVQ would serve no call of a layer; the message says why.
    """
    measurement = Measurement(
        pipe,
        examples,
        config,
        num_inference_steps=num_inference_steps,
        parts=parts,
        seed=seed,
        progress=progress,
        arguments=arguments,
    )
    profile = _single_layers(measurement)
    plans = [profile.within(tolerance).choices for tolerance in CHECKED]
    curve = []
    errors = _errors_of(measurement, plans, "together")
    for tolerance, of_examples in zip(CHECKED, errors, strict=True):
        predicted = profile.within(tolerance).error
        if predicted > 0 and max(of_examples) > 0:
            curve.append(Point(predicted, max(of_examples)))
    return replace(profile, curve=tuple(dict.fromkeys(curve)))


@torch.no_grad()
def output_errors(
    pipe: DiffusionPipeline | nn.Module,
    examples: Sequence[str] | Tensor | Sequence[Tensor],
    plans: Sequence[Plan],
    config: AVQConfig | None = None,
    *,
    num_inference_steps: int = 6,
    parts: int | None = None,
    seed: int = 0,
    progress: bool = True,
    **arguments: Any,
) -> list[list[float]]:
    """Measure the error of the model's output with several plans for its layers.

    Args:
        plans: the `choices` of allocations, or others: `Choice`s by layer name, then by the
            timestep from which they hold. Layers without an entry run exact.
        pipe, examples, config, num_inference_steps, parts, seed, progress: as for `measure_error`.
        **arguments: as for `measure_error`.

    Returns:
        By plan, then by example.

    Raises:
        TypeError, ValueError, RuntimeError: as `measure_error`.
    """
    measurement = Measurement(
        pipe,
        examples,
        config,
        num_inference_steps=num_inference_steps,
        parts=parts,
        seed=seed,
        progress=progress,
        arguments=arguments,
    )
    return _errors_of(measurement, plans, "output error")


def _single_layers(measurement: Measurement) -> ErrorProfile:
    """The profile of layers alone, without a curve."""
    output: dict[int, float] = defaultdict(float)
    calls: dict[int, int] = defaultdict(int)
    of_model: dict[Hosted, int] = defaultdict(int)
    with measurement.along("single layers") as along:
        layers, run = along.layers, along.run
        num_calls = int(run.bar.total or 1)
        repeated = 2 * num_calls * max(map(len, layers.values()))
        every = max(1, min(-(-repeated // MOST_REPEATED), num_calls // measurement.parts))
        for of_one in layers.values():
            for place, layer in enumerate(of_one):
                layer.every, layer.first = every, place % every

        def visit(hosted: Hosted, squared: float, repeat: Callable[[Trial], float]) -> None:
            output[run.start] += run.weight * squared
            calls[run.start] += 1
            of_model[hosted] += 1
            for layer in layers[hosted]:
                layer.probe(squared, repeat)

        along.each_call(visit)
    total = sum(calls.values())
    found = [
        layer.effects(output, of_model[hosted] / max(1, total))
        for hosted, of_one in layers.items()
        for layer in of_one
    ]
    shares = {start: number / total for start, number in calls.items()}
    return ErrorProfile(measurement.config, tuple(found), shares)


def _errors_of(
    measurement: Measurement, plans: Sequence[Plan], description: str
) -> list[list[float]]:
    """The output errors of plans on the examples."""
    sums = torch.zeros(len(plans), len(measurement.examples), 2, dtype=torch.float64)
    with measurement.along(description) as along:
        run = along.run

        def visit(hosted: Hosted, squared: float, repeat: Callable[[Trial], float]) -> None:
            for place, plan in enumerate(plans):
                trial = {
                    layer: at_timestep(plan[layer.layer.name], run.start).sizes
                    for layer in along.layers[hosted]
                    if layer.layer.name in plan
                }
                found = torch.tensor([repeat(trial), squared], dtype=torch.float64)
                sums[place, run.example] += run.weight * found

        for of_one in along.layers.values():
            for layer in of_one:
                layer.every, layer.first = 1, 1  # never: only plans are measured
        along.each_call(visit)
    return (sums[..., 0] / sums[..., 1]).sqrt().tolist()


def _weights(pipe: Any, num_inference_steps: int) -> Tensor | None:
    """Weights of the error of a predicted noise; None if the sampler has no such schedule."""
    alphas_cumprod = getattr(getattr(pipe, "scheduler", None), "alphas_cumprod", None)
    if alphas_cumprod is None or not alphas_cumprod.all():
        return None
    weights = sampling_weights(alphas_cumprod.double(), num_inference_steps)
    return weights / weights.mean()


def _num_calls(host: Host, examples: list[Any], num_inference_steps: int) -> int | None:
    """Of the model, if pipelines of its kind call it once a step."""
    if host.has_timesteps:
        return len(examples) * num_inference_steps
    return None if host.has_prompts else len(examples)


def _check_steps(num_inference_steps: int, parts: int) -> None:
    for name, number in (("num_inference_steps", num_inference_steps), ("parts", parts)):
        check_int(name, number, 1)
        if number > NUM_TRAIN_TIMESTEPS:
            raise ValueError(f"{name} must be at most {NUM_TRAIN_TIMESTEPS}, but got {number}.")


def _check_measured(config: AVQConfig) -> None:
    """Refuse a configuration whose sizes are no rung."""
    if not isinstance(config, AVQConfig):
        raise TypeError(f"config must be an AVQConfig, but got {config!r}.")
    for name, refused in (
        ("overrides", config.overrides),
        ('codewords="stored"', config.codewords == "stored"),
        ("key_norm", config.key_norm),
    ):
        if refused:
            raise ValueError(
                f"a tolerance chooses sizes of AVQ with codewords of each call; drop {name}."
            )


def _sizes(text: str) -> Sizes:
    return AVQConfig.parse(text).sizes


def _tensors_of(output: Any) -> list[Tensor]:
    """The tensors of a model's first output."""
    first = output if isinstance(output, Tensor) else output[0]
    return [x for x in pytree.tree_leaves(first) if isinstance(x, Tensor)]


def _squared(found: Sequence[Tensor], exact: Sequence[Tensor] | None = None) -> float:
    """The sum of squares, of the difference from `exact` if given."""
    differences = (
        found
        if exact is None
        else [a.float() - b.float() for a, b in zip(found, exact, strict=True)]
    )
    return sum(float(x.float().square().sum()) for x in differences)
