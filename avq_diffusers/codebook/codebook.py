"""`Codebook`: the codewords of one attention layer, and the constraint that ties them.

Shapes: H heads, M0 parents, C children per parent, D head dim.
"""

from dataclasses import InitVar, dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Codebook:
    """Two-level codewords of one attention layer.

    In-place changes that PyTorch counts take effect. After others, such as through `.data`, NumPy,
    `torch.distributed` or a fused optimizer, call `torch.autograd.graph.increment_version` on the
    tensors: the kernels keep codewords in a form of their own.

    Args:
        parents: (H, M0, D) floating point.
        children: (H, M0, C, D), same dtype and device; C = 0 is a flat codebook.
        check_finite: refuse NaN and infinity. The check synchronizes with the device; turn it off
            inside torch.compile and CUDA graphs, and for tensors already checked.

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
                f"children must have shape ({heads}, {num_parents}, children, {head_dim}) to match "
                f"parents, but got {tuple(children.shape)}."
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
            refuse_nonfinite("parents", parents)
            refuse_nonfinite("children", children)

    @property
    def num_heads(self) -> int:
        """H."""
        return self.parents.shape[0]

    @property
    def num_parents(self) -> int:
        """M0, parents per head."""
        return self.parents.shape[1]

    @property
    def num_children(self) -> int:
        """Children per parent; 0 for a flat codebook."""
        return self.children.shape[2]

    @property
    def head_dim(self) -> int:
        """D."""
        return self.parents.shape[2]

    @property
    def num_codewords(self) -> int:
        """Parents and children per head, M_total = M0 (1 + C)."""
        return self.num_parents * (1 + self.num_children)

    @property
    def leaves(self) -> Tensor:
        """(H, M0, 1 + C, D): each parent, then its children."""
        return torch.cat([self.parents[:, :, None], self.children], dim=2)

    def to(
        self, device: torch.device | str | None = None, dtype: torch.dtype | None = None
    ) -> "Codebook":
        """Move to another device or dtype; returns `self` if nothing changes.

        Raises:
            ValueError: a codeword overflows in the new dtype.
        """
        parents = self.parents.to(device=device, dtype=dtype)
        children = self.children.to(device=device, dtype=dtype)
        if parents is self.parents and children is self.children:
            return self
        return Codebook(parents, children, check_finite=parents.dtype != self.parents.dtype)


def project_children(child_means: Tensor, child_counts: Tensor, parents: Tensor) -> Tensor:
    """Move children until they average to their parent; lighter children move further.

    The closed form C_pc = M_c - delta / (N_c sigma) of mass-weighted least squares (paper, Eq.
    child_constraint_solve), and its limit for vanishing counts: children without keys share the
    whole residual equally and the others do not move. If no child has keys, all move equally.

    Args:
        child_means: (..., C, D), M_c, or the current position of a child with count 0.
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


def constraint_error(codebook: Codebook) -> Tensor:
    """How far children are from averaging to their parent (paper, Eq. parent_constraint).

    Returns:
        (H,) largest distance between a parent and the mean of its children, divided by the RMS
        distance of a child to its parent; 0 for a flat codebook.
    """
    offsets = codebook.children - codebook.parents[:, :, None]
    if codebook.num_children == 0:
        return offsets.new_zeros(codebook.num_heads)
    distance = offsets.square().sum(dim=-1).mean(dim=(1, 2)).sqrt()
    error = offsets.mean(dim=2).norm(dim=-1).amax(dim=1)
    return error / distance.clamp(min=torch.finfo(offsets.dtype).tiny)


def refuse_nonfinite(name: str, tensor: Tensor) -> None:
    """Raise ValueError if `tensor`, the argument `name`, holds NaN or infinity."""
    if not tensor.isfinite().all():
        raise ValueError(f"{name} must be finite, but got NaN or infinity.")
