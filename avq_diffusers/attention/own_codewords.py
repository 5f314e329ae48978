"""Codewords from the keys of the call itself, in plain PyTorch.

Parents are keys evenly spaced in the key order; children are keys evenly spaced in their parent's
cell, in index order.

Shapes: H heads (of all batch elements in a chunk), S keys, D head dim, M0 parents, C children.
"""

import torch
from torch import Tensor

from avq_diffusers.attention.tensors import Tensors
from avq_diffusers.codebook.assignment import leaf_sums, nearest_leaves, nearest_parents
from avq_diffusers.config import Spec


def codewords_and_leaves(tensors: Tensors, spec: Spec) -> tuple[Tensor, Tensor, Tensor]:
    """Parents (B H, M0, D) and children of a call, and the leaf (B H, S) of each key.

    Stored codewords are float64 for float64 keys, else float32.
    """
    batch = len(tensors.key)
    key = tensors.key.flatten(0, 1)
    wide = torch.promote_types(key.dtype, torch.float32)
    if tensors.parents is None:
        parents = spaced_keys(key, tensors.key_order, spec.num_parents).to(wide)
    else:
        parents = tensors.parents.expand(batch, -1, -1, -1).flatten(0, 1)
    for _ in range(spec.num_updates):
        parents = updated(key.to(wide), parents)
    cell = None
    if tensors.children is None:
        cell = nearest_parents(key, parents)
        children = cell_keys(key, cell, parents, spec.num_children)
    else:
        children = tensors.children.expand(batch, -1, -1, -1, -1).flatten(0, 1)
    return parents, children, nearest_leaves(key, parents, children, cell)


def spaced_keys(key: Tensor, key_order: Tensor | None, num_parents: int) -> Tensor:
    """Keys (H, M0, D) of (H, S, D), evenly spaced in the key order."""
    place = torch.arange(num_parents, device=key.device) * key.shape[1] // num_parents
    if key_order is not None:
        place = key_order[place].long()
    return key[:, place]


def updated(key: Tensor, parents: Tensor) -> Tensor:
    """Parents (H, M0, D) at the means of their keys (H, S, D); those without keys stay."""
    key_sums, counts = leaf_sums(key, nearest_parents(key, parents), parents.shape[1])
    mean_keys = key_sums / counts.clamp(min=1)[..., None]
    return mean_keys.where(counts[..., None] > 0, parents)


def cell_keys(key: Tensor, cell: Tensor, parents: Tensor, num_children: int) -> Tensor:
    """For each parent, keys (H, M0, C, D) of its cell, evenly spaced in index order.

    A cell with fewer keys repeats children, an empty one its parent; no key chooses these.
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
