"""`StoredAttention`: AVQ over a codebook that learns from the keys while the model trains.

Shapes: B batch, H heads, N tokens, D head dim.
"""

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from avq_diffusers import AVQConfig, avq_attention
from avq_diffusers.attention.diagnostics import capture
from avq_diffusers.codebook.assignment import centre_of
from avq_diffusers.codebook.codebook import Codebook
from avq_diffusers.codebook.ema import batch_statistics
from avq_diffusers.codebook.kmeans import fit_codebook
from distill.attention import exact_attention
from distill.quantizer import Quantizer


class StoredAttention(nn.Module):
    """A function for `train_attention`.

    In training, with `full_spawning`, it is exact attention over quantized keys.

    Args:
        num_heads: H.
        head_dim: D.
        config: of this layer, overrides resolved.
        settings: has `full_spawning`, `project_children` and `diveq`.
    """

    def __init__(self, num_heads: int, head_dim: int, config: AVQConfig, settings: Any) -> None:
        super().__init__()
        self.config = config
        self.full_spawning = settings.full_spawning
        self.key_norm = nn.LayerNorm(head_dim) if config.key_norm else None
        self.quantizer = Quantizer(
            num_heads,
            head_dim,
            config,
            constrain=settings.project_children,
            diveq=settings.diveq,
        )
        # Arguments of `capture` for one image of the last batch.
        self.sample: dict[str, Tensor] = {}

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, codebook: None, **options: Any
    ) -> tuple[Tensor, str]:
        """Attend with queries and keys (B, H, N, D), which have passed the key norm."""
        if self.training:
            leaves = self.quantizer(key.float())
            self.sample = {
                "query": query[:1].detach().clone(),
                "key": leaves.key[:1].detach().clone(),
                "query_order": options["query_order"],
            }
            if self.full_spawning:
                key = self.quantizer.quantized_key(leaves).to(query.dtype)
                sinks = options["sink_key"]
                if sinks is not None:
                    centre = centre_of(self.quantizer.parent_codewords.detach())
                    options["sink_key"] = (sinks.float() - centre).to(sinks.dtype)
                return exact_attention(query, key, value, **options)
        codebook = self.quantizer.codebook()
        return avq_attention(query, key, value, codebook, **options), options["backend"]

    @torch.no_grad()
    def start_key_norm(self, keys: Tensor) -> None:
        """Let the key norm, if there is one, change keys (H, S, D) least."""
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
        """Fit the codebook by k-means to keys (H, S, D) before the norm, on process 0 for all.

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
            constrain=self.quantizer.constrain,
        )
        _, counts = batch_statistics(keys, codebook)
        self.quantizer.start(codebook, counts * (keys_per_step / keys.shape[1]))
        if dist.is_initialized():
            for tensor in self.state_dict().values():
                dist.broadcast(tensor, src=0)

    @torch.no_grad()
    def copied_codebook(self) -> Codebook:
        """A copy of the codebook."""
        return Codebook(*(x.clone() for x in vars(self.quantizer.codebook()).values()))

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
