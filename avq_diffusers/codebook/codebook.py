"""`Codebook`: one layer's codewords, the assignment of keys to them, and k-means on keys.

Shapes: H heads, M0 parents, C children per parent, D head dim, N keys, S sampled keys.
Distances are never taken from raw coordinates: keys and parents are centred on the mean of the
codebook, children on their parent, so that no digits are lost where keys share a large offset.
"""

import math
from dataclasses import InitVar, dataclass

import torch
from torch import Tensor

from avq_diffusers.config import check_int

# Numbers in one chunk: on a CPU they stay in cache; on other devices few launches count.
ELEMENTS_CPU = 1 << 22
ELEMENTS = 1 << 26
SEEDING_TRIALS = 12
CONVERGED = 1 - 1e-4


@dataclass(frozen=True, eq=False)
class Codebook:
    """Two-level codewords of one attention layer.

    Args:
        parents: (H, M0, D) floating point.
        children: (H, M0, C, D), same dtype and device; C = 0 is a flat codebook.
        check_finite: look for NaN and infinity, which waits for the device. Turn it off for
            tensors that were checked before, and inside torch.compile and CUDA graphs.

    Raises:
        TypeError: a field is not a floating-point tensor, or the dtypes differ.
        ValueError: shapes or devices do not agree, or a codeword is NaN or infinite.
    """

    parents: Tensor
    children: Tensor
    check_finite: InitVar[bool] = True

    def __post_init__(self, check_finite: bool) -> None:
        for name, tensor in (("parents", self.parents), ("children", self.children)):
            if not isinstance(tensor, Tensor):
                raise TypeError(f"{name} must be a tensor, but got {type(tensor).__name__}.")
            if not tensor.is_floating_point():
                raise TypeError(f"{name} must be floating point, but got {tensor.dtype}.")
        parents, children = self.parents, self.children
        if parents.ndim != 3 or 0 in parents.shape:
            raise ValueError(
                f"parents must have shape (heads, parents, head_dim) and not be empty, but got "
                f"{tuple(parents.shape)}."
            )
        if children.ndim != 4 or (*children.shape[:2], children.shape[3]) != parents.shape:
            heads, num_parents, head_dim = parents.shape
            raise ValueError(
                f"children must have shape ({heads}, {num_parents}, children, {head_dim}) to go "
                f"with parents, but got {tuple(children.shape)}."
            )
        if children.dtype != parents.dtype:
            raise TypeError(
                f"children must have the dtype of parents, {parents.dtype}, but got "
                f"{children.dtype}."
            )
        if children.device != parents.device:
            raise ValueError(
                f"children must be on the device of parents, {parents.device}, but got "
                f"{children.device}."
            )
        if check_finite:
            _check_finite("parents", parents)
            _check_finite("children", children)

    @property
    def num_heads(self) -> int:
        """H."""
        return self.parents.shape[0]

    @property
    def num_parents(self) -> int:
        """M0, parents of one head."""
        return self.parents.shape[1]

    @property
    def num_children(self) -> int:
        """Children per parent; 0 for a flat codebook."""
        return self.children.shape[2]

    @property
    def most_refined(self) -> int:
        """Parents that a query tile can refine: all, or 0 if the codebook is flat."""
        return self.num_parents if self.num_children else 0

    @property
    def head_dim(self) -> int:
        """D."""
        return self.parents.shape[2]

    @property
    def num_codewords(self) -> int:
        """Parents and children of one head, M_total = M0 (1 + C)."""
        return self.num_parents * (1 + self.num_children)

    @property
    def leaves(self) -> Tensor:
        """(H, M0, 1 + C, D): each parent, then its children."""
        return torch.cat([self.parents[:, :, None], self.children], dim=2)

    def to(
        self, device: torch.device | str | None = None, dtype: torch.dtype | None = None
    ) -> "Codebook":
        """This codebook on another device or in another dtype; itself where nothing changes.

        Raises:
            ValueError: a codeword overflows in the new dtype.
        """
        parents = self.parents.to(device=device, dtype=dtype)
        children = self.children.to(device=device, dtype=dtype)
        if parents is self.parents and children is self.children:
            return self
        return Codebook(parents, children, check_finite=parents.dtype != self.parents.dtype)


