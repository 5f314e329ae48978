"""Fit a codebook: two-level k-means on keys.

Keys are centred, and children are relative to their parent: a large shared offset would cost
precision.

Shapes: H heads, M0 parents, C children per parent, D head dim, S keys.
"""

import math

import torch
from torch import Tensor

from avq_diffusers.codebook.assignment import (
    across_heads,
    grouped,
    leaf_sums,
    nearest_leaves,
    nearest_parents,
)
from avq_diffusers.codebook.codebook import Codebook, project_children, refuse_nonfinite
from avq_diffusers.config import check_int

SEEDING_TRIALS = 12
CONVERGED = 1 - 1e-4


@torch.no_grad()
def fit_codebook(
    keys: Tensor,
    num_parents: int,
    num_children: int,
    *,
    num_iterations: int = 25,
    seed: int = 0,
) -> Codebook:
    """Fit parents to all keys, then children to the keys of each parent's cell.

    Both levels are seeded with k-means++ and refined by Lloyd iterations. A key may stay with its
    parent. Each iteration for children ends in `project_children` and lowers the error under the
    parent-child constraint; children without keys balance their siblings.

    Args:
        keys: (H, S, D) floating point: the keys of a layer, or a sample of them.
        num_parents: M0, at most S.
        num_children: C; 0 is a flat codebook.
        num_iterations: most Lloyd iterations per level. Stops earlier if an iteration lowers the
            error by less than a factor of 1e-4.
        seed: on a CPU, the same seed and keys give the same codebook.

    Returns:
        Codebook on the device of `keys`, float32, or float64 if `keys` are float64.

    Raises:
        TypeError: `keys` is not a floating-point tensor, or a number is not an int.
        ValueError: `keys` has the wrong rank, holds NaN or infinity, or has fewer keys than
            parents; `num_parents` is below 1, or `num_children`, `num_iterations` or `seed` below
            0.
    """
    if not isinstance(keys, Tensor) or not keys.is_floating_point():
        arrived = keys.dtype if isinstance(keys, Tensor) else type(keys).__name__
        raise TypeError(f"keys must be a floating-point tensor, but got {arrived}.")
    if keys.ndim != 3 or 0 in keys.shape:
        raise ValueError(
            f"keys must have shape (heads, keys, head_dim) and not be empty, but got "
            f"{tuple(keys.shape)}."
        )
    for name, value, minimum in (
        ("num_parents", num_parents, 1),
        ("num_children", num_children, 0),
        ("num_iterations", num_iterations, 0),
        ("seed", seed, 0),
    ):
        check_int(name, value, minimum)
    if keys.shape[1] < num_parents:
        raise ValueError(
            f"keys must hold at least num_parents = {num_parents} keys per head, but got "
            f"{keys.shape[1]}."
        )
    refuse_nonfinite("keys", keys)

    keys = keys.to(torch.promote_types(keys.dtype, torch.float))
    centre = keys.mean(dim=1, keepdim=True)
    keys = keys - centre
    generator = torch.Generator(keys.device).manual_seed(seed)
    with torch.autocast(keys.device.type, enabled=False):
        parents = _seed_centroids(keys, num_parents, generator)
        parents = _lloyd(keys, parents, num_iterations)
        offsets = _fit_child_offsets(keys, parents, num_children, num_iterations, generator)
    parents = parents + centre
    return Codebook(parents, parents[:, :, None] + offsets)


def first_in_cell(rank: Tensor, cell: Tensor, num_cells: int) -> Tensor:
    """Index of the lowest-ranked row of each cell.

    Args:
        rank: (R,); rows of infinite rank do not count.
        cell: (R,) int64 in [0, num_cells).

    Returns:
        (num_cells,) int64; R for a cell without rows.
    """
    lowest = rank.new_full((num_cells,), math.inf).scatter_reduce_(0, cell, rank, "amin")
    is_lowest = (rank == lowest[cell]) & (rank < math.inf)
    rows = torch.arange(len(rank), device=rank.device).where(is_lowest, len(rank))
    return rows.new_full((num_cells,), len(rank)).scatter_reduce_(0, cell, rows, "amin")


