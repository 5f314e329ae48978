"""Stored codewords in the kernels' form, packed once per codebook."""

import weakref
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from avq_diffusers.attention.triton.codewords import StoredCodes, pack


class _Packed(NamedTuple):
    children: weakref.ref[Tensor]
    states: tuple[tuple[Any, ...], ...]
    codes: StoredCodes


# By parents tensor. A codebook that moves, or whose versions count a change, is packed again.
_packed: WeakTensorKeyDictionary = WeakTensorKeyDictionary()


def packed_codewords(
    parents: Tensor, children: Tensor, scale: float, dtype: torch.dtype
) -> StoredCodes:
    """`triton.codewords.pack`, cached for the lifetime of the codebook."""
    if parents.is_inference() or children.is_inference():  # no version counter
        return pack(parents, children, scale=scale, dtype=dtype)
    states = tuple((x._version, x.device, x.dtype, x.data_ptr()) for x in (parents, children))
    tables = _packed.setdefault(parents, {})
    found = tables.get((scale, dtype))
    if found is not None and found.children() is children and found.states == states:
        return found.codes
    codes = pack(parents, children, scale=scale, dtype=dtype)
    # Tensors allocated during CUDA graph capture belong to that graph.
    if not (parents.is_cuda and torch.cuda.is_current_stream_capturing()):
        tables[scale, dtype] = _Packed(weakref.ref(children), states, codes)
    return codes
