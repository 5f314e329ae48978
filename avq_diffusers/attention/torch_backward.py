"""Exact gradients of AVQ attention in plain PyTorch, at linear cost on every device.

Query i gives codeword a the weight w_ia = n_a exp(s q_i.c_a) / sum_b n_b exp(s q_i.c_b). With d for
gradients:

    delta_i = dy_i.y_i
    dq_i = s sum_a w_ia (dy_i.v_a - delta_i) c_a

If means represent the keys, c_a and v_a are means of n_a keys and values, so

    dv_j = sum_a dv_a / n_a,   dv_a = sum_i w_ia dy_i
    dk_j = sum_a dc_a / n_a,   dc_a = s sum_i w_ia (dy_i.v_a - delta_i) q_i

over the two codewords a of key j: its parent in tiles that do not refine this parent, its leaf in
the other tiles.

If codewords represent the keys, key gradients are straight-through (paper, section Method):

    dk_j = s sum_a sum_i w_ia / n_a (dy_i.v_j - delta_i) q_i

This is affine in v_j, so each codeword stores the moments sum_i w_ia / n_a [1, s q_i] [dy_i,
delta_i]^T, at O(N M D^2), for its keys to read.

Exact keys and sink keys are means of one key: they store the first two sums themselves.

The choice of parents and exact keys is a constant, which the code of `torch_forward` recomputes.
After a forward pass by the kernels, it may choose differently between parents with nearly equal
scores; so means in half precision have a backward pass by kernels, too (`triton.gradients`).

Shapes: as in `torch_forward`, with L numbers per codeword for its keys to read.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from avq_diffusers.attention.tensors import Tensors
from avq_diffusers.attention.torch_forward import (
    Summary,
    empty_tokens,
    summarize,
)
from avq_diffusers.codebook.assignment import (
    across_heads,
    centre_of,
    chunk_length,
    nearest_leaves,
)
from avq_diffusers.config import Spec

# Elements in the intermediates of one chunk, except on a CPU. A tile has many moments: with fewer
# elements, each tile would be its own chunk of about sixty launches.
ELEMENTS = 1 << 28

# Flops that dense attention does in the time of one flop of `gradients`. Measured on two CPU cores
# and on an H200, where `gradients` is bound by memory and launches.
DENSE_SPEED_CPU = 2.0
DENSE_SPEED = 20.0


def dense_is_faster(tensors: Tensors, spec: Spec) -> bool:
    """Whether dense attention over quantized keys, where it can run, trains faster, estimated from
    flops per query."""
    head_dim = tensors.query.shape[3]
    dense = 14 * tensors.key.shape[2] * head_dim
    assert spec.columns is not None  # stored codewords have no threshold
    linear = 12 * spec.columns * head_dim + 2 * spec.columns * head_dim**2
    is_cpu = tensors.query.device.type == "cpu"
    return dense < (DENSE_SPEED_CPU if is_cpu else DENSE_SPEED) * linear


def quantize(key: Tensor, parents: Tensor, children: Tensor) -> Tensor:
    """Replace each key by its leaf's codeword, minus a vector per head that softmax ignores."""
    batch = key.shape[0]
    centre = centre_of(parents)[:, None]
    codewords = torch.cat([parents[:, :, None], children], dim=2) - centre
    codewords = codewords.to(key.dtype).flatten(0, 2)
    num_leaves = 1 + children.shape[2]
    leaf = nearest_leaves(
        key.flatten(0, 1),
        parents.expand(batch, -1, -1, -1).flatten(0, 1),
        children.expand(batch, -1, -1, -1, -1).flatten(0, 1),
    )
    leaf = across_heads(leaf.view(key.shape[:3]), parents.shape[1] * num_leaves)
    return codewords.index_select(0, leaf.flatten()).view(key.shape)


