"""`avq_attention`, the public operation: checks its arguments, then chooses a backend."""

import warnings
import weakref
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache, partial
from math import prod
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import forward_ad
from torch.utils.flop_counter import register_flop_formula
from torch.utils.weak import WeakTensorKeyDictionary

from avq_diffusers.attention import reference, self_check, torch_backward, torch_forward
from avq_diffusers.attention.flops import backward_flops, forward_flops
from avq_diffusers.attention.limits import LIMITS, faults, kind_of_call, obstacles
from avq_diffusers.attention.spec import NUM_TOKENS, Spec, Tensors
from avq_diffusers.attention.triton import codewords as tables
from avq_diffusers.codebook.codebook import Codebook

BACKENDS = ("auto", *LIMITS)

_NOTHING = nullcontext()


def avq_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    codebook: Codebook | None = None,
    *,
    num_parents: int = 64,
    num_children: int = 8,
    num_refined: int = 16,
    codewords: str = "means",
    num_updates: int = 0,
    exact_keys: int = 0,
    sink_key: Tensor | None = None,
    sink_value: Tensor | None = None,
    query_tile: int = 128,
    query_order: Tensor | None = None,
    key_order: Tensor | None = None,
    scale: float | None = None,
    backend: str = "auto",
) -> Tensor:
    """Adaptive vector-quantized attention (paper, section Method).

    Each key is assigned to its nearest parent, then to that parent's nearest child if closer;
    otherwise it stays with the parent. Its cell represents it, or its leaf in query tiles that
    refine its parent. A tile refines the parents with the largest importance, the attention that
    its queries pay to the cell; with means, importance times spread, the variance of the cell's
    keys around their mean. The keys of the leaves where a tile gains most are exact: they take part
    as themselves, and so do sink keys. With as many exact keys as keys, this is exact attention.

    Without a codebook, codewords are keys of this call: parents are evenly spaced in `key_order`,
    children evenly spaced in their parent's cell.

    Backends:

    - `"triton"`: kernels for NVIDIA GPUs, linear cost.
    - `"torch"`: PyTorch on any device, linear cost.
    - `"dense"`: PyTorch's attention over the replaced keys, quadratic cost. Only works with stored
      codewords, without exact or sink keys, and if all query tiles see the same keys (they refine
      no parent, or all).
    - `"reference"`: the definition, slow.
    - `"auto"`: `"dense"` if a gradient is needed and this computes it faster, else `"triton"` if
      the kernels can run, else `"torch"`.

    Every backend is once differentiable in query, key, value and sinks. Assignments and the choice
    of parents and exact keys are constants. Key gradients are exact with means and straight-through
    with stored codewords; the codebook gets none.

    Args:
        query: (B, H, N, D) float16, bfloat16, float32 or float64. Any strides; a view of
            (B, N, H, D) memory is fastest.
        key, value: (B, H, S, D), same dtype and device as `query`.
        codebook: H heads and head dim D, on the same device. Converted to the dtype of `query`, or
            to float32 if that is narrower. None takes the codewords from `key`.
        num_parents, num_children: sizes without a codebook, at most 16 codewords M0 (1 + C) per
            key; a codebook has its own.
        num_refined: parents refined per query tile; 0 is flat VQ-attention.
        codewords: what represents the keys of a leaf or cell. `"means"` is their mean in this call;
            `"stored"` is the codeword, the paper's form, and needs a codebook.
        num_updates: Lloyd updates that first move the parents to the means of their keys.
        exact_keys: most keys per query tile that take part as themselves. Leaves, and cells that
            the tile does not refine, are taken in order of gain per key: the attention the key
            receives times the squared variance of the keys around what represents them.
        sink_key, sink_value: (B, H, T, D), dtype and device of `query`: keys that every query
            attends to exactly, such as the text tokens of a joint attention. They do not affect
            codewords or importance.
        query_tile: number of consecutive queries in `query_order` that share one choice of parents.
        query_order: (N,) int32 or int64 permutation of the queries that tiles are cut from. None
            is the order of `query`; the output is always in that order. Not verified to be a
            permutation, because that would synchronize with the device.
        key_order: (S,) int32 or int64 permutation of the keys that codewords are taken from
            without a codebook. None is `query_order` if there are as many queries as keys, else
            the order of `key`.
        scale: factor on the logits; None is 1 / sqrt(D).
        backend: `"auto"`, `"triton"`, `"torch"`, `"dense"` or `"reference"`.

    Returns:
        (B, H, N, D) view of (B, N, H, D) memory, dtype of `query`.

    Raises:
        TypeError: an argument has the wrong type or dtype.
        ValueError: shapes, devices or numbers do not agree, or the backend is unknown or cannot
            run here.
        NotImplementedError: an input has a forward-mode tangent, or the call is inside a
            `torch.func` transform.
    """
    output, _ = attention_and_backend(
        query,
        key,
        value,
        codebook,
        num_parents=num_parents,
        num_children=num_children,
        num_refined=num_refined,
        codewords=codewords,
        num_updates=num_updates,
        exact_keys=exact_keys,
        sink_key=sink_key,
        sink_value=sink_value,
        query_tile=query_tile,
        query_order=query_order,
        key_order=key_order,
        scale=scale,
        backend=backend,
    )
    return output


