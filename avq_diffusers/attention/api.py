"""`avq_attention`, the public operation: checks its arguments, then chooses a backend."""

import torch
from torch import Tensor
from torch.autograd import forward_ad

from avq_diffusers.attention import operators, reference
from avq_diffusers.attention.limits import LIMITS, obstacles
from avq_diffusers.attention.schema import arguments_of
from avq_diffusers.attention.settled import Settled, settled_call
from avq_diffusers.attention.tensors import Attended, Tensors
from avq_diffusers.codebook.codebook import Codebook
from avq_diffusers.config import Spec

BACKENDS = ("auto", *LIMITS)


def avq_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    codebook: Codebook | None = None,
    *,
    num_parents: int = 64,
    num_children: int = 8,
    threshold: float | None = None,
    num_refined: int | None = None,
    codewords: str = "means",
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
    otherwise it stays with the parent. A query tile shows a cell at the coarsest of three levels,
    its parent, its leaves or its keys, at which a further column would fix at most `threshold`:
    the attention that the tile's queries pay to it, times the variance of the logits inside. 0 is
    exact attention, infinity flat VQ. With `num_refined`, the paper's form, a tile shows the leaves
    of the parents with the largest importance, the attention that its queries pay to the cell; with
    means, importance times spread, the variance of the cell's keys. Sink keys take part as
    themselves.

    With own codewords, a first-order term says how values inside a leaf follow its keys: one matrix
    per head, the covariance of values and keys inside leaves.

    Without a codebook, codewords are keys of this call: parents are evenly spaced in `key_order`,
    children evenly spaced in their parent's cell.

    Backends:

    - `"triton"`: kernels for NVIDIA GPUs, linear cost.
    - `"torch"`: PyTorch on any device, linear cost.
    - `"reference"`: the definition, slow.
    - `"auto"`: `"triton"` if the kernels can run, else `"torch"`.

    Every backend is once differentiable in query, key, value and sinks. Assignments and the choice
    of levels are constants. Key gradients are exact with means and straight-through
    with stored codewords; the codebook gets none.

    Args:
        query: (B, H, N, D) float16, bfloat16, float32 or float64. Any strides; a view of
            (B, N, H, D) memory is fastest. From about 1e18 on, squares of queries or keys overflow.
        key, value: (B, H, S, D), same dtype and device as `query`.
        codebook: H heads and head dim D, on the same device. Converted to the dtype of `query`, or
            to float32 if that is narrower. None takes the codewords from `key`.
        num_parents, num_children: sizes without a codebook, at most 16 codewords M0 (1 + C) per
            key; a codebook has its own.
        threshold: error of the attention that a further column must fix to be shown, at least 0;
            1e-4 if neither this nor `num_refined` is given. From 4096 queries on, 16 of each tile
            decide.
        num_refined: parents refined per query tile, in place of a threshold; 0 is flat
            VQ-attention.
        codewords: what represents the keys of a leaf or cell. `"means"` is their mean in this call;
            `"stored"` is the codeword, the paper's form, and needs a codebook.
        sink_key, sink_value: (B, H, T, D), dtype and device of `query`: keys that every query
            attends to exactly, such as the text tokens of a joint attention. They do not affect
            codewords or importance, and attention to them leaves less for a threshold to resolve.
        query_tile: number of consecutive queries in `query_order` that share one choice of columns.
        query_order: (N,) int32 or int64 permutation of the queries that tiles are cut from. None
            is the order of `query`; the output is always in that order. Not verified to be a
            permutation, because that would synchronize with the device.
        key_order: (S,) int32 or int64 permutation of the keys that codewords are taken from
            without a codebook. None is `query_order` if there are as many queries as keys, else
            the order of `key`.
        scale: factor on the logits; None is 1 / sqrt(D).
        backend: `"auto"`, `"triton"`, `"torch"` or `"reference"`.

    Returns:
        (B, H, N, D) view of (B, N, H, D) memory, dtype of `query`.

    Raises:
        TypeError: an argument has the wrong type or dtype.
        ValueError: shapes, devices or numbers do not agree, or the backend is unknown or cannot
            run here.
        NotImplementedError: an input has a forward-mode tangent, or the call is inside a
            `torch.func` transform.
    """
    tensors = Tensors.of(
        query,
        key,
        value,
        codebook,
        sink_key=sink_key,
        sink_value=sink_value,
        query_order=query_order,
        key_order=key_order,
        scale=scale,
    )
    if codebook is not None:
        num_parents, num_children = codebook.num_parents, codebook.num_children
    spec = Spec(
        num_parents=num_parents,
        num_children=num_children,
        threshold=threshold,
        num_refined=num_refined,
        codewords=codewords,
        query_tile=query_tile,
    )
    return attend(tensors, spec, backend).output


def attend(tensors: Tensors, spec: Spec, backend: str = "auto") -> Attended:
    """`avq_attention` of one object, and how it ran.

    Args:
        tensors: the inputs.
        spec: the options; the sizes are those of the codebook, if there is one.
        backend: as in `avq_attention`.

    Raises:
        TypeError, ValueError, NotImplementedError: as `avq_attention`.
    """
    call = _settle(tensors, spec, backend)
    backend = call.backend
    _refuse_transforms(backend, *tensors.tokens())
    query, key, value = tensors[:3]
    if backend == "triton":
        needs_grad = _needs_grad(*tensors.tokens())
        if not needs_grad and not _is_watched(query, key, value):
            output, shown = operators.by_kernels(tensors, spec, call)
            return Attended(output, backend, shown)
        # No gradient for the codebook, even if it requires one.
        with torch.set_grad_enabled(needs_grad):
            output, shown = operators.kernel_attention(*arguments_of(tensors, spec))
            return Attended(output, backend, shown)

    tensors = tensors.with_wide_codewords()
    if backend == "torch":
        output, shown = operators.torch_attention(*arguments_of(tensors, spec))
        return Attended(output, backend, shown)
    # Autocast would choose parents in half precision.
    with torch.autocast(query.device.type, enabled=False):
        output = reference.avq_attention(tensors, spec)
    return Attended(output.transpose(1, 2).contiguous().transpose(1, 2), backend)


def _settle(tensors: Tensors, spec: Spec, backend: str) -> Settled:
    """Check a call and choose its backend: on a GPU once for all calls that look the same."""

    def find() -> str:
        tensors.check(spec)
        return resolve_backend(backend, tensors, spec)

    query = tensors.query
    if not isinstance(query, Tensor) or not query.is_cuda or torch.compiler.is_compiling():
        return Settled(find())
    return settled_call(tensors, spec, backend, torch.is_grad_enabled(), find=find)


def _is_watched(*tensors: Tensor) -> bool:
    """Whether a compiler, mode or tensor subclass must see the operation."""
    return (
        torch.compiler.is_compiling()
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
