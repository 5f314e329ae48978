"""Elastic inference by a target: the capture of each layer, and the plan that reaches it.

A query tile refines its most important parents. So one pass over the queries and keys of a layer
gives its capture for every number of refined parents.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from diffusers import DiffusionPipeline
from torch import Tensor
from tqdm import tqdm

from avq_diffusers.attention.diagnostics import capture_curve
from avq_diffusers.files import atomic_write
from avq_diffusers.plugin.apply import avq_disabled
from avq_diffusers.plugin.layer_state import LayerState, applied_states
from avq_diffusers.plugin.layers import SelfAttentionLayer, unet_of
from avq_diffusers.plugin.probe import Probe, check_probe, load_profile
from avq_diffusers.plugin.prompts import checked_prompts, run_prompts
from avq_diffusers.plugin.timesteps import NUM_TRAIN_TIMESTEPS

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
        return load_profile(
            cls,
            path,
            lambda document: cls(
                {
                    name: {
                        int(start): tuple(tuple(map(float, curve)) for curve in heads)
                        for start, heads in parts.items()
                    }
                    for name, parts in document["curves"].items()
                }
            ),
        )

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
    check_probe(num_inference_steps, parts)
    layers = {
        layer: state for layer, state in applied_states(pipe).items() if state.config.num_children
    }
    if not layers:
        raise ValueError("AVQ is flat here: without children, nothing can be refined.")

    bar = tqdm(total=len(prompts) * num_inference_steps, desc="capture", disable=not progress)
    captures = _Captures(layers, parts, bar)
    with bar, avq_disabled(pipe), captures.watch(unet_of(pipe), layers):
        run_prompts(pipe, prompts, num_inference_steps, seed, pipe_arguments)
    return CaptureProfile(
        {
            layer.name: {
                start: tuple(map(tuple, values.mean(0).tolist()))
                for start, values in captures.values_of(layer.name).items()
            }
            for layer in layers
        }
    )


class _Captures(Probe):
    """The capture curve of each layer."""

    def __init__(self, states: Mapping[SelfAttentionLayer, LayerState], parts: int, bar: tqdm):
        super().__init__(parts, bar)
        self.states = states

    def measure(self, layer: SelfAttentionLayer, hidden_states: Tensor) -> Tensor | None:
        state = self.states[layer]
        if not state.is_on_grid(hidden_states):
            return None
        last_image = hidden_states[-1:]
        return capture_curve(
            state.weights.project_heads(layer.attn, "to_q", last_image),
            state.weights.project_heads(layer.attn, "to_k", last_image),
            state.weights.codebook,
            num_parents=state.config.num_parents,
            num_children=state.config.num_children,
            codewords=state.config.codewords,
            num_updates=state.config.num_updates,
            query_tile=state.config.query_tile,
            query_order=state.present_call().query_order,
            importance_tile=state.config.importance_tile,
        )


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
