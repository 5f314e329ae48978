"""Floating point operations of AVQ's operators, for PyTorch's counter.

As for PyTorch's own attention, only products count, two operations per multiply-add; their numbers
follow from the shapes.
"""

from collections.abc import Sequence
from math import prod

from avq_diffusers.config import Spec


def forward_flops(query: Sequence[int], num_keys: int, num_sinks: int, spec: Spec) -> int:
    """Operations of a forward pass.

    Args:
        query: shape (B, H, N, D).
        num_keys: keys that are quantized.
        num_sinks: keys that every query sees.
        spec: options of the call.
    """
    return _assignment(query, num_keys, spec) + 2 * _product(query, num_keys, num_sinks, spec)


def backward_flops(query: Sequence[int], num_keys: int, num_sinks: int, spec: Spec) -> int:
    """Operations of a backward pass, which assigns the keys and computes the logits again.

    Args:
        query, num_keys, num_sinks, spec: as in `forward_flops`.
    """
    return _assignment(query, num_keys, spec) + 5 * _product(query, num_keys, num_sinks, spec)


def _product(query: Sequence[int], num_keys: int, num_sinks: int, spec: Spec) -> int:
    """One product of queries or weights with the columns that a query sees."""
    columns = spec.num_visible + min(spec.exact_keys, num_keys) + num_sinks
    return 2 * prod(query) * columns


def _assignment(query: Sequence[int], num_keys: int, spec: Spec) -> int:
    """Each key with all parents, once more per update, then with its parent's children."""
    batch, heads, _, dim = query
    codewords = (1 + spec.num_updates) * spec.num_parents + spec.num_children
    return 2 * batch * heads * num_keys * dim * codewords
