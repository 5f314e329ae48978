"""Error of the attention variants against the exact teacher, on held-out scenes.

Over all images, timesteps and elements, with s the student's output and t the teacher's:

feature_relative_mse  sum of (s - t)^2 / sum of t^2 of a layer's attn1, the student on its own input
output_error          |s - t| / |t| of the predicted noise

For the student's keys, means over heads and timesteps:

quantization_error    squared distance to what represents the leaf, relative to the keys' variance
active_ratio          share of codewords in use over all timesteps; for own codewords per image
columns               codewords and keys that a query attends to, mean over tiles
capture               share of attention on keys of refined parents, in the first image; without a
                      threshold
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from statistics import mean
from typing import Any

import numpy as np
import torch
from diffusers import StableDiffusionPipeline
from torch import Tensor
from tqdm import tqdm

from avq_diffusers import select_layers
from avq_diffusers.attention.api import attend
from avq_diffusers.attention.diagnostics import (
    active_ratio,
    capture,
    leaf_counts,
    quantization_error,
)
from avq_diffusers.attention.tensors import Attended, Tensors
from avq_diffusers.codebook.codebook import Codebook
from avq_diffusers.config import RESOLUTIONS, Spec
from avq_diffusers.hosts import Layer
from distill.quantizer import recorded
from distill.scenes import Scene, render
from eval.keys.calls import mean_columns
from eval.methods.prepared import Method, attention_method
from eval.methods.registry import row_label
from eval.store.markdown import rows_table

Row = dict[str, Any]
UNetInputs = tuple[Tensor, Tensor, Tensor]

METRICS = {
    "output_error": "output error",
    "feature_relative_mse": "feature, relative MSE",
    "quantization_error": "quantization error",
    "active_ratio": "active ratio",
    "capture": "capture",
}
Squares = tuple[float, float]  # sums of squared errors, and of squared expected values


@torch.no_grad()
def measure_errors(
    pipe: StableDiffusionPipeline,
    methods: Sequence[Method],
    scenes: Sequence[Scene],
    *,
    num_timesteps: int = 8,
    size: int | None = None,
) -> list[Row]:
    """Measure one row per method; `layers` holds each layer's metrics.

    All images of a timestep run in one batch.

    Args:
        pipe: a pipeline without AVQ; its UNet is the teacher.
        methods: methods prepared for `pipe`.
        scenes: scenes whose images are noised.
        num_timesteps: number of timesteps: the middles of equal parts of the noise schedule.
        size: side of the images, a multiple of 64; None takes the UNet's own.
    """
    totals = [_Totals(method) for method in methods]
    steps = noised_scenes(pipe, scenes, num_timesteps, size)
    for inputs in tqdm(steps, desc="timesteps", total=num_timesteps):
        expected = _run(pipe, inputs, select_layers(pipe.unet))
        for total in totals:
            with attention_method(pipe, total.method):
                total.add(pipe, inputs, *expected)
    return [total.row() for total in totals]


def noised_scenes(
    pipe: StableDiffusionPipeline,
    scenes: Sequence[Scene],
    num_timesteps: int,
    size: int | None = None,
) -> Iterator[UNetInputs]:
    """Yield noisy latents (B, 4, h, w), timesteps (B,) and text states of all scenes for each step.

    A step's noise depends only on its index.
    """
    size = size or pipe.unet.config.sample_size * pipe.vae_scale_factor
    images = torch.from_numpy(np.stack([render(scene, size) for scene in scenes]))
    pixels = images.permute(0, 3, 1, 2).to(pipe.device, pipe.dtype) / 127.5 - 1
    latents = pipe.vae.encode(pixels).latent_dist.mode() * pipe.vae.config.scaling_factor
    captions = [scene.caption for scene in scenes]
    text_states, _ = pipe.encode_prompt(captions, pipe.device, 1, False)
    length = pipe.scheduler.config.num_train_timesteps / num_timesteps
    for index in range(num_timesteps):
        noise = torch.randn(latents.shape, generator=torch.Generator().manual_seed(index))
        step = torch.full((len(latents),), int((index + 0.5) * length), device=pipe.device)
        yield pipe.scheduler.add_noise(latents, noise.to(latents), step), step, text_states


def errors_table(rows: Sequence[Row]) -> str:
    """The rows as a Markdown table, with means over layers."""
    columns = {"method": row_label, "effective codewords": "effective_codewords"}
    return rows_table(columns | {title: name for name, title in METRICS.items()}, rows, ".3g")


class _Totals:
    """Accumulates one method's row over the timesteps."""

    def __init__(self, method: Method) -> None:
        self.method = method
        self.outputs: list[Squares] = []
        self.layers: dict[str, _LayerTotals] = {}

    def add(
        self,
        pipe: StableDiffusionPipeline,
        inputs: UNetInputs,
        expected: Tensor,
        features: Mapping[str, Tensor],
    ) -> None:
        """Run one step with the method's attention."""
        layers = select_layers(pipe.unet, self.method.levels)
        if self.method.layer_configs:
            layers = [layer for layer in layers if layer.avq_state is not None]
        for layer in layers:
            total = self.layers.setdefault(layer.name, _LayerTotals(layer, self.method))
            if self.method.layer_configs:
                layer.avq_state.function = total.attend
        output, found = _run(pipe, inputs, layers)
        self.outputs.append(_squares(output, expected))
        for name, total in self.layers.items():
            total.features.append(_squares(found[name], features[name]))

    def row(self) -> Row:
        layers = {name: layer.figures() for name, layer in self.layers.items()}
        figures, *_ = layers.values()
        facts = self.method.facts()
        if facts["effective_codewords"] is None and "columns" in figures:
            columns = mean(of_layer["columns"] for of_layer in layers.values())
            facts["effective_codewords"] = columns
        return {
            **facts,
            **dict.fromkeys(METRICS),
            "output_error": _relative_mse(self.outputs) ** 0.5,
            **{
                name: mean(of_layer[name] for of_layer in layers.values())
                for name in figures
                if name != "level"
            },
            "layers": layers,
        }


