"""Errors and costs along the ladder of sizes, measured while the layers run exact attention."""

from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from diffusers import DiffusionPipeline
from torch import Tensor, nn
from tqdm import tqdm

from avq_diffusers.attention.api import avq_attention
from avq_diffusers.config import AVQConfig, check_int
from avq_diffusers.hosts.examples import checked_examples, run_examples
from avq_diffusers.hosts.host import Host, installed
from avq_diffusers.hosts.layers import LayerSpec
from avq_diffusers.hosts.models import models_of
from avq_diffusers.hosts.profile import ErrorProfile, LayerErrors
from avq_diffusers.hosts.refinement import EXACT
from avq_diffusers.hosts.routing import Workload, next_power_of_two, relative_cost
from avq_diffusers.hosts.sources import default_config, states_of_config
from avq_diffusers.hosts.state import LayerState, with_sinks
from avq_diffusers.hosts.timesteps import NUM_TRAIN_TIMESTEPS, Timesteps, at_timestep

# From fast to exact. On real keys more parents and refined parents pay first, then exact keys.
LADDER = (
    "M32P4C8",
    "M64P4C8",
    "M64P8C8",
    "M64P16C8",
    "M64P32C8",
    "M128P32C8",
    "M64P16C8E256",
    "M128P32C8E256",
    "M64P32C8E1024",
)


