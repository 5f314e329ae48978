"""Online k-means with exponential moving averages (paper, appendix "Codeword Clustering During
Training").

Statistics are the state; codewords are derived from them. A cell has statistics for 1 + C
codewords: the parent with all keys of the cell, then each child with its keys. Keys that stay with
the parent only count for the parent.

Shapes: H heads, M0 parents, C children per parent, D head dim.
"""

import math

import torch
from torch import Tensor

from avq_diffusers.codebook.assignment import (
    across_heads,
    assign_leaves,
    heads_first,
    leaf_sums,
    working_dtype,
)
from avq_diffusers.codebook.codebook import Codebook, project_children
from avq_diffusers.codebook.kmeans import first_in_cell

# Below this count, sums and counts that decay for thousands of steps lose precision, and their
# ratio drifts.
NEGLIGIBLE_COUNT = 1e-20


@torch.no_grad()
def batch_statistics(
    keys: Tensor, codebook: Codebook, leaf: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Key sums and counts of one batch.

    Both are sums over keys: add them over micro-batches and all-reduce them over processes before
    `ema_update`.

    Args:
        keys: (..., H, N, D).
        codebook: the current codewords of H heads.
        leaf: `assign_leaves(keys, codebook)`, if already computed.

    Returns:
        key_sums (H, M0, 1 + C, D) and counts (H, M0, 1 + C), float32, or float64 if an input is
        float64.

    Raises:
        ValueError: `keys` does not fit the codebook.
    """
    if leaf is None:
        leaf = assign_leaves(keys, codebook)
    key_sums, counts = leaf_sums(
        heads_first(keys).to(working_dtype(keys, codebook)),
        leaf.movedim(-2, 0).flatten(1),
        codebook.num_codewords,
    )
    key_sums = key_sums.unflatten(1, (codebook.num_parents, -1))
    counts = counts.unflatten(1, (codebook.num_parents, -1))
    key_sums[:, :, 0] = key_sums.sum(dim=2)
    counts[:, :, 0] = counts.sum(dim=2)
    return key_sums, counts


def ema_update(ema: Tensor, batch: Tensor, decay: float) -> Tensor:
    """Return `decay` * `ema` + (1 - `decay`) * `batch`, for key sums or counts."""
    return decay * ema + (1 - decay) * batch


def derive_codebook(ema_key_sums: Tensor, ema_counts: Tensor, previous: Codebook) -> Codebook:
    """Derive codewords from statistics: parents are S / N, children are projected S / N.

    A parent without keys keeps its position. A child without keys starts from its position, and
    `project_children` moves it.

    Args:
        ema_key_sums: (H, M0, 1 + C, D).
        ema_counts: (H, M0, 1 + C).
        previous: the codebook of the previous step, in the dtype of the statistics.
    """
    counts = ema_counts.where(ema_counts > NEGLIGIBLE_COUNT, 0)
    means = ema_key_sums / counts.where(counts > 0, 1)[..., None]
    ema_means = means.where(counts[..., None] > 0, previous.leaves)
    parents, children = ema_means[:, :, 0], ema_means[:, :, 1:]
    children = project_children(children, counts[:, :, 1:], parents)
    return Codebook(parents, children, check_finite=False)


@torch.no_grad()
def reassign_dead(
    ema_key_sums: Tensor,
    ema_counts: Tensor,
    codebook: Codebook,
    keys: Tensor,
    *,
    least_count: float,
    seed: int = 0,
) -> tuple[Tensor, Tensor, Codebook]:
    """Move dead codewords, whose EMA count is below `least_count`, to badly represented keys.

    Dead parents move to distinct keys, sampled by squared distance to their codeword; where there
    are more of them than keys, the others stay. Their children move along and lose their
    statistics. In each other cell, one dead child moves to a key of the cell, sampled in the same
    way. A moved parent gets a count of `least_count` keys, a moved child that of an average leaf of
    its cell: the projection would push a lighter child away from its key.

    The paper moves dead codewords to their nearest keys (appendix "Alternative VQ Training
    Methods"). Two dead codewords can share such a key, and it may already be well represented.

    Args:
        ema_key_sums: (H, M0, 1 + C, D).
        ema_counts: (H, M0, 1 + C).
        codebook: the codewords derived from these statistics.
        keys: (..., H, N, D). With the same keys and seed, all processes get the same codebook.
        least_count: keys per batch below which a codeword is dead.
        seed: seeds the sampling.

    Returns:
        New key sums, counts and codebook.

    Raises:
        ValueError: `keys` does not fit the codebook.
    """
    heads, num_parents, num_children = codebook.children.shape[:3]
    leaf = assign_leaves(keys, codebook).movedim(-2, 0).flatten(1)
    keys = heads_first(keys).to(working_dtype(keys, codebook))
    num_keys = keys.shape[1]
    head = torch.arange(heads, device=keys.device)[:, None]
    distance = (keys - codebook.leaves.flatten(1, 2)[head, leaf]).square().sum(dim=-1)
    # Among exponential clocks with rates w, each rings first with probability w / sum(w).
    generator = torch.Generator(keys.device).manual_seed(seed)
    clock = torch.empty_like(distance).exponential_(generator=generator) / distance

    is_dead = ema_counts < least_count
    rank = is_dead[:, :, 0].cumsum(dim=1) - 1
    num_drawn = min(num_parents, num_keys)
    dead_parent = is_dead[:, :, 0] & (rank < num_drawn)
    drawn = clock.topk(num_drawn, dim=1, largest=False).indices
    drawn = drawn.gather(1, rank.clamp(0, num_drawn - 1))

    cell = across_heads(leaf // (1 + num_children), num_parents).flatten()
    cell_key = first_in_cell(clock.flatten(), cell, heads * num_parents).view(heads, num_parents)
    dead_child = is_dead[:, :, 1:] & ~dead_parent[..., None]
    dead_child &= (dead_child.cumsum(dim=2) == 1) & (cell_key < heads * num_keys)[..., None]
    child_target = keys.flatten(0, 1)[cell_key.clamp(max=heads * num_keys - 1)]

    moved = torch.cat([dead_parent[..., None], dead_child], dim=2)
    orphaned = torch.cat(
        [torch.zeros_like(moved[:, :, :1]), dead_parent[..., None].expand_as(dead_child)], dim=2
    )
    target = torch.cat(
        [keys[head, drawn][:, :, None], child_target[:, :, None].expand_as(codebook.children)],
        dim=2,
    )
    # For a dead parent this is `least_count`.
    mass = (ema_counts[:, :, :1] / (1 + num_children)).clamp(min=least_count)

    counts = ema_counts.where(~moved, mass).masked_fill(orphaned, 0)
    key_sums = ema_key_sums.where(~moved[..., None], target * mass[..., None])
    key_sums = key_sums.masked_fill(orphaned[..., None], 0)
    shift = (keys[head, drawn] - codebook.parents).where(dead_parent[..., None], 0)
    previous = Codebook(
        codebook.parents + shift, codebook.children + shift[:, :, None], check_finite=False
    )
    return key_sums, counts, derive_codebook(key_sums, counts, previous)


def ema_decay(step: int, warmup_steps: int, start: float = 0.9, end: float = 0.99) -> float:
    """Decay at `step`: a cosine from `start` to `end` over `warmup_steps`, then `end`.

    The paper's recipe for ADE20K (appendix "Training Details").
    """
    if step >= warmup_steps:
        return end
    return end + (start - end) * (1 + math.cos(math.pi * step / warmup_steps)) / 2
