"""`Problem`: everything that a call's launches depend on, the key for cached plans.

Shapes: B batch, H heads, N queries, S keys, T sinks, D head dim, M0 parents.
"""

import math
from typing import Any, NamedTuple

import torch
import triton.language as tl
from torch import Tensor

from avq_diffusers.attention.limits import matrix_instructions
from avq_diffusers.attention.tensors import SAMPLE, SAMPLED_FROM, Tensors
from avq_diffusers.attention.triton.codewords import StoredCodes, padded_sizes
from avq_diffusers.attention.triton.launch import (
    Pointer,
    addresses_of,
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

    def divided(self, divisor: int) -> "Strides":
        """All strides but the last, divided."""
        return Strides(*(stride // divisor for stride in self.strides[:3]))


class Strides(NamedTuple):
    """Token strides, possibly divided by `ALIGN`."""

    batch: tl.tensor
    head: tl.tensor
    token: tl.tensor


class Given(NamedTuple):
    """What kernels are given: pointers in a plan, addresses in a run; None for anything else."""

    query: Any = None
    key: Any = None
    value: Any = None
    sink_key: Any = None
    sink_value: Any = None
    query_order: Any = None
    key_order: Any = None
    stored_codes: Any = None
    bias: Any = None
    centre: Any = None  # of stored codes
    output: Any = None
    shown: Any = None
    grad_output: Any = None
    grad_query: Any = None
    grad_key: Any = None
    grad_value: Any = None
    grad_sink_key: Any = None
    grad_sink_value: Any = None


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
    spec: Spec
    scale: float
    reduction: int = 0

    @classmethod
    def of(cls, tensors: Tensors, stored: StoredCodes | None, spec: Spec) -> "Problem":
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
            spec,
            scale,
        )

    @property
    def instructions(self) -> str:
        """Triton's matmul instruction: `"mma"`, `"wgmma"` or `"tcgen05"`."""
        return matrix_instructions(self.capability)

    @property
    def variant(self) -> "Problem":
        """The problem without what does not affect compilation: batch, strides, how much is
        refined, and token counts beyond whether samples decide."""
        _, heads, _, head_dim = self.query.shape
        anything = Layout(torch.Size((1, heads, 1, head_dim)), ())
        query = anything
        if self.num_samples < self.spec.query_tile:
            query = Layout(torch.Size((1, heads, SAMPLED_FROM, head_dim)), ())
        return self._replace(
            query=query,
            key=anything,
            value=anything,
            sinks=self.sinks and (anything, anything),
            spec=self.spec.any_refinement,
            reduction=0,
        )

    @property
    def num_keys(self) -> int:
        return self.key.shape[2]

    @property
    def shows_keys(self) -> bool:
        """Whether tiles may see keys in place of leaves."""
        return self.spec.threshold is not None

    @property
    def has_first_order(self) -> bool:
        """Whether values inside leaves follow their keys."""
        return self.spec.means and not self.is_stored

    @property
    def num_samples(self) -> int:
        """Queries of a tile that decide its columns."""
        is_sampled = self.shows_keys and self.query.shape[2] >= SAMPLED_FROM
        return min(SAMPLE if is_sampled else self.spec.query_tile, self.spec.query_tile)

    @property
    def num_sinks(self) -> int:
        return self.sinks[0].shape[2] if self.sinks else 0

    @property
    def padded_sizes(self) -> tuple[int, int, int]:
        """DP, MP and CP."""
        spec = self.spec
        return padded_sizes(self.key.shape[3], spec.num_parents, spec.num_children)

    @property
    def num_rows(self) -> int:
        """Rows of the tables, 2 MP + M0 CP."""
        _, parent_rows, child_rows = self.padded_sizes
        return 2 * parent_rows + self.spec.num_parents * child_rows

    @property
    def factor(self) -> float:
        """On the logits of keys, in base 2."""
        return self.scale * math.log2(math.e)

    @property
    def num_tiles(self) -> int:
        """Query tiles per head."""
        return -(-self.query.shape[2] // self.spec.query_tile)

    def pointers(self) -> Given:
        """Pointers to what the call gives, among them all that it may write."""
        dtype = self.dtype
        sinks = dtype if self.sinks else None
        codes, wide = (dtype, torch.float32) if self.is_stored else (None, None)
        orders = self.query_order, self.key_order
        inputs = dtype, dtype, dtype, sinks, sinks, *orders, codes, wide, wide
        outputs = dtype, torch.int32, dtype, dtype, dtype, dtype, sinks, sinks
        dtypes = enumerate((*inputs, *outputs))
        return Given(*(dtype and Pointer(index, dtype) for index, dtype in dtypes))


def alignment_of(*layouts: Layout) -> int:
    """A common divisor of all strides, 8 or 1.

    Multiplying by a constant lets the compiler prove that 16-byte rows are aligned.
    """
    return 8 if all(stride % 8 == 0 for x in layouts for stride in x.strides[:3]) else 1


def readable(tensors: Tensors) -> Tensors:
    """The tensors, copied where kernels cannot read them."""
    sink_key, sink_value = tensors.sink_key, tensors.sink_value
    return tensors._replace(
        query=kernel_layout(tensors.query, 8),
        key=kernel_layout(tensors.key),
        value=kernel_layout(tensors.value),
        sink_key=None if sink_key is None else kernel_layout(sink_key),
        sink_value=None if sink_value is None else kernel_layout(sink_value),
        query_order=aligned(tensors.query_order),
        key_order=aligned(tensors.key_order),
    )


def given_by(tensors: Tensors, stored: StoredCodes | None, *outputs: Tensor | None) -> Given:
    """Addresses of what a call gives; `outputs` are the fields from `output` on."""
    inputs = *tensors.tokens(), tensors.query_order, tensors.key_order
    return Given(*addresses_of(*inputs, *(stored or (None, None, None)), *outputs))
