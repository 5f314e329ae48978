"""Elastic inference by a target: the capture of each layer, and the plan that reaches it.

A query tile refines its most important parents. So one pass over the queries and keys of a layer
gives its capture for every number of refined parents.
"""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

from diffusers import DiffusionPipeline
from diffusers.models.attention_processor import Attention
from torch import Tensor, nn
from tqdm import tqdm

from avq_diffusers.attention.diagnostics import capture_curve
from avq_diffusers.config import check_int
from avq_diffusers.files import atomic_write
from avq_diffusers.plugin.apply import avq_disabled
from avq_diffusers.plugin.layer_state import LayerState, applied_states
from avq_diffusers.plugin.layers import SelfAttentionLayer, unet_of
from avq_diffusers.plugin.prompts import checked_prompts, run_prompts
from avq_diffusers.plugin.timesteps import NUM_TRAIN_TIMESTEPS, Timesteps, at_timestep

# The kernels compute children in blocks of 4 or 8 parents, and are compiled for each number.
PARENT_STEP = 4
SHOWN_TARGETS = (0.8, 0.9, 0.95)

Curve = tuple[float, ...]


@dataclass(frozen=True)
class CaptureProfile:
    """The capture of each layer of a pipeline, by the number of refined parents.

    `str()` is a table of the numbers that `at_least` chooses for some targets.

    Attributes:
        curves: by layer name, then by the training timestep at which a part of the denoising
            begins: one curve per head, the capture of 0, 1, ... M0 refined parents.

    Raises:
        ValueError: a layer has no part from timestep 1000 on, or a curve does not rise from 0 to 1.
    """

    curves: Mapping[str, Mapping[int, Sequence[Curve]]] = field(repr=False)

    def __post_init__(self) -> None:
        for name, parts in self.curves.items():
            if max(parts, default=None) != NUM_TRAIN_TIMESTEPS:
                raise ValueError(f"curves of {name} must begin at timestep {NUM_TRAIN_TIMESTEPS}.")
            if not all(map(_are_captures, parts.values())):
                raise ValueError(f"curves of {name} must rise from 0 to 1 in every head.")

    def at_least(self, target: float) -> dict[str, dict[int, int]]:
        """The plan that reaches a capture with the fewest refined parents.

        The capture is the mean over heads, as in the report of `calibrate`. A head that attends
        everywhere has a low capture for any choice, but loses least by coarse keys.

        Args:
            target: above 0; 1 refines every parent that gets attention.

        Returns:
            For `set_num_refined`: by layer and timestep, the smallest multiple of 4 parents, or all
            of them. All parents reach every target.

        Raises:
            ValueError: `target` is not above 0 and at most 1.
        """
        if not 0 < target <= 1:
            raise ValueError(f"target must be above 0 and at most 1, but got {target}.")
        return {
            name: {start: _fewest_parents(heads, target) for start, heads in parts.items()}
            for name, parts in self.curves.items()
        }

    def save(self, path: str | Path) -> None:
        """Write a JSON file, in one step.

        Raises:
            OSError: the disk is full or not writable.
        """
        with atomic_write(Path(path)) as temporary:
            temporary.write_text(json.dumps({"curves": self.curves}))

    @classmethod
    def load(cls, path: str | Path) -> "CaptureProfile":
        """Read a file that `save` wrote.

        Raises:
            OSError: the file cannot be read.
            ValueError: it holds something else.
        """
        try:
            document = json.loads(Path(path).read_text())
            return cls(
                {
                    name: {
                        int(start): tuple(tuple(map(float, curve)) for curve in heads)
                        for start, heads in parts.items()
                    }
                    for name, parts in document["curves"].items()
                }
            )
        except (
            AttributeError,
            KeyError,
            OverflowError,
            RecursionError,
            TypeError,
            ValueError,
        ) as error:
            raise ValueError(f"{path} is not a saved CaptureProfile: {error!r}.") from error

    def __str__(self) -> str:
        plans = [self.at_least(target) for target in SHOWN_TARGETS]
        width = max(map(len, ["layer", *self.curves]))
        header = "".join(f"  {f'{target:.0%}':>4}" for target in SHOWN_TARGETS)
        lines = [f"{'layer':<{width}}  from{header}"]
        for name, parts in self.curves.items():
            for start in parts:
                counts = "".join(f"  {plan[name][start]:>4}" for plan in plans)
                lines.append(f"{name:<{width}}  {start:>4}{counts}")
        return "\n".join(lines)


