"""A model's self-attention, layer by layer: observe its calls, or answer them."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from math import isqrt
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from avq_diffusers import AVQConfig, select_layers
from avq_diffusers.attention.api import attend
from avq_diffusers.attention.orders import query_order
from avq_diffusers.attention.tensors import Attended, Tensors
from avq_diffusers.config import Spec
from avq_diffusers.hosts import attention_replaced


class Call(NamedTuple):
    """One call of a layer, in the form of `avq_attention`.

    Sinks are the tokens beside the grid: text, CLS and registers.
    """

    layer: str
    query: Tensor
    key: Tensor
    value: Tensor
    sink_key: Tensor | None = None
    sink_value: Tensor | None = None
    query_order: Tensor | None = None
    key_order: Tensor | None = None
    scale: float | None = None

    @property
    def num_tokens(self) -> int:
        """The grid's tokens."""
        return self.key.shape[2]

    @property
    def arguments(self) -> dict[str, Any]:
        """Arguments of `avq_attention`."""
        return {name: value for name, value in self._asdict().items() if name != "layer"}

    @property
    def columns(self) -> tuple[Tensor, Tensor]:
        """All keys and values, the grid's first."""
        if self.sink_key is None or self.sink_value is None:
            return self.key, self.value
        return (
            torch.cat([self.key, self.sink_key], dim=2),
            torch.cat([self.value, self.sink_value], dim=2),
        )

    def exact(self) -> Tensor:
        """Exact attention, in float32 or wider."""
        dtype = torch.promote_types(self.query.dtype, torch.float32)
        tensors = (x.to(dtype) for x in (self.query, *self.columns))
        return F.scaled_dot_product_attention(*tensors, scale=self.scale)


def joined(call: Call, frames: int) -> Call:
    """Join a call on square frames (B * frames, H, N, D) to one on videos (B, H, frames * N, D)."""

    def join(tokens: Tensor | None) -> Tensor | None:
        if tokens is None:
            return None
        return tokens.unflatten(0, (-1, frames)).transpose(1, 2).flatten(2, 3)

    names = "query", "key", "value", "sink_key", "sink_value"
    side = isqrt(call.num_tokens)
    order = query_order(side, side, device=call.query.device, frames=frames)
    tensors = {name: join(getattr(call, name)) for name in names}
    return call._replace(**tensors, query_order=order, key_order=order)


def answered(
    model: nn.Module, answer: Callable[[Call], Tensor], *, min_tokens: int, frames: int = 1
) -> AbstractContextManager[None]:
    """Let `answer` compute the layers that AVQ could run in, inside the `with` block.

    Calls on grids with fewer tokens are exact, like those that AVQ would not serve. Each `frames`
    entries of the batch form a video, whose tokens all attend to each other.

    Raises:
        TypeError: `model` has no such layer.
    """

    def answer_call(layer: str, tensors: Tensors, spec: Spec, backend: str) -> Attended:
        known = {name: x for name, x in tensors._asdict().items() if name in Call._fields}
        call = Call(layer, **known)
        call = call if frames == 1 else joined(call, frames)
        output = answer(call) if call.num_tokens >= min_tokens else call.exact()
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
        noted.append(mean_columns(attended))
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


def mean_columns(attended: Attended) -> float:
    """Codewords and keys of the grid that a query tile of an AVQ call attends to, on average."""
    assert attended.shown is not None
    return float(attended.shown.sum(dim=-1).double().mean())
