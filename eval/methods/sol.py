"""Sol-Attn (arXiv 2607.24027): blocks above a threshold are exact."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from eval.methods.base import KEYS, TRANSFORMER_STEP
from eval.methods.peer import Peer


class Sol(Peer):
    """`sol@1.3`: blocks more than 1.3 standard deviations above the mean are exact, like a block
    itself and its neighbours."""

    kind, example = "sol", "sol@1.3"
    places = (TRANSFORMER_STEP, KEYS)
    title = "Sol-Attn, threshold {:g}"
    module = "sol_attn.triton_ref.fwd"
    install = (
        "pip install 'sol-attn @ git+https://github.com/NVlabs/Sana@sol-engine"
        "#subdirectory=techniques/sparse_backends'"
    )
    dtypes = (torch.bfloat16,)

    @classmethod
    def prepare(cls, module: Any) -> None:
        # The check only allows head dim 128, but the Triton kernels also take 64: padding to 128
        # would double their work.
        module._validate_inputs = lambda query, *_: torch.cuda.get_device_capability(query.device)

    def arranged(self, *tensors: Tensor) -> list[Tensor]:
        """The tensors as (B, N, H, D)."""
        return [x.transpose(1, 2).contiguous() for x in tensors]

    def call(self, module: Any, inputs: Sequence[Tensor], scale: float) -> Tensor:
        return module.sol_attn(*inputs, tau=self.setting, scale=scale).transpose(1, 2)
