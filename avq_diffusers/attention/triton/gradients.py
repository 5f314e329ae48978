"""The backward pass by kernels: gradients of AVQ attention whose codewords are means.

The keys are summarized and the parents chosen as in the forward pass, by the same kernels. Then
three launches: `column_gradients`, and the two of `key_gradients`. There are no atomics: every run
gives the same bits.
"""

from dataclasses import dataclass
from functools import lru_cache

import torch
import triton
from torch import Tensor

from avq_diffusers.attention.triton.attention import AttentionTiling, launch_constants
from avq_diffusers.attention.triton.codewords import StoredCodes
from avq_diffusers.attention.triton.column_gradients import column_gradients_kernel
from avq_diffusers.attention.triton.key_gradients import (
    key_gradients_kernel,
    leaf_gradients_kernel,
)
from avq_diffusers.attention.triton.launch import (
    MOST_PLANS,
    Launch,
    Part,
    Plan,
    aligned,
    capability_of,
    kernel_layout,
    pointer,
)
from avq_diffusers.attention.triton.precompute import precompute_launches, stored_pointers

# Bytes of the gradients of columns of one launch, unless one batch element has more.
COLUMN_BYTES = 1 << 30


@dataclass(frozen=True)
class GradientTiling:
    """How the gradients of a query tile are cut. Changes their last bits, never their meaning.

    num_warps: warps per program.
    num_columns: columns whose gradients are computed at once.
    """

    num_warps: int
    num_columns: int


def default_tiling(head_dim: int, capability: tuple[int, int]) -> GradientTiling:
    """The tiling for a problem size, measured on an H200."""
    if capability < (9, 0):
        return GradientTiling(num_warps=8, num_columns=32)
    return GradientTiling(num_warps=4 if head_dim <= 64 else 8, num_columns=64)


def unsupported(query: Tensor, *, means: bool, exact_keys: int, sink_key: Tensor | None) -> bool:
    """Whether these kernels cannot serve a call that those of the forward pass can.

    Two tiles of float32 do not fit shared memory.
    """
    is_wide = query.dtype == torch.float32
    return is_wide or not means or exact_keys > 0 or sink_key is not None


