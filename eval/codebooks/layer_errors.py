"""Error of the attention variants against the exact teacher, on held-out scenes.

Over all images, timesteps and elements, with s what the student and t what the teacher returns:

feature_mse           mean of (s - t)^2 of a layer's attn1, the student on its own input, as trained
feature_relative_mse  sum of (s - t)^2 / sum of t^2 of the same
forced_relative_mse   likewise, the layer on the teacher's input: without the errors before it
output_error          |s - t| / |t| of the predicted noise; `output_error_at` has each timestep's

Of the student's keys at all timesteps:

commitment_loss, quantization_error  distance to what represents the leaf; with stored codewords of
                                     a sample of the keys, else of each call
active_ratio, perplexity             how many codewords are in use; own ones in each image
evenness                             perplexity / codewords: 1 where all are in equal use

Of the student's attention in the first image at all timesteps:

capture          share on keys of refined parents
best_capture     the same if the parents of most exact attention were refined
overlap          share of refined parents that exact importance refines as well

The figures of codewords are known for each head; a layer's are the means over its heads.
"""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from operator import itemgetter
from pathlib import Path
from statistics import mean
from typing import Any, NamedTuple

import numpy as np
import torch
from diffusers import StableDiffusionPipeline
from diffusers.models.attention_processor import Attention
from torch import Tensor
from tqdm import tqdm

from avq_diffusers import AVQConfig, select_layers
from avq_diffusers.attention.diagnostics import (
    active_ratio,
    attention_mass,
    captured_share,
    commitment_loss,
    leaf_counts,
    perplexity,
    quantization_error,
    refined_parents,
)
from avq_diffusers.attention.orders import query_order
from avq_diffusers.codebook.codebook import Codebook
from avq_diffusers.mini import Scene, render
from eval.methods import Method, attention_method
from eval.names import codewords_form, config_label, method_cells
from eval.store.markdown import markdown_table, number
from eval.store.plots import Line, Panel

Row = dict[str, Any]
UNetInputs = tuple[Tensor, Tensor, Tensor]
Call = tuple[Tensor, Tensor, Tensor | None]  # input, output, output on the teacher's input

KEYS_PER_LAYER = 32768
METRICS = {
    "output_error": "output error",
    "feature_mse": "feature MSE",
    "feature_relative_mse": "feature, relative MSE",
    "forced_relative_mse": "feature on teacher's input, relative MSE",
    "quantization_error": "quantization error",
    "active_ratio": "active ratio",
    "capture": "capture",
}
KERNEL_TIME = "kernel_ms"
KERNEL_METRICS = {KERNEL_TIME: "kernel, ms"}
FEATURE_METRICS = ("feature_mse", "feature_relative_mse", "forced_relative_mse")
SIZES = ("num_parents", "num_codewords", "num_refined")
CODEBOOK_METRICS = (
    "commitment_loss",
    "quantization_error",
    "active_ratio",
    "perplexity",
    "evenness",
    "capture",
    "best_capture",
    "overlap",
)
PLOTTED = ("output_error", "feature_relative_mse", "forced_relative_mse")
ELASTIC = ("output_error", "feature_relative_mse", "capture")


def elastic(methods: Iterable[Method], numbers: Sequence[int]) -> list[Method]:
    """Repeat two-level codewords once for each possible number of refined parents.

    Methods without codewords, with flat ones or with a fixed number stay as they are.

    Raises:
        ValueError: codebooks allow none of the numbers.
    """
    expanded = []
    for method in methods:
        most = min((config.most_refined for config in method.layer_configs), default=0)
        if most == 0 or method.num_refined is not None:
            expanded.append(method)
        else:
            possible = [n for n in numbers if n <= most]
            if not possible:
                raise ValueError(
                    f"{method.name} refines at most {most} parents, but --refined asks for "
                    f"{', '.join(map(str, numbers))}."
                )
            expanded += [replace(method, num_refined=n) for n in possible]
    return expanded


