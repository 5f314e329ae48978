"""Checks of what attention and its diagnostics take: tensors that fit each other, and numbers.

Shapes: B batch, H heads, N queries, S keys, D head dim.
"""

import sys

import torch
from torch import Tensor

from avq_diffusers.codebook.codebook import Codebook
from avq_diffusers.config import check_int

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
LARGEST_SCALE = sys.float_info.max


def check_inputs(
    query: Tensor, key: Tensor, value: Tensor, codebook: Codebook, query_order: Tensor | None
) -> None:
    """Refuse tensors that do not fit each other; their floating point dtypes may differ.

    Args:
        query: (B, H, N, D).
        key, value: (B, H, S, D).
        codebook: of H heads and head dim D.
        query_order: (N,) or None.

    Raises:
        TypeError: an argument has the wrong type or dtype.
        ValueError: shapes or devices do not agree.
    """
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        if not isinstance(tensor, Tensor):
            raise TypeError(f"{name} must be a tensor, but got {type(tensor).__name__}.")
        if tensor.ndim != 4:
            raise ValueError(
                f"{name} must have shape (batch, heads, tokens, head_dim), but got "
                f"{tuple(tensor.shape)}."
            )
        if tensor.dtype not in DTYPES:
            raise TypeError(
                f"{name} must be float16, bfloat16, float32 or float64, but got {tensor.dtype}."
            )
        if 0 in tensor.shape:
            raise ValueError(f"{name} must not be empty, but got shape {tuple(tensor.shape)}.")
    if not isinstance(codebook, Codebook):
        raise TypeError(f"codebook must be a Codebook, but got {type(codebook).__name__}.")
    for name, tensor in (("key", key), ("value", value)):
        if tensor.device != query.device:
            raise ValueError(
                f"{name} must be on the device of query, {query.device}, but got {tensor.device}."
            )
        for axis, word in ((0, "batch size"), (1, "number of heads"), (3, "head dim")):
            if tensor.shape[axis] != query.shape[axis]:
                raise ValueError(
                    f"{name} must have the {word} of query, {query.shape[axis]}, but got "
                    f"{tensor.shape[axis]}."
                )
    if value.shape[2] != key.shape[2]:
        raise ValueError(
            f"value must have as many tokens as key, {key.shape[2]}, but got {value.shape[2]}."
        )

    parents = codebook.parents
    if parents.device != query.device:
        raise ValueError(
            f"codebook must be on the device of query, {query.device}, but got {parents.device}."
        )
    for axis, query_axis, word in ((0, 1, "number of heads"), (2, 3, "head dim")):
        if parents.shape[axis] != query.shape[query_axis]:
            raise ValueError(
                f"codebook must have the {word} of query, {query.shape[query_axis]}, but got "
                f"{parents.shape[axis]}."
            )

    if query_order is None:
        return
    if not isinstance(query_order, Tensor):
        raise TypeError(f"query_order must be a tensor, but got {type(query_order).__name__}.")
    if query_order.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"query_order must be int32 or int64, but got {query_order.dtype}.")
    if query_order.shape != query.shape[2:3]:
        raise ValueError(
            f"query_order must have shape ({query.shape[2]},), one entry per query, but got "
            f"{tuple(query_order.shape)}."
        )
    if query_order.device != query.device:
        raise ValueError(
            f"query_order must be on the device of query, {query.device}, but got "
            f"{query_order.device}."
        )


def check_numbers(
    codebook: Codebook,
    num_refined: int,
    query_tile: int,
    importance_tile: int | None,
    scale: float | None,
) -> None:
    """Refuse numbers that the codebook or the definition does not allow.

    Raises:
        TypeError: a number has the wrong type.
        ValueError: it is outside its range.
    """
    check_int("num_refined", num_refined, 0)
    check_int("query_tile", query_tile, 1)
    if importance_tile is not None:
        check_int("importance_tile", importance_tile, 1)
    if scale is not None and not isinstance(scale, int | float):
        raise TypeError(f"scale must be a number or None, but got {type(scale).__name__}.")
    if scale is not None and not abs(scale) <= LARGEST_SCALE:
        raise ValueError(f"scale must be finite, but got {scale}.")
    num_parents, num_children = codebook.children.shape[1:3]
    if num_refined > num_parents:
        raise ValueError(
            f"num_refined must be at most the codebook's {num_parents} parents, but got "
            f"{num_refined}."
        )
    if num_refined > 0 and num_children == 0:
        raise ValueError(
            f"num_refined must be 0 for a codebook without children (flat VQ), but got "
            f"{num_refined}."
        )
