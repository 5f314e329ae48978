"""The self-attention of any model in PyTorch: see its calls, or answer them."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

Arguments = tuple[Any, ...]


class Call(NamedTuple):
    """One call of `scaled_dot_product_attention`: query, key and value of one shape, (B, H, N, D).

    `layer` is the name of the innermost module that was running.
    """

    layer: str
    query: Tensor
    key: Tensor
    value: Tensor
    scale: float | None

    @property
    def num_tokens(self) -> int:
        return self.key.shape[2]


@contextmanager
def answered(
    model: nn.Module, answer: Callable[[Call], Tensor], *, min_tokens: int
) -> Iterator[None]:
    """Let `answer` compute the model's self-attention inside the `with` block.

    Calls with a mask, a causal one included, with fewer tokens, or of queries and keys that differ
    in number stay as they are.
    """
    running: list[str] = []

    def enter(name: str) -> Callable[..., None]:
        return lambda module, inputs: running.append(name)

    def leave(module: nn.Module, inputs: Arguments, output: Any) -> None:
        running.pop()

    with ExitStack() as stack:
        for name, module in model.named_modules():
            stack.enter_context(module.register_forward_pre_hook(enter(name)))
            stack.enter_context(module.register_forward_hook(leave, always_call=True))
        stack.enter_context(_SelfAttention(running, answer, min_tokens))
        yield


class _SelfAttention(TorchFunctionMode):
    def __init__(
        self, running: list[str], answer: Callable[[Call], Tensor], min_tokens: int
    ) -> None:
        super().__init__()
        self.running, self.answer, self.min_tokens = running, answer, min_tokens

    def __torch_function__(
        self, function: Any, types: Any, args: Arguments = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if function is F.scaled_dot_product_attention and self.running:
            call = self._self_attention(*args, **kwargs)
            if call is not None:
                return self.answer(call)
        return function(*args, **kwargs)

    def _self_attention(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Call | None:
        if attn_mask is not None or is_causal or not query.shape == key.shape == value.shape:
            return None
        if query.ndim != 4 or query.shape[2] < self.min_tokens:
            return None
        return Call(self.running[-1], query, key, value, scale)
