"""Inputs for one size of the operation, and codebooks fitted to their keys."""

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from avq_diffusers import AVQConfig
from avq_diffusers.codebook.codebook import Codebook
from avq_diffusers.codebook.kmeans import fit_codebook

CALIBRATION_KEYS = 16384


@dataclass(frozen=True)
class Shape:
    """One size of the operation."""

    batch: int
    num_heads: int
    num_tokens: int
    head_dim: int

    def __str__(self) -> str:
        return f"B{self.batch} H{self.num_heads} N{self.num_tokens} D{self.head_dim}"


class KeySource:
    """Queries, keys and values of one head shape, and codebooks fitted to the keys.

    Keys are Gaussian noise around 64 clusters of 16 clusters each. Two-level codebooks fit them and
    use every codeword.
    """

    def __init__(self, num_heads: int, head_dim: int, device: torch.device, seed: int = 0) -> None:
        self.num_heads, self.head_dim, self.device = num_heads, head_dim, device
        self.generator = torch.Generator(device).manual_seed(seed)
        self._normal = partial(torch.randn, generator=self.generator, device=device)
        centres = self._normal(num_heads, 64, 1, head_dim)
        self.centres = (centres + 0.6 * self._normal(num_heads, 64, 16, head_dim)).flatten(1, 2)
        self._codebooks: dict[tuple[int, int], Codebook] = {}

    def inputs(
        self, shape: Shape, dtype: torch.dtype, hot_share: float = 0.0
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Query, key, value (B, H, N, D), views of (B, N, H, D) memory as projections write it.

        A random `hot_share` of the keys is replaced by one key of their head.
        """
        size = (shape.batch, shape.num_tokens, self.num_heads)
        cluster = torch.randint(
            self.centres.shape[1], size, generator=self.generator, device=self.device
        )
        heads = torch.arange(self.num_heads, device=self.device)
        key = self.centres.to(dtype)[heads, cluster]
        key += 0.3 * self._normal(*size, self.head_dim, dtype=dtype)
        if hot_share:
            hot = torch.rand(size, generator=self.generator, device=self.device) < hot_share
            key = torch.where(hot[..., None], key[:1, :1], key)
        query, value = (self._normal(*size, self.head_dim, dtype=dtype) for _ in range(2))
        return tuple(tensor.transpose(1, 2) for tensor in (1.5 * query, key, value))

    def codebook(self, config: AVQConfig) -> Codebook:
        """The codebook of these sizes. K-means runs once for each."""
        sizes = config.num_parents, config.num_children
        if sizes not in self._codebooks:
            sample = Shape(1, self.num_heads, CALIBRATION_KEYS, self.head_dim)
            key = self.inputs(sample, torch.float32)[1]
            self._codebooks[sizes] = fit_codebook(key[0], *sizes, num_iterations=10)
        return self._codebooks[sizes]
