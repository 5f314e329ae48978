"""Peers with kernels of their own, on a GPU: PISA and Sol-Attn.

    pisa@.15   PISA (arXiv 2602.01077), the published first order: .15 of the blocks are exact
    pisa0@.15  its later version of zeroth order, without the Taylor term
    sol@1.3    Sol-Attn (arXiv 2607.24027): blocks more than 1.3 standard deviations above the mean
               are exact, and so are a block itself and its neighbours

Both cut the tokens into blocks of `BLOCK`, the last one shorter, so any number of tokens is
measured as it is. Their code is not in this repository; `_INSTALL` says where it is.

Blocks need tokens in an order of neighbours. Models that use these kernels reorder their tokens
once for all layers, so the order and the layout of the inputs are not timed. All else is: means,
scores, the choice of blocks. Their autotuners forget how many blocks are exact, so each setting has
a cache of its own.

Shapes: B batch, H heads, N tokens, D head dim, J blocks.
"""

from collections.abc import Callable, Sequence
from functools import cache, partial
from importlib import import_module
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from eval.keys.pooled import BLOCK, cut
from eval.names import PISA, PISA_ZEROTH, SOL

_MODULES = {
    PISA: "piecewise_attn.kernels.piecewise_sparse_attn_tma",
    PISA_ZEROTH: "pisa_hyvideo_kernels.piecewise_sparse_attn_0th",
    SOL: "sol_attn.triton_ref.fwd",
}
_INSTALL = {
    PISA: "git clone https://github.com/xie-lab-ml/piecewise-sparse-attention, then pip install -e "
    "piecewise-sparse-attention",
    PISA_ZEROTH: "clone https://github.com/NVlabs/Sana, check out 7d613e1, and put "
    "techniques/sparse_backends/pisa_hyvideo on PYTHONPATH",
    SOL: "pip install 'sol-attn @ git+https://github.com/NVlabs/Sana@sol-engine"
    "#subdirectory=techniques/sparse_backends'",
}
_DTYPES = {
    PISA: (torch.float16, torch.bfloat16),
    PISA_ZEROTH: (torch.float16, torch.bfloat16),
    SOL: (torch.bfloat16,),
}
_SOL_HEAD_DIMS = (64, 128)


def check_peer(name: str, source: str, weight: Tensor) -> None:
    """Refuse a peer that cannot run where a model with this weight does.

    Raises:
        ImportError: its package is missing.
        ValueError: the device is no GPU, or it does not take the dtype.
    """
    if not weight.is_cuda:
        raise ValueError(f"{name} runs on a GPU only: --device cuda.")
    if weight.dtype not in _DTYPES[source]:
        dtypes = " or ".join(str(dtype).removeprefix("torch.") for dtype in _DTYPES[source])
        raise ValueError(f"{name} takes {dtypes} only: --dtype {dtypes.split()[-1]}.")
    load_peer(source)


def peer_attention(
    source: str,
    setting: float,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    query_order: Tensor,
    scale: float | None = None,
) -> Tensor:
    """Attention by a peer's kernels, (B, H, N, D). The arguments are those of `prepared`."""
    order = query_order.long()
    output = prepared(source, setting, query, key, value, query_order=order, scale=scale)()
    return torch.empty_like(output).index_copy_(2, order, output)


def prepared(
    source: str,
    setting: float,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    query_order: Tensor,
    scale: float | None = None,
) -> Callable[[], Tensor]:
    """Arrange the inputs of a peer, and return its call, which is what is timed.

    Args:
        source: `PISA`, `PISA_ZEROTH` or `SOL`.
        setting: density of PISA, threshold of Sol-Attn.
        query, key, value: (B, H, N, D) on a GPU, of a dtype that `check_peer` allows.
        query_order: (N,) permutation of the tokens.
        scale: factor on the logits; None is 1 / sqrt(D).

    Returns:
        A call that returns (B, H, N, D), tokens in `query_order`.

    Raises:
        ValueError: Sol-Attn does not take the head dim.
    """
    head_dim = query.shape[-1]
    if source == SOL and head_dim not in _SOL_HEAD_DIMS:
        raise ValueError(f"{SOL} takes heads of 64 or 128 dims, but got {head_dim}.")
    inputs = arranged(source, query, key, value, query_order=query_order)
    return partial(attention_in_order, source, setting, inputs, scale)