@torch.no_grad()
def assign(key: Tensor, codebook: Codebook) -> tuple[Tensor, Tensor]:
    """Nearest parent of each key, then its nearest child (paper, Algorithm VQ Precompute).

    A child is taken only if it is strictly closer than the parent; of equal codewords the lower
    index is taken. Computed in fp32, or fp64 if an input is fp64, also under autocast; matrix
    products follow torch's TF32 setting. Memory stays bounded for any number of keys.

    Args:
        key: (..., H, N, D).
        codebook: of H heads and head dim D, on the same device.

    Returns:
        parent_assignment: (..., H, N) int64 in [0, M0).
        child_assignment: (..., H, N) int64 in [0, C), or -1 where the key stays with its parent.

    Raises:
        ValueError: `key` does not end in the codebook's heads, any number of keys, and head dim.
    """
    leaf = assign_leaves(key, codebook)
    num_leaves = 1 + codebook.num_children
    return leaf // num_leaves, leaf % num_leaves - 1


@torch.no_grad()
def assign_leaves(key: Tensor, codebook: Codebook) -> Tensor:
    """`assign` as one number per key, its row of the head's `codebook.leaves.flatten(1, 2)`.

    Args:
        key: (..., H, N, D).
        codebook: of H heads and head dim D, on the same device.

    Returns:
        (..., H, N) int64, p (1 + C) for a key that stays with parent p and p (1 + C) + 1 + c for
        one that its child c takes.

    Raises:
        ValueError: as `assign`.
    """
    if key.ndim < 3 or (key.shape[-3], key.shape[-1]) != (codebook.num_heads, codebook.head_dim):
        raise ValueError(
            f"key must have shape (..., {codebook.num_heads}, keys, {codebook.head_dim}) to go "
            f"with the codebook, but got {tuple(key.shape)}."
        )
    dtype = working_dtype(key, codebook)
    parents, children = codebook.parents.to(dtype), codebook.children.to(dtype)
    centre = parents.mean(dim=1, keepdim=True)
    centred_parents = parents - centre
    child_offsets = (children - parents[:, :, None]).flatten(0, 1)

    keys_per_chunk = _keys_per_chunk(key.device, key[..., :1, 0].numel(), codebook.num_parents)
    leaf_chunks = []
    with torch.autocast(key.device.type, enabled=False):
        for chunk in key.split(keys_per_chunk, dim=-2):
            centred_key = chunk.to(dtype) - centre
            parent = _score(centred_key, centred_parents).argmin(dim=-1)
            cell = _cell(parent, codebook.num_parents)
            residual = centred_key - centred_parents.flatten(0, 1)[cell]
            leaf, _ = _nearest_leaf(residual.flatten(0, -2), child_offsets, cell.flatten())
            leaf_chunks.append(parent * (1 + codebook.num_children) + leaf.view_as(parent))
    return torch.cat(leaf_chunks, dim=-1)


