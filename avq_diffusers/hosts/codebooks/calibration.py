"""Codebooks from a few prompts or images, without training.

The model runs with exact attention. Each layer keeps a bounded uniform sample of its keys over all
timesteps, and k-means fits the layer's two-level codebook to that sample.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from diffusers import DiffusionPipeline
from torch import Tensor, nn
from tqdm import tqdm

from avq_diffusers.attention.diagnostics import (
    active_ratio,
    capture,
    leaf_counts,
    quantization_error,
)
from avq_diffusers.attention.exact import exact_attention
from avq_diffusers.attention.tensors import Attended, Tensors
from avq_diffusers.codebook.codebook import Codebook
from avq_diffusers.codebook.kmeans import fit_codebook
from avq_diffusers.config import AVQConfig, Spec, check_int
from avq_diffusers.hosts.codebooks.avq_codebooks import AVQCodebooks, gather_codebooks
from avq_diffusers.hosts.core import (
    EXACT,
    LayerSpec,
    checked_examples,
    disabled,
    installed,
    run_examples,
    states_of_config,
)
from avq_diffusers.hosts.models import all_models_of, models_of, name_of


def calibrate(
    pipe: DiffusionPipeline | nn.Module,
    examples: str | Sequence[str] | Tensor | Sequence[Tensor],
    config: AVQConfig | None = None,
    *,
    model: nn.Module | None = None,
    num_inference_steps: int = 25,
    keys_per_layer: int = 32768,
    seed: int = 0,
    progress: bool = True,
    **arguments: Any,
) -> AVQCodebooks:
    """Fit codebooks to the keys of a few prompts or images, without training.

    Args:
        pipe: a Stable Diffusion pipeline, or a vision model; left as it was.
        examples: a handful of typical prompts; prompt i runs with seed `seed + i`. For a vision
            model, `pixel_values` as in `measure_error`.
        config: codebook sizes and levels; None is the paper's form, M64P16C8 with stored codewords,
            at the levels of `apply_avq`.
        model: the part of the pipeline to fit codebooks for, such as `pipe.controlnet`; None is its
            UNet.
        num_inference_steps: denoising steps per prompt.
        keys_per_layer: size of each layer's key sample.
        seed: seeds the noise, the sample and k-means; the same seed gives the same codebooks.
        progress: show progress bars.
        **arguments: passed on to the pipeline or model, such as `height`.

    Returns:
        Codebooks for `apply_avq`. `codebooks.config["calibration"]` holds the quantization error,
        active ratio and, without a threshold, capture of every layer.

    Raises:
        TypeError: the model takes no codebooks or needs a pipeline to run, or an argument has the
            wrong type or is set by this function.
        ValueError: no examples or steps, `config` does not fit the model, fewer keys than parents,
            NaN or infinity in the keys, LinFusion layers in the UNet, or `config.key_norm`, which
            needs training.
        RuntimeError: AVQ cannot serve any call of a layer; the message says why.
    """
    hosted = models_of(pipe if model is None else model)[0]
    host = hosted.host
    if not host.takes_codebooks:
        raise TypeError(f"a {host.kind} has no codebooks: it takes codewords from its own keys.")
    examples = checked_examples(pipe, host, examples, seed, arguments)
    if config is None:
        levels = host.default_config(hosted.model).levels
        config = AVQConfig.parse("M64P16C8", codewords="stored", levels=levels)
    if not isinstance(config, AVQConfig):
        raise TypeError(f"config must be an AVQConfig, but got {config!r}.")
    if config.key_norm:
        raise ValueError("key_norm changes the model and needs training; calibrate without it.")
    check_int("num_inference_steps", num_inference_steps, 1)
    check_int("keys_per_layer", keys_per_layer, 1)
    host.refuse(hosted.model)
    states = states_of_config(host.layers(hosted.model), config)
    most = max(state.config.num_parents for state in states.values())
    if keys_per_layer < most:
        raise ValueError(
            f"keys_per_layer must be at least num_parents = {most}, but got {keys_per_layer}."
        )
    snapshot_call = num_inference_steps // 2 if host.has_prompts else 0
    samples = {
        layer.name: _LayerSample(layer, keys_per_layer, snapshot_call, seed + index)
        for index, layer in enumerate(states)
    }
    for layer, state in states.items():
        state.function = samples[layer.name].attend
    bar = tqdm(desc="examples", total=len(examples), disable=not progress)
    others = [state for x in all_models_of(pipe) for state in x.states.values()]
    with bar, disabled(others), installed(hosted, states):
        for _ in run_examples(pipe, host, examples, num_inference_steps, seed, arguments):
            bar.update()

    codebooks, report = {}, {}
    for layer, state in tqdm(states.items(), "codebooks", disable=not progress):
        sample, layer_config = samples[layer.name], state.config
        if sample.flat_keys is None:
            raise RuntimeError(
                f"{layer.name} has no call that AVQ serves: {state.last_call or 'it did not run'}."
            )
        codebook = fit_codebook(
            sample.keys, layer_config.num_parents, layer_config.num_children, seed=seed
        )
        codebooks[layer.name] = codebook
        report[layer.name] = sample.report(codebook, layer_config)
    return gather_codebooks(
        hosted.model,
        config,
        codebooks,
        base_model=_model_name(pipe),
        calibration={
            "num_prompts": len(examples),
            "num_inference_steps": num_inference_steps,
            "keys_per_layer": keys_per_layer,
            "seed": seed,
            "layers": report,
        },
    )


class _LayerSample:
    """What calibration keeps per layer: a uniform sample of its keys, and one whole call.

    Each key gets a random priority and the highest stay, which samples a stream of unknown length
    uniformly.
    """

    def __init__(self, layer: LayerSpec, capacity: int, snapshot_call: int, seed: int) -> None:
        self.layer = layer
        self.capacity = capacity
        self.snapshot_call = snapshot_call
        self.generator = torch.Generator().manual_seed(seed)
        self.num_calls = 0
        self.priorities = torch.empty(0)
        self.flat_keys: Tensor | None = None

    @property
    def keys(self) -> Tensor:
        """The sample, (H, S, D) in fp32."""
        assert self.flat_keys is not None
        return self.flat_keys.float().transpose(0, 1)

    @torch.no_grad()
    def attend(self, tensors: Tensors, spec: Spec, backend: str) -> Attended:
        """Exact attention in place of AVQ."""
        query, key = tensors.query, tensors.key
        if self.num_calls <= self.snapshot_call:  # or the last call, if img2img ends before it
            query_of_last, key_of_last = (x[-1:].detach().float() for x in (query, key))
            self.snapshot = (query_of_last, key_of_last, tensors.query_order)
        self.num_calls += 1
        keys = key.transpose(1, 2).flatten(0, 1)
        if not keys.isfinite().all():
            raise ValueError(
                f"the keys of {self.layer.name} hold NaN or infinity; calibrate a model and dtype "
                f"that generate finite images."
            )
        priorities = torch.rand(len(keys), generator=self.generator, device="cpu")
        if self.flat_keys is not None:
            priorities = torch.cat([self.priorities, priorities])
            keys = torch.cat([self.flat_keys, keys])
        self.priorities, kept = priorities.topk(min(self.capacity, len(priorities)))
        self.flat_keys = keys[kept.to(keys.device)]
        return Attended(exact_attention(tensors), EXACT)

    def report(self, codebook: Codebook, config: AVQConfig) -> dict[str, float]:
        """Quantization error and active ratio on the sample, capture on the whole call."""
        error = quantization_error(self.keys, codebook, codewords="stored")
        report = {
            "quantization_error": error.mean().item(),
            "active_ratio": active_ratio(leaf_counts(self.keys, codebook)).mean().item(),
        }
        if config.num_refined is not None:
            query, key, order = self.snapshot
            captured = capture(
                query,
                key,
                codebook,
                config.num_refined,
                codewords="stored",
                query_tile=config.query_tile,
                query_order=order,
            )
            report["capture"] = captured.mean().item()
        return report


def _model_name(pipe: Any) -> str | None:
    """The Hub id, or the folder's name."""
    name = name_of(pipe)
    return Path(name).name if name and Path(name).exists() else name