@torch.no_grad()
def measure_errors(
    pipe: StableDiffusionPipeline,
    methods: Sequence[Method],
    scenes: Sequence[Scene],
    *,
    num_timesteps: int = 8,
    size: int | None = None,
) -> list[Row]:
    """Measure one row per method; its `layers` holds the metrics of each layer, by head in `heads`.

    `is_flat` says whether the codewords are flat, and is None without codewords. All images of a
    timestep run in one batch.

    Args:
        pipe: a pipeline without AVQ; its UNet is the teacher.
        methods: methods prepared for `pipe`.
        scenes: scenes whose images are noised.
        num_timesteps: number of timesteps, the middles of equal parts of the noise schedule.
        size: side of the images, a multiple of 64; None takes the UNet's own.
    """
    levels = tuple({level for method in methods for level in method.levels})
    attentions = {layer.name: layer.attn for layer in select_layers(pipe.unet, levels)}
    totals = [_Totals(pipe, method) for method in methods]
    num_keys = KEYS_PER_LAYER // num_timesteps
    steps = noised_scenes(pipe, scenes, num_timesteps, size)
    for inputs in tqdm(steps, desc="timesteps", total=num_timesteps):
        with _recorded(attentions) as teacher:
            teacher_output = pipe.unet(*inputs, return_dict=False)[0]
        for method, total in zip(methods, totals, strict=True):
            forced = {name: teacher[name][0] for name in total.layers}
            with attention_method(pipe, method):
                with _recorded(attentions, forced) as student:
                    output = pipe.unet(*inputs, return_dict=False)[0]
                total.add(inputs, output, teacher_output, student, teacher, num_keys)
    return [total.row() for total in totals]


def noised_scenes(
    pipe: StableDiffusionPipeline,
    scenes: Sequence[Scene],
    num_timesteps: int,
    size: int | None = None,
) -> Iterator[UNetInputs]:
    """Yield noisy latents (B, 4, h, w), timesteps (B,) and text states of all scenes for each step.

    The noise of a step depends on its number only.
    """
    size = size or own_size(pipe)
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


def own_size(pipe: StableDiffusionPipeline) -> int:
    """Side of the images that the UNet was trained on."""
    return pipe.unet.config.sample_size * pipe.vae_scale_factor


class KernelTimes(NamedTuple):
    """Milliseconds of AVQ attention by configuration, for one shape of its inputs on one GPU."""

    shape: str
    milliseconds: dict[str, float]


def read_kernel_times(path: Path, num_tokens: int) -> KernelTimes:
    """Read the times for `num_tokens` in a file of `bench kernels`, of the first such shape.

    Raises:
        ValueError: the file has other content, or no such row.
    """
    try:
        document = json.loads(path.read_text())
        rows: dict[str, list[Row]] = {}
        for row in document["rows"]:
            if "config" in row and row["tokens"] == num_tokens and row.get("keys") != "skewed":
                shape = f"B{row['batch']} H{row['heads']} N{num_tokens} D{row['head_dim']}"
                rows.setdefault(f"{shape}, {document['environment']['device']}", []).append(row)
        times = [
            KernelTimes(shape, {_timed_label(row["config"]): row["ms"] for row in group})
            for shape, group in rows.items()
        ]
    except (AttributeError, KeyError, RecursionError, TypeError, ValueError):
        raise ValueError(f"{path} is not a file of `python -m eval bench kernels`.") from None
    if not times:
        raise ValueError(f"{path} has no times of AVQ attention with {num_tokens} tokens.")
    return times[0]


def _timed_label(config: str) -> str:
    """As rows of errors say it; flat VQ was `M64P0C0` once."""
    sizes, slash, form = config.partition("/")
    return config_label(AVQConfig.parse(sizes, codewords="stored")) + slash + form


def add_kernel_times(rows: Sequence[Row], times: KernelTimes) -> None:
    """Give every row its `kernel_ms`, None where its configuration was not timed."""
    for row in rows:
        row[KERNEL_TIME] = times.milliseconds.get(row["config"])


def errors_table(rows: Sequence[Row]) -> str:
    """The rows as a Markdown table, with means over layers."""
    figures = METRICS | (KERNEL_METRICS if KERNEL_TIME in rows[0] else {})
    return markdown_table(
        ["method", "effective codewords", *figures.values()],
        ([*method_cells(row), *(number(row[name], ".3g") for name in figures)] for row in rows),
    )


