"""The table of codewords that the kernels read: centred, scaled, rounded and padded.

A key k belongs to the codeword with the largest k.codes[r] + bias[r]; a query q gives codeword r
the logit q.codes[r], in units of log2 and up to a constant per query, which a softmax ignores.

Shapes: H heads, D head dim, M0 parents, C children; DP, MP and CP are D, M0 and C padded to powers
of two (`padded_sizes`).
"""

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from avq_diffusers.codebook.assignment import centre_of


class StoredCodes(NamedTuple):
    """Stored codewords as the kernels read them.

    codes: (H, MP + M0 CP, DP) in the dtype of the inputs. Parents are the first rows, child c of
        parent p is row MP + p CP + c; padding is 0. A codeword too far away for the dtype moves to
        its edge.
    bias: (H, MP + M0 CP) float32, the part of -|k - codeword|^2 scale log2(e) / 2 that does not
        depend on the key k; -inf on padding rows.
    centre: (H, DP) float32, the vector that `codes` are around.
    """

    codes: Tensor
    bias: Tensor
    centre: Tensor


def padded_sizes(head_dim: int, num_parents: int, num_children: int) -> tuple[int, int, int]:
    """DP, MP and CP: powers of two, the first two at least 16 (least side of a matrix product)."""
    child_rows = _next_power_of_2(num_children) if num_children else 0
    return (
        max(16, _next_power_of_2(head_dim)),
        max(16, _next_power_of_2(num_parents)),
        child_rows,
    )


def mean_columns(head_dim: int) -> int:
    """Columns of a row of D value means, whose last 8 or more hold the share of keys."""
    padded_dim = padded_sizes(head_dim, 1, 0)[0]
    return padded_dim if head_dim < padded_dim else padded_dim + 16


def unsupported(
    query: Tensor,
    *,
    num_parents: int,
    num_children: int,
    num_refined: int,
    query_tile: int,
    capability: tuple[int, int],
) -> str | None:
    """Why the kernels cannot serve a call; None if they can.

    Args:
        query: (B, H, N, D).
        capability: compute capability of the GPU.
    """
    head_dim = query.shape[-1]
    if query.dtype not in (torch.float16, torch.bfloat16, torch.float32):
        return f"query must be float16, bfloat16 or float32, but is {query.dtype}"
    if head_dim % 8 or head_dim > 128:
        return f"head dim must be a multiple of 8 up to 128, but is {head_dim}"
    if query.dtype == torch.float32 and head_dim > 64 and capability < (9, 0):
        return f"float32 with head dim {head_dim} needs compute capability 9.0"
    if query_tile > 128:
        return f"query_tile must be at most 128, but is {query_tile}"
    most_parents = 256 if 0 < num_refined < num_parents else 512
    if num_parents > most_parents:
        return f"num_parents must be at most {most_parents}, but is {num_parents}"
    if num_children > 32:
        return f"num_children must be at most 32, but is {num_children}"
    if query.shape[0] > 65535:
        return f"batch must be at most 65535, but is {query.shape[0]}"
    if query.shape[2] * max(query.stride(2), query.shape[1] * head_dim) >= 2**31:
        return f"one batch element spans 2^31 elements or more: {tuple(query.shape)}"
    return None


def pack(parents: Tensor, children: Tensor, *, scale: float, dtype: torch.dtype) -> StoredCodes:
    """Codewords around the median parent of their head, times scale log2(e), and their biases.

    Centring leaves assignment and attention as they are and keeps digits. The biases belong to the
    rounded codewords, so rounding only moves the codewords.

    Args:
        parents: (H, M0, D) float32.
        children: (H, M0, C, D) float32.
        scale: factor on the logits, positive.
        dtype: of the inputs.
    """
    num_parents, num_children, head_dim = children.shape[1:]
    padded_dim, parent_rows, child_rows = padded_sizes(head_dim, num_parents, num_children)
    factor = scale * math.log2(math.e)

    parents, children = parents.double(), children.double()
    centre = centre_of(parents)
    children = F.pad(children, (0, 0, 0, child_rows - num_children), value=torch.inf)
    parents = F.pad(parents, (0, 0, 0, parent_rows - num_parents), value=torch.inf)
    codewords = torch.cat([parents, children.flatten(1, 2)], dim=1)
    is_padding = codewords[..., :1].isinf()

    limit = torch.finfo(dtype).max
    codes = (
        (factor * (codewords - centre)).clamp(-limit, limit).masked_fill(is_padding, 0).to(dtype)
    )
    exact = codes.double()
    bias = -(exact * (centre + exact / (2 * factor))).sum(dim=-1)
    bias = bias.float().masked_fill(is_padding[..., 0], -torch.inf)
    padding = (0, padded_dim - head_dim)
    return StoredCodes(F.pad(codes, padding), bias, F.pad(centre[:, 0].float(), padding))


def _next_power_of_2(number: int) -> int:
    return 1 << (number - 1).bit_length()