def attention_and_backend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    codebook: Codebook | None = None,
    *,
    backend: str = "auto",
    **options: Any,
) -> tuple[Tensor, str]:
    """`avq_attention`, plus the name of the backend that ran: never "auto".

    Args:
        query, key, value, codebook, backend: as in `avq_attention`.
        **options: the other arguments of `avq_attention`.

    Raises:
        TypeError, ValueError, NotImplementedError: as `avq_attention`.
    """
    tensors = Tensors.of_call(query, key, value, codebook, options)
    spec, backend = _settle(tensors, options, backend)
    _refuse_transforms(backend, *tensors.tokens())
    if backend == "triton":
        needs_grad = _needs_grad(*tensors.tokens())
        if not needs_grad and not _is_watched(query, key, value):
            return _launch_kernels(tensors, spec), backend
        # No gradient for the codebook, even if it requires one.
        with torch.set_grad_enabled(needs_grad):
            return _kernel_attention(*tensors, spec.numbers(), spec.scale), backend

    tensors = tensors.with_codewords_in(torch.promote_types(query.dtype, torch.float32))
    if backend == "torch":
        return _attention(*tensors, spec.numbers(), spec.scale), backend
    # Autocast would choose parents in half precision.
    with torch.autocast(query.device.type, enabled=False):
        parents, children = tensors.parents, tensors.children
        if parents is not None and children is not None and backend == "dense":
            quantized_key = _quantize(
                key, parents, children if spec.num_refined else children[:, :, :0]
            )
            output = F.scaled_dot_product_attention(query, quantized_key, value, scale=spec.scale)
        else:
            output = reference.avq_attention(query, key, value, parents, children, **options)
    return output.transpose(1, 2).contiguous().transpose(1, 2), backend


# Checked spec and chosen backend per call signature, on a GPU.
_settled: dict[tuple[object, ...], tuple[Spec, str]] = {}
_MOST_SETTLED = 512


def _settle(tensors: Tensors, options: Mapping[str, Any], backend: str) -> tuple[Spec, str]:
    """Check the arguments and choose the backend: on a GPU once per call signature."""
    looks = None
    query = tensors.query
    if isinstance(query, Tensor) and query.is_cuda and not torch.compiler.is_compiling():
        numbers = [x for x in options.values() if not isinstance(x, Tensor)]
        try:
            looks = (
                torch.is_grad_enabled(),
                backend,
                *options,
                *[None if x is None else _look(x) for x in tensors],
                *numbers,
                *map(type, numbers),
            )
            found = _settled.get(looks)
        except (AttributeError, TypeError):  # an argument of the wrong type, perhaps unhashable
            looks = found = None
        if found is not None:
            return found
    tensors.check()
    spec = Spec.of_call(tensors, options)
    settled = spec, resolve_backend(backend, tensors, spec)
    if looks is not None:
        if len(_settled) >= _MOST_SETTLED:
            _settled.clear()
        _settled[looks] = settled
    return settled


def _look(x: Tensor) -> tuple[object, ...]:
    """Cache key of a tensor: the properties that checks and dispatch look at."""
    return x.shape, x.stride(), x.dtype, x.device, x.requires_grad


