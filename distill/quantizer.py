"""`Quantizer`: one layer's codebook in training, and the quantization of the layer's keys.

Shapes: B batch, H heads, N keys, D head dim, M0 parents, C children per parent.
"""

import math
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from avq_diffusers import AVQConfig
from avq_diffusers.attention.diagnostics import active_ratio, quantization_error
from avq_diffusers.codebook.assignment import across_heads, assign_leaves, centre_of
from avq_diffusers.codebook.codebook import Codebook
from avq_diffusers.codebook.ema import batch_statistics, derive_codebook, ema_update, reassign_dead

# Variance of DiVeQ's noise in each dimension.
DIVEQ_VARIANCE = 1e-3
# Keys per head kept from the last batch, for diagnostics and as targets for dead codewords.
KEPT_KEYS = 4096


class Leaves(NamedTuple):
    """Keys and their leaves.

    Args:
        key: (B, H, N, D) float32.
        codeword: (B, H, N, D), the codeword of each key's leaf.
        leaf: (B, H, N) int64 from `assign_leaves`.
    """

    key: Tensor
    codeword: Tensor
    leaf: Tensor

    def commitment(self) -> Tensor:
        """Mean squared quantization error, differentiable in the keys.

        Equal to the mean of `commitment_loss` over heads, divided by D.
        """
        return F.mse_loss(self.key, self.codeword.detach())