def gradients(
    grad_output: Tensor, tensors: Tensors, spec: Spec, needs_grad: Sequence[bool]
) -> list[Tensor]:
    """Gradients of `torch_forward.avq_attention` for those of the five tokens in `needs_grad`.

    They are views of (B, N, H, D) memory, in the dtype of their input.
    """
    batch, heads, num_keys, head_dim = tensors.key.shape
    grads = [
        empty_tokens(x) if needed and x is not None else None
        for x, needed in zip(tensors.tokens(), needs_grad, strict=True)
    ]
    width = _moments_of(spec).width(head_dim, grads[1] is not None, grads[2] is not None)
    table_elements = heads * spec.num_parents * (2 + spec.num_children) * max(1, width)
    if spec.exact_keys:
        table_elements += heads * num_keys * 2 * head_dim
    size = min(batch, chunk_length(grad_output.device, table_elements, ELEMENTS))
    for start in range(0, batch, size):
        elements = slice(start, min(start + size, batch))
        of_part = [None if grad is None else grad[elements] for grad in grads]
        _write_gradients(grad_output[elements], tensors.part(elements), spec, of_part)
    return [grad for grad in grads if grad is not None]


def _write_gradients(
    grad_output: Tensor, tensors: Tensors, spec: Spec, grads: Sequence[Tensor | None]
) -> None:
    """Write the token gradients of a chunk of batch elements."""
    grad_query, grad_key, grad_value, grad_sink_key, grad_sink_value = grads
    summary = summarize(tensors, spec)
    moments = _moments_of(spec)(summary, grad_key, grad_value)
    of_sinks = None
    if summary.sinks is not None:
        needs_grad = grad_sink_key is not None, grad_sink_value is not None
        of_sinks = _KeySums(summary.sinks.keys, *needs_grad)
    _query_gradients(grad_output, tensors, summary, spec, grad_query, moments, of_sinks)
    moments.write(summary.leaf, tensors.value.flatten(0, 1))
    if of_sinks is not None:
        for grad, sums in ((grad_sink_value, of_sinks.values), (grad_sink_key, of_sinks.keys)):
            if grad is not None:
                grad.copy_(sums.view(grad.shape))


def _query_gradients(
    grad_output: Tensor,
    tensors: Tensors,
    summary: Summary,
    spec: Spec,
    grad_query: Tensor | None,
    moments: "_Moments",
    of_sinks: "_KeySums | None",
) -> None:
    """Write the query gradients (B, H, N, D) and accumulate those of keys."""
    scale = tensors.scale
    grad_output = grad_output.flatten(0, 1)
    heads, num_queries, head_dim = grad_output.shape
    query_tile = min(spec.query_tile, num_queries)
    num_columns = spec.num_visible + summary.num_single
    moment_elements = (spec.num_visible + query_tile) * moments.sums.shape[-1]
    moment_elements += summary.num_single * 2 * head_dim
    tile_elements = moment_elements + 4 * num_columns * query_tile + 2 * num_columns * head_dim
    num_tiles = chunk_length(grad_output.device, heads * tile_elements, ELEMENTS)
    for order, query_tiles, columns in tiles_and_columns(tensors, summary, spec, num_tiles):
        tiles = scale * query_tiles.transpose(0, 1)
        grads = cut_tiles(grad_output, order, query_tile, tiles.dtype).transpose(0, 1)

        # (T, H, I, K)
        logits = tiles @ columns.keys.mT + columns.log_counts[..., None, :]
        weights = logits.softmax(dim=-1)
        products = grads @ columns.values.mT
        delta = (weights * products).sum(dim=-1, keepdim=True)
        if grad_query is not None:
            grad_logits = weights * (products - delta)
            grad_tiles = scale * grad_logits @ columns.keys
            write_tiles(grad_query, grad_tiles.transpose(0, 1), order)
        found = _Tiles(tiles, grads, weights, products, delta)
        of_keys = moments.of_keys
        if moments.sums.shape[-1]:
            part = found.part(slice(spec.num_visible))
            counts = gather_rows(summary.table.counts, columns.visible).clamp(min=1)
            per_key = part._replace(weights=part.weights / counts[..., None, :])
            _add_rows(moments.sums, columns.visible, moments.of_tiles(per_key))
        if of_keys is not None and columns.key_rows is not None and of_keys.sums.shape[-1]:
            stop = spec.num_visible + columns.key_rows.shape[-1]
            part = found.part(slice(spec.num_visible, stop))
            _add_rows(of_keys.sums, columns.key_rows, of_keys.of_tiles(part))
        if of_sinks is not None and of_sinks.sums.shape[-1]:
            part = found.part(slice(num_columns - of_sinks.sums.shape[1], num_columns))
            of_sinks.sums += of_sinks.of_tiles(part).sum(dim=0)


