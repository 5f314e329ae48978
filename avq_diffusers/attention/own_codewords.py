"""Codewords made from the keys of the call itself, in plain PyTorch.

The parents are keys that are evenly spaced in the key order. The children of a parent are keys of
its cell that are evenly spaced in the order of keys.

Shapes: H heads (of all batch elements in a chunk), S keys, D head dim, M0 parents, C children.
"""

import torch
from torch import Tensor

from avq_diffusers.codebook.assignment import leaf_sums, nearest_leaves, nearest_parents


def codewords_and_leaves(
    key: Tensor,
    parents: Tensor | None,
    children: Tensor | None,
    key_order: Tensor | None,
    *,
    num_parents: int,
    num_children: int,
    num_updates: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """The codewords of a call, and the leaf of every key.

    Args:
        key: (B, H, S, D); the heads of all batch elements become one list.
        parents: (H, M0, D) stored ones, float64 for float64 keys, else float32; None takes keys.
        children: (H, M0, C, D), same dtype as `parents`; None takes keys.
        key_order: (S,) permutation in which parents are evenly spaced; None is that of the keys.
        num_updates: moves of the parents to the means of their keys.

    Returns:
        parents: (B H, M0, D).
        children: (B H, M0, C, D).
        leaf: (B H, S) from `nearest_leaves`.
    """
    batch = len(key)
    key = key.flatten(0, 1)
    wide = torch.promote_types(key.dtype, torch.float32)
    if parents is None:
        parents = spaced_keys(key, key_order, num_parents).to(wide)
    else:
        parents = parents.expand(batch, -1, -1, -1).flatten(0, 1)
    for _ in range(num_updates):
        parents = updated(key.to(wide), parents)
    cell = None
    if children is None:
        cell = nearest_parents(key, parents)
        children = cell_keys(key, cell, parents, num_children)
    else:
        children = children.expand(batch, -1, -1, -1, -1).flatten(0, 1)
    return parents, children, nearest_leaves(key, parents, children, cell)


def order_of_keys(
    key_order: Tensor | None, query_order: Tensor | None, num_keys: int
) -> Tensor | None:
    """The order of the keys where none is given: that of the queries if there are as many."""
    if key_order is None and query_order is not None and query_order.shape[0] == num_keys:
        return query_order
    return key_order


def spaced_keys(key: Tensor, key_order: Tensor | None, num_parents: int) -> Tensor:
    """Keys (H, M0, D) of (H, S, D), evenly spaced in the key order."""
    place = torch.arange(num_parents, device=key.device) * key.shape[1] // num_parents
    if key_order is not None:
        place = key_order[place].long()
    return key[:, place]


def updated(key: Tensor, parents: Tensor) -> Tensor:
    """Parents (H, M0, D) at the means of their keys (H, S, D); those without keys stay."""
    key_sums, counts = leaf_sums(key, nearest_parents(key, parents), parents.shape[1])
    means = key_sums / counts.clamp(min=1)[..., None]
    return means.where(counts[..., None] > 0, parents)


def cell_keys(key: Tensor, cell: Tensor, parents: Tensor, num_children: int) -> Tensor:
    """For every parent, keys of its cell that are evenly spaced in the order of keys.

    Args:
        key: (H, S, D).
        cell: (H, S) from `nearest_parents`.
        parents: (H, M0, D).

    Returns:
        (H, M0, C, D). A cell with fewer keys has equal children, an empty one its parent: no key
        chooses them.
    """
    heads, num_parents, head_dim = parents.shape
    if num_children == 0:
        return parents.new_empty(heads, num_parents, 0, head_dim)
    cell, order = cell.sort(dim=-1, stable=True)
    bounds = torch.arange(num_parents + 1, device=key.device).expand(heads, -1).contiguous()
    edges = torch.searchsorted(cell, bounds)
    counts = edges.diff()[..., None]
    rank = torch.arange(num_children, device=key.device) * counts // num_children
    place = (edges[:, :-1, None] + rank).clamp(max=key.shape[1] - 1).flatten(1)
    index = order.gather(1, place)[..., None].expand(-1, -1, head_dim)
    children = key.gather(1, index).view(heads, num_parents, num_children, head_dim)
    return children.where(counts[..., None] > 0, parents[:, :, None])
