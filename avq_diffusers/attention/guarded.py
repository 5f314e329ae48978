"""Runs kernels where the GPU has the resources for them and they pass their self-check."""

import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from types import SimpleNamespace

import torch
from torch import Tensor

from avq_diffusers.attention import self_check
from avq_diffusers.attention.limits import faults, kind_of_call
from avq_diffusers.attention.packing import packed_codewords
from avq_diffusers.attention.tensors import Tensors
from avq_diffusers.attention.triton.codewords import StoredCodes
from avq_diffusers.config import Spec

_NOTHING = nullcontext()


def guarded(
    tensors: Tensors,
    spec: Spec,
    run: Callable[[StoredCodes | None, Tensor | None], list[Tensor]],
    expected: Callable[[Tensors], list[Tensor]],
    of: str = "attention",
) -> list[Tensor] | None:
    """The results of kernels; None if they exceed the GPU's resources or are wrong.

    Args:
        run: launches the kernels; takes stored codewords or updated parents, at most one of them.
        expected: the first results for some batch elements, by PyTorch.
        of: what is computed, for `self_check`.
    """
    with _current(tensors.query.device):
        try:
            found = run(*_codewords(tensors, spec))
        except kernels().OutOfResources as error:
            warnings.warn(f"AVQ runs in PyTorch for calls like this one: {error}", stacklevel=4)
            fault = f"the kernels exceed this GPU's resources: {error}"
            faults[kind_of_call(tensors, spec)] = fault
            return None
    if self_check.is_due(tensors, spec, of=of):
        last = slice(-1, None)
        right = expected(tensors.part(last))
        pairs = [(x[last], y) for x, y in zip(found, right, strict=False)]
        if not self_check.passes(tensors, spec, pairs, of=of):
            return None
    return found


@cache
def kernels() -> SimpleNamespace:
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


def _codewords(tensors: Tensors, spec: Spec) -> tuple[StoredCodes | None, Tensor | None]:
    """Stored codewords or updated parents, in the kernels' form; at most one of the two."""
    if tensors.parents is not None and tensors.children is not None:
        dtype = tensors.key.dtype
        return packed_codewords(tensors.parents, tensors.children, tensors.scale, dtype), None
    if spec.num_updates == 0:
        return None, None
    return None, kernels().updates.updated_parents(tensors.key, tensors.key_order, spec)