def _seed_centroids(keys: Tensor, num_centroids: int, generator: torch.Generator) -> Tensor:
    """Greedy k-means++ (Arthur & Vassilvitskii 2007): sample a few keys by squared distance and
    keep the one that lowers the error most.
    """
    sample_size = min(keys.shape[1], 32 * num_centroids)
    sample = torch.randperm(keys.shape[1], generator=generator, device=keys.device)[:sample_size]
    keys = keys[:, sample]
    heads, _, head_dim = keys.shape
    head = torch.arange(heads, device=keys.device)
    half_norms = keys.square().sum(dim=-1) / 2
    # An upper bound on every distance makes the first sample uniform.
    half_distance = (4 * half_norms.amax(dim=1, keepdim=True)).expand_as(half_norms)

    centroids = keys.new_empty(heads, num_centroids, head_dim)
    for index in range(num_centroids):
        # Among exponential clocks with rates w, each rings first with probability w / sum(w).
        clock = keys.new_empty(heads, SEEDING_TRIALS, sample_size).exponential_(generator=generator)
        trial = (clock / half_distance[:, None]).argmin(dim=-1)
        candidates = keys[head[:, None], trial]
        score = candidates.square().sum(dim=-1)[:, None] / 2 - keys @ candidates.mT
        trial_distance = (half_norms[..., None] + score).mT.clamp(min=0)
        trial_distance = trial_distance.minimum(half_distance[:, None])
        best = trial_distance.sum(dim=-1).argmin(dim=-1)
        half_distance = trial_distance[head, best]
        centroids[:, index] = candidates[head, best]
    return centroids


def _lloyd(keys: Tensor, centroids: Tensor, num_iterations: int) -> Tensor:
    """Lloyd's algorithm; empty centroids move to the keys farthest from their centroid."""
    num_centroids = centroids.shape[1]
    head = torch.arange(keys.shape[0], device=keys.device)[:, None]
    previous_error = math.inf
    for _ in range(num_iterations):
        assignment = nearest_parents(keys, centroids)
        distance = (keys - centroids[head, assignment]).square().sum(dim=-1)
        error = distance.sum().item()
        if error >= CONVERGED * previous_error:
            break
        previous_error = error
        key_sums, counts = leaf_sums(keys, assignment, num_centroids)
        farthest = distance.topk(num_centroids, dim=1).indices
        spare = farthest.gather(1, ((counts == 0).cumsum(dim=1) - 1).clamp(min=0))
        centroids = torch.where(
            counts[..., None] > 0, key_sums / counts.clamp(min=1)[..., None], keys[head, spare]
        )
    return centroids


def _fit_child_offsets(
    keys: Tensor,
    parents: Tensor,
    num_children: int,
    num_iterations: int,
    generator: torch.Generator,
) -> Tensor:
    """Children minus their parents, (H, M0, C, D), from k-means in all cells at once."""
    heads, num_parents, head_dim = parents.shape
    num_cells = heads * num_parents
    if num_children == 0:
        return keys.new_zeros(heads, num_parents, 0, head_dim)
    cells = grouped(nearest_parents(keys, parents), num_parents)
    cell, origins = cells.number, parents.reshape(num_cells, 1, head_dim)
    flat = keys.flatten(0, 1)
    residual = flat - origins[cell, 0]
    # The last row is the parent. `first_in_cell` returns it for a cell without candidates.
    candidates = torch.cat([residual, residual.new_zeros(1, head_dim)])
    offsets = keys.new_zeros(num_cells, num_children, head_dim)

    # k-means++ with the parent as first centroid.
    distance = residual.square().sum(dim=-1)
    for index in range(num_children):
        clock = torch.empty_like(distance).exponential_(generator=generator)
        offsets[:, index] = candidates[first_in_cell(clock / distance, cell, num_cells)]
        distance = distance.minimum((residual - offsets[cell, index]).square().sum(dim=-1))

    # In high dimensions a key is closer to the parent than to any other key, so a child that starts
    # on a key would keep only that key. A tenth of the way is the paper's initial scale.
    offsets *= 0.1

    num_leaves = num_cells * (1 + num_children)
    origin = keys.new_zeros(num_cells, head_dim)
    previous_error = math.inf
    for _ in range(num_iterations):
        children = (origins + offsets).view(heads, num_parents, num_children, head_dim)
        leaf = across_heads(nearest_leaves(keys, parents, children, cells), num_leaves // heads)
        leaf = leaf.flatten()
        leaves = torch.cat([residual.new_zeros(num_cells, 1, head_dim), offsets], dim=1)
        distance = (residual - leaves.flatten(0, 1)[leaf]).square().sum(dim=-1)
        error = distance.sum().item()
        if error >= CONVERGED * previous_error:
            break
        previous_error = error
        key_sums, counts = leaf_sums(residual[None], leaf[None], num_leaves)
        key_sums = key_sums.view(num_cells, 1 + num_children, head_dim)[:, 1:]
        counts = counts.view(num_cells, 1 + num_children)[:, 1:]
        means = key_sums / counts.clamp(min=1)[..., None]

        farthest = first_in_cell((-distance).where(distance > 0, math.inf), cell, num_cells)
        is_first_empty = (counts == 0) & ((counts == 0).cumsum(dim=-1) == 1)
        reseeded = is_first_empty & (farthest < len(residual))[:, None]
        means = means.where(~reseeded[..., None], candidates[farthest][:, None])
        counts = counts.where(~reseeded, 1)

        offsets = project_children(means, counts, origin)
    return offsets.view(heads, num_parents, num_children, head_dim)
