"""Exact attention, and controls: tokens that see themselves only, and steps without attention."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from avq_diffusers.attention.exact import keys_and_values
from avq_diffusers.attention.tensors import Attended, Tensors
from avq_diffusers.config import Spec
from eval.methods.base import IMAGES, KEYS, STEPS, Word
from eval.methods.running import all_layers_by


class Exact(Word):
    """PyTorch's default."""

    kind = example = "exact"
    places = (*IMAGES, *STEPS, KEYS)
    title = "SDPA default"

    def columns(self, num_tokens: int) -> int:
        return num_tokens

    def applied(self, pipe: Any) -> AbstractContextManager[None]:
        return nullcontext()

    def on_keys(self, call: Tensors, *, timed: bool) -> Callable[[], Tensor]:
        tokens = call.query, *keys_and_values(call)
        return partial(F.scaled_dot_product_attention, *tokens, scale=call.scale)


class ValueProjection(Word):
    """Negative control: each token gets its own value."""

    kind = example = "value-projection"
    places = (*IMAGES, KEYS)

    def columns(self, num_tokens: int) -> int:
        return 0

    def applied(self, pipe: Any) -> AbstractContextManager[None]:
        return all_layers_by(pipe, own_values, self.levels)

    def on_keys(self, call: Tensors, *, timed: bool) -> Callable[[], Tensor]:
        values = keys_and_values(call)[1]
        return lambda: values[:, :, : call.query.shape[2]]


class SpeedLimit(Word):
    """The fastest possible attention: projections run, each token takes its own value."""

    kind = example = "limit"
    places = STEPS
    title = "limit"


def own_values(tensors: Tensors, spec: Spec, backend: str) -> Attended:
    """Each grid token attends to itself and the text only, or gets its own value without text."""
    if tensors.sink_key is None:
        return Attended(tensors.value, ValueProjection.kind)
    query, num_tokens = tensors.query, tensors.key.shape[2]
    key, value = keys_and_values(tensors)
    rows = tensors.query_order[:num_tokens].long()  # the text's come after them
    mask = torch.ones(query.shape[2], key.shape[2], dtype=torch.bool, device=query.device)
    mask[rows, :num_tokens] = False
    mask[rows, tensors.key_order.long()] = True
    output = F.scaled_dot_product_attention(query, key, value, mask, scale=tensors.scale)
    return Attended(output, ValueProjection.kind)
