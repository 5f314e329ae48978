"""Codebooks for any pipeline from a few prompts, without training.

The pipeline runs the prompts with exact attention. Every layer keeps a bounded uniform sample of
its keys at all timesteps, and k-means fits the layer's two-level codebook to that sample.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
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
from avq_diffusers.attention.orders import query_order
from avq_diffusers.codebook.codebook import Codebook
from avq_diffusers.codebook.kmeans import fit_codebook
from avq_diffusers.config import AVQConfig, check_int
from avq_diffusers.plugin.apply import avq_disabled
from avq_diffusers.plugin.codebooks import AVQCodebooks
from avq_diffusers.plugin.layers import SelfAttentionLayer, select_layers
from avq_diffusers.plugin.prompts import checked_prompts, run_prompts


def calibrate(
    pipe: DiffusionPipeline,
    prompts: Sequence[str],
    config: AVQConfig | None = None,
    *,
    model: nn.Module | None = None,
    num_inference_steps: int = 25,
    keys_per_layer: int = 32768,
    seed: int = 0,
    progress: bool = True,
    **pipe_arguments: Any,
) -> AVQCodebooks:
    """Fit the codebooks of a pipeline's UNet, or ControlNet, to the keys of a few prompts.

    Args:
        pipe: a Stable Diffusion pipeline; left as it was.
        prompts: a handful of prompts such as the pipeline will see; number i runs with seed
            `seed + i`.
        config: codebook sizes and levels; `AVQConfig()` when None.
        model: the part of the pipeline to fit codebooks for, such as `pipe.controlnet`;
            `pipe.unet` when None.
        num_inference_steps: denoising steps of each run.
        keys_per_layer: size of each layer's key sample.
        seed: of the noise, the sample and k-means; same seed, same codebooks.
        progress: show progress bars.
        **pipe_arguments: further arguments of the pipeline's call, such as `height` or `image`.

    Returns:
        Codebooks for `apply_avq`. `codebooks.config["calibration"]` holds the quantization error,
        capture and active ratio of every layer.

    Raises:
        TypeError: `pipe` is not a pipeline with a UNet, `prompts` is one string, an argument has
            the wrong type, or is prompt, generator or output_type.
        ValueError: there is no prompt, no step, no layer at `config.levels`, an override for none
            of these layers, fewer keys than parents, NaN or infinity in keys, LinFusion in the
            layers, or `config.key_norm`,
            which needs training.
        RuntimeError: the layers did not run, as in a UNet that is compiled or has fused
            projections.
    """
    prompts = checked_prompts(pipe, prompts, pipe_arguments)
    config = AVQConfig() if config is None else config
    if not isinstance(config, AVQConfig):
        raise TypeError(f"config must be an AVQConfig, but got {config!r}.")
    if config.key_norm:
        raise ValueError("key_norm changes the model and needs training; calibrate without it.")
    check_int("num_inference_steps", num_inference_steps, 1)
    check_int("keys_per_layer", keys_per_layer, 1)
    check_int("seed", seed, 0)
    model = pipe.unet if model is None else model
    layers = select_layers(model, config.levels, config.exact, config.overrides)
    most = max(config.for_layer(layer.name, layer.level).num_parents for layer in layers)
    if keys_per_layer < most:
        raise ValueError(
            f"keys_per_layer must be at least num_parents = {most}, but got {keys_per_layer}."
        )
    if any(layer.has_linfusion for layer in layers):
        raise ValueError("this UNet has LinFusion layers; call remove_linfusion(pipe) first.")
    samples = {
        layer.name: _LayerSample(layer, keys_per_layer, num_inference_steps // 2, seed + index)
        for index, layer in enumerate(layers)
    }
    bar = tqdm(prompts, "prompts", disable=not progress)
    with avq_disabled(pipe), avq_disabled(model), _watch(samples.values()):
        run_prompts(pipe, bar, num_inference_steps, seed, pipe_arguments)

    codebooks, report = {}, {}
    for layer in tqdm(layers, "codebooks", disable=not progress):
        sample = samples[layer.name]
        layer_config = config.for_layer(layer.name, layer.level)
        codebook = fit_codebook(
            sample.keys, layer_config.num_parents, layer_config.num_children, seed=seed
        )
        codebooks[layer.name] = codebook
        report[layer.name] = sample.report(codebook, layer_config)
    return AVQCodebooks.from_codebooks(
        config,
        codebooks,
        model,
        base_model=_model_name(pipe),
        calibration={
            "num_prompts": len(prompts),
            "num_inference_steps": num_inference_steps,
            "keys_per_layer": keys_per_layer,
            "seed": seed,
            "layers": report,
        },
    )


class _LayerSample:
    """What calibration keeps of one layer: a uniform sample of its keys, and one whole call.

    Every key gets a random priority, and the highest ones stay. This samples a stream of unknown
    length uniformly.
    """

    def __init__(
        self, layer: SelfAttentionLayer, capacity: int, snapshot_call: int, seed: int
    ) -> None:
        self.layer = layer
        self.capacity = capacity
        self.snapshot_call = snapshot_call
        self.generator = torch.Generator().manual_seed(seed)
        self.num_calls = 0
        self.priorities = torch.empty(0)
        self.flat_keys: Tensor | None = None
        self.query = torch.empty(0)
        self.grid = (0, 0)

    @property
    def keys(self) -> Tensor:
        """The sample, (H, S, D) in fp32."""
        if self.flat_keys is None:
            raise RuntimeError(
                f"{self.layer.name} did not run while calibrating; calibrate before compiling or "
                f"fusing projections."
            )
        return self._heads(self.flat_keys).transpose(0, 1)

    def see_grid(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        hidden_states = args[0] if args else kwargs["hidden_states"]  # AnimateDiff's UNet names it
        self.grid = (hidden_states.shape[-2], hidden_states.shape[-1])

    def see_query(self, module: nn.Module, inputs: tuple[Any, ...], query: Tensor) -> None:
        self.query = query

    def see_key(self, module: nn.Module, inputs: tuple[Any, ...], key: Tensor) -> None:
        if self.num_calls <= self.snapshot_call:  # or the last call, if img2img ends before it
            query, last = (self._heads(x[-1:]).transpose(1, 2) for x in (self.query, key))
            self.snapshot = (query, last, self.grid)
        self.num_calls += 1
        self.query = torch.empty(0)
        keys = key.flatten(0, 1)
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

    def report(self, codebook: Codebook, config: AVQConfig) -> dict[str, float]:
        """Quantization error and active ratio of the sample, and capture of the whole call."""
        query, key, (height, width) = self.snapshot
        captured = capture(
            query,
            key,
            codebook,
            config.num_refined,
            codewords="stored",
            query_tile=config.query_tile,
            query_order=query_order(height, width, config.query_order, key.device),
            importance_tile=config.importance_tile,
        )
        error = quantization_error(self.keys, codebook, codewords="stored")
        return {
            "quantization_error": error.mean().item(),
            "active_ratio": active_ratio(leaf_counts(self.keys, codebook)).mean().item(),
            "capture": captured.mean().item(),
        }

    def _heads(self, projected: Tensor) -> Tensor:
        return projected.detach().float().unflatten(-1, (self.layer.num_heads, -1))


def _model_name(pipe: DiffusionPipeline) -> str | None:
    """The Hub id, or the last part of a folder's path."""
    name = pipe.config.get("_name_or_path")
    return Path(name).name if name and Path(name).exists() else name


@contextmanager
def _watch(samples: Iterable[_LayerSample]) -> Iterator[None]:
    """Feed the samples from forward hooks while the block runs."""
    with ExitStack() as hooks:
        for sample in samples:
            attn, transformer = sample.layer.attn, sample.layer.transformer
            see_grid = transformer.register_forward_pre_hook(sample.see_grid, with_kwargs=True)
            hooks.enter_context(see_grid)
            hooks.enter_context(attn.to_q.register_forward_hook(sample.see_query))
            hooks.enter_context(attn.to_k.register_forward_hook(sample.see_key))
        yield
