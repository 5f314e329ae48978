"""PISA (arXiv 2602.01077): a share of the blocks is exact, the others are expanded around means."""

from collections.abc import Sequence
from math import ceil
from typing import Any

import torch
from torch import Tensor
from typing_extensions import Self

from eval.methods.base import KEYS, TRANSFORMER_IMAGES, TRANSFORMER_STEP
from eval.methods.peer import Peer
from eval.methods.pooled import BLOCK, pooled_columns


class Pisa(Peer):
    """`pisa@.15`, the published first order: 0.15 of the blocks are exact."""

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
        return pooled_columns(num_tokens, max(1, int(self.setting * ceil(num_tokens / BLOCK))))


class PisaZeroth(Pisa):
    """`pisa0@.15`, its later zeroth-order version, without the Taylor term."""

    kind, example = "pisa0", "pisa0@.15"
    places = (TRANSFORMER_STEP, KEYS)
    title = "PISA, zeroth order, {:.0%} of the blocks"
    module = "pisa_hyvideo_kernels.piecewise_sparse_attn_0th"
    install = (
        "clone https://github.com/NVlabs/Sana, check out 7d613e1, and put "
        "techniques/sparse_backends/pisa_hyvideo on PYTHONPATH"
    )

    @classmethod
    def prepare(cls, module: Any) -> None:
        """Nothing: this version has no descriptors."""

    def call(self, module: Any, inputs: Sequence[Tensor], scale: float) -> Tensor:
        options = {"density": self.setting, "block_size": BLOCK, "scale": scale}
        return module.piecewise_attention(*inputs, **options)