def _is_watched(*tensors: Tensor) -> bool:
    """Whether a compiler, tracer, mode or tensor subclass must see the operation."""
    return (
        torch.compiler.is_compiling()
        or torch._C._get_tracing_state() is not None
        or torch._C._len_torch_dispatch_stack() > 0
        or any(type(tensor) is not Tensor for tensor in tensors)
    )


def resolve_backend(backend: str, tensors: Tensors, spec: Spec) -> str:
    """Return the backend that `avq_attention` would run: never "auto".

    Args:
        backend: the requested backend.
        tensors, spec: the checked call.

    Raises:
        ValueError: the backend is unknown or cannot run; the message lists every violated limit.
    """
    check_backend(backend)
    if backend != "auto":
        reasons = obstacles(backend, tensors, spec)
        if reasons:
            raise ValueError(f'backend="{backend}" cannot run: {"; ".join(reasons)}.')
        return backend
    if (
        _needs_grad(tensors.query, tensors.key, tensors.value)
        and not obstacles("dense", tensors, spec)
        and torch_backward.dense_is_faster(tensors, spec)
    ):
        return "dense"
    if tensors.query.is_cuda and not obstacles("triton", tensors, spec):
        return "triton"
    return "torch"


def check_backend(backend: str) -> None:
    """Check the name of a backend.

    Raises:
        ValueError: `backend` is not in `BACKENDS`.
    """
    if backend not in BACKENDS:
        raise ValueError(f"backend must be one of {', '.join(BACKENDS)}, but got {backend!r}.")


def _refuse_transforms(backend: str, *tensors: Tensor | None) -> None:
    """Custom operators silently drop tangents and have no rules for `torch.func`."""
    if torch.compiler.is_compiling():
        return
    if forward_ad._current_level >= 0 and any(
        x is not None and forward_ad.unpack_dual(x).tangent is not None for x in tensors
    ):
        raise NotImplementedError("avq_attention has no forward-mode derivatives.")
    is_operator = backend in ("torch", "triton")
    if is_operator and torch._C._functorch.maybe_current_level() is not None:
        raise NotImplementedError(
            "avq_attention does not run inside torch.func's transforms (grad, vjp, jacrev, vmap); "
            "use torch.autograd or exact attention."
        )


def _needs_grad(*tensors: Tensor | None) -> bool:
    return torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors)


# Operator arguments: the fields of `Tensors`, then those of a `Spec`.
_CALL = ", ".join(
    [
        *(f"Tensor {name}" for name in Tensors._fields[:3]),
        *(f"Tensor? {name}" for name in Tensors._fields[3:]),
        "SymInt[] numbers",
        "float scale",
    ]
)


def _call_of(arguments: Sequence[Any]) -> tuple[Tensors, Spec]:
    """Unpack an operator's arguments; only `torch.jit.trace` can change their shapes."""
    *tensors, numbers, scale = arguments
    call = Tensors(*tensors)
    order, num_queries = call.query_order, call.query.shape[2]
    if order is not None and order.shape[0] != num_queries:
        raise ValueError(
            f"a torch.jit.trace only takes the number of tokens it was traced with: expected "
            f"{order.shape[0]}, but got {num_queries}."
        )
    return call, Spec.of_numbers(numbers, scale)


@torch.library.custom_op("avq_diffusers::attention", mutates_args=(), schema=f"({_CALL}) -> Tensor")
def _attention(*arguments: Any) -> Tensor:
    return _by_pytorch(*_call_of(arguments))


def _by_pytorch(tensors: Tensors, spec: Spec) -> Tensor:
    tensors = tensors.with_codewords_in(torch.promote_types(tensors.query.dtype, torch.float32))
    # Autocast would compute the float32 products in half precision.
    with torch.autocast(tensors.query.device.type, enabled=False):
        return torch_forward.avq_attention(tensors, spec)


@torch.library.custom_op(
    "avq_diffusers::kernel_attention", mutates_args=(), schema=f"({_CALL}) -> Tensor"
)
def _kernel_attention(*arguments: Any) -> Tensor:
    return _launch_kernels(*_call_of(arguments))


