"""Error of the attention variants against the exact teacher, on held-out scenes.

Over all pictures, time steps and elements, with s what the student and t what the teacher returns:

feature_mse           mean of (s - t)^2 of a layer's attn1, the student on its own input, as trained
feature_relative_mse  sum of (s - t)^2 / sum of t^2 of the same
forced_relative_mse   likewise, the layer on the teacher's input: without the errors before it
output_error          |s - t| / |t| of the predicted noise; `output_error_at` has each time step's

Quantization error and active ratio are those of the student's keys at all time steps, capture is
that of the first picture.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from statistics import mean
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from diffusers import StableDiffusionPipeline
from diffusers.models.attention_processor import Attention
from torch import Tensor, nn
from tqdm import tqdm

from avq_diffusers import (
    AVQConfig,
    active_ratio,
    capture,
    leaf_counts,
    quantization_error,
    query_order,
    select_layers,
)
from avq_diffusers.mini import Scene, render
from eval.methods import Method, attention_method, method_cells
from eval.plots import Line, Panel

Row = dict[str, Any]
UNetInputs = tuple[Tensor, Tensor, Tensor]
Call = tuple[Tensor, Tensor]  # input and output

KEYS_PER_LAYER = 32768
FIGURES = {
    "output_error": "output error",
    "feature_mse": "feature MSE",
    "feature_relative_mse": "feature, relative MSE",
    "forced_relative_mse": "feature on teacher's input, relative MSE",
    "quantization_error": "quantization error",
    "active_ratio": "active ratio",
    "capture": "capture",
}
PLOTTED = ("output_error", "feature_relative_mse", "forced_relative_mse")


def elastic(methods: Iterable[Method], numbers: Sequence[int]) -> list[Method]:
    """Two-level codebooks once for each number of refined parents that they can have.

    Methods without codebooks, with flat ones or with a number of their own stay as they are.
    """
    expanded = []
    for method in methods:
        most = min((_most_refined(config) for config in method.layer_configs), default=0)
        if most == 0 or method.num_refined is not None:
            expanded.append(method)
        else:
            expanded += [replace(method, num_refined=n) for n in numbers if n <= most]
    return expanded


@torch.no_grad()
def measure_errors(
    pipe: StableDiffusionPipeline,
    methods: Sequence[Method],
    scenes: Sequence[Scene],
    *,
    num_timesteps: int = 8,
) -> list[Row]:
    """Measure one row a method, whose `layers` holds the figures of each layer.

    All pictures of a time step run in one batch.

    Args:
        pipe: without AVQ; its UNet is the teacher.
        methods: prepared for `pipe`.
        scenes: whose pictures, at the UNet's own size, are noised.
        num_timesteps: middles of so many equal parts of the noise schedule.
    """
    levels = tuple({level for method in methods for level in method.levels})
    attentions = {layer.name: layer.attn for layer in select_layers(pipe.unet, levels)}
    totals = [_Totals(pipe, method) for method in methods]
    num_keys = KEYS_PER_LAYER // num_timesteps
    steps = noised_scenes(pipe, scenes, num_timesteps)
    for inputs in tqdm(steps, desc="time steps", total=num_timesteps):
        with _recorded(attentions) as teacher:
            teacher_output = pipe.unet(*inputs, return_dict=False)[0]
        for method, total in zip(methods, totals, strict=True):
            with attention_method(pipe, method):
                with _recorded(attentions) as student:
                    output = pipe.unet(*inputs, return_dict=False)[0]
                total.add(inputs, output, teacher_output, student, teacher, num_keys)
    return [total.row() for total in totals]


def noised_scenes(
    pipe: StableDiffusionPipeline, scenes: Sequence[Scene], num_timesteps: int
) -> Iterator[UNetInputs]:
    """Noisy latents (B, 4, h, w), time steps (B,) and text states of all scenes, step after step.

    The noise of a step depends on its number only.
    """
    side = pipe.unet.config.sample_size * pipe.vae_scale_factor
    pictures = torch.from_numpy(np.stack([render(scene, side) for scene in scenes]))
    pixels = pictures.permute(0, 3, 1, 2).to(pipe.device, pipe.dtype) / 127.5 - 1
    latents = pipe.vae.encode(pixels).latent_dist.mode() * pipe.vae.config.scaling_factor
    captions = [scene.caption for scene in scenes]
    text_states, _ = pipe.encode_prompt(captions, pipe.device, 1, False)
    length = pipe.scheduler.config.num_train_timesteps / num_timesteps
    for index in range(num_timesteps):
        noise = torch.randn(latents.shape, generator=torch.Generator().manual_seed(index))
        step = torch.full((len(latents),), int((index + 0.5) * length), device=pipe.device)
        yield pipe.scheduler.add_noise(latents, noise.to(latents), step), step, text_states


def errors_table(rows: Sequence[Row]) -> str:
    """The rows as a Markdown table, layers' figures as their means."""
    lines = [
        f"| method | effective codewords | {' | '.join(FIGURES.values())} |",
        f"|---|---|{'---|' * len(FIGURES)}",
    ]
    for row in rows:
        cells = ("-" if row[name] is None else format(row[name], ".3g") for name in FIGURES)
        lines.append(f"| {method_cells(row)} | {' | '.join(cells)} |")
    return "\n".join(lines)


def error_panels(rows: Sequence[Row]) -> list[Panel]:
    """Errors over effective codewords: a line for each two-level codebook, one for flat ones."""
    groups: dict[str, list[Row]] = {}
    for row in rows:
        if row["effective_codewords"] is not None:
            is_flat = "P" not in row["config"]
            label = f"{'flat VQ' if is_flat else row['method']}, {row['origin']}"
            groups.setdefault(label, []).append(row)
    for group in groups.values():
        group.sort(key=lambda row: row["effective_codewords"])
    return [
        Panel(
            FIGURES[figure],
            "effective codewords, M0 + P C",
            [
                Line(
                    label, [row["effective_codewords"] for row in group], [r[figure] for r in group]
                )
                for label, group in groups.items()
            ],
            xscale="log",
            yscale="log",
        )
        for figure in PLOTTED
    ]