def attention_in_order(
    source: str, setting: float, inputs: Sequence[Tensor], scale: float | None = None
) -> Tensor:
    """Attention (B, H, N, D) by a peer's kernels over what `arranged` returns."""
    scale = inputs[0].shape[-1] ** -0.5 if scale is None else scale
    module = load_peer(source)
    _tune_apart(module, (source, setting, inputs[0].shape))
    if source == SOL:
        return module.sol_attn(*inputs, tau=setting, scale=scale).transpose(1, 2)
    attend = module.piecewise_sparse_attention if source == PISA else module.piecewise_attention
    return attend(*inputs, density=setting, block_size=BLOCK, scale=scale)


def arranged(source: str, *tensors: Tensor, query_order: Tensor | None = None) -> list[Tensor]:
    """Tensors (B, H, N, D) in an order of tokens, contiguous: Sol-Attn has (B, N, H, D)."""
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
    name = _MODULES[source]
    package = name.partition(".")[0]
    try:
        module: Any = import_module(name)
    except ModuleNotFoundError as error:
        raise ImportError(
            f"{source} needs the package {package}: {_INSTALL[source]} ({error})."
        ) from error
    if source == SOL:
        # The check allows heads of 128 only, but the Triton kernels take 64 as well: zeros up to
        # 128 would double their work.
        module._validate_inputs = lambda query, *_: torch.cuda.get_device_capability(query.device)
    elif source == PISA:  # its descriptors need memory on the device
        module.triton.set_allocator(
            lambda size, alignment, stream: torch.empty(size, dtype=torch.int8, device="cuda")
        )
    return module


_tuned: dict[Any, dict[Any, Any]] = {}


def _tune_apart(module: ModuleType, setting: tuple[Any, ...]) -> None:
    """Give the kernels of a module the choices that were tuned at this setting."""
    for name, kernel in _autotuners(module):
        kernel.cache = _tuned.setdefault((name, *setting), {})


@cache
def _autotuners(module: ModuleType) -> list[tuple[str, Any]]:
    from triton.runtime import Autotuner

    return [(name, x) for name, x in vars(module).items() if isinstance(x, Autotuner)]


def sol_exact_blocks(
    query: Tensor, key: Tensor, *, threshold: float, scale: float | None = None
) -> Tensor:
    """Which blocks of keys Sol-Attn takes exactly, by its rule in float32.

    The score of a block is the logit of the mean query and the mean key. It is compared with the
    mean over blocks plus `threshold` standard deviations, where channels of the mean keys are taken
    as independent.

    Args:
        query, key: (B, H, N, D) in the order of the blocks.
        threshold: in standard deviations.
        scale: factor on the logits; None is 1 / sqrt(D).

    Returns:
        Bools (B, H, J, J): for each block of queries, which blocks of keys.
    """
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    counts = block_counts(query.shape[2], query.device)
    queries, keys = (
        (cut(x.flatten(0, 1).float(), BLOCK).sum(dim=2) / counts[:, None]).unflatten(0, x.shape[:2])
        for x in (query, key)
    )
    centre, variance = keys.mean(dim=2), keys.var(dim=2, correction=0)
    scores = torch.einsum("bhid,bhjd->bhij", queries, keys - centre[:, :, None])
    deviation = torch.einsum("bhid,bhd->bhi", queries.square(), variance).sqrt()
    index = torch.arange(len(counts), device=query.device)
    near = (index[:, None] - index).abs() <= 1
    return (scale * scores > threshold * abs(scale) * deviation[..., None]) | near


def sol_columns(
    query: Tensor,
    key: Tensor,
    *,
    threshold: float,
    query_order: Tensor,
    scale: float | None = None,
) -> float:
    """Keys and block means that a query meets in Sol-Attn, the mean over queries' blocks."""
    query, key = (x[:, :, query_order.long()] for x in (query, key))
    exact = sol_exact_blocks(query, key, threshold=threshold, scale=scale)
    counts = block_counts(query.shape[2], query.device)
    return float(torch.where(exact, counts, 1.0).sum(dim=-1).mean())


def block_counts(num_tokens: int, device: torch.device) -> Tensor:
    """Tokens of each block (J,), float32."""
    starts = torch.arange(0, num_tokens, BLOCK, device=device)
    return (num_tokens - starts).clamp_max(BLOCK).float()
