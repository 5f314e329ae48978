"""A call of the kernels from keys to outputs: precompute, then attention, in one memory."""

from functools import lru_cache

import torch
from torch import Tensor

from avq_diffusers.attention.triton.attention import TokenLayout, attention_launch
from avq_diffusers.attention.triton.codewords import StoredCodes
from avq_diffusers.attention.triton.launch import (
    MOST_PLANS,
    Plan,
    aligned,
    capability_of,
    kernel_layout,
    pointer,
)
from avq_diffusers.attention.triton.precompute import precompute_launches, stored_pointers


def kernel_attention(
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
    means: bool,
    exact_keys: int,
    query_tile: int,
    importance_tile: int | None,
    scale: float,
) -> Tensor:
    """AVQ attention on the current device.

    Args:
        query: (B, H, N, D) float16, bfloat16 or float32.
        key, value: (B, H, S, D), dtype of `query`.
        sink_key, sink_value: (B, H, T, D), dtype of `query`; or None.
        stored: codewords as `codewords.pack` gives them; None takes keys.
        parents: (B, H, M0, D) in place of keys, dtype of `key`, contiguous; or None.
        query_order: (N,) int32 or int64 permutation of the queries; None is their own order.
        key_order: (S,) the same of the keys.
        means: the mean of its keys represents a leaf, else the stored codeword.

        The other arguments are those of `avq_attention`. Exact keys need `means`.

    Returns:
        (B, H, N, D) view of new (B, N, H, D) memory, dtype of `query`.
    """
    query, key, value = kernel_layout(query, 8), kernel_layout(key), kernel_layout(value)
    sinks = None
    if sink_key is not None and sink_value is not None:
        sink_key, sink_value = kernel_layout(sink_key), kernel_layout(sink_value)
        sinks = TokenLayout.of(sink_key, sink_value)
    query_order, key_order = aligned(query_order), aligned(key_order)
    plan = _plan(
        query.device,
        query.shape,
        query.stride(),
        key.shape,
        key.stride(),
        value.stride(),
        query.dtype,
        sinks,
        None if query_order is None else query_order.dtype,
        None if key_order is None else key_order.dtype,
        stored is not None,
        parents is not None,
        num_parents,
        num_children,
        num_refined,
        means,
        exact_keys,
        query_tile,
        importance_tile,
        scale,
    )
    batch, heads, num_queries, head_dim = query.shape
    output = query.new_empty((batch, num_queries, heads, head_dim))
    inputs = {
        "query": pointer(query),
        "key": pointer(key),
        "value": pointer(value),
        "sink_key": pointer(sink_key),
        "sink_value": pointer(sink_value),
        "parents": pointer(parents),
        "query_order": pointer(query_order),
        "key_order": pointer(key_order),
        "output": pointer(output),
    }
    if stored is not None:
        inputs |= stored_pointers(stored)
        if not means:
            inputs["codes"] = inputs["stored_codes"]
    plan.run(inputs, query.device)
    return output.transpose(1, 2)


@lru_cache(MOST_PLANS)
def _plan(
    device: torch.device,
    shape: torch.Size,
    strides: tuple[int, ...],
    key_shape: torch.Size,
    key_strides: tuple[int, ...],
    value_strides: tuple[int, ...],
    dtype: torch.dtype,
    sinks: TokenLayout | None,
    query_order_dtype: torch.dtype | None,
    key_order_dtype: torch.dtype | None,
    is_stored: bool,
    has_parents: bool,
    num_parents: int,
    num_children: int,
    num_refined: int,
    means: bool,
    exact_keys: int,
    query_tile: int,
    importance_tile: int | None,
    scale: float,
) -> Plan:
    num_keys = key_shape[2]
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
        means=means,
        exact=exact_keys > 0,
        scale=scale,
    )
    exact = None
    if exact_keys > 0:
        exact = TokenLayout(num_keys, (*key_strides[:3], *value_strides[:3]))
    attention_parts, launch = attention_launch(
        shape,
        strides,
        dtype,
        capability_of(device),
        order_dtype=query_order_dtype,
        num_parents=num_parents,
        num_children=num_children,
        num_refined=num_refined,
        query_tile=query_tile,
        importance_tile=importance_tile,
        means=means,
        exact=exact,
        exact_keys=min(exact_keys, num_keys),
        sinks=sinks,
        own_centre=not is_stored,
        scale=scale if exact or sinks else 0.0,
    )
    return Plan(parts | attention_parts, [*launches, launch])
