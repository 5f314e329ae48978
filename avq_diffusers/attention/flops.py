"""Floating point operations of AVQ's operators, for PyTorch's counter.

As for PyTorch's own attention, only products count, two operations per multiply-add; their numbers
follow from the shapes. The columns of a threshold depend on the data: counted are one per parent,
as few as a tile has if no cell is empty, and no products that choose. The first-order term counts
for all means, although those of a codebook have none.
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
    others = _assignment(query, num_keys, spec) + _first_order(query, num_keys, spec)
    return others + 2 * _product(query, num_sinks, spec)


def backward_flops(query: Sequence[int], num_keys: int, num_sinks: int, spec: Spec) -> int:
    """Operations of a backward pass, which assigns the keys and computes the logits again."""
    others = _assignment(query, num_keys, spec) + 3 * _first_order(query, num_keys, spec)
    if not spec.means:
        others += _moments(query, num_keys, spec)
    return others + 5 * _product(query, num_sinks, spec)


def _product(query: Sequence[int], num_sinks: int, spec: Spec) -> int:
    """One product of queries or weights with the columns that a query sees."""
    columns = spec.num_parents if spec.columns is None else spec.columns
    return 2 * prod(query) * (columns + num_sinks)


def _first_order(query: Sequence[int], num_keys: int, spec: Spec) -> int:
    """The products of values and keys inside leaves, and of their matrices with the queries."""
    if not spec.means:
        return 0
    batch, heads, num_queries, dim = query
    return 2 * batch * heads * (num_keys + num_queries) * dim**2


def _moments(query: Sequence[int], num_keys: int, spec: Spec) -> int:
    """The moments of stored codewords, which straight-through gradients of keys are read from."""
    batch, heads, num_queries, dim = query
    assert spec.columns is not None  # stored codewords have no threshold
    return 2 * batch * heads * (num_queries * spec.columns * (1 + dim) + num_keys * dim) * (1 + dim)


def _assignment(query: Sequence[int], num_keys: int, spec: Spec) -> int:
    """Each key with all parents, then with its parent's children."""
    batch, heads, _, dim = query
    return 2 * batch * heads * num_keys * dim * (spec.num_parents + spec.num_children)
