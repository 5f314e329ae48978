"""Masks that hide keys beside a grid's, such as a text's padding: AVQ leaves these tokens out.

Shapes: B batch, Q queries, K keys, which are a grid's tokens and others before or after them.
"""

from typing import Any

import torch
from torch import Tensor

HIDDEN = -1e4  # at most that a mask of numbers adds to the logits of a hidden key


def seen_tokens(mask: Any, query: Tensor, key: Tensor, grid: slice) -> Tensor | None:
    """Which keys a batch entry sees; None if a mask does more than hide some beside the grid's.

    What hidden tokens see is left open: their outputs reach nothing that is seen. A mask is read on
    the host, so not in compiled code or while a CUDA graph is captured.

    Args:
        mask: (B or 1, 1, Q or 1, K), also expanded, or (B, K), True where a key is seen, or added
            to logits. Others, such as those of FlexAttention, may do more.
        query: (B, Q, H, D), of all tokens or of the grid's.
        key: (B, K, H, D).
        grid: where the keys of the grid are.

    Returns:
        (B or 1, K) bool on the CPU.
    """
    if not isinstance(mask, Tensor) or torch.compiler.is_compiling():
        return None
    if mask.ndim == 2:
        mask = mask[:, None, None]
    if mask.ndim != 4 or (mask.is_cuda and torch.cuda.is_current_stream_capturing()):
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
    found = torch.cat([does_more.expand(len(seen), 1), seen], dim=1).cpu()  # one wait
    return None if found[0, 0] else found[:, 1:]