def _moments_of(spec: Spec) -> "type[_Moments]":
    return _MeanMoments if spec.means else _StraightThroughMoments


def _add_rows(sums: Tensor, rows: Tensor, found: Tensor) -> None:
    """Add `found` (T, H, K, L), from T tiles, to `rows` (T, H, K) of the sums (all rows, L).

    A tile only repeats a row where it adds 0, so the order of additions is fixed.
    """
    for tile_rows, added in zip(rows.flatten(1), found.flatten(1, 2), strict=True):
        sums.index_add_(0, tile_rows, added)


class _Tiles(NamedTuple):
    """The inputs for the gradients of a query tile's columns."""

    queries: Tensor  # (T, H, I, D), scaled
    grads: Tensor  # (T, H, I, D) of the output
    weights: Tensor  # (T, H, I, K) of the columns
    products: Tensor  # (T, H, I, K) of `grads` and values
    delta: Tensor  # (T, H, I, 1)

    def part(self, columns: slice) -> "_Tiles":
        """The same for some columns."""
        parts = self.weights[..., columns], self.products[..., columns]
        return _Tiles(self.queries, self.grads, *parts, self.delta)

    def mean_gradients(self, for_key: bool, for_value: bool) -> Tensor:
        """Gradients of the values, then the keys, of columns (T, H, K), where needed."""
        of_values = [self.weights.mT @ self.grads] if for_value else []
        if not for_key:
            return of_values[0]
        of_keys = (self.weights * (self.products - self.delta)).mT @ self.queries
        return torch.cat([*of_values, of_keys], dim=-1)


class _KeySums:
    """Gradients of keys that take part as themselves.

    sums: (..., L), for values, then for keys, D each where needed.
    """

    def __init__(self, keys: Tensor, for_key: bool, for_value: bool) -> None:
        self.for_key, self.for_value = for_key, for_value
        self.head_dim = keys.shape[-1]
        self.sums = keys.new_zeros(*keys.shape[:-1], (for_key + for_value) * self.head_dim)

    @property
    def values(self) -> Tensor:
        return self.sums[..., : self.head_dim]

    @property
    def keys(self) -> Tensor:
        return self.sums[..., -self.head_dim :]

    def of_tiles(self, tiles: _Tiles) -> Tensor:
        """What tiles add for their keys, (T, H, K, L)."""
        return tiles.mean_gradients(self.for_key, self.for_value)


