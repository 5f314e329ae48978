"""Inputs of AVQ attention: keys in clusters, and a codebook that fits them roughly."""

from functools import partial
from typing import Any

import torch
from torch import Tensor

from avq_diffusers.attention.api import avq_attention
from avq_diffusers.attention.tensors import Tensors
from avq_diffusers.codebook.codebook import Codebook
from avq_diffusers.config import Spec

stored_attention = partial(avq_attention, codewords="stored")

INPUTS = ("sink_key", "sink_value", "query_order", "key_order", "scale")
# All arguments of `avq_attention` beside tensors, codebook and backend.
OPTIONS = {
    "num_parents": 6,
    "num_children": 3,
    "threshold": None,
    "num_refined": 2,
    "codewords": "stored",
    "sink_key": None,
    "sink_value": None,
    "query_tile": 16,
    "query_order": None,
    "key_order": None,
    "scale": None,
}


# Options of the other form, which shows some leaves of such keys and some keys of these.
THRESHOLD = {"threshold": 0.01, "num_refined": None, "codewords": "means"}


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
    tensors, spec = unchecked_call(query, key, value, codebook, **OPTIONS | options)
    tensors.check(spec)
    return tensors, spec


def unchecked_call(
    query: Tensor, key: Tensor, value: Tensor, codebook: Codebook | None = None, **options: Any
) -> tuple[Tensors, Spec]:
    """What `avq_attention` makes of its arguments, before it checks the tensors."""
    inputs = {name: options.pop(name) for name in INPUTS if name in options}
    if codebook is not None:
        options |= {"num_parents": codebook.num_parents, "num_children": codebook.num_children}
    return Tensors.of(query, key, value, codebook, **inputs), Spec(**options)


def relative_error(actual: Tensor, expected: Tensor) -> float:
    """Root mean square error in root mean squares of `expected`; NaN if `actual` has one."""
    expected = expected.double()
    return float((actual.double() - expected).norm() / expected.norm())