class Denoising:
    """How far a model is in its run.

    Second evaluations of noise-damped ScaleCrafter, inside a call of the UNet, do not count.

    Args:
        parts: how many equal parts of the training timesteps are kept apart.
        bar: moves by one per call of the model.

    Attributes:
        start: the timestep at which the present part begins.
        depth: calls of the model under way.
    """

    def __init__(self, parts: int, bar: tqdm) -> None:
        starts = [NUM_TRAIN_TIMESTEPS * (parts - part) // parts for part in range(parts)]
        self.starts = {start: start for start in starts}
        self.start = NUM_TRAIN_TIMESTEPS
        self.depth = 0
        self.timesteps = Timesteps()
        self.bar = bar

    @contextmanager
    def watch(self, model: nn.Module) -> Iterator[None]:
        """Follow the calls of a model inside the `with` block."""
        with (
            model.register_forward_pre_hook(self.enter, with_kwargs=True),
            model.register_forward_hook(self.leave, always_call=True),
        ):
            yield

    def enter(self, model: nn.Module, args: tuple, kwargs: dict) -> None:
        self.depth += 1
        if self.depth == 1:
            timestep = self.timesteps.of_call(args, kwargs) if len(self.starts) > 1 else None
            if timestep is not None:
                self.start = at_timestep(self.starts, timestep)
            self.bar.update()

    def leave(self, model: nn.Module, args: tuple, output: Any) -> None:
        self.depth -= 1


class Ladder:
    """The sizes that a layer is measured with: their costs, and their errors call by call.

    Args:
        layer: name, level and head shape.
        state: of the layer during the measurement.
        config: its sizes join those of `LADDER`.
        denoising: how far the model is.

    Attributes:
        num_tokens: of the first call.
        costs: by configuration string, for these tokens; sizes that meet as many columns as there
            are tokens are left out.
        calls: the errors (sizes,) of each call, by the start of its part of the denoising.
    """

    def __init__(
        self, layer: LayerSpec, state: LayerState, config: AVQConfig, denoising: Denoising
    ) -> None:
        self.layer = LayerSpec(**layer.stored)
        self.state = state
        self.config = config
        self.denoising = denoising
        self.num_tokens = 0
        self.costs: dict[str, float] | None = None
        self.calls: dict[int, list[Tensor]] = defaultdict(list)

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, codebook: None, **options: Any
    ) -> tuple[Tensor, str]:
        """Exact attention in place of `attention_and_backend`; its errors are kept.

        Raises:
            ValueError: attention has NaN or infinity.
        """
        keys, values = with_sinks(key, value, **options)
        scale = options["scale"]
        attend = partial(F.scaled_dot_product_attention, query, keys, values, scale=scale)
        exact = attend()
        if self.denoising.depth > 1:
            return exact, EXACT
        if not exact.isfinite().all():
            raise ValueError(
                f"the attention of {self.layer.name} gives NaN or infinity; measure a model and "
                f"dtype whose output is finite."
            )
        rungs = {
            sizes: partial(
                avq_attention, query, key, value, **options | asdict(AVQConfig.parse(sizes).sizes)
            )
            for sizes in (self._rungs(key) if self.costs is None else self.costs)
        }
        if self.costs is None:
            self.num_tokens = key.shape[2]
            if key.is_cuda:
                self._compile(rungs.values(), key.device)
            self.costs = {
                sizes: relative_cost(
                    self._workload(sizes, key), self.num_tokens, key.device, avq=avq, exact=attend
                )
                for sizes, avq in rungs.items()
            }
        errors = [_relative_error(avq(), exact) for avq in rungs.values()]
        self.calls[self.denoising.start].append(torch.tensor(errors, dtype=torch.float64))
        return exact, EXACT

    def layer_errors(self) -> LayerErrors:
        """The largest errors of each part of the denoising that had a call.

        The first part that had a call also covers the parts before it. An error says why there was
        none.
        """
        if not self.calls:
            raise RuntimeError(
                f"{self.layer.name} has no call that AVQ serves: "
                f"{self.state.last_call or 'it did not run'}."
            )
        costs = self.costs or {}
        starts = sorted(self.calls, reverse=True)
        largest = [torch.stack(self.calls[start]).amax(0).tolist() for start in starts]
        errors = {
            start: dict(zip(costs, of_part, strict=True))
            for start, of_part in zip([NUM_TRAIN_TIMESTEPS, *starts[1:]], largest, strict=True)
        }
        return LayerErrors(self.layer, self.num_tokens, costs, errors)

    def _rungs(self, key: Tensor) -> list[str]:
        """The sizes that meet fewer columns than there are tokens."""
        every = dict.fromkeys([*LADDER, str(self.config)])
        return [x for x in every if AVQConfig.parse(x).sizes.columns < key.shape[2]]

    def _workload(self, sizes: str, key: Tensor) -> Workload:
        batch, num_heads, _, head_dim = key.shape
        return Workload(
            next_power_of_two(batch * num_heads),
            head_dim,
            AVQConfig.parse(sizes).sizes,
            self.config.query_tile,
            key.dtype,
            self.config.num_updates,
        )

    def _compile(self, calls: Collection[Callable[[], Tensor]], device: torch.device) -> None:
        """Run calls once in threads. Their kernels compile side by side, outside the GIL."""

        @torch.no_grad()
        def run(call: Callable[[], Tensor]) -> None:
            with torch.accelerator.device_index(device.index):
                call()

        with ThreadPoolExecutor() as pool:
            done = pool.map(run, calls)
            hidden = self.denoising.bar.disable
            list(tqdm(done, "kernels", total=len(calls), leave=False, disable=hidden))


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
    """Measure the error of AVQ at several sizes in every layer, while the model runs exact.

    The error is |avq - exact| / |exact| of the attention of all heads before the output projection,
    over all tokens that query, and the largest over the calls. It holds for images of the size that
    was measured; four prompts or more make it hold for other prompts. The model is left as it was.

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
        progress: show a progress bar.
        **arguments: further arguments of the pipeline's or model's call, such as `height`.

    Returns:
        A profile for `apply_avq(pipe, profile, tolerance=0.1)`.

    Raises:
        TypeError: AVQ does not know the model, it needs a pipeline to run, or an argument has the
            wrong type or is one that is set for each prompt.
        ValueError: there is no example, step, part or layer; `config` has overrides, stored
            codewords or a key norm; attention has NaN or infinity; or several
            parts are asked of a model or sampler without training timesteps.
        RuntimeError: AVQ would serve no call of a layer; the message says why.
    """
    models = models_of(pipe)
    host = models[0].host
    examples = checked_examples(pipe, host, examples, arguments)
    parts = (3 if host.has_timesteps else 1) if parts is None else parts
    _check_steps(num_inference_steps, parts)
    if parts > 1 and not host.has_timesteps:
        raise ValueError(f"a {host.kind} has no schedules, so parts must be 1, but got {parts}.")
    config = default_config(host.layers(models[0].model)) if config is None else config
    _check_measured(config)
    total = _num_calls(host, examples, num_inference_steps)
    bar = tqdm(desc="error", unit=" calls", total=total, disable=not progress)
    denoising = Denoising(parts, bar)
    ladders = []
    # Compiled models run eagerly: a measurement leaves no trace in compiled code.
    with bar, ExitStack() as stack:
        for hosted in models:
            hosted.host.refuse(hosted.model)
            states = states_of_config(hosted.host.layers(hosted.model), config)
            for layer, state in states.items():
                named = replace(layer, name=hosted.prefix + layer.name)
                ladders.append(Ladder(named, state, config, denoising))
                state.function = ladders[-1].attend
            stack.enter_context(installed(hosted, states))
            stack.enter_context(denoising.watch(hosted.entrance))
        stack.enter_context(torch.compiler.set_stance("force_eager"))
        run_examples(pipe, host, examples, num_inference_steps, seed, arguments)
    return ErrorProfile(config, tuple(ladder.layer_errors() for ladder in ladders))


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


def _relative_error(output: Tensor, exact: Tensor) -> float:
    exact = exact.float()
    return float((output.float() - exact).norm() / exact.norm())


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
