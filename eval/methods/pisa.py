"""PISA (arXiv 2602.01077): a share of the blocks is exact, the others are expanded around means."""

from collections.abc import Sequence
from math import ceil
from typing import Any

import torch
from torch import Tensor
from typing_extensions import Self

from eval.methods.base import KEYS, TRANSFORMER_IMAGES, TRANSFORMER_STEP
from eval.methods.peer import Peer

BLOCK = 64


class Pisa(Peer):
    """`pisa@.15`: 0.15 of the blocks are exact."""

    kind, example = "pisa", "pisa@.15"
    places = (TRANSFORMER_IMAGES, TRANSFORMER_STEP, KEYS)
    title = "PISA, {:.0%} of the blocks"
    module = "piecewise_attn.kernels.piecewise_sparse_attn_tma"
    install = (
        "git clone https://github.com/xie-lab-ml/piecewise-sparse-attention, then pip install -e "
        "piecewise-sparse-attention"
    )

    @classmethod
    def parse(cls, name: str, levels: tuple[int, ...]) -> Self | None:
        found = super().parse(name, levels)
        if found is not None and not 0 < found.setting <= 1:
            raise ValueError(f"a density of pisa is above 0 and at most 1, but got {name!r}.")
        return found

    @classmethod
    def prepare(cls, module: Any) -> None:
        module.triton.set_allocator(  # its descriptors need memory on the device
            lambda size, alignment, stream: torch.empty(size, dtype=torch.int8, device="cuda")
        )

    def call(self, module: Any, inputs: Sequence[Tensor], scale: float) -> Tensor:
        options = {"density": self.setting, "block_size": BLOCK, "scale": scale}
        return module.piecewise_sparse_attention(*inputs, **options)

    def columns(self, num_tokens: int) -> int:
        num_blocks = ceil(num_tokens / BLOCK)
        num_exact = max(1, int(self.setting * num_blocks))
        return num_blocks - num_exact + min(num_exact * BLOCK, num_tokens)