class _LayerTotals:
    """Accumulates one layer's part of a row."""

    def __init__(self, layer: Layer, method: Method) -> None:
        self.level = layer.level
        self.has_own_codewords = method.has_own_codewords
        self.features: list[Squares] = []
        self.steps: list[dict[str, float]] = []
        self.counts: list[Tensor] = []  # keys per leaf, by image

    def attend(self, tensors: Tensors, spec: Spec, backend: str) -> Attended:
        """Attend with the method, and record the metrics of its codewords."""
        query, key = tensors.query, tensors.key
        codebook = None
        if tensors.parents is not None:
            codebook = Codebook(tensors.parents, tensors.children)
        known = {name: getattr(tensors, name) for name in ("query_order", "key_order", "scale")}
        known |= {name: x for name, x in asdict(spec).items() if name not in RESOLUTIONS}
        self.counts += [leaf_counts(image, codebook, **known) for image in key.split(1)]
        attended = attend(tensors, spec, backend)
        step = {"quantization_error": float(quantization_error(key, codebook, **known).mean())}
        if attended.shown is not None:
            step["columns"] = mean_columns(attended)
        if spec.num_refined is not None:
            first = query[:1], key[:1], codebook
            step["capture"] = float(capture(*first, spec.num_refined, **known).mean())
        self.steps.append(step)
        return attended

    def figures(self) -> dict[str, Any]:
        figures = {"level": self.level, "feature_relative_mse": _relative_mse(self.features)}
        if not self.steps:
            return figures
        counts = torch.stack(self.counts)
        if not self.has_own_codewords:
            counts = counts.sum(dim=0, keepdim=True)
        means = {name: mean(step[name] for step in self.steps) for name in self.steps[0]}
        return figures | {"active_ratio": float(active_ratio(counts).mean())} | means


def _run(
    pipe: StableDiffusionPipeline, inputs: UNetInputs, layers: Sequence[Layer]
) -> tuple[Tensor, dict[str, Tensor]]:
    """The predicted noise, and the output of each layer's attn1."""
    with recorded(layer.attn for layer in layers) as outputs:
        noise = pipe.unet(*inputs, return_dict=False)[0]
    return noise, {layer.name: outputs[layer.attn] for layer in layers}


def _squares(output: Tensor, expected: Tensor) -> Squares:
    expected = expected.float()
    return float((output.float() - expected).square().sum()), float(expected.square().sum())


def _relative_mse(squares: Iterable[Squares]) -> float:
    errors, expected = map(sum, zip(*squares, strict=True))
    return errors / expected
