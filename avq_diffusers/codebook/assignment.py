"""The assignment of keys to leaves (paper, Algorithm VQ Precompute).

A key goes to its nearest parent, then to that parent's nearest child if strictly closer; otherwise
it stays with the parent. Ties go to the lower index. Keys and codewords are centred first, by
`centre_of`: a large shared offset would cost precision.

Shapes: H heads, N keys, M0 parents, C children per parent, D head dim. Leaf p (1 + C) of a head
holds the keys that stay with parent p, leaf p (1 + C) + 1 + c those of its child c.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from avq_diffusers.codebook.codebook import Codebook

# Elements in the intermediates of one chunk: few enough for a CPU's cache; on other devices enough
# to keep launches few.
ELEMENTS_CPU = 1 << 22
ELEMENTS = 1 << 26

# Keys of one cell whose children are scored together.
BLOCK = 16


@torch.no_grad()
def assign(key: Tensor, codebook: Codebook) -> tuple[Tensor, Tensor]:
    """The parent and the child of each key.

    Args:
        key: (..., H, N, D).
        codebook: H heads and head dim D, on the same device.

    Returns:
        parent_assignment: (..., H, N) int64 in [0, M0).
        child_assignment: (..., H, N) int64 in [0, C), or -1 where the key stays with its parent.

    Raises:
        ValueError: the shape of `key` does not match the codebook.
    """
    leaf = assign_leaves(key, codebook)
    num_leaves = 1 + codebook.num_children
    return leaf // num_leaves, leaf % num_leaves - 1


@torch.no_grad()
def assign_leaves(key: Tensor, codebook: Codebook) -> Tensor:
    """The leaf of each key: its row of the head's `codebook.leaves.flatten(1, 2)`.

    Computed in float32, or in float64 if an input is float64, also under autocast. Matmuls follow
    PyTorch's TF32 setting.

    Args:
        key: (..., H, N, D).
        codebook: H heads and head dim D, on the same device.

    Returns:
        (..., H, N) int64 in [0, M0 (1 + C)).

    Raises:
        ValueError: as `assign`.
    """
    if key.ndim < 3 or (key.shape[-3], key.shape[-1]) != (codebook.num_heads, codebook.head_dim):
        raise ValueError(
            f"key must have shape (..., {codebook.num_heads}, keys, {codebook.head_dim}) to match "
            f"the codebook, but got {tuple(key.shape)}."
        )
    dtype = working_dtype(key, codebook)
    heads = key.shape[:-2]
    with torch.autocast(key.device.type, enabled=False):
        parents = codebook.parents.to(dtype).expand(*heads, -1, -1).flatten(0, -3)
        children = codebook.children.to(dtype).expand(*heads, -1, -1, -1).flatten(0, -4)
        centre = centre_of(parents)
        leaf = nearest_leaves(
            key.flatten(0, -3) - centre, parents - centre, children - centre[:, None]
        )
    return leaf.view(key.shape[:-1])


class Groups(NamedTuple):
    """The tokens of all heads by their group: a cell or a leaf, numbered over heads."""

    number: Tensor  # (H N,) group of each token
    rows: Tensor  # (H N,) tokens, group by group
    edges: Tensor  # (H groups + 1,), bounds of the groups in `rows`


def grouped(index: Tensor, per_head: int) -> Groups:
    """Sort tokens by their cell or leaf (H, N), of which there are `per_head`, then by index."""
    number = across_heads(index, per_head).flatten()
    in_order, rows = number.sort(stable=True)
    bounds = torch.arange(len(index) * per_head + 1, device=index.device)
    return Groups(number, rows, torch.searchsorted(in_order, bounds))


def nearest_parents(key: Tensor, parents: Tensor) -> Tensor:
    """Nearest parent of each key; ties go to the lower index.

    Args:
        key: (H, N, D), centred.
        parents: (H, M0, D), same dtype.

    Returns:
        (H, N) int64 in [0, M0).
    """
    # Half of |k|^2 - |k - p|^2 is linear in k.
    bias = -0.5 * parents.square().sum(dim=-1)[:, None]
    length = chunk_length(key.device, parents[..., 0].numel())
    scores = (torch.baddbmm(bias, keys, parents.mT) for keys in key.split(length, dim=1))
    return torch.cat([score.max(dim=-1).indices for score in scores], dim=1)


def nearest_leaves(
    key: Tensor, parents: Tensor, children: Tensor, cells: Groups | None = None
) -> Tensor:
    """The leaf of each key.

    Args:
        key: (H, N, D), centred.
        parents: (H, M0, D), same dtype.
        children: (H, M0, C, D), same dtype.
        cells: the keys by `nearest_parents`, if already known.

    Returns:
        (H, N) int64 in [0, M0 (1 + C)).
    """
    if cells is None:
        cells = grouped(nearest_parents(key, parents), parents.shape[1])
    if 0 in (key.shape[1], children.shape[2]):
        return (cells.number % parents.shape[1]).view(key.shape[:2])
    num_leaves, device = 1 + children.shape[2], key.device
    keys, offsets = key.flatten(0, 1), (children - parents[:, :, None]).flatten(0, 1)
    # Half of |k - p|^2 - |k - c|^2 is linear in k.
    middle = parents.reshape(-1, 1, keys.shape[1]) + 0.5 * offsets
    bias = -(offsets * middle).sum(dim=-1)[:, None]

    # Each block holds keys of one cell; there are at most so many.
    blocks = -(-cells.edges.diff() // BLOCK)
    ends = blocks.cumsum(dim=0)
    block = torch.arange(len(keys) // BLOCK + len(blocks), device=device)
    cell = torch.searchsorted(ends, block, right=True).clamp(max=len(blocks) - 1)
    # Where the rows of block 0 of a cell would start, if all blocks were full.
    shift = cells.edges[:-1] - BLOCK * (ends - blocks)
    index = (BLOCK * block + shift[cell])[:, None] + torch.arange(BLOCK, device=device)
    rows = cells.rows[index.clamp(max=len(keys) - 1)]
    leaf = torch.empty_like(rows)
    length = chunk_length(device, (BLOCK + num_leaves) * keys.shape[1])
    for part in map(slice, range(0, len(rows), length), range(length, len(rows) + length, length)):
        block_keys = keys.index_select(0, rows[part].flatten()).unflatten(0, (-1, BLOCK))
        gain = torch.baddbmm(bias[cell[part]], block_keys, offsets[cell[part]].mT)
        # Staying has gain 0 and comes first, and max takes the first of equal gains.
        leaf[part] = F.pad(gain, (1, 0)).max(dim=-1).indices
    cell = cells.number[cells.rows]
    leaf = leaf.flatten()[torch.arange(len(keys), device=device) - shift[cell]]
    leaf += cell % parents.shape[1] * num_leaves
    return torch.empty_like(leaf).index_copy_(0, cells.rows, leaf).view(key.shape[:2])


def leaf_sums(keys: Tensor, leaf: Tensor, num_leaves: int) -> tuple[Tensor, Tensor]:
    """Sum and count of the keys in each leaf; the same bits on every run.

    Args:
        keys: (H, N, D).
        leaf: (H, N) int64 in [0, num_leaves).

    Returns:
        key_sums (H, num_leaves, D) and counts (H, num_leaves), dtype of `keys`.
    """
    heads, _, head_dim = keys.shape
    # Accumulating index_put_ sorts its indices on CUDA, where index_add_ uses unordered atomics.
    key_sums = keys.new_zeros(heads * num_leaves, head_dim).index_put_(
        (across_heads(leaf, num_leaves).flatten(),), keys.flatten(0, 1), accumulate=True
    )
    counts = keys.new_zeros(heads, num_leaves).scatter_add_(
        1, leaf, keys.new_ones(()).expand_as(leaf)
    )
    return key_sums.view(heads, num_leaves, head_dim), counts


def centre_of(parents: Tensor) -> Tensor:
    """(H, 1, D) median of the parents: a distant dead codeword does not move it."""
    return parents.sort(dim=1).values[:, parents.shape[1] // 2, None]


def across_heads(index: Tensor, per_head: int) -> Tensor:
    """Number the cells or leaves consecutively over heads: (..., H, N) to h per_head + index."""
    first = torch.arange(0, index.shape[-2] * per_head, per_head, device=index.device)
    return index + first[:, None]


def heads_first(keys: Tensor) -> Tensor:
    """(..., H, N, D) to (H, all keys, D)."""
    return keys.movedim(-3, 0).flatten(1, -2)


def working_dtype(keys: Tensor, codebook: Codebook) -> torch.dtype:
    """Return float32, or float64 if `keys` or `codebook` have it."""
    dtype = torch.promote_types(keys.dtype, codebook.parents.dtype)
    return torch.promote_types(dtype, torch.float)


def chunk_length(device: torch.device, elements: int, most: int = ELEMENTS) -> int:
    """Return how many items make up a chunk.

    Args:
        device: on a CPU, chunks have `ELEMENTS_CPU` elements.
        elements: elements per item.
        most: elements per chunk on other devices.
    """
    return max(1, (ELEMENTS_CPU if device.type == "cpu" else most) // max(1, elements))
