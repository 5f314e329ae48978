"""`StoredAttention`: AVQ with a codebook that learns from the keys during training.

Shapes: B batch, H heads, N tokens, D head dim.
"""

import math
from collections.abc import Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from avq_diffusers import AVQCodebooks, AVQConfig, apply_avq, gather_codebooks, select_layers
from avq_diffusers.attention.api import attend
from avq_diffusers.attention.diagnostics import capture
from avq_diffusers.attention.tensors import Attended, Tensors
from avq_diffusers.codebook.assignment import centre_of
from avq_diffusers.codebook.codebook import Codebook
from avq_diffusers.codebook.ema import batch_statistics, ema_decay
from avq_diffusers.codebook.kmeans import fit_codebook
from avq_diffusers.config import Spec
from distill.attention import attend_exactly, train_attention
from distill.config import CodebookConfig
from distill.quantizer import Quantizer


class StoredAttention(nn.Module):
    """A function for `train_attention`.

    In training all parents are refined: it is exact attention over quantized keys.

    Args:
        num_heads: H.
        head_dim: D.
        config: this layer's configuration, overrides resolved.
        diveq: as in `Quantizer`.
    """

    def __init__(self, num_heads: int, head_dim: int, config: AVQConfig, *, diveq: bool) -> None:
        super().__init__()
        self.config = config
        self.key_norm = nn.LayerNorm(head_dim) if config.key_norm else None
        self.quantizer = Quantizer(num_heads, head_dim, config, diveq=diveq)
        # Arguments for `capture`, from one image of the last batch.
        self.sample: dict[str, Tensor] = {}

    def forward(self, tensors: Tensors, spec: Spec, backend: str) -> Attended:
        """Attend with queries and keys (B, H, N, D), after the key norm."""
        if not self.training:
            return attend(tensors.with_codebook(self.quantizer.codebook()), spec, backend)
        query = tensors.query
        leaves = self.quantizer(tensors.key.float())
        self.sample = {
            "query": query[:1].detach().clone(),
            "key": leaves.key[:1].detach().clone(),
            "query_order": tensors.query_order,
        }
        key = self.quantizer.quantized_key(leaves).to(query.dtype)
        sinks = tensors.sink_key
        if sinks is not None:
            centre = centre_of(self.quantizer.parent_codewords.detach())
            sinks = (sinks.float() - centre).to(sinks.dtype)
        return attend_exactly(tensors._replace(key=key, sink_key=sinks), spec, backend)

    @torch.no_grad()
    def start_key_norm(self, keys: Tensor) -> None:
        """Initialize the key norm, if any, to change keys (H, S, D) as little as possible."""
        if self.key_norm is None:
            return
        normal = F.layer_norm(keys.float(), keys.shape[-1:]).flatten(0, 1)
        plain = keys.float().flatten(0, 1)
        slope = ((normal - normal.mean(0)) * (plain - plain.mean(0))).mean(0) / normal.var(
            dim=0, correction=0
        )
        self.key_norm.weight.copy_(slope)
        self.key_norm.bias.copy_(plain.mean(0) - slope * normal.mean(0))

    @torch.no_grad()
    def start(self, keys: Tensor, keys_per_step: float, seed: int) -> None:
        """Fit the codebook to keys (H, S, D) before the norm with k-means, on process 0 for all.

        `keys_per_step` scales the EMA counts, so that the first updates are small.

        Raises:
            ValueError: there are fewer keys than parents.
        """
        keys = keys.float() if self.key_norm is None else self.key_norm(keys.float())
        codebook = fit_codebook(
            keys,
            self.config.num_parents,
            self.config.num_children,
            seed=seed,
        )
        _, counts = batch_statistics(keys, codebook)
        self.quantizer.start(codebook, counts * (keys_per_step / keys.shape[1]))
        if dist.is_initialized():
            for tensor in self.state_dict().values():
                dist.broadcast(tensor, src=0)

    @torch.no_grad()
    def diagnostics(self) -> dict[str, Tensor]:
        """Quantization error, active ratio and, unless the codebook is flat, capture: (H,) each."""
        metrics = self.quantizer.diagnostics()
        if self.config.num_refined:
            metrics["capture"] = capture(
                **self.sample,
                codebook=self.quantizer.codebook(),
                num_refined=self.config.num_refined,
                codewords=self.config.codewords,
                query_tile=self.config.query_tile,
            )
        return metrics


