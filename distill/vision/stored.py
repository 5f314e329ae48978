"""`StoredAttention`: attention over a codebook that learns while the model trains.

Shapes: B batch, H heads, N tokens, D head dim.
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from avq_diffusers import AVQConfig, avq_attention
from avq_diffusers.attention.diagnostics import capture
from avq_diffusers.attention.orders import query_order
from avq_diffusers.codebook.assignment import centre_of
from avq_diffusers.codebook.ema import batch_statistics
from avq_diffusers.codebook.kmeans import fit_codebook
from distill.quantizer import Quantizer
from distill.vision.config import CodebookConfig
from distill.vision.layers import Grid, TokenAttention


class StoredAttention(TokenAttention):
    """AVQ over stored codewords, the paper's form; the prefix is a sink of every patch.

    In training, with `full_spawning`, it is exact attention over quantized keys.

    Args:
        grid: of the layer.
        num_heads: H.
        head_dim: D.
        config: sizes.
        settings: how the codebook learns.
    """

    def __init__(
        self, grid: Grid, num_heads: int, head_dim: int, config: AVQConfig, settings: CodebookConfig
    ) -> None:
        super().__init__(grid)
        self.config = config
        self.full_spawning = settings.full_spawning
        self.key_norm = nn.LayerNorm(head_dim) if config.key_norm else nn.Identity()
        self.quantizer = Quantizer(
            num_heads,
            head_dim,
            config,
            constrain=settings.project_children,
            diveq=settings.diveq,
        )
        order = query_order(grid.height, grid.width, config.query_order, "cpu").clone()
        self.register_buffer("query_order", order, persistent=False)
        # Of the last pass in training mode.
        self.commitment: Tensor | None = None
        self.sample: dict[str, Tensor] = {}

    def prepared(self, key: Tensor) -> Tensor:
        if isinstance(self.key_norm, nn.Identity):
            return key
        return self.key_norm(key.float()).to(key.dtype)

    def attend(self, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        prefix = self.grid.prefix
        sinks, patches = key[:, :, :prefix], key[:, :, prefix:]
        if self.training:
            leaves = self.quantizer(patches.float())
            self.commitment = leaves.commitment()
            self.quantizer.observe(leaves)
            self.sample = {"query": query[:1].detach(), "key": leaves.key[:1].detach()}
            if self.full_spawning:
                centre = centre_of(self.quantizer.parent_codewords.detach())
                quantized = self.quantizer.quantized_key(leaves).to(key.dtype)
                key = torch.cat([(sinks.float() - centre).to(key.dtype), quantized], dim=2)
                return F.scaled_dot_product_attention(query, key, value, scale=scale)
        return avq_attention(
            query,
            patches,
            value[:, :, prefix:],
            self.quantizer.codebook(),
            sink_key=sinks if prefix else None,
            sink_value=value[:, :, :prefix] if prefix else None,
            query_order=self.query_order,
            scale=scale,
            **self.config.attention_arguments,
        )

    @torch.no_grad()
    def start(self, keys: Tensor, keys_per_step: float, seed: int) -> None:
        """Fit the codebook to keys (H, S, D) by k-means, and the key norm to change them least.

        On process 0 for all. `keys_per_step` scales the EMA counts, so that first updates are
        small.
        """
        if isinstance(self.key_norm, nn.LayerNorm):
            normal = F.layer_norm(keys.float(), keys.shape[-1:]).flatten(0, 1)
            plain = keys.float().flatten(0, 1)
            slope = ((normal - normal.mean(0)) * (plain - plain.mean(0))).mean(0) / normal.var(
                dim=0, correction=0
            )
            self.key_norm.weight.copy_(slope)
            self.key_norm.bias.copy_(plain.mean(0) - slope * normal.mean(0))
        keys = self.key_norm(keys.float())
        codebook = fit_codebook(
            keys,
            self.config.num_parents,
            self.config.num_children,
            seed=seed,
            constrain=self.quantizer.constrain,
        )
        _, counts = batch_statistics(keys, codebook)
        self.quantizer.start(codebook, counts * (keys_per_step / keys.shape[1]))
        if dist.is_initialized():
            for tensor in self.state_dict().values():
                dist.broadcast(tensor, src=0)

    @torch.no_grad()
    def update(self, decay: float) -> None:
        """Update the codebook by all keys since the last update, once after an optimizer step."""
        key_sums, counts = self.quantizer.statistics
        if dist.is_initialized():
            dist.all_reduce(key_sums)
            dist.all_reduce(counts)
        self.quantizer.update(key_sums, counts, decay)
        self.quantizer.statistics = None

    @torch.no_grad()
    def reassign_dead(self, *, threshold: float, seed: int) -> None:
        """Move codewords with fewer than `threshold` keys per step to keys of the last batch."""
        if dist.is_initialized():
            dist.broadcast(self.quantizer.kept_keys, src=0)
        self.quantizer.reassign_dead(threshold=threshold, seed=seed)

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
                query_order=self.query_order,
                importance_tile=self.config.importance_tile,
            )
        return metrics