def measure_capture(
    pipe: DiffusionPipeline,
    prompts: Sequence[str],
    *,
    num_inference_steps: int = 8,
    parts: int = 4,
    seed: int = 0,
    progress: bool = True,
    **pipe_arguments: Any,
) -> CaptureProfile:
    """Measure the capture of every AVQ layer for every number of refined parents.

    The pipeline runs exact attention, so the result does not depend on the present number. Of each
    batch the last image counts: with guidance, the one that sees the prompt, except in
    InstructPix2Pix. Second evaluations of noise-damped ScaleCrafter do not count.

    Args:
        pipe: a Stable Diffusion pipeline with AVQ; left as it was.
        prompts: one or a handful; number i runs with seed `seed + i`.
        num_inference_steps: denoising steps of each run.
        parts: how many equal parts of the training timesteps get their own number of parents. A
            part without a denoising step takes the number of the part before.
        seed: of the noise.
        progress: show a progress bar.
        **pipe_arguments: further arguments of the pipeline's call, such as `height` or `image`.

    Returns:
        A profile. Its `at_least(0.9)` is a plan for `set_num_refined`.

    Raises:
        TypeError: `pipe` is not a pipeline with a UNet, `prompts` is one string, a number is not an
            int, or an argument is prompt, generator or output_type.
        ValueError: there is no prompt, no step, no part, no AVQ, or no codebook with children, or
            there are several parts for a sampler without training timesteps, such as EDM's.
        RuntimeError: a layer did not run, as in a compiled UNet.
    """
    prompts = checked_prompts(pipe, prompts, pipe_arguments)
    for name, number in (("num_inference_steps", num_inference_steps), ("parts", parts)):
        check_int(name, number, 1)
        if number > NUM_TRAIN_TIMESTEPS:
            raise ValueError(f"{name} must be at most {NUM_TRAIN_TIMESTEPS}, but got {number}.")
    layers = {
        layer: state for layer, state in applied_states(pipe).items() if state.config.num_children
    }
    if not layers:
        raise ValueError("AVQ is flat here: without children, nothing can be refined.")

    bar = tqdm(total=len(prompts) * num_inference_steps, desc="capture", disable=not progress)
    measurement = _Measurement(parts, bar)
    with bar, avq_disabled(pipe), measurement.watch(unet_of(pipe), layers):
        run_prompts(pipe, prompts, num_inference_steps, seed, pipe_arguments)
    return CaptureProfile({layer.name: measurement.curves(layer.name) for layer in layers})


class _Measurement:
    """The curves of a UNet's layers while it runs, summed over the calls in each part."""

    def __init__(self, parts: int, bar: tqdm) -> None:
        starts = [NUM_TRAIN_TIMESTEPS * (parts - part) // parts for part in range(parts)]
        self.starts = {start: start for start in starts}
        self.start = NUM_TRAIN_TIMESTEPS
        self.timesteps = Timesteps()
        self.bar = bar
        self.depth = 0  # calls of the UNet under way
        self.sums: dict[tuple[str, int], Tensor] = {}

    @contextmanager
    def watch(
        self, unet: nn.Module, layers: Mapping[SelfAttentionLayer, LayerState]
    ) -> Iterator[None]:
        with ExitStack() as hooks:
            hooks.enter_context(unet.register_forward_pre_hook(self.enter, with_kwargs=True))
            hooks.enter_context(unet.register_forward_hook(self.leave, always_call=True))
            for layer, state in layers.items():
                see_layer = partial(self.see_layer, layer.name, state)
                hooks.enter_context(layer.attn.register_forward_pre_hook(see_layer))
            yield

    def enter(self, unet: nn.Module, args: tuple, kwargs: dict) -> None:
        self.depth += 1
        if self.depth == 1:
            timestep = self.timesteps.of_call(args, kwargs) if len(self.starts) > 1 else None
            if timestep is not None:
                self.start = at_timestep(self.starts, timestep)
            self.bar.update()

    def leave(self, unet: nn.Module, args: tuple, output: Any) -> None:
        self.depth -= 1

    def see_layer(self, name: str, state: LayerState, attn: Attention, args: tuple) -> None:
        hidden_states = args[0][-1:]
        if self.depth > 1 or not state.is_on_grid(hidden_states):
            return
        curve = capture_curve(
            state.weights.project_heads(attn, "to_q", hidden_states),
            state.weights.project_heads(attn, "to_k", hidden_states),
            state.weights.codebook,
            num_parents=state.config.num_parents,
            num_children=state.config.num_children,
            codewords=state.config.codewords,
            num_updates=state.config.num_updates,
            query_tile=state.config.query_tile,
            query_order=state.present_call().query_order,
            importance_tile=state.config.importance_tile,
        )
        self.sums[name, self.start] = self.sums.get((name, self.start), 0) + curve

    def curves(self, name: str) -> dict[int, tuple[Curve, ...]]:
        """The mean curves of a layer, by the start of each part that had a call."""
        sums = {
            start: self.sums[name, start] for start in self.starts if (name, start) in self.sums
        }
        if not sums:
            raise RuntimeError(
                f"{name} did not run on its grid of tokens; measure before compiling and without "
                "merging tokens."
            )
        # The first part that had a call also covers the parts before it.
        starts = [NUM_TRAIN_TIMESTEPS, *list(sums)[1:]]
        means = ((total / total[:, -1:]).tolist() for total in sums.values())
        return {start: tuple(map(tuple, mean)) for start, mean in zip(starts, means, strict=True)}


def _are_captures(heads: Sequence[Curve]) -> bool:
    return len(set(map(len, heads))) == 1 and all(
        len(curve) > 1
        and (curve[0], curve[-1]) == (0, 1)
        and all(fewer <= more for fewer, more in pairwise(curve))
        for curve in heads
    )


def _fewest_parents(heads: Sequence[Curve], target: float) -> int:
    captures = [sum(captured) / len(heads) for captured in zip(*heads, strict=True)]
    fewest = next(count for count, captured in enumerate(captures) if captured >= target)
    return min(math.ceil(fewest / PARENT_STEP) * PARENT_STEP, len(captures) - 1)
