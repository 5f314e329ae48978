"""Exact gradients of AVQ attention in plain PyTorch, at linear cost on every device.

Query i gives codeword a the weight w_ia = n_a exp(s q_i.c_a) / sum_b n_b exp(s q_i.c_b). With d for
gradients:

    delta_i = dy_i.y_i
    dq_i = s sum_a w_ia (dy_i.v_a - delta_i) c_a

If means represent the keys, c_a and v_a are means of n_a keys and values, so that

    dv_j = sum_a dv_a / n_a,   dv_a = sum_i w_ia dy_i
    dk_j = sum_a dc_a / n_a,   dc_a = s sum_i w_ia (dy_i.v_a - delta_i) q_i

over the two codewords a of key j: its parent in tiles that do not refine this parent, its leaf in
the other tiles.

If codewords represent the keys, gradients of keys are straight through the quantization (paper,
section Method):

    dk_j = s sum_a sum_i w_ia / n_a (dy_i.v_j - delta_i) q_i

This is affine in v_j. So every codeword stores the moments sum_i w_ia / n_a [1, s q_i] [dy_i,
delta_i]^T, at O(N M D^2), and its keys read them.

Exact keys and sink keys are means of one key: they store the first two sums themselves.

The choice of parents and of exact keys is a constant. The code of `forward` makes it again. After a
forward pass by the kernels, it may choose differently between parents of nearly equal score; means
in half precision then have gradients by kernels, too (`triton.gradients`).

Shapes: as in `forward`, with L numbers per codeword that its keys read.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from avq_diffusers.attention import forward
from avq_diffusers.attention.forward import CodewordTable
from avq_diffusers.codebook.assignment import (
    across_heads,
    centre_of,
    chunk_length,
    nearest_leaves,
)

# Numbers in the intermediates of one chunk, except on a CPU. A tile has many moments: with fewer
# numbers each tile would be a chunk of about sixty launches.
ELEMENTS = 1 << 28

# Flops of dense attention in the time of one flop of `gradients`. Measured on two CPU cores and on
# an H200, where memory and launches bound `gradients`.
DENSE_SPEED_CPU = 2.0
DENSE_SPEED = 20.0


def dense_is_faster(
    device: torch.device,
    *,
    num_keys: int,
    head_dim: int,
    num_parents: int,
    num_children: int,
    num_refined: int,
) -> bool:
    """Whether dense attention over quantized keys trains faster, counted in flops per query.

    False unless all tiles see the same keys: they refine no parent, or all.
    """
    if 0 < num_refined < num_parents:
        return False
    codewords = num_parents + num_refined * num_children
    dense = 14 * num_keys * head_dim
    linear = 12 * codewords * head_dim + 2 * codewords * head_dim**2
    return dense < (DENSE_SPEED_CPU if device.type == "cpu" else DENSE_SPEED) * linear


def quantize(key: Tensor, parents: Tensor, children: Tensor) -> Tensor:
    """Replace each key by its leaf's codeword minus one vector per head, which softmax ignores.

    Args:
        key: (B, H, S, D).
        parents: (H, M0, D).
        children: (H, M0, C, D).

    Returns:
        (B, H, S, D), dtype of `key`.
    """
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
    *,
    needs_grad: Sequence[bool],
    num_parents: int,
    num_children: int,
    num_refined: int,
    means: bool,
    num_updates: int,
    exact_keys: int,
    query_tile: int,
    importance_tile: int | None,
    scale: float,
) -> list[Tensor]:
    """Gradients of `forward.avq_attention`.

    Args:
        grad_output: (B, H, N, D).
        needs_grad: for query, key, value and the sinks.

        The other arguments are those of `forward.avq_attention`.

    Returns:
        The gradients that are needed: (B, H, N, D) or (B, H, S, D) views of (B, N, H, D) memory, in
        the dtype of their input.
    """
    batch, heads, _, head_dim = query.shape
    inputs = query, key, value, sink_key, sink_value
    grads = [
        empty_gradient(x) if needed and x is not None else None
        for x, needed in zip(inputs, needs_grad, strict=True)
    ]
    grad_query, grad_key, grad_value, grad_sink_key, grad_sink_value = grads
    moments_of = _MeanMoments if means else _StraightThroughMoments
    width = moments_of.width(head_dim, grad_key is not None, grad_value is not None)

    table_elements = heads * num_parents * (2 + num_children) * max(1, width)
    if exact_keys:
        table_elements += heads * key.shape[2] * 2 * head_dim
    size = min(batch, chunk_length(query.device, table_elements, ELEMENTS))
    for start in range(0, batch, size):
        part = slice(start, min(start + size, batch))
        summary = forward.summarize(
            key[part],
            value[part],
            None if sink_key is None else sink_key[part],
            None if sink_value is None else sink_value[part],
            parents,
            children,
            key_order,
            num_parents=num_parents,
            num_children=num_children,
            means=means,
            num_updates=num_updates,
            exact_keys=exact_keys,
        )
        of_exact = of_sinks = None
        if summary.exact is not None:
            of_exact = _KeySums(summary.exact.keys, grad_key is not None, grad_value is not None)
        if summary.sinks is not None:
            of_sinks = _KeySums(
                summary.sinks.keys, grad_sink_key is not None, grad_sink_value is not None
            )
        moments = moments_of(
            summary.table,
            of_exact,
            None if grad_key is None else grad_key[part],
            None if grad_value is None else grad_value[part],
        )
        _query_gradients(
            grad_output[part].flatten(0, 1),
            query[part].flatten(0, 1),
            summary,
            None if grad_query is None else grad_query[part],
            moments,
            of_sinks,
            query_order,
            num_refined=num_refined,
            query_tile=query_tile,
            importance_tile=importance_tile,
            scale=scale,
        )
        moments.write(summary.leaf, value[part].flatten(0, 1))
        if of_sinks is not None:
            for grad, sums in ((grad_sink_value, of_sinks.values), (grad_sink_key, of_sinks.keys)):
                if grad is not None:
                    grad[part].copy_(sums.view(grad[part].shape))
    return [grad for grad in grads if grad is not None]


def empty_gradient(tokens: Tensor) -> Tensor:
    """An uninitialized gradient of (B, H, N, D) tokens, a view of (B, N, H, D) memory."""
    tokens = tokens.transpose(1, 2)
    return torch.empty_like(tokens, memory_format=torch.contiguous_format).transpose(1, 2)


def _query_gradients(
    grad_output: Tensor,
    query: Tensor,
    summary: forward.Summary,
    grad_query: Tensor | None,
    moments: "_Moments",
    of_sinks: "_KeySums | None",
    query_order: Tensor | None,
    *,
    num_refined: int,
    query_tile: int,
    importance_tile: int | None,
    scale: float,
) -> None:
    """Write the gradients (B, H / B, N, D) of the queries and add up those of keys."""
    table = summary.table
    heads, num_queries, head_dim = query.shape
    num_parents, per_cell = table.counts.shape[1:]
    dtype = table.codewords.dtype
    query_tile = min(query_tile, num_queries)

    num_visible = num_parents + num_refined * (per_cell - 2)
    num_columns = num_visible + summary.num_single
    moment_elements = (num_visible + query_tile) * moments.sums.shape[-1]
    moment_elements += summary.num_single * 2 * head_dim
    tile_elements = moment_elements + 4 * num_columns * query_tile + 2 * num_columns * head_dim
    chunk = query_tile * chunk_length(query.device, heads * tile_elements, ELEMENTS)
    for start in range(0, num_queries, chunk):
        stop = min(start + chunk, num_queries)
        order = slice(start, stop) if query_order is None else query_order[start:stop].long()
        tiles = forward.cut_tiles(query, order, query_tile, dtype)
        columns = forward.columns_of(
            tiles,
            summary,
            num_queries=stop - start,
            num_refined=num_refined,
            importance_tile=importance_tile,
            scale=scale,
        )
        tiles = scale * tiles.transpose(0, 1)
        grads = forward.cut_tiles(grad_output, order, query_tile, dtype).transpose(0, 1)

        # (T, H, I, K)
        logits = tiles @ columns.keys.mT + columns.log_counts[..., None, :]
        weights = logits.softmax(dim=-1)
        products = grads @ columns.values.mT
        delta = (weights * products).sum(dim=-1, keepdim=True)
        if grad_query is not None:
            grad_logits = weights * (products - delta)
            grad_tiles = scale * grad_logits @ columns.keys
            forward.write_tiles(grad_query, grad_tiles.transpose(0, 1), order)
        of_codewords, of_exact = slice(num_visible), moments.of_exact
        if moments.sums.shape[-1]:
            counts = forward.gather_rows(table.counts, columns.visible).clamp(min=1)
            of_key = weights[..., of_codewords] / counts[..., None, :]
            found = moments.of_tiles(tiles, grads, of_key, products[..., of_codewords], delta)
            _add_rows(moments.sums, columns.visible, found)
        if of_exact is not None and columns.exact is not None and of_exact.sums.shape[-1]:
            part = slice(num_visible, num_visible + columns.exact.shape[-1])
            found = of_exact.of_tiles(tiles, grads, weights[..., part], products[..., part], delta)
            _add_rows(of_exact.sums, columns.exact, found)
        if of_sinks is not None and of_sinks.sums.shape[-1]:
            part = slice(num_columns - of_sinks.sums.shape[1], num_columns)
            found = of_sinks.of_tiles(tiles, grads, weights[..., part], products[..., part], delta)
            of_sinks.sums += found.sum(dim=0)


def _add_rows(sums: Tensor, rows: Tensor, found: Tensor) -> None:
    """Add what tiles (T, H, K, L) found to rows (T, H, K) of the sums (all rows, L).

    A tile has no row twice but where it adds 0, so the order of additions is fixed.
    """
    for tile_rows, added in zip(rows.flatten(1), found.flatten(1, 2), strict=True):
        sums.index_add_(0, tile_rows, added)


def _mean_gradients(
    tiles: Tensor,
    grads: Tensor,
    weights: Tensor,
    products: Tensor,
    delta: Tensor,
    *,
    for_key: bool,
    for_value: bool,
) -> Tensor:
    """Of the values, then of the keys of columns (T, H, K), as far as needed."""
    of_values = [weights.mT @ grads] if for_value else []
    of_keys = [(weights * (products - delta)).mT @ tiles] if for_key else []
    return torch.cat(of_values + of_keys, dim=-1)


class _KeySums:
    """Gradients of keys that tiles meet as themselves.

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

    def of_tiles(
        self, tiles: Tensor, grads: Tensor, weights: Tensor, products: Tensor, delta: Tensor
    ) -> Tensor:
        """What the keys of tiles get, (T, H, K, L)."""
        return _mean_gradients(
            tiles, grads, weights, products, delta, for_key=self.for_key, for_value=self.for_value
        )


