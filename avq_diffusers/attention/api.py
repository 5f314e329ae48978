"""`avq_attention`, the public operation: checks its arguments, then chooses a backend."""

import os
import weakref
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from importlib.util import find_spec
from typing import Any, NamedTuple, Unpack

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import forward_ad
from torch.utils.weak import WeakTensorKeyDictionary

from avq_diffusers.attention import backward, forward, reference
from avq_diffusers.attention.own_codewords import order_of_keys
from avq_diffusers.attention.triton import codewords as tables
from avq_diffusers.attention.validation import Options, check_arguments
from avq_diffusers.codebook.codebook import Codebook

BACKENDS = ("auto", "triton", "torch", "dense", "reference")

# The operators take query, key, value and the sinks, then other tensors, then numbers.
NUM_DIFFERENTIABLE = 5
NUM_TENSORS = 9

_HAS_TRITON = find_spec("triton") is not None
_MIN_CAPABILITY = (8, 0)
MOST_VISIBLE = 1024  # codewords that a tile of the kernels sorts


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
    importance_tile: int | None = None,
    scale: float | None = None,
    backend: str = "auto",
) -> Tensor:
    """Adaptive vector-quantized attention (paper, section Method).

    Every key goes to its nearest parent, and there to a child that is closer, or it stays. Its cell
    represents it, or its leaf in query tiles that refine its parent. A tile refines the parents of
    largest importance, the attention that its queries pay to the cell; with means, of largest
    importance times spread, the mean squared distance of the cell's keys to their mean. Exact keys,
    those of the leaves where a tile gains most, take part as themselves, and so do sink keys. With
    as many exact keys as keys, this is exact attention.

    Without a codebook, the codewords are keys of this call: the parents are evenly spaced in
    `key_order`, the children in the cell of their parent.

    Backends:

    - `"triton"`: kernels for NVIDIA GPUs, of linear cost.
    - `"torch"`: PyTorch on any device, of linear cost.
    - `"dense"`: PyTorch's attention over the replaced keys, of quadratic cost. Works only if all
      query tiles see the same keys (they refine no parent, or all), codewords are stored, and
      there are neither exact nor sink keys.
    - `"reference"`: the definition, slow.
    - `"auto"`: `"dense"` if a gradient is needed and this computes it faster, else `"triton"` if
      the kernels can run, else `"torch"`.

    Every backend is differentiable once in query, key, value and the sinks. Assignments and the
    choice of parents and of exact keys are constants. Gradients of keys are exact for means and
    straight-through for stored codewords; the codebook gets none.

    Args:
        query: (B, H, N, D) float16, bfloat16, float32 or float64. Any strides; a view of
            (B, N, H, D) memory is fastest.
        key, value: (B, H, S, D), same dtype and device as `query`.
        codebook: H heads and head dim D, on the same device. Converted to the dtype of `query`, or
            to float32 if that is narrower. None takes the codewords from `key`.
        num_parents, num_children: sizes without a codebook; a codebook has its own.
        num_refined: parents refined per query tile; 0 is flat VQ-attention.
        codewords: what represents the keys of a leaf or cell. `"means"` is their mean in this call;
            `"stored"` is the codeword, the paper's form, and needs a codebook.
        num_updates: Lloyd updates that move the parents to the means of their keys first.
        exact_keys: most keys that a query tile meets as themselves. Leaves, and cells that the tile
            does not refine, are taken by the gain of each of their keys: the attention that it
            receives times the squared spread of the keys around what represents them.
        sink_key, sink_value: (B, H, T, D), dtype and device of `query`, that every query meets as
            themselves, such as the text tokens of a joint attention. They take no part in
            codewords and importance.
        query_tile: consecutive queries of `query_order` that share one choice of parents.
        query_order: (N,) int32 or int64 permutation of the queries, from which tiles are cut. None
            is the order of `query`; the output always has that order. Not checked to be a
            permutation, because that would synchronize with the device.
        key_order: (S,) int32 or int64 permutation of the keys, from which codewords are taken
            without a codebook. None is `query_order` if there are as many queries as keys, else
            the order of `key`.
        importance_tile: parents per tile of the tiled importance (paper, appendix "Computing
            Importance with Tiled Codewords"); None takes the exact denominator, which exact keys
            need.
        scale: factor on the logits; None is 1 / sqrt(D).
        backend: `"auto"`, `"triton"`, `"torch"`, `"dense"` or `"reference"`.

    Returns:
        (B, H, N, D) view of (B, N, H, D) memory, dtype of `query`.

    Raises:
        TypeError: an argument has the wrong type or dtype.
        ValueError: shapes, devices or numbers do not agree, or the backend is unknown or cannot
            run here.
        NotImplementedError: an input has a tangent, for forward-mode derivatives.
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
        importance_tile=importance_tile,
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
    **options: Unpack[Options],
) -> tuple[Tensor, str]:
    """`avq_attention`, and the backend that ran: never "auto".

    Args:
        query, key, value, codebook, backend: as `avq_attention`.
        **options: all others of `avq_attention`.

    Raises:
        TypeError, ValueError, NotImplementedError: as `avq_attention`.
    """
    if isinstance(codebook, Codebook):
        options["num_parents"] = int(codebook.num_parents)  # torch.jit.trace has tensors here
        options["num_children"] = int(codebook.num_children)
    backend = _settled_backend(backend, query, key, value, codebook, options)
    sinks = options["sink_key"], options["sink_value"]
    _refuse_tangents(query, key, value, *sinks)
    options["key_order"] = order_of_keys(options["key_order"], options["query_order"], key.shape[2])
    scale = options["scale"]
    scale = query.shape[-1] ** -0.5 if scale is None else float(scale)
    options["scale"] = scale
    parents = children = None
    if codebook is not None:
        parents, children = codebook.parents, codebook.children
    if backend == "triton":
        needs_grad = _needs_grad(query, key, value, *sinks)
        arguments: dict[str, Any] = {"parents": parents, "children": children, **options}
        if not needs_grad and not _is_watched(query, key, value):
            return _launch_kernels(query, key, value, **arguments), backend
        # A codebook that requires a gradient gets none.
        with torch.set_grad_enabled(needs_grad):
            return _kernel_attention(query, key, value, **arguments), backend

    dtype = torch.promote_types(query.dtype, torch.float32)
    if codebook is not None:
        parents, children = (x.detach().to(dtype) for x in (codebook.parents, codebook.children))
    if backend == "torch":
        output = _attention(query, key, value, parents=parents, children=children, **options)
        return output, backend
    # Autocast would choose parents by half-precision products.
    with torch.autocast(query.device.type, enabled=False):
        if parents is not None and children is not None and backend == "dense":
            has_leaves = options["num_refined"] > 0
            quantized_key = _quantize(key, parents, children if has_leaves else children[:, :, :0])
            output = F.scaled_dot_product_attention(query, quantized_key, value, scale=scale)
        else:
            output = reference.avq_attention(query, key, value, parents, children, **options)
    return output.transpose(1, 2).contiguous().transpose(1, 2), backend


# The backends of calls on a GPU whose arguments have been checked, by all that was checked.
_settled: dict[tuple[object, ...], str] = {}
_MOST_SETTLED = 512


def _settled_backend(
    backend: str,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    codebook: Codebook | None,
    options: Options,
) -> str:
    """Check the arguments and choose the backend: on a GPU once for all calls that look alike."""
    looks = None
    if isinstance(query, Tensor) and query.is_cuda and not torch.compiler.is_compiling():
        sinks = options["sink_key"], options["sink_value"]
        orders = options["query_order"], options["key_order"]
        tensors = (query, key, value, *sinks, *orders, codebook)
        numbers = [x for x in options.values() if not isinstance(x, Tensor)]
        looks = (
            torch.is_grad_enabled(),
            backend,
            *options,
            *map(_look, tensors),
            *numbers,
            *map(type, numbers),
        )
        try:
            found = _settled.get(looks)
        except TypeError:  # an argument of a wrong type that has no hash
            looks = found = None
        if found is not None:
            return found
    check_arguments(query, key, value, codebook, **options)
    sinks = options["sink_key"], options["sink_value"]
    names = ("key", "value", "sink_key", "sink_value")
    for name, tensor in zip(names, (key, value, *sinks), strict=True):
        if tensor is not None and tensor.dtype != query.dtype:
            raise TypeError(
                f"{name} must have the dtype of query, {query.dtype}, but got {tensor.dtype}."
            )
    backend = resolve_backend(backend, query, key, value, codebook, **options)
    if looks is not None:
        if len(_settled) >= _MOST_SETTLED:
            _settled.clear()
        _settled[looks] = backend
    return backend


def _look(argument: object) -> object:
    """All of a tensor or codebook that checks and backends depend on."""
    if isinstance(argument, Tensor):
        layout = argument.shape, argument.stride()
        return *layout, argument.dtype, argument.device, argument.requires_grad
    if isinstance(argument, Codebook):
        return argument.parents.shape, argument.parents.device
    return type(argument)


def _is_watched(*tensors: Tensor) -> bool:
    """Whether a compiler, a trace, a mode or a kind of tensor must see an operation."""
    return (
        torch.compiler.is_compiling()
        or torch._C._get_tracing_state() is not None
        or torch._C._len_torch_dispatch_stack() > 0
        or torch._C._functorch.maybe_current_level() is not None
        or any(type(tensor) is not Tensor for tensor in tensors)
    )


def resolve_backend(
    backend: str,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    codebook: Codebook | None,
    **options: Unpack[Options],
) -> str:
    """Return the backend that `avq_attention` would run: never "auto".

    Args:
        backend: what the call asks for.
        query, key, value, codebook: as for `avq_attention`.
        **options: all others of `avq_attention`, with the sizes of the codebook.

    Raises:
        ValueError: the backend is unknown or cannot run; the message says why.
    """
    check_backend(backend)
    if backend in ("torch", "reference"):
        return backend
    is_dense = options["codewords"] == "stored" and not (
        options["num_updates"] or options["exact_keys"] or options["sink_key"] is not None
    )
    if backend == "dense":
        if not is_dense:
            raise ValueError(
                'backend="dense" cannot run: it needs stored codewords, no updates, exact keys or '
                "sink keys."
            )
        if 0 < options["num_refined"] < options["num_parents"]:
            raise ValueError(
                f'backend="dense" cannot run: num_refined must be 0 or all '
                f"{options['num_parents']} parents, but is {options['num_refined']}."
            )
        return "dense"
    if (
        backend == "auto"
        and is_dense
        and _needs_grad(query, key, value)
        and backward.dense_is_faster(
            query.device,
            num_keys=key.shape[2],
            head_dim=query.shape[3],
            num_parents=options["num_parents"],
            num_children=options["num_children"],
            num_refined=options["num_refined"],
        )
    ):
        return "dense"
    if backend == "auto" and query.device.type != "cuda":
        return "torch"
    obstacle = _kernel_obstacle(query, codebook is not None, **options)
    if obstacle is None:
        return "triton"
    if backend == "triton":
        raise ValueError(f'backend="triton" cannot run: {obstacle}.')
    return "torch"


def check_backend(backend: str) -> None:
    """Check the name of a backend.

    Raises:
        ValueError: `backend` is not in `BACKENDS`.
    """
    if backend not in BACKENDS:
        raise ValueError(f"backend must be one of {', '.join(BACKENDS)}, but got {backend!r}.")


def _refuse_tangents(*tensors: Tensor | None) -> None:
    """Custom operators drop tangents, so derivatives would be zero."""
    if torch.compiler.is_compiling() or forward_ad._current_level < 0:
        return
    if any(x is not None and forward_ad.unpack_dual(x).tangent is not None for x in tensors):
        raise NotImplementedError("avq_attention has no forward-mode derivatives.")


def _needs_grad(*tensors: Tensor | None) -> bool:
    return torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors)


def _kernel_obstacle(query: Tensor, has_codebook: bool, **options: Unpack[Options]) -> str | None:
    """Why the kernels cannot run; None if they can."""
    if not _HAS_TRITON:
        return "triton is not installed"
    capability = _MIN_CAPABILITY
    if query.device.type == "cuda":
        if torch.version.hip is not None:
            return "the kernels have been tried on NVIDIA GPUs only"
        capability = torch.cuda.get_device_capability(query.device)
        if capability < _MIN_CAPABILITY:
            return "the GPU's compute capability is below 8.0"
    elif query.device.type != "cpu" or os.environ.get("TRITON_INTERPRET") != "1":
        return f"query is on {query.device}, and the kernels need an NVIDIA GPU"
    scale = options["scale"]
    if scale is not None and not scale > 0:
        return f"scale must be positive, but is {scale}"
    is_exact = options["exact_keys"] > 0
    if is_exact and options["codewords"] == "stored":
        return 'exact keys need codewords="means"'
    visible = options["num_parents"] + options["num_refined"] * options["num_children"]
    if is_exact and visible > MOST_VISIBLE:
        return f"tiles with exact keys may see {MOST_VISIBLE} codewords, but see {visible}"
    if options["num_updates"] and has_codebook:
        return "num_updates moves the parents of a codebook"
    return tables.unsupported(
        query,
        num_parents=options["num_parents"],
        num_children=options["num_children"],
        num_refined=options["num_refined"],
        query_tile=options["query_tile"],
        capability=capability,
    )


@torch.library.custom_op("avq_diffusers::attention", mutates_args=())
def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    sink_key: Tensor | None,
    sink_value: Tensor | None,
    parents: Tensor | None,
    children: Tensor | None,
    query_order: Tensor | None,
    key_order: Tensor | None,
    num_parents: int,
    num_children: int,
    num_refined: int,
    codewords: str,
    num_updates: int,
    exact_keys: int,
    query_tile: int,
    importance_tile: int | None,
    scale: float,
) -> Tensor:
    _check_traced_order(query, query_order)
    # Autocast would compute the float32 products in half precision.
    with torch.autocast(query.device.type, enabled=False):
        return forward.avq_attention(
            query,
            key,
            value,
            sink_key,
            sink_value,
            parents,
            children,
            query_order,
            key_order,
            num_parents=num_parents,
            num_children=num_children,
            num_refined=num_refined,
            means=codewords == "means",
            num_updates=num_updates,
            exact_keys=exact_keys,
            query_tile=query_tile,
            importance_tile=importance_tile,
            scale=scale,
        )


def _launch_kernels(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    sink_key: Tensor | None,
    sink_value: Tensor | None,
    parents: Tensor | None,
    children: Tensor | None,
    query_order: Tensor | None,
    key_order: Tensor | None,
    num_parents: int,
    num_children: int,
    num_refined: int,
    codewords: str,
    num_updates: int,
    exact_keys: int,
    query_tile: int,
    importance_tile: int | None,
    scale: float,
) -> Tensor:
    from avq_diffusers.attention.triton.call import kernel_attention

    _check_traced_order(query, query_order)
    with _current(query.device):
        stored, parents = _kernel_codewords(
            key, parents, children, key_order, num_parents, num_updates, scale
        )
        return kernel_attention(
            query,
            key,
            value,
            sink_key,
            sink_value,
            stored,
            parents,
            query_order,
            key_order,
            num_parents=num_parents,
            num_children=num_children,
            num_refined=num_refined,
            means=codewords == "means",
            exact_keys=exact_keys,
            query_tile=query_tile,
            importance_tile=importance_tile,
            scale=scale,
        )


_kernel_attention = torch.library.custom_op(
    "avq_diffusers::kernel_attention", _launch_kernels, mutates_args=()
)


def _current(device: torch.device) -> AbstractContextManager:
    """Makes the device current: Triton launches there."""
    is_current = device.type != "cuda" or device.index == torch.cuda.current_device()
    return nullcontext() if is_current else torch.cuda.device(device)


def _kernel_codewords(
    key: Tensor,
    parents: Tensor | None,
    children: Tensor | None,
    key_order: Tensor | None,
    num_parents: int,
    num_updates: int,
    scale: float,
) -> tuple[tables.StoredCodes | None, Tensor | None]:
    """Stored codewords and updated parents as the kernels take them, one or none of the two."""
    if parents is not None and children is not None:
        return _packed_codewords(parents, children, scale, key.dtype), None
    if num_updates == 0:
        return None, None
    from avq_diffusers.attention.triton.updates import updated_parents

    return None, updated_parents(key, key_order, num_parents=num_parents, num_updates=num_updates)


def _check_traced_order(query: Tensor, query_order: Tensor | None) -> None:
    """All other callers have checked it."""
    if query_order is not None and query_order.shape[0] != query.shape[2]:
        raise ValueError(
            f"torch.jit.trace serves the number of tokens that it was made with: expected "
            f"{query_order.shape[0]}, but got {query.shape[2]}."
        )


@_kernel_attention.register_fake
@_attention.register_fake
def _(query: Tensor, *args: object) -> Tensor:
    return backward.empty_gradient(query)


@torch.library.custom_op("avq_diffusers::attention_backward", mutates_args=())
def _attention_backward(
    grad_output: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    sink_key: Tensor | None,
    sink_value: Tensor | None,
    parents: Tensor | None,
    children: Tensor | None,
    query_order: Tensor | None,
    key_order: Tensor | None,
    num_parents: int,
    num_children: int,
    num_refined: int,
    codewords: str,
    num_updates: int,
    exact_keys: int,
    query_tile: int,
    importance_tile: int | None,
    scale: float,
    needs_grad: Sequence[bool],
    by_kernels: bool,
) -> list[Tensor]:
    means = codewords == "means"
    if by_kernels:
        from avq_diffusers.attention.triton import gradients

        if gradients.serves(query, means=means):
            with _current(query.device):
                stored, parents = _kernel_codewords(
                    key, parents, children, key_order, num_parents, num_updates, scale
                )
                grads = gradients.kernel_gradients(
                    grad_output,
                    query,
                    key,
                    value,
                    sink_key,
                    sink_value,
                    stored,
                    parents,
                    query_order,
                    key_order,
                    num_parents=num_parents,
                    num_children=num_children,
                    num_refined=num_refined,
                    exact_keys=exact_keys,
                    query_tile=query_tile,
                    importance_tile=importance_tile,
                    scale=scale,
                )
            return [grad for grad, needed in zip(grads, needs_grad, strict=False) if needed]
    dtype = torch.promote_types(query.dtype, torch.float32)
    with torch.autocast(query.device.type, enabled=False):
        return backward.gradients(
            grad_output,
            query,
            key,
            value,
            sink_key,
            sink_value,
            None if parents is None else parents.to(dtype),
            None if children is None else children.to(dtype),
            query_order,
            key_order,
            needs_grad=needs_grad,
            num_parents=num_parents,
            num_children=num_children,
            num_refined=num_refined,
            means=means,
            num_updates=num_updates,
            exact_keys=exact_keys,
            query_tile=query_tile,
            importance_tile=importance_tile,
            scale=scale,
        )


@_attention_backward.register_fake
def _(grad_output: Tensor, *args: Any) -> list[Tensor]:
    inputs = zip(args[:NUM_DIFFERENTIABLE], args[-2], strict=True)
    return [backward.empty_gradient(x) for x, needed in inputs if needed]


def _save_inputs(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[:NUM_TENSORS])
    ctx.numbers = inputs[NUM_TENSORS:]


def _backward(ctx: Any, grad_output: Tensor, *, by_kernels: bool) -> tuple[Tensor | None, ...]:
    needs_grad = ctx.needs_input_grad[:NUM_DIFFERENTIABLE]
    inputs = (*ctx.saved_tensors, *ctx.numbers)
    found = iter(_attention_backward(grad_output, *inputs, needs_grad, by_kernels))
    constants = len(ctx.needs_input_grad) - NUM_DIFFERENTIABLE
    return *(next(found) if needed else None for needed in needs_grad), *(None,) * constants


for _operation, _by_kernels in ((_attention, False), (_kernel_attention, True)):
    _operation.register_autograd(
        partial(_backward, by_kernels=_by_kernels), setup_context=_save_inputs
    )


@torch.library.custom_op("avq_diffusers::quantize", mutates_args=())
def _quantize(key: Tensor, parents: Tensor, children: Tensor) -> Tensor:
    return backward.quantize(key, parents, children)


@_quantize.register_fake
def _(key: Tensor, parents: Tensor, children: Tensor) -> Tensor:
    return key.new_empty(key.shape)


_quantize.register_autograd(lambda ctx, grad_output: (grad_output, None, None))


class _Packed(NamedTuple):
    children: weakref.ref[Tensor]
    states: tuple[tuple[Any, ...], ...]
    codes: tables.StoredCodes


# The tables of each tensor of parents. A codebook that moves or changes in place is packed again.
_packed: WeakTensorKeyDictionary = WeakTensorKeyDictionary()


def _packed_codewords(
    parents: Tensor, children: Tensor, scale: float, dtype: torch.dtype
) -> tables.StoredCodes:
    """`codewords.pack`, cached for the lifetime of the codebook."""
    if parents.is_inference() or children.is_inference():  # they have no version counter
        return tables.pack(parents, children, scale=scale, dtype=dtype)
    states = tuple((x._version, x.device, x.dtype, x.data_ptr()) for x in (parents, children))
    tables_of = _packed.setdefault(parents, {})
    found = tables_of.get((scale, dtype))
    if found is not None and found.children() is children and found.states == states:
        return found.codes
    codes = tables.pack(parents, children, scale=scale, dtype=dtype)
    # Tensors that are allocated during the capture of a CUDA graph belong to that graph.
    if not (parents.is_cuda and torch.cuda.is_current_stream_capturing()):
        tables_of[scale, dtype] = _Packed(weakref.ref(children), states, codes)
    return codes
