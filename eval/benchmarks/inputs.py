"""Inputs of one size, and codebooks fitted to their keys."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial

import torch
from torch import Tensor

from avq_diffusers import AVQConfig
from avq_diffusers.attention.orders import query_order
from avq_diffusers.codebook.codebook import Codebook
from avq_diffusers.codebook.kmeans import fit_codebook

CALIBRATION_KEYS = 16384

InputSets = Sequence[tuple[Tensor, Tensor, Tensor]]


@dataclass(frozen=True)
class Shape:
    """One size of the attention operation."""

    batch: int
    num_heads: int
    num_tokens: int
    head_dim: int

    def __str__(self) -> str:
        return f"B{self.batch} H{self.num_heads} N{self.num_tokens} D{self.head_dim}"


class Inputs:
    """`count` sets of queries, keys and values of one shape, and codebooks fitted to the keys.

    Keys are Gaussian noise around 64 clusters of 16 clusters each: two-level codebooks fit them and
    use every codeword. Tensors (B, H, N, D) are views of (B, N, H, D) memory, as projections write
    it.
    """

    def __init__(self, shape: Shape, dtype: torch.dtype, device: torch.device, count: int) -> None:
        self.shape, self.dtype, self.device, self.count = shape, dtype, device, count
        self.generator = torch.Generator(device).manual_seed(0)
        self._normal = partial(torch.randn, generator=self.generator, device=device)
        heads, head_dim = shape.num_heads, shape.head_dim
        centres = self._normal(heads, 64, 1, head_dim)
        self.centres = (centres + 0.6 * self._normal(heads, 64, 16, head_dim)).flatten(1, 2)
        self._sinks: dict[int, list[tuple[Tensor, Tensor]]] = {}
        self._codebooks: dict[tuple[int, int], Codebook] = {}

    @cached_property
    def sets(self) -> InputSets:
        return [self._draw(self.shape, self.dtype) for _ in range(self.count)]

    def sinks(self, number: int) -> Sequence[tuple[Tensor, Tensor]]:
        """`number` keys and values per set, as for text; the same at every call."""
        if number not in self._sinks:
            text = replace(self.shape, num_tokens=number)
            self._sinks[number] = [self._draw(text, self.dtype)[1:] for _ in range(self.count)]
        return self._sinks[number]

    def joint(self, number: int) -> InputSets:
        """The sets with `sinks` among their keys and values."""
        texts = self.sinks(number)
        return [
            (query, torch.cat([key, text_key], 2), torch.cat([value, text_value], 2))
            for (query, key, value), (text_key, text_value) in zip(self.sets, texts, strict=True)
        ]

    @cached_property
    def order(self) -> Tensor:
        """Gilbert order on a square grid if N is a square, else on a single row."""
        side = math.isqrt(num_tokens := self.shape.num_tokens)
        grid = (side, side) if side * side == num_tokens else (1, num_tokens)
        return query_order(*grid, "gilbert", self.device)

    def codebook(self, config: AVQConfig) -> Codebook:
        """The codebook of these sizes; k-means runs once per size."""
        sizes = config.num_parents, config.num_children
        if sizes not in self._codebooks:
            sample = replace(self.shape, batch=1, num_tokens=CALIBRATION_KEYS)
            _, key, _ = self._draw(sample, torch.float32)
            self._codebooks[sizes] = fit_codebook(key[0], *sizes, num_iterations=10)
        return self._codebooks[sizes]

    def _draw(self, shape: Shape, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
        size = (shape.batch, shape.num_tokens, shape.num_heads)
        cluster = torch.randint(
            self.centres.shape[1], size, generator=self.generator, device=self.device
        )
        heads = torch.arange(shape.num_heads, device=self.device)
        key = self.centres.to(dtype)[heads, cluster]
        key += 0.3 * self._normal(*size, shape.head_dim, dtype=dtype)
        query, value = (self._normal(*size, shape.head_dim, dtype=dtype) for _ in range(2))
        query, key, value = (x.transpose(1, 2) for x in (1.5 * query, key, value))
        return query, key, value