def error_panels(rows: Sequence[Row], times: KernelTimes | None = None) -> list[list[Panel]]:
    """Rows of panels: what a codebook costs against what it errs, and elastic inference.

    Errors over effective codewords, and over `times`, with a line for each two-level codebook and
    one for flat ones; then figures of two-level codebooks over the number of refined parents.

    Args:
        rows: of `measure_errors`.
        times: that `add_kernel_times` gave to the rows.
    """
    groups: dict[str, list[Row]] = {}
    for row in rows:
        if row["effective_codewords"] is not None:
            flat = f"flat VQ{codewords_form(row['config'])}"
            label = f"{flat if row['is_flat'] else row['method']}, {row['origin']}"
            groups.setdefault(label, []).append(row)
    two_level = {label: group for label, group in groups.items() if not group[0]["is_flat"]}
    codewords = "effective codewords, M0 + P C"
    panels = [_panels(groups, PLOTTED, "effective_codewords", codewords, xscale="log")]
    if times is not None:
        panels.append(_panels(groups, PLOTTED, KERNEL_TIME, f"kernel, ms ({times.shape})"))
    if two_level:
        figures = ELASTIC if times is None else (*ELASTIC, KERNEL_TIME)
        panels.append(_panels(two_level, figures, "num_refined", "refined parents P"))
    return panels


