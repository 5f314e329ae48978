"""Codewords from the keys of the call itself, in plain PyTorch.

Parents are keys evenly spaced in the key order; children are keys evenly spaced in their parent's
cell, in index order.

Shapes: H heads (of all batch elements in a chunk), S keys, D head dim, M0 parents, C children.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from avq_diffusers.attention.tensors import Tensors
from avq_diffusers.codebook.assignment import (
    Groups,
    centre_of,
    grouped,
    nearest_leaves,
    nearest_parents,
)
from avq_diffusers.config import Spec


class Assigned(NamedTuple):
    """Keys and codewords around the centre of their head, float32 or float64, and the leaves.

    Shifting all keys by one vector leaves the softmax unchanged, and small numbers round less.
    """

    centre: Tensor  # (B H, 1, D)
    key: Tensor  # (B H, S, D)
    parents: Tensor  # (B H, M0, D)
    children: Tensor  # (B H, M0, C, D)
    leaf: Tensor  # (B H, S) int64


def assigned(tensors: Tensors, spec: Spec) -> Assigned:
    """The codewords of a call, and the leaf of each key."""
    key, batch = tensors.key.flatten(0, 1), len(tensors.key)
    if tensors.parents is None:
        parents = spaced_keys(key, tensors.key_order, spec.num_parents)
        parents = parents.to(torch.promote_types(key.dtype, torch.float32))
    else:
        parents = tensors.parents.expand(batch, -1, -1, -1).flatten(0, 1)
    centre = centre_of(parents)
    key = torch.sub(key, centre, out=torch.empty(key.shape, dtype=parents.dtype, device=key.device))
    parents = parents - centre
    cells = grouped(nearest_parents(key, parents), spec.num_parents)
    if tensors.children is None:
        children = cell_keys(key, cells, parents, spec.num_children)
    else:
        children = tensors.children.expand(batch, -1, -1, -1, -1).flatten(0, 1) - centre[:, None]
    leaf = nearest_leaves(key, parents, children, cells)
    return Assigned(centre, key, parents, children, leaf)


def spaced_keys(key: Tensor, key_order: Tensor | None, num_parents: int) -> Tensor:
    """Keys (H, M0, D) of (H, S, D), evenly spaced in the key order."""
    index = torch.arange(num_parents, device=key.device) * key.shape[1] // num_parents
    if key_order is not None:
        index = key_order[index].long()
    return key[:, index]


def cell_keys(key: Tensor, cells: Groups, parents: Tensor, num_children: int) -> Tensor:
    """For each parent, keys (H, M0, C, D) of its cell, evenly spaced in index order.

    A cell with fewer keys repeats children, an empty one its parent; no key chooses these.
    """
    counts = cells.edges.diff()[:, None]
    rank = torch.arange(num_children, device=key.device) * counts // num_children
    index = (cells.edges[:-1, None] + rank).clamp(max=len(cells.rows) - 1)
    children = key.flatten(0, 1)[cells.rows[index]]
    children = children.where(counts[..., None] > 0, parents.flatten(0, 1)[:, None])
    return children.unflatten(0, parents.shape[:2])