def learn_attention(
    model: nn.Module, config: AVQConfig, *, diveq: bool
) -> dict[str, StoredAttention]:
    """Let a model's layers run AVQ that is trained; its other weights stay unchanged.

    Args:
        model: as in `apply_avq`.
        config: layers, sizes and order. With `codewords="means"`, codewords come from the keys of
            each call, and nothing of AVQ learns.
        diveq: as in `Quantizer`.

    Returns:
        The attention with codebooks that learn, by layer name; NaN until `start_codebooks`.
    """
    if config.means:
        apply_avq(model, config, route="always")
        return {}
    stored = {
        x.name: StoredAttention(
            x.num_heads, x.head_dim, config.for_layer(x.name, x.level), diveq=diveq
        )
        for x in select_layers(model, config.levels, config.exact)
    }
    train_attention(model, stored, config)
    return stored


def start_codebooks(
    stored: Mapping[str, StoredAttention],
    images: Iterable[Mapping[str, Tensor]],
    *,
    num_images: int,
    images_per_step: int,
    keys_per_layer: int,
    seed: int,
    start_key_norms: bool = False,
) -> None:
    """Fit the layers' codebooks to the keys of some images.

    Args:
        stored: layer name -> attention.
        images: each image's keys (H, N, D), by layer.
        num_images: number of images.
        images_per_step: images per optimizer step, over micro-batches and processes.
        keys_per_layer: number of keys sampled per layer.
        seed: seeds sampling and k-means.
        start_key_norms: initialize key norms to change keys as little as possible.

    Raises:
        ValueError: there are fewer keys than parents.
    """
    generator = torch.Generator().manual_seed(seed)
    num_kept = math.ceil(keys_per_layer / num_images)
    samples: dict[str, list[Tensor]] = {name: [] for name in stored}
    num_tokens: dict[str, int] = {}
    for image in images:
        for name in stored:
            keys = image[name]
            num_tokens[name] = keys.shape[1]
            kept = torch.randperm(keys.shape[1], generator=generator)[:num_kept]
            samples[name].append(keys[:, kept.to(keys.device)].float())
    for name, attention in stored.items():
        keys = torch.cat(samples[name], dim=1)
        if start_key_norms:
            attention.start_key_norm(keys)
        attention.start(keys, images_per_step * num_tokens[name], seed)


def update_codebooks(
    stored: Mapping[str, StoredAttention], settings: CodebookConfig, step: int, seed: int
) -> float:
    """Update the codebooks from all keys since the last update, once after each optimizer step.

    With DiVeQ the optimizer has already moved the codewords; only their statistics follow.

    Args:
        stored: layer name -> attention.
        settings: decays, and when dead codewords move.
        step: number of earlier steps.
        seed: seeds the choice of keys that dead codewords move to; the same on all processes.

    Returns:
        The EMA decay.
    """
    decay = ema_decay(step, settings.decay_warmup_steps, settings.decay_start, settings.decay_end)
    threshold = settings.dead_threshold
    is_due = threshold is not None and (step + 1) % settings.dead_every == 0
    for attention in stored.values():
        attention.quantizer.update(decay)
        if is_due:
            attention.quantizer.reassign_dead(threshold=threshold, seed=seed)
    return decay


@torch.no_grad()
def learned_codebooks(
    model: nn.Module, config: AVQConfig, stored: Mapping[str, StoredAttention], **options: Any
) -> AVQCodebooks:
    """Copies of the learned codebooks and key norms, for `apply_avq`.

    Args:
        model: holds the layers.
        config: the configuration of its attention.
        stored: layer name -> attention; empty for own codewords.
        options: other arguments of `gather_codebooks`.
    """
    found = {
        name: Codebook(*(x.clone() for x in vars(attention.quantizer.codebook()).values()))
        for name, attention in stored.items()
    }
    codebooks = gather_codebooks(model, config, found or None, **options)
    for name, attention in stored.items():
        if attention.key_norm is not None:
            codebooks.key_norm(name).load_state_dict(attention.key_norm.state_dict())
    return codebooks
