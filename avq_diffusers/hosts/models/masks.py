"""Masks that hide keys beside the grid, such as a text's padding: AVQ leaves these tokens out.

Shapes: B batch, Q queries, K keys: the grid's tokens, with others before or after them.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from diffusers.models.attention_dispatch import AttentionBackendName, dispatch_attention_fn
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from avq_diffusers.attention.api import attend
from avq_diffusers.attention.flops import forward_flops
from avq_diffusers.attention.schema import CALL, call_of, shapes_of
from avq_diffusers.attention.tensors import Tensors
from avq_diffusers.hosts.core import orders, read_once

HIDDEN = -1e4  # an additive mask adds at most this to the logits of a hidden key


class Entries(NamedTuple):
    """Batch entries that see the same keys, as slices where possible, which need no copies.

    Attributes:
        entries: the batch entries.
        tokens: the keys they see.
        grid: the grid's slice of these.
    """

    entries: Tensor | slice
    tokens: Tensor | slice
    grid: slice


def joint_attention(
    attend: Callable[..., Tensor],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    grid: slice,
    scale: float | None,
    groups: Sequence[Entries] = (),
) -> Tensor:
    """AVQ for all queries; keys beside the grid are sinks.

    Args:
        attend: `LayerState.attend`.
        query: (B, Q, H, D), for all tokens or only the grid's.
        key, value: (B, K, H, D).
        grid: the grid's slice of the keys.
        scale: as in `avq_attention`.
        groups: batch entries by the keys they see; hidden tokens are left out and their outputs are
            zero. Empty if all see all.

    Returns:
        (B, Q, H, D).
    """
    if groups:
        has_all_queries, output = query.shape[1] == key.shape[1], query.new_empty(query.shape)
        for entries, tokens, seen_grid in groups:
            queries = tokens if has_all_queries else slice(None)
            entry_output = torch.zeros_like(query[entries])
            q, (k, v) = query[entries][:, queries], (x[entries][:, tokens] for x in (key, value))
            entry_output[:, queries] = joint_attention(attend, q, k, v, seen_grid, scale)
            output[entries] = entry_output
        return output
    beside = slice(0, grid.start) if grid.start else slice(grid.stop, key.shape[1])
    has_sinks = beside.start < beside.stop
    query, key, value = (x.transpose(1, 2) for x in (query, key, value))
    return attend(
        query,
        key[:, :, grid],
        value[:, :, grid],
        sink_key=key[:, :, beside] if has_sinks else None,
        sink_value=value[:, :, beside] if has_sinks else None,
        scale=scale,
    ).transpose(1, 2)


# Reading a mask cannot be captured in a CUDA graph.
@torch.library.custom_op(
    "avq_diffusers::masked_attention",
    mutates_args=(),
    schema=f"({CALL}, Tensor mask, SymInt start, SymInt stop, str? exact_backend, str backend) "
    "-> Tensor",
    tags=(torch.Tag.cudagraph_unsafe,),
)
def masked_attention(*arguments: Any) -> Tensor:
    """Masked attention for compiled code, which cannot read a mask itself, without gradients.

    Args:
        *arguments: a call (`arguments_of`) whose keys are all tokens and whose `key_order` is the
            grid's order; a mask as in `seen_tokens`, with exact attention for others; the bounds of
            the grid's keys; diffusers' backend for exact attention, None being the active one; and
            `backend` as in `avq_attention`.

    Returns:
        (B, Q, H, D).
    """
    *call, mask, start, stop, exact_backend, backend = arguments
    tensors, spec = call_of(call)
    order = tensors.key_order
    assert order is not None
    query, key, value = (x.transpose(1, 2) for x in (tensors.query, tensors.key, tensors.value))

    def attend_grid(query: Tensor, key: Tensor, value: Tensor, **others: Any) -> Tensor:
        call_orders = orders(order, query, key, text_first=start > 0)
        return attend(Tensors.of(query, key, value, **others, **call_orders), spec, backend).output

    grid = slice(start, stop)
    # Compiled code reuses the memory of old masks for new ones.
    groups = read_groups(mask, query, key, grid, keep=False)
    if groups is not None:
        return joint_attention(attend_grid, query, key, value, grid, tensors.scale, groups)
    exact_name = None if exact_backend is None else AttentionBackendName(exact_backend)
    exact = dispatch_attention_fn(query, key, value, mask, scale=tensors.scale, backend=exact_name)
    return exact.contiguous()


@masked_attention.register_fake
def _(query: Tensor, *others: Any) -> Tensor:
    return query.new_empty(query.transpose(1, 2).shape)


@register_flop_formula(masked_attention._opoverload.overloadpacket)
def _(*arguments: Any, **settings: Any) -> int:
    *call, _, start, stop, _, _ = arguments
    query, num_keys, _, spec = shapes_of(call)
    return forward_flops(query, stop - start, num_keys - (stop - start), spec)


def read_groups(
    mask: Any, query: Tensor, key: Tensor, grid: slice, *, keep: bool
) -> list[Entries] | None:
    """Batch entries grouped by the keys they see; empty if all see all.

    Masks are read on the host, so not during CUDA graph capture.

    Args:
        mask, query, key, grid: as in `seen_tokens`. Masks that are not tensors, such as
            FlexAttention's, may do more than hide keys.
        keep: whether other layers will ask for the same mask.

    Returns:
        The groups; None if a mask does more than hide some keys beside the grid.
    """
    if not isinstance(mask, Tensor):
        return None
    if mask.is_cuda and torch.cuda.is_current_stream_capturing():
        return None
    if not keep:
        return _groups(mask, query, key, grid)
    tokens = query.shape[:2], key.shape[1], grid.start, grid.stop, query.device
    return read_once(mask, partial(_groups, mask, query, key, grid), *tokens)


def _groups(mask: Tensor, query: Tensor, key: Tensor, grid: slice) -> list[Entries] | None:
    seen, groups = seen_tokens(mask, query, key, grid), []
    if seen is None:
        return None
    if seen.all():
        return []
    patterns, pattern_of = seen.unique(dim=0, return_inverse=True)
    for index, pattern in enumerate(patterns):
        num_tokens, num_before = int(pattern.sum()), int(pattern[: grid.start].sum())
        entries: Tensor | slice = slice(None)
        if len(patterns) > 1:
            entries = (pattern_of == index).nonzero().flatten().to(query.device)
        tokens: Tensor | slice = slice(num_tokens)
        if not pattern[:num_tokens].all():
            tokens = pattern.nonzero().flatten().to(query.device)
        seen_grid = slice(num_before, num_before + grid.stop - grid.start)
        groups.append(Entries(entries, tokens, seen_grid))
    return groups


def seen_tokens(mask: Tensor, query: Tensor, key: Tensor, grid: slice) -> Tensor | None:
    """Which keys each batch entry sees; None if a mask does more than hide some beside the grid.

    What hidden tokens see does not matter: nothing visible uses their outputs.

    Args:
        mask: (B or 1, 1, Q or 1, K), possibly expanded, or (B, K): True where a key is seen, or
            added to logits.
        query: (B, Q, H, D), for all tokens or only the grid's.
        key: (B, K, H, D).
        grid: the grid's slice of the keys.

    Returns:
        (B or 1, K) bool on the CPU.
    """
    if mask.ndim == 2:
        mask = mask[:, None, None]
    if mask.ndim != 4:
        return None
    (batch, num_queries), num_keys = query.shape[:2], key.shape[1]
    for axis in (1, 2):
        if mask.stride(axis) == 0:
            mask = mask.narrow(axis, 0, 1)
    if mask.shape[0] not in (1, batch) or mask.shape[1] != 1 or mask.shape[3] != num_keys:
        return None
    shows = mask if mask.dtype == torch.bool else mask == 0
    has_all_queries, has_rows = num_queries == num_keys, mask.shape[2] > 1
    seen = shows[:, 0, grid.start if has_all_queries and has_rows else 0]  # (B, K)
    does_more = ~seen[:, grid].all()
    if has_rows:
        sees_others = (shows != seen[:, None, None]).any(dim=3).squeeze(1)  # (B, Q)
        does_more = does_more | (sees_others & seen if has_all_queries else sees_others).any()
    if mask.dtype != torch.bool:
        does_more = does_more | (~shows & (mask > HIDDEN)).any()
    found = torch.cat([does_more.expand(len(seen), 1), seen], dim=1).cpu()  # one synchronization
    return None if found[0, 0] else found[:, 1:]
