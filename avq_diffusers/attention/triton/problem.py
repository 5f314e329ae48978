"""`Problem`: everything that a call's launches depend on, the key for cached plans.

Shapes: B batch, H heads, N queries, S keys, T sinks, D head dim, M0 parents.
"""

from typing import NamedTuple

import torch
import triton.language as tl
from torch import Tensor

from avq_diffusers.attention.limits import matrix_instructions
from avq_diffusers.attention.tensors import Tensors
from avq_diffusers.attention.triton.codewords import StoredCodes
from avq_diffusers.attention.triton.launch import (
    Address,
    Pointer,
    address,
    aligned,
    capability_of,
    kernel_layout,
)
from avq_diffusers.config import Spec


class Layout(NamedTuple):
    """Memory layout of a tensor (B, H, tokens, D)."""

    shape: torch.Size
    strides: tuple[int, ...]

    @classmethod
    def of(cls, tensor: Tensor) -> "Layout":
        return cls(tensor.shape, tensor.stride())


class Strides(NamedTuple):
    """Token strides, possibly divided by `ALIGN`."""

    batch: tl.tensor
    head: tl.tensor
    token: tl.tensor


class Problem(NamedTuple):
    """A kernel call without the contents of its tensors.

    capability: compute capability of the GPU.
    query, key, value, sinks: layouts; `sinks` is for sink keys and values, or None.
    query_order, key_order: dtypes, or None.
    reduction: how often tilings are made smaller to fit the GPU's resources.
    """

    device: torch.device
    capability: tuple[int, int]
    dtype: torch.dtype
    query: Layout
    key: Layout
    value: Layout
    sinks: tuple[Layout, Layout] | None
    query_order: torch.dtype | None
    key_order: torch.dtype | None
    is_stored: bool  # codewords come from a codebook
    has_parents: bool  # updated parents are given
    spec: Spec
    scale: float
    reduction: int = 0

    @classmethod
    def of(
        cls, tensors: Tensors, stored: StoredCodes | None, parents: Tensor | None, spec: Spec
    ) -> "Problem":
        """The problem of tensors that are `readable`."""
        query, key, value, sink_key, sink_value, *_, query_order, key_order, scale = tensors
        sinks = None
        if sink_key is not None and sink_value is not None:
            sinks = Layout.of(sink_key), Layout.of(sink_value)
        return cls(
            query.device,
            capability_of(query.device),
            query.dtype,
            Layout.of(query),
            Layout.of(key),
            Layout.of(value),
            sinks,
            None if query_order is None else query_order.dtype,
            None if key_order is None else key_order.dtype,
            stored is not None,
            parents is not None,
            spec,
            scale,
        )

    @property
    def instructions(self) -> str:
        """Triton's matmul instruction: `"mma"`, `"wgmma"` or `"tcgen05"`."""
        return matrix_instructions(self.capability)

    @property
    def variant(self) -> "Problem":
        """The problem without what does not affect compilation: batch, strides, token counts."""
        anything = Layout(torch.Size((1, *self.query.shape[1:2], 1, *self.query.shape[3:])), ())
        sinks = self.sinks and (anything, anything)
        return self._replace(query=anything, key=anything, value=anything, sinks=sinks, reduction=0)

    @property
    def num_keys(self) -> int:
        return self.key.shape[2]

    @property
    def exact_keys(self) -> int:
        """Most exact keys of a tile."""
        return min(self.spec.exact_keys, self.num_keys)

    @property
    def num_sinks(self) -> int:
        return self.sinks[0].shape[2] if self.sinks else 0

    @property
    def num_tiles(self) -> int:
        """Query tiles per head."""
        return -(-self.query.shape[2] // self.spec.query_tile)

    def pointers(self) -> dict[str, Pointer | None]:
        """Pointers to the call's inputs; None for absent ones."""
        dtypes = {
            "query": self.dtype,
            "key": self.dtype,
            "value": self.dtype,
            "sink_key": self.dtype if self.sinks else None,
            "sink_value": self.dtype if self.sinks else None,
            "query_order": self.query_order,
            "key_order": self.key_order,
            "parents": self.dtype if self.has_parents else None,
            "stored_codes": self.dtype if self.is_stored else None,
            "bias": torch.float32 if self.is_stored else None,
            "centre": torch.float32 if self.is_stored else None,
        }
        return {name: dtype and Pointer(name, dtype) for name, dtype in dtypes.items()}


def strides_of(*layouts: Layout) -> tuple[int, list[Strides]]:
    """A common divisor of all strides, 8 or 1, and each tensor's strides divided by it.

    Multiplying by a constant lets the compiler prove that 16-byte rows are aligned.
    """
    strides = [x.strides[:3] for x in layouts]
    align = 8 if all(stride % 8 == 0 for each in strides for stride in each) else 1
    return align, [Strides(*(stride // align for stride in each)) for each in strides]


def readable(tensors: Tensors) -> Tensors:
    """The tensors, copied where kernels cannot read them."""
    sink_key, sink_value = tensors.sink_key, tensors.sink_value
    return Tensors(
        kernel_layout(tensors.query, 8),
        kernel_layout(tensors.key),
        kernel_layout(tensors.value),
        None if sink_key is None else kernel_layout(sink_key),
        None if sink_value is None else kernel_layout(sink_value),
        tensors.parents,
        tensors.children,
        aligned(tensors.query_order),
        aligned(tensors.key_order),
        tensors.scale,
    )


def addresses_of(
    tensors: Tensors, stored: StoredCodes | None, parents: Tensor | None
) -> dict[str, Address]:
    """Addresses of the call's inputs, by the names of `Problem.pointers`."""
    addresses = {
        "query": address(tensors.query),
        "key": address(tensors.key),
        "value": address(tensors.value),
        "sink_key": address(tensors.sink_key),
        "sink_value": address(tensors.sink_value),
        "query_order": address(tensors.query_order),
        "key_order": address(tensors.key_order),
        "parents": address(parents),
    }
    if stored is not None:
        addresses["stored_codes"] = address(stored.codes)
        addresses["bias"] = address(stored.bias)
        addresses["centre"] = address(stored.centre)
    return addresses
