"""Peers with their own kernels, on a GPU: PISA and Sol-Attn.

    pisa@.15   PISA (arXiv 2602.01077), the published first order: 0.15 of the blocks are exact
    pisa0@.15  its later zeroth-order version, without the Taylor term
    sol@1.3    Sol-Attn (arXiv 2607.24027): blocks more than 1.3 standard deviations above the mean
               are exact, like a block itself and its neighbours

Both cut the tokens into blocks of `BLOCK`, the last one shorter, so any number of tokens can be
measured unchanged. Their code is not in this repository; `_PEERS` says where it is.

Blocks need neighbouring tokens to be adjacent. Models that use these kernels reorder their tokens
once for all layers, so reordering and input layout are not timed. Everything else is: means,
scores, the choice of blocks. Their autotuners ignore how many blocks are exact, so each setting
gets its own cache.

Shapes: B batch, H heads, N tokens, D head dim.
"""

from collections.abc import Sequence
from functools import cache
from importlib import import_module
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from eval.keys.pooled import BLOCK
from eval.names import PISA, PISA_ZEROTH, SOL


class Peer(NamedTuple):
    """Where a peer's kernels are, how to install them, and what they take."""

    module: str
    install: str
    dtypes: tuple[torch.dtype, ...]


_HALF = (torch.float16, torch.bfloat16)
_PEERS = {
    PISA: Peer(
        "piecewise_attn.kernels.piecewise_sparse_attn_tma",
        "git clone https://github.com/xie-lab-ml/piecewise-sparse-attention, then pip install -e "
        "piecewise-sparse-attention",
        _HALF,
    ),
    PISA_ZEROTH: Peer(
        "pisa_hyvideo_kernels.piecewise_sparse_attn_0th",
        "clone https://github.com/NVlabs/Sana, check out 7d613e1, and put "
        "techniques/sparse_backends/pisa_hyvideo on PYTHONPATH",
        _HALF,
    ),
    SOL: Peer(
        "sol_attn.triton_ref.fwd",
        "pip install 'sol-attn @ git+https://github.com/NVlabs/Sana@sol-engine"
        "#subdirectory=techniques/sparse_backends'",
        (torch.bfloat16,),
    ),
}


def check_peer(name: str, source: str, weight: Tensor) -> None:
    """Refuse a peer that cannot run where a model with this weight does.

    Raises:
        ImportError: its package is missing.
        ValueError: the device is not a GPU, or the peer does not take the dtype.
    """
    if not weight.is_cuda:
        raise ValueError(f"{name} only runs on a GPU: --device cuda.")
    if weight.dtype not in _PEERS[source].dtypes:
        dtypes = " or ".join(str(dtype).removeprefix("torch.") for dtype in _PEERS[source].dtypes)
        raise ValueError(f"{name} only takes {dtypes}: --dtype {dtypes.split()[-1]}.")
    load_peer(source)


def attention_in_order(
    source: str, setting: float, inputs: Sequence[Tensor], scale: float | None = None
) -> Tensor:
    """Attention (B, H, N, D) with a peer's kernels over the tensors from `arranged`."""
    scale = inputs[0].shape[-1] ** -0.5 if scale is None else scale
    module = load_peer(source)
    _tune_apart(module, (source, setting, inputs[0].shape))
    if source == SOL:
        return module.sol_attn(*inputs, tau=setting, scale=scale).transpose(1, 2)
    attend = module.piecewise_sparse_attention if source == PISA else module.piecewise_attention
    return attend(*inputs, density=setting, block_size=BLOCK, scale=scale)


def arranged(source: str, *tensors: Tensor, query_order: Tensor | None = None) -> list[Tensor]:
    """Contiguous tensors (B, H, N, D) in an order of tokens; for Sol-Attn (B, N, H, D)."""
    if query_order is not None:
        order = query_order.long()
        tensors = tuple(x[:, :, order] for x in tensors)
    return [(x.transpose(1, 2) if source == SOL else x).contiguous() for x in tensors]


@cache
def load_peer(source: str) -> ModuleType:
    """Import the module with a peer's kernels, ready for calls.

    Raises:
        ImportError: its package is missing.
    """
    peer = _PEERS[source]
    try:
        module: Any = import_module(peer.module)
    except ModuleNotFoundError as error:
        package = peer.module.partition(".")[0]
        raise ImportError(
            f"{source} needs the package {package}: {peer.install} ({error})."
        ) from error
    if source == SOL:
        # The check only allows head dim 128, but the Triton kernels also take 64: padding to 128
        # would double their work.
        module._validate_inputs = lambda query, *_: torch.cuda.get_device_capability(query.device)
    elif source == PISA:  # its descriptors need memory on the device
        module.triton.set_allocator(
            lambda size, alignment, stream: torch.empty(size, dtype=torch.int8, device="cuda")
        )
    return module


_tuned: dict[Any, dict[Any, Any]] = {}


def _tune_apart(module: ModuleType, setting: tuple[Any, ...]) -> None:
    """Give a module's kernels the tuning cache of this setting."""
    from triton.runtime import Autotuner

    for name, kernel in vars(module).items():
        if isinstance(kernel, Autotuner):
            kernel.cache = _tuned.setdefault((name, *setting), {})