class _Moments(ABC):
    """What every codeword stores for its keys, over all tiles.

    sums: (H M0 (2 + C), L).
    of_exact: what keys add to it where they are exact.
    """

    def __init__(
        self,
        table: CodewordTable,
        of_exact: _KeySums | None,
        grad_key: Tensor | None,
        grad_value: Tensor | None,
    ) -> None:
        self.of_exact = of_exact
        self.grad_key = grad_key
        self.grad_value = grad_value
        self.shape = table.counts.shape
        width = self.width(table.codewords.shape[-1], grad_key is not None, grad_value is not None)
        self.sums = table.codewords.new_zeros(self.shape.numel(), width)

    @staticmethod
    @abstractmethod
    def width(head_dim: int, for_key: bool, for_value: bool) -> int:
        """L, for the gradients that are needed."""

    @abstractmethod
    def of_tiles(
        self, tiles: Tensor, grads: Tensor, weights: Tensor, grad_logits: Tensor, delta: Tensor
    ) -> Tensor:
        """What the codewords that tiles see store, (T, H, V, L)."""

    @abstractmethod
    def write(self, leaf: Tensor, value: Tensor) -> None:
        """Write the gradients of keys and values."""

    def of_leaves(self) -> Tensor:
        """(H M0 (1 + C), L) of the two codewords of the keys of each leaf."""
        sums = self.sums.unflatten(0, self.shape)
        return (sums[:, :, 1:] + sums[:, :, :1]).flatten(0, 2)

    def pieces(self, leaf: Tensor) -> Iterator[tuple[slice, Tensor]]:
        """Slices of keys, and the rows of `of_leaves` of their leaves."""
        heads, num_parents, per_cell = self.shape
        leaf = across_heads(leaf, num_parents * (per_cell - 1))
        chunk = chunk_length(leaf.device, heads * self.sums.shape[-1], ELEMENTS)
        for start in range(0, leaf.shape[1], chunk):
            part = slice(start, start + chunk)
            yield part, leaf[:, part].flatten()

    def put(self, grad: Tensor, part: slice, of_leaves: Tensor) -> None:
        """Write a slice of a gradient: that through the leaves, of shape (H keys, D), and that of
        exact keys."""
        target = grad[:, :, part]
        if self.of_exact is not None:
            sums = self.of_exact.keys if grad is self.grad_key else self.of_exact.values
            of_exact = sums.unflatten(0, (-1, self.shape[0]))[part].transpose(0, 1)
            of_leaves = of_leaves.view(of_exact.shape) + of_exact
        target.copy_(of_leaves.view(target.shape))


class _MeanMoments(_Moments):
    """Gradients of mean values and mean keys: L = D for each that is needed."""

    @staticmethod
    def width(head_dim: int, for_key: bool, for_value: bool) -> int:
        return (for_key + for_value) * head_dim

    def of_tiles(
        self, tiles: Tensor, grads: Tensor, weights: Tensor, products: Tensor, delta: Tensor
    ) -> Tensor:
        return _mean_gradients(
            tiles,
            grads,
            weights,
            products,
            delta,
            for_key=self.grad_key is not None,
            for_value=self.grad_value is not None,
        )

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

    def of_tiles(
        self, tiles: Tensor, grads: Tensor, weights: Tensor, products: Tensor, delta: Tensor
    ) -> Tensor:
        head_dim = tiles.shape[-1]
        start = 0 if self.grad_value is not None else 1
        stop = 1 if self.grad_key is None else 1 + head_dim
        left = F.pad(tiles, (1, 0), value=1)[..., start:stop, None]
        right = torch.cat([grads, delta], dim=-1)[..., None, :]
        return weights.mT @ (left * right).flatten(-2)

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
