"""Inputs of AVQ attention: keys in clusters, and a codebook that fits them roughly."""

import torch
from torch import Tensor

from avq_diffusers.codebook.codebook import Codebook

LAYOUTS = {
    "(B, H, N, D) memory": lambda x: x.contiguous(),
    "(B, N, H, D) memory": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
    "(D, N, H, B) memory": lambda x: x.permute(3, 2, 1, 0).contiguous().permute(3, 2, 1, 0),
    "part of a fused projection": lambda x: torch.cat([x, x + 1, x - 1], dim=-1)[..., 8:16],
    "every second token": lambda x: x.repeat_interleave(2, dim=2)[:, :, ::2],
    "batch expanded": lambda x: x[:1].expand(2, -1, -1, -1),
}


def make_case(
    *,
    batch: int = 2,
    heads: int = 2,
    queries: int = 50,
    keys: int | None = None,
    head_dim: int = 8,
    parents: int = 6,
    children: int = 3,
    dtype: torch.dtype = torch.float64,
    seed: int = 0,
) -> tuple[Tensor, Tensor, Tensor, Codebook]:
    """Query, key, value as (B, H, N, D) views of (B, N, H, D) memory, and a codebook.

    The codewords are float64 for float64 inputs and float32 otherwise.
    """
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    keys = queries if keys is None else keys
    parent_codewords = 1.5 * normal(heads, parents, head_dim)
    offsets = 0.7 * normal(heads, parents, children, head_dim)
    cell = torch.randint(parents, (batch, keys, heads), generator=generator)
    key = parent_codewords[torch.arange(heads), cell] + 0.7 * normal(batch, keys, heads, head_dim)
    query = normal(batch, queries, heads, head_dim)
    value = normal(batch, keys, heads, head_dim)

    codebook = Codebook(parent_codewords, parent_codewords[:, :, None] + offsets)
    if dtype != torch.float64:
        codebook = codebook.to(dtype=torch.float32)
    return *(x.to(dtype).transpose(1, 2) for x in (query, key, value)), codebook


def relative_error(actual: Tensor, expected: Tensor) -> float:
    """Root mean square error in root mean squares of `expected`; NaN if `actual` has one."""
    expected = expected.double()
    return float((actual.double() - expected).norm() / expected.norm())
