"""A model's self-attention, layer by layer: observe its calls, or answer them."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from math import isqrt

import torch
from torch import Tensor, nn

from avq_diffusers import AVQConfig, select_layers
from avq_diffusers.attention.api import attend
from avq_diffusers.attention.exact import exact_attention
from avq_diffusers.attention.orders import query_order
from avq_diffusers.attention.tensors import NUM_TOKENS, Attended, Tensors, mean_columns
from avq_diffusers.config import Spec
from avq_diffusers.hosts import attention_replaced

Answer = Callable[[str, Tensors], Tensor]  # of a layer's name and the inputs of its call


def exactly(tensors: Tensors) -> Tensor:
    """Exact attention of a call, in float32 or wider."""
    dtype = torch.promote_types(tensors.query.dtype, torch.float32)
    tokens = (None if x is None else x.to(dtype) for x in tensors.tokens())
    return exact_attention(Tensors._make((*tokens, *tensors[NUM_TOKENS:])))


def joined(tensors: Tensors, frames: int) -> Tensors:
    """Join a call on square frames (B * frames, H, N, D) to one on videos (B, H, frames * N, D)."""

    def join(tokens: Tensor | None) -> Tensor | None:
        if tokens is None:
            return None
        return tokens.unflatten(0, (-1, frames)).transpose(1, 2).flatten(2, 3)

    side = isqrt(tensors.key.shape[2])
    order = query_order(side, side, device=tensors.query.device, frames=frames)
    whole = Tensors._make((*map(join, tensors.tokens()), *tensors[NUM_TOKENS:]))
    return whole._replace(query_order=order, key_order=order)


def answered(
    model: nn.Module, answer: Answer, *, min_tokens: int, frames: int = 1
) -> AbstractContextManager[None]:
    """Let `answer` compute the layers that AVQ could run in, inside the `with` block.

    Sinks are the tokens beside the grid: text, CLS and registers. Calls on grids with fewer tokens
    are exact, like those that AVQ would not serve. Each `frames` entries of the batch form a video,
    whose tokens all attend to each other.

    Raises:
        TypeError: `model` has no such layer.
    """

    def answer_call(layer: str, tensors: Tensors, spec: Spec, backend: str) -> Attended:
        call = tensors if frames == 1 else joined(tensors, frames)
        output = answer(layer, call) if call.key.shape[2] >= min_tokens else exactly(call)
        output = output.unflatten(2, (frames, -1)).transpose(1, 2).flatten(0, 1)
        return Attended(output.to(tensors.query.dtype), "eval")

    layers = select_layers(model)
    config = AVQConfig(levels=tuple(sorted({layer.level for layer in layers})))
    functions = {layer.name: partial(answer_call, layer.name) for layer in layers}
    return attention_replaced(model, functions, config)


@contextmanager
def columns_noted(model: nn.Module) -> Iterator[list[float]]:
    """Note the `mean_columns` of every AVQ call of a model, inside the `with` block."""
    noted: list[float] = []

    def attend_and_note(tensors: Tensors, spec: Spec, backend: str) -> Attended:
        attended = attend(tensors, spec, backend)
        noted.append(mean_columns(attended.shown))
        return attended

    layers = [layer.avq_state for layer in select_layers(model)]
    states = [state for state in layers if state is not None and state.function is None]
    for state in states:
        state.function = attend_and_note
    try:
        yield noted
    finally:
        for state in states:
            state.function = None


def relative_error(output: Tensor, exact: Tensor) -> float:
    """The relative error |output - exact| / |exact|."""
    exact = exact.float()
    return float((output.float() - exact).norm() / exact.norm())