class _Moments(ABC):
    """What each codeword accumulates for its keys, over all tiles.

    sums: (H M0 (2 + C), L).
    of_keys: gradients of keys where they are exact; None without exact keys.
    """

    def __init__(
        self, summary: Summary, grad_key: Tensor | None, grad_value: Tensor | None
    ) -> None:
        self.grad_key, self.grad_value = grad_key, grad_value
        self.needed = grad_key is not None, grad_value is not None
        self.of_keys = None
        if summary.by_leaf is not None:
            self.of_keys = _KeySums(summary.by_leaf.keys, *self.needed)
        codewords = summary.table.codewords
        self.shape = codewords.shape[:3]
        width = self.width(codewords.shape[3], *self.needed)
        self.sums = codewords.new_zeros(self.shape.numel(), width)

    @staticmethod
    @abstractmethod
    def width(head_dim: int, for_key: bool, for_value: bool) -> int:
        """L, for the needed gradients."""

    @abstractmethod
    def of_tiles(self, tiles: _Tiles) -> Tensor:
        """What tiles add to the codewords they see, (T, H, V, L); weights are per key."""

    @abstractmethod
    def write(self, leaf: Tensor, value: Tensor) -> None:
        """Write the gradients of keys and values."""

    def of_leaves(self) -> Tensor:
        """(H M0 (1 + C), L) for each leaf: the sum over the two codewords of its keys."""
        sums = self.sums.unflatten(0, self.shape)
        return (sums[:, :, 1:] + sums[:, :, :1]).flatten(0, 2)

    def pieces(self, leaf: Tensor) -> Iterator[tuple[slice, Tensor]]:
        """Slices of keys, with the rows of `of_leaves` for their leaves."""
        heads, num_parents, per_cell = self.shape
        leaf = across_heads(leaf, num_parents * (per_cell - 1))
        chunk = chunk_length(leaf.device, heads * self.sums.shape[-1], ELEMENTS)
        for start in range(0, leaf.shape[1], chunk):
            part = slice(start, start + chunk)
            yield part, leaf[:, part].flatten()

    def put(self, grad: Tensor, part: slice, of_leaves: Tensor) -> None:
        """Write a slice of a gradient: through the leaves, (H keys, D), plus where keys are
        exact."""
        target = grad[:, :, part]
        if self.of_keys is not None:
            sums = self.of_keys.keys if grad is self.grad_key else self.of_keys.values
            of_keys = sums.unflatten(0, (-1, self.shape[0]))[part].transpose(0, 1)
            of_leaves = of_leaves.view(of_keys.shape) + of_keys
        target.copy_(of_leaves.view(target.shape))


class _MeanMoments(_Moments):
    """Gradients of mean values and mean keys: L = D for each needed one."""

    @staticmethod
    def width(head_dim: int, for_key: bool, for_value: bool) -> int:
        return (for_key + for_value) * head_dim

    def of_tiles(self, tiles: _Tiles) -> Tensor:
        return tiles.mean_gradients(*self.needed)

    def write(self, leaf: Tensor, value: Tensor) -> None:
        targets = [grad for grad in (self.grad_value, self.grad_key) if grad is not None]
        if not targets:
            return
        columns = self.of_leaves().chunk(len(targets), dim=-1)
        for part, rows in self.pieces(leaf):
            for grad, of_leaves in zip(targets, columns, strict=True):
                self.put(grad, part, of_leaves.index_select(0, rows))


class _StraightThroughMoments(_Moments):
    """sum_i w_ia / n_a [1, s q_i] [dy_i, delta_i]^T: one row for values, D for keys."""

    @staticmethod
    def width(head_dim: int, for_key: bool, for_value: bool) -> int:
        return (for_value + for_key * head_dim) * (1 + head_dim)

    def of_tiles(self, tiles: _Tiles) -> Tensor:
        head_dim = tiles.queries.shape[-1]
        for_key, for_value = self.needed
        rows = slice(0 if for_value else 1, 1 + head_dim if for_key else 1)
        left = F.pad(tiles.queries, (1, 0), value=1)[..., rows, None]
        right = torch.cat([tiles.grads, tiles.delta], dim=-1)[..., None, :]
        return tiles.weights.mT @ (left * right).flatten(-2)

    def write(self, leaf: Tensor, value: Tensor) -> None:
        head_dim = value.shape[-1]
        if self.grad_key is None and self.grad_value is None:
            return
        moments = self.of_leaves().unflatten(-1, (-1, 1 + head_dim))
        for part, rows in self.pieces(leaf):
            if self.grad_value is not None:
                self.put(self.grad_value, part, moments[:, 0, :-1].index_select(0, rows))
            if self.grad_key is not None:
                values = F.pad(value[:, part].to(moments.dtype), (0, 1), value=-1)
                matrices = moments[:, -head_dim:].index_select(0, rows)
                self.put(self.grad_key, part, matrices @ values.reshape(-1, 1 + head_dim, 1))