def _panels(
    groups: Mapping[str, Sequence[Row]],
    figures: Sequence[str],
    axis: str,
    xlabel: str,
    *,
    xscale: str = "linear",
) -> list[Panel]:
    lines = {
        label: sorted((row for row in group if row[axis] is not None), key=itemgetter(axis))
        for label, group in groups.items()
    }
    return [
        Panel(
            (METRICS | KERNEL_METRICS)[figure],
            xlabel,
            [
                Line(label, [row[axis] for row in group], [row[figure] for row in group])
                for label, group in lines.items()
            ],
            xscale=xscale,
            yscale="linear" if figure in ("capture", KERNEL_TIME) else "log",
        )
        for figure in figures
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
    """What one method's row is made of, collected timestep after timestep."""

    def __init__(self, pipe: StableDiffusionPipeline, method: Method) -> None:
        self.method = method
        self.outputs: dict[int, _SquaredError] = {}
        configs = method.layer_configs or [None]
        if method.codebooks is not None:
            config = method.codebooks.avq_config
            layers = select_layers(pipe.unet, config.levels, config.exact)
        else:
            exact = () if method.own is None else method.own.exact
            layers = select_layers(pipe.unet, method.levels, exact)
            configs *= len(layers)
        self.layers = {
            layer.name: _LayerTotals(layer, method, config)
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
        """Take in one step; the method's attention is on, and knows the size of the image."""
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
            for name in (*FEATURE_METRICS, *SIZES, *CODEBOOK_METRICS)
        }
        errors = self.outputs.values()
        relative = sum(error.error for error in errors) / sum(error.expected for error in errors)
        configs = self.method.layer_configs
        return {
            **self.method.facts(),
            "is_flat": not any(config.num_children for config in configs) if configs else None,
            "output_error": relative**0.5,
            **means,
            "output_error_at": {
                str(timestep): error.relative_mse**0.5 for timestep, error in self.outputs.items()
            },
            "layers": layers,
        }


class _LayerTotals:
    """One layer's part of a row."""

    def __init__(self, layer: Any, method: Method, config: AVQConfig | None) -> None:
        self.layer = layer
        self.config = config
        self.importance_tile = method.importance_tile
        self.feature = _SquaredError()
        self.forced = _SquaredError()
        self.keys: list[Tensor] = []
        self.losses: list[dict[str, Tensor]] = []
        self.counts: list[Tensor] = []
        self.captures: list[dict[str, Tensor]] = []
        self.codebook = None
        if method.codebooks is not None:
            self.codebook = method.codebooks.codebook(layer.name)

    def add(self, student: Call, teacher: Call, latent_size: torch.Size, num_keys: int) -> None:
        hidden_states, output, forced = student
        expected = teacher[1]
        self.feature.add(output, expected)
        self.forced.add(forced, expected)
        attn, config = self.layer.attn, self.config
        if config is None:
            return
        weights = self.layer.avq_state.weights
        key = weights.project_heads(attn, "to_k", hidden_states)
        grid = (length >> self.layer.level for length in latent_size)
        options = {
            "num_parents": config.num_parents,
            "num_children": config.num_children,
            "codewords": config.codewords,
            "num_updates": config.num_updates,
            "query_tile": config.query_tile,
            "query_order": query_order(*grid, config.query_order, key.device),
        }
        if config.codewords == "stored":
            flat_key = key.movedim(1, 0).flatten(1, 2)
            generator = torch.Generator().manual_seed(len(self.keys))
            kept = torch.randperm(flat_key.shape[1], generator=generator)[:num_keys]
            self.keys.append(flat_key[:, kept.to(key.device)])
        else:
            self.losses.append(_losses(key, self.codebook, **options))
        is_own = self.codebook is None
        images = key.split(1) if is_own else [key]
        self.counts += [leaf_counts(image, self.codebook, **options) for image in images]
        query = weights.project_heads(attn, "to_q", hidden_states[:1])
        self.captures.append(self._capture_figures(query, key[:1], options))

    def _capture_figures(
        self, query: Tensor, key: Tensor, options: dict[str, Any]
    ) -> dict[str, Tensor]:
        """How good the choice of refined parents is, each (H,)."""
        inputs = (query, key, self.codebook)
        choose = partial(refined_parents, *inputs, self.config.num_refined, **options)
        mass = attention_mass(*inputs, **options)
        best = torch.zeros_like(mass, dtype=torch.bool)
        best.scatter_(-1, mass.topk(self.config.num_refined).indices, True)
        refined = choose(importance_tile=self.importance_tile)
        missed = (refined & ~choose()).sum(dim=(0, 2, 3)) / refined.sum(dim=(0, 2, 3)).clamp(min=1)
        return {
            "capture": captured_share(mass, refined),
            "best_capture": captured_share(mass, best),
            "overlap": 1 - missed,
        }

    def figures(self) -> dict[str, Any]:
        figures = {
            "level": self.layer.level,
            "feature_mse": self.feature.mse,
            "feature_relative_mse": self.feature.relative_mse,
            "forced_relative_mse": self.forced.relative_mse,
        }
        config = self.config
        if config is None:
            return figures
        counts = torch.stack(self.counts)
        if self.codebook is not None:
            counts = counts.sum(dim=0, keepdim=True)
        losses = self.losses
        if self.keys:
            losses = [_losses(torch.cat(self.keys, dim=1), self.codebook, codewords="stored")]
        num_codewords = config.num_parents * (1 + config.num_children)
        heads = {
            **_means(losses),
            "active_ratio": active_ratio(counts).mean(dim=0),
            "perplexity": perplexity(counts).mean(dim=0),
            "evenness": perplexity(counts).mean(dim=0) / num_codewords,
            **_means(self.captures),
        }
        return figures | {
            "num_parents": config.num_parents,
            "num_codewords": num_codewords,
            "num_refined": config.num_refined,
            **{name: values.mean().item() for name, values in heads.items()},
            "heads": {name: values.tolist() for name, values in heads.items()},
        }


def _losses(key: Tensor, codebook: Codebook | None, **options: Any) -> dict[str, Tensor]:
    """How far keys are from what represents them, each (H,)."""
    return {
        "commitment_loss": commitment_loss(key, codebook, **options),
        "quantization_error": quantization_error(key, codebook, **options),
    }


def _means(steps: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    return {name: torch.stack([step[name] for step in steps]).mean(dim=0) for name in steps[0]}


@contextmanager
def _recorded(
    attentions: Mapping[str, Attention], forced: Mapping[str, Tensor] | None = None
) -> Iterator[dict[str, Call]]:
    """Collect input and output of each attention while the block runs, and outputs on `forced`."""
    calls = {}

    def record(name: str, attn: Attention, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        given = (forced or {}).get(name)
        # Not by a call, which would end here again; and not later, when AVQ would run exact.
        calls[name] = inputs[0], output, None if given is None else attn.forward(given)

    with ExitStack() as hooks:
        for name, attn in attentions.items():
            hooks.enter_context(attn.register_forward_hook(partial(record, name)))
        yield calls