@torch.no_grad()
def fit_codebook(
    keys: Tensor,
    num_parents: int,
    num_children: int,
    *,
    num_iterations: int = 25,
    seed: int = 0,
    constrain: bool = True,
) -> Codebook:
    """Two-level k-means: parents on all keys, then children on the keys of each parent's cell.

    Both levels are seeded by k-means++ and improved by Lloyd's iterations. A key of a cell may
    stay with the parent. With `constrain`, each iteration ends in `project_children`, which makes
    it a descent on the error under the parent-child constraint. Children that find no key of
    their own mirror their siblings: at the parent, if those balance already.

    Args:
        keys: (H, S, D) floating point; S = B N keys of a layer, or a sample of them.
        num_parents: M0, at most S.
        num_children: C; 0 is a flat codebook.
        num_iterations: most iterations of Lloyd's algorithm per level; it stops where the error
            falls by less than 1e-4 of itself.
        seed: same seed and keys, same codebook on the CPU.
        constrain: let the children of each parent average to it.

    Returns:
        Codebook on the device of `keys`, fp32, or fp64 if `keys` are fp64.

    Raises:
        TypeError: `keys` is not a floating-point tensor, or a number is not an int.
        ValueError: `keys` has another rank, holds NaN or infinity, or fewer keys than parents;
            `num_parents` is below 1, or `num_children`, `num_iterations` or `seed` below 0.
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
    _check_finite("keys", keys)

    keys = keys.to(torch.promote_types(keys.dtype, torch.float))
    centre = keys.mean(dim=1, keepdim=True)
    keys = keys - centre
    generator = torch.Generator(keys.device).manual_seed(seed)
    with torch.autocast(keys.device.type, enabled=False):
        parents = _seed_centroids(keys, num_parents, generator)
        parents = _lloyd(keys, parents, num_iterations)
        offsets = _fit_child_offsets(
            keys, parents, num_children, num_iterations, generator, constrain
        )
    parents = parents + centre
    return Codebook(parents, parents[:, :, None] + offsets)


def project_children(child_means: Tensor, child_counts: Tensor, parents: Tensor) -> Tensor:
    """Move children, the lighter the further, until they average to their parent.

    The closed form C_pc = M_c - delta / (N_c sigma) of the mass-weighted least squares (paper,
    Eq. child_constraint_solve), extended to its limit where counts vanish: the children without
    keys share the whole residual equally, and the others do not move. If no child has a key, all
    move rigidly with the parent.

    Args:
        child_means: (..., C, D), M_c; where the count is 0, the position to start from.
        child_counts: (..., C), N_c >= 0.
        parents: (..., D).

    Returns:
        (..., C, D).
    """
    if child_counts.shape[-1] == 0:
        return child_means
    lightest = child_counts.amin(dim=-1, keepdim=True)
    mobility = torch.where(child_counts > 0, lightest / child_counts, 1)
    share = mobility / mobility.sum(dim=-1, keepdim=True)
    residual = (child_means - parents[..., None, :]).sum(dim=-2, keepdim=True)
    return child_means - share[..., None] * residual


def leaf_sums(keys: Tensor, leaf: Tensor, num_leaves: int) -> tuple[Tensor, Tensor]:
    """Sum and number of the keys in each leaf; the same bits on every run.

    Args:
        keys: (H, N, D).
        leaf: (H, N) int64 in [0, num_leaves).

    Returns:
        key_sums (H, num_leaves, D) and counts (H, num_leaves), dtype of `keys`.
    """
    heads, _, head_dim = keys.shape
    # Accumulating index_put_ sorts its indices on CUDA, where index_add_ uses unordered atomics.
    key_sums = keys.new_zeros(heads * num_leaves, head_dim).index_put_(
        (_cell(leaf, num_leaves).flatten(),), keys.flatten(0, 1), accumulate=True
    )
    counts = keys.new_zeros(heads, num_leaves).scatter_add_(
        1, leaf, keys.new_ones(()).expand_as(leaf)
    )
    return key_sums.view(heads, num_leaves, head_dim), counts


def first_in_cell(rank: Tensor, cell: Tensor, num_cells: int) -> Tensor:
    """Index of the lowest-ranked row of each cell.

    Args:
        rank: (R,); rows of infinite rank are left out.
        cell: (R,) int64 in [0, num_cells).

    Returns:
        (num_cells,) int64; R where a cell has no row.
    """
    lowest = rank.new_full((num_cells,), math.inf).scatter_reduce_(0, cell, rank, "amin")
    is_lowest = (rank == lowest[cell]) & (rank < math.inf)
    rows = torch.arange(len(rank), device=rank.device).where(is_lowest, len(rank))
    return rows.new_full((num_cells,), len(rank)).scatter_reduce_(0, cell, rows, "amin")


def centre_of(parents: Tensor) -> Tensor:
    """(H, 1, D) median of the parents, which a dead codeword far away does not move."""
    return parents.sort(dim=1).values[:, parents.shape[1] // 2, None]


def heads_first(keys: Tensor) -> Tensor:
    """(..., H, N, D) to (H, all keys, D)."""
    return keys.movedim(-3, 0).flatten(1, -2)


def working_dtype(keys: Tensor, codebook: Codebook) -> torch.dtype:
    """fp32, or fp64 if keys or codewords are."""
    dtype = torch.promote_types(keys.dtype, codebook.parents.dtype)
    return torch.promote_types(dtype, torch.float)


def _check_finite(name: str, tensor: Tensor) -> None:
    if not tensor.isfinite().all():
        raise ValueError(f"{name} must be finite, but got NaN or infinity.")


def _keys_per_chunk(device: torch.device, batch: int, width: int) -> int:
    elements = ELEMENTS_CPU if device.type == "cpu" else ELEMENTS
    return max(1, elements // max(1, batch * width))


def _cell(assignment: Tensor, num_cells: int) -> Tensor:
    """Number the cells of all heads in one row: (..., H, N) to h * num_cells + assignment."""
    heads = torch.arange(assignment.shape[-2], device=assignment.device)
    return assignment + num_cells * heads[:, None]


def _score(points: Tensor, centroids: Tensor) -> Tensor:
    """Half the squared distance, less half the point's squared norm: (..., N, M)."""
    return centroids.square().sum(dim=-1)[..., None, :] / 2 - points @ centroids.mT