def _launch_kernels(tensors: Tensors, spec: Spec) -> Tensor:
    """Run the kernels, or PyTorch if they exceed the GPU's resources or fail the self-check."""
    kernels = _kernels()
    with _current(tensors.query.device):
        try:
            output = kernels.call.kernel_attention(tensors, *_kernel_codewords(tensors, spec), spec)
        except kernels.OutOfResources as error:
            _note_lack(tensors, spec, error)
            return _by_pytorch(tensors, spec)
    if self_check.is_due(tensors, spec):
        last = slice(-1, None)
        expected = _by_pytorch(tensors.part(last), spec)
        if not self_check.passes(tensors, spec, [(output[last], expected)]):
            _settled.clear()
            return _by_pytorch(tensors, spec)
    return output


def _note_lack(tensors: Tensors, spec: Spec, error: Exception) -> None:
    """Remember that calls of this kind exceed the GPU's resources."""
    warnings.warn(f"AVQ runs in PyTorch for calls like this one: {error}", stacklevel=3)
    faults[kind_of_call(tensors, spec)] = f"the kernels exceed this GPU's resources: {error}"
    _settled.clear()


@cache
def _kernels() -> SimpleNamespace:
    """The modules that launch kernels; importing them needs Triton."""
    from triton.runtime.errors import OutOfResources

    from avq_diffusers.attention.triton import call, gradients, updates

    return SimpleNamespace(
        call=call, gradients=gradients, updates=updates, OutOfResources=OutOfResources
    )


def _current(device: torch.device) -> AbstractContextManager:
    """Make the device current: Triton launches on the current one."""
    is_current = device.type != "cuda" or device.index == torch.cuda.current_device()
    return _NOTHING if is_current else torch.cuda.device(device)


def _kernel_codewords(
    tensors: Tensors, spec: Spec
) -> tuple[tables.StoredCodes | None, Tensor | None]:
    """Stored codewords or updated parents, in the kernels' form; at most one of the two."""
    if tensors.parents is not None and tensors.children is not None:
        dtype = tensors.key.dtype
        return _packed_codewords(tensors.parents, tensors.children, spec.scale, dtype), None
    if spec.num_updates == 0:
        return None, None
    return None, _kernels().updates.updated_parents(tensors.key, tensors.key_order, spec)


@_kernel_attention.register_fake
@_attention.register_fake
def _(query: Tensor, *others: Any) -> Tensor:
    return torch_forward.empty_tokens(query)


@torch.library.custom_op(
    "avq_diffusers::attention_backward",
    mutates_args=(),
    schema=f"(Tensor grad_output, {_CALL}, bool[] needs_grad, bool by_kernels) -> Tensor[]",
)
def _attention_backward(grad_output: Tensor, *arguments: Any) -> list[Tensor]:
    *call, needs_grad, by_kernels = arguments
    tensors, spec = _call_of(call)
    if by_kernels and _kernels().gradients.serves(tensors.query, means=spec.means):
        grads = _gradients_by_kernels(grad_output, tensors, spec)
        if grads is not None:
            return [grad for grad, needed in zip(grads, needs_grad, strict=False) if needed]
    return _gradients_by_pytorch(grad_output, tensors, spec, needs_grad)


def _gradients_by_kernels(grad_output: Tensor, tensors: Tensors, spec: Spec) -> list[Tensor] | None:
    """Gradients of all tokens; None if the kernels exceed the GPU's resources or are wrong."""
    kernels = _kernels()
    with _current(tensors.query.device):
        try:
            codewords = _kernel_codewords(tensors, spec)
            grads = kernels.gradients.kernel_gradients(grad_output, tensors, *codewords, spec)
        except kernels.OutOfResources as error:
            _note_lack(tensors, spec, error)
            return None
    if self_check.is_due(tensors, spec, of="gradients"):
        last, needed = slice(-1, None), [x is not None for x in tensors.tokens()]
        expected = _gradients_by_pytorch(grad_output[last], tensors.part(last), spec, needed)
        pairs = [(found[last], right) for found, right in zip(grads, expected, strict=True)]
        if not self_check.passes(tensors, spec, pairs, of="gradients"):
            _settled.clear()
            return None
    return grads


def _gradients_by_pytorch(
    grad_output: Tensor, tensors: Tensors, spec: Spec, needs_grad: Sequence[bool]
) -> list[Tensor]:
    tensors = tensors.with_codewords_in(torch.promote_types(tensors.query.dtype, torch.float32))
    with torch.autocast(tensors.query.device.type, enabled=False):
        return torch_backward.gradients(grad_output, tensors, spec, needs_grad)