def kernel_gradients(
    grad_output: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    stored: StoredCodes | None,
    parents: Tensor | None,
    query_order: Tensor | None,
    key_order: Tensor | None,
    *,
    num_parents: int,
    num_children: int,
    num_refined: int,
    query_tile: int,
    importance_tile: int | None,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of query, key and value, on the current device.

    Args:
        grad_output: (B, H, N, D), dtype of `query`.

        The other arguments are those of `call.kernel_attention`.

    Returns:
        (B, H, N, D) and twice (B, H, S, D), views of new (B, N, H, D) memory, dtype of `query`.
    """
    query_order, key_order = aligned(query_order), aligned(key_order)
    grads = [x.new_empty(x.transpose(1, 2).shape) for x in (query, key, value)]
    batch, heads, num_queries, head_dim = query.shape
    columns = num_parents + num_refined * num_children
    num_tiles = triton.cdiv(num_queries, query_tile)
    size = max(1, COLUMN_BYTES // (heads * num_tiles * columns * 8 * head_dim))
    for start in range(0, batch, size):
        part = slice(start, start + size)
        of_part = [kernel_layout(x[part], 8) for x in (grad_output, query)]
        of_part += [kernel_layout(x[part]) for x in (key, value)]
        plan = _plan(
            query.device,
            *(x.shape for x in of_part[1:3]),
            tuple(x.stride() for x in of_part),
            query.dtype,
            None if query_order is None else query_order.dtype,
            None if key_order is None else key_order.dtype,
            stored is not None,
            parents is not None,
            num_parents,
            num_children,
            num_refined,
            query_tile,
            importance_tile,
            scale,
        )
        names = ("grad_output", "query", "key", "value")
        inputs = dict(zip(names, map(pointer, of_part), strict=True))
        names = ("grad_query", "grad_key", "grad_value")
        inputs |= zip(names, (pointer(x[part]) for x in grads), strict=True)
        inputs |= {
            "parents": None if parents is None else pointer(parents[part]),
            "query_order": pointer(query_order),
            "key_order": pointer(key_order),
        }
        plan.run(inputs | stored_pointers(stored), query.device)
    grad_query, grad_key, grad_value = (x.transpose(1, 2) for x in grads)
    return grad_query, grad_key, grad_value


@lru_cache(MOST_PLANS)
def _plan(
    device: torch.device,
    shape: torch.Size,
    key_shape: torch.Size,
    strides: tuple[tuple[int, ...], ...],
    dtype: torch.dtype,
    query_order_dtype: torch.dtype | None,
    key_order_dtype: torch.dtype | None,
    is_stored: bool,
    has_parents: bool,
    num_parents: int,
    num_children: int,
    num_refined: int,
    query_tile: int,
    importance_tile: int | None,
    scale: float,
) -> Plan:
    num_refined = num_refined if num_children else 0
    grad_strides, query_strides, key_strides, value_strides = strides
    parts, launches = precompute_launches(
        key_shape,
        key_strides,
        value_strides,
        dtype,
        capability_of(device),
        is_stored=is_stored,
        has_parents=has_parents,
        order_dtype=key_order_dtype,
        num_parents=num_parents,
        num_children=num_children,
        means=True,
        exact=False,
        leaves=True,
        scale=scale,
    )
    aggregation = launches[-1]
    parent_rows, child_rows = (aggregation.constants[x] for x in ("PARENT_ROWS", "CHILD_ROWS"))
    batch, heads, num_queries, head_dim = shape
    num_tiles = triton.cdiv(num_queries, query_tile)
    columns = parent_rows + num_refined * child_rows
    int32, float32 = torch.int32, torch.float32
    parts |= {
        "refined": Part((batch, heads, num_tiles, num_refined), int32),
        "column": Part((batch, heads, num_tiles, columns, 2 * head_dim), float32),
        "leaf_gradients": Part((batch, heads, num_parents, 1 + child_rows, 2 * head_dim), dtype),
    }
    names = ("grad_output", "query", "grad_query", "grad_key", "grad_value")
    dtypes = {name: part.dtype for name, part in parts.items()} | dict.fromkeys(names, dtype)
    if query_order_dtype is not None:
        dtypes["query_order"] = query_order_dtype
    numbers = aggregation.numbers | {
        "num_queries": num_queries,
        "num_tiles": num_tiles,
        "query_stride_batch": query_strides[0],
        "query_stride_head": query_strides[1],
        "grad_stride_batch": grad_strides[0],
        "grad_stride_head": grad_strides[1],
    }
    tiling = default_tiling(head_dim, capability_of(device))
    constants = aggregation.constants | launch_constants(
        heads=heads,
        head_dim=head_dim,
        query_stride=query_strides[2],
        num_parents=num_parents,
        num_children=num_children,
        num_refined=num_refined,
        query_tile=query_tile,
        importance_tile=importance_tile,
        dtype=dtype,
        means=True,
        capability=capability_of(device),
        tiling=AttentionTiling(
            num_warps=tiling.num_warps,
            num_stages=1,
            parents_per_block=max(1, 32 // max(1, child_rows)),
            parent_block=parent_rows if parent_rows <= 128 else 64,
        ),
        own_centre=not is_stored,
    )
    of_columns = {
        "GRAD_STRIDE_TOKEN": grad_strides[2],
        "GRAD_M": min(tiling.num_columns, parent_rows),
        "GRAD_P": max(1, tiling.num_columns // max(1, child_rows)),
    }
    width = triton.next_power_of_2(2 * head_dim)
    of_leaves = {
        "WIDTH": width,
        # One warp is an order of magnitude faster than four, as long as its sums fit registers.
        "TILES": max(1, 2048 // (max(1, child_rows) * width)),
        "num_warps": max(1, child_rows * width // 2048),
        "SCALE": scale,
    }
    of_keys = {"KEYS": 32, "num_warps": 1}
    tiles = (heads * num_tiles, batch, 1)
    parents = (num_parents, heads, batch)
    return Plan(
        parts,
        [
            *launches,
            Launch(column_gradients_kernel, tiles, dtypes, numbers, constants | of_columns),
            Launch(leaf_gradients_kernel, parents, dtypes, numbers, constants | of_leaves),
            Launch(key_gradients_kernel, aggregation.grid, dtypes, numbers, constants | of_keys),
        ],
    )
