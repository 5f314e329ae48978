"""The operators behind `avq_attention`, which compilers, exporters and counters see.

Their arguments are those of `schema`.
"""

from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from avq_diffusers.attention import torch_forward
from avq_diffusers.attention.autograd import make_differentiable
from avq_diffusers.attention.flops import forward_flops
from avq_diffusers.attention.guarded import guarded, kernels
from avq_diffusers.attention.schema import CALL, call_of, query_tile_of, shapes_of
from avq_diffusers.attention.settled import Settled, settled_call
from avq_diffusers.attention.tensors import Tensors, empty_shown, empty_tokens
from avq_diffusers.config import Spec


def by_pytorch(tensors: Tensors, spec: Spec) -> tuple[Tensor, Tensor]:
    """Attention by PyTorch, on any device: `Attended.output` and `Attended.shown`."""
    # Autocast would compute the float32 products in half precision.
    with torch.autocast(tensors.query.device.type, enabled=False):
        return torch_forward.avq_attention(tensors.with_wide_codewords(), spec)


def by_kernels(tensors: Tensors, spec: Spec, call: Settled) -> tuple[Tensor, Tensor]:
    """`by_pytorch` by kernels, unless `guarded` rules them out.

    Without a codebook, later calls repeat the first one's launches.
    """
    if call.repeat is not None and tensors.query.device.index == torch.cuda.current_device():
        repeated = call.repeat(tensors)
        if repeated is not None:
            return repeated
    found = guarded(
        tensors,
        spec,
        lambda stored: list(kernels().call.kernel_attention(tensors, stored, spec)),
        lambda part: [by_pytorch(part, spec)[0]],
    )
    if found is None:
        return by_pytorch(tensors, spec)
    if call.repeat is None and _is_repeatable(tensors):
        call.repeat = kernels().call.repetition(tensors, spec)
    return found[0], found[1]


def _is_repeatable(tensors: Tensors) -> bool:
    """Whether launches are all of a call, which has no table then, and have been checked, as in a
    CUDA graph they may not be."""
    is_whole = tensors.parents is None
    return is_whole and tensors.query.is_cuda and not torch.cuda.is_current_stream_capturing()


@torch.library.custom_op(
    "avq_diffusers::attention", mutates_args=(), schema=f"({CALL}) -> (Tensor, Tensor)"
)
def torch_attention(*arguments: Any) -> tuple[Tensor, Tensor]:
    """`by_pytorch`, as an operator."""
    return by_pytorch(*call_of(arguments))


@torch.library.custom_op(
    "avq_diffusers::kernel_attention", mutates_args=(), schema=f"({CALL}) -> (Tensor, Tensor)"
)
def kernel_attention(*arguments: Any) -> tuple[Tensor, Tensor]:
    """`by_kernels`, as an operator."""
    tensors, spec = call_of(arguments)
    return by_kernels(tensors, spec, settled_call(tensors, spec, find=lambda: "triton"))


make_differentiable(torch_attention, by_kernels=False)
make_differentiable(kernel_attention, by_kernels=True)


@kernel_attention.register_fake
@torch_attention.register_fake
def _(query: Tensor, *others: Any) -> tuple[Tensor, Tensor]:
    return empty_tokens(query), empty_shown(query, query_tile_of(others))


@register_flop_formula([x._opoverload.overloadpacket for x in (torch_attention, kernel_attention)])
def _(*arguments: Any, **others: Any) -> int:
    return forward_flops(*shapes_of(arguments))
