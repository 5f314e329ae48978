"""The assignment of keys to leaves (paper, Algorithm VQ Precompute).

A key goes to its nearest parent, then to that parent's nearest child if strictly closer; otherwise
it stays with the parent. Ties go to the lower index. Keys and codewords are centred first: a large
shared offset would cost precision.

Shapes: H heads, N keys, M0 parents, C children per parent, D head dim. Leaf p (1 + C) of a head
holds the keys that stay with parent p, leaf p (1 + C) + 1 + c those of its child c.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from avq_diffusers.codebook.codebook import Codebook

# Elements in the intermediates of one chunk: few enough for a CPU's cache; on other devices enough
# to keep launches few.
ELEMENTS_CPU = 1 << 20
ELEMENTS = 1 << 26


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
    PyTorch's TF32 setting. Memory is bounded for any number of keys.

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
        leaf = nearest_leaves(
            key.flatten(0, -3),
            codebook.parents.to(dtype).expand(*heads, -1, -1).flatten(0, -3),
            codebook.children.to(dtype).expand(*heads, -1, -1, -1).flatten(0, -4),
        )
    return leaf.view(key.shape[:-1])


def nearest_parents(key: Tensor, parents: Tensor) -> Tensor:
    """Nearest parent of each key; ties go to the lower index.

    Args:
        key: (H, N, D), dtype of `parents` or narrower.
        parents: (H, M0, D) float32 or float64.

    Returns:
        (H, N) int64 in [0, M0).
    """
    return nearest_leaves(key, parents, parents[:, :, None][:, :, :0])


def nearest_leaves(
    key: Tensor, parents: Tensor, children: Tensor, cell: Tensor | None = None
) -> Tensor:
    """The leaf of each key.

    Args:
        key: (H, N, D), dtype of `parents` or narrower.
        parents: (H, M0, D) float32 or float64.
        children: (H, M0, C, D), same dtype.
        cell: (H, N) from `nearest_parents`, if already computed.

    Returns:
        (H, N) int64 in [0, M0 (1 + C)).
    """
    heads, num_keys, head_dim = key.shape
    num_parents, num_leaves = parents.shape[1], 1 + children.shape[2]
    centre = centre_of(parents)
    offsets = (children - parents[:, :, None]).flatten(0, 1)
    parents = parents - centre
    # Half of |k|^2 - |k - p|^2, and of |k - p|^2 - |k - c|^2, are linear in k.
    parent_bias = -0.5 * parents.square().sum(dim=-1)
    child_bias = -(offsets * (parents.reshape(-1, 1, head_dim) + 0.5 * offsets)).sum(dim=-1)

    assignment = torch.empty(heads, num_keys, dtype=torch.int64, device=key.device)
    chunk = chunk_length(key.device, heads * (offsets[0].numel() + num_parents))
    for start in range(0, num_keys, chunk):
        keys = key[:, start : start + chunk] - centre
        if cell is None:
            scores = torch.baddbmm(parent_bias[:, None], keys, parents.transpose(1, 2))
            parent = scores.argmax(dim=-1)
        else:
            parent = cell[:, start : start + chunk]
        row = across_heads(parent, num_parents).flatten()
        products = offsets.index_select(0, row).mul_(keys.reshape(-1, 1, head_dim))
        gain = products.sum(dim=-1) + child_bias.index_select(0, row)
        # Staying has gain 0 and comes first, and argmax takes the first of equal gains.
        leaf = F.pad(gain, (1, 0)).argmax(dim=-1)
        assignment[:, start : start + chunk] = parent * num_leaves + leaf.view_as(parent)
    return assignment


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
