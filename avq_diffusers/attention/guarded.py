"""Runs kernels where Triton can make them for the GPU and they pass their self-check."""

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
    run: Callable[[StoredCodes | None], list[Tensor]],
    expected: Callable[[Tensors], list[Tensor]],
    of: str = "attention",
) -> list[Tensor] | None:
    """The results of kernels; None if Triton cannot make them for the GPU, or they do not pass.

    Args:
        run: launches the kernels; takes stored codewords in their form, if there are any.
        expected: the first results for some batch elements, by PyTorch.
        of: what is computed, for `self_check`.
    """
    with _current(tensors.query.device):
        try:
            found = run(stored_codes(tensors))
        except kernels().UnfitError as error:
            warnings.warn(f"AVQ runs in PyTorch for calls like this one: {error}", stacklevel=4)
            fault = f"Triton cannot make the kernels for this GPU: {error}"
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
    from avq_diffusers.attention.triton import call, gradients
    from avq_diffusers.attention.triton.launch import UnfitError

    return SimpleNamespace(call=call, gradients=gradients, UnfitError=UnfitError)


def _current(device: torch.device) -> AbstractContextManager:
    """Make the device current: Triton launches on the current one."""
    is_current = device.type != "cuda" or device.index == torch.cuda.current_device()
    return _NOTHING if is_current else torch.cuda.device(device)


def stored_codes(tensors: Tensors) -> StoredCodes | None:
    """Stored codewords in the kernels' form; None without a codebook."""
    if tensors.parents is None or tensors.children is None:
        return None
    return packed_codewords(tensors.parents, tensors.children, tensors.scale, tensors.key.dtype)
