"""Peers with their own kernels, on a GPU.

Peers cut the tokens into blocks, the last one shorter, so any number of tokens can be
measured unchanged. Their code is not in this repository; each class says where it is.

Blocks need neighbouring tokens to be adjacent. Models that use these kernels reorder their tokens
once for all layers, so reordering and input layout are not timed. Everything else is: means,
scores, the choice of blocks. Their autotuners ignore how many blocks are exact, so each setting
gets its own cache.

Shapes: B batch, H heads, N tokens, D head dim.
"""

from abc import abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import cache, partial
from importlib import import_module
from types import ModuleType
from typing import Any, ClassVar

import torch
from torch import Tensor

from avq_diffusers.attention.exact import keys_and_values
from avq_diffusers.attention.tensors import Attended, Tensors
from avq_diffusers.config import Spec
from eval.methods.base import Word
from eval.methods.running import all_layers_by

HALF = (torch.float16, torch.bfloat16)


class Peer(Word):
    """A peer: attention over one sequence, the tokens of the grid in query order, then others.

    Attributes:
        module: where its kernels are.
        install: how to install them.
        dtypes: dtypes that it takes.
    """

    module: ClassVar[str]
    install: ClassVar[str]
    dtypes: ClassVar[tuple[torch.dtype, ...]] = HALF
    takes_setting = True

    @property
    def scheme(self) -> str:
        return self.title.rpartition(", ")[0]  # without the setting

    def check(self, weight: Tensor) -> None:
        name = f"{self.source}@{self.setting:g}"
        if not weight.is_cuda:
            raise ValueError(f"{name} only runs on a GPU: --device cuda.")
        if weight.dtype not in self.dtypes:
            dtypes = " or ".join(str(dtype).removeprefix("torch.") for dtype in self.dtypes)
            raise ValueError(f"{name} only takes {dtypes}: --dtype {dtypes.split()[-1]}.")
        load_peer(type(self))

    @classmethod
    def prepare(cls, module: Any) -> None:
        """Make the imported module ready for calls."""

    @abstractmethod
    def call(self, module: Any, inputs: Sequence[Tensor], scale: float) -> Tensor:
        """Attention (B, H, N, D) over tensors from `arranged`."""

    def arranged(self, *tensors: Tensor) -> list[Tensor]:
        """The tensors (B, H, N, D) in the layout that it takes."""
        return [x.contiguous() for x in tensors]

    def attend(self, inputs: Sequence[Tensor], scale: float | None = None) -> Tensor:
        """Attention (B, H, N, D) over tensors from `arranged`."""
        scale = inputs[0].shape[-1] ** -0.5 if scale is None else scale
        module = load_peer(type(self))
        _tune_apart(module, (self.source, self.setting, inputs[0].shape))
        return self.call(module, inputs, scale)

    def on_keys(self, call: Tensors, *, timed: bool) -> Callable[[], Tensor]:
        """Keys stand in for the missing queries of tokens beside the grid.

        A timed peer leaves its tokens in the order of blocks.
        """
        keys, values = keys_and_values(call)
        num_queries = call.query.shape[2]
        queries = torch.cat([call.query, keys[:, :, num_queries:]], dim=2)
        beside = torch.arange(call.key.shape[2], keys.shape[2], device=keys.device)
        order = torch.cat([call.key_order.long(), beside])
        inputs = self.arranged(*(x[:, :, order] for x in (queries, keys, values)))
        run = partial(self.attend, inputs, call.scale)
        return run if timed else lambda: in_order(run(), order)[:, :, :num_queries]

    def applied(self, pipe: Any) -> AbstractContextManager[None]:
        return all_layers_by(pipe, self._in_model, self.levels)

    def _in_model(self, tensors: Tensors, spec: Spec, backend: str) -> Attended:
        """Over the grid tokens in query order, followed by the text."""
        order, key_order = tensors.query_order.long(), tensors.key_order.long()
        query, key, value = tensors[:3]
        key, value = keys_and_values(
            tensors._replace(key=key[:, :, key_order], value=value[:, :, key_order])
        )
        output = self.attend(self.arranged(query[:, :, order], key, value), tensors.scale)
        return Attended(in_order(output, order), self.source)


def in_order(output: Tensor, order: Tensor) -> Tensor:
    """The output with its tokens back in their places."""
    found = torch.empty_like(output, memory_format=torch.contiguous_format)
    return found.index_copy_(2, order, output)


@cache
def load_peer(peer: type[Peer]) -> ModuleType:
    """Import the module with a peer's kernels, ready for calls.

    Raises:
        ImportError: its package is missing.
    """
    try:
        module = import_module(peer.module)
    except ModuleNotFoundError as error:
        package = peer.module.partition(".")[0]
        raise ImportError(
            f"{peer.kind} needs the package {package}: {peer.install} ({error})."
        ) from error
    peer.prepare(module)
    return module


_tuned: dict[Any, dict[Any, Any]] = {}


def _tune_apart(module: ModuleType, setting: tuple[Any, ...]) -> None:
    """Give a module's kernels the tuning cache of this setting."""
    from triton.runtime import Autotuner

    for name, kernel in vars(module).items():
        if isinstance(kernel, Autotuner):
            kernel.cache = _tuned.setdefault((name, *setting), {})
