"""The backward pass by kernels: gradients of AVQ attention whose codewords are means.

The keys are summarized and the choices made as in the forward pass, by the same kernels. Then three
launches: `column_gradients`, and the two of `key_gradients`. There are no atomics: every run gives
the same bits.

Shapes: as in `call`.
"""

from dataclasses import dataclass
from functools import lru_cache

import torch
import triton
from torch import Tensor

from avq_diffusers.attention.triton.attention import (
    AttentionTiling,
    TokenLayout,
    attention_launch,
)
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


def serves(query: Tensor, *, means: bool) -> bool:
    """Whether these kernels serve a call that those of the forward pass have served.

    Two tiles of float32 do not fit shared memory. Gradients through stored codewords are others.
    """
    return query.dtype != torch.float32 and means


def kernel_gradients(
    grad_output: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    sink_key: Tensor | None,
    sink_value: Tensor | None,
    stored: StoredCodes | None,
    parents: Tensor | None,
    query_order: Tensor | None,
    key_order: Tensor | None,
    *,
    num_parents: int,
    num_children: int,
    num_refined: int,
    exact_keys: int,
    query_tile: int,
    importance_tile: int | None,
    scale: float,
) -> list[Tensor]:
    """Gradients of query, key, value and, if there are any, sinks, on the current device.

    Args:
        grad_output: (B, H, N, D), dtype of `query`.

        The other arguments are those of `call.kernel_attention`.

    Returns:
        (B, H, N, D), twice (B, H, S, D) and perhaps twice (B, H, T, D), views of new (B, N, H, D)
        memory, dtype of `query`.
    """
    query_order, key_order = aligned(query_order), aligned(key_order)
    tensors = {"query": query, "key": key, "value": value}
    if sink_key is not None and sink_value is not None:
        tensors |= {"sink_key": sink_key, "sink_value": sink_value}
    grads = {
        f"grad_{name}": x.new_empty(x.transpose(1, 2).shape).transpose(1, 2)
        for name, x in tensors.items()
    }
    tensors["grad_output"] = grad_output
    batch, heads, num_queries, head_dim = query.shape
    columns = num_parents + num_refined * num_children + exact_keys
    columns += 0 if sink_key is None else sink_key.shape[2]
    num_tiles = triton.cdiv(num_queries, query_tile)
    size = max(1, COLUMN_BYTES // (heads * num_tiles * columns * 8 * head_dim))
    for start in range(0, batch, size):
        part = slice(start, start + size)
        of_part = {
            name: kernel_layout(x[part], 8 if name in ("query", "grad_output") else 1)
            for name, x in tensors.items()
        }
        plan = _plan(
            query.device,
            tuple((name, x.shape, x.stride()) for name, x in of_part.items()),
            query.dtype,
            None if query_order is None else query_order.dtype,
            None if key_order is None else key_order.dtype,
            stored is not None,
            parents is not None,
            num_parents,
            num_children,
            num_refined,
            exact_keys,
            query_tile,
            importance_tile,
            scale,
        )
        of_part |= {name: grad[part] for name, grad in grads.items()}
        inputs = {name: pointer(x) for name, x in of_part.items()}
        inputs |= {
            "parents": None if parents is None else pointer(parents[part]),
            "query_order": pointer(query_order),
            "key_order": pointer(key_order),
        }
        memory = plan.run(inputs | stored_pointers(stored), query.device)
        if "sink_key" in tensors:
            of_sinks = plan.part(memory, "sink_column").sum(dim=2)
            grads["grad_sink_value"][part] = of_sinks[..., :head_dim]
            grads["grad_sink_key"][part] = of_sinks[..., head_dim:] * scale
    return list(grads.values())


@lru_cache(MOST_PLANS)
def _plan(
    device: torch.device,
    layouts: tuple[tuple[str, torch.Size, tuple[int, ...]], ...],
    dtype: torch.dtype,
    query_order_dtype: torch.dtype | None,
    key_order_dtype: torch.dtype | None,
    is_stored: bool,
    has_parents: bool,
    num_parents: int,
    num_children: int,
    num_refined: int,
    exact_keys: int,
    query_tile: int,
    importance_tile: int | None,
    scale: float,
) -> Plan:
    """Layouts are name, shape and strides of the tensors."""
    num_refined = num_refined if num_children else 0
    shapes = {name: shape for name, shape, _ in layouts}
    strides = {name: stride for name, _, stride in layouts}
    parts, launches = precompute_launches(
        shapes["key"],
        strides["key"],
        strides["value"],
        dtype,
        capability_of(device),
        is_stored=is_stored,
        has_parents=has_parents,
        order_dtype=key_order_dtype,
        num_parents=num_parents,
        num_children=num_children,
        means=True,
        exact=exact_keys > 0,
        leaves=True,
        scale=scale,
    )
    aggregation = launches[1]
    parent_rows, child_rows = (aggregation.constants[x] for x in ("PARENT_ROWS", "CHILD_ROWS"))
    batch, heads, num_queries, head_dim = shapes["query"]
    num_keys = shapes["key"][2]
    tiling = default_tiling(head_dim, capability_of(device))
    exact = sinks = None
    if exact_keys:
        exact = TokenLayout(num_keys, (*strides["key"][:3], *strides["value"][:3]))
    if "sink_key" in shapes:
        sink_strides = *strides["sink_key"][:3], *strides["sink_value"][:3]
        sinks = TokenLayout(shapes["sink_key"][2], sink_strides)
    attention_parts, attention = attention_launch(
        shapes["query"],
        strides["query"],
        dtype,
        capability_of(device),
        order_dtype=query_order_dtype,
        num_parents=num_parents,
        num_children=num_children,
        num_refined=num_refined,
        query_tile=query_tile,
        importance_tile=importance_tile,
        means=True,
        tiling=AttentionTiling(
            num_warps=tiling.num_warps,
            num_stages=1,
            parents_per_block=max(1, 32 // max(1, child_rows)),
            parent_block=parent_rows if parent_rows <= 128 else 64,
        ),
        exact=exact,
        exact_keys=min(exact_keys, num_keys),
        sinks=sinks,
        own_centre=not is_stored,
        scale=scale if exact or sinks else 0.0,
    )

    num_tiles = triton.cdiv(num_queries, query_tile)
    tiles = (batch, heads, num_tiles)
    width = 2 * head_dim
    columns = parent_rows + num_refined * child_rows
    parts |= attention_parts | {
        "column": Part((*tiles, columns, width), torch.float32),
        "leaf_gradients": Part((batch, heads, num_parents, 1 + child_rows, width), dtype),
    }
    if exact is not None:
        parts["exact_column"] = Part((*tiles, min(exact_keys, num_keys), width), torch.float32)
        parts["exact_slot"] = Part((batch, heads, num_parents, num_tiles), torch.int32)
    if sinks is not None:
        parts["sink_column"] = Part((*tiles, sinks.number, width), torch.float32)
    dtypes = {name: given for name, given in attention.dtypes.items() if given is not None}
    dtypes |= {name: part.dtype for name, part in parts.items()}
    dtypes |= dict.fromkeys(("grad_output", "grad_query", "grad_key", "grad_value"), dtype)
    # Strides of keys, divided by `ALIGN`, are those of the attention.
    numbers = aggregation.numbers | attention.numbers
    numbers |= {
        "num_keys": num_keys,
        "num_tiles": num_tiles,
        "grad_stride_batch": strides["grad_output"][0],
        "grad_stride_head": strides["grad_output"][1],
    }
    constants = aggregation.constants | attention.constants | {"SCALE": scale}
    padded_width = triton.next_power_of_2(width)
    of_columns = {
        "GRAD_STRIDE_TOKEN": strides["grad_output"][2],
        "GRAD_M": min(tiling.num_columns, parent_rows),
        "GRAD_P": max(1, tiling.num_columns // max(1, child_rows)),
    }
    of_leaves = {
        "WIDTH": padded_width,
        # One warp is an order of magnitude faster than four, as long as its sums fit registers.
        "TILES": max(1, 2048 // (max(1, child_rows) * padded_width)),
        "num_warps": max(1, child_rows * padded_width // 2048),
    }
    of_keys = {"KEYS": min(32, 2048 // aggregation.constants["PADDED_DIM"]), "num_warps": 1}
    grids = (heads * num_tiles, batch, 1), (num_parents, heads, batch), aggregation.grid
    return Plan(
        parts,
        [
            *launches,
            Launch(column_gradients_kernel, grids[0], dtypes, numbers, constants | of_columns),
            Launch(leaf_gradients_kernel, grids[1], dtypes, numbers, constants | of_leaves),
            Launch(key_gradients_kernel, grids[2], dtypes, numbers, constants | of_keys),
        ],
    )