class _SquaredError:
    """Running sums of squared differences and of squares of what is expected."""

    def __init__(self) -> None:
        self.error = self.expected = 0.0
        self.count = 0

    def add(self, output: Tensor, expected: Tensor) -> None:
        expected = expected.float()
        self.error += float((output.float() - expected).square().sum())
        self.expected += float(expected.square().sum())
        self.count += expected.numel()

    @property
    def mse(self) -> float:
        return self.error / self.count

    @property
    def relative_mse(self) -> float:
        return self.error / self.expected


class _Totals:
    """What one method's row is made of, collected time step after time step."""

    def __init__(self, pipe: StableDiffusionPipeline, method: Method) -> None:
        self.method = method
        self.outputs: dict[int, _SquaredError] = {}
        layers = select_layers(pipe.unet, method.levels)
        configs = method.layer_configs or [None] * len(layers)
        self.layers = {
            layer.name: _LayerTotals(layer.name, layer.level, layer.attn, method, config)
            for layer, config in zip(layers, configs, strict=True)
        }

    def add(
        self,
        inputs: UNetInputs,
        output: Tensor,
        teacher_output: Tensor,
        student: Mapping[str, Call],
        teacher: Mapping[str, Call],
        num_keys: int,
    ) -> None:
        """Take in one step; the method's attention is on, and knows the size of the picture."""
        noisy_latents, timesteps, _ = inputs
        self.outputs.setdefault(int(timesteps[0]), _SquaredError()).add(output, teacher_output)
        for name, layer in self.layers.items():
            layer.add(student[name], teacher[name], noisy_latents.shape[-2:], num_keys)

    def row(self) -> Row:
        layers = {name: layer.figures() for name, layer in self.layers.items()}
        means = {
            name: mean(figures[name] for figures in layers.values())
            if all(name in figures for figures in layers.values())
            else None
            for name in FIGURES
            if name != "output_error"
        }
        errors = self.outputs.values()
        relative = sum(error.error for error in errors) / sum(error.expected for error in errors)
        return {
            **self.method.facts(),
            "output_error": relative**0.5,
            **means,
            "output_error_at": {
                str(timestep): error.relative_mse**0.5 for timestep, error in self.outputs.items()
            },
            "layers": layers,
        }


class _LayerTotals:
    """One layer's part of a row."""

    def __init__(
        self, name: str, level: int, attn: Attention, method: Method, config: AVQConfig | None
    ) -> None:
        self.level = level
        self.attn = attn
        self.config = config
        self.feature = _SquaredError()
        self.forced = _SquaredError()
        self.keys: list[Tensor] = []
        self.captured: list[float] = []
        if config is not None:
            self.codebook = method.codebooks.codebook(name)
            self.projections = method.codebooks.projections(name) or {}
            self.key_norm = method.codebooks.key_norm(name) or nn.Identity()

    def add(self, student: Call, teacher: Call, latent_size: torch.Size, num_keys: int) -> None:
        hidden_states, output = student
        teacher_hidden_states, expected = teacher
        self.feature.add(output, expected)
        self.forced.add(self.attn(teacher_hidden_states), expected)
        if self.config is None:
            return
        key = self.key_norm(self._project("to_k", hidden_states))
        flat_key = key.movedim(1, 0).flatten(1, 2)
        generator = torch.Generator().manual_seed(len(self.keys))
        kept = torch.randperm(flat_key.shape[1], generator=generator)[:num_keys]
        self.keys.append(flat_key[:, kept.to(key.device)])
        grid = (length >> self.level for length in latent_size)
        captured = capture(
            self._project("to_q", hidden_states[:1]),
            key[:1],
            self.codebook,
            self.config.num_refined,
            query_tile=self.config.query_tile,
            query_order=query_order(*grid, self.config.query_order, key.device),
            importance_tile=self.config.importance_tile,
        )
        self.captured.append(captured.mean().item())

    def figures(self) -> dict[str, float]:
        figures = {
            "feature_mse": self.feature.mse,
            "feature_relative_mse": self.feature.relative_mse,
            "forced_relative_mse": self.forced.relative_mse,
        }
        if self.config is None:
            return figures
        keys = torch.cat(self.keys, dim=1)
        return figures | {
            "quantization_error": quantization_error(keys, self.codebook).mean().item(),
            "active_ratio": active_ratio(leaf_counts(keys, self.codebook)).mean().item(),
            "capture": mean(self.captured),
        }

    def _project(self, name: str, hidden_states: Tensor) -> Tensor:
        """(B, N, channels) to (B, H, N, D) by the tuned projection, if there is one."""
        weight = self.projections.get(f"{name}.weight", self.attn.get_submodule(name).weight)
        projected = F.linear(hidden_states.float(), weight.float())
        return projected.unflatten(-1, (self.attn.heads, -1)).transpose(1, 2)


@contextmanager
def _recorded(attentions: Mapping[str, Attention]) -> Iterator[dict[str, Call]]:
    """Collect input and output of each attention while the block runs."""
    calls = {}

    def record(name: str, attn: Attention, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        calls[name] = inputs[0], output

    handles = [
        attn.register_forward_hook(partial(record, name)) for name, attn in attentions.items()
    ]
    try:
        yield calls
    finally:
        for handle in handles:
            handle.remove()


def _most_refined(config: AVQConfig) -> int:
    return config.num_parents if config.num_children else 0
