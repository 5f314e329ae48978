"""The gradients of the attention operators, by an operator of their own."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch._library.custom_ops import CustomOpDef
from torch.utils.flop_counter import register_flop_formula

from avq_diffusers.attention import torch_backward
from avq_diffusers.attention.flops import backward_flops
from avq_diffusers.attention.guarded import guarded, kernels
from avq_diffusers.attention.schema import CALL, call_of, shapes_of
from avq_diffusers.attention.tensors import NUM_TOKENS, Tensors, empty_tokens
from avq_diffusers.config import Spec


@torch.library.custom_op(
    "avq_diffusers::attention_backward",
    mutates_args=(),
    schema=f"(Tensor grad_output, {CALL}, bool[] needs_grad, bool by_kernels) -> Tensor[]",
)
def _attention_backward(grad_output: Tensor, *arguments: Any) -> list[Tensor]:
    *call, needs_grad, by_kernels = arguments
    tensors, spec = call_of(call)
    if by_kernels and kernels().gradients.serves(tensors.query, means=spec.means):
        every = [x is not None for x in tensors.tokens()]
        found = guarded(
            tensors,
            spec,
            lambda stored: kernels().gradients.kernel_gradients(grad_output, tensors, stored, spec),
            lambda part: _by_pytorch(grad_output[-len(part.query) :], part, spec, every),
            of="gradients",
        )
        if found is not None:
            return [grad for grad, needed in zip(found, needs_grad, strict=False) if needed]
    return _by_pytorch(grad_output, tensors, spec, needs_grad)


def _by_pytorch(
    grad_output: Tensor, tensors: Tensors, spec: Spec, needs_grad: Sequence[bool]
) -> list[Tensor]:
    with torch.autocast(tensors.query.device.type, enabled=False):
        tensors = tensors.with_wide_codewords()
        return torch_backward.gradients(grad_output, tensors, spec, needs_grad)


@_attention_backward.register_fake
def _(grad_output: Tensor, *arguments: Any) -> list[Tensor]:
    inputs = zip(arguments[:NUM_TOKENS], arguments[-2], strict=True)
    return [empty_tokens(x) for x, needed in inputs if needed]


@register_flop_formula(_attention_backward._opoverload.overloadpacket)
def _(grad_output: Any, *arguments: Any, **others: Any) -> int:
    return backward_flops(*shapes_of(arguments[:-2]))


def _refuse_second_derivatives(ctx: Any, *grads: Any) -> None:
    raise NotImplementedError(
        "avq_attention is only once differentiable; for second derivatives use exact attention."
    )


_attention_backward.register_autograd(_refuse_second_derivatives)


def make_differentiable(operator: CustomOpDef, *, by_kernels: bool) -> None:
    """Register the gradient of a forward operator, which kernels may compute if `by_kernels`."""
    backward = partial(_backward, by_kernels=by_kernels)
    operator.register_autograd(backward, setup_context=_save_inputs)


def _save_inputs(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    *tensors, ctx.scale, ctx.numbers, ctx.threshold = inputs
    ctx.save_for_backward(*tensors)


def _backward(
    ctx: Any, grad_output: Tensor, grad_shown: Tensor | None, *, by_kernels: bool
) -> tuple[Tensor | None, ...]:
    needs_grad = ctx.needs_input_grad[:NUM_TOKENS]
    call = *ctx.saved_tensors, ctx.scale, ctx.numbers, ctx.threshold
    found = iter(_attention_backward(grad_output, *call, needs_grad, by_kernels))
    constants = len(call) - NUM_TOKENS
    return *(next(found) if needed else None for needed in needs_grad), *(None,) * constants