@_attention_backward.register_fake
def _(grad_output: Tensor, *arguments: Any) -> list[Tensor]:
    inputs = zip(arguments[:NUM_TOKENS], arguments[-2], strict=True)
    return [torch_forward.empty_tokens(x) for x, needed in inputs if needed]


def _refuse_second_derivatives(ctx: Any, *grads: Any) -> None:
    raise NotImplementedError(
        "avq_attention is only once differentiable; for second derivatives use exact attention."
    )


_attention_backward.register_autograd(_refuse_second_derivatives)


def _save_inputs(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    *tensors, ctx.numbers, ctx.scale = inputs
    ctx.save_for_backward(*tensors)


def _backward(ctx: Any, grad_output: Tensor, *, by_kernels: bool) -> tuple[Tensor | None, ...]:
    needs_grad = ctx.needs_input_grad[:NUM_TOKENS]
    call = *ctx.saved_tensors, ctx.numbers, ctx.scale
    found = iter(_attention_backward(grad_output, *call, needs_grad, by_kernels))
    constants = len(call) - NUM_TOKENS
    return *(next(found) if needed else None for needed in needs_grad), *(None,) * constants


for _operation, _by_kernels in ((_attention, False), (_kernel_attention, True)):
    _operation.register_autograd(
        partial(_backward, by_kernels=_by_kernels), setup_context=_save_inputs
    )


def _shapes_of(arguments: Sequence[Any]) -> tuple[Any, int, int, Spec]:
    """The arguments of `forward_flops`, of an operator's arguments with shapes for tensors."""
    *shapes, numbers, scale = arguments
    call = Tensors(*shapes)
    num_sinks = 0 if call.sink_key is None else call.sink_key[2]
    return call.query, int(call.key[2]), int(num_sinks), Spec.of_numbers(numbers, scale)


@register_flop_formula([x._opoverload.overloadpacket for x in (_attention, _kernel_attention)])
def _(*arguments: Any, **others: Any) -> int:
    return forward_flops(*_shapes_of(arguments))


@register_flop_formula(_attention_backward._opoverload.overloadpacket)
def _(grad_output: Any, *arguments: Any, **others: Any) -> int:
    return backward_flops(*_shapes_of(arguments[:-2]))


@torch.library.custom_op("avq_diffusers::quantize", mutates_args=())
def _quantize(key: Tensor, parents: Tensor, children: Tensor) -> Tensor:
    return torch_backward.quantize(key, parents, children)


@_quantize.register_fake
def _(key: Tensor, parents: Tensor, children: Tensor) -> Tensor:
    return key.new_empty(key.shape)


@register_flop_formula(_quantize._opoverload.overloadpacket)
def _(key: Sequence[int], parents: Any, children: Sequence[int], **others: Any) -> int:
    _, num_parents, num_children, _ = children
    return 2 * prod(key) * (num_parents + num_children)


_quantize.register_autograd(lambda ctx, grad_output: (grad_output, None, None))


class _Packed(NamedTuple):
    children: weakref.ref[Tensor]
    states: tuple[tuple[Any, ...], ...]
    codes: tables.StoredCodes


# Packed tables per parents tensor. A codebook that moves or changes in place is packed again.
_packed: WeakTensorKeyDictionary = WeakTensorKeyDictionary()


def _packed_codewords(
    parents: Tensor, children: Tensor, scale: float, dtype: torch.dtype
) -> tables.StoredCodes:
    """`codewords.pack`, cached for the lifetime of the codebook."""
    if parents.is_inference() or children.is_inference():  # no version counter
        return tables.pack(parents, children, scale=scale, dtype=dtype)
    states = tuple((x._version, x.device, x.dtype, x.data_ptr()) for x in (parents, children))
    tables_of = _packed.setdefault(parents, {})
    found = tables_of.get((scale, dtype))
    if found is not None and found.children() is children and found.states == states:
        return found.codes
    codes = tables.pack(parents, children, scale=scale, dtype=dtype)
    # Tensors allocated during CUDA graph capture belong to that graph.
    if not (parents.is_cuda and torch.cuda.is_current_stream_capturing()):
        tables_of[scale, dtype] = _Packed(weakref.ref(children), states, codes)
    return codes