def _nearest_leaf(residual: Tensor, child_offsets: Tensor, cell: Tensor) -> tuple[Tensor, Tensor]:
    """0 for each row that stays, 1 + c for child c of its cell, and the squared distance to that.

    Args:
        residual: (R, D), keys less their parents.
        child_offsets: (K, C, D), children less their parents, in K cells.
        cell: (R,) int64 in [0, K).
    """
    _, num_children, head_dim = child_offsets.shape
    half_norms = child_offsets.square().sum(dim=-1) / 2
    squared_distance = residual.square().sum(dim=-1)
    if num_children == 0:
        return torch.zeros_like(cell), squared_distance

    leaf, gain = [], []
    rows_per_chunk = _keys_per_chunk(residual.device, num_children, head_dim)
    for rows, cells in zip(residual.split(rows_per_chunk), cell.split(rows_per_chunk), strict=True):
        score = half_norms[cells] - (child_offsets[cells] @ rows[:, :, None])[:, :, 0]
        lowest, nearest = score.min(dim=-1)
        leaf.append((1 + nearest).where(lowest < 0, 0))
        gain.append(lowest.clamp(max=0))
    return torch.cat(leaf), (squared_distance + 2 * torch.cat(gain)).clamp(min=0)


def _seed_centroids(keys: Tensor, num_centroids: int, generator: torch.Generator) -> Tensor:
    """Greedy k-means++ (Arthur & Vassilvitskii 2007): of a few keys drawn by squared distance,
    take the one that lowers the error most.
    """
    sample_size = min(keys.shape[1], 32 * num_centroids)
    sample = torch.randperm(keys.shape[1], generator=generator, device=keys.device)[:sample_size]
    keys = keys[:, sample]
    heads, _, head_dim = keys.shape
    head = torch.arange(heads, device=keys.device)
    half_norms = keys.square().sum(dim=-1) / 2
    # An upper bound of every distance makes the first draw uniform.
    half_distance = (4 * half_norms.amax(dim=1, keepdim=True)).expand_as(half_norms)

    centroids = keys.new_empty(heads, num_centroids, head_dim)
    for index in range(num_centroids):
        # The first of exponential clocks with rates w rings with probability w / sum(w).
        clock = keys.new_empty(heads, SEEDING_TRIALS, sample_size).exponential_(generator=generator)
        trial = (clock / half_distance[:, None]).argmin(dim=-1)
        candidates = keys[head[:, None], trial]
        trial_distance = half_norms[:, None] + _score(keys, candidates).mT
        trial_distance = trial_distance.clamp(min=0).minimum(half_distance[:, None])
        best = trial_distance.sum(dim=-1).argmin(dim=-1)
        half_distance = trial_distance[head, best]
        centroids[:, index] = candidates[head, best]
    return centroids


