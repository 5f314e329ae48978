"""Exact attention: PyTorch's default."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from avq_diffusers.attention.exact import keys_and_values
from avq_diffusers.attention.tensors import Tensors
from eval.methods.base import IMAGES, KEYS, STEPS, Word


class Exact(Word):
    """Exact attention."""

    kind = example = "exact"
    places = (*IMAGES, *STEPS, KEYS)
    title = "SDPA default"

    def columns(self, num_tokens: int) -> int:
        return num_tokens

    def applied(self, pipe: Any, levels: tuple[int, ...]) -> AbstractContextManager[None]:
        return nullcontext()

    def on_keys(self, call: Tensors, *, timed: bool) -> Callable[[], Tensor]:
        tokens = call.query, *keys_and_values(call)
        return partial(F.scaled_dot_product_attention, *tokens, scale=call.scale)