class Quantizer(nn.Module):
    """Codewords and their EMA statistics: buffers, NaN until `start` or `load_state_dict`.

    Args:
        num_heads: H.
        head_dim: D.
        config: this layer's configuration, overrides resolved.
        diveq: train the codewords as parameters (Vali et al. 2026, "DiVeQ: Differentiable Vector
            Quantization Using the Reparameterization Trick").
    """

    def __init__(self, num_heads: int, head_dim: int, config: AVQConfig, *, diveq: bool) -> None:
        super().__init__()
        self.diveq = diveq
        cells = (num_heads, config.num_parents)
        # `nn.Module` has a method named `children`, hence the longer names.
        for name, shape in (
            ("parent_codewords", (*cells, head_dim)),
            ("child_codewords", (*cells, config.num_children, head_dim)),
        ):
            codewords = torch.full(shape, math.nan)
            if diveq:
                self.register_parameter(name, nn.Parameter(codewords))
            else:
                self.register_buffer(name, codewords)
        per_cell = 1 + config.num_children
        self.register_buffer("ema_key_sums", torch.full((*cells, per_cell, head_dim), math.nan))
        self.register_buffer("ema_counts", torch.full((*cells, per_cell), math.nan))
        # For the current optimizer step. Not buffers, because DDP may broadcast those.
        self.statistics: tuple[Tensor, Tensor] | None = None
        self.kept_keys: Tensor | None = None

    def codebook(self) -> Codebook:
        """The current codewords; without DiVeQ they share this module's memory."""
        children = self.child_codewords
        if self.diveq:
            # Part of the graph, so children's gradients reach their parent.
            shift = children.mean(dim=2) - self.parent_codewords
            children = children - shift[:, :, None]
        return Codebook(self.parent_codewords, children, check_finite=False)

    def forward(self, key: Tensor) -> Leaves:
        """Find the leaves of float32 keys (B, H, N, D)."""
        codebook = self.codebook()
        leaf = assign_leaves(key, codebook)
        row = across_heads(leaf, codebook.num_codewords)
        return Leaves(key, F.embedding(row, codebook.leaves.flatten(0, 2)), leaf)

    def quantized_key(self, leaves: Leaves) -> Tensor:
        """Codewords in place of keys, minus one vector per head, which softmax ignores.

        Gradients reach keys straight through. With DiVeQ they reach keys and codewords, and
        training mode adds a little noise.
        """
        key, codeword = leaves.key, leaves.codeword
        # A common offset would cost precision in half precision.
        centre = centre_of(self.parent_codewords.detach())
        if not self.diveq:
            return codeword - centre + (key - key.detach())
        error = codeword - key
        noise = DIVEQ_VARIANCE**0.5 * torch.randn_like(error) if self.training else 0
        direction = F.normalize(error.detach() + noise, dim=-1)
        return key - centre + error.norm(dim=-1, keepdim=True) * direction

    @torch.no_grad()
    def start(self, codebook: Codebook, ema_counts: Tensor) -> None:
        """Start from a codebook whose codewords stand for `ema_counts` keys per step."""
        self.ema_counts.copy_(ema_counts)
        self._set_codebook(codebook)
        self.ema_key_sums.copy_(codebook.leaves * ema_counts[..., None])

    @torch.no_grad()
    def observe(self, leaves: Leaves) -> None:
        """Add the keys of a micro-batch to the statistics of this step."""
        key = leaves.key.detach()
        statistics = batch_statistics(key, self.codebook(), leaves.leaf)
        if self.statistics is not None:
            statistics = tuple(a + b for a, b in zip(self.statistics, statistics, strict=True))
        self.statistics = statistics
        # An odd stride visits every column of a grid whose width is a power of two.
        stride = math.ceil(key.shape[0] * key.shape[2] / KEPT_KEYS) | 1
        kept = key[:, :, ::stride].movedim(1, 0).flatten(1, 2)
        # NCCL only broadcasts contiguous tensors.
        self.kept_keys = kept.clone(memory_format=torch.contiguous_format)

    @torch.no_grad()
    def update(self, decay: float) -> None:
        """Update from the statistics of all processes, once after each optimizer step.

        With DiVeQ, only the counts are used; the optimizer moves the codewords.
        """
        key_sums, counts = self.statistics
        self.statistics = None
        if dist.is_initialized():
            dist.all_reduce(key_sums)
            dist.all_reduce(counts)
        self.ema_counts.copy_(ema_update(self.ema_counts, counts, decay))
        if self.diveq:
            codebook = self.codebook()
            self._set_codebook(codebook)
            self.ema_key_sums.copy_(codebook.leaves * self.ema_counts[..., None])
            return
        self.ema_key_sums.copy_(ema_update(self.ema_key_sums, key_sums, decay))
        self._set_codebook(derive_codebook(self.ema_key_sums, self.ema_counts, self.codebook()))

    @torch.no_grad()
    def reassign_dead(self, *, threshold: float, seed: int) -> None:
        """Move codewords with fewer than `threshold` keys per step to keys of the last batch.

        Call right after `update`, when no statistics of old codewords are pending. `seed` is the
        same on all processes and differs between steps.
        """
        if dist.is_initialized():
            dist.broadcast(self.kept_keys, src=0)
        key_sums, counts, codebook = reassign_dead(
            self.ema_key_sums,
            self.ema_counts,
            self.codebook(),
            self.kept_keys,
            least_count=threshold,
            seed=seed,
        )
        self.ema_key_sums.copy_(key_sums)
        self.ema_counts.copy_(counts)
        self._set_codebook(codebook)

    @torch.no_grad()
    def diagnostics(self) -> dict[str, Tensor]:
        """Quantization error of the kept keys and active ratio by EMA counts, both (H,)."""
        cells, children = self.ema_counts[..., :1], self.ema_counts[..., 1:]
        leaves = torch.cat([cells - children.sum(dim=-1, keepdim=True), children], dim=-1)
        return {
            "quantization_error": quantization_error(
                self.kept_keys, self.codebook(), codewords="stored"
            ),
            "active_ratio": active_ratio(leaves),
        }

    def _set_codebook(self, codebook: Codebook) -> None:
        self.parent_codewords.copy_(codebook.parents)
        self.child_codewords.copy_(codebook.children)


@contextmanager
def recorded(modules: Iterable[nn.Module]) -> Iterator[dict[nn.Module, Any]]:
    """Collect the outputs of the modules while the block runs."""
    outputs = {}

    def record(module: nn.Module, inputs: tuple, output: Any) -> None:
        outputs[module] = output

    with ExitStack() as hooks:
        for module in modules:
            hooks.enter_context(module.register_forward_hook(record))
        yield outputs