def _nearest(keys: Tensor, centroids: Tensor) -> tuple[Tensor, Tensor]:
    """Nearest centroid of each key (H, S) and half the squared distance to it."""
    keys_per_chunk = _keys_per_chunk(keys.device, keys.shape[0], centroids.shape[1])
    chunks = [_score(chunk, centroids).min(dim=-1) for chunk in keys.split(keys_per_chunk, dim=1)]
    score = torch.cat([values for values, _ in chunks], dim=1)
    assignment = torch.cat([indices for _, indices in chunks], dim=1)
    return assignment, (keys.square().sum(dim=-1) / 2 + score).clamp(min=0)


def _lloyd(keys: Tensor, centroids: Tensor, num_iterations: int) -> Tensor:
    """Lloyd's algorithm; empty centroids move to the keys farthest from theirs."""
    num_centroids = centroids.shape[1]
    head = torch.arange(keys.shape[0], device=keys.device)[:, None]
    previous_error = math.inf
    for _ in range(num_iterations):
        assignment, half_distance = _nearest(keys, centroids)
        error = half_distance.sum().item()
        if error >= CONVERGED * previous_error:
            break
        previous_error = error
        key_sums, counts = leaf_sums(keys, assignment, num_centroids)
        farthest = half_distance.topk(num_centroids, dim=1).indices
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
    constrain: bool,
) -> Tensor:
    """Children less their parents, (H, M0, C, D), by k-means in all cells at once."""
    heads, num_parents, head_dim = parents.shape
    num_cells = heads * num_parents
    offsets = keys.new_zeros(num_cells, num_children, head_dim)
    if num_children == 0:
        return offsets.view(heads, num_parents, 0, head_dim)
    assignment, _ = _nearest(keys, parents)
    cell = _cell(assignment, num_parents).flatten()
    residual = keys.flatten(0, 1) - parents.flatten(0, 1)[cell]
    # Where a cell has no key to offer, `first_in_cell` points to this last row: the parent.
    candidates = torch.cat([residual, residual.new_zeros(1, head_dim)])

    # k-means++ whose first centroid is the parent.
    distance = residual.square().sum(dim=-1)
    for index in range(num_children):
        clock = torch.empty_like(distance).exponential_(generator=generator)
        offsets[:, index] = candidates[first_in_cell(clock / distance, cell, num_cells)]
        distance = distance.minimum((residual - offsets[cell, index]).square().sum(dim=-1))

    # In many dimensions a key is closer to the parent than to any other key: children that start
    # on keys would stay alone. A tenth of the way there is the paper's initial scale.
    offsets *= 0.1

    origin = keys.new_zeros(num_cells, head_dim)
    previous_error = math.inf
    for _ in range(num_iterations):
        leaf, distance = _nearest_leaf(residual, offsets, cell)
        error = distance.sum().item()
        if error >= CONVERGED * previous_error:
            break
        previous_error = error
        leaf = cell * (1 + num_children) + leaf
        key_sums, counts = leaf_sums(residual[None], leaf[None], num_cells * (1 + num_children))
        key_sums = key_sums.view(num_cells, 1 + num_children, head_dim)[:, 1:]
        counts = counts.view(num_cells, 1 + num_children)[:, 1:]
        means = key_sums / counts.clamp(min=1)[..., None]

        farthest = first_in_cell((-distance).where(distance > 0, math.inf), cell, num_cells)
        is_first_empty = (counts == 0) & ((counts == 0).cumsum(dim=-1) == 1)
        reseeded = is_first_empty & (farthest < len(residual))[:, None]
        means = means.where(~reseeded[..., None], candidates[farthest][:, None])
        counts = counts.where(~reseeded, 1)

        offsets = project_children(means, counts, origin) if constrain else means
    return offsets.view(heads, num_parents, num_children, head_dim)
