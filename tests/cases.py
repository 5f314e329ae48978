"""Inputs of AVQ attention: keys in clusters, and a codebook that fits them roughly."""

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from avq_diffusers.attention.api import avq_attention
from avq_diffusers.attention.spec import Spec, Tensors
from avq_diffusers.codebook.codebook import Codebook

stored_attention = partial(avq_attention, codewords="stored")

# All arguments of `avq_attention` beside tensors, codebook and backend.
OPTIONS = {
    "num_parents": 6,
    "num_children": 3,
    "num_refined": 2,
    "codewords": "stored",
    "num_updates": 0,
    "exact_keys": 0,
    "sink_key": None,
    "sink_value": None,
    "query_tile": 16,
    "query_order": None,
    "key_order": None,
    "scale": None,
}

LAYOUTS = {
    "(B, H, N, D) memory": lambda x: x.contiguous(),
    "(B, N, H, D) memory": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
    "(D, N, H, B) memory": lambda x: x.permute(3, 2, 1, 0).contiguous().permute(3, 2, 1, 0),
    "part of a fused projection": lambda x: torch.cat([x, x + 1, x - 1], dim=-1)[..., 8:16],
    "every second token": lambda x: x.repeat_interleave(2, dim=2)[:, :, ::2],
    "batch expanded": lambda x: x[:1].expand(2, -1, -1, -1),
}

# Hard shapes, each with refined parents and query tile.
SHAPES = [
    pytest.param({"queries": 48}, 2, 16, id="whole tiles"),
    pytest.param({"queries": 51}, 2, 16, id="last tile partial"),
    pytest.param({"queries": 5}, 2, 16, id="fewer queries than a tile"),
    pytest.param({"queries": 40, "keys": 70}, 2, 16, id="more keys than queries"),
    pytest.param({"queries": 130}, 2, 128, id="default tile, above the chunk"),
    pytest.param({"queries": 20}, 2, 1, id="tiles of one query"),
    pytest.param({"queries": 20}, 2, 10**9, id="tile above any memory"),
    pytest.param({"batch": 1, "heads": 1}, 2, 16, id="one head"),
    pytest.param({"batch": 3, "heads": 5}, 2, 16, id="odd batch and heads"),
    pytest.param({"head_dim": 40}, 2, 16, id="head dim of SD1.5 level 0"),
    pytest.param({"head_dim": 64}, 2, 16, id="head dim of SDXL"),
    pytest.param({"head_dim": 80}, 2, 16, id="head dim of SD1.5 level 1"),
    pytest.param({"head_dim": 128}, 2, 16, id="head dim of DiT"),
    pytest.param({"head_dim": 160}, 2, 16, id="head dim of SD1.5 level 2"),
    pytest.param({"head_dim": 1}, 2, 16, id="one channel"),
    pytest.param({"parents": 1}, 1, 16, id="one parent, refined"),
    pytest.param({"parents": 6}, 6, 16, id="all parents refined"),
    pytest.param({"parents": 13}, 5, 16, id="parents not a power of two"),
    pytest.param({"parents": 40, "queries": 30}, 25, 16, id="more parents than keys"),
    pytest.param({"children": 1}, 2, 16, id="one child"),
    pytest.param({"children": 0}, 0, 16, id="flat codebook"),
    pytest.param({"queries": 70, "keys": 33}, 2, 16, id="fewer keys than queries"),
    pytest.param({}, 0, 16, id="none refined"),
    pytest.param({}, 1, 16, id="one refined"),
]


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


def call_of(
    query: Tensor, key: Tensor, value: Tensor, codebook: Codebook | None, **options: Any
) -> tuple[Tensors, Spec]:
    """What `avq_attention` makes of its arguments; others than the given ones are `OPTIONS`."""
    options = OPTIONS | options
    tensors = Tensors.of_call(query, key, value, codebook, options)
    tensors.check()
    return tensors, Spec.of_call(tensors, options)


def relative_error(actual: Tensor, expected: Tensor) -> float:
    """Root mean square error in root mean squares of `expected`; NaN if `actual` has one."""
    expected = expected.double()
    return float((actual.double() - expected).norm() / expected.norm())
