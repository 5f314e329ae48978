"""Query orders of a grid of tokens, which query tiles are cut from.

`order[i]` is the raster index (row * width + column) of the token at position i; a video's frames
are concatenated. Keys and values are never reordered.
"""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from avq_diffusers.config import QUERY_ORDERS

# Frames that a tile of a video spans: 128 tokens are about 8 x 4 x 4. On the keys of camera pans,
# errors are smaller than with 4 x 6 x 6 and as small as along a Hilbert curve in three dimensions.
_SLAB = 8


def query_order(
    height: int,
    width: int,
    kind: str = "gilbert",
    device: torch.device | str | None = None,
    frames: int = 1,
) -> Tensor:
    """Raster token index at each position of the order.

    Args:
        height: rows of the grid.
        width: columns of the grid.
        kind: `"gilbert"`, a space-filling curve with compact tiles on a grid of any size (paper,
            section Vector Quantization for (A)VQ-Attention), `"raster"` or `"random"`, which is the
            same at every call and on every device.
        device: device of the order; None is torch's default device.
        frames: frames of a video. Its curve is a frame's, with several tokens in time per step.

    Returns:
        (frames * height * width,) int32. Outside torch.compile this is a cached tensor: do not
        write to it.

    Raises:
        ValueError: `height`, `width` or `frames` is below 1, or `kind` is unknown.
    """
    if height < 1 or width < 1:
        raise ValueError(f"height and width must be at least 1, but got {height} x {width}.")
    if frames < 1:
        raise ValueError(f"frames must be at least 1, but got {frames}.")
    if kind not in QUERY_ORDERS:
        raise ValueError(f"kind must be one of {', '.join(QUERY_ORDERS)}, but got {kind!r}.")
    device = torch.empty(0).device if device is None else torch.device(device)
    if torch.compiler.is_compiling():
        return _query_order_op(height, width, kind, device, frames)
    return _cached(_build_order, height, width, kind, device, frames)


def joint_order(order: Tensor, num_text: int, *, text_first: bool) -> Tensor:
    """The order of a grid's tokens, followed by a text's tokens in their own order.

    Args:
        order: (N,) from `query_order`.
        num_text: T.
        text_first: whether the text comes before the grid in memory.

    Returns:
        (N + T,) int32. Outside torch.compile this is a cached tensor: do not write to it.
    """
    if torch.compiler.is_compiling():
        return _build_joint_order(order, num_text, text_first)
    return _cached(_build_joint_order, order, num_text, text_first)


def _build_joint_order(order: Tensor, num_text: int, text_first: bool) -> Tensor:
    text = torch.arange(num_text, device=order.device, dtype=order.dtype)
    if text_first:
        return torch.cat([order + num_text, text])
    return torch.cat([order, text + order.shape[0]])


@torch.library.custom_op("avq_diffusers::query_order", mutates_args=())
def _query_order_op(
    height: int, width: int, kind: str, device: torch.device, frames: int = 1
) -> Tensor:
    return _cached(_build_order, height, width, kind, device, frames).clone()


@_query_order_op.register_fake
def _(height: int, width: int, kind: str, device: torch.device, frames: int = 1) -> Tensor:
    return torch.empty(frames * height * width, dtype=torch.int32, device=device)


@lru_cache(maxsize=128)
def _cached(build: Callable[..., Tensor], *arguments: Any) -> Tensor:
    # A cached tensor outlives inference mode, fake tensor modes and CUDA graph pools. These are all
    # per thread, so a new thread has none of them.
    with ThreadPoolExecutor(max_workers=1) as worker:
        return worker.submit(build, *arguments).result()


def _build_order(height: int, width: int, kind: str, device: torch.device, frames: int) -> Tensor:
    if kind == "gilbert":
        order = _in_time(_gilbert_order(height, width), frames)
    elif kind == "raster":
        order = torch.arange(frames * height * width, device="cpu")
    else:
        generator = torch.Generator().manual_seed(0)
        order = torch.randperm(frames * height * width, generator=generator, device="cpu")
    return order.to(device, torch.int32)


def _gilbert_order(height: int, width: int) -> Tensor:
    if width >= height:
        columns, rows = _gilbert_path(width, height).unbind(1)
    else:
        rows, columns = _gilbert_path(height, width).unbind(1)
    return rows * width + columns


def _in_time(order: Tensor, frames: int) -> Tensor:
    """The order (frames * N,) of a video whose frames have `order` (N,).

    The video is cut into slabs of at most `_SLAB` frames. In each, the path follows a frame's
    order and visits all of the slab's frames at every token, alternately up and down. Every second
    slab is walked backwards, so that the next one starts where it ends.
    """
    slabs = torch.arange(frames, device="cpu").tensor_split(-(-frames // _SLAB))
    order_of_slabs = []
    for i, slab in enumerate(slabs):
        tokens = len(order) * slab + (order if i % 2 == 0 else order.flip(0))[:, None]
        tokens[1::2] = tokens[1::2].flip(1)
        order_of_slabs.append(tokens.flatten())
    return torch.cat(order_of_slabs)


@lru_cache(maxsize=256)
def _gilbert_path(length: int, breadth: int) -> Tensor:
    """Path from (0, 0) to (length - 1, 0) through every cell, int64 (length * breadth, 2).

    The generalized Hilbert curve by J. Cerveny (github.com/jakubcerveny/gilbert). A long rectangle
    is split into two end to end; any other goes up, across and down again. Halves have even sizes,
    because only those start and end on the same side.
    """
    if length == 1 or breadth == 1:
        path = torch.zeros(length * breadth, 2, dtype=torch.int64, device="cpu")
        path[:, 0 if breadth == 1 else 1] = torch.arange(length * breadth, device="cpu")
        return path
    if 2 * length > 3 * breadth:
        half = _half(length)
        rest = _gilbert_path(length - half, breadth) + torch.tensor((half, 0), device="cpu")
        return torch.cat([_gilbert_path(half, breadth), rest])
    half_length, half_breadth = length // 2, _half(breadth)
    up = _gilbert_path(half_breadth, half_length).flip(1)
    across = _gilbert_path(length, breadth - half_breadth)
    across = across + torch.tensor((0, half_breadth), device="cpu")
    corner = torch.tensor((half_breadth - 1, length - 1), device="cpu")
    down = corner - _gilbert_path(half_breadth, length - half_length)
    return torch.cat([up, across, down.flip(1)])


def _half(size: int) -> int:
    half = size // 2
    return half + 1 if half % 2 and size > 2 else half
