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
    """Stored codewords as the kernels read them."""

    # (H, MP + M0 CP, DP) in the dtype of the inputs. Parents come first; child c of parent p is
    # row MP + p CP + c; padding is 0. Codewords outside the dtype's range are clamped.
    codes: Tensor
    # (H, MP + M0 CP) float32, the part of -|k - codeword|^2 scale log2(e) / 2 that does not
    # depend on the key k; -inf on padding rows.
    bias: Tensor
    centre: Tensor  # (H, DP) float32, subtracted from `codes`


def padded(length: int, least: int = 1) -> int:
    """The side of a block: the power of two that holds a length, and at least `least`."""
    return max(least, 1 << (length - 1).bit_length())


def padded_sizes(head_dim: int, num_parents: int, num_children: int) -> tuple[int, int, int]:
    """DP, MP and CP: powers of two, the first two at least 16 (the smallest side of `tl.dot`)."""
    child_rows = padded(num_children) if num_children else 0
    return padded(head_dim, 16), padded(num_parents, 16), child_rows


def pack(parents: Tensor, children: Tensor, *, scale: float, dtype: torch.dtype) -> StoredCodes:
    """Codewords around the median parent of their head, times scale log2(e), and their biases.

    Centring preserves precision and leaves assignment and attention unchanged. Biases are computed
    from the rounded codewords, so rounding only moves the codewords. `dtype` is that of the inputs.
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
