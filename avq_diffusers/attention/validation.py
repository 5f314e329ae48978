"""Checks of the arguments that attention and its diagnostics take.

Shapes: B batch, H heads, N queries, S keys, D head dim.
"""

import sys
from typing import TypedDict

import torch
from torch import Tensor

from avq_diffusers.codebook.codebook import Codebook
from avq_diffusers.config import (
    CODEWORDS,
    LARGEST_COUNT,
    check_exact_keys,
    check_int,
    check_num_updates,
)

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
LARGEST_SCALE = sys.float_info.max


class Options(TypedDict):
    """The arguments of `avq_attention` beside query, key, value and codebook."""

    num_parents: int
    num_children: int
    num_refined: int
    codewords: str
    num_updates: int
    exact_keys: int
    sink_key: Tensor | None
    sink_value: Tensor | None
    query_tile: int
    query_order: Tensor | None
    key_order: Tensor | None
    importance_tile: int | None
    scale: float | None


def check_arguments(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    codebook: Codebook | None,
    *,
    num_parents: int,
    num_children: int,
    num_refined: int,
    codewords: str,
    num_updates: int,
    exact_keys: int,
    sink_key: Tensor | None,
    sink_value: Tensor | None,
    query_tile: int,
    query_order: Tensor | None,
    key_order: Tensor | None,
    importance_tile: int | None,
    scale: float | None,
) -> None:
    """Refuse arguments that do not fit each other; the dtypes of tensors may differ.

    Args:
        query: (B, H, N, D).
        key, value: (B, H, S, D).
        codebook: of H heads and head dim D, or None for codewords from the keys.
        sink_key, sink_value: (B, H, T, D), or both None.
        query_order: (N,) or None.
        key_order: (S,) or None.

    Raises:
        TypeError: an argument has the wrong type or dtype.
        ValueError: shapes or devices do not agree, or a number is outside its range.
    """
    if (sink_key is None) != (sink_value is None):
        raise ValueError("sink_key and sink_value must be given together.")
    keys = {"key": key, "value": value}
    if sink_key is not None and sink_value is not None:
        keys |= {"sink_key": sink_key, "sink_value": sink_value}
    for name, tensor in {"query": query, **keys}.items():
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
    if not (codebook is None or isinstance(codebook, Codebook)):
        raise TypeError(f"codebook must be a Codebook, but got {type(codebook).__name__}.")
    devices = {name: tensor.device for name, tensor in keys.items()}
    if codebook is not None:
        devices["codebook"] = codebook.parents.device
    for token, tokens, order in (("query", query, query_order), ("key", key, key_order)):
        if order is None:
            continue
        name = f"{token}_order"
        if not isinstance(order, Tensor):
            raise TypeError(f"{name} must be a tensor, but got {type(order).__name__}.")
        if order.dtype not in (torch.int32, torch.int64):
            raise TypeError(f"{name} must be int32 or int64, but got {order.dtype}.")
        if order.shape != tokens.shape[2:3]:
            raise ValueError(
                f"{name} must have shape ({tokens.shape[2]},), one entry per {token}, but got "
                f"{tuple(order.shape)}."
            )
        devices[name] = order.device
    for name, device in devices.items():
        if device != query.device:
            raise ValueError(
                f"{name} must be on the device of query, {query.device}, but got {device}."
            )
    batch, heads, _, head_dim = query.shape
    shapes = [
        (name, word, tensor.shape[dim], expected)
        for dim, word, expected in (
            (0, "batch size", batch),
            (1, "number of heads", heads),
            (3, "head dim", head_dim),
        )
        for name, tensor in keys.items()
    ]
    if codebook is not None:
        shapes += [
            ("codebook", "number of heads", codebook.num_heads, heads),
            ("codebook", "head dim", codebook.head_dim, head_dim),
        ]
    for name, word, found, expected in shapes:
        if found != expected:
            raise ValueError(f"{name} must have the {word} of query, {expected}, but got {found}.")
    if value.shape[2] != key.shape[2]:
        raise ValueError(
            f"value must have as many tokens as key, {key.shape[2]}, but got {value.shape[2]}."
        )
    if sink_key is not None and sink_value is not None and sink_value.shape != sink_key.shape:
        raise ValueError(
            f"sink_value must have as many tokens as sink_key, {sink_key.shape[2]}, but got "
            f"{sink_value.shape[2]}."
        )

    check_int("num_parents", num_parents, 1, LARGEST_COUNT)
    check_int("num_children", num_children, 0, LARGEST_COUNT)
    check_int("num_refined", num_refined, 0, LARGEST_COUNT)
    check_num_updates(num_updates)
    check_int("query_tile", query_tile, 1, LARGEST_COUNT)
    if importance_tile is not None:
        check_int("importance_tile", importance_tile, 1, LARGEST_COUNT)
    check_exact_keys(exact_keys, importance_tile)
    if scale is not None and not isinstance(scale, int | float):
        raise TypeError(f"scale must be a number or None, but got {type(scale).__name__}.")
    if scale is not None and not abs(scale) <= LARGEST_SCALE:
        raise ValueError(f"scale must be finite, but got {scale}.")
    if codewords not in CODEWORDS:
        raise ValueError(f"codewords must be one of {', '.join(CODEWORDS)}, but got {codewords!r}.")
    if codewords == "stored" and codebook is None:
        raise ValueError('codewords="stored" needs a codebook.')
    if num_refined > num_parents:
        raise ValueError(
            f"num_refined must be at most num_parents, {num_parents}, but got {num_refined}."
        )
    if num_refined > 0 and num_children == 0:
        raise ValueError(
            f"num_refined must be 0 without children (flat VQ), but got {num_refined}."
        )
