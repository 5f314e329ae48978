"""What each backend can do, as data read by dispatch, error messages, tests and the README."""

import operator
import os
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch

from avq_diffusers.attention.tensors import Tensors
from avq_diffusers.config import Spec

HAS_TRITON = find_spec("triton") is not None
# Triton's matmul instruction by major compute capability. Others have "mma" (Ampere, Ada, consumer
# Blackwell), with operands in registers.
MATRIX_INSTRUCTIONS = {9: "wgmma", 10: "tcgen05"}

# GPUs on which the tests compared kernels and definition -> Triton version.
VERIFIED = {"NVIDIA H200": "3.6"}

# Faults found in this process, by device and, if they only affect some calls, the kind of call.
faults: dict[tuple[Any, ...], str] = {}


def matrix_instructions(capability: tuple[int, int]) -> str:
    """Triton's matmul instruction: `"mma"`, `"wgmma"` or `"tcgen05"`.

    Args:
        capability: compute capability, major and minor.
    """
    return MATRIX_INSTRUCTIONS.get(capability[0], "mma")


class Limit(NamedTuple):
    """A limit of a backend."""

    value: Any  # what is allowed: the largest number, or a set of values
    found: Callable[[Tensors, Spec], Any]  # what a call has; None where the limit does not apply
    # Why a call cannot run; a format string with `value`, `found`, `device`, `shape` and `spec`.
    message: str
    allows: Callable[[Any, Any], bool] = operator.contains  # whether `value` allows what was found


def obstacles(backend: str, tensors: Tensors, spec: Spec) -> list[str]:
    """Why a backend cannot run a call: one reason per violated limit, none if it can.

    Args:
        backend: one of `LIMITS`.
        tensors, spec: the checked call.
    """
    reasons = []
    for limit in LIMITS[backend].values():
        found = limit.found(tensors, spec)
        if found is not None and not limit.allows(limit.value, found):
            query = {"device": tensors.query.device, "shape": tuple(tensors.query.shape)}
            reasons.append(limit.message.format(value=limit.value, found=found, spec=spec, **query))
    return reasons


def _device(tensors: Tensors, spec: Spec) -> str:
    """`"nvidia"`, `"amd"`, `"interpreter"` for a CPU that interprets kernels, or other types."""
    device = tensors.query.device.type
    if device == "cuda":
        return "nvidia" if torch.version.hip is None else "amd"
    is_interpreted = device == "cpu" and os.environ.get("TRITON_INTERPRET") == "1"
    return "interpreter" if is_interpreted else device


def _capability(tensors: Tensors, spec: Spec) -> tuple[int, int]:
    """Compute capability of a GPU; for other devices, the lowest one supported."""
    if _device(tensors, spec) == "nvidia":
        return torch.cuda.get_device_capability(tensors.query.device)
    return (8, 0)


def _wide_head_dim(tensors: Tensors, spec: Spec) -> int | None:
    """A float32 head dim whose operands may not fit registers, or tensor memory on sm_100."""
    has_wgmma = matrix_instructions(_capability(tensors, spec)) == "wgmma"
    is_wide = tensors.query.dtype == torch.float32 and not has_wgmma
    return tensors.query.shape[3] if is_wide else None


def kind_of_call(tensors: Tensors, spec: Spec) -> tuple[Any, ...]:
    """Key shared by calls that need the same GPU resources, whatever their thresholds.

    Args:
        tensors, spec: the checked call.
    """
    query = tensors.query
    return query.device, query.dtype, query.shape[3], spec.any_refinement


def _fault(tensors: Tensors, spec: Spec) -> str | None:
    if not faults:
        return None
    kind = kind_of_call(tensors, spec)
    return faults.get(kind[:1]) or faults.get(kind)


def _span(tensors: Tensors, spec: Spec) -> int:
    """Elements that one batch element spans in the memory of query or output."""
    _, heads, num_queries, head_dim = tensors.query.shape
    return num_queries * max(tensors.query.stride(2), heads * head_dim)


def _most(value: int, name: str, found: Callable[[Tensors, Spec], int | None]) -> Limit:
    return Limit(value, found, name + " must be at most {value}, but is {found}", operator.ge)


# By backend and name, in the order in which an error message lists them.
LIMITS: dict[str, dict[str, Limit]] = {
    "triton": {
        "installation": Limit((True,), lambda call, spec: HAS_TRITON, "triton is not installed"),
        "vendor": Limit(
            ("nvidia",),
            lambda call, spec: _device(call, spec) if call.query.is_cuda else None,
            "the kernels have only been tried on NVIDIA GPUs",
        ),
        "device": Limit(
            ("interpreter",),
            lambda call, spec: None if call.query.is_cuda else _device(call, spec),
            "query is on {device}, and the kernels need an NVIDIA GPU",
        ),
        "capability": Limit(
            (8, 0), _capability, "the GPU's compute capability is below 8.0", operator.le
        ),
        "scale": Limit(
            0.0,
            lambda call, spec: call.scale,
            "scale must be positive, but is {found}",
            operator.lt,
        ),
        "dtype": Limit(
            (torch.float16, torch.bfloat16, torch.float32),
            lambda call, spec: call.query.dtype,
            "query must be float16, bfloat16 or float32, but is {found}",
        ),
        "head dim": Limit(
            range(8, 129, 8),
            lambda call, spec: call.query.shape[3],
            "head dim must be a multiple of 8 up to 128, but is {found}",
        ),
        "head dim of float32": Limit(
            64,
            _wide_head_dim,
            "float32 with head dim {found} needs compute capability 9",
            operator.ge,
        ),
        "query tile": _most(128, "query_tile", lambda call, spec: spec.query_tile),
        "parents if tiles choose": _most(
            256, "num_parents", lambda call, spec: spec.num_parents if spec.refines_some else None
        ),
        "parents": _most(
            512, "num_parents", lambda call, spec: None if spec.refines_some else spec.num_parents
        ),
        "children": _most(32, "num_children", lambda call, spec: spec.num_children),
        "batch": _most(65535, "batch", lambda call, spec: call.query.shape[0]),
        "fault": Limit((), _fault, "{found}"),
        "span": Limit(
            2**31 - 1, _span, "one batch element spans 2^31 elements or more: {shape}", operator.ge
        ),
    },
    "torch": {},
    "reference": {},
}
